"""Presets: what each changes, and what it refuses."""

import pytest

from vocabjax.config import Config, differences
from vocabjax.errors import UserError
from vocabjax.find import load_config
from vocabjax.flags import TrainFlags, parse, with_parts
from vocabjax.presets import PRESETS


def changes(name: str, words: str) -> list[str]:
    """Old → new of every setting that the flags change in a config."""
    config = load_config(name)[1]
    return differences(with_flags(config, words), config)


def with_flags(config: Config, words: str) -> Config:
    return parse(
        TrainFlags, "train", words.split(), TrainFlags(config=with_parts(config, words.split()))
    ).config


@pytest.mark.parametrize(
    ("config", "preset", "changed"),
    [
        ("tied", "article", {"optim.tied.lr": 5.0, "optim.tied.weight_decay": 0.0}),
        ("untied", "article", {"optim.embed.lr": 5.0, "optim.embed.weight_decay": 0.0}),
        ("tied", "bloom", {"vocab.input.norm": "layernorm"}),
        ("tide", "engram", {"optim.memory.lr": 5.0, "optim.memory.weight_decay": 0.0}),
        ("tied", "gemma2", {"vocab.input.scale": "sqrt_width", "vocab.head.softcap": 30.0}),
        ("hash", "glm130b", {"vocab.input.gradient": 0.1}),
        ("untied", "oec", {"vocab.head.centre": True}),
        ("tied", "olmo2", {"vocab.objective.z_loss": 1e-5, "optim.tied.weight_decay": 0.0}),
    ],
)
def test_a_preset_changes_what_it_names_and_nothing_else(
    config: str, preset: str, changed: dict[str, object]
) -> None:
    found = changes(config, f"--preset {preset}")
    assert len(found) == len(changed), found
    for path, value in changed.items():
        assert any(path in line and repr(value).strip("'") in line for line in found), found


def test_rates_of_its_own_become_multiples_of_the_config_s() -> None:
    """At D = 64: 0.3 · (64/768)^−½ and 0.008 · (64/768)^−½, over 3e−3."""
    config = with_flags(load_config("untied")[1], "--preset nanochat")
    optim = config.optim
    assert optim.lr * optim.embed.lr == pytest.approx(0.3 * 12**0.5)
    assert optim.lr * optim.head.lr == pytest.approx(0.008 * 12**0.5)
    assert (optim.embed.weight_decay, optim.head.weight_decay) == (0.001, 0.01)


def test_flags_stand_over_presets_and_later_presets_over_earlier_ones() -> None:
    config = with_flags(load_config("tied")[1], "--preset article --preset olmo2 --optim.tied.lr 2")
    assert (config.optim.tied.lr, config.optim.tied.weight_decay) == (2.0, 0.0)
    assert config.vocab.objective.z_loss == 1e-5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--preset engrm", "--preset: unknown name 'engrm'; did you mean 'engram'"),
        ("--preset engram", "has no memory; add --memory engram"),
        ("--preset nanochat", "two tables; use an untied head"),
        ("--head mos --preset mos", "unknown name 'mos'"),
        (
            "--input adaptive --head tied_adaptive --preset oec",
            "'tied_adaptive' is not one softmax",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        changes("tied", words)


def test_every_preset_says_what_it_is_in_a_line() -> None:
    for name, preset in PRESETS.items():
        assert preset.summary.endswith("."), name
        assert len(preset.summary) < 130, name
