"""Host-side checks of token ids and labels.

On the device nothing can raise: a bad id reads a zero row and a bad label is ignored and counted.
These checks run where an error can still name the position and the value.
"""

import numpy as np
from numpy.typing import ArrayLike

from vocabjax.errors import IdError

IGNORE = -100
"""The label that every loss skips."""


def check_ids(ids: ArrayLike, size: int) -> None:
    """Raises `IdError` naming the first id outside [0, size).

    Args:
        ids: integers of any shape.
        size: the logical vocabulary size V.
    """
    array = _integers(ids, "ids")
    _refuse(
        (array < 0) | (array >= size),
        array,
        f"token id {{value}} at {{where}} is outside [0, {size})",
    )


def check_labels(labels: ArrayLike, size: int, predictable: np.ndarray | None = None) -> None:
    """Raises `IdError` naming the first label that is neither −100 nor an id the model may predict.

    Args:
        labels: integers of any shape; −100 is ignored by every loss.
        size: the logical vocabulary size V.
        predictable: bool [V], False for ids that may be read but never predicted; None: all may be
            predicted.
    """
    array = _integers(labels, "labels")
    outside = (array != IGNORE) & ((array < 0) | (array >= size))
    _refuse(
        outside,
        array,
        f"label {{value}} at {{where}} is neither {IGNORE} nor in [0, {size})",
    )
    if predictable is not None:
        real = array != IGNORE
        banned = real & ~np.asarray(predictable)[np.where(real, array, 0)]
        _refuse(
            banned,
            array,
            "label {value} at {where} is an input-only id: the model may not predict it",
        )


def _integers(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise IdError(f"{name} must be integers, not {array.dtype}")
    return array


def _refuse(bad: np.ndarray, array: np.ndarray, message: str) -> None:
    if bad.any():
        where = tuple(int(axis) for axis in np.unravel_index(np.argmax(bad), bad.shape))
        raise IdError(message.format(value=int(array[where]), where=f"position {where}"))
