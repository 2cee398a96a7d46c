"""Heads of one matrix: scores = cap(scale · h·tableᵀ + bias).

Tied (Press & Wolf 2016, arXiv:1608.05859): the table is the input's, handed over at each call. Untied: a table of its own.
The two differ in nothing else. Parameters: 0 tied, V·D untied (+ V with a bias). Soft cap: Gemma 2 (arXiv:2408.00118).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax

from vocabjax.errors import UserError
from vocabjax.param import matrix_flops, zeros
from vocabjax.vocab.interfaces import (
    Context,
    Head,
    HeadConfig,
    Input,
    Loss,
    Objective,
    Shared,
    Tokens,
    check_std,
)
from vocabjax.vocab.loss import linear_cross_entropy
from vocabjax.vocab.per_token import per_token
from vocabjax.vocab.scores import Scoring, linear_logits


@dataclass(frozen=True)
class LinearHead(HeadConfig):
    """What tied and untied heads share.

    Attributes:
      bias: an output bias of V entries, initially 0.
      scale: multiplies h·tableᵀ.
      softcap: cap · tanh(z / cap); None: no cap.
    """

    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None

    def check(self) -> None:
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise UserError(f"vocab.head.softcap = {self.softcap} must be positive, or None")
        if not 0 < abs(self.scale) < math.inf:
            raise UserError(f"vocab.head.scale = {self.scale} must be finite and not zero")

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return MatrixHead(self, context, objective)


@dataclass(frozen=True)
class TiedHead(LinearHead):
    """Scores against the input's table."""

    kind: ClassVar[str] = "tied"
    tied: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("table",)


@dataclass(frozen=True)
class UntiedHead(LinearHead):
    """Scores against a table of its own.

    Attributes:
      std: standard deviation of its initial rows; None: D^−½, like the input's.
    """

    kind: ClassVar[str] = "untied"
    tied: ClassVar[bool] = False
    std: float | None = None

    def check(self) -> None:
        super().check()
        check_std("vocab.head.std", self.std)


class MatrixHead(Head):
    """Scores of transform(h) against rows of width E; E = D, and the transform the identity, unless a subclass says so."""

    def __init__(
        self, config: LinearHead, context: Context, objective: Objective, width: int | None = None
    ) -> None:
        self.scoring = Scoring(context.scope.layout, context.sizes, config.scale, config.softcap)
        self.objective = objective
        self.trunk_width = context.width
        self.width = context.width if width is None else width
        self.table = (
            context.table("table", "head", width=self.width, std=config.std)
            if isinstance(config, UntiedHead)
            else None
        )
        self.bias = (
            context.scope.param(
                "bias",
                (context.sizes.padded,),
                ("vocab",),
                "vector",
                zeros,
                rows=context.sizes.logical,
            )
            if config.bias
            else None
        )

    def transform(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        """What is scored against the rows: [B, T, E]."""
        return h_BTD

    def flops(self) -> int:
        return 2 * self.scoring.sizes.logical * self.width + matrix_flops(self)

    def logits(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        h_BTE = self.transform(shared, h_BTD)
        return linear_logits(self.scoring, h_BTE, self._rows(shared), self._bias())

    def loss(
        self,
        shared: Shared,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
        normalizer: jax.Array | None,
        tokens: Tokens | None,
    ) -> Loss:
        return linear_cross_entropy(
            self.scoring,
            self.objective,
            self.transform(shared, h_BTD),
            self._rows(shared),
            targets_BT,
            weights_BT,
            bias_V=self._bias(),
            normalizer=normalizer,
        )

    def nll(self, shared: Shared, h_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        return -per_token(
            self.scoring,
            self.objective.chunk,
            self.transform(shared, h_BTD),
            self._rows(shared),
            targets_BT,
            bias_V=self._bias(),
        ).log_p

    def _rows(self, shared: Shared) -> jax.Array:
        return shared["table"] if self.table is None else self.table[...]

    def _bias(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]
