"""Untied, with the head's mean row subtracted after every step.

    python run.py train centred

Expect: TODO.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import UntiedHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=UntiedHead(centre=True)))
