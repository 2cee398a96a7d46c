"""Value embeddings: attention values of some layers receive a row per token, gated per key/value head.

    v ← v + 3σ(h[:12]·W_l) ⊙ table_l[id]                  table_l[id] as [G, K], the gate one number per head

Source: modded-nanogpt and nanochat (every second layer, the last one included; 12 channels). W starts at 0: a gate of 3/2.
Parameters: V·n·G·K and n·12·G for n layers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from vocabjax.attention import kv_axis
from vocabjax.errors import UserError
from vocabjax.param import zeros
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
class ValueEmbeddings(MemoryConfig):
    """A gated row per token, added to the values.

    Attributes:
      every: one layer in so many, counted back from the last.
      channels: of h, that the gate reads.
    """

    kind: ClassVar[str] = "value_embeddings"
    every: int = 2
    channels: int = 12

    def check(self) -> None:
        if self.every < 1 or self.channels < 1:
            raise UserError(
                f"vocab.memories: every = {self.every} and channels = {self.channels} must be at least 1"
            )

    def build(self, context: Context, trunk: TrunkShape) -> Memory:
        if self.channels > context.width:
            raise UserError(
                f"vocab.memories: channels = {self.channels} of value_embeddings is more than vocab.width = {context.width}"
            )
        return ValueMemory(self, context, trunk)


class ValueMemory(Memory):
    site: Site = "value"

    def __init__(self, config: ValueEmbeddings, context: Context, trunk: TrunkShape) -> None:
        self.layers = tuple(range((trunk.layers - 1) % config.every, trunk.layers, config.every))
        self.layout, self.channels = context.scope.layout, config.channels
        self.heads, self.head_dim = trunk.kv_heads, trunk.head_dim
        self.kv_axis = kv_axis(self.layout, self.heads)
        count, row = len(self.layers), self.heads * self.head_dim
        self.table = context.table("table", "memory", width=count * row, std=context.width**-0.5)
        self.gate = context.scope.param(
            "gate", (count, config.channels, self.heads), ("layers", None, None), "matrix", zeros
        )

    def prepare(self, rows: Rows, tokens: Tokens, x_BTD: jax.Array) -> tuple[Any, Any]:
        flat = rows["table"]
        shape = (*flat.shape[:2], len(self.layers), self.heads, self.head_dim)
        return None, jnp.moveaxis(flat.reshape(shape), 2, 0)

    def per_layer(self) -> Any:
        return {"gate": self.gate[...]}

    def apply(
        self, params: Any, common: Any, context: Any, h_BTD: jax.Array, y: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        seen = h_BTD[..., : self.channels]
        gate_BTG = 3 * jax.nn.sigmoid(
            jnp.einsum("btc,cg->btg", seen, params["gate"].astype(y.dtype))
        )
        update_BTGK = gate_BTG[..., None] * context
        return y + self.layout.place(update_BTGK, "batch", "seq", self.kv_axis, None), cache
