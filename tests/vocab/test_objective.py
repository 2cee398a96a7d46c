"""What is minimised beside the likelihood, and what a head does to its table, against float64 NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from meshes import SOME, layout_of, put
from models import layout_on, random_params

from vocabjax.errors import UserError
from vocabjax.model import Blueprint
from vocabjax.optim import GroupConfig, OptimConfig, make_optimizer
from vocabjax.state import init_state
from vocabjax.step import make_step, to_device
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.augmented import augmented_kl
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.heads.linear import LinearHead, TiedHead, UntiedHead
from vocabjax.vocab.heads.low_rank import LowRankHead
from vocabjax.vocab.heads.mixture import MixtureOfSoftmaxes
from vocabjax.vocab.inputs.hashed import HashTable
from vocabjax.vocab.interfaces import Objective, Tokens
from vocabjax.vocab.scores import Scoring
from vocabjax.vocab.sizes import Sizes

V, B, T, D = 37, 4, 6, 8
BANNED = (5,)


def build(head: LinearHead, **objective: Any) -> Vocab:
    config = VocabConfig(
        size=V,
        width=D,
        multiple=4,
        banned=BANNED,
        head=head,
        objective=Objective(chunk=5, **objective),
    )
    return Vocab(config, rngs=nnx.Rngs(0))


def hidden(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, D))


def labels() -> np.ndarray:
    targets = np.random.default_rng(1).integers(6, V, (B, T))
    targets[0, 1] = -100
    return targets


def softmax(a: np.ndarray) -> np.ndarray:
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("mesh", [*SOME, "a=2,b=2,c=2 explicit"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_divergence_from_the_embedding_s_distribution(mesh: str, softcap: float | None) -> None:
    """Value and all five gradients of Σ c · KL(ỹ‖ŷ), c its own for each token; over the ids that may be predicted."""
    layout = layout_of(mesh)
    sizes = Sizes.make(V, 2, BANNED, layout)
    rng = np.random.default_rng(2)
    batch = (8, 4)
    targets = rng.integers(6, V, batch)
    targets[0, 1], targets[3, 2] = -100, BANNED[0]
    h, u, c = rng.normal(size=(*batch, D)), rng.normal(size=(*batch, 6)), rng.normal(size=batch)
    table, embedding = np.zeros((sizes.padded, D)), np.zeros((sizes.padded, 6))
    table[:V], embedding[:V] = rng.normal(size=(V, D)), rng.normal(size=(V, 6))
    bias = np.where(np.arange(sizes.padded) < V, rng.normal(size=sizes.padded), 0)
    tau, scale = 0.7, 1.3

    allowed = oracles.allowed_ids(sizes.padded, V, BANNED)
    z = oracles.scores(h, table, bias, scale=scale, softcap=softcap)
    s, a = z[..., allowed] / tau, (u @ embedding.T)[..., allowed] / tau
    y_hat, y = softmax(s), softmax(a)
    valid = (targets >= 0) & (targets != BANNED[0])
    kl = np.where(valid, (y * np.log(y / y_hat)).sum(-1), 0)
    gap = a - s
    weight = np.where(valid, c, 0)[..., None] / tau
    ds, da = np.zeros_like(z), np.zeros_like(z)
    ds[..., allowed] = weight * (y_hat - y)
    da[..., allowed] = weight * y * (gap - (y * gap).sum(-1, keepdims=True))
    if softcap is not None:
        ds *= 1 - (z / softcap) ** 2
    flat_s, flat_a = ds.reshape(-1, sizes.padded), da.reshape(-1, sizes.padded)
    expected = (
        scale * ds @ table,
        scale * flat_s.T @ h.reshape(-1, D),
        flat_s.sum(0),
        da @ embedding,
        flat_a.T @ u.reshape(-1, 6),
    )

    def tokens(x: np.ndarray) -> jax.Array:
        return put(layout, x.astype(np.float32), "batch", "seq", *[None] * (x.ndim - 2))

    def rows(x: np.ndarray) -> jax.Array:
        return put(layout, x.astype(np.float32), "vocab", *[None] * (x.ndim - 1))

    objective = Objective(augmented=1.0, temperature=tau, chunk=5)
    label = put(layout, targets.astype(np.int32), "batch", "seq")

    def total(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = augmented_kl(Scoring(layout, sizes, scale, softcap), objective, *inputs, label)
        return (tokens(c) * found).sum(), found

    with jax.set_mesh(layout.mesh):
        (_, found), gradients = jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True)(
            tokens(h), rows(table), rows(bias), tokens(u), rows(embedding)
        )
    np.testing.assert_allclose(found, kl, atol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


@pytest.mark.parametrize("through", [False, True])
def test_the_augmented_loss_is_the_cross_entropy_and_its_share_of_the_divergence(
    through: bool,
) -> None:
    """Tied, by automatic differentiation through whole distributions; the targets' side held fixed or not."""
    alpha, tau = 0.4, 1.7
    vocab = build(TiedHead(), augmented=alpha, temperature=tau, augmented_targets=through)
    h, targets = jnp.asarray(hidden(), jnp.float32), labels()
    allowed = np.arange(V) != BANNED[0]
    valid = targets >= 0

    def whole(table_VD: jax.Array) -> jax.Array:
        rows = table_VD[:V]
        log_p = jax.nn.log_softmax(jnp.where(allowed, h @ rows.T, -jnp.inf))
        entropy = -jnp.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0]
        source = rows if through else jax.lax.stop_gradient(rows)
        a = source[np.maximum(targets, 0)] @ source.T / tau
        y = jax.nn.softmax(jnp.where(allowed, a, -jnp.inf))
        log_y_hat = jax.nn.log_softmax(jnp.where(allowed, h @ rows.T / tau, -jnp.inf))
        gap = jnp.where(allowed, jnp.log(jnp.where(allowed, y, 1)) - log_y_hat, 0)
        return jnp.where(valid, entropy + alpha * (y * gap).sum(-1), 0).sum() / valid.sum()

    expected, gradient = jax.value_and_grad(whole)(vocab.input.table[...])

    total, found = jax.value_and_grad(lambda v: v.loss(h, targets).total)(vocab)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(found.input.table[...], gradient, atol=1e-5)
    plain = build(TiedHead())
    np.testing.assert_array_equal(vocab.loss(h, targets).nll, plain.loss(h, targets).nll)


