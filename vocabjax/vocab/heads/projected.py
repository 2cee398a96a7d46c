"""Projection-regularised tying: z = cap(scale · (h·P)·tableᵀ + bias), and λ‖P‖_F is added to the loss once per step.

Source: Press & Wolf 2016 (arXiv:1608.05859, section 3.3): λ = 0.15. Their code squares the norm, halves it, divides it by the
batch and gives P a bias; the paper's reading is the default here, `squared` is the other one without the division. Parameters:
D² (+ V). P starts as the identity, so that training starts as with a plain tied head.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from vocabjax.errors import UserError
from vocabjax.vocab.heads.linear import MatrixHead, TiedHead
from vocabjax.vocab.interfaces import Context, Head, Input, Objective, Shared


@dataclass(frozen=True)
class ProjectedHead(TiedHead):
    """A tied head behind a regularised square projection.

    Attributes:
      strength: λ.
      squared: penalise λ/2 · ‖P‖² instead of λ‖P‖.
    """

    kind: ClassVar[str] = "pr_tied"
    strength: float = 0.15
    squared: bool = False

    def check(self) -> None:
        super().check()
        if not 0 <= self.strength < math.inf:
            raise UserError(
                f"vocab.head.strength = {self.strength} must be finite and not negative"
            )

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return Projected(self, context, objective, input)


class Projected(MatrixHead):
    def __init__(
        self, config: ProjectedHead, context: Context, objective: Objective, input: Input
    ) -> None:
        super().__init__(config, context, objective, input)
        self.strength, self.squared = config.strength, config.squared
        self.projection = context.scope.param(
            "projection", (self.width, self.width), (None, None), "matrix", identity
        )

    def transform(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        return jnp.einsum("btd,de->bte", h_BTD, self.projection[...].astype(h_BTD.dtype))

    def penalty(self, shared: Shared) -> jax.Array:
        of_the_mean = super().penalty(shared)
        of_the_projection = self._projection_penalty()
        return of_the_projection if of_the_mean is None else of_the_projection + of_the_mean

    def _projection_penalty(self) -> jax.Array:
        square = (self.projection[...] ** 2).sum()
        if self.squared:
            return self.strength * square / 2
        # Away from 0, where the root's gradient is infinite.
        root = jnp.sqrt(jnp.where(square > 0, square, 1))
        return self.strength * jnp.where(square > 0, root, 0)


def identity(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.eye(shape[0], dtype=jnp.float32)
