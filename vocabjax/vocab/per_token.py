"""log p(target) and log Σ exp z of each token, differentiable token by token, without [B, T, V].

For evaluation, and for heads whose loss is a function of several softmaxes (mixtures, bands). The forward keeps two numbers per
token; the backward computes the scores again, chunk by chunk:

    dz = g_log_p · ([is the target] − p) + g_lse · p + g_smooth · (p − 1 / predictable)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vocabjax.vocab.interfaces import Head, Loss, Shared, Tokens
from vocabjax.vocab.labels import (
    count_labels,
    inverse_or_zero,
    label_weights,
    valid_labels,
    where_counted,
)
from vocabjax.vocab.scores import (
    Scoring,
    allowed_rows,
    chunk_size,
    chunk_statistics,
    cut_chunks,
    join_chunks,
    local_scores,
    product_gradients,
)
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import TokenAxes, row_start


class PerToken(NamedTuple):
    """float32 [B, T, …].

    Attributes:
      log_p: log p(target) in nats; 0, without gradient, where the label may not be predicted.
      lse: log Σ exp z over the ids that may be predicted.
      smooth: lse − the mean of z over the ids that may be predicted, where it is asked for; 0 as log_p is.
    """

    log_p: jax.Array
    lse: jax.Array
    smooth: jax.Array | None


# Jitted: called eagerly, a `shard_map` would compile anew each time.
@functools.partial(jax.jit, static_argnames=("scoring", "chunk", "with_mean"))
def per_token(
    scoring: Scoring,
    chunk: int | None,
    h: jax.Array,
    table_VD: jax.Array,
    targets: jax.Array,
    *,
    bias_V: jax.Array | None = None,
    with_mean: bool = False,
) -> PerToken:
    """Differentiable in h, table and bias.

    Args:
      chunk: tokens per device whose scores exist at one time; None: chosen.
      h: [B, T, …, D]; dimensions after T (the components of a mixture) are not sharded.
      table_VD: float32 [Vp, D], rows sharded over the vocabulary axis.
      targets: int32, the shape of `h` without D.
      with_mean: whether `smooth` is asked for.
    """
    layout, inner = scoring.layout, [None] * (h.ndim - 3)
    h = layout.place(h, "batch", "seq", *inner, None)
    targets = layout.place(targets, "batch", "seq", *inner)
    return _per_token(scoring, chunk, with_mean, _Inputs(h, table_VD, bias_V, targets))


def nll_loss(
    sizes: Sizes,
    nll_BT: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array | None,
    normalizer: jax.Array | None,
) -> Loss:
    """The loss of a head that knows −log p(target) of each token, 0 where the label is not valid. Its z is 0."""
    weight_BT = label_weights(sizes, targets_BT, weights_BT)
    weight = weight_BT.sum()
    nll = (weight_BT * nll_BT).sum()
    divisor = weight if normalizer is None else normalizer
    return Loss(
        nll * inverse_or_zero(divisor),
        lax.stop_gradient(nll),
        jnp.zeros((), jnp.float32),
        lax.stop_gradient(weight),
        *count_labels(sizes, targets_BT),
    )


class LikelihoodHead(Head):
    """A head of several softmaxes: all that its loss is made of is its `nll`, so it honours nothing more of an objective.

    Attributes:
      sizes: which ids may be predicted.
    """

    sizes: Sizes

    def loss(
        self,
        shared: Shared,
        h_BTD: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None,
        normalizer: jax.Array | None,
        tokens: Tokens | None,
    ) -> Loss:
        h_BTD = where_counted(self.sizes, h_BTD, targets_BT, weights_BT)
        nll_BT = self.nll(shared, h_BTD, targets_BT)
        return nll_loss(self.sizes, nll_BT, targets_BT, weights_BT, normalizer)


class _Inputs(NamedTuple):
    h: jax.Array
    table_VD: jax.Array
    bias_V: jax.Array | None
    targets: jax.Array


# Kept apart for the backward: the highest score, and lse − that; their sum has lost digits.
_Lse = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _per_token(scoring: Scoring, chunk: int | None, with_mean: bool, inputs: _Inputs) -> PerToken:
    return _per_token_fwd(scoring, chunk, with_mean, inputs)[0]


def _per_token_fwd(
    scoring: Scoring, chunk: int | None, with_mean: bool, inputs: _Inputs
) -> tuple[PerToken, tuple[_Inputs, _Lse]]:
    sizes = scoring.sizes
    axes = TokenAxes.of(scoring.layout)

    def local(
        h: jax.Array, table_RD: jax.Array, bias_R: jax.Array | None, targets: jax.Array
    ) -> tuple[jax.Array, ...]:
        h, gathered = axes.gather(h), axes.gather(targets)
        cast_RD = table_RD.astype(h.dtype)

        def body(_: None, part: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
            h_CD, t_C = part
            z_CR, _slope = local_scores(scoring, axes, h_CD, cast_RD, bias_R)
            at = chunk_statistics(axes, sizes, z_CR, t_C, with_mean=with_mean)
            own = [at.target - at.log_sum, at.top, at.log_sum]
            return None, jnp.stack([*own, *([] if at.mean is None else [at.log_sum - at.mean])], -1)

        _, found = lax.scan(
            body,
            None,
            cut_chunks(
                chunk_size(scoring.layout, len(table_RD), h.dtype, chunk), *_flat(h, gathered)
            ),
        )
        found = axes.keep(join_chunks(found, gathered.shape))
        log_p, top, log_sum, *smooth = jnp.moveaxis(found, -1, 0)
        is_valid = valid_labels(sizes, targets)
        log_p, *smooth = (jnp.where(is_valid, x, 0) for x in (log_p, *smooth))
        return log_p, top, log_sum, *smooth

    log_p, top, log_sum, *smooth = jax.shard_map(
        local,
        mesh=scoring.layout.mesh,
        in_specs=_specs(scoring, axes),
        out_specs=axes.spec,
        check_vma=False,
    )(*inputs)
    found = PerToken(log_p, top + log_sum, smooth[0] if with_mean else None)
    return found, (inputs, (top, log_sum))


def _per_token_bwd(
    scoring: Scoring,
    chunk: int | None,
    with_mean: bool,
    residuals: tuple[_Inputs, _Lse],
    cotangents: PerToken,
) -> tuple[_Inputs]:
    inputs, (top, log_sum) = residuals
    sizes = scoring.sizes
    axes = TokenAxes.of(scoring.layout)
    is_valid = valid_labels(sizes, inputs.targets)
    g_log_p, g_lse, g_smooth = cotangents
    of_valid = [g_log_p] if g_smooth is None else [g_log_p, g_smooth]
    of_valid = [jnp.where(is_valid, g, 0) for g in of_valid]
    numbers = jnp.stack([top, log_sum, g_lse, *of_valid], -1)

    def local(
        h: jax.Array,
        table_RD: jax.Array,
        bias_R: jax.Array | None,
        targets: jax.Array,
        numbers: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        h, targets, numbers = axes.gather(h), axes.gather(targets), axes.gather(numbers)
        cast_RD = table_RD.astype(h.dtype)
        rows = table_RD.shape[0]
        start = row_start(axes.rows, rows)
        allowed_R = allowed_rows(sizes, axes, rows)

        def body(carry: Any, part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            dtable_RD, dbias_R = carry
            h_CD, t_C, n_CX = part
            top, log_sum, g_lse, g_log_p, *g_smooth = jnp.moveaxis(n_CX[..., None], 1, 0)
            z_CR, slope_CR = local_scores(scoring, axes, h_CD, cast_RD, bias_R)
            is_target_CR = jnp.arange(rows) == (t_C - start)[:, None]
            dz_CR = jnp.exp(z_CR - top - log_sum) * (g_lse - g_log_p + sum(g_smooth))
            dz_CR += jnp.where(is_target_CR, g_log_p, 0)
            if g_smooth:
                dz_CR -= g_smooth[0] / sizes.predictable
            du_CR = jnp.where(allowed_R, dz_CR * slope_CR, 0)
            dh_CD, more_RD = product_gradients(du_CR * scoring.scale, h_CD, cast_RD)
            return (dtable_RD + more_RD, dbias_R + du_CR.sum(0)), dh_CD

        zeros = (jnp.zeros(table_RD.shape, jnp.float32), jnp.zeros(rows, jnp.float32))
        gradients, dh = lax.scan(
            body,
            zeros,
            cut_chunks(
                chunk_size(scoring.layout, rows, h.dtype, chunk), *_flat(h, targets, numbers)
            ),
        )
        dtable_RD, dbias_R = lax.psum(gradients, axes.only_tokens)
        return (
            axes.reduce(join_chunks(dh, targets.shape)).astype(h.dtype),
            dtable_RD.astype(table_RD.dtype),
            None if bias_R is None else dbias_R.astype(bias_R.dtype),
        )

    specs = _specs(scoring, axes)
    gradients = jax.shard_map(
        local,
        mesh=scoring.layout.mesh,
        in_specs=(*specs, axes.spec),
        out_specs=specs[:3],
        check_vma=False,
    )(*inputs, numbers)
    return (_Inputs(*gradients, None),)  # type: ignore[arg-type]  # integers have no gradient


_per_token.defvjp(_per_token_fwd, _per_token_bwd)


def _specs(scoring: Scoring, axes: TokenAxes) -> tuple[Any, Any, Any, Any]:
    layout = scoring.layout
    return axes.spec, layout.spec("vocab", None), layout.spec("vocab"), axes.spec


def _flat(h: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """[b, t, …, D] → [b, t·…, D], and the others, [b, t, …] or with one more dimension, alike."""
    inner = h.ndim - 3
    return tuple(x.reshape(x.shape[0], -1, *x.shape[2 + inner :]) for x in (h, *others))
