"""Which mesh and rules for so many chips: ranked by formulas, before anything is compiled.

Per step and device, of L layers, d = shards of the batch, s of the positions, m of the model, N tokens, x = N/(d·s)·D activations in
the compute dtype, W the trunk's matrices and E the tables, in numbers:

    state     (parameters + moments) as they would lie, float32
    kept      what the backward keeps of a device's sequences, over s, and over m where it is sharded (half of it, as a guess)
    tensor    all-reduces over m: four activations a layer (one or two more where they are recomputed), and two of the vocabulary
    context   keys and values of N/d tokens gathered over s (again where they are recomputed), and their gradients scattered
    data      fsdp: W/m gathered forward and backward and its gradient reduced; else W/m reduced; and E/m reduced, float32
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from vocabjax.attention import kv_axis
from vocabjax.design import Design
from vocabjax.errors import UserError
from vocabjax.forecast.accelerators import Accelerator
from vocabjax.forecast.count import Count, count
from vocabjax.forecast.footprint import held
from vocabjax.mesh import RULE_SETS, Layout, make_mesh, parse_rules
from vocabjax.param import total_size
from vocabjax.state import abstract_state


@dataclass(frozen=True)
class Candidate:
    """A mesh and rules, with what formulas say of them: bytes on a device, and seconds of a step."""

    mesh: dict[str, int]
    rules: str
    bytes: int
    compute: float
    network: float

    def fits(self, chip: Accelerator) -> bool:
        return self.bytes <= chip.memory

    @property
    def seconds(self) -> float:
        return self.compute + self.network


def search(design: Design, devices: Sequence[jax.Device], chip: Accelerator) -> list[Candidate]:
    """Every data × seq × model mesh of the devices that the sizes divide over, under both rule sets; those that fit and are fastest first.

    Args:
      design: on one device.
    """
    with jax.set_mesh(design.layout.mesh):
        counted = count(design)
    found = []
    for mesh, rules in _meshes(len(devices)):
        layout = Layout.make(make_mesh(mesh, devices=devices), parse_rules(rules))
        with jax.set_mesh(layout.mesh):
            try:
                there = Design.of(design.config, layout)
            except UserError:  # a size does not divide
                continue
            found.append(_estimate(there, counted, chip, mesh, rules))
    if not found:
        raise UserError(
            f"no mesh of {len(devices)} devices divides this config: its batch, heads, feed-forward or width; change --train.batch"
        )
    return sorted(found, key=lambda x: (not x.fits(chip), x.seconds))


def _meshes(devices: int) -> Iterator[tuple[dict[str, int], str]]:
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for model, seq in itertools.product(divisors, divisors):
        data, rest = divmod(devices, model * seq)
        if rest:
            continue
        if seq == 1:
            yield from (({"data": data, "model": model}, rules) for rules in RULE_SETS)
        else:
            mesh = {"data": data, "seq": seq, "model": model}
            yield mesh, "default,seq=seq"
            yield mesh, "fsdp,seq=seq,width=data+seq"


def _estimate(
    design: Design, counted: Count, chip: Accelerator, mesh: dict[str, int], rules: str
) -> Candidate:
    config, blueprint, layout = design.config, design.blueprint, design.layout
    data, seq, model = mesh["data"], mesh.get("seq", 1), mesh["model"]
    narrow = jnp.dtype(config.vocab.dtype).itemsize
    micro = config.train.batch // config.train.accumulate // data
    tokens = config.train.batch * config.data.length // (data * seq)
    state: Any = abstract_state(blueprint, design.optimizer, design.sparse.catch_up)
    stored = held(state.params)
    kept = counted.memory.kept * micro / seq * (1 + 1 / model) / 2
    sizes, width = blueprint.sizes, config.vocab.width
    loss = 4 * sizes.padded // model * (width + 512)
    # The state, a gradient like it, and what a pass over a microbatch holds.
    size = held((state.params, state.optimizer)) + stored + int(kept) + loss
    activation = narrow * tokens * width
    remat = {"full": 2, "dots": 1, "none": 0}[config.trunk.remat]
    tensor = (config.trunk.layers * (4 + remat) + 2) * activation * _ring(model) * 2
    heads = config.trunk.kv_heads // layout.shards(kv_axis(layout, config.trunk.kv_heads))
    of_token = 2 * narrow * heads * config.trunk.width_of_head(width)
    context = config.trunk.layers * (2 + (remat > 0)) * seq * tokens * of_token * _ring(seq)
    trunk = total_size(i for i in blueprint.infos.values() if i.path.startswith("trunk/"))
    tables = blueprint.count("vocab/")
    passes = config.train.accumulate
    if layout.axes("width"):
        moved = narrow * trunk / model * ((2 + (remat > 0)) * passes + 1) * _ring(data * seq)
    else:
        moved = narrow * trunk / model * 2 * _ring(data * seq)
    moved += 4 * tables / model * 2 * _ring(data * seq)
    links = (2 if chip.torus else 1) * chip.link_bandwidth
    again = 4 / 3 if remat == 2 else 1
    flops = counted.train_flops * again * config.train.batch * config.data.length
    return Candidate(
        mesh,
        rules,
        size,
        flops / math.prod(mesh.values()) / chip.bf16_flops,
        (tensor + context + moved) / links,
    )


def _ring(devices: int) -> float:
    return (devices - 1) / devices
