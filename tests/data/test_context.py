"""Which tokens a context-parallel rank has: as many as the others, in zigzag, with equal work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.context import order_tokens, work_of


def ids_of(*sizes: int, length: int) -> np.ndarray:
    """Returns the segment ids of a row of documents of these sizes, then padding."""
    ids = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    return np.pad(ids, (0, length - len(ids)))


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_one_document_that_fills_the_row_is_in_zigzag(cp):
    order = order_tokens(np.ones((3, 8 * cp), np.int32), cp)
    chunks = np.arange(8 * cp).reshape(2 * cp, 4)
    for rank, mine in enumerate(order[1].reshape(cp, 8)):
        np.testing.assert_array_equal(mine, [*chunks[rank], *chunks[2 * cp - 1 - rank]])
    work = work_of(np.ones((1, 8 * cp), np.int32), cp)
    assert (work == work[0, 0]).all()


def test_packed_documents_are_each_in_zigzag():
    """Documents of 8 and 4 tokens, and padding of 4, over two ranks."""
    order = order_tokens(ids_of(8, 4, length=16), 2)
    np.testing.assert_array_equal(order[:8], [0, 1, 6, 7, 8, 11, 12, 15])
    np.testing.assert_array_equal(order[8:], [2, 3, 4, 5, 9, 10, 13, 14])


@given(
    st.integers(1, 6),
    st.lists(st.lists(st.sampled_from([1, 1, 2, 3, 7, 30]), max_size=9), min_size=1, max_size=3),
)
def test_whatever_the_lengths_ranks_have_as_many_tokens(cp, documents):
    """Documents of one token, rows of padding alone: the order is a permutation, of each rank's
    tokens rising, and it cuts a document into pieces that differ by two tokens at most."""
    length = cp * max(-(-max(sum(sizes) for sizes in documents) // cp), 1)
    ids = np.stack([ids_of(*sizes, length=length) for sizes in documents])
    order = order_tokens(ids[None], cp)[0]
    assert order.dtype == np.int32
    np.testing.assert_array_equal(
        np.sort(order, axis=1), np.tile(np.arange(length), (len(ids), 1))
    )
    places = order.reshape(len(ids), cp, -1)
    assert (np.diff(places, axis=-1) > 0).all()
    for row, mine in zip(ids, places, strict=True):
        for document in set(row.tolist()):
            counts = (row[mine] == document).sum(axis=1)
            assert counts.max() - counts.min() <= 2


@pytest.mark.parametrize(("cp", "limit"), [(2, 1.02), (8, 1.05), (32, 1.2)])
def test_work_is_even(cp, limit):
    """Documents of 1 to 4,096 tokens in rows of 8,192: the busiest rank has little more than its
    share. Contiguous pieces have up to twice as much."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(4096), 400)).astype(int)
    ids = np.repeat(np.arange(1, 401), sizes)
    ids = ids[: len(ids) // 8192 * 8192].reshape(-1, 8192)
    work = work_of(ids, cp)
    assert (work.sum(axis=1) > 8192).all()
    assert (work.max(axis=1) / work.mean(axis=1)).max() < limit


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="rows of 10 tokens do not divide over cp=4"):
        order_tokens(np.ones((1, 10), np.int32), 4)
