"""A run's directory: what was trained, with what code, and how it went.

config.json       the configuration, V filled in          metrics.jsonl    one line per logged step
data.json         fingerprint and sizes of the data       checkpoints/     Orbax
tokenizer.json    the tokenizer (none for tokens: data)   curves.png       losses against tokens
counts.npy        int64 [V], training counts              summary.json     written last: the run is finished
code.json         versions, commit, command; code.patch   uncommitted changes
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from vocabjax.config import Config, differences, load_config, to_json
from vocabjax.data import Dataset
from vocabjax.data import tokenizer as tokenizing
from vocabjax.errors import UserError, nearest

PACKAGES = ("vocabjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

_SETUP = ("tokenizer.json", "counts.npy", "data.json", "code.json", "code.patch", "config.json")
SETUP_FILES = frozenset([*_SETUP, *(f"{name}.tmp" for name in _SETUP)])


@dataclass(frozen=True)
class Run:
    """An existing run directory."""

    directory: Path

    @staticmethod
    def create(directory: Path, config: Config, dataset: Dataset) -> "Run":
        """Makes the directory, or reopens the one this same config made on the same data.

        Raises:
          UserError: the directory holds something else, another config, or was trained on other data. Nothing in it is
            changed.
        """
        run = Run(directory)
        facts = {
            "fingerprint": dataset.fingerprint,
            "size": dataset.size,
            "train_tokens": len(dataset.train.tokens),
            "validation_tokens": len(dataset.validation.tokens),
            "validation_bytes": dataset.validation.bytes,
        }
        if (directory / "config.json").exists():
            run._refuse_another(config, facts)
            return run
        # What a kill left before config.json, which is written last, is ours to write again.
        if directory.exists() and any(path.name not in SETUP_FILES for path in directory.iterdir()):
            raise UserError(
                f"{directory} is not empty and not a run (no config.json); choose another --name"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if dataset.tokenizer is not None:
                tokenizing.save(dataset.tokenizer, directory / "tokenizer.json")
            np.save(directory / "counts.npy", dataset.counts_V)
            write_atomic(directory / "data.json", json.dumps(facts, indent=2) + "\n")
            _write_code(directory)
            write_atomic(directory / "config.json", to_json(config))  # last: it makes this a run
        except OSError as error:
            raise UserError(f"cannot write {directory}: {error.strerror or error}") from error
        return run

    @staticmethod
    def open(name: str, runs: Path) -> "Run":
        """The run of that name (or path). Raises UserError with the nearest names when there is none."""
        for directory in (runs / name, Path(name)):
            if (directory / "config.json").exists():
                return Run(directory)
        known = [path.parent.name for path in runs.glob("*/config.json")]
        raise UserError(f"no run {name!r} in {runs}{nearest(name, known)}")

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
        return _read_json(self.directory / "data.json")

    def code(self) -> dict[str, Any]:
        """What `code.json` holds: `code_version()` and the command."""
        return _read_json(self.directory / "code.json")

    def tokenizer(self) -> Tokenizer | None:
        path = self.directory / "tokenizer.json"
        return tokenizing.load(path) if path.exists() else None

    def counts(self) -> np.ndarray:
        """int64 [V]. Raises UserError when the file cannot be read."""
        path = self.directory / "counts.npy"
        try:
            return np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"cannot read {path}: {error}") from error

    def summary(self) -> dict[str, Any] | None:
        """The result of a finished run; None while it is not finished."""
        path = self.directory / "summary.json"
        return _read_json(path) if path.exists() else None

    def finish(self, summary: dict[str, Any]) -> None:
        write_atomic(self.directory / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _refuse_another(self, config: Config, facts: dict[str, Any]) -> None:
        changed = differences(config, self.config())
        if changed:
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            raise UserError(
                f"{self.directory} holds a run of another config: {'; '.join(changed[:3])}{more}; "
                "choose another --name, or repeat the run's own settings to resume it"
            )
        recorded = self.facts()
        if recorded["fingerprint"] != facts["fingerprint"]:
            raise UserError(
                f"{self.directory} was trained on other data (the text or tokenizer changed since); "
                "choose another --name"
            )


def write_atomic(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def code_version() -> dict[str, Any]:
    """Commit and whether there are uncommitted changes (None outside a git checkout), and package versions."""
    root = Path(__file__).parent.parent
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "commit": commit.strip() if commit else None,
        "uncommitted_changes": bool(status) if commit else None,
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in PACKAGES},
    }


def summary_dict(value: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values."""
    return json.loads(json.dumps(asdict(value)))


def _write_code(directory: Path) -> None:
    code = {**code_version(), "command": sys.argv}
    write_atomic(directory / "code.json", json.dumps(code, indent=2) + "\n")
    if code["uncommitted_changes"]:
        patch = _git(Path(__file__).parent.parent, "diff", "HEAD")
        write_atomic(directory / "code.patch", patch or "")


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():  # an installed copy, perhaps inside somebody else's repository
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
