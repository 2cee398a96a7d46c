"""The product of the trunk, and its gradients, against NumPy."""

import jax
import numpy as np
import pytest
from meshes import layout_of, put

from vocabjax.dense import dense


@pytest.mark.parametrize("mesh", ["none", "data=2,model=4 explicit", "data=8 explicit"])
@pytest.mark.parametrize("inner", [(12,), (4, 3)], ids=["[D, F]", "[D, N, K]"])
def test_values_and_gradients(mesh: str, inner: tuple[int, ...]) -> None:
    layout, rng = layout_of(mesh), np.random.default_rng(0)
    h_BTD, w_DX, g_BTX = (rng.normal(size=s) for s in ((8, 2, 5), (5, *inner), (8, 2, *inner)))
    axes = ("heads" if len(inner) == 2 else "ffn", *[None] * (len(inner) - 1))

    @jax.jit
    def run(h: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(dense, h, w)
        return y, *back(g)

    h, w, g = (x.astype(np.float32) for x in (h_BTD, w_DX, g_BTX))
    with jax.set_mesh(layout.mesh):
        found = run(
            put(layout, h, "batch", "seq", None),
            put(layout, w, None, *axes),
            put(layout, g, "batch", "seq", *axes),
        )
    expected = (
        np.tensordot(h_BTD, w_DX, 1),
        np.tensordot(g_BTX.reshape(8, 2, -1), w_DX.reshape(5, -1), (2, 1)),
        np.tensordot(h_BTD, g_BTX, ((0, 1), (0, 1))),
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert jax.typeof(found[2]).sharding.spec == layout.spec(None, *axes)
