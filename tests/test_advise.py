"""Advice follows from the numbers of the model, says where it is from, and comes with a config that trains."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from models import layout_on

from vocabjax import cli, find
from vocabjax.config import Config
from vocabjax.design import Design
from vocabjax.forecast.advise import Advice, Needs, advise, rows_seen
from vocabjax.forecast.count import on_trunk_of
from vocabjax.published import MODELS
from vocabjax.trunk import TrunkConfig


def advised(name: str, **needs: Any) -> tuple[dict[str, Advice], Config]:
    layout = layout_on("data=1,model=1")
    config = MODELS[name][1] if name in MODELS else find.load_config(name)[1]
    if config.vocab.size is None:
        config = replace(config, vocab=replace(config.vocab, size=4096))
    with jax.set_mesh(layout.mesh):
        lines, config = advise(Design.of(config, layout), Needs(**needs))
    return {line.topic: line for line in lines}, config


@pytest.mark.parametrize(
    ("name", "needs", "is_tied"),
    [
        ("qwen2_0_5b", {}, True),
        ("article_3b", {}, True),
        ("llama3_1_8b", {}, False),
        ("llama3_1_70b", {}, False),
        ("llama3_1_8b", {"on_device": True}, True),
        ("llama3_1_8b", {"passes": 16}, True),
    ],
)
def test_tables_are_tied_where_published_models_do_or_measurements_say(
    name: str, needs: dict[str, Any], is_tied: bool
) -> None:
    lines, config = advised(name, **needs)
    assert config.vocab.head.tied is is_tied
    assert lines["tie the tables"].choice == ("tied" if is_tied else "untied")
    expected = "measured here" if "passes" in needs else "arithmetic" if needs else "published"
    assert lines["tie the tables"].certainty == expected


def test_its_numbers_are_those_of_the_model() -> None:
    lines, config = advised("article_3b", accelerator="v5e", shards=4)
    assert "256,245,760 parameters, 10.4% of the tied model" in lines["tie the tables"].because
    # 782 blocks of 128 do not divide over 4 shards: 784 do.
    assert "are 100,352: 256 more" in lines["padding"].because
    head = lines["precision of the head"].because
    assert "512,491,520 FLOPs on 488.75 MiB of weights: 1 FLOP per byte" in head
    assert f"({2 * 256_245_760 / 819e9 * 1e6:.0f} µs)" in head
    assert config.optim.tied.weight_decay == 0
    assert "update of the input" not in lines  # a tied table's gradient is dense


def test_on_a_device_per_layer_embeddings_are_weighed_by_what_they_cost() -> None:
    lines, config = advised("article_3b", on_device=True)
    assert [memory.kind for memory in config.vocab.memories] == ["ple"]
    line = lines["per-layer embeddings"]
    assert f"{100_096 * 32 * 256:,} parameters" in line.because
    # 6·D·P of a layer's 2·(2·D·K·(N + G) + 3·D·F).
    share = 6 * 2560 * 256 / (2 * (2 * 2560 * 128 * 24 + 3 * 2560 * 6912))
    assert f"grow by {share:.1%}" in line.because


def test_rows_read_in_a_step_follow_zipf() -> None:
    """Against a draw; and as methods have it: 18 % of 100,096 rows by 65k tokens, 82 % by a million."""
    rng = np.random.default_rng(0)
    p = 1 / np.arange(1, 1001)
    drawn = [len(set(rng.choice(1000, 2000, p=p / p.sum()))) for _ in range(20)]
    assert rows_seen(1000, 2000) == pytest.approx(np.mean(drawn) / 1000, rel=0.01)
    assert rows_seen(100_096, 65_536) == pytest.approx(0.18, abs=0.01)
    assert rows_seen(100_096, 1 << 20) == pytest.approx(0.82, abs=0.01)


@pytest.mark.parametrize("name", find.configs())
def test_every_vocabulary_can_be_advised_on(name: str) -> None:
    """As it is, and on a trunk of 8B where tables are not tied; what is said is what the config then has."""
    layout, config = layout_on("data=1,model=1"), find.load_config(name)[1]
    vocab = replace(config.vocab, size=4096)
    if config.trunk.kind != TrunkConfig.kind:
        config = replace(config, trunk=replace(config.trunk, separator=3))
    for given, needs in (
        (replace(config, vocab=vocab), Needs(on_device=True)),
        (on_trunk_of(MODELS["llama3_1_8b"][1], config), Needs()),
    ):
        with jax.set_mesh(layout.mesh):
            lines, found = advise(Design.of(given, layout), needs)
        choices = {line.topic: line.choice for line in lines}
        is_tied = found.vocab.head.tied
        assert choices["tie the tables"] == ("tied" if is_tied else "untied")
        assert choices["shape of the table"].startswith(found.vocab.input.kind)
        assert (choices["per-layer embeddings"] == "none") == (not found.vocab.memories)
        assert choices["precision of the head"].startswith(found.vocab.dtype)
        assert found.vocab.input.kind == given.vocab.input.kind


def test_an_untied_input_of_which_few_rows_are_read_is_trained_by_rows() -> None:
    config = find.load_config("untied")[1]
    config = replace(
        config,
        vocab=replace(config.vocab, size=50_000),
        trunk=replace(config.trunk, layers=64, ffn=50_000),  # so large that untying is advised
        train=replace(config.train, batch=4),
    )
    layout = layout_on("data=1,model=1")
    config = replace(config, vocab=replace(config.vocab, width=1024), trunk=replace(config.trunk, head_dim=64))  # fmt: skip
    with jax.set_mesh(layout.mesh):
        lines, config = advise(Design.of(config, layout), Needs())
    assert config.vocab.head.kind == "untied"
    assert config.optim.embed.sparse == "catch_up"
    assert any(line.source == "experiments/sparse_rows" for line in lines)


def test_the_command_writes_a_config_that_trains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "advised" / "config.json"
    path.parent.mkdir()
    words = ["advise", "untied", "--vocab.size", "4096", "--on-device", "--parameters", "2e6"]
    assert cli.main([*words, "--out", str(path)]) == 0
    text = capsys.readouterr().out
    assert "vocab.head.kind: untied → tied" in text
    assert cli.main(["train", str(path), "--dry-run"]) == 0
    assert "no parameter was allocated" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    known = {"published", "measured here", "arithmetic", "claimed"}
    assert {line["certainty"] for line in found["advice"]} <= known
    assert all(line["source"] and line["because"] for line in found["advice"])
    assert found["config"] == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--passes", "0"], "--passes = 0.0 must be positive"),
        (["--input-only", "1"], "--input-only = 1.0 must be in [0, 1)"),
        (["--shards", "0"], "--shards = 0 must be at least 1"),
        (["--out", "a.py"], "--out a.py must end in .json"),
        (["--parameters", "3"], "--parameters = 3 must be between"),
    ],
)
def test_what_cannot_be_advised_on_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", "tied", "--vocab.size", "4096", *words]) == 2
    assert message in capsys.readouterr().err
