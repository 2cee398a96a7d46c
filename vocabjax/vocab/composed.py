"""The table that an input's rows would make: composed for all ids, so that a tied head can score against it.

    table[v] = the input's row of id v for v < V, else 0                    [Vp, D], float32, sharded over rows

Ids go through in blocks, of which each device holds its part, and a block is looked up as tokens are: every device reads its own
buckets for the ids of all, and a reduce-scatter gives each the rows of its own ids. So neither the input's tables nor the
result are ever gathered. The backward composes each block again instead of keeping what it was made of.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from vocabjax.mesh import Layout
from vocabjax.param import Role
from vocabjax.vocab.interfaces import Context, Input, Shared, Tokens

BLOCK = 1024  # ids that are composed at one time, over all devices


class ComposedInput(Input):
    """An input whose rows are functions of the id alone, made of rows of other tables; lends what they compose.

    Attributes:
      role: of its tables.
    """

    def __init__(self, context: Context, *, tied: bool) -> None:
        self.layout, self.sizes = context.scope.layout, context.sizes
        self.role: Role = "tied" if tied else "embed"

    def shared(self) -> Shared:
        # Only for a head that uses it: outside jit it would be composed in vain.
        return {"table": compose(self)} if self.role == "tied" else {}


# Jitted, like a lookup: called eagerly, its loop would compile anew each time.
@functools.partial(jax.jit, static_argnames="block")
def compose(input: ComposedInput, *, block: int = BLOCK) -> jax.Array:
    """float32 [Vp, D], rows sharded by the rule for `"vocab"`: see the module's docstring.

    Args:
      block: how many ids at one time, over all devices.
    """
    layout, sizes = input.layout, input.sizes
    shards = layout.shards("vocab")
    rows = sizes.padded // shards
    blocks = -(-sizes.padded // block)
    per_shard = -(-rows // blocks)
    # As if every shard of the vocabulary were one row of a batch, and its ids the tokens.
    own = {"batch": layout.axes("vocab"), "seq": ()}
    as_tokens = Layout(
        layout.mesh, tuple((name, own.get(name, axes)) for name, axes in layout.rules)
    )

    def body(_: None, index: jax.Array) -> tuple[None, jax.Array]:
        row_C = index * per_shard + jnp.arange(per_shard, dtype=jnp.int32)
        ids_SC = rows * jnp.arange(shards, dtype=jnp.int32)[:, None] + row_C
        ids_SC = jnp.where((row_C < rows) & (ids_SC < sizes.logical), ids_SC, -1)  # −1: a zero row
        tokens = Tokens.of(as_tokens.place(ids_SC, "batch", "seq"))
        return None, input(input.gather(as_tokens, tokens, jnp.dtype(jnp.float32)), tokens)

    def local(x_K1CD: jax.Array) -> jax.Array:
        return x_K1CD.reshape(-1, x_K1CD.shape[-1])[:rows]

    body = jax.checkpoint(body, prevent_cse=False)
    _, x_KSCD = lax.scan(body, None, jnp.arange(blocks, dtype=jnp.int32))
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=as_tokens.spec(None, "batch", "seq", None),
        out_specs=layout.spec("vocab", None),
    )(x_KSCD)
