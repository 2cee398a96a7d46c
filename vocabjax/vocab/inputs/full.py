"""The full table: one row of width D per id.

    x = norm(scale · table[id])                     scale: 1, √D (Vaswani et al. 2017, section 3.4), or a number

Parameters: V·D (+ D or 2D with a norm). Source of the norm after the lookup: BLOOM (arXiv:2211.05100, section 3.3). It acts
on the input path only: a tied head scores against the raw rows.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from vocabjax.errors import UserError
from vocabjax.norms import build_norm
from vocabjax.param import Role
from vocabjax.vocab.interfaces import (
    Context,
    Input,
    InputConfig,
    Rows,
    Shared,
    Tokens,
    check_std,
)


@dataclass(frozen=True)
class FullTable(InputConfig):
    """A row of width D per id.

    Attributes:
      scale: "none", "sqrt_width", or a number: multiplies the row, once. Tied scores see the row without it.
      norm: applied after the scale.
      std: standard deviation of the initial rows; None: D^−½, so that sqrt_width gives unit-variance inputs.
    """

    kind: ClassVar[str] = "full"
    scale: Literal["none", "sqrt_width"] | float = "none"
    norm: Literal["none", "layernorm", "rmsnorm"] = "none"
    std: float | None = None

    def check(self) -> None:
        check_std("vocab.input.std", self.std)
        if not isinstance(self.scale, str) and not 0 < abs(self.scale) < math.inf:
            raise UserError(f"vocab.input.scale = {self.scale} must be finite and not zero")

    def build(self, context: Context, *, tied: bool) -> Input:
        return FullInput(self, context, tied=tied)


class FullInput(Input):
    def __init__(self, config: FullTable, context: Context, *, tied: bool) -> None:
        role: Role = "tied" if tied else "embed"
        self.table = context.table("table", role, std=config.std)
        self.norm = build_norm(config.norm, context.scope / "norm", context.width)
        self.scale = math.sqrt(context.width) if config.scale == "sqrt_width" else config.scale
        self.dtype = context.dtype

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        x_BTD = rows["table"]
        if self.scale != "none":
            # In float32, so that the factor is rounded once however narrow the compute dtype.
            x_BTD = (x_BTD.astype(jnp.float32) * self.scale).astype(self.dtype)
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def shared(self) -> Shared:
        return {"table": self.table[...]}
