"""Exact counts of a mix, and that over epochs no row is lost or favoured."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.data import DataConfig, DataSource, MixUntil, SourceConfig
from trainer.config.errors import UserError
from trainer.data.ordering.mixing import MixPlan, plan_mix
from trainer.data.ordering.permutation import FIRST_SOURCE


def source(weight: float | None = None, epochs: float | None = None) -> SourceConfig:
    return SourceConfig(source=DataSource.pydocs, weight=weight, epochs=epochs)


def weighted(sizes: list[int], weights: list[float], until: str = "all", temperature: float = 1.0) -> MixPlan:
    return plan_mix(sizes, [source(weight=w) for w in weights], until=MixUntil(until), temperature=temperature)


def passed(sizes: list[int], epochs: list[float | None]) -> MixPlan:
    return plan_mix(sizes, [source(epochs=e) for e in epochs], until=MixUntil.all)


def rows(plan: MixPlan, epoch: int, *, seed: int = 3, shuffle: bool = True) -> list[int]:
    return plan.rows(epoch, seed=seed, shuffle=shuffle).tolist()


def source_of(plan: MixPlan, row: int) -> int:
    return int(np.searchsorted(np.cumsum(plan.sizes), row, side="right"))


# ---- how many


def test_nothing_given_takes_every_row_once() -> None:
    plan = passed([4, 7, 1], [None] * 3)
    assert plan.counts(0) == plan.counts(9) == [4, 7, 1]
    assert sorted(rows(plan, 5)) == list(range(12))


@pytest.mark.parametrize(
    ("sizes", "weights", "until", "counts"),
    [
        ([100, 100], [3, 1], "all", [300, 100]),  # the lighter one is seen whole, the heavier three times
        ([100, 100], [3, 1], "first", [100, 33]),
        ([100, 300], [1, 1], "all", [300, 300]),
        ([100, 300], [1, 1], "first", [100, 100]),
        ([10, 10, 10], [0.1, 0.2, 0.7], "first", [1, 3, 10]),  # quotas 1.43, 2.86, 10: 14.3 rows, the 4th to 0.86
        ([10, 1000], [1000, 0.001], "first", [10, 1]),  # a share of 1e-5 rows is one row: no source is dropped
        ([5], [7], "all", [5]),
    ],
)
def test_counts_of_weights(sizes: list[int], weights: list[float], until: str, counts: list[int]) -> None:
    plan = weighted(sizes, weights, until)
    assert plan.counts(0) == plan.counts(7) == counts
    assert dict(sorted(Counter(source_of(plan, row) for row in rows(plan, 7)).items())) == dict(enumerate(counts))


def test_temperature_brings_shares_together() -> None:
    # Square roots of 100 and 6400 are 1 to 8: the larger source ends after 6400 rows, 800 of the smaller beside them.
    plan = plan_mix([100, 6400], [source()] * 2, until=MixUntil.all, temperature=2)
    assert plan.counts(0) == [800, 6400]
    assert weighted([60, 60], [1, 16], "first", temperature=4).counts(0) == [30, 60]
    assert weighted([60, 60], [1, 16], "first", temperature=0.5).counts(0) == [1, 60]  # 1 to 256


def test_a_fraction_of_a_source_adds_up() -> None:
    plan = passed([10, 5], [0.1, None])
    assert [plan.counts(epoch) for epoch in range(3)] == [[1, 5]] * 3  # 0.1 is a tenth, not 0.1000000000000000055
    halves = passed([5, 5], [0.5, 2])
    assert [halves.counts(epoch) for epoch in range(4)] == [[3, 10], [2, 10]] * 2
    assert sorted(row for epoch in range(2) for row in rows(halves, epoch) if row < 5) == list(range(5))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 20)), min_size=1, max_size=5),
    st.sampled_from(list(MixUntil)),
    st.sampled_from([1.0, 0.7, 3.0]),
)
def test_counts_follow_weights(given_sources: list, until: MixUntil, temperature: float) -> None:
    sizes, weights = map(list, zip(*given_sources, strict=True))
    counts = weighted(sizes, weights, until.value, temperature).counts(0)
    powers = [weight ** (1 / temperature) for weight in weights]
    scale = (min if until is MixUntil.first else max)(n / p for n, p in zip(sizes, powers, strict=True))
    for size, power, count in zip(sizes, powers, counts, strict=True):
        # Less than a row from the share, unless that is less than a row. 1e-9: weights count to twelve digits.
        assert abs(count - power * scale) < 1 + 1e-9 * count or (count == 1 and power * scale < 1)
        assert count <= size if until is MixUntil.first else count >= size
    assert any(count == size for size, count in zip(sizes, counts, strict=True))


# ---- which


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.5, 2.7])), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_no_row_twice_before_all_of_its_source_once(given_sources: list, seed: int, shuffle: bool) -> None:
    sizes, epochs = map(list, zip(*given_sources, strict=True))
    plan, seen = passed(sizes, epochs), Counter()
    for epoch in range(12):
        seen.update(rows(plan, epoch, seed=seed, shuffle=shuffle))
        for index, size in enumerate(sizes):
            first = sum(sizes[:index])
            times = [seen[row] for row in range(first, first + size)]
            assert max(times) - min(times) <= 1
            assert 0 <= sum(times) - (epoch + 1) * size * Fraction(str(epochs[index])) < 1


def test_cycles_differ_and_epochs_differ() -> None:
    plan = weighted([40, 10], [1, 1], "first")  # 10 of 40 rows an epoch: a cycle is four epochs
    cycles = [[row for epoch in range(4 * k, 4 * k + 4) for row in rows(plan, epoch) if row < 40] for k in range(2)]
    assert all(sorted(cycle) == list(range(40)) for cycle in cycles)
    assert set(cycles[0][:10]) != set(cycles[1][:10])
    assert rows(plan, 0) != rows(plan, 0, seed=4)
    assert set(rows(plan, 0)) != set(rows(plan, 0, seed=4))


def test_equal_sources_are_drawn_apart() -> None:
    plan = passed([50, 50], [0.5, 0.5])
    taken = rows(plan, 0)
    assert {row for row in taken if row < 50} != {row - 50 for row in taken if row >= 50}


def test_an_epoch_needs_no_epoch_before() -> None:
    plan = passed([9, 4, 30], [1.5, None, 0.2])
    forward = [rows(plan, epoch) for epoch in range(6)]
    assert [rows(passed([9, 4, 30], [1.5, None, 0.2]), epoch) for epoch in reversed(range(6))] == forward[::-1]


def test_mixed_order_is_pinned() -> None:
    # A change of this order would make every mixed run that is resumed under a newer version read other rows.
    plan = passed([6, 4], [0.5, None])
    cycle = np.random.Philox(key=[3, 0], counter=[0, 0, FIRST_SOURCE, 0]).random_raw(6).argsort()
    together = np.random.Philox(key=[3, 0]).random_raw(7).argsort()
    assert rows(plan, 0) == np.concatenate([cycle[:3], range(6, 10)])[together].tolist()
    assert rows(plan, 0) == [9, 2, 8, 3, 7, 6, 4]


def test_in_their_own_order_sources_interleave() -> None:
    assert rows(weighted([6, 3], [2, 1]), 0, shuffle=False) == [0, 6, 1, 2, 7, 3, 4, 8, 5]
    assert rows(passed([3], [None]), 1, shuffle=False) == [0, 1, 2]
    quarter = passed([6], [0.5])
    assert [rows(quarter, epoch, shuffle=False) for epoch in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_interleaving_keeps_every_prefix_in_proportion(sizes: list[int]) -> None:
    plan = passed(sizes, [None] * len(sizes))
    taken = rows(plan, 0, shuffle=False)
    assert [[row for row in taken if source_of(plan, row) == i] for i in range(len(sizes))] == [
        list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))
    ]
    counts = np.cumsum([[source_of(plan, row) == i for i in range(len(sizes))] for row in taken], axis=0)
    expected = np.outer(np.arange(1, len(taken) + 1), sizes) / len(taken)
    # Half a row for the source itself, and half a row for each source by which the number of rows so far is off.
    assert np.abs(counts - expected).max() <= 0.5 + len(sizes) / 2


# ---- what does not fit


def test_a_source_without_rows() -> None:
    with pytest.raises(UserError, match="path=pydocs has no rows"):
        passed([3, 0], [None, None])


def test_weights_far_from_the_sizes() -> None:
    with pytest.raises(UserError, match=r"would have 1e\+13 rows; give weights"):
        weighted([10**7, 10**7], [1, 1e6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix_temperature": 2.0}, "mix_temperature=2.0 has no effect without data.mix"),
        ({"mix_temperature": 2.0, "mix": [source(epochs=2), source()]}, "mix_temperature=2.0 has no effect"),
        ({"mix_until": MixUntil.first}, "mix_until=first has no effect without weights"),
        ({"mix_until": MixUntil.first, "mix": [source(), source()]}, "mix_until=first has no effect without weights"),
    ],
)
def test_settings_without_effect(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(source=DataSource.file, **({"path": "."} if "mix" not in changes else {}), **changes)
