"""Cross-entropy of a linear head over a row-sharded vocabulary, without [B, T, V].

    objective = (1−ε)(lse − z_target) + ε (lse − mean_allowed z) + λ lse²   lse = log Σ exp z, z the scores of `scores.py`
    total     = Σ weight · objective / normaliser

Tokens go through in chunks; while a chunk's logits exist, its gradients are taken too ("gradient in forward": three
matrix products instead of the four of recomputation); the reductions of dh and dtable stand outside the loop.
Since the gradients are those of one scalar, only `total` is differentiable: in h, table, bias, weights and normaliser.
Where each token has a cotangent of its own (`reduction="none"`), the backward recomputes: `per_token.py`.

Source of z-loss: PaLM (arXiv:2204.02311, section 5).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.vocab.accumulator import Accumulator
from vocabjax.vocab.interfaces import Loss, Objective
from vocabjax.vocab.labels import (
    count_labels,
    inverse_or_zero,
    label_weights,
    valid_labels,
    where_counted,
)
from vocabjax.vocab.per_token import per_token
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


@functools.partial(jax.jit, static_argnames=("scoring", "objective", "reduction"))
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
    reduction: Literal["mean", "none"] = "mean",
) -> Loss:
    """The loss of a linear head. See the module's docstring for the equation.

    Args:
      h_BTD: hidden states, float32 or bfloat16; scores and sums are float32 either way.
      table_VD: float32 [Vp, D], rows sharded over the vocabulary axis (and brought there from elsewhere).
      targets_BT: int32 labels. −100 is ignored; any other label that may not be predicted is ignored and counted in
        `invalid`.
      weights_BT: float32; None: 1. A token of weight 0 is left out, whatever its hidden state holds: its objective counts as
        0, also in the gradient of the weight.
      normalizer: what `total` is divided by; None: Σ weight over the whole batch. Pass the sum over all microbatches
        when accumulating gradients. 0 gives a total of 0 and zero gradients.
      reduction: "none" keeps what is summed apart: `total`, `nll`, `z` and `weight` are [B, T], and what is a divisor by
        default is 1. Any function of `total` may then be minimised, at four matrix products instead of three.
    """
    table_VD = scoring.layout.place(table_VD, "vocab", None)
    if bias_V is not None:
        bias_V = scoring.layout.place(bias_V, "vocab")
    if reduction == "none":
        return _each_token(
            scoring, objective, h_BTD, table_VD, bias_V, targets_BT, weights_BT, normalizer
        )
    inputs, weight = _inputs(scoring, h_BTD, table_VD, bias_V, targets_BT, weights_BT, normalizer)
    sums = _cross_entropy(scoring, objective, inputs)
    return Loss(*sums, lax.stop_gradient(weight), *count_labels(scoring.sizes, targets_BT))


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
    microbatch; this adds where the sum already lies. `total` is differentiable in all but table and bias, and must enter what
    is minimised with a factor of 1, since that is what the accumulator takes for granted.
    """
    inputs, weight = _inputs(scoring, h_BTD, table_VD, bias_V, targets_BT, weights_BT, normalizer)
    sums, into = _accumulate(scoring, objective, inputs, into)
    counts = count_labels(scoring.sizes, targets_BT)
    return Loss(*sums, lax.stop_gradient(weight), *counts), into


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


def _each_token(
    scoring: Scoring,
    objective: Objective,
    h_BTD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_BT: jax.Array,
    weights_BT: jax.Array | None,
    normalizer: jax.Array | None,
) -> Loss:
    sizes, epsilon = scoring.sizes, objective.label_smoothing
    weight_BT = label_weights(sizes, targets_BT, weights_BT)
    h_BTD = where_counted(sizes, h_BTD, targets_BT, weights_BT)
    log_p_BT, lse_BT, smooth_BT = per_token(
        scoring,
        objective.chunk,
        h_BTD,
        table_VD,
        targets_BT,
        bias_V=bias_V,
        with_mean=epsilon > 0,
    )
    total_BT = -(1 - epsilon) * log_p_BT
    if smooth_BT is not None:
        total_BT += epsilon * smooth_BT
    if objective.z_loss:
        total_BT += objective.z_loss * lse_BT**2
    is_counted_BT = weight_BT != 0

    def weighted(x_BT: jax.Array) -> jax.Array:
        return weight_BT * jnp.where(is_counted_BT, x_BT, 0)

    return Loss(
        weighted(total_BT) * (1.0 if normalizer is None else inverse_or_zero(normalizer)),
        lax.stop_gradient(weighted(-log_p_BT)),
        lax.stop_gradient(weighted(lse_BT**2)),
        lax.stop_gradient(weight_BT),
        *count_labels(sizes, targets_BT),
    )


class _Inputs(NamedTuple):
    """What the loss is computed from; all but the targets are differentiable."""

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
    weight_BT = layout.place(weight_BT, "batch", "seq")
    weight = weight_BT.sum()
    inverse = inverse_or_zero(weight if normalizer is None else normalizer)
    return _Inputs(h_BTD, table_VD, bias_V, targets_BT, weight_BT, inverse), weight


_Sums = tuple[jax.Array, jax.Array, jax.Array]  # total, nll, z


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(scoring: Scoring, objective: Objective, inputs: _Inputs) -> _Sums:
    return _run(scoring, objective, inputs).sums(inputs)


