"""The trunk against a float64 NumPy Transformer; causality and documents by gradient; the same on every mesh."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from meshes import put
from models import layout_on, quick_jit, random_params

from vocabjax.attention import attention, rotate, rotation
from vocabjax.errors import UserError
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint
from vocabjax.norms import LayerNorm, RMSNorm, build_norm
from vocabjax.param import Scope
from vocabjax.trunk import Segment, Trunk, TrunkConfig, plan_segments
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import UntiedHead
from vocabjax.vocab.interfaces import Tokens

ONE = "data=1,model=1"
VOCAB = VocabConfig(size=30, width=16, multiple=4)
# Two query heads per key/value head; head width (4) times heads (8) is not the trunk's width (16).
TRUNK = TrunkConfig(layers=2, heads=8, kv_heads=4, head_dim=4, ffn=24)
RICH = replace(TRUNK, qkv_bias=True, post_norm=True)
Pure = dict[str, Any]


def tokens_on(layout: Layout, segment_BT: Any, ids_BT: Any = None) -> Tokens:
    """Packed documents: positions restart with each segment."""
    segment_BT = np.asarray(segment_BT, np.int32)
    index_T = np.arange(segment_BT.shape[1])
    starts_BT = np.diff(segment_BT, axis=1, prepend=segment_BT[:, :1]) != 0
    position_BT = index_T - np.maximum.accumulate(np.where(starts_BT, index_T, 0), axis=1)
    ids_BT = np.zeros_like(segment_BT) if ids_BT is None else ids_BT
    arrays = (ids_BT, segment_BT, position_BT)
    return Tokens(*[put(layout, a.astype(np.int32), "batch", "seq") for a in arrays])


def one_device(trunk: TrunkConfig = TRUNK) -> tuple[Blueprint, Pure]:
    blueprint = Blueprint(VOCAB, trunk, layout_on(ONE))
    return blueprint, random_params(blueprint)


# --- float64 oracles ---------------------------------------------------------------------------------------------------


def rms_norm_oracle(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rope_oracle(x_BTNK: np.ndarray, position_BT: np.ndarray, theta: float) -> np.ndarray:
    """Dimensions i and i + K/2 are the real and imaginary part of a number turned by position · θ^(−2i/K)."""
    half = x_BTNK.shape[-1] // 2
    number = x_BTNK[..., :half] + 1j * x_BTNK[..., half:]
    angle = position_BT[:, :, None, None] * theta ** (-2 * np.arange(half) / (2 * half))
    turned = number * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def attention_oracle(
    q_BTNK: np.ndarray, k_BSGK: np.ndarray, v_BSGK: np.ndarray, segment_BT: np.ndarray
) -> np.ndarray:
    """One query at a time, over a list of the keys it may see."""
    out = np.zeros_like(q_BTNK)
    group = q_BTNK.shape[2] // k_BSGK.shape[2]
    for b, t, n in np.ndindex(q_BTNK.shape[:3]):
        seen = [s for s in range(t + 1) if segment_BT[b, s] == segment_BT[b, t]]
        keys, values = k_BSGK[b, seen, n // group], v_BSGK[b, seen, n // group]
        scores = keys @ q_BTNK[b, t, n] / np.sqrt(q_BTNK.shape[3])
        weight = np.exp(scores - scores.max())
        out[b, t, n] = weight @ values / weight.sum()
    return out


def trunk_oracle(params: Pure, x_BTD: np.ndarray, tokens: Tokens, theta: float) -> np.ndarray:
    layers = jax.tree.map(lambda a: np.asarray(a, np.float64), params["layers"])
    segment_BT, position_BT = np.asarray(tokens.segment_BT), np.asarray(tokens.position_BT)
    x_BTD = x_BTD.astype(np.float64)
    for index in range(len(layers["q"])):
        p = {name: value[index] for name, value in layers.items()}
        h = rms_norm_oracle(x_BTD, p["attn_norm"])
        q, k, v = (
            np.einsum("btd,dnk->btnk", h, p[name]) + p.get(f"{name}_bias", 0) for name in "qkv"
        )
        if "q_norm" in p:
            q, k = rms_norm_oracle(q, p["q_norm"]), rms_norm_oracle(k, p["k_norm"])
        q, k = rope_oracle(q, position_BT, theta), rope_oracle(k, position_BT, theta)
        y = np.einsum("btnk,nkd->btd", attention_oracle(q, k, v, segment_BT), p["o"])
        if "attn_post_norm" in p:
            y = rms_norm_oracle(y, p["attn_post_norm"])
        x_BTD = x_BTD + y
        h = rms_norm_oracle(x_BTD, p["ffn_norm"])
        gate = h @ p["gate"]
        y = (gate / (1 + np.exp(-gate)) * (h @ p["up"])) @ p["down"]
        if "ffn_post_norm" in p:
            y = rms_norm_oracle(y, p["ffn_post_norm"])
        x_BTD = x_BTD + y
    return rms_norm_oracle(x_BTD, np.asarray(params["final_norm"]["scale"], np.float64))


# --- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True}, {"qkv_bias": True}, {"post_norm": True}], ids=str
)
def test_the_trunk_is_the_numpy_transformer(options: dict[str, bool]) -> None:
    config = replace(TRUNK, **options, rope_theta=50.0)
    blueprint, params = one_device(config)
    tokens = tokens_on(blueprint.layout, [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 3]])
    x_BTD = np.random.default_rng(0).normal(size=(2, 7, 16)).astype(np.float32)
    run = quick_jit(lambda p, x, tokens: blueprint.bind(p).trunk(x, tokens)[0])
    h_BTD = run(params, put(blueprint.layout, x_BTD, "batch", "seq", None), tokens)
    expected = trunk_oracle(params["trunk"], x_BTD, tokens, 50.0)
    np.testing.assert_allclose(h_BTD, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "rules", "kv_heads"),
    [
        (ONE, "default", 1),
        (ONE, "default", 8),
        ("data=2,model=4", "default", 2),
        ("data=2,model=4", "default", 4),
        ("seq=2,model=4", "seq=seq", 2),
    ],
)
def test_attention_is_numpy_s(mesh: str, rules: str, kv_heads: int) -> None:
    layout = layout_on(mesh, rules)
    rng = np.random.default_rng(kv_heads)
    q, k, v = (rng.normal(size=(2, 6, heads, 4)) for heads in (8, kv_heads, kv_heads))
    segment_BT = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 2, 2]], np.int32)
    kv_axis = "heads" if kv_heads % layout.shards("heads") == 0 else None
    on_device = [
        put(layout, x.astype(np.float32), "batch", "seq", axis, None)
        for x, axis in ((q, "heads"), (k, kv_axis), (v, kv_axis))
    ]
    segments = put(layout, segment_BT, "batch", "seq")
    out = quick_jit(functools.partial(attention, layout))(*on_device, segments, segments)
    np.testing.assert_allclose(out, attention_oracle(q, k, v, segment_BT), atol=1e-5)


def test_rope_is_numpy_s_at_far_positions() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32)
    position_BT = np.array([[0, 1, 2], [100, 2047, 4095]], np.int32)
    # Angles in float32: an error of 2^-24 of 4,095 radians.
    np.testing.assert_allclose(
        rotate(jnp.asarray(x), rotation(jnp.asarray(position_BT), 8, 10_000.0)),
        rope_oracle(x.astype(np.float64), position_BT, 10_000.0),
        atol=2e-3,
    )
    nowhere = rotation(jnp.zeros((2, 3), jnp.int32), 8, 1e4)
    np.testing.assert_array_equal(rotate(jnp.asarray(x), nowhere), x)


@pytest.mark.parametrize("shift", [1, 17, 300])
def test_scores_depend_on_relative_positions_alone(shift: int) -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 5, 2, 8)), jnp.float32) for _ in range(2))
    position_BT = jnp.asarray([[0, 1, 2, 5, 9]])

    def scores(offset: int) -> jax.Array:
        turned = [rotate(x, rotation(position_BT + offset, 8, 10_000.0)) for x in (q, k)]
        return jnp.einsum("btnk,bsnk->bnts", *turned)

    np.testing.assert_allclose(scores(0), scores(shift), atol=5e-4)
    assert not np.allclose(scores(0), jnp.einsum("btnk,bsnk->bnts", q, k), atol=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_are_numpy_s(kind: Any, dtype: str) -> None:
    rng = np.random.default_rng(0)
    norm = build_norm(kind, Scope(jax.random.key(0), layout_on(ONE)), 64)
    assert isinstance(norm, RMSNorm if kind == "rmsnorm" else LayerNorm)
    scale, bias = rng.normal(size=(2, 64))
    norm.scale[...] = jnp.asarray(scale, jnp.float32)
    # A mean far from 0 and a tiny row: a variance as E x² − (E x)² or a lost ε would show.
    x = jnp.asarray(rng.normal(size=(3, 64)) * [[1], [1e-3], [50]] + [[300], [0], [0]], dtype)
    wide = np.asarray(x, np.float64)
    if isinstance(norm, RMSNorm):
        expected = rms_norm_oracle(wide, scale)
    else:
        norm.bias[...] = jnp.asarray(bias, jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        expected = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-6) * scale + bias
    out = norm(x)
    assert out.dtype == dtype
    tolerance = 2e-4 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, tolerance, tolerance)


def test_no_norm_is_none() -> None:
    assert build_norm("none", Scope(jax.random.key(0), layout_on(ONE)), 4) is None


# --- who sees whom -----------------------------------------------------------------------------------------------------


@functools.cache
def influence() -> Callable[[list[int]], np.ndarray]:
    """segment ids → ‖∂ h[t] / ∂ x[s]‖ as [T, T]."""
    blueprint = Blueprint(VOCAB, TRUNK, layout_on("model=1"))
    params = random_params(blueprint)
    direction = jnp.asarray(np.random.default_rng(1).normal(size=16), jnp.float32)

    def readout(x_TD: jax.Array, tokens: Tokens) -> jax.Array:
        return (blueprint.bind(params).trunk(x_TD[None], tokens)[0] @ direction)[0]

    jacobian = quick_jit(jax.jacrev(readout))
    x_TD = jnp.asarray(np.random.default_rng(2).normal(size=(6, 16)), jnp.float32)

    def norms(segment_T: list[int]) -> np.ndarray:
        with jax.set_mesh(blueprint.layout.mesh):
            gradient = jacobian(x_TD, tokens_on(blueprint.layout, [segment_T]))
        return np.linalg.norm(np.asarray(gradient, np.float64), axis=-1)

    return norms


@pytest.mark.parametrize(
    "segment_T", [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5], [-1, -1, 0, 0, 0, 1]]
)
def test_a_token_is_influenced_by_the_past_of_its_document_and_by_nothing_else(
    segment_T: list[int],
) -> None:
    norms_TT = influence()(segment_T)
    for t, s in np.ndindex(6, 6):
        if s <= t and segment_T[s] == segment_T[t]:
            assert norms_TT[t, s] > 1e-4
        else:
            assert norms_TT[t, s] == 0  # exactly


def test_a_packed_row_equals_its_documents_run_alone() -> None:
    blueprint, params = one_device()
    packed, first, last = np.random.default_rng(0).integers(0, 30, (3, 10))
    first[:4], last[:6] = packed[:4], packed[4:]  # what follows them is hidden by causality
    segment_BT = [[0] * 4 + [1] * 6, [0] * 10, [0] * 10]
    tokens = tokens_on(blueprint.layout, segment_BT, np.stack([packed, first, last]))
    z_BTV = quick_jit(lambda p: blueprint.bind(p).logits(tokens)[0][..., :30])(params)
    np.testing.assert_allclose(z_BTV[0, :4], z_BTV[1, :4], atol=1e-5)
    np.testing.assert_allclose(z_BTV[0, 4:], z_BTV[2, :6], atol=1e-5)


# --- dtypes, rematerialisation, depth -----------------------------------------------------------------------------------


def loss_and_gradient(
    blueprint: Blueprint, jit: Callable[..., Any] = quick_jit
) -> Callable[[Pure, Tokens, jax.Array], Any]:
    return jit(
        jax.value_and_grad(lambda p, tokens, targets: blueprint.bind(p).loss(tokens, targets).total)
    )


def batch_on(layout: Layout) -> tuple[Tokens, jax.Array]:
    rng = np.random.default_rng(0)
    segment_BT = np.sort(rng.integers(0, 3, (8, 8)), axis=1)
    tokens = tokens_on(layout, segment_BT, rng.integers(0, 30, (8, 8)))
    targets_BT = rng.integers(0, 30, (8, 8)).astype(np.int32)
    targets_BT[0, :5] = -100
    return tokens, put(layout, targets_BT, "batch", "seq")


@functools.cache
def unsharded() -> tuple[float, Pure]:
    """Loss and gradients on one device, without rematerialisation."""
    blueprint, params = one_device(RICH)
    loss, gradient = loss_and_gradient(blueprint)(params, *batch_on(blueprint.layout))
    return float(loss), jax.tree.map(np.asarray, gradient)


def assert_same_gradient(gradient: Pure, expected: Pure) -> None:
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(expected), strict=True
    ):
        logical = 30 if "table" in str(path) else None
        np.testing.assert_allclose(
            np.asarray(ours)[:logical], theirs[:logical], 1e-4, 2e-6, err_msg=str(path)
        )


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(remat: Any) -> None:
    blueprint, params = one_device(replace(RICH, remat=remat))
    loss, gradient = loss_and_gradient(blueprint)(params, *batch_on(blueprint.layout))
    np.testing.assert_allclose(loss, unsharded()[0], 1e-6)
    assert_same_gradient(gradient, unsharded()[1])


def test_rematerialisation_recomputes_more_the_fuller_it_is() -> None:
    products = []
    for remat in ("none", "dots", "full"):
        blueprint, params = one_device(replace(RICH, remat=remat))
        jaxpr = loss_and_gradient(blueprint, jax.make_jaxpr)(params, *batch_on(blueprint.layout))
        products.append(str(jaxpr).count("dot_general"))
    assert products[0] < products[1] < products[2]


def test_bfloat16_computes_narrow_and_keeps_parameters_and_gradients_wide() -> None:
    blueprint = Blueprint(replace(VOCAB, dtype="bfloat16"), TRUNK, layout_on(ONE))
    params = blueprint.abstract()
    tokens, targets_BT = batch_on(blueprint.layout)
    hidden = jax.eval_shape(lambda p: blueprint.bind(p).hidden(tokens)[0], params)
    assert hidden.dtype == jnp.bfloat16
    logits = jax.eval_shape(lambda p: blueprint.bind(p).logits(tokens)[0], params)
    assert logits.dtype == jnp.float32
    gradient = jax.eval_shape(loss_and_gradient(blueprint, lambda f: f), params, tokens, targets_BT)
    leaves = jax.tree.leaves((params, gradient))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    jaxpr = str(jax.make_jaxpr(lambda p: blueprint.bind(p).hidden(tokens)[0])(params))
    products = re.findall(r"(\w+)\[[^]]*\] = dot_general", jaxpr)
    # Attention scores are float32 sums of bf16 products; all else in the trunk stays bf16.
    assert products.count("bf16") >= 7


def test_the_program_does_not_grow_with_depth() -> None:
    sizes = []
    for layers in (4, 16):
        blueprint = Blueprint(VOCAB, replace(TRUNK, layers=layers), layout_on(ONE))
        batch = batch_on(blueprint.layout)
        lowered = loss_and_gradient(blueprint).lower(blueprint.abstract(), *batch)
        sizes.append(len(re.findall(r"^ *%\S+ = ", lowered.as_text(), re.M)))
    assert sizes[0] > 100
    assert sizes[0] == sizes[1]


# --- meshes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ("data=1,model=8", "default"),  # four key/value heads over eight devices: replicated
        ("data=2,model=4", "default"),
        ("data=8,model=1", "default"),
        ("data=2,seq=2,model=2", "seq=seq"),
        ("data=2,model=4", "fsdp"),
        ("data=2,seq=2,model=2", "fsdp,seq=seq,width=data+seq"),
        ("data=2,seq=2,model=2", "fsdp,seq=seq"),  # tokens are cut further than the width
    ],
)
def test_sharded_equals_unsharded(mesh: str, rules: str) -> None:
    blueprint = Blueprint(VOCAB, RICH, layout_on(mesh, rules))
    layout, arguments = blueprint.layout, (random_params(blueprint), *batch_on(blueprint.layout))
    with jax.set_mesh(layout.mesh):
        compiled = loss_and_gradient(blueprint).lower(*arguments).compile()
        loss, gradient = compiled(*arguments)
    np.testing.assert_allclose(loss, unsharded()[0], 1e-5)
    assert_same_gradient(gradient, unsharded()[1])
    q = gradient["trunk"]["layers"]["q"]
    assert q.sharding.is_equivalent_to(
        blueprint.layout.sharding("layers", "width", "heads", "head_dim"), q.ndim
    )
    matrices = [gradient["trunk"]["layers"][name] for name in (*"qkvo", "gate", "up", "down")]
    parts = {part.sharding.shard_shape(part.shape)[1:] for part in matrices}
    found = {shape for kind, shape in collectives(compiled.as_text()) if kind == "reduce-scatter"}
    is_cut = layout.axes("width") == (*layout.axes("batch"), *layout.axes("seq"))
    assert parts & found == (parts if is_cut else set())


def test_key_value_heads_that_do_not_divide_are_replicated() -> None:
    for kv_heads, spec in ((4, "model"), (2, None), (1, None)):
        config = replace(TRUNK, kv_heads=kv_heads)
        layers = Blueprint(VOCAB, config, layout_on("data=2,model=4")).abstract()["trunk"]["layers"]
        assert layers["k"].sharding.spec[2] == spec
        assert layers["v"].sharding.spec[2] == spec
        assert layers["q"].sharding.spec[2] == "model"


@pytest.mark.parametrize(
    ("change", "rules", "message"),
    [
        ({"heads": 6, "kv_heads": 2}, "default", r"trunk.heads = 6 .* use 4 or 8"),
        ({"heads": 2, "kv_heads": 2}, "default", r"trunk.heads = 2 .* use 4,"),
        ({"ffn": 30}, "default", r"trunk.ffn = 30 .* use 28 or 32"),
        ({"kv_heads": 3}, "default", r"trunk.heads = 8 must be a multiple of .* 3"),
        ({"head_dim": 3}, "default", "must be even"),
        ({"head_dim": 0}, "default", "trunk.head_dim = 0 must be at least 1"),
        ({"rope_theta": 0.0}, "default", "trunk.rope_theta = 0.0 must be positive"),
        ({}, "heads=data", "'batch' and 'heads' .* both placed on mesh axis 'data'"),
        ({}, "ffn=data", "'batch' and 'ffn' .* both placed on mesh axis 'data'"),
        ({"layers": 0}, "default", "trunk.layers = 0 must be at least 1"),
    ],
)
def test_other_sizes_that_do_not_divide_are_refused(change: Pure, rules: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Blueprint(VOCAB, replace(TRUNK, **change), layout_on("data=2,model=4", rules))


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocab.width = 18 .* use 16 or 20"):
        Blueprint(replace(VOCAB, width=18), TRUNK, layout_on("data=4,model=2", "fsdp"))
    config = replace(TRUNK, head_dim=None)
    with pytest.raises(UserError, match=r"vocab.width = 18 .* trunk.heads = 8; .* 16 or 24"):
        Blueprint(replace(VOCAB, width=18), config, layout_on(ONE))


# --- initial values ----------------------------------------------------------------------------------------------------


@functools.cache
def born(mesh: str, layers: int) -> dict[str, np.ndarray]:
    """Initial values of a trunk's layers."""
    layout = layout_on(mesh)
    trunk = Trunk(replace(TRUNK, layers=layers), Scope(jax.random.key(0), layout, "trunk"), 16)
    return {name: np.asarray(value) for name, value in trunk.layers.arrays().items()}


