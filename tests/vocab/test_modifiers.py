"""Scale, norm, gradient scale and dropout of the rows that enter the trunk, with every input."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from meshes import layout_of, put
from models import quick_jit, random_params

from vocabjax.config import kinds
from vocabjax.errors import UserError
from vocabjax.model import Blueprint
from vocabjax.optim import OptimConfig, make_optimizer
from vocabjax.state import init_state
from vocabjax.step import make_step, to_device, tokens_of
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.inputs.full import FullTable
from vocabjax.vocab.interfaces import InputConfig, Tokens
from vocabjax.vocab.lexicon import Lexicon
from vocabjax.vocab.modifiers import keep_types

V, D = 23, 12
IDS_BT = np.random.default_rng(0).integers(0, V, (4, 8)).astype(np.int32)
KEY = jax.random.key(7, impl="threefry2x32")
# Settings that a vocabulary this small needs.
SMALL: dict[str, dict[str, Any]] = {"over_encoding": {"order": 2}, "adaptive": {"cutoffs": (3, 11)}}


def build(input: InputConfig, head: Any = None) -> Vocab:
    config = VocabConfig(size=V, width=D, multiple=4, input=input, head=head or UntiedHead())
    return Vocab(config, rngs=nnx.Rngs(0), lexicon=Lexicon.stand_in())


def dropping(ids_BT: Any = IDS_BT, key: jax.Array = KEY) -> Tokens:
    return Tokens.of(ids_BT)._replace(key=key)


def host(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


# Before any test runs: those of other tests' own are left out.
INPUTS = {k: c for k, c in kinds(InputConfig).items() if c.__module__.startswith("vocabjax.")}


@pytest.mark.parametrize("kind", INPUTS)
def test_every_input_has_them_once_and_in_order(kind: str) -> None:
    """Field report 19, and x = m · norm(s · row)."""
    cls, settings = INPUTS[kind], SMALL.get(kind, {})
    rows_BTD = host(build(cls(**settings)).encode(IDS_BT))
    for scale, factor in (("sqrt_width", math.sqrt(D)), (-3.0, -3.0)):
        scaled = build(cls(scale=scale, **settings))
        np.testing.assert_allclose(scaled.encode(IDS_BT), factor * rows_BTD, rtol=1e-5)
    # A large factor, which the norm's epsilon does not hide.
    vocab = build(cls(scale=10.0, norm="layernorm", gradient=0.0, dropout=0.25, **settings))
    vocab.modifiers.norm.bias[...] = jnp.ones(D)
    wide = 10 * rows_BTD
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) + 1
    np.testing.assert_allclose(vocab.encode(IDS_BT), normed, rtol=1e-4, atol=1e-4)
    x_BTD = host(vocab.encode(dropping()))
    is_kept_BT = x_BTD.any(-1)
    assert 0 < is_kept_BT.mean() < 1
    np.testing.assert_allclose(x_BTD[is_kept_BT], normed[is_kept_BT] / 0.75, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 0.0}, "scale = 0.0 must be finite and not zero"),
        ({"scale": math.nan}, "scale = nan"),
        ({"gradient": -1.0}, "gradient = -1.0 must be finite and not negative"),
        ({"gradient": math.inf}, "gradient = inf"),
        ({"dropout": 1.0}, r"dropout = 1.0 must be in \[0, 1\)"),
        ({"dropout": -0.1}, "dropout = -0.1"),
    ],
)
def test_every_input_refuses_settings_that_cannot_work(
    settings: dict[str, Any], message: str
) -> None:
    for cls in INPUTS.values():
        with pytest.raises(UserError, match=rf"vocab.input.{message}"):
            cls(**settings).check()


@pytest.mark.parametrize(
    ("name", "gradient"), [("none", 0.0), ("none", 0.1), ("data=2,model=4 explicit", 3.0)]
)
def test_the_gradient_of_the_input_path_is_scaled_and_the_heads_is_not(
    name: str, gradient: float
) -> None:
    """float64, tied: dW = dscoresᵀ h + γ · scatter-add of m · √D · dx, and the loss is that of γ = 1."""
    layout, p = layout_of(name), 0.5
    input = FullTable(scale="sqrt_width", gradient=gradient, dropout=p)
    config = VocabConfig(size=V, width=D, multiple=1, input=input, head=TiedHead())
    with jax.set_mesh(layout.mesh):
        vocab = Vocab(config, rngs=nnx.Rngs(0), mesh=layout.mesh)
        graph, params = nnx.split(vocab)
        ids = put(layout, IDS_BT, "batch", "seq")

        @jax.jit
        def run(params: Any, ids: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                model = nnx.merge(graph, params)
                return model.loss(jnp.tanh(model.encode(dropping(ids))), ids).total

            return jax.value_and_grad(loss)(params)

        total, gradients = run(params, ids)
    is_kept_V = np.asarray(keep_types(KEY, np.arange(V, dtype=np.int32)[None], 1 - p))[0]
    factor_BT1 = (is_kept_V / (1 - p) * math.sqrt(D))[IDS_BT][..., None]
    rows_VD = host(vocab.input.table[...])
    h_BTD = np.tanh(rows_VD[IDS_BT] * factor_BT1)
    expected = oracles.cross_entropy(h_BTD, rows_VD, IDS_BT, vocab.sizes.allowed_V)
    dx_BTD = expected.dh_BTD * (1 - h_BTD**2) * factor_BT1
    from_input = oracles.scatter_add(rows_VD.shape, IDS_BT, dx_BTD)
    np.testing.assert_allclose(total, expected.total, rtol=1e-5)
    np.testing.assert_allclose(
        nnx.to_pure_dict(gradients)["input"]["table"],
        expected.dtable_VD + gradient * from_input,
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_scaled_gradient_leaves_every_bit_of_the_forward() -> None:
    plain, scaled = build(FullTable()), build(FullTable(gradient=0.3))
    np.testing.assert_array_equal(plain.encode(IDS_BT), scaled.encode(IDS_BT))


def test_dropout_takes_whole_types_keeps_the_mean_and_never_drops_in_evaluation() -> None:
    size, p = 40_000, 0.3
    ids_BT = np.arange(size, dtype=np.int32).reshape(4, -1)
    ids_BT = np.concatenate([ids_BT, ids_BT[::-1]], 1)  # every id twice, in another row
    config = VocabConfig(size=size, width=2, input=FullTable(dropout=p))
    vocab = Vocab(config, rngs=nnx.Rngs(0))
    vocab.input.table[...] = jnp.ones_like(vocab.input.table[...])
    np.testing.assert_array_equal(vocab.encode(ids_BT), 1)
    x_BTD = np.asarray(vocab.encode(dropping(ids_BT)))
    by_id = x_BTD.reshape(-1, 2)[np.argsort(ids_BT, axis=None)].reshape(size, -1)
    assert (by_id == by_id[:, :1]).all()
    np.testing.assert_allclose(np.unique(by_id), [0, 1 / (1 - p)], rtol=1e-6)
    # The standard error of the mean of a row's factor is √(p / (1−p) / size).
    assert abs(by_id.mean() - 1) < 4 * math.sqrt(p / (1 - p) / size)
    other = np.asarray(vocab.encode(dropping(ids_BT, jax.random.fold_in(KEY, 1))))
    agree = ((other == 0) == (x_BTD == 0)).mean()
    assert abs(agree - (p**2 + (1 - p) ** 2)) < 0.02  # independent of the first


@pytest.mark.parametrize(
    ("name", "rows"),
    [("model=8 explicit", 1), ("data=2,model=4 explicit", 4), ("data=2,seq=2,model=2 auto", 4)],
)
def test_what_is_dropped_does_not_depend_on_the_mesh(name: str, rows: int) -> None:
    layout = layout_of(name)
    expected = np.asarray(keep_types(KEY, IDS_BT[:rows], 0.5))
    with jax.set_mesh(layout.mesh):
        ids = put(layout, IDS_BT[:rows], "batch", "seq")
        kept_BT = jax.jit(lambda ids, key: keep_types(key, ids, 0.5))(ids, KEY)
    assert kept_BT.sharding.is_equivalent_to(ids.sharding, 2)
    np.testing.assert_array_equal(kept_BT, expected)
    assert 0 < expected.mean() < 1


def test_a_step_drops_by_the_seed_and_its_number() -> None:
    """So a resumed run drops what it would have dropped; `tests/test_train.py` trains with dropout on every mesh."""
    config = VocabConfig(size=V, width=D, multiple=1, input=FullTable(dropout=0.5))
    blueprint = Blueprint(
        config,
        TrunkConfig(layers=1, heads=1, kv_heads=1, ffn=4),
        layout_of("data=1,model=1 explicit"),
    )
    host = {"ids": IDS_BT, "targets": IDS_BT, "segment": 0 * IDS_BT, "position": 0 * IDS_BT}
    with jax.set_mesh(blueprint.layout.mesh):
        batch = to_device(blueprint.layout, host, "batch", "seq")
        optimizer = make_optimizer(OptimConfig(warmup=0), blueprint.infos.values(), 20)
        state = init_state(optimizer, random_params(blueprint))._replace(step=jnp.int32(3))
        loss = quick_jit(
            lambda params, tokens: blueprint.bind(params).loss(tokens, batch["targets"]).total
        )
        keys = [jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 3) for seed in (5, 6)]
        expected, other = (loss(state.params, tokens_of(batch)._replace(key=key)) for key in keys)
        step = make_step(blueprint, optimizer, 5)
        _, metrics = step(state, {name: array[None] for name, array in batch.items()})
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-5)
    assert abs(other - expected) > 1e-3
