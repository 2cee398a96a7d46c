"""Tied behind a square projection that is regularised (Press & Wolf 2016).

    python run.py train pr_tied

Expect: validation loss 5.97, 2.37 bits per byte; 463,424 parameters, 266,240 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.projected import ProjectedHead

from .base import config as base

config = replace(base, vocab=replace(base.vocab, head=ProjectedHead()))
