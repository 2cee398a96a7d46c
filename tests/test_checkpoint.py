"""Checkpoints: exact on any mesh, atomic, rotated, and clear about what is wrong."""

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import chex
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from vocabjax.checkpoint import Checkpoints, _examine
from vocabjax.errors import UserError

V, D = 17, 4
LOGICAL = {"vocab/input/table": (V, D), "trunk/up": (3, D)}


class State(NamedTuple):
    step: jax.Array
    params: dict[str, Any]
    opt: optax.OptState


def make_mesh(data: int, model: int) -> jax.sharding.Mesh:
    mesh: jax.sharding.Mesh = jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(AxisType.Explicit,) * 2,
        devices=jax.devices()[: data * model],
    )
    return mesh


def padded_size(mesh: jax.sharding.Mesh) -> int:
    shards = int(mesh.shape["model"])
    return -(-V // shards) * shards


def table_VD() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)


def place(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Tables of V rows are padded and sharded over the vocabulary; all else is replicated."""

    def put(leaf: np.ndarray) -> jax.Array:
        is_table = leaf.shape == (V, D)
        if is_table:
            leaf = np.pad(leaf, ((0, padded_size(mesh) - V), (0, 0)))
        spec = P("model") if is_table else P()
        array: jax.Array = jax.device_put(leaf, NamedSharding(mesh, spec))
        return array

    return jax.tree.map(put, tree)


def numpy_state(scale: float = 1.0) -> State:
    """A state whose every leaf is recognisable; the moments are different from the parameters."""
    params = {
        "vocab": {"input": {"table": scale * table_VD()}},
        "trunk": {"up": jnp.full((3, D), scale, jnp.bfloat16)},
    }
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    opt = jax.tree.map(lambda x: np.asarray(x) if x.shape == () else np.asarray(x) + 0.5, opt)
    params = jax.tree.map(np.asarray, params)
    return State(jnp.int32(16_777_217), params, opt)  # 2^24 + 1: float32 would lose the 1


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(state: State, expected: State, mesh: jax.sharding.Mesh) -> None:
    """Bitwise equal to `expected` (unpadded), padded with zeros and sharded for `mesh`."""
    want = place(mesh, expected)
    chex.assert_trees_all_equal_structs(state, want)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        assert leaf.dtype == other.dtype
        assert leaf.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def restore(checkpoints: Checkpoints, target: Any, step: int | None = None) -> Any:
    return checkpoints.restore(abstract(target), None, logical=LOGICAL, step=step)


def save_and_wait(checkpoints: Checkpoints, step: int, state: Any) -> None:
    checkpoints.save(step, state, None, logical={})
    checkpoints.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 5, saved on a (2, 4) mesh; copy it to change it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with closing(Checkpoints(directory)) as checkpoints:
        state = place(make_mesh(2, 4), numpy_state())
        checkpoints.save(5, state, None, logical=LOGICAL, metrics={"validation_loss": 2.5})
    return directory


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, 4), (2, 4)),
        ((2, 4), (1, 8)),
        ((2, 4), (1, 3)),
        ((2, 4), (1, 1)),
        ((1, 1), (1, 8)),
        ((8, 1), (2, 4)),
    ],
)
def test_restores_exactly_on_another_mesh(
    source: tuple[int, int], target: tuple[int, int], tmp_path: Path
) -> None:
    # Field reports 5 and 15: 17 rows are 20 on 4 shards, 18 on 3, 24 on 8, 17 on 1.
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, place(make_mesh(*source), numpy_state()), None, logical=LOGICAL)
        mesh = make_mesh(*target)
        assert_same(restore(checkpoints, place(mesh, numpy_state(0.0))), numpy_state(), mesh)


def test_padding_is_zero_again_even_if_it_was_not_saved_so(tmp_path: Path) -> None:
    state = place(make_mesh(2, 4), numpy_state())
    table = state.params["vocab"]["input"]["table"]
    state.params["vocab"]["input"]["table"] = jax.device_put(
        np.asarray(table) + (np.arange(20) >= V)[:, None], table.sharding
    )
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, None, logical=LOGICAL)
        for shards in (3, 8):
            mesh = make_mesh(1, shards)
            assert_same(restore(checkpoints, place(mesh, numpy_state(0.0))), numpy_state(), mesh)


def test_a_donated_state_is_saved_as_it_was(tmp_path: Path) -> None:
    mesh = make_mesh(2, 4)
    sharding = NamedSharding(mesh, P("model"))
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jax.device_put(np.zeros((1024, 64), np.float32), sharding)
    with closing(Checkpoints(tmp_path, keep_last=5)) as checkpoints:
        for step in range(5):
            checkpoints.save(step, {"w": array}, None, logical={})
            array = add(array)
        for step in range(5):
            state = checkpoints.restore(abstract({"w": array}), None, logical={}, step=step)
            np.testing.assert_array_equal(np.asarray(state["w"]), np.full((1024, 64), step))


def test_one_device_describes_and_restores_what_eight_saved(saved: Path) -> None:
    # Field report 15.
    code = f"""
import jax
from vocabjax.checkpoint import Checkpoints
assert jax.device_count() == 1
checkpoints = Checkpoints({str(saved)!r})
description = checkpoints.describe()
table = description.leaves["params/vocab/input/table"]
print(description.step, table.shape, table.dtype, description.logical["vocab/input/table"], description.metrics)
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
leaves = {{
    path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)
    for path, leaf in description.leaves.items()
}}
state = checkpoints.restore(leaves, None, logical={LOGICAL})
print(state["step"], float(state["params/vocab/input/table"].sum()))
"""
    output = run_python(code, devices=1).splitlines()
    assert output[0] == "5 (20, 4) float32 (17, 4) {'validation_loss': 2.5}"
    step, total = output[1].split()
    assert step == "16777217"
    assert float(total) == pytest.approx(float(table_VD().astype(np.float64).sum()), abs=1e-5)


@pytest.mark.parametrize("target", [(2, 4), (1, 8), (1, 1)])
def test_a_part_is_restored_alone(target: tuple[int, int], saved: Path) -> None:
    """The parameters of a run, whatever optimiser it had: the other arrays are neither compared nor read."""
    mesh = make_mesh(*target)
    params = place(mesh, numpy_state(0.0)).params
    restored = Checkpoints(saved).restore(abstract(params), None, logical=LOGICAL, part="params/")
    want = place(mesh, numpy_state()).params
    chex.assert_trees_all_equal_structs(restored, want)
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(want), strict=True):
        assert leaf.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def test_differences_within_a_part_are_named(saved: Path) -> None:
    mesh = make_mesh(2, 4)
    params = place(mesh, with_leaf(numpy_state(), up=jnp.zeros((2, D), jnp.bfloat16)).params)
    for changed, told in (
        (params, r"params/trunk/up is bfloat16\[3,4\] in the checkpoint, bfloat16\[2,4\] in"),
        ({"vocab": params["vocab"]}, r"params/trunk/up bfloat16\[3,4\] is not in the model"),
        ({**params, "more": params["trunk"]}, "params/more/up .* is not in the checkpoint"),
    ):
        logical = LOGICAL | {"trunk/up": (2, D)}
        with pytest.raises(UserError, match=told):
            Checkpoints(saved).restore(abstract(changed), None, logical=logical, part="params/")


def with_leaf(state: State, **changes: Any) -> State:
    """The state with its step or its trunk's leaf `up` replaced, or the latter removed (None)."""
    params = dict(state.params)
    if "up" in changes:
        up = changes.pop("up")
        params["trunk"] = {} if up is None else {"up": up}
    return state._replace(params=params, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": np.float32(0)}, ("step is", "int32[]", "float32[]")),
        ({"step": np.int64(0)}, None),  # 32-bit JAX makes it an int32: no difference
        (
            {"up": np.zeros((3, D), np.float32)},
            ("params/trunk/up", "bfloat16[3,4]", "float32[3,4]"),
        ),
        (
            {"up": jnp.zeros((2, D), jnp.bfloat16)},  # another depth
            ("params/trunk/up", "bfloat16[3,4]", "bfloat16[2,4]"),
        ),
        ({"up": jnp.zeros((3 * D), jnp.bfloat16)}, ("params/trunk/up", "[3,4]", "[12]")),
        ({"up": None}, ("params/trunk/up", "bfloat16[3,4]", "not in the model")),
        ({"opt": ()}, ("opt/1/0/count", "not in the model", "more differences")),
        ({"opt": {"extra": np.zeros(2)}}, ("opt/extra", "not in the checkpoint")),
    ],
)
def test_any_difference_is_named_and_never_cast(
    changes: dict[str, Any], words: tuple[str, ...] | None, saved: Path
) -> None:
    # Field report 14: Orbax by itself casts, truncates and pads.
    mesh = make_mesh(2, 4)
    target = place(mesh, with_leaf(numpy_state(), **changes))
    up = changes.get("up")
    logical = LOGICAL if up is None else LOGICAL | {"trunk/up": up.shape}
    if words is None:
        assert restore(Checkpoints(saved), target).step == 16_777_217
        return
    with pytest.raises(UserError) as caught:
        Checkpoints(saved).restore(abstract(target), None, logical=logical)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_another_vocabulary_is_refused_even_if_it_pads_to_the_same_size(saved: Path) -> None:
    target = abstract(place(make_mesh(2, 4), numpy_state()))
    with pytest.raises(
        UserError, match=r"params/vocab/input/table is float32\[17,4\].* float32\[19,4\]"
    ):
        Checkpoints(saved).restore(target, None, logical=LOGICAL | {"vocab/input/table": (19, D)})


