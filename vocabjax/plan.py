"""What a program will hold and send on machines that need not be here.

The training step, or the decoding program, is lowered for abstract arrays and compiled for the mesh, by XLA for simulated CPUs
or by libtpu for a pod: what is reported is read from the compiled program. Times are estimates, from published figures of the chip:

    compute   FLOPs of the model (and of what is recomputed) / peak
    memory    (arguments + outputs + 2 · temporaries) / bandwidth: each read or written once
    network   Σ bytes on the wire / (two links of a torus, or all of a switch): ring algorithms, axis after axis

None of them overlaps another here; on the device some do.
"""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from vocabjax.accelerators import Accelerator
from vocabjax.design import Design
from vocabjax.errors import UserError
from vocabjax.generate import SamplingConfig, decode
from vocabjax.hlo import Collective, Shape, axes_of, buffers, collectives
from vocabjax.mesh import Layout
from vocabjax.state import abstract_state
from vocabjax.step import lower
from vocabjax.vocab.interfaces import Tokens
from vocabjax.vocab.scores import chunk_size

Mode = Literal["train", "decode"]
_PARTS = (
    ("loss", r"cross_entropy|per_token|augmented"),
    ("optimiser", r"optimizer"),
    ("table gradient", r"table_gradient"),
    ("attention", r"attention"),
    ("feed-forward", r"feed_forward"),
    ("scores", r"\bscores\b"),
    ("lookups", r"lookup|touched"),
    ("trunk", r"trunk"),
)


class Exchange(NamedTuple):
    """All that one part of a program sends in one way.

    Attributes:
      bytes: of the results on one device, each time; of several, added up.
      times: per step; None: once per token that is decoded.
      devices: that exchange with one another.
    """

    kind: str
    axes: tuple[str, ...]
    part: str
    bytes: int
    times: int | None
    devices: int

    @property
    def total(self) -> int:
        """Bytes per step (or per decoded token) on one device."""
        return self.bytes * (1 if self.times is None else self.times)

    def wire(self) -> float:
        """Bytes that a device sends per step, by a ring."""
        share = (self.devices - 1) / self.devices if self.devices else 0.0
        factor = {
            "all-reduce": 2 * share,
            "reduce-scatter": share * self.devices,  # of its operand, not its result
            "collective-permute": 1.0,
        }.get(self.kind, share)
        return factor * self.total


@dataclass(frozen=True)
class Plan:
    """Bytes are of one device, times of one step.

    Attributes:
      mesh: axis → size.
      tokens: per step, of all devices.
      parameters, moments: as they lie in arguments.
      arguments, outputs, aliased, temporaries, peak: of the compiled program; what is aliased is updated in place.
      exchanges: the largest first.
      warnings: faults, such as a gathered table.
      flops: per step, of all devices, recomputation included.
    """

    mesh: Mapping[str, int]
    mode: Mode
    chip: Accelerator | None
    tokens: int
    parameters: int
    moments: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    exchanges: tuple[Exchange, ...]
    warnings: tuple[str, ...]
    flops: int
    compile_seconds: float

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool | None:
        return None if self.chip is None else self.peak <= self.chip.memory

    def seconds(self) -> dict[str, float] | None:
        """Estimates of compute, memory and network; None: the chip is not known."""
        if self.chip is None:
            return None
        links = (2 if self.chip.torus else 1) * self.chip.link_bandwidth
        moved = self.arguments + self.outputs + 2 * self.temporaries
        return {
            "compute": self.flops / self.devices / self.chip.bf16_flops,
            "memory": moved / self.chip.memory_bandwidth,
            "network": sum(exchange.wire() for exchange in self.exchanges) / links,
        }


def plan(
    design: Design,
    chip: Accelerator | None = None,
    mode: Mode = "train",
    *,
    context: int = 1024,
    sequences: int | None = None,
) -> tuple[Plan, str]:
    """Compiles a design for its layout; the plan and the program's text.

    Args:
      context, sequences: of decoding: the prompt's length and how many there are; None: one per shard of the batch.

    Raises:
      UserError: the compiler refuses, as for too little memory; says what it says.
    """
    blueprint, config, layout = design.blueprint, design.config, design.layout
    start = time.perf_counter()
    with jax.set_mesh(layout.mesh):
        if mode == "train":
            tokens = config.train.batch * config.data.length
            lowered = lower(
                blueprint,
                design.optimizer,
                design.sparse,
                (config.train.batch, config.train.accumulate, config.data.length),
            )
        else:
            tokens = layout.shards("batch") if sequences is None else sequences
            lowered = _lower_decode(design, tokens, context)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise UserError(_refused(error)) from error
    text = compiled.as_text() or ""
    memory: Any = compiled.memory_analysis()
    state = abstract_state(blueprint, design.optimizer, design.sparse.catch_up)
    aliased = memory.alias_size_in_bytes
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    found = Plan(
        mesh=dict(layout.mesh.shape),
        mode=mode,
        chip=chip,
        tokens=tokens,
        parameters=held(state.params),
        moments=held((state.optimizer, state.current)) if mode == "train" else 0,
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        peak=arguments + outputs - aliased + temporaries,
        exchanges=exchanges(collectives(text), layout),
        warnings=tuple(faults(design, text, mode)),
        flops=_flops(design, mode, tokens, context),
        compile_seconds=time.perf_counter() - start,
    )
    return found, text


