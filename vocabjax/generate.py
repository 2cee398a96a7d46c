"""Sampling with a key/value cache: one prefill, then one compiled loop of single-token steps.

Prompts are padded on the left to a common length, so that every row continues at the same index of the cache. Padding is a
document of its own (segment −1): attention never crosses documents, so a prompt gives the same tokens in any batch. The
common length is a power of two, so prompts of similar lengths share one compilation.

Each row draws from a key of its own, folded from the seed, its index and the step; noise is drawn per logical id. Samples
therefore do not depend on the mesh, the padding of the vocabulary, or the other rows.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vocabjax.errors import IdError, UserError
from vocabjax.model import Blueprint, Params
from vocabjax.trunk import Cache
from vocabjax.vocab.interfaces import Tokens

SHORTEST = 16  # prompts are padded at least to this length
NOTHING = -1  # in the output: the row had already ended


class _Loop(NamedTuple):
    """Decoding so far: `step` ids of each row."""

    step: jax.Array
    id_B: jax.Array  # the last one, not fed back yet
    past_BH: jax.Array  # the H before it
    is_done_B: jax.Array
    new_BN: jax.Array
    cache: Cache


@dataclass(frozen=True)
class SamplingConfig:
    """How to sample.

    Attributes:
      max_tokens: new ids per prompt, at most.
      temperature: divides the scores; 0: always the most probable id.
      top_k: sample from the k most probable ids; None: from all.
      top_p: sample from the fewest ids whose probabilities sum to at least p, after top_k; None: from all.
      seed: of all randomness.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises UserError for settings that cannot work."""
        for name, least in (("max_tokens", 1), ("seed", 0)):
            if not least <= getattr(self, name) < 2**31:
                raise UserError(
                    f"{name} = {getattr(self, name)} must be at least {least} and below 2^31"
                )
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature = {self.temperature} must be 0 (greedy) or a positive number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k = {self.top_k} must be at least 1, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p} must be in (0, 1], or None")


def generate(
    blueprint: Blueprint,
    params: Params,
    prompts: Sequence[Sequence[int]],
    config: SamplingConfig,
    *,
    end_of_text: int | None,
) -> list[list[int]]:
    """Continues every prompt.

    Args:
      blueprint, params: the model.
      prompts: token ids; every process gives the same ones.
      end_of_text: the id that begins and ends documents. A row stops after it, an empty prompt starts from it, and
        inside a prompt it begins a new document, as in training. None: there is none.

    Returns:
      The new ids of each prompt, up to `config.max_tokens`; the last one is `end_of_text` where the row ended. Never a
      padded or banned id.

    Raises:
      UserError: settings that cannot work; an empty prompt without end_of_text; a layout that shards positions.
      IdError: an id outside [0, V); names the prompt and the position.
    """
    config.check()
    layout = blueprint.layout
    if layout.shards("seq") > 1:
        raise UserError(
            "sampling decodes one position at a time, which cannot be sharded: use --rules seq="
        )
    if not prompts:
        return []
    rows = [_checked(blueprint, i, prompt, end_of_text) for i, prompt in enumerate(prompts)]
    shards = layout.shards("batch")
    host = _left_padded(rows, -(-len(rows) // shards) * shards, end_of_text)
    with jax.set_mesh(layout.mesh):
        tokens = Tokens(*[jax.device_put(x, layout.sharding("batch", None)) for x in host])
        # Seed and end are arguments, not constants: others need no other compilation.
        key = jax.random.key(config.seed)
        end = jnp.int32(NOTHING if end_of_text is None else end_of_text)
        new_BN = decode(blueprint, replace(config, seed=0), params, tokens, key, end)
    return [[int(i) for i in row if i != NOTHING] for row in np.asarray(new_BN)[: len(rows)]]


def filter_scores(z_BV: jax.Array, config: SamplingConfig) -> jax.Array:
    """float32 scores [B, V] at the temperature (positive); −inf for ids that top_k or top_p leave out.

    Of equal scores, lower ids come first. At least one id stays. The vocabulary must not be sharded.
    """
    # From the maximum down, and by no denormal (flushed to 0): the smallest temperature gives no NaN.
    z_BV = (z_BV - z_BV.max(-1, keepdims=True)) / max(config.temperature, 1e-30)
    if config.top_k is None and config.top_p in (None, 1):
        return z_BV
    order_BV = jnp.argsort(z_BV, axis=-1, descending=True)
    ranked_BV = jnp.take_along_axis(z_BV, order_BV, -1)
    is_kept_BV = jnp.arange(z_BV.shape[-1]) < (config.top_k or z_BV.shape[-1])
    if config.top_p not in (None, 1):
        p_BV = jax.nn.softmax(jnp.where(is_kept_BV, ranked_BV, -jnp.inf), axis=-1)
        # An id stays while those before it fall short of p.
        is_kept_BV &= jnp.cumsum(p_BV, -1) - p_BV < config.top_p
    ranked_BV = jnp.where(is_kept_BV, ranked_BV, -jnp.inf)
    return jnp.take_along_axis(ranked_BV, jnp.argsort(order_BV, axis=-1), -1)


def _checked(
    blueprint: Blueprint, index: int, prompt: Sequence[int], end_of_text: int | None
) -> np.ndarray:
    if len(prompt) == 0:
        if end_of_text is None:
            raise UserError(
                f"prompt {index} is empty, and there is no end-of-text id to start from"
            )
        prompt = [end_of_text]
    for position, token in enumerate(prompt):
        if isinstance(token, int) and token >= 2**31:  # NumPy may have no integer for it
            raise IdError(
                f"prompt {index}: token id {token} at position {position} is outside "
                f"[0, {blueprint.sizes.logical})"
            )
    ids_T = np.asarray(prompt)
    try:
        blueprint.sizes.check_ids(ids_T)
    except IdError as error:
        raise IdError(f"prompt {index}: {error}") from None
    return ids_T.astype(np.int32)


def _left_padded(
    rows: Sequence[np.ndarray], batch: int, end_of_text: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, segment and position, int32 [batch, T]; rows beyond the prompts are padding alone."""
    longest = max(len(row) for row in rows)
    length = max(SHORTEST, 1 << (longest - 1).bit_length())
    ids_BT = np.zeros((batch, length), np.int32)
    segment_BT = np.full((batch, length), -1, np.int32)
    position_BT = np.zeros((batch, length), np.int32)
    for i, row in enumerate(rows):
        offset_T = np.arange(len(row))
        is_start_T = row == end_of_text
        first = length - len(row)
        ids_BT[i, first:] = row
        segment_BT[i, first:] = np.cumsum(is_start_T)
        position_BT[i, first:] = offset_T - np.maximum.accumulate(is_start_T * offset_T)
    return ids_BT, segment_BT, position_BT


