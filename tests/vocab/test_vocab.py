"""`Vocab`, the object: initial values, tying, scales, foreign trunks, and what it compiles to.

Field reports 1, 4, 6, 19, 23 and the last line's initial values.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from flax import nnx
from hlo import buffers, collectives, compiled_text
from meshes import SOME, layout_of, put

from vocabjax import (
    FullTable,
    IdError,
    Objective,
    TiedHead,
    Tokens,
    UntiedHead,
    UserError,
    Vocab,
    VocabConfig,
    make_mesh,
)
from vocabjax.mesh import Layout
from vocabjax.param import Scope, param_infos, zeros
from vocabjax.vocab.inputs.full import FullInput
from vocabjax.vocab.interfaces import Context
from vocabjax.vocab.loss import reference_cross_entropy

V, B, T, D = 17, 8, 4, 6
IDS_BT = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
TARGETS_BT = np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)
TARGETS_BT[2] = -100


def config(**changes: Any) -> VocabConfig:
    return VocabConfig(**{"size": V, "width": D, "multiple": 1} | changes)


def build(layout: Layout | None = None, seed: int = 0, **changes: Any) -> Vocab:
    layout = layout_of("none") if layout is None else layout
    return Vocab(config(**changes), scope=Scope(jax.random.key(seed), layout))


def leaves(model: nnx.Module) -> dict[str, jax.Array]:
    flat = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in flat}


def host(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


# Initial values


@pytest.mark.parametrize("head", [TiedHead(bias=True), UntiedHead(bias=True)], ids=lambda h: h.kind)
def test_initial_rows_depend_on_neither_the_mesh_nor_the_padding(head):
    expected = leaves(build(head=head))
    for shards, multiple in ((1, 8), (2, 1), (4, 4), (8, 1), (8, 3)):
        mesh = make_mesh({"data": 8 // shards, "model": shards})
        vocab = Vocab(
            config(head=head, multiple=multiple), scope=Scope(jax.random.key(0), Layout.make(mesh))
        )
        got = leaves(vocab)
        assert got.keys() == expected.keys()
        for path, value in got.items():
            np.testing.assert_array_equal(np.asarray(value)[:V], expected[path])
            assert not np.asarray(value)[V:].any()
            assert value.shape[0] == vocab.sizes.padded
            # Field report 6: born sharded, the same number of rows on every device.
            rows = {shard.data.shape[0] for shard in value.addressable_shards}
            assert rows == {vocab.sizes.padded // shards}


def test_tables_are_drawn_apart_and_with_the_stated_deviation():
    vocab = build(size=4000, width=16, input=FullTable(std=0.5), head=UntiedHead())
    table, head = (host(leaves(vocab)[path]) for path in ("input/table", "head/table"))
    # The standard error of 64,000 draws is 0.3 %.
    np.testing.assert_allclose(table.std(), 0.5, rtol=0.02)
    np.testing.assert_allclose(head.std(), 16**-0.5, rtol=0.02)
    assert abs(np.corrcoef(table.ravel(), head.ravel())[0, 1]) < 0.02


def test_the_seed_changes_the_values():
    tables = [leaves(build(seed=seed))["input/table"] for seed in (0, 1)]
    assert not np.isclose(*tables).any()


# Tying


@pytest.mark.parametrize("name", ["none", "data=2,model=4 explicit"])
def test_a_tied_model_has_one_table_in_parameters_gradients_and_moments(name):
    """Field report 4."""
    layout = layout_of(name)
    vocab = build(layout)
    assert list(leaves(vocab)) == ["input/table"]
    params = nnx.split(vocab)[1]
    gradients = jax.eval_shape(jax.grad(objective(vocab)), params)
    moments = jax.eval_shape(optax.scale_by_adam().init, params)
    for tree, tables in ((params, 1), (gradients, 1), (moments, 2)):
        shapes = [leaf.shape for leaf in jax.tree.leaves(tree) if leaf.ndim == 2]
        assert shapes == [(vocab.sizes.padded, D)] * tables
    assert sorted(leaves(build(layout, head=UntiedHead()))) == ["head/table", "input/table"]


def objective(vocab: Vocab, ids: Any = IDS_BT, targets: Any = TARGETS_BT) -> Any:
    """A loss of pure parameters, through the smallest trunk: h = tanh x."""
    graph, _ = nnx.split(vocab)
    ids, targets = (put(vocab.layout, x, "batch", "seq") for x in (ids, targets))

    def loss_fn(params: Any) -> jax.Array:
        model = nnx.merge(graph, params)
        return model.loss(jnp.tanh(model.encode(ids)), targets).total

    return loss_fn


class TwiceStored(FullInput):
    def __init__(self, config: FullTable, context: Context, *, tied: bool) -> None:
        super().__init__(config, context, tied=tied)
        self.alias = self.table


@dataclass(frozen=True)
class TwiceStoredTable(FullTable):
    def build(self, context: Context, *, tied: bool) -> FullInput:
        return TwiceStored(self, context, tied=tied)


def test_a_param_stored_twice_is_refused_at_construction():
    with pytest.raises(UserError, match="'input/alias' and 'input/table' are one Param"):
        Vocab(config(input=TwiceStoredTable()), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", SOME)
def test_the_tied_gradient_is_the_heads_plus_the_scattered_inputs(name):
    """float64: dW = dscoresᵀ h + scatter-add over ids of √D · dx. An untied model with equal tables splits that sum."""
    layout = layout_of(name)
    table = FullTable(scale="sqrt_width")
    tied = build(layout, input=table, head=TiedHead(bias=True))
    untied = build(layout, input=table, head=UntiedHead(bias=True))
    untied.head.table[...] = tied.input.table[...]
    rows_VD = host(tied.input.table[...])
    h_BTD = np.tanh(rows_VD[IDS_BT] * math.sqrt(D))
    expected = oracles.cross_entropy(h_BTD, rows_VD, TARGETS_BT, tied.sizes.allowed_V)
    dx_BTD = expected.dh_BTD * (1 - h_BTD**2)
    from_input = oracles.scatter_add(rows_VD.shape, IDS_BT, dx_BTD * math.sqrt(D))

    results = {}
    for kind, vocab in (("tied", tied), ("untied", untied)):
        total, gradients = jax.jit(jax.value_and_grad(objective(vocab)))(nnx.split(vocab)[1])
        np.testing.assert_allclose(total, expected.total, rtol=1e-5)
        results[kind] = nnx.to_pure_dict(gradients)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(results["untied"]["input"]["table"], from_input, **tolerance)
    np.testing.assert_allclose(results["untied"]["head"]["table"], expected.dtable_VD, **tolerance)
    np.testing.assert_allclose(
        results["tied"]["input"]["table"], from_input + expected.dtable_VD, **tolerance
    )
    for gradients in results.values():
        np.testing.assert_allclose(gradients["head"]["bias"], expected.dbias_V, **tolerance)


def test_an_untied_head_with_the_inputs_rows_computes_the_tied_model():
    settings = {"bias": True, "scale": 0.5, "softcap": 2.0}
    tied, untied = build(head=TiedHead(**settings)), build(head=UntiedHead(**settings))
    h_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
    before = untied.logits(h_BTD)
    untied.head.table[...] = tied.input.table[...]
    np.testing.assert_array_equal(untied.logits(h_BTD), tied.logits(h_BTD))
    assert not np.array_equal(before, tied.logits(h_BTD))
    assert untied.loss(h_BTD, TARGETS_BT) == tied.loss(h_BTD, TARGETS_BT)


# Scales and norms


@pytest.mark.parametrize(
    ("scale", "factor"), [("none", 1.0), ("sqrt_width", math.sqrt(D)), (3.0, 3.0)]
)
def test_the_input_scale_multiplies_once_and_leaves_tied_scores_alone(scale, factor):
    """Field report 19."""
    vocab = build(input=FullTable(scale=scale))
    table_VD = host(vocab.input.table[...])
    np.testing.assert_allclose(vocab.encode(IDS_BT), table_VD[IDS_BT] * factor, rtol=1e-6)
    h_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    z_BTV = np.asarray(vocab.logits(jnp.asarray(h_BTD)))
    np.testing.assert_allclose(z_BTV, oracles.scores(h_BTD, table_VD), rtol=1e-5, atol=1e-5)


def test_the_input_scale_is_not_rounded_to_bf16():
    """√6 is 2.4495, in bf16 2.4531: the row is rounded and the product is rounded, the factor is not."""
    bf16 = jnp.bfloat16
    vocab = build(dtype="bfloat16", input=FullTable(scale="sqrt_width"))
    x_BTD = vocab.encode(IDS_BT)
    rows_BTD = np.asarray(vocab.input.table[...])[IDS_BT].astype(bf16)
    expected = (rows_BTD.astype(np.float32) * np.float32(math.sqrt(D))).astype(bf16)
    assert x_BTD.dtype == bf16
    np.testing.assert_array_equal(x_BTD, expected)
    assert (rows_BTD * np.asarray(math.sqrt(D), bf16) != expected).any()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_the_embedding_norm_acts_on_the_input_path_only(norm):
    vocab, plain = build(input=FullTable(norm=norm)), build()
    table_VD = host(vocab.input.table[...])
    scale = np.random.default_rng(0).normal(size=D)
    vocab.modifiers.norm.scale[...] = jnp.asarray(scale, jnp.float32)
    x_BTD = table_VD[IDS_BT]
    if norm == "layernorm":
        x_BTD = x_BTD - x_BTD.mean(-1, keepdims=True)
    expected = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(vocab.encode(IDS_BT), expected, rtol=1e-4, atol=1e-5)
    h_BTD = jnp.ones((B, T, D))
    np.testing.assert_array_equal(vocab.logits(h_BTD), plain.logits(h_BTD))
    assert vocab.loss(h_BTD, TARGETS_BT) == plain.loss(h_BTD, TARGETS_BT)


def test_bf16_compute_scores_in_float32():
    vocab = build(dtype="bfloat16", head=UntiedHead(bias=True))
    h_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.bfloat16)
    table_VD = host(vocab.head.table[...].astype(jnp.bfloat16))
    z_BTV = vocab.logits(h_BTD)
    assert z_BTV.dtype == jnp.float32
    np.testing.assert_allclose(z_BTV, oracles.scores(host(h_BTD), table_VD), rtol=1e-5, atol=1e-6)
    assert {leaf.dtype for leaf in leaves(vocab).values()} == {jnp.dtype("float32")}


# Ids and labels


def test_host_ids_and_labels_are_checked_by_position_and_value():
    """Field report 1, where an error can still be raised."""
    vocab = build(banned=(3,))
    ids_BT, targets_BT = IDS_BT.copy(), np.where(TARGETS_BT == 3, 4, TARGETS_BT)
    h_BTD = jnp.zeros((B, T, D))
    for bad in (-1, V, vocab.sizes.padded - 1 + V):
        ids_BT[1, 2] = targets_BT[1, 2] = bad
        with pytest.raises(IdError, match=rf"token id {bad} at position \(1, 2\)"):
            vocab.encode(ids_BT)
        for call in (vocab.loss, vocab.nll):
            with pytest.raises(IdError, match=rf"label {bad} at position \(1, 2\)"):
                call(h_BTD, targets_BT)
    targets_BT[1, 2] = 3
    with pytest.raises(IdError, match=r"label 3 at position \(1, 2\) is an input-only id"):
        vocab.loss(h_BTD, targets_BT)
    ids_BT[1, 2] = 3
    vocab.encode(ids_BT.tolist())


@pytest.mark.parametrize("name", ["none", "data=2,model=4 auto"])
def test_device_ids_outside_the_vocabulary_read_zero_rows_and_are_counted(name):
    vocab = build(layout_of(name), multiple=3, head=UntiedHead())
    bad = [-1, V, vocab.sizes.padded - 1, 2**31 - 1]
    ids_BT = IDS_BT.copy()
    ids_BT[3] = bad
    tokens = Tokens.of(ids_BT)
    x_BTD = np.asarray(vocab.encode(jnp.asarray(ids_BT)))
    np.testing.assert_array_equal(x_BTD, vocab.encode(tokens))
    assert not x_BTD[3].any()
    assert x_BTD[:3].all()
    assert vocab.invalid_ids(tokens) == len(bad)
    loss = vocab.loss(jnp.zeros((B, T, D)), jnp.asarray(ids_BT))
    assert loss.invalid == len(bad)
    assert loss.tokens == B * T - len(bad)
    # Scores of h = 0 are uniform.
    np.testing.assert_allclose(loss.total, math.log(V), rtol=1e-6)


def test_weight_is_the_normalizer_of_the_loss():
    vocab = build()
    weights_BT = jnp.asarray(np.random.default_rng(0).uniform(size=(B, T)), jnp.float32)
    h_BTD = jnp.ones((B, T, D))
    targets_BT = jnp.asarray(TARGETS_BT)
    weight = vocab.weight(targets_BT, weights_BT)
    np.testing.assert_allclose(weight, host(weights_BT)[TARGETS_BT >= 0].sum(), rtol=1e-6)
    loss = vocab.loss(h_BTD, targets_BT, weights_BT)
    given = vocab.loss(h_BTD, targets_BT, weights_BT, normalizer=weight)
    assert loss == given
    np.testing.assert_allclose(
        loss.nll, (host(vocab.nll(h_BTD, targets_BT)) * host(weights_BT)).sum(), rtol=1e-5
    )


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": None}, "vocab.size is not set"),
        ({"size": 0}, "vocab.size = 0"),
        ({"width": 0}, "vocab.width = 0"),
        ({"banned": (V,)}, f"vocab.banned: id {V} is outside [0, {V})"),
        ({"objective": Objective(label_smoothing=1.0)}, "vocab.objective.label_smoothing = 1.0"),
        ({"objective": Objective(z_loss=-1.0)}, "z_loss = -1.0"),
        ({"objective": Objective(chunk=0)}, "chunk = 0"),
        ({"head": TiedHead(softcap=0.0)}, "vocab.head.softcap = 0.0"),
        ({"head": UntiedHead(std=-1.0)}, "vocab.head.std = -1.0"),
        ({"objective": Objective(z_loss=math.nan)}, "z_loss = nan"),
        ({"dtype": "float16"}, "vocab.dtype = 'float16'"),
        ({"size": 50.0}, "vocab.size = 50.0"),
        ({"head": "tied"}, "'tied' is no HeadConfig, such as head=TiedHead()"),
        ({"memories": (FullTable(),)}, "is no MemoryConfig"),
        ({"size": 2**31}, "below 2^31"),
    ],
)
def test_settings_that_cannot_work_are_named(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Vocab(config(**changes), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("rngs", [None, 0, {"params": 0}])
def test_random_numbers_are_asked_for(rngs):
    with pytest.raises(UserError, match=re.escape("Vocab(config, rngs=nnx.Rngs(0))")):
        Vocab(config(), rngs=rngs)


@pytest.mark.parametrize("mesh", [(2, 4), {"data": 8}])
def test_a_mesh_is_a_mesh(mesh):
    with pytest.raises(UserError, match="mesh must be a"):
        Vocab(config(), rngs=nnx.Rngs(0), mesh=mesh)


def test_arrays_of_other_shapes_and_types_are_refused_and_named():
    """A transposed [T, B] has the right number of labels: it would give another loss, not an error."""
    vocab = build()
    h_BTD, targets_BT = jnp.zeros((B, T, D)), jnp.asarray(TARGETS_BT)
    weights_BT = jnp.ones((B, T))
    for call in (vocab.loss, vocab.nll):
        for bad in (targets_BT.T, targets_BT[:, 1:], targets_BT[0], TARGETS_BT.T.copy()):
            with pytest.raises(AssertionError, match="targets_BT"):
                call(h_BTD, bad)
        for dtype in (jnp.float32, jnp.bool):
            with pytest.raises(AssertionError):
                call(h_BTD, targets_BT.astype(dtype))
    with pytest.raises(AssertionError, match="weights_BT"):
        vocab.loss(h_BTD, targets_BT, weights_BT[:, 1:])
    assert vocab.loss(h_BTD, targets_BT, host(weights_BT).tolist()) == vocab.loss(h_BTD, targets_BT)
    for bad in (h_BTD[0], h_BTD[..., 1:]):
        with pytest.raises(AssertionError, match="h_BTD"):
            vocab.logits(bad)
    with pytest.raises(UserError, match="h_BTD is float16"):
        vocab.logits(h_BTD.astype(jnp.float16))
    with pytest.raises(AssertionError, match="ids_BT"):
        vocab.encode(targets_BT[0])


def test_a_batch_that_does_not_divide_names_the_sizes_that_would():
    vocab = build(layout_of("data=2,model=4 auto"))
    with pytest.raises(UserError, match=r"the batch of ids_BT = 3 .* use 2 or 4"):
        vocab.encode(np.zeros((3, T), np.int32))
    with pytest.raises(UserError, match=r"the batch of h_BTD = 3 .* use 2 or 4"):
        vocab.loss(jnp.zeros((3, T, D)), np.zeros((3, T), np.int32))


# Somebody else's trunk


class ForeignTrunk(nnx.Module):
    """A model that knows nothing of vocabjax but the object."""

    def __init__(self, rngs: nnx.Rngs, **arguments: Any) -> None:
        self.vocab = Vocab(config(input=FullTable(scale="sqrt_width")), rngs=rngs, **arguments)
        self.layer = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, ids: Any, targets: Any) -> jax.Array:
        return self.vocab.loss(jnp.tanh(self.layer(self.vocab.encode(ids))), targets).total


def foreign_oracle(model: ForeignTrunk) -> tuple[float, np.ndarray, np.ndarray]:
    """Total, and the gradients of the kernel and of the tied table, in float64."""
    table_VD, kernel_DD = host(model.vocab.input.table[...]), host(model.layer.kernel[...])
    x_BTD = table_VD[IDS_BT] * math.sqrt(D)
    h_BTD = np.tanh(x_BTD @ kernel_DD)
    expected = oracles.cross_entropy(h_BTD, table_VD, TARGETS_BT, model.vocab.sizes.allowed_V)
    dy_BTD = expected.dh_BTD * (1 - h_BTD**2)
    dx_BTD = dy_BTD @ kernel_DD.T * math.sqrt(D)
    dkernel_DD = np.einsum("btd,bte->de", x_BTD, dy_BTD)
    scattered = oracles.scatter_add(table_VD.shape, IDS_BT, dx_BTD)
    return expected.total, dkernel_DD, expected.dtable_VD + scattered


def split_and_merge(model: ForeignTrunk) -> tuple[jax.Array, Any]:
    graph, params = nnx.split(model)

    @jax.jit
    def run(params, ids, targets):
        return jax.value_and_grad(lambda p: nnx.merge(graph, p)(ids, targets))(params)

    return run(params, jnp.asarray(IDS_BT), jnp.asarray(TARGETS_BT))


def nnx_transforms(model: ForeignTrunk) -> tuple[jax.Array, Any]:
    run = nnx.jit(nnx.value_and_grad(lambda model, ids, targets: model(ids, targets)))
    return run(model, jnp.asarray(IDS_BT), jnp.asarray(TARGETS_BT))


def eager(model: ForeignTrunk) -> tuple[jax.Array, Any]:
    return nnx.value_and_grad(lambda model: model(IDS_BT, TARGETS_BT))(model)


FOREIGN = {
    "no mesh": {},
    "automatic": {"mesh": {"data": 2, "model": 4}},
    "other names": {
        "mesh": {"dp": 4, "tp": 2},
        "rules": {"batch": ("dp",), "vocab": ("tp",), "heads": ("tp",)},
    },
    "no vocabulary axis": {"mesh": {"data": 8}},
}


@pytest.mark.parametrize("arguments", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("style", [split_and_merge, nnx_transforms, eager])
def test_foreign_trunk(arguments, style):
    arguments = dict(arguments)
    if "mesh" in arguments:
        arguments["mesh"] = make_mesh(arguments["mesh"], explicit=False)
    model = ForeignTrunk(nnx.Rngs(0), **arguments)
    total, gradients = style(model)
    expected_total, dkernel_DD, dtable_VD = foreign_oracle(model)
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    gradients = nnx.to_pure_dict(gradients)
    np.testing.assert_allclose(gradients["layer"]["kernel"], dkernel_DD, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        gradients["vocab"]["input"]["table"], dtable_VD, rtol=1e-4, atol=1e-6
    )


def test_the_ambient_mesh_is_the_default():
    with jax.set_mesh(make_mesh({"data": 2, "model": 4})):
        vocab = Vocab(config(), rngs=nnx.Rngs(0))
    assert vocab.layout.shards("vocab") == 4


# Compiled programs (field report 23). Sizes are such that nothing legitimate is as large as what is forbidden.

HLO_B, HLO_T, HLO_V, HLO_D, HLO_CHUNK = 8, 48, 521, 24, 32


class Compiled:
    """A vocabulary, the limits its programs must stay below, and ways to compile with it."""

    def __init__(self, name: str, head: Any) -> None:
        self.layout = layout_of(name)
        objective = Objective(z_loss=1e-4, label_smoothing=0.1, chunk=HLO_CHUNK)
        self.vocab = build(self.layout, size=HLO_V, width=HLO_D, head=head, objective=objective)
        self.tokens = HLO_B * HLO_T // self.layout.shards("batch")
        self.rows = self.vocab.sizes.padded // self.layout.shards("vocab")
        self.ids = put(self.layout, np.zeros((HLO_B, HLO_T), np.int32), "batch", "seq")

    def text(self, loss_of: Any) -> str:
        graph, params = nnx.split(self.vocab)

        def loss_fn(params: Any, ids: jax.Array) -> jax.Array:
            return loss_of(nnx.merge(graph, params), ids)

        return compiled_text(jax.jit(jax.value_and_grad(loss_fn)), params, self.ids)

    def logits_held(self, text: str) -> list[tuple[int, ...]]:
        """Buffers as large as this device's tokens by its share of the vocabulary."""
        return [shape for shape in buffers(text) if math.prod(shape) >= self.tokens * self.rows]

    def tables_gathered(self, text: str) -> list[tuple[str, tuple[int, ...]]]:
        """All-gathers as large as one device's share of a table, and anything as large as a whole one."""
        table = self.vocab.sizes.padded * HLO_D
        return [
            (kind, shape)
            for kind, shape in collectives(text)
            if math.prod(shape) >= (self.rows * HLO_D if kind == "all-gather" else table)
        ]


