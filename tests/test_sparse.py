"""Training by touched rows: against torch's SparseAdam, dense Adam in float64, and dense training of whole models."""

import functools
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import compiled_text
from models import layout_on, quick_jit, random_params

from vocabjax import optim
from vocabjax.catch_up import in_blocks, make_catch_up
from vocabjax.checkpoint import Checkpoints
from vocabjax.errors import UserError
from vocabjax.model import Blueprint
from vocabjax.optim import GroupConfig, GroupRule, NamedGroup, OptimConfig, make_optimizer
from vocabjax.paths import by_path
from vocabjax.sparse import Sparse, looked_up
from vocabjax.state import State, abstract_state, init_state
from vocabjax.step import make_step, to_device
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.inputs.hashed import HashTable
from vocabjax.vocab.inputs.over_encoding import OverEncoding
from vocabjax.vocab.interfaces import Objective
from vocabjax.vocab.memories.ple import PLE
from vocabjax.vocab.table import lookup

FIXTURES = Path(__file__).parent / "fixtures"
ONE, MESHES = "data=1,model=1", ("data=1,model=8", "data=2,model=4", "data=8,model=1")
V, B, T = 53, 8, 4


def rule_of(steps: int, **settings: Any) -> GroupRule:
    """A rule whose rate rises, falls, and differs at every step."""
    rates = (0.05 * np.minimum(1, np.arange(1, steps + 1) / 7) * 0.999 ** np.arange(steps)).astype(
        np.float32
    )
    default = {"sparse": "catch_up", "optimizer": "adamw", "weight_decay": 0.1}
    return GroupRule(**{**default, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "rates": rates, **settings})


def dense(
    rule: GroupRule, p: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The textbook's Adam, Adagrad or SGD in float64: parameters and moments after all the gradients [S, R, W]."""
    p, m, v = p.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)
    for s, g in enumerate(gradients, start=1):
        move = g
        if rule.optimizer == "adamw":
            m = rule.b1 * m + (1 - rule.b1) * g
            v = rule.b2 * v + (1 - rule.b2) * g**2
            move = m / (1 - rule.b1**s) / (np.sqrt(v / (1 - rule.b2**s)) + rule.eps)
        elif rule.optimizer == "adagrad":
            v = v + g**2
            move = g / (np.sqrt(v) + 1e-30)
        p = p - float(rule.rates[s - 1]) * (move + rule.weight_decay * p)
    return p, m, v


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"b2": 0.999, "eps": 1e-4},
        {"b1": 0.99, "b2": 0.95},  # terms that do not shrink
        {"b1": 0.0},
        {"optimizer": "adagrad", "weight_decay": 0.5},
        {"optimizer": "sgd"},
    ],
    ids=str,
)
@pytest.mark.parametrize("blocks", [False, True])
def test_rows_catch_up_with_dense_updates_in_float64(settings: Any, blocks: bool) -> None:
    """Each row has its last gradient at another step, from never to now, and small and large ones within a row."""
    steps, width = 700, 5
    rng = np.random.default_rng(0)
    rule = rule_of(steps, **settings)
    last_R = np.array([0, 1, 2, 3, 8, 30, 350, 690, 693, steps - 1, steps])
    scales = np.array([1e-12, 1e-8, 1e-5, 1e-2, 1.0])
    gradients = rng.normal(size=(steps, len(last_R), width)) * scales
    gradients[np.arange(steps)[:, None] >= last_R] = 0
    born = rng.normal(size=(len(last_R), width)).astype(np.float32)
    start: dict[str, list[np.ndarray]] = {"params": [], "mu": [], "nu": []}
    for row, last in enumerate(last_R):
        at_last = dense(rule, born[row : row + 1], gradients[:last, row : row + 1])
        for name, value in zip(start, at_last, strict=True):
            start[name].append(value[0])
    expected = dict(zip(start, dense(rule, born, gradients), strict=True))
    rows = {name: jnp.asarray(np.stack(x), jnp.float32) for name, x in start.items()}
    if rule.optimizer != "adamw":
        rows = {"params": rows["params"]}
    catch_up = make_catch_up(rule)
    apply = functools.partial(in_blocks, catch_up) if blocks else catch_up
    caught = jax.jit(apply)(rows, jnp.asarray(last_R, jnp.int32), jnp.int32(steps))
    for name, value in caught.items():
        # What moved is compared too, not only where it ended.
        np.testing.assert_allclose(value, expected[name], rtol=3e-5, atol=1e-7, err_msg=name)


