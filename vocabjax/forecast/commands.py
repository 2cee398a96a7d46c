"""The commands `count`, `advise` and `plan`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import jax

from vocabjax import describe, find
from vocabjax.config import Config, differences, to_json
from vocabjax.design import Design, Mode
from vocabjax.errors import UserError
from vocabjax.experiment import depth_of_equal_parameters, with_layers
from vocabjax.files import write_atomic
from vocabjax.flags import Flat, PartFlags, Switches, config_of, parse
from vocabjax.forecast import count_report, plan_report
from vocabjax.forecast.accelerators import Accelerator, accelerator
from vocabjax.forecast.advise import Needs, advise
from vocabjax.forecast.count import count, on_trunk_of
from vocabjax.forecast.plan import Plan, plan
from vocabjax.forecast.search import search
from vocabjax.forecast.topologies import tpu_devices
from vocabjax.launch import Launch, start
from vocabjax.mesh import Layout, make_mesh, parse_mesh, parse_rules


@dataclass(frozen=True)
class CountRequest:
    """What to count beside the model.

    Attributes:
      context: tokens that a decoding sequence has behind it.
      sequences: how many decode together.
      accelerator: a chip to tell whether decoding is bound by memory on it: v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200.
      compare: configs, separated by commas, whose vocabularies are counted on this trunk, V and D, side by side.
      out: a picture to draw of that, as PNG, PDF or SVG.
      json: print JSON.
    """

    context: int = 1024
    sequences: int = 1
    accelerator: str | None = None
    compare: str | None = None
    out: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class CountFlags:
    """Counts what a config costs: parameters, FLOPs, bytes. Nothing is allocated."""

    count: Annotated[CountRequest, Flat, Switches] = field(default_factory=CountRequest)
    parts: Annotated[PartFlags, Flat, Switches] = field(default_factory=PartFlags)
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
      mesh: named axes and their sizes, e.g. data=2,model=4; one may be -1. None: every device along data.
      rules: default or fsdp, and changes to it, as of `train`.
      devices: simulate so many CPU devices.
      topology: compile for a TPU slice instead, e.g. v5e:4x4, v5p:4x4x4, v6e:16x16; needs the extra `tpu`.
      accelerator: the chip whose memory and speed count on simulated devices.
      mode: the training step, or decoding.
      context: of decoding: how long the prompts are.
      sequences: of decoding: how many; None: one per shard of the batch.
      search: rank meshes and rules for these devices by formulas, then compile the best few.
      compare: configs, separated by commas, whose vocabularies are planned on this trunk, V and D, side by side.
      out: a picture to draw of what each device holds, as PNG, PDF or SVG.
      json: print JSON.
    """

    mesh: str | None = None
    rules: str = "default"
    devices: int | None = None
    topology: str | None = None
    accelerator: str | None = None
    mode: Mode = "train"
    context: int = 1024
    sequences: int | None = None
    search: bool = False
    compare: str | None = None
    out: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class PlanFlags:
    """Compiles the real program for machines that need not be here: what it holds, sends, and whether it fits."""

    plan: Annotated[PlanRequest, Flat, Switches] = field(default_factory=PlanRequest)
    parts: Annotated[PartFlags, Flat, Switches] = field(default_factory=PartFlags)
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class AdviseRequest:
    """What to ask beside the model's needs.

    Attributes:
      parameters: aim at a model of so many (3e9), by its depth; None: the config's.
      out: write the advised config there, a .json that `train` takes.
      json: print JSON.
    """

    parameters: float | None = None
    out: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class AdviseFlags:
    """What to choose for this model's vocabulary, why, and how sure that is."""

    advise: Annotated[AdviseRequest, Flat, Switches] = field(default_factory=AdviseRequest)
    needs: Annotated[Needs, Flat, Switches] = field(default_factory=Needs)
    parts: Annotated[PartFlags, Flat, Switches] = field(default_factory=PartFlags)
    config: Annotated[Config, Flat] = field(default_factory=Config)


