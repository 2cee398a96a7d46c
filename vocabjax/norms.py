"""RMSNorm and LayerNorm: statistics in float32, result in the input's dtype."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from vocabjax.param import Scope, ones, zeros

# One for all norms. A row of zeros (an id added to a vocabulary, say) gets ε^−½ = 10³ times the gradient; with ALBERT's 1e−12 it
# would get 10⁶ times.
EPSILON = 1e-6


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / √(mean x² + ε) · scale over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPSILON)
    return (wide * inverse * scale).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Parameters: D."""

    def __init__(self, scope: Scope, width: int) -> None:
        self.scale = scope.param("scale", (width,), (None,), "vector", ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...])


class LayerNorm(nnx.Module):
    """(x − mean) / √(variance + ε) · scale + bias (Ba et al. 2016, arXiv:1607.06450). Parameters: 2D."""

    def __init__(self, scope: Scope, width: int) -> None:
        self.scale = scope.param("scale", (width,), (None,), "vector", ones)
        self.bias = scope.param("bias", (width,), (None,), "vector", zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        inverse = lax.rsqrt((centred * centred).mean(-1, keepdims=True) + EPSILON)
        return (centred * inverse * self.scale[...] + self.bias[...]).astype(x.dtype)


def build_norm(
    kind: Literal["none", "layernorm", "rmsnorm"], scope: Scope, width: int
) -> RMSNorm | LayerNorm | None:
    """The norm of that name, or None."""
    if kind == "layernorm":
        return LayerNorm(scope, width)
    return RMSNorm(scope, width) if kind == "rmsnorm" else None