@functools.partial(jax.jit, static_argnames=("blueprint", "config"))
def decode(
    blueprint: Blueprint,
    config: SamplingConfig,
    params: Params,
    tokens: Tokens,
    key: jax.Array,
    end: jax.Array,
) -> jax.Array:
    """New ids int32 [B, max_tokens], replicated; `NOTHING` after a row's end."""
    layout = blueprint.layout
    model = blueprint.bind(params)
    batch, length = tokens.ids_BT.shape
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
        key, layout.place(jnp.arange(batch, dtype=jnp.int32), "batch")
    )

    def choose(h_BTD: jax.Array, step: jax.Array) -> jax.Array:
        """The id after the last position, int32 [B]."""
        with jax.named_scope("scores"):
            z_BTV = model.vocab.logits(h_BTD[:, -1:])
            # Sorts and cumulative sums need the vocabulary in one piece; one position of it is small.
            z_BV = layout.place(z_BTV[:, 0], "batch", None)[:, : blueprint.sizes.logical]
        if config.temperature == 0:
            return jnp.argmax(z_BV, -1).astype(jnp.int32)
        step_keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
        draw = jax.vmap(jax.random.categorical)
        return draw(step_keys_B, filter_scores(z_BV, config)).astype(jnp.int32)

    def feed(tokens: Tokens, cache: Cache) -> tuple[jax.Array, Cache]:
        h_BTD, after = model.hidden(tokens, cache)
        assert after is not None  # because a cache was given
        return h_BTD, after

    def is_running(loop: _Loop) -> jax.Array:
        return (loop.step < config.max_tokens) & ~loop.is_done_B.all()

    def advance(loop: _Loop) -> _Loop:
        id_B1, position_B1 = (
            layout.place(loop.id_B[:, None], "batch", None),
            tokens.position_BT[:, -1:] + loop.step,
        )
        last = Tokens(id_B1, tokens.segment_BT[:, -1:], position_B1, loop.past_BH)
        h_BTD, cache = feed(last, loop.cache)
        id_B = choose(h_BTD, loop.step)
        return _Loop(
            loop.step + 1,
            id_B,
            layout.place(jnp.concatenate([loop.past_BH, id_B1], axis=1)[:, 1:], "batch", None),
            loop.is_done_B | (id_B == end),
            loop.new_BN.at[:, loop.step].set(jnp.where(loop.is_done_B, NOTHING, id_B)),
            cache,
        )

    # The last id is never fed back.
    cache = model.init_cache(batch, length + config.max_tokens - 1)
    h_BTD, cache = feed(tokens, cache)
    id_B = choose(h_BTD, jnp.int32(0))
    is_done_B = (id_B == end) | (tokens.segment_BT[:, -1] < 0)  # rows of padding alone
    new_BN = jnp.full(
        (batch, config.max_tokens), NOTHING, jnp.int32, out_sharding=layout.sharding("batch", None)
    )
    new_BN = new_BN.at[:, 0].set(id_B)
    past_BH = layout.place(_last_ids(tokens, model.vocab.history), "batch", None)
    start = _Loop(jnp.int32(1), id_B, past_BH, is_done_B, new_BN, cache)
    return layout.place(lax.while_loop(is_running, advance, start).new_BN, None, None)


def _last_ids(tokens: Tokens, history: int) -> jax.Array:
    """The last `history` ids of each row, −1 where they are of another document than the last one or padding."""
    is_same_BT = tokens.segment_BT == tokens.segment_BT[:, -1:]
    past_BT = jnp.where(is_same_BT, tokens.ids_BT, -1)
    past_BT = jnp.pad(past_BT, ((0, 0), (history, 0)), constant_values=-1)
    return past_BT[:, past_BT.shape[1] - history :]
