"""Adaptive softmax: a softmax over the commonest ids and one slot per band of rarer ids, then one within the band.

    p(w) = softmax([s_0; C·h])[w]                                  w in band 0
    p(w) = softmax([s_0; C·h])[slot i] · softmax(s_i)[w]           w in band i
    s_i  = (h·A_i)·table_iᵀ

    adaptive         tables and A_i of its own, A_0 the identity, band i of width D div factor^i
    tied_adaptive    those of an adaptive input: A_i is its projection of that band, transposed (A_0 too)

Bands are cut by frequency rank in the training text, whatever the order of ids. Sources: Grave et al. 2016 (arXiv:1609.04309),
in the form of torch's AdaptiveLogSoftmaxWithLoss; tied, Baevski & Auli 2018 (arXiv:1809.10853, section 3.2). Parameters with n
bands after the first: n·D, and untied ids_0·D + Σ_i (ids_i + D)·D_i. Every band scores every token: what narrow rows save is
kept, what skipping bands could save is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from vocabjax.errors import UserError
from vocabjax.param import normal
from vocabjax.vocab.bands import band_bounds, band_width, check_bands
from vocabjax.vocab.inputs.adaptive import AdaptiveInput
from vocabjax.vocab.interfaces import Context, Head, HeadConfig, Input, Objective, Shared
from vocabjax.vocab.labels import valid_labels
from vocabjax.vocab.lexicon import Constant
from vocabjax.vocab.per_token import LikelihoodHead, PerToken, per_token
from vocabjax.vocab.scores import Scoring, linear_logits, score_spec
from vocabjax.vocab.sizes import Sizes
from vocabjax.vocab.table import row_start


@dataclass(frozen=True)
class AdaptiveSoftmax(HeadConfig):
    """Bands of ids by frequency, each with rows of its own width, in tables of its own.

    Attributes:
      cutoffs: the ranks at which the second and later bands begin, 0 being the commonest id.
      factor: how much narrower each band is than the one before.
    """

    kind: ClassVar[str] = "adaptive"
    by_ids: ClassVar[tuple[str, ...]] = ("cutoffs",)
    tied: ClassVar[bool] = False
    cutoffs: tuple[int, ...] = (512, 2048)
    factor: int = 4

    def check(self) -> None:
        check_bands("vocab.head", self.cutoffs, self.factor)

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        ranks = Constant(
            context.lexicon.ranks(context.sizes.logical, "vocab.head of kind 'adaptive'")
        )
        return OwnBands(self, context, objective, ranks)


@dataclass(frozen=True)
class TiedAdaptiveSoftmax(HeadConfig):
    """The bands, tables and projections of an adaptive input."""

    kind: ClassVar[str] = "tied_adaptive"
    tied: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("bands/0/table", "bands/0/projection")

    def build(self, context: Context, objective: Objective, input: Input) -> Head:
        assert isinstance(input, AdaptiveInput)  # nothing else lends bands
        return LentBands(context, objective, input)


class BandedHead(LikelihoodHead):
    """What both share: all but where tables and projections come from."""

    def __init__(
        self,
        context: Context,
        objective: Objective,
        ranks: Constant,
        cutoffs: tuple[int, ...],
    ) -> None:
        sizes, D, n = context.sizes, context.width, len(cutoffs)
        self.layout, self.sizes, self.ranks = context.scope.layout, sizes, ranks
        self.chunk = objective.chunk
        self.bounds = band_bounds("vocab.head", cutoffs, sizes.logical)
        banned = ranks.values[list(sizes.banned)]
        self.scorings = tuple(
            Scoring(self.layout, _band_sizes(sizes, start, end, banned))
            for start, end in self.bounds
        )
        self.slots = (
            context.scope.param("slots", (n, D), (None, None), "matrix", normal(D**-0.5))
            if n
            else None
        )

    def band(self, shared: Shared, i: int, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(h·A_i [B, T, D_i], table_i) of band i."""
        raise NotImplementedError

    def logits(self, shared: Shared, h_BTD: jax.Array) -> jax.Array:
        """log p: the scores of nested softmaxes are normalised already."""
        scores = [
            linear_logits(scoring, *self.band(shared, i, h_BTD))
            for i, scoring in enumerate(self.scorings)
        ]
        slots_BTn = self._slots(h_BTD)
        lse_BT1 = _head_lse(jax.nn.logsumexp(scores[0], -1), slots_BTn)[..., None]
        log_p = [scores[0] - lse_BT1]
        for i, z_BTR in enumerate(scores[1:]):
            log_p.append(slots_BTn[..., i, None] - lse_BT1 + jax.nn.log_softmax(z_BTR))
        return self._by_id(log_p)

    def nll(self, shared: Shared, h_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        is_valid_BT = valid_labels(self.sizes, targets_BT)
        rank_BT = self.ranks.of(self.layout, targets_BT)

        def within(i: int) -> tuple[jax.Array, PerToken]:
            start, end = self.bounds[i]
            is_here_BT = is_valid_BT & (rank_BT >= start) & (rank_BT < end)
            targets = jnp.where(is_here_BT, rank_BT - start, -1)
            h_BTE, table_RE = self.band(shared, i, h_BTD)
            return is_here_BT, per_token(self.scorings[i], self.chunk, h_BTE, table_RE, targets)

        slots_BTn = self._slots(h_BTD)
        is_here_BT, found = within(0)
        lse_BT = _head_lse(found.lse, slots_BTn)
        log_p_BT = jnp.where(is_here_BT, found.log_p + (found.lse - lse_BT), 0)
        for i in range(1, len(self.bounds)):
            is_here_BT, found = within(i)
            slot_BT = slots_BTn[..., i - 1] - lse_BT
            log_p_BT += jnp.where(is_here_BT, slot_BT + found.log_p, 0)
        return -log_p_BT

    def _slots(self, h_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, n]: the scores of the bands after the first."""
        if self.slots is None:
            return jnp.zeros((*h_BTD.shape[:2], 0), jnp.float32)
        rows_nD = self.slots[...].astype(h_BTD.dtype)
        return jnp.einsum("btd,nd->btn", h_BTD, rows_nD, preferred_element_type=jnp.float32)

    def _by_id(self, log_p: list[jax.Array]) -> jax.Array:
        """[B, T, Vp] in the order of ids, from the bands' [B, T, rows] in that of ranks."""
        layout, spec = self.layout, score_spec(self.layout)
        whole = PartitionSpec(*spec[:2], None)
        rows = layout.axes("vocab")
        held = self.sizes.padded // layout.shards("vocab")
        rank_V = np.zeros(self.sizes.padded, np.int32)
        rank_V[: self.sizes.logical] = self.ranks.values

        def local(*bands: jax.Array) -> jax.Array:
            ordered = jnp.concatenate(
                [
                    band[..., : end - start]
                    for band, (start, end) in zip(bands, self.bounds, strict=True)
                ],
                -1,
            )
            start = row_start(rows, held)
            rank_R = lax.dynamic_slice_in_dim(jnp.asarray(rank_V), start, held)
            allowed_R = lax.dynamic_slice_in_dim(jnp.asarray(self.sizes.allowed_V), start, held)
            return jnp.where(allowed_R, ordered[..., rank_R], -jnp.inf)

        # Scores of all ids meet on each device here, as sampling wants them; training goes by `nll`.
        return jax.shard_map(
            local, mesh=layout.mesh, in_specs=(whole,) * len(log_p), out_specs=spec, check_vma=False
        )(*(layout.place_as(band, whole) for band in log_p))


class OwnBands(BandedHead):
    """Tables and projections of its own."""

    def __init__(
        self, config: AdaptiveSoftmax, context: Context, objective: Objective, ranks: Constant
    ) -> None:
        super().__init__(context, objective, ranks, config.cutoffs)
        D = context.width
        self.widths = tuple(band_width(D, config.factor, i) for i in range(len(self.bounds)))
        tables, downs = [], []
        for i, ((start, end), width) in enumerate(zip(self.bounds, self.widths, strict=True)):
            inner = context._replace(scope=context.scope / "tables")
            tables.append(inner.table(str(i), "head", rows=end - start, width=width))
            if i:
                scope = context.scope / "downs"
                downs.append(
                    scope.param(str(i - 1), (D, width), (None, None), "matrix", normal(D**-0.5))
                )
        self.tables, self.downs = nnx.List(tables), nnx.List(downs)

    def band(self, shared: Shared, i: int, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        table_RE = self.tables[i][...]
        if not i:
            return h_BTD, table_RE
        down_DE = self.downs[i - 1][...].astype(h_BTD.dtype)
        return jnp.einsum("btd,de->bte", h_BTD, down_DE), table_RE

    def flops(self) -> int:
        return super().flops() + _table_flops(self.bounds, self.widths)


class LentBands(BandedHead):
    """Tables and projections that an adaptive input lends."""

    def __init__(
        self,
        context: Context,
        objective: Objective,
        input: AdaptiveInput,
    ) -> None:
        super().__init__(context, objective, input.ranks, input.cutoffs)
        self.widths = tuple(table.get_metadata("logical")[1] for table in input.tables().values())
        self.width = context.width

    def band(self, shared: Shared, i: int, h_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        projection_ED = shared[f"bands/{i}/projection"].astype(h_BTD.dtype)
        return jnp.einsum("btd,ed->bte", h_BTD, projection_ED), shared[f"bands/{i}/table"]

    def flops(self) -> int:
        projections = 2 * self.width * sum(self.widths)
        return super().flops() + projections + _table_flops(self.bounds, self.widths)


def _head_lse(lse_BT: jax.Array, slots_BTn: jax.Array) -> jax.Array:
    """log Σ exp of the first band's scores and the slots."""
    if not slots_BTn.shape[-1]:
        return lse_BT
    return jnp.logaddexp(lse_BT, jax.nn.logsumexp(slots_BTn, -1))


def _band_sizes(sizes: Sizes, start: int, end: int, banned: np.ndarray) -> Sizes:
    """Of one band's table. Raises UserError when nothing of it may be predicted."""
    here = tuple(sorted(int(rank) - start for rank in banned if start <= rank < end))
    if len(here) == end - start:
        raise UserError(
            f"vocab.banned holds every id of the ranks {start} … {end - 1}, a band of vocab.head: choose other cutoffs"
        )
    return Sizes(end - start, here, sizes.unit)


def _table_flops(bounds: tuple[tuple[int, int], ...], widths: Sequence[int]) -> int:
    return 2 * sum((end - start) * E for (start, end), E in zip(bounds, widths, strict=True))
