"""What becomes of an input's rows before they enter the trunk, whatever the input.

    x = m[id] · norm(scale · row)              d/d row is multiplied by `gradient`, the value is not

scale      1, √D (Vaswani et al. 2017, arXiv:1706.03762, section 3.4), or a number
norm       BLOOM (arXiv:2211.05100, section 3.3)
gradient   α < 1 is GLM-130B's α·E + (1−α)·stop(E) (arXiv:2210.02414, section 3.1); more than 1 Lopardo's input-gradient scaling
           (arXiv:2603.26663)
dropout    m = 0 with probability p, else 1 / (1−p): one draw per id and step, so that a dropped type is gone wherever it occurs
           (Gal & Ghahramani 2016, arXiv:1512.05287; AWD-LSTM, arXiv:1708.02182, section 4.3)

All act on the input path only: a tied head scores against the rows as they are. Parameters: 0, or D or 2D with a norm.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from vocabjax.norms import build_norm
from vocabjax.vocab.interfaces import Context, InputConfig, Tokens


class Modifiers(nnx.Module):
    def __init__(self, config: InputConfig, context: Context) -> None:
        named = {"none": 1.0, "sqrt_width": math.sqrt(context.width)}
        self.scale = named[config.scale] if isinstance(config.scale, str) else config.scale
        self.norm = build_norm(config.norm, context.scope / "norm", context.width)
        self.gradient = config.gradient
        self.dropout = config.dropout

    def __call__(self, x_BTD: jax.Array, tokens: Tokens) -> jax.Array:
        """x_BTD as the trunk gets it, in the same dtype; without `tokens.key` nothing is dropped."""
        if self.gradient != 1:
            x_BTD = scale_gradient(self.gradient, x_BTD)
        if self.scale != 1:
            x_BTD = _times(x_BTD, self.scale)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        if self.dropout and tokens.key is not None:
            kept_BT = keep_types(tokens.key, tokens.ids_BT, 1 - self.dropout)
            x_BTD = _times(x_BTD, kept_BT[..., None] / (1 - self.dropout))
        return x_BTD


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scale_gradient(factor: float, x: jax.Array) -> jax.Array:
    """x; its gradient is multiplied by the factor."""
    return x


def _scale_gradient_fwd(factor: float, x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _scale_gradient_bwd(factor: float, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent * factor,)


scale_gradient.defvjp(_scale_gradient_fwd, _scale_gradient_bwd)


def keep_types(key: jax.Array, ids_BT: jax.Array, share: float) -> jax.Array:
    """bool [B, T]: True with probability `share`; a function of key and id alone, wherever and however often an id stands."""
    keys_BT = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (None, 0))(key, ids_BT)
    return jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, share)))(keys_BT)


def _times(x: jax.Array, factor: jax.Array | float) -> jax.Array:
    """In float32, so that the factor is rounded once however narrow the compute dtype."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
