"""Adaptive input: the commoner an id, the wider its row.

    x = table_i[rank(id) − start_i] · P_i          for the band i that holds the id's rank by training count

Band i has rows of width D_i = max(1, D div factor^i): table_i [its ids, D_i], P_i [D_i, D]. Source: Baevski & Auli 2019
(arXiv:1809.10853, section 3): factor 4, on WikiText-103 cutoffs 20,000 and 60,000. Parameters: Σ_i (ids_i + D)·D_i.
Lends its tables and its projections, band by band.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vocabjax.param import Role, normal
from vocabjax.vocab.bands import band_bounds, band_width, check_bands
from vocabjax.vocab.interfaces import Context, Input, InputConfig, Reads, Rows, Shared, Tokens
from vocabjax.vocab.lexicon import Constant


@dataclass(frozen=True)
class AdaptiveTable(InputConfig):
    """Bands of ids by frequency, each with rows of its own width.

    Attributes:
      cutoffs: the ranks at which the second and later bands begin, 0 being the commonest id.
      factor: how much narrower each band is than the one before.
    """

    kind: ClassVar[str] = "adaptive"
    by_ids: ClassVar[tuple[str, ...]] = ("cutoffs",)
    cutoffs: tuple[int, ...] = (512, 2048)
    factor: int = 4

    def check(self) -> None:
        super().check()
        check_bands("vocab.input", self.cutoffs, self.factor)

    def build(self, context: Context, *, tied: bool) -> Input:
        return AdaptiveInput(self, context, tied=tied)


class AdaptiveInput(Input):
    """Attributes:
    cutoffs: as configured, without V.
    ranks: the rank of each id.
    """

    def __init__(self, config: AdaptiveTable, context: Context, *, tied: bool) -> None:
        size = context.sizes.logical
        self.cutoffs = config.cutoffs
        self.ranks = Constant(context.lexicon.ranks(size, "vocab.input of kind 'adaptive'"))
        self.layout = context.scope.layout
        self.bounds = band_bounds("vocab.input", config.cutoffs, size)
        self.bands: nnx.List[Band] = nnx.List([])
        for i, (start, end) in enumerate(self.bounds):
            scope = context.scope / "bands" / str(i)
            width = band_width(context.width, config.factor, i)
            self.bands.append(Band(context._replace(scope=scope), end - start, width, tied=tied))

    def tables(self) -> dict[str, nnx.Param[jax.Array]]:
        return {f"bands/{i}/table": band.table for i, band in enumerate(self.bands)}

    def reads(self, tokens: Tokens) -> Reads:
        rank_BT = self.ranks.of(self.layout, tokens.ids_BT)
        return {
            # −1, a zero row, in every band but one; in all of them for an id that does not exist.
            f"bands/{i}/table": jnp.where((rank_BT >= start) & (rank_BT < end), rank_BT - start, -1)
            for i, (start, end) in enumerate(self.bounds)
        }

    def __call__(self, rows: Rows, tokens: Tokens) -> jax.Array:
        x_BTD = [band(rows[f"bands/{i}/table"]) for i, band in enumerate(self.bands)]
        return sum(x_BTD[1:], x_BTD[0])

    def shared(self) -> Shared:
        tables = {name: table[...] for name, table in self.tables().items()}
        projections = {
            f"bands/{i}/projection": band.projection[...] for i, band in enumerate(self.bands)
        }
        return tables | projections


class Band(nnx.Module):
    """Rows of one width, and their projection to the trunk's."""

    def __init__(self, context: Context, rows: int, width: int, *, tied: bool) -> None:
        role: Role = "tied" if tied else "embed"
        D = context.width
        self.table = context.table("table", role, rows=rows, width=width)
        # Glorot & Bengio 2010.
        self.projection = context.scope.param(
            "projection", (width, D), (None, None), "matrix", normal((2 / (width + D)) ** 0.5)
        )

    def __call__(self, e_BTE: jax.Array) -> jax.Array:
        return jnp.einsum("bte,ed->btd", e_BTE, self.projection[...].astype(e_BTE.dtype))
