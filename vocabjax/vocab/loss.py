"""Cross-entropy of a linear head over a row-sharded vocabulary, without [B, T, V].

    u = scale · (h · tableᵀ) + bias         z = cap · tanh(u / cap)         z = −inf where an id may not be predicted
    objective = (1−ε)(lse − z_target) + ε (lse − mean_allowed z) + λ lse²   lse = log Σ exp z
    total     = Σ weight · objective / normaliser

Tokens go through in chunks; while a chunk's logits exist, its gradients are taken too ("gradient in forward": three
matrix products instead of the four of recomputation). Per chunk the vocabulary shards exchange four numbers per token
(maximum, sum of exponentials, target score, sum of scores); the reductions of dh and dtable stand outside the loop.
Since the gradients are those of one scalar, only `total` is differentiable, and only in h, table and bias.

Source: Megatron-LM's vocabulary-parallel cross-entropy (arXiv:1909.08053, section 3) for the sharding; z-loss from PaLM
(arXiv:2204.02311, section 5).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.ids import IGNORE
from vocabjax.mesh import Layout
from vocabjax.vocab.interfaces import Loss, Objective
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
    tokens = [
        tuple(axis for axis in layout.axes(name) if axis not in axes.rows)
        for name in ("batch", "seq")
    ]

    def local(h: jax.Array, table_RD: jax.Array, bias_R: jax.Array | None) -> jax.Array:
        h = axes.gather(h)
        z, _ = _scores(scoring, axes, h, table_RD.astype(h.dtype), bias_R)
        return z

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            axes.spec,
            layout.spec("vocab", None),
            layout.spec("vocab"),
        ),
        out_specs=PartitionSpec(tokens[0] or None, tokens[1] or None, axes.rows or None),
    )(h_BTD, table_VD, bias_V)


@functools.partial(jax.jit, static_argnames=("scoring", "objective"))
def linear_cross_entropy(
    scoring: Scoring,
    objective: Objective,
    h_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array | None = None,
    *,
    bias_V: jax.Array | None = None,
    normalizer: jax.Array | None = None,
) -> Loss:
    """The loss of a linear head. See the module's docstring for the equation.

    Args:
      h_BTD: hidden states, float32 or bfloat16; scores and sums are float32 either way.
      table_VD: float32 [Vp, D], rows sharded over the vocabulary axis.
      targets_BT: int32 labels. −100 is ignored; any other label that may not be predicted is ignored and counted in
        `invalid`.
      weights_BT: float32, not differentiable; None: 1.
      normalizer: what `total` is divided by; None: Σ weight over the whole batch. Pass the sum over all microbatches
        when accumulating gradients. 0 gives a total of 0 and zero gradients.
    """
    layout = scoring.layout
    h_BTD = layout.place(h_BTD, "batch", "seq", None)
    targets_BT = layout.place(targets_BT, "batch", "seq")
    weight_BT = label_weights(scoring.sizes, targets_BT, weights_BT)
    weight_BT = lax.stop_gradient(layout.place(weight_BT, "batch", "seq"))
    weight = weight_BT.sum()
    divisor = weight if normalizer is None else lax.stop_gradient(normalizer)
    total, nll, z = _cross_entropy(
        scoring,
        objective,
        _Inputs(h_BTD, table_VD, bias_V, targets_BT, weight_BT, _inverse(divisor)),
    )
    return Loss(total, nll, z, weight, *_count_labels(scoring.sizes, targets_BT))


@functools.partial(jax.jit, static_argnames=("scoring", "chunk"))
def linear_nll(
    scoring: Scoring,
    chunk: int,
    h_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    bias_V: jax.Array | None = None,
) -> jax.Array:
    """float32 [B, T]: −log p(target) in nats, 0 where the label is not valid. For evaluation; not differentiable."""
    layout = scoring.layout
    axes = TokenAxes.of(layout)

    def local(
        h: jax.Array, table_RD: jax.Array, bias_R: jax.Array | None, targets: jax.Array
    ) -> jax.Array:
        h, gathered = axes.gather(h), axes.gather(targets)
        table_RD = table_RD.astype(h.dtype)

        def body(_: None, part: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
            h_CD, t_C = part
            z_CR, _slope = _scores(scoring, axes, h_CD, table_RD, bias_R)
            at = _statistics(axes, scoring.sizes, z_CR, t_C)
            return None, at.log_sum - at.target

        pieces = _chunks(chunk, h, gathered)
        _, nll = lax.scan(body, None, pieces)
        nll = nll.reshape(-1)[: gathered.size].reshape(gathered.shape)
        return jnp.where(valid_labels(scoring.sizes, targets), axes.keep(nll), 0)

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            axes.spec,
            layout.spec("vocab", None),
            layout.spec("vocab"),
            axes.spec,
        ),
        out_specs=axes.spec,
        check_vma=False,
    )(
        layout.place(h_BTD, "batch", "seq", None),
        table_VD,
        bias_V,
        layout.place(targets_BT, "batch", "seq"),
    )


def reference_cross_entropy(
    sizes: Sizes,
    objective: Objective,
    z_BTV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array | None = None,
    *,
    normalizer: jax.Array | None = None,
) -> Loss:
    """The same loss from whole logits [B, T, Vp], by automatic differentiation: the oracle of `linear_cross_entropy`.

    Plain operations that partition over a sharded vocabulary by themselves. Differentiable in everything but integers.
    """
    is_valid_BT = valid_labels(sizes, targets_BT)
    weight_BT = label_weights(sizes, targets_BT, weights_BT)
    allowed_V = jnp.asarray(sizes.allowed_V)
    lse_BT = jax.nn.logsumexp(z_BTV, axis=-1)
    is_target_BTV = targets_BT[..., None] == jnp.arange(sizes.padded)
    target_BT = jnp.where(is_target_BTV & allowed_V, z_BTV, 0).sum(-1)
    mean_BT = jnp.where(allowed_V, z_BTV, 0).sum(-1) / sizes.predictable
    nll_BT = jnp.where(is_valid_BT, lse_BT - target_BT, 0)
    smooth_BT = jnp.where(is_valid_BT, lse_BT - mean_BT, 0)
    epsilon = objective.label_smoothing
    z2_BT = lse_BT**2
    total_BT = (1 - epsilon) * nll_BT + epsilon * smooth_BT + objective.z_loss * z2_BT
    weight = weight_BT.sum()
    return Loss(
        (weight_BT * total_BT).sum() * _inverse(weight if normalizer is None else normalizer),
        (weight_BT * nll_BT).sum(),
        (weight_BT * z2_BT).sum(),
        weight,
        *_count_labels(sizes, targets_BT),
    )


def valid_labels(sizes: Sizes, targets_BT: jax.Array) -> jax.Array:
    """bool [B, T]: labels that may be predicted."""
    is_id_BT = (targets_BT >= 0) & (targets_BT < sizes.logical)
    if not sizes.banned:
        return is_id_BT
    # A comparison that is reduced as it is made: unlike a lookup it needs no sharding to be stated.
    is_banned_BTK = targets_BT[..., None] == jnp.asarray(sizes.banned, jnp.int32)
    return is_id_BT & ~is_banned_BTK.any(-1)


def _count_labels(sizes: Sizes, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 scalars: labels that may be predicted, and those that are neither that nor −100."""
    is_valid_BT = valid_labels(sizes, targets_BT)
    invalid = ((targets_BT != IGNORE) & ~is_valid_BT).sum()
    return is_valid_BT.sum().astype(jnp.float32), invalid.astype(jnp.float32)


