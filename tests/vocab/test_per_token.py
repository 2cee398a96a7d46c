"""log p and log Σ exp per token, and their gradients, against float64 NumPy on every kind of mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from meshes import SOME, layout_of, put

from vocabjax.vocab.per_token import PerToken, nll_loss, per_token
from vocabjax.vocab.scores import Scoring
from vocabjax.vocab.sizes import Sizes

V, B, T, K, D = 37, 8, 4, 3, 6
BANNED = (5,)


@pytest.mark.parametrize("mesh", [*SOME, "data=8 explicit", "a=2,b=2,c=2 explicit"])
@pytest.mark.parametrize("inner", [(), (K,)], ids=["tokens", "components"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_and_gradients_of_each_token(
    mesh: str, inner: tuple[int, ...], softcap: float | None
) -> None:
    """Of Σ a · log_p + b · lse, with its own a and b for each token; the chunk does not divide the tokens."""
    layout = layout_of(mesh)
    sizes = Sizes.make(V, 2, BANNED, layout)
    rng = np.random.default_rng(1)
    h = rng.normal(size=(B, T, *inner, D))
    table_VD, bias_V = np.zeros((sizes.padded, D)), np.zeros(sizes.padded)
    table_VD[:V], bias_V[:V] = rng.normal(size=(V, D)), rng.normal(size=V)
    targets = rng.integers(0, V, (B, T, *inner))
    targets[0, 1], targets[1, 2], targets[2, 3] = -100, V, BANNED[0]
    a, b = rng.normal(size=(2, *targets.shape))
    scoring = Scoring(layout, sizes, 1.5, softcap)

    allowed_V = oracles.allowed_ids(sizes.padded, V, BANNED)
    z = np.where(
        allowed_V, oracles.scores(h, table_VD, bias_V, scale=1.5, softcap=softcap), -np.inf
    )
    lse = np.log(np.exp(z).sum(-1))
    p = np.exp(z - lse[..., None])
    is_target = (targets[..., None] == np.arange(sizes.padded)) & allowed_V
    valid = is_target.any(-1)
    log_p = np.where(valid, np.where(is_target, z, 0).sum(-1) - lse, 0)
    a_valid = np.where(valid, a, 0)[..., None]
    dz = a_valid * (is_target - p) + b[..., None] * p
    du = (
        1.5 * dz if softcap is None else 1.5 * dz * (1 - (np.where(allowed_V, z, 0) / softcap) ** 2)
    )
    flat = du.reshape(-1, sizes.padded)

    def put_tokens(x: np.ndarray) -> jax.Array:
        return put(layout, jnp.asarray(x, jnp.float32), "batch", "seq", *[None] * (x.ndim - 2))

    def total(h: jax.Array, table: jax.Array, bias: jax.Array) -> tuple[jax.Array, PerToken]:
        labels = put(layout, targets.astype(np.int32), "batch", "seq", *[None] * len(inner))
        found = per_token(scoring, 5, h, table, labels, bias_V=bias)
        return (put_tokens(a) * found.log_p + put_tokens(b) * found.lse).sum(), found

    with jax.set_mesh(layout.mesh):
        (_, found), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(
            put_tokens(h),
            put(layout, table_VD.astype(np.float32), "vocab", None),
            put(layout, bias_V.astype(np.float32), "vocab"),
        )
    np.testing.assert_allclose(found.log_p, log_p, atol=2e-5)
    np.testing.assert_allclose(found.lse, lse, atol=2e-5)
    expected = (du @ table_VD, flat.T @ h.reshape(-1, D), flat.sum(0) / 1.5)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


def test_what_all_scores_have_in_common_does_not_round_log_p() -> None:
    """An offset of 10⁴ through the bias leaves log p as it was (field report 2)."""
    layout = layout_of("none")
    sizes = Sizes.make(V, 1, (), layout)
    rng = np.random.default_rng(0)
    h, table_VD = rng.normal(size=(1, 3, D)), rng.normal(size=(V, D))
    targets = np.array([[0, 5, 36]], np.int32)
    arrays = [jnp.asarray(x, jnp.float32) for x in (h, table_VD)]
    both = [
        per_token(
            Scoring(layout, sizes), 8, *arrays, jnp.asarray(targets), bias_V=jnp.full(V, offset)
        )
        for offset in (0.0, 1e4)
    ]
    # 10⁴ itself has a spacing of 10⁻³ in float32.
    np.testing.assert_allclose(both[1].log_p, both[0].log_p, atol=2e-3)


def test_a_loss_of_what_each_token_costs() -> None:
    layout = layout_of("none")
    sizes = Sizes.make(V, 1, BANNED, layout)
    targets = jnp.array([[1, -100, 5, 2]])
    weights = jnp.array([[1.0, jnp.nan, jnp.nan, 3.0]])
    nll = jnp.array([[2.0, 0.0, 0.0, 4.0]])
    loss = nll_loss(sizes, nll, targets, weights, None)
    assert loss == (14 / 4, 14, 0, 4, 2, 1)
    gradient = jax.grad(lambda nll: nll_loss(sizes, nll, targets, weights, jnp.float32(8)).total)
    np.testing.assert_allclose(gradient(nll), [[1 / 8, 0, 0, 3 / 8]])
    empty = nll_loss(sizes, nll, jnp.full((1, 4), -100), None, None)
    assert empty == (0, 0, 0, 0, 0, 0)
