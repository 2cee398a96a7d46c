"""What every part promises. Parts are found by their place: none is listed here.

Each is tried beside one partner that the rules allow; `VOCABJAX_EVERY_PAIR=1 python -m pytest tests/test_contract.py` tries every
pair. Parts are built small by the names of their fields (`SMALL`): a new part needs nothing here unless it has a size of a new name.
"""

import functools
import math
import os
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import buffers, collectives, compiled_text
from meshes import layout_of, put
from models import layout_on, quick_jit, random_params

from vocabjax.config import Config, from_json, kinds, to_json
from vocabjax.errors import UserError
from vocabjax.model import Blueprint, Params
from vocabjax.optim import OptimConfig, make_optimizer
from vocabjax.step import init_state, make_step, to_device
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.interfaces import HeadConfig, InputConfig, MemoryConfig, Objective, Tokens
from vocabjax.vocab.lexicon import Lexicon

ONE, WIDE = "data=1,model=1", "data=2,model=4"
V, D, B, T = 37, 16, 4, 8
BANNED = 3
# Not sorted by id; every third id spells what the one before it does.
LEXICON = Lexicon(
    np.random.default_rng(0).integers(1, 1000, V), [f"Word{v - (v % 3 == 2)}" for v in range(V)]
)
TRUNK = TrunkConfig(layers=2, heads=4, kv_heads=4, ffn=16)
SMALL = {
    "factor": 6,
    "rank": 6,
    "width": 6,
    "bias": True,
    "order": 2,
    "buckets": 11,
    "channels": 5,
    "cutoffs": (9, 26),
}


class Parts(NamedTuple):
    input: InputConfig
    head: HeadConfig
    memories: tuple[MemoryConfig, ...] = ()

    def __str__(self) -> str:
        return "-".join(part.kind for part in (self.input, self.head, *self.memories))


def small(cls: type[Any]) -> Any:
    return cls(**{f.name: SMALL[f.name] for f in fields(cls) if f.name in SMALL})


def config_of(parts: Parts, **changes: Any) -> VocabConfig:
    settings = {
        "size": V,
        "width": D,
        "multiple": 1,
        "banned": (BANNED,),
        "objective": Objective(chunk=8),
    }
    return VocabConfig(**parts._asdict(), **{**settings, **changes})


def is_allowed(parts: Parts) -> bool:
    try:
        Blueprint(config_of(parts), TRUNK, layout_on(ONE), LEXICON)
    except UserError:
        return False
    return True


def of_the_library(base: type[Any]) -> dict[str, Any]:
    """Kind → class of the library's own parts: other tests bring toys along."""
    return {k: cls for k, cls in kinds(base).items() if cls.__module__.startswith("vocabjax.")}


# Once, before any test runs: one of the documents' tests adds a part.
INPUTS, HEADS, MEMORIES = map(of_the_library, (InputConfig, HeadConfig, MemoryConfig))


def choices() -> list[Parts]:
    """Every part with the first partner of the other kind that the rules allow, tied and full first; or every pair."""
    inputs = [small(cls) for cls in INPUTS.values()]
    heads = [small(cls) for cls in HEADS.values()]
    inputs.sort(key=lambda part: part.kind != "full")
    heads.sort(key=lambda part: part.kind != "tied")
    pairs = [p for p in (Parts(i, h) for i in inputs for h in heads) if is_allowed(p)]
    if not os.environ.get("VOCABJAX_EVERY_PAIR"):
        of_input = {p.input.kind: p for p in reversed(pairs)}
        of_head = {p.head.kind: p for p in reversed(pairs)}
        pairs = [p for p in pairs if p in of_input.values() or p in of_head.values()]
    memories = [small(cls) for cls in MEMORIES.values()]
    return pairs + [Parts(inputs[0], heads[0], (memory,)) for memory in memories]


CHOICES = choices()
every_choice = pytest.mark.parametrize("parts", CHOICES, ids=str)


@functools.cache
def model_on(mesh: str, parts: Parts, dtype: Any = "float32") -> tuple[Blueprint, Params]:
    blueprint = Blueprint(config_of(parts, dtype=dtype), TRUNK, layout_on(mesh), LEXICON)
    return blueprint, random_params(blueprint)


