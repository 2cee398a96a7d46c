"""Row lookup and its gradient against NumPy indexing, on every mesh (field reports 1, 24)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import buffers, collectives, compiled_text
from jax import lax
from meshes import EVERYWHERE, SOME, layout_of, put
from oracles import scatter_add

from vocabjax.mesh import Layout
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import lookup

V, D, B, T = 37, 6, 8, 4
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def draw(padded: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table without zero rows, even in the padding; ids that repeat and include every kind of bad one; cotangents."""
    rng = np.random.default_rng(seed)
    table_VD = rng.uniform(1, 2, (padded, D)).astype(np.float32)
    ids_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    ids_BT[0] = V - 1
    ids_BT[1] = [-1, V, padded - 1, padded]
    ids_BT[5] = [-100, 0, 0, 2**31 - 1]
    return table_VD, ids_BT, rng.normal(size=(B, T, D)).astype(np.float32)


def expected_rows(table_VD: np.ndarray, ids_BT: np.ndarray) -> np.ndarray:
    is_real = (ids_BT >= 0) & (ids_BT < V)
    return np.where(is_real[..., None], table_VD[np.where(is_real, ids_BT, 0)], 0)


def expected_gradient(table_VD: np.ndarray, ids_BT: np.ndarray, rows: np.ndarray) -> np.ndarray:
    gradient_VD = np.zeros(table_VD.shape)
    gradient_VD[:V] = scatter_add((V, D), ids_BT, rows)
    return gradient_VD


def padded_sizes(layout: Layout) -> Sizes:
    sizes = Sizes.make(V, 2, (), layout)
    assert sizes.padded > V  # else Vp−1 is a real id and the tests below say less
    return sizes


@pytest.mark.parametrize("name", EVERYWHERE)
def test_rows_and_gradient_equal_numpy(name):
    layout = layout_of(name)
    table_VD, ids_BT, cotangent_BTD = draw(padded_sizes(layout).padded)

    @jax.jit
    def rows_and_gradient(table, ids, cotangent):
        rows, back = jax.vjp(lambda t: lookup(layout, t, ids, logical=V, dtype=F32), table)
        return rows, back(cotangent)[0]

    rows, gradient = rows_and_gradient(
        put(layout, table_VD, "vocab", None),
        put(layout, ids_BT, "batch", "seq"),
        put(layout, cotangent_BTD, "batch", "seq", None),
    )
    np.testing.assert_array_equal(rows, expected_rows(table_VD, ids_BT))
    expected = expected_gradient(table_VD, ids_BT, cotangent_BTD)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert gradient.sharding.is_equivalent_to(layout.sharding("vocab", None), 2)


@pytest.mark.parametrize("name", SOME)
def test_eager_equals_numpy(name):
    layout = layout_of(name)
    table_VD, ids_BT, _ = draw(padded_sizes(layout).padded, seed=1)
    rows = lookup(
        layout, put(layout, table_VD, "vocab", None), jnp.asarray(ids_BT), logical=V, dtype=F32
    )
    np.testing.assert_array_equal(rows, expected_rows(table_VD, ids_BT))


@pytest.mark.parametrize("name", SOME)
def test_bf16_gradient_of_a_frequent_id_is_summed_in_float32(name):
    """4,096 cotangents of 1 are 4,096, and one fewer is 4,095: a bf16 sum stops at 256 or rounds to 4,096."""
    layout = layout_of(name)
    table_VD = np.ones((padded_sizes(layout).padded, 2), np.float32)
    ids_BT = np.full((8, 1024), 11, np.int32)
    ids_BT[:, ::2] = 36
    ids_BT[5, 3] = 0

    @jax.jit
    def gradient(table, ids):
        return jax.grad(
            lambda t: lookup(layout, t, ids, logical=V, dtype=BF16).sum(dtype=jnp.float32)
        )(table)

    got = gradient(put(layout, table_VD, "vocab", None), put(layout, ids_BT, "batch", "seq"))
    expected = np.zeros_like(table_VD)
    expected[36], expected[11], expected[0] = 4096, 4095, 1
    np.testing.assert_array_equal(got, expected)


def test_bf16_rows_are_the_rounded_rows():
    layout = layout_of("data=2,model=4 explicit")
    table_VD, ids_BT, _ = draw(padded_sizes(layout).padded)
    rows = lookup(
        layout, put(layout, table_VD, "vocab", None), jnp.asarray(ids_BT), logical=V, dtype=BF16
    )
    assert rows.dtype == BF16
    np.testing.assert_array_equal(rows, expected_rows(table_VD, ids_BT).astype(BF16))


