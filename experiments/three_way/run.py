"""Does one table do for source, target and scores? Same trunk, same batches, same start; only the tying differs.

    python run.py experiment three_way

Arms: no tying (three tables), target tying (the decoder's input and the head share one), three-way tying (the source too). The
task: a dictionary's headword to its definition. Random keys follow the parameter's path, so what two arms share starts equal.
"""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from vocabjax.config import Config, TrainConfig
from vocabjax.data import DataConfig, TokenStream, prepare, windows_per_pass
from vocabjax.encoder_decoder import EncoderDecoderConfig
from vocabjax.evaluate import Evaluator
from vocabjax.experiment import (
    Arm,
    Result,
    Spread,
    difference,
    lowest,
    markdown_table,
    over,
    report,
    run_arms,
)
from vocabjax.flags import StudyFlags, parse
from vocabjax.launch import start
from vocabjax.load import load_run, run_data
from vocabjax.mesh import Layout
from vocabjax.optim import OptimConfig
from vocabjax.runs import Run
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.interfaces import Objective

NONE, TARGET, THREE_WAY = "no tying", "target tying", "three-way tying"
CELLS = ((80_000, 4), (20_000, 16))  # training tokens, passes over them: equally many steps
SEEDS = (0, 1, 2)


def arms_of(train_tokens: int, passes: int, seed: int) -> list[Arm]:
    """The three arms of one setting for one seed."""
    data = DataConfig(
        source="gcide",
        prefix_end="\n",
        max_train_tokens=train_tokens,
        max_validation_tokens=16_000,
    )
    dataset, batch = prepare(data), 16
    per_pass = windows_per_pass(dataset.train, data.length) // batch
    # Chunk and remat change speed only.
    trunk = EncoderDecoderConfig(layers=2, heads=2, kv_heads=1, ffn=192, remat="dots")
    untied = Config(
        vocab=VocabConfig(
            size=dataset.size, width=64, head=UntiedHead(), objective=Objective(chunk=256)
        ),
        trunk=trunk,
        data=data,
        optim=OptimConfig(lr=3e-3, warmup=max(1, per_pass * passes // 10)),
        train=TrainConfig(
            steps=per_pass * passes,
            batch=batch,
            seed=seed,
            eval_every=per_pass,
            checkpoint_every=per_pass,
            keep_last=1,
            keep_best=0,
        ),
    )
    target = replace(untied, vocab=replace(untied.vocab, head=TiedHead()))
    three_way = replace(target, trunk=replace(trunk, source_table="shared"))
    cell = f"width 64, 4k ids, {train_tokens // 1000}k tokens × {passes}"
    named = ((NONE, untied), (TARGET, target), (THREE_WAY, three_way))
    return [Arm(cell, name, config) for name, config in named]


def table(results: list[Result]) -> str:
    """One row per cell and arm, means over seeds."""
    header = [
        "arm", "parameters", "vocabulary", "trunk", "training loss", "validation loss", "lowest on the way",
        "perplexity", "gap", "wrong source", "tokens/s",
    ]  # fmt: skip
    parts = []
    for cell in dict.fromkeys(r["cell"] for r in results):
        rows = []
        for arm in (NONE, TARGET, THREE_WAY):
            seeds = [r for r in results if r["cell"] == cell and r["arm"] == arm]
            rows.append(
                [
                    arm,
                    f"{seeds[0]['parameters']:,}",
                    f"{seeds[0]['vocab_parameters']:,}",
                    f"{seeds[0]['trunk_parameters']:,}",
                    over(seeds, "loss", "training"),
                    over(seeds, "loss", "validation"),
                    Spread.of(map(lowest, seeds)).show(),
                    over(seeds, "perplexity", "validation", lambda spread: spread.show(1)),
                    over(seeds, "gap"),
                    over(seeds, "source_gain", show=lambda spread: spread.show(sign=True)),
                    over(seeds, "tokens_per_second", show=lambda spread: f"{spread.mean:,.0f}"),
                ]
            )
        parts.append(f"**{cell}**\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts) + "\n"


def verdict(results: list[Result]) -> str:
    """One sentence per cell and tying: what it did there, with its numbers."""
    seeds = len({r["seed"] for r in results})
    lines = []
    for cell in dict.fromkeys(r["cell"] for r in results):
        for arm, base in ((TARGET, NONE), (THREE_WAY, NONE), (THREE_WAY, TARGET)):
            validation, early, training = (
                difference(results, cell, arm, base, value)
                for value in (
                    lambda r: r["validation"]["loss"],
                    lowest,
                    lambda r: r["training"]["loss"],
                )
            )
            lines.append(
                f"{cell}: {arm}, against {base}: validation loss {validation.direction} ({validation.show(sign=True)} nats), "
                f"at its lowest {early.direction} ({early.show(sign=True)}), training loss {training.direction} "
                f"({training.show(sign=True)}) ({seeds} seed{'s' * (seeds > 1)})."
            )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Runs the study and writes results.jsonl, table.md, verdict.txt and curves.png."""
    options = parse(StudyFlags, "experiment three_way", arguments)
    layout = start(options.launch)
    runs = options.runs / "three_way_study"  # a run of the config lies in three_way
    arms = [arm for cell in CELLS for seed in SEEDS for arm in arms_of(*cell, seed)]
    study(arms, runs, options.out or runs, layout, quiet=options.quiet)


def source_gain(run: Run, layout: Layout) -> float:
    """What the right headword is worth: by how many nats per token validation loss rises with that of the next entry."""
    with jax.set_mesh(layout.mesh):
        (dataset, _), loaded = run_data(run), load_run(run, layout, "latest")
        evaluator, config = Evaluator(loaded.blueprint, run.counts()), run.config()
        right, wrong = (
            evaluator(
                loaded.params,
                with_source_of(dataset.validation, entries_ahead),
                config.data.length,
                config.train.batch,
            ).loss
            for entries_ahead in (0, 1)
        )
    return wrong - right


def with_source_of(stream: TokenStream, entries_ahead: int) -> TokenStream:
    """The stream with each document's source replaced by that of another, those without one left out."""
    end, cut = stream.end_of_text, stream.prefix_end
    bounds = np.flatnonzero(stream.tokens == end)
    documents = [d[1:] for d in np.split(stream.tokens, bounds)[1:-1] if cut in d]
    ends = [int(np.flatnonzero(d == cut)[0]) for d in documents]
    sources = [d[:at] for d, at in zip(documents, ends, strict=True)]
    tokens = [np.array([end], stream.tokens.dtype)]
    for index, (document, at) in enumerate(zip(documents, ends, strict=True)):
        tokens += [sources[(index + entries_ahead) % len(sources)], document[at:], tokens[0]]
    return replace(stream, tokens=np.concatenate(tokens), bytes=None)


def study(
    arms: list[Arm], runs: Path, out: Path, layout: Layout, *, quiet: bool = False
) -> list[Result]:
    """Trains every arm and reports."""
    results = run_arms(arms, runs, layout, quiet=quiet)
    for arm, result in zip(arms, results, strict=True):
        result["source_gain"] = source_gain(Run(runs / arm.run_name), layout)
    if jax.process_index() == 0:
        from ..tied_vs_untied.plot import plot  # draws with matplotlib, which only reporting needs

        report(results, out, table(results), verdict(results), plot)
    return results
