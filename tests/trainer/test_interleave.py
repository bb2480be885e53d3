"""Which source gives the next row: shares, whole passes, and going on from any row."""

import json
from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.data import DataConfig, DataSource, MixUntil, SourceConfig
from trainer.config.errors import UserError
from trainer.data.reading.readers import ListReader, RawRow
from trainer.data.streams.interleave import HeldOut, Interleave


def reader(name: str, size: int) -> ListReader:
    return ListReader(name, [{"text": f"{name}{row}"} for row in range(size)])


def mixed(sizes: list[int], until: str = "all", skip: dict[int, HeldOut] | None = None, **columns: list) -> Interleave:
    """A stream of sources a, b, ... with the settings of each in `columns`."""
    # `-` passes for a path that exists; the readers are given
    sources = [
        SourceConfig(source=DataSource.pydocs, **{name: values[index] for name, values in columns.items()})
        for index in range(len(sizes))
    ]
    config = DataConfig(source=DataSource.file, streaming=True, mix=sources, mix_until=MixUntil(until))
    return Interleave([reader("abcdef"[index], size) for index, size in enumerate(sizes)], config, skip=skip)


def epoch(stream: Interleave) -> list[str]:
    """The rows of one epoch, `a1 a2 b1`."""
    rows = takewhile(lambda row: row is not None, iter(stream.next_row, "never"))
    return [row.where.replace(":", "") for _, row in rows]


def test_sources_without_weights_follow_one_another() -> None:
    stream = mixed([3, 2])
    assert [epoch(stream) for _ in range(2)] == [["a1", "a2", "a3", "b1", "b2"]] * 2


def test_passes_of_an_epoch() -> None:
    stream = mixed([2, 3], epochs=[2, None])
    assert epoch(stream) == ["a1", "a2", "a1", "a2", "b1", "b2", "b3"]


@pytest.mark.parametrize(("share", "epochs"), [(0.1, 10), (0.5, 2), (0.4, 5), (1 / 3, 3), (0.75, 4), (1.4, 5)])
@pytest.mark.parametrize("size", [1, 7, 20])
def test_a_fraction_of_a_pass_takes_every_row_as_often(share: float, epochs: int, size: int) -> None:
    stream = mixed([size], epochs=[share])
    taken = [epoch(stream) for _ in range(epochs)]
    times = Counter(row for rows in taken for row in rows)
    assert times == {f"a{row + 1}": round(share * epochs) for row in range(size)}
    # within one row of the share, in every epoch, and spread: not the first rows only
    assert all(abs(len(rows) - share * size) < 1.001 for rows in taken)


def test_weights() -> None:
    stream = mixed([100, 100], weight=[2, 1], until="first")
    rows = epoch(stream)
    assert "".join(row[0] for row in rows[:9]) == "abaabaaba"
    assert [row for row in rows if row[0] == "a"] == [f"a{row + 1}" for row in range(100)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    until=st.sampled_from(["all", "first"]),
)
def test_weights_are_kept_at_every_moment(sizes: list[int], weights: list[float], until: str) -> None:
    stream = mixed(sizes, until, weight=weights[: len(sizes)])
    total = sum(weights[: len(sizes)])
    for _ in range(2):
        rows = epoch(stream)
        taken: Counter[str] = Counter()
        for now, row in enumerate(rows, start=1):
            taken[row[0]] += 1
            for name, weight in zip("abcd", weights[: len(sizes)], strict=False):
                # less than a row ahead; n sources can let one fall at most n - 1 behind
                assert -1 < weight / total * now - taken[name] < max(1, len(sizes) - 1) or len(sizes) == 1
        times = Counter(rows)
        seen = [[times[f"{name}{row + 1}"] for row in range(size)] for name, size in zip("abcd", sizes, strict=False)]
        # each source in whole passes and a begun one
        assert all(max(each) - min(each) <= 1 and sorted(each, reverse=True) == each for each in seen)
        whole = [min(each) for each in seen]
        assert min(whole) >= 1 if until == "all" else max(whole) == 1


