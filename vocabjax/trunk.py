"""The Transformer between the two faces: deliberately plain, and the same under every vocabulary.

Pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU. Layers are scanned, so compile time does not grow with
depth; memories (per-layer token tables) attach at named sites, and layers that differ split the scan into segments.

Letters: B batch, T positions, D width, N query heads, G key/value heads, K head width, F FFN width, L layers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.attention import Rotation, attention, kv_axis, rotate, rotation
from vocabjax.dense import dense, gathered
from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.norms import RMSNorm, rms_norm
from vocabjax.param import Scope, matrix_flops, normal, ones, zeros
from vocabjax.vocab.interfaces import Memory, Site, Tokens

LayerParams = dict[str, jax.Array]  # of a layer, as `Layers` names them


@dataclass(frozen=True)
class TrunkConfig:
    """The trunk; its width D is the vocabulary's (`vocab.width`).

    Attributes:
      layers: L, how many.
      heads: N, attention heads (of queries).
      kv_heads: G, of keys and values; N is a multiple of it.
      ffn: F, the inner width of the feed-forward.
      head_dim: K, the width of a head; None: D / N.
      qk_norm: RMSNorm over K on queries and keys.
      qkv_bias: biases of queries, keys and values (Qwen2, arXiv:2407.10671).
      post_norm: RMSNorm also of what attention and feed-forward add to the residual stream (Gemma 2, arXiv:2408.00118).
      rope_theta: base of the rotary frequencies.
      remat: what the backward recomputes: "none"; "dots" keeps the matrix products; "full" keeps only each layer's input.
    """

    kind: ClassVar[str] = "decoder"  # the name used in files
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 384
    head_dim: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    post_norm: bool = False
    rope_theta: float = 10_000.0
    remat: Literal["none", "dots", "full"] = "none"

    def check(self, width: int) -> None:
        """Raises UserError for shapes that cannot work with trunk width D."""
        for name in ("layers", "heads", "kv_heads", "ffn", "head_dim"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UserError(f"trunk.{name} = {size} must be at least 1")
            most = 10_000 if name == "layers" else 2**31 - 1
            if size is not None and size > most:
                raise UserError(f"trunk.{name} = {size} must be at most {most:,}")
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"trunk.rope_theta = {self.rope_theta} must be positive and finite")
        if self.heads % self.kv_heads:
            raise UserError(
                f"trunk.heads = {self.heads} must be a multiple of trunk.kv_heads = {self.kv_heads}"
            )
        if self.head_dim is None and width % self.heads:
            below, above = (width // self.heads * self.heads, -(-width // self.heads) * self.heads)
            raise UserError(
                f"vocab.width = {width} does not divide over trunk.heads = {self.heads}; set trunk.head_dim, or a "
                f"width of {f'{below} or ' if below else ''}{above}"
            )
        if self.width_of_head(width) % 2:
            raise UserError(
                f"the head width {self.width_of_head(width)} must be even for rotary positions"
            )

    def width_of_head(self, width: int) -> int:
        """K."""
        return width // self.heads if self.head_dim is None else self.head_dim


class Cache(NamedTuple):
    """Decoding state of the trunk: keys and values of S positions, and the memories' own caches."""

    k_LBSGK: jax.Array
    v_LBSGK: jax.Array
    segment_BS: jax.Array  # −1 where nothing has been written
    length: jax.Array  # int32 scalar: positions written
    memories: tuple[Any, ...]


class Segment(NamedTuple):
    """`repeats` scanned blocks of `period` layers, from layer `start`."""

    start: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repeats


