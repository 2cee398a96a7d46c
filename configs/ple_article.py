"""A per-layer gate on the FFN, as the article words it.

    python run.py train ple_article

Expect: validation loss 6.13, 2.43 bits per byte; 725,568 parameters, 528,384 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.memories.ple import ArticlePLE

from .base import config as base

config = replace(base, vocab=replace(base.vocab, memories=(ArticlePLE(width=16),)))