@functools.cache
def initial() -> Pure:
    """Initial values of a tied model with two layers on one device."""
    return Blueprint(VOCAB, TRUNK, layout_on(ONE)).init(0)


def test_initial_trunks_are_equal_on_every_mesh() -> None:
    on_eight = born("data=2,model=4", 2)
    jax.tree.map(np.testing.assert_array_equal, initial()["trunk"]["layers"], on_eight)
    # Each layer and matrix has values of its own.
    q_LDNK, gate_LDF = on_eight["q"], on_eight["gate"]
    assert not np.allclose(q_LDNK[0], q_LDNK[1])
    assert not np.allclose(np.ravel(q_LDNK)[:99], np.ravel(gate_LDF)[:99])


def test_initial_trunks_are_equal_under_tied_and_untied_vocabularies() -> None:
    untied = Blueprint(replace(VOCAB, head=UntiedHead()), TRUNK, layout_on(ONE)).init(0)
    assert "table" in untied["vocab"]["head"] and "head" not in initial()["vocab"]
    jax.tree.map(np.testing.assert_array_equal, untied["trunk"], initial()["trunk"])
    # And the input's table, so that the arms of a comparison differ in the head alone.
    jax.tree.map(
        np.testing.assert_array_equal, untied["vocab"]["input"], initial()["vocab"]["input"]
    )


