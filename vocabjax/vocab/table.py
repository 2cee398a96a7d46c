"""Rows of a table that is sharded over its rows: a local gather and one all-reduce of activations.

    rows[i] = table[ids[i]]     ids outside [0, logical) give a zero row

The backward scatters in float32 into each device's own rows and reduces over the token axes once. No device ever holds
another's rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.mesh import Layout


class TokenAxes(NamedTuple):
    """How the token dimensions of an activation and the rows of a table share the mesh.

    Attributes:
      spec: the partition of [B, T].
      rows: mesh axes the table's rows are sharded over.
      only_tokens: axes that shard tokens but not rows: gradients of the table are summed over them.
      only_rows: axes that shard rows but not tokens: partial results are summed over them.
      both: per token dimension, axes that shard both: tokens are gathered over them, results scattered back.
    """

    spec: PartitionSpec
    rows: tuple[str, ...]
    only_tokens: tuple[str, ...]
    only_rows: tuple[str, ...]
    both: tuple[tuple[int, str], ...]

    @staticmethod
    def of(layout: Layout) -> "TokenAxes":
        rows = layout.axes("vocab")
        per_dim = (layout.axes("batch"), layout.axes("seq"))
        tokens = per_dim[0] + per_dim[1]
        return TokenAxes(
            layout.spec("batch", "seq"),
            rows,
            tuple(axis for axis in tokens if axis not in rows),
            tuple(axis for axis in rows if axis not in tokens),
            tuple((dim, axis) for dim, axes in enumerate(per_dim) for axis in axes if axis in rows),
        )

    def gather(self, x: jax.Array) -> jax.Array:
        """This device's tokens and those of the devices that hold other rows of the table."""
        for dim, axis in self.both:
            x = lax.all_gather(x, axis, axis=dim, tiled=True)
        return x

    def reduce(self, x: jax.Array) -> jax.Array:
        """Sums partial results over the table's shards and keeps this device's tokens: the inverse of `gather`."""
        x = lax.psum(x, self.only_rows)
        for dim, axis in reversed(self.both):
            x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        return x


def row_start(axes: tuple[str, ...], rows: int) -> jax.Array:
    """The first row this device holds, inside `shard_map`."""
    return lax.axis_index(axes) * rows if axes else jnp.int32(0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _lookup(
    layout: Layout, logical: int, dtype: jnp.dtype, table_VD: jax.Array, ids_BT: jax.Array
) -> jax.Array:
    axes = TokenAxes.of(layout)

    def local(table_RD: jax.Array, ids: jax.Array) -> jax.Array:
        ids = axes.gather(ids)
        index, is_here = _local_index(axes, table_RD.shape[0], logical, ids)
        rows = table_RD.at[index].get(mode="promise_in_bounds").astype(dtype)
        return axes.reduce(jnp.where(is_here[..., None], rows, 0))

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec("vocab", None), axes.spec),
        out_specs=PartitionSpec(*axes.spec, None),
        check_vma=False,
    )(table_VD, ids_BT)


def _lookup_fwd(
    layout: Layout, logical: int, dtype: jnp.dtype, table_VD: jax.Array, ids_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _lookup(layout, logical, dtype, table_VD, ids_BT), (table_VD, ids_BT)


def _lookup_bwd(
    layout: Layout,
    logical: int,
    dtype: jnp.dtype,
    residuals: tuple[jax.Array, jax.Array],
    cotangent_BTD: jax.Array,
) -> tuple[jax.Array, None]:
    table_VD, ids_BT = residuals
    axes = TokenAxes.of(layout)

    def local(table_RD: jax.Array, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        ids, cotangent = axes.gather(ids), axes.gather(cotangent)
        rows = table_RD.shape[0]
        index, is_here = _local_index(axes, rows, logical, ids)
        index = jnp.where(is_here, index, rows)  # out of range: dropped
        # float32 whatever the compute dtype: in bf16 a row that occurs 4,096 times would stop growing at 256.
        gradient_RD = jnp.zeros(table_RD.shape, jnp.float32)
        gradient_RD = gradient_RD.at[index].add(cotangent.astype(jnp.float32), mode="drop")
        return lax.psum(gradient_RD, axes.only_tokens).astype(table_RD.dtype)

    gradient_VD = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec("vocab", None), axes.spec, PartitionSpec(*axes.spec, None)),
        out_specs=layout.spec("vocab", None),
        check_vma=False,
    )(table_VD, ids_BT, cotangent_BTD)
    return gradient_VD, None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _local_index(
    axes: TokenAxes, rows: int, logical: int, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    index = ids - row_start(axes.rows, rows)
    is_here = (index >= 0) & (index < rows) & (ids >= 0) & (ids < logical)
    return jnp.where(is_here, index, 0), is_here


# Jitted, like the functions of a head: called eagerly, a `shard_map` would compile anew each time.
@functools.partial(jax.jit, static_argnames=("layout", "logical", "dtype"))
def lookup(
    layout: Layout, table_VD: jax.Array, ids_BT: jax.Array, *, logical: int, dtype: jnp.dtype
) -> jax.Array:
    """Rows of a row-sharded table, [B, T, D] in `dtype`; a zero row for ids outside [0, logical).

    Args:
      table_VD: [Vp, D], rows sharded by the rule for `"vocab"`.
      ids_BT: int32, sharded by the rules for `"batch"` and `"seq"`.
    """
    ids_BT = layout.place(ids_BT, "batch", "seq")
    return _lookup(layout, logical, dtype, table_VD, ids_BT)
