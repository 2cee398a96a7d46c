"""log p(target) and log Σ exp z of each token, differentiable token by token, without [B, T, V].

For evaluation, and for heads whose loss is a function of several softmaxes (mixtures, bands). The forward keeps two numbers per
token; the backward computes the scores again, chunk by chunk:

    dz = g_log_p · ([is the target] − p) + g_lse · p
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vocabjax.vocab.interfaces import Loss
from vocabjax.vocab.labels import count_labels, inverse_or_zero, label_weights, valid_labels
from vocabjax.vocab.scores import Scoring, allowed_rows, chunk_statistics, cut_chunks, local_scores
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import TokenAxes, row_start


class PerToken(NamedTuple):
    """float32 [B, T, …].

    Attributes:
      log_p: log p(target) in nats; 0, without gradient, where the label may not be predicted.
      lse: log Σ exp z over the ids that may be predicted.
    """

    log_p: jax.Array
    lse: jax.Array


# Jitted: called eagerly, a `shard_map` would compile anew each time.
@functools.partial(jax.jit, static_argnames=("scoring", "chunk"))
def per_token(
    scoring: Scoring,
    chunk: int,
    h: jax.Array,
    table_VD: jax.Array,
    targets: jax.Array,
    *,
    bias_V: jax.Array | None = None,
) -> PerToken:
    """Differentiable in h, table and bias.

    Args:
      chunk: tokens per device whose scores exist at one time.
      h: [B, T, …, D]; dimensions after T (the components of a mixture) are not sharded.
      table_VD: float32 [Vp, D], rows sharded over the vocabulary axis.
      targets: int32, the shape of `h` without D.
    """
    layout, inner = scoring.layout, [None] * (h.ndim - 3)
    h = layout.place(h, "batch", "seq", *inner, None)
    targets = layout.place(targets, "batch", "seq", *inner)
    found = _per_token(scoring, chunk, _Inputs(h, table_VD, bias_V, targets))
    return PerToken(found.log_p, found.top + found.log_sum)


def nll_loss(
    sizes: Sizes,
    nll_BT: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array | None,
    normalizer: jax.Array | None,
) -> Loss:
    """The loss of a head that knows −log p(target) of each token, 0 where the label is not valid. Its z is 0."""
    weight_BT = lax.stop_gradient(label_weights(sizes, targets_BT, weights_BT))
    weight = weight_BT.sum()
    nll = (weight_BT * nll_BT).sum()
    divisor = weight if normalizer is None else normalizer
    return Loss(
        nll * lax.stop_gradient(inverse_or_zero(divisor)),
        lax.stop_gradient(nll),
        jnp.zeros((), jnp.float32),
        weight,
        *count_labels(sizes, targets_BT),
    )


class _Inputs(NamedTuple):
    h: jax.Array
    table_VD: jax.Array
    bias_V: jax.Array | None
    targets: jax.Array


class _Found(NamedTuple):
    log_p: jax.Array
    top: jax.Array  # the highest score
    log_sum: jax.Array  # lse − top


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _per_token(scoring: Scoring, chunk: int, inputs: _Inputs) -> _Found:
    sizes = scoring.sizes
    axes = TokenAxes.of(scoring.layout)

    def local(
        h: jax.Array, table_RD: jax.Array, bias_R: jax.Array | None, targets: jax.Array
    ) -> _Found:
        h, gathered = axes.gather(h), axes.gather(targets)
        cast_RD = table_RD.astype(h.dtype)

        def body(_: None, part: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
            h_CD, t_C = part
            z_CR, _slope = local_scores(scoring, axes, h_CD, cast_RD, bias_R)
            at = chunk_statistics(axes, sizes, z_CR, t_C)
            return None, jnp.stack([at.target - at.log_sum, at.top, at.log_sum], -1)

        _, found = lax.scan(body, None, cut_chunks(chunk, *_flat(h, gathered)))
        found = found.reshape(-1, 3)[: gathered.size].reshape(*gathered.shape, 3)
        log_p, top, log_sum = jnp.moveaxis(axes.keep(found), -1, 0)
        return _Found(jnp.where(valid_labels(sizes, targets), log_p, 0), top, log_sum)

    return jax.shard_map(
        local,
        mesh=scoring.layout.mesh,
        in_specs=_specs(scoring, axes),
        out_specs=axes.spec,
        check_vma=False,
    )(*inputs)


def _per_token_fwd(
    scoring: Scoring, chunk: int, inputs: _Inputs
) -> tuple[_Found, tuple[_Inputs, _Found]]:
    found = _per_token(scoring, chunk, inputs)
    return found, (inputs, found)


def _per_token_bwd(
    scoring: Scoring, chunk: int, residuals: tuple[_Inputs, _Found], cotangents: _Found
) -> tuple[_Inputs]:
    inputs, found = residuals
    sizes = scoring.sizes
    axes = TokenAxes.of(scoring.layout)
    is_valid = valid_labels(sizes, inputs.targets)
    # `top` and `log_sum` are only ever used as their sum, so their cotangents are equal.
    numbers = jnp.stack(
        [jnp.where(is_valid, cotangents.log_p, 0), cotangents.top, found.top, found.log_sum], -1
    )

    def local(
        h: jax.Array,
        table_RD: jax.Array,
        bias_R: jax.Array | None,
        targets: jax.Array,
        numbers: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        h, targets, numbers = axes.gather(h), axes.gather(targets), axes.gather(numbers)
        shape, dtype = h.shape, h.dtype
        cast_RD = table_RD.astype(dtype)
        rows = table_RD.shape[0]
        start = row_start(axes.rows, rows)
        allowed_R = allowed_rows(sizes, axes, rows)

        def body(carry: Any, part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            dtable_RD, dbias_R = carry
            h_CD, t_C, n_C4 = part
            g_log_p, g_lse, top, log_sum = jnp.moveaxis(n_C4[..., None], 1, 0)
            z_CR, slope_CR = local_scores(scoring, axes, h_CD, cast_RD, bias_R)
            is_target_CR = jnp.arange(rows) == (t_C - start)[:, None]
            dz_CR = jnp.exp(z_CR - top - log_sum) * (g_lse - g_log_p)
            dz_CR += jnp.where(is_target_CR, g_log_p, 0)
            du_CR = jnp.where(allowed_R, dz_CR * slope_CR, 0)
            scaled_CR = (du_CR * scoring.scale).astype(dtype)
            dh_CD = jnp.einsum("cr,rd->cd", scaled_CR, cast_RD, preferred_element_type=jnp.float32)
            dtable_RD += jnp.einsum(
                "cr,cd->rd", scaled_CR, h_CD, preferred_element_type=jnp.float32
            )
            return (dtable_RD, dbias_R + du_CR.sum(0)), dh_CD

        zeros = (jnp.zeros(table_RD.shape, jnp.float32), jnp.zeros(rows, jnp.float32))
        gradients, dh = lax.scan(body, zeros, cut_chunks(chunk, *_flat(h, targets, numbers)))
        dtable_RD, dbias_R = lax.psum(gradients, axes.only_tokens)
        dh = dh.reshape(-1, shape[-1])[: h.size // shape[-1]].reshape(shape)
        return (
            axes.reduce(dh).astype(dtype),
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
