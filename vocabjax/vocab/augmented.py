"""The augmented loss: how far the predicted distribution is from one that the embedding itself suggests, without [B, T, V].

    a = E·u / τ,  u = E[target]     ỹ = softmax(a)          s = z / τ     ŷ = softmax(s)
    KL(ỹ‖ŷ) = Σ ỹ (a − s) − lse(a) + lse(s)
    d/ds = ŷ − ỹ                    d/da = ỹ ((a − s) − Σ ỹ (a − s))

over the ids that may be predicted. Source: Inan et al. 2016 (arXiv:1611.01462, section 3). Like `per_token.py`, the forward keeps
a few numbers per token, and the backward computes the scores again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vocabjax.vocab.interfaces import Objective
from vocabjax.vocab.labels import valid_labels
from vocabjax.vocab.scores import (
    LOWEST,
    Scoring,
    allowed_rows,
    chunk_size,
    cut_chunks,
    join_chunks,
    local_scores,
    product_gradients,
)
from vocabjax.vocab.table import TokenAxes


class _Inputs(NamedTuple):
    h_BTE: jax.Array
    table_VE: jax.Array
    bias_V: jax.Array | None
    u_BTD: jax.Array
    embedding_VD: jax.Array


# Jitted: called eagerly, a `shard_map` would compile anew each time.
@functools.partial(jax.jit, static_argnames=("scoring", "objective"))
def augmented_kl(
    scoring: Scoring,
    objective: Objective,
    h_BTE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array | None,
    u_BTD: jax.Array,
    embedding_VD: jax.Array,
    targets_BT: jax.Array,
) -> jax.Array:
    """float32 [B, T]: KL(ỹ‖ŷ) in nats, 0 where the label is not valid. Differentiable in all but the labels.

    Args:
      h_BTE, table_VE, bias_V: what z is made from.
      u_BTD, embedding_VD: the targets' rows of E, and E: [Vp, D], rows sharded like the head's table.
    """
    layout = scoring.layout
    is_valid_BT = valid_labels(scoring.sizes, layout.place(targets_BT, "batch", "seq"))
    h_BTE = layout.place(h_BTE, "batch", "seq", None)
    u_BTD = layout.place(u_BTD, "batch", "seq", None)
    inputs = _Inputs(h_BTE, table_VE, bias_V, u_BTD, embedding_VD)
    return jnp.where(is_valid_BT, _kl(scoring, objective, inputs), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kl(scoring: Scoring, objective: Objective, inputs: _Inputs) -> jax.Array:
    return _kl_fwd(scoring, objective, inputs)[0]


def _scaled(
    scoring: Scoring,
    temperature: float,
    axes: TokenAxes,
    part: tuple[jax.Array, jax.Array],
    shard: tuple[jax.Array, jax.Array | None, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(s, a, dz/du) of this device's rows, −inf where an id may not be predicted."""
    (h_CE, u_CD), (table_RE, bias_R, embedding_RD) = part, shard
    z_CR, slope_CR = local_scores(scoring, axes, h_CE, table_RE, bias_R)
    plain = Scoring(scoring.layout, scoring.sizes)
    a_CR, _ = local_scores(plain, axes, u_CD, embedding_RD, None)
    return z_CR / temperature, a_CR / temperature, slope_CR


