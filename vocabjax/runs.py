"""A run's directory: what was trained, with what code, and how it went.

config.json       the configuration, V filled in          metrics.jsonl    one line per logged step
data.json         the data's fingerprint and sizes; init  checkpoints/     Orbax
tokenizer.json    the tokenizer (none for tokens: data)   curves.png       losses against tokens
counts.npy        int64 [V], training counts              summary.json     written last: the run is finished
code.json         versions, commit, command; code.patch   uncommitted changes, new files too
lock              held by the process that trains the run; its content does not matter
"""

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from vocabjax.checkpoint import UNFINISHED
from vocabjax.config import Config, differences, load_config, to_json
from vocabjax.data import Dataset
from vocabjax.data import tokenizer as tokenizing
from vocabjax.errors import UserError, nearest
from vocabjax.files import lock, read_json, write_atomic
from vocabjax.vocab.lexicon import Lexicon

PACKAGES = ("vocabjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
CHECKOUT = Path(__file__).parent.parent  # has no .git where the package is installed

_LARGEST_NEW_FILE = 1 << 20
_CODE_SUFFIXES = (".py", ".toml", ".sh", ".yaml", ".yml", ".cfg")
_DIFF = ("diff", "--binary", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
_SETUP = ("tokenizer.json", "counts.npy", "data.json", "code.json", "code.patch", "config.json")
SETUP_FILES = frozenset(["lock", *_SETUP, *(f"{name}.tmp" for name in _SETUP)])

# What is read of each JSON file, see `read_json`.
_NUMBER = int | float
_ORIGIN = {"run": str, "step": int, "fingerprint": str}
_FACTS = {"fingerprint": str}
_COUNTED = {"size": int, "train_tokens": int}
_CODE = {
    "commit": str | None,
    "uncommitted_changes": bool | None,
    "python": str,
    "versions": dict,
    "command": list,
}
_SUMMARY = {
    "validation": {"loss": _NUMBER, "perplexity": _NUMBER, "bits_per_byte": _NUMBER | None},
    "training": {"loss": _NUMBER},
    **dict.fromkeys(("parameters", "vocab_parameters", "trunk_parameters", "tokens"), int),
    **dict.fromkeys(("gap", "passes", "train_flops"), _NUMBER),
    "tokens_per_second": _NUMBER | None,
}
_COPY = "restore it from a copy, or train again under another --name"


class Origin(NamedTuple):
    """What a run's first parameters were: a step of another run (see `Run.name_from`), and that run's data."""

    run: str
    step: int
    fingerprint: str


@dataclass(frozen=True)
class Run:
    """An existing run directory."""

    directory: Path

    @staticmethod
    def create(
        directory: Path, config: Config, dataset: Dataset, origin: Origin | None = None
    ) -> "Run":
        """Makes the directory, or reopens the one this same config made on the same data.

        Another run is made anew, and a line says so, if nothing of its training was saved: a setting that was refused late
        must not stand in the way of its correction.

        Args:
          origin: is recorded where the directory is new; None: fresh parameters.

        Raises:
          UserError: the directory holds something else, or a saved run of another config or on other data. Nothing in it
            is changed.
        """
        run = Run(directory)
        facts = {
            "fingerprint": dataset.fingerprint,
            "size": dataset.size,
            "train_tokens": len(dataset.train.tokens),
            "validation_tokens": len(dataset.validation.tokens),
            "validation_bytes": dataset.validation.bytes,
            **({} if origin is None else {"init": origin._asdict()}),
        }
        tokenizer = directory / "tokenizer.json"
        if run.exists():
            another = run._another(config, facts)
            if another is None:
                if dataset.tokenizer is not None and not tokenizer.exists():
                    tokenizing.save(dataset.tokenizer, tokenizer)
                if not run._counts.exists():
                    run._save_counts(dataset)
                return run
            if not run._is_blank():
                raise UserError(
                    f"{another}; choose another --name, or repeat the run's own settings to resume it"
                )
            print(f"{another}; nothing of it was saved, so it is replaced", file=sys.stderr)
        run._refuse_foreign()
        code = code_version()
        patch = _patch() if code["uncommitted_changes"] else None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # config.json made it a run: the rest of these may be there without it.
            for name in ("metrics.jsonl", "config.json", *_SETUP):
                (directory / name).unlink(missing_ok=True)
            if dataset.tokenizer is not None:
                tokenizing.save(dataset.tokenizer, tokenizer)
            run._save_counts(dataset)
            write_atomic(directory / "data.json", json.dumps(facts, indent=2) + "\n")
            code["command"] = sys.argv
            write_atomic(directory / "code.json", json.dumps(code, indent=2) + "\n")
            if patch is not None:
                write_atomic(directory / "code.patch", patch)
            write_atomic(directory / "config.json", to_json(config))  # last: it makes this a run
        except OSError as error:
            raise UserError(f"cannot write {directory}: {error.strerror or error}") from error
        return run

    @staticmethod
    def open(name: str, runs: Path) -> "Run":
        """The run of that name (or path). Raises UserError with the nearest names when there is none."""
        for directory in (runs / name, Path(name)):
            if (run := Run(directory)).exists():
                return run
        known = [path.parent.name for path in runs.glob("*/config.json")]
        raise UserError(f"no run {name!r} in {runs}{nearest(name, known)}")

    def lock(self) -> IO[bytes]:
        """Makes the directory and keeps all others from training in it, until the file is closed or the process dies.

        Raises:
          UserError: another process trains in it, it cannot be written, or it holds something else.
        """
        self._refuse_foreign()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return lock(self.directory / "lock")
        except BlockingIOError:
            raise UserError(
                f"{self.directory} is being trained by another process; wait for it, or choose another --name"
            ) from None
        except OSError as error:
            raise UserError(f"cannot write {self.directory}: {error.strerror or error}") from error

    def name_from(self, runs: Path) -> str:
        """What `open` finds it by, whatever the working directory: its path below `runs`; an absolute one elsewhere."""
        path, runs = Path(os.path.abspath(self.directory)), Path(os.path.abspath(runs))
        return str(path.relative_to(runs) if path.is_relative_to(runs) else path)

    def exists(self) -> bool:
        """Whether the directory is a run: one that a kill left half made is not."""
        return (self.directory / "config.json").exists()

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def config(self) -> Config:
        """Raises UserError when the file cannot be read."""
        return load_config(self.directory / "config.json")

    def facts(self) -> dict[str, Any]:
        """What `data.json` holds."""
        return read_json(self.directory / "data.json", _FACTS, _COPY)

    def origin(self) -> Origin | None:
        """What its first parameters were; None: fresh ones."""
        if self.facts().get("init") is None:
            return None
        facts = read_json(self.directory / "data.json", {"init": _ORIGIN}, _COPY)
        return Origin(*(facts["init"][name] for name in _ORIGIN))

    def code(self) -> dict[str, Any]:
        """What `code.json` holds: `code_version()` and the command."""
        return read_json(self.directory / "code.json", _CODE, _COPY)

    def tokenizer(self) -> Tokenizer | None:
        """None: it was trained on token ids. Raises UserError when the file is missing or cannot be read."""
        path = self.directory / "tokenizer.json"
        if path.exists():
            return tokenizing.load(path)
        if self.config().data.source.startswith("tokens:"):
            return None
        raise UserError(f"{path} is missing; the command that trained the run writes it again")

    def counts(self) -> np.ndarray:
        """int64 [V]. Raises UserError when the file is missing, or is not that of the run's training text."""
        path, mend = self._counts, "the command that trained the run writes it again"
        if not path.exists():
            raise UserError(f"{path} is missing; {mend}")
        facts = read_json(self.directory / "data.json", _COUNTED, _COPY)
        try:
            counts_V = np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"cannot read {path}: {error}; delete it, and {mend}") from error
        # Parts that sort ids by frequency would take other counts for other ids' rows.
        if (counts_V.dtype, counts_V.shape) != (np.int64, (facts["size"],)) or (
            counts_V.sum() != facts["train_tokens"]
        ):
            raise UserError(
                f"{path} does not hold the counts of the run's {facts['train_tokens']} training tokens; delete it, and {mend}"
            )
        return counts_V

    def lexicon(self) -> Lexicon:
        """What the run's vocabulary was built from. Raises UserError when its files cannot be read."""
        tokenizer = self.tokenizer()
        return Lexicon(self.counts(), None if tokenizer is None else tokenizing.texts(tokenizer))

    def summary(self) -> dict[str, Any] | None:
        """The result of a finished run; None while it is not finished."""
        path = self.directory / "summary.json"
        mend = "delete it, and the command that trained the run writes it again"
        return read_json(path, _SUMMARY, mend) if path.exists() else None

    def finish(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2, allow_nan=False)
        write_atomic(self.directory / "summary.json", text + "\n")

    @property
    def _counts(self) -> Path:
        return self.directory / "counts.npy"

    def _save_counts(self, dataset: Dataset) -> None:
        content = io.BytesIO()
        np.save(content, dataset.counts_V)
        write_atomic(self._counts, content.getvalue())

    def _is_blank(self) -> bool:
        """Whether nothing of its training was saved: no result, and nothing below `checkpoints` but what a kill left."""
        saved = (path for path in self.checkpoints.glob("*") if UNFINISHED not in path.name)
        return not (self.directory / "summary.json").exists() and not any(saved)

    def _refuse_foreign(self) -> None:
        """Raises UserError unless it is a run, or can become one: what a kill left before config.json is written again."""
        directory = self.directory
        if self.exists() or not directory.exists():
            return
        if any(path.name not in SETUP_FILES for path in directory.iterdir()):
            raise UserError(
                f"{directory} is not empty and not a run (no config.json); choose another --name"
            )

    def _another(self, config: Config, facts: dict[str, Any]) -> str | None:
        """How it differs from the run of this config and data; None: it is that run."""
        changed = differences(config, self.config())
        if changed:
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            return f"{self.directory} holds a run of another config: {'; '.join(changed[:3])}{more}"
        if self.facts()["fingerprint"] != facts["fingerprint"]:
            return (
                f"{self.directory} was trained on other data (the text or tokenizer changed since)"
            )
        return None


def code_version() -> dict[str, Any]:
    """Commit and whether there are uncommitted changes (None outside a git checkout), and package versions."""
    commit = _git("rev-parse", "HEAD")
    return {
        "commit": None if commit is None else commit.decode().strip(),
        "uncommitted_changes": None if commit is None else bool(_git("status", "--porcelain")),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in PACKAGES},
    }


