"""A whole training step: against its own parts measured alone, and against the step one would write with Optax.

    python run.py bench step                    32,768 ids
    python run.py bench step --vocab 100352     another case, beside the first

`tied` is set against the sum of what it cannot do without: the trunk alone (forward, backward and its Adam), F (the three products of
the head alone), and dense Adam of the table. `untied` and `ple`, whose looked-up tables are trained by rows, are set against the same
model with full logits, Optax's loss and dense Adam everywhere.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vocabjax.flags import Flat, Switches, parse
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.optim import GroupConfig, OptimConfig, make_optimizer
from vocabjax.paths import by_path
from vocabjax.sparse import Sparse
from vocabjax.state import init_state
from vocabjax.step import Arrays, make_step, tokens_of
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.interfaces import Tokens
from vocabjax.vocab.memories.ple import PLE

from . import runner
from .harness import Candidate, Deviation, Memory, Ready, Record, measure
from .loss import Problem, floor_in_jax, floor_in_torch
from .report import Target

TRUNK, TABLE = "trunk alone, with its Adam", "dense Adam of the table"
FLOORS = ("F, XLA", "F, torch")
STEPS = 10_000  # of the schedule: more than are ever taken
LAZY = GroupConfig(sparse="lazy", weight_decay=0.0)
DENSE = OptimConfig(lr=1e-3)
BY_ROWS = replace(DENSE, embed=LAZY, memory=LAZY)


@dataclass(frozen=True)
class Options:
    """Times training steps.

    Attributes:
      batch, length: of the tokens.
      width: D.
      layers: L.
      vocab: V, a multiple of 128.
      threads: of torch.
    """

    batch: int = 8
    length: int = 256
    width: int = 512
    layers: int = 4
    vocab: int = 32_768
    threads: int = 2
    how: Annotated[runner.Rounds, Flat, Switches] = field(default_factory=runner.Rounds)


class Problem_:
    pass
