"""The flags of each command, and how they are parsed.

Flags are the fields of frozen dataclasses, so that every setting of a `Config` is one: `--vocab.head.softcap 30`.
"""

import argparse
import contextlib
import io
import re
import sys
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from vocabjax import find
from vocabjax.config import Config, kinds
from vocabjax.errors import UserError, nearest
from vocabjax.generate import SamplingConfig
from vocabjax.launch import Launch
from vocabjax.load import Step
from vocabjax.optim import NamedGroup
from vocabjax.presets import apply_presets
from vocabjax.published import MODELS
from vocabjax.vocab.interfaces import HeadConfig, InputConfig, MemoryConfig, PartConfig, converted

Flat = tyro.conf.arg(name="")  # its flags stand without a name before them
Switches: Any = tyro.conf.FlagCreatePairsOff  # --quiet, without --no-quiet
_Flags = TypeVar("_Flags")


@dataclass(frozen=True)
class PartFlags:
    """Parts of the config to swap or add.

    Attributes:
      head: another kind of head (tied, untied …), with the settings it shares with the config's.
      input: another kind of input (full …), likewise.
      memory: another memory; may be repeated. Its settings are then flags: --vocab.memories.0.…
      group: NAME=PATTERN, an optimiser group of the parameters whose paths match; may be repeated. Its settings are then
        flags: --optim.groups.0.group.…
      preset: published settings of others, by name (`configs` lists them); may be repeated. Flags are applied after it.
    """

    head: str | None = None
    input: str | None = None
    memory: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    group: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    preset: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


@dataclass(frozen=True)
class RunFlags:
    """What to run, and where it lands.

    Attributes:
      name: the run's name; None: the config's.
      runs: the directory that holds runs.
      init: a run to take the first parameters from (its best checkpoint), instead of fresh ones.
      dry_run: print config, parameters, groups and mesh; train nothing.
      tensorboard: also log to TensorBoard, in the run directory.
      wandb: also log to Weights & Biases.
      profile: trace a few steps into the run's profile/, and say where their time went.
      quiet: no progress.
    """

    name: str | None = None
    runs: Path = Path("runs")
    init: str | None = None
    dry_run: bool = False
    tensorboard: bool = False
    wandb: bool = False
    profile: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class TrainFlags:
    """Trains a config in RUNS/NAME. The same command again resumes it; a finished run prints its result."""

    run: Annotated[RunFlags, Flat, Switches] = field(default_factory=RunFlags)
    parts: Annotated[PartFlags, Flat, Switches] = field(default_factory=PartFlags)
    launch: Annotated[Launch, Flat, Switches] = field(default_factory=Launch)
    config: Annotated[Config, Flat] = field(default_factory=Config)


@dataclass(frozen=True)
class EvalFlags:
    """Evaluates a checkpoint on the validation split, on one device unless told otherwise.

    Attributes:
      run: name or path of a run.
      runs: the directory that holds runs.
      step: a saved step, best (lowest validation loss) or latest.
      data: another source, in the run's tokens; its validation split is read.
      batch: sequences at a time; changes nothing but memory.
      json: print JSON.
    """

    run: tyro.conf.Positional[str]
    runs: Path = Path("runs")
    step: Step = "best"
    data: str | None = None
    batch: int | None = None
    json: Annotated[bool, Switches] = False
    launch: Annotated[Launch, Flat, Switches] = field(default_factory=Launch)


@dataclass(frozen=True)
class SampleFlags:
    """Continues prompts, on one device unless told otherwise.

    Attributes:
      run: name or path of a run.
      runs: the directory that holds runs.
      step: a saved step, best (lowest validation loss) or latest.
      prompt: a text to continue, as the start of a document; may be repeated. None given: starts from nothing.
      ids: a prompt of token ids, for a run without a tokenizer.
    """

    run: tyro.conf.Positional[str]
    runs: Path = Path("runs")
    step: Step = "best"
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    ids: tuple[int, ...] = ()
    sampling: Annotated[SamplingConfig, Flat] = field(default_factory=SamplingConfig)
    launch: Annotated[Launch, Flat, Switches] = field(default_factory=Launch)


@dataclass(frozen=True)
class InspectFlags:
    """Describes a run, also while it trains; on one device, whatever it trains on.

    Attributes:
      run: name or path of a run.
      runs: the directory that holds runs.
    """

    run: tyro.conf.Positional[str]
    runs: Path = Path("runs")


@dataclass(frozen=True)
class StudyFlags:
    """Settings of the experiment.

    Attributes:
      runs: the directory that holds runs; finished arms are skipped, killed ones resumed.
      out: where results, table and figure go; None: the experiment's folder under `runs`.
      quiet: no progress.
    """

    runs: Path = Path("runs")
    out: Path | None = None
    quiet: Annotated[bool, Switches] = False
    launch: Annotated[Launch, Flat, Switches] = field(default_factory=Launch)


