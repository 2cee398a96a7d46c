"""`Vocab`: the two faces of a Transformer in one object, on anybody's trunk.

x_BTD = vocab.encode(ids_BT)                  read
loss  = vocab.loss(h_BTD, targets_BT)         predict, without [B, T, V]
z_BTV = vocab.logits(h_BTD)                   predict, for evaluation and sampling
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.param import Scope, param_infos
from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.composed import ComposedInput
from vocabjax.vocab.heads.linear import TiedHead
from vocabjax.vocab.inputs.full import FullTable
from vocabjax.vocab.interfaces import (
    Context,
    HeadConfig,
    InputConfig,
    Loss,
    Memory,
    MemoryConfig,
    Objective,
    Part,
    Reader,
    Reads,
    Rows,
    Shared,
    Tokens,
    TrunkShape,
)
from vocabjax.vocab.labels import label_weights
from vocabjax.vocab.lexicon import Lexicon
from vocabjax.vocab.modifiers import Modifiers
from vocabjax.vocab.rules import require_objective, require_pair
from vocabjax.vocab.sizes import Sizes


@dataclass(frozen=True)
class VocabConfig:
    """Input × head × memories × objective.

    Attributes:
      size: V, the number of ids; None: what the tokenizer really has.
      width: D, the width of the trunk.
      multiple: stored rows are a multiple of this times the shards of the vocabulary axis.
      banned: ids that may be read but never predicted. As labels they are ignored, so bits per byte are then unknown.
      dtype: compute dtype; parameters, scores and sums are float32.
      input, head, memories, objective: the parts.
    """

    size: int | None = None
    width: int = 128
    multiple: int = 128
    banned: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    input: InputConfig = field(default_factory=FullTable)
    head: HeadConfig = field(default_factory=TiedHead)
    memories: tuple[MemoryConfig, ...] = ()
    objective: Objective = field(default_factory=Objective)

    def check(self) -> None:
        """Raises UserError for settings that cannot work, before anything is built."""
        for name in ("size", "width", "multiple"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value < 2**31):
                raise UserError(
                    f"vocab.{name} = {value} must be a whole number, at least 1 and below 2^31"
                )
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"vocab.dtype = {self.dtype!r} must be float32 or bfloat16")
        kinds = ((self.input, InputConfig), (self.head, HeadConfig))
        for part, kind in (*kinds, *((memory, MemoryConfig) for memory in self.memories)):
            if not isinstance(part, kind):
                raise UserError(
                    f"VocabConfig: {part!r} is no {kind.__name__}, such as head=TiedHead()"
                )
            part.check()
        self.objective.check()


class Vocab(nnx.Module):
    """Reads ids and predicts ids.

    Attributes:
      sizes: logical and padded sizes, and which ids may be predicted.
      input, head, memories: the parts that the config names.
      modifiers: what becomes of the input's rows on their way into the trunk.
    """

    def __init__(
        self,
        config: VocabConfig,
        *,
        rngs: nnx.Rngs | None = None,
        mesh: Mesh | None = None,
        rules: Mapping[str, Sequence[str]] | None = None,
        trunk: TrunkShape | None = None,
        lexicon: Lexicon | None = None,
        scope: Scope | None = None,
    ) -> None:
        """Builds the parts; every parameter is born sharded.

        Args:
          config: its `size` must be set.
          rngs: one key is drawn; initial values follow each parameter's path.
          mesh: None: the ambient mesh of `jax.set_mesh`, else one device. Explicit and automatic axes both work.
          rules: logical axis → mesh axes; see `vocabjax.mesh.DEFAULT_RULES`.
          trunk: the shape of the trunk, needed by memories.
          lexicon: counts and texts of the ids, needed by parts that sort ids by frequency or read what they spell.
          scope: instead of `rngs`, `mesh` and `rules`, when building inside a larger model.

        Raises:
          UserError: settings that cannot work.
        """
        config.check()
        if config.size is None:
            raise UserError(
                "vocab.size is not set: give the number of ids (the tokenizer's real size)"
            )
        owner = scope is None
        if scope is None:
            if not isinstance(rngs, nnx.Rngs):
                raise UserError("Vocab needs rngs, e.g. Vocab(config, rngs=nnx.Rngs(0))")
            scope = Scope(rngs.params(), Layout.make(mesh, rules))
        self.layout = scope.layout
        self.sizes = Sizes.make(config.size, config.multiple, config.banned, scope.layout)
        self.dtype = jnp.dtype(config.dtype)

        def context(*names: str) -> Context:
            inner = scope
            for name in names:
                inner = inner / name
            return Context(inner, self.sizes, config.width, self.dtype, lexicon or Lexicon())

        self.tied = config.head.tied
        self.width = config.width
        self.input = config.input.build(context("input"), tied=self.tied)
        self.modifiers = Modifiers(config.input, context("modifiers"))
        lent = jax.eval_shape(self.input.shared)  # shapes: what is composed is not composed here
        composed = isinstance(self.input, ComposedInput)
        require_pair(config.input, config.head, lent, config.width, composed=composed)
        require_objective(config.head, config.objective, config.input, lent)
        self.head = config.head.build(context("head"), config.objective, self.input)
        self.memories: nnx.List[Memory] = nnx.List([])
        for index, memory in enumerate(config.memories):
            if trunk is None:
                raise UserError(
                    "memories attach to a trunk: give Vocab its shape, trunk=TrunkShape(…)"
                )
            self.memories.append(memory.build(context("memories", str(index)), trunk))
        if owner:
            param_infos(self)  # refuses a Param stored twice

    @property
    def history(self) -> int:
        """H: how many ids before a position its table reads depend on."""
        return max(part.history for _, part in self._readers())

    def encode(self, ids_BT: Any) -> jax.Array:
        """x_BTD in the compute dtype. An id outside [0, V) gives a zero row on device.

        Args:
          ids_BT: integers [B, T], or `Tokens`. Host arrays (NumPy, lists) are checked first.

        Raises:
          IdError: a host array holds an id outside [0, V); names position and value.
        """
        tokens = self.tokens(ids_BT)
        return self.embed(self.gather(tokens), tokens)

    def tokens(self, ids_BT: Any) -> Tokens:
        """`Tokens` of ids: one document per row unless they are `Tokens` already. Host arrays are checked."""
        if isinstance(ids_BT, Tokens):
            return ids_BT
        if not isinstance(ids_BT, jax.Array):
            ids_BT = np.asarray(ids_BT)
            self.sizes.check_ids(ids_BT)
        chex.assert_rank(ids_BT, 2, custom_message="ids_BT")
        chex.assert_type(ids_BT, int)
        self._check_tokens("ids_BT", ids_BT.shape)
        return Tokens.of(ids_BT)

    def wanted(self, tokens: Tokens, leading: int = 0) -> Reads:
        """By path of a table, the int32 ids of the rows that these tokens read of it: functions of the tokens alone.

        Args:
          leading: how many axes (of microbatches) stand before [B, T]; they are not sharded.
        """
        return {
            path: ids
            for _, part in self._readers()
            for path, ids in part.wanted(tokens, leading).items()
        }

    def place_of(self, path: str) -> tuple[str, str]:
        """Where the rows of a table that is read stand in what `gather` gives: the part, and the part's name for it."""
        return next(
            (part, name)
            for part, reader in self._readers()
            for name, table in reader.tables().items()
            if table.get_metadata("path") == path
        )

    def gather(
        self, tokens: Tokens, leading: int = 0, slots: Reads | None = None
    ) -> dict[str, Rows]:
        """Every row that the input and the memories read, by part: all table reads of a step, before any loop.

        Args:
          leading: as in `wanted`.
          slots: for tables of which only the rows touched are there; see `Reader.gather`.
        """
        return {
            name: part.gather(self.layout, tokens, self.dtype, leading, slots)
            for name, part in self._readers()
        }

    def embed(self, rows: Mapping[str, Rows], tokens: Tokens) -> jax.Array:
        """x_BTD from gathered rows."""
        return self.modifiers(self.input(rows["input"], tokens), tokens)

    def contexts(
        self, rows: Mapping[str, Rows], tokens: Tokens, x_BTD: jax.Array
    ) -> tuple[tuple[Any, Any], ...]:
        """Per memory, what its layers need of its rows: (common, by layer)."""
        return tuple(
            memory.prepare(rows[f"memories/{index}"], tokens, x_BTD)
            for index, memory in enumerate(self.memories)
        )

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, Vp], sharded over the vocabulary; −inf for padding and for ids that may not be predicted."""
        self._check_hidden(h_BTD)
        return self.head.logits(self.input.shared(), h_BTD)

    def loss(
        self,
        h_BTD: jax.Array,
        targets_BT: Any,
        weights_BT: jax.Array | None = None,
        *,
        normalizer: jax.Array | None = None,
        tokens: Tokens | None = None,
        shared: Shared | None = None,
    ) -> Loss:
        """The training loss; only `.total` is differentiable: in h, the parameters, weights and normaliser.

        Args:
          h_BTD: hidden states.
          targets_BT: labels, already shifted (position t holds the token that follows t); −100 is ignored.
          weights_BT: per token; one of weight 0 is left out, whatever its hidden state holds.
          normalizer: what the total is divided by; None: the sum of the weights of this call.
          tokens: the tokens h_BTD came from, for heads that look at documents.
          shared: what the input lends, when it was made beforehand.

        Raises:
          IdError: a host array of labels holds one that is neither predictable nor −100.
        """
        self._check_hidden(h_BTD)
        targets_BT = self._labels(targets_BT, h_BTD)
        if weights_BT is not None:
            weights_BT = jnp.asarray(weights_BT)
            chex.assert_shape(weights_BT, targets_BT.shape, custom_message="weights_BT")
        shared = self.input.shared() if shared is None else shared
        return self.head.loss(shared, h_BTD, targets_BT, weights_BT, normalizer, tokens)

    def accumulate(
        self,
        shared: Shared,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        into: Accumulator,
        *,
        normalizer: jax.Array,
        tokens: Tokens,
    ) -> tuple[Loss, Accumulator]:
        """`loss` for one microbatch of several; see `Head.accumulate`.

        Args:
          shared: what the input lends, made once for all microbatches.
        """
        return self.head.accumulate(shared, h_BTD, targets_BT, None, normalizer, tokens, into)

    def nll(self, h_BTD: jax.Array, targets_BT: Any) -> jax.Array:
        """float32 [B, T]: −log p(target) in nats, 0 where the label is not valid."""
        self._check_hidden(h_BTD)
        return self.head.nll(self.input.shared(), h_BTD, self._labels(targets_BT, h_BTD))

    def weight(self, targets_BT: jax.Array, weights_BT: jax.Array | None = None) -> jax.Array:
        """Σ weight over valid labels: the normaliser of a batch that is cut into microbatches."""
        return label_weights(self.sizes, targets_BT, weights_BT).sum()

    def invalid_ids(self, tokens: Tokens) -> jax.Array:
        """float32 scalar: how many ids lie outside [0, V)."""
        ids_BT = tokens.ids_BT
        return ((ids_BT < 0) | (ids_BT >= self.sizes.logical)).sum().astype(jnp.float32)

    def penalty(self, shared: Shared | None = None) -> jax.Array | None:
        """The parts' penalties on parameters, added once per step; None when there are none. `shared`: as for `loss`."""
        shared = self.input.shared() if shared is None else shared
        penalties = [p for p in (part.penalty(shared) for part in self._parts()) if p is not None]
        return sum(penalties[1:], penalties[0]) if penalties else None

    def flops(self) -> int:
        """Matrix-product FLOPs per token of the forward, over the logical vocabulary."""
        return sum(part.flops() for part in self._parts())

    def decode_flops(self) -> int:
        """Matrix-product FLOPs per token that is decoded: what the loss alone needs is left out."""
        return self.flops() - self.head.flops() + self.head.decode_flops()

    def _parts(self) -> list[Part]:
        return [self.input, self.head, *self.memories]

    def _readers(self) -> Iterator[tuple[str, Reader]]:
        yield "input", self.input
        for index, memory in enumerate(self.memories):
            yield f"memories/{index}", memory

    def _labels(self, targets_BT: Any, h_BTD: jax.Array) -> jax.Array:
        if not isinstance(targets_BT, jax.Array):
            targets_BT = np.asarray(targets_BT)
            self.sizes.check_labels(targets_BT)
        chex.assert_shape(targets_BT, h_BTD.shape[:2], custom_message="targets_BT")
        chex.assert_type(targets_BT, int)
        return jnp.asarray(targets_BT, jnp.int32)

    def _check_hidden(self, h_BTD: jax.Array) -> None:
        chex.assert_shape(h_BTD, (None, None, self.width), custom_message="h_BTD")
        if h_BTD.dtype not in (jnp.float32, jnp.bfloat16):
            raise UserError(f"h_BTD is {h_BTD.dtype}; hidden states are float32 or bfloat16")
        self._check_tokens("h_BTD", h_BTD.shape)

    def _check_tokens(self, name: str, shape: tuple[int, ...]) -> None:
        self.layout.require(f"the batch of {name}", "batch", shape[0])
        self.layout.require(f"the length of {name}", "seq", shape[1])
