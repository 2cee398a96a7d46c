"""Files written whole or not at all, and the folder of what can be made again."""

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from vocabjax.errors import UserError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file (text as UTF-8) so that a kill leaves the old one or the new one.

    Raises:
      OSError: it cannot be written; the old one is intact.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def lock(path: Path) -> IO[bytes]:
    """Holds a file's exclusive lock until it is closed or the process dies.

    Raises:
      BlockingIOError: another process holds it.
      OSError: the file cannot be opened.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:  # a file system without locks, as some network mounts: go on without
        pass
    return file


def read_json(path: Path, shape: dict[str, Any], mend: str) -> dict[str, Any]:
    """A JSON object with at least the keys of `shape`, whose values are the types theirs must have, or shapes again.

    Raises:
      UserError: the file cannot be read, or holds something else; ends with `mend`.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; {mend}") from error
    if (wrong := misfit(value, shape)) is not None:
        raise UserError(f"{path} is damaged ({wrong}); {mend}")
    return value


def misfit(value: Any, shape: dict[str, Any]) -> str | None:
    """What keeps a JSON value from having a shape (see `read_json`); None: nothing."""
    if not isinstance(value, dict):
        return f"{str(value)[:40]!r} is not an object"
    for key, wanted in shape.items():
        if key not in value:
            return f"{key!r} is missing"
        if isinstance(wanted, dict):
            if (wrong := misfit(value[key], wanted)) is not None:
                return f"in {key!r}: {wrong}"
        elif not isinstance(value[key], wanted):
            return f"{key!r} is {str(value[key])[:40]!r}"
    return None


def cache_folder() -> Path:
    """Where prepared data and compiled programs are kept: VOCABJAX_CACHE, else ~/.cache/vocabjax."""
    return Path(os.environ.get("VOCABJAX_CACHE") or "~/.cache/vocabjax").expanduser()
