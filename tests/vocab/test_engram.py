"""Engram against float64 NumPy and Python integers; its caches against the full pass."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import layout_of, put
from models import layout_on, quick_jit, random_params
from test_memories import rms, sigmoid

from vocabjax.errors import UserError
from vocabjax.generate import SamplingConfig, generate
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.param import Scope, param_infos, total_size
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.interfaces import Tokens, TrunkShape
from vocabjax.vocab.lexicon import Lexicon
from vocabjax.vocab.memories.engram import Engram

V, D, B, T = 29, 16, 8, 14
ONE = "data=1,model=1"
# Every third id spells what the one before it does.
TEXTS = [f"Word{v - (v % 3 == 2)}" for v in range(V)]
SMALL = Engram(heads=2, width=6, buckets=11, layers=(1, 3))
TRUNK = TrunkConfig(layers=4, heads=8, kv_heads=8, head_dim=2, ffn=16)

# Rows of documents of all lengths; the convolution reaches back 9 positions. Two ids do not exist.
IDS_BT = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
STARTS_BT = np.random.default_rng(1).random((B, T)) < np.linspace(0, 0.4, B)[:, None]
STARTS_BT[:, 0] = True
SEGMENT_BT = np.cumsum(STARTS_BT, 1).astype(np.int32)
POSITION_BT = (np.arange(T) - np.maximum.accumulate(STARTS_BT * np.arange(T), 1)).astype(np.int32)
BAD_BT = IDS_BT.copy()
BAD_BT[0, 4], BAD_BT[1, 2] = V, -3


def vocab_on(layout: Layout, memory: Engram = SMALL, texts: Any = TEXTS) -> Vocab:
    config = VocabConfig(size=V, width=D, multiple=4, memories=(memory,))
    scope = Scope(jax.random.key(0), layout)
    return Vocab(config, scope=scope, trunk=TrunkShape(4, 2, 8), lexicon=Lexicon(texts=texts))


@functools.cache
def varied(memory: Engram = SMALL) -> Vocab:
    """On one device, with zeros and ones made visible."""
    vocab = vocab_on(layout_on(ONE), memory)
    params = jax.tree.leaves(
        nnx.state(vocab.memories[0]), is_leaf=lambda x: isinstance(x, nnx.Param)
    )
    for index, param in enumerate(params):
        noise = 0.3 * np.random.default_rng(index).normal(size=param.shape)
        if param.get_metadata("role") != "memory":
            param.set_value(param[...] + noise.astype(np.float32))
    return vocab


def tokens_on(layout: Layout, ids_BT: np.ndarray = IDS_BT) -> Tokens:
    return Tokens(*[put(layout, a, "batch", "seq") for a in (ids_BT, SEGMENT_BT, POSITION_BT)])


def expected_rows(memory: Any, at: int, ids_BT: np.ndarray) -> np.ndarray:
    """Which rows of its `at`-th table the ids read, [B, T, orders · heads]: Python integers, from the equations."""
    spelled = dict.fromkeys(TEXTS)
    number = {text: i for i, text in enumerate(spelled)}
    multipliers, primes = memory.multipliers[at], memory.primes[at]
    rows = np.full((*ids_BT.shape, sum(map(len, primes))), -1)
    for b, t in np.ndindex(ids_BT.shape):
        gram = []
        for back in range(memory.history + 1):
            exists = back <= POSITION_BT[b, t] and 0 <= ids_BT[b, t - back] < V
            gram.append(number[TEXTS[ids_BT[b, t - back]]] if exists else len(spelled))
        if not 0 <= ids_BT[b, t] < V:
            continue
        column = first = 0
        for order, heads in enumerate(primes, 2):
            mixed = 0
            for i in range(order):
                mixed ^= gram[i] * multipliers[i]
            for prime in heads:
                rows[b, t, column] = first + mixed % prime
                column, first = column + 1, first + prime
    return rows


@pytest.mark.parametrize(
    "mesh",
    ["none", "model=8 explicit", "data=2,model=4 explicit", "data=8 explicit", "data=8 auto"],
)
def test_each_layer_reads_the_rows_of_its_own_hashes(mesh: str) -> None:
    """In two microbatches; ids that do not exist read nothing."""
    layout = layout_of(mesh)
    memory = vocab_on(layout).memories[0]
    parts = [np.stack([a, a[::-1]]) for a in (BAD_BT, SEGMENT_BT, POSITION_BT)]
    with jax.set_mesh(layout.mesh):
        tokens = Tokens(*[put(layout, a, None, "batch", "seq") for a in parts])
        found = quick_jit(jax.vmap(memory.reads))(tokens)
    for at in range(2):
        one, two = np.asarray(found[f"grams/{at}"])
        np.testing.assert_array_equal(one, expected_rows(memory, at, BAD_BT))
        np.testing.assert_array_equal(two, one[::-1])


def test_hashes_are_different_primes_and_multipliers_that_do_not_overflow() -> None:
    memory = vocab_on(layout_on(ONE), replace(SMALL, buckets=14)).memories[0]
    primes = [p for layer in memory.primes for heads in layer for p in heads]
    assert primes == [17, 19, 23, 29, 31, 37, 41, 43]  # those from 14 up
    multipliers = [m for layer in memory.multipliers for m in layer]
    assert len(set(multipliers)) == 6 and all(m % 2 for m in multipliers)
    largest = len(set(TEXTS))  # what stands before the document
    assert 2**61 < max(multipliers) * largest < 2**63
    other = vocab_on(layout_on(ONE), replace(SMALL, seed=1)).memories[0]
    assert not set(multipliers) & {m for layer in other.multipliers for m in layer}


@pytest.mark.parametrize(
    ("alike", "apart"),
    [
        (["Apple", " apple", "APPLE ", "\n aPPle"], ["apples", "ap ple"]),
        (["É", "e\u0301", "e", "ｅ"], ["\0é", "\0e", "f"]),
        ([" ", "\n", "\t \r\n", "\u00a0"], ["", "_"]),
        (["ﬁne", "fine"], ["fin"]),
        (["a  b", "A\n\nb"], ["ab"]),
        (["\u0301"], ["\u0300", ""]),  # nothing would remain: kept as they are
        (["<End>", " <end>"], ["\0<end>"]),
    ],
)
def test_ids_are_one_where_they_spell_alike(alike: list[str], apart: list[str]) -> None:
    texts = alike + apart
    config = VocabConfig(size=len(texts) + 1, width=D, memories=(SMALL,))
    scope = Scope(jax.random.key(0), layout_on(ONE))
    vocab = Vocab(config, scope=scope, trunk=TrunkShape(4, 2, 8), lexicon=Lexicon(texts=texts))
    ids = vocab.memories[0].compressed.values
    assert ids[: len(alike)].tolist() == [0] * len(alike)
    assert ids[len(alike) :].tolist() == list(range(1, len(apart) + 2))


def test_texts_are_needed_unless_ids_stay_as_they_are() -> None:
    layout = layout_on(ONE)
    with pytest.raises(UserError, match=r"engram, unless compress=False, needs the text"):
        vocab_on(layout, SMALL, None)
    memory = vocab_on(layout, replace(SMALL, compress=False), None).memories[0]
    np.testing.assert_array_equal(memory.compressed.values, np.arange(V))


@pytest.mark.parametrize("signed_root", [True, False])
def test_a_layer_s_update_is_the_equation_s(signed_root: bool) -> None:
    vocab = varied(replace(SMALL, signed_root=signed_root))
    memory, tokens = vocab.memories[0], tokens_on(vocab.layout, BAD_BT)
    assert memory.site == "pre_attn" and memory.layers == (1, 3)
    rng = np.random.default_rng(2)
    h_BTD, y_BTD = rng.normal(size=(2, B, T, D))
    common, by_layer = memory.prepare(vocab.gather(tokens)["memories/0"], tokens, jnp.zeros(()))
    for at in range(2):
        p, context = jax.tree.map(lambda a, at=at: a[at], (memory.per_layer(), by_layer))
        ours, cache = memory.apply(
            p, common, context, jnp.asarray(h_BTD, "float32"), jnp.asarray(y_BTD, "float32"), None
        )
        assert cache is None

        p = {name: np.asarray(value, np.float64) for name, value in p.items()}
        rows = expected_rows(memory, at, BAD_BT)
        table = np.asarray(memory.grams[at][...], np.float64)
        e_BTE = np.where(rows[..., None] >= 0, table[rows], 0).reshape(B, T, -1)
        key, query = rms(e_BTE @ p["keys"]) * p["key_norm"], rms(h_BTD) * p["query_norm"]
        s_BT = (key * query).sum(-1) / math.sqrt(D)
        if signed_root:
            s_BT = np.sign(s_BT) * np.sqrt(np.maximum(abs(s_BT), 1e-6))
        v_BTD = sigmoid(s_BT)[..., None] * (e_BTE @ p["values"])
        normed = rms(v_BTD) * p["value_norm"]
        mixed = np.zeros((B, T, D))
        for b, t in np.ndindex(B, T):
            for j in range(4):
                if 3 * j <= POSITION_BT[b, t]:
                    mixed[b, t] += p["taps"][j] * normed[b, t - 3 * j]
        expected = y_BTD + v_BTD + mixed * sigmoid(mixed)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    assert (POSITION_BT >= 9).any()


def test_the_convolution_starts_as_nothing() -> None:
    memory = vocab_on(layout_on(ONE)).memories[0]
    assert not np.asarray(memory.taps[...]).any()


def test_parameters_are_those_of_the_formula() -> None:
    config = Engram(order=4, heads=3, width=9, buckets=20, layers=(0, 2))
    memory = vocab_on(layout_on(ONE), config).memories[0]
    primes = [p for p in range(20, 120) if all(p % k for k in range(2, p))][: 2 * 3 * 3]
    E = 3 * 9
    expected = sum(primes) * 9 // 3 + 2 * (2 * E * D + 4 * D + 3 * D)
    assert total_size(param_infos(memory).values()) == expected
    assert memory.flops() == 2 * 2 * (2 * E * D + 4 * D)


@pytest.mark.parametrize(("depth", "layers"), [(1, (0,)), (2, (1,)), (4, (1, 2)), (30, (1, 15))])
def test_by_default_it_stands_in_the_second_layer_and_the_middle(
    depth: int, layers: tuple[int, ...]
) -> None:
    config = VocabConfig(size=V, width=D, memories=(replace(SMALL, layers=None),))
    scope = Scope(jax.random.key(0), layout_on(ONE))
    vocab = Vocab(config, scope=scope, trunk=TrunkShape(depth, 2, 8), lexicon=Lexicon(texts=TEXTS))
    assert vocab.memories[0].layers == layers


@functools.cache
def model_on(mesh: str) -> tuple[Blueprint, Params]:
    vocab = VocabConfig(size=V, width=D, multiple=4, memories=(SMALL,))
    blueprint = Blueprint(vocab, TRUNK, layout_on(mesh), Lexicon(texts=TEXTS))
    return blueprint, random_params(blueprint)


@functools.cache
def full_pass() -> np.ndarray:
    blueprint, params = model_on(ONE)
    tokens = tokens_on(blueprint.layout)
    return np.asarray(quick_jit(lambda p: blueprint.bind(p).hidden(tokens)[0])(params))


@pytest.mark.parametrize(
    ("mesh", "first"),
    [("data=8,model=1", 1), ("data=2,model=4", 3), ("data=1,model=8", 11)],
)
def test_decoding_equals_the_full_pass(mesh: str, first: int) -> None:
    """A prefill shorter or longer than the convolution's reach, then one token at a time, over documents' ends."""
    blueprint, params = model_on(mesh)
    layout = blueprint.layout
    padded = np.pad(IDS_BT, ((0, 0), (2, 0)), constant_values=-1)
    with jax.set_mesh(layout.mesh):
        cache = blueprint.bind(params).init_cache(B, T)
        run = quick_jit(lambda p, tokens, cache: blueprint.bind(p).hidden(tokens, cache))
        pieces, start = [], 0
        for stop in (first, *range(first + 1, T + 1)):
            part = [
                put(layout, a[:, start:stop], "batch", "seq")
                for a in (IDS_BT, SEGMENT_BT, POSITION_BT)
            ]
            past_BH = put(layout, padded[:, start : start + 2], "batch", None)
            h_BTD, cache = run(params, Tokens(*part, past_BH), cache)
            pieces.append(np.asarray(h_BTD))
            start = stop
    np.testing.assert_allclose(np.concatenate(pieces, 1), full_pass(), atol=2e-4)


def test_a_prompt_is_continued_alike_alone_and_beside_longer_ones() -> None:
    blueprint, params = model_on(ONE)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [1]]
    greedy = SamplingConfig(max_tokens=8, temperature=0)
    together = generate(blueprint, params, prompts, greedy, end_of_text=None)
    alone = [generate(blueprint, params, [p], greedy, end_of_text=None)[0] for p in prompts]
    assert together == alone


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"order": 1}, "order = 1 of engram must be at least 2"),
        ({"heads": 0}, "heads = 0"),
        ({"buckets": 0}, "buckets = 0"),
        ({"width": 7}, "width = 7 of engram does not divide over heads = 2; use 6 or 8"),
        ({"width": 1}, "heads = 2; use 2"),
        ({"buckets": 2**29}, r"more than 2\^31 rows"),
        ({"layers": ()}, r"layers = \(\)"),
        ({"layers": (4,)}, r"layers = \(4,\) of engram must ascend, from 0 to 3"),
        ({"layers": (-1,)}, r"layers = \(-1,\)"),
        ({"layers": (2, 1)}, r"layers = \(2, 1\)"),
        ({"layers": (1, 1)}, r"layers = \(1, 1\)"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        vocab_on(layout_on(ONE), replace(SMALL, **changes))
