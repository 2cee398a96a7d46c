"""Qwen2-0.5B, tied, for a TPU slice: a million tokens a step, embedding without decay.

    python run.py train pod_qwen2_0_5b

Expect: not trained here. 494,032,768 parameters; compiled for v5e, v5p and v6e slices (docs/plans.md). On a slice add
`--multihost --mesh data=-1,model=2`.
"""

from dataclasses import replace

from vocabjax.optim import GroupConfig
from vocabjax.published import MODELS

base = MODELS["qwen2_0_5b"][1]
config = replace(base, optim=replace(base.optim, tied=GroupConfig(weight_decay=0.0)))
