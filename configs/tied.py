"""One table reads and predicts.

    python run.py train tied

Expect: RESULT.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import TiedHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=TiedHead()))
