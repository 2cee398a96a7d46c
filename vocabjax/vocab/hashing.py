"""Exact integer hashing on the device, in 32 bits: every result equals that of Python's unbounded integers."""

import jax
import jax.numpy as jnp

PRIME = 2**31 - 1  # of the universal hash


def mulmod(a: jax.Array, b: int, m: int) -> jax.Array:
    """(a · b) mod m, uint32, for 0 ≤ a < m < 2³¹ and any b ≥ 0: by doubling, since the product needs 64 bits."""
    if not 0 < m < 2**31:
        raise ValueError(f"the modulus {m} must be positive and below 2^31")
    a = a.astype(jnp.uint32)
    result = a & 0
    for bit in bin(b % m)[2:]:
        result = _reduced(result + result, m)
        if bit == "1":
            result = _reduced(result + a, m)
    return result


def universal_hash(ids: jax.Array, a: int, b: int, buckets: int) -> jax.Array:
    """((a · id + b) mod (2³¹ − 1)) mod buckets, int32, for ids in [0, 2³¹ − 1) (Carter & Wegman 1979)."""
    product = _reduced(mulmod(ids, a, PRIME) + jnp.uint32(b % PRIME), PRIME)
    return (product % jnp.uint32(buckets)).astype(jnp.int32)


def ngram_ids(ids_BTn: tuple[jax.Array, ...], base: int, m: int) -> jax.Array:
    """(Σ_p id_p · base^p) mod m, int32; the first of `ids_BTn` has p = 0, and ids are in [0, 2³¹)."""
    total = ids_BTn[0].astype(jnp.uint32) & 0
    for ids in reversed(ids_BTn):
        total = _reduced(mulmod(total, base, m) + ids.astype(jnp.uint32) % jnp.uint32(m), m)
    return total.astype(jnp.int32)


def _reduced(x: jax.Array, m: int) -> jax.Array:
    """x mod m for x < 2m."""
    return jnp.where(x >= m, x - jnp.uint32(m), x)
