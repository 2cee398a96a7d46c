"""Rows composed from a quotient's and a remainder's.

    python run.py train compositional

Expect: validation loss 6.05, 2.40 bits per byte; 467,520 parameters, 270,336 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import UntiedHead
from vocabjax.vocab.inputs.hashed import CompositionalTable

from .base import config as base

config = replace(base, vocab=replace(base.vocab, input=CompositionalTable(), head=UntiedHead()))
