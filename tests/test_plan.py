"""A plan is the program that then runs, and its faults are called by name."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from models import layout_on
from small_runs import config_of as small_config

from vocabjax import cli, find
from vocabjax import train as training
from vocabjax.config import Config
from vocabjax.design import Design
from vocabjax.errors import UserError
from vocabjax.forecast.accelerators import ACCELERATORS
from vocabjax.forecast.faults import faults
from vocabjax.forecast.footprint import Footprint, TooLarge, hbm_total, held, no_room
from vocabjax.forecast.hlo import collectives, compiled_text
from vocabjax.forecast.parts import part_of
from vocabjax.forecast.plan import Exchange, Plan, exchanges, plan
from vocabjax.forecast.plan_report import as_json, as_text, side_by_side
from vocabjax.forecast.search import search
from vocabjax.forecast.topologies import tpu_devices
from vocabjax.mesh import Layout, make_mesh
from vocabjax.optim import GroupConfig
from vocabjax.state import init_state
from vocabjax.step import abstract_batch, make_step
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.interfaces import Objective
from vocabjax.vocab.loss import linear_cross_entropy
from vocabjax.vocab.scores import Scoring
from vocabjax.vocab.sizes import Sizes

V, D, B, T = 512, 16, 8, 8
TRUNK = TrunkConfig(layers=2, heads=8, kv_heads=8, head_dim=4, ffn=24)


def config_of(name: str, **optim: Any) -> Config:
    config = find.load_config(name)[1]
    return replace(
        config,
        vocab=replace(config.vocab, size=V, width=D, multiple=8),
        trunk=TRUNK,
        data=replace(config.data, length=T),
        optim=replace(config.optim, **optim),
        train=replace(config.train, batch=B, accumulate=1),
    )


def shard_bytes(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("mesh", ["data=1,model=8", "data=2,model=4", "data=8,model=1"])
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "by rows"])
def test_a_plan_is_the_program_that_runs(mesh: str, rows: bool) -> None:
    """Its bytes are those of the arrays and of the compiled step; its exchanges those of the text, counted by hand."""
    sparse: dict[str, Any] = {"embed": GroupConfig(sparse="catch_up")} if rows else {}
    layout = layout_on(mesh)
    design = Design.of(config_of("untied", **sparse), layout)
    found, _ = plan(design)
    with jax.set_mesh(layout.mesh):
        params = design.blueprint.init(0)
        state = init_state(design.optimizer, params, design.sparse.catch_up)
        assert found.parameters == shard_bytes(params)
        assert found.moments == shard_bytes((state.optimizer, state.current))
        step = make_step(design.blueprint, design.optimizer, sparse=design.sparse)
        batch = jax.tree.map(
            lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding),
            abstract_batch(layout, B, 1, T),
        )
        compiled = step.lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()
    held_by_it = found.footprint
    assert (held_by_it.arguments, held_by_it.temporaries, held_by_it.outputs) == (
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
    )
    # The number of the step is one more; the norm of the last gradients, in the moments, is not read.
    assert held_by_it.arguments == found.parameters + found.moments + shard_bytes(batch)
    # Donated: nothing of the state is there twice.
    assert held_by_it.outputs - held_by_it.aliased < 1000
    sent: dict[str, int] = {}
    for line in (compiled.as_text() or "").splitlines():
        if kind := re.search(r"= .* (all-\w+|reduce-scatter|collective-permute)\(", line):
            numbers = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", line[: kind.start(1)])
            size = sum(
                int(bits) // 8 * eval("*".join(dims.split(",")) or "1") for bits, dims in numbers
            )
            sent[kind[1]] = sent.get(kind[1], 0) + size  # once: what loops do is tested in test_hlo
    by_kind: dict[str, int] = {}
    for exchange in found.exchanges or ():
        by_kind[exchange.kind] = by_kind.get(exchange.kind, 0) + exchange.bytes
    assert by_kind == sent


def test_a_plan_is_what_a_training_run_compiles(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `train` itself, with two microbatches, a seed, and what is dropped: its step's memory and exchanges."""
    compiled: list[jax.stages.Compiled] = []

    def recorded(*arguments: Any) -> Any:
        step = make_step(*arguments)

        def run(state: Any, batch: Any) -> Any:
            if not compiled:
                compiled.append(step.lower(state, batch).compile())
            return compiled[0](state, batch)

        return run

    monkeypatch.setattr(training, "make_step", recorded)
    config, layout = small_config(corpus, steps=2, accumulate=2, seed=3), layout_on("data=2,model=4")  # fmt: skip
    training.train(config, tmp_path / "run", layout, quiet=True)
    found, _ = plan(Design.of(config, layout))
    (step,) = compiled
    memory: Any = step.memory_analysis()
    assert (found.footprint.arguments, found.footprint.temporaries) == (
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
    )
    assert found.exchanges == exchanges(collectives(step.as_text() or ""), layout)