def chunked_loss(vocab: Vocab, ids: jax.Array) -> jax.Array:
    return vocab.loss(jnp.tanh(vocab.encode(ids)), ids).total


def whole_logits_loss(vocab: Vocab, ids: jax.Array) -> jax.Array:
    z_BTV = vocab.logits(jnp.tanh(vocab.encode(ids)))
    return reference_cross_entropy(vocab.sizes, Objective(), z_BTV, ids).total


def one_hot_loss(vocab: Vocab, ids: jax.Array) -> jax.Array:
    one_hot_BTV = jax.nn.one_hot(ids, vocab.sizes.padded)
    x_BTD = jnp.einsum("btv,vd->btd", one_hot_BTV, vocab.input.table[...])
    return vocab.loss(jnp.tanh(x_BTD), ids).total


def gathered_table_loss(vocab: Vocab, ids: jax.Array) -> jax.Array:
    table_VD = vocab.layout.place(vocab.input.table[...], None, None)
    return vocab.loss(jnp.tanh(table_VD[ids]), ids).total


@pytest.mark.parametrize(
    "head", [TiedHead(bias=True, softcap=5.0), UntiedHead()], ids=lambda h: h.kind
)
@pytest.mark.parametrize(
    "name", ["data=2,model=4 explicit", "model=8 explicit", "data=2,model=4 auto", "model=8 auto"]
)
def test_the_compiled_loss_holds_no_logits_and_gathers_no_table(name, head):
    compiled = Compiled(name, head)
    text = compiled.text(chunked_loss)
    assert (HLO_CHUNK, compiled.rows) in buffers(text)  # one chunk's logits: the text was read
    assert "all-reduce" in dict(collectives(text))
    assert compiled.logits_held(text) == []
    assert compiled.tables_gathered(text) == []


