"""What `plan` prints and draws."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vocabjax.describe import section, size_text, table
from vocabjax.mesh import Layout
from vocabjax.plan import Exchange, Plan

_RED, _PLAIN = "\033[31m", "\033[0m"
_SHOWN = 16


def as_text(found: Plan) -> str:
    """One plan, section by section."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    chip = f"{found.devices} × {found.chip.name}" if found.chip else f"{found.devices} devices"
    sections = [
        section(f"memory of one device ({mesh}, {chip})", _memory(found)),
        section(f"exchanges, {_what(found)}", _exchanges(found.exchanges)),
    ]
    if (seconds := found.seconds()) is not None:
        sections.append(section("estimated time of a step", _times(found, seconds)))
    lines = ["\n".join(sections)]
    for warning in found.warnings:
        lines.append(red(f"WARNING: {warning}"))
    lines.append(f"compiled in {found.compile_seconds:.0f} s")
    return "\n".join(lines)


def _what(found: Plan) -> str:
    if found.mode == "train":
        return f"a training step of {found.tokens:,} tokens"
    return f"reading the prompts of {found.tokens:,} sequences, then every token"


def _memory(found: Plan) -> str:
    rows: list[tuple[str, Any]] = [("parameters", size_text(found.parameters))]
    if found.mode == "train":
        rows.append(("optimiser state", size_text(found.moments)))
    rest = found.arguments - found.parameters - found.moments
    rows += [
        ("other arguments", size_text(max(0, rest))),
        ("results that are not updated in place", size_text(max(0, found.outputs - found.aliased))),
        ("temporaries", size_text(found.temporaries)),
        ("peak", size_text(found.peak)),
    ]
    text = table(("", "bytes"), rows, right=True)
    if found.chip is None or found.fits is None:
        return text
    share = found.peak / found.chip.memory
    verdict = f"fits: {share:.0%} of the {size_text(found.chip.memory)} of a {found.chip.name}"
    if not found.fits:
        verdict = (
            red(f"does not fit: {share:.0%} of {size_text(found.chip.memory)}")
            + "\n"
            + advice(found)
        )
    return f"{text}\n\n{verdict}"


def advice(found: Plan) -> str:
    """What would make it fit."""
    state = found.parameters + found.moments
    lines = []
    if found.temporaries > state:
        lines.append(
            "temporaries are most of it: --trunk.remat full, a larger --train.accumulate, or a smaller --train.batch"
        )
    if state > found.temporaries:
        lines.append(
            "parameters and their moments are most of it: --rules fsdp, or a larger model axis in --mesh"
        )
    if found.chip is not None and state > found.chip.memory:
        need = math.ceil(found.devices * state / found.chip.memory)
        lines.append(
            f"they alone would fit {need} chips, if all of them were sharded over all chips"
        )
    return "\n".join(lines)


def _exchanges(all_: tuple[Exchange, ...]) -> str:
    if not all_:
        return "none"
    rows = [
        (
            x.part,
            x.kind,
            "+".join(x.axes),
            size_text(x.bytes),
            "a token" if x.times is None else x.times,
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
        return f"{text}\nof {found.tokens:,} prompts and a token each; {longest} takes longest"
    return (
        f"{text}\nbound by {longest}; at most {rate:,.0f} tokens/s if the three overlap, "
        f"{found.tokens / sum(seconds.values()):,.0f} if none does (published figures of the chip, not measured)"
    )


def red(text: str) -> str:
    """Red on a terminal."""
    return f"{_RED}{text}{_PLAIN}" if sys.stdout.isatty() else text


def as_json(found: Plan) -> dict[str, Any]:
    """Plain values."""
    return {
        "mesh": dict(found.mesh),
        "devices": found.devices,
        "chip": found.chip.name if found.chip else None,
        "mode": found.mode,
        "tokens_per_step": found.tokens,
        "bytes_per_device": {
            name: getattr(found, name)
            for name in (
                "parameters",
                "moments",
                "arguments",
                "outputs",
                "aliased",
                "temporaries",
                "peak",
            )
        },
        "fits": found.fits,
        "exchanges": [{**x._asdict(), "total": x.total} for x in found.exchanges],
        "warnings": list(found.warnings),
        "flops_per_step": found.flops,
        "estimated_seconds": found.seconds(),
        "compile_seconds": round(found.compile_seconds, 1),
    }


def side_by_side(plans: Mapping[str, Plan]) -> str:
    """Several plans, a column each."""
    all_ = list(plans.values())
    rows: list[tuple[str, ...]] = []
    for name in ("parameters", "moments", "temporaries", "peak"):
        rows.append((f"{name} of a device", *(size_text(getattr(x, name)) for x in all_)))
    rows.append(("fits", *("unknown" if x.fits is None else str(x.fits) for x in all_)))
    for part in dict.fromkeys(x.part for found in all_ for x in found.exchanges):
        sums = [sum(x.total for x in found.exchanges if x.part == part) for found in all_]
        if max(sums) * 100 > max(sum(x.total for x in found.exchanges) for found in all_):
            rows.append((f"sent: {part}", *(size_text(x) for x in sums)))
    rows.append(("sent: all", *(size_text(sum(x.total for x in f.exchanges)) for f in all_)))
    for name in ("compute", "memory", "network"):
        values = [found.seconds() for found in all_]
        if all(value is not None for value in values):
            rows.append((f"{name}, ms at least", *(f"{v[name] * 1e3:,.1f}" for v in values if v)))
    rows.append(("warnings", *(str(len(found.warnings)) for found in all_)))
    return table(("", *plans), rows, right=True)


def plot(layout: Layout, rows: int, path: Path) -> None:
    """Which part of every sharded dimension each device holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    named = {"vocab": f"vocabulary rows (of {rows:,})", "heads": "heads", "ffn": "feed-forward",
             "width": "width of matrices", "batch": "sequences"}  # fmt: skip
    devices = list(layout.mesh.devices.flat)
    figure = Figure(figsize=(2.6 * len(named), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (logical, title) in enumerate(named.items()):
        axes = figure.add_subplot(1, len(named), index + 1)
        shards = layout.shards(logical)
        where = layout.sharding(logical).devices_indices_map((shards,))
        boxes, shades = [], []
        for at, device in enumerate(devices):
            start, stop, _ = where[device][0].indices(shards)
            boxes.append(Rectangle((at, start / shards), 1, (stop - start) / shards))
            shades.append(start / shards)
        edge = "white" if len(devices) <= 32 else "none"
        drawn = PatchCollection(boxes, cmap="viridis", edgecolor=edge, linewidth=0.5)
        drawn.set_array(np.array(shades))
        drawn.set_clim(0, 1)
        axes.add_collection(drawn)
        axes.set_xlim(0, len(devices))
        axes.set_ylim(1, 0)
        over = "+".join(layout.axes(logical))
        axes.set_title(
            f"{title}\n{f'{shards} shards over {over}' if shards > 1 else 'all of it'}", fontsize=8
        )
        axes.set_xlabel("device", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_yticks([0, 0.5, 1], ["first", "", "last"] if not index else ["", "", ""])
    figure.savefig(path, dpi=110)
