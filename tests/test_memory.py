"""Memories inside the scanned trunk: the same as a plain loop over layers, in training and in decoding, on any mesh."""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import put
from models import layout_on, quick_jit, random_params
from test_generate import Trigrams

from vocabjax.attention import kv_axis, rotate
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, LanguageModel, Params
from vocabjax.norms import rms_norm
from vocabjax.optim import GroupConfig, OptimConfig, make_optimizer
from vocabjax.param import normal
from vocabjax.state import init_state
from vocabjax.step import make_step, to_device
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import UntiedHead
from vocabjax.vocab.interfaces import (
    Context,
    Memory,
    MemoryConfig,
    Reads,
    Rows,
    Site,
    Tokens,
    TrunkShape,
)

ONE, WIDE = "data=1,model=1", "data=2,model=4"
TRUNK = TrunkConfig(layers=6, heads=8, kv_heads=4, head_dim=4, ffn=16)  # G · K = D


@dataclass(frozen=True)
class Toy(MemoryConfig):
    """update_t = f_t, f_t = (row_t · matrix_l) ⊙ σ(h_t); with `carries`, + f_{t−1} / 2 inside a document.

    Attributes:
      site, layers: where it attaches.
      carries: whether a token's update needs the one before it, and so a cache in decoding.
    """

    kind: ClassVar[str] = "toy"
    site: Site
    layers: tuple[int, ...]
    carries: bool = False

    def build(self, context: Context, trunk: TrunkShape) -> Memory:
        assert max(self.layers) < trunk.layers
        return ToyMemory(self, context, trunk)


