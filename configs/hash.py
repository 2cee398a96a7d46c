"""Rows composed from hashed buckets.

    python run.py train hash

Expect: validation loss 6.05, 2.40 bits per byte; 533,056 parameters, 335,872 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.linear import UntiedHead
from vocabjax.vocab.inputs.hashed import HashTable

from .base import config as base

config = replace(base, vocab=replace(base.vocab, input=HashTable(), head=UntiedHead()))
