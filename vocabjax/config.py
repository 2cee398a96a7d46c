"""The whole configuration of a run: frozen dataclasses, checked early, JSON in and out.

Letters used throughout vocabjax: V vocabulary (logical), Vp padded vocabulary, D model width, L layers, B batch,
T positions, N query heads, G key/value heads, K head width, F FFN width, A microbatches per step.
"""

import dataclasses
import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias, ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import cattrs
from cattrs.gen import make_dict_structure_fn
from cattrs.v import format_exception

from vocabjax import optim
from vocabjax.data import DataConfig
from vocabjax.encoder_decoder import EncoderDecoderConfig
from vocabjax.errors import UserError, nearest
from vocabjax.optim import OptimConfig
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab import heads, inputs, memories
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.interfaces import HeadConfig, InputConfig, MemoryConfig, PartConfig

PARTS: dict[type[PartConfig], ModuleType] = {
    InputConfig: inputs,
    HeadConfig: heads,
    MemoryConfig: memories,
}
TRUNKS: dict[str, type[TrunkConfig]] = {
    cls.kind: cls for cls in (TrunkConfig, EncoderDecoderConfig)
}


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large a batch, and what is kept.

    Attributes:
      steps: optimiser steps.
      batch: sequences per step, over all devices and microbatches.
      accumulate: A, microbatches a step is cut into.
      seed: of the initial parameters and the order of the batches.
      log_every: steps between two lines of the log; the last step is logged too.
      eval_every: steps between two evaluations; the last step is evaluated too.
      checkpoint_every: steps between two checkpoints; the last step is saved too.
      keep_last: how many of the latest checkpoints are kept.
      keep_best: how many of those of lowest validation loss are kept beside them.
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
        for name, least in (
            ("steps", 1),
            ("batch", 1),
            ("accumulate", 1),
            ("seed", 0),
            ("log_every", 1),
            ("eval_every", 1),
            ("checkpoint_every", 1),
            ("keep_last", 1),
            ("keep_best", 0),
        ):
            if not least <= getattr(self, name) < 2**31:
                raise UserError(
                    f"train.{name} = {getattr(self, name)} must be at least {least} and below 2^31"
                )
        if self.batch % self.accumulate:
            raise UserError(
                f"train.batch = {self.batch} does not divide into train.accumulate = {self.accumulate} microbatches"
            )


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
        self.data.check()
        self.train.check()
        optim.check(self.optim, self.train.steps)
        if (ahead := self.vocab.objective.future) >= self.data.length:
            raise UserError(
                f"vocab.objective.future = {ahead} must be below data.length = {self.data.length}: no window holds a token "
                "that far ahead"
            )
        if isinstance(self.trunk, EncoderDecoderConfig) and self.data.prefix_end is None:
            raise UserError(
                "an encoder-decoder reads the beginning of each document as its source: set data.prefix_end to what ends "
                "it, such as a line's end for data.source = 'gcide'"
            )

    @property
    def needs_data(self) -> bool:
        """Something of the model is not known before the data are read."""
        trunk = self.trunk
        return self.vocab.size is None or (
            isinstance(trunk, EncoderDecoderConfig) and trunk.separator is None
        )

    def with_separator(self, separator: int | None) -> "Config":
        """The config with the id that ends a source filled in from the data, where the model asks for one.

        Raises:
          UserError: it names another one.
        """
        if not isinstance(self.trunk, EncoderDecoderConfig):
            return self
        if self.trunk.separator not in (None, separator):
            raise UserError(
                f"trunk.separator = {self.trunk.separator}, but data.prefix_end = {self.data.prefix_end!r} is id {separator} "
                "of the tokenizer; leave trunk.separator unset"
            )
        return dataclasses.replace(self, trunk=dataclasses.replace(self.trunk, separator=separator))

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
    return from_values(_values(text, where), where)


def from_values(values: Any, where: str) -> Config:
    """`from_json`, of what the JSON holds."""
    try:
        config: Config = _converter().structure(values, Config)
    except (cattrs.BaseValidationError, cattrs.errors.StructureHandlerNotFoundError) as error:
        told = (text.rpartition(" @ ") for text in cattrs.transform_error(error, "", _explain))
        details = "; ".join(f"{path[1:]} {what}".strip() for what, _, path in told)
        raise UserError(f"{where}: {details}") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return config


def read_values(path: Path) -> Any:
    """What a JSON file holds. Raises UserError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return _values(text, str(path))


def load_config(path: Path) -> Config:
    """Reads a `config.json`. Raises UserError naming the file."""
    return from_values(read_values(path), str(path))


def _values(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); is the file truncated?") from error


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
    pairs = [(key, b.get(key), a.get(key)) for key in sorted(a | b)]
    # NaN differs from itself.
    return [
        f"{k}: {shown(old)} → {shown(new)}"
        for k, old, new in pairs
        if old != new and (old == old or new == new)
    ]


def shown(value: Any) -> str:
    """A setting on one line: a line's end, say, as its escape."""
    text = str(value)
    return text if text.isprintable() else repr(value)


def _explain(error: BaseException, wanted: type | None) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [f.name for f in dataclasses.fields(error.cl)]
        return ", ".join(
            f"has no field {name!r}{nearest(name, known)}" for name in sorted(error.extra_fields)
        )
    return "is missing" if isinstance(error, KeyError) else format_exception(error, wanted)


