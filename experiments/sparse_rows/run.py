"""Does a table trained by rows learn what dense Adam teaches it? Same start, same batches; only `sparse` differs.

    python run.py experiment sparse_rows

Arms: dense; catch_up (a row is given what it missed when it is read next); lazy (what it missed is lost). Two settings: weight decay of
0.1 on the table, where lazy is refused since rows would miss it, and none.
"""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from vocabjax.config import Config, TrainConfig
from vocabjax.data import DataConfig, prepare, windows_per_pass
from vocabjax.experiment import (
    Arm,
    Result,
    Spread,
    difference,
    markdown_table,
    over,
    report,
    run_arms,
)
from vocabjax.flags import StudyFlags, parse
from vocabjax.launch import start
from vocabjax.load import load_run
from vocabjax.mesh import Layout
from vocabjax.optim import GroupConfig, OptimConfig, Sparse
from vocabjax.runs import Run
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import UntiedHead

DENSE, CATCH_UP, LAZY = "dense", "catch_up", "lazy"
SETTINGS: tuple[tuple[float, dict[str, Sparse]], ...] = (
    (0.1, {DENSE: "off", CATCH_UP: "catch_up"}),
    (0.0, {DENSE: "off", CATCH_UP: "catch_up", LAZY: "lazy"}),
)
SEEDS = (0, 1, 2)


def arms_of(seed: int, train_tokens: int = 200_000) -> list[Arm]:
    """The arms of both settings for one seed: small batches, so that most rows wait for many steps."""
    data = DataConfig(source="wiki", max_train_tokens=train_tokens, max_validation_tokens=20_000)
    dataset, batch = prepare(data), 4
    steps = windows_per_pass(dataset.train, data.length) // batch
    every = max(1, steps // 8)
    dense = Config(
        vocab=VocabConfig(size=dataset.size, width=64, head=UntiedHead()),
        trunk=TrunkConfig(layers=2, heads=2, kv_heads=1, ffn=192),
        data=data,
        optim=OptimConfig(lr=3e-3, warmup=max(1, steps // 10), weight_decay=0.1),
        train=TrainConfig(
            steps=steps,
            batch=batch,
            seed=seed,
            eval_every=every,
            checkpoint_every=steps,
            keep_last=1,
            keep_best=0,
        ),
    )
    arms = []
    for decay, kinds in SETTINGS:
        for name, sparse in kinds.items():
            group = GroupConfig(weight_decay=decay, sparse=sparse)
            config = replace(dense, optim=replace(dense.optim, embed=group))
            arms.append(Arm(f"decay {decay:g}", name, config))
    return arms


def table(results: list[Result]) -> str:
    """One row per setting and arm, means over seeds."""
    header = ["arm", "training loss", "validation loss", "validation, less dense", "rows, off by"]
    parts = []
    for cell in dict.fromkeys(r["cell"] for r in results):
        rows = []
        for arm in dict.fromkeys(r["arm"] for r in results if r["cell"] == cell):
            seeds = [r for r in results if r["cell"] == cell and r["arm"] == arm]
            rows.append(
                [
                    arm,
                    over(seeds, "loss", "training"),
                    over(seeds, "loss", "validation"),
                    difference(results, cell, arm, DENSE, lambda r: r["validation"]["loss"]).show(sign=True),
                    over(seeds, "rows_off", show=lambda spread: f"{spread.mean:.1e}"),
                ]
            )  # fmt: skip
        parts.append(f"**{cell}**\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts) + "\n"


def verdict(results: list[Result]) -> str:
    """One sentence per setting and arm."""
    lines = []
    for cell in dict.fromkeys(r["cell"] for r in results):
        for arm in dict.fromkeys(
            r["arm"] for r in results if r["cell"] == cell and r["arm"] != DENSE
        ):
            off = difference(results, cell, arm, DENSE, lambda r: r["validation"]["loss"])
            largest = Spread.of(
                abs(p["validation_loss"] - q["validation_loss"])
                for r in results
                if (r["cell"], r["arm"]) == (cell, arm)
                for s in results
                if (s["cell"], s["arm"], s["seed"]) == (cell, DENSE, r["seed"])
                for p, q in zip(r["curve"], s["curve"], strict=True)
            ).high
            lines.append(
                f"{cell}: {arm}, against dense: validation loss {off.show(sign=True)} nats at the end, and never further away "
                f"than {largest:.1e} at an evaluation."
            )
    return "\n".join(lines) + "\n"  # fmt: skip


def looked_up_table(run: Run, layout: Layout) -> np.ndarray:
    """The rows of the input, as the last checkpoint holds them: float64 [Vp, D]."""
    with jax.set_mesh(layout.mesh):
        params = load_run(run, layout, "latest").params
        return np.asarray(params["vocab"]["input"]["table"], np.float64)


def study(
    arms: list[Arm], runs: Path, out: Path, layout: Layout, *, quiet: bool = False
) -> list[Result]:
    """Trains every arm and reports; `rows_off` is ‖E − E_dense‖ / ‖E_dense‖ of the input table."""
    results = run_arms(arms, runs, layout, quiet=quiet)
    reference: dict[tuple[str, int], np.ndarray] = {}
    for arm, result in zip(arms, results, strict=True):
        rows = looked_up_table(Run(runs / arm.run_name), layout)
        dense = reference.setdefault((arm.cell, arm.config.train.seed), rows)  # comes first
        result["rows_off"] = float(np.linalg.norm(rows - dense) / np.linalg.norm(dense))
    if jax.process_index() == 0:
        from ..tied_vs_untied.plot import plot  # draws with matplotlib, which only reporting needs

        report(results, out, table(results), verdict(results), plot)
    return results


def main(arguments: list[str]) -> None:
    """Runs the study and writes results.jsonl, table.md, verdict.txt and curves.png."""
    options = parse(StudyFlags, "experiment sparse_rows", arguments)
    layout = start(options.launch)
    runs = options.runs / "sparse_rows"
    arms = [arm for seed in SEEDS for arm in arms_of(seed)]
    study(arms, runs, options.out or runs, layout, quiet=options.quiet)
