"""The full config that every other one changes: a small tied model on Wikipedia lead sections.

    python run.py train base

Expect: validation loss 5.99, 2.38 bits per byte, after 410k tokens, about a minute on two cores.
"""

from vocabjax.config import Config, TrainConfig
from vocabjax.data import DataConfig
from vocabjax.optim import GroupConfig, OptimConfig
from vocabjax.trunk import TrunkConfig
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import TiedHead
from vocabjax.vocab.inputs.full import FullTable
from vocabjax.vocab.interfaces import Objective

config = Config(
    vocab=VocabConfig(
        size=None,  # what the tokenizer really has
        width=64,
        multiple=128,
        banned=(),
        dtype="float32",
        input=FullTable(scale="none", norm="none"),
        head=TiedHead(bias=False, scale=1.0, softcap=None),
        memories=(),
        objective=Objective(z_loss=0.0, label_smoothing=0.0, chunk=None),
    ),
    trunk=TrunkConfig(
        layers=4,
        heads=4,
        kv_heads=2,
        ffn=192,
        head_dim=None,
        qk_norm=False,
        rope_theta=10_000.0,
        remat="none",
    ),
    data=DataConfig(
        source="wiki",
        tokenizer="bpe",
        vocab_size=4096,
        length=128,
        validation=0.1,
        max_train_tokens=None,
        max_validation_tokens=25_000,
        seed=0,
    ),
    optim=OptimConfig(
        lr=3e-3,
        schedule="cosine",
        warmup=20,
        final_lr=0.1,
        weight_decay=0.1,
        b1=0.9,
        b2=0.95,
        clip=1.0,
        vector=GroupConfig(weight_decay=0.0),
    ),
    train=TrainConfig(
        steps=200,
        batch=16,
        accumulate=1,
        seed=0,
        log_every=10,
        eval_every=100,
        checkpoint_every=100,
        keep_last=2,
        keep_best=1,
    ),
)
