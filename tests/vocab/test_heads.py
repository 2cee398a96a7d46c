"""Heads behind a transform, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vocabjax.errors import UserError
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.heads.low_rank import LowRankHead
from vocabjax.vocab.heads.projected import ProjectedHead

V, D = 23, 12
H_BTD = np.random.default_rng(0).normal(size=(3, 5, D))


def build(head: LowRankHead | ProjectedHead) -> Vocab:
    return Vocab(VocabConfig(size=V, width=D, multiple=4, head=head), rngs=nnx.Rngs(0))


def host(x: nnx.Param[jax.Array]) -> np.ndarray:
    return np.asarray(x[...], np.float64)


def scores(vocab: Vocab) -> np.ndarray:
    return np.asarray(vocab.logits(jnp.asarray(H_BTD, jnp.float32))[..., :V])


def test_low_rank_scores_span_no_more_than_the_rank() -> None:
    vocab = build(LowRankHead(rank=4))
    expected = H_BTD @ host(vocab.head.down) @ host(vocab.head.table)[:V].T
    np.testing.assert_allclose(scores(vocab), expected, rtol=1e-4, atol=1e-5)
    singular = np.linalg.svd(expected.reshape(-1, V), compute_uv=False)
    assert (singular[:4] > 1e-3).all()
    assert (singular[4:] < 1e-10).all()
    assert vocab.flops() == 2 * (D * 4 + V * 4)
    with pytest.raises(UserError, match=r"vocab.head.rank = 0"):
        build(LowRankHead(rank=0))


def test_the_projected_head_starts_as_a_tied_one() -> None:
    vocab = build(ProjectedHead())
    expected = H_BTD @ host(vocab.input.table)[:V].T
    np.testing.assert_allclose(scores(vocab), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("squared", [False, True])
def test_the_projection_is_penalised_and_used(squared: bool) -> None:
    vocab = build(ProjectedHead(strength=0.3, squared=squared))
    projection = np.random.default_rng(1).normal(size=(D, D))
    vocab.head.projection[...] = jnp.asarray(projection, jnp.float32)
    expected = H_BTD @ projection @ host(vocab.input.table)[:V].T
    np.testing.assert_allclose(scores(vocab), expected, rtol=1e-4, atol=1e-5)
    square = (projection**2).sum()
    penalty = 0.3 * (square / 2 if squared else np.sqrt(square))
    np.testing.assert_allclose(vocab.penalty(), penalty, rtol=1e-5)
    gradient = jax.grad(lambda v: v.penalty())(vocab).head.projection[...]
    expected = 0.3 * projection * (1 if squared else 1 / np.sqrt(square))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    with pytest.raises(UserError, match=r"vocab.head.strength = -1"):
        build(ProjectedHead(strength=-1))


def test_a_projection_of_zero_has_a_finite_penalty_gradient() -> None:
    vocab = build(ProjectedHead())
    vocab.head.projection[...] = jnp.zeros((D, D))
    gradient = jax.grad(lambda v: v.penalty())(vocab).head.projection[...]
    np.testing.assert_array_equal(gradient, np.zeros((D, D)))