@pytest.mark.parametrize("name", SOME)
def test_scanned_microbatches_equal_the_full_batch(name):
    """Looked up inside the scan, and gathered once before it as the training step does."""
    layout = layout_of(name)
    table_VD, ids_BT, weight_BTD = draw(padded_sizes(layout).padded, seed=2)
    parts = 2
    ids_ABT = ids_BT.reshape(parts, -1, T)
    weight_ABTD = weight_BTD.reshape(parts, -1, T, D)

    def objective(rows, weight):
        return (rows**2 * weight).sum()

    def inside(table, ids, weight):
        def body(total, part):
            rows = lookup(layout, table, part[0], logical=V, dtype=F32)
            return total + objective(rows, part[1]), None

        return lax.scan(body, jnp.float32(0), (ids, weight))[0]

    def before(table, ids, weight):
        rows = lookup(layout, table, ids, logical=V, dtype=F32, leading=1)
        return lax.scan(
            lambda total, part: (total + objective(*part), None), jnp.float32(0), (rows, weight)
        )[0]

    expected = expected_gradient(table_VD, ids_BT, 2 * expected_rows(table_VD, ids_BT) * weight_BTD)
    table = put(layout, table_VD, "vocab", None)
    ids = put(layout, ids_ABT, None, "batch", "seq")
    weight = put(layout, weight_ABTD, None, "batch", "seq", None)
    for scanned in (inside, before):
        gradient = jax.jit(jax.grad(scanned))(table, ids, weight)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SOME)
def test_ids_of_any_shape(name):
    """Microbatches before the tokens and hashes after them: [A, B, T, H] ids give [A, B, T, H, D] rows."""
    layout = layout_of(name)
    table_VD, _, _ = draw(padded_sizes(layout).padded, seed=3)
    rng = np.random.default_rng(4)
    ids = rng.integers(-1, V + 1, (3, B, T, 2)).astype(np.int32)
    cotangent = rng.normal(size=(*ids.shape, D)).astype(np.float32)

    @jax.jit
    def rows_and_gradient(table, ids, cotangent):
        rows, back = jax.vjp(
            lambda t: lookup(layout, t, ids, logical=V, dtype=F32, leading=1), table
        )
        return rows, back(cotangent)[0]

    rows, gradient = rows_and_gradient(
        put(layout, table_VD, "vocab", None),
        put(layout, ids, None, "batch", "seq", None),
        put(layout, cotangent, None, "batch", "seq", None, None),
    )
    np.testing.assert_array_equal(rows, expected_rows(table_VD, ids))
    expected = expected_gradient(table_VD, ids, cotangent)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["data=2,model=4 explicit", "a=2,b=2,c=2 explicit"])
def test_microbatches_share_one_reduction_and_no_table_is_gathered(name):
    layout = layout_of(name)
    table_VD = np.ones((520, D), np.float32)
    ids = np.zeros((4, B, T), np.int32)

    def gradient(table, ids):
        return jax.grad(lambda t: lookup(layout, t, ids, logical=V, dtype=F32, leading=1).sum())(
            table
        )

    text = compiled_text(
        jax.jit(gradient),
        put(layout, table_VD, "vocab", None),
        put(layout, ids, None, "batch", "seq"),
    )
    shard = (520 // layout.shards("vocab"), D)
    reductions = [shape for kind, shape in collectives(text) if kind != "all-gather"]
    assert reductions.count(shard) <= 1
    assert not [shape for _, shape in collectives(text) if 520 in shape]
    assert not [shape for shape in buffers(text) if 520 in shape]


@pytest.mark.parametrize(
    "name",
    ["data=2,model=4 explicit", "data=8 auto", "data=2,seq=2,model=2 auto", "a=2,b=2,c=2 explicit"],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_backward_moves_what_is_fewer_bytes(name, dtype):
    """A table of many rows: token gradients are gathered, in their dtype, and no row is reduced; of few rows: the reverse."""
    layout = layout_of(name)
    rng = np.random.default_rng(5)
    ids_BT = rng.integers(-1, 8, (B, T)).astype(np.int32)
    cotangent_BTD = rng.integers(-4, 5, (B, T, D)).astype(dtype)
    for rows in (8, 4096):
        shard = (rows // layout.shards("vocab"), D)

        @jax.jit
        def gradient(table, ids, cotangent, rows=rows):
            back = jax.vjp(lambda t: lookup(layout, t, ids, logical=rows, dtype=dtype), table)[1]
            return back(cotangent)[0]

        arguments = (
            put(layout, np.ones((rows, D), np.float32), "vocab", None),
            put(layout, ids_BT, "batch", "seq"),
            put(layout, cotangent_BTD, "batch", "seq", None),
        )
        sent = collectives(compiled_text(gradient, *arguments))
        assert [shape for kind, shape in sent if kind == "all-reduce"].count(shard) == (rows == 8)
        moved = [math.prod(shape) for kind, shape in sent if kind == "all-gather" and D in shape]
        assert sum(moved) <= 2 * B * T * D
        expected = scatter_add((rows, D), ids_BT, cotangent_BTD.astype(np.float32))
        np.testing.assert_array_equal(gradient(*arguments), expected)