def run_count(words: list[str]) -> None:
    name, config, rest = config_of("count", words)
    flags = parse(CountFlags, f"count {name}", rest, CountFlags(config=config))
    asked, config = flags.count, flags.config
    chip = None if asked.accelerator is None else accelerator(asked.accelerator)
    chosen = _chosen(name, config, asked.compare)
    _check_picture(asked.out)
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be busy
    layout = start(Launch(), one_device=True)
    with jax.set_mesh(layout.mesh):
        designs = {key: Design.of(value, layout) for key, value in chosen.items()}
        counts = {
            key: count(design, batch=asked.sequences, context=asked.context)
            for key, design in designs.items()
        }
    if asked.out is not None:
        count_report.plot(counts, asked.out)
    if asked.json:
        values = {key: found.as_json(chip) for key, found in counts.items()}
        print(json.dumps(values if asked.compare else values[name], indent=2))
        return
    if asked.compare is None:
        print(count_report.as_text(counts[name], chip))
    else:
        trunk = config.trunk
        V, D = next(iter(designs.values())).config.vocab.size, config.vocab.width
        title = f"V = {V:,}, D = {D:,}, {trunk.layers} layers of {name}"
        print(describe.section(title, count_report.side_by_side(counts, chip)))
        print(_sizes(chosen), end="")
    print(f"{next(iter(designs.values())).note}")
    if asked.out is not None:
        print(f"Figure: {asked.out}")


def _chosen(name: str, config: Config, compare: str | None) -> dict[str, Config]:
    """The config; or, to compare, the vocabularies of others on its trunk."""
    if compare is None:
        return {name: config}
    others = {other: find.load_config(other)[1] for other in compare.split(",")}
    return {other: on_trunk_of(config, theirs) for other, theirs in others.items()}


def _sizes(chosen: dict[str, Config]) -> str:
    """What `on_trunk_of` brought to this model's width and ids, or ""."""
    told = []
    for name, config in chosen.items():
        parts = (config.vocab.input, config.vocab.head, *config.vocab.memories)
        sizes = {
            f"{part.kind} {key} = {value}"
            for part in parts
            for key in (*part.by_width, *part.by_ids)
            if (value := getattr(part, key)) is not None
        }
        if sizes:
            told.append(f"{name}: {', '.join(sorted(sizes))}")
    return f"sizes in proportion to D and V: {'; '.join(told)}\n" if told else ""


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--out {path} must end in .png, .pdf or .svg")


def run_advise(words: list[str]) -> None:
    name, config, rest = config_of("advise", words)
    flags = parse(AdviseFlags, f"advise {name}", rest, AdviseFlags(config=config))
    asked, config = flags.advise, flags.config
    if asked.out is not None and asked.out.suffix != ".json":
        raise UserError(f"--out {asked.out} must end in .json")
    flags.needs.check()
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be busy
    layout = start(Launch(), one_device=True)
    with jax.set_mesh(layout.mesh):
        if asked.parameters is not None:
            config = _of_size(config, asked.parameters, layout)
        design = Design.of(config, layout)
        lines, advised = advise(design, flags.needs)
    if asked.out is not None:
        write_atomic(asked.out, to_json(advised))
    if asked.json:
        advice = [line._asdict() for line in lines]
        print(json.dumps({"advice": advice, "config": json.loads(to_json(advised))}, indent=2))
        return
    for line in lines:
        print(describe.hang(f"{line.topic}: ", line.choice))
        print(describe.hang("    ", f"{line.because}."))
        print(describe.hang("    ", f"[{line.certainty}: {line.source}]") + "\n")
    changes = differences(advised, design.config)
    print(describe.section(f"what that changes of {name}", "\n".join(changes) or "nothing"))
    if asked.out is None:
        print("--out FILE.json keeps the config")
    else:
        print(f"{asked.out}: look at it with `train {asked.out} --dry-run`")


