"""The loss, its gradients and the logits against float64 NumPy, on every mesh (field reports 1, 2, 16, 18, 24)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import lax
from meshes import EVERYWHERE, SOME, layout_of, put

from vocabjax.mesh import Layout
from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.interfaces import Loss, Objective
from vocabjax.vocab.loss import (
    accumulate_cross_entropy,
    linear_cross_entropy,
    reference_cross_entropy,
)
from vocabjax.vocab.per_token import per_token
from vocabjax.vocab.scores import Scoring, chunk_size, linear_logits
from vocabjax.vocab.sizes import Sizes

# With `MULTIPLE` = 2 every layout has padding, and on eight shards of rows the last holds nothing but padding.
V, B, T, D, MULTIPLE = 37, 8, 4, 6, 2
SHARDED = "data=2,model=4 explicit"


class Setting(NamedTuple):
    """What a loss is asked for."""

    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    weights: bool = False
    banned: tuple[int, ...] = ()
    bad_labels: bool = False


SETTINGS = {
    "plain": Setting(),
    "bias": Setting(bias=True),
    "scale": Setting(scale=0.3),
    "softcap": Setting(softcap=2.0),
    "z-loss": Setting(z_loss=0.1),
    "smoothing": Setting(label_smoothing=0.2),
    "weights": Setting(weights=True),
    "banned": Setting(banned=(0, 19, 36)),
    "bad labels": Setting(bad_labels=True),
}
ALL = Setting(True, 0.7, 3.0, 0.05, 0.15, True, (0, 19, 36), True)


class Problem(NamedTuple):
    """Host arrays. Rows and biases of the padding are as large as the others: they must not matter."""

    h_BTD: np.ndarray
    table_VD: np.ndarray
    bias_V: np.ndarray | None
    targets_BT: np.ndarray
    weights_BT: np.ndarray | None

    def put(self, layout: Layout, *, tokens: tuple[str | None, ...] = ("batch", "seq")) -> tuple:
        axes = ((*tokens, None), ("vocab", None), ("vocab",), tokens, tokens)
        return tuple(
            None if x is None else put(layout, x, *names)
            for x, names in zip(self, axes, strict=True)
        )


def scoring_of(layout: Layout, setting: Setting) -> Scoring:
    sizes = Sizes.make(V, MULTIPLE, setting.banned, layout)
    return Scoring(layout, sizes, setting.scale, setting.softcap)


def objective_of(setting: Setting, chunk: int | None = 5) -> Objective:
    return Objective(z_loss=setting.z_loss, label_smoothing=setting.label_smoothing, chunk=chunk)


def draw(setting: Setting, sizes: Sizes, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    targets_BT = rng.choice(np.flatnonzero(sizes.allowed_V), (B, T)).astype(np.int32)
    weights_BT = rng.uniform(0, 2, (B, T)).astype(np.float32) if setting.weights else None
    if setting.bad_labels:
        targets_BT[1] = -100
        targets_BT[2] = [-1, V, sizes.padded - 1, sizes.padded]
        targets_BT[5, 1:3] = [-100, 0]
    if weights_BT is not None:
        weights_BT[3, 0] = 0
        weights_BT[targets_BT < 0] = np.nan  # a weight is not even read where its label is ignored
    return Problem(
        normal(B, T, D),
        normal(sizes.padded, D),
        normal(sizes.padded) if setting.bias else None,
        targets_BT,
        weights_BT,
    )


def oracle_of(
    problem: Problem, setting: Setting, allowed_V: np.ndarray, normalizer: float | None = None
) -> oracles.CrossEntropy:
    return oracles.cross_entropy(
        problem.h_BTD,
        problem.table_VD,
        problem.targets_BT,
        allowed_V,
        bias_V=problem.bias_V,
        weights_BT=problem.weights_BT,
        scale=setting.scale,
        softcap=setting.softcap,
        z_loss=setting.z_loss,
        label_smoothing=setting.label_smoothing,
        normalizer=normalizer,
    )


def loss_and_gradients(
    scoring: Scoring, objective: Objective, arguments: tuple, normalizer: Any = None
) -> tuple[Loss, tuple]:
    """One jitted call: the loss, and the gradients of its total in h, table and (if there is one) bias."""

    def loss_fn(h, table, bias, targets, weights):
        loss = linear_cross_entropy(
            scoring, objective, h, table, targets, weights, bias_V=bias, normalizer=normalizer
        )
        return loss.total, loss

    (_, loss), gradients = jax.jit(jax.value_and_grad(loss_fn, (0, 1, 2), has_aux=True))(*arguments)
    return loss, gradients


def check(loss: Loss, gradients: tuple, expected: oracles.CrossEntropy, allowed_V) -> None:
    for name in Loss._fields:
        value = getattr(loss, name)
        assert value.dtype == jnp.float32
        assert value.shape == ()
        np.testing.assert_allclose(value, getattr(expected, name), rtol=3e-6, err_msg=name)
    dh_BTD, dtable_VD, dbias_V = gradients
    np.testing.assert_allclose(dh_BTD, expected.dh_BTD, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dtable_VD, expected.dtable_VD, rtol=1e-5, atol=1e-6)
    assert not np.asarray(dtable_VD)[~allowed_V].any()
    if dbias_V is not None:
        np.testing.assert_allclose(dbias_V, expected.dbias_V, rtol=1e-5, atol=1e-6)
        assert not np.asarray(dbias_V)[~allowed_V].any()


def test_the_oracles_gradient_is_its_finite_difference():
    sizes = scoring_of(layout_of("none"), ALL).sizes
    problem = draw(ALL, sizes)
    problem = problem._replace(
        **{name: getattr(problem, name).astype(np.float64) for name in ("h_BTD", "table_VD")},
        bias_V=problem.bias_V.astype(np.float64),
    )
    expected = oracle_of(problem, ALL, sizes.allowed_V)
    step = 1e-5
    for name, gradient, at in (
        ("h_BTD", expected.dh_BTD, (0, 1, 2)),
        ("h_BTD", expected.dh_BTD, (2, 0, 0)),
        ("table_VD", expected.dtable_VD, (5, 3)),
        ("table_VD", expected.dtable_VD, (19, 3)),
        ("bias_V", expected.dbias_V, (11,)),
    ):
        totals = []
        for sign in (1, -1):
            moved = getattr(problem, name).copy()
            moved[at] += sign * step
            totals.append(oracle_of(problem._replace(**{name: moved}), ALL, sizes.allowed_V).total)
        difference = (totals[0] - totals[1]) / (2 * step)
        np.testing.assert_allclose(gradient[at], difference, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_each_setting_equals_the_oracle(setting):
    layout = layout_of(SHARDED)
    scoring = scoring_of(layout, setting)
    problem = draw(setting, scoring.sizes)
    loss, gradients = loss_and_gradients(scoring, objective_of(setting), problem.put(layout))
    allowed_V = scoring.sizes.allowed_V
    check(loss, gradients, oracle_of(problem, setting, allowed_V), allowed_V)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_all_settings_together_equal_the_oracle_on_every_mesh(name):
    layout = layout_of(name)
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes, seed=1)
    loss, gradients = loss_and_gradients(scoring, objective_of(ALL), problem.put(layout))
    allowed_V = scoring.sizes.allowed_V
    check(loss, gradients, oracle_of(problem, ALL, allowed_V), allowed_V)
    for gradient, axes in zip(
        gradients, (("batch", "seq", None), ("vocab", None), ("vocab",)), strict=True
    ):
        assert gradient.sharding.is_equivalent_to(layout.sharding(*axes), len(axes))


@pytest.mark.parametrize("setting", [Setting(), ALL._replace(banned=())], ids=["plain", "all"])
@pytest.mark.parametrize("name", SOME)
def test_a_table_without_padding_needs_no_mask(name, setting):
    layout = layout_of(name)
    sizes = Sizes.make(40, 1, (), layout)
    assert sizes.padded == sizes.predictable == 40
    problem = draw(setting, sizes, seed=5)
    targets_BT = np.where(
        problem.targets_BT == V, -1, problem.targets_BT
    )  # an id here, not a bad label
    problem = problem._replace(targets_BT=targets_BT)
    scoring = Scoring(layout, sizes, setting.scale, setting.softcap)
    loss, gradients = loss_and_gradients(scoring, objective_of(setting), problem.put(layout))
    check(loss, gradients, oracle_of(problem, setting, sizes.allowed_V), sizes.allowed_V)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_microbatches_accumulate_to_the_gradient_of_the_batch(name, bias):
    """Two halves, and the rows that were looked up in the same table: all in one reduction."""
    setting = ALL._replace(bias=bias)
    layout = layout_of(name)
    scoring = scoring_of(layout, setting)
    halves = [draw(setting, scoring.sizes, seed=seed) for seed in (6, 7)]
    halves[1] = halves[1]._replace(table_VD=halves[0].table_VD, bias_V=halves[0].bias_V)
    rng = np.random.default_rng(8)
    ids_BT = rng.integers(-1, V + 2, (B, T)).astype(np.int32)
    of_rows_BTD = rng.normal(size=(B, T, D)).astype(np.float32)

    @jax.jit
    def run(halves, ids, of_rows):
        into = Accumulator.zeros(layout, halves[0][1], halves[0][2])
        dh = []
        for h, table, bias_V, targets, weights in halves:

            def loss_fn(h, into, table=table, bias_V=bias_V, targets=targets, weights=weights):
                loss, into = accumulate_cross_entropy(
                    scoring,
                    objective_of(setting),
                    h,
                    table,
                    targets,
                    weights,
                    into,
                    bias_V=bias_V,
                    normalizer=jnp.float32(9),
                )
                return loss.total, into

            (_, into), of_h = jax.value_and_grad(loss_fn, has_aux=True)(h, into)
            dh.append(of_h)
        return dh, into.total(layout, ids, of_rows, logical=V)

    dh, (dtable_VD, dbias_V) = run(
        [half.put(layout) for half in halves],
        put(layout, ids_BT, "batch", "seq"),
        put(layout, of_rows_BTD, "batch", "seq", None),
    )
    expected = [oracle_of(half, setting, scoring.sizes.allowed_V, 9.0) for half in halves]
    for got, want in zip(dh, expected, strict=True):
        np.testing.assert_allclose(got, want.dh_BTD, rtol=1e-5, atol=1e-6)
    read_VD = np.zeros((scoring.sizes.padded, D))
    read_VD[:V] = oracles.scatter_add((V, D), ids_BT, of_rows_BTD)
    whole = expected[0].dtable_VD + expected[1].dtable_VD + read_VD
    np.testing.assert_allclose(dtable_VD, whole, rtol=1e-5, atol=1e-5)
    assert (dbias_V is None) == (not bias)
    if bias:
        whole = expected[0].dbias_V + expected[1].dbias_V
        np.testing.assert_allclose(dbias_V, whole, rtol=1e-5, atol=1e-5)


def test_the_chosen_chunk_keeps_to_its_bounds():
    layout = layout_of("none")
    assert chunk_size(layout, 50_304, jnp.float32, 7) == 7
    # 16 MiB of float32 scores where that is 256 tokens or more, whatever the operands are.
    for dtype, least in ((jnp.float32, 384), (jnp.bfloat16, 256)):
        sizes = [chunk_size(layout, rows, dtype, None) for rows in (1, 4096, 12_576, 50_304, 10**6)]
        assert sizes == [8192, 1024, 256, least, least]


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000, None])
def test_the_chunk_changes_nothing(chunk):
    layout = layout_of(SHARDED)  # 16 tokens per device
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes, seed=2)
    loss, gradients = loss_and_gradients(scoring, objective_of(ALL, chunk), problem.put(layout))
    allowed_V = scoring.sizes.allowed_V
    check(loss, gradients, oracle_of(problem, ALL, allowed_V), allowed_V)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_reference_on_logits_equals_the_oracle(name):
    """Also the gradient of the logits, by automatic differentiation."""
    layout = layout_of(name)
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes, seed=3)

    @jax.jit
    def run(h, table, bias, targets, weights):
        def loss_fn(h, table, bias):
            z_BTV = linear_logits(scoring, h, table, bias)
            loss = reference_cross_entropy(
                scoring.sizes, objective_of(ALL), z_BTV, targets, weights
            )
            return loss.total, loss

        return jax.value_and_grad(loss_fn, (0, 1, 2), has_aux=True)(h, table, bias)

    # Replicated tokens: in whole logits, the vocabulary may take the batch's mesh axis.
    (_, loss), gradients = run(*problem.put(layout, tokens=(None, None)))
    allowed_V = scoring.sizes.allowed_V
    check(loss, gradients, oracle_of(problem, ALL, allowed_V), allowed_V)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_logits_are_a_distribution_over_the_allowed_ids(name):
    """−inf after the soft cap elsewhere; and the loss per token is −log softmax(logits)[target]."""
    layout = layout_of(name)
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes, seed=4)

    @jax.jit
    def run(h, table, bias, targets, _):
        return (
            linear_logits(scoring, h, table, bias),
            -per_token(scoring, 5, h, table, targets, bias_V=bias).log_p,
        )

    z_BTV, nll_BT = (np.asarray(x) for x in run(*problem.put(layout)))
    assert z_BTV.dtype == nll_BT.dtype == np.float32
    allowed_V = scoring.sizes.allowed_V
    expected_z = oracles.scores(
        problem.h_BTD, problem.table_VD, problem.bias_V, scale=ALL.scale, softcap=ALL.softcap
    )
    np.testing.assert_allclose(
        z_BTV[..., allowed_V], expected_z[..., allowed_V], rtol=1e-5, atol=1e-5
    )
    assert (z_BTV[..., ~allowed_V] == -np.inf).all()
    p_BTV = np.asarray(jax.nn.softmax(z_BTV))
    assert not p_BTV[..., ~allowed_V].any()
    np.testing.assert_allclose(p_BTV.sum(-1), 1, rtol=1e-6)
    expected = oracle_of(problem, ALL, allowed_V)
    np.testing.assert_allclose(nll_BT, expected.nll_BT, rtol=1e-5, atol=1e-6)
    is_valid = expected.nll_BT != 0
    picked = np.take_along_axis(
        p_BTV, np.where(is_valid, problem.targets_BT, 0)[..., None], axis=-1
    )[..., 0]
    np.testing.assert_allclose(nll_BT[is_valid], -np.log(picked[is_valid]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SOME)
def test_microbatches_under_the_global_normalizer_equal_the_full_batch(name):
    """Also where one microbatch has no valid label at all."""
    layout = layout_of(name)
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes, seed=5)
    parts = 4
    problem.targets_BT[: B // parts] = -100
    allowed_V = scoring.sizes.allowed_V
    expected = oracle_of(problem, ALL, allowed_V)

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(parts, B // parts, *x.shape[1:])

    tokens = (None, "batch", "seq")
    h = put(layout, split(problem.h_BTD), *tokens, None)
    targets, weights = (
        put(layout, split(x), *tokens) for x in (problem.targets_BT, problem.weights_BT)
    )
    _, table, bias, _, _ = problem.put(layout)

    @jax.jit
    def run(h, table, bias, targets, weights):
        def loss_fn(h, table, bias):
            def body(_, part):
                h, targets, weights = part
                return None, linear_cross_entropy(
                    scoring,
                    objective_of(ALL),
                    h,
                    table,
                    targets,
                    weights,
                    bias_V=bias,
                    normalizer=jnp.float32(expected.weight),
                )

            losses = lax.scan(body, None, (h, targets, weights))[1]
            summed = jax.tree.map(lambda x: x.sum(0), losses)
            return summed.total, summed

        return jax.value_and_grad(loss_fn, (0, 1, 2), has_aux=True)(h, table, bias)

    (_, loss), (dh, dtable, dbias) = run(h, table, bias, targets, weights)
    check(loss, (np.asarray(dh).reshape(B, T, D), dtable, dbias), expected, allowed_V)


@pytest.mark.parametrize("name", SOME)
def test_a_batch_without_valid_labels_gives_zero_and_no_nan(name):
    layout = layout_of(name)
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes)
    problem.targets_BT[...] = -100
    problem.targets_BT[0, 0] = -1
    problem.weights_BT[...] = np.nan
    loss, gradients = loss_and_gradients(scoring, objective_of(ALL), problem.put(layout))
    assert [float(x) for x in loss] == [0, 0, 0, 0, 0, 1]
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_hidden_states_that_do_not_count_may_be_anything(name, bad):
    """An ignored label or a weight of 0: whatever stands there reaches neither the loss nor a gradient."""
    layout = layout_of(name)
    scoring = scoring_of(layout, ALL)
    clean = draw(ALL, scoring.sizes)
    clean.targets_BT[0, 0] = -100
    clean.weights_BT[1, 1] = 0
    dirty = clean._replace(h_BTD=clean.h_BTD.copy())
    for place in ((0, 0), (1, 1)):
        clean.h_BTD[place] = 0
        dirty.h_BTD[place] = bad
    run = jax.jit(lambda *args: loss_and_gradients(scoring, objective_of(ALL), args))
    loss, gradients = run(*clean.put(layout))
    bad_loss, bad_gradients = run(*dirty.put(layout))
    assert jax.device_get(bad_loss) == jax.device_get(loss)
    for one, two in zip(gradients, bad_gradients, strict=True):
        np.testing.assert_array_equal(one, two)


def test_scores_whose_square_overflows_are_no_harm_without_z_loss():
    scoring = scoring_of(layout_of("none"), Setting())
    problem = draw(Setting(), scoring.sizes)
    problem.h_BTD[...] *= 1e22
    loss, gradients = loss_and_gradients(
        scoring, Objective(chunk=5), problem.put(layout_of("none"))
    )
    assert np.isfinite(loss.total)
    assert all(np.isfinite(gradient).all() for gradient in gradients if gradient is not None)


def test_invalid_labels_are_counted_and_change_nothing_else():
    """Field report 1: −1, V and Vp−1, and a banned id, are as if they were −100."""
    setting = Setting(banned=(7,))
    layout = layout_of(SHARDED)
    scoring = scoring_of(layout, setting)
    ignored = draw(setting, scoring.sizes)
    ignored.targets_BT[1] = -100
    invalid = ignored._replace(targets_BT=ignored.targets_BT.copy())
    invalid.targets_BT[1] = [-1, V, scoring.sizes.padded - 1, 7]

    @jax.jit
    def run(h, table, bias, targets, weights):
        def loss_fn(h, table):
            loss = linear_cross_entropy(scoring, Objective(), h, table, targets)
            return loss.total, loss

        return jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(h, table)

    (_, loss), gradients = run(*ignored.put(layout))
    (_, bad_loss), bad_gradients = run(*invalid.put(layout))
    assert loss.invalid == 0
    assert bad_loss.invalid == 4
    assert loss == bad_loss._replace(invalid=loss.invalid)
    for gradient, bad_gradient in zip(gradients, bad_gradients, strict=True):
        np.testing.assert_array_equal(gradient, bad_gradient)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_z_loss_is_reported_apart_and_zero_weight_is_exactly_the_cross_entropy(label_smoothing):
    """Field report 18; scores far from 0, where lse² would show."""
    layout = layout_of("none")
    setting = Setting(bias=True, label_smoothing=label_smoothing, bad_labels=True)
    scoring = scoring_of(layout, setting)
    problem = draw(setting, scoring.sizes)
    problem.bias_V[...] += 50
    arguments = problem.put(layout)
    losses = {}
    for z_loss in (0.0, 1e-3):
        losses[z_loss], _ = loss_and_gradients(
            scoring, objective_of(setting._replace(z_loss=z_loss)), arguments
        )
    off, on = losses[0.0], losses[1e-3]
    expected = oracle_of(problem, setting, scoring.sizes.allowed_V)
    np.testing.assert_allclose(off.total, expected.total, rtol=1e-6)
    if label_smoothing == 0:
        np.testing.assert_allclose(off.total, off.nll / off.weight, rtol=1e-6)
    np.testing.assert_allclose(on.total - off.total, 1e-3 * on.z / on.weight, rtol=1e-5)
    assert on._replace(total=off.total) == off


@pytest.mark.parametrize("field", ["nll", "z", "weight", "tokens", "invalid"])
def test_only_the_total_is_differentiable(field):
    """The other fields are reports: their gradients are zero, silently. The total's follows its cotangent."""
    layout = layout_of("none")
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes)
    h, table, bias, targets, weights = problem.put(layout)

    @jax.jit
    def gradients(h, table, bias, weights):
        def loss_fn(h, table, bias, weights):
            loss = linear_cross_entropy(
                scoring, objective_of(ALL), h, table, targets, weights, bias_V=bias
            )
            return 3 * loss.total + 5 * getattr(loss, field)

        return jax.grad(loss_fn, (0, 1, 2, 3))(h, table, bias, weights)

    got = gradients(h, table, bias, weights)
    expected = oracle_of(problem, ALL, scoring.sizes.allowed_V)
    theirs = (*expected[-3:], by_weight(problem, ALL, scoring.sizes.allowed_V))
    for gradient, oracle in zip(got, theirs, strict=True):
        np.testing.assert_allclose(gradient, 3 * oracle, rtol=1e-5, atol=1e-6)


