"""Gated rows of hashed n-grams in two layers, trained as the paper does: five times the learning rate, no weight decay.

    python run.py train engram

Expect: validation loss 5.92, 2.35 bits per byte; 1,560,064 parameters, 1,362,880 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.optim import GroupConfig
from vocabjax.vocab.memories.engram import Engram

from .base import config as base

vocab = replace(base.vocab, memories=(Engram(heads=4, buckets=4096),))
optim = replace(base.optim, memory=GroupConfig(lr=5.0, weight_decay=0.0))
config = replace(base, vocab=vocab, optim=optim)
