"""The head owns a table of narrow rows behind a projection of h.

    python run.py train low_rank

Expect: validation loss 6.34, 2.51 bits per byte; 525,888 parameters, 328,704 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.low_rank import LowRankHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=LowRankHead(rank=16)))
