"""vocabjax: every way to read and to predict token ids, sharded over the vocabulary."""

from vocabjax.errors import IdError, UserError
from vocabjax.mesh import Layout, make_mesh
from vocabjax.vocab.core import Vocab, VocabConfig
from vocabjax.vocab.heads.linear import TiedHead, UntiedHead
from vocabjax.vocab.inputs.full import FullTable
from vocabjax.vocab.interfaces import Loss, Objective, Tokens
from vocabjax.vocab.lexicon import Lexicon
from vocabjax.vocab.loss import linear_cross_entropy
from vocabjax.vocab.scores import Scoring
from vocabjax.vocab.sizes import Sizes

__version__ = "0.1.0"

__all__ = [
    "FullTable",
    "IdError",
    "Layout",
    "Lexicon",
    "Loss",
    "Objective",
    "Scoring",
    "Sizes",
    "TiedHead",
    "Tokens",
    "UntiedHead",
    "UserError",
    "Vocab",
    "VocabConfig",
    "__version__",
    "linear_cross_entropy",
    "make_mesh",
]
