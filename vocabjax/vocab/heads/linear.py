"""Heads of one matrix: scores = cap(scale · h·tableᵀ + bias).

Tied (Press & Wolf 2016, arXiv:1608.05859): the table is the input's, handed over at each call. Untied: a table of its own.
The two differ in nothing else. Parameters: 0 tied, V·D untied (+ V with a bias). Soft cap: Gemma 2 (arXiv:2408.00118).
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
from flax import nnx

from vocabjax.errors import UserError
from vocabjax.param import zeros
from vocabjax.vocab.inputs.full import table_param
from vocabjax.vocab.interfaces import Context, Head, HeadConfig, Loss, Objective
from vocabjax.vocab.loss import Scoring, linear_cross_entropy, linear_logits, linear_nll


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

    def build(self, context: Context, objective: Objective) -> Head:
        return MatrixHead(self, context, objective)


@dataclass(frozen=True)
class TiedHead(LinearHead):
    """Scores against the input's table."""

    kind: ClassVar[str] = "tied"
    tied: ClassVar[bool] = True


@dataclass(frozen=True)
class UntiedHead(LinearHead):
    """Scores against a table of its own.

    Attributes:
      std: standard deviation of its initial rows; None: D^−½, like the input's.
    """

    kind: ClassVar[str] = "untied"
    tied: ClassVar[bool] = False
    std: float | None = None


class MatrixHead(Head):
    def __init__(self, config: LinearHead, context: Context, objective: Objective) -> None:
        if config.softcap is not None and config.softcap <= 0:
            raise UserError(f"vocab.head.softcap = {config.softcap} must be positive, or none")
        self.scoring = Scoring(context.scope.layout, context.sizes, config.scale, config.softcap)
        self.objective = objective
        self.width = context.width
        self.table = (
            table_param(context, "table", "head", config.std)
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

    def flops(self) -> int:
        return 2 * self.scoring.sizes.logical * self.width

    def logits(self, table: jax.Array | None, h_BTD: jax.Array) -> jax.Array:
        return linear_logits(self.scoring, h_BTD, self._rows(table), self._bias())

    def loss(
        self,
        table: jax.Array | None,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
        normalizer: jax.Array | None,
    ) -> Loss:
        return linear_cross_entropy(
            self.scoring,
            self.objective,
            h_BTD,
            self._rows(table),
            targets_BT,
            weights_BT,
            bias_V=self._bias(),
            normalizer=normalizer,
        )

    def nll(self, table: jax.Array | None, h_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        return linear_nll(
            self.scoring,
            self.objective.chunk,
            h_BTD,
            self._rows(table),
            targets_BT,
            bias_V=self._bias(),
        )

    def _rows(self, table: jax.Array | None) -> jax.Array:
        rows: nnx.Param[jax.Array] | jax.Array | None = self.table if table is None else table
        assert rows is not None, "a tied head is handed the input's table"
        return rows[...]

    def _bias(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]
