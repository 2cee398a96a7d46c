"""Errors a user can mend: one line that says what is wrong, where, and what to do.

The command line prints a `UserError` without a traceback and exits with code 2 (`--debug` shows the traceback).
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave is wrong: a config, a file, a mesh, a checkpoint, a name."""


class IdError(UserError):
    """A token id outside [0, V), or a label that is neither a predictable id nor −100."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?`, or the full list when nothing is close: the end of an error message."""
    options = sorted(set(known))
    close = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(option) for option in close) + "?"
    return "; known: " + (", ".join(options) or "none")
