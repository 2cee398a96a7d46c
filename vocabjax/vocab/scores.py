"""Scores of a linear head over a row-sharded vocabulary, and what a softmax needs of them.

    u = scale · (h · tableᵀ) + bias         z = cap · tanh(u / cap)         z = −inf where an id may not be predicted

Per chunk of tokens the vocabulary shards exchange three or four numbers per token (maximum, sum of exponentials, target score and, for label smoothing, sum of
scores), as in Megatron-LM's vocabulary-parallel cross-entropy (arXiv:1909.08053, section 3).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.mesh import Layout
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import TokenAxes, row_start

LOWEST = -1e30  # a finite running maximum: a shard of padding alone has no score


class Scoring(NamedTuple):
    """Static settings of a linear head: what turns h · tableᵀ into scores."""

    layout: Layout
    sizes: Sizes
    scale: float = 1.0
    softcap: float | None = None


# Jitted: called eagerly, a `shard_map` would compile anew each time.
@functools.partial(jax.jit, static_argnames="scoring")
def linear_logits(
    scoring: Scoring, h_BTD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None = None
) -> jax.Array:
    """float32 scores [B, T, Vp], sharded over the vocabulary; −inf where an id may not be predicted.

    Args:
      h_BTD: hidden states; their dtype is that of the product's operands.
      table_VD: [Vp, D]; bias_V: [Vp] or None.
    """
    layout = scoring.layout
    axes = TokenAxes.of(layout)
    h_BTD = layout.place(h_BTD, "batch", "seq", None)

    def local(h: jax.Array, table_RD: jax.Array, bias_R: jax.Array | None) -> jax.Array:
        h = axes.gather(h)
        z, _ = local_scores(scoring, axes, h, table_RD.astype(h.dtype), bias_R)
        return z

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            axes.spec,
            layout.spec("vocab", None),
            layout.spec("vocab"),
        ),
        out_specs=score_spec(layout),
    )(h_BTD, table_VD, bias_V)


def score_spec(layout: Layout) -> PartitionSpec:
    """The partition of scores [B, T, Vp]: axes that shard both tokens and rows shard the vocabulary here."""
    rows = layout.axes("vocab")
    batch, seq = (
        tuple(axis for axis in layout.axes(name) if axis not in rows) for name in ("batch", "seq")
    )
    return PartitionSpec(batch or None, seq or None, rows or None)


class ChunkStatistics(NamedTuple):
    """Per token. All but `top` are relative to `top`: what the scores have in common cancels before it can round."""

    top: jax.Array  # the highest score
    log_sum: jax.Array  # lse − top
    target: jax.Array  # the target's score − top
    mean: jax.Array | None  # the mean of the allowed scores − top, where asked for
    row: jax.Array  # the target's row on this device, or out of range
    exp: jax.Array  # [C, R] exponentials of this device's scores, relative to their own highest
    share: jax.Array  # what makes them probabilities


def local_scores(
    scoring: Scoring,
    axes: TokenAxes,
    h: jax.Array,
    table_RD: jax.Array,
    bias_R: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Masked float32 scores of this device's rows [..., R], and dz/du."""
    u = jnp.einsum("...d,rd->...r", h, table_RD, preferred_element_type=jnp.float32) * scoring.scale
    if bias_R is not None:
        u = u + bias_R
    slope = jnp.float32(1.0)
    if scoring.softcap is not None:
        unit = jnp.tanh(u / scoring.softcap)
        u, slope = scoring.softcap * unit, 1 - unit**2
    return mask_rows(scoring.sizes, axes, u, -jnp.inf), slope


def mask_rows(sizes: Sizes, axes: TokenAxes, x_R: jax.Array, other: float) -> jax.Array:
    """[..., R], and `other` where a row may not be predicted."""
    if sizes.predictable == sizes.padded:  # a pass over the scores that nothing needs
        return x_R
    return jnp.where(allowed_rows(sizes, axes, x_R.shape[-1]), x_R, other)


def allowed_rows(sizes: Sizes, axes: TokenAxes, rows: int) -> jax.Array:
    """bool [R]: which of this device's rows may be predicted."""
    start = row_start(axes.rows, rows)
    return lax.dynamic_slice_in_dim(jnp.asarray(sizes.allowed_V), start, rows)


