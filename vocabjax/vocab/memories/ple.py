"""Per-layer embeddings: every layer reads the token's identity again, from rows of its own.

    ple            A = √P · table[id] as [L, P];  C = rms_norm(x₀·W · D^−½) as [L, P];  e = (A + C) / √2
                   in layer l, after the FFN:  u = gelu(h·G_l) ⊙ e_l;  h ← (h + rms_norm(u·O_l)) · s_l
    ple_article    in layer l:  h ← h + (e_l·U_l) ⊙ FFN(h),  e = √P · table[id]

The first is that of Gemma 3n and 4 as published in Hugging Face transformers (s_l, a learned scalar, in Gemma 4 only: `scalar`).
Ids from its own, smaller vocabulary on read a zero row (in transformers, the padding id's, which its training keeps zero). The
second is a gate on the FFN as the article on vocabulary design words it; P numbers cannot gate D, so it is given the projection U
that makes it type-check.

Parameters: V'·L·P, and L·(3·D·P + P + D + 1) (P for C's norm once; gate, output and context 3·D·P) or L·P·D.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from vocabjax.errors import UserError
from vocabjax.norms import RMSNorm, rms_norm
from vocabjax.param import normal, ones
from vocabjax.vocab.interfaces import (
    Context,
    Memory,
    MemoryConfig,
    Rows,
    Site,
    Tokens,
    TrunkShape,
)


@dataclass(frozen=True)
class _PerLayerConfig(MemoryConfig):
    """What both forms share.

    Attributes:
      width: P, of each layer's part of a row.
      rows: V', ids that have a row; None: all.
    """

    by_width: ClassVar[tuple[str, ...]] = ("width",)
    by_ids: ClassVar[tuple[str, ...]] = ("rows",)
    width: int = 64
    rows: int | None = None

    def check(self) -> None:
        if self.width < 1 or (self.rows is not None and self.rows < 1):
            raise UserError(
                f"vocab.memories: width = {self.width} and rows = {self.rows} of {self.kind} must be at least 1"
            )


class _PerLayer(Memory):
    """A table whose rows hold every layer's part."""

    def __init__(self, config: _PerLayerConfig, context: Context, trunk: TrunkShape) -> None:
        self.layers = tuple(range(trunk.layers))
        self.width = config.width
        size = context.sizes.logical
        self.table = context.table(
            "table",
            "memory",
            rows=size if config.rows is None else min(config.rows, size),
            width=trunk.layers * config.width,
            std=config.width**-0.5,
        )

    def _by_layer(self, flat: jax.Array) -> jax.Array:
        """[B, T, L·P] → [B, T, L, P]."""
        return flat.reshape(*flat.shape[:2], len(self.layers), self.width)


@dataclass(frozen=True)
class PLE(_PerLayerConfig):
    """Per-layer embeddings as Gemma 3n and 4 build them.

    Attributes:
      scalar: whether each layer's output is scaled by a learned number, initially 1.
    """

    kind: ClassVar[str] = "ple"
    scalar: bool = False

    def build(self, context: Context, trunk: TrunkShape) -> Memory:
        return PLEMemory(self, context, trunk)


class PLEMemory(_PerLayer):
    site: Site = "post_ffn"

    def __init__(self, config: PLE, context: Context, trunk: TrunkShape) -> None:
        super().__init__(config, context, trunk)
        L, P, D, scope = trunk.layers, config.width, context.width, context.scope
        stacked = ("layers", None, None)
        self.context = scope.param("context", (D, L * P), (None, None), "matrix", normal(1.0))
        self.context_norm = RMSNorm(scope / "context_norm", P)
        self.gate = scope.param("gate", (L, D, P), stacked, "matrix", normal(D**-0.5))
        self.out = scope.param("out", (L, P, D), stacked, "matrix", normal(P**-0.5))
        self.out_norm = scope.param("out_norm", (L, D), ("layers", None), "vector", ones)
        self.scalar = (
            scope.param("scalar", (L, 1), ("layers", None), "vector", ones)
            if config.scalar
            else None
        )

    def prepare(self, rows: Rows, tokens: Tokens, x_BTD: jax.Array) -> tuple[Any, Any]:
        dtype, D = x_BTD.dtype, x_BTD.shape[-1]
        a_BTLP = self._by_layer(rows["table"]) * math.sqrt(self.width)
        c = jnp.einsum("btd,de->bte", x_BTD, self.context[...].astype(dtype)) * D**-0.5
        c_BTLP = self.context_norm(self._by_layer(c))
        return None, jnp.moveaxis((a_BTLP + c_BTLP) * 0.5**0.5, 2, 0)

    def per_layer(self) -> Any:
        params = {"gate": self.gate, "out": self.out, "norm": self.out_norm}
        if self.scalar is not None:
            params["scalar"] = self.scalar
        return {name: param[...] for name, param in params.items()}

    def apply(
        self, params: Any, common: Any, context: Any, h_BTD: jax.Array, y: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        dtype = h_BTD.dtype
        gate_BTP = jnp.einsum("btd,dp->btp", h_BTD, params["gate"].astype(dtype))
        u_BTP = jax.nn.gelu(gate_BTP, approximate=True) * context
        delta_BTD = jnp.einsum("btp,pd->btd", u_BTP, params["out"].astype(dtype))
        y = y + rms_norm(delta_BTD, params["norm"])
        return (y * params["scalar"].astype(dtype) if "scalar" in params else y), cache


@dataclass(frozen=True)
class ArticlePLE(_PerLayerConfig):
    """A per-layer gate on the FFN, as the article words it."""

    kind: ClassVar[str] = "ple_article"

    def build(self, context: Context, trunk: TrunkShape) -> Memory:
        return ArticlePLEMemory(self, context, trunk)


class ArticlePLEMemory(_PerLayer):
    site: Site = "ffn_out"

    def __init__(self, config: ArticlePLE, context: Context, trunk: TrunkShape) -> None:
        super().__init__(config, context, trunk)
        L, P, D = trunk.layers, config.width, context.width
        self.up = context.scope.param(
            "up", (L, P, D), ("layers", None, None), "matrix", normal(P**-0.5)
        )

    def prepare(self, rows: Rows, tokens: Tokens, x_BTD: jax.Array) -> tuple[Any, Any]:
        return None, jnp.moveaxis(self._by_layer(rows["table"]) * math.sqrt(self.width), 2, 0)

    def per_layer(self) -> Any:
        return {"up": self.up[...]}

    def apply(
        self, params: Any, common: Any, context: Any, h_BTD: jax.Array, y: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        gate_BTD = jnp.einsum("btp,pd->btd", context, params["up"].astype(y.dtype))
        return gate_BTD * y, cache
