"""A mixture of four softmaxes over the tied table.

    python run.py train mos

Expect: validation loss 6.18, 2.45 bits per byte; 475,968 parameters, 278,784 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.mixture import MixtureOfSoftmaxes

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=MixtureOfSoftmaxes()))
