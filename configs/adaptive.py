"""Rare ids have narrow rows, in the input and in the head, each with tables of its own.

    python run.py train adaptive

Expect: validation loss 6.11, 2.42 bits per byte; 335,040 parameters, 137,856 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.adaptive import AdaptiveSoftmax
from vocabjax.vocab.inputs.adaptive import AdaptiveTable

from .base import config as base

config = replace(base, vocab=replace(base.vocab, input=AdaptiveTable(), head=AdaptiveSoftmax()))
