"""Tied, and the token after the next is predicted too.

    python run.py train over_decoding

Expect: TODO.
"""

from dataclasses import replace

from vocabjax.vocab.interfaces import Objective

from .base import config as base

config = replace(base, vocab=replace(base.vocab, objective=Objective(future=1)))