def test_blocks_that_do_not_divide_the_rows_and_a_second_flush(monkeypatch: Any) -> None:
    monkeypatch.setattr("vocabjax.catch_up.BLOCK", 4)
    rule = rule_of(30)
    rng = np.random.default_rng(1)
    rows = {
        name: jnp.asarray(rng.normal(size=(10, 3)) ** 2, jnp.float32)
        for name in ("params", "mu", "nu")
    }
    last_R = jnp.asarray(rng.integers(0, 30, 10), jnp.int32)
    catch_up = make_catch_up(rule)
    whole = catch_up(rows, last_R, jnp.int32(30))
    blocks = in_blocks(catch_up, rows, last_R, jnp.int32(30))
    again = in_blocks(catch_up, blocks, jnp.full(10, 30, jnp.int32), jnp.int32(30))
    for name, value in whole.items():
        np.testing.assert_allclose(blocks[name], value, rtol=1e-6)
        np.testing.assert_array_equal(again[name], blocks[name])


TRUNK = TrunkConfig(layers=2, heads=8, kv_heads=8, head_dim=4, ffn=16)
UNTIED = VocabConfig(size=V, width=16, multiple=2, head=UntiedHead(), objective=Objective(chunk=16))
MODELS = {
    "untied": UNTIED,
    "ple": replace(UNTIED, head=TiedHead(), memories=(PLE(width=8),)),
    "hash": replace(UNTIED, input=HashTable(buckets=19, hashes=2)),
    "over_encoding": replace(UNTIED, input=OverEncoding(order=2, buckets=31)),
}


def optim_of(blueprint: Blueprint, mode: str, **settings: Any) -> OptimConfig:
    """One group for everything that is only looked up; a clip that bites."""
    patterns = sorted(looked_up(blueprint))
    assert patterns
    group = GroupConfig(sparse=mode, weight_decay=0.0 if mode == "lazy" else 0.3, lr=2.0)  # type: ignore[arg-type]
    groups = tuple(NamedGroup(str(i), path, group) for i, path in enumerate(patterns))
    return OptimConfig(lr=1e-2, warmup=3, clip=0.05, groups=groups, **settings)


