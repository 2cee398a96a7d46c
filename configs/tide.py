"""Banks of token rows that every layer mixes anew.

    python run.py train tide

Expect: validation loss 5.89, 2.34 bits per byte; 984,768 parameters, 787,584 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.memories.tide import Tide

from .base import config as base

config = replace(base, vocab=replace(base.vocab, memories=(Tide(),)))
