"""Untied, with an output bias.

    python run.py train untied_bias

Expect: RESULT.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import UntiedHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=UntiedHead(bias=True)))
