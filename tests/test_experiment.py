"""The study of tying: what its arms share, what it reports, and that it can be stopped and started."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import layout_on

from vocabjax.config import differences
from vocabjax.data import DataConfig, TokenStream
from vocabjax.experiment import Spread, depth_of_equal_parameters, difference, read_results
from vocabjax.find import load_experiment
from vocabjax.log import read_metrics
from vocabjax.model import Blueprint

study_of_tying: Any = load_experiment("tied_vs_untied")
study_of_three: Any = load_experiment("three_way")
study_of_rows: Any = load_experiment("sparse_rows")
CELL = study_of_tying.Cell(width=32, vocab_size=512, train_tokens=4000, passes=2)
ONE = "data=1,model=1"


@pytest.fixture
def small(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study on the tests' corpus."""
    source = functools.partial(DataConfig, source=f"files:{corpus}")
    monkeypatch.setattr(study_of_tying, "DataConfig", source)


def test_its_flags_are_like_those_of_the_other_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        study_of_tying.main(["--help"])
    flags = re.findall(r"--[\w.-]+", capsys.readouterr().out)
    assert {"--full", "--quiet", "--devices", "--multihost"} <= set(flags)
    assert not [flag for flag in flags if "launch" in flag or flag.startswith("--no-")]


@pytest.mark.usefixtures("small")
def test_arms_differ_in_tying_and_depth_alone() -> None:
    layout = layout_on(ONE)
    untied, tied, equal = (arm.config for arm in study_of_tying.arms_of(CELL, 3, layout))
    assert untied.train.seed == 3
    assert [line.split(":")[0] for line in differences(tied, untied)] == ["vocab.head.kind"]
    assert [line.split(":")[0] for line in differences(equal, tied)] == ["trunk.layers"]
    sizes = [Blueprint(c.vocab, c.trunk, layout).count() for c in (untied, tied, equal)]
    layer = (sizes[2] - sizes[1]) // (equal.trunk.layers - tied.trunk.layers)
    assert sizes[1] < sizes[0]
    assert abs(sizes[2] - sizes[0]) <= layer / 2
    assert depth_of_equal_parameters(tied, sizes[1], layout) == tied.trunk.layers


