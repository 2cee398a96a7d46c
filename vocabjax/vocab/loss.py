"""Cross-entropy of a linear head over a row-sharded vocabulary, without [B, T, V].

    objective = (1−ε)(lse − z_target) + ε (lse − mean_allowed z) + λ lse²   lse = log Σ exp z, z the scores of `scores.py`
    total     = Σ weight · objective / normaliser

Tokens go through in chunks; while a chunk's logits exist, its gradients are taken too ("gradient in forward": three
matrix products instead of the four of recomputation); the reductions of dh and dtable stand outside the loop.
Since the gradients are those of one scalar, only `total` is differentiable, and only in h, table and bias.

Source of z-loss: PaLM (arXiv:2204.02311, section 5).
"""

import functools
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.interfaces import Loss, Objective
from vocabjax.vocab.labels import count_labels, inverse_or_zero, label_weights, valid_labels
from vocabjax.vocab.scores import (
    ChunkStatistics,
    Scoring,
    chunk_size,
    chunk_statistics,
    cut_chunks,
    join_chunks,
    local_scores,
    mask_rows,
)
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import TokenAxes


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
    inputs, weight = _inputs(scoring, h_BTD, table_VD, bias_V, targets_BT, weights_BT, normalizer)
    sums = _cross_entropy(scoring, objective, inputs)
    return Loss(*sums, weight, *count_labels(scoring.sizes, targets_BT))


@functools.partial(jax.jit, static_argnames=("scoring", "objective"))
def accumulate_cross_entropy(
    scoring: Scoring,
    objective: Objective,
    h_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array | None,
    into: Accumulator,
    *,
    bias_V: jax.Array | None = None,
    normalizer: jax.Array | None = None,
) -> tuple[Loss, Accumulator]:
    """`linear_cross_entropy`, whose gradient of table and bias goes into an accumulator instead of through `jax.grad`.

    For gradient accumulation: what `jax.grad` gives of a table is an array of its own, to be reduced and added up for each
    microbatch; this adds where the sum already lies. `total` is differentiable in h alone, and must enter what is minimised
    with a factor of 1, since that is what the accumulator takes for granted.
    """
    inputs, weight = _inputs(scoring, h_BTD, table_VD, bias_V, targets_BT, weights_BT, normalizer)
    sums, into = _accumulate(scoring, objective, inputs, into)
    return Loss(*sums, weight, *count_labels(scoring.sizes, targets_BT)), into


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
        (weight_BT * total_BT).sum()
        * inverse_or_zero(weight if normalizer is None else normalizer),
        (weight_BT * nll_BT).sum(),
        (weight_BT * z2_BT).sum(),
        weight,
        *count_labels(sizes, targets_BT),
    )


def _score_gradients(objective: Objective, sizes: Sizes, at: ChunkStatistics) -> jax.Array:
    """d objective / dz: (1 + 2λ lse) p − (1−ε) [is the target] − ε / predictable."""
    share_C = at.share
    if objective.z_loss:
        share_C *= 1 + 2 * objective.z_loss * (at.top + at.log_sum)
    dz_CR = at.exp * share_C[:, None]
    epsilon = objective.label_smoothing
    is_target_CR = jnp.arange(dz_CR.shape[-1]) == at.row[:, None]
    dz_CR -= jnp.where(is_target_CR, 1 - epsilon, 0.0)
    return dz_CR - epsilon / sizes.predictable if epsilon else dz_CR


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


def _inputs(
    scoring: Scoring,
    h_BTD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_BT: jax.Array,
    weights_BT: jax.Array | None,
    normalizer: jax.Array | None,
) -> tuple[_Inputs, jax.Array]:
    """And the sum of the weights."""
    layout = scoring.layout
    h_BTD = layout.place(h_BTD, "batch", "seq", None)
    targets_BT = layout.place(targets_BT, "batch", "seq")
    weight_BT = label_weights(scoring.sizes, targets_BT, weights_BT)
    weight_BT = lax.stop_gradient(layout.place(weight_BT, "batch", "seq"))
    weight = weight_BT.sum()
    divisor = weight if normalizer is None else lax.stop_gradient(normalizer)
    inverse = inverse_or_zero(divisor)
    return _Inputs(h_BTD, table_VD, bias_V, targets_BT, weight_BT, inverse), weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(scoring: Scoring, objective: Objective, inputs: _Inputs) -> _Sums:
    return _run(scoring, objective, inputs)[0]


def _cross_entropy_fwd(
    scoring: Scoring, objective: Objective, inputs: _Inputs
) -> tuple[_Sums, _Gradients]:
    layout, table_VD, bias_V = scoring.layout, inputs.table_VD, inputs.bias_V
    into = Accumulator.zeros(layout, table_VD, bias_V)
    sums, dh_BTD, into = _run(scoring, objective, inputs, into)
    dtable_VD, dbias_V = into.total(layout)
    return sums, (dh_BTD, dtable_VD.astype(table_VD.dtype), dbias_V)


