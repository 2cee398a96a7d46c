"""Tiny tables: rows composed from a few buckets.

    hash            x = Σ_i p_i[id] · B[h_i(id)], i = 1 … k        B [buckets, D], p [V, k], h_i universal hashes
    compositional   x = Q[id div r] ⊙ R[id mod r]                   Q [⌈V / r⌉, D], R [r, D]

Sources: hash embeddings, Svenstrup et al. 2017 (arXiv:1709.03933, section 3); quotient–remainder codes, Shi et al. 2019
(arXiv:1909.02107, section 3). Parameters: buckets·D + k·V; (⌈V / r⌉ + r)·D. A tied head scores against the composed rows.
"""

import math
import random
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vocabjax.errors import UserError
from vocabjax.vocab.composed import ComposedInput
from vocabjax.vocab.hashing import PRIME, universal_hash
from vocabjax.vocab.interfaces import Context, Input, InputConfig, Reads, Rows, Tokens


@dataclass(frozen=True)
class HashTable(InputConfig):
    """A weighted sum of hashed buckets.

    Attributes:
      buckets: rows of the shared table.
      hashes: k, buckets per id.
      seed: draws the hash functions.
    """

    kind: ClassVar[str] = "hash"
    by_ids: ClassVar[tuple[str, ...]] = ("buckets",)
    buckets: int = 1024
    hashes: int = 2
    seed: int = 0

    def check(self) -> None:
        super().check()
        if not 1 <= self.buckets < 2**31 or self.hashes < 1:
            raise UserError(
                f"vocab.input.buckets = {self.buckets} must be at least 1 and below 2^31, hashes = {self.hashes} at least 1"
            )

    def build(self, context: Context, *, tied: bool) -> Input:
        return HashInput(self, context, tied=tied)


class HashInput(ComposedInput):
    def __init__(self, config: HashTable, context: Context, *, tied: bool) -> None:
        super().__init__(context, tied=tied)
        draw = random.Random(config.seed)
        self.functions = tuple(
            (draw.randrange(1, PRIME), draw.randrange(PRIME)) for _ in range(config.hashes)
        )
        self.buckets = config.buckets
        # k independent terms with weights of variance 1: rows of unit length on average.
        std = (context.width * config.hashes) ** -0.5
        self.table = context.table("table", self.role, rows=config.buckets, std=std)
        self.importance = context.table("importance", self.role, width=config.hashes, std=1.0)

    def tables(self) -> dict[str, nnx.Param[jax.Array]]:
        return {"table": self.table, "importance": self.importance}

    def reads(self, tokens: Tokens) -> Reads:
        ids_BT = tokens.ids_BT
        buckets = [universal_hash(ids_BT, a, b, self.buckets) for a, b in self.functions]
        # An id that does not exist has no importance row, and so a zero row.
        return {"table": jnp.stack(buckets, -1), "importance": ids_BT}

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        return jnp.einsum("btk,btkd->btd", rows["importance"], rows["table"])


@dataclass(frozen=True)
class CompositionalTable(InputConfig):
    """The product of a quotient's row and a remainder's row.

    Attributes:
      remainders: r; None: ⌈√V⌉, the fewest rows.
    """

    kind: ClassVar[str] = "compositional"
    remainders: int | None = None

    def check(self) -> None:
        super().check()
        if self.remainders is not None and not 1 <= self.remainders < 2**31:
            raise UserError(
                f"vocab.input.remainders = {self.remainders} must be at least 1 and below 2^31, or None"
            )

    def build(self, context: Context, *, tied: bool) -> Input:
        return CompositionalInput(self, context, tied=tied)


class CompositionalInput(ComposedInput):
    def __init__(self, config: CompositionalTable, context: Context, *, tied: bool) -> None:
        super().__init__(context, tied=tied)
        self.size = context.sizes.logical
        self.remainders = config.remainders or math.isqrt(self.size - 1) + 1
        # Two factors of deviation D^−¼ each: a product of deviation D^−½.
        std = context.width**-0.25
        rows = -(-self.size // self.remainders)
        self.quotient = context.table("quotient", self.role, rows=rows, std=std)
        self.remainder = context.table("remainder", self.role, rows=self.remainders, std=std)

    def tables(self) -> dict[str, nnx.Param[jax.Array]]:
        return {"quotient": self.quotient, "remainder": self.remainder}

    def reads(self, tokens: Tokens) -> Reads:
        ids_BT = tokens.ids_BT
        ids_BT = jnp.where((ids_BT >= 0) & (ids_BT < self.size), ids_BT, -1)
        # −1 stays outside both tables: a zero row.
        quotient = jnp.where(ids_BT < 0, -1, ids_BT // self.remainders)
        return {
            "quotient": quotient,
            "remainder": jnp.where(ids_BT < 0, -1, ids_BT % self.remainders),
        }

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        return rows["quotient"] * rows["remainder"]
