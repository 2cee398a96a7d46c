"""The whole configuration of a run: frozen dataclasses, checked early, JSON in and out.

Letters used throughout vocabjax: V vocabulary (logical), Vp padded vocabulary, D model width, L layers, B batch,
T positions, N query heads, G key/value heads, K head width, F FFN width, A microbatches per step.
"""

import dataclasses
import functools
import importlib
import json
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cattrs
from cattrs.gen import make_dict_structure_fn
from cattrs.strategies import configure_union_passthrough
from cattrs.v import format_exception

from vocabjax.data import DataConfig
from vocabjax.errors import UserError, nearest
from vocabjax.optim import OptimConfig, check
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab import heads, inputs, memories
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.interfaces import PartConfig


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large a batch, and what is kept.

    Attributes:
      steps: optimiser steps.
      batch: sequences per step, over all devices and microbatches.
      accumulate: A, microbatches a step is cut into.
      seed: of the initial parameters and the order of the batches.
      log_every, eval_every, checkpoint_every: in steps; the last step always does all three.
      keep_last, keep_best: checkpoints kept; best means lowest validation loss.
    """

    steps: int = 600
    batch: int = 16
    accumulate: int = 1
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100
    keep_last: int = 2
    keep_best: int = 1

    def check(self) -> None:
        """Raises UserError for counts that cannot work."""
        for name in ("steps", "batch", "accumulate", "log_every", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} = {getattr(self, name)} must be at least 1")
        if self.batch % self.accumulate:
            raise UserError(
                f"train.batch = {self.batch} does not divide into train.accumulate = {self.accumulate} microbatches"
            )
        if self.seed < 0:
            raise UserError(f"train.seed = {self.seed} must not be negative")


@dataclass(frozen=True)
class Config:
    """What is trained, on what, and how. Where it runs (mesh, devices) is not part of it."""

    vocab: VocabConfig = field(default_factory=VocabConfig)
    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def check(self) -> None:
        """Everything that can be refused without data or devices. Raises UserError."""
        self.vocab.check()
        self.trunk.check(self.vocab.width)
        self.train.check()
        check(self.optim, self.train.steps)

    def with_size(self, size: int) -> "Config":
        """The config with V filled in from the data.

        Raises:
          UserError: the data holds more ids than the model.
        """
        if self.vocab.size is None:
            return dataclasses.replace(self, vocab=dataclasses.replace(self.vocab, size=size))
        if self.vocab.size < size:
            raise UserError(
                f"vocab.size = {self.vocab.size} is smaller than the tokenizer, whose ids need {size}; "
                f"leave vocab.size unset, or set it to {size} or more"
            )
        return self


def to_json(config: Config) -> str:
    """A config as JSON; parts carry their `kind`."""
    return json.dumps(_converter().unstructure(config), indent=2) + "\n"


def from_json(text: str, where: str = "config") -> Config:
    """The config that `to_json` wrote.

    Raises:
      UserError: not JSON, an unknown field or part, or a value of the wrong type; names the place.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error}); is the file truncated?") from error
    try:
        config: Config = _converter().structure(values, Config)
    except (cattrs.BaseValidationError, cattrs.errors.StructureHandlerNotFoundError) as error:
        details = "; ".join(cattrs.transform_error(error, "config", _explain))
        raise UserError(f"{where}: {details}") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return config


def load_config(path: Path) -> Config:
    """Reads a `config.json`. Raises UserError naming the file."""
    try:
        return from_json(path.read_text(), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def differences(ours: Config, theirs: Config) -> list[str]:
    """`path: theirs → ours` for each field that differs."""

    def flat(value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {
                k: v
                for name, item in value.items()
                for k, v in flat(item, f"{path}.{name}" if path else name).items()
            }
        return {path: value}

    a, b = (flat(_converter().unstructure(config), "") for config in (ours, theirs))
    return [f"{k}: {b.get(k)} → {a.get(k)}" for k in sorted(a | b) if a.get(k) != b.get(k)]


def _explain(error: BaseException, wanted: type | None) -> str:
    return str(error) if isinstance(error, UserError) else format_exception(error, wanted)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    configure_union_passthrough(str | int | float | bool | None, converter)

    def is_part(cls: Any) -> bool:
        return isinstance(cls, type) and issubclass(cls, PartConfig)

    # A part is written with its kind; where the config asks for any input, head or memory, the kind says which class.
    def unstructure(part: Any) -> dict[str, Any]:
        values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        return {"kind": part.kind, **{k: converter.unstructure(v) for k, v in values.items()}}

    converter.register_unstructure_hook_func(is_part, unstructure)

    @converter.register_structure_hook_factory(is_part)
    def _(base: type[PartConfig]) -> Any:
        kinds = {cls.kind: cls for cls in concrete(base)}
        fields = {
            kind: make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)
            for kind, cls in kinds.items()
        }

        def structure(values: Any, _: Any) -> Any:
            values = dict(values)
            kind = values.pop("kind", None)
            if kind not in kinds:
                raise UserError(f"unknown {base.__name__} kind {kind!r}{nearest(str(kind), kinds)}")
            return fields[kind](values, kinds[kind])

        return structure

    return converter


def concrete(base: type[PartConfig]) -> list[type[PartConfig]]:
    """Every kind of a part: those in `vocabjax/vocab/{inputs,heads,memories}`, and those a config brought along."""
    _import_parts()
    found = [base] if hasattr(base, "kind") else []
    return found + [cls for sub in base.__subclasses__() for cls in concrete(sub)]


@functools.cache
def _import_parts() -> None:
    for package in (inputs, heads, memories):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
