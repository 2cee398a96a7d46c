"""What a program will hold and send on machines that need not be here.

The training step, or the decoding program, is lowered for abstract arrays and compiled for the mesh, by XLA for simulated CPUs
or by libtpu for a pod: what is reported is read from the compiled program. Times are estimates, from published figures of the chip:

    compute   FLOPs of the model (and of what is recomputed) / peak
    memory    (arguments + outputs + 2 · temporaries) / bandwidth: each read or written once; of a decoded token, (parameters + cache) / bandwidth
    network   Σ bytes on the wire / (two links of a torus, or all of a switch): ring algorithms, axis after axis; a slice that is smaller
              than the torus is open at its ends, where it takes up to twice as long

None of them overlaps another here; on the device some do. Of decoding they are of one token of each sequence, its prompt having been read.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vocabjax.design import Design, Mode
from vocabjax.errors import UserError
from vocabjax.forecast.accelerators import Accelerator
from vocabjax.forecast.faults import faults, remedies
from vocabjax.forecast.footprint import Footprint, TooLarge, compile_measured, held
from vocabjax.forecast.hlo import Collective, axes_of, collectives
from vocabjax.forecast.parts import part_of
from vocabjax.generate import SamplingConfig, decode
from vocabjax.mesh import Layout
from vocabjax.state import abstract_state
from vocabjax.step import abstract_batch, lower
from vocabjax.vocab.interfaces import Tokens

_DECODED = 2  # tokens: one after the prompt, one more in the loop that decodes all others


class Exchange(NamedTuple):
    """All that one part of a program sends in one way.

    Attributes:
      bytes: of the results on one device, each time; of several, added up.
      times: per step, or per token.
      each_token: whether it is sent for every token that is decoded.
      devices: that exchange with one another.
    """

    kind: str
    axes: tuple[str, ...]
    part: str
    bytes: int
    times: int
    each_token: bool
    devices: int

    @property
    def total(self) -> int:
        """Bytes per step (or per decoded token) on one device."""
        return self.bytes * self.times

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
      cache: keys, values and whatever else decoding keeps of every sequence; a part of the temporaries.
      footprint: of the compiled program; of one that the compiler refuses, what it would need.
      available: what there is; None: the chip is not known.
      exchanges: the largest first; None: the compiler refuses the program.
      warnings: faults, such as a gathered table.
      advice: of a program that does not fit, what would make it smaller.
      flops: per step, or per token of each sequence, of all devices, recomputation included.
    """

    mesh: Mapping[str, int]
    mode: Mode
    chip: Accelerator | None
    tokens: int
    parameters: int
    moments: int
    cache: int
    footprint: Footprint
    available: int | None
    exchanges: tuple[Exchange, ...] | None
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    flops: int
    compile_seconds: float

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.footprint.peak <= self.available

    def seconds(self) -> dict[str, float] | None:
        """Estimates of compute, memory and network; None: the chip is not known, or the compiler refuses the program."""
        if self.chip is None or self.exchanges is None:
            return None
        links = (2 if self.chip.torus else 1) * self.chip.link_bandwidth
        footprint, sent = self.footprint, self.exchanges
        moved = footprint.arguments + footprint.outputs + 2 * footprint.temporaries
        if self.mode == "decode":
            moved = self.parameters + self.cache
            sent = tuple(exchange for exchange in sent if exchange.each_token)
        return {
            "compute": self.flops / self.devices / self.chip.bf16_flops,
            "memory": moved / self.chip.memory_bandwidth,
            "network": sum(exchange.wire() for exchange in sent) / links,
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
      UserError: a context or sequences that cannot be; the compiler refuses, and not for memory.
    """
    blueprint, config, layout = design.blueprint, design.config, design.layout
    start = time.perf_counter()
    state = abstract_state(blueprint, design.optimizer, design.sparse.catch_up)
    with jax.set_mesh(layout.mesh):
        cache = 0
        if mode == "train":
            tokens = config.train.batch * config.data.length
            shape = (config.train.batch, config.train.accumulate, config.data.length)
            inputs: Any = abstract_batch(layout, *shape)
            lowered = lower(blueprint, design.optimizer, design.sparse, shape)
        else:
            tokens = layout.shards("batch") if sequences is None else sequences
            inputs = _prompts(layout, tokens, context)
            cache = _held_by_cache(design, tokens, context)
            lowered = _lower_decode(design, inputs)
        moments = held((state.optimizer, state.current)) if mode == "train" else 0
        available = None if chip is None else chip.memory
        sent: tuple[Exchange, ...] | None = None
        text, warnings = "", []
        try:
            platform = layout.mesh.devices.flat[0].platform
            compiled, footprint = compile_measured(lowered, platform)
        except TooLarge as refusal:
            known = held((state.params, inputs)) + moments
            footprint = Footprint(known, 0, 0, refusal.needs - known, is_exact=True)
            available = refusal.available
        else:
            text = compiled.as_text() or ""
            sent = exchanges(collectives(text), layout)
            warnings = faults(design, text, mode)
            if not footprint.is_exact:
                warnings.append(
                    "the compiler's report of memory could not be read: temporaries and peak are no more than these"
                )
    found = Plan(
        mesh=dict(layout.mesh.shape),
        mode=mode,
        chip=chip,
        tokens=tokens,
        parameters=held(state.params),
        moments=moments,
        cache=cache,
        footprint=footprint,
        available=available,
        exchanges=sent,
        warnings=tuple(warnings),
        advice=(),
        flops=_flops(design, mode, tokens, context),
        compile_seconds=time.perf_counter() - start,
    )
    if found.fits is False and available is not None:
        advice = remedies(design, footprint, found.parameters + moments, available, mode)
        found = replace(found, advice=tuple(advice))
    return found, text


def exchanges(found: list[Collective], layout: Layout) -> tuple[Exchange, ...]:
    """What a program's collectives add up to, by kind, axes, part and times; the largest first."""
    mesh = dict(layout.mesh.shape)
    sums: dict[tuple[Any, ...], int] = {}
    for x in found:
        axes = axes_of(x.groups, mesh)
        devices = len(x.groups[0]) if x.groups else math.prod(mesh.values())
        key = (x.kind, axes, part_of(x.origin), x.times, x.in_open_loop, devices)
        sums[key] = sums.get(key, 0) + x.bytes
    all_ = [
        Exchange(kind, axes, part, size, times, each_token, devices)
        for (kind, axes, part, times, each_token, devices), size in sums.items()
        if devices > 1
    ]
    return tuple(sorted(all_, key=lambda x: -x.total))


def _prompts(layout: Layout, sequences: int, context: int) -> Any:
    """`Tokens` of shapes: prompts of so many ids."""
    for flag, value in (("--sequences", sequences), ("--context", context)):
        if value < 1:
            raise UserError(f"{flag} {value} must be at least 1")
    layout.require("--sequences", "batch", sequences)
    if layout.shards("seq") > 1:
        raise UserError(
            "decoding goes position by position, which cannot be sharded: use --rules seq="
        )
    sharding = layout.sharding("batch", None)
    array = jax.ShapeDtypeStruct((sequences, context), jnp.int32, sharding=sharding)
    return Tokens._make([array] * 3 + [None] * (len(Tokens._fields) - 3))


def _lower_decode(design: Design, prompts: Any) -> jax.stages.Lowered:
    blueprint = design.blueprint
    key = jax.eval_shape(lambda: jax.random.key(0))
    end = jax.ShapeDtypeStruct((), jnp.int32)
    config = SamplingConfig(temperature=0, max_tokens=_DECODED)
    return decode.lower(blueprint, config, blueprint.abstract(), prompts, key, end)


def _held_by_cache(design: Design, sequences: int, context: int) -> int:
    def empty() -> Any:
        model = design.blueprint.bind(design.blueprint.abstract())
        return model.init_cache(sequences, context + _DECODED - 1)

    return held(jax.eval_shape(empty))


def _flops(design: Design, mode: Mode, tokens: int, context: int) -> int:
    model = design.blueprint.bind(design.blueprint.abstract())
    if mode == "decode":
        return tokens * (model.vocab.decode_flops() + model.trunk.flops(2 * context - 1))
    again = 1 if design.config.trunk.remat == "full" else 0
    length = design.config.data.length
    return tokens * (3 * model.vocab.flops() + (3 + again) * model.trunk.flops(length))
