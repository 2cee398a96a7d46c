"""The full table: one row of width D per id.

    x = table[id]

Parameters: V·D. Lends its table: a tied head scores against the same rows.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

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
      std: standard deviation of the initial rows; None: D^−½, so that sqrt_width gives unit-variance inputs.
    """

    kind: ClassVar[str] = "full"
    std: float | None = None

    def check(self) -> None:
        super().check()
        check_std("vocab.input.std", self.std)

    def build(self, context: Context, *, tied: bool) -> Input:
        return FullInput(self, context, tied=tied)


class FullInput(Input):
    def __init__(self, config: FullTable, context: Context, *, tied: bool) -> None:
        role: Role = "tied" if tied else "embed"
        self.table = context.table("table", role, std=config.std)

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        return rows["table"]

    def shared(self) -> Shared:
        return {"table": self.table[...]}