class ToyMemory(Memory):
    def __init__(self, config: Toy, context: Context, trunk: TrunkShape) -> None:
        self.kv_axis = kv_axis(context.scope.layout, trunk.kv_heads)
        self.site, self.layers, self.carries = config.site, config.layers, config.carries
        self.layout: Layout = context.scope.layout
        count, width, scope = len(config.layers), context.width, context.scope
        self.table = scope.param(
            "table",
            (context.sizes.padded, count * 8),
            ("vocab", "table_width"),
            "memory",
            normal(1.0),
            rows=context.sizes.logical,
        )
        self.matrix = scope.param(
            "matrix", (count, 8, width), ("layers", None, None), "matrix", normal(1.0)
        )

    def tables(self) -> dict[str, nnx.Param[jax.Array]]:
        return {"rows": self.table}

    def reads(self, tokens: Tokens) -> Reads:
        return {"rows": tokens.ids_BT}

    def prepare(self, rows: Rows, tokens: Tokens, x_BTD: jax.Array) -> tuple[Any, Any]:
        parts = jnp.split(rows["rows"], len(self.layers), axis=-1)
        continues_BT1 = (tokens.position_BT > 0)[..., None].astype(x_BTD.dtype)
        return continues_BT1, jnp.stack(parts)

    def per_layer(self) -> Any:
        return {"matrix": self.matrix[...]}

    def apply(
        self, params: Any, common: Any, context: Any, h_BTD: jax.Array, y: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        continues_BT1, row_BTE = common, context
        f_BTD = (row_BTE @ params["matrix"]) * jax.nn.sigmoid(h_BTD)
        update = f_BTD
        if self.carries:
            first_B1D = jnp.zeros_like(f_BTD[:, :1]) if cache is None else cache[:, None]
            before_BTD = jnp.concatenate([first_B1D, f_BTD[:, :-1]], 1)
            update = f_BTD + continues_BT1 * before_BTD / 2
        if self.site == "value":
            update = jnp.reshape(
                update, y.shape, out_sharding=self.layout.sharding("batch", "seq", None, None)
            )
            update = self.layout.place(update, "batch", "seq", self.kv_axis, None)
        return y + update, f_BTD[:, -1] if self.carries and cache is not None else cache

    def init_cache(self, batch: int) -> Any:
        if not self.carries:
            return None
        shape = (len(self.layers), batch, self.matrix.shape[-1])
        return jnp.zeros(shape, out_sharding=self.layout.sharding(None, "batch", None))


EVERY, ODD, TWO = tuple(range(6)), (1, 3, 5), (1, 4)
# Blocks of two layers, where one memory attaches to both and the other to the second.
PAIRED = (Toy("post_ffn", EVERY, carries=True), Toy("value", ODD))
# Each site; the patterns make one scan, blocks of two layers, and scans around special layers.
SIMPLE = (
    (Toy("pre_attn", EVERY, carries=True),),
    (Toy("value", ODD),),
    (Toy("ffn_out", TWO, carries=True),),
    (Toy("post_ffn", ODD, carries=True),),
    PAIRED,
)
# Overlapping memories that cut the scan into unequal segments; two of them decode with a cache.
MIXED = (
    Toy("pre_attn", EVERY, carries=True),
    Toy("value", ODD),
    Toy("ffn_out", TWO, carries=True),
    Toy("post_ffn", (5,)),
)


@functools.cache
def model_on(mesh: str, memories: tuple[Toy, ...], remat: Any = "none") -> tuple[Blueprint, Params]:
    vocab = VocabConfig(size=20, width=16, multiple=4, memories=memories)
    blueprint = Blueprint(vocab, replace(TRUNK, remat=remat), layout_on(mesh))
    return blueprint, random_params(blueprint)


def tokens_on(layout: Layout) -> Tokens:
    """Two rows of packed documents."""
    ids_BT = np.random.default_rng(0).integers(0, 20, (2, 6))
    segment_BT = [[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]]
    position_BT = [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    arrays = (ids_BT, segment_BT, position_BT)
    return Tokens(*[put(layout, np.asarray(a, np.int32), "batch", "seq") for a in arrays])


def slice_at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda a: a[index], tree)


def plain_loop(model: LanguageModel, tokens: Tokens) -> jax.Array:
    """h_BTD by a Python loop over layers, with each memory in its place."""
    vocab, memories = model.vocab, model.vocab.memories
    rows = vocab.gather(tokens)
    x = vocab.embed(rows, tokens)
    contexts = vocab.contexts(rows, tokens, x)
    arrays = model.trunk.layers.arrays()
    serves_GN = jnp.kron(jnp.eye(4), jnp.ones((1, 2)))  # a key head serves two query heads
    index_T = jnp.arange(x.shape[1])
    is_seen_BTS = (tokens.segment_BT[:, :, None] == tokens.segment_BT[:, None]) & (
        index_T[:, None] >= index_T
    )

    for layer in range(TRUNK.layers):
        p = slice_at(arrays, layer)

        def visit(site: Site, h: jax.Array, y: jax.Array, layer: int = layer) -> jax.Array:
            for memory, context in zip(memories, contexts, strict=True):
                if memory.site == site and layer in memory.layers:
                    here = memory.layers.index(layer)
                    params, own = slice_at((memory.per_layer(), context[1]), here)
                    y, _ = memory.apply(params, context[0], own, h, y, None)
            return y

        x = visit("pre_attn", x, x)
        h = rms_norm(x, p["attn_norm"])
        q, k, v = (jnp.einsum("btd,dnk->btnk", h, p[name]) for name in "qkv")
        v = visit("value", h, v)
        q, k = (rotate(a, model.trunk.rotation(tokens.position_BT)) for a in (q, k))
        k, v = (jnp.einsum("bsgk,gn->bsnk", a, serves_GN) for a in (k, v))
        scores = jnp.einsum("btnk,bsnk->bnts", q, k) / 2  # √K
        weights = jax.nn.softmax(jnp.where(is_seen_BTS[:, None], scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("bnts,bsnk,nkd->btd", weights, v, p["o"])
        h = rms_norm(x, p["ffn_norm"])
        out = (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        x = x + visit("ffn_out", h, out)
        x = visit("post_ffn", x, x)
    return rms_norm(x, model.trunk.final_norm.scale[...])


def weigh(h_BTD: jax.Array) -> jax.Array:
    """A scalar that every hidden state enters."""
    direction = np.random.default_rng(3).normal(size=h_BTD.shape).astype(np.float32)
    return (h_BTD * direction).sum()


@functools.cache
def looped(memories: tuple[Toy, ...]) -> np.ndarray:
    """Hidden states by the plain loop, with nothing sharded."""
    blueprint, params = model_on("replica=1", memories)
    run = quick_jit(lambda p, tokens: plain_loop(blueprint.bind(p), tokens))
    with jax.set_mesh(blueprint.layout.mesh):
        return np.asarray(run(params, tokens_on(blueprint.layout)))


@functools.cache
def looped_gradient() -> Params:
    """The gradient of `weigh` for `MIXED`, by the plain loop."""
    blueprint, params = model_on("replica=1", MIXED)
    run = quick_jit(jax.grad(lambda p, tokens: weigh(plain_loop(blueprint.bind(p), tokens))))
    with jax.set_mesh(blueprint.layout.mesh):
        return jax.tree.map(np.asarray, run(params, tokens_on(blueprint.layout)))


def scanned(blueprint: Blueprint) -> Any:
    """`weigh` of the trunk's hidden states, them, and the gradient."""

    def run(params: Params, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        h_BTD, _ = blueprint.bind(params).hidden(tokens)
        return weigh(h_BTD), h_BTD

    return jax.value_and_grad(run, has_aux=True)


@pytest.mark.parametrize("memories", SIMPLE, ids=lambda memories: memories[0].site)
def test_the_scanned_trunk_equals_a_plain_loop(memories: tuple[Toy, ...]) -> None:
    blueprint, params = model_on(ONE, memories)
    tokens = tokens_on(blueprint.layout)
    h_BTD = quick_jit(lambda p: blueprint.bind(p).hidden(tokens)[0])(params)
    np.testing.assert_allclose(h_BTD, looped(memories), atol=2e-4)


@pytest.mark.parametrize(("mesh", "remat"), [(ONE, "full"), (WIDE, "none")])
def test_overlapping_memories_and_their_gradients_equal_a_plain_loop_s(
    mesh: str, remat: str
) -> None:
    blueprint, params = model_on(mesh, MIXED, remat)
    with jax.set_mesh(blueprint.layout.mesh):
        (_, h_BTD), gradient = quick_jit(scanned(blueprint))(params, tokens_on(blueprint.layout))
    np.testing.assert_allclose(h_BTD, looped(MIXED), atol=2e-4)
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(gradient),
        jax.tree.leaves(looped_gradient()),
        strict=True,
    )
    for (path, ours), theirs in leaves:
        rows = slice(20) if "table" in str(path) else slice(None)
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(
            np.asarray(ours)[rows] / scale, theirs[rows] / scale, atol=1e-4, err_msg=str(path)
        )


def test_gradients_reach_the_rows_that_were_read_and_every_layer_s_parameters() -> None:
    read = np.unique(tokens_on(layout_on(ONE)).ids_BT).tolist()
    for index, memory in enumerate(MIXED):
        gradient = looped_gradient()["vocab"]["memories"][index]
        touched_V = np.abs(gradient["table"]).max(-1) > 0
        assert np.flatnonzero(touched_V).tolist() == read
        per_layer = np.abs(gradient["matrix"]).max((1, 2))
        assert per_layer.shape == (len(memory.layers),) and (per_layer > 0).all()


@pytest.mark.parametrize(
    ("mesh", "memories", "first"),
    [(ONE, PAIRED, 3), (WIDE, MIXED, 1)],
)
def test_decoding_with_the_memories_caches_equals_the_full_pass(
    mesh: str, memories: tuple[Toy, ...], first: int
) -> None:
    blueprint, params = model_on(mesh, memories)
    tokens = tokens_on(blueprint.layout)
    with jax.set_mesh(blueprint.layout.mesh):
        cache = blueprint.bind(params).init_cache(2, 6)
        run = quick_jit(lambda p, tokens, cache: blueprint.bind(p).hidden(tokens, cache))
        pieces, start = [], 0
        for stop in (first, *range(first + 1, 7)):  # a prefill, then one token at a time
            part = Tokens(*[a[:, start:stop] for a in tokens[:3]])
            h_BTD, cache = run(params, part, cache)
            pieces.append(np.asarray(h_BTD))
            start = stop
    np.testing.assert_allclose(np.concatenate(pieces, 1), looped(memories), atol=2e-4)


def test_the_program_does_not_grow_with_depth_where_memories_alternate() -> None:
    sizes = []
    for layers in (8, 16):
        everywhere, odd = tuple(range(layers)), tuple(range(1, layers, 2))
        memories = (Toy("value", odd), Toy("post_ffn", everywhere), Toy("ffn_out", (0, 1)))
        vocab = VocabConfig(size=20, width=16, multiple=4, memories=memories)
        blueprint = Blueprint(vocab, replace(TRUNK, layers=layers), layout_on(ONE))
        tokens = tokens_on(blueprint.layout)
        lowered = jax.jit(scanned(blueprint)).lower(blueprint.abstract(), tokens)
        # Matrix products only: a memory of more layers has a wider row to cut up.
        sizes.append(lowered.as_text().count("dot_general"))
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("mesh", [ONE, WIDE])
def test_microbatches_change_nothing_where_parts_read_ids_before_and_memories_carry(
    mesh: str,
) -> None:
    """A step on [2, B/2, T] equals one on [1, B, T]: reads of each microbatch see its own rows and documents."""
    vocab = VocabConfig(
        size=20, width=16, multiple=4, input=Trigrams(), head=UntiedHead(), memories=PAIRED
    )
    blueprint = Blueprint(vocab, TRUNK, layout_on(mesh))
    rng = np.random.default_rng(1)
    host = {
        "ids": rng.integers(0, 20, (4, 6)),
        "targets": rng.integers(0, 20, (4, 6)),
        "segment": np.repeat([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]], 2, axis=0),
        "position": np.repeat([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]], 2, axis=0),
    }
    plain = {
        info.role: GroupConfig(optimizer="sgd", weight_decay=0.0)
        for info in blueprint.infos.values()
    }
    config = OptimConfig(lr=1.0, warmup=0, schedule="constant", clip=None, **plain)
    optimizer = make_optimizer(config, blueprint.infos.values(), 1)
    changed = []
    for parts in (1, 2):
        with jax.set_mesh(blueprint.layout.mesh):
            batch = to_device(
                blueprint.layout,
                {name: x.reshape(parts, -1, 6).astype(np.int32) for name, x in host.items()},
                None,
                "batch",
                "seq",
            )
            state = init_state(optimizer, random_params(blueprint))
            state, metrics = make_step(blueprint, optimizer)(state, batch)
        changed.append((metrics.loss, metrics.gradient_norm, state.params))
    assert changed[0][1] > 0.1
    for one, two in zip(*map(jax.tree.leaves, changed), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-3, atol=2e-4)
