"""Parameter groups, schedules and the update, against float64 NumPy and arithmetic by hand."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from vocabjax import optim, param
from vocabjax.errors import UserError
from vocabjax.optim import GroupConfig, NamedGroup, OptimConfig
from vocabjax.paths import path_of


class Info(NamedTuple):
    path: str
    role: str
    shape: tuple[int, ...] = (4, 3)
    centred: bool = False


UNTIED = (
    Info("vocab/input/table", "embed", (16, 4)),
    Info("vocab/head/table", "head", (16, 4)),
    Info("trunk/attn/q", "matrix", (4, 4)),
    Info("trunk/norm/scale", "vector", (4,)),
)
TIED = (UNTIED[0]._replace(role="tied"), *UNTIED[2:])
# One step is the bare rule: constant rate 1, nothing decayed, nothing clipped.
PLAIN = OptimConfig(lr=1.0, schedule="constant", warmup=0, weight_decay=0.0, clip=None)
SGD = GroupConfig(optimizer="sgd")


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def flatten(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(tree)
    return {path_of(key_path): np.asarray(leaf) for key_path, leaf in leaves}


def random_tree(infos: tuple[Info, ...], seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return nest({i.path: jnp.asarray(rng.normal(size=i.shape), jnp.float32) for i in infos})


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint32)


def oracle(
    group: GroupConfig,
    param: np.ndarray,
    grads: list[np.ndarray],
    rates: list[float],
    decay: float,
    eps: float,
) -> np.ndarray:
    """The textbook rules, in float64."""
    p = param.astype(np.float64)
    m, v, total = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        if group.optimizer == "adamw":
            assert group.b1 is not None
            assert group.b2 is not None
            m = group.b1 * m + (1 - group.b1) * g
            v = group.b2 * v + (1 - group.b2) * g**2
            direction = (m / (1 - group.b1**t)) / (np.sqrt(v / (1 - group.b2**t)) + eps)
        elif group.optimizer == "adagrad":
            total = total + g**2
            direction = g / np.sqrt(total + eps**2)
        else:
            direction = g
        p = p - rate * group.lr * (direction + decay * p)
    return p


@pytest.mark.parametrize("optimizer", get_args(optim.Optimizer))
def test_three_steps_of_two_groups_equal_numpy(optimizer: Any) -> None:
    betas: dict[str, Any] = {"b1": 0.8, "b2": 0.97} if optimizer == "adamw" else {}
    head = GroupConfig(lr=5.0, weight_decay=0.0, optimizer=optimizer, **betas)
    config = OptimConfig(lr=0.01, schedule="constant", warmup=2, weight_decay=0.3, head=head)
    params = random_tree(UNTIED, 0)
    grads = [random_tree(UNTIED, 1 + step) for step in range(3)]
    transform = optim.make_optimizer(config, UNTIED, steps=3)
    state = transform.init(params)
    moved = params
    for grad in grads:
        updates, state = transform.update(grad, state, moved)
        moved = optax.apply_updates(moved, updates)

    clipped = []
    for grad in grads:
        flat = {path: g.astype(np.float64) for path, g in flatten(grad).items()}
        norm = math.sqrt(sum(float(np.sum(g**2)) for g in flat.values()))
        assert norm > 1.0  # so that the clip is at work
        clipped.append({path: g / norm for path, g in flat.items()})
    default = GroupConfig(b1=config.b1, b2=config.b2)
    rates = [0.005, 0.01, 0.01]
    expected = {
        "vocab/head/table": (head, 0.0),
        "vocab/input/table": (default, 0.3),
        "trunk/attn/q": (default, 0.3),
        "trunk/norm/scale": (default, 0.0),
    }
    for path, (group, decay) in expected.items():
        right = oracle(
            group, flatten(params)[path], [g[path] for g in clipped], rates, decay, config.eps
        )
        np.testing.assert_allclose(flatten(moved)[path], right, rtol=2e-6, atol=2e-7)


# The clip, and what it leaves out


def test_clip_is_one_norm_over_all_groups() -> None:
    """Field report 3: gradients (3, 4), norm at most 1, SGD with rate 1."""
    infos = (Info("a", "embed", ()), Info("b", "head", ()))
    config = dataclasses.replace(PLAIN, clip=1.0, embed=SGD, head=SGD)
    transform = optim.make_optimizer(config, infos, steps=1)
    params = {"a": jnp.float32(0), "b": jnp.float32(0)}
    grads = {"a": jnp.float32(3), "b": jnp.float32(4)}
    updates, state = transform.update(grads, transform.init(params), params)
    np.testing.assert_allclose([updates["a"], updates["b"]], [-0.6, -0.8], rtol=1e-6)
    assert optim.gradient_norm(state) == 5.0


@pytest.mark.parametrize(("clip", "norm"), [(1.0, 0.5), (1.0, 0.0), (None, 50.0)])
def test_gradients_within_the_norm_pass_unchanged(clip: float | None, norm: float) -> None:
    infos = (Info("a", "matrix", ()),)
    config = dataclasses.replace(PLAIN, clip=clip, matrix=SGD)
    transform = optim.make_optimizer(config, infos, steps=1)
    params, grads = {"a": jnp.float32(0)}, {"a": jnp.float32(norm)}
    updates, state = transform.update(grads, transform.init(params), params)
    assert updates["a"] == -norm
    assert optim.gradient_norm(state) == norm


def test_squares_of_bfloat16_gradients_are_summed_in_float32() -> None:
    infos = (Info("a", "matrix", (4096,)),)
    transform = optim.make_optimizer(dataclasses.replace(PLAIN, matrix=SGD), infos, steps=1)
    params = {"a": jnp.zeros(4096, jnp.bfloat16)}
    grad = jnp.full(4096, 1 + 2**-7, jnp.bfloat16)
    _, state = transform.update({"a": grad}, transform.init(params), params)
    np.testing.assert_allclose(optim.gradient_norm(state), 64 * (1 + 2**-7), rtol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
def test_frozen_leaves_keep_their_bits_and_stay_out_of_norm_and_state(jitted: bool) -> None:
    """Field report 9, with a value and a gradient for which `p + 0.0` and `0 · g` would fail."""
    config = dataclasses.replace(
        PLAIN, weight_decay=0.5, clip=1.0, matrix=SGD, embed=GroupConfig(frozen=True)
    )
    infos = (Info("table", "embed", (3,)), Info("w", "matrix", (2,)))
    transform = optim.make_optimizer(config, infos, steps=1)
    params = {"table": jnp.array([-0.0, 1.5, -2e30]), "w": jnp.array([1.0, 1.0])}
    grads = {"table": jnp.array([jnp.nan, 1e30, 7.0]), "w": jnp.array([3.0, 4.0])}

    def step(params: Any, grads: Any) -> Any:
        state = transform.init(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    moved, state = (jax.jit(step) if jitted else step)(params, grads)
    np.testing.assert_array_equal(bits(moved["table"]), bits(params["table"]))
    np.testing.assert_allclose(moved["w"], [1 - 0.6 - 0.5, 1 - 0.8 - 0.5], rtol=1e-6, atol=1e-7)
    assert optim.gradient_norm(state) == 5.0
    assert not any("table" in path for path in flatten(state))


def test_zero_gradient_and_zero_decay_leave_a_table_unchanged() -> None:
    """Field report 8; vectors are not decayed unless asked, matrices are."""
    config = OptimConfig(tied=GroupConfig(weight_decay=0.0), warmup=0)
    params = random_tree(TIED, 0)
    transform = optim.make_optimizer(config, TIED, steps=10)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transform.update(grads, transform.init(params), params)
    moved = flatten(optax.apply_updates(params, updates))
    before = flatten(params)
    for path in ("vocab/input/table", "trunk/norm/scale"):
        np.testing.assert_array_equal(bits(moved[path]), bits(before[path]))
    np.testing.assert_allclose(
        moved["trunk/attn/q"], before["trunk/attn/q"] * (1 - 3e-3 * 0.1), rtol=1e-6
    )


# Schedules


def rates(config: OptimConfig, steps: int, at: list[int]) -> list[float]:
    schedule = optim.schedule(config, steps)
    return [float(schedule(jnp.int32(step))) for step in at]


def test_warmup_rises_to_the_peak_and_wastes_no_step() -> None:
    config = OptimConfig(lr=0.8, schedule="constant", warmup=4)
    right = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    np.testing.assert_allclose(rates(config, 100, [0, 1, 2, 3, 4, 99]), right, rtol=1e-6)


def test_cosine_goes_from_the_peak_through_the_mean_to_the_end() -> None:
    config = OptimConfig(lr=1.0, schedule="cosine", warmup=20, final_lr=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    np.testing.assert_allclose(
        rates(config, 100, [19, 20, 40, 60, 100]), [1.0, 1.0, quarter, 0.6, 0.2], rtol=1e-6
    )


def test_wsd_is_flat_and_then_falls_linearly() -> None:
    config = OptimConfig(lr=1.0, schedule="wsd", warmup=10, decay=0.25, final_lr=0.0)
    right = [1.0, 1.0, 1.0, 0.96, 0.2, 0.04, 0.0]
    at = [9, 10, 75, 76, 95, 99, 100]
    np.testing.assert_allclose(rates(config, 100, at), right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", get_args(optim.Schedule))
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_rates_of_short_runs_are_finite_and_within_the_peak(schedule: Any, warmup: int) -> None:
    config = OptimConfig(lr=1.0, schedule=schedule, warmup=warmup, decay=0.25)
    values = rates(config, 4, [0, 1, 2, 3])
    assert all(0 < value <= 1 for value in values)
    assert max(values) == 1.0


# Groups


def test_each_parameter_is_in_one_group() -> None:
    config = OptimConfig(groups=(NamedGroup("queries", "trunk/attn/q*", SGD),))
    assert optim.assign(config, UNTIED) == {
        "vocab/input/table": "embed",
        "vocab/head/table": "head",
        "trunk/attn/q": "queries",
        "trunk/norm/scale": "vector",
    }
    assert optim.assign(OptimConfig(), TIED)["vocab/input/table"] == "tied"


def test_each_role_has_a_config() -> None:
    fields = {field.name for field in dataclasses.fields(OptimConfig)}
    assert set(get_args(param.Role)) <= fields


CHANGED = GroupConfig(lr=5.0)
UNKNOWN: Any = "adam"


@pytest.mark.parametrize(
    ("config", "infos", "parts"),
    [
        (OptimConfig(), (Info("a/b", "matrx"),), ["a/b", "'matrx'", "'matrix'"]),
        (OptimConfig(), (Info("a", "matrix"), Info("a", "vector")), ["a is declared twice"]),
        (
            OptimConfig(groups=(NamedGroup("one", "vocab/*"), NamedGroup("two", "*/table"))),
            UNTIED,
            ["vocab/input/table", "'one'", "'two'"],
        ),
        (
            OptimConfig(groups=(NamedGroup("mine", "vocab/inptu/*"),)),
            UNTIED,
            ["'mine'", "'vocab/inptu/*'", "did you mean 'vocab/input/table'"],
        ),
        (OptimConfig(groups=(NamedGroup("head", "vocab/*"),)), UNTIED, ["'head' is taken"]),
        (OptimConfig(memory=CHANGED), UNTIED, ["optim.memory", "embed, head, matrix, vector"]),
        (OptimConfig(tied=CHANGED), UNTIED, ["optim.tied", "embed, head, matrix, vector"]),
        (OptimConfig(head=CHANGED), TIED, ["optim.head", "vocab/input/table", "--optim.tied"]),
        (
            OptimConfig(embed=GroupConfig(frozen=True)),
            TIED,
            ["optim.embed", "freezing one face of a tied table is impossible: untie it"],
        ),
    ],
)
def test_bad_groups_are_named(
    config: OptimConfig, infos: tuple[Info, ...], parts: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        optim.make_optimizer(config, infos, steps=1000)
    assert [part for part in parts if part not in str(error.value)] == []


def test_report_counts_each_parameter_once() -> None:
    config = OptimConfig(
        lr=0.01,
        tied=GroupConfig(lr=5.0, weight_decay=0.0),
        vector=GroupConfig(frozen=True),
        groups=(NamedGroup("queries", "*/q", SGD),),
    )
    rows = {row.group: row for row in optim.report(config, TIED)}
    assert list(rows) == ["tied", "vector", "queries"]
    assert sorted(path for row in rows.values() for path in row.paths) == sorted(
        info.path for info in TIED
    )
    assert rows["tied"] == optim.GroupRow(
        group="tied",
        optimizer="adamw",
        parameters=64,
        paths=("vocab/input/table",),
        peak_lr=0.05,
        weight_decay=0.0,
    )
    assert (rows["queries"].optimizer, rows["queries"].weight_decay) == ("sgd", 0.1)
    frozen = rows["vector"]
    assert (frozen.optimizer, frozen.peak_lr, frozen.parameters) == ("none", 0, 4)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (OptimConfig(lr=-1e-3), ["optim.lr", "-0.001"]),
        (OptimConfig(lr=math.nan), ["optim.lr", "nan"]),
        (OptimConfig(warmup=101), ["optim.warmup", "101", "100 steps"]),
        (OptimConfig(warmup=-1), ["optim.warmup", "-1"]),
        (OptimConfig(clip=0.0), ["optim.clip", "0.0"]),
        (OptimConfig(b2=1.0), ["optim.b2", "1.0"]),
        (OptimConfig(eps=0.0), ["optim.eps"]),
        (OptimConfig(decay=0.0), ["optim.decay"]),
        (OptimConfig(decay=1.5), ["optim.decay"]),
        (OptimConfig(final_lr=1.5), ["optim.final_lr"]),
        (OptimConfig(weight_decay=-0.1), ["optim.weight_decay"]),
        (OptimConfig(schedule="wsd", warmup=90, decay=0.2), ["optim.decay", "0.1", "90"]),
        (OptimConfig(schedule=UNKNOWN), ["optim.schedule", "'adam'", "cosine"]),
        (OptimConfig(head=GroupConfig(lr=-5.0)), ["optim.head.lr", "-5.0"]),
        (OptimConfig(head=GroupConfig(b1=1.0)), ["optim.head.b1"]),
        (OptimConfig(head=GroupConfig(weight_decay=-1.0)), ["optim.head.weight_decay"]),
        (
            OptimConfig(head=GroupConfig(optimizer=UNKNOWN)),
            ["optim.head.optimizer", "did you mean 'adamw'"],
        ),
        (OptimConfig(head=GroupConfig(optimizer="sgd", b1=0.9)), ["optim.head.b1", "sgd"]),
        (
            OptimConfig(groups=(NamedGroup("mine", "*", GroupConfig(lr=-1.0)),)),
            ["optim.groups: mine.lr"],
        ),
    ],
)
def test_bad_hyper_parameters_are_named(config: OptimConfig, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        optim.make_optimizer(config, UNTIED, steps=100)
    assert [part for part in parts if part not in str(error.value)] == []


def test_tree_with_other_paths_is_refused() -> None:
    transform = optim.make_optimizer(OptimConfig(), UNTIED, steps=1000)
    params = random_tree(UNTIED, 0)
    params["vocab"]["heed"] = params["vocab"].pop("head")
    with pytest.raises(UserError, match=r"missing: vocab/head/table; undeclared: vocab/heed/table"):
        transform.init(params)


# Trees other than nested dicts


class TiedModel(nnx.Module):
    """A user's own model: one table, read as rows and as scores."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, 4)))
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.value = nnx.Param(jnp.zeros(8))

    def __call__(self, ids: jax.Array) -> jax.Array:
        h = self.table[...][ids]
        for block in self.blocks:
            h = h + block(h)
        return h @ self.table[...].T + self.value[...]


