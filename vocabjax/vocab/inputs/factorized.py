"""A factorised table: x = row_norm(table[id]) · P + b, table [V, E], P [E, D].

Parameters: V·E + E·D (+ D with the bias, + E or 2E with a row norm). Source: ALBERT (Lan et al. 2019, arXiv:1909.11942, section 3.1);
its implementation in Hugging Face transformers has the LayerNorm on the narrow rows and a bias, which `row_norm` and `bias` give.
Lends its table and its projection: see the heads `factorized_tied` and `albert`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from vocabjax.errors import UserError
from vocabjax.norms import build_norm
from vocabjax.param import Role, normal, zeros
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
class FactorizedTable(InputConfig):
    """Narrow rows and a projection to the trunk's width.

    Attributes:
      factor: E, the width of the rows.
      bias: whether the projection has one.
      row_norm: of the narrow rows, before the projection.
      std: standard deviation of the initial rows; None: E^−½.
    """

    kind: ClassVar[str] = "factorized"
    by_width: ClassVar[tuple[str, ...]] = ("factor",)
    factor: int = 64
    bias: bool = False
    row_norm: Literal["none", "layernorm", "rmsnorm"] = "none"
    std: float | None = None

    def check(self) -> None:
        super().check()
        check_std("vocab.input.std", self.std)
        if self.factor < 1:
            raise UserError(f"vocab.input.factor = {self.factor} must be at least 1")

    def build(self, context: Context, *, tied: bool) -> Input:
        return FactorizedInput(self, context, tied=tied)


class FactorizedInput(Input):
    def __init__(self, config: FactorizedTable, context: Context, *, tied: bool) -> None:
        E, D = config.factor, context.width
        role: Role = "tied" if tied else "embed"
        self.table = context.table("table", role, width=E, std=config.std)
        self.row_norm = build_norm(config.row_norm, context.scope / "row_norm", E)
        # Rows have unit length on average, so x has, too.
        self.projection = context.scope.param(
            "projection", (E, D), (None, None), "matrix", normal(D**-0.5)
        )
        self.bias = (
            context.scope.param("bias", (D,), (None,), "vector", zeros) if config.bias else None
        )

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        e_BTE = rows["table"]
        if self.row_norm is not None:
            e_BTE = self.row_norm(e_BTE)
        x_BTD = jnp.einsum("bte,ed->btd", e_BTE, self.projection[...].astype(e_BTE.dtype))
        return x_BTD if self.bias is None else x_BTD + self.bias[...].astype(x_BTD.dtype)

    def shared(self) -> Shared:
        return {"table": self.table[...], "projection": self.projection[...]}
