"""Views of the rows that are read, against NumPy's unique, on every mesh."""

import jax
import numpy as np
import pytest
from meshes import EVERYWHERE, layout_of, put

from vocabjax.vocab import touched

V, D, B, T = 37, 3, 8, 4


def draw(case: str, rng: np.random.Generator) -> np.ndarray:
    """Ids [2, B, T, 2]: of a few frequent rows, with every kind of bad one; one row alone; none at all; nearly all rows."""
    shape = (2, B, T, 2)
    if case == "one":
        return np.full(shape, V - 1)
    if case == "none":
        return rng.choice([-1, -100, V, 2**31 - 1], shape)
    if case == "many":
        return rng.permutation(np.arange(np.prod(shape)) % V).reshape(shape)
    return rng.choice([-1, 0, 3, 3, 9, 20, 21, V - 1, V, V + 1, 2**31 - 1], shape)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_view_holds_each_row_once_and_goes_back_to_its_place(name: str) -> None:
    layout = layout_of(name)
    shards = layout.shards("vocab")
    padded = -(-V // shards // 2) * shards * 2
    rng = np.random.default_rng(0)
    table_VD = rng.normal(size=(padded, D)).astype(np.float32)
    table = put(layout, table_VD, "vocab", None)
    plan_of = jax.jit(lambda ids: touched.plan(layout, ids, logical=V, padded=padded, leading=1))

    @jax.jit
    def negated(table: jax.Array, plan: touched.Plan) -> tuple[jax.Array, jax.Array]:
        view = touched.fetch(layout, table, plan)
        return view, touched.commit(layout, table, plan, -view)

    for case in ("few", "one", "none", "many"):
        ids = draw(case, rng).astype(np.int32)
        plan = plan_of(put(layout, ids, None, "batch", "seq", None))
        view, changed = negated(table, plan)
        slots, rows = np.asarray(plan.slots), np.asarray(plan.rows).reshape(shards, -1)
        is_real = (ids >= 0) & (ids < V)
        real = np.unique(ids[is_real])
        np.testing.assert_array_equal(slots == -1, ~is_real)
        np.testing.assert_array_equal(
            np.asarray(view)[np.where(is_real, slots, 0)][is_real], table_VD[ids[is_real]]
        )
        assert len(np.unique(slots[is_real])) == len(real)
        assert (
            np.diff(rows) > 0
        ).all()  # ascending and unique in each shard, as scatter is promised
        np.testing.assert_array_equal(
            (rows + padded // shards * np.arange(shards)[:, None])[rows < padded // shards], real
        )
        expected = table_VD.copy()
        expected[real] *= -1
        np.testing.assert_array_equal(changed, expected)
