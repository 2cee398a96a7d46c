"""A trace of a few training steps, and where their time went.

The trace is JAX's own (for Perfetto, XProf or TensorBoard). The table beside it adds up, by operation, the time that devices
were busy with the step's program, and names the place in the code that each operation came from.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from vocabjax.files import write_atomic

SKIPPED, TRACED = 2, 5  # steps: the first one compiles, and the second may still wait for it

_OPERATION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (?:.*? )??([a-z][a-z0-9-]*)\(", re.MULTILINE)
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_CONTAINERS = ("while", "call", "conditional")  # their time is that of what they hold
_NOISE = re.compile(r"\b(?:jit|jvp|transpose|while|body|closed_call|shard_map|checkpoint|cond)\b")


class Item(NamedTuple):
    """One operation of the compiled program.

    Attributes:
      seconds: per step, added up over devices and threads.
      share: of all operations.
      operation: its name in the program.
      origin: the scopes and functions it came from, outermost first.
    """

    seconds: float
    share: float
    operation: str
    origin: str


class Profiler:
    """Traces `TRACED` steps of a command, after `SKIPPED`, into a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._taken = 0
        self._running = False

    def after_step(self, results: object, program: Callable[[], str]) -> str | None:
        """Call it after each step; returns the table when the trace is complete.

        Args:
          results: of the step; the trace begins and ends when they are there.
          program: gives the text of the step's compiled program.
        """
        self._taken += 1
        if self._taken == SKIPPED:
            jax.block_until_ready(results)
            jax.profiler.start_trace(str(self.directory))
            self._running = True
        if self._taken < SKIPPED + TRACED or not self._running:
            return None
        jax.block_until_ready(results)
        self.close()
        text = as_text(read_trace(self.directory, program(), TRACED))
        write_atomic(self.directory / "operations.txt", text)
        return text

    def close(self) -> None:
        """Ends a trace that is still going on."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


def read_trace(directory: Path, program: str, steps: int) -> list[Item]:
    """The operations of a program in the newest trace of a directory, longest first.

    Args:
      program: the text of the compiled program; operations that are not in it are left out.
      steps: how often it ran.
    """
    found = {}
    for match in _OPERATION.finditer(program):
        line = program[match.start() : program.find("\n", match.end())]
        origin = _ORIGIN.search(line)
        if match[2] not in _CONTAINERS:
            found[match[1]] = _readable(origin[1]) if origin else ""
    module = re.match(r"HloModule (\w+)", program)
    path = max(directory.glob("plugins/profile/*/*.xplane.pb"))
    nanoseconds: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the binding's own types
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line_ in plane.lines:
                for event in line_.events:
                    stats = dict(event.stats)
                    name = str(stats.get("hlo_op", "")).removeprefix("%")
                    if name in found and module and stats.get("hlo_module") == module[1]:
                        nanoseconds[name] += event.duration_ns
    total = sum(nanoseconds.values()) or 1
    return [
        Item(time / 1e9 / steps, time / total, name, found[name])
        for name, time in nanoseconds.most_common()
    ]


def as_text(items: list[Item], largest: int = 15) -> str:
    """The largest items, a line each."""
    lines = [f"{'ms/step':>9}  share  operation, and where it comes from"]
    for item in items[:largest]:
        lines.append(
            f"{item.seconds * 1e3:9.2f}  {item.share:5.1%}  {item.operation}  {item.origin}"
        )
    rest = sum(item.seconds for item in items[largest:])
    lines.append(f"{rest * 1e3:9.2f}         {max(0, len(items) - largest)} more")
    return "\n".join(lines) + "\n"


def _readable(origin: str) -> str:
    """`jit(step)/transpose(jvp(trunk))/while/body/dot_general` → `trunk/dot_general (backward)`."""
    parts = [part for part in re.split(r"[/()]+", origin) if part and not _NOISE.fullmatch(part)]
    parts = [part for part in parts if part not in ("step", "update", "rematted_computation")]
    backward = " (backward)" if "transpose(" in origin else ""
    return "/".join(dict.fromkeys(parts)) + backward