def test_only_padded_axes_may_change_their_size(saved: Path) -> None:
    target = place(make_mesh(1, 8), numpy_state())
    with pytest.raises(
        UserError, match=r"table is float32\[17,4\] \(stored 20,4\).*float32\[24,4\]"
    ):
        Checkpoints(saved).restore(abstract(target), None, logical={})
    table = jax.ShapeDtypeStruct((16, D), np.float32, sharding=NamedSharding(make_mesh(1, 8), P()))
    target.params["vocab"]["input"]["table"] = table  # fewer rows than the vocabulary has
    with pytest.raises(UserError, match=r"input/table is .*\(stored 20,4\).*\(stored 16,4\)"):
        Checkpoints(saved).restore(target, None, logical=LOGICAL)


def batches() -> Any:
    """Two passes over 10 shuffled numbers, five batches in each."""
    return iter(grain.MapDataset.range(10).shuffle(seed=3).batch(2).repeat(2).to_iter_dataset())


@pytest.mark.parametrize("taken", [0, 3, 5, 10])
def test_the_data_continue_where_they_were(taken: int, tmp_path: Path) -> None:
    # Field report 25: in the middle of a pass, at its end (5), and at the end of the data (10).
    everything = [batch.tolist() for batch in batches()]
    state = {"w": jnp.zeros(2)}
    iterator = batches()
    for _ in range(taken):
        next(iterator)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, iterator, logical={})
        for _ in iterator:  # moves on while the save is in progress
            pass
        fresh = batches()
        checkpoints.restore(abstract(state), fresh, logical={})
    assert [batch.tolist() for batch in fresh] == everything[taken:]