def test_all_ends_with_the_last_source_that_was_seen_whole() -> None:
    rows = epoch(mixed([2, 6], weight=[1, 1]))
    assert Counter(rows) == {"a1": 3, "a2": 3, **{f"b{row + 1}": 1 for row in range(6)}} | {"a1": 4}


def test_first_ends_with_the_first_source() -> None:
    stream = mixed([2, 6], "first", weight=[1, 1])
    assert [epoch(stream) for _ in range(2)] == [["a1", "b1", "a2", "b2"]] * 2


def test_temperature_brings_shares_closer() -> None:
    sources = [SourceConfig(source=DataSource.pydocs, weight=weight) for weight in (9, 1)]
    until = {"mix_temperature": 2.0, "mix_until": MixUntil.first}
    config = DataConfig(source=DataSource.file, streaming=True, mix=sources, **until)
    rows = epoch(Interleave([reader("a", 30), reader("b", 30)], config))
    # the square roots of 9 and 1
    assert Counter(row[0] for row in rows[:40]) == {"a": 30, "b": 10}


def test_temperature_needs_weights() -> None:
    sources = [SourceConfig(source=DataSource.pydocs)] * 2
    config = DataConfig(source=DataSource.file, streaming=True, mix=sources, mix_temperature=2.0)
    with pytest.raises(UserError, match=r"data.mix_temperature=2.0 needs the sizes .* data.streaming=false"):
        Interleave([reader("a", 3), reader("b", 3)], config)


def test_max_rows_and_held_out_rows() -> None:
    behind = list(reader("a", 9).raw())[1].behind
    stream = mixed([9, 9], skip={0: HeldOut(behind, 2)}, max_rows=[5, 2])
    assert [epoch(stream) for _ in range(2)] == [["a3", "a4", "a5", "b1", "b2"]] * 2
    with pytest.raises(UserError, match="a: max_rows=2 rows are all held out"):
        mixed([9], skip={0: HeldOut(behind, 2)}, max_rows=[2])


@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_source_without_rows(weight: float | None) -> None:
    stream = mixed([2, 0], weight=[weight, weight])
    with pytest.raises(UserError, match="^b holds no rows; give at least one"):
        epoch(stream)
    behind = list(reader("a", 3).raw())[-1].behind
    with pytest.raises(UserError, match="^a holds no rows, behind those held out; give"):
        epoch(mixed([3], skip={0: HeldOut(behind, 3)}))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    weights=st.none() | st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    epochs=st.lists(st.floats(0.1, 2.5), min_size=3, max_size=3),
    until=st.sampled_from(["all", "first"]),
    limit=st.none() | st.integers(1, 6),
    stop=st.integers(0, 80),
)
def test_goes_on_from_any_row(
    sizes: list[int],
    weights: list[float] | None,
    epochs: list[float],
    until: str,
    limit: int | None,
    stop: int,
) -> None:
    shares = {"weight": weights[: len(sizes)]} if weights else {"epochs": epochs[: len(sizes)]}
    shares["max_rows"] = [limit] * len(sizes)

    def rows(stream: Interleave, number: int) -> list[tuple[int, RawRow] | None]:
        return [stream.next_row() for _ in range(number)]

    until = until if weights else "all"
    whole = rows(mixed(sizes, until, **shares), stop + 40)
    first = mixed(sizes, until, **shares)
    assert rows(first, stop) == whole[:stop]
    state = json.loads(json.dumps(first.state()))
    second = mixed(sizes, until, **shares)
    second.next_row()
    second.restore(state)
    assert rows(second, 40) == whole[stop:]


def test_a_mix_that_changed_is_refused() -> None:
    with pytest.raises(UserError, match="data.mix has 2 sources, and this run had 1"):
        mixed([1, 2]).restore(mixed([1]).state())
