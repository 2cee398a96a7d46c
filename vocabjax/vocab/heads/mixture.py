"""Mixtures over K contexts of one hidden state: π = softmax(h·W_π), c_k = tanh(h·W_k), z_k = cap(scale · c_k·tableᵀ + bias).

    mos     p = Σ_k π_k softmax(z_k)                 mixture of softmaxes
    moc     p = softmax(z), from c = Σ_k π_k c_k     mixture of contexts: one softmax, so its rank stays at most D

Source: Yang et al. 2017 (arXiv:1711.03953, sections 2.3 and 3.2), tied. Parameters: K·D² + D·K (+ V with a bias). The loss of
`mos` scores K·N contexts against the table once, and nothing of it is [B, T, V].
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from vocabjax.errors import UserError
from vocabjax.param import normal
from vocabjax.vocab.heads.linear import MatrixHead, TiedHead
from vocabjax.vocab.interfaces import Context, Head, Input, Objective, Shared
from vocabjax.vocab.labels import valid_labels
from vocabjax.vocab.per_token import LikelihoodHead, per_token
from vocabjax.vocab.scores import linear_logits


@dataclass(frozen=True)
class MixtureOfSoftmaxes(TiedHead):
    """A weighted sum of K softmaxes over the input's table.

    Attributes:
      components: K.
    """

    kind: ClassVar[str] = "mos"
    honours: ClassVar[frozenset[str]] = frozenset()
    components: int = 4

    def check(self) -> None:
        super().check()
        if self.components < 1:
            raise UserError(f"vocab.head.components = {self.components} must be at least 1")

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return SoftmaxMixture(self, context, objective, input)


@dataclass(frozen=True)
class MixtureOfContexts(MixtureOfSoftmaxes):
    """One softmax of a weighted sum of K contexts."""

    kind: ClassVar[str] = "moc"
    honours: ClassVar[frozenset[str]] = TiedHead.honours

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        return ContextMixture(self, context, objective, input)


class _Mixture(MatrixHead):
    def __init__(
        self, config: MixtureOfSoftmaxes, context: Context, objective: Objective, input: Input
    ) -> None:
        super().__init__(config, context, objective, input)
        D, K, scope = context.width, config.components, context.scope
        std = normal(D**-0.5)
        self.components = K
        self.latent = scope.param("latent", (D, K, D), (None, None, None), "matrix", std)
        self.prior = scope.param("prior", (D, K), (None, None), "matrix", std)

    def contexts(self, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(log π [B, T, K] in float32, c [B, T, K, D])."""
        dtype = h_BTD.dtype
        prior = jnp.einsum(
            "btd,dk->btk", h_BTD, self.prior[...].astype(dtype), preferred_element_type=jnp.float32
        )
        latent = jnp.einsum("btd,dke->btke", h_BTD, self.latent[...].astype(dtype))
        return jax.nn.log_softmax(prior), jnp.tanh(latent)


class ContextMixture(_Mixture):
    def transform(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        log_share_BTK, c_BTKD = self.contexts(h_BTD)
        return jnp.einsum("btk,btkd->btd", jnp.exp(log_share_BTK).astype(c_BTKD.dtype), c_BTKD)


class SoftmaxMixture(LikelihoodHead, _Mixture):
    def decode_flops(self) -> int:
        once = 2 * self.sizes.logical * self.width
        return super().decode_flops() + (self.components - 1) * once

    def logits(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        """log p: the scores of a mixture are normalised already."""
        log_share_BTK, c_BTKD = self.contexts(h_BTD)
        allowed_V = jnp.asarray(self.sizes.allowed_V)

        def component(k: int) -> jax.Array:
            z_BTV = linear_logits(self.scoring, c_BTKD[:, :, k], self._rows(shared), self._bias())
            share_BT1 = log_share_BTK[:, :, k, None]
            # Elsewhere 0: the sum of −inf and −inf has no gradient.
            return jnp.where(allowed_V, share_BT1 + jax.nn.log_softmax(z_BTV), 0)

        log_p_BTV = functools.reduce(jnp.logaddexp, map(component, range(self.components)))
        return jnp.where(allowed_V, log_p_BTV, -jnp.inf)

    def nll(self, shared: Shared, h_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        log_share_BTK, c_BTKD = self.contexts(h_BTD)
        log_p_BTK = per_token(
            self.scoring,
            self.objective.chunk,
            c_BTKD,
            self._rows(shared),
            jnp.broadcast_to(targets_BT[..., None], log_share_BTK.shape),
            bias_V=self._bias(),
        ).log_p
        is_valid_BT = valid_labels(self.sizes, targets_BT)
        return jnp.where(is_valid_BT, -jax.nn.logsumexp(log_share_BTK + log_p_BTK, -1), 0)