def summary_dict(value: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values."""
    return json.loads(json.dumps(asdict(value), allow_nan=False))


def _patch() -> bytes:
    """All that differs from the commit, for `git apply`; new files of code too, but nobody's corpus."""
    listed = _git("ls-files", "--others", "--exclude-standard", "-z") or b""
    notes, new = [], []
    for name in filter(None, os.fsdecode(listed).split("\0")):
        size = (CHECKOUT / name).lstat().st_size
        if size > _LARGEST_NEW_FILE or Path(name).suffix not in _CODE_SUFFIXES:
            notes.append(f"# left out, as it is large or no code: {name} ({size:,} bytes)\n")
        else:
            new.append(_git(*_DIFF, "--no-index", "--", os.devnull, name) or b"")
    return b"".join([os.fsencode("".join(notes)), _git(*_DIFF, "HEAD") or b"", *new])


def _git(*arguments: str) -> bytes | None:
    """What git prints; None without a checkout, or when it fails. Changes nothing there, the index included."""
    if not (
        CHECKOUT / ".git"
    ).exists():  # an installed copy, perhaps inside somebody else's repository
        return None
    read_only = ("--no-optional-locks", "-c", "diff.autoRefreshIndex=false")
    try:
        done = subprocess.run(
            ["git", *read_only, *arguments], cwd=CHECKOUT, capture_output=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode < 2 else None  # 1: `diff --no-index` found a difference


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