def _cross_entropy_fwd(
    scoring: Scoring, objective: Objective, inputs: _Inputs
) -> tuple[_Sums, _Inputs]:
    layout, table_VD, bias_V = scoring.layout, inputs.table_VD, inputs.bias_V
    found = _run(scoring, objective, inputs, Accumulator.zeros(layout, table_VD, bias_V))
    assert found.into is not None
    dtable_VD, dbias_V = found.into.total(layout)
    gradients = found.gradients(inputs)
    gradients = gradients._replace(table_VD=dtable_VD.astype(table_VD.dtype), bias_V=dbias_V)
    return found.sums(inputs), gradients


def _cross_entropy_bwd(
    scoring: Scoring, objective: Objective, gradients: _Inputs, cotangents: _Sums
) -> tuple[_Inputs]:
    return (jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), gradients),)


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _accumulate(
    scoring: Scoring, objective: Objective, inputs: _Inputs, into: Accumulator
) -> tuple[_Sums, Accumulator]:
    return _accumulate_fwd(scoring, objective, inputs, into)[0]


def _accumulate_fwd(
    scoring: Scoring, objective: Objective, inputs: _Inputs, into: Accumulator
) -> tuple[tuple[_Sums, Accumulator], _Inputs]:
    found = _run(scoring, objective, inputs, into)
    assert found.into is not None
    return (found.sums(inputs), found.into), found.gradients(inputs)


def _accumulate_bwd(
    scoring: Scoring, objective: Objective, gradients: _Inputs, cotangents: tuple[_Sums, Any]
) -> tuple[_Inputs, None]:
    return *_cross_entropy_bwd(scoring, objective, gradients, cotangents[0]), None


_accumulate.defvjp(_accumulate_fwd, _accumulate_bwd)


class _Found(NamedTuple):
    """What a pass over the tokens finds: Σ weight · (objective, nll, lse²), the objective of each token and, with an
    accumulator, the gradient of h and the accumulator with those of table and bias in it."""

    weighted_3: jax.Array
    cost_BT: jax.Array
    dh_BTD: jax.Array | None
    into: Accumulator | None

    def sums(self, inputs: _Inputs) -> _Sums:
        objective, nll, z = self.weighted_3
        return objective * inputs.inverse, nll, z

    def gradients(self, inputs: _Inputs) -> _Inputs:
        """Of `total`; those of table and bias stand in the accumulator."""
        by_weight_BT = jnp.where(inputs.weight_BT != 0, self.cost_BT * inputs.inverse, 0)
        nothing: Any = None
        return _Inputs(self.dh_BTD, nothing, nothing, nothing, by_weight_BT, self.weighted_3[0])  # type: ignore[arg-type]


def _run(
    scoring: Scoring, objective: Objective, inputs: _Inputs, into: Accumulator | None = None
) -> _Found:
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
    ) -> _Found:
        h, targets, weight = axes.gather(h), axes.gather(targets), axes.gather(weight)
        h = jnp.where(weight[..., None] != 0, h, 0)  # NaN where nothing counts must not spread
        cast_RD = table_RD.astype(h.dtype)
        chunk = chunk_size(layout, len(table_RD), h.dtype, objective.chunk)
        # Of one chunk, XLA:CPU would unroll the loop, and then cannot multiply the transposed bfloat16.
        chunk = min(chunk, -(-targets.size // 2))
        h_KCD, t_KC, w_KC = cut_chunks(chunk, h, targets, weight)
        # Transposed before the loop: in it, XLA would fold it into the product, which a CPU does at half the speed.
        hT_KDC = None if into is None else jnp.swapaxes(h_KCD, 1, 2)

        def body(carry: Any, part: Any) -> tuple[Any, tuple[jax.Array, jax.Array | None]]:
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
                return (sums, None), (total_C, None)
            du_CR = _score_gradients(objective, sizes, at) * slope_CR
            # Not only p = 0: a softcapped slope or a banned target must not leak through a masked row.
            du_CR = mask_rows(sizes, axes, du_CR * (w_C * inverse)[:, None], 0)
            d_CR = (du_CR * scoring.scale).astype(h_CD.dtype)
            dh_CD = jnp.einsum("cr,rd->cd", d_CR, cast_RD, preferred_element_type=jnp.float32)
            more = jnp.einsum("dc,cr->dr", hT_DC, d_CR, preferred_element_type=jnp.float32)
            bias = None if into.bias is None else into.bias + du_CR.sum(0)
            return (sums, Accumulator(into.table + more, bias)), (total_C, dh_CD)

        start = (jnp.zeros(3, jnp.float32), into)
        (sums, into), (cost, dh) = lax.scan(body, start, (h_KCD, t_KC, w_KC, hT_KDC))
        cost = axes.keep(join_chunks(cost[..., None], targets.shape))[..., 0]
        if dh is not None:
            dh = axes.reduce(join_chunks(dh, targets.shape)).astype(h.dtype)
        return _Found(lax.psum(sums, axes.only_tokens), cost, dh, into)

    parts = None if into is None else Accumulator.specs(layout)
    found: _Found = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            *(axes.spec, layout.spec("vocab", None), layout.spec("vocab")),
            *(axes.spec, axes.spec, PartitionSpec(), parts),
        ),
        out_specs=_Found(PartitionSpec(), axes.spec, axes.spec, parts),  # type: ignore[arg-type]
        check_vma=False,
    )(*inputs, into)
    return found
