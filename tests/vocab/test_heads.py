"""Heads behind a transform, against float64 NumPy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vocabjax.errors import UserError
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.heads.adaptive import AdaptiveSoftmax, TiedAdaptiveSoftmax
from vocabjax.vocab.heads.linear import LinearHead, TiedHead
from vocabjax.vocab.heads.low_rank import LowRankHead
from vocabjax.vocab.heads.mixture import MixtureOfContexts, MixtureOfSoftmaxes
from vocabjax.vocab.heads.projected import ProjectedHead
from vocabjax.vocab.inputs.adaptive import AdaptiveTable
from vocabjax.vocab.lexicon import Lexicon

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


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_mixture_of_softmaxes_is_a_mean_of_distributions_and_one_of_contexts_is_one() -> None:
    """Scores, per-token loss and its gradients (by differentiating the whole distribution), with a bias and a banned id."""
    banned, targets = 4, np.random.default_rng(2).integers(5, V, H_BTD.shape[:2])
    allowed = np.arange(V) != banned
    for head in (
        MixtureOfSoftmaxes(components=3, bias=True),
        MixtureOfContexts(components=3, bias=True),
    ):
        config = VocabConfig(size=V, width=D, multiple=4, banned=(banned,), head=head)
        vocab = Vocab(config, rngs=nnx.Rngs(0))
        bias = np.random.default_rng(3).normal(size=V)
        vocab.head.bias[...] = jnp.pad(jnp.asarray(bias, jnp.float32), (0, vocab.sizes.padded - V))
        share_BTK = softmax(H_BTD @ host(vocab.head.prior))
        c_BTKD = np.tanh(np.einsum("btd,dke->btke", H_BTD, host(vocab.head.latent)))
        rows = host(vocab.input.table)[:V]
        if head.kind == "mos":
            z_BTKV = np.where(allowed, c_BTKD @ rows.T + bias, -np.inf)
            p_BTV = (share_BTK[..., None] * softmax(z_BTKV)).sum(2)
            ours_BTV = np.exp(scores(vocab))  # they are normalised
        else:
            c_BTD = (share_BTK[..., None] * c_BTKD).sum(2)
            p_BTV = softmax(np.where(allowed, c_BTD @ rows.T + bias, -np.inf))
            ours_BTV = softmax(scores(vocab))
        np.testing.assert_allclose(ours_BTV, p_BTV, rtol=1e-4, atol=1e-7)
        nll_BT = -np.log(np.take_along_axis(p_BTV, targets[..., None], -1)[..., 0])
        h_BTD = jnp.asarray(H_BTD, jnp.float32)
        np.testing.assert_allclose(vocab.nll(h_BTD, targets), nll_BT, rtol=1e-4)
        np.testing.assert_allclose(vocab.loss(h_BTD, targets).total, nll_BT.mean(), rtol=1e-5)
        assert vocab.flops() == 2 * (3 * D * D + 3 * D + V * D * (3 if head.kind == "mos" else 1))


def test_a_mixture_of_softmaxes_has_a_rank_that_one_softmax_cannot_have() -> None:
    """Of log p over many contexts, in float64: at most D + 1 for one softmax (Yang et al. 2017, section 2.2)."""
    narrow, contexts = 4, np.random.default_rng(0).normal(size=(1, 60, 4)) * 3

    def rank(head: LinearHead) -> int:
        config = VocabConfig(size=V, width=narrow, multiple=1, head=head)
        vocab = Vocab(config, rngs=nnx.Rngs(0))
        z = np.asarray(vocab.logits(jnp.asarray(contexts, jnp.float32)), np.float64)[0]
        log_p = z - z.max(-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        # Scores are float32: what is below its rounding is no rank.
        return int(np.linalg.matrix_rank(log_p, tol=1e-4 * np.linalg.norm(log_p, 2)))

    assert rank(TiedHead()) <= narrow + 1
    assert rank(MixtureOfContexts(components=3)) <= narrow + 1
    assert rank(MixtureOfSoftmaxes(components=3)) > narrow + 1


def test_bands_that_hold_nothing_predictable_are_refused() -> None:
    lexicon = Lexicon(counts_V=np.arange(V))  # the rarest are 0 and 1
    config = VocabConfig(size=V, width=D, banned=(0, 1), head=AdaptiveSoftmax(cutoffs=(5, V - 2)))
    with pytest.raises(UserError, match=r"banned holds every id of the ranks 21 … 22"):
        Vocab(config, rngs=nnx.Rngs(0), lexicon=lexicon)
    with pytest.raises(UserError, match=r"cutoffs = \[5, 23\] must be below .* 23"):
        build_adaptive((5, V))
    with pytest.raises(UserError, match=r"cutoffs = \[5, 5\] must ascend"):
        build_adaptive((5, 5))
    with pytest.raises(UserError, match="needs to know how often"):
        Vocab(replace(config, banned=()), rngs=nnx.Rngs(0))


def build_adaptive(cutoffs: tuple[int, ...]) -> Vocab:
    config = VocabConfig(size=V, width=D, multiple=1, head=AdaptiveSoftmax(cutoffs=cutoffs))
    return Vocab(config, rngs=nnx.Rngs(0), lexicon=Lexicon(counts_V=np.zeros(V)))


def test_an_adaptive_softmax_without_cutoffs_is_an_untied_head() -> None:
    vocab = build_adaptive(())
    expected = H_BTD @ host(vocab.head.tables[0]).T
    log_p = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores(vocab), log_p, atol=1e-5)


def test_a_tied_adaptive_softmax_uses_the_input_s_bands_and_projections() -> None:
    """Ranks by count, whatever the order of ids; projections transposed, that of the first band too."""
    counts = np.random.default_rng(5).permutation(V)
    config = VocabConfig(
        size=V,
        width=D,
        multiple=4,
        input=AdaptiveTable(cutoffs=(6, 15)),
        head=TiedAdaptiveSoftmax(),
    )
    vocab = Vocab(config, rngs=nnx.Rngs(0), lexicon=Lexicon(counts_V=counts))
    z = []
    for i, (start, end) in enumerate(((0, 6), (6, 15), (15, V))):
        table, projection = (
            host(x) for x in (vocab.input.bands[i].table, vocab.input.bands[i].projection)
        )
        assert projection.shape == ((12, 3, 1)[i], D)
        z.append(H_BTD @ projection.T @ table[: end - start].T)
    first = softmax(np.concatenate([z[0], H_BTD @ host(vocab.head.slots).T], -1))
    by_rank = np.concatenate(
        [first[..., :6], first[..., 6, None] * softmax(z[1]), first[..., 7, None] * softmax(z[2])],
        -1,
    )
    rank = np.argsort(np.argsort(-counts))
    np.testing.assert_allclose(np.exp(scores(vocab)), by_rank[..., rank], rtol=1e-4, atol=1e-7)
    widths = ((6, 12), (9, 3), (8, 1))
    bands, projections = (
        2 * sum(a * b for a, b in pairs) for pairs in (widths, [(D, w) for _, w in widths])
    )
    assert vocab.flops() == 2 * 2 * D + bands + 2 * projections
