"""Batches for training and evaluation.

The rows of all training sources are interleaved by their weights into one endless sequence of
global rows. A step takes the next `batch_size` of them, each process its own share. So
what is trained on depends on the seed and the row number alone, however many processes there are
and however often the run was resumed, and the loader's whole state is the number of the next row.
Threads read a few batches ahead, so that a step need not wait for its batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import grain
import numpy as np

from moejax.data.cache import cache_key
from moejax.data.config import HELDOUT, DataConfig
from moejax.data.pack import Batch, PackedRows, mix_seed
from moejax.data.token_set import TokenSet, tokenise
from moejax.data.tokenizer import Tokenizer

_ENDLESS = 1 << 60
_READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
_EVAL_SEED = 0


@dataclass(frozen=True)
class _Share:
    """The rows of every global batch that this process reads: its part of each microbatch."""

    batch_size: int
    microbatches: int
    process_index: int
    process_count: int

    def __post_init__(self) -> None:
        pieces = self.microbatches * self.process_count
        if self.batch_size < 1 or self.batch_size % pieces:
            raise ValueError(
                f"a global batch of {self.batch_size} rows does not divide over "
                f"{self.process_count} processes and {self.microbatches} microbatches; take a "
                f"multiple of {pieces}"
            )

    def rows(self, start: int) -> list[int]:
        """Global row numbers of this process, for the batch whose first row is `start`."""
        micro = self.batch_size // self.microbatches
        size = micro // self.process_count
        first = start + self.process_index * size
        return [
            row
            for at in range(first, first + self.batch_size, micro)
            for row in range(at, at + size)
        ]


class TrainBatches(Iterator[Batch]):
    """Endless training batches; `state` and `restore` are exact. Made by `train_batches`."""

    def __init__(
        self, sources: tuple[PackedRows, ...], weights: tuple[float, ...], share: _Share, seed: int
    ) -> None:
        # grain keeps a mixture's proportions to about 1 %.
        each = [grain.MapDataset.range(_ENDLESS).map(rows.shuffled) for rows in sources]
        mixture = grain.MapDataset.mix(each, weights)
        self._row = cast(Callable[[int], Batch], mixture.__getitem__)
        self._share = share
        self._next_row = 0
        self._batches: grain.DatasetIterator[Batch] | None = None
        self._identity = {
            "seed": seed,
            "length": sources[0].length,
            "data": cache_key([rows.token_set.fingerprint for rows in sources], weights),
        }
        self.num_tokens = sum(rows.token_set.tokens.size for rows in sources)
        """Tokens of all sources together, each document's eos included."""
        self.num_bytes = sum(rows.token_set.num_bytes for rows in sources)
        """UTF-8 bytes of all sources' text."""
        total = sum(weights)
        epochs = (
            rows.rows_per_epoch * total / weight
            for rows, weight in zip(sources, weights, strict=True)
        )
        self.rows_per_epoch = int(min(epochs))
        """Global rows until the first of the sources has been seen once."""

    def __next__(self) -> Batch:
        """This process's rows of the next global batch."""
        if self._batches is None:
            self._batches = self._iterate(self._next_row)
        batch = next(self._batches)
        self._next_row += self._share.batch_size
        return batch

    def _iterate(self, first_row: int) -> grain.DatasetIterator[Batch]:
        def assemble(step: int) -> Batch:
            start = first_row + step * self._share.batch_size
            return _stack([self._row(row) for row in self._share.rows(start)])

        steps = grain.MapDataset.range(_ENDLESS).map(assemble)
        return iter(steps.to_iter_dataset(_READ_AHEAD))

    def state(self) -> dict[str, int | str]:
        """What `restore` needs to go on with the next batch; JSON-able, equal on all processes."""
        return {"next_row": self._next_row, **self._identity}

    def restore(self, state: dict[str, int | str]) -> None:
        """Goes on where `state` was taken, under any batch size and number of processes.

        Raises ValueError if the state is of other data, another seed, row length or mixture: its
        row numbers would mean other text here.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved data position has {name}={state.get(name)!r}, this run has "
                    f"{value!r}; resume with the data configuration it was saved with, or start "
                    "a new run from its weights"
                )
        self.close()
        self._next_row = int(state["next_row"])

    def close(self) -> None:
        """Stops the threads that read ahead."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def train_batches(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    length: int,
    seed: int,
    cache_dir: Path,
    microbatches: int = 1,
    process_index: int = 0,
    process_count: int = 1,
) -> TrainBatches:
    """Training batches of `batch_size` global rows of `length` tokens, tokenising first if needed.

    Raises what `tokenise` raises, and ValueError for a batch that does not divide over the
    processes or a row longer than all the text of a source.
    """
    share = _Share(batch_size, microbatches, process_index, process_count)
    sources = []
    for index, source in enumerate(cfg.train):
        token_set = tokenise(cfg, (source,), "train", tokenizer, cache_dir)
        if length > token_set.tokens.size:
            raise ValueError(
                f"rows of {length} tokens are longer than the whole of data source {source!r} "
                f"({token_set.tokens.size} tokens); shorten the rows or add text"
            )
        sources.append(PackedRows(token_set, length=length, seed=mix_seed(seed, index)))
    weights = cfg.weights or tuple(float(rows.rows_per_epoch) for rows in sources)
    return TrainBatches(tuple(sources), weights, share, seed)


@dataclass(frozen=True)
class EvalBatches:
    """The batches of one evaluation set, the same on every pass. Made by `eval_batches`."""

    rows: PackedRows
    share: _Share
    num_batches: int

    @property
    def token_set(self) -> TokenSet:
        return self.rows.token_set

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches from number `start` on; the last one is filled up with rows of padding."""
        for number in range(start, self.num_batches):
            yield _stack(
                [
                    self.rows[row] if row < self.rows.rows_per_epoch else self.rows.padding()
                    for row in self.share.rows(number * self.share.batch_size)
                ]
            )


def eval_batches(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    name: str,
    *,
    batch_size: int,
    length: int,
    cache_dir: Path,
    max_batches: int = 0,
    microbatches: int = 1,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """The evaluation set `name` of `cfg`: one pass, or its first `max_batches` (0 = all).

    Its documents are in an order drawn once for all runs, so that the first batches are a fair
    sample. Raises what `tokenise` raises, ValueError for a name that `cfg` does not have.
    """
    share = _Share(batch_size, microbatches, process_index, process_count)
    if name not in cfg.eval_sources:
        raise ValueError(
            f"no evaluation set {name!r}; data.eval has: {', '.join(cfg.eval_sources) or 'none'}"
        )
    source = cfg.eval_sources[name]
    if source == HELDOUT:
        token_set = tokenise(cfg, cfg.train, "heldout", tokenizer, cache_dir)
    else:
        token_set = tokenise(cfg, (source,), "all", tokenizer, cache_dir)
    rows = PackedRows(token_set, length=length, seed=_EVAL_SEED)
    num_batches = -(-rows.rows_per_epoch // batch_size)
    return EvalBatches(rows, share, min(num_batches, max_batches or num_batches))


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
