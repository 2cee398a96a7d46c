"""A head of low rank: z = cap(scale · (h·A)·tableᵀ + bias), A [D, R], table [V, R].

Parameters: D·R + V·R (+ V). The scores of all contexts span at most R dimensions: the softmax bottleneck (Yang et al. 2017,
arXiv:1711.03953, section 2) at R instead of D.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from vocabjax.errors import UserError
from vocabjax.param import normal
from vocabjax.vocab.heads.linear import MatrixHead, UntiedHead
from vocabjax.vocab.interfaces import Context, Head, Input, Objective, Shared


@dataclass(frozen=True)
class LowRankHead(UntiedHead):
    """A table of narrow rows, and a projection of h to their width.

    Attributes:
      rank: R, the width of the rows.
    """

    kind: ClassVar[str] = "low_rank"
    by_width: ClassVar[tuple[str, ...]] = ("rank",)
    rank: int = 64

    def check(self) -> None:
        super().check()
        if self.rank < 1:
            raise UserError(f"vocab.head.rank = {self.rank} must be at least 1")

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return LowRank(self, context, objective, input)


class LowRank(MatrixHead):
    def __init__(
        self, config: LowRankHead, context: Context, objective: Objective, input: Input
    ) -> None:
        super().__init__(config, context, objective, input, config.rank)
        D, R = context.width, config.rank
        self.down = context.scope.param("down", (D, R), (None, None), "matrix", normal(D**-0.5))

    def transform(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        return jnp.einsum("btd,dr->btr", h_BTD, self.down[...].astype(h_BTD.dtype))
