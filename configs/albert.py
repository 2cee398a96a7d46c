"""Factorised as ALBERT in Hugging Face transformers: normed rows, a head with a transform of its own.

    python run.py train albert

Expect: validation loss 6.55, 2.60 bits per byte; 269,008 parameters, 71,824 in the vocabulary.
"""

from dataclasses import replace

from vocabjax.vocab.heads.factorized import AlbertHead
from vocabjax.vocab.inputs.factorized import FactorizedTable

from .base import config as base

config = replace(
    base,
    vocab=replace(
        base.vocab,
        input=FactorizedTable(16, True, row_norm="layernorm"),
        head=AlbertHead(bias=True),
    ),
)