def host_batch() -> dict[str, np.ndarray]:
    """[B, T]: two documents per row; labels of every kind."""
    rng = np.random.default_rng(0)
    targets_BT = rng.integers(0, V, (B, T))
    targets_BT[targets_BT == BANNED] = 0
    targets_BT[1, 2] = -100
    half = T // 2
    return {
        "ids": rng.integers(0, V, (B, T)).astype(np.int32),
        "targets": targets_BT.astype(np.int32),
        "segment": np.tile(np.arange(T) // half, (B, 1)).astype(np.int32),
        "position": np.tile(np.arange(T) % half, (B, 1)).astype(np.int32),
    }


def tokens_on(blueprint: Blueprint, host: dict[str, np.ndarray]) -> Tokens:
    return Tokens(
        *[
            put(blueprint.layout, host[name], "batch", "seq")
            for name in ("ids", "segment", "position")
        ]
    )


def scores(blueprint: Blueprint, params: Params, host: dict[str, np.ndarray]) -> np.ndarray:
    with jax.set_mesh(blueprint.layout.mesh):
        run = quick_jit(lambda p, tokens: blueprint.bind(p).logits(tokens)[0])
        return np.asarray(run(params, tokens_on(blueprint, host)))


def test_every_part_is_in_a_pair_that_the_rules_allow() -> None:
    assert {parts.input.kind for parts in CHOICES} == set(INPUTS)
    assert {parts.head.kind for parts in CHOICES} == set(HEADS)


@every_choice
def test_settings_go_to_a_file_and_come_back(parts: Parts) -> None:
    config = Config(vocab=config_of(parts))
    assert from_json(to_json(config)) == config


@every_choice
def test_scores_are_a_distribution_and_the_loss_is_its_logarithm(parts: Parts) -> None:
    """Value and gradients of the loss against automatic differentiation through the scores; −100, pads and banned ids."""
    blueprint, params = model_on(ONE, parts)
    host = host_batch()
    tokens = tokens_on(blueprint, host)
    is_label_BT = host["targets"] >= 0

    def whole(params: Params) -> jax.Array:
        z_BTV = blueprint.bind(params).logits(tokens)[0]
        log_p_BTV = jax.nn.log_softmax(z_BTV)
        is_target_BTV = host["targets"][..., None] == np.arange(z_BTV.shape[-1])
        log_p_BT = jnp.where(is_target_BTV, log_p_BTV, 0).sum(-1)
        return -jnp.where(is_label_BT, log_p_BT, 0).sum() / is_label_BT.sum()

    def ours(params: Params) -> jax.Array:
        return blueprint.bind(params).loss(tokens, jnp.asarray(host["targets"])).total

    (expected, expected_gradient), (total, gradient) = (
        quick_jit(jax.value_and_grad(function))(params) for function in (whole, ours)
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert_same(gradient, expected_gradient, blueprint)

    z_BTV = scores(blueprint, params, host)
    assert z_BTV.dtype == np.float32
    p_BTV = np.exp(z_BTV - z_BTV.max(-1, keepdims=True), dtype=np.float64)
    is_allowed_V = (np.arange(z_BTV.shape[-1]) < V) & (np.arange(z_BTV.shape[-1]) != BANNED)
    assert (p_BTV[..., ~is_allowed_V] == 0).all()
    assert (p_BTV[..., is_allowed_V] > 0).all()


@every_choice
def test_a_token_reaches_no_score_before_it_and_none_of_another_document(parts: Parts) -> None:
    blueprint, params = model_on(ONE, parts)
    host = host_batch()
    before = scores(blueprint, params, host)
    changed = {**host, "ids": host["ids"].copy()}
    at = T // 2 - 2  # in the first document of each row
    changed["ids"][:, at] = (host["ids"][:, at] + 1) % V
    after = scores(blueprint, params, changed)
    np.testing.assert_array_equal(before[:, :at], after[:, :at])
    np.testing.assert_array_equal(before[:, T // 2 :], after[:, T // 2 :])
    seen = before[:, at : T // 2] != after[:, at : T // 2]
    assert seen.any(-1).all()


@every_choice
def test_sharded_steps_equal_unsharded_ones_and_lower_the_loss(parts: Parts) -> None:
    """Ten steps on one batch in two microbatches: loss, gradient norm, and every parameter after the first step."""
    runs = []
    for mesh in (ONE, WIDE):
        blueprint, params = model_on(mesh, parts)
        optimizer = make_optimizer(OptimConfig(lr=1e-2, warmup=0), blueprint.infos.values(), 20)
        host = {name: x.reshape(2, B // 2, T) for name, x in host_batch().items()}
        with jax.set_mesh(blueprint.layout.mesh):
            batch = to_device(blueprint.layout, host, None, "batch", "seq")
            state = init_state(optimizer, jax.tree.map(jnp.copy, params))
            step = make_step(blueprint, optimizer)
            state, first = step(state, batch)
            params = jax.tree.map(np.asarray, state.params)
            for _ in range(9):
                state, metrics = step(state, batch)
        runs.append((first, metrics, params, blueprint))
    (first, last, params, _), (wide_first, wide_last, wide_params, wide) = runs
    np.testing.assert_allclose(wide_first.loss, first.loss, rtol=1e-5)
    np.testing.assert_allclose(wide_first.gradient_norm, first.gradient_norm, rtol=1e-3)
    np.testing.assert_allclose(wide_last.loss, last.loss, rtol=1e-2)
    assert last.nll < first.nll
    assert first.invalid == 0
    assert_same(wide_params, params, wide, atol=2e-3)


@every_choice
def test_bfloat16_gives_finite_gradients_of_float32(parts: Parts) -> None:
    blueprint, params = model_on(ONE, parts, "bfloat16")
    host = host_batch()
    tokens = tokens_on(blueprint, host)
    gradient = quick_jit(
        jax.grad(lambda p: blueprint.bind(p).loss(tokens, jnp.asarray(host["targets"])).total)
    )(params)
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jnp.float32
        assert np.isfinite(leaf).all()


def history(parts: Parts) -> int:
    blueprint = Blueprint(config_of(parts), TRUNK, layout_on(ONE), LEXICON)
    return blueprint.bind(blueprint.abstract()).vocab.history


# Other parts act on each position alone: decoding is then the trunk's business.
@pytest.mark.parametrize(
    "parts",
    [parts for parts in CHOICES if parts.memories or history(parts)],
    ids=str,
)
def test_decoding_one_token_at_a_time_equals_the_full_pass(parts: Parts) -> None:
    blueprint, params = model_on(ONE, parts)
    ids_BT = host_batch()["ids"]
    one_document = {
        "ids": ids_BT, "segment": np.zeros_like(ids_BT), "position": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
    }  # fmt: skip
    full = scores(blueprint, params, one_document)
    history = blueprint.bind(params).vocab.history
    padded = np.pad(ids_BT, ((0, 0), (history, 0)), constant_values=-1)
    with jax.set_mesh(blueprint.layout.mesh):
        cache = blueprint.bind(params).init_cache(B, T)
        run = quick_jit(lambda p, tokens, cache: blueprint.bind(p).logits(tokens, cache))
        pieces = []
        for t in range(T):
            part = tokens_on(blueprint, {name: x[:, t : t + 1] for name, x in one_document.items()})
            past_BH = put(blueprint.layout, padded[:, t : t + history], "batch", None)
            z_BTV, cache = run(params, part._replace(past_BH=past_BH), cache)
            pieces.append(np.asarray(z_BTV))
    np.testing.assert_allclose(np.concatenate(pieces, 1), full, atol=3e-5)


@every_choice
@pytest.mark.parametrize("mesh", ["data=2,model=4 explicit"])
def test_the_compiled_loss_holds_no_scores_and_gathers_no_table(parts: Parts, mesh: str) -> None:
    """Sizes are such that nothing legitimate is as large as what is forbidden."""
    layout = layout_of(mesh)
    size, length, chunk = 2081, 48, 32
    blueprint = Blueprint(
        config_of(parts, size=size, objective=Objective(chunk=chunk)),
        TRUNK,
        layout,
        Lexicon.stand_in(size),
    )
    rows = blueprint.sizes.padded // layout.shards("vocab")
    ids = put(layout, np.zeros((B, length), np.int32), "batch", "seq")

    def loss(params: Params, tokens: Tokens) -> jax.Array:
        return blueprint.bind(params).loss(tokens, tokens.ids_BT).total

    with jax.set_mesh(layout.mesh):
        text = compiled_text(
            jax.jit(jax.value_and_grad(loss)), blueprint.abstract(), Tokens.of(ids)
        )
    tokens = B * length // layout.shards("batch")
    assert [s for s in buffers(text) if math.prod(s) >= tokens * rows] == []
    of_tables = {info.shape[0] for info in blueprint.infos.values() if info.axes[0] == "vocab"}
    gathered = [s for kind, s in collectives(text) if kind == "all-gather" and of_tables & set(s)]
    assert gathered == []


def assert_same(ours: Params, theirs: Params, blueprint: Blueprint, atol: float = 2e-5) -> None:
    """Logical entries of two trees of parameters or gradients, leaf by leaf, relative to the largest of each."""
    for (path, one), two in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        logical = tuple(map(slice, np.minimum(one.shape, two.shape)))
        scale = max(np.abs(two).max(), 1e-3)
        np.testing.assert_allclose(
            np.asarray(one)[logical] / scale,
            np.asarray(two)[logical] / scale,
            atol=atol,
            err_msg=jax.tree_util.keystr(path),
        )
