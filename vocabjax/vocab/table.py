"""Rows of a table that is sharded over its rows: a local gather and one all-reduce of activations.

    rows[i] = table[ids[i]]     ids outside [0, logical) give a zero row

The backward adds in float32 into each device's own rows. Over the axes that shard tokens alone it moves, once, whichever is
fewer bytes: the tokens' gradients (gathered, then added by every device) or the rows' (added, then reduced). No device ever
holds another's rows.
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
      spec: the partition of [..., B, T].
      rows: mesh axes the table's rows are sharded over.
      only_tokens: axes that shard tokens but not rows: gradients of the table are summed over them.
      only_rows: axes that shard rows but not tokens: partial results are summed over them.
      both: (dimension, axes that shard both): tokens are gathered over them, results scattered back.
    """

    spec: PartitionSpec
    rows: tuple[str, ...]
    only_tokens: tuple[str, ...]
    only_rows: tuple[str, ...]
    both: tuple[tuple[int, tuple[str, ...]], ...]

    @staticmethod
    def of(layout: Layout, leading: int = 0) -> "TokenAxes":
        """For activations [..., B, T, ...] with `leading` dimensions, not sharded, before B."""

        def cut_by(logical: str) -> tuple[str, ...]:
            # A collective over an axis of one device still costs a copy.
            return tuple(axis for axis in layout.axes(logical) if layout.mesh.shape[axis] > 1)

        rows, per_dim = cut_by("vocab"), (cut_by("batch"), cut_by("seq"))
        tokens = per_dim[0] + per_dim[1]
        shared = (tuple(axis for axis in axes if axis in rows) for axes in per_dim)
        return TokenAxes(
            layout.spec(*[None] * leading, "batch", "seq"),
            rows,
            tuple(axis for axis in tokens if axis not in rows),
            tuple(axis for axis in rows if axis not in tokens),
            tuple((dim, axes) for dim, axes in enumerate(shared, leading) if axes),
        )

    def gather(self, x: jax.Array) -> jax.Array:
        """This device's tokens and those of the devices that hold other rows of the table, in their global order."""
        for dim, axes in self.both:
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    def reduce(self, x: jax.Array) -> jax.Array:
        """Sums partial results over the table's shards and keeps this device's tokens: the inverse of `gather`."""
        x = lax.psum(x, self.only_rows)
        for dim, axes in self.both:
            x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return x

    def keep(self, x: jax.Array) -> jax.Array:
        """This device's tokens of what every shard of the table knows in full."""
        for dim, axes in self.both:
            size = x.shape[dim] // lax.axis_size(axes)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
        return x


def row_start(axes: tuple[str, ...], rows: int) -> jax.Array:
    """The first row this device holds, inside `shard_map`."""
    return lax.axis_index(axes) * rows if axes else jnp.int32(0)


class _Static(NamedTuple):
    layout: Layout
    logical: int
    dtype: jnp.dtype
    leading: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(static: _Static, table_RD: jax.Array, ids: jax.Array) -> jax.Array:
    layout = static.layout
    axes = TokenAxes.of(layout, static.leading)

    def local(table_RD: jax.Array, ids: jax.Array) -> jax.Array:
        ids = axes.gather(ids)
        index, is_here = _local_index(axes, table_RD.shape[0], static.logical, ids)
        rows = table_RD.at[index].get(mode="promise_in_bounds").astype(static.dtype)
        return axes.reduce(jnp.where(is_here[..., None], rows, 0))

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec("vocab", None), axes.spec),
        out_specs=axes.spec,
        check_vma=False,
    )(table_RD, ids)


def _lookup_fwd(
    static: _Static, table_RD: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _lookup(static, table_RD, ids), (table_RD, ids)


def _lookup_bwd(
    static: _Static, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    table_RD, ids = residuals
    layout = static.layout
    axes = TokenAxes.of(layout, static.leading)

    def local(table_RD: jax.Array, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        ids, cotangent = axes.gather(ids), axes.gather(cotangent)
        rows, width = table_RD.shape
        ids, cotangent = ids.reshape(-1), cotangent.reshape(-1, width)
        is_few = _moves_tokens(lax.axis_size(axes.only_tokens), ids.size, rows, cotangent)
        if is_few:
            ids, cotangent = (
                lax.all_gather(x, axes.only_tokens, tiled=True) for x in (ids, cotangent)
            )
        gradient_RD = jnp.zeros(table_RD.shape, jnp.float32)
        gradient_RD = add_rows(axes, static.logical, gradient_RD, ids, cotangent)
        if not is_few:
            gradient_RD = lax.psum(gradient_RD, axes.only_tokens)
        return gradient_RD.astype(table_RD.dtype)

    gradient_RD = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec("vocab", None), axes.spec, axes.spec),
        out_specs=layout.spec("vocab", None),
        check_vma=False,
    )(table_RD, ids, cotangent)
    return gradient_RD, None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _moves_tokens(shards: int, tokens: int, rows: int, cotangent: jax.Array) -> bool:
    """Whether a device sends fewer bytes for its tokens' gradients, gathered, than for its rows', reduced in a ring."""
    width = cotangent.shape[-1]
    gathered = (shards - 1) * tokens * (width * cotangent.dtype.itemsize + 4)
    reduced = 2 * (shards - 1) / shards * rows * width * 4
    return gathered < reduced


def add_rows(
    axes: TokenAxes, logical: int, sum_RD: jax.Array, ids: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """Adds gradients of looked-up rows to those of this device's rows, inside `shard_map`.

    In float32 whatever they are: in bf16 a row that occurs 4,096 times would stop growing at 256.
    """
    rows = sum_RD.shape[0]
    index, is_here = _local_index(axes, rows, logical, ids)
    index = jnp.where(is_here, index, rows)  # out of range: dropped
    return sum_RD.at[index].add(cotangent.astype(jnp.float32), mode="drop")


def _local_index(
    axes: TokenAxes, rows: int, logical: int, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    index = ids - row_start(axes.rows, rows)
    is_here = (index >= 0) & (index < rows) & (ids >= 0) & (ids < logical)
    return jnp.where(is_here, index, 0), is_here


# Jitted, like the functions of a head: called eagerly, a `shard_map` would compile anew each time.
@functools.partial(jax.jit, static_argnames=("layout", "logical", "dtype", "leading"))
def lookup(
    layout: Layout,
    table_RD: jax.Array,
    ids: jax.Array,
    *,
    logical: int,
    dtype: jnp.dtype,
    leading: int = 0,
) -> jax.Array:
    """Rows of a row-sharded table in `dtype`, [*ids.shape, D]; a zero row for ids outside [0, logical).

    Args:
      table_RD: [R, D], rows sharded by the rule for `"vocab"`.
      ids: int32 [..., B, T, ...]: B and T sharded by the rules for `"batch"` and `"seq"`, dimensions after them (the
        hashes of a memory) not sharded.
      leading: dimensions before B, not sharded. The backward of all of them is one scatter and one reduction.
    """
    ids = layout.place(ids, *[None] * leading, "batch", "seq")
    return _lookup(_Static(layout, logical, dtype, leading), table_RD, ids)