def test_future_tokens_are_those_of_the_same_document() -> None:
    """Against a loss of its own per offset, with labels moved by hand; `nll` stays that of the next token."""
    vocab = build(UntiedHead(), future=2, future_weight=0.3)
    h, targets = hidden(), labels()
    segment = np.tile([0, 0, 0, 1, 1, 1], (B, 1))
    tokens = Tokens(*(jnp.asarray(x, jnp.int32) for x in (targets, segment, segment)))
    table, future = (np.asarray(x[...], np.float64) for x in (vocab.head.table, vocab.head.future))
    allowed = oracles.allowed_ids(vocab.sizes.padded, V, BANNED)
    first = oracles.cross_entropy(h, table, targets, allowed)
    expected = first.total
    for ahead in (1, 2):
        moved = np.full((B, T), -100)
        for t in range(T - ahead):
            same = segment[:, t] == segment[:, t + ahead]
            same &= targets[:, t] != -100
            moved[:, t] = np.where(same, targets[:, t + ahead], -100)
        more = oracles.cross_entropy(
            h @ future[ahead - 1], table, moved, allowed, normalizer=first.weight
        )
        expected += 0.3 * more.total
    loss = vocab.loss(jnp.asarray(h, jnp.float32), targets, tokens=tokens)
    np.testing.assert_allclose(loss.total, expected, rtol=1e-5)
    np.testing.assert_allclose(loss.nll, first.nll, rtol=1e-5)
    assert vocab.flops() == 3 * 2 * V * D + 2 * 2 * D * D


@pytest.mark.parametrize("objective", [{"augmented": 0.5}, {"future": 1}], ids=str)
def test_what_is_not_finite_where_nothing_counts_does_not_spread(
    objective: dict[str, float],
) -> None:
    vocab, targets = build(TiedHead(), **objective), labels()
    h_BTD = jnp.asarray(np.where(targets[..., None] == -100, np.nan, hidden()), jnp.float32)
    gradient = jax.grad(lambda v, h: v.loss(h, targets).total, (0, 1))(vocab, h_BTD)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_what_an_objective_computes_is_counted() -> None:
    """Products of the forward: each future token passes F and the whole head; the divergence scores h and the target's row."""
    head = LowRankHead(rank=3)
    plain = 2 * (D * 3 + 3 * V)
    assert build(head).flops() == plain
    assert build(head, future=2).flops() == 3 * plain + 2 * 2 * D * D
    assert build(head, augmented=0.1).flops() == plain + 2 * 3 * V + 2 * D * V