def held(tree: Any) -> int:
    """Bytes of a pytree of arrays or their shapes that one device holds."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def exchanges(found: list[Collective], layout: Layout) -> tuple[Exchange, ...]:
    """What a program's collectives add up to, by kind, axes, part and times; the largest first."""
    mesh = dict(layout.mesh.shape)
    sums: dict[tuple[Any, ...], int] = {}
    for collective in found:
        axes = axes_of(collective.groups, mesh)
        devices = len(collective.groups[0]) if collective.groups else math.prod(mesh.values())
        key = (collective.kind, axes, part_of(collective.origin), collective.times, devices)
        sums[key] = sums.get(key, 0) + collective.bytes
    all_ = [
        Exchange(kind, axes, part, size, times, devices)
        for (kind, axes, part, times, devices), size in sums.items()
        if devices > 1 and times != 0
    ]
    return tuple(sorted(all_, key=lambda x: -x.total))


def part_of(origin: str) -> str:
    """The part of the model that an operation of that origin belongs to."""
    for part, pattern in _PARTS:
        if re.search(pattern, origin):
            backward = " (backward)" if "transpose(" in origin and part != "table gradient" else ""
            return part + backward
    return "other" if origin else "unnamed"


def _lower_decode(design: Design, sequences: int, context: int) -> jax.stages.Lowered:
    blueprint, layout = design.blueprint, design.layout
    layout.require("--sequences", "batch", sequences)
    if layout.shards("seq") > 1:
        raise UserError(
            "decoding goes position by position, which cannot be sharded: use --rules seq="
        )
    sharding = layout.sharding("batch", None)
    array = jax.ShapeDtypeStruct((sequences, context), jnp.int32, sharding=sharding)
    key = jax.eval_shape(lambda: jax.random.key(0))
    end = jax.ShapeDtypeStruct((), jnp.int32)
    config = SamplingConfig(temperature=0, max_tokens=2)
    tokens: Any = Tokens._make([array] * 3 + [None] * (len(Tokens._fields) - 3))
    return decode.lower(blueprint, config, blueprint.abstract(), tokens, key, end)


def _flops(design: Design, mode: Mode, tokens: int, context: int) -> int:
    model = design.blueprint.bind(design.blueprint.abstract())
    if mode == "decode":
        return tokens * (model.vocab.flops() + model.trunk.flops(2 * context - 1))
    again = 1 if design.config.trunk.remat == "full" else 0
    length = design.config.data.length
    return tokens * (3 * model.vocab.flops() + (3 + again) * model.trunk.flops(length))


def faults(design: Design, text: str, mode: Mode) -> list[str]:
    """What ought not to be: tables that are gathered or replicated, logits of all tokens at once."""
    blueprint, layout, config = design.blueprint, design.layout, design.config
    found = []
    tables = {
        path: info
        for path, info in blueprint.infos.items()
        if "vocab" in info.axes and len(info.shape) > 1
    }
    shards = layout.shards("vocab")
    if layout.mesh.size > 1 and shards == 1:
        size = held({path: blueprint_leaf(design, path) for path in tables})
        found.append(
            f"the vocabulary is not sharded: each of {layout.mesh.size} devices holds all tables ({size:,} bytes); give the axis "
            "that --rules vocab= names a size in --mesh"
        )
    whole: dict[Shape, str] = {info.shape: path for path, info in tables.items()}
    for collective in collectives(text):
        for _, shape in collective.arrays:
            path = whole.get(_squeezed(shape))
            if path is not None and shards > 1 and collective.kind == "all-gather":
                found.append(
                    f"{path} is gathered: an all-gather of {shape} from {collective.origin}"
                )
    if mode == "train":
        rows = blueprint.sizes.padded // shards
        tokens = config.train.batch // config.train.accumulate * config.data.length
        local = tokens // (layout.shards("batch") * layout.shards("seq"))
        chunk = chunk_size(layout, rows, config.vocab.objective.chunk)
        for shape in sorted(buffers(text)):
            if len(shape) > 1 and shape[-1] in (rows, blueprint.sizes.padded):
                count = math.prod(shape[:-1])
                if count >= local > chunk:
                    found.append(f"logits of all tokens at once: a buffer of {shape}")
    return found


def blueprint_leaf(design: Design, path: str) -> jax.ShapeDtypeStruct:
    """The abstract array of a parameter."""
    info = design.blueprint.infos[path]
    sharding = design.layout.sharding(*info.axes)
    return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _refused(error: Exception) -> str:
    text = str(error)
    wanted = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", text)
    if wanted:
        return (
            f"it does not fit: the compiler needs {wanted[1]} of {wanted[2]} on a chip; raise train.accumulate, set trunk.remat "
            "full, use --rules fsdp, or more chips"
        )
    return f"the compiler refuses it: {text.splitlines()[0][:300]}"