_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    NoneType: "null",
}


def _options(cls: Any) -> tuple[Any, ...]:
    """The types and the literals of a union, or of a type alone."""
    if get_origin(cls) in (Union, UnionType):
        return tuple(option for member in get_args(cls) for option in _options(member))
    return (cls,)


def _is_plain(cls: Any) -> bool:
    return all(option in _PLAIN or get_origin(option) is Literal for option in _options(cls))


def _plain(cls: Any) -> Callable[[Any, Any], Any]:
    """Takes a JSON value as it is; only a whole number may stand for a number."""
    options = _options(cls)
    literals = [value for option in options for value in get_args(option)]
    names = [repr(value) for value in literals]
    names += [_PLAIN[option] for option in options if option in _PLAIN]

    def structure(value: Any, _: Any) -> Any:
        if type(value) in options or any(type(x) is type(value) and x == value for x in literals):
            return value
        if float in options and type(value) is int and abs(value) <= 1e308:
            return float(value)
        raise UserError(f"must be {' or '.join(names)}, not {value!r:.60}")

    return structure


def _require(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise UserError(f"must be {name}, not {value!r:.60}")
    return value


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    # cattrs itself would coerce: "12" to (1, 2), 10.7 to 10.
    converter.register_structure_hook_factory(_is_plain)(_plain)
    for cls in (int, float, bool, str):
        converter.register_structure_hook(cls, _plain(cls))

    @converter.register_structure_hook_factory(lambda cls: get_args(cls)[1:] == (Ellipsis,))
    def _(cls: Any) -> Any:
        items: Any = GenericAlias(list, get_args(cls)[:1])
        return lambda values, _: tuple(converter.structure(_require(values, list, "a list"), items))

    @converter.register_structure_hook_factory(dataclasses.is_dataclass)
    def _(cls: Any) -> Any:
        fields = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)
        return lambda values, _: fields(_require(values, dict, "an object"), cls)

    def is_part(cls: Any) -> bool:
        return isinstance(cls, type) and issubclass(cls, (PartConfig, TrunkConfig))

    # A part is written with its kind; where the config asks for any input, head, memory or trunk, the kind says which class.
    def unstructure(part: Any) -> dict[str, Any]:
        if "kind" not in vars(
            type(part)
        ):  # written under its parent's, it would be read back as its parent
            raise UserError(
                f"{type(part).__name__} needs a `kind` of its own, to be named in files"
            )
        values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        return {"kind": part.kind, **{k: converter.unstructure(v) for k, v in values.items()}}

    converter.register_unstructure_hook_func(is_part, unstructure)

    @converter.register_structure_hook_factory(is_part)
    def _(base: Any) -> Any:
        is_trunk = issubclass(base, TrunkConfig)
        known: Mapping[str, Any] = TRUNKS if is_trunk else kinds(base)
        hint = "" if is_trunk else f" ({_own_part(base)})"
        fields = {
            kind: make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)
            for kind, cls in known.items()
        }

        def structure(values: Any, _: Any) -> Any:
            values = dict(_require(values, dict, "an object"))
            # Files older than the second trunk name none.
            kind = values.pop("kind", TrunkConfig.kind if is_trunk else None)
            if not isinstance(kind, str) or kind not in known:
                raise UserError(f"has the unknown kind {kind!r}{nearest(str(kind), known)}{hint}")
            return fields[kind](values, known[kind])

        return structure

    return converter


def _own_part(base: type[PartConfig]) -> str:
    where = PARTS[base].__name__.replace(".", "/")
    return f"a part of your own is found where its module is {where}/NAME.py"


def kinds(base: type[PartConfig]) -> dict[str, type[PartConfig]]:
    """Kind → class of an input, a head or a memory: those in `vocabjax/vocab/…`, and those a config brought along.

    Raises:
      UserError: two classes of one kind.
    """
    _import_parts()
    found: dict[str, type[PartConfig]] = {}
    for cls in _subclasses(base):
        if "kind" not in vars(
            cls
        ):  # a base of several, or one that cannot be named (see `to_json`)
            continue
        other = found.setdefault(cls.kind, cls)
        # The same name twice is one module that was imported again: its last import counts.
        if (cls.__module__, cls.__qualname__) != (other.__module__, other.__qualname__):
            raise UserError(
                f"{other.__module__}.{other.__qualname__} and {cls.__module__}.{cls.__qualname__} are both of the kind "
                f"{cls.kind!r}; give one another `kind`"
            )
        found[cls.kind] = cls
    return found


def _subclasses(base: type[PartConfig]) -> list[type[PartConfig]]:
    return [cls for sub in base.__subclasses__() for cls in (sub, *_subclasses(sub))]


@functools.cache
def _import_parts() -> None:
    for package in PARTS.values():
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            try:
                importlib.import_module(module.name)
            except UserError:
                raise
            except Exception as error:  # somebody's new part, in the middle of being written
                raise UserError(
                    f"cannot import {module.name}: {why_not_imported(error)}"
                ) from error


def why_not_imported(error: Exception) -> str:
    """What is wrong with a module, and in which file and line where that is known."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    return f"{type(error).__name__}: {error}"
