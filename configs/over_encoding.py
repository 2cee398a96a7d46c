"""Hashed n-gram rows beside the token's own; the head ties the token table.

    python run.py train over_encoding

Expect: validation loss 6.27, 2.49 bits per byte; 723,552 parameters, 526,368 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.inputs.over_encoding import OverEncoding

from .base import config as base

config = replace(base, vocab=replace(base.vocab, input=OverEncoding(order=2)))
