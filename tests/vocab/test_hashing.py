"""Hashes equal Python's unbounded integers, at the edges of 32 bits."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from vocabjax.vocab.hashing import PRIME, mulmod, ngram_ids, universal_hash, xor_hashes

MODULI = (1, 2, 3, 37, 65_536, 12_800_003, 2**30 + 3, 2**31 - 2, 2**31 - 1)


@pytest.mark.parametrize("m", MODULI)
def test_mulmod(m: int) -> None:
    draw = random.Random(m)
    a = [0, m - 1, *(draw.randrange(m) for _ in range(50))]
    for b in (
        0,
        1,
        2,
        m,
        m - 1,
        262_400,
        2**31 - 1,
        2**40 + 7,
        *(draw.randrange(2**62) for _ in range(5)),
    ):
        got = mulmod(jnp.asarray(np.array(a, np.uint32)), b, m)
        assert got.tolist() == [x * b % m for x in a]


@pytest.mark.parametrize("m", [0, 2**31])
def test_a_modulus_that_does_not_fit_is_refused(m: int) -> None:
    with pytest.raises(ValueError, match=f"modulus {m}"):
        mulmod(jnp.zeros(1, jnp.uint32), 1, m)


def test_universal_hash() -> None:
    ids = np.array([0, 1, 262_399, 2**31 - 2], np.int32)
    draw = random.Random(0)
    for _ in range(20):
        a, b, buckets = draw.randrange(1, PRIME), draw.randrange(PRIME), draw.randrange(1, 2**20)
        got = universal_hash(jnp.asarray(ids), a, b, buckets)
        assert got.dtype == jnp.int32
        assert got.tolist() == [(a * int(x) + b) % PRIME % buckets for x in ids]


@pytest.mark.parametrize("m", MODULI)
@pytest.mark.parametrize("base", [1, 37, 151_936, 2**31 - 1])
def test_ngrams(base: int, m: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, min(base, 2**31 - 1) + 1, (3, 40)).astype(np.int32)
    got = ngram_ids(tuple(jnp.asarray(x) for x in ids), base, m)
    expected = [sum(int(x) * base**p for p, x in enumerate(gram)) % m for gram in ids.T]
    assert got.tolist() == expected


@pytest.mark.parametrize("moduli", [*((m,) for m in MODULI), (11, 65_537, 640_007), MODULI])
def test_xor_hashes(moduli: tuple[int, ...]) -> None:
    """Products at the edges of 32 and 63 bits, and some that leave 64."""
    draw = random.Random(0)
    ids = [[0, 1, 2**16 - 1, 2**16, 2**31 - 1, *(draw.randrange(2**31) for _ in range(40))]]
    ids += [draw.sample(ids[0], len(ids[0])) for _ in range(2)]
    arrays = [jnp.asarray(np.array(row, np.int32)) for row in ids]
    for multipliers in (
        (1, 1, 1),
        (2**32 - 1, 2**32, 2**32 + 1),
        (2**63 - 1, 2**64 - 1, 2**48 - 1),
        tuple(draw.randrange(2**63) for _ in range(3)),
    ):
        got = xor_hashes(arrays, multipliers, moduli)
        assert got.dtype == jnp.int32
        mixed = [
            a * multipliers[0] % 2**64 ^ b * multipliers[1] % 2**64 ^ c * multipliers[2] % 2**64
            for a, b, c in zip(*ids, strict=True)
        ]
        assert got.tolist() == [[x % m for m in moduli] for x in mixed]


@pytest.mark.parametrize("m", [0, 2**31])
def test_xor_hashes_refuse_a_modulus_that_does_not_fit(m: int) -> None:
    with pytest.raises(ValueError, match=f"modulus {m}"):
        xor_hashes([jnp.zeros(1, jnp.int32)], (3,), (5, m))
