"""What a model costs: parameters, FLOPs and bytes, by part. Nothing is allocated, and no device is needed but a CPU.

Parameters are the model's own leaves, and FLOPs its parts' own (`Part.flops`, `Trunk.flops`): nothing is counted a second time here.
Padding is counted apart, a lookup costs no FLOPs, and a multiply-add is two.

Decoding one token of each of b sequences, c tokens long, moves at least: every weight that is multiplied once (so 1/b of it per
token), the rows that are looked up, and the sequence's keys and values. That is memory-bound where FLOPs per byte stay below
the chip's ridge, peak FLOP/s over bytes/s (Williams et al. 2009, the roofline model).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vocabjax.config import Config
from vocabjax.design import Design
from vocabjax.errors import UserError
from vocabjax.forecast.accelerators import Accelerator
from vocabjax.forecast.footprint import held
from vocabjax.optim import assign, with_vocabulary_groups
from vocabjax.param import ParamInfo, matrix_flops, total_size
from vocabjax.sparse import looked_up
from vocabjax.state import abstract_state
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.interfaces import Tokens
from vocabjax.vocab.scores import chunk_size

FEED_FORWARD, ATTENTION, NORMS, HEAD = "feed-forward", "attention", "norms", "head"


class PartCost(NamedTuple):
    """One part of a model.

    Attributes:
      parameters: padding left out.
      train_flops: per token, three times the forward's.
      decode_flops: per token.
      decode_bytes: per token, at least.
    """

    name: str
    parameters: int
    train_flops: int
    decode_flops: int
    decode_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte when decoding."""
        return self.decode_flops / self.decode_bytes


class Memory(NamedTuple):
    """Bytes of training on one device.

    Attributes:
      parameters, gradients, moments: of all of them; of tables trained by rows, gradients of no more rows than a step reads.
      kept: activations that the backward of one sequence needs, as automatic differentiation keeps them.
      logits: of one microbatch, if they were made at once (float32).
      loss: what is held instead: a chunk's scores and the table's gradient.
    """

    parameters: int
    gradients: int
    moments: int
    kept: int
    logits: int
    loss: int


@dataclass(frozen=True)
class Count:
    """What a config costs.

    Attributes:
      parts: in the order of the model.
      groups: optimiser group → parameters.
      padding: numbers that are stored only so that tables divide over their shards.
      vocab: parameters of the vocabulary.
      layer_flops: per token, of the matrices of one layer.
      batch, context: of decoding: sequences at a time, tokens each has behind it.
      dtype: that weights, rows and the cache are read in when decoding.
      decodes: whether it can decode; else what is said of that is not meant.
    """

    parts: tuple[PartCost, ...]
    groups: Mapping[str, int]
    padding: int
    vocab: int
    layer_flops: float
    memory: Memory
    batch: int
    context: int
    dtype: str
    decodes: bool

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def train_flops(self) -> int:
        """Per token."""
        return sum(part.train_flops for part in self.parts)

    @property
    def decode_flops(self) -> int:
        """Per token."""
        return sum(part.decode_flops for part in self.parts)

    @property
    def decode_bytes(self) -> float:
        """Per token."""
        return sum(part.decode_bytes for part in self.parts)

    @property
    def intensity(self) -> float:
        """FLOPs per byte when decoding."""
        return self.decode_flops / self.decode_bytes

    @property
    def head(self) -> PartCost:
        return next(part for part in self.parts if part.name == HEAD)

    @property
    def head_in_layers(self) -> float:
        """FLOPs of decoding with the head, in those of a layer's matrices."""
        return self.head.decode_flops / self.layer_flops

    def as_json(self, chip: Accelerator | None = None) -> dict[str, Any]:
        """Plain values; with a chip, also whether decoding is bound by its memory."""
        found: dict[str, Any] = {
            "parameters": self.parameters,
            "vocabulary_parameters": self.vocab,
            "padding": self.padding,
            "train_flops_per_token": self.train_flops,
            "parts": [part._asdict() for part in self.parts],
            "groups": dict(self.groups),
            "training_bytes": self.memory._asdict(),
        }
        if not self.decodes:
            return found
        found |= {
            "decode_flops_per_token": self.decode_flops,
            "decode_bytes_per_token": self.decode_bytes,
            "head_in_layers": self.head_in_layers,
            "decode": {"sequences": self.batch, "context": self.context, "dtype": self.dtype},
        }
        if chip is not None:
            found["accelerator"] = {
                "name": chip.name,
                "ridge_flops_per_byte": chip.ridge,
                "decode_memory_bound": self.intensity < chip.ridge,
                "head_memory_bound": self.head.intensity < chip.ridge,
                "decode_seconds_at_least": self.seconds(chip),
            }
        return found

    def seconds(self, chip: Accelerator) -> float:
        """Of decoding one token of every sequence on one chip: the longer of computing and moving."""
        of_one = max(self.decode_flops / chip.bf16_flops, self.decode_bytes / chip.memory_bandwidth)
        return self.batch * of_one


