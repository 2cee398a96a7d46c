"""Qwen2-7B, untied, for a TPU slice: a million tokens a step, tables without decay.

    python run.py train pod_qwen2_7b

Expect: not trained here. 7,615,616,512 parameters; compiled for v5e, v5p and v6e slices (docs/plans.md). On a slice add
`--multihost --mesh data=-1,model=4 --rules fsdp`.
"""

from dataclasses import replace

from vocabjax.optim import GroupConfig
from vocabjax.published import MODELS

base, still = MODELS["qwen2_7b"][1], GroupConfig(weight_decay=0.0)
config = replace(base, optim=replace(base.optim, embed=still, head=still))
