"""The head owns a table of its own.

    python run.py train untied

Expect: RESULT.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import UntiedHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=UntiedHead()))
