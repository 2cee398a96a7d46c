"""The trainer as a whole: meshes, accumulation, resuming, killed and joined processes, the compiled step."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from hlo import buffers, collectives
from models import layout_on

from vocabjax import IdError, TiedHead, UntiedHead, UserError
from vocabjax import load as loading
from vocabjax import train as training
from vocabjax.checkpoint import Checkpoints
from vocabjax.config import Config, TrainConfig
from vocabjax.data import DataConfig
from vocabjax.describe import summary_text
from vocabjax.load import Loaded, adopt, load_run
from vocabjax.log import read_metrics
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint
from vocabjax.optim import GroupConfig, OptimConfig
from vocabjax.paths import path_of
from vocabjax.runs import Run
from vocabjax.step import init_state, make_step, to_device, tokens_of
from vocabjax.train import Setup, train
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.adaptive import AdaptiveSoftmax
from vocabjax.vocab.inputs.adaptive import AdaptiveTable
from vocabjax.vocab.inputs.full import FullTable
from vocabjax.vocab.interfaces import Objective
from vocabjax.vocab.lexicon import Lexicon

ROOT = Path(__file__).parent.parent
ONE = "data=1,model=1"


def config_of(corpus: Path, *, head: Any = None, steps: int = 6, **settings: Any) -> Config:
    return Config(
        vocab=VocabConfig(
            width=16,
            multiple=1,
            input=FullTable(dropout=0.1),  # so that what is dropped is the same everywhere, too
            head=head or UntiedHead(),
            objective=Objective(chunk=settings.pop("chunk", 16)),
        ),
        trunk=TrunkConfig(layers=2, heads=8, kv_heads=2, head_dim=4, ffn=24),
        data=DataConfig(source=f"files:{corpus}", vocab_size=300, length=16),
        optim=OptimConfig(warmup=2),
        train=TrainConfig(
            steps=steps,
            **{"batch": 8, "eval_every": 3, "checkpoint_every": 3, "log_every": 1, **settings},
        ),
    )


def trained(config: Config, directory: Path, layout: Layout) -> tuple[dict[str, Any], Any]:
    """The summary and the final parameters, logical rows only."""
    summary = train(config, directory, layout, quiet=True)
    with jax.set_mesh(layout.mesh):
        setup = Setup.of(config, layout)
        state = restore(setup, directory)
    size = setup.blueprint.sizes.logical

    def logical(key_path: Any, leaf: jax.Array) -> np.ndarray:
        info = setup.blueprint.infos[path_of(key_path)]
        return np.asarray(leaf)[:size] if info.axes[0] == "vocab" else np.asarray(leaf)

    return summary, jax.tree_util.tree_map_with_path(logical, state.params)


def restore(setup: Setup, directory: Path) -> Any:
    return Checkpoints(directory / "checkpoints").restore(
        training.abstract_state(setup.blueprint, setup.optimizer),
        None,
        logical=setup.blueprint.logical_shapes(),
    )


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("reference") / "run"
    return (*trained(config_of(corpus), directory, layout_on(ONE)), directory)


@pytest.mark.parametrize(
    ("mesh", "rules", "accumulate"),
    [
        ("data=1,model=8", "default", 1),
        ("data=2,model=4", "default", 2),
        ("data=8,model=1", "default", 1),
        ("data=2,model=4", "fsdp,vocab=model+data", 1),
        (ONE, "default", 4),
    ],
)
def test_every_mesh_and_accumulation_trains_to_the_same_model(
    mesh: str, rules: str, accumulate: int, reference: Any, corpus: Path, tmp_path: Path
) -> None:
    config = config_of(corpus, accumulate=accumulate)
    # Accumulation regroups the rows of a step, not which rows it holds: global order is a function of step and batch.
    summary, params = trained(config, tmp_path / "run", layout_on(mesh, rules))
    expected, expected_params, _ = reference
    assert summary["validation"]["loss"] == pytest.approx(expected["validation"]["loss"], rel=1e-5)
    assert summary["parameters"] == expected["parameters"]
    chex.assert_trees_all_close(params, expected_params, rtol=2e-3, atol=2e-5)


def test_training_lowers_the_loss_below_the_unigram_entropy(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, steps=40, eval_every=40, checkpoint_every=40)
    config = replace(config, optim=OptimConfig(warmup=2, lr=1e-2))
    layout = layout_on(ONE)
    counts = Setup.of(config, layout).dataset.counts_V.astype(float)
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * np.log(share)).sum()
    summary = train(config, tmp_path / "run", layout, quiet=True)
    assert summary["training"]["loss"] < entropy


def test_bfloat16_trains_and_keeps_float32_parameters(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus)
    config = replace(config, vocab=replace(config.vocab, dtype="bfloat16"))
    _, params = trained(config, tmp_path / "run", layout_on("data=2,model=4"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    losses = [line["train_loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
              if "train_loss" in line]  # fmt: skip
    assert losses[-1] < losses[0]


def test_tied_and_untied_start_from_the_same_values_and_see_the_same_batches(
    corpus: Path,
) -> None:
    layout = layout_on(ONE)
    arms = [Setup.of(config_of(corpus, head=head), layout) for head in (TiedHead(), UntiedHead())]  # fmt: skip
    with jax.set_mesh(layout.mesh):
        tied, untied = (arm.blueprint.init(0) for arm in arms)
    chex.assert_trees_all_equal(tied["trunk"], untied["trunk"])
    chex.assert_trees_all_equal(tied["vocab"]["input"], untied["vocab"]["input"])
    assert "head" not in tied["vocab"]
    streams = [arm.batches() for arm in arms]
    pairs = [[next(stream) for stream in streams] for _ in range(5)]
    for pair in pairs:
        chex.assert_trees_all_equal(*pair)
    assert len({pair[0]["ids"].tobytes() for pair in pairs}) == 5  # not one batch five times


def test_first_and_restored_moments_lie_as_their_parameters(corpus: Path) -> None:
    layout = layout_on("data=2,model=4", "fsdp")
    setup = Setup.of(config_of(corpus), layout)
    with jax.set_mesh(layout.mesh):
        first = init_state(setup.optimizer, setup.blueprint.init(0))
        restored = training.abstract_state(setup.blueprint, setup.optimizer)
    chex.assert_trees_all_equal_shapes_and_dtypes(first.optimizer, restored.optimizer)
    lies = {info.path: layout.sharding(*info.axes) for info in setup.blueprint.infos.values()}
    for state in (first, restored):
        for key_path, leaf in jax.tree.leaves_with_path(state.optimizer):
            own = [s for path, s in lies.items() if path_of(key_path).endswith(f"/{path}")]
            assert [leaf.sharding] == (own or [layout.sharding()])


def test_a_tied_table_is_one_leaf_of_parameters_moments_and_checkpoint(
    corpus: Path, tmp_path: Path
) -> None:
    config, layout = config_of(corpus, head=TiedHead(), steps=3), layout_on("data=2,model=4")
    train(config, tmp_path / "run", layout, quiet=True)
    setup = Setup.of(config, layout)
    tables = [info for info in setup.blueprint.infos.values() if "vocab" in info.axes]
    assert [info.role for info in tables] == ["tied"]
    leaves = Checkpoints(tmp_path / "run" / "checkpoints").describe().leaves
    of_table = [name for name, leaf in leaves.items() if leaf.shape == tables[0].shape]
    assert len(of_table) == 3, of_table  # itself and Adam's two moments


def test_one_compilation_per_step_function_over_a_run_and_its_resumption(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, dtypes or shardings that drift after the first step, or after a restore, would trace or compile anew."""
    steps: list[Any] = []
    evaluators: list[Any] = []
    make, evaluator = make_step, training.Evaluator

    def counted(*arguments: Any) -> Any:
        chex.clear_trace_counter()
        traced_once = chex.assert_max_traces(make(*arguments).__wrapped__, n=1)
        steps.append(jax.jit(traced_once, donate_argnums=0))
        return steps[-1]

    def kept(*arguments: Any) -> Any:
        evaluators.append(evaluator(*arguments))
        return evaluators[-1]

    monkeypatch.setattr(training, "make_step", counted)
    monkeypatch.setattr(training, "Evaluator", kept)
    config, layout = config_of(corpus), layout_on("data=2,model=4")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(training.Interrupted):
            train(config, tmp_path / "run", layout, quiet=True)
    train(config, tmp_path / "run", layout, quiet=True)
    assert [step._cache_size() for step in steps] == [1, 1]
    # The validation split's last batch is a partial one, padded: it must not compile anew.
    assert [each._sums._cache_size() for each in evaluators] == [1, 1]


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivers SIGTERM once `step` has been taken."""

    def stopped(self: Any, stop: Any, now: int) -> bool:
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.signal_number:
                time.sleep(0.01)
        return bool(stop.signal_number)

    monkeypatch.setattr(training._Trainer, "_stopped", stopped)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_run_stopped_by_sigterm_resumes_to_the_same_bits(
    step: int,
    reference: Any,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, layout = config_of(corpus), layout_on(ONE)
    with monkeypatch.context() as patch:
        stop_after(step, patch)
        with pytest.raises(training.Interrupted, match=f"saved at step {step}"):
            train(config, tmp_path / "run", layout, quiet=True)
    summary, params = trained(config, tmp_path / "run", layout)
    expected, expected_params, directory = reference
    chex.assert_trees_all_equal(params, expected_params)
    assert summary["validation"] == expected["validation"]
    ours, theirs = (read_metrics(d / "metrics.jsonl") for d in (tmp_path / "run", directory))
    assert drop_speed(ours) == drop_speed(theirs)


def drop_speed(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def test_a_finished_run_is_not_trained_again(reference: Any, corpus: Path) -> None:
    expected, _, directory = reference
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    assert train(config_of(corpus), directory, layout_on(ONE), quiet=True) == expected
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_a_run_killed_before_its_summary_logs_its_last_evaluation_once(
    reference: Any, corpus: Path, tmp_path: Path
) -> None:
    expected, _, directory = reference
    shutil.copytree(directory, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    again = train(config_of(corpus), tmp_path / "run", layout_on(ONE), quiet=True)
    assert again == {**expected, "name": "run"}
    ours, theirs = (read_metrics(d / "metrics.jsonl") for d in (tmp_path / "run", directory))
    assert ours == theirs


def test_parameters_are_loaded_without_the_optimiser(
    reference: Any, corpus: Path, tmp_path: Path
) -> None:
    shutil.copytree(reference[2], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"adamw"', '"sgd"'))
    for mesh in (ONE, "data=2,model=4"):
        loaded = load_run(Run(tmp_path / "run"), layout_on(mesh), "latest")
        assert loaded.step == 6
        chex.assert_trees_all_equal(
            jax.tree.map(lambda x, full: np.asarray(x)[: len(full)], loaded.params, reference[1]),
            reference[1],
        )


@pytest.mark.parametrize("setting", [{"keep_last": 0}, {"keep_best": -1}, {"steps": 0}])
def test_counts_that_cannot_work_make_no_run(
    setting: dict[str, int], corpus: Path, tmp_path: Path
) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(UserError, match=rf"train\.{name} = {value} must be at least"):
        train(config_of(corpus, **setting), tmp_path / "run", layout_on(ONE), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_an_id_that_is_read_and_never_predicted(corpus: Path, tmp_path: Path) -> None:
    """In running text it is also the label one position earlier."""
    config, layout = config_of(corpus, steps=3), layout_on("data=2,model=4")
    setup = Setup.of(config, layout)
    banned = tuple(np.argsort(-setup.dataset.counts_V)[[0, 3]].tolist())  # common ones
    config = replace(config, vocab=replace(config.vocab, banned=banned))
    validation = train(config, tmp_path / "run", layout, quiet=True)["validation"]
    targets = setup.dataset.validation.tokens[1:]
    assert 0 < validation["tokens"] == np.sum(~np.isin(targets, banned)) < len(targets)
    assert validation["bits_per_byte"] is None  # nobody knows how many bytes the others have
    with jax.set_mesh(layout.mesh):
        host = next(setup.batches())
        assert np.isin(banned, host["ids"]).all()
        tokens = tokens_of(to_device(layout, {k: v[0] for k, v in host.items()}, "batch", "seq"))
        loaded = load_run(Run(tmp_path / "run"), layout)
        z_BTV = jax.jit(lambda params: loaded.blueprint.bind(params).logits(tokens)[0])(loaded.params)  # fmt: skip
        p_BTV = np.asarray(z_BTV, np.float64)
    p_BTV = np.exp(p_BTV - p_BTV.max(-1, keepdims=True))[..., : setup.dataset.size]
    assert np.isfinite(p_BTV).all()
    assert sorted(np.flatnonzero((p_BTV == 0).all((0, 1)))) == sorted(banned)


@pytest.mark.parametrize("log_every", [1, 10])
def test_a_run_of_one_step_has_no_speed(log_every: int, corpus: Path, tmp_path: Path) -> None:
    """Its time was that of compiling."""
    config = config_of(corpus, steps=1, log_every=log_every)
    config = replace(config, optim=OptimConfig(warmup=1))
    summary = train(config, tmp_path / "run", layout_on(ONE), quiet=True)
    assert summary["tokens_per_second"] is None
    text = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == summary  # NaN is not JSON
    assert summary_text(summary).endswith("FLOPs, speed unknown")


@pytest.mark.parametrize("name", ["ids", "targets"])
def test_an_invalid_id_or_label_stops_the_run_one_step_late_and_is_named(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = training.train_batches

    class Spoilt:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self.inner, self.step = original(*arguments, **settings), 0

        def __next__(self) -> Any:
            batch, self.step = next(self.inner), self.step + 1
            if self.step == 4:
                batch[name][0, 2, 5] = 999
            return batch

        def get_state(self) -> Any:
            return self.inner.get_state()

    monkeypatch.setattr(training, "train_batches", Spoilt)
    config = config_of(corpus)
    config = replace(config, vocab=replace(config.vocab, banned=(7,)))  # excuses no other label
    what = {"ids": "token id", "targets": "label"}[name]
    with pytest.raises(IdError, match=rf"step 4: {what} 999 at position \(0, 2, 5\)"):
        train(config, tmp_path / "run", layout_on("data=2,model=4"), quiet=True)
    # Nothing trained on it was saved.
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() == 3


@pytest.mark.parametrize(
    ("steps", "loss"), [(6, "loss of step 2"), (1, "validation loss of step 1")]
)
def test_a_loss_that_is_not_finite_stops_the_run(
    steps: int, loss: str, corpus: Path, tmp_path: Path
) -> None:
    config = config_of(corpus, steps=steps)
    config = replace(config, optim=OptimConfig(lr=1e30, warmup=0, head=GroupConfig(lr=1e30)))
    with pytest.raises(UserError, match=rf"the {loss} is (nan|inf).*--optim\.lr"):
        train(config, tmp_path / "run", layout_on(ONE), quiet=True)
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() is None
    assert not (tmp_path / "run" / "summary.json").exists()


def test_nothing_that_is_not_finite_is_ever_saved(corpus: Path, tmp_path: Path) -> None:
    """The first update makes the head infinite; its own loss is still finite, and no evaluation comes in between."""
    config = config_of(corpus, checkpoint_every=1, eval_every=100)
    config = replace(config, optim=OptimConfig(lr=1e30, warmup=0, head=GroupConfig(lr=1e30)))
    told = r"params/vocab/head/table is not finite at step 1: lower --optim\.lr.*no checkpoint"
    with pytest.raises(UserError, match=told):
        train(config, tmp_path / "run", layout_on(ONE), quiet=True)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == []
    # Huge, but finite at first.
    config = replace(config, optim=OptimConfig(lr=1e30, warmup=0))
    with pytest.raises(UserError, match=r"not finite|is (nan|inf)"):
        train(config, tmp_path / "run", layout_on(ONE), quiet=True)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    setup = Setup.of(config, layout_on(ONE))
    with jax.set_mesh(setup.layout.mesh):
        for step in checkpoints.steps():
            state = checkpoints.restore(
                training.abstract_state(setup.blueprint, setup.optimizer),
                None,
                logical=setup.blueprint.logical_shapes(),
                step=step,
            )
            chex.assert_tree_all_finite(state)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_one_run_is_trained_by_one_command(
    reference: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout, directory = config_of(corpus), layout_on(ONE), tmp_path / "run"
    first = training._Trainer.fit
    told: list[str] = []

    def second_command(self: Any) -> Any:
        before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
        for other in (config, config_of(corpus, steps=4)):
            with pytest.raises(UserError, match="is being trained by another process") as caught:
                train(other, directory, layout, quiet=True)
            told.append(str(caught.value))
        assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
        return first(self)

    with monkeypatch.context() as patch:
        patch.setattr(training._Trainer, "fit", second_command)
        train(config, directory, layout, quiet=True)
    assert len(told) == 2
    assert train(config, directory, layout, quiet=True) == {**reference[0], "name": "run"} | {
        "tokens_per_second": json.loads((directory / "summary.json").read_text())[
            "tokens_per_second"
        ]
    }

    # The other command ends between the look at its checkpoints and the lock.
    (directory / "summary.json").unlink()
    lock = Run.lock

    def late(self: Run) -> Any:
        shutil.rmtree(directory / "checkpoints" / "6")
        return lock(self)

    monkeypatch.setattr(Run, "lock", late)
    with pytest.raises(UserError, match="is being trained by another process"):
        train(config, directory, layout, quiet=True)


def test_a_setting_that_is_refused_late_can_be_corrected(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, directory = config_of(corpus, steps=3), tmp_path / "run"
    wrong = replace(config, optim=OptimConfig(lr=1e30, warmup=0, head=GroupConfig(lr=1e30)))
    with pytest.raises(UserError, match="lr"):
        train(wrong, directory, layout_on(ONE), quiet=True)
    capsys.readouterr()
    train(config, directory, layout_on(ONE), quiet=True)
    assert "replaced" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(directory / "metrics.jsonl")] == [0, 1, 2, 3, 3]
    with pytest.raises(UserError, match="holds a run of another config"):
        train(wrong, directory, layout_on(ONE), quiet=True)


def test_frozen_groups_stay_bitwise_equal(corpus: Path, tmp_path: Path) -> None:
    config, layout = config_of(corpus, steps=3), layout_on(ONE)
    config = replace(config, optim=replace(config.optim, head=GroupConfig(frozen=True)))
    _, params = trained(config, tmp_path / "run", layout)
    with jax.set_mesh(layout.mesh):
        start = Setup.of(config, layout).blueprint.init(0)
    np.testing.assert_array_equal(
        params["vocab"]["head"]["table"],
        np.asarray(start["vocab"]["head"]["table"])[: len(params["vocab"]["head"]["table"])],
    )
    assert np.any(params["vocab"]["input"]["table"] != start["vocab"]["input"]["table"])


def test_starting_from_another_run_keeps_tied_and_untied_apart(
    corpus: Path, tmp_path: Path
) -> None:
    """Field report 10: what the config says of tying must agree with the parameters at hand."""
    layout = layout_on(ONE)
    source = {"untied": tmp_path / "untied", "tied": tmp_path / "tied"}
    heads = {"untied": UntiedHead(), "tied": TiedHead()}
    for name, directory in source.items():
        train(config_of(corpus, head=heads[name], steps=3), directory, layout, quiet=True)

    def start(head: str, init: str, name: str) -> Any:
        config = config_of(corpus, head=heads[head], steps=3)
        return train(config, tmp_path / name, layout, init=init, quiet=True)

    # Tied from tied: one table, and it begins where the other ended.
    first = start("tied", "tied", "more")
    losses = [line["validation_loss"] for line in read_metrics(tmp_path / "more" / "metrics.jsonl")
              if "validation_loss" in line]  # fmt: skip
    ended = json.loads((source["tied"] / "summary.json").read_text())["validation"]["loss"]
    assert losses[0] == pytest.approx(ended, rel=1e-6)
    assert first["vocab_parameters"] == 16 * Setup.of(config_of(corpus), layout).dataset.size
    with pytest.raises(UserError, match="is tied and has no vocab/head/table"):
        start("untied", "tied", "lacking")
    with pytest.raises(UserError, match="has a head of its own"):
        start("tied", "untied", "losing")
    assert not (tmp_path / "lacking").exists()
    assert not (tmp_path / "losing").exists()

    # An untied model whose head equals its table may become a tied one.
    with jax.set_mesh(layout.mesh):
        loaded = load_run(Run(source["untied"]), layout)
        loaded.params["vocab"]["head"]["table"] = loaded.params["vocab"]["input"]["table"]
        tied = Setup.of(config_of(corpus, head=TiedHead()), layout).blueprint
        assert set(adopt(tied, loaded)["vocab"]) == {"input"}


def test_starting_from_a_run_of_another_tokenizer_is_refused(
    reference: Any, corpus: Path, tmp_path: Path
) -> None:
    config = config_of(corpus)
    config = replace(config, data=replace(config.data, vocab_size=280))
    path = reference[2] / "tokenizer.json"
    with pytest.raises(UserError, match=rf"another tokenizer.*add --data\.tokenizer {path}$"):
        train(config, tmp_path / "run", layout_on(ONE), init=str(reference[2]), quiet=True)

    np.save(tmp_path / "ids.npy", np.arange(400) % 20)
    ids = replace(config, data=DataConfig(source=f"tokens:{tmp_path}/ids.npy", length=16))
    with pytest.raises(
        UserError, match=r"another tokenizer.* it was trained on text, not on token"
    ):
        train(ids, tmp_path / "run", layout_on(ONE), init=str(reference[2]), quiet=True)
    train(
        replace(ids, train=replace(ids.train, steps=3)),
        tmp_path / "ids",
        layout_on(ONE),
        quiet=True,
    )
    with pytest.raises(UserError, match=r"another tokenizer.* it was trained on token ids: give"):
        train(config, tmp_path / "run", layout_on(ONE), init="ids", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_start_does_not_depend_on_how_either_run_pads_its_tables(
    reference: Any, corpus: Path, tmp_path: Path
) -> None:
    """The source pads its rows to a multiple of 1 on one device; this model to one of 64 on eight."""
    layout = layout_on("data=1,model=8")
    config = config_of(corpus, steps=3)
    config = replace(config, vocab=replace(config.vocab, multiple=64))
    with jax.set_mesh(layout.mesh):
        blueprint = Setup.of(config, layout).blueprint
        params = adopt(blueprint, load_run(Run(reference[2]), layout, 6, multiple=64))
        chex.assert_trees_all_equal_shapes_and_dtypes(params, blueprint.abstract())
    size = blueprint.sizes.logical
    assert blueprint.sizes.padded > size
    for name in ("input", "head"):
        table = np.asarray(params["vocab"][name]["table"])
        np.testing.assert_array_equal(table[:size], reference[1]["vocab"][name]["table"])
        assert not table[size:].any()
    chex.assert_trees_all_equal(params["trunk"], reference[1]["trunk"])
    train(config, tmp_path / "run", layout, init=str(reference[2]), quiet=True)
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["validation_loss"] == pytest.approx(reference[0]["validation"]["loss"], rel=1e-5)
    wider = replace(config.vocab, size=size + 1)
    with jax.set_mesh(layout.mesh):
        bigger = Setup.of(replace(config, vocab=wider), layout).blueprint
        with pytest.raises(
            UserError, match=rf"of shape \({size}, 16\) in run .*\({size + 1}, 16\)"
        ):
            adopt(bigger, load_run(Run(reference[2]), layout, 6, multiple=64))


def test_rows_that_stand_for_other_ids_are_no_start(corpus: Path, tmp_path: Path) -> None:
    """Rows of bands belong to ranks: those of a run on other text, in the same tokens, are of other ids."""
    config, layout = config_of(corpus), layout_on(ONE)
    vocab = replace(
        config.vocab, size=300, input=AdaptiveTable((9,)), head=AdaptiveSoftmax(cutoffs=(9,))
    )

    def blueprint(counts_V: np.ndarray) -> Blueprint:
        return Blueprint(vocab, config.trunk, layout, Lexicon(counts_V))

    counts_V = np.arange(300)
    theirs = blueprint(counts_V)
    source = Loaded(Run(tmp_path / "source"), theirs, theirs.abstract(), 6)
    chex.assert_trees_all_equal(adopt(blueprint(10 * counts_V), source), theirs.abstract())
    with pytest.raises(UserError, match=r"ranks differs in run 'source', so .* for other ids"):
        adopt(blueprint(-counts_V), source)


def out_of_memory(_: Any) -> None:
    raise MemoryError


def test_a_run_remembers_where_its_start_lies(
    reference: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint, and started again without --init, from another directory."""
    layout, config = layout_on(ONE), config_of(corpus, steps=2)
    shutil.copytree(reference[2], tmp_path / "elsewhere" / "source")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(training._Trainer, "fit", out_of_memory)
        for _ in range(2):  # the same command again goes as far
            with pytest.raises(MemoryError):
                train(config, Path("runs/run"), layout, init="elsewhere/source", quiet=True)
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(UserError, match=r"was started from run '.*/elsewhere/source', not from"):
        train(config, Path("run"), layout, init="elsewhere/source", quiet=True)  # not here
    train(config, Path("run"), layout, quiet=True)
    first = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")[0]
    assert first["validation_loss"] == pytest.approx(reference[0]["validation"]["loss"], rel=1e-6)