def test_the_mean_row_is_penalised() -> None:
    vocab = build(UntiedHead(mean_penalty=0.7))
    table = np.asarray(vocab.head.table[...], np.float64)[:V]
    np.testing.assert_allclose(vocab.penalty(), 0.7 * (table.mean(0) ** 2).sum(), rtol=1e-4)
    gradient = jax.grad(lambda v: v.penalty())(vocab).head.table[...]
    expected = np.broadcast_to(2 * 0.7 * table.mean(0) / V, (V, D))
    np.testing.assert_allclose(gradient[:V], expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("mesh", ["data=1,model=1", "data=2,model=4"])
@pytest.mark.parametrize(
    "head", [TiedHead(centre=True), UntiedHead(centre=True)], ids=lambda h: h.kind
)
def test_rows_that_are_scored_against_are_centred_after_a_step(mesh: str, head: LinearHead) -> None:
    """By the mean of the real rows: what the same step without centring leaves, minus its mean; padding stays zero."""
    results = []
    for centre in (False, True):
        config = VocabConfig(size=V, width=D, multiple=2, head=type(head)(centre=centre))
        blueprint = Blueprint(
            config, TrunkConfig(layers=1, heads=4, kv_heads=4, ffn=8), layout_on(mesh)
        )
        optimizer = make_optimizer(OptimConfig(lr=1e-2, warmup=0), blueprint.infos.values(), 5)
        ids = np.random.default_rng(0).integers(0, V, (1, B, T)).astype(np.int32)
        host = dict.fromkeys(("ids", "targets"), ids) | {
            name: np.zeros_like(ids) for name in ("segment", "position")
        }
        with jax.set_mesh(blueprint.layout.mesh):
            batch = to_device(blueprint.layout, host, None, "batch", "seq")
            state = init_state(optimizer, random_params(blueprint))
            state, _ = make_step(blueprint, optimizer)(state, batch)
        results.append(jax.tree.map(np.asarray, state.params["vocab"]))
    plain, centred = results
    face = "input" if head.tied else "head"
    expected = plain[face]["table"][:V] - plain[face]["table"][:V].mean(0)
    np.testing.assert_allclose(centred[face]["table"][:V], expected, atol=1e-6)
    assert not centred[face]["table"][V:].any()
    if not head.tied:
        np.testing.assert_array_equal(centred["input"]["table"], plain["input"]["table"])


def test_a_frozen_table_cannot_be_centred() -> None:
    config = VocabConfig(size=V, width=D, multiple=2, head=TiedHead(centre=True))
    blueprint = Blueprint(
        config, TrunkConfig(layers=1, heads=4, kv_heads=4, ffn=8), layout_on("data=1")
    )
    frozen = OptimConfig(tied=GroupConfig(frozen=True))
    with pytest.raises(UserError, match=r"'tied' freezes vocab/input/table.*centre"):
        make_optimizer(frozen, blueprint.infos.values(), 200)


def test_rows_that_are_stored_nowhere_cannot_be_centred() -> None:
    config = VocabConfig(size=V, width=D, input=HashTable(), head=TiedHead(centre=True))
    with pytest.raises(UserError, match=r"'tied' on .* 'hash': centre moves .* mean_penalty"):
        Vocab(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "objective",
    [{"z_loss": 1e-4}, {"label_smoothing": 0.1}, {"augmented": 0.1}, {"future": 1}],
    ids=lambda objective: next(iter(objective)),
)
def test_what_a_mixture_does_not_define_is_refused(objective: dict[str, float]) -> None:
    name = next(iter(objective))
    with pytest.raises(UserError, match=rf"vocab.objective.{name} = .* 'mos'"):
        build(MixtureOfSoftmaxes(), **objective)


@pytest.mark.parametrize(
    ("name", "value"),
    [("augmented", -1.0), ("temperature", 0.0), ("future", -1), ("future_weight", float("nan"))],
)
def test_impossible_objectives_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"vocab.objective.{name} = "):
        build(TiedHead(), **{name: value})
