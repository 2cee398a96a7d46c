"""Memories against float64 NumPy, one layer at a time."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import put
from models import layout_on

from vocabjax.errors import UserError
from vocabjax.param import Scope
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.interfaces import Tokens, TrunkShape
from vocabjax.vocab.memories.ple import PLE, ArticlePLE
from vocabjax.vocab.memories.tide import Tide
from vocabjax.vocab.memories.value import ValueEmbeddings

V, D, L, G, K = 23, 16, 5, 2, 6
IDS_BT = np.random.default_rng(0).integers(0, V, (2, 7)).astype(np.int32)
RNG = np.random.default_rng(1)
H_BTD, Y_BTD = RNG.normal(size=(2, 2, 7, D))


def build(memory: Any) -> Vocab:
    config = VocabConfig(size=V, width=D, multiple=4, memories=(memory,))
    scope = Scope(jax.random.key(0), layout_on("data=1,model=1"))
    vocab = Vocab(config, scope=scope, trunk=TrunkShape(L, G, K))
    for index, param in enumerate(
        jax.tree.leaves(nnx.state(vocab.memories[0]), is_leaf=lambda x: isinstance(x, nnx.Param))
    ):
        if param.get_metadata("role") != "memory":  # zeros and ones would hide much
            noise = np.random.default_rng(index).normal(size=param.shape)
            param.set_value(param[...] + 0.3 * noise.astype(np.float32))
    return vocab


def host(x: Any) -> np.ndarray:
    return np.asarray(x[...], np.float64)


def apply(vocab: Vocab, layer: int, y: np.ndarray, x_BTD: np.ndarray | None = None) -> np.ndarray:
    memory = vocab.memories[0]
    tokens = Tokens.of(IDS_BT)
    rows = vocab.gather(tokens)["memories/0"]
    x_BTD = np.zeros((2, 7, D)) if x_BTD is None else x_BTD
    common, by_layer = memory.prepare(rows, tokens, jnp.asarray(x_BTD, jnp.float32))
    at = memory.layers.index(layer)
    params, context = jax.tree.map(lambda a: a[at], (memory.per_layer(), by_layer))
    out, cache = memory.apply(
        params,
        common,
        context,
        put(vocab.layout, H_BTD.astype(np.float32), "batch", "seq"),
        put(vocab.layout, y.astype(np.float32), "batch", "seq"),
        None,
    )
    assert cache is None
    return np.asarray(out)


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("scalar", [False, True])
def test_ple_is_gemma_s(scalar: bool) -> None:
    """Ids from V' = 11 on read a zero row; x₀ enters through the context projection."""
    P = 6
    vocab = build(PLE(width=P, rows=11, scalar=scalar))
    memory = vocab.memories[0]
    x_BTD = RNG.normal(size=(2, 7, D))
    table = host(memory.table)[:11].reshape(11, L, P)
    a = np.where((IDS_BT < 11)[..., None, None], table[np.minimum(IDS_BT, 10)], 0) * math.sqrt(P)
    c = (x_BTD @ host(memory.context) / math.sqrt(D)).reshape(2, 7, L, P)
    e = (a + rms(c) * host(memory.context_norm.scale)) / math.sqrt(2)
    for layer in (0, 3):
        u = gelu(H_BTD @ host(memory.gate)[layer]) * e[:, :, layer]
        expected = Y_BTD + rms(u @ host(memory.out)[layer]) * host(memory.out_norm)[layer]
        if scalar:
            expected = expected * host(memory.scalar)[layer]
        np.testing.assert_allclose(
            apply(vocab, layer, Y_BTD, x_BTD), expected, rtol=1e-4, atol=1e-5
        )
    # Gemma's form costs 6·D·P FLOPs per layer: gate, projection, context.
    assert memory.flops() == 6 * D * P * L


def test_the_article_s_ple_gates_the_ffn() -> None:
    P = 4
    vocab = build(ArticlePLE(width=P))
    memory = vocab.memories[0]
    assert memory.site == "ffn_out"
    e = host(memory.table)[IDS_BT].reshape(2, 7, L, P) * math.sqrt(P)
    expected = (e[:, :, 2] @ host(memory.up)[2]) * Y_BTD
    np.testing.assert_allclose(apply(vocab, 2, Y_BTD), expected, rtol=1e-4, atol=1e-5)
    assert memory.flops() == 2 * D * P * L


@pytest.mark.parametrize(
    ("every", "layers"), [(1, (0, 1, 2, 3, 4)), (2, (0, 2, 4)), (3, (1, 4)), (9, (4,))]
)
def test_value_embeddings_count_layers_back_from_the_last(
    every: int, layers: tuple[int, ...]
) -> None:
    vocab = build(ValueEmbeddings(every=every, channels=5))
    memory = vocab.memories[0]
    assert memory.layers == layers
    v_BTGK = RNG.normal(size=(2, 7, G, K))
    rows = host(memory.table)[IDS_BT].reshape(2, 7, len(layers), G, K)
    for at, layer in enumerate(layers):
        gate = 3 * sigmoid(H_BTD[..., :5] @ host(memory.gate)[at])
        expected = v_BTGK + gate[..., None] * rows[:, :, at]
        np.testing.assert_allclose(apply(vocab, layer, v_BTGK), expected, rtol=1e-4, atol=1e-5)


def test_value_embeddings_start_with_a_gate_of_three_halves() -> None:
    config = VocabConfig(size=V, width=D, memories=(ValueEmbeddings(),))
    vocab = Vocab(config, rngs=nnx.Rngs(0), trunk=TrunkShape(L, G, K))
    zero = np.zeros((2, 7, G, K))
    rows = host(vocab.memories[0].table)[IDS_BT].reshape(2, 7, 3, G, K)
    np.testing.assert_allclose(apply(vocab, 4, zero), 1.5 * rows[:, :, 2], rtol=1e-5)


def test_tide_mixes_its_banks_and_an_empty_one() -> None:
    banks = 3
    vocab = build(Tide(banks=banks))
    memory = vocab.memories[0]
    rows = host(memory.table)[IDS_BT].reshape(2, 7, banks, D)
    banks_BTKD = rms(rows) * host(memory.bank_norm)
    for layer in (0, 4):
        score = (rms(H_BTD) * host(memory.norm)[layer]) @ host(memory.router)[layer]
        share = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
        expected = Y_BTD + np.einsum("btk,btkd->btd", share[..., 1:], banks_BTKD)
        np.testing.assert_allclose(apply(vocab, layer, Y_BTD), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        (PLE(width=0), "width = 0"),
        (PLE(rows=0), "rows = 0"),
        (ValueEmbeddings(every=0), "every = 0"),
        (
            ValueEmbeddings(channels=17),
            "channels = 17 of value_embeddings is more than vocab.width = 16",
        ),
        (Tide(banks=0), "banks = 0"),
    ],
)
def test_settings_that_cannot_work_are_named(memory: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        build(memory)
