"""What the parts of a vocabulary promise each other and the trunk: input × head × memory × objective.

Letters: B batch, T positions, D model width, V vocabulary (padded where it is a stored dimension), L layers.

Every table read depends on token identity alone (`reads`): rows are gathered once, before the layer scan and before the
microbatch scan, so that a read's gradient is that of the rows that were touched, scattered once per step.
"""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.param import Role, Scope, matrix_flops, normal
from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.lexicon import Lexicon
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import lookup

Reads = dict[str, jax.Array]  # table name → int32 ids of any shape
Rows = Mapping[str, jax.Array]  # table name → those rows, [..., width]
Site = Literal["pre_attn", "value", "ffn_out", "post_ffn"]


class Tokens(NamedTuple):
    """What the vocabulary reads: int32 ids, and where documents begin.

    Attributes:
      ids_BT: token ids.
      segment_BT: which document of its row a token belongs to; tokens of different segments never see each other.
      position_BT: position within the document.
      past_BH: the H ids just before ids_BT[:, 0] in decoding, −1 where there is none or it is of another document; H is
        `Vocab.history`. None: no past.
      key: a threefry key of a training step, for what is dropped in it; None: evaluation, which drops nothing.
    """

    ids_BT: jax.Array
    segment_BT: jax.Array
    position_BT: jax.Array
    past_BH: jax.Array | None = None
    key: jax.Array | None = None

    @staticmethod
    def of(ids_BT: Any) -> "Tokens":
        """One document per row."""
        ids_BT = jnp.asarray(ids_BT, jnp.int32)
        # Computed from the ids, so that on explicit meshes all three are sharded alike (`zeros_like` does not promise it).
        zeros_BT = ids_BT & 0
        return Tokens(ids_BT, zeros_BT, zeros_BT + jnp.arange(ids_BT.shape[1], dtype=jnp.int32))

    def before(self, back: int) -> jax.Array:
        """int32 [B, T]: the id `back` positions earlier in the same document; −1 where there is none."""
        if back == 0:
            return self.ids_BT
        # By padding and cropping in one operation: slices of a batch of one row forget its sharding.
        zero, length = jnp.int32(0), self.ids_BT.shape[1]
        seen_BT = lax.pad(self.ids_BT, zero, ((0, 0, 0), (back, -back, 0)))
        if self.past_BH is not None:
            skipped = self.past_BH.shape[1] - back
            seen_BT += lax.pad(self.past_BH, zero, ((0, 0, 0), (-skipped, length - back, 0)))
        return jnp.where(self.position_BT >= back, seen_BT, -1)


