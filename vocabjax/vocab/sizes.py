"""The sizes of a vocabulary, and which ids may be predicted. Padding lives only here."""

from dataclasses import dataclass

import numpy as np

from vocabjax.errors import UserError
from vocabjax.ids import IGNORE, check_ids, check_labels
from vocabjax.mesh import Layout


@dataclass(frozen=True)
class Sizes:
    """Logical and padded rows of a vocabulary.

    Attributes:
      logical: V, the ids that exist: 0 … V−1. What a checkpoint records.
      banned: ids below V that may be read but never predicted (image placeholders, control tokens), sorted.
      unit: rows of every table come in multiples of this: `multiple` × shards.
    """

    logical: int
    banned: tuple[int, ...]
    unit: int

    @property
    def padded(self) -> int:
        """Vp ≥ V, rows of the stored tables. Rows V … Vp−1 are zero and never predicted."""
        return self.pad(self.logical)

    def pad(self, rows: int) -> int:
        """Rows as stored: rounded up to the unit; an exact multiple does not grow."""
        return -(-rows // self.unit) * self.unit

    @staticmethod
    def make(size: int, multiple: int, banned: tuple[int, ...], layout: Layout) -> "Sizes":
        """Pads `size` for a layout; an exact multiple does not grow.

        Raises:
          UserError: an empty vocabulary, a multiple below 1, a banned id outside [0, size), or nothing left to predict.
        """
        if size < 1 or multiple < 1:
            raise UserError(
                f"vocab.size = {size} and vocab.multiple = {multiple} must be at least 1"
            )
        for token in banned:
            if not 0 <= token < size:
                raise UserError(f"vocab.banned: id {token} is outside [0, {size})")
        unique = tuple(sorted(set(banned)))
        if len(unique) == size:
            raise UserError("vocab.banned holds every id: nothing is left to predict")
        return Sizes(size, unique, multiple * layout.shards("vocab"))

    @property
    def allowed_V(self) -> np.ndarray:
        """bool [Vp]: which rows may be predicted."""
        allowed_V = np.arange(self.padded) < self.logical
        allowed_V[list(self.banned)] = False
        return allowed_V

    @property
    def predictable(self) -> int:
        """How many ids may be predicted."""
        return self.logical - len(self.banned)

    def ignore_banned(self, labels: np.ndarray) -> np.ndarray:
        """Labels of running text: −100 where the next id may be read but not predicted. Any shape."""
        return np.where(np.isin(labels, self.banned), IGNORE, labels) if self.banned else labels

    def check_ids(self, ids: np.ndarray) -> None:
        """Raises IdError naming the position and value of the first id outside [0, V)."""
        check_ids(ids, self.logical)

    def check_labels(self, labels: np.ndarray) -> None:
        """Raises IdError naming the position and value of the first label that is neither predictable nor −100."""
        check_labels(labels, self.logical, self.allowed_V if self.banned else None)
