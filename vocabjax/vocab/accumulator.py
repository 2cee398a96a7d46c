"""Where the gradient of a scored table adds up over microbatches, in place and not reduced until the end."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.mesh import Layout
from vocabjax.vocab.table import TokenAxes, add_rows


class Accumulator(NamedTuple):
    """The gradient of a scored table and of its bias, as it grows over chunks and microbatches: float32.

    Each device sums over its own tokens: S parts, one for each place along the axes that shard tokens alone, which are added
    up once, by `total`, when all microbatches are in.

    Attributes:
      table: [S, D, Vp], sharded over S and over Vp: transposed, as matrix products on a CPU take twice as long to make [Vp, D]
        of bfloat16.
      bias: [S, Vp]; None: there is no bias.
    """

    table: jax.Array
    bias: jax.Array | None

    @staticmethod
    def specs(layout: Layout) -> "Accumulator":
        """The partition of each array."""
        axes = TokenAxes.of(layout)
        parts, rows = axes.only_tokens or None, axes.rows or None
        specs: Any = (PartitionSpec(parts, None, rows), PartitionSpec(parts, rows))
        return Accumulator(*specs)

    @staticmethod
    def zeros(layout: Layout, table_VD: jax.Array, bias_V: jax.Array | None) -> "Accumulator":
        """Empty, for a table and its bias."""
        rows = table_VD.shape[0] // layout.shards("vocab")

        def local() -> Accumulator:
            bias = None if bias_V is None else jnp.zeros((1, rows), jnp.float32)
            return Accumulator(jnp.zeros((1, table_VD.shape[1], rows), jnp.float32), bias)

        made: Accumulator = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(),
            out_specs=Accumulator.specs(layout),
            check_vma=False,
        )()
        return made

    def total(
        self,
        layout: Layout,
        ids: jax.Array | None = None,
        of_rows: jax.Array | None = None,
        *,
        logical: int = 0,
        leading: int = 0,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The gradients of table [Vp, D] and bias [Vp]: one reduction each.

        Args:
          ids, logical, leading: as of `lookup`: rows that were read of the same table; None: none.
          of_rows: [*ids.shape, D], their gradients, which join the table's before it is reduced.
        """
        axes = TokenAxes.of(layout, leading)

        def local(
            own: Accumulator, ids: jax.Array | None, of_rows: jax.Array | None
        ) -> tuple[jax.Array, jax.Array | None]:
            table_RD, bias = own.table[0].T, own.bias
            if ids is not None and of_rows is not None:
                ids, of_rows = axes.gather(ids), axes.gather(of_rows)
                table_RD = add_rows(axes, logical, table_RD, ids, of_rows)
            own_sums = (table_RD, None if bias is None else bias[0])
            return jax.tree.map(lambda x: lax.psum(x, axes.only_tokens), own_sums)

        if ids is not None:
            ids = layout.place(ids, *[None] * leading, "batch", "seq")
        result: tuple[jax.Array, jax.Array | None] = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(Accumulator.specs(layout), axes.spec, axes.spec),
            out_specs=(layout.spec("vocab", None), layout.spec("vocab")),
            check_vma=False,
        )(self, ids, of_rows)
        return result
