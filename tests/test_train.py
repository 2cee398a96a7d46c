"""Training as a whole: meshes, accumulation, what must never happen, the compiled step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from hlo import buffers, collectives
from models import layout_on
from small_runs import ONE, config_of, trained

from vocabjax import IdError, TiedHead, UntiedHead, UserError
from vocabjax import train as training
from vocabjax.checkpoint import Checkpoints
from vocabjax.describe import summary_text
from vocabjax.load import load_run
from vocabjax.log import read_metrics
from vocabjax.optim import GroupConfig, OptimConfig
from vocabjax.paths import path_of
from vocabjax.runs import Run
from vocabjax.state import init_state
from vocabjax.step import make_step, to_device, tokens_of
from vocabjax.train import Setup, train


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


def test_a_profile_names_the_operations_of_a_step_and_where_they_come_from(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(config_of(corpus, steps=8), run, layout_on(ONE), profile=True)
    rows = [
        line.split() for line in (run / "profile" / "operations.txt").read_text().splitlines()[1:-1]
    ]
    times = [float(row[0]) for row in rows]
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert 0 < sum(float(row[1].rstrip("%")) for row in rows) <= 100.1
    assert any("trunk" in row[-1] for row in rows)
    assert "profile of 5 steps" in capsys.readouterr().err
