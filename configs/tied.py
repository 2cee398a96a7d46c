"""One table reads and predicts.

    python run.py train tied

Expect: validation loss 5.99, 2.38 bits per byte; 459,328 parameters, 262,144 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import TiedHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=TiedHead()))
