"""What `plan` prints and draws."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vocabjax.describe import section, size_text, table
from vocabjax.design import Mode
from vocabjax.errors import UserError
from vocabjax.forecast.accelerators import Accelerator
from vocabjax.forecast.plan import Exchange, Plan
from vocabjax.forecast.search import Candidate
from vocabjax.mesh import Layout

_RED, _PLAIN = "\033[31m", "\033[0m"
_SHOWN = 16


def as_text(found: Plan) -> str:
    """One plan, section by section."""
    mesh = _mesh_text(found.mesh)
    chip = f"{found.devices} × {found.chip.name}" if found.chip else f"{found.devices} devices"
    sections = [section(f"memory of one device ({mesh}, {chip})", _memory(found))]
    if found.exchanges is not None:
        sections.append(
            section(f"exchanges, {_what(found)}", _exchanges(found.exchanges, found.mode))
        )
    if (seconds := found.seconds()) is not None:
        what = "a step" if found.mode == "train" else "a token of every sequence"
        sections.append(section(f"estimated time of {what}", _times(found, seconds)))
    lines = ["\n".join(sections)]
    for warning in found.warnings:
        lines.append(red(f"WARNING: {warning}"))
    did = "compiled" if found.exchanges is not None else "refused"
    lines.append(f"{did} in {found.compile_seconds:.0f} s")
    return "\n".join(lines)


def _what(found: Plan) -> str:
    if found.mode == "train":
        return f"a training step of {found.tokens:,} tokens"
    return f"reading the prompts of {found.tokens:,} sequences, then every token"


def _memory(found: Plan) -> str:
    rows: list[tuple[str, Any]] = [("parameters", size_text(found.parameters))]
    if found.mode == "train":
        rows.append(("optimiser state", size_text(found.moments)))
    held = found.footprint
    rest = held.arguments - found.parameters - found.moments
    rows.append(("other arguments", size_text(max(0, rest))))
    if found.exchanges is not None:
        beside = max(0, held.outputs - held.aliased)
        rows.append(("results that are not updated in place", size_text(beside)))
    rows.append(("temporaries", size_text(held.temporaries)))
    if found.mode == "decode":
        rows.append(("… of which keys and values", size_text(found.cache)))
    rows.append(("peak", size_text(held.peak)))
    text = table(("", "bytes"), rows, right=True)
    if found.chip is None or found.available is None:
        return text
    share = f"{held.peak / found.available:.0%} of the {size_text(found.available)} of a {found.chip.name}"
    if found.fits:
        return f"{text}\n\nfits: {share}"
    lines = [text, "", red(f"does not fit: {share}"), *(f"  {line}" for line in found.advice)]
    return "\n".join(lines)


def _exchanges(all_: tuple[Exchange, ...], mode: Mode) -> str:
    if not all_:
        return "none"
    rows = [
        (
            x.part,
            x.kind,
            "+".join(x.axes),
            size_text(x.bytes),
            f"{x.times} a {'token' if mode == 'decode' else 'turn'}" if x.each_token else x.times,
            size_text(x.total),
        )
        for x in all_[:_SHOWN]
    ]
    text = table(("part", "kind", "over", "bytes", "times", "in all"), rows)
    if len(all_) > _SHOWN:
        rest = sum(x.total for x in all_[_SHOWN:])
        text += f"\n{len(all_) - _SHOWN} more: {size_text(rest)}"
    return text


def _times(found: Plan, seconds: Mapping[str, float]) -> str:
    rows = [(name, f"{value * 1e3:,.2f} ms") for name, value in seconds.items()]
    longest = max(seconds, key=lambda name: seconds[name])
    rate = found.tokens / max(seconds.values())
    text = table(("", "at least"), rows, right=True)
    if found.mode == "decode":
        return f"{text}\nbound by {longest}; at most {rate:,.0f} tokens/s (published figures of the chip, not measured)"
    return (
        f"{text}\nbound by {longest}; at most {rate:,.0f} tokens/s if the three overlap, "
        f"{found.tokens / sum(seconds.values()):,.0f} if none does (published figures of the chip, not measured)"
    )


def red(text: str) -> str:
    """Red on a terminal."""
    return f"{_RED}{text}{_PLAIN}" if sys.stdout.isatty() else text


def as_json(found: Plan) -> dict[str, Any]:
    """Plain values."""
    held = found.footprint
    return {
        "mesh": dict(found.mesh),
        "devices": found.devices,
        "chip": found.chip.name if found.chip else None,
        "mode": found.mode,
        "tokens_per_step": found.tokens,
        "bytes_per_device": {
            "parameters": found.parameters,
            "moments": found.moments,
            "cache": found.cache,
            "arguments": held.arguments,
            "outputs": held.outputs,
            "aliased": held.aliased,
            "temporaries": held.temporaries,
            "peak": held.peak,
            "available": found.available,
        },
        "compiled": found.exchanges is not None,
        "fits": found.fits,
        "advice": list(found.advice),
        "exchanges": [{**x._asdict(), "total": x.total} for x in found.exchanges or ()],
        "warnings": list(found.warnings),
        "flops_per_step": found.flops,
        "estimated_seconds": found.seconds(),
        "compile_seconds": round(found.compile_seconds, 1),
    }


def side_by_side(plans: Mapping[str, Plan]) -> str:
    """Several plans, a column each."""
    all_ = list(plans.values())
    rows: list[tuple[str, ...]] = []

    def add(name: str, of: Callable[[Plan], int]) -> None:
        rows.append((name, *(size_text(of(found)) for found in all_)))

    def sent(name: str, part: str | None = None) -> None:
        cells = [
            "unknown"
            if found.exchanges is None
            else size_text(sum(x.total for x in found.exchanges if part in (None, x.part)))
            for found in all_
        ]
        rows.append((f"sent: {name}", *cells))

    add("parameters of a device", lambda found: found.parameters)
    add("moments of a device", lambda found: found.moments)
    add("temporaries of a device", lambda found: found.footprint.temporaries)
    add("peak of a device", lambda found: found.footprint.peak)
    rows.append(("fits", *("unknown" if x.fits is None else str(x.fits) for x in all_)))
    known = [found.exchanges for found in all_ if found.exchanges is not None]
    most = max((sum(x.total for x in exchanges) for exchanges in known), default=0)
    for part in dict.fromkeys(x.part for exchanges in known for x in exchanges):
        sums = (sum(x.total for x in exchanges if x.part == part) for exchanges in known)
        if max(sums) * 100 > most:
            sent(part, part)
    sent("all")
    for name in ("compute", "memory", "network"):
        values = [found.seconds() for found in all_]
        if any(values):
            cells = ("unknown" if v is None else f"{v[name] * 1e3:,.3g}" for v in values)
            rows.append((f"{name}, ms at least", *cells))
    rows.append(("warnings", *(str(len(found.warnings)) for found in all_)))
    return table(("", *plans), rows, right=True)


def ranking(
    ranked: Sequence[Candidate], truths: Sequence[Plan | UserError | None], chip: Accelerator
) -> str:
    """Meshes and rules with what formulas say of them; beside it what compiling some of them told (None: it was not)."""
    rows, refusals = [], []
    for candidate, truth in zip(ranked, truths, strict=True):
        row = [
            _mesh_text(candidate.mesh),
            candidate.rules,
            size_text(candidate.bytes),
            "yes" if candidate.fits(chip) else "no",
            f"{candidate.compute * 1e3:.3g}",
            f"{candidate.network * 1e3:.3g}",
        ]
        if truth is None:
            row += ["", "", ""]
        elif isinstance(truth, UserError):
            row += ["refused", "", ""]
            where = f"{_mesh_text(candidate.mesh)} with {candidate.rules}"
            refusals.append(f"\n{where} was refused: {truth}")
        else:
            seconds = truth.seconds()
            network = "unknown" if seconds is None else f"{seconds['network'] * 1e3:.3g}"
            row += [size_text(truth.footprint.peak), "yes" if truth.fits else "no", network]
        rows.append(row)
    estimated = ("mesh", "rules", "bytes", "fits", "compute ms", "network ms")
    return table((*estimated, "compiled: peak", "fits", "network ms"), rows) + "".join(refusals)


def ranking_as_json(
    ranked: Sequence[Candidate], truths: Sequence[Plan | UserError | None], chip: Accelerator
) -> list[dict[str, Any]]:
    """`ranking` as plain values."""
    return [
        {
            "mesh": candidate.mesh,
            "rules": candidate.rules,
            "estimate": {
                "bytes": candidate.bytes,
                "fits": candidate.fits(chip),
                "compute_seconds": candidate.compute,
                "network_seconds": candidate.network,
            },
            "plan": as_json(truth) if isinstance(truth, Plan) else None,
            "refused": str(truth) if isinstance(truth, UserError) else None,
        }
        for candidate, truth in zip(ranked, truths, strict=True)
    ]


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def plot(layout: Layout, rows: int, path: Path) -> None:
    """Which part of every sharded dimension each device holds: the mesh once per dimension, coloured by part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = {"vocab": f"{rows:,} vocabulary rows", "heads": "heads", "ffn": "feed-forward",
              "width": "width of matrices", "batch": "sequences", "seq": "positions"}  # fmt: skip
    named = {k: v for k, v in titles.items() if k != "seq" or layout.shards("seq") > 1}
    first, *others = layout.mesh.axis_names
    grid = layout.mesh.devices.reshape(layout.mesh.devices.shape[0], -1)
    down, across = grid.shape
    height = min(7.0, max(2.6, 0.32 * down + 1.4))
    figure = Figure(figsize=(2.5 * len(named), height), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (logical, title) in enumerate(named.items()):
        axes = figure.add_subplot(1, len(named), index + 1)
        shards = layout.shards(logical)
        where = layout.sharding(logical).devices_indices_map((shards,))
        part = np.array([[where[device][0].indices(shards)[0] for device in row] for row in grid])
        axes.imshow(part, aspect="auto", cmap="viridis", vmin=0, vmax=max(1, shards - 1))
        over = "+".join(layout.axes(logical))
        size = f"{rows // shards:,} rows" if logical == "vocab" else f"1/{shards}"
        held = f"{size} each, by {over}" if shards > 1 else "all of it on each"
        axes.set_title(f"{title}\n{held}", fontsize=8)
        for at in _labelled(part):
            shade = "black" if part[at] > 0.6 * max(1, shards - 1) else "white"
            label = str(part[at])
            axes.text(at[1], at[0], label, ha="center", va="center", fontsize=7, color=shade)
        axes.set_xticks([0, across - 1] if across > 1 else [0])
        axes.set_yticks([0, down - 1] if down > 1 else [0])
        axes.tick_params(labelsize=7)
        if others:
            axes.set_xlabel(" · ".join(others), fontsize=8)
        if index == 0:
            axes.set_ylabel(first, fontsize=8)
    figure.suptitle("What each device of the mesh holds: the number of its part", fontsize=9)
    figure.savefig(path, dpi=130)


def _labelled(part: np.ndarray) -> list[tuple[int, int]]:
    """Cells that bear the number of their part: as many as can be read, spread evenly."""
    rows, columns = (_spread(size) for size in part.shape)
    if part.shape[1] > 16:  # cells are narrow
        columns = columns[1::4]
    return [(row, column) for row in rows for column in columns]


def _spread(size: int) -> list[int]:
    """At most 16 of so many cells, in the middles of equal stretches."""
    shown = min(size, 16)
    return [int((at + 0.5) * size / shown) for at in range(shown)]