def _kl_fwd(
    scoring: Scoring, objective: Objective, inputs: _Inputs
) -> tuple[jax.Array, tuple[_Inputs, jax.Array]]:
    axes = TokenAxes.of(scoring.layout)

    def local(
        h: jax.Array,
        table_RE: jax.Array,
        bias_R: jax.Array | None,
        u: jax.Array,
        embedding_RD: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        h, u = axes.gather(h), axes.gather(u)
        shard = (table_RE.astype(h.dtype), bias_R, embedding_RD.astype(u.dtype))

        def body(_: None, part: Any) -> tuple[None, jax.Array]:
            s_CR, a_CR, _slope = _scaled(scoring, objective.temperature, axes, part, shard)
            gap_CR = jnp.where(jnp.isfinite(s_CR), a_CR - s_CR, 0)
            top_s, top_a = (jnp.maximum(x.max(-1), LOWEST) for x in (s_CR, a_CR))
            exp_a_CR = jnp.exp(a_CR - top_a[:, None])
            own = jnp.stack(
                [
                    top_s,
                    jnp.exp(s_CR - top_s[:, None]).sum(-1),
                    top_a,
                    exp_a_CR.sum(-1),
                    (exp_a_CR * gap_CR).sum(-1),
                ]
            )
            # One collective, of five numbers per token.
            all_own = lax.all_gather(own, axes.rows, axis=0) if axes.rows else own[None]
            top_s, sum_s, top_a, sum_a, gap = jnp.moveaxis(all_own, 1, 0)
            highest_s, highest_a = top_s.max(0), top_a.max(0)
            part_a = jnp.exp(top_a - highest_a)
            total_a = (sum_a * part_a).sum(0)
            lse_s = highest_s + jnp.log((sum_s * jnp.exp(top_s - highest_s)).sum(0))
            mean_gap = (gap * part_a).sum(0) / total_a
            return None, jnp.stack([lse_s, highest_a + jnp.log(total_a), mean_gap], -1)

        chunk = chunk_size(scoring.layout, len(shard[0]), h.dtype, objective.chunk)
        _, found = lax.scan(body, None, cut_chunks(chunk, h, u))
        found = axes.keep(join_chunks(found, h.shape[:2]))
        lse_s, lse_a, mean_gap = jnp.moveaxis(found, -1, 0)
        return mean_gap - lse_a + lse_s, found

    kl_BT, found = jax.shard_map(
        local,
        mesh=scoring.layout.mesh,
        in_specs=_specs(scoring, axes),
        out_specs=(axes.spec, axes.spec),
        check_vma=False,
    )(*inputs)
    return kl_BT, (inputs, found)


def _kl_bwd(
    scoring: Scoring,
    objective: Objective,
    residuals: tuple[_Inputs, jax.Array],
    cotangent_BT: jax.Array,
) -> tuple[_Inputs]:
    inputs, found = residuals
    axes = TokenAxes.of(scoring.layout)
    temperature = objective.temperature

    def local(
        h: jax.Array,
        table_RE: jax.Array,
        bias_R: jax.Array | None,
        u: jax.Array,
        embedding_RD: jax.Array,
        found: jax.Array,
        cotangent: jax.Array,
    ) -> _Inputs:
        h, u, found, cotangent = (axes.gather(x) for x in (h, u, found, cotangent))
        shard = (table_RE.astype(h.dtype), bias_R, embedding_RD.astype(u.dtype))
        is_allowed_R = allowed_rows(scoring.sizes, axes, len(table_RE))

        def body(carry: Any, part: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            h_CE, u_CD, found_C3, g_C = part
            lse_s, lse_a, mean_gap = jnp.moveaxis(found_C3[..., None], 1, 0)
            s_CR, a_CR, slope_CR = _scaled(scoring, temperature, axes, (h_CE, u_CD), shard)
            y_CR = jnp.exp(a_CR - lse_a)
            g_CR = g_C[:, None] / temperature
            gap_CR = jnp.where(is_allowed_R, a_CR - s_CR, 0) - mean_gap
            ds_CR = jnp.where(is_allowed_R, g_CR * (jnp.exp(s_CR - lse_s) - y_CR) * slope_CR, 0)
            da_CR = jnp.where(is_allowed_R, g_CR * y_CR * gap_CR, 0)
            dh_CE, dtable_RE = product_gradients(ds_CR * scoring.scale, h_CE, shard[0])
            du_CD, dembedding_RD = product_gradients(da_CR, u_CD, shard[2])
            more = (dtable_RE, ds_CR.sum(0), dembedding_RD)
            return jax.tree.map(jnp.add, carry, more), (dh_CE, du_CD)

        zeros = tuple(
            jnp.zeros(shape, jnp.float32)
            for shape in (table_RE.shape, table_RE.shape[:1], embedding_RD.shape)
        )
        chunk = chunk_size(scoring.layout, len(shard[0]), h.dtype, objective.chunk)
        gradients, (dh, du) = lax.scan(body, zeros, cut_chunks(chunk, h, u, found, cotangent))
        dtable_RE, dbias_R, dembedding_RD = lax.psum(gradients, axes.only_tokens)

        def back(d: jax.Array, like: jax.Array) -> jax.Array:
            return axes.reduce(join_chunks(d, like.shape[:2])).astype(like.dtype)

        dbias = None if bias_R is None else dbias_R
        return _Inputs(back(dh, h), dtable_RE, dbias, back(du, u), dembedding_RD)

    specs = _specs(scoring, axes)
    gradients = jax.shard_map(
        local,
        mesh=scoring.layout.mesh,
        in_specs=(*specs, axes.spec, axes.spec),
        out_specs=_Inputs(*specs),
        check_vma=False,
    )(*inputs, found, cotangent_BT)
    return (gradients,)


_kl.defvjp(_kl_fwd, _kl_bwd)


def _specs(scoring: Scoring, axes: TokenAxes) -> tuple[Any, ...]:
    layout = scoring.layout
    rows = layout.spec("vocab", None)
    return axes.spec, rows, layout.spec("vocab"), axes.spec, rows