@pytest.mark.usefixtures("small")
def test_a_study_reports_what_its_runs_say_and_trains_only_what_is_missing(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    start = functools.partial(
        study_of_tying.study, (CELL,), (0,), runs, out, layout_on(ONE), quiet=True
    )
    results = start()
    assert [r["arm"] for r in results] == ["untied", "tied", "tied, equal parameters"]
    assert read_results(out / "results.jsonl") == json.loads(json.dumps(results))
    table = (out / "table.md").read_text()
    for result in results:
        steps = [point["step"] for point in result["curve"]]
        assert steps[0] == 0
        assert steps == sorted(set(steps))
        assert result["curve"][-1]["validation_loss"] == result["validation"]["loss"]
        assert result["curve"][-1]["tokens"] == result["tokens"]
        assert CELL.passes - 1 < result["passes"] <= CELL.passes  # whole batches only
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {result['arm']} |")]
        assert f"| {result['parameters']:,} |" in row
        assert f"| {result['validation']['loss']:.3f} |" in row
    assert (out / "curves.png").stat().st_size > 10_000
    unknown = [{**result, "tokens_per_second": None} for result in results]
    speeds = [line.split(" | ")[-1] for line in study_of_tying.table(unknown).splitlines()[4:]]
    assert speeds == ["unknown |"] * 3

    directories = sorted(runs.iterdir())
    assert len(directories) == 3
    removed = directories[1]
    (removed / "summary.json").unlink()  # as if it had been killed
    before = {d: (d / "summary.json").stat().st_mtime_ns for d in directories if d != removed}
    again = start()
    assert all((d / "summary.json").stat().st_mtime_ns == before[d] for d in before)
    for first, second in zip(results, again, strict=True):
        assert second["validation"] == first["validation"]
        assert second["curve"] == first["curve"]
    assert read_metrics(removed / "metrics.jsonl")


def record(cell: str, arm: str, seed: int, validation: float, training: float) -> dict[str, Any]:
    return {
        "cell": cell,
        "arm": arm,
        "seed": seed,
        "validation": {"loss": validation},
        "training": {"loss": training},
    }


def test_the_verdict_compares_seed_by_seed_and_names_no_sign_that_seeds_dispute() -> None:
    names = ("untied", "tied", "tied, equal parameters")
    losses = {  # by seed: (validation, training) of each arm
        0: ((5.0, 4.0), (4.9, 4.25), (4.7, 3.0)),
        1: ((6.0, 5.0), (5.6, 5.05), (6.1, 4.5)),
    }
    records = [
        record("a cell", arm, seed, *pair)
        for seed, arms in losses.items()
        for arm, pair in zip(names, arms, strict=True)
    ]
    assert study_of_tying.verdict(records) == (
        "a cell: tying, against untied: on the equal trunk validation loss falls (-0.250 (-0.400 … -0.100) nats) and "
        "training loss rises (+0.150 (+0.050 … +0.250)); with equal parameters validation loss moves either way by the seed "
        "(-0.100 (-0.300 … +0.100) nats) and training loss falls (-0.750 (-1.000 … -0.500)) (2 seeds).\n"
    )
    change = difference(records, "a cell", "tied", "untied", lambda r: r["training"]["loss"])
    assert (change.mean, change.low, change.high) == pytest.approx((0.15, 0.05, 0.25))


def test_a_spread_of_one_value_shows_no_range() -> None:
    assert Spread.of([1.25]).show() == "1.250"
    assert Spread.of([1.0, 2.0]).show(1) == "1.5 (1.0 … 2.0)"


# --- three-way tying ---------------------------------------------------------------------------------------------------


def test_three_tyings_differ_in_tables_alone(
    dictionary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data(**settings: Any) -> DataConfig:
        return DataConfig(**{**settings, "source": f"files:{dictionary}", "vocab_size": 300})

    monkeypatch.setattr(study_of_three, "DataConfig", data)
    arms = study_of_three.arms_of(4000, 1, 2)
    none, target, three_way = (arm.config for arm in arms)
    assert none.train.seed == 2
    assert [line.split(":")[0] for line in differences(target, none)] == ["vocab.head.kind"]
    assert [line.split(":")[0] for line in differences(three_way, target)] == ["trunk.source_table"]
    for tables, config in ((3, none), (2, target), (1, three_way)):
        config = config.with_separator(10)
        blueprint = Blueprint(config.vocab, config.trunk, layout_on(ONE))
        assert blueprint.count("vocab/") == tables * 64 * config.vocab.size


def test_three_tyings_are_compared_seed_by_seed() -> None:
    losses = {
        "no tying": (5.0, 6.0),
        "target tying": (4.9, 5.6),
        "three-way tying": (5.25, 5.75),
    }
    records = [
        record("a cell", arm, seed, loss, 4.0) | {"curve": [{"validation_loss": loss}]}
        for arm, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]
    lines = study_of_three.verdict(records).splitlines()
    assert lines[0].startswith(
        "a cell: target tying, against no tying: validation loss falls (-0.250 (-0.400 … -0.100) nats)"
    )
    assert "three-way tying, against no tying: validation loss moves either way" in lines[1]
    assert lines[2].startswith(
        "a cell: three-way tying, against target tying: validation loss rises (+0.250 (+0.150 … +0.350) nats)"
    )


def test_a_wrong_source_changes_nothing_but_the_source() -> None:
    tokens = np.array([0, 11, 12, 5, 13, 5, 0, 21, 22, 0, 31, 5, 32, 33, 0], np.uint16)
    stream = TokenStream(tokens, 0, None, 5)
    right, wrong = (study_of_three.with_source_of(stream, ahead) for ahead in (0, 1))
    assert right.tokens.tolist() == [0, 11, 12, 5, 13, 5, 0, 31, 5, 32, 33, 0]
    assert wrong.tokens.tolist() == [0, 31, 5, 13, 5, 0, 11, 12, 5, 32, 33, 0]
    assert wrong.prefix_end == 5


def test_arms_of_the_study_of_rows_differ_in_that_alone(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each setting from its dense arm."""
    source = functools.partial(DataConfig, **{"vocab_size": 300})
    monkeypatch.setattr(
        study_of_rows, "DataConfig", lambda **kw: source(**{**kw, "source": f"files:{corpus}"})
    )
    arms = study_of_rows.arms_of(0, train_tokens=1100)
    dense = {arm.cell: arm.config for arm in arms if arm.name == "dense"}
    for arm in arms:
        changed = [line.split(":")[0] for line in differences(arm.config, dense[arm.cell])]
        assert changed == ["optim.embed.sparse"] * (arm.name != "dense")


def test_what_coincides_is_reported_as_coinciding() -> None:
    def result(cell: str, arm: str, loss: float, off: float) -> dict[str, Any]:
        curve = [{"step": step, "validation_loss": loss + 1 - step} for step in range(2)]
        losses = {"validation": {"loss": loss}, "training": {"loss": loss - 0.5}}
        return {"cell": cell, "arm": arm, "seed": 0, "rows_off": off, "curve": curve, **losses}

    results = [
        result("decay 0", "dense", 5.0, 0.0),
        result("decay 0", "catch_up", 5.0 + 2e-8, 4e-6),
        result("decay 0", "lazy", 5.25, 0.2),
    ]
    first, second = study_of_rows.verdict(results).splitlines()
    assert "catch_up, against dense: validation loss +0.000 nats" in first
    assert "than 2.0e-08 at an evaluation" in first
    assert "lazy, against dense: validation loss +0.250 nats" in second
    assert "| lazy | 4.750 | 5.250 | +0.250 | 2.0e-01 |" in study_of_rows.table(results)
