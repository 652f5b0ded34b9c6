"""Documents dealt to groups of context-parallel ranks: none cut further than its length asks for,
as many tokens and as much work on each rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.context import order_tokens, work_of
from moejax.data.dynamic import deal
from tests.data.test_context import ids_of

GROUPS = ((1, 2), (1, 3), (1, 2, 4), (1, 2, 6), (1, 3, 6), (1, 2, 4, 8))


def ranks_of(ids: np.ndarray, groups) -> np.ndarray:
    """Returns the rank of each token of a row."""
    ranks = np.empty_like(ids)
    ranks[order_tokens(ids, groups[-1], groups)] = np.repeat(
        np.arange(groups[-1]), len(ids) // groups[-1]
    )
    return ranks


def level_of(ids: np.ndarray, groups) -> int:
    """Returns the size of the smallest groups that hold each document of a row whole."""
    ranks, documents = ranks_of(ids, groups), set(ids.tolist()) - {0}
    alike = lambda g: all(len(set((ranks[ids == d] // g).tolist())) == 1 for d in documents)  # noqa: E731
    return next(g for g in groups if alike(g))


def test_documents_are_cut_over_no_more_ranks_than_they_ask_for():
    """Of 6, 4, 4 and 2 tokens on four ranks: the first has twice a rank's share of the work, the
    last does not fit anywhere whole. In zigzag, by hand."""
    order = order_tokens(ids_of(6, 4, 4, 2, length=16), 4, (1, 2, 4))
    np.testing.assert_array_equal(
        order.reshape(4, 4), [[0, 1, 5, 14], [2, 3, 4, 15], [6, 7, 8, 9], [10, 11, 12, 13]]
    )


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_documents_that_fill_groups_are_on_one_each(groups):
    """Of each size: whole documents where a rank has room for one, one on all ranks, in zigzag."""
    cp = groups[-1]
    for group in groups:
        ids = ids_of(*[24 * group] * (cp // group), length=24 * cp)
        assert level_of(ids, groups) == group
    long = np.ones(24 * cp, np.int64)
    np.testing.assert_array_equal(order_tokens(long, cp, groups), order_tokens(long, cp))
    assert level_of(ids_of(*[4] * 6 * cp, length=24 * cp), groups) == 1
    for nothing in (np.zeros(24 * cp, np.int64), ids_of(1, length=24 * cp)):
        order = order_tokens(nothing, cp, groups)
        np.testing.assert_array_equal(np.sort(order), np.arange(24 * cp))
        assert level_of(nothing, groups) == 1


@given(
    st.sampled_from(GROUPS),
    st.lists(st.lists(st.sampled_from([1, 1, 2, 3, 7, 30]), max_size=12), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_whatever_the_lengths_ranks_have_as_many_tokens(groups, documents, padding):
    """Rows full to the last token, rows of padding alone: the order is a permutation, of each
    rank's tokens rising, each row's as it is alone."""
    cp = groups[-1]
    length = cp * max(-(-max(sum(sizes) + padding for sizes in documents) // cp), 1)
    ids = np.stack([ids_of(*sizes, length=length) for sizes in documents])
    order = order_tokens(ids[None], cp, groups)[0]
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(length), (len(ids), 1)))
    assert (np.diff(order.reshape(len(ids), cp, -1), axis=-1) > 0).all()
    for row, mine in zip(ids, order, strict=True):
        np.testing.assert_array_equal(order_tokens(row, cp, groups), mine)


@given(st.sampled_from(GROUPS), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_document_has_one_aligned_group_and_its_share_of_the_tokens(groups, sizes):
    """With room to spare, pieces are even, and no larger a group is used than work asks for."""
    room, mean = sum(sizes), sum(n * n for n in sizes) / groups[-1]
    largest = max(next((g for g in groups if n * n <= 1.05 * mean * g), groups[-1]) for n in sizes)
    work, level = np.zeros(groups[-1]), 1
    for size, (first, pieces) in zip(sizes, deal(sizes, room, groups), strict=True):
        assert len(pieces) in groups and first % len(pieces) == 0
        assert sum(pieces) == size and max(pieces) - min(pieces) <= 1
        work[first : first + len(pieces)] += size * np.array(pieces)
        level = max(level, len(pieces))
    assert level >= largest
    # What is beyond the largest group is for balance.
    assert level == largest or work.max() <= 1.2 * mean or level == groups[-1]


@pytest.mark.parametrize("groups", [(1, 2), (1, 2, 6), (1, 2, 4, 8)], ids=str)
def test_full_rows_of_many_documents_are_cut_for_none_of_them(groups):
    """They fill the ranks to the last token."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        sizes = rng.integers(1, 800, 400)
        ids = np.repeat(np.arange(1, 401), sizes)[: 16384 * groups[-1]]
        assert ids.all() and level_of(ids, groups) == 1


@pytest.mark.parametrize("groups", [(1, 2), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)], ids=str)
def test_work_is_even(groups):
    """Documents of 1 to 4,096 tokens in rows of 8,192: no rank has a quarter above its share."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(4096), 400)).astype(int)
    ids = np.repeat(np.arange(1, 401), sizes)
    ids = ids[: len(ids) // 8192 * 8192].reshape(-1, 8192)
    work = work_of(ids, groups[-1], groups)
    assert (work.max(axis=1) / work.mean(axis=1)).max() < 1.25
