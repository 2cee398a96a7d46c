"""Does tying the input table and the head help? Same trunk, same batches, same start; only the tying differs.

    python run.py experiment tied_vs_untied           one small cell, one seed: a few minutes on two cores
    python run.py experiment tied_vs_untied --full    widths, vocabularies, data sizes; three seeds each

Arms of each cell: untied; tied (equal trunk); tied with equal parameters (deeper trunk of the same width). The initial
values of every parameter that two arms share are equal, because random keys follow the parameter's path. One exception: the
residual projections `o` and `down` are drawn with a scale of (2L)^−½, so those of the deeper arm are as much smaller.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import jax

from vocabjax.config import Config, TrainConfig
from vocabjax.data import DataConfig, prepare, windows_per_pass
from vocabjax.experiment import (
    Arm,
    Result,
    Spread,
    depth_of_equal_parameters,
    difference,
    lowest,
    markdown_table,
    over,
    report,
    run_arms,
    with_layers,
)
from vocabjax.flags import StudyFlags, Switches, parse
from vocabjax.launch import start
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint
from vocabjax.optim import OptimConfig
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.interfaces import Objective

VALIDATION_TOKENS = 16_000
UNTIED, TIED, EQUAL = "untied", "tied", "tied, equal parameters"


@dataclass(frozen=True)
class Cell:
    """One setting: the arms in it differ only in the tying (and, for equal parameters, the depth)."""

    width: int
    vocab_size: int
    train_tokens: int
    passes: int

    @property
    def name(self) -> str:
        return (
            f"width {self.width}, {self.vocab_size // 1024}k ids, "
            f"{self.train_tokens // 1000}k tokens × {self.passes}"
        )


DEFAULT_CELLS = (Cell(128, 4096, 80_000, 4),)
# One axis at a time from width 64, 8k ids, 80k tokens × 4. Data size and passes trade off at equal training; the 32k cell
# has half the passes, since its head makes a token four times as dear.
FULL_CELLS = (
    Cell(64, 8192, 80_000, 4),
    Cell(32, 8192, 80_000, 4),
    Cell(64, 8192, 20_000, 16),
    Cell(64, 8192, 320_000, 1),
    Cell(64, 32768, 80_000, 2),
    Cell(128, 8192, 80_000, 4),
)


@dataclass(frozen=True)
class Options(StudyFlags):
    """Settings of the experiment.

    Attributes:
      full: the real study instead of the small one.
    """

    full: Annotated[bool, Switches] = False


def base_config(cell: Cell, seed: int) -> Config:
    """The untied arm: everything the arms share, and the data's real V filled in."""
    data = DataConfig(
        vocab_size=cell.vocab_size,
        max_train_tokens=cell.train_tokens,
        max_validation_tokens=VALIDATION_TOKENS,
    )
    dataset, batch = prepare(data), 8
    steps = windows_per_pass(dataset.train, data.length) // batch * cell.passes
    # Once a pass, and 4 to 8 times in all, beside that of the untrained model.
    every = -(-steps // min(8, max(4, cell.passes)))
    return Config(
        # Chunk and remat change speed only: both are the fastest measured for these sizes on a CPU.
        vocab=VocabConfig(
            size=dataset.size,
            width=cell.width,
            head=UntiedHead(),
            objective=Objective(chunk=256),
        ),
        trunk=TrunkConfig(
            layers=4,
            heads=max(1, cell.width // 32),
            kv_heads=1,
            ffn=3 * cell.width,
            remat="dots",
        ),
        data=data,
        optim=OptimConfig(lr=3e-3, warmup=max(1, steps // 10)),
        train=TrainConfig(
            steps=steps,
            batch=batch,
            seed=seed,
            eval_every=every,
            checkpoint_every=every,
            keep_last=1,
            keep_best=0,
        ),
    )


def arms_of(cell: Cell, seed: int, layout: Layout) -> list[Arm]:
    """The three arms of a cell for one seed."""
    untied = base_config(cell, seed)
    target = Blueprint(untied.vocab, untied.trunk, layout).count()
    tied = replace(untied, vocab=replace(untied.vocab, head=TiedHead()))
    return [
        Arm(cell.name, UNTIED, untied),
        Arm(cell.name, TIED, tied),
        Arm(cell.name, EQUAL, with_layers(tied, depth_of_equal_parameters(tied, target, layout))),
    ]


def table(results: list[Result]) -> str:
    """One row per arm and cell, means over seeds."""
    header = [
        "arm", "layers", "parameters", "vocabulary", "trunk", "training FLOPs", "training loss", "validation loss",
        "lowest on the way", "perplexity", "bits per byte", "gap", "tokens/s",
    ]  # fmt: skip
    parts = []
    for cell in dict.fromkeys(r["cell"] for r in results):
        rows = []
        for arm in (UNTIED, TIED, EQUAL):
            seeds = [r for r in results if r["cell"] == cell and r["arm"] == arm]
            first = seeds[0]
            rows.append(
                [
                    arm,
                    str(first["layers"]),
                    f"{first['parameters']:,}",
                    f"{first['vocab_parameters']:,}",
                    f"{first['trunk_parameters']:,}",
                    f"{first['train_flops']:.2e}",
                    over(seeds, "loss", "training"),
                    over(seeds, "loss", "validation"),
                    Spread.of(map(lowest, seeds)).show(),
                    over(seeds, "perplexity", "validation", lambda spread: spread.show(1)),
                    over(seeds, "bits_per_byte", "validation"),
                    over(seeds, "gap"),
                    over(seeds, "tokens_per_second", show=lambda spread: f"{spread.mean:,.0f}"),
                ]
            )
        parts.append(f"**{cell}**\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts) + "\n"


def verdict(results: list[Result]) -> str:
    """One sentence per cell: what tying did there, with its numbers."""
    lines = []
    for cell in dict.fromkeys(r["cell"] for r in results):
        changes = []
        for arm, what in ((TIED, "on the equal trunk"), (EQUAL, "with equal parameters")):
            validation = difference(results, cell, arm, UNTIED, lambda r: r["validation"]["loss"])
            training = difference(results, cell, arm, UNTIED, lambda r: r["training"]["loss"])
            changes.append(
                f"{what} validation loss {validation.direction} ({validation.show(sign=True)} nats) "
                f"and training loss {training.direction} ({training.show(sign=True)})"
            )
        seeds = len({r["seed"] for r in results if r["cell"] == cell})
        lines.append(
            f"{cell}: tying, against untied: {'; '.join(changes)} ({seeds} seed{'s' * (seeds > 1)})."
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Runs the study and writes results.jsonl, table.md, verdict.txt and curves.png."""
    options = parse(Options, "experiment tied_vs_untied", arguments)
    layout = start(options.launch)
    cells, seeds = (FULL_CELLS, (0, 1, 2)) if options.full else (DEFAULT_CELLS, (0,))
    runs = options.runs / ("tied_vs_untied_full" if options.full else "tied_vs_untied")
    out = options.out or runs
    study(cells, seeds, runs, out, layout, quiet=options.quiet)


def study(
    cells: tuple[Cell, ...],
    seeds: tuple[int, ...],
    runs: Path,
    out: Path,
    layout: Layout,
    *,
    quiet: bool = False,
) -> list[Result]:
    """Trains every arm, cell by cell, and reports."""
    results: list[Result] = []
    for cell in cells:
        for seed in seeds:
            results += run_arms(arms_of(cell, seed, layout), runs, layout, quiet=quiet)
    if jax.process_index() == 0:
        from .plot import plot  # draws with matplotlib, which only reporting needs

        report(results, out, table(results), verdict(results), plot)
    return results
