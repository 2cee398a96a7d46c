"""Evaluation against float64 NumPy: totals, units, frequency bins, and what they must not depend on."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from models import layout_on, random_params

from vocabjax import IdError, UntiedHead, UserError
from vocabjax import evaluate as module
from vocabjax.data import TokenStream
from vocabjax.evaluate import Evaluation, Evaluator, frequency_bins
from vocabjax.model import Blueprint
from vocabjax.step import to_device
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.interfaces import Objective, Tokens

V, T = 37, 8


def blueprint_on(mesh: str, banned: tuple[int, ...] = ()) -> Blueprint:
    vocab = VocabConfig(
        size=V,
        width=8,
        multiple=1,
        banned=banned,
        head=UntiedHead(bias=True),
        objective=Objective(chunk=5),
    )
    return Blueprint(vocab, TrunkConfig(layers=1, heads=4, kv_heads=1, ffn=8), layout_on(mesh))


def stream_of(tokens: np.ndarray, size_bytes: int | None = 400) -> TokenStream:
    return TokenStream(tokens.astype(np.uint16), end_of_text=0, bytes=size_bytes)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    random = np.random.default_rng(0)
    ids = random.zipf(1.5, 203) % V
    ids[[0, 60, 61, 130]] = 0  # documents, one of them empty
    return ids


@pytest.fixture(scope="module")
def counts(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=V).astype(np.int64)


def evaluated(
    mesh: str, tokens: np.ndarray, counts: np.ndarray, batch: int, banned: tuple[int, ...] = ()
) -> Evaluation:
    blueprint = blueprint_on(mesh, banned)
    with jax.set_mesh(blueprint.layout.mesh):
        return Evaluator(blueprint, counts)(random_params(blueprint), stream_of(tokens), T, batch)


def oracle_nll(tokens: np.ndarray, banned: tuple[int, ...] = ()) -> np.ndarray:
    """−log p of tokens[1:], one window at a time, softmax in float64 over the ids that are not banned."""
    blueprint = blueprint_on("data=1,model=1")
    losses: list[float] = []
    with jax.set_mesh(blueprint.layout.mesh):
        model = blueprint.bind(random_params(blueprint))
        hidden = jax.jit(lambda tokens: model.hidden(tokens)[0])
        table = np.asarray(model.vocab.head.table[...], np.float64)[:V]
        bias = np.asarray(model.vocab.head.bias[...], np.float64)[:V]
        for start in range(0, len(tokens) - 1, T):
            window = tokens[start : start + T + 1]
            ids = np.zeros(T, np.int32)
            ids[: len(window) - 1] = window[:-1]
            segment = np.cumsum(ids == 0)
            position = [t - max([s for s in range(t + 1) if ids[s] == 0], default=0) for t in range(T)]  # fmt: skip
            put: Any = lambda x: jax.device_put(np.asarray(x, np.int32)[None], blueprint.layout.sharding("batch", "seq"))  # noqa: E731  # fmt: skip
            h = np.asarray(hidden(Tokens(put(ids), put(segment), put(position))), np.float64)[0]
            z = h @ table.T + bias
            z[:, list(banned)] = -np.inf
            log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
            losses += [-log_p[t, label] for t, label in enumerate(window[1:])]
    return np.array(losses)


def test_totals_and_units(tokens: np.ndarray, counts: np.ndarray) -> None:
    result = evaluated("data=1,model=1", tokens, counts, 4)
    nll = oracle_nll(tokens)
    assert result.tokens == len(tokens) - 1  # every token but the first is a target once
    assert result.nll == pytest.approx(nll.sum(), rel=1e-5)
    assert result.loss == pytest.approx(nll.mean(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    # Bytes of the real text, so end-of-text adds its loss and no bytes.
    assert result.bits_per_byte == pytest.approx(nll.sum() / math.log(2) / 400, rel=1e-5)


def test_loss_by_frequency(tokens: np.ndarray, counts: np.ndarray) -> None:
    result = evaluated("data=1,model=1", tokens, counts, 4)
    nll, targets = oracle_nll(tokens), tokens[1:]
    for deciles, bins in zip((result.by_mass, result.by_type), frequency_bins(counts), strict=True):
        assert sum(decile.types for decile in deciles) == V
        for number, decile in enumerate(deciles):
            inside = bins[targets] == number
            assert decile.tokens == inside.sum()
            if inside.any():
                assert decile.loss == pytest.approx(nll[inside].mean(), rel=1e-5)
            else:
                assert decile.loss is None


@pytest.mark.parametrize("mesh", ["data=1,model=1", "data=2,model=4"])
def test_banned_targets_are_left_out(mesh: str, tokens: np.ndarray, counts: np.ndarray) -> None:
    banned = (1, 3)
    result = evaluated(mesh, tokens, counts, 4, banned)
    predicted = ~np.isin(tokens[1:], banned)
    nll = oracle_nll(tokens, banned)[predicted]
    assert 0 < result.tokens == len(nll) < len(tokens) - 1
    assert result.nll == pytest.approx(nll.sum(), rel=1e-5)
    assert sum(decile.tokens for decile in result.by_mass) == len(nll)
    assert result.bits_per_byte is None  # the bytes of what is left are not known
    unseen = tuple(np.flatnonzero(counts == 0)[:2].tolist())
    assert evaluated(mesh, tokens, counts, 4, unseen).bits_per_byte is not None
    with pytest.raises(UserError, match="holds every target"):
        evaluated(mesh, np.array([2, 1, 3, 3, 1]), counts, 4, banned)


def test_bins_by_hand() -> None:
    # 100 tokens. By mass: id 3 holds 50 of them, so its middle (25) lies in bin 2; then 20, 10, 10, 6, 4.
    counts = np.array([10, 4, 20, 50, 0, 10, 6])
    by_mass, by_type = frequency_bins(counts)
    #        id:          0  1  2  3  4  5  6      order: 3 2 0 5 6 1 4
    assert by_mass.tolist() == [7, 9, 6, 2, 9, 8, 9]
    assert by_type.tolist() == [2, 7, 1, 0, 8, 4, 5]


def test_ten_equal_bins_of_a_flat_distribution() -> None:
    by_mass, by_type = frequency_bins(np.full(40, 7))
    assert np.bincount(by_mass).tolist() == np.bincount(by_type).tolist() == [4] * 10


@pytest.mark.parametrize(
    ("mesh", "batch"), [("data=1,model=1", 1), ("data=1,model=1", 2), ("data=2,model=4", 8)]
)
def test_neither_batch_nor_mesh_changes_the_result(
    mesh: str, batch: int, tokens: np.ndarray, counts: np.ndarray
) -> None:
    ours, other = (evaluated(*setting, tokens, counts, size) for setting, size in
                   (((mesh,), batch), (("data=1,model=1",), 4)))  # fmt: skip
    assert ours.tokens == other.tokens
    assert ours.nll == pytest.approx(other.nll, rel=1e-6)
    assert [d.tokens for d in ours.by_mass] == [d.tokens for d in other.by_mass]


@pytest.mark.parametrize(("mesh", "rows"), [("data=1,model=1", 26), ("data=4,model=2", 28)])
def test_a_batch_is_no_larger_than_the_text(
    mesh: str, rows: int, tokens: np.ndarray, counts: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """202 targets are 26 windows of 8: 28 rows, where they must divide over 4 shards."""
    shapes = []

    def recorded(layout: Any, host: Any, *axes: Any) -> Any:
        shapes.append(host["ids"].shape)
        return to_device(layout, host, *axes)

    monkeypatch.setattr(module, "to_device", recorded)
    result = evaluated(mesh, tokens, counts, 100_000)
    assert shapes == [(rows, T)]
    assert result.nll == pytest.approx(oracle_nll(tokens).sum(), rel=1e-5)


def test_the_order_of_documents_changes_nothing_when_windows_do_not_cut_them(
    counts: np.ndarray,
) -> None:
    random = np.random.default_rng(1)
    documents = [np.concatenate([[0], random.integers(1, V, T - 1)]) for _ in range(6)]
    totals = []
    for order in (range(6), reversed(range(6))):
        stream = np.concatenate([*(documents[i] for i in order), [0]])
        totals.append(evaluated("data=1,model=1", stream, counts, 4).nll)
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_an_id_beyond_the_model_is_named(counts: np.ndarray) -> None:
    with pytest.raises(IdError, match=r"37 at position \(1, 2\)"):
        evaluated("data=1,model=1", np.array([0, *[1] * 9, V, 1]), counts, 2)


def test_unknown_bytes_give_no_bits_per_byte(tokens: np.ndarray, counts: np.ndarray) -> None:
    blueprint = blueprint_on("data=1,model=1")
    with jax.set_mesh(blueprint.layout.mesh):
        result = Evaluator(blueprint, counts)(
            random_params(blueprint), stream_of(tokens, None), T, 4
        )
    assert result.bits_per_byte is None
