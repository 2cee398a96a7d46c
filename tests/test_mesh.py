"""Meshes and rules: what is accepted, what is refused, and what each process reads."""

import jax
import numpy as np
import pytest
from flax import nnx
from hlo import buffers, compiled_text
from jax.sharding import AxisType, Mesh, PartitionSpec
from models import layout_on

from vocabjax import TiedHead, UntiedHead, Vocab, VocabConfig
from vocabjax.errors import UserError
from vocabjax.mesh import Layout, make_mesh, parse_mesh


def test_a_mesh_has_the_sizes_asked_for_and_minus_one_takes_the_rest() -> None:
    assert dict(make_mesh({"data": 2, "model": 4}).shape) == {"data": 2, "model": 4}
    assert dict(make_mesh({"data": -1, "model": 2}).shape) == {"data": 4, "model": 2}
    assert dict(make_mesh(parse_mesh("")).shape) == {"data": 8, "model": 1}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=3,model=2", r"data=3,model=2 needs 6 devices, but there are 8"),
        ("data=-1,model=3", r"needs 3 times a whole number of devices"),
        ("data=-1,model=-1", r"at most one may be -1"),
        ("data=0", r"every size must be positive"),
        ("data=-2", r"every size must be positive"),
    ],
)
def test_a_mesh_that_does_not_match_the_devices_is_refused(mesh: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_mesh(parse_mesh(mesh))


@pytest.mark.parametrize("text", ["data", "data=", "data=2,data=4", "2=data", "data=2x", "data==2"])
def test_a_mesh_that_cannot_be_read_names_the_part(text: str) -> None:
    with pytest.raises(UserError, match=f"cannot read '{text.split(',')[-1]}'"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("mesh", "rules", "message"),
    [
        ("data=8", "fsdpp", "unknown rule set 'fsdpp'.*fsdp"),
        ("data=8", "vocabs=data", "cannot read 'vocabs=data'.*vocab"),
        ("data=8", "kv_heads=", "cannot read 'kv_heads='"),
        ("data=8", "default,vocab", "cannot read 'vocab'"),
        ("data=8", "vocab=modle", "'vocab' is placed on mesh axis 'modle', which the mesh data=8"),
        ("a=2,b=4", "batch=a+b,vocab=a", r"put the shared axes last \(--rules batch=b\+a\)"),
        ("data=4,seq=2", "seq=seq+data,batch=,vocab=seq", r"--rules seq=data\+seq"),
    ],
)
def test_rules_that_cannot_work_are_refused(mesh: str, rules: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layout_on(mesh, rules)


def test_one_mesh_axis_for_two_dimensions_of_an_array_is_refused() -> None:
    clash = layout_on("data=2,model=4", "fsdp,heads=data")
    with pytest.raises(UserError, match=r"'width' and 'heads' .* both placed on mesh axis 'data'"):
        clash.spec("layers", "width", "heads", "head_dim")
    assert clash.spec("heads", None) == PartitionSpec("data", None)


def test_default_rules_replicate_what_the_mesh_has_no_axis_for() -> None:
    alone = layout_on("data=8")
    assert alone.spec("batch", "vocab") == PartitionSpec("data", None)
    assert (alone.shards("batch"), alone.shards("vocab"), alone.shards("table_width")) == (8, 1, 1)


def test_a_mesh_axis_that_no_rule_uses_is_refused_for_a_run_but_not_for_a_library() -> None:
    idle = layout_on("replica=2,data=4")
    assert idle.spec("batch") == PartitionSpec("data")
    with pytest.raises(UserError, match=r"no rule uses axis 'replica', so its 2 devices"):
        idle.require_used()
    layout_on("replica=2,data=4", "batch=replica+data").require_used()
    layout_on("data=8,model=1").require_used()


def test_a_mesh_of_mixed_axis_types_is_refused() -> None:
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=kinds)
    with pytest.raises(UserError, match="make all explicit or all automatic"):
        Layout.make(mesh)


@pytest.mark.parametrize(
    ("size", "fit"), [(6, "use 4 or 8"), (3, "use 4,"), (9, "use 8 or 12"), (4, None), (8, None)]
)
def test_a_size_that_does_not_divide_names_those_that_do(size: int, fit: str | None) -> None:
    four = layout_on("data=2,model=4")
    if fit is None:
        four.require("trunk.ffn", "ffn", size)
        return
    with pytest.raises(UserError, match=rf"trunk.ffn = {size} .* {fit}.*--rules ffn="):
        four.require("trunk.ffn", "ffn", size)


def test_the_ambient_mesh_is_the_default() -> None:
    mesh = make_mesh({"data": 2, "model": 4})
    with jax.set_mesh(mesh):
        assert Layout.make().mesh == mesh
    assert Layout.make().mesh.size == 1


def test_under_a_trace_the_mesh_must_be_given() -> None:
    """JAX knows axes there, but no devices."""
    config = VocabConfig(size=100, width=8)
    build = nnx.jit(lambda: Vocab(config, rngs=nnx.Rngs(0)))
    with (
        jax.set_mesh(make_mesh({"data": 2, "model": 4})),
        pytest.raises(UserError, match="give mesh="),
    ):
        build()


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("head", [TiedHead(), UntiedHead()], ids=lambda head: head.kind)
def test_tables_are_born_sharded(explicit: bool, head: TiedHead | UntiedHead) -> None:
    """No device holds a whole table, not even while drawing it; at once or inside a program of the caller's."""
    mesh = make_mesh({"data": 2, "model": 4}, explicit=explicit)
    config = VocabConfig(size=1201, width=8, multiple=1, head=head)

    def tables(key: jax.Array) -> list[jax.Array]:
        vocab = Vocab(config, rngs=nnx.Rngs(params=key), mesh=mesh)
        return jax.tree.leaves(nnx.state(vocab, nnx.Param))

    eager = tables(jax.random.key(0))
    with jax.set_mesh(mesh):
        under_jit = jax.jit(tables)
        text = compiled_text(under_jit, jax.random.key(0))
        traced = under_jit(jax.random.key(0))
    assert any(301 in shape for shape in buffers(text))
    assert not any(1204 in shape or 1204 * 8 in shape for shape in buffers(text))
    for one, two in zip(eager, traced, strict=True):
        assert {s.data.shape for s in (*one.addressable_shards, *two.addressable_shards)} == {
            (301, 8)
        }
        np.testing.assert_array_equal(one, two)
