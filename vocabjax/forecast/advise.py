"""The article's decision tree, made honest: what to choose for a vocabulary, why, by which numbers, and how sure that is.

Every line carries where it is from: "published" (a report or paper says so), "measured here" (an experiment of this repository),
"arithmetic" (it follows from the numbers of this model), or "claimed" (the article on vocabulary design says so, and no source does).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from vocabjax.config import Config
from vocabjax.describe import size_text
from vocabjax.design import Design
from vocabjax.errors import UserError
from vocabjax.forecast.accelerators import Accelerator, accelerator
from vocabjax.forecast.count import Count, count
from vocabjax.optim import GroupConfig, OptimConfig, with_vocabulary_groups
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.heads.adaptive import TiedAdaptiveSoftmax
from vocabjax.vocab.heads.factorized import FactorizedHead
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.inputs.full import FullTable
from vocabjax.vocab.interfaces import HeadConfig, Objective, converted
from vocabjax.vocab.memories.ple import PLE

Certainty = Literal["published", "measured here", "arithmetic", "claimed"]
SMALL, LARGE = 4.5e9, 7e9  # parameters: up to here published models tie, from here most do not


@dataclass(frozen=True)
class Needs:
    """What is known beside the config.

    Attributes:
      on_device: it is to decode where memory is scarce and storage is not.
      tokens: of training text; None: unknown.
      passes: over that text.
      input_only: share of ids that are read and never predicted, such as image placeholders.
      accelerator: the chip that it decodes on; None: unknown.
      shards: of the vocabulary that are planned.
    """

    on_device: bool = False
    tokens: float | None = None
    passes: float = 1.0
    input_only: float = 0.0
    accelerator: str | None = None
    shards: int = 1

    def check(self) -> None:
        """Raises UserError for what cannot be."""
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise UserError(f"--tokens = {self.tokens} must be positive and finite")
        if not 0 < self.passes < math.inf:
            raise UserError(f"--passes = {self.passes} must be positive and finite")
        if not 0 <= self.input_only < 1:
            raise UserError(f"--input-only = {self.input_only} must be in [0, 1)")
        if self.shards < 1:
            raise UserError(f"--shards = {self.shards} must be at least 1")
        _ = self.chip

    @property
    def chip(self) -> Accelerator | None:
        return None if self.accelerator is None else accelerator(self.accelerator)


class Advice(NamedTuple):
    """One decision.

    Attributes:
      topic, choice: what is decided, and how.
      because: the reason, with the numbers of this model.
      source: where that is from.
      certainty: how sure it is.
    """

    topic: str
    choice: str
    because: str
    source: str
    certainty: Certainty


class _Model(NamedTuple):
    """What the decisions are made by: the design, and the same with nothing but one tied table; both counted."""

    design: Design
    needs: Needs
    own: Count
    tied: Count
    V: int
    D: int

    @property
    def table(self) -> int:
        return self.V * self.D

    @property
    def share(self) -> float:
        """Of the tied table."""
        return self.table / self.tied.parameters


def advise(design: Design, needs: Needs) -> tuple[list[Advice], Config]:
    """The decisions for a design on one device, and the config that follows them.

    Raises:
      UserError: needs that cannot be, or a config that does not fit together.
    """
    needs.check()
    config = design.config
    plain = _with_vocab(
        config, input=FullTable(), head=TiedHead(), memories=(), objective=Objective()
    )
    plain = replace(plain, optim=with_vocabulary_groups(config.optim, OptimConfig()))
    counted = count(Design.of(plain, design.layout))
    assert config.vocab.size is not None
    model = _Model(design, needs, count(design), counted, config.vocab.size, config.vocab.width)
    lines: list[Advice] = []
    for decide in (
        _tying,
        _norm,
        _rates,
        _rows,
        _padding,
        _shape,
        _memory,
        _precision,
        _z_loss,
        _shards,
    ):
        line, config = decide(model, config)
        lines += [line] if line is not None else []
    Design.of(config, design.layout)  # else it would be no advice
    return lines, config


_Decision = tuple[Advice | None, Config]
_NUMBERS = "this model's numbers"
# The tied head of an input whose rows are not of the trunk's width.
_TIED: dict[str, type[HeadConfig]] = {
    "factorized": FactorizedHead,
    "adaptive": TiedAdaptiveSoftmax,
}


def _tying(model: _Model, config: Config) -> _Decision:
    total, share = model.tied.parameters, model.share
    needs = model.needs
    saved = f"one table is {model.table:,} parameters, {share:.1%} of the tied model of {total:,}"
    repeated = needs.passes >= 4
    is_tied = needs.on_device or repeated or total <= (SMALL + LARGE) / 2
    if needs.on_device:
        why, source, sure = f"{saved}: memory that a device has to hold", _NUMBERS, "arithmetic"
    elif repeated:
        why = f"{saved}; on text that is read {needs.passes:g} times tying lowered validation loss (−0.022 nats at 4 passes, −0.310 at 16)"
        source, sure = "experiments/tied_vs_untied", "measured here"
    elif total <= SMALL:
        why = f"{saved}; Qwen2.5 up to 3B, Qwen3 up to 4B, Llama 3.2, Gemma and SmolLM2 tie"
        source, sure = "arXiv:2412.15115, 2505.09388, 2407.21783", "published"
    elif total < LARGE:
        why = f"{saved}; published models of this size do either: measure it (`experiment tied_vs_untied`)"
        source, sure = "arXiv:2412.15115, 2505.09388", "published"
    else:
        why = f"{saved}; Qwen from 7B and Llama from 8B do not tie (Gemma 2 and 3 of 27B do)"
        source, sure = "arXiv:2407.10671, 2407.21783, 2408.00118", "published"
    if not is_tied and needs.tokens is not None and needs.tokens < 20 * total:
        why += f"; but {needs.tokens:.3g} tokens are few for it, which speaks for tying"
    head = config.vocab.head
    if head.tied != is_tied:
        new: type[HeadConfig] = UntiedHead
        if is_tied:
            new = _TIED.get(config.vocab.input.kind, TiedHead)
        config = _with_vocab(config, head=converted(head, new))
        config = replace(config, optim=_regrouped(config.optim, is_tied))
    choice = "tied" if is_tied else "untied"
    return Advice("tie the tables", choice, why, source, sure), config  # type: ignore[arg-type]


def _regrouped(optim: OptimConfig, is_tied: bool) -> OptimConfig:
    """The settings of the input's table go to the table of both faces, or from there to both."""
    default = GroupConfig()
    if is_tied:
        tied = replace(optim.embed, sparse="off", frozen=False)
        return replace(optim, embed=default, head=default, tied=tied)
    return replace(optim, embed=optim.tied, head=optim.tied, tied=default)


