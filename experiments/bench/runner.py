"""Runs a bench once with each allocator, in processes of their own, and reports.

glibc maps large blocks afresh and gives them back at once, so every temporary faults its pages in on every call: several times
the cost of small kernels. "retained" keeps them (what a long training run should be started with); "default" is what one gets.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vocabjax.allocator import RETAINED
from vocabjax.errors import UserError
from vocabjax.files import write_atomic

from .harness import Record
from .report import Target, machine, merged, picture, read, text

_WORKER = "VOCABJAX_BENCH_RECORDS"  # where a worker writes what it measured


@dataclass(frozen=True)
class Rounds:
    """How a bench measures, and where its results go.

    Attributes:
      rounds: of all candidates, after one that warms up.
      retries: how often the rounds are repeated while the floor spreads by more than a tenth.
      seed: of the data and the orders.
      allocator: which to measure with.
      out: gets results/NAME.jsonl, results/NAME.md and NAME.png; cases measured earlier stay.
    """

    rounds: int = 7
    retries: int = 2
    seed: int = 0
    allocator: Literal["both", "retained", "default"] = "both"
    out: Path = Path("runs/bench")


def run(
    name: str,
    words: Sequence[str],
    flags: Rounds,
    measured: Callable[[], list[Record]],
    targets: Callable[[Sequence[str]], list[Target]],
    *,
    is_timed: bool = True,
) -> None:
    """Measures in processes of their own and reports; in such a process, measures.

    Args:
      words: the bench's arguments, which the processes get too.
      measured: does the work.
      targets: by the cases that there are results of.
      is_timed: False: the allocator makes no difference.

    Raises:
      UserError: fewer than one round, or a process failed.
    """
    if flags.rounds < 1 or flags.retries < 0:
        raise UserError(f"--rounds {flags.rounds} --retries {flags.retries}: at least 1 and 0")
    if path := os.environ.get(_WORKER):
        del sys.argv[1:]  # absl, which tokamax brings, would take them for its own
        write_atomic(
            Path(path), _lines([{**record, "machine": machine()} for record in measured()])
        )
        return
    out = flags.out
    command = shlex.join(["run.py", "bench", name, *words])
    both = ["retained", "default"] if is_timed else ["default"]
    mallocs = both if flags.allocator == "both" else [flags.allocator]
    records: list[Record] = []
    for malloc in mallocs:
        found = _in_process(name, words, RETAINED if malloc == "retained" else {})
        records += [{**record, "malloc": malloc, "command": command} for record in found]
        if records and records[0]["machine"]["platform"] != "cpu":
            break  # an accelerator's memory is XLA's own
    (out / "results").mkdir(parents=True, exist_ok=True)
    results = out / "results" / f"{name}.jsonl"
    records = merged(read(results), records)
    cases = list(dict.fromkeys(record["case"] for record in records))
    report = text(records, targets(cases))
    write_atomic(results, _lines(records))
    write_atomic(results.with_suffix(".md"), report)
    picture(records, out / f"{name}.png")
    print(f"\n{report}\nFigure: {out / f'{name}.png'}")


def _in_process(name: str, words: Sequence[str], settings: Mapping[str, str]) -> list[Record]:
    clean = {key: value for key, value in os.environ.items() if key not in RETAINED}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "records.jsonl"
        environment = {
            **clean,
            **settings,
            _WORKER: str(path),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        code = "import sys; from vocabjax.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, "bench", name, *words], env=environment, check=False
        )
        if done.returncode:
            raise UserError(f"bench {name} stopped with exit code {done.returncode}")
        return read(path)


def _lines(records: Sequence[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
