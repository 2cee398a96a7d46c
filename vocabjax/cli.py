"""The command line: `main` and its commands. What they can be told is in `flags`."""

import contextlib
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from vocabjax import __version__, describe, find
from vocabjax.allocator import restart_retaining
from vocabjax.checkpoint import Checkpoints
from vocabjax.config import Config, differences
from vocabjax.data.tokenizer import decode, encode_documents, with_end_of_text
from vocabjax.design import Design
from vocabjax.errors import UserError, nearest
from vocabjax.evaluate import Evaluator
from vocabjax.flags import (
    EvalFlags,
    InspectFlags,
    SampleFlags,
    TrainFlags,
    config_of,
    parse,
)
from vocabjax.forecast.commands import run_advise, run_count, run_plan
from vocabjax.generate import generate
from vocabjax.launch import Launch, start
from vocabjax.load import load_run, run_data
from vocabjax.log import read_metrics
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint
from vocabjax.optim import make_optimizer
from vocabjax.presets import PRESETS
from vocabjax.processes import together
from vocabjax.published import MODELS
from vocabjax.runs import Run
from vocabjax.step import lower
from vocabjax.train import Interrupted, train

OVERVIEW = """\
usage: run.py COMMAND ...

  train CONFIG [flags]       train a config in runs/NAME; the same command again resumes it
  eval RUN                   loss, perplexity, bits per byte, and loss by token frequency
  sample RUN --prompt TEXT   continue a text
  inspect RUN                what a run is, how far it got, what it holds
  experiment NAME [...]      run an experiment; without a name, list them
  bench NAME [flags]         time a part against its peers; without a name, list the benches
  count CONFIG [flags]       what a model costs: parameters, FLOPs, bytes, by part
  advise CONFIG [flags]      what to choose for its vocabulary, why, and how sure that is
  plan CONFIG [flags]        compile it for a pod that is not here: memory, exchanges, does it fit
  configs                    list the configs, and the published models

examples:
  run.py train tiny
  run.py train tied --vocab.width 256 --optim.tied.lr 5 --train.steps 1000 --name wide
  run.py train untied --devices 8 --mesh data=2,model=4 --rules fsdp --dry-run
  run.py train tied --data.source "files:books/*.txt" --head untied
  run.py count article_3b --compare tied,untied,ple
  run.py plan qwen2_0_5b --topology v5e:4x4 --mesh data=8,model=2 --train.batch 16
  run.py eval wide --step latest --data gcide
  run.py sample wide --prompt "The history of" --temperature 0.8 --top-p 0.95

COMMAND --help lists the flags of a command, train CONFIG --help with that config's values.
--debug, anywhere, shows the traceback of an error. --version prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 (out of memory), 2 (an error the user can mend), 128 + signal."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if arguments is None and words[:1] in (["train"], ["experiment"]):
        restart_retaining()
    try:
        _dispatch(words)
    except Interrupted as stop:
        return _fail(str(stop), 128 + stop.signal_number)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # what reads our output has had enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        if debug:
            raise
        return _fail(f"error: {_one_line(error)}", 2)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        # An accelerator's code for it; a CPU's runtime says it inside an internal error.
        said = any(code in str(error) for code in ("RESOURCE_EXHAUSTED", "Out of memory"))
        if debug or not (isinstance(error, MemoryError) or said):
            raise
        return _fail(
            "error: out of memory: lower --train.batch, raise --train.accumulate, or shard over more devices (--mesh)",
            1,
        )
    return 0


def _dispatch(words: list[str]) -> None:
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": _train,
        "count": run_count,
        "advise": run_advise,
        "plan": run_plan,
        "eval": _eval,
        "sample": _sample,
        "inspect": _inspect,
        "experiment": _experiment,
        "bench": _bench,
        "configs": _configs,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
    elif words[0] == "--version":
        print(f"vocabjax {__version__}")
    elif words[0] in commands:
        commands[words[0]](words[1:])
    else:
        raise UserError(f"unknown command {words[0]!r}{nearest(words[0], commands)}")


def _train(words: list[str]) -> None:
    name, config, rest = config_of("train", words)
    flags = parse(TrainFlags, f"train {name}", rest, TrainFlags(config=config))
    name = flags.run.name or name
    if name in (".", "..") or Path(name).name != name:
        raise UserError(f"--name {name!r} must be a plain name; --runs says where runs lie")
    layout = start(flags.launch)
    if flags.run.dry_run:
        _dry_run(flags.config, layout)
        return
    directory = flags.run.runs / name
    was_finished = (directory / "summary.json").exists()
    summary = train(
        flags.config,
        directory,
        layout,
        init=flags.run.init,
        tensorboard=flags.run.tensorboard,
        wandb=flags.run.wandb,
        profile=flags.run.profile,
        quiet=flags.run.quiet,
    )
    if jax.process_index() == 0:
        title = f"{directory}: " + ("finished already, nothing to do" if was_finished else "done")
        print(describe.section(title, describe.summary_text(summary)), end="")


def _dry_run(config: Config, layout: Layout) -> None:
    with jax.set_mesh(layout.mesh):
        design = Design.of(config, layout)
        config, blueprint, optimizer = design.config, design.blueprint, design.optimizer
        flops = blueprint.train_flops(config.data.length)
        shape = (config.train.batch, config.train.accumulate, config.data.length)
        lower(blueprint, optimizer, design.sparse, shape)
        print(describe.section("config", describe.config_text(config)))
        print(describe.section("mesh", describe.mesh_text(layout)))
        print(
            describe.section(
                "parameters", describe.parameter_text(blueprint, config.optim, optimizer)
            )
        )
        print(describe.section("optimiser groups", describe.group_text(config.optim, blueprint)))
    print(f"{flops:,} training FLOPs per token; {design.note}")
    print("dry run: no parameter was allocated, no run made")


def _eval(words: list[str]) -> None:
    flags = parse(EvalFlags, "eval", words)
    run = Run.open(flags.run, flags.runs)
    layout = start(flags.launch, one_device=True)
    with jax.set_mesh(layout.mesh):
        config = run.config()
        batch = (
            config.train.batch // config.train.accumulate if flags.batch is None else flags.batch
        )
        if batch < 1:
            raise UserError(f"--batch = {batch} must be at least 1")
        layout.require("--batch", "batch", batch)
        dataset, changed = together(lambda: run_data(run, flags.data))
        loaded = load_run(run, layout, flags.step)
        evaluator = Evaluator(loaded.blueprint, run.counts())
        stream = dataset.validation
        evaluation = asdict(evaluator(loaded.params, stream, config.data.length, batch))
    source = flags.data or config.data.source
    if jax.process_index() != 0:
        return
    if flags.json:
        head = {"run": run.name, "step": loaded.step, "source": source, "split": "validation"}
        facts = {**head, "data_changed": changed, "bytes": stream.bytes}
        print(json.dumps({**facts, **evaluation}, indent=2))
        return
    print(f"{run.name} at step {loaded.step}, on the validation split of {source}")
    if changed:
        print("The data have changed since the run was trained.")
    print()
    print(describe.evaluation_text(evaluation))


def _sample(words: list[str]) -> None:
    flags = parse(SampleFlags, "sample", words)
    flags.sampling.check()
    run = Run.open(flags.run, flags.runs)
    tokenizer = run.tokenizer()
    layout = start(flags.launch, one_device=True)
    if tokenizer is None and (flags.prompt or not flags.ids):
        raise UserError(f"run {run.name!r} has no tokenizer: give token ids, e.g. --ids 1 2 3")
    end, texts, prompts = None, [], [list(flags.ids)] if flags.ids else []
    if tokenizer is not None:
        tokenizer, end = with_end_of_text(tokenizer, run.config().data.end_of_text)
        texts = list(flags.prompt) or ([] if flags.ids else [""])
        prompts += [[end, *ids] for ids in encode_documents(texts, tokenizer)]
    loaded = load_run(run, layout, flags.step)
    news = generate(loaded.blueprint, loaded.params, prompts, flags.sampling, end_of_text=end)
    if jax.process_index() != 0:
        return
    shown = [" ".join(map(str, flags.ids))] * bool(flags.ids) + texts
    for index, (text, new) in enumerate(zip(shown, news, strict=True)):
        if index:
            print("---")
        if index == 0 and flags.ids:
            print(text, *new)
        elif tokenizer is not None:
            print(text + decode(new, tokenizer))


def _inspect(words: list[str]) -> None:
    flags = parse(InspectFlags, "inspect", words)
    run = Run.open(flags.run, flags.runs)
    config, summary = run.config(), run.summary()
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be busy with this very run
    lines = read_metrics(run.directory / "metrics.jsonl")
    step = max((int(line["step"]) for line in lines), default=0)
    resume = ["run.py", "train", str(run.directory / "config.json")]
    if run.directory.parent != Path("runs"):
        resume += ["--runs", str(run.directory.parent)]
    if summary is None:
        print(f"{run.directory}: step {step} of {config.train.steps} logged")
        print(f"unless it is running, resume with: {shlex.join(resume)}\n")
    else:
        print(f"{run.directory}: finished\n")
        print(describe.section("result", describe.summary_text(summary)))
    base = find.load_config("base")[1]
    changes = differences(config, base)
    print(describe.section("config, where it differs from base", "\n".join(changes) or "nowhere"))
    print(describe.section("data", _data_text(run)))
    print(describe.section("code", _code_text(run)))
    print(describe.section("checkpoints", _checkpoint_text(run)))
    losses = [
        (int(line["step"]), line["validation_loss"]) for line in lines if "validation_loss" in line
    ]
    if losses:
        (last, last_loss), (best, best_loss) = losses[-1], min(losses, key=lambda pair: pair[1])
        text = f"last {last_loss:.4f} at step {last}; best {best_loss:.4f} at step {best}"
        print(describe.section("validation loss", text))
    layout = start(Launch(), one_device=True)
    with jax.set_mesh(layout.mesh):
        blueprint = Blueprint(config.vocab, config.trunk, layout, run.lexicon())
        optimizer = make_optimizer(config.optim, blueprint.infos.values(), config.train.steps)
        text = describe.parameter_text(blueprint, config.optim, optimizer)
    print(describe.section("parameters, on one device", text), end="")


def _checkpoint_text(run: Run) -> str:
    checkpoints = Checkpoints(run.checkpoints)
    best = None
    with contextlib.suppress(UserError):  # a damaged one might be the best: its row says so
        best = checkpoints.best()
    rows: list[tuple[int, float | None, str]] = []
    for step in checkpoints.steps():
        try:
            saved = checkpoints.describe(step)
        except UserError as error:
            rows.append((step, None, f"damaged: {_one_line(error)}"))
            continue
        count = sum(math.prod(shape) for shape in saved.logical.values())
        note = f"{len(saved.leaves)} arrays, {count:,} parameters" + (
            ", best" if step == best else ""
        )
        rows.append((step, saved.metrics.get("validation_loss"), note))
    return describe.table(("step", "validation loss", "holds"), rows) if rows else "none yet"


def _data_text(run: Run) -> str:
    facts = {key.replace("_", " "): value for key, value in run.facts().items() if key != "init"}
    facts["fingerprint"] = f"{facts['fingerprint'][:16]}…"
    if (origin := run.origin()) is not None:
        facts["started from"] = f"run {origin.run!r}, step {origin.step}"
    return describe.table(("fact", "value"), facts.items())


def _code_text(run: Run) -> str:
    code = run.code()
    commit = code["commit"] or "not from a git checkout"
    dirty = " with uncommitted changes (code.patch)" if code["uncommitted_changes"] else ""
    versions = ", ".join(f"{name} {v}" for name, v in code["versions"].items() if v is not None)
    return "\n".join(
        [
            f"{commit}{dirty}",
            describe.hang("versions  ", f"python {code['python']}, {versions}"),
            describe.hang("command   ", shlex.join(code["command"])),
        ]
    )


def _experiment(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        known = find.experiments()
        print(describe.table(("experiment", "question"), known.items()) if known else "none yet")
        return
    find.load_experiment(words[0]).main(words[1:])


def _bench(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(describe.table(("bench", "what it measures"), find.benches().items()))
        return
    find.load_bench(words[0]).main(words[1:])


def _configs(words: list[str]) -> None:
    if words and words[0] not in ("-h", "--help"):
        raise UserError(f"configs takes no arguments, but got {words[0]!r}")
    print(describe.table(("config", "what it trains"), find.configs().items()))
    models = ((name, title) for name, (title, _) in MODELS.items())
    print("\n" + describe.table(("model", "of"), models))
    rows = [(name, preset.summary) for name, preset in PRESETS.items()]
    print("\n" + describe.table(("--preset", "what it changes"), rows))


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _fail(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code
