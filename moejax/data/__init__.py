"""From text files to packed batches.

    source -> tokenizer -> token_set -> pack -> loader
    files     ids          on disk      rows    batches, mixture, position

and `ngram`, the count model that a trained one has to beat on the same batches.
"""

from moejax.data.config import DataConfig
from moejax.data.loader import EvalBatches, TrainBatches, eval_batches, train_batches
from moejax.data.pack import Batch
from moejax.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "DataConfig",
    "EvalBatches",
    "Tokenizer",
    "TrainBatches",
    "eval_batches",
    "load_tokenizer",
    "train_batches",
]
