"""Documents to rows of equal length, each row a function of (seed, row number) alone.

An epoch is all documents in an order drawn from (seed, epoch), end to end, cut every `length`
tokens; its last row is padded. A document cut by a row's end goes on in the next row as a piece of
its own: a new segment, positions from 0. With length 4, documents "a b c d e ." and "x y ." (the
dots are eos):

    tokens       a b c d | e . x y | . 0 0 0
    segment_ids  1 1 1 1 | 1 1 2 2 | 1 0 0 0      0 is padding
    positions    0 1 2 3 | 0 1 0 1 | 0 0 0 0
    targets      b c d e | . - y . | - - - -      - is -1: nothing is predicted there

So a target is the next token of the same document, even one that lies in the next row; it is never
another document's, and eos predicts nothing.
"""

import threading

import numpy as np
from jaxtyping import Int64

from moejax.data.token_set import TokenSet

Batch = dict[str, np.ndarray]
"""int32 arrays "tokens", "targets", "segment_ids", "positions", each [rows, length]."""

_U64 = (1 << 64) - 1


class PackedRows:
    """Endless rows of a token set: row n is row n % rows_per_epoch of epoch n // rows_per_epoch.

    Every epoch has the same number of rows, so any row is found by two binary searches. Holds the
    orders of the last two epochs (16 bytes a document, 8 a row). Safe to index from threads.
    """

    def __init__(self, token_set: TokenSet, *, length: int, seed: int) -> None:
        """Raises ValueError if `length` is below 2."""
        if length < 2:
            raise ValueError(f"a row of {length} tokens has nothing to learn; take 2 or more")
        self.token_set = token_set
        self.length = length
        self.seed = seed
        self.rows_per_epoch = -(-token_set.tokens.size // length)
        self._orders: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Batch:
        """The four arrays of row `number`, each int32 [length]."""
        epoch, row = divmod(number, self.rows_per_epoch)
        documents, ends, _ = self._order(epoch)
        start, stop = row * self.length, min((row + 1) * self.length, int(ends[-1]))
        out = self.padding()
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left"))
        for segment, place in enumerate(range(first, last + 1), start=1):
            document = int(documents[place])
            begin, end = (int(x) for x in self.token_set.offsets[document : document + 2])
            origin = int(ends[place]) - (end - begin)  # where the document begins in the epoch
            piece = slice(max(start, origin) - start, min(stop, int(ends[place])) - start)
            size = piece.stop - piece.start
            at = begin + max(start - origin, 0)
            # One token more than the piece, if the document has it: the last target.
            tokens = self.token_set.tokens[at : min(at + size + 1, end)].astype(np.int32)
            out["tokens"][piece] = tokens[:size]
            out["targets"][piece.start : piece.start + tokens.size - 1] = tokens[1:]
            out["segment_ids"][piece] = segment
            out["positions"][piece] = np.arange(size, dtype=np.int32)
        return out

    def shuffled(self, number: int) -> Batch:
        """Row `number` of the same epochs with the rows of each in an order of their own.

        Neighbouring rows are mostly of one document: a batch of them is worth little more than one.
        """
        epoch, place = divmod(number, self.rows_per_epoch)
        return self[epoch * self.rows_per_epoch + int(self._order(epoch)[2][place])]

    def padding(self) -> Batch:
        """A row in which nothing is seen and nothing is predicted."""
        zeros = {name: np.zeros(self.length, np.int32) for name in ("tokens", "segment_ids")}
        return zeros | {
            "targets": np.full(self.length, -1, np.int32),
            "positions": np.zeros(self.length, np.int32),
        }

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The epoch's documents in order, where each one ends in it, and its rows shuffled."""
        with self._lock:
            if epoch not in self._orders:
                offsets = self.token_set.offsets
                documents = draw_order(offsets.size - 1, seed=self.seed, epoch=epoch)
                ends = np.cumsum(np.diff(offsets)[documents])
                while len(self._orders) > 1:
                    self._orders.pop(next(iter(self._orders)))
                rows = draw_order(self.rows_per_epoch, seed=mix_seed(self.seed, 1), epoch=epoch)
                self._orders[epoch] = documents, ends, rows
            return self._orders[epoch]


def draw_order(count: int, *, seed: int, epoch: int) -> Int64[np.ndarray, " N"]:
    """A permutation of 0 .. count-1 drawn from (seed, epoch): the numbers sorted by a hash.

    The hash is spelled out because numpy promises no stable stream between its versions, and a run
    must find the same order after an upgrade.
    """
    start = mix_seed(mix_seed(seed, epoch), count)
    hashes = _splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(start))
    return np.argsort(hashes, kind="stable")


def mix_seed(seed: int, salt: int) -> int:
    """A seed in 0 .. 2**63 - 1 that depends on all bits of both."""
    mixed = _splitmix64(np.array([seed & _U64], np.uint64)) + np.uint64(salt & _U64)
    return int(_splitmix64(mixed)[0]) >> 1


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele, Lea, Flood (2014), "Fast splittable pseudorandom number generators"."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
