"""The benches' harness: its arithmetic by hand, wrong and missing peers, and what the report makes of records."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import allowed_ids
from oracles import cross_entropy as oracle

from vocabjax import cli, find

loss = find.load_bench("loss")
lookup = find.load_bench("lookup")
harness = sys.modules["vocabjax.experiments.bench.harness"]
report = sys.modules["vocabjax.experiments.bench.report"]


def candidate(name: str, found: Any, seen: list[str] | None = None) -> Any:
    """Finds `found` where 2 is right."""

    def make() -> Any:
        if isinstance(found, Exception):
            raise found
        run: Callable[[], None] = lambda: None if seen is None else seen.append(name)  # noqa: E731
        check = lambda: [harness.Deviation.of("it", found, 2.0, 0.01)]  # noqa: E731
        return harness.Ready(run, check)

    return harness.Candidate("case", name, make)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # Ratios 2, 0.5, 3: their median is 2, that of the medians 2/4.
    assert harness.ratio([2, 2, 12], [1, 4, 4]) == 2
    assert harness.ratio([6, 2, 3], [1, 1, 1], [2, 3, 2]) == 1  # of a sum: 2, 0.5, 1
    assert harness.spread([1, 2, 3, 4, 5]) == pytest.approx((4 - 2) / 3)
    assert harness.spread([7]) == 0


def test_every_round_runs_all_candidates_in_an_order_of_its_own() -> None:
    seen: list[str] = []
    names = list("abcdef")
    harness.measure([candidate(name, 2.0, seen) for name in names], {}, rounds=8, retries=0)
    rounds = [seen[i : i + 6] for i in range(6, len(seen), 6)]  # after the one that warms up
    assert len(rounds) == 8
    assert all(sorted(order) == names for order in rounds)
    assert len({*map(tuple, rounds)}) > 4
    again: list[str] = []
    harness.measure([candidate(name, 2.0, again) for name in names], {}, rounds=8, retries=0)
    assert again == seen


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (2.001, "ok"),
        (2.1, "disqualified: it is off by 5.0e-02"),
        (float("nan"), "disqualified: it is off by nan"),
        (ModuleNotFoundError("no", name="fast_peer"), "not installed: fast_peer"),
        (RuntimeError("no kernel\nfor this"), "failed: RuntimeError: no kernel"),
    ],
)
def test_what_is_not_right_keeps_its_line_and_is_not_timed(found: Any, status: str) -> None:
    seen: list[str] = []
    listed = [candidate("right", 2.0, seen), candidate("peer", found, seen)]
    right, peer = harness.measure(listed, {"case": ["right"]}, rounds=3, retries=0)
    assert (right["status"], len(right["seconds"])) == ("ok", 3)
    assert peer["status"] == status
    assert len(peer["seconds"]) == (3 if status == "ok" else 0)
    assert ("peer" in seen) == (status == "ok")
    machine = {"processor": "abacus"}
    records = [{**r, "malloc": "default", "machine": machine} for r in (right, peer)]
    assert ("peer" if status == "ok" else f"peer ({status})") in report.text(records, [])


def test_rounds_are_repeated_while_the_floor_is_restless(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter([[1.0, 2.0, 3.0], [1.0, 1.2, 1.4], [1.0, 1.5, 2.0]])
    monkeypatch.setattr(harness, "timed", lambda *_: [next(attempts)])
    (record,) = harness.measure([candidate("a", 2.0)], {"case": ["a"]}, rounds=3, retries=2)
    assert (record["attempts"], record["seconds"]) == (3, [1.0, 1.2, 1.4])  # the calmest
    assert record["floor_spread"] == pytest.approx(0.2 / 1.2)
    attempts = iter([[1.0, 2.0, 3.0], [1.0, 1.05, 1.1], [0.0, 0.0, 0.0]])
    (record,) = harness.measure([candidate("a", 2.0)], {"case": ["a"]}, rounds=3, retries=2)
    assert (record["attempts"], record["seconds"]) == (2, [1.0, 1.05, 1.1])


def record(name: str, seconds: Sequence[float], **more: Any) -> dict[str, Any]:
    memory = {"temporaries": 10, "outputs": 1, "peak": 20}
    return {
        "case": "c", "candidate": name, "status": "ok", "seconds": seconds, "memory": memory,
        "collectives": None, "malloc": "default", **more,
    }  # fmt: skip


def test_targets_take_the_smallest_alternative_and_leave_out_the_disqualified() -> None:
    records = [
        record("ours", [3.0, 3.0]),
        record("slow", [6.0, 6.0]),
        record("fast", [4.0, 4.0]),
        record("part", [1.0, 1.0]),
        record("wrong", [1.0, 1.0], status="disqualified: it is off"),
    ]

    def reached(*against: tuple[str, ...], quantity: str = "seconds") -> float | None:
        keys = tuple(tuple(("c", name) for name in names) for names in against)
        value: float | None = report.Target("", 1.0, ("c", "ours"), keys, quantity).reached(records)
        return value

    assert reached(("slow",), ("fast",)) == 0.75
    assert reached(("slow",), ("fast", "part")) == 0.6
    assert reached(("wrong",), ("slow",)) == 0.5
    assert reached(("wrong",)) is None
    assert reached(("slow",), quantity="temporaries") == 1.0


def test_only_cases_measured_again_are_replaced() -> None:
    old = [record("x", [1.0], case="a"), record("x", [1.0], case="b")]
    new = [record("y", [2.0], case="b")]
    assert report.merged(old, new) == [old[0], *new]
    retained = [record("y", [3.0], case="a", malloc="retained")]
    assert report.merged(old, retained) == [*retained, *old]


def test_the_losses_are_checked_against_float64_also_in_a_ragged_last_chunk() -> None:
    rng = np.random.default_rng(0)
    h, table = rng.normal(size=(300, 4)), rng.normal(size=(7, 4))
    targets = rng.integers(0, 7, 300)
    value, dh, dtable = loss.cross_entropy(h, table, targets)
    expected = oracle(h[None], table, targets[None], allowed_ids(7, 7))
    np.testing.assert_allclose(value, expected.total, rtol=1e-12)
    np.testing.assert_allclose(dh, expected.dh_BTD[0], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(dtable, expected.dtable_VD, rtol=1e-9, atol=1e-15)


def test_a_peer_that_scores_padding_is_disqualified() -> None:
    problem = loss.Problem.draw(64, 8, 40, "float32", 0)
    right = harness.Candidate("c", "right", lambda: loss.full(problem))

    def padded() -> Any:  # 8 rows of zeros, as of a peer that forgets to mask them
        import jax.numpy as jnp

        def total(h: Any, table: Any, targets: Any) -> Any:
            return loss._sum_of_full(h, jnp.pad(table, ((0, 8), (0, 0))), targets) / len(h)

        return loss.in_jax(problem, total)

    statuses = [harness.prepared(c)[0] for c in (right, harness.Candidate("c", "padded", padded))]
    assert statuses[0] == "ok"
    assert statuses[1].startswith("disqualified: the loss is off by")


def test_collectives_are_added_up_by_kind() -> None:
    text = """
      %a = f32[8,16]{1,0} all-gather(%x), dimensions={0}
      %b = (bf16[4]{0}, s32[2,3]{1,0}) all-reduce-start(%y, %z), to_apply=%add
      ROOT %c = f32[] all-reduce(%w), to_apply=%add
      %d = f32[99]{0} add(%p, %q)
    """
    assert lookup.collectives(text) == {"all-gather": 512, "all-reduce": 8 + 24 + 4}


def test_the_command_lists_benches_and_knows_its_mistakes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("loss", "lookup", "sparse", "step"))
    assert "harness" not in out and "runner" not in out
    assert "bench" not in find.experiments()
    assert cli.main(["bench", "los"]) == 2
    assert "did you mean 'loss'" in capsys.readouterr().err
    assert cli.main(["bench", "loss", "--rounds", "0"]) == 2
    assert "--rounds 0" in capsys.readouterr().err


def test_a_bench_measures_in_processes_of_both_allocators_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = sys.modules["vocabjax.experiments.bench.runner"]
    seen = []

    def process(name: str, words: Sequence[str], settings: dict[str, str]) -> Any:
        seen.append(settings)
        times = record("ours", [1.0, 2.0, 3.0], is_floor=True, error=1e-7)
        facts = {"attempts": 1, "rounds": 3, "floor_spread": 0.05}
        return [{**times, **facts, "machine": {"platform": "cpu"}}]

    monkeypatch.setattr(runner, "_in_process", process)
    flags = runner.Rounds(out=tmp_path)
    runner.run("loss", ["--tokens", "8"], flags, lambda: [], lambda cases: [])
    assert seen == [runner.RETAINED, {}]
    found = report.read(tmp_path / "results" / "loss.jsonl")
    assert [r["malloc"] for r in found] == ["retained", "default"]
    assert found[0]["command"] == "run.py bench loss --tokens 8"
    assert "| ours | 2,000.0 | 1.00 | 2,000.0 | 1.00 |" in capsys.readouterr().out
    assert (tmp_path / "loss.png").stat().st_size > 1000
