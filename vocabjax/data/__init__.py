"""Text to batches: sources, tokenizers, token streams on disk, windows.

`prepare(DataConfig(source="wiki"))` gives a `Dataset`; `train_batches(dataset.train, ...)` gives
its batches for one process, `evaluation_batches(dataset.validation, ...)` every target once.
"""

from vocabjax.data.prepare import DataConfig, Dataset, TokenStream, prepare
from vocabjax.data.windows import Batch, evaluation_batches, train_batches, windows_per_pass

__all__ = [
    "Batch",
    "DataConfig",
    "Dataset",
    "TokenStream",
    "evaluation_batches",
    "prepare",
    "train_batches",
    "windows_per_pass",
]
