"""The article's 3B, tied, for a TPU slice: a million tokens a step, embedding without decay.

    python run.py train pod_article_3b

Expect: not trained here. 2,458,426,880 parameters; compiled for v5e, v5p and v6e slices (docs/plans.md). On a slice add
`--multihost --mesh data=-1,model=4 --rules fsdp`.
"""

from dataclasses import replace

from vocabjax.optim import GroupConfig
from vocabjax.published import MODELS

base = MODELS["article_3b"][1]
config = replace(base, optim=replace(base.optim, tied=GroupConfig(weight_decay=0.0)))