@pytest.mark.parametrize("name", ["data=2,model=4 auto", "model=8 auto"])
def test_the_checks_find_whole_logits_one_hot_lookups_and_gathered_tables(name):
    compiled = Compiled(name, TiedHead())
    tokens_and_rows = compiled.tokens * compiled.rows
    for forbidden in (whole_logits_loss, one_hot_loss):
        held = compiled.logits_held(compiled.text(forbidden))
        assert tokens_and_rows in {math.prod(shape) for shape in held}
    gathered = compiled.tables_gathered(compiled.text(gathered_table_loss))
    assert ("all-gather", (compiled.vocab.sizes.padded, HLO_D)) in gathered


def test_hlo_text_is_read():
    text = """
      %a = f32[4,8]{1,0} parameter(0)
      %g = bf16[32,8]{1,0:T(8,128)} all-gather(%a), dimensions={0}
      %s = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%a), dimensions={0}
      %r = (f32[3]{0}, s32[]) all-reduce(%b, %c), to_apply=%add
      ROOT %d = f32[32,8]{1,0} all-gather-done(%s), metadata={op_name="x[7,7]"}
    """
    assert buffers(text) == {(4, 8), (32, 8), (3,), ()}
    assert collectives(text) == [
        ("all-gather", (32, 8)),
        ("all-gather", (32, 8)),  # the result of the one that is started, not its operand
        ("all-reduce", (3,)),
        ("all-reduce", ()),
    ]


class Misnamed(nnx.Module):
    def __init__(self, scope: Scope) -> None:
        self.gains = scope.param("gain", (V, 1), ("vocab", None), "memory", zeros)


def test_a_parameter_is_stored_under_the_name_it_was_declared_with() -> None:
    """Two that are declared under one name would start from the same values."""
    with pytest.raises(UserError, match=r"declared as 'part/gain', but is stored as 'gains'"):
        param_infos(Misnamed(Scope(jax.random.key(0), Layout.make(), "part")))


class Misreading(FullInput):
    def reads(self, tokens: Tokens) -> dict[str, jax.Array]:
        return {"tabel": tokens.ids_BT}


def test_a_part_reads_the_tables_it_has() -> None:
    vocab = build()
    vocab.input = Misreading(
        FullTable(),
        Context(Scope(jax.random.key(0), vocab.layout), vocab.sizes, D, vocab.dtype),
        tied=True,
    )
    with pytest.raises(
        UserError, match=r"Misreading: tables\(\) names table, but reads\(\) names tabel"
    ):
        vocab.encode([[1, 2]])
