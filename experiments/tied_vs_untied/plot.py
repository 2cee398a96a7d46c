"""The figure of the study, one row per cell: every arm's losses against tokens, and what tying changed of them."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vocabjax.experiment import Result, read_results


def plot(results: list[Result], path: Path) -> None:
    """One row per cell: losses against tokens on the left, difference to the cell's first arm on the right."""
    cells = list(dict.fromkeys(result["cell"] for result in results))
    arms = list(dict.fromkeys(result["arm"] for result in results))
    colors = {arm: f"C{index}" for index, arm in enumerate(arms)}
    figure = Figure(figsize=(11, 3.6 * len(cells)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, cell in enumerate(cells):
        mine = [result for result in results if result["cell"] == cell]
        left = figure.add_subplot(len(cells), 2, 2 * row + 1)
        right = figure.add_subplot(len(cells), 2, 2 * row + 2)
        _losses(left, mine, cell, colors)
        _differences(right, mine, colors)
    figure.savefig(path, dpi=80)


def _losses(axes: Any, results: list[Result], cell: str, colors: dict[str, str]) -> None:
    for result in results:
        color = colors[result["arm"]]
        # Step 0 is the untrained model: it would flatten everything else.
        curve = [point for point in result["curve"] if point["step"] > 0]
        tokens = [point["tokens"] for point in curve]
        label = result["arm"] if result["seed"] == results[0]["seed"] else None
        axes.plot(
            tokens, [p["validation_loss"] for p in curve], "-", color=color, lw=1.4, label=label
        )
        axes.plot(tokens, [p["training_sample_loss"] for p in curve], "--", color=color, lw=1)
    _mark_passes(axes, results[0])
    axes.set_title(f"{cell}: validation (solid), training (dashed)", fontsize=9)
    axes.set_ylabel("loss (nats per token)")
    axes.legend(fontsize=8)


def _differences(axes: Any, results: list[Result], colors: dict[str, str]) -> None:
    first, *others = colors
    reference = {r["seed"]: r["curve"] for r in results if r["arm"] == first}
    for arm in others:
        seeds = [r for r in results if r["arm"] == arm]
        if not seeds:  # an arm that this cell does not have
            continue
        for key, style in (("validation_loss", "-"), ("training_sample_loss", "--")):
            lines = [
                [p[key] - q[key] for p, q in zip(r["curve"], reference[r["seed"]], strict=True)][1:]
                for r in seeds
            ]
            tokens = [point["tokens"] for point in seeds[0]["curve"]][1:]
            columns = list(zip(*lines, strict=True))
            middle = [sum(column) / len(column) for column in columns]
            axes.plot(tokens, middle, style, color=colors[arm], label=arm if style == "-" else None)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(tokens, low, high, color=colors[arm], alpha=0.15, lw=0)
    axes.axhline(0, color=colors[first], lw=1)
    _mark_passes(axes, results[0])
    spread = ", range of seeds" if len(reference) > 1 else ""
    axes.set_title(f"loss − {first}: validation (solid), training (dashed){spread}", fontsize=9)
    axes.legend(fontsize=8)


def _mark_passes(axes: Any, result: Result) -> None:
    per_pass = result["tokens"] / result["passes"]
    for number in range(1, round(result["passes"]) + 1):
        axes.axvline(number * per_pass, color="0.85", lw=0.8, zorder=0)
    axes.set_xlabel("tokens (grey lines: passes over the same subset)")


if __name__ == "__main__":
    here = Path(__file__).parent
    plot(read_results(here / "results.jsonl"), here / "curves.png")