def test_a_checkpoint_without_data_cannot_resume_training(saved: Path) -> None:
    target = abstract(place(make_mesh(2, 4), numpy_state()))
    with pytest.raises(UserError, match="no data position"):
        Checkpoints(saved).restore(target, batches(), logical=LOGICAL)


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan"), 6: 1.0}
    kept = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [2, 4, 5], 6: [2, 5, 6]}
    for step, loss in losses.items():
        # A new object each time: a restarted process knows the losses from the disk.
        with closing(Checkpoints(tmp_path, keep_last=2, keep_best=1)) as checkpoints:
            metrics = {"tokens": 1.0} if loss is None else {"validation_loss": loss}
            checkpoints.save(step, {"w": jnp.zeros(2)}, None, logical={}, metrics=metrics)
            assert checkpoints.steps() == kept[step]
            assert checkpoints.latest() == step
            assert checkpoints.best() == (1 if step == 1 else 2)


def test_a_checkpoint_without_loss_is_never_the_best(tmp_path: Path) -> None:
    with closing(Checkpoints(tmp_path, keep_last=1, keep_best=1)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.zeros(2)}, None, logical={})
        assert checkpoints.best() is None
        assert checkpoints.steps() == [2]


def test_the_rotation_deletes_nothing_that_it_did_not_save(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "thesis.txt").write_text("precious")
    with closing(Checkpoints(tmp_path, keep_last=1, keep_best=0)) as checkpoints:
        for step in (2, 3):
            checkpoints.save(step, {"w": jnp.zeros(2)}, None, logical={})
        assert checkpoints.steps() == [1, 3]
    assert (tmp_path / "1" / "thesis.txt").read_text() == "precious"


