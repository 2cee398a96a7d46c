"""A config's model and optimiser before there is a run: for those who ask what it would be."""

from dataclasses import dataclass
from typing import Literal

import optax

from vocabjax.config import Config
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint
from vocabjax.optim import make_optimizer
from vocabjax.sparse import Sparse
from vocabjax.train import Setup, check_fit
from vocabjax.vocab.lexicon import Lexicon

Mode = Literal["train", "decode"]  # the programs of a design


@dataclass(frozen=True)
class Design:
    """What a config stands for on a layout; nothing is allocated.

    Attributes:
      config: V and what else the data say filled in.
      note: where V comes from.
    """

    config: Config
    layout: Layout
    blueprint: Blueprint
    optimizer: optax.GradientTransformation
    sparse: Sparse
    note: str

    @staticmethod
    def of(config: Config, layout: Layout) -> "Design":
        """Reads the data where the config leaves V to them. Raises UserError for what does not fit."""
        check_fit(config, layout)
        if config.needs_data:
            setup = Setup.of(config, layout)
            setup.batches()  # may find the text too short
            return Design(
                *(setup.config, layout, setup.blueprint, setup.optimizer, setup.sparse),
                "V was read from the prepared data",
            )
        blueprint = Blueprint(config.vocab, config.trunk, layout, Lexicon.stand_in())
        optimizer = make_optimizer(config.optim, blueprint.infos.values(), config.train.steps)
        sparse = Sparse(config.optim, blueprint, config.train.steps)
        note = "V is set: the data were not read"
        return Design(config, layout, blueprint, optimizer, sparse, note)
