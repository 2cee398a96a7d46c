"""Heads of one matrix: scores = cap(scale · h·tableᵀ + bias).

Tied (Press & Wolf 2016, arXiv:1608.05859): the table is the input's, handed over at each call. Untied: a table of its own.
The two differ in nothing else. Parameters: 0 tied, V·D untied (+ V with a bias, + D² per `Objective.future` token).
Soft cap: Gemma 2 (arXiv:2408.00118). Centred rows and the penalty on their mean μ: arXiv:2601.02031.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vocabjax.errors import UserError
from vocabjax.ids import IGNORE
from vocabjax.mesh import Layout
from vocabjax.param import matrix_flops, normal, zeros
from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.augmented import augmented_kl
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
from vocabjax.vocab.labels import (
    inverse_or_zero,
    label_weights,
    valid_labels,
    where_counted,
)
from vocabjax.vocab.loss import accumulate_cross_entropy, linear_cross_entropy
from vocabjax.vocab.per_token import nll_loss, per_token
from vocabjax.vocab.scores import Scoring, linear_logits
from vocabjax.vocab.table import lookup


@dataclass(frozen=True)
class LinearHead(HeadConfig):
    """What tied and untied heads share.

    Attributes:
      bias: an output bias of V entries, initially 0.
      scale: multiplies h·tableᵀ.
      softcap: cap · tanh(z / cap); None: no cap.
      centre: subtract the mean row from the table after every step.
      mean_penalty: γ; γ‖μ‖² is added to the loss once per step, μ the mean row.
    """

    honours: ClassVar[frozenset[str]] = Objective.terms
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    centre: bool = False
    mean_penalty: float = 0.0

    def check(self) -> None:
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise UserError(
                f"vocab.head.softcap = {self.softcap} must be positive and finite, or None"
            )
        if not 0 < abs(self.scale) < math.inf:
            raise UserError(f"vocab.head.scale = {self.scale} must be finite and not zero")
        if not 0 <= self.mean_penalty < math.inf:
            raise UserError(
                f"vocab.head.mean_penalty = {self.mean_penalty} must be finite and not negative"
            )

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return MatrixHead(self, context, objective, input)


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


class _Labels(NamedTuple):
    """What is predicted, and how much it counts."""

    targets_BT: jax.Array
    weights_BT: jax.Array | None
    normalizer: jax.Array | None
    tokens: Tokens | None


class MatrixHead(Head):
    """Scores of transform(h) against rows of width E; E = D, and the transform the identity, unless a subclass says so."""

    def __init__(
        self,
        config: LinearHead,
        context: Context,
        objective: Objective,
        input: Input,
        width: int | None = None,
    ) -> None:
        layout, sizes, scope = context.scope.layout, context.sizes, context.scope
        self.sizes, self.scoring = sizes, Scoring(layout, sizes, config.scale, config.softcap)
        self.objective = objective
        self.mean_penalty = config.mean_penalty
        self.trunk_width = context.width
        lent = jax.eval_shape(input.shared).get("table")
        self.lent_width = 0 if lent is None else lent.shape[-1]
        self.width = context.width if width is None else width
        self.table = (
            context.table("table", "head", width=self.width, std=config.std)
            if isinstance(config, UntiedHead)
            else None
        )
        self.bias = (
            scope.param("bias", (sizes.padded,), ("vocab",), "vector", zeros, rows=sizes.logical)
            if config.bias
            else None
        )
        if config.centre:
            (input.table if self.table is None else self.table).set_metadata(centred=True)
        D, F = context.width, objective.future
        self.future = (
            scope.param("future", (F, D, D), (None, None, None), "matrix", normal(D**-0.5))
            if F
            else None
        )

    def transform(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        """What is scored against the rows: [B, T, E]."""
        return h_BTD

    def transform_flops(self) -> int:
        """Matrix-product FLOPs per token of `transform`."""
        return matrix_flops(self) - self.objective.future * 2 * self.trunk_width**2

    def decode_flops(self) -> int:
        return self.transform_flops() + 2 * self.sizes.logical * self.width

    def flops(self) -> int:
        scores, ahead = 2 * self.sizes.logical * self.width, self.objective.future
        once = self.decode_flops()
        # The augmented loss scores the hidden state again, and the target's row.
        again = scores + 2 * self.sizes.logical * self.lent_width
        further = ahead * (once + 2 * self.trunk_width**2)
        return once + further + (again if self.objective.augmented else 0)

    def logits(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        h_BTE = self.transform(shared, h_BTD)
        return linear_logits(self.scoring, h_BTE, self._rows(shared), self._bias())

    def scored(self, shared: Shared) -> tuple[jax.Array | None, jax.Array | None]:
        # Of a subclass with a loss of its own, that loss is the one to differentiate.
        is_ours = type(self).loss is MatrixHead.loss
        return (self._rows(shared), self._bias()) if is_ours else (None, None)

    def loss(
        self,
        shared: Shared,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
        normalizer: jax.Array | None,
        tokens: Tokens | None,
    ) -> Loss:
        labels = _Labels(targets_BT, weights_BT, normalizer, tokens)
        return self._loss(shared, h_BTD, labels, None)[0]

    def accumulate(
        self,
        shared: Shared,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
        normalizer: jax.Array,
        tokens: Tokens | None,
        into: Accumulator,
    ) -> tuple[Loss, Accumulator]:
        labels = _Labels(targets_BT, weights_BT, normalizer, tokens)
        loss, grown = self._loss(shared, h_BTD, labels, into)
        assert grown is not None
        return loss, grown

    def _loss(
        self, shared: Shared, h_BTD: jax.Array, labels: _Labels, into: Accumulator | None
    ) -> tuple[Loss, Accumulator | None]:
        h_BTE, objective = self.transform(shared, h_BTD), self.objective
        loss, into = self._entropy(objective, shared, h_BTE, labels, into)
        targets_BT, weights_BT, normalizer, tokens = labels
        if normalizer is None:
            normalizer = label_weights(self.sizes, targets_BT, weights_BT).sum()
        total = loss.total
        if objective.augmented:
            kl_BT = self._divergence(shared, h_BTE, targets_BT, weights_BT)
            more = nll_loss(self.sizes, kl_BT, targets_BT, weights_BT, normalizer).total
            total += objective.augmented * more
        plain = Objective(chunk=objective.chunk)
        for ahead in range(1, objective.future + 1):
            later_BT = _shifted(self.scoring.layout, targets_BT, tokens, ahead)
            # A position that predicts nothing next predicts nothing further on.
            later_BT = jnp.where(valid_labels(self.sizes, targets_BT), later_BT, IGNORE)
            h_later_BTD = where_counted(self.sizes, h_BTD, later_BT, weights_BT)
            h_BTE = self.transform(shared, self._ahead(h_later_BTD, ahead))
            # Its weight stands in the normaliser: what is accumulated enters the objective with a factor of 1.
            share = objective.future_weight * inverse_or_zero(normalizer)
            later = _Labels(later_BT, weights_BT, inverse_or_zero(share), tokens)
            further, into = self._entropy(plain, shared, h_BTE, later, into)
            total += further.total
        return loss._replace(total=total), into

    def _entropy(
        self,
        objective: Objective,
        shared: Shared,
        h_BTE: jax.Array,
        labels: _Labels,
        into: Accumulator | None,
    ) -> tuple[Loss, Accumulator | None]:
        given = (self.scoring, objective, h_BTE, self._rows(shared), labels.targets_BT)
        bias_V, normalizer = self._bias(), labels.normalizer
        if into is None:
            loss = linear_cross_entropy(
                *given, labels.weights_BT, bias_V=bias_V, normalizer=normalizer
            )
            return loss, None
        return accumulate_cross_entropy(
            *given, labels.weights_BT, into, bias_V=bias_V, normalizer=normalizer
        )

    def _divergence(
        self,
        shared: Shared,
        h_BTE: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
    ) -> jax.Array:
        """KL(ỹ‖ŷ) per token, see `augmented.py`."""
        scoring, objective, table_VD = self.scoring, self.objective, shared["table"]
        if not objective.augmented_targets:
            table_VD = lax.stop_gradient(table_VD)
        u_BTD = lookup(
            scoring.layout, table_VD, targets_BT, logical=self.sizes.logical, dtype=h_BTE.dtype
        )
        h_BTE = where_counted(self.sizes, h_BTE, targets_BT, weights_BT)
        rows, bias_V = self._rows(shared), self._bias()
        return augmented_kl(scoring, objective, h_BTE, rows, bias_V, u_BTD, table_VD, targets_BT)

    def nll(self, shared: Shared, h_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        return -per_token(
            self.scoring,
            self.objective.chunk,
            self.transform(shared, h_BTD),
            self._rows(shared),
            targets_BT,
            bias_V=self._bias(),
        ).log_p

    def penalty(self, shared: Shared) -> jax.Array | None:
        if not self.mean_penalty:
            return None
        mean_E = self._rows(shared).sum(0) / self.sizes.logical  # padding is zero
        return self.mean_penalty * (mean_E**2).sum()

    def _ahead(self, h_BTD: jax.Array, ahead: int) -> jax.Array:
        assert self.future is not None
        return jnp.einsum("btd,de->bte", h_BTD, self.future[...][ahead - 1].astype(h_BTD.dtype))

    def _rows(self, shared: Shared) -> jax.Array:
        return shared["table"] if self.table is None else self.table[...]

    def _bias(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]


def _shifted(layout: Layout, targets_BT: jax.Array, tokens: Tokens | None, ahead: int) -> jax.Array:
    """The label `ahead` positions later in the same document; −100 where there is none."""
    edges = ((0, 0, 0), (-ahead, ahead, 0))

    def later(x_BT: jax.Array, fill: int) -> jax.Array:
        # Cropped and padded in one operation: slices of a batch of one row forget its sharding.
        return lax.pad(layout.place(x_BT, "batch", "seq"), jnp.int32(fill), edges)

    if tokens is None:
        return later(targets_BT, IGNORE)
    is_same_BT = later(tokens.segment_BT, -1) == tokens.segment_BT
    return jnp.where(is_same_BT, later(targets_BT, IGNORE), IGNORE)
