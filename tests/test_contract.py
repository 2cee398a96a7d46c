"""What every part promises. Parts are found by their place: none is listed here.

Each is tried beside one partner that the rules allow; `VOCABJAX_EVERY_PAIR=1 python -m pytest tests/test_contract.py` tries every
pair. Parts are built small by the names of their fields (`SMALL`): a new part needs nothing here unless it has a size of a new name.
"""

import functools
import math
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import buffers, collectives, compiled_text
from meshes import layout_of, put
from models import layout_on, quick_jit, random_params

from vocabjax.checkpoint import Checkpoints
from vocabjax.config import Config, from_json, kinds, to_json
from vocabjax.errors import UserError
from vocabjax.model import Blueprint, LanguageModel, Params
from vocabjax.optim import OptimConfig, make_optimizer
from vocabjax.state import State, abstract_state, init_state
from vocabjax.step import Metrics, make_step, to_device
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.interfaces import HeadConfig, InputConfig, Loss, MemoryConfig, Objective, Tokens
from vocabjax.vocab.lexicon import Lexicon

ONE, WIDE = "data=1,model=1", "data=2,model=4"
OTHER_MESHES = ("data=1,model=8", "data=8,model=1")
BY_POSITION = "data=2,seq=2,model=2"
V, D, B, T = 37, 16, 16, 8
BANNED = 3
# Not sorted by id; every third id spells what the one before it does.
LEXICON = Lexicon(
    np.random.default_rng(0).integers(1, 1000, V), [f"Word{v - (v % 3 == 2)}" for v in range(V)]
)
TRUNK = TrunkConfig(layers=2, heads=8, kv_heads=8, ffn=16)
SMALL = {
    "factor": 6,
    "rank": 6,
    "width": 6,
    "bias": True,
    "order": 2,
    "buckets": 11,
    "channels": 5,
    "heads": 2,
    "cutoffs": (9, 26),
    "components": 3,
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
    blueprint = Blueprint(
        config_of(parts, dtype=dtype),
        TRUNK,
        layout_on(mesh, "seq=seq" if "seq" in mesh else "default"),
        LEXICON,
    )
    return blueprint, random_params(blueprint)


def hidden(model: LanguageModel, tokens: Tokens) -> jax.Array:
    """What the head is given. Through the trunk where a part acts inside it; else straight from the input, since the trunk has
    tests of its own and would be most of what is compiled here."""
    if model.vocab.memories:
        return model.hidden(tokens)[0]
    return model.vocab.embed(model.vocab.gather(tokens), tokens)


class Found(NamedTuple):
    """What one program computes: the scores, then loss and gradients, ours and through the whole distribution."""

    z_BTV: np.ndarray
    loss: Loss
    gradient: Params
    expected: jax.Array
    expected_gradient: Params


@functools.cache
def program(parts: Parts) -> Callable[[dict[str, np.ndarray]], Found]:
    """One compilation for several tests; takes a batch on the host."""
    blueprint, params = model_on(ONE, parts)

    def loss_of(params: Params, tokens: Tokens, batch: Any) -> tuple[jax.Array, Loss]:
        model = blueprint.bind(params)
        loss = model.vocab.loss(
            hidden(model, tokens), batch["targets"], batch["weights"], tokens=tokens
        )
        return loss.total, loss

    def whole(params: Params, tokens: Tokens, batch: Any) -> tuple[jax.Array, jax.Array]:
        model = blueprint.bind(params)
        z_BTV = model.vocab.logits(hidden(model, tokens))
        log_p_BTV = jax.nn.log_softmax(z_BTV)
        is_target_BTV = batch["targets"][..., None] == jnp.arange(z_BTV.shape[-1])
        log_p_BT = jnp.where(is_target_BTV, log_p_BTV, 0).sum(-1)
        weight_BT = jnp.where(batch["targets"] >= 0, batch["weights"], 0)
        return -(weight_BT * log_p_BT).sum() / jnp.maximum(weight_BT.sum(), 1e-9), z_BTV

    @quick_jit
    def run(params: Params, tokens: Tokens, batch: Any) -> Any:
        (_, loss), gradient = jax.value_and_grad(loss_of, has_aux=True)(params, tokens, batch)
        (expected, z_BTV), theirs = jax.value_and_grad(whole, has_aux=True)(params, tokens, batch)
        return z_BTV, loss, gradient, expected, theirs

    def on_host(batch: dict[str, np.ndarray]) -> Found:
        with jax.set_mesh(blueprint.layout.mesh):
            return Found(*jax.tree.map(np.asarray, run(params, tokens_on(blueprint, batch), batch)))

    return on_host


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
        "weights": rng.uniform(0.5, 2, (B, T)).astype(np.float32),
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


def test_every_part_is_in_a_pair_that_the_rules_allow() -> None:
    assert {parts.input.kind for parts in CHOICES} == set(INPUTS)
    assert {parts.head.kind for parts in CHOICES} == set(HEADS)


@every_choice
def test_settings_go_to_a_file_and_come_back(parts: Parts) -> None:
    config = Config(vocab=config_of(parts))
    assert from_json(to_json(config)) == config


@every_choice
def test_scores_are_a_distribution_and_the_loss_is_its_logarithm(parts: Parts) -> None:
    """Value and gradients against automatic differentiation through the scores; weights, −100, pads and banned ids."""
    found = program(parts)(host_batch())
    np.testing.assert_allclose(found.loss.total, found.expected, rtol=1e-5)
    assert_same(found.gradient, found.expected_gradient)

    z_BTV = found.z_BTV
    assert z_BTV.dtype == np.float32
    p_BTV = np.exp(z_BTV - z_BTV.max(-1, keepdims=True), dtype=np.float64)
    is_allowed_V = (np.arange(z_BTV.shape[-1]) < V) & (np.arange(z_BTV.shape[-1]) != BANNED)
    assert (p_BTV[..., ~is_allowed_V] == 0).all()
    assert (p_BTV[..., is_allowed_V] > 0).all()


@every_choice
def test_labels_that_are_all_ignored_cost_nothing_and_move_nothing(parts: Parts) -> None:
    host = host_batch()
    host["targets"][:] = -100
    host["targets"][0, 0] = BANNED
    host["weights"][0, 1] = np.nan
    loss, gradient = program(parts)(host)[1:3]
    assert (loss.total, loss.nll, loss.weight, loss.tokens, loss.invalid) == (0, 0, 0, 0, 1)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


@every_choice
def test_a_token_reaches_no_score_before_it_and_none_of_another_document(parts: Parts) -> None:
    host = host_batch()
    before = program(parts)(host).z_BTV
    changed = {**host, "ids": host["ids"].copy()}
    at = T // 2 - 2  # in the first document of each row
    changed["ids"][:, at] = (host["ids"][:, at] + 1) % V
    after = program(parts)(changed).z_BTV
    np.testing.assert_array_equal(before[:, :at], after[:, :at])
    np.testing.assert_array_equal(before[:, T // 2 :], after[:, T // 2 :])
    assert (before[:, at] != after[:, at]).any(-1).all()


class Trained(NamedTuple):
    """Ten steps on one batch in two microbatches."""

    blueprint: Blueprint
    optimizer: optax.GradientTransformation
    first: Metrics
    params: Params  # after the first step, on the host
    last: Metrics
    state: State


def trained(mesh: str, parts: Parts) -> Trained:
    blueprint, params = model_on(mesh, parts)
    optimizer = make_optimizer(OptimConfig(lr=1e-2, warmup=0), blueprint.infos.values(), 20)
    host = host_batch()
    del host["weights"]
    batch = {name: x.reshape(2, B // 2, T) for name, x in host.items()}
    with jax.set_mesh(blueprint.layout.mesh):
        arrays = to_device(blueprint.layout, batch, None, "batch", "seq")
        state = init_state(optimizer, jax.tree.map(jnp.copy, params))
        step = make_step(blueprint, optimizer)
        state, first = step(state, arrays)
        after_one = jax.tree.map(np.asarray, state.params)
        for _ in range(9):
            state, metrics = step(state, arrays)
    return Trained(blueprint, optimizer, first, after_one, metrics, state)


@functools.cache
def trained_on_one(parts: Parts) -> Trained:
    return trained(ONE, parts)


# One part of each way that tables are cut: by id, by band, by bucket, by hashed n-gram, with all layers in a row.
PATTERNS = (
    "full-tied",
    "adaptive-tied_adaptive",
    "hash-tied",
    "over_encoding-tied",
    "full-tied-ple",
)


# Parts that read ids at other positions, where positions are cut too.
LOOK_AROUND = ("over_encoding-tied", "full-tied-engram")


@pytest.mark.parametrize(
    ("parts", "mesh"),
    [
        *((parts, WIDE) for parts in CHOICES),
        *((p, mesh) for p in CHOICES if str(p) in PATTERNS for mesh in OTHER_MESHES),
        *((p, BY_POSITION) for p in CHOICES if str(p) in LOOK_AROUND),
    ],
    ids=str,
)
def test_sharded_steps_equal_unsharded_ones_lower_the_loss_and_are_restored_elsewhere(
    parts: Parts, mesh: str, tmp_path: Path
) -> None:
    """Loss, gradient norm, every parameter after the first step; then the whole state, from a checkpoint on one device."""
    one, wide = trained_on_one(parts), trained(mesh, parts)
    np.testing.assert_allclose(wide.first.loss, one.first.loss, rtol=1e-5)
    np.testing.assert_allclose(wide.first.gradient_norm, one.first.gradient_norm, rtol=1e-3)
    np.testing.assert_allclose(wide.last.loss, one.last.loss, rtol=1e-2)
    assert one.last.nll < one.first.nll
    assert one.first.invalid == 0
    assert_same(wide.params, one.params, atol=2e-3)

    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(10, wide.state, None, logical=wide.blueprint.logical_shapes())
        with jax.set_mesh(one.blueprint.layout.mesh):
            restored = checkpoints.restore(
                abstract_state(one.blueprint, one.optimizer),
                None,
                logical=one.blueprint.logical_shapes(),
            )
    assert_same(restored, wide.state, atol=0)


@every_choice
def test_bfloat16_gives_finite_gradients_of_float32(parts: Parts) -> None:
    blueprint, params = model_on(ONE, parts, "bfloat16")
    host = host_batch()
    tokens = tokens_on(blueprint, host)

    def loss(params: Params) -> jax.Array:
        model = blueprint.bind(params)
        return model.vocab.loss(hidden(model, tokens), jnp.asarray(host["targets"])).total

    gradient = quick_jit(jax.grad(loss))(params)
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
    with jax.set_mesh(blueprint.layout.mesh):
        whole = quick_jit(lambda p, tokens: blueprint.bind(p).logits(tokens)[0])
        full = np.asarray(whole(params, tokens_on(blueprint, one_document)))
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
        Lexicon.stand_in(),
    )
    rows = blueprint.sizes.padded // layout.shards("vocab")
    ids = put(layout, np.zeros((B, length), np.int32), "batch", "seq")

    def loss(params: Params, tokens: Tokens) -> jax.Array:
        model = blueprint.bind(params)
        return model.vocab.loss(hidden(model, tokens), tokens.ids_BT, tokens=tokens).total

    with jax.set_mesh(layout.mesh):
        text = compiled_text(
            jax.jit(jax.value_and_grad(loss)), blueprint.abstract(), Tokens.of(ids)
        )
    tokens = B * length // layout.shards("batch")
    assert [s for s in buffers(text) if math.prod(s) >= tokens * rows] == []
    of_tables = {info.shape[0] for info in blueprint.infos.values() if info.axes[0] == "vocab"}
    gathered = [s for kind, s in collectives(text) if kind == "all-gather" and of_tables & set(s)]
    assert gathered == []


def assert_same(ours: Any, theirs: Any, atol: float = 2e-5) -> None:
    """Two trees of parameters or gradients, which may be padded differently, leaf by leaf, relative to the largest of each."""
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