def _inverse(divisor: jax.Array) -> jax.Array:
    """1 / divisor, and 0 for 0."""
    return jnp.where(divisor == 0, 0.0, 1 / jnp.where(divisor == 0, 1.0, divisor))


def label_weights(
    sizes: Sizes, targets_BT: jax.Array, weights_BT: jax.Array | None = None
) -> jax.Array:
    """float32 [B, T]: the weight of each token, 0 where its label is not valid (even if the weight is NaN there)."""
    weights = 1.0 if weights_BT is None else weights_BT.astype(jnp.float32)
    return jnp.where(valid_labels(sizes, targets_BT), weights, 0.0)


class _Statistics(NamedTuple):
    """Per token. All but `top` are relative to `top`: what the scores have in common cancels before it can round."""

    top: jax.Array  # the highest score
    log_sum: jax.Array  # lse − top
    target: jax.Array  # the target's score − top
    mean: jax.Array  # the mean of the allowed scores − top
    row: jax.Array  # the target's row on this device, or out of range


def _scores(
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
    return jnp.where(_allowed(scoring.sizes, axes, table_RD.shape[0]), u, -jnp.inf), slope


def _allowed(sizes: Sizes, axes: TokenAxes, rows: int) -> jax.Array:
    """bool [R]: which of this device's rows may be predicted."""
    start = row_start(axes.rows, rows)
    return lax.dynamic_slice_in_dim(jnp.asarray(sizes.allowed_V), start, rows)


def _statistics(
    axes: TokenAxes, sizes: Sizes, z_CR: jax.Array, targets_C: jax.Array
) -> _Statistics:
    rows = z_CR.shape[-1]
    row_C = targets_C - row_start(axes.rows, rows)
    is_here_C = (row_C >= 0) & (row_C < rows)
    row_C = jnp.where(is_here_C, row_C, rows)
    target_C = jnp.take_along_axis(z_CR, jnp.where(is_here_C, row_C, 0)[:, None], axis=-1)[:, 0]
    highest_C = jnp.maximum(z_CR.max(-1), LOWEST)
    centred_CR = z_CR - highest_C[:, None]
    stacked = jnp.stack(
        [
            highest_C,
            jnp.exp(centred_CR).sum(-1),
            jnp.where(is_here_C, target_C, 0),
            jnp.where(jnp.isfinite(z_CR), centred_CR, 0).sum(-1),
        ]
    )
    # One collective, of four numbers per token.
    stacked = lax.all_gather(stacked, axes.rows, axis=0) if axes.rows else stacked[None]
    highest, sums, targets, scores = jnp.moveaxis(stacked, 1, 0)
    top_C = highest.max(0)
    below_SC = highest - top_C  # S: shards of rows
    allowed_S1 = sizes.allowed_V.reshape(-1, rows).sum(1, dtype=np.float32, keepdims=True)
    return _Statistics(
        top_C,
        jnp.log((sums * jnp.exp(below_SC)).sum(0)),
        targets.sum(0) - top_C,
        (scores + allowed_S1 * below_SC).sum(0) / sizes.predictable,
        row_C,
    )


def _score_gradients(
    objective: Objective, sizes: Sizes, z_CR: jax.Array, at: _Statistics
) -> jax.Array:
    """d objective / dz: (1 + 2λ lse) p − (1−ε) [is the target] − ε / predictable."""
    p_CR = jnp.exp(z_CR - at.top[:, None] - at.log_sum[:, None])
    is_target_CR = jnp.arange(z_CR.shape[-1]) == at.row[:, None]
    dz_CR = p_CR * (1 + 2 * objective.z_loss * (at.top + at.log_sum)[:, None])
    dz_CR -= jnp.where(is_target_CR, 1 - objective.label_smoothing, 0.0)
    return dz_CR - objective.label_smoothing / sizes.predictable


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[b, t, ...] → [chunks, C, ...], padded with zeros, for C ≤ chunk as even as possible."""
    size = arrays[0].shape[0] * arrays[0].shape[1]
    count = max(1, -(-size // chunk))
    per_chunk = -(-size // count)

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(size, *x.shape[2:])
        padding = [(0, count * per_chunk - size)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, padding).reshape(count, per_chunk, *x.shape[2:])

    return tuple(cut(x) for x in arrays)


_Sums = tuple[jax.Array, jax.Array, jax.Array]  # total, nll, z
_Gradients = tuple[jax.Array, jax.Array, jax.Array | None]  # of h, table, bias


class _Inputs(NamedTuple):
    """What the loss is computed from; only the first three are differentiable."""

    h_BTD: jax.Array
    table_VD: jax.Array
    bias_V: jax.Array | None
    targets_BT: jax.Array
    weight_BT: jax.Array
    inverse: jax.Array  # of the normaliser


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(scoring: Scoring, objective: Objective, inputs: _Inputs) -> _Sums:
    return _run(scoring, objective, inputs, with_gradients=False)[0]


def _cross_entropy_fwd(
    scoring: Scoring, objective: Objective, inputs: _Inputs
) -> tuple[_Sums, _Gradients | None]:
    return _run(scoring, objective, inputs, with_gradients=True)


def _cross_entropy_bwd(
    scoring: Scoring, objective: Objective, gradients: _Gradients, cotangents: _Sums
) -> tuple[tuple[jax.Array | None, ...]]:
    dh, dtable, dbias = jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), gradients)
    return (_Inputs(dh, dtable, dbias, None, None, None),)  # type: ignore[arg-type]  # no gradient


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _run(
    scoring: Scoring, objective: Objective, inputs: _Inputs, *, with_gradients: bool
) -> tuple[_Sums, _Gradients | None]:
    layout, sizes = scoring.layout, scoring.sizes
    axes = TokenAxes.of(layout)
    epsilon, z_loss = objective.label_smoothing, objective.z_loss

    def local(
        h: jax.Array,
        table_RD: jax.Array,
        bias_R: jax.Array | None,
        targets: jax.Array,
        weight: jax.Array,
        inverse: jax.Array,
    ) -> tuple[_Sums, _Gradients | None]:
        h, targets, weight = axes.gather(h), axes.gather(targets), axes.gather(weight)
        shape, dtype = h.shape, h.dtype
        cast_RD = table_RD.astype(dtype)
        rows = table_RD.shape[0]
        allowed_R = _allowed(sizes, axes, rows)

        def body(carry: Any, part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array | None]:
            sums, gradients = carry
            h_CD, t_C, w_C = part
            h_CD = jnp.where(w_C[:, None] != 0, h_CD, 0)  # NaN where nothing counts must not spread
            z_CR, slope_CR = _scores(scoring, axes, h_CD, cast_RD, bias_R)
            at = _statistics(axes, sizes, z_CR, t_C)
            lse_C, nll_C = at.top + at.log_sum, at.log_sum - at.target
            total_C = (1 - epsilon) * nll_C + epsilon * (at.log_sum - at.mean)
            if z_loss:  # else lse² may overflow without harm
                total_C += z_loss * lse_C**2
            sums += jnp.stack(
                [jnp.where(w_C != 0, w_C * x, 0).sum() for x in (total_C, nll_C, lse_C**2)]
            )
            if gradients is None:
                return (sums, None), None
            du_CR = _score_gradients(objective, sizes, z_CR, at) * slope_CR
            # Not only p = 0: a softcapped slope or a banned target must not leak through a masked row.
            du_CR = jnp.where(allowed_R, du_CR * (w_C * inverse)[:, None], 0)
            dtable_RD, dbias_R = gradients
            scaled_CR = (du_CR * scoring.scale).astype(dtype)
            dh_CD = jnp.einsum("cr,rd->cd", scaled_CR, cast_RD, preferred_element_type=jnp.float32)
            dtable_RD += jnp.einsum(
                "cr,cd->rd", scaled_CR, h_CD, preferred_element_type=jnp.float32
            )
            return (sums, (dtable_RD, dbias_R + du_CR.sum(0))), dh_CD

        zeros = (jnp.zeros(table_RD.shape, jnp.float32), jnp.zeros(rows, jnp.float32))
        (sums, gradients), dh = lax.scan(
            body,
            (jnp.zeros(3, jnp.float32), zeros if with_gradients else None),
            _chunks(objective.chunk, h, targets, weight),
        )
        total, nll, z = lax.psum(sums, axes.only_tokens)
        if gradients is None or dh is None:
            return (total * inverse, nll, z), None
        dtable_RD, dbias_R = lax.psum(gradients, axes.only_tokens)
        dh = dh.reshape(-1, shape[-1])[: shape[0] * shape[1]].reshape(shape)
        return (total * inverse, nll, z), (
            axes.reduce(dh).astype(dtype),
            dtable_RD.astype(table_RD.dtype),
            None if bias_R is None else dbias_R.astype(bias_R.dtype),
        )

    table_spec, bias_spec = layout.spec("vocab", None), layout.spec("vocab")
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(axes.spec, table_spec, bias_spec, axes.spec, axes.spec, PartitionSpec()),
        out_specs=(PartitionSpec(), (axes.spec, table_spec, bias_spec) if with_gradients else None),
        check_vma=False,
    )(*inputs)