def test_reading_changes_nothing_on_disk(saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    nothing = Checkpoints(directory)
    assert (nothing.steps(), nothing.latest(), nothing.best()) == ([], None, None)
    assert not directory.exists()
    shutil.copytree(saved, directory)
    unfinished = directory / "6.orbax-checkpoint-tmp"  # perhaps being saved by a run right now
    unfinished.mkdir()
    with closing(Checkpoints(directory)) as checkpoints:
        assert checkpoints.latest() == 5
        restore(checkpoints, place(make_mesh(2, 4), numpy_state()))
        assert unfinished.exists()
        save_and_wait(checkpoints, 6, {"w": jnp.zeros(2)})
        assert not unfinished.exists()
        assert checkpoints.steps() == [5, 6]


def test_missing_checkpoints(saved: Path, tmp_path: Path) -> None:
    target = place(make_mesh(1, 1), numpy_state())
    (tmp_path / "notes").mkdir()
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=f"{directory}: no checkpoint here"):
            restore(Checkpoints(directory), target)
    with pytest.raises(UserError, match="no checkpoint of step 4; saved: 5"):
        restore(Checkpoints(saved), target, step=4)
    with pytest.raises(UserError, match="step 5 is already saved"):
        Checkpoints(saved).save(5, target, None, logical=LOGICAL)
    (tmp_path / "12").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path / '12'}: not a checkpoint"):
        restore(Checkpoints(tmp_path), target)