def count(design: Design, *, batch: int = 1, context: int = 1024) -> Count:
    """Counts a design on one device.

    Args:
      batch: sequences that decode together.
      context: tokens each has behind it.

    Raises:
      UserError: a batch or a context below 1.
    """
    for name, value in (("--sequences", batch), ("--context", context)):
        if value < 1:
            raise UserError(f"{name} = {value} must be at least 1")
    blueprint, config = design.blueprint, design.config
    infos = list(blueprint.infos.values())
    model = blueprint.bind(blueprint.abstract())
    names = [f"memory {i}: {part.kind}" for i, part in enumerate(config.vocab.memories)]
    parts = {
        name: [info for info in infos if part_of(info.path, names) == name]
        for name in dict.fromkeys(["input", *(part_of(info.path, names) for info in infos), HEAD])
    }
    layers = config.trunk.layers
    keys = model.trunk.flops(config.data.length) - matrix_flops(model.trunk)
    keys_decoding = model.trunk.flops(2 * context - 1) - matrix_flops(model.trunk)  # exactly c keys
    forward = {"input": model.vocab.input.flops(), HEAD: model.vocab.head.flops()}
    forward |= {
        name: memory.flops() for name, memory in zip(names, model.vocab.memories, strict=True)
    }
    decode = {**forward, HEAD: model.vocab.head.decode_flops()}
    for name in (ATTENTION, FEED_FORWARD):
        matrices = 2 * total_size(info for info in parts[name] if info.role == "matrix")
        forward[name] = decode[name] = matrices
    forward[ATTENTION] += keys
    decode[ATTENTION] += keys_decoding
    moved = _decode_bytes(design, parts, batch, context)
    costs = tuple(
        PartCost(
            name,
            total_size(of_part),
            3 * forward.get(name, 0),
            decode.get(name, 0),
            moved[name],
        )
        for name, of_part in parts.items()
    )
    groups: dict[str, int] = {}
    for path, group in assign(config.optim, infos).items():
        groups[group] = groups.get(group, 0) + math.prod(blueprint.infos[path].logical)
    found = Count(
        costs,
        groups,
        sum(math.prod(info.shape) for info in infos) - total_size(infos),
        blueprint.count("vocab/"),
        matrix_flops(model.trunk) / layers,
        _memory(design),
        batch,
        context,
        config.vocab.dtype,
        config.trunk.kind == TrunkConfig.kind,
    )
    assert found.parameters == blueprint.count()
    assert found.train_flops == blueprint.train_flops(config.data.length)
    return found


def part_of(path: str, memories: Sequence[str]) -> str:
    """The part a parameter belongs to."""
    first, *rest = path.split("/")
    if first == "vocab":
        if rest[0] == "memories":
            return memories[int(rest[1])]
        return {"head": HEAD, "source": "source input"}.get(rest[0], "input")
    leaf = rest[-1].removesuffix("_bias")
    if leaf in ("gate", "up", "down"):
        return FEED_FORWARD
    return ATTENTION if leaf in ("q", "k", "v", "o") else NORMS


