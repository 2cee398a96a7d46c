"""Where the gradient of a scored table adds up over microbatches, in place and not reduced until the end."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.mesh import Layout
from vocabjax.vocab.table import TokenAxes, add_rows


class Accumulator(NamedTuple):
    """The gradient of a scored table and of its bias, as it grows over microbatches: float32.

    Each device sums over its own tokens: S parts, one for each place along the axes that shard tokens alone, which are added
    up once, by `total`, when all microbatches are in.

    Attributes:
      table: [S, Vp, D], sharded over S and over rows.
      bias: [S, Vp].
    """

    table: jax.Array
    bias: jax.Array

    @staticmethod
    def specs(layout: Layout) -> "Accumulator":
        """The partition of each array."""
        axes = TokenAxes.of(layout)
        parts, rows = axes.only_tokens or None, axes.rows or None
        specs: Any = (PartitionSpec(parts, rows, None), PartitionSpec(parts, rows))
        return Accumulator(*specs)

    @staticmethod
    def zeros(layout: Layout, padded: int, width: int) -> "Accumulator":
        """Empty, for a table [padded, width]."""
        specs = Accumulator.specs(layout)

        def local() -> Accumulator:
            rows = padded // layout.shards("vocab")
            return Accumulator(
                jnp.zeros((1, rows, width), jnp.float32), jnp.zeros((1, rows), jnp.float32)
            )

        made: Accumulator = jax.shard_map(
            local, mesh=layout.mesh, in_specs=(), out_specs=specs, check_vma=False
        )()
        return made

    def total(self, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """The gradients of table [Vp, D] and bias [Vp]: one reduction each."""
        axes = TokenAxes.of(layout)
        return jax.shard_map(
            lambda own: jax.tree.map(lambda x: lax.psum(x[0], axes.only_tokens), tuple(own)),
            mesh=layout.mesh,
            in_specs=(Accumulator.specs(layout),),
            out_specs=(layout.spec("vocab", None), layout.spec("vocab")),
            check_vma=False,
        )(self)

    def add_rows(
        self, layout: Layout, ids: jax.Array, rows: jax.Array, *, logical: int, leading: int
    ) -> "Accumulator":
        """With the gradients of rows that were looked up in the same table, before either is reduced.

        Args:
          ids, logical, leading: as of `lookup`; rows: [*ids.shape, D].
        """
        added = add_rows(layout, self.table, ids, rows, logical=logical, leading=leading)
        return self._replace(table=added)