class AttentionLayers(nnx.Module):
    """Attention of all layers, stacked on a leading L axis. Each layer: D·K·(2N + 2G) + D, and 2K for `qk_norm`, K·(N + 2G) for
    `qkv_bias`, D for `post_norm`."""

    def __init__(self, config: TrunkConfig, scope: Scope, width: int) -> None:
        L, D, N, G = config.layers, width, config.heads, config.kv_heads
        K, kv = config.width_of_head(width), kv_axis(scope.layout, G)
        self.q = _matrix(scope, "q", L, (D, N, K), ("width", "heads", "head_dim"), D)
        self.k = _matrix(scope, "k", L, (D, G, K), ("width", kv, "head_dim"), D)
        self.v = _matrix(scope, "v", L, (D, G, K), ("width", kv, "head_dim"), D)
        self.o = _matrix(scope, "o", L, (N, K, D), ("heads", "head_dim", "width"), N * K)
        self.attn_norm = _vector(scope, "attn_norm", L, D)
        if config.qk_norm:
            self.q_norm = _vector(scope, "q_norm", L, K)
            self.k_norm = _vector(scope, "k_norm", L, K)
        if config.qkv_bias:
            self.q_bias = _bias(scope, "q_bias", L, (N, K), "heads")
            self.k_bias = _bias(scope, "k_bias", L, (G, K), kv)
            self.v_bias = _bias(scope, "v_bias", L, (G, K), kv)
        if config.post_norm:
            self.attn_post_norm = _vector(scope, "attn_post_norm", L, D)

    def arrays(self) -> dict[str, jax.Array]:
        """name → [L, ...]."""
        return {
            name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Param)
        }


class Layers(AttentionLayers):
    """And their feed-forward. Each layer adds 3·D·F + D, and D for `post_norm`."""

    def __init__(self, config: TrunkConfig, scope: Scope, width: int) -> None:
        super().__init__(config, scope, width)
        L, D, F = config.layers, width, config.ffn
        self.gate = _matrix(scope, "gate", L, (D, F), ("width", "ffn"), D)
        self.up = _matrix(scope, "up", L, (D, F), ("width", "ffn"), D)
        self.down = _matrix(scope, "down", L, (F, D), ("ffn", "width"), F)
        self.ffn_norm = _vector(scope, "ffn_norm", L, D)
        if config.post_norm:
            self.ffn_post_norm = _vector(scope, "ffn_post_norm", L, D)


def _matrix(
    scope: Scope,
    name: str,
    layers: int,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    fan_in: int,
) -> nnx.Param[jax.Array]:
    # What is added to the residual stream is scaled down by its 2L contributions (GPT-2).
    depth = (2 * layers) ** -0.5 if name in ("o", "down") else 1.0
    std = depth * fan_in**-0.5
    return scope.param(name, (layers, *shape), ("layers", *axes), "matrix", normal(std))


def _vector(scope: Scope, name: str, layers: int, size: int) -> nnx.Param[jax.Array]:
    return scope.param(name, (layers, size), ("layers", None), "vector", ones)


def _bias(
    scope: Scope, name: str, layers: int, shape: tuple[int, ...], heads: str | None
) -> nnx.Param[jax.Array]:
    return scope.param(name, (layers, *shape), ("layers", heads, "head_dim"), "vector", zeros)


