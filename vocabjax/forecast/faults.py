"""What ought not to be in a compiled program, and what would make one fit that does not."""

import math

import jax

from vocabjax.design import Design, Mode
from vocabjax.errors import UserError
from vocabjax.forecast.footprint import Footprint, held
from vocabjax.forecast.hlo import Shape, collectives, results
from vocabjax.forecast.parts import part_of
from vocabjax.mesh import FSDP_RULES, Layout
from vocabjax.state import abstract_state
from vocabjax.vocab.scores import chunk_size

# Parts that see no scores: their activations may happen to be as wide as a shard has rows.
_WITHOUT_SCORES = ("attention", "feed-forward", "trunk", "lookups")


def faults(design: Design, text: str, mode: Mode) -> list[str]:
    """Tables that are gathered or replicated, and in a training step logits of all tokens at once.

    Logits are told by their shape, among the values that stand in memory and come from no part of the trunk; so not where a shard has as
    many rows as the model is wide.
    """
    blueprint, layout = design.blueprint, design.layout
    found = []
    tables = {
        path: info
        for path, info in blueprint.infos.items()
        if "vocab" in info.axes and len(info.shape) > 1
    }
    shards = layout.shards("vocab")
    if layout.mesh.size > 1 and shards == 1:
        size = held({path: _leaf(design, path) for path in tables})
        found.append(
            f"the vocabulary is not sharded: each of {layout.mesh.size} devices holds all tables ({size:,} bytes); give the axis "
            "that --rules vocab= names a size in --mesh"
        )
    whole: dict[Shape, str] = {}
    for path, info in tables.items():
        whole |= {info.shape: path, info.shape[::-1]: path}
    for collective in collectives(text):
        for _, shape in collective.arrays:
            name = whole.get(_squeezed(shape))
            if name is not None and shards > 1 and collective.kind == "all-gather":
                found.append(
                    f"{name} is gathered: an all-gather of {shape} from {collective.origin}"
                )
    if mode == "train":
        found += _logits(design, text)
    return found


def _logits(design: Design, text: str) -> list[str]:
    layout, config = design.layout, design.config
    padded, width = design.blueprint.sizes.padded, config.vocab.width
    rows = padded // layout.shards("vocab")
    tokens = config.train.batch // config.train.accumulate * config.data.length
    local = tokens // (layout.shards("batch") * layout.shards("seq"))
    if local <= chunk_size(layout, rows, config.vocab.dtype, config.vocab.objective.chunk):
        return []  # all of them are one chunk
    of_rows = {rows, padded} - {width}
    shapes = set()
    for shape, origin in results(text):
        sizes = _squeezed(shape)
        part = part_of(origin).removesuffix(" (backward)")
        if not origin or part in _WITHOUT_SCORES or len(sizes) < 2:
            continue
        # [tokens, rows] or [rows, tokens]; a table and its gradient are [rows, width].
        for side, others in ((sizes[-1], sizes[:-1]), (sizes[0], sizes[1:])):
            if side in of_rows and others != (width,) and math.prod(others) >= local:
                shapes.add(shape)
    return [f"logits of all tokens at once: a buffer of {shape}" for shape in sorted(shapes)]


def remedies(
    design: Design, footprint: Footprint, state: int, available: int, mode: Mode
) -> list[str]:
    """What would make a program smaller that needs more than there is, only what is not done yet; what saves a known amount first.

    Args:
      state: bytes of parameters and moments on one device.
      available: bytes of one device.
    """
    config, layout = design.config, design.layout
    found = [
        f"--rules {rules}: {state - less:,} bytes fewer of {'parameters and moments' if mode == 'train' else 'parameters'}"
        for less, rules in sorted(_other_rules(design, mode))
        if less < state
    ]
    if mode == "decode":
        found.append("fewer --sequences, or a shorter --context: the cache grows with both")
    else:
        each = config.train.batch // config.train.accumulate // layout.shards("batch")
        if each > 1:
            price = held(design.blueprint.abstract())
            keeps = f", but keeps a gradient of {price:,} bytes" * (config.train.accumulate == 1)
            found.append(
                f"--train.accumulate {each * config.train.accumulate}: a device has one sequence at a time instead of {each}{keeps}"
            )
        if config.trunk.remat != "full":
            found.append("--trunk.remat full: keeps the input of each layer alone")
        elif each == 1 and footprint.temporaries > available - state:
            found.append("a shorter --data.length: one sequence at a time is too much")
    found.append("a larger model axis in --mesh, or more devices")
    if state > available:
        found.append(
            f"no batch is small enough: parameters and moments alone take {state:,} of {available:,} bytes"
        )
    return found


def _other_rules(design: Design, mode: Mode) -> list[tuple[int, str]]:
    """(bytes of the state on one device, --rules) with the trunk's matrices, or the tables' rows, over the batch's axes too."""
    layout = design.layout
    tables, batch = layout.axes("vocab"), layout.axes("batch")
    base = "fsdp" if layout.axes("width") else "default"
    changes: list[tuple[str, dict[str, tuple[str, ...]]]] = []
    if not layout.axes("width"):
        changes.append(("fsdp", dict(FSDP_RULES)))
    if not set(tables) & set(batch):
        axes = (*tables, *batch)
        changes.append((f"{base},vocab={'+'.join(axes)}", {"vocab": axes}))
    found = []
    for name, change in changes:
        try:
            other = Layout.make(layout.mesh, {**dict(layout.rules), **change})
            there = Design.of(design.config, other)
        except UserError:  # a size does not divide
            continue
        state = abstract_state(there.blueprint, there.optimizer, there.sparse.catch_up)
        kept = (state.params, state.optimizer, state.current)
        found.append((held(kept if mode == "train" else state.params), name))
    return found


def _leaf(design: Design, path: str) -> jax.ShapeDtypeStruct:
    """The abstract array of a parameter."""
    info = design.blueprint.infos[path]
    sharding = design.layout.sharding(*info.axes)
    return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