def chunk_statistics(
    axes: TokenAxes, sizes: Sizes, z_CR: jax.Array, targets_C: jax.Array, *, with_mean: bool = False
) -> ChunkStatistics:
    """Over all shards of the vocabulary. `with_mean`: of the scores, too, which only label smoothing needs."""
    rows = z_CR.shape[-1]
    row_C = targets_C - row_start(axes.rows, rows)
    is_here_C = (row_C >= 0) & (row_C < rows)
    row_C = jnp.where(is_here_C, row_C, rows)
    target_C = jnp.take_along_axis(z_CR, jnp.where(is_here_C, row_C, 0)[:, None], axis=-1)[:, 0]
    highest_C = jnp.maximum(z_CR.max(-1), LOWEST)
    centred_CR = z_CR - highest_C[:, None]
    # Held as it is: XLA:CPU would rather take every exponential twice, for the sum and for the gradient.
    exp_CR = lax.optimization_barrier(jnp.exp(centred_CR))
    own = [highest_C, exp_CR.sum(-1), jnp.where(is_here_C, target_C, 0)]
    if with_mean:
        own.append(mask_rows(sizes, axes, centred_CR, 0).sum(-1))
    stacked = jnp.stack(own)
    # One collective, of three or four numbers per token.
    stacked = lax.all_gather(stacked, axes.rows, axis=0) if axes.rows else stacked[None]
    highest, sums, targets, *scores = jnp.moveaxis(stacked, 1, 0)
    top_C = highest.max(0)
    below_SC = highest - top_C  # S: shards of rows
    mean_C = None
    if with_mean:
        allowed_S1 = sizes.allowed_V.reshape(-1, rows).sum(1, dtype=np.float32, keepdims=True)
        mean_C = (scores[0] + allowed_S1 * below_SC).sum(0) / sizes.predictable
    log_sum_C = jnp.log((sums * jnp.exp(below_SC)).sum(0))
    share_C = jnp.exp(highest_C - top_C - log_sum_C)
    return ChunkStatistics(top_C, log_sum_C, targets.sum(0) - top_C, mean_C, row_C, exp_CR, share_C)


def chunk_size(layout: Layout, rows: int, dtype: jax.typing.DTypeLike, chunk: int | None) -> int:
    """How many tokens' scores [C, rows] a device holds at one time: what is asked for, or else what its memory is made for.

    Float32 scores of a chunk should stay in a CPU's cache; where those of 256 tokens do not, they are of 384, as fewer make slow
    matrix products of float32, and of 256 for operands of `dtype` bfloat16, whose products are no slower than those of 384.
    An accelerator reads and writes the table's gradient once per chunk, so its chunks are as large as memory reasonably holds.
    """
    if chunk is not None:
        return chunk
    is_cpu = layout.mesh.devices.flat[0].platform == "cpu"
    budget = 2**24 if is_cpu else 2**29  # bytes
    fitting = budget // (4 * rows)
    if fitting >= 256:
        return min(8192, 2 ** (fitting.bit_length() - 1))
    return 384 if jnp.dtype(dtype).itemsize == 4 else 256


def cut_chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[b, t, ...] → [chunks, C, ...], padded with zeros, for C ≤ chunk as even as possible."""
    size = arrays[0].shape[0] * arrays[0].shape[1]
    count = max(1, -(-size // chunk))
    per_chunk = -(-size // count)

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(size, *x.shape[2:])
        padding = [(0, count * per_chunk - size)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, padding).reshape(count, per_chunk, *x.shape[2:])

    return tuple(cut(x) for x in arrays)


def join_chunks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Back from [chunks, C, k] to [*shape, k], for `shape` that of the tokens that were cut."""
    return x.reshape(-1, x.shape[-1])[: math.prod(shape)].reshape(*shape, x.shape[-1])


def product_gradients(
    d_CR: jax.Array, h_CD: jax.Array, table_RD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """float32 gradients of h and of the table from those of h · tableᵀ; products are of operands in the dtype of h."""
    d_CR = d_CR.astype(h_CD.dtype)
    return (
        jnp.einsum("cr,rd->cd", d_CR, table_RD, preferred_element_type=jnp.float32),
        jnp.einsum("cr,cd->rd", d_CR, h_CD, preferred_element_type=jnp.float32),
    )
