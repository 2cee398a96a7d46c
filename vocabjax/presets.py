"""Published settings by name: what others do to embeddings beside their shape. `--preset NAME` changes a config by one.

Learning rates are multiples of `optim.lr`; where the source gives a rate of its own, the multiple is that rate over `optim.lr`.
Nothing else of the source is taken: not its trunk, schedule or optimiser for matrices.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from vocabjax.config import Config
from vocabjax.errors import UserError, nearest
from vocabjax.vocab.heads.linear import LinearHead


class Preset(NamedTuple):
    """What it changes and where that is from; `apply` gives the changed config, or raises UserError where it cannot."""

    summary: str
    apply: Callable[[Config], Config]


def apply_presets(config: Config, names: tuple[str, ...]) -> Config:
    """The config, changed by each in turn.

    Raises:
      UserError: an unknown name, or a preset for a part that this config does not have.
    """
    for name in names:
        if name not in PRESETS:
            raise UserError(f"--preset: unknown name {name!r}{nearest(name, PRESETS)}")
        config = PRESETS[name].apply(config)
    return config


def _group(config: Config, role: str, **changes: Any) -> Config:
    groups: dict[str, Any] = {role: replace(getattr(config.optim, role), **changes)}
    return replace(config, optim=replace(config.optim, **groups))


def _reading_role(config: Config) -> str:
    return "tied" if config.vocab.head.tied else "embed"


def _input(config: Config, **changes: Any) -> Config:
    vocab = config.vocab
    return replace(config, vocab=replace(vocab, input=replace(vocab.input, **changes)))


def _head(name: str, config: Config, **changes: Any) -> Config:
    vocab = config.vocab
    if not isinstance(vocab.head, LinearHead):
        raise UserError(
            f"--preset {name}: vocab.head of kind {vocab.head.kind!r} is not one softmax over one table; use tied or untied"
        )
    return replace(config, vocab=replace(vocab, head=replace(vocab.head, **changes)))


def _engram(config: Config) -> Config:
    if not config.vocab.memories:
        raise UserError(
            "--preset engram: this config has no memory; add --memory engram, or another"
        )
    return _group(config, "memory", lr=5.0, weight_decay=0.0)


def _article(config: Config) -> Config:
    return _group(config, _reading_role(config), lr=5.0, weight_decay=0.0)


def _nanochat(config: Config) -> Config:
    if config.vocab.head.tied:
        raise UserError("--preset nanochat: its rates are for two tables; use an untied head")
    unit = (config.vocab.width / 768) ** -0.5 / config.optim.lr
    config = _group(config, "embed", lr=0.3 * unit, weight_decay=0.001)
    config = _group(config, "head", lr=0.008 * unit, weight_decay=0.01)
    if config.vocab.memories:
        config = _group(config, "memory", lr=0.3 * unit, weight_decay=0.01)
    return _head("nanochat", config, softcap=15.0)


def _olmo2(config: Config) -> Config:
    config = _group(config, _reading_role(config), weight_decay=0.0)
    objective = replace(config.vocab.objective, z_loss=1e-5)
    return replace(config, vocab=replace(config.vocab, objective=objective))


PRESETS = {
    "article": Preset(
        "The reading table at 5 times the learning rate, no decay: claimed by the article on embeddings, no source.",
        _article,
    ),
    "bloom": Preset(
        "LayerNorm after the lookup (BLOOM, arXiv:2211.05100).",
        lambda config: _input(config, norm="layernorm"),
    ),
    "engram": Preset(
        "Memory tables at 5 times the learning rate, no decay (Engram, arXiv:2601.07372).", _engram
    ),
    "gemma2": Preset(
        "Rows times √D, soft cap 30 (Gemma 2, arXiv:2408.00118).",
        lambda config: _head("gemma2", _input(config, scale="sqrt_width"), softcap=30.0),
    ),
    "glm130b": Preset(
        "The input path's gradient times 0.1 (GLM-130B, arXiv:2210.02414).",
        lambda config: _input(config, gradient=0.1),
    ),
    "nanochat": Preset(
        "Input and memories at 0.3, head at 0.008, times (D/768)^-½; decay 0.001, 0.01, 0.01; soft cap 15 (nanochat).",
        _nanochat,
    ),
    "oec": Preset(
        "The scored table centred after every step (output-embedding centring, arXiv:2601.02031).",
        lambda config: _head("oec", config, centre=True),
    ),
    "olmo2": Preset(
        "z-loss 1e-5, no decay of the reading table (OLMo 2, arXiv:2501.00656).", _olmo2
    ),
}
