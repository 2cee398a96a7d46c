"""Bands of ids by frequency rank: what an adaptive input and an adaptive softmax share."""

from collections.abc import Sequence
from itertools import pairwise

from vocabjax.errors import UserError


def check_bands(where: str, cutoffs: Sequence[int], factor: int) -> None:
    """Raises UserError, naming the part at `where`, for cutoffs that do not ascend, or a factor below 1."""
    if factor < 1:
        raise UserError(f"{where}.factor = {factor} must be at least 1")
    if any(low >= high for low, high in pairwise((0, *cutoffs))):
        raise UserError(f"{where}.cutoffs = {list(cutoffs)} must ascend, from 1 at least")


def band_bounds(where: str, cutoffs: Sequence[int], size: int) -> tuple[tuple[int, int], ...]:
    """(first rank, the one past the last) of each band; none is empty.

    Raises:
      UserError: a cutoff at the vocabulary's size or above.
    """
    if cutoffs and cutoffs[-1] >= size:
        raise UserError(
            f"{where}.cutoffs = {list(cutoffs)} must be below the vocabulary's size, {size}, so that every band holds an id"
        )
    return tuple(pairwise((0, *cutoffs, size)))


def band_width(width: int, factor: int, band: int) -> int:
    """⌊D / factor^i⌋, at least 1."""
    return max(1, width // factor**band)
