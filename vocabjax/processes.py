"""Processes of one job that go on together or fail together: a lone failure would leave the others waiting for ever."""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from vocabjax.errors import UserError

_Result = TypeVar("_Result")


def together(work: Callable[[], _Result]) -> _Result:
    """What `work` returns, once it has succeeded on every process; itself it must not wait for another process.

    Raises:
      Exception: what `work` raises on this process.
      UserError: it raised on another one, which is named.
    """
    if jax.process_count() == 1:
        return work()
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the others must hear of it
        failure = error
    failed = multihost_utils.process_allgather(np.bool_(failure is not None))
    if failure is not None:
        raise failure
    if failed.any():
        raise UserError(f"process {int(np.argmax(failed))} failed; its own output says why")
    return result


def require_same(what: str, text: str) -> None:
    """Raises UserError, on every process, unless all of them have the same text."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    other = (multihost_utils.process_allgather(digest) != digest).any(axis=1)
    if other.any():
        raise UserError(
            f"process {jax.process_index()} has other {what} than process {int(np.argmax(other))}; start all processes "
            "with the same flags, code and files"
        )
