"""Inputs that compose their rows, against float64 NumPy and Python integers."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vocabjax.errors import UserError
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.hashing import PRIME
from vocabjax.vocab.heads.factorized import AlbertHead, FactorizedHead
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.inputs.adaptive import AdaptiveTable
from vocabjax.vocab.inputs.factorized import FactorizedTable
from vocabjax.vocab.inputs.hashed import CompositionalTable, HashTable
from vocabjax.vocab.inputs.over_encoding import OverEncoding
from vocabjax.vocab.interfaces import Tokens
from vocabjax.vocab.lexicon import Lexicon

V, D = 23, 12
IDS_BT = np.random.default_rng(0).integers(0, V, (3, 7)).astype(np.int32)
SEGMENT_BT = np.array([[0] * 7, [0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5, 6]], np.int32)


COUNTS_V = np.random.default_rng(1).permutation(V)  # each another, so that ranks are unique


def build(input: Any, head: Any = None, **changes: Any) -> Vocab:
    config = VocabConfig(
        size=V, width=D, multiple=4, input=input, head=head or UntiedHead(), **changes
    )
    return Vocab(config, rngs=nnx.Rngs(0), lexicon=Lexicon(COUNTS_V))


def tokens() -> Tokens:
    position_BT = np.zeros_like(SEGMENT_BT)
    for row, segments in enumerate(SEGMENT_BT):
        for t in range(1, len(segments)):
            position_BT[row, t] = (
                position_BT[row, t - 1] + 1 if segments[t] == segments[t - 1] else 0
            )
    return Tokens(jnp.asarray(IDS_BT), jnp.asarray(SEGMENT_BT), jnp.asarray(position_BT))


def host(x: Any) -> np.ndarray:
    return np.asarray(x[...], np.float64)


def count(vocab: Vocab) -> int:
    return sum(
        math.prod(p.get_metadata("logical"))
        for p in jax.tree.leaves(
            nnx.state(vocab, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param)
        )
    )


def test_factorized() -> None:
    input = build(FactorizedTable(factor=5, bias=True)).input
    input.bias[...] = jnp.arange(D, dtype=jnp.float32)
    x_BTD = build_rows(input)
    expected = host(input.table)[IDS_BT] @ host(input.projection) + np.arange(D)
    np.testing.assert_allclose(x_BTD, expected, rtol=1e-5, atol=1e-6)


def build_rows(input: Any) -> np.ndarray:
    reads = input.reads(tokens())
    rows = {}
    for name, ids in reads.items():
        table = host(input.tables()[name])
        logical = input.tables()[name].get_metadata("logical")[0]
        ids = np.asarray(ids)
        is_row = (ids >= 0) & (ids < logical)
        rows[name] = jnp.asarray(
            np.where(is_row[..., None], table[np.where(is_row, ids, 0)], 0), jnp.float32
        )
    return np.asarray(input(rows, tokens()))


def test_albert_normalises_the_narrow_rows_and_transforms_the_hidden_state() -> None:
    vocab = build(FactorizedTable(5, True, row_norm="layernorm"), AlbertHead(bias=True))
    e = host(vocab.input.table)[IDS_BT]
    normed = (e - e.mean(-1, keepdims=True)) / np.sqrt(e.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(
        vocab.encode(IDS_BT), normed @ host(vocab.input.projection), rtol=1e-4, atol=1e-5
    )
    h_BTD = np.random.default_rng(1).normal(size=(3, 7, D))
    head = vocab.head
    u = h_BTD @ host(head.dense) + host(head.dense_bias)
    u = 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    u = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-6)
    z_BTV = vocab.logits(jnp.asarray(h_BTD, jnp.float32))[..., :V]
    np.testing.assert_allclose(z_BTV, u @ host(vocab.input.table)[:V].T, rtol=1e-4, atol=1e-5)


def test_the_transposed_head_scores_against_the_composed_rows() -> None:
    vocab = build(FactorizedTable(5), FactorizedHead())
    rows_VD = host(vocab.input.table)[:V] @ host(vocab.input.projection)
    h_BTD = np.random.default_rng(1).normal(size=(3, 7, D))
    z_BTV = vocab.logits(jnp.asarray(h_BTD, jnp.float32))[..., :V]
    np.testing.assert_allclose(z_BTV, h_BTD @ rows_VD.T, rtol=1e-4, atol=1e-5)
    assert count(vocab) == V * 5 + 5 * D
    assert vocab.flops() == 2 * (5 * D + 5 * D + V * 5)


def test_hash_rows_are_weighted_sums_of_the_buckets_python_names() -> None:
    vocab = build(HashTable(buckets=7, hashes=3, seed=4))
    input = vocab.input
    expected = np.zeros((*IDS_BT.shape, D))
    for k, (a, b) in enumerate(input.functions):
        bucket = np.array([[(a * int(i) + b) % PRIME % 7 for i in row] for row in IDS_BT])
        expected += host(input.importance)[IDS_BT, k][..., None] * host(input.table)[bucket]
    np.testing.assert_allclose(vocab.encode(IDS_BT), expected, rtol=1e-5, atol=1e-6)
    assert count(vocab) == 7 * D + 3 * V + V * D
    assert build(HashTable(seed=5)).input.functions != build(HashTable(seed=4)).input.functions


@pytest.mark.parametrize("remainders", [None, 1, 6, V])
def test_compositional_rows_are_products_and_all_different(remainders: int | None) -> None:
    vocab = build(CompositionalTable(remainders))
    input, r = vocab.input, vocab.input.remainders
    assert r == (remainders or 5)
    expected = host(input.quotient)[IDS_BT // r] * host(input.remainder)[IDS_BT % r]
    np.testing.assert_allclose(vocab.encode(IDS_BT), expected, rtol=1e-5, atol=1e-6)
    assert count(vocab) == (-(-V // r) + r) * D + V * D
    everything = np.asarray(vocab.encode(np.arange(V)[None]))[0]
    assert len(np.unique(everything.round(6), axis=0)) == V


@pytest.mark.parametrize(
    ("cutoffs", "factor", "widths"),
    [
        ((5, 12), 4, (12, 3, 1)),
        ((1, V - 1), 2, (12, 6, 3)),  # field report 21: bands of one id
        ((2, 3, 4), 4, (12, 3, 1, 1)),  # never narrower than 1
        ((), 4, (12,)),
    ],
)
def test_adaptive_rows_are_of_the_band_of_their_rank(
    cutoffs: tuple[int, ...], factor: int, widths: tuple[int, ...]
) -> None:
    vocab = build(AdaptiveTable(cutoffs, factor))
    starts = (0, *cutoffs)
    by_count = sorted(range(V), key=lambda v: -COUNTS_V[v])
    expected = np.zeros((*IDS_BT.shape, D))
    for place, id in np.ndenumerate(IDS_BT):
        rank = by_count.index(id)
        i = max(i for i, start in enumerate(starts) if start <= rank)
        band = vocab.input.bands[i]
        expected[place] = host(band.table)[rank - starts[i]] @ host(band.projection)
    np.testing.assert_allclose(vocab.encode(IDS_BT), expected, rtol=1e-5, atol=1e-6)
    sizes = np.diff([*starts, V])
    assert count(vocab) == V * D + sum(
        (n + D) * width for n, width in zip(sizes, widths, strict=True)
    )
    assert vocab.flops() == 2 * (V * D + D * sum(widths))
    lent = {name: array.shape for name, array in vocab.input.shared().items()}
    for i, (n, width) in enumerate(zip(sizes, widths, strict=True)):
        assert lent.pop(f"bands/{i}/table") == (-(-n // 4) * 4, width)
        assert lent.pop(f"bands/{i}/projection") == (width, D)
    assert not lent


def test_adaptive_tables_start_with_rows_of_unit_length() -> None:
    size, width = 4000, 64
    config = VocabConfig(size=size, width=width, input=AdaptiveTable((1000,)))
    lexicon = Lexicon.stand_in()
    vocab = Vocab(replace(config, head=UntiedHead()), rngs=nnx.Rngs(0), lexicon=lexicon)
    for band, E in zip(vocab.input.bands, (64, 16), strict=True):
        logical = band.table.get_metadata("logical")[0]
        np.testing.assert_allclose(host(band.table)[:logical].std(), E**-0.5, rtol=0.05)
        expected = math.sqrt(2 / (E + width))
        np.testing.assert_allclose(host(band.projection).std(), expected, rtol=0.1)


def test_cutoffs_that_cannot_be_are_named() -> None:
    for cutoffs in ((0, 5), (5, 5), (7, 5), (-1,)):
        with pytest.raises(UserError, match=rf"cutoffs = \[{cutoffs[0]}.*must ascend, from 1"):
            build(AdaptiveTable(cutoffs))
    with pytest.raises(UserError, match=r"cutoffs = \[5, 23\] must be below .* size, 23,"):
        build(AdaptiveTable((5, V)))
    with pytest.raises(UserError, match=r"factor = 0 must be at least 1"):
        build(AdaptiveTable(factor=0))
    with pytest.raises(UserError, match=r"'adaptive' needs to know how often each id occurs"):
        Vocab(VocabConfig(size=V, width=D, input=AdaptiveTable((5,))), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("count", [0, 2**31])
def test_buckets_that_no_id_could_name_are_refused(count: int) -> None:
    for input in (HashTable(buckets=count), CompositionalTable(count)):
        with pytest.raises(UserError, match=rf"{count} must be at least 1 and below 2\^31"):
            build(input)


@pytest.mark.parametrize(("order", "slices"), [(2, 1), (3, 2)])
def test_over_encoding_reads_the_ngrams_python_names_inside_the_document(
    order: int, slices: int
) -> None:
    vocab = build(OverEncoding(order=order, slices=slices, buckets=2 * V - 1))
    input = vocab.input
    assert len(set(input.buckets)) == (order - 1) * slices
    assert all(m % V for m in input.buckets)
    expected = host(input.table)[IDS_BT]
    for i, (n, m) in enumerate(zip(input.orders, input.buckets, strict=True)):
        gram_BT = np.zeros(IDS_BT.shape, np.int64)
        for (row, t), _ in np.ndenumerate(IDS_BT):
            ids = [
                int(IDS_BT[row, t - p])
                if t >= p and SEGMENT_BT[row, t - p] == SEGMENT_BT[row, t]
                else 0
                for p in range(n)
            ]
            gram_BT[row, t] = sum(x * V**p for p, x in enumerate(ids)) % m
        expected = expected + host(input.grams[i])[gram_BT] @ host(input.projections[i])
    expected /= 1 + (order - 1) * slices
    np.testing.assert_allclose(vocab.encode(tokens()), expected, rtol=1e-4, atol=1e-5)


def test_combinations_that_cannot_be_are_named_with_what_to_use() -> None:
    with pytest.raises(UserError, match="rows have width 5; use a head that projects them"):
        build(FactorizedTable(5), TiedHead())
    with pytest.raises(
        UserError,
        match=r"needs the input's table, but that input lends bands/0/projection, .*table;",
    ):
        build(AdaptiveTable((5,)), TiedHead())
    with pytest.raises(
        UserError, match=r"needs the input's projection, but that input lends table"
    ):
        build(OverEncoding(order=2), AlbertHead())
    with pytest.raises(
        UserError, match=r"vocab.width = 12 does not divide .* 5 parts; use a width of 10 or 15"
    ):
        build(OverEncoding(order=5))