class Loss(NamedTuple):
    """float32 scalars. `total` is differentiable, the others are reports; the sums are over all tokens of all shards.

    Attributes:
      total: (Σ weight · objective) / normaliser; the objective is the cross-entropy and all that `Objective` adds to it.
      nll: Σ weight · (−log p(target)), in nats, without any of that.
      z: Σ weight · lse², without its coefficient; 0 for heads whose scores are normalised.
      weight: Σ weight over valid labels.
      tokens: number of valid labels.
      invalid: number of labels that are neither predictable nor −100; they are left out of everything else.
    """

    total: jax.Array
    nll: jax.Array
    z: jax.Array
    weight: jax.Array
    tokens: jax.Array
    invalid: jax.Array


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised, beside the likelihood.

    Attributes:
      z_loss: weight of lse² per token (0: exactly the cross-entropy).
      label_smoothing: ε; the target distribution is (1−ε) one-hot + ε uniform over the predictable ids.
      augmented: α of the augmented loss: α · KL(ỹ‖ŷ) is added, ŷ = softmax(z/τ), and ỹ = softmax(E·E[target]/τ) from the input's
        table E (Inan et al. 2016, arXiv:1611.01462, section 3).
      temperature: τ of the augmented loss.
      augmented_targets: whether its gradient flows into E through ỹ too (the paper holds ỹ fixed).
      future: further tokens of the document that are predicted too, from h·F_j, by the same table, wherever the next one is:
        over-decoding (arXiv:2501.16975). How h is turned to them is our reading.
      future_weight: of the cross-entropy of each of them.
      chunk: tokens per device whose logits exist at one time; None: chosen from the rows a device holds (`scores.chunk_size`).
      terms: what a head may or may not define: not 0 where it is asked for.
    """

    terms: ClassVar[frozenset[str]] = frozenset(
        ["z_loss", "label_smoothing", "augmented", "future"]
    )
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    augmented: float = 0.0
    temperature: float = 1.0
    augmented_targets: bool = False
    future: int = 0
    future_weight: float = 0.1
    chunk: int | None = None

    def check(self) -> None:
        """Raises UserError for settings that cannot work."""
        if not 0 <= self.label_smoothing < 1:
            raise UserError(
                f"vocab.objective.label_smoothing = {self.label_smoothing} must be in [0, 1)"
            )
        for name in ("z_loss", "augmented", "future_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(
                    f"vocab.objective.{name} = {getattr(self, name)} must be finite and not negative"
                )
        if not 0 < self.temperature < math.inf:
            raise UserError(
                f"vocab.objective.temperature = {self.temperature} must be positive and finite"
            )
        for name, least in (("chunk", 1), ("future", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"vocab.objective.{name} = {value} must be at least {least}")


class TrunkShape(NamedTuple):
    """What a memory may need to know of the trunk it attaches to."""

    layers: int
    kv_heads: int
    head_dim: int


class Context(NamedTuple):
    """What a part is built from: the sizes, the width D, the compute dtype, what is known of the ids, its place in the model."""

    scope: Scope
    sizes: Sizes
    width: int
    dtype: jnp.dtype
    lexicon: Lexicon = Lexicon()

    def table(
        self,
        name: str,
        role: Role,
        *,
        rows: int | None = None,
        width: int | None = None,
        std: float | None = None,
    ) -> nnx.Param[jax.Array]:
        """A table [rows, width], rows sharded and padded for their shards: N(0, std²), zero in the padding.

        Args:
          rows: logical rows; None: V.
          width: None: D.
          std: None: width^−½, which makes rows of unit length on average.
        """
        rows = self.sizes.logical if rows is None else rows
        width = self.width if width is None else width
        return self.scope.param(
            name,
            (self.sizes.pad(rows), width),
            ("vocab", "table_width"),
            role,
            normal(width**-0.5 if std is None else std),
            rows=rows,
        )


Shared = Mapping[str, jax.Array]  # what an input lends to heads, by name


class Part(nnx.Module):
    """A piece of a vocabulary."""

    def flops(self) -> int:
        """Matrix-product FLOPs per token of the forward; a lookup costs none."""
        return matrix_flops(self)

    def penalty(self, shared: Shared) -> jax.Array | None:
        """A penalty on parameters alone, added to the loss once per step (not once per microbatch); None: none."""
        return None


class Reader(Part):
    """A part that looks rows up by token identity: of one table, a row per id, unless a subclass says otherwise.

    Attributes:
      table: that table.
      history: how many ids before a position `reads` looks at (n−1 for n-grams); decoding then fills `Tokens.past_BH`.
    """

    table: nnx.Param[jax.Array]
    history: int = 0

    def tables(self) -> dict[str, nnx.Param[jax.Array]]:
        """The tables it reads, by name: [rows, width], rows sharded; each with its own logical number of rows.

        A memory of L layers has one table whose rows hold all layers ([rows, L·P]), or L tables where they differ in rows.
        """
        return {"table": self.table}

    def reads(self, tokens: Tokens) -> Reads:
        """Which rows of which table: integers only, a function of the tokens [B, T] alone."""
        return {"table": tokens.ids_BT}

    def wanted(self, tokens: Tokens, leading: int = 0) -> Reads:
        """What `reads` gives for tokens [..., B, T], by path of the table.

        Args:
          leading: how many axes (of microbatches) stand before [B, T].

        Raises:
          UserError: it reads other tables than it has.
        """
        reads = self.reads
        for _ in range(leading):
            reads = jax.vmap(reads)
        tables, wanted = self.tables(), reads(tokens)
        if tables.keys() != wanted.keys():
            raise UserError(
                f"{type(self).__name__}: tables() names {', '.join(tables)}, but reads() names {', '.join(wanted)}"
            )
        return {tables[name].get_metadata("path"): ids for name, ids in wanted.items()}

    def gather(
        self,
        layout: Layout,
        tokens: Tokens,
        dtype: jnp.dtype,
        leading: int = 0,
        slots: Reads | None = None,
    ) -> Rows:
        """The rows that `reads` asks for, in `dtype`; zero rows for what a table does not hold.

        Args:
          leading: how many axes (of microbatches) stand before [B, T]; they are not sharded.
          slots: by path, of the tables that hold a view of the rows touched instead of all of them (`touched.py`): where in
            the view each read lies.

        Raises:
          UserError: it reads other tables than it has.
        """
        wanted, slots = self.wanted(tokens, leading), slots or {}
        rows = {}
        for name, table in self.tables().items():
            path, table_RD = table.get_metadata("path"), table[...]
            is_view = path in slots
            rows[name] = lookup(
                layout,
                table_RD,
                slots[path] if is_view else wanted[path],
                # Its own: a memory may know fewer ids.
                logical=len(table_RD) if is_view else table.get_metadata("logical")[0],
                dtype=dtype,
                leading=leading,
            )
        return rows


class Input(Reader):
    """ids → x_BTD."""

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        """x_BTD in the compute dtype, from the rows that `reads` asked for."""
        raise NotImplementedError

    def shared(self) -> Shared:
        """What it lends to heads, if `tied`: a tied head scores against `"table"` [Vp, D]; other inputs lend other things."""
        return {}


class Head(Part):
    """h_BTD → scores over the vocabulary. A tied head stores no table: it is handed what the input lends."""

    def decode_flops(self) -> int:
        """Matrix-product FLOPs per token of `logits`."""
        return self.flops()

    def logits(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, Vp]; −inf wherever an id may not be predicted."""
        raise NotImplementedError

    def loss(
        self,
        shared: Shared,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
        normalizer: jax.Array | None,
        tokens: Tokens | None,
    ) -> Loss:
        """The loss without [B, T, V]. `tokens` tells documents apart, for heads that look further ahead."""
        raise NotImplementedError

    def scored(self, shared: Shared) -> tuple[jax.Array | None, jax.Array | None]:
        """The table [Vp, E] and the bias [Vp], if it has one, whose gradients `accumulate` adds up; (None, None): it has no
        `accumulate`."""
        return None, None

    def accumulate(
        self,
        shared: Shared,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
        normalizer: jax.Array,
        tokens: Tokens | None,
        into: Accumulator,
    ) -> tuple[Loss, Accumulator]:
        """`loss`, for gradient accumulation: its gradient of what is `scored` goes into `into`, and the rest through `total`.

        `total` must enter what is minimised with a factor of 1.
        """
        raise NotImplementedError

    def nll(self, shared: Shared, h_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """float32 [B, T]: −log p(target) in nats, 0 where the label is not valid; without [B, T, V]."""
        raise NotImplementedError


class Memory(Reader):
    """Token identity again, inside the trunk: at one site of some layers.

    Attributes:
      layers: the layers it attaches to, ascending.
      site: "pre_attn" changes the residual stream before attention; "value" the attention values [B, T, kv heads, head
        width]; "ffn_out" the FFN's output; "post_ffn" the residual stream after the FFN.
    """

    layers: tuple[int, ...]
    site: Site

    def prepare(self, rows: Rows, tokens: Tokens, x_BTD: jax.Array) -> tuple[Any, Any]:
        """(common, by layer): what its layers need of the rows. Pytrees; the second has leading axis len(layers)."""
        raise NotImplementedError

    def per_layer(self) -> Any:
        """A pytree of arrays with leading axis len(layers): the parameters `apply` gets one layer of."""
        raise NotImplementedError

    def apply(
        self, params: Any, common: Any, context: Any, h_BTD: jax.Array, y: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """(y, cache) after this memory at one layer.

        Args:
          params, context: this layer's slice of `per_layer()` and of the second part of `prepare(...)`.
          common: the first part of `prepare(...)`.
          h_BTD: the residual stream the site's sub-block reads.
          y: what stands at the site.
          cache: this layer's slice of `init_cache(...)`, or None when not decoding.
        """
        raise NotImplementedError

    def init_cache(self, batch: int) -> Any:
        """A pytree with leading axis len(layers) that `apply` carries through decoding; None: it needs none."""
        return None


def check_std(name: str, std: float | None) -> None:
    """Raises UserError for a standard deviation that cannot be; None: the default."""
    if std is not None and not 0 <= std < math.inf:
        raise UserError(f"{name} = {std} must be finite and not negative, or None")


class PartConfig(abc.ABC):
    """Frozen dataclasses that name a part and hold its settings.

    Attributes:
      kind: the name used in files.
      by_width, by_ids: settings that grow with the trunk's width, and with the number of ids.
    """

    kind: ClassVar[str]
    by_width: ClassVar[tuple[str, ...]] = ()
    by_ids: ClassVar[tuple[str, ...]] = ()

    def resized(self, width: float, ids: float) -> Self:
        """The part for a model so many times as wide, with so many times the ids: its own widths and counts in proportion."""

        def of(value: Any, by: float) -> Any:
            if value is None or by == 1:
                return value
            if isinstance(value, tuple):
                return tuple(of(one, by) for one in value)
            unit = math.gcd(value, 8)  # what divided over heads, say, still does
            return max(1, round(value * by / unit)) * unit

        changes = {name: of(getattr(self, name), width) for name in self.by_width}
        changes |= {name: of(getattr(self, name), ids) for name in self.by_ids}
        return replace(self, **changes) if changes else self  # type: ignore[type-var]

    def check(self) -> None:  # noqa: B027  # most have nothing to refuse
        """Raises UserError for settings that cannot work, whatever they are combined with."""


_Part = TypeVar("_Part", bound=PartConfig)


def converted(part: PartConfig, kind: type[_Part]) -> _Part:
    """Another kind of part, with the settings it shares with this one."""
    own = {f.name for f in fields(part)}  # type: ignore[arg-type]
    return kind(**{f.name: getattr(part, f.name) for f in fields(kind) if f.name in own})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class InputConfig(PartConfig):
    """Every input's rows may be changed before they enter the trunk (`modifiers.py`); tied scores see them unchanged.

    Attributes:
      scale: "none", "sqrt_width", or a number: multiplies the row, once.
      norm: applied after the scale.
      gradient: multiplies the gradient that reaches the row from the trunk, not its value.
      dropout: probability that an id's row is 0 throughout a training step; the others are divided by the rest.
    """

    scale: Literal["none", "sqrt_width"] | float = "none"
    norm: Literal["none", "layernorm", "rmsnorm"] = "none"
    gradient: float = 1.0
    dropout: float = 0.0

    def check(self) -> None:
        if not isinstance(self.scale, str) and not 0 < abs(self.scale) < math.inf:
            raise UserError(f"vocab.input.scale = {self.scale} must be finite and not zero")
        if not 0 <= self.gradient < math.inf:
            raise UserError(
                f"vocab.input.gradient = {self.gradient} must be finite and not negative"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"vocab.input.dropout = {self.dropout} must be in [0, 1)")

    @abc.abstractmethod
    def build(self, context: Context, *, tied: bool) -> Input:
        """The input part. `tied` says that a head will score against its table."""


class HeadConfig(PartConfig):
    """What `rules.py` decides by.

    Attributes:
      tied: whether it scores against what the input lends.
      needs: what the input must lend for that, by name.
      honours: which of `Objective.terms` its loss has; the others must be 0.
    """

    tied: ClassVar[bool]
    needs: ClassVar[tuple[str, ...]] = ()
    honours: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        """The head of a vocabulary with this input; a tied head may read its shapes, and stores none of it."""


class MemoryConfig(PartConfig):
    """Names a memory."""

    @abc.abstractmethod
    def build(self, context: Context, trunk: TrunkShape) -> Memory:
        """The memory, for a trunk of that shape."""
