"""One table for source, target and scores: an encoder-decoder from a dictionary's headword to its definition.

    python run.py train three_way

Expect: validation loss 5.35 (bits per byte are not defined: headwords are read, not predicted); 484,096 parameters, 262,144 in the
vocabulary; about four minutes on two cores. Of each entry, the first 256 tokens: 9 % of the definitions' tokens lie beyond.
"""

from dataclasses import replace

from vocabjax.encoder_decoder import EncoderDecoderConfig
from vocabjax.vocab.heads.linear import TiedHead

from .base import config as base

config = replace(
    base,
    vocab=replace(base.vocab, head=TiedHead()),
    trunk=EncoderDecoderConfig(layers=2, heads=4, kv_heads=2, ffn=192, source_table="shared"),
    data=replace(base.data, source="gcide", prefix_end="\n", length=256, max_train_tokens=400_000),
    train=replace(base.train, steps=400, batch=8),
)