def _cross_entropy_bwd(
    scoring: Scoring, objective: Objective, gradients: _Gradients, cotangents: _Sums
) -> tuple[_Inputs]:
    dh, dtable, dbias = jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), gradients)
    nothing: Any = None
    return (_Inputs(dh, dtable, dbias, nothing, nothing, nothing),)


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _accumulate(
    scoring: Scoring, objective: Objective, inputs: _Inputs, into: Accumulator
) -> tuple[_Sums, Accumulator]:
    return _accumulate_fwd(scoring, objective, inputs, into)[0]


def _accumulate_fwd(
    scoring: Scoring, objective: Objective, inputs: _Inputs, into: Accumulator
) -> tuple[tuple[_Sums, Accumulator], jax.Array]:
    sums, dh_BTD, into = _run(scoring, objective, inputs, into)
    return (sums, into), dh_BTD


def _accumulate_bwd(
    scoring: Scoring, objective: Objective, dh_BTD: jax.Array, cotangents: tuple[_Sums, Any]
) -> tuple[_Inputs, None]:
    dh_BTD = (cotangents[0][0] * dh_BTD).astype(dh_BTD.dtype)
    nothing: Any = None
    return _Inputs(dh_BTD, nothing, nothing, nothing, nothing, nothing), None


_accumulate.defvjp(_accumulate_fwd, _accumulate_bwd)


@overload
def _run(scoring: Scoring, objective: Objective, inputs: _Inputs) -> tuple[_Sums, None, None]: ...


@overload
def _run(
    scoring: Scoring, objective: Objective, inputs: _Inputs, into: Accumulator
) -> tuple[_Sums, jax.Array, Accumulator]: ...


def _run(
    scoring: Scoring, objective: Objective, inputs: _Inputs, into: Accumulator | None = None
) -> tuple[_Sums, jax.Array | None, Accumulator | None]:
    """The sums and, with an accumulator, the gradient of h and the accumulator with those of table and bias in it."""
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
        into: Accumulator | None,
    ) -> tuple[_Sums, jax.Array | None, Accumulator | None]:
        h, targets, weight = axes.gather(h), axes.gather(targets), axes.gather(weight)
        h = jnp.where(weight[..., None] != 0, h, 0)  # NaN where nothing counts must not spread
        cast_RD = table_RD.astype(h.dtype)
        chunk = chunk_size(layout, len(table_RD), objective.chunk)
        # Of one chunk, XLA:CPU would unroll the loop, and then cannot multiply the transposed bfloat16.
        chunk = min(chunk, -(-targets.size // 2))
        h_KCD, t_KC, w_KC = cut_chunks(chunk, h, targets, weight)
        # Transposed before the loop: in it, XLA would fold it into the product, which a CPU does at half the speed.
        hT_KDC = None if into is None else jnp.swapaxes(h_KCD, 1, 2)

        def body(carry: Any, part: Any) -> tuple[Any, jax.Array | None]:
            sums, into = carry
            h_CD, t_C, w_C, hT_DC = part
            z_CR, slope_CR = local_scores(scoring, axes, h_CD, cast_RD, bias_R)
            at = chunk_statistics(axes, sizes, z_CR, t_C, with_mean=epsilon > 0)
            lse_C, nll_C = at.top + at.log_sum, at.log_sum - at.target
            total_C = nll_C
            if at.mean is not None:
                total_C = (1 - epsilon) * nll_C + epsilon * (at.log_sum - at.mean)
            if z_loss:  # else lse² may overflow without harm
                total_C += z_loss * lse_C**2
            sums += jnp.stack(
                [jnp.where(w_C != 0, w_C * x, 0).sum() for x in (total_C, nll_C, lse_C**2)]
            )
            if into is None:
                return (sums, None), None
            du_CR = _score_gradients(objective, sizes, at) * slope_CR
            # Not only p = 0: a softcapped slope or a banned target must not leak through a masked row.
            du_CR = mask_rows(sizes, axes, du_CR * (w_C * inverse)[:, None], 0)
            d_CR = (du_CR * scoring.scale).astype(h_CD.dtype)
            dh_CD = jnp.einsum("cr,rd->cd", d_CR, cast_RD, preferred_element_type=jnp.float32)
            more = jnp.einsum("dc,cr->dr", hT_DC, d_CR, preferred_element_type=jnp.float32)
            bias = None if into.bias is None else into.bias + du_CR.sum(0)
            return (sums, Accumulator(into.table + more, bias)), dh_CD

        start = (jnp.zeros(3, jnp.float32), into)
        (sums, into), dh = lax.scan(body, start, (h_KCD, t_KC, w_KC, hT_KDC))
        total, nll, z = lax.psum(sums, axes.only_tokens)
        if dh is not None:
            dh = axes.reduce(join_chunks(dh, targets.shape)).astype(h.dtype)
        return (total * inverse, nll, z), dh, into

    parts = None if into is None else Accumulator.specs(layout)
    results: tuple[_Sums, jax.Array | None, Accumulator | None] = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            *(axes.spec, layout.spec("vocab", None), layout.spec("vocab")),
            *(axes.spec, axes.spec, PartitionSpec(), parts),
        ),
        out_specs=(PartitionSpec(), axes.spec, parts),
        check_vma=False,
    )(*inputs, into)
    return results
