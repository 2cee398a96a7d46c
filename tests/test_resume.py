"""Runs that are stopped, resumed, found finished, guarded from one another, and started from one another."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from models import layout_on
from small_runs import ONE, config_of, drop_speed, restore, stop_after, trained

from vocabjax import TiedHead, UntiedHead, UserError
from vocabjax import load as loading
from vocabjax import train as training
from vocabjax.checkpoint import Checkpoints
from vocabjax.data import DataConfig
from vocabjax.load import Loaded, adopt, load_run
from vocabjax.log import read_metrics
from vocabjax.model import Blueprint
from vocabjax.optim import GroupConfig, OptimConfig
from vocabjax.runs import Run
from vocabjax.step import make_step
from vocabjax.train import Setup, train
from vocabjax.vocab.heads.adaptive import AdaptiveSoftmax
from vocabjax.vocab.inputs.adaptive import AdaptiveTable
from vocabjax.vocab.lexicon import Lexicon


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


def test_sparse_rows_resume_to_the_same_bits_and_are_read_as_dense_training_has_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between two evaluations, while some rows are behind."""
    dense = config_of(corpus)
    sparse = replace(dense, optim=replace(dense.optim, embed=GroupConfig(sparse="catch_up")))
    layout = layout_on(ONE)
    for name, config in (("dense", dense), ("sparse", sparse)):
        with monkeypatch.context() as patch:
            stop_after(5, patch)
            with pytest.raises(training.Interrupted):
                train(config, tmp_path / name, layout, quiet=True)
    stopped, behind = (
        load_run(Run(tmp_path / name), layout, "latest") for name in ("dense", "sparse")
    )
    state = restore(Setup.of(sparse, layout), tmp_path / "sparse")
    assert np.unique(state.current["vocab/input/table"]).tolist() == [3, 4, 5]
    chex.assert_trees_all_close(behind.params, stopped.params, atol=1e-5)

    _, resumed = trained(sparse, tmp_path / "sparse", layout)
    _, whole = trained(sparse, tmp_path / "whole", layout)
    chex.assert_trees_all_equal(resumed, whole)


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
