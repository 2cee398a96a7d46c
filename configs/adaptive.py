"""Rare ids have narrow rows, in the input and in the head, each with tables of its own.

    python run.py train adaptive

Expect: TODO.
"""

from dataclasses import replace

from vocabjax.vocab.heads.adaptive import AdaptiveSoftmax
from vocabjax.vocab.inputs.adaptive import AdaptiveTable

from .base import config as base

config = replace(base, vocab=replace(base.vocab, input=AdaptiveTable(), head=AdaptiveSoftmax()))
