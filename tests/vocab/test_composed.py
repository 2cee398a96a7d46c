"""Heads tied to rows that are composed from a few buckets, against the composition in float64."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from hlo import buffers, collectives, compiled_text
from meshes import SOME, layout_of, put

from vocabjax.mesh import Layout
from vocabjax.param import Scope, param_infos
from vocabjax.vocab.composed import compose
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.hashing import PRIME
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.inputs.hashed import CompositionalTable, HashTable

V, D = 53, 6
IDS_BT = np.random.default_rng(0).integers(0, V, (4, 8)).astype(np.int32)
INPUTS = (HashTable(buckets=7, hashes=3), CompositionalTable())
every_input = pytest.mark.parametrize("input", INPUTS, ids=lambda input: input.kind)


def build(layout: Layout, **settings: Any) -> Vocab:
    config = VocabConfig(**{"size": V, "width": D, "multiple": 3, "head": TiedHead(), **settings})
    return Vocab(config, scope=Scope(jax.random.key(0), layout))


def tables(vocab: Vocab) -> dict[str, np.ndarray]:
    """float64, logical rows."""
    found = vocab.input.tables()
    return {
        name: np.asarray(param[...], np.float64)[: param.get_metadata("logical")[0]]
        for name, param in found.items()
    }


def composed(vocab: Vocab) -> np.ndarray:
    """float64 [V, D]: the equations."""
    input, stored, ids_V = vocab.input, tables(vocab), np.arange(V)
    if "quotient" in stored:
        r = input.remainders
        return stored["quotient"][ids_V // r] * stored["remainder"][ids_V % r]
    return sum(
        stored["importance"][:, k : k + 1] * stored["table"][buckets_V]
        for k, buckets_V in enumerate(buckets(vocab))
    )


def buckets(vocab: Vocab) -> list[np.ndarray]:
    size = vocab.input.buckets
    return [
        np.array([(a * v + b) % PRIME % size for v in range(V)]) for a, b in vocab.input.functions
    ]


def through(vocab: Vocab, dtable_VD: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of the stored tables, by the chain rule."""
    stored, ids_V = tables(vocab), np.arange(V)
    gradients = {name: np.zeros_like(table) for name, table in stored.items()}
    if "quotient" in stored:
        q_V, r_V = np.divmod(ids_V, vocab.input.remainders)
        np.add.at(gradients["quotient"], q_V, dtable_VD * stored["remainder"][r_V])
        np.add.at(gradients["remainder"], r_V, dtable_VD * stored["quotient"][q_V])
        return gradients
    for k, buckets_V in enumerate(buckets(vocab)):
        np.add.at(gradients["table"], buckets_V, stored["importance"][:, k : k + 1] * dtable_VD)
        gradients["importance"][:, k] = (stored["table"][buckets_V] * dtable_VD).sum(-1)
    return gradients


@every_input
@pytest.mark.parametrize("name", SOME)
def test_a_tied_head_scores_against_the_composed_rows_and_trains_both_faces(
    input: Any, name: str
) -> None:
    """The scale of the input path is not the head's; the gradient is the sum of both faces', through the composition."""
    layout = layout_of(name)
    vocab = build(layout, input=type(input)(scale="sqrt_width"))
    graph, params = nnx.split(vocab)

    def loss(params: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, params)
        h_BTD = jnp.tanh(model.encode(ids))
        return model.loss(h_BTD, ids).total, h_BTD

    with jax.set_mesh(layout.mesh):
        ids = put(layout, IDS_BT, "batch", "seq")
        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (total, h_BTD), gradients = run(params, ids)
        z_BTV = np.asarray(vocab.logits(h_BTD))
        np.testing.assert_allclose(
            np.asarray(vocab.nll(h_BTD, ids)).sum() / IDS_BT.size, total, rtol=1e-5
        )
    table_VD = composed(vocab)
    expected_h_BTD = np.tanh(math.sqrt(D) * table_VD[IDS_BT])
    expected = oracles.cross_entropy(expected_h_BTD, table_VD, IDS_BT, oracles.allowed_ids(V, V))
    np.testing.assert_allclose(z_BTV[..., :V], h_BTD @ table_VD.T, rtol=1e-4, atol=1e-5)
    assert (z_BTV[..., V:] == -np.inf).all()
    np.testing.assert_allclose(total, expected.total, rtol=1e-5)
    dx_BTD = expected.dh_BTD * (1 - expected_h_BTD**2) * math.sqrt(D)
    dtable_VD = expected.dtable_VD + oracles.scatter_add((V, D), IDS_BT, dx_BTD)
    got = nnx.to_pure_dict(gradients)["input"]
    for path, gradient in through(vocab, dtable_VD).items():
        np.testing.assert_allclose(
            np.asarray(got[path])[: len(gradient)], gradient, rtol=1e-4, atol=1e-6
        )


@every_input
@pytest.mark.parametrize("name", ["model=8 explicit", "a=2,b=2,c=2 auto"])
def test_blocks_change_nothing_and_padding_is_zero(input: Any, name: str) -> None:
    layout = layout_of(name)
    with jax.set_mesh(layout.mesh):
        vocab = build(layout, input=input)
        expected = composed(vocab)
        for block in (1, 16, 1024):  # one id per device, some that do not divide, all
            table_VD = compose(vocab.input, block=block)
            assert table_VD.sharding.is_equivalent_to(layout.sharding("vocab", None), 2)
            assert table_VD.shape == (vocab.sizes.padded, D) and vocab.sizes.padded > V
            rows = np.asarray(table_VD)
            np.testing.assert_allclose(rows[:V], expected, rtol=1e-5, atol=1e-6)
            assert not rows[V:].any()


@every_input
def test_tables_are_tied_where_the_head_is_and_lent_only_then(input: Any) -> None:
    layout = layout_of("none")
    tied, untied = (build(layout, input=input, head=head) for head in (TiedHead(), UntiedHead()))
    assert {info.role for info in param_infos(tied).values()} == {"tied"}
    assert {info.role for info in param_infos(untied.input).values()} == {"embed"}
    assert list(tied.input.shared()) == ["table"]
    assert not untied.input.shared()  # nor composed


@every_input
def test_no_table_is_gathered_nor_composed_at_once(input: Any) -> None:
    """Sizes are such that a block, with all its buckets, is far smaller than a whole table."""
    layout, size, block = layout_of("data=2,model=4 explicit"), 4001, 64
    vocab = build(layout, input=type(input)(), size=size)
    graph, params = nnx.split(vocab)

    def loss(params: Any) -> jax.Array:
        return (compose(nnx.merge(graph, params).input, block=block) ** 2).sum()

    with jax.set_mesh(layout.mesh):
        text = compiled_text(jax.jit(jax.value_and_grad(loss)), params)
    held = {math.prod(shape) for shape in buffers(text)}
    assert vocab.sizes.padded // 4 * D in held  # a device's own rows: the text was read
    assert max(held) < 2 * vocab.sizes.padded // 4 * D
    sent = {math.prod(shape) for kind, shape in collectives(text) if kind != "all-reduce"}
    assert sent and max(sent) <= 2 * 2 * block * D
