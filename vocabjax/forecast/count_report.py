"""What `count` prints and draws."""

from collections.abc import Mapping
from pathlib import Path

from vocabjax.describe import section, size_text, table
from vocabjax.forecast.accelerators import Accelerator
from vocabjax.forecast.count import Count


def as_text(found: Count, chip: Accelerator | None) -> str:
    """One model, section by section."""
    total = found.parameters
    rows = [
        (part.name, part.parameters, _share(part.parameters, total), part.train_flops)
        for part in found.parts
    ]
    rows.append(("all", total, _share(total, total), found.train_flops))
    sections = [
        section(
            "parameters, and training FLOPs per token (3 times the forward's)",
            table(("part", "parameters", "share", "FLOPs"), rows)
            + f"\n\n{found.vocab:,} in the vocabulary ({_share(found.vocab, total)})"
            + (f"; {found.padding:,} more only pad tables" if found.padding else ""),
        ),
        section(
            "optimiser groups",
            table(("group", "parameters"), sorted(found.groups.items(), key=lambda x: -x[1])),
        ),
        section("bytes while training on one device", _memory_text(found)),
    ]
    if found.decodes:
        sections.append(section(_decode_title(found), _decode_text(found, chip)))
    return "\n".join(sections)


def _decode_title(found: Count) -> str:
    many = f"{found.batch} sequences" if found.batch > 1 else "one sequence"
    return f"decoding a token of {many}, {found.context:,} tokens behind it, in {found.dtype}"


def _decode_text(found: Count, chip: Accelerator | None) -> str:
    rows = [
        (part.name, part.decode_flops, size_text(round(part.decode_bytes)), part.intensity)
        for part in found.parts
        if part.decode_bytes
    ]
    rows.append(("all", found.decode_flops, size_text(round(found.decode_bytes)), found.intensity))
    lines = [
        table(("part", "FLOPs", "moved at least", "FLOPs/byte"), rows),
        "",
        f"the head costs the FLOPs of {found.head_in_layers:.1f} layers' matrices",
    ]
    if chip is not None:
        bound = ["bound by memory" if x < chip.ridge else "bound by compute"
                 for x in (found.intensity, found.head.intensity)]  # fmt: skip
        lines += [
            f"on {chip.name} ({chip.ridge:.0f} FLOPs per byte): {bound[0]}, the head alone {bound[1]};",
            f"at least {found.seconds(chip) * 1e3:.3g} ms a step, {found.batch / found.seconds(chip):,.0f} tokens/s",
        ]
    return "\n".join(lines)


def _memory_text(found: Count) -> str:
    memory = found.memory
    rows = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimiser's moments", memory.moments),
        ("activations kept for the backward, a sequence", memory.kept),
        ("logits of a microbatch, were they made at once", memory.logits),
        ("held for the loss instead: a chunk's scores, the table's gradient", memory.loss),
    ]
    return table(("what", "bytes"), [(name, size_text(value)) for name, value in rows], right=True)


def side_by_side(counts: Mapping[str, Count], chip: Accelerator | None) -> str:
    """Several vocabularies on one trunk, a column each."""
    first = next(iter(counts.values()))
    names = list(dict.fromkeys(part.name for found in counts.values() for part in found.parts))
    rows: list[tuple[str, ...]] = []

    def row(name: str, values: list[str]) -> None:
        rows.append((name, *values))

    for name in names:
        of_part = [
            next((part.parameters for part in found.parts if part.name == name), None)
            for found in counts.values()
        ]
        row(name, ["–" if x is None else f"{x:,}" for x in of_part])
    all_ = list(counts.values())
    row("all parameters", [f"{x.parameters:,}" for x in all_])
    row("share of the vocabulary", [_share(x.vocab, x.parameters) for x in all_])
    row("training FLOPs per token", [f"{x.train_flops:.3e}" for x in all_])
    row(
        "parameters, gradients, moments",
        [size_text(x.memory.parameters + x.memory.gradients + x.memory.moments) for x in all_],
    )
    if first.decodes:
        row("decoding: FLOPs per token", [f"{x.decode_flops:.3e}" for x in all_])
        row("head, in layers", [f"{x.head_in_layers:.1f}" for x in all_])
        row("decoding: moved per token", [size_text(round(x.decode_bytes)) for x in all_])
        if chip is not None:
            row(f"ms a step on {chip.name}", [f"{x.seconds(chip) * 1e3:.3g}" for x in all_])
    return table(("", *counts), rows, right=True)


def plot(counts: Mapping[str, Count], path: Path) -> None:
    """Parameters, and what decoding a token computes and moves: stacked by part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(part.name for found in counts.values() for part in found.parts))
    panels = [("parameters", "parameters"), ("training FLOPs per token", "train_flops")]
    if all(found.decodes for found in counts.values()):
        panels += [
            ("decoding: FLOPs per token", "decode_flops"),
            ("decoding: bytes moved per token", "decode_bytes"),
        ]
    figure = Figure(figsize=(3.4 * len(panels), 1.8 + 0.42 * len(counts)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, field) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        left = [0.0] * len(counts)
        for color, name in enumerate(names):
            values = [
                sum(getattr(part, field) for part in found.parts if part.name == name)
                for found in counts.values()
            ]
            axes.barh(list(counts), values, left=left, color=f"C{color}", label=name, height=0.7)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        if index:
            axes.set_yticklabels([])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 6), fontsize=8)
    figure.savefig(path, dpi=110)


def _short(value: float) -> str:
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:g}{unit}"
    return f"{value:g}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"