def trained(name: str, mode: str, mesh: str, steps: int = 8, **settings: Any) -> Any:
    """(metrics of each step, flushed state, setup) after steps on batches that leave most rows alone."""
    blueprint = Blueprint(MODELS[name], TRUNK, layout_on(mesh))
    rng = np.random.default_rng(3)
    with jax.set_mesh(blueprint.layout.mesh):
        config = optim_of(blueprint, mode, **settings)
        optimizer = make_optimizer(config, blueprint.infos.values(), 20)
        sparse = Sparse(config, blueprint, 20)
        state = init_state(optimizer, random_params(blueprint), sparse.catch_up)
        step = make_step(blueprint, optimizer, sparse=sparse)
        metrics = []
        for _ in range(steps):
            few = rng.choice(V, 5, replace=False)
            ids = (
                rng.choice(few, (2, B // 2, T + 1))
                if blueprint.layout.shards("batch") <= B // 2
                else rng.choice(few, (1, B, T + 1))
            )
            host = {
                "ids": ids[..., :-1],
                "targets": ids[..., 1:],
                "segment": np.zeros_like(ids[..., 1:]),
                "position": np.broadcast_to(np.arange(T), ids[..., 1:].shape),
            }
            host = {key: x.astype(np.int32) for key, x in host.items()}
            batch = to_device(blueprint.layout, host, None, "batch", "seq")
            state, more = step(state, batch)
            metrics.append(more)
        state = sparse.flush(state)
    return metrics, state, (blueprint, optimizer, sparse)


on_one = functools.cache(functools.partial(trained, mesh=ONE))


def assert_close(ours: State, theirs: State, atol: float) -> None:
    left, right = by_path(ours.params), by_path(theirs.params)
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        rows = min(len(leaf), len(right[path]))
        np.testing.assert_allclose(
            np.asarray(leaf)[:rows], np.asarray(right[path])[:rows], atol=atol, err_msg=path
        )


@pytest.mark.parametrize("name", MODELS)
def test_catching_up_trains_to_what_dense_training_does(name: str) -> None:
    """Loss, the clip's norm, all parameters: two microbatches, decay, warm-up, a clip."""
    dense_metrics, dense_state, _ = on_one(name, "off")
    metrics, state, _ = on_one(name, "catch_up")
    for ours, theirs in zip(metrics, dense_metrics, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
        np.testing.assert_allclose(ours.gradient_norm, theirs.gradient_norm, rtol=1e-4)
    assert dense_metrics[0].gradient_norm > 0.05  # the clip is at work
    assert_close(state, dense_state, atol=1e-4)
    assert all((np.asarray(leaf) == 8).all() for leaf in state.current.values())


def test_lazy_rows_that_are_not_read_stay_as_they_are_and_differ_from_dense_ones() -> None:
    _, state, (blueprint, *_) = on_one("untied", "lazy", steps=1)
    before = by_path(random_params(blueprint))["vocab/input/table"]
    after = np.asarray(by_path(state.params)["vocab/input/table"])
    is_same_V = (after == np.asarray(before)).all(-1)
    assert 0 < (~is_same_V).sum() <= 5
    _, dense_state, _ = on_one("untied", "off")
    _, lazy_state, _ = on_one("untied", "lazy")
    far = (
        by_path(dense_state.params)["vocab/input/table"]
        - by_path(lazy_state.params)["vocab/input/table"]
    )
    assert abs(np.asarray(far)).max() > 1e-3
    assert state.current == {}


@pytest.mark.parametrize(
    ("name", "mode", "mesh"),
    [
        *(("ple", "catch_up", mesh) for mesh in MESHES),
        ("untied", "lazy", MESHES[1]),
        ("hash", "catch_up", MESHES[1]),
    ],
)
def test_sharded_steps_equal_unsharded_ones_and_are_restored_elsewhere(
    name: str, mode: str, mesh: str, tmp_path: Path
) -> None:
    metrics, state, (wide, *_) = trained(name, mode, mesh)
    one_metrics, one_state, (one, optimizer, sparse) = on_one(name, mode)
    np.testing.assert_allclose(metrics[0].gradient_norm, one_metrics[0].gradient_norm, rtol=1e-4)
    np.testing.assert_allclose(metrics[-1].loss, one_metrics[-1].loss, rtol=1e-4)
    assert_close(state, one_state, atol=1e-3)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(8, state, None, logical=wide.logical_shapes())
        with jax.set_mesh(one.layout.mesh):
            restored = checkpoints.restore(
                abstract_state(one, optimizer, sparse.catch_up), None, logical=one.logical_shapes()
            )
    assert_close(restored, state, atol=0)
    for path, current in restored.current.items():
        np.testing.assert_array_equal(current[: one.infos[path].logical[0]], 8)


def test_torch_sparse_adam() -> None:
    """The lazy rule is torch's, value for value: repeated ids, rows left alone, one count for all rows."""
    data = np.load(FIXTURES / "sparse_adam.npz")
    rows, width = data["initial"].shape
    vocab = VocabConfig(size=rows, width=width, multiple=1, head=UntiedHead())
    blueprint = Blueprint(vocab, replace(TRUNK, heads=1, kv_heads=1, head_dim=4), layout_on(ONE))
    b1, b2 = map(float, data["betas"])
    group = GroupConfig(sparse="lazy", weight_decay=0.0, b1=b1, b2=b2)
    config = OptimConfig(
        lr=float(data["lr"]),
        eps=float(data["eps"]),
        schedule="constant",
        warmup=0,
        clip=None,
        embed=group,
    )
    path = "vocab/input/table"
    with jax.set_mesh(blueprint.layout.mesh):
        optimizer = make_optimizer(config, blueprint.infos.values(), len(data["ids"]))
        sparse = Sparse(config, blueprint, len(data["ids"]))
        params = random_params(blueprint)
        params["vocab"]["input"]["table"] = jax.device_put(
            data["initial"].astype(np.float32), blueprint.layout.sharding("vocab", None)
        )
        state = init_state(optimizer, params)

        @quick_jit
        def step(state: State, ids_1N: jax.Array, gradients: jax.Array) -> State:
            view, plans = sparse.fetch(state, {path: ids_1N[None]})
            zeros = jax.tree.map(jnp.zeros_like, view.params)
            table = view.params["vocab"]["input"]["table"]

            def rows(table: jax.Array) -> jax.Array:
                return lookup(
                    blueprint.layout,
                    table,
                    plans[path].slots,
                    logical=len(table),
                    dtype=table.dtype,
                    leading=1,
                )

            (zeros["vocab"]["input"]["table"],) = jax.vjp(rows, table)[1](
                blueprint.layout.place(gradients[None, None], None, "batch", "seq", None)
            )
            updates, moments = optimizer.update(zeros, view.optimizer, view.params)
            params = jax.tree.map(jnp.add, view.params, updates)
            return sparse.commit(state, State(state.step + 1, params, moments, {}), plans)

        for at, (ids, gradients) in enumerate(zip(data["ids"], data["row_gradients"], strict=True)):
            state = step(
                state, jnp.asarray(ids[None], jnp.int32), jnp.asarray(gradients, jnp.float32)
            )
            leaves = by_path(state)
            for ours, theirs in (("params", "table"), ("mu", "exp_avg"), ("nu", "exp_avg_sq")):
                (value,) = (x for name, x in leaves.items() if name.endswith(f"{ours}/{path}"))
                np.testing.assert_allclose(value, data[theirs][at], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mesh", [ONE, "data=2,model=4"])
def test_no_gradient_of_a_table_is_built_and_its_rows_are_changed_in_place(mesh: str) -> None:
    """Among the values of the program, those of the table's shape are the table and its moments, never copied."""
    big = replace(UNTIED, input=HashTable(buckets=4096))
    blueprint = Blueprint(big, TRUNK, layout_on(mesh))
    with jax.set_mesh(blueprint.layout.mesh):
        config = OptimConfig(warmup=3, embed=GroupConfig(sparse="catch_up"))
        optimizer = make_optimizer(config, blueprint.infos.values(), 20)
        sparse = Sparse(config, blueprint, 20)
        state = abstract_state(blueprint, optimizer, sparse.catch_up)
        sharding = blueprint.layout.sharding(None, "batch", "seq")
        array = jax.ShapeDtypeStruct((1, B, T), jnp.int32, sharding=sharding)
        batch = dict.fromkeys(("ids", "targets", "segment", "position"), array)
        text = compiled_text(make_step(blueprint, optimizer, sparse=sparse), state, batch)
    rows = 4096 // blueprint.layout.shards("vocab")
    harmless = (
        "parameter",
        "get-tuple-element",
        "fusion",
        "scatter",
        "dynamic-update-slice",
        "bitcast",
    )
    of_table = [line for line in text.splitlines() if f" = f32[{rows},16]" in line]
    made = [line for line in of_table if not any(f" {kind}(" in line for kind in harmless)]
    assert of_table
    assert made == []


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"sparse": "lazy"}, "would miss their weight decay of 0.1"),
        ({"sparse": "catch_up", "frozen": True}, "frozen; unset one"),
        ({"sparse": "catchup"}, "did you mean 'catch_up'"),
        ({"sparse": "catch_up", "lr": 5000.0}, "leaves nothing of a row"),
    ],
)
def test_settings_that_cannot_work_are_refused(group: Any, message: str) -> None:
    config = OptimConfig(embed=GroupConfig(**group))
    with pytest.raises(UserError, match=message):
        optim.check(config, 200)


