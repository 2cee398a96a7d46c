"""Running the arms of a comparison: skip what is finished, resume what was killed, collect what they say."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import jax

from vocabjax.config import Config
from vocabjax.files import write_atomic
from vocabjax.log import read_metrics
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint
from vocabjax.train import train
from vocabjax.vocab.lexicon import Lexicon

Result = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One training run of a comparison.

    Attributes:
      cell: the setting all arms of a comparison share, e.g. "width 64".
      name: what differs, e.g. "tied".
      config: the whole configuration, seed included.
    """

    cell: str
    name: str
    config: Config

    @property
    def run_name(self) -> str:
        words = f"{self.cell} {self.name} seed {self.config.train.seed}"
        return words.replace(",", "").replace(" ", "-").replace("×", "x")


def run_arms(
    arms: Sequence[Arm], directory: Path, layout: Layout, *, quiet: bool = False
) -> list[Result]:
    """Trains each arm in `directory/RUN_NAME`, in order, and returns one plain record per arm.

    A record holds cell, arm, seed, layers, the summary's fields, and `curve`: the metrics at each evaluation.
    """
    results = []
    for arm in arms:
        run_directory = directory / arm.run_name
        summary = train(arm.config, run_directory, layout, quiet=quiet)
        evaluations = [
            line
            for line in read_metrics(run_directory / "metrics.jsonl")
            if "validation_loss" in line
        ]
        results.append(
            {
                "cell": arm.cell,
                "arm": arm.name,
                "seed": arm.config.train.seed,
                "layers": arm.config.trunk.layers,
                **summary,
                "curve": evaluations,
            }
        )
        jax.clear_caches()  # the next arm has its own programs
    return results


def write_results(path: Path, results: Iterable[Result]) -> None:
    """One JSON object per arm and line."""
    write_atomic(path, "".join(json.dumps(result, allow_nan=False) + "\n" for result in results))


def report(
    results: list[Result],
    out: Path,
    table: str,
    verdict: str,
    plot: Callable[[list[Result], Path], None],
) -> None:
    """Writes results.jsonl, table.md, verdict.txt and curves.png, and prints the middle two."""
    out.mkdir(parents=True, exist_ok=True)
    write_results(out / "results.jsonl", results)
    write_atomic(out / "table.md", table)
    write_atomic(out / "verdict.txt", verdict)
    plot(results, out / "curves.png")
    print(table, verdict, f"Figure: {out / 'curves.png'}", sep="\n")


def read_results(path: Path) -> list[Result]:
    """What `write_results` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def depth_of_equal_parameters(config: Config, target: int, layout: Layout) -> int:
    """The trunk depth whose parameters, vocabulary included, come closest to `target`. V must be set."""

    def parameters(layers: int) -> int:
        trunk = with_layers(config, layers).trunk
        return Blueprint(config.vocab, trunk, layout, Lexicon.stand_in()).count()

    one, two = parameters(1), parameters(2)
    return max(1, 1 + round((target - one) / (two - one)))


def with_layers(config: Config, layers: int) -> Config:
    """The config with another depth."""
    return replace(config, trunk=replace(config.trunk, layers=layers))


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: mean, lowest, highest."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        numbers = list(values)
        return Spread(mean(numbers), min(numbers), max(numbers))

    @property
    def direction(self) -> str:
        """Of a change: what every seed agrees on."""
        if self.low > 0:
            return "rises"
        if self.high < 0:
            return "falls"
        return "moves either way by the seed"

    def show(self, digits: int = 3, sign: bool = False) -> str:
        plus = "+" if sign else ""
        text = f"{self.mean:{plus}.{digits}f}"
        if self.low == self.high:
            return text
        return f"{text} ({self.low:{plus}.{digits}f} … {self.high:{plus}.{digits}f})"


def difference(
    results: Iterable[Result], cell: str, arm: str, base: str, value: Callable[[Result], float]
) -> Spread:
    """value(arm) − value(base), seed by seed."""
    by_seed: dict[str, dict[int, float]] = {arm: {}, base: {}}
    for result in results:
        if result["cell"] == cell and result["arm"] in by_seed:
            by_seed[result["arm"]][result["seed"]] = value(result)
    return Spread.of(by_seed[arm][seed] - by_seed[base][seed] for seed in by_seed[arm])


def over(
    seeds: Iterable[Result],
    key: str,
    part: str | None = None,
    show: Callable[[Spread], str] = Spread.show,
) -> str:
    """A figure over seeds; None where a run does not know it, as bits per byte of unknown bytes."""
    values = [(result[part] if part else result)[key] for result in seeds]
    return "unknown" if None in values else show(Spread.of(values))


def lowest(result: Result) -> float:
    """The lowest validation loss of any evaluation: where early stopping would have stopped."""
    loss: float = min(point["validation_loss"] for point in result["curve"])
    return loss


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, first column left, the others right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