def test_a_run_remembers_what_it_started_from(
    reference: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout = config_of(corpus), layout_on(ONE)
    source = tmp_path / "source"
    shutil.copytree(reference[2], source)
    expected = train(config, tmp_path / "whole", layout, init="source", quiet=True)

    # Killed before its first checkpoint, and once after it; meanwhile its source gets better, and then is gone.
    directory = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(training._Trainer, "fit", out_of_memory)
        with pytest.raises(MemoryError):
            train(config, directory, layout, init="source", quiet=True)
    step = Checkpoints(source / "checkpoints").best()
    fingerprint = Run(source).facts()["fingerprint"]
    facts = json.loads((directory / "data.json").read_text())
    assert facts["init"] == {"run": "source", "step": step, "fingerprint": fingerprint}
    assert step == 6
    for module in (loading, training):
        monkeypatch.setattr(module, "saved_step", lambda run, step="best": 3 if step == "best" else step)  # fmt: skip
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(training.Interrupted):
            train(config, directory, layout, quiet=True)
    shutil.rmtree(source)
    for init in ("other", str(tmp_path / "elsewhere" / "run")):
        with pytest.raises(UserError, match=r"was started from run 'source', not from"):
            train(config, directory, layout, init=init, quiet=True)
    summary = train(config, directory, layout, init="source", quiet=True)
    assert summary["validation"] == expected["validation"]
    with pytest.raises(UserError, match="was started from fresh parameters, not from 'source'"):
        train(config, reference[2], layout, init="source", quiet=True)


@pytest.mark.parametrize("head", [TiedHead(), UntiedHead()], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("mesh", "rules"),
    [("data=1,model=8", "default"), ("data=2,model=4", "default"), ("data=2,model=4", "fsdp")],
)
def test_the_compiled_step_holds_no_logits_and_gathers_no_table(
    mesh: str, rules: str, head: Any, corpus: Path
) -> None:
    layout = layout_on(mesh, rules)
    config = config_of(corpus, head=head, batch=16, accumulate=2)
    with jax.set_mesh(layout.mesh):
        setup = Setup.of(config, layout)
        state = init_state(setup.optimizer, setup.blueprint.init(0))
        batch = to_device(layout, next(setup.batches()), None, "batch", "seq")
        text = make_step(setup.blueprint, setup.optimizer).lower(state, batch).compile().as_text()
    rows = setup.blueprint.sizes.padded
    shard = rows // layout.shards("vocab")
    tokens = 8 * 16 // layout.shards("batch")  # of one microbatch, on one device
    for shape in buffers(text):
        for size in {rows, shard} & set(shape):
            assert np.prod(shape) // size < tokens, f"logits of all tokens: {shape}"
    for kind, shape in collectives(text):
        if kind == "all-gather":
            assert not {rows, shard} & set(shape), f"gathered table: {shape}"


def command(corpus: Path, runs: Path, *flags: str) -> list[str]:
    small = [
        "--vocab.width",
        "16",
        "--trunk.layers",
        "1",
        "--trunk.heads",
        "4",
        "--trunk.kv-heads",
        "1",
        "--trunk.ffn",
        "16",
        "--data.vocab-size",
        "300",
        "--data.length",
        "16",
        "--train.batch",
        "8",
        "--train.steps",
        "12",
        "--train.eval-every",
        "6",
        "--train.checkpoint-every",
        "2",
        "--train.log-every",
        "1",
        "--optim.warmup",
        "2",
        "--quiet",
        "--name",
        "run",
    ]
    return [
        sys.executable, str(ROOT / "run.py"), "train", "untied", *small,
        "--data.source", f"files:{corpus}", "--runs", str(runs), *flags,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "XLA_FLAGS": ""}


def test_a_run_killed_at_arbitrary_moments_resumes_to_the_same_bits(
    corpus: Path, tmp_path: Path
) -> None:
    words = command(corpus, tmp_path / "whole", "--devices", "1")
    subprocess.run(words, check=True, env=environment(), timeout=240, capture_output=True)
    words = command(corpus, tmp_path / "killed", "--devices", "1")
    run = tmp_path / "killed" / "run"
    chance = random.Random(0)
    kills = 0
    for _ in range(40):
        process = subprocess.Popen(
            words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        seen = progress(run)
        # Wait until it has moved, then kill it at a moment of its own: while stepping, saving or evaluating.
        deadline = time.monotonic() + 120
        while process.poll() is None and progress(run) == seen and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.15)
        if process.poll() is None and kills < 3:
            process.kill()
            kills += 1
        _, errors = process.communicate(timeout=240)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
    assert kills, "the run was never killed"
    whole = tmp_path / "whole" / "run"
    a, b = (json.loads((d / "summary.json").read_text()) for d in (whole, run))
    del a["tokens_per_second"], b["tokens_per_second"]
    assert a == b
    assert drop_speed(read_metrics(whole / "metrics.jsonl")) == drop_speed(
        read_metrics(run / "metrics.jsonl")
    )


def progress(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def joined(words: list[str], directories: list[Path]) -> list[subprocess.Popen[bytes]]:
    """One process of the command in each directory, all of one job."""
    with socket.socket() as listener:  # a free port, so that tests side by side do not meet
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    join = ["--coordinator", f"localhost:{port}", "--processes", str(len(directories))]
    return [
        subprocess.Popen(
            [*words, *join, "--process-id", str(index)],
            cwd=directory,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index, directory in enumerate(directories)
    ]


def ended(processes: list[subprocess.Popen[bytes]]) -> list[tuple[int, str]]:
    """Exit code and standard error of each."""
    try:
        errors = [process.communicate(timeout=240)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.mark.parametrize("mesh", ["data=4,model=1", "data=2,model=2", "data=1,model=4"])
def test_two_processes_train_like_one(mesh: str, corpus: Path, tmp_path: Path) -> None:
    one = command(corpus, tmp_path / "one", "--devices", "4", "--mesh", mesh)
    two = command(corpus, tmp_path / "two", "--devices", "2", "--mesh", mesh)
    alone = subprocess.Popen(one, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for code, errors in ended([*joined(two, [tmp_path] * 2), alone]):
        assert code == 0, errors
    a, b = (
        json.loads((tmp_path / name / "run" / "summary.json").read_text())
        for name in ("one", "two")
    )
    assert b["validation"]["loss"] == pytest.approx(a["validation"]["loss"], rel=1e-5)
    assert b["training"]["nll"] == pytest.approx(a["training"]["nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("lose", ("process 1 failed; its own output says why", "no file matches 'text.jsonl'")),
        ("edit", ("process 0 has other data than process 1", "process 1 has other data than process 0")),
    ],
)  # fmt: skip
def test_what_one_process_cannot_use_ends_both(
    change: str, told: tuple[str, str], corpus: Path, tmp_path: Path
) -> None:
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
        shutil.copy(corpus, directory / "text.jsonl")
    mine = directories[1] / "text.jsonl"
    if change == "lose":
        mine.unlink()
    else:
        mine.write_text(mine.read_text() + json.dumps({"text": "one document more"}) + "\n")
    words = command(Path("text.jsonl"), tmp_path / "runs", "--devices", "1", "--mesh", "data=2")
    for (code, errors), told_here in zip(ended(joined(words, directories)), told, strict=True):
        assert code == 2
        assert told_here in errors and "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


def test_processes_that_see_other_states_of_the_run_all_stop(corpus: Path, tmp_path: Path) -> None:
    """As on a shared file system that is slow to show one process what another wrote."""
    directories = [tmp_path / "first", tmp_path / "second"]
    words = command(corpus, Path("runs"), "--devices", "1", "--mesh", "data=2")
    alone = command(corpus, directories[0] / "runs", "--devices", "1")
    subprocess.run(alone, check=True, env=environment(), timeout=240, capture_output=True)
    shutil.copytree(*directories)
    shown, late = (directory / "runs" / "run" for directory in directories)

    def all_stop() -> None:
        before = [sorted(directory.rglob("*")) for directory in directories]
        for index, (code, errors) in enumerate(ended(joined(words, directories))):
            assert code == 2
            assert f"process {index} has other state of the run than process {1 - index}" in errors
            assert "Traceback" not in errors
        assert [sorted(directory.rglob("*")) for directory in directories] == before

    (late / "summary.json").unlink()
    all_stop()
    (shown / "summary.json").unlink()
    shutil.rmtree(late / "checkpoints" / "12")
    all_stop()


def test_sigterm_to_one_process_stops_both_at_one_step(corpus: Path, tmp_path: Path) -> None:
    words = command(corpus, tmp_path, "--devices", "1", "--mesh", "data=2")
    words[words.index("--train.steps") + 1] = "100000"
    processes = joined(words, [tmp_path] * 2)
    deadline = time.monotonic() + 200
    while progress(tmp_path / "run") < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    ends = ended(processes)
    steps = set()
    for code, errors in ends:
        assert code == 128 + signal.SIGTERM, errors
        stopped = re.search(r"run: stopped and saved at step (\d+)", errors)
        assert stopped is not None and "Traceback" not in errors
        steps.add(int(stopped[1]))
    assert steps == {Checkpoints(tmp_path / "run" / "checkpoints").latest()}