def test_a_table_s_bytes_shrink_with_its_shards_and_an_unsharded_one_is_called_out() -> None:
    bytes_of = {}
    for shards in (1, 4, 8):
        layout = layout_on(f"data={8 // shards},model={shards}")
        found, _ = plan(Design.of(config_of("untied"), layout))
        tied = held(Design.of(config_of("tied"), layout).blueprint.abstract())
        bytes_of[shards] = found.parameters - tied
        is_called_out = any("the vocabulary is not sharded" in w for w in found.warnings)
        assert is_called_out == (shards == 1)
        assert len(found.warnings) == is_called_out
    assert bytes_of == {shards: 4 * 512 * D // shards for shards in (1, 4, 8)}


def test_temporaries_of_the_loss_grow_with_activations_alone() -> None:
    """Within (chunk·R + 2·R·D)·4 bytes for R rows of a shard, and of every further token a few times its width, never its scores."""
    layout = layout_on("data=2,model=4")
    rows, chunk = 2048, 8
    scoring = Scoring(layout, Sizes.make(4 * rows, 1, (), layout))
    table = jax.ShapeDtypeStruct((4 * rows, D), jnp.float32, sharding=layout.sharding("vocab", None))  # fmt: skip

    def temporaries(tokens: int) -> int:
        def of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            axes = ["batch", "seq", None][: len(shape)]
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*axes))

        def loss(h: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
            return linear_cross_entropy(scoring, Objective(chunk=chunk), h, table, targets).total

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        shapes = of((2, tokens, D), jnp.float32), table, of((2, tokens), jnp.int32)
        memory: Any = step.lower(*shapes).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    with jax.set_mesh(layout.mesh):
        few, many = temporaries(64), temporaries(256)
    activations = 8 * D * 4  # bytes per token
    assert few <= (chunk * rows + 2 * rows * D) * 4 + 64 * activations
    assert many - few <= (256 - 64) * activations


def test_gathered_tables_and_whole_logits_are_called_by_name() -> None:
    layout = layout_on("data=2,model=4")
    config = config_of("untied")
    design = Design.of(replace(config, vocab=replace(config.vocab, objective=replace(config.vocab.objective, chunk=4))), layout)  # fmt: skip
    table = jax.device_put(jnp.ones((512, D)), layout.sharding("vocab", None))
    h = jax.device_put(jnp.ones((B, T, D)), layout.sharding("batch", "seq", None))

    @jax.jit
    def step(h: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = jnp.einsum("btd,vd->btv", h, table)
        return layout.place(table, None, None), jax.nn.softmax(z)

    with jax.set_mesh(layout.mesh):
        found = faults(design, compiled_text(step, h, table), "train")
    assert any("vocab/input/table is gathered" in fault for fault in found)
    assert any("logits of all tokens at once: a buffer of (4, 8, 128)" in fault for fault in found)


@pytest.mark.parametrize(
    ("origin", "shape", "is_fault"),
    [
        ("jvp(jit(accumulate_cross_entropy))/dot", "f32[32,128]", True),
        ("jvp(jit(accumulate_cross_entropy))/dot", "f32[1,128,32]", True),
        ("some_head/dot", "bf16[4,8,512]", True),
        ("jvp(jit(accumulate_cross_entropy))/dot", "f32[31,128]", False),  # a chunk
        ("jvp(trunk)/while/body/attention/dot", "f32[4,8,8,128]", False),  # as wide by chance
        ("table_gradient/scatter", "f32[128,16]", False),  # a table
    ],
)  # fmt: skip
def test_logits_are_told_from_what_has_their_width_by_chance(
    origin: str, shape: str, is_fault: bool
) -> None:
    config = config_of("untied")
    objective = replace(config.vocab.objective, chunk=4)
    config = replace(config, vocab=replace(config.vocab, objective=objective))
    text = f"""
%fused (p: f32[32,128]) -> f32[] {{
  %inside = f32[32,128]{{1,0}} exponential(%p), metadata={{op_name="jit(step)/cross_entropy/exp"}}
}}
ENTRY %main (p: f32[32,128]) -> f32[] {{
  %made = {shape}{{1,0}} dot(%p, %p), metadata={{op_name="jit(step)/{origin}"}}
  ROOT %sum = f32[] fusion(%p), kind=kLoop, calls=%fused
}}
"""
    found = faults(Design.of(config, layout_on("data=2,model=4")), text, "train")
    assert bool(found) == is_fault


def test_decoding_is_planned_with_what_every_token_costs() -> None:
    config = config_of("tied")
    vocab = replace(config.vocab, objective=Objective(future=1))  # which is trained, not decoded
    design = Design.of(replace(config, vocab=vocab), layout_on("data=2,model=4"))
    found, _ = plan(design, mode="decode", context=16, sequences=4)
    assert found.moments == 0
    # Of two layers of eight heads of 4: four projections, three of the feed-forward, 16 keys and values.
    assert found.flops == 4 * (2 * V * D + 2 * (4 * 2 * D * 32 + 3 * 2 * D * 24 + 2 * 2 * 32 * 16))
    each = [x for x in found.exchanges or () if x.each_token]
    assert {(x.part, x.kind) for x in each} >= {("scores", "all-gather"), ("lookups", "all-reduce")}
    # Of a device's two sequences, one token's width.
    (lookup,) = [x for x in each if x.part == "lookups"]
    assert (lookup.bytes, lookup.times) == (2 * D * 4, 1)
    # In each of two layers, for every token.
    (attention,) = [x for x in each if x.part == "attention"]
    assert (attention.bytes, attention.times) == (2 * D * 4, 2)
    # Keys and values of two layers, two sequences, 17 positions, two of eight heads of 4; whose segment and length are int32.
    assert found.cache == 2 * 2 * 2 * 17 * 2 * 4 * 4 + 2 * 17 * 4 + 4


def test_estimates_are_hand_arithmetic() -> None:
    chip = ACCELERATORS["v5e"]
    exchanges = (
        Exchange("all-reduce", ("model",), "attention", 1000, 3, False, 4),
        Exchange("all-gather", ("data",), "trunk", 400, 1, False, 2),
    )
    footprint = Footprint(40, 36, 30, 100, is_exact=True)
    made = Plan(
        mesh={"data": 2, "model": 4}, mode="train", chip=chip, tokens=64, parameters=10, moments=20, cache=0, footprint=footprint,
        available=146, exchanges=exchanges, warnings=(), advice=(), flops=8 * 197 * 10**12, compile_seconds=0.1,
    )  # fmt: skip
    seconds = made.seconds()
    assert seconds is not None
    assert seconds["compute"] == pytest.approx(1.0)
    assert seconds["memory"] == pytest.approx((40 + 36 + 200) / 819e9)
    assert seconds["network"] == pytest.approx((2 * 3000 * 3 / 4 + 400 / 2) / (2 * 50e9))
    assert made.fits
    assert not replace(made, available=145).fits
    text = as_text(replace(made, available=73, advice=("buy more",)))
    assert "does not fit: 200% of the 73 bytes of a v5e\n    buy more" in text
    # A token reads parameters and cache; the prompt's exchanges are not its own.
    each = (exchanges[0]._replace(each_token=True), exchanges[1])
    seconds = replace(made, mode="decode", cache=809, exchanges=each).seconds()
    assert seconds is not None
    assert seconds["memory"] == pytest.approx(819 / 819e9)
    assert seconds["network"] == pytest.approx(2 * 3000 * 3 / 4 / (2 * 50e9))


def test_what_a_compiler_refuses_is_a_plan_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its state is known without compiling, its need from the refusal; its exchanges are not."""

    def refuse(lowered: Any, platform: str) -> Any:
        raise TooLarge(needs=10_000_000, available=9_000_000)

    monkeypatch.setattr("vocabjax.forecast.plan.compile_measured", refuse)
    layout = layout_on("data=2,model=4")
    design = Design.of(config_of("untied"), layout)
    found, text = plan(design, ACCELERATORS["v5e"])
    assert (found.fits, found.footprint.peak, found.available) == (False, 10_000_000, 9_000_000)
    assert (found.exchanges, found.seconds(), text) == (None, None, "")
    assert found.parameters == held(design.blueprint.abstract())
    # Of 512 rows in four parts two tables, and two moments of each, which halve over `data`: what saves a known amount is first.
    tables, trunk = 2 * 3 * 128 * D * 4, [line for line in found.advice if "fsdp:" in line]
    assert f"--rules default,vocab=model+data: {tables // 2:,} bytes fewer" in found.advice[0]
    fsdp = Design.of(config_of("untied"), layout_on("data=2,model=4", "fsdp"))
    saved = 3 * (found.parameters - held(fsdp.blueprint.abstract()))
    assert trunk == [f"--rules fsdp: {saved:,} bytes fewer of parameters and moments"]
    advice = "\n".join(found.advice)
    assert "--train.accumulate 4: a device has one sequence at a time instead of 4, but" in advice
    assert "no batch is small enough" not in advice
    assert "does not fit: 111% of the 8.58 MiB" in as_text(found)
    assert "unknown" in side_by_side({"a": found})
    assert as_json(found)["compiled"] is False
    done = replace(
        config_of("untied"), train=replace(config_of("untied").train, accumulate=4)
    )  # a sequence at a time, everything sharded
    layout = layout_on("data=2,model=4", "fsdp,vocab=model+data")
    advice = "\n".join(plan(Design.of(done, layout), ACCELERATORS["v5e"])[0].advice)
    assert advice
    assert not any(said in advice for said in ("fsdp", "vocab=", "accumulate"))


def test_refusals_and_reports_are_read() -> None:
    """As libtpu words them: in two ways, and by memory space."""
    older = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm. Exceeded"
    newer = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.40G) exceeds available HBM (15.75G)."
    available = round(15.75 * 2**30)
    assert no_room(older) == (round(21.5 * 2**30), available)
    assert no_room(newer) == (round(16.4 * 2**30), available)
    huge = newer.replace("16.40G", "5.00T")
    assert no_room(huge) == (5 * 2**40, available)
    assert no_room("INTERNAL: Mosaic failed to compile (TPU kernel)") is None


def test_the_memory_in_a_report_is_that_of_hbm(tmp_path: Path) -> None:
    assert hbm_total(tmp_path) is None
    report = tmp_path / "module_0000.jit_step.after_optimizations-memory-usage-report.txt"
    report.write_text(
        "Memory Space: default (color=0)\nTotal bytes: 17607639040 (16.40GiB)\n  cumulative_size;\n\n"
        "Memory Space: vmem (color=1)\nTotal bytes: 116672512 (111.27MiB)\n"
    )
    assert hbm_total(tmp_path) == 17_607_639_040


def test_parts_are_told_by_where_operations_come_from() -> None:
    assert (
        part_of("jit(step)/transpose(jvp(trunk))/while/body/attention/dot")
        == "attention (backward)"
    )
    assert part_of("jit(step)/jvp(jit(accumulate_cross_entropy))/psum") == "loss"
    assert part_of("jit(step)/jvp(jit(lookup))/shard_map/psum") == "lookups"
    assert part_of("") == "unnamed"


def test_a_search_ranks_what_fits_by_time_and_leaves_out_what_does_not_divide() -> None:
    config = config_of("tied")
    config = replace(config, train=replace(config.train, batch=2))
    design = Design.of(config, layout_on("data=1,model=1"))
    ranked = search(design, jax.devices(), ACCELERATORS["v5e"])
    by_mesh = {(x.mesh["data"], x.mesh.get("seq", 1), x.mesh["model"], x.rules.split(",")[0]): x for x in ranked}  # fmt: skip
    assert len(by_mesh) == len(ranked)
    # Two sequences fill no more than two devices of the batch; what is left goes to positions and the model.
    meshes = {(1, 1, 8), (1, 2, 4), (1, 4, 2), (1, 8, 1), (2, 1, 4), (2, 2, 2), (2, 4, 1)}
    assert set(by_mesh) == {(*mesh, rules) for mesh in meshes for rules in ("default", "fsdp")}
    seconds = [x.seconds for x in ranked]
    assert seconds == sorted(seconds)
    assert by_mesh[2, 1, 4, "fsdp"].bytes < by_mesh[2, 1, 4, "default"].bytes
    assert by_mesh[2, 2, 2, "fsdp"].bytes < by_mesh[2, 2, 2, "default"].bytes


def test_a_search_outlives_a_candidate_that_the_compiler_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[dict[str, int]] = []

    def compiles_from_the_second_on(design: Design, *others: Any) -> tuple[Plan, str]:
        tried.append(dict(design.layout.mesh.shape))
        if len(tried) == 1:
            raise UserError("the compiler refuses it: INTERNAL: no such kernel")
        return plan(design, *others)

    monkeypatch.setattr("vocabjax.forecast.commands.plan", compiles_from_the_second_on)
    words = ["plan", "tied", "--vocab.size", "500", "--train.batch", "8", "--devices", "8", "--accelerator", "v5e", "--search"]  # fmt: skip
    assert cli.main([*words, "--json"]) == 0
    refused, *compiled = json.loads(capsys.readouterr().out)
    assert [x["mesh"] for x in (refused, *compiled)][: len(tried)] == tried
    assert refused["plan"] is None and "no such kernel" in refused["refused"]
    assert all(x["plan"]["fits"] and x["refused"] is None for x in compiled[: len(tried) - 1])
    assert all(x["plan"] is None and x["refused"] is None for x in compiled[len(tried) - 1 :])

    def refuses(*_: Any) -> tuple[Plan, str]:
        raise UserError("the compiler refuses it: INTERNAL: no such kernel")

    monkeypatch.setattr("vocabjax.forecast.commands.plan", refuses)
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert out.count(" was refused: the compiler refuses it: INTERNAL: no such kernel") == 3


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "devices.png"
    words = ["plan", "tied", "--vocab.size", "500", "--devices", "8", "--mesh", "data=2,model=4", "--accelerator", "v5e"]  # fmt: skip
    assert cli.main([*words, "--json", "--out", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 8
    assert found["fits"] is True
    assert found["warnings"] == []
    assert {x["part"] for x in found["exchanges"]} >= {"loss", "attention", "lookups"}
    assert picture.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "v5e:3x3x3"], "--topology 'v5e:3x3x3' is not known; write e.g. v5e:4x4; known: v5e"),
        (["--topology", "v5e:32x32"], "is not known; write e.g. v5e:4x4; known: v5e and v6e: 1x1, 2x2"),
        (["--topology", "v5p:16x20x28"], "and 6,144 of v5p"),
        (["--topology", "v4:4x4x6"], "each 1, 2, 4 or a multiple of 4"),
        (["--topology", "v5e:4x4", "--devices", "8"], "--topology says what devices there are"),
        (["--devices", "8", "--mesh", "data=3"], "mesh data=3 needs 3 devices, but there are 8"),
        (["--devices", "8", "--train.batch", "12"], "12 does not divide over the 8 shards"),
        (["--devices", "8", "--search"], "--search ranks by a chip's figures: give --topology"),
        (["--devices", "8", "--search", "--accelerator", "v5e", "--mode", "decode"], "leave --mode decode out"),
        (["--devices", "8", "--search", "--accelerator", "v5e", "--mesh", "data=8"], "leave --mesh out"),
        (["--devices", "8", "--mode", "decode", "--context", "0"], "--context 0 must be at least 1"),
        (["--devices", "8", "--accelerator", "h1000"], "unknown accelerator 'h1000'"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "tied", "--vocab.size", "500", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_libtpu_the_line_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["plan", "tied", "--vocab.size", "500", "--topology", "v5e:4x4"]) == 2
    assert "pip install 'vocabjax[tpu]'" in capsys.readouterr().err


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "topology"), [("tied", "v5e:2x4"), ("untied", "v5e:2x4"), ("tied", "v6e:2x4")]
)
def test_a_tpu_slice_compiles_and_gathers_no_table(
    name: str, topology: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "plan",
        name,
        "--vocab.size",
        "4096",
        "--vocab.dtype",
        "bfloat16",
        "--topology",
        topology,
    ]
    assert cli.main([*words, "--mesh", "data=2,model=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chip"] == topology[:3]
    assert found["warnings"] == []
    assert found["fits"] is True
    tables = {"tied": 1, "untied": 2}[name]
    assert found["bytes_per_device"]["parameters"] >= tables * 4096 // 4 * 64 * 4
    parts = {x["part"] for x in found["exchanges"]}
    assert {"loss", "lookups", "attention", "feed-forward"} <= parts


@pytest.mark.tpu
def test_memory_on_a_tpu_is_what_its_compiler_allots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of the buffers of its assignment, one by one, but those that lie on the chip (a colour); and the state is in it."""
    folder = contextlib.nullcontext(str(tmp_path))  # kept
    monkeypatch.setattr("tempfile.TemporaryDirectory", lambda: folder)
    devices, chip = tpu_devices("v5e:2x4")
    layout = Layout.make(make_mesh({"data": 2, "model": 4}, devices=list(devices)))
    config = config_of("untied")
    config = replace(config, vocab=replace(config.vocab, size=8192, dtype="bfloat16"))
    found, _ = plan(Design.of(config, layout), chip)
    (assignment,) = tmp_path.glob("*after_optimizations-buffer-assignment.txt")
    sizes = re.findall(r"^allocation \d+: size (\d+),(?! color)", assignment.read_text(), re.MULTILINE)  # fmt: skip
    assert found.footprint.is_exact
    assert found.footprint.peak == sum(map(int, sizes))
    assert found.fits
    # Two tables of 8,192 rows in four parts, and two moments of each, are not all of it but most.
    tables = 2 * 3 * 8192 // 4 * D * 4
    assert tables < found.parameters + found.moments < found.footprint.peak


@pytest.mark.tpu
def test_what_a_tpu_s_compiler_refuses_is_told_with_its_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Logits are not made at once, but 2²⁰ sequences a chip are too many anyhow."""
    words = ["plan", "tied", "--vocab.size", "512", "--topology", "v5e:1x1", "--mesh", "data=1", "--train.batch", "1048576"]  # fmt: skip
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    held = found["bytes_per_device"]
    assert (found["fits"], found["compiled"]) == (False, False)
    assert held["peak"] > held["available"] == round(15.75 * 2**30)
    assert any("--train.accumulate" in line for line in found["advice"])


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("topology", "chips"), [("v4:2x2x1", 4), ("v5e:1x1", 1), ("v5p:2x2x2", 8), ("v6e:16x16", 256)]
)
def test_a_chip_is_a_device(topology: str, chips: int) -> None:
    devices, chip = tpu_devices(topology)
    assert len(devices) == chips
    assert topology.startswith(chip.name)


@pytest.mark.tpu
def test_a_mesh_may_cut_an_axis_of_the_torus() -> None:
    """2 of a 4×4×4, which JAX's own mesh refuses."""
    devices, chip = tpu_devices("v5p:4x4x4")
    mesh = make_mesh({"data": 32, "model": 2}, devices=list(devices))
    assert dict(mesh.shape) == {"data": 32, "model": 2}
    assert len({d.id for d in mesh.devices.flat}) == 64
    assert chip.name == "v5p"
