"""Tied, and pulled towards the distribution that the embedding of the target suggests (Inan et al. 2016).

    python run.py train augmented_loss

Expect: TODO.
"""

from dataclasses import replace

from vocabjax.vocab.interfaces import Objective

from .base import config as base

config = replace(base, vocab=replace(base.vocab, objective=Objective(augmented=0.5)))