def on_trunk_of(config: Config, other: Config) -> Config:
    """`config` with the vocabulary of another: its input, head, memories, objective and their groups, at this V, D and dtype.

    What the other counts in its own width or ids (the width of narrow rows, cutoffs, buckets) grows in proportion.
    """
    theirs = other.vocab
    width = config.vocab.width / theirs.width
    ids = (config.vocab.size or config.data.vocab_size) / (theirs.size or other.data.vocab_size)
    vocab = replace(
        config.vocab,
        input=theirs.input.resized(width, ids),
        head=theirs.head.resized(width, ids),
        memories=tuple(memory.resized(width, ids) for memory in theirs.memories),
        objective=theirs.objective,
    )
    return replace(config, vocab=vocab, optim=with_vocabulary_groups(config.optim, other.optim))


def _decode_bytes(
    design: Design, parts: Mapping[str, list[ParamInfo]], batch: int, context: int
) -> dict[str, float]:
    blueprint, config = design.blueprint, design.config
    size = jnp.dtype(config.vocab.dtype).itemsize
    only_looked_up = looked_up(blueprint)
    moved = dict.fromkeys(parts, 0.0)
    for name, infos in parts.items():
        for info in infos:
            if info.path not in only_looked_up:
                # A table that is scored belongs to the input, and it is the head that reads all of it.
                reader = HEAD if info.role == "tied" else name
                moved[reader] += size * math.prod(info.logical) / batch
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32, sharding=design.layout.sharding("batch", "seq"))

    def read(params: Any, ids: jax.Array) -> Any:
        return blueprint.bind(params).vocab.gather(Tokens.of(ids))

    rows = jax.eval_shape(read, blueprint.abstract(), token)
    memories = [name for name in parts if name.startswith("memory ")]
    for reader, of_reader in rows.items():
        part = part_of(f"vocab/{reader}/", memories)
        moved[part] += sum(size * x.size for x in jax.tree.leaves(of_reader))
    trunk = config.trunk
    head = trunk.width_of_head(config.vocab.width)
    # Keys and values of the context are read, those of the token written.
    moved[ATTENTION] += 2 * trunk.layers * trunk.kv_heads * head * size * (context + 1)
    return moved


def _memory(design: Design) -> Memory:
    blueprint, config, layout = design.blueprint, design.config, design.layout
    sparse, length = design.sparse, config.data.length
    microbatch = config.train.batch // config.train.accumulate
    state = abstract_state(blueprint, design.optimizer, sparse.catch_up)
    gradients = 0
    for path, info in blueprint.infos.items():
        rows = info.shape[0]
        if path in sparse.tables:
            rows = min(rows, config.train.batch * length)
        gradients += 4 * rows * math.prod(info.shape[1:])
    sizes = blueprint.sizes
    chunk = chunk_size(layout, sizes.padded, config.vocab.dtype, config.vocab.objective.chunk)
    chunk = min(chunk, microbatch * length)
    return Memory(
        held(state.params),
        gradients,
        held((state.optimizer, state.current)),
        _kept(design),
        4 * microbatch * length * sizes.padded,
        4 * sizes.padded * (chunk + config.vocab.width),
    )


def _kept(design: Design) -> int:
    """Bytes that the backward of one sequence keeps: what a second one adds."""
    blueprint, layout = design.blueprint, design.layout
    sharding = layout.sharding("batch", "seq")

    def of(sequences: int) -> int:
        shape = (sequences, design.config.data.length)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

        def backward(params: Any, ids: jax.Array) -> Any:
            def hidden(params: Any) -> jax.Array:
                return blueprint.bind(params).hidden(Tokens.of(ids))[0]

            return jax.vjp(hidden, params)[1]

        return held(jax.eval_shape(backward, blueprint.abstract(), ids))

    return of(2) - of(1)
