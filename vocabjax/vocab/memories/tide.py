"""TIDE: banks of rows by token identity, which every layer mixes anew; one bank is empty, so a layer may take nothing.

    m_k = rms_norm_k(table_k[id]), k = 1 … K, m_0 = 0
    in layer l:  α = softmax(rms_norm(h)·W_l) over K + 1;  h ← h + Σ α_k m_k          before attention

Source: arXiv:2605.06216 (the article describes under this name an extension of vocabularies, which is another thing). Where in the
layer the sum is added is our reading. W starts at 0: all banks alike. Parameters: K·V·D, K·D, and L·(D·(K + 1) + D).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from vocabjax.errors import UserError
from vocabjax.norms import rms_norm
from vocabjax.param import ones, zeros
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
class Tide(MemoryConfig):
    """Banks of token rows, mixed in every layer.

    Attributes:
      banks: K.
    """

    kind: ClassVar[str] = "tide"
    banks: int = 2

    def check(self) -> None:
        if self.banks < 1:
            raise UserError(f"vocab.memories: banks = {self.banks} of tide must be at least 1")

    def build(self, context: Context, trunk: TrunkShape) -> Memory:
        return TideMemory(self, context, trunk)


class TideMemory(Memory):
    site: Site = "pre_attn"

    def __init__(self, config: Tide, context: Context, trunk: TrunkShape) -> None:
        self.layers = tuple(range(trunk.layers))
        L, K, D, scope = trunk.layers, config.banks, context.width, context.scope
        self.banks = K
        self.table = context.table("table", "memory", width=K * D, std=1.0)  # normed when read
        self.bank_norm = scope.param("bank_norm", (K, D), (None, None), "vector", ones)
        self.norm = scope.param("norm", (L, D), ("layers", None), "vector", ones)
        self.router = scope.param("router", (L, D, K + 1), ("layers", None, None), "matrix", zeros)

    def prepare(self, rows: Rows, tokens: Tokens, x_BTD: jax.Array) -> tuple[Any, Any]:
        flat = rows["table"]
        banks_BTKD = flat.reshape(*flat.shape[:2], self.banks, -1)
        return rms_norm(banks_BTKD, self.bank_norm[...]), None

    def per_layer(self) -> Any:
        return {"norm": self.norm[...], "router": self.router[...]}

    def apply(
        self, params: Any, common: Any, context: Any, h_BTD: jax.Array, y: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        normed_BTD = rms_norm(h_BTD, params["norm"])
        score = jnp.einsum("btd,dk->btk", normed_BTD, params["router"].astype(h_BTD.dtype))
        share_BTK = jax.nn.softmax(score.astype(jnp.float32), -1)[..., 1:]  # 0: nothing
        return y + jnp.einsum("btk,btkd->btd", share_BTK.astype(y.dtype), common), cache