def by_weight(problem: Problem, setting: Setting, allowed_V: np.ndarray) -> np.ndarray:
    """d total / d weight, by finite differences of the oracle; the objective of a token of weight 0 is left out as 0."""
    whole = oracle_of(problem, setting, allowed_V)
    gradient = np.where(problem.weights_BT == 0, -whole.total / whole.weight, 0)
    for at in np.argwhere(problem.weights_BT > 0):
        totals = []
        for sign in (1, -1):
            moved = problem.weights_BT.astype(np.float64)
            moved[tuple(at)] += sign * 1e-5
            totals.append(oracle_of(problem._replace(weights_BT=moved), setting, allowed_V).total)
        gradient[tuple(at)] = (totals[0] - totals[1]) / 2e-5
    return gradient


@pytest.mark.parametrize("name", SOME)
def test_each_token_apart(name):
    """Without a reduction: the objective of every token, and the gradient of a sum in which each has a factor of its own."""
    layout = layout_of(name)
    scoring = scoring_of(layout, ALL)
    problem = draw(ALL, scoring.sizes)
    factor_BT = np.random.default_rng(3).normal(size=(B, T)).astype(np.float32)

    @jax.jit
    def run(h, table, bias, targets, weights, factor):
        def loss_fn(h, table, bias, weights):
            loss = linear_cross_entropy(
                scoring,
                objective_of(ALL),
                h,
                table,
                targets,
                weights,
                bias_V=bias,
                reduction="none",
            )
            return (factor * loss.total).sum(), loss

        return jax.value_and_grad(loss_fn, (0, 1, 2, 3), has_aux=True)(h, table, bias, weights)

    with jax.set_mesh(layout.mesh):
        (_, loss), (*gradients, dweights) = run(
            *problem.put(layout), put(layout, factor_BT, "batch", "seq")
        )
    # The same sum is a mean of tokens weighted by weight · factor, times the sum of those weights.
    allowed_V = scoring.sizes.allowed_V
    weighted = problem._replace(weights_BT=problem.weights_BT * factor_BT)
    expected = oracle_of(weighted, ALL, allowed_V, normalizer=1.0)
    np.testing.assert_allclose((factor_BT * loss.total).sum(), expected.total, rtol=2e-5)
    for gradient, oracle in zip(gradients, expected[-3:], strict=True):
        np.testing.assert_allclose(gradient, oracle, rtol=1e-4, atol=2e-5)
    plain = oracle_of(problem, ALL, allowed_V, normalizer=1.0)
    for field in ("total", "nll", "z", "weight"):
        np.testing.assert_allclose(getattr(loss, field).sum(), getattr(plain, field), rtol=2e-5)
    assert (loss.tokens, loss.invalid) == (plain.tokens, plain.invalid)
    cost_BT = np.where(problem.weights_BT > 0, loss.total / problem.weights_BT, 0)
    np.testing.assert_allclose(dweights, factor_BT * cost_BT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_common_offset_of_the_scores_leaves_loss_and_gradients_unchanged(name, offset):
    """Field report 2. The scores are multiples of 1/8, so that float32 holds them beside 10⁴ exactly."""
    layout = layout_of(name)
    setting = Setting(bias=True, label_smoothing=0.1)
    scoring = scoring_of(layout, setting)
    rng = np.random.default_rng(0)
    problem = draw(setting, scoring.sizes)
    problem = problem._replace(
        h_BTD=rng.integers(-4, 5, (B, T, D)).astype(np.float32) / 2,
        table_VD=rng.integers(-4, 5, (scoring.sizes.padded, D)).astype(np.float32) / 4,
        bias_V=np.zeros(scoring.sizes.padded, np.float32),
    )
    allowed_V = scoring.sizes.allowed_V
    expected = oracle_of(problem, setting, allowed_V)
    moved = problem._replace(bias_V=problem.bias_V + np.float32(offset))
    loss, gradients = loss_and_gradients(scoring, objective_of(setting), moved.put(layout))
    # z is what the offset does change.
    check(loss._replace(z=jnp.float32(expected.z)), gradients, expected, allowed_V)


@pytest.mark.parametrize("logit_scale", [1, 160])
def test_bf16_inputs(logit_scale):
    """Field report 2: a float32 loss of the rounded inputs, and no error that grows with the number of chunks."""
    layout = layout_of("none")
    sizes = Sizes.make(V, MULTIPLE, (), layout)
    rng = np.random.default_rng(0)
    bf16 = jnp.bfloat16
    tokens, width = 1024, 16
    h_BTD = rng.normal(size=(8, tokens // 8, width)).astype(bf16)
    table_VD = rng.normal(size=(sizes.padded, width)).astype(np.float32) * (logit_scale / 4)
    targets_BT = rng.integers(0, V, h_BTD.shape[:2]).astype(np.int32)
    expected = oracles.cross_entropy(
        h_BTD.astype(np.float64),
        table_VD.astype(bf16).astype(np.float64),
        targets_BT,
        sizes.allowed_V,
    )
    errors = {}
    for chunks in (1, 8, 64):
        loss, (dh, dtable, _) = loss_and_gradients(
            Scoring(layout, sizes),
            Objective(chunk=tokens // chunks),
            (jnp.asarray(h_BTD), jnp.asarray(table_VD), None, jnp.asarray(targets_BT), None),
        )
        assert (dh.dtype, dtable.dtype) == (bf16, jnp.float32)
        np.testing.assert_allclose(loss.total, expected.total, rtol=1e-6)
        errors[chunks] = np.array(
            [
                np.linalg.norm(np.asarray(got, np.float64) - oracle) / np.linalg.norm(oracle)
                for got, oracle in ((dh, expected.dh_BTD), (dtable, expected.dtable_VD))
            ]
        )
    half_ulp = 2.0**-9
    assert (errors[1] < 2 * half_ulp).all()
    assert (errors[8] < 1.01 * errors[1]).all()
    assert (errors[64] < 1.01 * errors[1]).all()
