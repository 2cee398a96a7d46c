"""Files written whole or not at all, and the folder of what can be made again."""

import os
from pathlib import Path


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


def cache_folder() -> Path:
    """Where prepared data and compiled programs are kept: VOCABJAX_CACHE, else ~/.cache/vocabjax."""
    return Path(os.environ.get("VOCABJAX_CACHE") or "~/.cache/vocabjax").expanduser()
