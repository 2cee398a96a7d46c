"""Tied, with LayerNorm on the embedded input only (embed-layernorm).

    python run.py train tied_layernorm

Expect: validation loss 5.84, 2.32 bits per byte; 128 parameters more than tied.
"""

from dataclasses import replace

from vocabjax.vocab.inputs.full import FullTable

from .base import config as base

config = replace(base, vocab=replace(base.vocab, input=FullTable(norm="layernorm")))
