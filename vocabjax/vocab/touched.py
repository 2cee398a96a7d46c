"""The rows of a table that a step touches, as a small table of their own.

    view[slots[i]] = table[ids[i]]      each row once, in ascending order; table[rows] is the view

A step that trains the view instead of the table differentiates, clips and updates touched rows only: whatever works on a table
works on the view, with `slots` for ids. `plan` finds the rows (integers only, once per step), `fetch` takes them out of an
array whose leading dimension is the table's rows (the table, its moments), `commit` puts them back in place.

The view lies like the table: each shard of the vocabulary holds a view of its own rows, all of one capacity, the number of
reads or of rows, whichever is smaller. Unused slots hold zeros and are dropped by `commit`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vocabjax.mesh import Layout

_NONE = jnp.iinfo(jnp.int32).max


class Plan(NamedTuple):
    """What a step touches of one table; U is the capacity of a shard's view, S the number of shards.

    Attributes:
      rows: int32 [S·U], sharded over the vocabulary: which row of its shard each slot holds, ascending; rows beyond the
        shard's where a slot is unused.
      slots: int32, shaped and sharded as the ids: the row of the view for each read, −1 where the table has no such row.
    """

    rows: jax.Array
    slots: jax.Array


def plan(layout: Layout, ids: jax.Array, *, logical: int, padded: int, leading: int = 0) -> Plan:
    """The plan of one table's reads.

    Args:
      ids: int32 [..., B, T, ...], as `lookup` takes them.
      logical: rows the table holds; ids outside [0, logical) touch nothing.
      padded: rows as stored.
      leading: dimensions before B.
    """
    # Every device sorts all the ids, which are few beside the rows they stand for.
    flat_N = layout.place(ids, *[None] * ids.ndim).reshape(-1)
    shards = layout.shards("vocab")
    per_shard = padded // shards
    capacity = min(flat_N.size, per_shard)
    is_real_N = (flat_N >= 0) & (flat_N < logical)
    key_N = jnp.where(is_real_N, flat_N, _NONE)
    order_N = jnp.argsort(key_N, stable=False)
    sorted_N = key_N[order_N]
    is_first_N = jnp.concatenate([jnp.ones(1, bool), sorted_N[1:] != sorted_N[:-1]])
    rank_N = jnp.cumsum(is_first_N, dtype=jnp.int32) - 1
    unique_N = jnp.full(flat_N.size, _NONE, jnp.int32).at[rank_N].set(sorted_N)
    start_S = jnp.searchsorted(unique_N, per_shard * jnp.arange(shards + 1, dtype=jnp.int32))
    start_S = start_S.astype(jnp.int32)

    slot_U = jnp.arange(capacity, dtype=jnp.int32)
    rank_SU = start_S[:-1, None] + slot_U
    is_used_SU = rank_SU < start_S[1:, None]
    row_SU = unique_N.at[rank_SU].get(mode="clip") - per_shard * jnp.arange(shards)[:, None]
    index_SU = jnp.where(is_used_SU, row_SU, per_shard + slot_U)  # still ascending, still unique

    shard_N = jnp.minimum(sorted_N // per_shard, shards - 1)
    slot_N = shard_N * capacity + rank_N - start_S[shard_N]
    slot_N = jnp.where(sorted_N == _NONE, -1, slot_N)
    slots = jnp.zeros_like(slot_N).at[order_N].set(slot_N, unique_indices=True).reshape(ids.shape)
    after = [None] * (ids.ndim - leading - 2)
    return Plan(
        layout.place(index_SU.reshape(-1), "vocab"),
        layout.place(slots, *[None] * leading, "batch", "seq", *after),
    )


def fetch(layout: Layout, array: jax.Array, plan: Plan) -> jax.Array:
    """The view [S·U, ...] of an array [Vp, ...] whose rows are sharded over the vocabulary."""

    def local(array: jax.Array, index_U: jax.Array) -> jax.Array:
        return array.at[index_U].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )

    return _per_shard(layout, local, array, plan.rows)


def commit(layout: Layout, array: jax.Array, plan: Plan, view: jax.Array) -> jax.Array:
    """The array with the view's rows in it: in place where the array is donated."""

    def local(array: jax.Array, index_U: jax.Array, view: jax.Array) -> jax.Array:
        return array.at[index_U].set(
            view, mode="drop", unique_indices=True, indices_are_sorted=True
        )

    return _per_shard(layout, local, array, plan.rows, view)


def _per_shard(layout: Layout, local: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`local` on each shard's rows of all the arrays."""
    specs = tuple(layout.spec("vocab", *[None] * (array.ndim - 1)) for array in arrays)
    result: jax.Array = jax.shard_map(
        local, mesh=layout.mesh, in_specs=specs, out_specs=specs[0], check_vma=False
    )(*arrays)
    return result
