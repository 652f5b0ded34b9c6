"""Which tokens of a row each context-parallel rank has, so that all have equal work.

A causal token works on all tokens of its document before it, so the later ones cost more. In the
*zigzag* a document is cut into 2 cp chunks, of which rank i has the i-th and the i-th from the end:
every rank then has as much work as the others.

    8 tokens, cp = 2      chunks 0 1 | 2 3 | 4 5 | 6 7      rank 0: 0 1 6 7      rank 1: 2 3 4 5

Packed documents have any lengths. Each is cut alike, into chunks that differ by one token, and the
longer chunks of a row's documents (and of its padding, which is cut as they are) go round the
ranks: so all ranks have exactly L / cp tokens, whatever the lengths.

With *dynamic* context parallelism documents are cut over groups of ranks that suit their lengths,
or not at all (`dynamic`).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from moejax.data.dynamic import deal


def order_tokens(
    segment_ids: Int[np.ndarray, "... L"], cp: int, groups: Sequence[int] = ()
) -> Int[np.ndarray, "... L"]:
    """Returns, int32, the place in its row of each token in the order in which ranks have them:
    rank 0's L / cp tokens, by rising place, then rank 1's, ...

    `groups` (`Fold.groups`): sizes of the groups over which documents are cut, 1 first and cp last;
    none: each is cut over all ranks. Raises ValueError where L does not divide over cp.
    """
    *rows, length = segment_ids.shape
    if length % cp:
        raise ValueError(f"rows of {length} tokens do not divide over cp={cp}")
    ids_BL = segment_ids.reshape(-1, length)
    if groups:
        rank_BL = np.stack([_ranks_of_row(ids_L, groups) for ids_L in ids_BL])
    else:
        rank_BL = _ranks_in_zigzag(ids_BL, cp)
    return np.argsort(rank_BL, axis=1, kind="stable").astype(np.int32).reshape(*rows, length)


def _ranks_in_zigzag(ids_BL: np.ndarray, cp: int) -> np.ndarray:
    """Returns the rank of each token, every document cut over all."""
    length = ids_BL.shape[1]
    starts_BL = np.diff(ids_BL, axis=1, prepend=ids_BL[:, :1] - 1) != 0
    row_d, place_d = np.nonzero(starts_BL)
    sizes_d = np.diff(row_d * length + place_d, append=ids_BL.size)
    chunks_dC = _chunks(sizes_d, row_d, cp)
    rank_C = np.concatenate([np.arange(cp), np.arange(cp)[::-1]])
    return np.repeat(np.tile(rank_C, len(sizes_d)), chunks_dC.ravel()).reshape(-1, length)


def _ranks_of_row(ids_L: np.ndarray, groups: Sequence[int]) -> np.ndarray:
    """Returns the rank of each token of a row, documents dealt to groups."""
    length, cp = len(ids_L), groups[-1]
    place_d = np.nonzero(np.diff(ids_L, prepend=ids_L[:1] - 1))[0]
    sizes_d, true_d = np.diff(place_d, append=length), ids_L[place_d] != 0
    parts = deal(sizes_d[true_d].tolist(), length // cp, groups)
    rank_t, size_t = [], []
    for first, pieces in parts:
        ranks = range(first, first + len(pieces))
        rank_t += [*ranks, *reversed(ranks)]
        size_t += [*((n + 1) // 2 for n in pieces), *(n // 2 for n in reversed(pieces))]
    rank_L = np.empty(length, np.int64)
    rank_L[ids_L != 0] = dealt = np.repeat(rank_t, size_t).astype(np.int64)
    rank_L[ids_L == 0] = np.repeat(np.arange(cp), length // cp - np.bincount(dealt, minlength=cp))
    return rank_L


def _chunks(sizes_d: np.ndarray, row_d: np.ndarray, cp: int) -> np.ndarray:
    """Returns the sizes [documents, 2 cp] of the chunks of documents (and padding) of these sizes,
    in rows of these numbers."""
    base_d, more_d = sizes_d // (2 * cp), sizes_d % (2 * cp)
    first_d = np.searchsorted(row_d, row_d)  # the first document of its row
    dealt_d = np.cumsum(more_d) - more_d  # to all ranks before, this row's and earlier ones'
    next_d = (dealt_d - dealt_d[first_d]) % cp
    # Rank next_d is dealt the first one, its neighbour the second, ...; 0, 1 or 2 in all.
    behind_dr = (np.arange(cp)[None] - next_d[:, None]) % cp
    dealt_dr = (more_d[:, None] + cp - 1 - behind_dr) // cp
    single_dr = dealt_dr == 1
    # A rank's single ones lengthen its early chunk and its late chunk in turn.
    nth_dr = np.cumsum(single_dr, axis=0)
    late_dr = single_dr & ((nth_dr - nth_dr[first_d]) % 2 == 1)
    early_dr = (dealt_dr == 2) | (single_dr & ~late_dr)
    late_dr |= dealt_dr == 2
    return base_d[:, None] + np.concatenate([early_dr, late_dr[:, ::-1]], axis=1)


def work_of(
    segment_ids: Int[np.ndarray, "... L"], cp: int, groups: Sequence[int] = ()
) -> Int[np.ndarray, "... cp"]:
    """Returns, of each row, the pairs of query and key that each rank works on under
    `order_tokens`."""
    *rows, length = segment_ids.shape
    ids_BL = segment_ids.reshape(-1, length)
    starts_BL = np.diff(ids_BL, axis=1, prepend=ids_BL[:, :1] - 1) != 0
    at_1L = np.arange(length)[None]
    begin_BL = np.maximum.accumulate(np.where(starts_BL, at_1L, 0), axis=1)
    pairs_BL = np.where(ids_BL != 0, at_1L - begin_BL + 1, 0)
    mine_BL = np.take_along_axis(pairs_BL, order_tokens(ids_BL, cp, groups), axis=1)
    return mine_BL.reshape(*rows, cp, -1).sum(axis=-1)
