"""The head owns a table of its own.

    python run.py train untied

Expect: validation loss 5.86, 2.32 bits per byte; 721,472 parameters, 524,288 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import UntiedHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=UntiedHead()))
