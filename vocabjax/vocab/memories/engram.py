"""Engram: rows of hashed n-grams, let into some layers by a gate that the hidden state opens.

    g        compressed ids: ids that spell the same but for case, accents and outer spaces share one
    e_t      rows of table_l, concatenated over orders n = 2 … N and heads k:   (⊕_{i<n} g_{t−i} · m_li) mod p_lnk
    in layer l, before attention:
    s = ⟨rms_norm(e·K_l), rms_norm(h)⟩ / √D;   α = σ(sign(s)·√max(|s|, 10⁻⁶));   v = α · e·V_l
    h ← h + v + silu(Σ_j w_lj ⊙ rms_norm(v)_{t−jN}),   j = 0 … 3

Source: arXiv:2601.07372 and its demo code, from which the signed root comes (the paper: α = σ(s)), for a trunk of one residual
stream. As in the paper, w starts at 0 and projections have no bias (those of the demo do). The m are odd and so small that no
product leaves 63 bits; the p are different primes. N-grams and the convolution stay in their document; what precedes it is an
id of its own. The paper trains the tables with 5 times the learning rate and no weight decay. Qwen4-Exp in Hugging Face
transformers does not compress, has its eos precede a document, and lets the convolution cross documents; else it is the same.

Parameters, for n layers and E = (N−1)·width: Σ p · width / heads, and n·(2·E·D + 4·D + 3·D).
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from tokenizers import Regex, normalizers

from vocabjax.errors import UserError
from vocabjax.norms import rms_norm
from vocabjax.param import normal, ones, zeros
from vocabjax.vocab.hashing import xor_hashes
from vocabjax.vocab.interfaces import (
    Context,
    Memory,
    MemoryConfig,
    Reads,
    Rows,
    Site,
    Tokens,
    TrunkShape,
)
from vocabjax.vocab.lexicon import Constant

TAPS = 4  # of the convolution


@dataclass(frozen=True)
class Engram(MemoryConfig):
    """Gated rows of hashed n-grams, in some layers.

    Attributes:
      order: N, the longest n-gram.
      heads: hashes per order.
      width: of the rows of one order, all heads together.
      buckets: rows per hash: each has the next prime that none before it has.
      layers: where, from 0 up; None: the second layer and the one in the middle.
      signed_root: whether the gate takes the signed root of its score.
      compress: whether ids that spell alike count as one; needs the text of each id.
      seed: draws the hash functions.
    """

    kind: ClassVar[str] = "engram"
    by_width: ClassVar[tuple[str, ...]] = ("width",)
    by_ids: ClassVar[tuple[str, ...]] = ("buckets",)
    order: int = 3
    heads: int = 8
    width: int = 64
    buckets: int = 8192
    layers: tuple[int, ...] | None = None
    signed_root: bool = True
    compress: bool = True
    seed: int = 0

    def check(self) -> None:
        if self.order < 2 or self.heads < 1 or self.buckets < 1:
            raise UserError(
                f"vocab.memories: order = {self.order} of engram must be at least 2, heads = {self.heads} and buckets = "
                f"{self.buckets} at least 1"
            )
        if self.width < 1 or self.width % self.heads:
            below = self.width // self.heads * self.heads
            fit = " or ".join(str(w) for w in (below, below + self.heads) if w > 0)
            raise UserError(
                f"vocab.memories: width = {self.width} of engram does not divide over heads = {self.heads}; use "
                f"{fit or self.heads}"
            )
        if (self.order - 1) * self.heads * self.buckets >= 2**31:
            raise UserError(
                f"vocab.memories: heads = {self.heads} and buckets = {self.buckets} of engram make a table of more than "
                "2^31 rows"
            )

    def build(self, context: Context, trunk: TrunkShape) -> Memory:
        layers = self.layers
        if layers is None:
            layers = tuple(sorted({min(1, trunk.layers - 1), trunk.layers // 2}))
        is_ascending = all(one < two for one, two in itertools.pairwise(layers))
        if not (layers and is_ascending and layers[0] >= 0 and layers[-1] < trunk.layers):
            raise UserError(
                f"vocab.memories: layers = {layers} of engram must ascend, from 0 to {trunk.layers - 1} in this trunk"
            )
        return EngramMemory(self, context, layers)


class EngramMemory(Memory):
    site: Site = "pre_attn"

    def __init__(self, config: Engram, context: Context, layers: tuple[int, ...]) -> None:
        scope, size, D = context.scope, context.sizes.logical, context.width
        self.layers, self.layout, self.dtype = layers, scope.layout, context.dtype
        self.order, self.signed_root = config.order, config.signed_root
        self.history = config.order - 1
        ids_V = np.arange(size)
        if config.compress:
            ids_V = _compressed(context.lexicon.spelling(size, "engram, unless compress=False,"))
        self.compressed = Constant(ids_V)
        self.nothing = int(np.max(ids_V)) + 1  # stands before the document
        self.multipliers = tuple(
            _multipliers(f"{config.seed}/{layer}", config.order, self.nothing) for layer in layers
        )
        free = _primes(config.buckets)
        self.primes = tuple(
            tuple(tuple(itertools.islice(free, config.heads)) for _ in range(2, config.order + 1))
            for _ in layers
        )

        count, E = len(layers), self.history * config.width
        grams = context._replace(scope=scope / "grams")
        self.grams = nnx.List(
            [
                grams.table(
                    str(at),
                    "memory",
                    rows=sum(map(sum, primes)),
                    width=config.width // config.heads,
                )
                for at, primes in enumerate(self.primes)
            ]
        )
        stacked = ("layers", None, None)
        self.keys = scope.param("keys", (count, E, D), stacked, "matrix", normal(E**-0.5))
        self.values = scope.param("values", (count, E, D), stacked, "matrix", normal(E**-0.5))
        self.taps = scope.param("taps", (count, TAPS, D), stacked, "matrix", zeros)
        self.key_norm = scope.param("key_norm", (count, D), ("layers", None), "vector", ones)
        self.query_norm = scope.param("query_norm", (count, D), ("layers", None), "vector", ones)
        self.value_norm = scope.param("value_norm", (count, D), ("layers", None), "vector", ones)

    def tables(self) -> dict[str, nnx.Param[jax.Array]]:
        return {f"grams/{at}": table for at, table in enumerate(self.grams)}

    def reads(self, tokens: Tokens) -> Reads:
        found = [self.compressed.of(self.layout, tokens.before(back)) for back in range(self.order)]
        known = [jnp.where(ids >= 0, ids, self.nothing) for ids in found]
        is_id_BT1 = found[0][..., None] >= 0
        reads: Reads = {}
        for at, (multipliers, primes) in enumerate(zip(self.multipliers, self.primes, strict=True)):
            hashes = [
                xor_hashes(known[:n], multipliers[:n], primes[n - 2])
                for n in range(2, self.order + 1)
            ]
            sizes = [prime for heads in primes for prime in heads]
            first = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
            rows_BTH = jnp.concatenate(hashes, -1) + first
            reads[f"grams/{at}"] = jnp.where(is_id_BT1, rows_BTH, -1)  # a bad id reads nothing
        return reads

    def prepare(self, rows: Rows, tokens: Tokens, x_BTD: jax.Array) -> tuple[Any, Any]:
        e_LBTE = jnp.stack(
            [
                self.layout.place(grams.reshape(*grams.shape[:2], -1), "batch", "seq", None)
                for grams in (rows[name] for name in self.tables())
            ]
        )
        return self.layout.place(tokens.position_BT, "batch", "seq"), e_LBTE

    def per_layer(self) -> Any:
        return {
            "keys": self.keys[...],
            "values": self.values[...],
            "taps": self.taps[...],
            "key_norm": self.key_norm[...],
            "query_norm": self.query_norm[...],
            "value_norm": self.value_norm[...],
        }

    def apply(
        self, params: Any, common: Any, context: Any, h_BTD: jax.Array, y: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        position_BT, e_BTE, dtype = common, context, h_BTD.dtype
        key_BTD = jnp.einsum("bte,ed->btd", e_BTE, params["keys"].astype(dtype))
        value_BTD = jnp.einsum("bte,ed->btd", e_BTE, params["values"].astype(dtype))
        key_BTD = rms_norm(key_BTD, params["key_norm"]).astype(jnp.float32)
        query_BTD = rms_norm(h_BTD, params["query_norm"]).astype(jnp.float32)
        score_BT = (key_BTD * query_BTD).sum(-1) * h_BTD.shape[-1] ** -0.5
        if self.signed_root:
            score_BT = jnp.sign(score_BT) * jnp.sqrt(jnp.maximum(jnp.abs(score_BT), 1e-6))
        value_BTD = value_BTD * jax.nn.sigmoid(score_BT)[..., None].astype(dtype)
        normed_BTD = rms_norm(value_BTD, params["value_norm"])
        taps = params["taps"].astype(dtype)
        mixed_BTD, cache = self._convolve(taps, normed_BTD, position_BT, cache)
        return y + value_BTD + jax.nn.silu(mixed_BTD), cache

    def _convolve(
        self, taps: jax.Array, x_BTD: jax.Array, position_BT: jax.Array, cache_BSD: Any
    ) -> tuple[jax.Array, Any]:
        """Σ_j taps_j ⊙ x_{t−jN} inside the document; the cache is x at the S = 3N positions before, then the last S."""
        length, reach = x_BTD.shape[1], (TAPS - 1) * self.order
        out_BTD = taps[0] * x_BTD
        for j in range(1, TAPS):
            back = j * self.order
            seen_BTD = _window(x_BTD, -back, length)
            if cache_BSD is not None:
                seen_BTD += _window(cache_BSD, reach - back, length)
            is_same_BT1 = (position_BT >= back)[..., None]
            out_BTD += taps[j] * jnp.where(is_same_BT1, seen_BTD, 0)
        if cache_BSD is None:
            return out_BTD, None
        return out_BTD, _window(x_BTD, length - reach, reach) + _window(cache_BSD, length, reach)

    def init_cache(self, batch: int) -> Any:
        shape = (len(self.layers), batch, (TAPS - 1) * self.order, self.taps.shape[-1])
        sharding = self.layout.sharding(None, "batch", None, None)
        return jnp.zeros(shape, self.dtype, out_sharding=sharding)


def _window(x_BTD: jax.Array, start: int, size: int) -> jax.Array:
    """x[:, start : start + size], 0 where there is no such position."""
    # One operation: slices of a batch of one row forget its sharding.
    ends = (-start, start + size - x_BTD.shape[1], 0)
    return lax.pad(x_BTD, jnp.zeros((), x_BTD.dtype), ((0, 0, 0), ends, (0, 0, 0)))


_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
)


def _compressed(texts: Sequence[str]) -> np.ndarray:
    """int32 [V]: one number for all ids that spell alike, from 0 up in the order of the ids."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(_plain(text), len(numbers)) for text in texts], np.int32)


def _plain(text: str) -> str:
    """A text without case, accents and outer spaces; as it is where it is none (NUL), or nothing would remain."""
    if text.startswith("\0"):
        return text
    plain: str = _NORMALIZER.normalize_str(text)
    return plain.strip() or (" " if plain == " " else text)


def _multipliers(seed: str, count: int, largest: int) -> tuple[int, ...]:
    """Odd numbers whose products with ids up to `largest` stay below 2⁶³."""
    draw = random.Random(seed)
    bound = (2**63 - 1) // (largest + 1) // 2
    return tuple(2 * draw.randrange(bound) + 1 for _ in range(count))


def _primes(start: int) -> Iterator[int]:
    """The primes from `start` up."""
    return (
        n
        for n in itertools.count(max(start, 2))
        if all(n % factor for factor in range(2, math.isqrt(n) + 1))
    )
