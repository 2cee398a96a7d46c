"""Exact integer hashing on the device, in 32 bits: every result equals that of Python's unbounded integers."""

import functools
from collections.abc import Sequence

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


def xor_hashes(
    ids_BTn: Sequence[jax.Array], multipliers: Sequence[int], moduli: Sequence[int]
) -> jax.Array:
    """(⊕_p id_p · multiplier_p) mod each modulus, int32 [..., moduli]: products are mod 2⁶⁴, ids in [0, 2³¹).

    Raises:
      ValueError: a modulus that is not positive and below 2³¹.
    """
    for m in moduli:
        if not 0 < m < 2**31:
            raise ValueError(f"the modulus {m} must be positive and below 2^31")
    products = [_product(ids, m) for ids, m in zip(ids_BTn, multipliers, strict=True)]
    high, low = (
        functools.reduce(jnp.bitwise_xor, halves)[..., None]
        for halves in zip(*products, strict=True)
    )
    # Long division: each step brings down as many bits as fit into 32 beside a remainder.
    step = 32 - max(moduli).bit_length()
    divisor = jnp.asarray(moduli, jnp.uint32)
    remainder = high % divisor
    for left in range(32, 0, -step):
        bits = min(step, left)
        digit = (low >> (left - bits)) & jnp.uint32(2**bits - 1)
        remainder = ((remainder << bits) | digit) % divisor
    return remainder.astype(jnp.int32)


def _product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """(a · b) mod 2⁶⁴ as its upper and lower 32 bits: by halves of 16 bits, whose products and carries fit into 32."""
    half = jnp.uint32(2**16 - 1)
    b_top, b_high, b_low = (
        jnp.uint32(part) for part in (b >> 32 & 2**32 - 1, b >> 16 & 2**16 - 1, b & 2**16 - 1)
    )
    a = a.astype(jnp.uint32)
    a_high, a_low = a >> 16, a & half
    one = a_high * b_low + (a_low * b_low >> 16)
    two = a_low * b_high + (one & half)
    high = a_high * b_high + (one >> 16) + (two >> 16) + a * b_top
    return high, (two << 16) | (a_low * b_low & half)


def _reduced(x: jax.Array, m: int) -> jax.Array:
    """x mod m for x < 2m."""
    return jnp.where(x >= m, x - jnp.uint32(m), x)
