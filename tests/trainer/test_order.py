"""The order of a run, mixed, packed and by length: a function of (seed, epoch), and the steps that are cut from it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.data import DataConfig, DataSource, SourceConfig
from trainer.data.loader import BatchPlan
from trainer.data.ordering.order import KEPT_EPOCHS, RunOrder

ORDERS = {
    "plain": {},
    "packed": {"packing": True},
    "by length": {"group_by_length": True},
    "in order": {"shuffle": False},
    "packed in order": {"packing": True, "shuffle": False},
}
MIXES = {
    "one": [{}],
    "two": [{}, {}],
    "weights": [{"weight": 1.0}, {"weight": 2.5}, {"weight": 0.3}],
    "epochs": [{"epochs": 0.3}, {}, {"epochs": 1.7}],
}


def settings_of(kind: str = "plain", mix: str = "one") -> DataConfig:
    sources = [SourceConfig(source=DataSource.pydocs, **keys) for keys in MIXES[mix]]
    return DataConfig(source=DataSource.file, max_seq_len=64, mix=sources, **ORDERS[kind])


def lengths_of(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(1, 65, num_rows)


def order(
    sizes: list[int], kind: str = "plain", mix: str = "one", *, seed: int = 3, rows_per_step: int = 4
) -> RunOrder:
    return RunOrder(sizes, lengths_of(sum(sizes)), settings_of(kind, mix), seed, rows_per_step)


def plan(
    of: RunOrder, *, world: int = 1, accum: int = 1, epochs: float = 1.0, max_steps: int | None = None
) -> BatchPlan:
    batch = of.rows_per_step // (world * accum)
    return BatchPlan(of.num_rows, batch, accum, world, of.seed, epochs, max_steps, of)


def steps(batch_plan: BatchPlan) -> list[list[list[int]]]:
    return [batch_plan.units(step) for step in range(batch_plan.num_steps)]


def flat(units: list[list[int]]) -> list[int]:
    return [row for unit in units for row in unit]


orders = st.builds(
    lambda mix, sizes, kind, seed, rows: order(sizes[: len(MIXES[mix])], kind, mix, seed=seed, rows_per_step=rows),
    st.sampled_from(list(MIXES)),
    st.lists(st.integers(1, 30), min_size=3, max_size=3),
    st.sampled_from(list(ORDERS)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 4, 12]),
)


# ---- epochs


def test_nothing_set_is_the_order_without_any() -> None:
    of = RunOrder([10], lengths_of(10), DataConfig(), 3, 4)
    plain = BatchPlan(10, 4, 1, 1, 3, epochs=2.7)
    assert steps(plan(of, epochs=2.7)) == steps(plain)
    # Checked by hand: the ranks of np.random.Philox(key=[3, 0]).random_raw(10); as in test_loader.py.
    assert of.epoch(0).rows.tolist() == [6, 1, 8, 5, 2, 7, 9, 4, 3, 0]


def test_sources_without_weights_are_as_one_file() -> None:
    assert order([4, 6], mix="two").epoch(1).rows.tolist() == order([10]).epoch(1).rows.tolist()


@settings(max_examples=60, deadline=None)
@given(orders)
def test_units_hold_what_the_mix_takes(of: RunOrder) -> None:
    lengths = lengths_of(of.num_rows)
    seen, plain = Counter(), Counter()
    bare = RunOrder(
        of._mix.sizes, lengths, DataConfig(source=DataSource.file, mix=of._config.mix), of.seed, of.rows_per_step
    )
    for epoch in range(4):
        units = of.epoch(epoch)
        assert len(units) == of.num_units(epoch)
        assert all(lengths[units[index]].sum() <= 64 for index in range(len(units)))
        assert of._config.packing or all(len(units[index]) == 1 for index in range(len(units)))
        seen.update(units.rows.tolist())
        plain.update(bare.epoch(epoch).rows.tolist())
        assert not of._config.shuffle or seen == plain  # which rows does not depend on how they are laid out


@pytest.mark.parametrize("kind", ["plain", "packed", "by length"])
def test_epochs_and_seeds_differ(kind: str) -> None:
    one, other = order([40], kind), order([40], kind, seed=4)
    drawn = [one.epoch(0), one.epoch(1), other.epoch(0)]
    assert len({tuple(map(tuple, [units[index] for index in range(len(units))])) for units in drawn}) == 3


def test_packed_units_are_not_in_the_order_of_fullness() -> None:
    of = order([2000], "packed")
    tokens = np.add.reduceat(lengths_of(2000)[of.epoch(0).rows], of.epoch(0).starts[:-1])
    rows = np.diff(of.epoch(0).starts)
    for what in (tokens, rows):  # about 1000 units: a correlation with the place has a deviation of 0.03 by chance
        assert abs(np.corrcoef(what, np.arange(len(what)))[0, 1]) < 0.1


def test_packed_in_order_starts_with_the_first_rows() -> None:
    firsts = [min(unit) for unit in map(order([50], "packed in order").epoch(0).__getitem__, range(10))]
    assert firsts[0] == 0 and firsts == sorted(firsts)


def test_memory_is_that_of_a_few_epochs() -> None:
    of = order([10])
    for epoch in range(20):
        of.epoch(epoch)
    assert of._kept.cache_info().currsize == KEPT_EPOCHS
    assert of.epoch(19) is of.epoch(19)


def test_capacity_of_pairs() -> None:
    lengths = np.full(6, 100)  # pairs of documents of up to 64 tokens each
    of = RunOrder([6], lengths, settings_of("packed"), 0, 1, capacity=128)
    assert of.num_units(0) == 6 and of.efficiency() == 100 / 128
    with pytest.raises(ValueError, match="has 100 tokens; give rows of 1 to capacity=64"):
        RunOrder([6], lengths, settings_of("packed"), 0, 1).epoch(0)


# ---- steps


@settings(max_examples=80, deadline=None)
@given(orders, st.floats(0.1, 3.5), st.none() | st.integers(1, 9))
def test_steps_are_the_epochs_cut_in_pieces(of: RunOrder, epochs: float, max_steps: int | None) -> None:
    taken = [unit for units in steps(plan(of, epochs=epochs, max_steps=max_steps)) for unit in units]
    expected, epoch = [], 0
    while len(expected) < len(taken):
        expected += [of.epoch(epoch)[index] for index in range(of.num_units(epoch))]
        epoch += 1
    assert taken == expected[: len(taken)]
    if max_steps is not None:
        assert len(taken) == max_steps * of.rows_per_step
    else:
        whole, part = sum(of.num_units(each) for each in range(int(epochs))), epochs % 1 * of.num_units(int(epochs))
        assert abs(len(taken) - max(1, whole + part)) <= 0.5 + 1e-9  # rounded to whole units, one at least


@settings(max_examples=60, deadline=None)
@given(orders, st.floats(0.5, 2.5))
def test_ranks_share_what_one_process_takes(of: RunOrder, epochs: float) -> None:
    one = plan(of, epochs=epochs)
    for world, accum in ((1, 4), (2, 2), (4, 1), (2, 1)):
        if of.rows_per_step % (world * accum):
            continue
        many = plan(of, world=world, accum=accum, epochs=epochs)
        assert many.num_steps == one.num_steps
        for step in range(one.num_steps):
            assert many.row_ids(step) == one.row_ids(step) == flat(one.units(step))
            shares = [many.micro_batches(step, rank) for rank in range(world)]
            assert [len(share) for share in shares] == [accum] * world
            dealt = flat([share[micro] for micro in range(accum) for share in shares])
            assert dealt == one.row_ids(step)


@settings(max_examples=40, deadline=None)
@given(orders, st.integers(0, 10**6))
def test_a_step_needs_no_step_before(of: RunOrder, draw: int) -> None:
    """What a resumed run does: a new object is asked for a late step first."""
    forward = steps(plan(of, epochs=3.3))
    step = draw % len(forward)
    fresh = RunOrder(of._mix.sizes, lengths_of(of.num_rows), of._config, of.seed, of.rows_per_step)
    assert plan(fresh, max_steps=len(forward)).row_ids(step)[: len(flat(forward[step]))] == flat(forward[step])
    assert steps(plan(fresh, epochs=3.3)) == forward


def test_a_fraction_of_an_epoch_is_whole_units() -> None:
    of = order([40], "packed")
    first, second = of.num_units(0), of.num_units(1)
    assert plan(of, epochs=1.5).total_units == round(first + second / 2)
    assert plan(of, epochs=2).total_units == first + second
    assert plan(of, epochs=1e-9).total_units == 1


def test_epochs_without_rows_are_passed_over() -> None:
    of = RunOrder(
        [1],
        np.array([5]),
        DataConfig(source=DataSource.file, mix=[SourceConfig(source=DataSource.pydocs, epochs=0.25)]),
        0,
        1,
    )
    assert [of.num_units(epoch) for epoch in range(9)] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert [of.place(position) for position in range(3)] == [(0, 0), (4, 0), (8, 0)]
    assert steps(plan(of, max_steps=3)) == [[[0]]] * 3


def test_batches_of_similar_length_are_steps_in_every_epoch() -> None:
    """An epoch of 202 rows leaves 2 over in steps of 8; the next one fills their step up before its own batches."""
    of = order([202], "by length", rows_per_step=8)
    lengths = lengths_of(202)
    spans = [np.ptp(lengths[p]) for p in map(plan(of, epochs=4).row_ids, range(101))]
    mixed = [step for step, span in enumerate(spans) if span > 15]  # a batch is a 25th of lengths 1 to 64
    assert mixed == [25, 50, 75]
    assert max(lengths) in lengths[plan(of).row_ids(0)]  # memory runs out at once or never


@pytest.mark.parametrize("change", [{"num_rows": 11}, {"seed": 4}, {"batch_size": 3}])
def test_an_order_of_another_plan(change: dict[str, int]) -> None:
    keys = dict(num_rows=10, batch_size=4, grad_accum_steps=1, world_size=1, seed=3, order=order([10]))
    assert BatchPlan(**keys).num_steps == 3
    with pytest.raises(ValueError, match=r"\(num_rows, seed, rows_per_step\)=.*, and of the order \(10, 3, 4\)"):
        BatchPlan(**{**keys, **change})


@pytest.mark.parametrize(("sizes", "num_lengths"), [([10], 9), ([5, 5], 10)])
def test_numbers_that_do_not_fit(sizes: list[int], num_lengths: int) -> None:
    with pytest.raises(ValueError, match=f"1 sources, {num_lengths} lengths; give a size a source"):
        RunOrder(sizes, lengths_of(num_lengths), settings_of(), 0, 1)
