"""Gemma's per-layer embeddings beside a tied table.

    python run.py train ple

Expect: validation loss 6.08, 2.41 bits per byte; 734,032 parameters, 536,848 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.memories.ple import PLE

from .base import config as base

config = replace(base, vocab=replace(base.vocab, memories=(PLE(width=16),)))
