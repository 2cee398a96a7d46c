"""Rare ids have narrow rows; input and head share bands, tables and projections.

    python run.py train tied_adaptive

Expect: validation loss 6.15, 2.44 bits per byte; 268,224 parameters, 71,040 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.adaptive import TiedAdaptiveSoftmax
from vocabjax.vocab.inputs.adaptive import AdaptiveTable

from .base import config as base

config = replace(base, vocab=replace(base.vocab, input=AdaptiveTable(), head=TiedAdaptiveSoftmax()))
