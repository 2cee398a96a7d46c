"""Tied, and pulled towards the distribution that the embedding of the target suggests (Inan et al. 2016).

    python run.py train augmented_loss

Expect: validation loss 6.14, 2.44 bits per byte; 459,328 parameters, 262,144 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.interfaces import Objective

from .base import config as base

config = replace(base, vocab=replace(base.vocab, objective=Objective(augmented=0.5)))