def _norm(model: _Model, config: Config) -> _Decision:
    if not config.vocab.head.tied:
        why = "an untied input chooses its own scale; a LayerNorm (BLOOM) is for a start that is unstable"
        return Advice("norm of the embedding", "none", why, "arXiv:2211.05100", "published"), config
    why = (
        f"a tied row is of unit length, so that logits are of order 1; times √{model.D} = {model.D**0.5:.1f} it enters the residual stream "
        "with unit variance. The article's LayerNorm acts on the input alone: logits still see the raw row"
    )
    input_ = config.vocab.input
    if input_.norm == "none" and input_.scale == "none":
        config = _with_vocab(config, input=replace(input_, scale="sqrt_width"))
    else:
        why += "; kept as the config has it"
    choice = f"scale {config.vocab.input.scale}, norm {config.vocab.input.norm}"
    return (
        Advice("norm of the embedding", choice, why, "arXiv:1706.03762, 2408.00118", "published"),
        config,
    )


def _rates(model: _Model, config: Config) -> _Decision:
    batch = config.train.batch * config.data.length
    seen = rows_seen(model.V, batch)
    why = (
        f"no decay: a row that is not read would only shrink (SmolLM3 saw no difference). The article's rate of 5 for rows seen every "
        f"5 to 10 steps has no source, and Adam's step for a row seen every k steps shrinks as 1/√k, not 1/k; of {model.V:,} rows, "
        f"{seen:.0%} are read in a step of {batch:,} tokens (Zipf)"
    )
    role = "tied" if config.vocab.head.tied else "embed"
    group: Any = replace(getattr(config.optim, role), weight_decay=0.0)
    optim: Any = replace(config.optim, **{role: group})
    source = "OLMo 2, arXiv:2501.00656"
    return Advice("rate and decay", "lr × 1, decay 0", why, source, "published"), replace(
        config, optim=optim
    )


