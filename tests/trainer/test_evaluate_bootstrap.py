"""Intervals: they cover as often as they say, and what they bound is what numpy says."""

import math

import numpy as np
import pytest

from trainer.evaluate.quality.bootstrap import (
    Interval,
    Resampler,
    expanded_tail,
    mean,
    quantile,
    ratio,
    student_quantile,
)


@pytest.mark.parametrize("num_rows", [8, 24])
def test_nominal_95_percent_covers(num_rows):
    """Rows of unequal lengths with a level of their own: tokens are no independent draws."""
    generator, covered, times = np.random.default_rng(0), 0, 300
    for seed in range(times):
        counts = generator.integers(20, 60, num_rows)
        sums = [generator.normal(generator.normal(2, 1), 1, count).sum() for count in counts]
        interval = Resampler(num_rows, resamples=400, seed=seed).interval(ratio(sums, counts))
        covered += interval.low <= 2 <= interval.high
    assert 0.90 <= covered / times <= 0.99


def test_tokens_as_draws_would_not_cover():
    """The same rows, resampled token by token: the interval is far too short, which is why rows are drawn."""
    generator, covered, times = np.random.default_rng(0), 0, 60
    for seed in range(times):
        tokens = np.concatenate([generator.normal(generator.normal(2, 1), 1, 40) for _ in range(8)])
        interval = Resampler(len(tokens), resamples=200, seed=seed).interval(mean(tokens))
        covered += interval.low <= 2 <= interval.high
    assert covered / times < 0.6


def test_quantiles_of_student():
    """Against tables, to three digits."""
    for degrees, table in ((3, 3.182), (5, 2.571), (9, 2.262), (30, 2.042)):
        assert student_quantile(0.975, degrees) == pytest.approx(table, rel=2e-3)
    assert expanded_tail(1000) == pytest.approx(0.025, rel=0.02) and expanded_tail(6) < 0.01


def test_a_quantile_of_tokens_is_numpys():
    rows = [np.random.default_rng(n).random(10 + n) for n in range(6)]
    found = Resampler(6).interval(quantile(rows, 0.9))
    assert found.value == np.quantile(np.concatenate(rows), 0.9, method="inverted_cdf")
    weights = np.array([[2.0, 0, 0, 1, 0, 0]])  # rows drawn twice, never, once
    drawn = np.concatenate([rows[0], rows[0], rows[3]])
    assert quantile(rows, 0.9)(weights)[0] == np.quantile(drawn, 0.9, method="inverted_cdf")


def test_a_ratio_is_over_all_tokens_and_not_a_mean_of_means():
    found = Resampler(4).interval(ratio([1, 10, 0, 0], [1, 100, 50, 50]))
    assert found.value == pytest.approx(11 / 201) and found.low <= found.value <= found.high


def test_equal_seeds_draw_equally():
    values = np.random.default_rng(0).random(9)
    first, second, other = (Resampler(9, seed=seed).interval(mean(values)) for seed in (1, 1, 2))
    assert first == second != other


def test_few_rows_have_no_interval():
    assert Resampler(3).interval(mean([1, 2, 3])) == Interval(2.0)
    assert Resampler(3).share([True, True, False]).low is None


@pytest.mark.parametrize(("hits", "bounds"), [([False] * 30, (0, 0.1157)), ([True] * 30, (0.8843, 1))])
def test_never_and_always_are_bounded(hits, bounds):
    """Clopper and Pearson: of 30 without a hit, at most 11.57 % may have one."""
    found = Resampler(30).share(hits)
    assert (found.low, found.high) == (pytest.approx(bounds[0], abs=1e-4), pytest.approx(bounds[1], abs=1e-4))


def test_what_is_no_number_is_null():
    assert Interval(math.nan).to_dict() == {"value": None, "low": None, "high": None}
    assert Resampler(5).interval(lambda weights: np.full(len(weights), np.nan)).low is None
