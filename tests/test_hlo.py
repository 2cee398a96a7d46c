"""What is read out of a compiled program: kinds, sizes, groups, axes, and how often loops repeat it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from models import layout_on

from vocabjax.forecast.hlo import axes_of, collectives, compiled_text


def test_loops_multiply_what_stands_in_them() -> None:
    """A sum over one axis before, in, and in a loop within a loop; the last one over the other axis."""
    layout = layout_on("data=2,model=4")

    def local(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.psum(x * 0.5, "model"), None

        def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x, _ = lax.scan(inner, x, length=5)
            return lax.all_gather(x, "data", axis=0).sum(0), None

        x, _ = lax.scan(outer, lax.psum(x, ("data", "model")), length=3)
        return x

    spec = PartitionSpec(None)
    run = jax.jit(
        jax.shard_map(local, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    found = collectives(compiled_text(run, jnp.ones(16)))
    mesh = dict(layout.mesh.shape)
    seen = {(c.kind, axes_of(c.groups, mesh), c.times, c.bytes) for c in found}
    assert seen == {
        ("all-reduce", ("data", "model"), 1, 64),
        ("all-reduce", ("model",), 15, 64),
        ("all-gather", ("data",), 3, 128),
    }


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("model",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups=[2,4]<=[8]", ("model",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=[1,8]<=[8]", ("data", "model")),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("data",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_1'}", ("model",)),
        # Devices of a 2×4 mesh in the order 0 4 1 5 2 6 3 7: the first axis counts "model", the second "data".
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("model",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("data",)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("data",)),
        ("replica_groups=mesh['a'=1,'b'=8], device_ids=([8]) {'a'}", ()),
        # Parts of one axis of 8: its outer 2, its inner 4.
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ("model",)),
        ("replica_groups={}", ("data", "model")),
    ],
)  # fmt: skip
def test_groups_are_read_in_every_notation(groups: str, axes: tuple[str, ...]) -> None:
    text = f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %sum = f32[8]{{0}} all-reduce(%x), channel_id=1, {groups}, to_apply=%add, metadata={{op_name="jit(f)/psum"}}
}}
"""
    (found,) = collectives(text)
    assert (found.kind, found.bytes, found.times, found.origin) == (
        "all-reduce",
        32,
        1,
        "jit(f)/psum",
    )
    assert axes_of(found.groups, {"data": 2, "model": 4}) == axes


def test_a_loop_of_unknown_length_keeps_what_is_known_inside_it() -> None:
    """Three sums in a turn of a loop that ends when a value is small, one before it; the sum in a branch counts."""
    layout = layout_on("data=2,model=4")

    def local(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.psum(x * 0.1, "model"), None

        def turn(x: jax.Array) -> jax.Array:
            return lax.scan(layer, x, length=3)[0]

        x = lax.while_loop(lambda x: x.sum() > 1, turn, lax.psum(x, "data"))
        return lax.cond(x[0] > 0, lambda x: lax.psum(x, ("data", "model")), lambda x: x, x)

    spec = PartitionSpec(None)
    run = jax.jit(
        jax.shard_map(local, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    found = collectives(compiled_text(run, jnp.ones(16)))
    mesh = dict(layout.mesh.shape)
    seen = sorted((axes_of(c.groups, mesh), c.times, c.in_open_loop) for c in found)
    assert seen == [(("data",), 1, False), (("data", "model"), 1, False), (("model",), 3, True)]


def test_both_branches_of_a_condition_are_read() -> None:
    """As they are named where a boolean decides, and where a number does."""
    text = """
%yes (x: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}
%no (x: f32[8]) -> f32[8] {
  ROOT %b = f32[8]{0} all-reduce(%x), channel_id=2, replica_groups={{0,1}}, to_apply=%add
}
ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} conditional(%p, %x, %x), HOW
}
"""
    for how in (
        "true_computation=%yes, false_computation=%no",
        "branch_computations={%yes, %no}",
    ):
        assert [c.times for c in collectives(text.replace("HOW", how))] == [1, 1]


def test_a_permutation_goes_along_every_axis_that_a_pair_of_it_crosses() -> None:
    """A ring through all eight: within a row of four, and from its end to the next row."""
    mesh = {"data": 2, "model": 4}
    assert axes_of(((0, 1), (1, 2), (2, 3)), mesh) == ("model",)
    assert axes_of(tuple((i, (i + 1) % 8) for i in range(8)), mesh) == ("data", "model")


def test_an_exchange_is_not_left_out_because_its_caller_is_unknown() -> None:
    """But one in a loop of no turns is not there."""
    text = """
%body (x: f32[8]) -> f32[8] {
  ROOT %sum = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
}
%condition (x: f32[8]) -> pred[] {
  ROOT %end = pred[] constant(false)
}
ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %y = f32[8]{0} HOW
}
"""
    with pytest.raises(ValueError, match=r"cannot tell how often body runs, which has ROOT %sum"):
        collectives(text.replace("HOW", "novelty(%x), performs=%body"))
    loop = (
        'while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"0"}}'
    )
    assert collectives(text.replace("HOW", loop)) == []


def test_groups_in_an_unknown_notation_are_not_taken_for_all_devices() -> None:
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %sum = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=torus<2,4>, to_apply=%add
}
"""
    with pytest.raises(ValueError, match=r"cannot read which devices exchange in .*torus<2,4>"):
        collectives(text)


def test_what_a_compiler_adds_is_named_by_what_it_is_given() -> None:
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %made = f32[8]{0} fusion(%x), kind=kCustom, calls=%f, metadata={op_name="jit(f)/feed_forward/dot"}
  %slice.2 = f32[2]{0} slice(%made), slice={[6:8]}
  %shift = f32[2]{0} collective-permute(%slice.2), channel_id=1, source_target_pairs={{0,1},{1,2}}
  ROOT %lost = f32[8]{0} all-reduce(%x), channel_id=2, replica_groups={{0,1}}, to_apply=%add
}
"""
    assert [c.origin for c in collectives(text)] == ["jit(f)/feed_forward/dot", ""]


def test_asynchronous_operations_count_once_and_by_their_results() -> None:
    """As a GPU's program has them (start and done), and a TPU's (a fusion for each part, one channel)."""
    text = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
%start_fusion (p: bf16[2,8]) -> bf16[8,8] {
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}
%done_fusion (p: bf16[2,8]) -> bf16[8,8] {
  ROOT %all-gather.2 = bf16[8,8]{1,0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}
%all-reduce-scatter.clone (p: f32[8]) -> f32[2] {
  %all-reduce.5 = f32[8]{0} all-reduce(%p), channel_id=9, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %slice = f32[2]{0} dynamic-slice(%all-reduce.5)
}
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %r = f32[4]{0} all-reduce(%t), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %f = bf16[8,8]{1,0} fusion(%t), kind=kCustom, calls=%start_fusion
  %g = bf16[8,8]{1,0} fusion(%t), kind=kCustom, calls=%done_fusion
}
%condition (t: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%t, %limit), direction=LT
}
ENTRY %main.1 (x: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]{0}) while(%x), condition=%condition, body=%body
  %c = (f32[3]{0}, f32[12]{0}) all-gather-start(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %d = f32[12]{0} all-gather-done(%c)
  %p = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %s = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.clone
}
"""
    found = [(c.kind, c.bytes, c.times) for c in collectives(text)]
    assert found == [
        ("all-gather", 128, 6),
        ("reduce-scatter", 8, 1),
        ("all-reduce", 16, 6),
        ("all-gather", 48, 1),
        ("collective-permute", 20, 1),
    ]
