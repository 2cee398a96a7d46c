"""What is known of ids beside their number: how often each occurs, and what it spells."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from vocabjax.errors import UserError
from vocabjax.mesh import Layout


@dataclass(frozen=True, eq=False)
class Lexicon:
    """Facts about a vocabulary that some parts are built from. Either may be unknown.

    Attributes:
      counts_V: integers [V], occurrences of each id in the training text; BPE ids are not sorted by them. Missing ids at the
        end have none.
      texts: the text of each id; what is no text by itself (a part of a character) begins with NUL. Missing ids at the end
        have none.
    """

    counts_V: np.ndarray | None = None
    texts: Sequence[str] | None = None

    @staticmethod
    def stand_in() -> "Lexicon":
        """For shapes alone, where there are no data: ids are taken for sorted, and for different texts."""
        return Lexicon(np.zeros(0, np.int64), ())

    def ranks(self, size: int, who: str) -> np.ndarray:
        """int32 [size]: 0 for the commonest id; ties by id, ids that were never counted last.

        Raises:
          UserError: the counts are not known; `who` needs them.
        """
        if self.counts_V is None:
            raise UserError(
                f"{who} needs to know how often each id occurs: train it on data, or give "
                "lexicon=Lexicon(counts_V=…) to the vocabulary"
            )
        counts = np.zeros(size, np.int64)
        known = self.counts_V[:size]
        counts[: len(known)] = known
        ranks = np.empty(size, np.int32)
        ranks[np.argsort(-counts, kind="stable")] = np.arange(size)
        return ranks

    def spelling(self, size: int, who: str) -> list[str]:
        """The text of each id below `size`; those that have none get one that no other has.

        Raises:
          UserError: the texts are not known; `who` needs them.
        """
        if self.texts is None:
            raise UserError(
                f"{who} needs the text of each id: train it on text instead of token ids, or give "
                "lexicon=Lexicon(texts=…) to the vocabulary"
            )
        known = list(self.texts[:size])
        return known + [f"\0{token}" for token in range(len(known), size)]


class Constant:
    """An int32 array that a part holds as a setting: compared by content, so that equal models share programs."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = np.ascontiguousarray(values, np.int32)
        self._bytes = self.values.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and (self._bytes, self.values.shape) == (
            other._bytes,
            other.values.shape,
        )

    def __hash__(self) -> int:
        return hash(self._bytes)

    def of(self, layout: Layout, ids_BT: jax.Array) -> jax.Array:
        """int32 [B, T]: its values at ids; −1 for ids it does not hold."""

        def local(ids: jax.Array) -> jax.Array:
            is_here = (ids >= 0) & (ids < len(self.values))
            values = jnp.asarray(self.values)[jnp.where(is_here, ids, 0)]
            return jnp.where(is_here, values, -1)

        # Per device: on explicit meshes an indexing would have to state the sharding of its result.
        spec = layout.spec("batch", "seq")
        ids_BT = layout.place(ids_BT, "batch", "seq")  # a batch of one row may have forgotten it
        return jax.shard_map(local, mesh=layout.mesh, in_specs=spec, out_specs=spec)(ids_BT)
