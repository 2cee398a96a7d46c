"""What a bench says: its files, its table, its targets, its picture, and on what machine."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import jax

from vocabjax.experiment import markdown_table

from .harness import Record, ratio

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "torch", "cut-cross-entropy", "tokamax")
Key = tuple[str, str]  # case, candidate


@dataclass(frozen=True)
class Target:
    """A ratio that is to be reached.

    Attributes:
      against: alternatives, of which the smallest counts; each a sum of candidates.
      quantity: seconds, one of `Memory`'s, or the bytes of all collectives.
    """

    what: str
    limit: float
    ours: Key
    against: tuple[tuple[Key, ...], ...]
    quantity: Literal["seconds", "temporaries", "peak", "collectives"] = "seconds"

    def reached(self, records: Iterable[Record]) -> float | None:
        """The ratio in records of one allocator; None where something of it was not measured."""
        values: dict[Key, list[float]] = {}
        for record in records:
            if self.quantity == "seconds":
                found = record["seconds"]
            elif self.quantity == "collectives":
                found = [sum((record["collectives"] or {}).values())]
            else:
                found = [record["memory"][self.quantity]] if record["memory"] else []
            if record["status"] == "ok" and found:
                values[record["case"], record["candidate"]] = found
        sums = [
            tuple(values[key] for key in keys) for keys in self.against if values.keys() >= {*keys}
        ]
        if self.ours not in values or not sums:
            return None
        best = min(sums, key=lambda parts: sum(median(part) for part in parts))
        return ratio(values[self.ours], *best)


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": _processor(),
        "cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "system": platform.system(),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def read(path: Path) -> list[Record]:
    """The records of a file; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merged(old: Iterable[Record], new: Sequence[Record]) -> list[Record]:
    """The new records, and those of cases that were not measured again with that allocator."""
    again = {(record["case"], record["malloc"]) for record in new}
    kept = [record for record in old if (record["case"], record["malloc"]) not in again]
    return sorted(
        [*kept, *new], key=lambda record: (record["case"], record["malloc"] != "retained")
    )


def _allocators(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record["malloc"] for record in records))


def text(records: Sequence[Record], targets: Sequence[Target]) -> str:
    """Markdown: machine, a table per case, and the targets."""
    latest = records[-1]["machine"]
    parts = ["Machine: " + ", ".join(f"{name} {value}" for name, value in latest.items())]
    for case in dict.fromkeys(record["case"] for record in records):
        mine = [record for record in records if record["case"] == case]
        parts += [f"**{case}**", _case_table(mine)]
        if notes := _rounds(mine):
            parts.append(notes)
    if rows := [row for target in targets if (row := _target_row(target, records))]:
        mallocs = _allocators(records)
        parts.append(markdown_table(("target", "at most", *mallocs), rows))
    return "\n\n".join(parts) + "\n"


def _rounds(records: Sequence[Record]) -> str:
    notes = {
        record[
            "malloc"
        ]: f"{record['malloc']} allocator: {record['rounds']} rounds, the floor spread by "
        f"{record['floor_spread']:.0%}, attempt{'s' * (record['attempts'] > 1)}: {record['attempts']}"
        for record in records
        if record["rounds"]
    }
    return "; ".join(notes.values())


def _case_table(records: Sequence[Record]) -> str:
    mallocs = _allocators(records)
    timed = any(record["seconds"] for record in records)
    header = ["candidate"]
    for malloc in mallocs if timed else ():
        header += [f"ms ({malloc})", "× floor"]
    moves = any(record["collectives"] is not None for record in records)
    header += ["temporaries MB", "outputs MB", "peak MB", *["collectives"] * moves, "error"]
    rows = []
    for name in dict.fromkeys(record["candidate"] for record in records):
        mine = {record["malloc"]: record for record in records if record["candidate"] == name}
        first = next(iter(mine.values()))
        failed = next((r["status"] for r in mine.values() if r["status"] != "ok"), None)
        row = [name if failed is None else f"{name} ({failed})"]
        for malloc in mallocs if timed else ():
            seconds = mine[malloc]["seconds"] if malloc in mine else []
            floor = _floor([record for record in records if record["malloc"] == malloc])
            row.append(f"{median(seconds) * 1e3:,.1f}" if seconds else "–")
            row.append(f"{ratio(seconds, floor):.2f}" if seconds and floor else "–")
        memory = first["memory"]
        sizes = ("temporaries", "outputs", "peak")
        row += [f"{memory[key] / 1e6:,.1f}" if memory else "–" for key in sizes]
        if moves:
            sent = (first["collectives"] or {}).items()
            row.append(", ".join(f"{kind} {size / 1e6:,.2f} MB" for kind, size in sent) or "–")
        row.append("–" if first["error"] is None else f"{first['error']:.0e}")
        rows.append(row)
    return markdown_table(header, rows)


def _floor(records: Iterable[Record]) -> list[float] | None:
    """The seconds of the fastest floor."""
    floors = [record["seconds"] for record in records if record["is_floor"] and record["seconds"]]
    return min(floors, key=median, default=None)


def _target_row(target: Target, records: Sequence[Record]) -> list[str] | None:
    row, known = [target.what, f"{target.limit:.3g}"], False
    for malloc in _allocators(records):
        value = target.reached([record for record in records if record["malloc"] == malloc])
        known = known or value is not None
        row.append(
            "–" if value is None else f"{value:.3f}{'' if value <= target.limit else ' (missed)'}"
        )
    return row if known else None


def picture(records: Sequence[Record], path: Path) -> None:
    """One panel per case: milliseconds, or where nothing was timed megabytes (of collectives, else of temporaries)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(record["case"] for record in records))
    names = {
        case: list(dict.fromkeys(r["candidate"] for r in records if r["case"] == case))
        for case in cases
    }
    heights = [1.2 + 0.42 * len(names[case]) for case in cases]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(cases), squeeze=False, gridspec_kw={"height_ratios": heights})[
        :, 0
    ]
    for axes, case in zip(panels, cases, strict=True):
        mine = [record for record in records if record["case"] == case]
        mallocs = _allocators(mine)
        timed = any(record["seconds"] for record in mine)
        height = 0.8 / len(mallocs)
        for index, malloc in enumerate(mallocs):
            of = {record["candidate"]: record for record in mine if record["malloc"] == malloc}
            values = [_length(of.get(name), timed) for name in names[case]]
            places = [row + index * height for row in range(len(values))]
            bars = axes.barh(places, values, height, label=malloc if timed else None)
            axes.bar_label(
                bars, [f"{value:,.1f}" if value else "" for value in values], fontsize=7, padding=2
            )
            if timed and index == 0 and (floor := _floor(of.values())):
                axes.axvline(median(floor) * 1e3, color="0.4", lw=0.8, ls="--", label="floor")
        middle = 0.4 - height / 2
        axes.set_yticks([row + middle for row in range(len(names[case]))], names[case], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(case, fontsize=9)
        axes.set_xlabel("ms" if timed else "MB", fontsize=8)
        axes.margins(x=0.12)
        if timed:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def _length(record: Record | None, timed: bool) -> float:
    if record is None or record["status"] != "ok":
        return 0.0
    if timed:
        return median(record["seconds"]) * 1e3 if record["seconds"] else 0.0
    if record["collectives"]:
        return sum(record["collectives"].values()) / 1e6
    return record["memory"]["temporaries"] / 1e6 if record["memory"] else 0.0
