"""Published throughput is predicted as well as benchmarks/results/published.md says."""

from statistics import median

import pytest

from benchmarks import published
from benchmarks.published import OSS, RESULTS, ROWS


@pytest.fixture(scope="module")
def priced():
    return [published.price(row) for row in ROWS]


def test_rows_are_many_and_mostly_unmarked():
    assert len({row.model for row in ROWS}) >= 5 and len({row.gpu for row in ROWS}) == 4
    assert len(ROWS) == len(set(ROWS)) == 49
    assert sum(row.marked for row in ROWS) == 4


def test_the_median_error_is_below_15_percent(priced):
    """And below that of the best constant share of the peak for each GPU, chosen in hindsight."""
    for rows in (priced, [p for p in priced if p.row.model != OSS]):
        unmarked = [p for p in rows if not p.row.marked]
        ours = median(published.errors(unmarked))
        best = published.best_shares(unmarked)
        given = published.marked_shares(priced)
        assert ours < 0.15
        assert ours < median(published.constant_errors(unmarked, best))
        assert ours < 0.5 * median(published.constant_errors(unmarked, given))


def test_the_worst_miss_is_gpt_oss(priced):
    """What is known to be missing there is not covered up; elsewhere one row, which offloads, is
    more than 35 % off. What can be priced: 37 rows of four models on four GPUs."""
    _, others, able = published.kinds_of_rows(priced).values()
    assert max(published.errors(others)) < 0.40
    assert sum(error > 0.35 for error in published.errors(others)) == 1
    assert max(published.errors(able)) < 0.35 and median(published.errors(able)) < 0.15
    assert len(able) == 37 and len({p.row.model.split(" ")[0] for p in able}) == 4


def test_ablations_have_their_sign_and_half_their_size():
    shares = [ablation.share for ablation in published.ablations()]
    assert len(shares) == 2
    assert all(0.5 < share < 1.5 for share in shares)


def test_the_constant_is_the_one_that_the_marked_pairs_choose(monkeypatch):
    """Least squares of the logarithms of both pairs' ratios, in whole microseconds."""
    marked = [row for row in ROWS if row.marked]
    pairs = list(zip(marked[::2], marked[1::2], strict=True))
    assert all((a.graphs, b.graphs) == ("partial", "full") for a, b in pairs)

    def squares(microseconds: int) -> float:
        monkeypatch.setattr("moejax.plan.analytic.events.LAUNCHED", microseconds * 1e-6)
        total = 0.0
        for partial, full in pairs:
            a, b = published.price(partial), published.price(full)
            total += ((1 + a.error) / (1 + b.error) - 1) ** 2
        return total

    assert min(range(20, 51), key=squares) == 33


def test_a_share_of_the_peak_is_compared_fairly(priced):
    """The best one of a GPU is no worse than that of any of its rows, or than the mean of two."""
    for gpu, best in published.best_shares(priced).items():
        mine = [p for p in priced if p.row.gpu == gpu]
        error = median(published.constant_errors(mine, {gpu: best}))
        shares = [p.published / p.peak for p in mine]
        for share in (*shares, *((a + b) / 2 for a in shares for b in shares)):
            assert error <= median(published.constant_errors(mine, {gpu: share})) + 0.003


def test_the_results_are_those_of_the_code():
    assert RESULTS.read_text() == published.report()
