"""Tied heads of a factorised input, whose rows have width E.

    factorized_tied   u = h·Pᵀ                              P [E, D]: the input's projection, transposed
    albert            u = norm(act(h·W + b))                W [D, E] of its own
    z = cap(scale · u·tableᵀ + bias)

Parameters: 0, and D·E + E + 2E (+ V with a bias). Source of the second: ALBERT (Lan et al. 2019, arXiv:1909.11942) as implemented in
Hugging Face transformers: dense, gelu (tanh form), LayerNorm (there with ε = 1e−12, here that of all norms), tied decoder with a
bias. Its head is not the input's projection transposed; both are offered.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from vocabjax.norms import LayerNorm
from vocabjax.param import normal, zeros
from vocabjax.vocab.heads.linear import MatrixHead, TiedHead
from vocabjax.vocab.interfaces import Context, Head, Input, Objective, Shared


@dataclass(frozen=True)
class FactorizedHead(TiedHead):
    """Scores against the input's narrow rows, through its projection transposed."""

    kind: ClassVar[str] = "factorized_tied"
    needs: ClassVar[tuple[str, ...]] = ("table", "projection")

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return Factorized(self, context, objective, input, input.shared()["table"].shape[-1])


class Factorized(MatrixHead):
    def transform(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        return jnp.einsum("btd,ed->bte", h_BTD, shared["projection"].astype(h_BTD.dtype))

    def transform_flops(self) -> int:
        return super().transform_flops() + 2 * self.width * self.trunk_width


@dataclass(frozen=True)
class AlbertHead(TiedHead):
    """Scores against the input's narrow rows, through a transform of its own."""

    kind: ClassVar[str] = "albert"
    needs: ClassVar[tuple[str, ...]] = ("table", "projection")

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return Albert(self, context, objective, input)


class Albert(MatrixHead):
    def __init__(
        self, config: AlbertHead, context: Context, objective: Objective, input: Input
    ) -> None:
        D, E, scope = context.width, input.shared()["table"].shape[-1], context.scope
        super().__init__(config, context, objective, input, E)
        self.dense = scope.param("dense", (D, E), (None, None), "matrix", normal(D**-0.5))
        self.dense_bias = scope.param("dense_bias", (E,), (None,), "vector", zeros)
        self.norm = LayerNorm(scope / "norm", E)

    def transform(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        u_BTE = jnp.einsum("btd,de->bte", h_BTD, self.dense[...].astype(h_BTD.dtype))
        u_BTE = u_BTE + self.dense_bias[...].astype(u_BTE.dtype)
        return self.norm(jax.nn.gelu(u_BTE, approximate=True))
