"""Narrow rows and a projection; the head scores through it, transposed.

    python run.py train factorized

Expect: validation loss 6.52, 2.59 bits per byte; 263,744 parameters, 66,560 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.factorized import FactorizedHead
from vocabjax.vocab.inputs.factorized import FactorizedTable

from .base import config as base

config = replace(
    base, vocab=replace(base.vocab, input=FactorizedTable(factor=16), head=FactorizedHead())
)
