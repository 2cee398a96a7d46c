"""h · w over the width D, with a backward that suits XLA on a CPU, and w gathered for it where its width is sharded.

JAX makes the gradient of w as g · h, transposed. On a CPU, XLA copies the left operand of that product with its tokens last, which
takes longer than the product does: of g, [B, T, 3·D] or so, for every w. h · g is the same, and copies h: narrower, and once for
all the weights that multiply it.

Under fsdp every device has tokens of its own and keeps a part of w. The gradient of the whole w is then a sum over devices of which
each needs its part. XLA may all-reduce the sum and cut it, which sends twice as much; here it is a reduce-scatter by construction.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from vocabjax.mesh import Layout


@jax.custom_vjp
def dense(h_BTD: jax.Array, w_DX: jax.Array) -> jax.Array:
    """h · w: [B, T, D] and [D, ...] to [B, T, ...], all of one dtype. On explicit axes; D is not sharded."""
    return jnp.tensordot(h_BTD, w_DX, 1)


def _forward(h_BTD: jax.Array, w_DX: jax.Array) -> tuple[jax.Array, Any]:
    return dense(h_BTD, w_DX), (h_BTD, w_DX)


def _backward(kept: Any, g_BTX: jax.Array) -> tuple[jax.Array, jax.Array]:
    h_BTD, w_DX = kept
    inner = w_DX.ndim - 1
    of_w, of_h = jax.typeof(w_DX).sharding, jax.typeof(h_BTD).sharding
    # Where `gathered` reduces, the products of this device's tokens are left as they are.
    left = PartitionSpec(*of_w.spec.partitions, unreduced=of_w.spec.reduced)
    after = tuple(range(2, 2 + inner)), tuple(range(1, 1 + inner))
    return (
        lax.dot_general(g_BTX, w_DX, (after, ((), ())), out_sharding=of_h),
        lax.dot_general(
            h_BTD, g_BTX, (((0, 1), (0, 1)), ((), ())), out_sharding=of_w.update(spec=left)
        ),
    )


dense.defvjp(_forward, _backward)


def gathered(layout: Layout, w: jax.Array, *axes: str | None) -> jax.Array:
    """`layout.place(w, *axes)`, for a weight that multiplies activations: its gradient is reduced into the parts that are kept."""
    if not layout.explicit:
        return layout.place(w, *axes)
    part, whole = jax.typeof(w).sharding.spec.partitions, layout.spec(*axes).partitions
    of_tokens = {*layout.axes("batch"), *layout.axes("seq")}
    cut = [dim for dim in range(w.ndim) if part[dim] != whole[dim]]
    over = layout.axes("width")
    if len(cut) != 1 or whole[cut[0]] is not None or set(over) != of_tokens:
        return layout.place(w, *axes)
    return _gathered(_Gather(layout, part, whole, cut[0], over), w)


class _Gather(NamedTuple):
    layout: Layout
    part: tuple[Any, ...]
    whole: tuple[Any, ...]
    dim: int
    over: tuple[str, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(at: _Gather, w: jax.Array) -> jax.Array:
    # "Reduced": that its cotangent is not, but one summand per device.
    spec = PartitionSpec(*at.whole, reduced=set(at.over))
    return jax.sharding.reshard(w, NamedSharding(at.layout.mesh, spec))


def _scattered(at: _Gather, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (
        jax.shard_map(
            lambda x: lax.psum_scatter(x, at.over, scatter_dimension=at.dim, tiled=True),
            mesh=at.layout.mesh,
            in_specs=PartitionSpec(*at.whole, unreduced=set(at.over)),
            out_specs=PartitionSpec(*at.part),
        )(g),
    )


_gathered.defvjp(lambda at, w: (_gathered(at, w), None), _scattered)
