"""Times candidates side by side: checked first, in an order shuffled per round, against a floor of the same rounds.

    ratio(a, b) = median over rounds of seconds(a) / seconds(b)

A machine's speed drifts by more than what is measured, but within a round it drifts for all candidates alike. So no time of one
round is ever set against one of another. A candidate that is wrong, that fails, or whose package is missing keeps its
line in the table and is not timed.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

import jax
import numpy as np

CALM = 0.10  # the largest spread of the floor in rounds that count


class Deviation(NamedTuple):
    """How far a result lies from what it must be, and how far it may."""

    what: str
    error: float
    limit: float

    @staticmethod
    def of(what: str, found: Any, expected: np.ndarray | float, limit: float) -> "Deviation":
        """‖found − expected‖ / ‖expected‖, in float64."""
        expected = np.asarray(expected, np.float64)
        error = float(np.linalg.norm(np.asarray(found, np.float64) - expected))
        return Deviation(what, error / max(float(np.linalg.norm(expected)), 1e-30), limit)


class Memory(NamedTuple):
    """Bytes of a compiled program on one device.

    Attributes:
      temporaries: held while it runs.
      outputs: results, those in place of donated arguments included.
      peak: arguments, temporaries and outputs, where donated arguments and the outputs in their place count once.
    """

    temporaries: int
    outputs: int
    peak: int

    @staticmethod
    def of(compiled: jax.stages.Compiled) -> "Memory":
        sizes: Any = compiled.memory_analysis()
        temporaries, outputs = sizes.temp_size_in_bytes, sizes.output_size_in_bytes
        held = sizes.argument_size_in_bytes + outputs - sizes.alias_size_in_bytes
        return Memory(temporaries, outputs, held + temporaries)


class Ready(NamedTuple):
    """A candidate that can run.

    Attributes:
      run: does the work once, and has finished it when it returns.
      check: does it once too, and compares the result with float64.
      memory: None: unknown, as of torch.
      collectives: bytes of the results of a device's collectives, by kind; None: unknown.
    """

    run: Callable[[], Any]
    check: Callable[[], Sequence[Deviation]]
    memory: Memory | None = None
    collectives: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to do what a case asks for. `make` imports, allocates and compiles."""

    case: str
    name: str
    make: Callable[[], Ready]


Record = dict[str, Any]  # of one candidate: what a line of results/NAME.jsonl holds


def measure(
    candidates: Sequence[Candidate],
    floors: Mapping[str, Sequence[str]],
    rounds: int,
    retries: int,
    seed: int = 0,
) -> list[Record]:
    """Checks the candidates, times those that are right in the same rounds, and returns one record each.

    Args:
      floors: by case, the candidates of which the fastest is its floor.
      rounds: 0: nothing is timed.
      retries: how often all rounds are repeated while a floor spreads by more than `CALM`; the calmest counts.
    """
    records: list[Record] = []
    ready: list[tuple[Record, Callable[[], Any]]] = []
    for candidate in candidates:
        status, error, made = prepared(candidate)
        record: Record = {
            "case": candidate.case,
            "candidate": candidate.name,
            "status": status,
            "error": error,
            "memory": made and made.memory and made.memory._asdict(),
            "collectives": made and made.collectives,
            "is_floor": candidate.name in floors.get(candidate.case, ()),
            "seconds": [],
        }
        records.append(record)
        if made is not None and status == "ok":
            ready.append((record, made.run))
    if not rounds:
        ready = []
    attempts = []
    for attempt in range(1 + retries):
        times = timed([run for _, run in ready], rounds, random.Random(f"{seed} {attempt}"))
        spreads = [
            spread(seconds)
            for (record, _), seconds in zip(ready, times, strict=True)
            if record["is_floor"]
        ]
        attempts.append((max(spreads, default=0.0), times))
        if attempts[-1][0] <= CALM:
            break
    calmest, times = min(attempts, key=lambda attempt: attempt[0])
    for (record, _), seconds in zip(ready, times, strict=True):
        record["seconds"] = seconds
    return [
        {**record, "floor_spread": calmest, "attempts": len(attempts), "rounds": rounds}
        for record in records
    ]


def prepared(candidate: Candidate) -> tuple[str, float | None, Ready | None]:
    """(status, largest error, what can be timed if the status is "ok")."""
    try:
        ready = candidate.make()
        deviations = ready.check()
    except ImportError as error:
        return f"not installed: {error.name or error}", None, None
    except Exception as error:  # whatever a peer does: the others are measured all the same
        reason = str(error).strip().splitlines() or [""]
        return f"failed: {type(error).__name__}: {reason[0][:120]}", None, None
    # Written so that NaN is wrong.
    wrong = [f"{d.what} is off by {d.error:.1e}" for d in deviations if not d.error <= d.limit]
    status = f"disqualified: {', '.join(wrong)}" if wrong else "ok"
    return status, max((d.error for d in deviations), default=None), ready


def timed(
    runs: Sequence[Callable[[], Any]], rounds: int, order: random.Random
) -> list[list[float]]:
    """Seconds of each run in each round; the order within a round is drawn anew."""
    seconds: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(rounds):
        for index in order.sample(range(len(runs)), len(runs)):
            start = time.perf_counter()
            result = runs[index]()
            seconds[index].append(time.perf_counter() - start)
            del result  # not while the next one is timed
    return seconds


def ratio(ours: Sequence[float], *parts: Sequence[float]) -> float:
    """The median over rounds of ours over the sum of the parts."""
    return median(mine / sum(theirs) for mine, *theirs in zip(ours, *parts, strict=True))


def spread(seconds: Sequence[float]) -> float:
    """The distance between the quartiles over the median: half of the rounds lie within it."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle
