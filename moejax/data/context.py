"""Which tokens of a row each context-parallel rank has, so that all have equal work.

A causal token works on all tokens of its document before it, so the later ones cost more. In the
*zigzag* a document is cut into 2 cp chunks, of which rank i has the i-th and the i-th from the end:
every rank then has as much work as the others.

    8 tokens, cp = 2      chunks 0 1 | 2 3 | 4 5 | 6 7      rank 0: 0 1 6 7      rank 1: 2 3 4 5

Packed documents have any lengths. Each is cut alike, into chunks that differ by one token, and the
longer chunks of a row's documents (and of its padding, which is cut as they are) go round the
ranks: so all ranks have exactly L / cp tokens, whatever the lengths.
"""

import numpy as np
from jaxtyping import Int


def order_tokens(segment_ids: Int[np.ndarray, "... L"], cp: int) -> Int[np.ndarray, "... L"]:
    """Returns, int32, the place in its row of each token in the order in which ranks have them:
    rank 0's L / cp tokens, by rising place, then rank 1's, ...

    Raises ValueError where L does not divide over cp.
    """
    *rows, length = segment_ids.shape
    if length % cp:
        raise ValueError(f"rows of {length} tokens do not divide over cp={cp}")
    ids_BL = segment_ids.reshape(-1, length)
    starts_BL = np.diff(ids_BL, axis=1, prepend=ids_BL[:, :1] - 1) != 0
    row_d, place_d = np.nonzero(starts_BL)
    sizes_d = np.diff(row_d * length + place_d, append=ids_BL.size)
    chunks_dC = _chunks(sizes_d, row_d, cp)
    rank_C = np.concatenate([np.arange(cp), np.arange(cp)[::-1]])
    rank_BL = np.repeat(np.tile(rank_C, len(sizes_d)), chunks_dC.ravel()).reshape(-1, length)
    return np.argsort(rank_BL, axis=1, kind="stable").astype(np.int32).reshape(*rows, length)


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


def work_of(segment_ids: Int[np.ndarray, "... L"], cp: int) -> Int[np.ndarray, "... cp"]:
    """Returns, of each row, the pairs of query and key that each rank works on under
    `order_tokens`."""
    *rows, length = segment_ids.shape
    ids_BL = segment_ids.reshape(-1, length)
    starts_BL = np.diff(ids_BL, axis=1, prepend=ids_BL[:, :1] - 1) != 0
    at_1L = np.arange(length)[None]
    begin_BL = np.maximum.accumulate(np.where(starts_BL, at_1L, 0), axis=1)
    pairs_BL = np.where(ids_BL != 0, at_1L - begin_BL + 1, 0)
    mine_BL = np.take_along_axis(pairs_BL, order_tokens(ids_BL, cp), axis=1)
    return mine_BL.reshape(*rows, cp, -1).sum(axis=-1)
