"""What is counted equals the model's leaves and hand arithmetic."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from models import layout_on

from vocabjax import cli, find
from vocabjax.config import Config
from vocabjax.design import Design
from vocabjax.forecast.accelerators import ACCELERATORS
from vocabjax.forecast.count import ATTENTION, FEED_FORWARD, HEAD, Count, count, on_trunk_of
from vocabjax.optim import GroupConfig, NamedGroup, OptimConfig
from vocabjax.published import MODELS
from vocabjax.trunk import TrunkConfig

V, D, L, N, G, K, F, T = 3000, 64, 2, 4, 2, 16, 128, 128
TRUNK = TrunkConfig(layers=L, heads=N, kv_heads=G, head_dim=K, ffn=F)
MATRICES = L * (2 * D * K * (2 * N + 2 * G) + 2 * 3 * D * F)  # FLOPs per token


def config_of(name: str, **vocab: Any) -> Config:
    config = find.load_config(name)[1]
    is_decoder = config.trunk.kind == TrunkConfig.kind
    trunk = TRUNK if is_decoder else replace(config.trunk, separator=3)
    return replace(config, vocab=replace(config.vocab, size=V, **vocab), trunk=trunk)


def counted(config: Config, **asked: int) -> Count:
    layout = layout_on("data=1,model=1")
    with jax.set_mesh(layout.mesh):
        return count(Design.of(config, layout), **asked)


@pytest.mark.parametrize("name", find.configs())
def test_every_config_s_parts_and_groups_add_up_to_its_leaves(name: str) -> None:
    config = config_of(name)
    found = counted(config)
    layout = layout_on("data=1,model=1")
    with jax.set_mesh(layout.mesh):
        design = Design.of(config, layout)
    leaves = sum(leaf.size for leaf in jax.tree.leaves(design.blueprint.abstract()))
    assert found.parameters + found.padding == leaves
    assert sum(found.groups.values()) == found.parameters
    assert found.train_flops == design.blueprint.train_flops(config.data.length)
    assert 0 < found.vocab < found.parameters
    assert found.memory.parameters == 4 * leaves
    json.dumps(found.as_json(ACCELERATORS["v5e"]))


@pytest.mark.parametrize("name", ["tied", "untied", "ple", "mos"])
def test_flops_are_those_of_hand_arithmetic(name: str) -> None:
    found = counted(config_of(name), context=100)
    parts = {part.name: part for part in found.parts}
    head = 2 * V * D
    if name == "mos":  # four times, after four projections and the prior
        head = 4 * head + 2 * D * 4 * D + 2 * D * 4
    assert parts[HEAD].train_flops == 3 * head
    assert parts[HEAD].decode_flops == head
    assert parts["input"].train_flops == parts["input"].decode_flops == 0
    assert parts[FEED_FORWARD].train_flops == 3 * L * 6 * D * F
    projections = L * 2 * D * K * (2 * N + 2 * G)
    # A query of position t sees t + 1 keys, and pays 2·K for each score and 2·K for each value, per head.
    scores = sum(4 * N * K * (t + 1) for t in range(T)) / T * L
    assert parts[ATTENTION].train_flops == 3 * (projections + scores)
    assert parts[ATTENTION].decode_flops == projections + 4 * N * K * L * 100
    if name == "ple":
        P = 16
        assert parts["memory 0: ple"].decode_flops == L * 3 * 2 * D * P
    assert found.head_in_layers == pytest.approx(head / (MATRICES / L))


def test_bytes_of_decoding_are_those_of_hand_arithmetic() -> None:
    """Of an untied model: of the input only a row moves; of the rest every number, shared by those that decode together."""
    found = counted(config_of("untied", dtype="bfloat16"), batch=8, context=50)
    norms = 2 * L * D + D
    weights = L * (D * K * (2 * N + 2 * G) + 3 * D * F) + norms + V * D
    cache = 2 * L * G * K * 51
    assert found.decode_bytes == 2 * (weights / 8 + D + cache)
    tied = counted(config_of("tied", dtype="bfloat16"), batch=8, context=50)
    assert tied.decode_bytes == found.decode_bytes
    assert tied.head.decode_bytes == 2 * V * D / 8


def test_a_head_is_bound_by_memory_until_the_batch_reaches_the_ridge() -> None:
    """In bfloat16 it takes a FLOP per byte and sequence: 241 of them on a v5e, 197e12 over 819e9 bytes/s."""
    chip = ACCELERATORS["v5e"]
    assert chip.ridge == pytest.approx(240.5, abs=0.1)
    for batch, is_bound in ((1, True), (240, True), (241, False)):
        found = counted(config_of("untied", dtype="bfloat16"), batch=batch)
        assert found.head.intensity == pytest.approx(batch)
        assert found.as_json(chip)["accelerator"]["head_memory_bound"] is is_bound
    alone = counted(config_of("untied", dtype="bfloat16"), batch=1)
    assert alone.seconds(chip) == alone.decode_bytes / 819e9


def test_gradients_of_tables_trained_by_rows_are_those_of_the_rows() -> None:
    config = config_of("untied")
    rows = replace(
        config,
        optim=replace(config.optim, embed=GroupConfig(sparse="catch_up")),
        data=replace(config.data, length=8),
        train=replace(config.train, batch=4),
    )
    dense, sparse = counted(config).memory, counted(rows).memory
    padded = 3072
    assert dense.gradients - sparse.gradients == 4 * (padded - 32) * D
    assert sparse.moments - dense.moments == 4 * padded  # which step each row is at


def test_what_the_backward_keeps_grows_with_what_is_not_recomputed() -> None:
    kept = [
        counted(replace(config_of("tied"), trunk=replace(TRUNK, remat=remat))).memory.kept
        for remat in ("full", "dots", "none")
    ]
    assert kept == sorted(kept)
    # Of every layer its input, float32; beside that, little.
    assert L * T * D * 4 <= kept[0] < 3 * L * T * D * 4


def test_a_comparison_puts_other_vocabularies_on_the_same_trunk() -> None:
    config = MODELS["article_3b"][1]
    other = on_trunk_of(config, find.load_config("untied")[1])
    assert (other.trunk, other.vocab.size, other.vocab.width) == (
        config.trunk,
        100_096,
        2560,
    )
    assert other.vocab.head.kind == "untied"
    untied, tied = counted(other), counted(on_trunk_of(config, find.load_config("tied")[1]))
    assert untied.parameters - tied.parameters == 100_096 * 2560
    # Of width 64 and 4,096 ids are: narrow rows of 16, per-layer rows of 16, bands from 512 and 2,048, 4,096 buckets.
    factorized, ple, adaptive, engram = (
        on_trunk_of(config, find.load_config(name)[1]).vocab
        for name in ("factorized", "ple", "adaptive", "engram")
    )
    assert factorized.input.factor == 16 * 40  # type: ignore[attr-defined]
    assert ple.memories[0].width == 16 * 40  # type: ignore[attr-defined]
    assert adaptive.input.cutoffs == (12_512, 50_048)  # type: ignore[attr-defined]
    assert adaptive.head.cutoffs == adaptive.input.cutoffs  # type: ignore[attr-defined]
    assert engram.memories[0].buckets == 100_096  # type: ignore[attr-defined]
    # The groups of a vocabulary go with it, and those of the trunk stay.
    mine = NamedGroup("first", "trunk/*", GroupConfig(lr=0.5))
    theirs = NamedGroup("rows", "vocab/memories/*", GroupConfig(optimizer="adagrad"))
    untied = find.load_config("untied")[1]
    optim = OptimConfig(embed=GroupConfig(sparse="catch_up"), groups=(mine,))
    base = replace(untied, vocab=replace(untied.vocab, size=512), optim=optim)
    tied, ple = find.load_config("tied")[1], find.load_config("ple")[1]
    ple = replace(ple, optim=replace(ple.optim, groups=(theirs,)))
    counted(on_trunk_of(base, tied))  # would be refused with settings of an input of its own
    assert on_trunk_of(base, ple).optim.groups == (mine, theirs)
    assert on_trunk_of(base, untied).optim.embed == untied.optim.embed


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "costs.png"
    words = [
        "count",
        "tied",
        "--vocab.size",
        "1000",
        "--compare",
        "tied,ple",
        "--out",
        str(picture),
    ]
    assert cli.main(words) == 0
    assert "memory 0: ple" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    assert cli.main(["count", "qwen2_0_5b", "--accelerator", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 494_032_768
    assert found["accelerator"]["decode_memory_bound"] is True
    assert sum(part["parameters"] for part in found["parts"]) == found["parameters"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["count"], "count needs a config first"),
        (["count", "qwen2_0_6b"], "no config 'qwen2_0_6b'; did you mean"),
        (["count", "article_3b", "--accelerator", "v9"], "unknown accelerator 'v9'"),
        (["count", "article_3b", "--context", "0"], "--context = 0 must be at least 1"),
        (["count", "article_3b", "--compare", "tied,unteid"], "no config 'unteid'; did you mean"),
        (["count", "article_3b", "--out", "costs.txt"], "must end in .png, .pdf or .svg"),
    ],
)
def test_what_cannot_be_counted_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
