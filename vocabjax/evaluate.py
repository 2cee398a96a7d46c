"""Evaluation: total −log likelihood over every target once, in units that compare across vocabularies and batch sizes."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from vocabjax.data import TokenStream, evaluation_batches
from vocabjax.data.windows import WindowSource
from vocabjax.errors import UserError
from vocabjax.model import Blueprint, Params
from vocabjax.step import Arrays, to_device, tokens_of

BINS = 10


@dataclass(frozen=True)
class Decile:
    """One frequency bin: its share of the evaluated tokens' loss.

    Attributes:
      types: ids in the bin.
      tokens: evaluated targets in it.
      loss: their mean −log p, nats; None when there are none.
    """

    types: int
    tokens: int
    loss: float | None


@dataclass(frozen=True)
class Evaluation:
    """A whole split.

    Attributes:
      nll: Σ −log p(target), nats.
      tokens: number of targets; those that the vocabulary bans, and those of prefixes, are left out.
      loss: nll / tokens.
      perplexity: exp(loss).
      bits_per_byte: nll / (ln 2 · UTF-8 bytes of the real text); end-of-text counts zero bytes, its loss is included.
        None when the bytes are not known, or a target was left out, whose bytes nobody can tell.
      by_mass: ten bins of equal token mass in the training split, commonest ids first.
      by_type: ten bins of equally many ids, commonest first.
    """

    nll: float
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None
    by_mass: tuple[Decile, ...]
    by_type: tuple[Decile, ...]


def frequency_bins(counts_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bin of each id, 0 (commonest) … 9, by equal token mass and by equally many types: int32 [V] each.

    An id belongs to the mass bin its middle token falls into, so a bin may stay empty when one id outweighs a tenth.
    Ties are broken by id.
    """
    order = np.argsort(-counts_V, kind="stable")
    counts = counts_V[order].astype(np.float64)
    total = counts.sum()
    middle = np.cumsum(counts) - counts / 2
    mass = np.minimum(BINS - 1, np.floor(BINS * middle / max(total, 1.0)))
    by_mass = np.empty(len(order), np.int32)
    by_mass[order] = np.where(counts > 0, mass, BINS - 1)
    by_type = np.empty(len(order), np.int32)
    by_type[order] = np.arange(len(order)) * BINS // len(order)
    return by_mass, by_type


class Evaluator:
    """Evaluates parameters on token streams; compiles once for all batches of one shape."""

    def __init__(self, blueprint: Blueprint, counts_V: np.ndarray) -> None:
        """`counts_V`: int64 [≥ V of the data], training counts per id."""
        self.blueprint = blueprint
        size = blueprint.sizes.logical
        padded = np.zeros(size, np.int64)
        padded[: len(counts_V)] = counts_V[:size]
        self.bins = np.stack(frequency_bins(padded))  # [2, V]
        self._sums = jax.jit(self._batch_sums)

    def _batch_sums(self, params: Params, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        """Σ nll and number of targets per bin: float32 [2, 10] each. `batch` has the targets' bins, −1 for none."""
        nll_BT = self.blueprint.bind(params).nll(tokens_of(batch), batch["targets"])
        sums, counts = [], []
        for name in ("by_mass", "by_type"):
            in_bin = batch[name][..., None] == jnp.arange(BINS)
            sums.append(jnp.where(in_bin, nll_BT[..., None], 0).sum((0, 1)))
            counts.append(in_bin.sum((0, 1)).astype(jnp.float32))
        return jnp.stack(sums), jnp.stack(counts)

    def __call__(self, params: Params, stream: TokenStream, length: int, batch: int) -> Evaluation:
        """Every target of the stream once; the result does not depend on `batch` beyond float32 rounding.

        Raises:
          IdError: an id of the stream lies outside the model's vocabulary.
          UserError: no target is left.
        """
        nll = np.zeros((2, BINS))
        tokens = np.zeros((2, BINS))
        layout, sizes = self.blueprint.layout, self.blueprint.sizes
        index, processes = layout.process_share()
        shards = layout.shards("batch")
        windows = len(WindowSource(stream, length, pad_last=True))
        batch = min(batch, max(1, -(-windows // shards)) * shards)  # more would be rows of padding
        for host in evaluation_batches(
            stream, length=length, batch=batch, process_index=index, process_count=processes
        ):
            targets = sizes.ignore_banned(host["targets"])
            sizes.check_ids(host["ids"])
            sizes.check_labels(targets)
            real = targets >= 0
            bins = np.where(real, self.bins[:, np.where(real, targets, 0)], -1)
            batch_arrays = {**host, "targets": targets, "by_mass": bins[0], "by_type": bins[1]}
            sums = self._sums(params, to_device(layout, batch_arrays, "batch", "seq"))
            nll += np.asarray(sums[0], np.float64)
            tokens += np.asarray(sums[1], np.float64)
        total, count = float(nll[0].sum()), int(tokens[0].sum())
        if not count:
            raise UserError(
                "nothing is left to evaluate: vocab.banned holds every target, or the documents' prefixes do"
            )
        loss = total / count
        left_out = len(stream.tokens) - 1 - count
        bits = None if left_out or not stream.bytes else total / math.log(2) / stream.bytes
        by_mass, by_type = (
            tuple(
                Decile(
                    int((self.bins[kind] == b).sum()),
                    int(tokens[kind, b]),
                    float(nll[kind, b] / tokens[kind, b]) if tokens[kind, b] else None,
                )
                for b in range(BINS)
            )
            for kind in range(2)
        )
        return Evaluation(total, count, loss, math.exp(min(loss, 700)), bits, by_mass, by_type)