def parse(
    kind: type[_Flags], command: str, words: list[str], default: _Flags | None = None
) -> _Flags:
    """The flags of a command. Raises UserError for what cannot be parsed; --help exits."""
    if "--" in words:
        raise UserError(f"unexpected argument '--'; see {command} --help")
    name = Path(sys.argv[0]).name
    options: dict[str, Any] = {
        "prog": f"{name if name.endswith('.py') else 'vocabjax'} {command}",
        "config": (tyro.conf.AvoidSubcommands,),
        **({} if default is None else {"default": default}),
    }
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            flags, unknown = tyro.cli(kind, args=words, return_unknown_args=True, **options)
    except SystemExit as stop:
        if stop.code:
            raise UserError(f"{_boxed(errors.getvalue())}; see {command} --help") from None
        raise
    if unknown:
        word, see = unknown[0].partition("=")[0], f"; see {command} --help"
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r}{see}")
        for path, flag in _ADDED.items():
            if word.startswith(path):
                raise UserError(
                    f"unknown flag {word}: {flag} adds one, whose settings are then flags{see}"
                )
        listing = io.StringIO()
        with contextlib.redirect_stdout(listing), contextlib.suppress(SystemExit):
            tyro.cli(kind, args=["--help"], compact_help=True, **options)
        known = re.findall(r"(?<!\S)--[a-z][\w.-]*", listing.getvalue())
        raise UserError(f"unknown flag {word}{_nearest_flag(word, known) or see}")
    return flags


_ADDED = {
    "--optim.groups": "--group NAME=PATTERN",
    "--vocab.memories": "--memory KIND",
}


def _nearest_flag(word: str, known: list[str]) -> str:
    """`--lr` → `; did you mean '--optim.lr' …?`: flags of the same last name first, then those spelt alike; or ""."""

    def last(flag: str) -> str:
        return flag.lstrip("-").rpartition(".")[2].replace("_", "-")

    same = sorted((flag for flag in known if last(flag) == last(word)), key=len)
    if same:
        return f"; did you mean {' or '.join(map(repr, same[:3]))}?"
    ending = nearest(word, (flag for flag in known if flag.startswith("--")))
    return "" if ending.startswith("; known") else ending


def config_of(command: str, words: list[str]) -> tuple[str, Config, list[str]]:
    """What a command is about: (name, the config with its parts swapped and added, the flags).

    Raises:
      UserError: it does not begin with a config.
    """
    if words and words[0] in ("-h", "--help", "-H", "--help-verbose"):
        words = ["base", *words]
    if not words or words[0].startswith("-"):
        known = ", ".join([*find.configs(), *MODELS])
        raise UserError(
            f"{command} needs a config first: {command} CONFIG [flags]; configs: {known}"
        )
    name, config = find.load_config(words[0])
    return name, with_parts(config, words[1:]), words[1:]


def with_parts(config: Config, words: list[str]) -> Config:
    """The config with what --head, --input, --memory, --group and --preset ask for: fields of parts and groups become flags.

    Raises:
      UserError: an unknown kind or preset, one that does not fit, or a group that is not NAME=PATTERN.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--head")
    parser.add_argument("--input")
    parser.add_argument("--memory", action="append", default=[])
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--preset", action="append", default=[])
    try:
        asked = parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    vocab = config.vocab
    if asked.head is not None:
        vocab = replace(
            vocab, head=converted(vocab.head, _class_of("--head", HeadConfig, asked.head))
        )
    if asked.input is not None:
        vocab = replace(
            vocab, input=converted(vocab.input, _class_of("--input", InputConfig, asked.input))
        )
    memories = [_blank(_class_of("--memory", MemoryConfig, kind)) for kind in asked.memory]
    vocab = replace(vocab, memories=(*vocab.memories, *memories))
    optim = replace(config.optim, groups=(*config.optim.groups, *map(_group, asked.group)))
    return apply_presets(replace(config, vocab=vocab, optim=optim), tuple(asked.preset))


def _class_of(flag: str, base: type[PartConfig], kind: str) -> Any:
    known = kinds(base)
    if kind not in known:
        raise UserError(f"{flag}: unknown kind {kind!r}{nearest(kind, known)}")
    return known[kind]


def _blank(cls: Any) -> Any:
    """A part whose fields without a default are flags that must be given."""
    return cls(
        **{
            f.name: tyro.MISSING
            for f in fields(cls)
            if f.default is MISSING and f.default_factory is MISSING
        }
    )


def _group(text: str) -> NamedGroup:
    name, _, pattern = text.partition("=")
    if not name or not pattern:
        raise UserError(f"--group {text!r}: write NAME=PATTERN, such as queries='trunk/*/q'")
    return NamedGroup(name, pattern)


def _boxed(text: str) -> str:
    """The message inside the box that tyro draws around an error."""
    body = " ".join(line.strip("│ ") for line in text.splitlines() if line.startswith("│"))
    body = body.split("─")[0].removeprefix("Error parsing ").strip(" .") or text
    for theirs, ours in _PLAIN_WORDS:
        body = re.sub(theirs, ours, body)
    return body


_PLAIN_WORDS = (
    (r"no type matching (\S+) could be instantiated from \[(.*?)\]\..*", r"must be \1, not \2"),
    (r"invalid literal for int\(\) with base 10:", "must be a whole number, not"),
    (r"could not convert string to float:", "must be a number, not"),
    (r"Expected 1 values", "Give one value"),
)