class Trunk(nnx.Module):
    """x_BTD → h_BTD, normed."""

    def __init__(
        self, config: TrunkConfig, scope: Scope, width: int, memories: Sequence[Memory] = ()
    ) -> None:
        layout = scope.layout
        if not layout.explicit:
            raise UserError(
                "the trunk needs a mesh of explicit axes: vocabjax.make_mesh({...}), without explicit=False"
            )
        layout.require("trunk.heads", "heads", config.heads)
        layout.require("trunk.ffn", "ffn", config.ffn)
        layout.require("vocab.width", "width", width)
        for inner in ("heads", "ffn"):
            layout.spec("batch", "seq", inner)  # refuses rules that place two of them on one axis
        self.config, self.layout = config, layout
        self.layers = Layers(config, scope / "layers", width)
        self.final_norm = RMSNorm(scope / "final_norm", width)
        self.segments = plan_segments(config.layers, [memory.layers for memory in memories])

    def __call__(
        self,
        x_BTD: jax.Array,
        tokens: Tokens,
        memories: Sequence[Memory] = (),
        contexts: Sequence[tuple[Any, Any]] = (),
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Runs all layers.

        Args:
          x_BTD: the encoded tokens; their dtype is the compute dtype.
          tokens: documents and positions.
          memories, contexts: the vocabulary's memories and what they prepared, in the same order.
          cache: with it, the T tokens follow those already in it.

        Returns:
          (h_BTD after the final norm, the cache with these tokens in it or None).
        """
        # Some operations forget the sharding of a dimension of size 1: a batch of one row.
        tokens = tokens._replace(
            segment_BT=self.layout.place(tokens.segment_BT, "batch", "seq"),
            position_BT=self.layout.place(tokens.position_BT, "batch", "seq"),
        )
        if cache is None:
            segment_kv, start = tokens.segment_BT, None
        else:
            start = cache.length
            segment_kv = lax.dynamic_update_slice_in_dim(
                cache.segment_BS, tokens.segment_BT, start, 1
            )
        commons = tuple(common for common, _ in contexts)
        around = _Around(
            *(self.config, self.layout, tokens, self.rotation(tokens.position_BT)),
            *(segment_kv, start, memories, commons),
        )
        layer: Callable[..., Any] = functools.partial(_layer, around)
        if cache is None:
            layer = rematerialised(self.config, layer, static_argnums=(0,))

        arrays = self.layers.arrays()
        kv = None if cache is None else (cache.k_LBSGK, cache.v_LBSGK)
        memory_state = tuple(
            (memory.per_layer(), contexts[i][1], None if cache is None else cache.memories[i])
            for i, memory in enumerate(memories)
        )
        kv_out, memory_out = [], []
        for segment in self.segments:
            x_BTD, kv_segment, caches = _scan_segment(
                segment, layer, memories, x_BTD, arrays, kv, memory_state
            )
            kv_out.append(kv_segment)
            memory_out.append(caches)
        h_BTD = self.final_norm(x_BTD)
        if cache is None:
            return h_BTD, None
        k, v = jax.tree.map(lambda *parts: jnp.concatenate(parts), *kv_out)
        caches = jax.tree.map(lambda *parts: jnp.concatenate(parts), *memory_out)
        return h_BTD, Cache(k, v, segment_kv, cache.length + tokens.ids_BT.shape[1], caches)

    def rotation(self, position_BT: jax.Array) -> Rotation:
        """What turns queries and keys to their positions."""
        return rotation(position_BT, self.layers.q.shape[-1], self.config.rope_theta)

    def flops(self, length: int) -> int:
        """FLOPs per token of the forward: matrix products, and causal attention over (length + 1) / 2 keys on average."""
        config = self.config
        head = self.layers.q.shape[-1]
        # Scores and weighted values: 2 · 2 · N · K per key.
        keys = 2 * config.layers * config.heads * head * (length + 1)
        return matrix_flops(self) + keys

    def init_cache(
        self, batch: int, length: int, dtype: jnp.dtype, memories: Sequence[Memory] = ()
    ) -> Cache:
        """An empty cache for `length` positions."""
        config = self.config
        head = self.layers.k.shape[-1]
        shape = (config.layers, batch, length, config.kv_heads, head)
        axes = (None, "batch", None, kv_axis(self.layout, config.kv_heads), None)
        empty = jnp.zeros(shape, dtype, out_sharding=self.layout.sharding(*axes))
        segment = jnp.full(
            (batch, length), -1, jnp.int32, out_sharding=self.layout.sharding("batch", None)
        )
        caches = tuple(memory.init_cache(batch) for memory in memories)
        return Cache(empty, empty, segment, jnp.int32(0), caches)


def rematerialised(
    config: TrunkConfig, layer: Callable[..., Any], static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """A layer to be scanned, whose backward recomputes what `config.remat` says."""
    policies = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    if config.remat == "none":
        return layer
    # Inside a scan nothing can be merged with its recomputation, so no barrier is needed.
    return jax.checkpoint(
        layer, policy=policies[config.remat], prevent_cse=False, static_argnums=static_argnums
    )


def plan_segments(layers: int, attached: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    """Cuts the layers into scans of equal blocks.

    Two layers are equal when the same memories attach to them. Where layers alternate (value embeddings), a block is one
    period of up to 4 layers, so that the number of scans does not grow with depth.
    """
    signature = [
        tuple(i for i, where in enumerate(attached) if layer in where) for layer in range(layers)
    ]
    segments: list[Segment] = []
    start = 0
    while start < layers:
        best = Segment(start, 1, 1)
        for period in range(1, min(4, layers - start) + 1):
            block = signature[start : start + period]
            repeats = 1
            while signature[start + repeats * period : start + (repeats + 1) * period] == block:
                repeats += 1
            candidate = Segment(start, period, repeats)
            # A longer block must repeat to be worth its compile time.
            if candidate.stop > best.stop and (repeats > 1 or period == 1):
                best = candidate
        segments.append(best)
        start = best.stop
    return tuple(segments)


def _scan_segment(
    segment: Segment,
    layer: Callable[..., Any],
    memories: Sequence[Memory],
    x_BTD: jax.Array,
    arrays: dict[str, jax.Array],
    kv: tuple[jax.Array, jax.Array] | None,
    memory_state: tuple[Any, ...],
) -> tuple[jax.Array, Any, tuple[Any, ...]]:
    """Runs one segment; returns x, its layers' keys and values, and the memories' caches, leading axis its layers."""

    def blocks(tree: Any, start: int, count: int) -> Any:
        def cut(a: jax.Array) -> jax.Array:
            piece = a if count == a.shape[0] else lax.slice_in_dim(a, start, start + count)
            return _regroup(piece, 1, (segment.repeats, count // segment.repeats))

        return jax.tree.map(cut, tree)

    inside = [
        [at for at, index in enumerate(memory.layers) if segment.start <= index < segment.stop]
        for memory in memories
    ]
    attached = [i for i, where in enumerate(inside) if where]
    xs = (
        blocks(arrays, segment.start, segment.stop - segment.start),
        blocks(kv, segment.start, segment.stop - segment.start),
        {i: blocks(memory_state[i], inside[i][0], len(inside[i])) for i in attached},
    )

    def body(x: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        params, kv, state = xs
        kv_out = []
        caches: dict[int, list[Any]] = {i: [] for i in attached}
        for j in range(segment.period):
            here = tuple(i for i in attached if segment.start + j in memories[i].layers)
            taken = {i: _slice_at(state[i], len(caches[i])) for i in here}
            x, kv_j, caches_j = layer(here, x, _slice_at(params, j), _slice_at(kv, j), taken)
            kv_out.append(kv_j)
            for i in here:
                caches[i].append(caches_j[i])
        stack = functools.partial(jax.tree.map, lambda *parts: jnp.stack(parts))
        return x, (stack(*kv_out), {i: stack(*caches[i]) for i in attached})

    x_BTD, (kv_out, caches) = lax.scan(body, x_BTD, xs)
    flat = functools.partial(jax.tree.map, lambda a: _regroup(a, 2, (a.shape[0] * a.shape[1],)))
    # Memories with no layer here contribute nothing: an empty slice of their own cache.
    return (
        x_BTD,
        flat(kv_out),
        tuple(
            flat(caches[i]) if i in caches else jax.tree.map(lambda a: a[:0], memory_state[i][2])
            for i in range(len(memories))
        ),
    )


def _slice_at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda a: a[index], tree)


def _regroup(a: jax.Array, leading: int, sizes: tuple[int, ...]) -> jax.Array:
    """Reshapes the first `leading` dimensions, which are not sharded, to `sizes`."""
    # The sharding is stated because a plain reshape forgets that of a dimension of size 1: a batch of one row.
    sharding = jax.typeof(a).sharding
    spec = PartitionSpec(*[None] * len(sizes), *sharding.spec[leading:])
    return jnp.reshape(a, (*sizes, *a.shape[leading:]), out_sharding=sharding.update(spec=spec))


class _Around(NamedTuple):
    """What is the same for all layers of one pass."""

    config: TrunkConfig
    layout: Layout
    tokens: Tokens
    rotation: Rotation
    segment_kv_BS: jax.Array
    start: jax.Array | None  # index of the first token, with a cache
    memories: Sequence[Memory]
    commons: tuple[Any, ...]  # what each memory prepared for all its layers


def _layer(
    around: _Around,
    active: tuple[int, ...],
    x_BTD: jax.Array,
    params: LayerParams,
    kv: tuple[jax.Array, jax.Array] | None,
    state: dict[int, Any],
) -> tuple[jax.Array, Any, dict[int, Any]]:
    """One layer. `active` names the memories attached to it; `state[i]` is (params, context, cache) of memory i."""
    config, layout, tokens, turn, segment_kv_BS, start, memories, commons = around
    caches: dict[int, Any] = {}

    def at_site(site: Site, h_BTD: jax.Array, y: jax.Array) -> jax.Array:
        for i in active:
            if memories[i].site == site:
                memory_params, context, cache = state[i]
                y, caches[i] = memories[i].apply(
                    memory_params, commons[i], context, h_BTD, y, cache
                )
        return y

    x_BTD = at_site("pre_attn", x_BTD, x_BTD)
    with jax.named_scope("attention"):
        h_BTD = rms_norm(x_BTD, params["attn_norm"])
        q, k, v = project(config, layout, params, h_BTD, h_BTD, turn)
        v = at_site("value", h_BTD, v)
        if kv is not None and start is not None:
            k = lax.dynamic_update_slice_in_dim(kv[0], k, start, 1)
            v = lax.dynamic_update_slice_in_dim(kv[1], v, start, 1)
        attended = attention(layout, q, k, v, tokens.segment_BT, segment_kv_BS, start)
        x_BTD = x_BTD + merge(layout, params, attended)

    with jax.named_scope("feed_forward"):
        h_BTD = rms_norm(x_BTD, params["ffn_norm"])
        x_BTD = x_BTD + at_site("ffn_out", h_BTD, feed_forward(layout, params, h_BTD))
    x_BTD = at_site("post_ffn", x_BTD, x_BTD)
    return x_BTD, (None if kv is None else (k, v)), caches


def project(
    config: TrunkConfig,
    layout: Layout,
    params: LayerParams,
    h_BTD: jax.Array,
    m_BSD: jax.Array,
    turn: Rotation | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, K] of h, keys and values [B, S, G, K] of m.

    Args:
      turn: of the positions of both, where S = T; None: without positions.
    """
    kv = kv_axis(layout, config.kv_heads)
    q = dense(h_BTD, _weight(layout, params["q"], h_BTD, None, "heads", None))
    k = dense(m_BSD, _weight(layout, params["k"], m_BSD, None, kv, None))
    v = dense(m_BSD, _weight(layout, params["v"], m_BSD, None, kv, None))
    if config.qkv_bias:
        q, k, v = (
            x + params[f"{name}_bias"].astype(x.dtype) for x, name in ((q, "q"), (k, "k"), (v, "v"))
        )
    if config.qk_norm:
        q, k = rms_norm(q, params["q_norm"]), rms_norm(k, params["k_norm"])
    if turn is not None:
        q, k = rotate(q, turn), rotate(k, turn)
    return q, k, v


def merge(layout: Layout, params: LayerParams, attended_BTNK: jax.Array) -> jax.Array:
    """[B, T, D]: what the heads add to the residual stream."""
    o_NKD = _weight(layout, params["o"], attended_BTNK, "heads", None, None)
    residual = layout.sharding("batch", "seq", None)
    y_BTD = jnp.einsum("btnk,nkd->btd", attended_BTNK, o_NKD, out_sharding=residual)
    return rms_norm(y_BTD, params["attn_post_norm"]) if "attn_post_norm" in params else y_BTD


def feed_forward(layout: Layout, params: LayerParams, h_BTD: jax.Array) -> jax.Array:
    """[B, T, D]: (silu(h·gate) ⊙ h·up)·down."""
    gate_BTF = dense(h_BTD, _weight(layout, params["gate"], h_BTD, None, "ffn"))
    up_BTF = dense(h_BTD, _weight(layout, params["up"], h_BTD, None, "ffn"))
    y_BTD = jnp.einsum(
        "btf,fd->btd",
        jax.nn.silu(gate_BTF) * up_BTF,
        _weight(layout, params["down"], h_BTD, "ffn", None),
        out_sharding=layout.sharding("batch", "seq", None),
    )
    return rms_norm(y_BTD, params["ffn_post_norm"]) if "ffn_post_norm" in params else y_BTD


def _weight(layout: Layout, value: jax.Array, like: jax.Array, *axes: str | None) -> jax.Array:
    # Cast, then gathered over the width's axes (fsdp): the collective moves the narrow dtype.
    return gathered(layout, value.astype(like.dtype), *axes)
