"""The encoder-decoder: against a NumPy one that takes a document at a time, who sees whom, the three tyings, meshes, whole runs."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import buffers, collectives, compiled_text
from meshes import put
from models import layout_on, quick_jit, random_params
from small_runs import stop_after, trained
from test_trunk import rms_norm_oracle, rope_oracle, tokens_on

from vocabjax.cli import main
from vocabjax.config import Config, TrainConfig, differences, from_json, to_json
from vocabjax.data import DataConfig
from vocabjax.encoder_decoder import EncoderDecoderConfig
from vocabjax.errors import UserError
from vocabjax.find import load_config
from vocabjax.model import Blueprint, Params
from vocabjax.optim import GroupConfig, OptimConfig, make_optimizer
from vocabjax.paths import by_path
from vocabjax.state import init_state
from vocabjax.step import make_step, to_device
from vocabjax.train import Interrupted, train
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.interfaces import Objective, Tokens
from vocabjax.vocab.memories.tide import Tide

ONE = "data=1,model=1"
V, D, T, END = 30, 16, 12, 5  # END ends a source
TRUNK = EncoderDecoderConfig(
    layers=2, heads=8, kv_heads=4, head_dim=4, ffn=24, rope_theta=50.0, separator=END
)
TYINGS: dict[str, tuple[Any, Any]] = {
    "none": (UntiedHead(), "own"),
    "target": (TiedHead(), "own"),
    "three_way": (TiedHead(), "shared"),
}
every_tying = pytest.mark.parametrize("tying", TYINGS)


def vocab_of(tying: str, **settings: Any) -> VocabConfig:
    head = TYINGS[tying][0]
    defaults = {"size": V, "width": D, "multiple": 4, "objective": Objective(chunk=8)}
    return VocabConfig(head=head, **{**defaults, **settings})


def blueprint_on(mesh: str, tying: str, rules: str = "default", **trunk: Any) -> Blueprint:
    config = replace(TRUNK, source_table=TYINGS[tying][1], **trunk)
    return Blueprint(vocab_of(tying), config, layout_on(mesh, rules))


def packed(rows: int = 2) -> dict[str, np.ndarray]:
    """Two documents per row, cut at 5 or at 8; sources of 2 to 4 tokens; a separator inside a target too; labels −100 before."""
    rng = np.random.default_rng(0)
    ids_BT = rng.integers(END + 1, V, (rows, T)).astype(np.int32)
    segment_BT = np.stack([np.arange(T) >= (5, 8)[row % 2] for row in range(rows)]).astype(np.int32)
    position_BT = np.where(
        segment_BT, np.arange(T) - (T - segment_BT.sum(1))[:, None], np.arange(T)
    )
    ends_BT = position_BT == 2 + segment_BT
    ids_BT[ends_BT] = END
    ids_BT[:, 4], ids_BT[:, -2] = END, END  # the second one of its document
    targets_BT = rng.integers(0, V, (rows, T)).astype(np.int32)
    targets_BT[position_BT < 2 + segment_BT] = -100
    return {
        "ids": ids_BT,
        "targets": targets_BT,
        "segment": segment_BT,
        "position": position_BT.astype(np.int32),
    }


def tokens_of(blueprint: Blueprint, host: dict[str, np.ndarray]) -> Tokens:
    return tokens_on(blueprint.layout, host["segment"], host["ids"])


def loss_of(blueprint: Blueprint) -> Callable[[Params, dict[str, np.ndarray]], Any]:
    """(parameters, host batch) → loss and gradient."""
    run = quick_jit(
        jax.value_and_grad(lambda p, tokens, targets: blueprint.bind(p).loss(tokens, targets).total)
    )

    def on_mesh(params: Params, host: dict[str, np.ndarray]) -> Any:
        targets_BT = put(blueprint.layout, host["targets"], "batch", "seq")
        with jax.set_mesh(blueprint.layout.mesh):
            return run(params, tokens_of(blueprint, host), targets_BT)

    return on_mesh


# --- values ------------------------------------------------------------------------------------------------------------


def attend_oracle(p: Any, h_TD: Any, m_SD: Any, where: Any, seen_TS: np.ndarray) -> np.ndarray:
    """Attention of one document from h to m; `where`: the positions of both, for rotary ones."""
    q, k, v = (
        np.einsum("td,dnk->tnk", x, p[name]) for x, name in ((h_TD, "q"), (m_SD, "k"), (m_SD, "v"))
    )
    if "q_norm" in p:
        q, k = rms_norm_oracle(q, p["q_norm"]), rms_norm_oracle(k, p["k_norm"])
    if where is not None:
        q, k = (rope_oracle(a[None], where[None], TRUNK.rope_theta)[0] for a in (q, k))
    k, v = (np.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("tnk,snk->nts", q, k) / np.sqrt(q.shape[-1])
    weight = np.where(seen_TS, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("nts,snk,nkd->td", weight, v, p["o"])


def feed_forward_oracle(p: Any, x_TD: np.ndarray) -> np.ndarray:
    h = rms_norm_oracle(x_TD, p["ffn_norm"])
    gate = h @ p["gate"]
    return x_TD + (gate / (1 + np.exp(-gate)) * (h @ p["up"])) @ p["down"]


def document_oracle(params: Params, ids_T: np.ndarray) -> np.ndarray:
    """Scores [targets, V] of one document alone: its source through the encoder, its target through the decoder."""
    wide: Any = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    trunk, tables = wide["trunk"], {name: wide["vocab"][name]["table"] for name in wide["vocab"]}
    cut = int(np.flatnonzero(ids_T == END)[0])
    position_T = np.arange(len(ids_T))
    m = tables.get("source", tables["input"])[ids_T[:cut]]
    x = tables["input"][ids_T[cut:]]
    both_ways, backwards = np.ones((cut, cut), bool), np.tri(len(x), dtype=bool)
    for index in range(TRUNK.layers):
        p = {name: value[index] for name, value in trunk["encoder"].items()}
        h = rms_norm_oracle(m, p["attn_norm"])
        m = m + attend_oracle(p, h, h, position_T[:cut], both_ways)
        m = feed_forward_oracle(p, m)
    m = rms_norm_oracle(m, trunk["encoder_norm"]["scale"])
    for index in range(TRUNK.layers):
        p, cross = ({n: v[index] for n, v in trunk[name].items()} for name in ("layers", "cross"))
        h = rms_norm_oracle(x, p["attn_norm"])
        x = x + attend_oracle(p, h, h, position_T[cut:], backwards)
        h = rms_norm_oracle(x, cross["attn_norm"])
        x = x + attend_oracle(cross, h, m, None, np.ones((len(x), cut), bool))
        x = feed_forward_oracle(p, x)
    h = rms_norm_oracle(x, trunk["final_norm"]["scale"])
    return np.asarray(h @ tables.get("head", tables["input"])[:V].T)


@pytest.mark.parametrize(
    ("tying", "qk_norm"), [("none", True), ("target", False), ("three_way", False)]
)
def test_packed_windows_give_the_scores_of_each_document_alone(tying: str, qk_norm: bool) -> None:
    blueprint = blueprint_on(ONE, tying, qk_norm=qk_norm)
    params, host = random_params(blueprint), packed()
    tokens = tokens_of(blueprint, host)
    z_BTV = quick_jit(lambda p: blueprint.bind(p).logits(tokens)[0])(params)
    for row, document in np.ndindex(2, 2):
        is_ours_T = host["segment"][row] == document
        expected = document_oracle(params, host["ids"][row, is_ours_T])
        ours = np.asarray(z_BTV)[row, is_ours_T][-len(expected) :, :V]
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_what_the_backward_recomputes_changes_nothing() -> None:
    kept, dots, full = (
        loss_of(blueprint)(random_params(blueprint), packed())
        for blueprint in (
            blueprint_on(ONE, "none", remat=what) for what in ("none", "dots", "full")
        )
    )
    for total, gradient in (dots, full):
        np.testing.assert_allclose(total, kept[0], rtol=1e-6)
        assert_close(gradient, kept[1])


# --- who sees whom -----------------------------------------------------------------------------------------------------


def test_a_score_depends_on_its_documents_source_and_on_earlier_targets_alone() -> None:
    """∂ score[t] / ∂ x[s], exactly 0 elsewhere. Sources too see both ways, but nobody is told of what they score."""
    blueprint = blueprint_on("model=1", "three_way")
    params, host = random_params(blueprint), packed()
    direction = jnp.asarray(np.random.default_rng(1).normal(size=D), jnp.float32)

    def readout(x_TD: jax.Array, tokens: Tokens) -> jax.Array:
        return (blueprint.bind(params).trunk(x_TD[None], tokens)[0] @ direction)[0]

    jacobian = quick_jit(jax.jacrev(readout))
    x_TD = jnp.asarray(np.random.default_rng(2).normal(size=(T, D)), jnp.float32)
    for row in range(2):
        one = {name: x[row : row + 1] for name, x in host.items()}
        with jax.set_mesh(blueprint.layout.mesh):
            gradient = jacobian(x_TD, tokens_of(blueprint, one))
        norms_TT = np.linalg.norm(np.asarray(gradient, np.float64), axis=-1)
        segment_T = one["segment"][0]
        is_target_T = one["position"][0] >= 2 + segment_T
        for t, s in np.ndindex(T, T):
            if not is_target_T[t]:
                continue
            is_seen = segment_T[s] == segment_T[t] and (not is_target_T[s] or s <= t)
            assert (norms_TT[t, s] > 1e-5) if is_seen else (norms_TT[t, s] == 0), (row, t, s)


def test_a_document_without_its_source_reaches_nothing_else_and_is_finite() -> None:
    """A window that begins at a separator, and one without any."""
    blueprint = blueprint_on(ONE, "none")
    host = packed()
    host["ids"][0, :5] = [END, 9, 9, 9, 9]
    host["ids"][1, :8] = 9
    host["targets"][:, :8] = -100
    params, run = random_params(blueprint), loss_of(blueprint)
    total, gradient = run(params, host)
    changed = {**host, "ids": np.where(host["ids"] == 9, 11, host["ids"])}
    assert np.isfinite(total)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert run(params, changed)[0] == total


# --- tying -------------------------------------------------------------------------------------------------------------


@every_tying
def test_parameters_are_those_of_the_formula(tying: str) -> None:
    blueprint = blueprint_on("data=2,model=4", tying)
    L, N, G, K, F = 2, 8, 4, 4, 24
    attention, feed_forward = D * K * (2 * N + 2 * G) + D, 3 * D * F + D
    tables = {"none": 3, "target": 2, "three_way": 1}[tying]
    assert blueprint.count("vocab/") == tables * V * D
    assert blueprint.count("trunk/") == L * (3 * attention + 2 * feed_forward) + 2 * D
    assert blueprint.count() == sum(
        math.prod(shape) for shape in blueprint.logical_shapes().values()
    )
    assert {p for p in blueprint.infos if p.startswith("vocab")} == {
        "none": {"vocab/source/table", "vocab/input/table", "vocab/head/table"},
        "target": {"vocab/source/table", "vocab/input/table"},
        "three_way": {"vocab/input/table"},
    }[tying]
    roles = {i.path.split("/")[1]: i.role for i in blueprint.infos.values() if "vocab" in i.path}
    assert roles["input"] == ("embed" if tying == "none" else "tied")
    assert roles.get("source", "embed") == "embed"
    for info in blueprint.infos.values():
        if info.path.startswith("vocab"):
            assert blueprint.layout.sharding(*info.axes).spec[0] == "model"


def test_the_gradient_of_a_tied_table_is_the_sum_of_those_of_the_tables_it_stands_for() -> None:
    """With equal values, tied models are the untied one: source and target scatter what they read, the head adds (p − y)ᵀh."""
    host = packed()
    untied = blueprint_on(ONE, "none")
    params = random_params(untied)
    table = params["vocab"]["input"]["table"]
    params["vocab"] = {name: {"table": table} for name in ("source", "input", "head")}
    total, separate = loss_of(untied)(params, host)
    parts = {name: np.asarray(part["table"]) for name, part in separate["vocab"].items()}
    is_source_BT = (host["targets"] < 0) & (host["ids"] != END)
    read = {
        "source": np.unique(host["ids"][is_source_BT]),
        "input": np.unique(host["ids"][~is_source_BT]),
    }
    for name, ids in read.items():  # each path alone, in its own table
        assert np.flatnonzero(np.abs(parts[name]).sum(1)).tolist() == ids.tolist()
    for tying in ("target", "three_way"):
        tied = blueprint_on(ONE, tying)
        kept = ("source", "input") if tying == "target" else ("input",)
        ours, gradient = loss_of(tied)(
            {**params, "vocab": {name: params["vocab"][name] for name in kept}}, host
        )
        np.testing.assert_allclose(ours, total, rtol=1e-6)
        expected = {"input": parts["input"] + parts["head"], "source": parts["source"]}
        if tying == "three_way":
            expected = {"input": sum(parts.values())}
        assert_close(
            gradient, {**separate, "vocab": {name: {"table": g} for name, g in expected.items()}}
        )


def test_all_tyings_start_from_the_same_values() -> None:
    starts = [by_path(blueprint_on(ONE, tying).init(3)) for tying in TYINGS]
    for other in starts[1:]:
        assert other.keys() < starts[0].keys()
        for path, value in other.items():
            np.testing.assert_array_equal(value, starts[0][path])


# --- meshes ------------------------------------------------------------------------------------------------------------


@functools.cache
def stepped(mesh: str, rules: str, accumulate: int) -> tuple[Any, Params]:
    """One step of plain descent on a fixed batch: metrics, and the parameters without their padding."""
    blueprint = blueprint_on(mesh, "none", rules)
    roles = {info.role for info in blueprint.infos.values()}
    groups = dict.fromkeys(roles, GroupConfig(optimizer="sgd"))
    config = OptimConfig(lr=1.0, warmup=0, clip=None, weight_decay=0.0, **groups)
    optimizer = make_optimizer(config, blueprint.infos.values(), 10)
    host = {n: x.reshape(accumulate, -1, T) for n, x in packed(rows=8).items()}
    with jax.set_mesh(blueprint.layout.mesh):
        batch = to_device(blueprint.layout, host, None, "batch", "seq")
        state = init_state(optimizer, random_params(blueprint))
        state, metrics = make_step(blueprint, optimizer)(state, batch)
    logical = blueprint.logical_shapes()
    params = {p: np.asarray(x)[: logical[p][0]] for p, x in by_path(state.params).items()}
    return jax.tree.map(float, metrics), params


@pytest.mark.parametrize(
    ("mesh", "rules", "accumulate"),
    [
        ("data=1,model=8", "default", 1),
        ("data=2,model=4", "default", 2),
        ("data=8,model=1", "fsdp", 1),
        ("data=2,seq=2,model=2", "vocab=model+data,seq=seq", 1),
    ],
)
def test_sharded_steps_equal_unsharded_ones(mesh: str, rules: str, accumulate: int) -> None:
    expected, expected_params = stepped(ONE, "default", 1)
    metrics, params = stepped(mesh, rules, accumulate)
    assert metrics._asdict() == pytest.approx(expected._asdict(), rel=1e-4)
    assert_close(params, expected_params)


@pytest.mark.parametrize("tying", ["none", "three_way"])
def test_the_compiled_loss_holds_no_scores_and_gathers_no_table(tying: str) -> None:
    """Sizes are such that nothing legitimate is as large as what is forbidden."""
    layout, rows_B, length = layout_on("data=2,model=4"), 4, 48
    vocab = vocab_of(tying, size=2081, objective=Objective(chunk=32))
    blueprint = Blueprint(vocab, replace(TRUNK, source_table=TYINGS[tying][1]), layout)
    ids = put(layout, np.full((rows_B, length), END, np.int32), "batch", "seq")

    def loss(params: Params, tokens: Tokens) -> jax.Array:
        return blueprint.bind(params).loss(tokens, tokens.ids_BT).total

    with jax.set_mesh(layout.mesh):
        text = compiled_text(
            jax.jit(jax.value_and_grad(loss)), blueprint.abstract(), Tokens.of(ids)
        )
    tokens, rows = rows_B * length // 2, blueprint.sizes.padded // 4
    assert [s for s in buffers(text) if math.prod(s) >= tokens * rows] == []
    padded = blueprint.sizes.padded
    assert [s for kind, s in collectives(text) if kind == "all-gather" and padded in s] == []


# --- settings ----------------------------------------------------------------------------------------------------------


def test_the_config_dry_runs_and_counts_one_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "train three_way --dry-run --vocab.size 300 --trunk.separator 9 --devices 1"
    assert main(words.split()) == 0
    config = load_config("three_way")[1]
    D, F, N, G = config.vocab.width, config.trunk.ffn, config.trunk.heads, config.trunk.kv_heads
    L, K = config.trunk.layers, D // N
    trunk = L * (3 * (D * K * (2 * N + 2 * G) + D) + 2 * (3 * D * F + D)) + 2 * D
    out = capsys.readouterr().out
    assert f"{trunk + 300 * D:,} parameters: {300 * D:,} in the vocabulary" in out
    assert "prefix_end='\\n'" in out
    assert "the data were not read" in out
    assert list(tmp_path.iterdir()) == []


def test_either_kind_of_trunk_goes_to_a_file_and_comes_back() -> None:
    plain, other = Config(trunk=TrunkConfig(heads=2)), Config(trunk=TRUNK)
    for config in (plain, other):
        assert from_json(to_json(config)) == config
    assert "trunk.separator: None → 5" in differences(other, plain)
    values = json.loads(to_json(plain))
    del values["trunk"]["kind"]  # as runs were written before there were two kinds
    assert from_json(json.dumps(values)) == plain
    values["trunk"]["kind"] = "encoder_decodr"
    with pytest.raises(UserError, match=r"trunk has the unknown kind .*'encoder_decoder'"):
        from_json(json.dumps(values))


def test_what_cannot_work_is_refused() -> None:
    layout = layout_on(ONE)
    with pytest.raises(UserError, match=r"set data\.prefix_end"):
        Config(trunk=TRUNK).check()
    for separator in (None, V, -1):
        with pytest.raises(UserError, match=rf"trunk\.separator = {separator} must be the id"):
            Blueprint(vocab_of("none"), replace(TRUNK, separator=separator), layout)
    with pytest.raises(UserError, match=r"vocab\.memories \(tide\)"):
        Blueprint(vocab_of("none", memories=(Tide(),)), TRUNK, layout)
    with pytest.raises(
        UserError, match=r"trunk\.separator = 5, but data\.prefix_end = '\|' is id 7"
    ):
        Config(trunk=TRUNK, data=DataConfig(prefix_end="|")).with_separator(7)


# --- whole runs --------------------------------------------------------------------------------------------------------


def run_config(dictionary: Path, **settings: Any) -> Config:
    return Config(
        vocab=replace(vocab_of("three_way"), size=None),
        trunk=replace(TRUNK, separator=None, source_table="shared"),
        data=DataConfig(source=f"files:{dictionary}", vocab_size=300, length=48, prefix_end="\n"),
        optim=OptimConfig(warmup=2, lr=1e-2),
        train=TrainConfig(
            **{"steps": 6, "batch": 8, "eval_every": 3, "checkpoint_every": 3, **settings}
        ),
    )


@pytest.fixture(scope="module")
def finished(dictionary: Path) -> tuple[Path, dict[str, Any]]:
    directory = dictionary.parent / "runs" / "whole"
    return directory, train(run_config(dictionary), directory, layout_on(ONE), quiet=True)


def test_a_run_learns_and_reports(
    finished: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, summary = finished
    validation = summary["validation"]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert losses[-1] < losses[0]
    assert validation["bits_per_byte"] is None  # the sources' bytes are read, not predicted
    words = ["eval", str(directory), "--devices", "1", "--step", "latest", "--json", "--batch", "3"]
    assert main(words) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["tokens"] == validation["tokens"]
    assert evaluated["loss"] == pytest.approx(validation["loss"], rel=1e-6)
    assert main(["sample", str(directory), "--prompt", "ab"]) == 2
    assert "cannot be sampled" in capsys.readouterr().err


def test_eight_devices_train_to_the_same_model(
    finished: tuple[Path, dict[str, Any]], dictionary: Path, tmp_path: Path
) -> None:
    config = run_config(dictionary)
    summary = train(config, tmp_path / "run", layout_on("data=2,model=4"), quiet=True)
    assert summary["validation"]["loss"] == pytest.approx(
        finished[1]["validation"]["loss"], rel=1e-4
    )
    assert summary["validation"]["tokens"] == finished[1]["validation"]["tokens"]


def test_a_stopped_run_resumes_to_the_same_bits(
    finished: tuple[Path, dict[str, Any]],
    dictionary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, layout = run_config(dictionary), layout_on(ONE)
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "run", layout, quiet=True)
    summary, params = trained(config, tmp_path / "run", layout)
    _, expected = trained(config, finished[0], layout)
    chex.assert_trees_all_equal(params, expected)
    assert summary["validation"] == finished[1]["validation"]
    assert summary["training"] == finished[1]["training"]


def assert_close(ours: Any, theirs: Any) -> None:
    """Leaf by leaf, relative to the largest entry of each."""
    for (path, one), two in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        scale = max(np.abs(two).max(), 1e-3)
        np.testing.assert_allclose(
            np.asarray(one) / scale, np.asarray(two) / scale, atol=1e-5, err_msg=str(path)
        )
