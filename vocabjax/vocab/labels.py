"""Which labels count, and how much."""

import jax
import jax.numpy as jnp

from vocabjax.ids import IGNORE
from vocabjax.vocab.sizes import Sizes


def valid_labels(sizes: Sizes, targets_BT: jax.Array) -> jax.Array:
    """bool [B, T]: labels that may be predicted."""
    is_id_BT = (targets_BT >= 0) & (targets_BT < sizes.logical)
    if not sizes.banned:
        return is_id_BT
    # A comparison that is reduced as it is made: unlike a lookup it needs no sharding to be stated.
    is_banned_BTK = targets_BT[..., None] == jnp.asarray(sizes.banned, jnp.int32)
    return is_id_BT & ~is_banned_BTK.any(-1)


def where_counted(
    sizes: Sizes, h_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array | None
) -> jax.Array:
    """Hidden states, and 0 where nothing counts: what is not finite there must not spread."""
    is_counted_BT = label_weights(sizes, targets_BT, weights_BT) != 0
    return jnp.where(is_counted_BT[..., None], h_BTD, 0)


def count_labels(sizes: Sizes, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 scalars: labels that may be predicted, and those that are neither that nor −100."""
    is_valid_BT = valid_labels(sizes, targets_BT)
    invalid = ((targets_BT != IGNORE) & ~is_valid_BT).sum()
    return is_valid_BT.sum().astype(jnp.float32), invalid.astype(jnp.float32)


def inverse_or_zero(divisor: jax.Array) -> jax.Array:
    """1 / divisor, and 0 for 0."""
    return jnp.where(divisor == 0, 0.0, 1 / jnp.where(divisor == 0, 1.0, divisor))


def label_weights(
    sizes: Sizes, targets_BT: jax.Array, weights_BT: jax.Array | None = None
) -> jax.Array:
    """float32 [B, T]: the weight of each token, 0 where its label is not valid (even if the weight is NaN there)."""
    weights = 1.0 if weights_BT is None else weights_BT.astype(jnp.float32)
    return jnp.where(valid_labels(sizes, targets_BT), weights, 0.0)
