"""Tied, and the token after the next is predicted too.

    python run.py train over_decoding

Expect: validation loss 5.99, 2.38 bits per byte; 463,424 parameters, 266,240 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.interfaces import Objective

from .base import config as base

config = replace(base, vocab=replace(base.vocab, objective=Objective(future=1)))
