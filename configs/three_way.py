"""One table for source, target and scores: an encoder-decoder from a dictionary's headword to its definition.

    python run.py train three_way

Expect: TODO
"""

from dataclasses import replace

from vocabjax.encoder_decoder import EncoderDecoderConfig
from vocabjax.vocab.heads.linear import TiedHead

from .base import config as base

config = replace(
    base,
    vocab=replace(base.vocab, head=TiedHead()),
    trunk=EncoderDecoderConfig(layers=2, heads=4, kv_heads=2, ffn=192, source_table="shared"),
    data=replace(
        base.data,
        source="gcide",
        prefix_end="\n",
        max_train_tokens=400_000,
    ),
)
