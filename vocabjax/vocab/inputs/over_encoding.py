"""Over-encoding: hashed n-gram rows beside the token's own.

    x = (table[id_t] + Σ_{i=2..n} Σ_{j=1..k} E_ij[h_i mod m_ij]·W_ij) / (1 + k(n−1))
    h_i = Σ_{p<i} id_{t−p} · V^p                              E_ij [m_ij, D / nk], W_ij [D / nk, D]

Source: Over-Tokenized Transformer (arXiv:2501.16975, section 3.2): n = 3; ids before the document are 0; the m_ij differ slightly, and no
multiple of V (they are worse). Hashes are exact, and never cross a document. Lends the token table, so that a tied head ties it.
Parameters: V·D + Σ_ij (m_ij + D)·D / nk.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vocabjax.errors import UserError
from vocabjax.param import Role, normal
from vocabjax.vocab.hashing import ngram_ids
from vocabjax.vocab.interfaces import Context, Input, InputConfig, Reads, Rows, Shared, Tokens


@dataclass(frozen=True)
class OverEncoding(InputConfig):
    """A token table and hashed tables of n-grams.

    Attributes:
      order: n, the longest n-gram.
      slices: k, tables per order.
      buckets: m, rows of the first hashed table; the others have a few more.
    """

    kind: ClassVar[str] = "over_encoding"
    by_ids: ClassVar[tuple[str, ...]] = ("buckets",)
    order: int = 3
    slices: int = 1
    buckets: int = 8192

    def check(self) -> None:
        super().check()
        if self.order < 2 or self.slices < 1 or not 1 <= self.buckets < 2**30:
            raise UserError(
                f"vocab.input: order = {self.order} must be at least 2, slices = {self.slices} at least 1, and buckets = "
                f"{self.buckets} from 1 to 2^30"
            )

    def build(self, context: Context, *, tied: bool) -> Input:
        if context.width % (self.order * self.slices):
            width, unit = context.width, self.order * self.slices
            raise UserError(
                f"vocab.width = {width} does not divide into order · slices = {unit} parts; use a width of "
                f"{width // unit * unit or unit} or {-(-width // unit) * unit}, or other slices"
            )
        return OverEncodingInput(self, context, tied=tied)


class OverEncodingInput(Input):
    def __init__(self, config: OverEncoding, context: Context, *, tied: bool) -> None:
        self.history = config.order - 1
        self.size, D = context.sizes.logical, context.width
        width = D // (config.order * config.slices)
        self.orders = tuple(i for i in range(2, config.order + 1) for _ in range(config.slices))
        self.buckets = _moduli(config.buckets, len(self.orders), self.size)
        role: Role = "tied" if tied else "embed"
        self.table = context.table("table", role)
        grams = context._replace(scope=context.scope / "grams")
        self.grams = nnx.List(
            [grams.table(str(i), "memory", rows=m, width=width) for i, m in enumerate(self.buckets)]
        )
        projections = context.scope / "projections"
        self.projections = nnx.List(
            [
                projections.param(str(i), (width, D), (None, None), "matrix", normal(D**-0.5))
                for i in range(len(self.orders))
            ]
        )

    def tables(self) -> dict[str, nnx.Param[jax.Array]]:
        return {"table": self.table, **{f"grams/{i}": gram for i, gram in enumerate(self.grams)}}

    def reads(self, tokens: Tokens) -> Reads:
        before = [tokens.before(back) for back in range(self.history + 1)]
        is_id = [(ids >= 0) & (ids < self.size) for ids in before]
        known = [jnp.where(ok, ids, 0) for ok, ids in zip(is_id, before, strict=True)]
        reads = {"table": tokens.ids_BT}
        for i, (order, m) in enumerate(zip(self.orders, self.buckets, strict=True)):
            gram_BT = ngram_ids(tuple(known[:order]), self.size, m)
            reads[f"grams/{i}"] = jnp.where(is_id[0], gram_BT, -1)  # a bad id reads nothing
        return reads

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        x_BTD = rows["table"]
        for i, projection in enumerate(self.projections):
            e_BTE = rows[f"grams/{i}"]
            x_BTD = x_BTD + jnp.einsum("bte,ed->btd", e_BTE, projection[...].astype(e_BTE.dtype))
        return x_BTD / (1 + len(self.orders))

    def shared(self) -> Shared:
        return {"table": self.table[...]}


def _moduli(first: int, count: int, size: int) -> tuple[int, ...]:
    """`count` different moduli from `first` up, none a multiple of `size` (unless every number is)."""
    moduli: list[int] = []
    candidate = first
    while len(moduli) < count:
        if size == 1 or candidate % size:
            moduli.append(candidate)
        candidate += 1
    return tuple(moduli)