def test_a_deeper_trunk_starts_with_a_shallower_one_s_layers() -> None:
    deep = born(ONE, 5)
    for name, value in initial()["trunk"]["layers"].items():
        # The residual projections are scaled by (2L)^-½.
        factor = (2 / 5) ** 0.5 if name in ("o", "down") else 1
        np.testing.assert_allclose(deep[name][:2], value * factor, rtol=1e-6, err_msg=name)


def test_initial_values_have_the_stated_spread() -> None:
    fans = {"q": 16, "k": 16, "v": 16, "o": 8 * 4 * 10, "gate": 16, "up": 16, "down": 24 * 10}
    for name, value in born(ONE, 5).items():
        if name in fans:  # o and down: the fan-in times 2L
            spread = np.std(value) * fans[name] ** 0.5
            assert abs(spread - 1) < 5 / (2 * value.size) ** 0.5, name
        else:
            np.testing.assert_array_equal(value, 1)


# --- segments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "attached", "expected"),
    [
        (6, [], [Segment(0, 1, 6)]),
        (1, [], [Segment(0, 1, 1)]),
        (6, [range(6)], [Segment(0, 1, 6)]),
        (6, [()], [Segment(0, 1, 6)]),
        (8, [(1, 3, 5, 7)], [Segment(0, 2, 4)]),
        (8, [(0, 2, 4, 6)], [Segment(0, 2, 4)]),
        (9, [(1, 3, 5, 7)], [Segment(0, 2, 4), Segment(8, 1, 1)]),
        (12, [(3, 7, 11)], [Segment(0, 4, 3)]),
        (8, [range(8), (1, 3, 5, 7)], [Segment(0, 2, 4)]),
        (6, [range(3), range(3, 6)], [Segment(0, 1, 3), Segment(3, 1, 3)]),
    ],
)
def test_segments_are_the_fewest_scans(
    layers: int, attached: list[Any], expected: list[Segment]
) -> None:
    assert list(plan_segments(layers, attached)) == expected


@pytest.mark.parametrize(
    ("layers", "attached"),
    [(16, [(2, 15)]), (16, [(2, 15), (2, 5)]), (6, [(1, 4)]), (7, [(0,)]), (5, [(0, 1), (1, 2)])],
)
def test_segments_cover_every_layer_once_and_their_blocks_are_equal(
    layers: int, attached: list[tuple[int, ...]]
) -> None:
    segments = plan_segments(layers, attached)
    assert [segment.start for segment in segments] == [0, *[s.stop for s in segments[:-1]]]
    assert segments[-1].stop == layers
    for segment in segments:
        for layer in range(segment.start, segment.stop - segment.period):
            for where in attached:
                assert (layer in where) == (layer + segment.period in where)
    assert len(segments) <= 1 + 2 * sum(map(len, attached))


def test_two_special_layers_of_sixteen_take_four_scans() -> None:
    starts = [segment.start for segment in plan_segments(16, [(2, 15)])]
    assert starts == [0, 2, 3, 15]
