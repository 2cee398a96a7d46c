"""Sampling: the cache changes nothing, filters match NumPy, nothing depends on the mesh or the other rows."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import put
from models import layout_on, quick_jit, random_params

from vocabjax import generate as module
from vocabjax.errors import IdError, UserError
from vocabjax.generate import SamplingConfig, filter_scores, generate
from vocabjax.model import Blueprint, Params
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import UntiedHead
from vocabjax.vocab.interfaces import Context, Input, InputConfig, Reads, Rows, Tokens

ONE, WIDE = "data=1,model=1", "data=2,model=4"
# Two key/value heads do not divide over model=4 and model=8; V = 30 is padded to 32 and more; id 3 is banned.
VOCAB = VocabConfig(size=30, width=16, multiple=4, banned=(3,), head=UntiedHead())
TRUNK = TrunkConfig(layers=2, heads=8, kv_heads=2, head_dim=4, ffn=16)
PROMPTS = [[1, 2, 0], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
GREEDY = SamplingConfig(max_tokens=7, temperature=0)


@dataclass(frozen=True)
class Trigrams(InputConfig):
    """x_t = Σ_n row_n[(id_t + 7 id_{t−1} + … ) mod 40]: reads two ids back, inside the document."""

    kind: ClassVar[str] = "trigrams"

    def build(self, context: Context, *, tied: bool) -> Input:
        return TrigramInput(context)


class TrigramInput(Input):
    history = 2

    def __init__(self, context: Context) -> None:
        self.unigrams = context.table("unigrams", "embed", std=1.0)
        self.trigrams = context.table("trigrams", "embed", rows=40, std=1.0)

    def tables(self) -> Any:
        return {"unigrams": self.unigrams, "trigrams": self.trigrams}

    def reads(self, tokens: Tokens) -> Reads:
        gram_BT = tokens.ids_BT
        for back in (1, 2):
            gram_BT += 7**back * (tokens.before(back) + 1)
        return {"unigrams": tokens.ids_BT, "trigrams": gram_BT % 40}

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        return rows["unigrams"] + rows["trigrams"]


@functools.cache
def model_on(mesh: str) -> tuple[Blueprint, Params]:
    blueprint = Blueprint(VOCAB, TRUNK, layout_on(mesh))
    return blueprint, random_params(blueprint)


def run(
    mesh: str, prompts: Any, config: SamplingConfig, end_of_text: int | None = None
) -> list[list[int]]:
    return generate(*model_on(mesh), prompts, config, end_of_text=end_of_text)


@functools.cache
def full_pass() -> Any:
    """Scores [B, T, V] of whole sequences, without a cache, on one device."""
    blueprint, params = model_on(ONE)

    def scores(ids_BT: jax.Array) -> jax.Array:
        return blueprint.bind(params).logits(Tokens.of(ids_BT))[0][..., : VOCAB.size]

    return lambda ids_BT: np.asarray(
        quick_jit(scores)(put(blueprint.layout, ids_BT, "batch", "seq"))
    )


@pytest.mark.parametrize("mesh", [ONE, WIDE])
def test_greedy_is_the_argmax_of_repeated_full_passes(mesh: str) -> None:
    new = run(mesh, PROMPTS, GREEDY)
    ids_BT = np.zeros((3, 24), np.int32)  # padded at the end, where causality hides it
    for row, (prompt, tail) in enumerate(zip(PROMPTS, new, strict=True)):
        ids_BT[row, : len(prompt) + 7] = prompt + tail
    best_BT = full_pass()(ids_BT).argmax(-1)
    for row, (prompt, tail) in enumerate(zip(PROMPTS, new, strict=True)):
        first = len(prompt) - 1
        assert tail == best_BT[row, first : first + 7].tolist()
    assert len({i for tail in new for i in tail}) > 3, "the model says one thing only"


@pytest.mark.parametrize("mesh", ["model=8", WIDE])
def test_decoding_with_the_cache_equals_the_full_pass(mesh: str) -> None:
    blueprint, params = model_on(mesh)
    layout = blueprint.layout
    ids_BT = np.random.default_rng(0).integers(0, VOCAB.size, (2, 6)).astype(np.int32)
    with jax.set_mesh(layout.mesh):
        cache = blueprint.bind(params).init_cache(2, 6)
        decode = quick_jit(lambda p, tokens, cache: blueprint.bind(p).logits(tokens, cache))
        steps = []
        for t in range(6):
            id_B1 = put(layout, ids_BT[:, t : t + 1], "batch", "seq")
            tokens = Tokens(id_B1, jnp.zeros_like(id_B1), jnp.full_like(id_B1, t))
            z_BTV, cache = decode(params, tokens, cache)
            steps.append(np.asarray(z_BTV)[..., : VOCAB.size])
    np.testing.assert_allclose(np.concatenate(steps, 1), full_pass()(ids_BT), atol=2e-5)


def filter_oracle(
    z_V: np.ndarray, temperature: float, top_k: int | None, top_p: float | None
) -> np.ndarray:
    """The probabilities that are left, one id at a time, in float64."""
    weight_V = np.exp((z_V - z_V.max()).astype(np.float64) / temperature)
    ranked = sorted(range(len(z_V)), key=lambda i: (-weight_V[i], i))[:top_k]
    total = sum(weight_V[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weight_V[i] / total
        if top_p is not None and mass >= top_p:
            break
    p_V = np.zeros(len(z_V))
    p_V[kept] = weight_V[kept] / weight_V[kept].sum()
    return p_V


@pytest.mark.parametrize("temperature", [0.3, 1.0, 100.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(None, None), (1, None), (5, None), (99, None), (None, 0.01), (None, 0.6), (8, 0.7)],
)
def test_filters_match_numpy(temperature: float, top_k: int | None, top_p: float | None) -> None:
    z_BV = np.random.default_rng(1).normal(size=(4, 13)).astype(np.float32) * 3
    z_BV[:, 5] = -np.inf  # banned
    z_BV[3, :4] = 2.5  # equal scores: lower ids first, and no more than k of them
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    ours_BV = np.asarray(jax.nn.softmax(filter_scores(jnp.asarray(z_BV), config), axis=-1))
    for z_V, ours_V in zip(z_BV, ours_BV, strict=True):
        np.testing.assert_allclose(ours_V, filter_oracle(z_V, temperature, top_k, top_p), atol=1e-6)


def test_top_p_of_one_keeps_every_id_however_improbable() -> None:
    z_BV = jnp.asarray([[0.0, -30.0, -80.0]])
    kept_BV = filter_scores(z_BV, SamplingConfig(top_p=1.0))
    assert np.isfinite(kept_BV).all()


def test_the_smallest_temperature_is_greedy_not_nan() -> None:
    z_BV = filter_scores(jnp.asarray([[1.0, 3.0, 2.0]]), SamplingConfig(temperature=1e-38))
    np.testing.assert_array_equal(jax.nn.softmax(z_BV), [[0, 1, 0]])


def test_samples_do_not_depend_on_the_mesh_but_on_row_and_seed() -> None:
    config = SamplingConfig(max_tokens=12, temperature=1.5, top_k=20, top_p=0.95, seed=4)
    prompts = [[1, 2], [1, 2], [7]]
    new = run(ONE, prompts, config)
    assert new == run(WIDE, prompts, config)  # where a fourth row is added
    assert new[0] != new[1]
    assert new[0] == run(ONE, [[1, 2], [9, 9, 9], [4]], config)[0]
    assert new != run(ONE, prompts, dataclasses.replace(config, seed=5))


def test_padded_and_banned_ids_are_never_sampled_at_any_temperature() -> None:
    config = SamplingConfig(max_tokens=48, temperature=100.0)
    new = run(WIDE, [[i] for i in range(8)], config)
    drawn = {i for row in new for i in row}
    # Near-uniform: 384 draws of 29 ids miss one of them with a probability below 1e-4.
    assert drawn == set(range(30)) - {3}


def test_the_frequencies_of_samples_are_the_model_s() -> None:
    config = SamplingConfig(max_tokens=1, temperature=0.5)
    prompts = [[1, 2, 0]] * 512
    counts_V = np.bincount([row[0] for row in run(WIDE, prompts, config)], minlength=VOCAB.size)
    z_V = full_pass()(np.asarray([[1, 2, 0]], np.int32))[0, -1]
    p_V = filter_oracle(z_V, 0.5, None, None)
    # Total variation of 512 draws: its mean is at most √(V / 4n) = 0.12.
    assert np.abs(counts_V / 512 - p_V).sum() / 2 < 0.2


@pytest.mark.parametrize("mesh", [ONE, WIDE])
def test_an_input_that_reads_ids_before_decodes_as_in_a_full_pass(mesh: str) -> None:
    """The past reaches across the prefill, fills as ids are made, and stops where the document began."""
    end = 29
    blueprint = Blueprint(dataclasses.replace(VOCAB, input=Trigrams()), TRUNK, layout_on(mesh))
    params = random_params(blueprint)
    prompts = [[4], [end], [6, 7, 8, end, 4], [1, 2, 0, 9]]
    new = generate(blueprint, params, prompts, GREEDY, end_of_text=end)
    assert new[:1] == generate(blueprint, params, prompts[:1], GREEDY, end_of_text=end)
    score = quick_jit(lambda p, tokens: blueprint.bind(p).logits(tokens)[0])
    for prompt, tail in zip(prompts, new, strict=True):
        first = max((i for i, token in enumerate(prompt) if token == end), default=0)
        document = prompt[first:] + tail
        ids_BT = np.zeros((2, 16), np.int32)
        ids_BT[:, : len(document)] = document
        with jax.set_mesh(blueprint.layout.mesh):
            tokens = Tokens.of(put(blueprint.layout, ids_BT, "batch", "seq"))
            best_T = np.asarray(score(params, tokens))[0].argmax(-1)  # the padding is −∞
        start = len(prompt) - first - 1
        assert tail == best_T[start : start + len(tail)].tolist()
    assert new[0] != new[2], "end-of-text before it changed nothing: the document was not seen"


def test_a_prompt_gives_the_same_tokens_in_any_batch() -> None:
    together = run(WIDE, PROMPTS, GREEDY)
    assert together == [run(WIDE, [prompt], GREEDY)[0] for prompt in PROMPTS]


def test_a_row_stops_after_end_of_text_and_the_others_go_on() -> None:
    prompts = [[1, 2, 0], [4], [1, 2, 0, 4]]
    free = run(ONE, prompts, GREEDY)
    end = next(i for i in free[0] if i not in {0, 1, 2, 4})
    stopped = run(ONE, prompts, GREEDY, end_of_text=end)
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(end) + 1] if end in before else before)
    assert min(map(len, stopped)) < max(map(len, stopped))


def test_an_empty_prompt_starts_from_end_of_text() -> None:
    end = 29
    assert run(ONE, [[]], GREEDY, end_of_text=end) == run(ONE, [[end]], GREEDY, end_of_text=end)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        run(ONE, [[1], []], GREEDY)


def test_end_of_text_inside_a_prompt_begins_a_document() -> None:
    end = 29
    alone = run(ONE, [[end, 4, 5]], GREEDY, end_of_text=end)
    assert alone == run(ONE, [[6, 7, 8, end, 4, 5]], GREEDY, end_of_text=end)
    assert alone != run(ONE, [[6, 7, 8, end, 4, 5]], GREEDY)  # one document


def test_prompts_of_similar_lengths_and_other_seeds_share_a_compilation() -> None:
    run(ONE, [[1]], GREEDY)
    before = module.decode._cache_size()
    for length in (2, 9, 16):
        config = dataclasses.replace(GREEDY, seed=length)
        run(ONE, [[1] * length], config, end_of_text=length)
    assert module.decode._cache_size() == before


def test_no_prompts_give_no_tokens() -> None:
    assert run(ONE, [], GREEDY) == []


@pytest.mark.parametrize("bad", [-1, 30, 31])
def test_bad_ids_are_named(bad: int) -> None:
    with pytest.raises(IdError, match=rf"prompt 1: token id {bad} at position \(2,\)"):
        run(ONE, [[1], [1, 2, bad]], GREEDY)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_settings_that_cannot_work_are_named(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        dataclasses.replace(SamplingConfig(), **change).check()


def test_sharded_positions_are_refused() -> None:
    blueprint = Blueprint(VOCAB, TRUNK, layout_on("seq=2", "seq=seq"))
    with pytest.raises(UserError, match="seq="):
        generate(blueprint, {}, [[1]], GREEDY, end_of_text=None)
