"""A mixture of four softmaxes over the tied table.

    python run.py train mos

Expect: TODO.
"""

from dataclasses import replace

from vocabjax.vocab.heads.mixture import MixtureOfSoftmaxes

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=MixtureOfSoftmaxes()))
