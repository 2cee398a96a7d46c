"""A mixture of four contexts, scored once against the tied table.

    python run.py train moc

Expect: validation loss 6.15, 2.44 bits per byte; 475,968 parameters, 278,784 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.mixture import MixtureOfContexts

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=MixtureOfContexts()))
