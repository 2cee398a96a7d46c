"""A mixture of four contexts, scored once against the tied table.

    python run.py train moc

Expect: TODO.
"""

from dataclasses import replace

from vocabjax.vocab.heads.mixture import MixtureOfContexts

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=MixtureOfContexts()))