@pytest.mark.parametrize(
    ("vocab", "role", "path"),
    [
        (replace(UNTIED, head=TiedHead()), "tied", "vocab/input/table"),
        (UNTIED, "head", "vocab/head/table"),
        (UNTIED, "matrix", "trunk/layers"),
        (
            replace(UNTIED, objective=Objective(augmented=0.1, chunk=16)),
            "embed",
            "vocab/input/table",
        ),
        (replace(MODELS["hash"], head=TiedHead()), "tied", "vocab/input"),
    ],
)
def test_a_table_that_is_more_than_looked_up_cannot_be_sparse(
    vocab: VocabConfig, role: str, path: str
) -> None:
    blueprint = Blueprint(vocab, TRUNK, layout_on(ONE))
    config = replace(OptimConfig(), **{role: GroupConfig(sparse="catch_up")})
    with (
        jax.set_mesh(blueprint.layout.mesh),
        pytest.raises(UserError, match=f"the model does more with {path}"),
    ):
        Sparse(config, blueprint, 200)


def test_dense_leaves_and_sparse_tables_are_all_leaves_and_disjoint() -> None:
    _, state, (*_, sparse) = on_one("ple", "catch_up")
    view, _ = jax.eval_shape(
        lambda s: sparse.fetch(s, {p: jnp.zeros((1, B, T), jnp.int32) for p in sparse.tables}),
        state,
    )
    whole, views = by_path(state), by_path(view)
    assert whole.keys() == views.keys()
    smaller = {name for name in whole if whole[name].shape != views[name].shape}
    tables = {name for name in whole if any(name.endswith(f"/{path}") for path in sparse.tables)}
    assert smaller == tables
    assert len(tables) == 4 * len(
        sparse.tables
    )  # the table, two moments, and how current its rows are
    assert math.prod(views["params/" + next(iter(sparse.tables))].shape) < math.prod(
        whole["params/" + next(iter(sparse.tables))].shape
    )