MODEL_ROLES = {
    "table": "tied",
    "blocks/0/kernel": "matrix",
    "blocks/0/bias": "vector",
    "value": "vector",
}


def model_trees() -> dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]]:
    """Kind of tree → (params, params → callable model)."""

    def state() -> tuple[Any, Callable[[Any], Any]]:
        graph, params = nnx.split(TiedModel(nnx.Rngs(0)), nnx.Param)
        return params, lambda params: nnx.merge(graph, params)

    def pure_dict() -> tuple[Any, Callable[[Any], Any]]:
        graph, params = nnx.split(TiedModel(nnx.Rngs(0)), nnx.Param)
        return nnx.to_pure_dict(params), lambda params: nnx.merge(graph, nnx.State(params))

    def module() -> tuple[Any, Callable[[Any], Any]]:
        return TiedModel(nnx.Rngs(0)), lambda params: params

    return {"state": state, "pure_dict": pure_dict, "module": module}


@pytest.mark.parametrize("graph_mode", [True, False])
@pytest.mark.parametrize("kind", ["state", "pure_dict", "module"])
def test_groups_train_a_tied_nnx_model_and_survive_a_checkpoint(
    kind: str, graph_mode: bool, tmp_path: Path
) -> None:
    """Field reports 4 and 7."""
    with nnx.set_graph_mode(graph_mode):
        params, model_of = model_trees()[kind]()
        assert set(flatten(params)) == set(MODEL_ROLES)
        infos = [Info(path, MODEL_ROLES[path], p.shape) for path, p in flatten(params).items()]
        config = OptimConfig(lr=0.05, schedule="constant", warmup=0)
        transform = optim.make_optimizer(config, infos, steps=20)
        ids = jnp.arange(8)

        def loss_of(params: Any) -> jax.Array:
            logits = model_of(params)(ids)
            return optax.softmax_cross_entropy_with_integer_labels(logits, (ids + 1) % 8).mean()

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        state = transform.init(params)
        losses = []
        for _ in range(20):
            params, state, loss = step(params, state)
            losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    tables = [path for path in flatten(state) if path.split("/")[-1] == "table"]
    assert len(tables) == 2  # the first and the second moment, once each

    ocp.save(tmp_path / "state", state)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = ocp.load(tmp_path / "state", abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


# Sharded parameters


def mesh_of(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("model",), axis_types=(axis_type,))


def shard(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Tables over rows, the rest on every device."""

    def place(key_path: Any, leaf: jax.Array) -> jax.Array:
        is_table = path_of(key_path).endswith("table")
        spec = PartitionSpec("model", None) if is_table else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map_with_path(place, tree)


MIXED = OptimConfig(warmup=0, head=GroupConfig(optimizer="adagrad"))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_sharded_step_equals_unsharded_and_moments_lie_as_parameters(axis_type: AxisType) -> None:
    transform = optim.make_optimizer(MIXED, UNTIED, steps=10)
    params, grads = random_tree(UNTIED, 0), random_tree(UNTIED, 1)
    right, right_state = transform.update(grads, transform.init(params), params)

    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        params, grads = shard(params, mesh), shard(grads, mesh)
        init = jax.jit(transform.init, out_shardings=optim.state_shardings(transform, params))
        state = init(params)
        updates, new_state = jax.jit(transform.update)(grads, state, params)
    for path, update in flatten(updates).items():
        np.testing.assert_allclose(update, flatten(right)[path], rtol=1e-5, atol=1e-9)
    squares = sum(float(np.sum(g.astype(np.float64) ** 2)) for g in flatten(grads).values())
    for norm in (optim.gradient_norm(new_state), optim.gradient_norm(right_state)):
        np.testing.assert_allclose(norm, math.sqrt(squares), rtol=1e-6)
    for tree in (state, new_state):
        rows = [
            leaf.sharding.shard_shape(leaf.shape)[0]
            for key_path, leaf in jax.tree.leaves_with_path(tree)
            if path_of(key_path).endswith("table")
        ]
        assert rows == [2, 2, 2]  # two moments of AdamW, one of Adagrad, 16 rows over 8 devices


@pytest.mark.parametrize("start", ["eager", "jit", "eval_shape"])
def test_moments_are_born_sharded_on_explicit_axes(start: str) -> None:
    mesh = mesh_of(AxisType.Explicit)
    transform = optim.make_optimizer(MIXED, UNTIED, steps=10)
    run: dict[str, Callable[[Any], Any]] = {
        "eager": transform.init,
        "jit": jax.jit(transform.init),
        "eval_shape": lambda params: jax.eval_shape(transform.init, params),
    }
    with jax.set_mesh(mesh):
        state = run[start](shard(random_tree(UNTIED, 0), mesh))
    specs = [
        leaf.sharding.spec
        for key_path, leaf in jax.tree.leaves_with_path(state)
        if path_of(key_path).endswith("table")
    ]
    assert specs == [PartitionSpec("model", None)] * 3
