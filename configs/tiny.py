"""A first try and the tests' smoke config: seconds, not a result.

    python run.py train tiny

Expect: validation loss 5.20, 3.70 bits per byte, in seconds once compiled.
"""

from dataclasses import replace

from .base import config as base

config = replace(
    base,
    vocab=replace(base.vocab, width=32),
    trunk=replace(base.trunk, layers=2, heads=4, kv_heads=2, ffn=64),
    data=replace(
        base.data, vocab_size=512, length=32, max_train_tokens=40_000, max_validation_tokens=4_000
    ),
    optim=replace(base.optim, lr=1e-2, warmup=10),
    train=replace(base.train, steps=100, batch=8, eval_every=50, checkpoint_every=50),
)
