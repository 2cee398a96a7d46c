"""What configs, models, meshes and results look like on a terminal. Nothing here allocates a parameter."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from vocabjax.config import Config, shown, to_json
from vocabjax.evaluate import Decile
from vocabjax.forecast.footprint import held
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint
from vocabjax.optim import OptimConfig, assign, report
from vocabjax.state import abstract_state


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, right: bool = False) -> str:
    """Aligned columns; numbers to the right, None as `-`; a long last column wraps. `right`: all but the first are."""
    rows = [list(row) for row in rows]
    cells = [list(header), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    on_the_right = [
        (right and i > 0)
        or (
            any(isinstance(row[i], int | float) for row in rows)
            and not any(isinstance(row[i], str) for row in rows)
        )
        for i in range(len(header))
    ]
    lines = []
    for row in cells:
        *most, last = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, on_the_right, strict=True)
        )
        lines.append(hang("  ".join([*most, ""]), last))
    return "\n".join(lines)


def hang(start: str, text: str) -> str:
    """`start` and `text`, broken between words at the terminal's width; what follows is indented to where it began."""
    room = shutil.get_terminal_size().columns - len("  ") - len(start)  # a section is indented
    lines = textwrap.wrap(text, max(room, 20), break_long_words=False, break_on_hyphens=False)
    return (
        ("\n" + " " * len(start)).join([start + (lines[0] if lines else ""), *lines[1:]]).rstrip()
    )


def section(title: str, body: str) -> str:
    """A titled, indented block."""
    return "\n".join([title, *[f"  {line}".rstrip() for line in body.splitlines()]]) + "\n"


def config_text(config: Config) -> str:
    """Every setting, named as its flag is; a part to a line."""
    lines: list[tuple[str, str]] = []

    def walk(name: str, values: dict[str, Any]) -> None:
        parts = {key: _by_index(value) for key, value in values.items()}
        own = {key: value for key, value in parts.items() if not isinstance(value, dict)}
        if own:
            lines.append((name, "  ".join(f"{key}={_plain(own[key])}" for key in own)))
        for key, value in parts.items():
            if isinstance(value, dict):
                walk(f"{name}.{key}" if name else key, value)

    walk("", json.loads(to_json(config)))
    width = max(len(name) for name, _ in lines)
    return "\n".join(hang(f"{name:{width}}  ", text) for name, text in lines)


def mesh_text(layout: Layout) -> str:
    """The mesh's axes and devices, and where each logical axis lies."""
    mesh = layout.mesh
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    count = f"{mesh.size} {device.device_kind} device{'s' if mesh.size > 1 else ''}"
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    rows = [
        (logical, "+".join(targets) or "replicated", layout.shards(logical))
        for logical, targets in layout.rules
    ]
    return f"{axes} on {count}{processes}\n" + table(("logical axis", "mesh axes", "shards"), rows)


def parameter_text(
    blueprint: Blueprint, optim: OptimConfig, optimizer: optax.GradientTransformation
) -> str:
    """Each parameter, and totals. Bytes are those one device holds."""
    layout, sizes = blueprint.layout, blueprint.sizes
    groups = assign(optim, blueprint.infos.values())
    rows = []
    for info in blueprint.infos.values():
        sharding = layout.sharding(*info.axes)
        size = held(jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding))
        shape = jax.typeof(jax.ShapeDtypeStruct(info.shape, info.dtype)).str_short(True)
        rows.append((info.path, shape, _spec(sharding.spec), groups[info.path], size))
    parameters = sum(row[-1] for row in rows)
    moments = held(abstract_state(blueprint, optimizer).optimizer)
    padding = f", padded to {sizes.padded:,} rows" if sizes.padded > sizes.logical else ""
    return "\n".join(
        [
            table(("parameter", "dtype[shape]", "sharding", "group", "bytes/device"), rows),
            "",
            f"{blueprint.count():,} parameters: {blueprint.count('vocab/'):,} in the vocabulary, "
            f"{blueprint.count('trunk/'):,} in the trunk",
            f"V = {sizes.logical:,}{padding}",
            f"{size_text(parameters + moments)} per device: parameters {size_text(parameters)}, optimiser state {size_text(moments)}",
            f"while training, gradients ({size_text(parameters)}) and activations are added",
        ]
    )


def group_text(optim: OptimConfig, blueprint: Blueprint) -> str:
    """The optimiser's groups, and how much is in them."""
    rows = [
        (
            row.group,
            row.optimizer,
            len(row.paths),
            row.parameters,
            row.peak_lr,
            row.weight_decay,
            row.sparse,
        )
        for row in report(optim, blueprint.infos.values())
    ]
    return table(
        ("group", "optimizer", "arrays", "stored numbers", "peak lr", "decay", "sparse"), rows
    )


def evaluation_text(evaluation: dict[str, Any]) -> str:
    """An `Evaluation` as a dict: the sums, then the loss by frequency of the target."""
    bits = evaluation["bits_per_byte"]
    totals = table(
        ("loss", "perplexity", "bits/byte", "tokens"),
        [
            (
                f"{evaluation['loss']:.4f}",
                f"{evaluation['perplexity']:,.2f}",
                "unknown" if bits is None else f"{bits:.4f}",
                f"{evaluation['tokens']:,}",
            )
        ],
    )
    rows = []
    for index in range(len(evaluation["by_mass"])):
        row: list[Any] = [index + 1]
        for kind in ("by_mass", "by_type"):
            bin_ = Decile(**evaluation[kind][index])
            row += [bin_.types, bin_.tokens, bin_.loss]
        rows.append(row)
    header = ("decile", "types", "tokens", "loss", "types", "tokens", "loss")
    return (
        f"{totals}\n\nby frequency in training, commonest first:\n"
        "left, bins of equal token mass; right, bins of equally many types\n" + table(header, rows)
    )


def summary_text(summary: dict[str, Any]) -> str:
    """A finished run in a few lines."""
    validation, speed = summary["validation"], summary["tokens_per_second"]
    bits = validation["bits_per_byte"]
    return "\n".join(
        [
            f"validation  loss {validation['loss']:.4f}  perplexity {validation['perplexity']:,.2f}  bits/byte "
            + ("unknown" if bits is None else f"{bits:.4f}"),
            f"training    loss {summary['training']['loss']:.4f}  gap {summary['gap']:+.4f}",
            f"{summary['parameters']:,} parameters ({summary['vocab_parameters']:,} vocabulary, "
            f"{summary['trunk_parameters']:,} trunk)",
            f"{summary['tokens']:,} tokens, {summary['passes']:.2f} passes, "
            f"{summary['train_flops']:.3g} FLOPs, "
            + ("speed unknown" if speed is None else f"{speed:,.0f} tokens/s"),
        ]
    )


def _spec(spec: PartitionSpec) -> str:
    """`·,data,model+seq`: where each dimension lies."""
    return ",".join(
        "·" if entry is None else entry if isinstance(entry, str) else "+".join(entry)
        for entry in spec
    )


def _by_index(value: Any) -> Any:
    """A list of parts as its flags name it: {"0": …, "1": …}."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {str(index): part for index, part in enumerate(value)}
    return value


def size_text(count: int) -> str:
    """Bytes in a unit of powers of 1,024."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{count / 1024**power:.{2 if power else 0}f} {unit}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> str:
    if value is None:
        return "None"
    return json.dumps(value) if isinstance(value, list) else shown(value)