def _rows(model: _Model, config: Config) -> _Decision:
    vocab = config.vocab
    if vocab.head.tied or vocab.objective.augmented or vocab.input.kind != "full":
        return None, config
    seen = rows_seen(model.V, config.train.batch * config.data.length)
    if seen > 0.5:
        why = f"{seen:.0%} of the rows are read in a step (Zipf): a dense update costs little more"
        return Advice(
            "update of the input", "dense", why, "experiments/bench", "measured here"
        ), config
    why = f"{seen:.0%} of the rows are read in a step (Zipf); catch_up equals dense Adam within 1e-7 nats, lazy does not (+0.130)"
    group = replace(config.optim.embed, sparse="catch_up")
    optim = replace(config.optim, embed=group)
    advice = Advice(
        "update of the input", "sparse catch_up", why, "experiments/sparse_rows", "measured here"
    )
    return advice, replace(config, optim=optim)


def _padding(model: _Model, config: Config) -> _Decision:
    unit = config.vocab.multiple * model.needs.shards
    padded = -(-model.V // unit) * unit
    why = (
        f"{model.V:,} ids in rows of a multiple of {config.vocab.multiple} on each of {model.needs.shards} shards are {padded:,}: "
        f"{padded - model.V:,} more, zero and never predicted"
    )
    if model.needs.input_only:
        why += f"; the {model.needs.input_only:.1%} of ids that are only read belong in vocab.banned, so that the softmax leaves them out"
    choice = f"multiple of {config.vocab.multiple}"
    return Advice("padding", choice, why, "docs/architecture.md", "arithmetic"), config


def _shape(model: _Model, config: Config) -> _Decision:
    topic, kind = "shape of the table", config.vocab.input.kind
    if kind != "full":
        stored = model.design.blueprint.count("vocab/input/")
        why = f"it stores {stored:,} parameters where a full table has {model.table:,}"
        return Advice(topic, f"{kind}, as the config has it", why, _NUMBERS, "arithmetic"), config
    if model.share < 0.25:
        why = f"the table is {model.share:.1%} of the model: there is little to save"
        return Advice(topic, "full", why, _NUMBERS, "arithmetic"), config
    E = max(64, model.D // 4)
    small = model.V * E + E * model.D
    why = (
        f"the table is {model.share:.1%} of the model; of width {E} and a projection it would be {small:,} parameters, "
        f"{1 - small / model.table:.0%} less. ALBERT's average fell from 82.3 to 81.7 at width 128 (81.8 at 256) where layers are not "
        "shared: worth it only where memory decides, so it is not in the config below"
    )
    choice = "full; or factorized, adaptive"
    return Advice(topic, choice, why, "arXiv:1909.11942", "published"), config


def _memory(model: _Model, config: Config) -> _Decision:
    topic, layers = "per-layer embeddings", config.trunk.layers
    if memories := config.vocab.memories:
        stored = model.design.blueprint.count("vocab/memories/")
        kinds = ", ".join(memory.kind for memory in memories)
        why = f"{kinds}: {stored:,} parameters, of which a token reads a few rows"
        return Advice(topic, "the config's memories", why, _NUMBERS, "arithmetic"), config
    if config.trunk.kind != TrunkConfig.kind:
        why = "they attach to the layers of a decoder alone"
        return Advice(topic, "none", why, "docs/variants.md", "arithmetic"), config
    width = 256 if model.D >= 2048 else 64
    size = model.V * layers * width
    flops = 6 * model.D * width * layers
    ratio = flops / (model.tied.layer_flops * layers)
    if not model.needs.on_device:
        why = f"per-layer embeddings spend storage for quality where memory is scarce: {size:,} parameters here"
        return Advice(topic, "none", why, "Gemma 3n", "published"), config
    row = layers * width * 2
    why = (
        f"{size:,} parameters that are only looked up may lie in storage: {size_text(2 * size)} in bfloat16, of which a token reads "
        f"{size_text(row)}; FLOPs grow by {ratio:.1%} of the layers' matrices (the article's 4 % is not what Gemma builds)"
    )
    config = _with_vocab(config, memories=(PLE(width=width),))
    choice = f"PLE of width {width}"
    return Advice(topic, choice, why, "Gemma 3n, docs/articles.md", "published"), config


def _precision(model: _Model, config: Config) -> _Decision:
    head = model.own.head
    why = (
        f"decoding one sequence, the head does {head.decode_flops:,} FLOPs on {size_text(round(head.decode_bytes))} of weights: "
        f"{head.intensity:.2g} FLOP per byte"
    )
    chip = model.needs.chip
    if chip is not None:
        seconds = head.decode_bytes / chip.memory_bandwidth
        why += (
            f", far below the {chip.ridge:.0f} of a {chip.name}: it is bound by memory ({seconds * 1e6:,.0f} µs), not by compute as the "
            f"article says, until {math.ceil(chip.ridge / head.intensity)} sequences decode together"
        )
    why += "; narrower weights pay, with scores and sums in float32"
    if config.vocab.dtype != "bfloat16" and model.tied.parameters > 1e8:
        config = _with_vocab(config, dtype="bfloat16")
    choice = f"{config.vocab.dtype} operands, float32 scores"
    return Advice("precision of the head", choice, why, _NUMBERS, "arithmetic"), config


def _z_loss(model: _Model, config: Config) -> _Decision:
    if model.tied.parameters < 1e9 or "z_loss" not in config.vocab.head.honours:
        return None, config
    why = "keeps log Σ exp of the scores near 0, where bfloat16 is fine; 1e-5 as in OLMo 2"
    objective = config.vocab.objective
    if not objective.z_loss:
        config = _with_vocab(config, objective=replace(objective, z_loss=1e-5))
    return Advice(
        "z-loss", f"{config.vocab.objective.z_loss:g}", why, "arXiv:2501.00656", "published"
    ), config


def _shards(model: _Model, config: Config) -> _Decision:
    shards = model.needs.shards
    held = 12 * Design.of(config, model.design.layout).blueprint.count("vocab/") / shards
    why = (
        f"rows over the model axis: tables, their gradients' sums and Adam's moments lie where their rows are, {size_text(round(held))} on each of "
        f"{shards}; a step sends activations, and of the loss three numbers per token"
    )
    choice, source = f"vocab over model={shards}", "arXiv:1909.08053, `run.py plan`"
    return Advice("sharding", choice, why, source, "published"), config


def rows_seen(rows: int, tokens: int) -> float:
    """The share of rows that a step of so many tokens reads, on average, where the i-th commonest id has probability ∝ 1/i."""
    rank = np.arange(1, rows + 1)
    p = 1 / rank / (1 / rank).sum()
    return float(-np.expm1(tokens * np.log1p(-p)).mean())


def _with_vocab(config: Config, **changes: Any) -> Config:
    return replace(config, vocab=replace(config.vocab, **changes))