def _of_size(config: Config, parameters: float, layout: Layout) -> Config:
    if not 1e3 <= parameters < 1e13:
        raise UserError(f"--parameters = {parameters:g} must be between 1e3 and 1e13")
    if config.vocab.size is None:
        raise UserError("--parameters needs the vocabulary's size: --vocab.size")
    return with_layers(config, depth_of_equal_parameters(config, int(parameters), layout))


def run_plan(words: list[str]) -> None:
    name, config, rest = config_of("plan", words)
    flags = parse(PlanFlags, f"plan {name}", rest, PlanFlags(config=config))
    asked = flags.plan
    chosen = _chosen(name, flags.config, asked.compare)
    _check_picture(asked.out)
    chip = None if asked.accelerator is None else accelerator(asked.accelerator)
    if asked.topology is not None:
        if asked.devices is not None or chip is not None:
            raise UserError(
                "--topology says what devices there are; leave --devices and --accelerator out"
            )
        jax.config.update("jax_platforms", "cpu")
        devices, chip = tpu_devices(asked.topology)
    else:
        simulated = Launch(devices=asked.devices, mesh=f"data={asked.devices or -1}")
        devices = list(start(simulated).mesh.devices.flat)
    rules = parse_rules(asked.rules)
    if asked.search:
        for flag, is_given in (
            ("--mesh", asked.mesh is not None),
            ("--rules", asked.rules != PlanRequest().rules),
            ("--mode decode", asked.mode == "decode"),
            ("--out", asked.out is not None),
        ):
            if is_given:
                raise UserError(
                    f"--search tries meshes and rules for the training step: leave {flag} out"
                )
        _search(chosen, devices, chip, as_json=asked.json)
        return
    layout = Layout.make(make_mesh(parse_mesh(asked.mesh or ""), devices=devices), rules)
    layout.require_used()
    plans = {}
    for key, value in chosen.items():
        design = Design.of(value, layout)
        plans[key], _ = plan(
            design, chip, asked.mode, context=asked.context, sequences=asked.sequences
        )
    if asked.out is not None:
        plan_report.plot(layout, design.blueprint.sizes.padded, asked.out)
    if asked.json:
        values = {key: plan_report.as_json(found) for key, found in plans.items()}
        print(json.dumps(values if asked.compare else values[name], indent=2))
        return
    if asked.compare is None:
        print(plan_report.as_text(plans[name]))
    else:
        print(plan_report.side_by_side(plans))
        print(_sizes(chosen), end="")
        for key, found in plans.items():
            for warning in found.warnings:
                print(plan_report.red(f"WARNING: {key}: {warning}"))
    if asked.out is not None:
        print(f"Figure: {asked.out}")


def _search(
    chosen: dict[str, Config],
    devices: Sequence[jax.Device],
    chip: Accelerator | None,
    *,
    as_json: bool,
) -> None:
    if chip is None:
        raise UserError("--search ranks by a chip's figures: give --topology, or --accelerator")
    if len(chosen) > 1:
        raise UserError("--search is for one config: leave --compare out")
    (config,) = chosen.values()
    one = start(Launch(), one_device=True)
    with jax.set_mesh(one.mesh):
        alone = Design.of(config, one)
    ranked = search(alone, devices, chip)
    truths: list[Plan | UserError | None] = []
    for candidate in ranked[:_COMPILED]:
        mesh = make_mesh(candidate.mesh, devices=devices)
        layout = Layout.make(mesh, parse_rules(candidate.rules))
        try:
            truths.append(plan(Design.of(alone.config, layout), chip)[0])
        except UserError as refusal:  # of one candidate: the others still count
            truths.append(refusal)
    truths += [None] * (len(ranked) - len(truths))
    if as_json:
        print(json.dumps(plan_report.ranking_as_json(ranked, truths, chip), indent=2))
        return
    print(plan_report.ranking(ranked, truths, chip))
    print(
        f"\nby formulas (see vocabjax/forecast/search.py); the best {_COMPILED} were compiled for {len(devices)} × {chip.name}"
    )


_COMPILED = 3  # of the candidates of a search