@pytest.mark.parametrize("damage", ["removed", "emptied", "halved"])
def test_damage_is_an_error_or_harmless_but_never_other_numbers(
    damage: str, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = place(make_mesh(2, 4), numpy_state(0.0))
    refused = set()
    for file in sorted(path for path in (saved / "5").rglob("*") if path.stat().st_size):
        if file.is_dir():
            continue
        shutil.copytree(saved, tmp_path / "checkpoints")
        victim = tmp_path / "checkpoints" / file.relative_to(saved)
        content = victim.read_bytes()
        victim.unlink()
        if damage != "removed":
            victim.write_bytes(content[: len(content) // 2] if damage == "halved" else b"")
        try:
            state = restore(Checkpoints(tmp_path / "checkpoints"), target)
        except UserError as error:
            message = str(error)
            refused.add(file.relative_to(saved / "5").parts[:2])
            assert str(tmp_path / "checkpoints" / "5") in message
            assert len(message.splitlines()) == 1
        else:
            assert_same(state, numpy_state(), make_mesh(2, 4))
        with closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:  # training goes on
            save_and_wait(checkpoints, 6, {"w": jnp.zeros(2)})
            assert checkpoints.latest() == 6
        shutil.rmtree(tmp_path / "checkpoints")
    assert {("_CHECKPOINT_METADATA",), ("state", "d"), ("state", "manifest.ocdbt")} <= refused
    assert capfd.readouterr() == ("", "")


def test_one_flipped_bit_is_never_restored(tmp_path: Path) -> None:
    """Each copy has one other bit, in an array so large that its bytes lie outside the tree that Orbax checks itself."""
    width = 4096
    noise = np.random.default_rng(0).standard_normal((V, width)).astype(np.float32)
    mesh = make_mesh(2, 4)
    rows = NamedSharding(mesh, P("model"))
    table = jax.device_put(np.pad(noise, ((0, 3), (0, 0))), rows)
    state, logical = {"params": {"table": table}, "count": jnp.arange(4)}, {"table": (V, width)}
    with closing(Checkpoints(tmp_path / "whole")) as checkpoints:
        checkpoints.save(1, state, None, logical=logical)
    largest = max((tmp_path / "whole").rglob("*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    chance = random.Random(0)
    one = make_mesh(1, 1)  # pads otherwise than the mesh that saved
    target = jax.ShapeDtypeStruct((V, width), np.float32, sharding=NamedSharding(one, P()))
    whole = {"params": {"table": target}, "count": jnp.arange(4)}
    for index in range(8):
        directory = tmp_path / str(index)
        shutil.copytree(tmp_path / "whole", directory)
        spoilt = bytearray(content)
        spoilt[chance.randrange(len(content) // 4, len(content))] ^= 1 << chance.randrange(8)
        (directory / largest.relative_to(tmp_path / "whole")).write_bytes(spoilt)
        told = f"{directory}/1: params/table is not what was saved, .* an earlier step"
        for part, wanted in (("", whole), ("params/", whole["params"])):
            with pytest.raises(UserError, match=told):
                Checkpoints(directory).restore(wanted, None, logical=logical, part=part)


def test_the_checksum_sees_every_bit_and_no_padding() -> None:
    """Of every dtype that a state may hold."""
    for dtype in ("float32", "bfloat16", "int32", "int8", "uint32", "bool"):
        values = np.random.default_rng(0).integers(0, 2, 6).astype(jnp.dtype(dtype))

        def checksum(array: np.ndarray, size: int = 6) -> int:
            return _examine({"w": jnp.asarray(array)}, {"w": (size,)})[0]["w"]

        seen = {checksum(values)}
        bits = [0] if dtype == "bool" else range(8 * values.itemsize)
        for bit in bits:
            other = values.copy()
            raw = other.view(np.uint8)
            raw[values.itemsize * 2 + bit // 8] ^= 1 << bit % 8
            seen.add(checksum(other))
        assert len(seen) == 1 + len(bits)
        assert checksum(np.concatenate([values, values])) == checksum(values)


def test_older_checkpoints_have_no_checksums(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = Checkpoints.describe
    assert describe(Checkpoints(saved)).checksums
    monkeypatch.setattr(Checkpoints, "describe", lambda *a: replace(describe(*a), checksums={}))
    target = place(make_mesh(2, 4), numpy_state(0.0))
    assert_same(restore(Checkpoints(saved), target), numpy_state(), make_mesh(2, 4))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_saved(value: float, tmp_path: Path) -> None:
    mesh = make_mesh(2, 4)
    state = place(mesh, numpy_state())
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, None, logical=LOGICAL)
        up = np.ones((3, D), jnp.bfloat16)
        up[2, 1] = value
        spoilt = place(mesh, with_leaf(numpy_state(), up=up))
        told = r"params/trunk/up is not finite at step 2: lower --optim\.lr.*is of step 1$"
        with pytest.raises(UserError, match=told):
            checkpoints.save(2, spoilt, None, logical=LOGICAL)
        assert checkpoints.steps() == [1]


def test_the_best_is_unknown_where_a_checkpoint_is_damaged(tmp_path: Path) -> None:
    with closing(Checkpoints(tmp_path, keep_last=3)) as checkpoints:
        for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
            metrics = {"validation_loss": loss}
            checkpoints.save(step, {"w": jnp.zeros(2)}, None, logical={}, metrics=metrics)
        assert checkpoints.best() == 2
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(UserError, match=rf"{tmp_path}/2: .*damaged.* --step latest"):
        Checkpoints(tmp_path).best()


KILLED_WHILE_DELETING = """
import os, shutil, signal, sys
import jax.numpy as jnp
from vocabjax.checkpoint import Checkpoints
unlink, left = os.unlink, [2]
def unlink_few(path, **options):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    unlink(path, **options)
def rmtree(path, real=shutil.rmtree):
    os.unlink = unlink_few
    real(path)
shutil.rmtree = rmtree
checkpoints = Checkpoints(sys.argv[1], keep_last=1, keep_best=0)
for step in (1, 2):
    checkpoints.save(step, {"w": jnp.zeros(2)}, None, logical={})
checkpoints.close()
"""


def test_a_deletion_that_is_killed_is_completed_by_the_next_save(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_DELETING, str(tmp_path)],
        env=environment(1),
        capture_output=True,
        timeout=60,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "1").mkdir()  # damaged, but by somebody else
    with closing(Checkpoints(tmp_path, keep_last=1, keep_best=0)) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        save_and_wait(checkpoints, 3, {"w": jnp.zeros(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_is_reported_once_and_spoils_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noise = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(20_000))}
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    save_and_wait(checkpoints, 1, noise)
    told = (
        r"step 2 was not saved \(File too large\); the last checkpoint is of step 1: make room .*$"
    )
    with file_size_limit(1000), pytest.raises(UserError, match=told) as caught:
        save_and_wait(checkpoints, 2, noise)
    assert "\n" not in str(caught.value)
    assert checkpoints.steps() == [1]
    # The failure of a save in the background surfaces at the next call, whichever it is.
    for call in (
        checkpoints.wait,
        checkpoints.latest,
        checkpoints.close,
        lambda: checkpoints.save(4, noise, None, logical={}),
    ):
        with file_size_limit(1000):
            checkpoints.save(3, noise, None, logical={})
            with pytest.raises(UserError, match="step 3 was not saved"):
                call()
        assert checkpoints.steps() == [1]
        checkpoints.wait()
    save_and_wait(checkpoints, 5, noise)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    checkpoints.close()
    assert capfd.readouterr() == ("", "")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=r"step 1 was not saved \(Not a directory\); no checkpoint"):
        Checkpoints(tmp_path / "checkpoints").save(1, {"w": jnp.zeros(2)}, None, logical={})


def test_normal_use_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(Checkpoints(tmp_path)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, place(make_mesh(2, 4), numpy_state()), None, logical=LOGICAL)
        checkpoints.describe()
        restore(checkpoints, place(make_mesh(1, 8), numpy_state()))
    assert capfd.readouterr() == ("", "")


def environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": root}


def run_python(code: str, devices: int) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


SAVE_FOR_EVER = """
import itertools, sys
import jax.numpy as jnp
from vocabjax.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
for step in itertools.count((checkpoints.latest() or 0) + 1):
    state = {"a": jnp.full(64, step), "b": jnp.full((8, 8), step)}
    checkpoints.save(step, state, None, logical={}, metrics={"validation_loss": -step})
    print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    delays = random.Random(0)
    target = abstract({"a": jnp.zeros(64, int), "b": jnp.zeros((8, 8), int)})
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)],
            env=environment(1),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        timer_start = time.monotonic()
        process.stdout.readline()  # the first save has begun
        time.sleep(delays.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        begun = process.stdout.read().split()
        process.wait(timeout=30)
        assert time.monotonic() - timer_start < 60
        checkpoints = Checkpoints(tmp_path)
        step = checkpoints.latest()
        if begun:  # save N+1 returns only after save N is complete, whatever happens to N+1
            assert step is not None
            assert step >= int(begun[-1]) - 1
        if step is not None:
            state = checkpoints.restore(target, None, logical={})
            assert {int(x) for leaf in state.values() for x in leaf.ravel()} == {step}
    with closing(Checkpoints(tmp_path, keep_last=1, keep_best=0)) as checkpoints:
        save_and_wait(checkpoints, 10**6, {"a": jnp.zeros(2)})
        assert not [path for path in tmp_path.iterdir() if not path.name.isdecimal()]


TWO_PROCESSES = """
import sys
import jax
import numpy as np
port, index, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, index)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from vocabjax.checkpoint import Checkpoints

class Position:
    state = {"next_index": 7}
    def get_state(self): return self.state
    def set_state(self, state): self.state = state

mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))
sharding = NamedSharding(mesh, P("model"))
rows = np.pad(np.arange(17.0, dtype=np.float32), (0, 3))
state = {"table": jax.make_array_from_callback((20,), sharding, lambda index: rows[index])}
checkpoints = Checkpoints(directory, keep_last=1, keep_best=1)
for step in (1, 2, 3):
    metrics = {"validation_loss": float(step)}
    checkpoints.save(step, state, Position(), logical={"table": (17,)}, metrics=metrics)
abstract = {"table": jax.ShapeDtypeStruct((20,), np.float32, sharding=sharding)}
back = checkpoints.restore(
    abstract, Position(), logical={"table": (17,)}
)
for shard in back["table"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), rows[shard.index])
checkpoints.close()
"""


def test_two_processes_save_and_one_restores(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(port), str(index), str(tmp_path)],
            env=environment(2),
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in processes:
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == 0, stderr
    finally:
        for process in processes:
            process.kill()
    assert Checkpoints(tmp_path).steps() == [1, 3]
    iterator = batches()
    mesh = make_mesh(1, 8)
    target = {
        "table": jax.ShapeDtypeStruct((24,), np.float32, sharding=NamedSharding(mesh, P("model")))
    }
    state = Checkpoints(tmp_path).restore(target, iterator, logical={"table": (17,)})
    np.testing.assert_array_equal(np.asarray(state["table"]), np.pad(np.arange(17.0), (0, 7)))
    assert iterator.get_state() == {"next_index": 7}
