"""Attention inside documents, causal or not, heads sharded: each device computes its own query heads.

`jax.nn.dot_product_attention` takes no segment ids, so documents are kept apart by a mask; where the backend has a fused
kernel that does (splash attention on TPU), that is used. On GPU the mask goes to cuDNN's fused attention as a dense operand;
that path has not run on a device yet.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.mesh import Layout


def attention(
    layout: Layout,
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    segment_q_BT: jax.Array,
    segment_kv_BS: jax.Array,
    start: jax.Array | None = None,
    *,
    causal: bool = True,
) -> jax.Array:
    """Softmax attention [B, T, N, K]; a query sees keys of its own segment at or before its own index.

    What comes of a query that sees no key means nothing: keep it from mattering.

    Args:
      q_BTNK: N query heads, sharded by the rule for `"heads"`.
      k_BSGK, v_BSGK: G key/value heads, N a multiple of G; replicated when G does not divide over the axis.
      segment_q_BT, segment_kv_BS: document of each token.
      start: index of the first query among the keys (decoding with a cache); None: 0, and S = T.
      causal: False: it sees later keys of its segment too.
    """
    kv_heads = kv_axis(layout, k_BSGK.shape[2])
    tokens = layout.spec("batch", "seq")
    group = q_BTNK.shape[2] // k_BSGK.shape[2]
    seq_axes = layout.axes("seq")
    platform = layout.mesh.devices.flat[0].platform

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_q: jax.Array,
        segment_kv: jax.Array,
        start: jax.Array | None,
    ) -> jax.Array:
        if kv_heads is None:  # replicated: pick the key head of each of this device's query heads
            first = lax.axis_index(layout.axes("heads")) * q.shape[2]
            picked = (first + jnp.arange(q.shape[2])) // group
            k, v = jnp.take(k, picked, axis=2), jnp.take(v, picked, axis=2)
        for axis in reversed(seq_axes):
            k, v, segment_kv = (
                lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v, segment_kv)
            )
        length = q.shape[1]
        if start is None and not seq_axes and _splash_fits(platform, q, k):
            return _splash(q, k, v, segment_q, segment_kv, causal)
        offset = lax.axis_index(seq_axes) * length if seq_axes else jnp.int32(0)
        index_q = offset + jnp.arange(length) + (0 if start is None else start)
        mask = segment_q[:, :, None] == segment_kv[:, None, :]
        if causal:
            mask &= jnp.arange(k.shape[1]) <= index_q[:, None]
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask[:, None],
            implementation="cudnn" if _cudnn_fits(platform, q, k) else "xla",
        )

    heads = layout.spec("batch", "seq", "heads", None)
    keys = layout.spec("batch", "seq", kv_heads, None)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(heads, keys, keys, tokens, tokens, PartitionSpec()),
        out_specs=heads,
        check_vma=platform != "tpu",  # a Pallas call states no varying axes
    )(q_BTNK, k_BSGK, v_BSGK, segment_q_BT, segment_kv_BS, start)


def kv_axis(layout: Layout, kv_heads: int) -> str | None:
    """The logical axis of key/value heads: that of their queries, or None (replicated) when they do not divide over it."""
    return "heads" if kv_heads % layout.shards("heads") == 0 else None


class Rotation(NamedTuple):
    """Cosine and sine of each position's angles: float32 [B, T, 1, K/2]."""

    cos: jax.Array
    sin: jax.Array


def rotation(position_BT: jax.Array, head_dim: int, theta: float) -> Rotation:
    """Of rotary positions (Su et al. 2021, arXiv:2104.09864): made once for all layers and heads."""
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position_BT[..., None, None].astype(jnp.float32) * frequency
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x_BTNK: jax.Array, by: Rotation) -> jax.Array:
    """Rotary positions, halves paired; products in float32."""
    left, right = jnp.split(x_BTNK.astype(jnp.float32), 2, axis=-1)
    turned = (left * by.cos - right * by.sin, right * by.cos + left * by.sin)
    return jnp.concatenate(turned, -1).astype(x_BTNK.dtype)


def _cudnn_fits(platform: str, q: jax.Array, k: jax.Array) -> bool:
    # What its kernels take from Ampere on; a mask needs even lengths for its gradient.
    is_even = q.shape[1] % 2 == 0 and k.shape[1] % 2 == 0
    is_narrow = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return platform in ("gpu", "cuda") and q.dtype == jnp.bfloat16 and is_narrow and is_even


def _splash_fits(platform: str, q: jax.Array, k: jax.Array) -> bool:
    return platform == "tpu" and q.shape[-1] % 128 == 0 and q.shape[1] % 128 == 0


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_q: jax.Array,
    segment_kv: jax.Array,
    causal: bool,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # TPU only
        splash_attention_kernel as kernel,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1], q.shape[2]
    kind = masks.CausalMask if causal else masks.FullMask
    mask = masks.MultiHeadMask([kind((length, length))] * heads)
    attend = kernel.make_splash_mha_single_device(mask=mask)
    scale = q.shape[-1] ** -0.5

    def one(q: jax.Array, k: jax.Array, v: jax.Array, s_q: jax.Array, s_kv: jax.Array) -> jax.Array:
        by_head = [jnp.swapaxes(x, 0, 1) for x in (q * scale, k, v)]
        out: jax.Array = attend(*by_head, segment_ids=kernel.SegmentIds(s_q, s_kv))
        return jnp.swapaxes(out, 0, 1).astype(q.dtype)

    return jax.vmap(one)(q, k, v, segment_q, segment_kv)
