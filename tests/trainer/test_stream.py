"""Streams: every row once a pass over all ranks, and a resumed run takes what the uninterrupted one would have."""

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.letters import MAX_SEQ_LEN, Letters, Texts, hash_of, texts
from trainer.config.data import DataConfig, DataSource, MixUntil, OnBadRow, SourceConfig
from trainer.config.errors import UserError
from trainer.data.loader import row_len
from trainer.data.opening import HOPELESS_ROWS
from trainer.data.reading.raw_rows import RawRow
from trainer.data.reading.readers import open_reader
from trainer.data.rows import Tokenized, TokenRow
from trainer.data.streams.interleave import HeldOut, Interleave
from trainer.data.streams.stream import StreamSteps
from trainer.data.streams.windows import Window, Windows
from trainer.data.tokenizer_pool import TokenizerPool


def readers_of(sources: list[list[str]]) -> list[Texts]:
    return [Texts("abcdef"[index], rows) for index, rows in enumerate(sources)]


def config_of(num_sources: int, *, weights: list[float] | None = None, **settings: Any) -> DataConfig:
    of_weights = weights or [None] * num_sources
    mix = [SourceConfig(source=DataSource.pydocs, weight=weight) for weight in of_weights[:num_sources]]  # not read
    defaults = {"on_bad_row": OnBadRow.skip, "max_seq_len": MAX_SEQ_LEN, "shuffle_buffer": 8, "streaming": True}
    return DataConfig(source=DataSource.file, mix=mix, **{**defaults, **settings})


def steps_of(sources: list[list[str]], config: DataConfig, **settings: Any) -> StreamSteps:
    readers = readers_of(sources)
    run = dict(seed=3, rank=0, world_size=1, batch_size=2, grad_accum_steps=2, max_steps=1000)
    return StreamSteps(readers, list(map(Letters, readers)), config, **{**run, **settings})


def take(steps: StreamSteps, first: int, end: int) -> list[list[list[TokenRow]]]:
    return [steps.micro_batches(step) for step in range(first, end)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def windows_of(sources: list[list[str]], config: DataConfig, *, rank: int, world_size: int) -> Iterator[Window]:
    readers = readers_of(sources)
    windows = Windows(
        Interleave(readers, config),
        TokenizerPool(list(map(Letters, readers)), num_workers=0),
        config,
        seed=3,
        rank=rank,
        world_size=world_size,
        units_per_step=4,
        held_out=frozenset(),
    )
    return iter(windows.next, None)


# ---- every row of a pass once

SOURCES = st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["", "btx", "xxxb"])), min_size=1, max_size=3)
ORDERS = st.sampled_from([{}, {"packing": True}, {"group_by_length": True}, {"shuffle": False}])
WEIGHTS = st.none() | st.lists(st.floats(0.2, 5), min_size=3, max_size=3)


def drawn(sizes: list[tuple[int, str]]) -> list[list[str]]:
    sources = [texts("abcdef"[index], size, kinds) for index, (size, kinds) in enumerate(sizes)]
    sources[0][0] = "good"  # one at least
    return sources


@settings(max_examples=80, deadline=None)
@given(
    sizes=SOURCES,
    weights=WEIGHTS,
    order=ORDERS,
    window=st.integers(1, 40),
    world_size=st.integers(1, 3),
    until=st.sampled_from(list(MixUntil)),
)
def test_every_row_of_a_pass_once_over_ranks(
    sizes: list[tuple[int, str]],
    weights: list[float] | None,
    order: dict[str, Any],
    window: int,
    world_size: int,
    until: MixUntil,
) -> None:
    sources = drawn(sizes)
    order = {**order, "mix_until": until} if weights else order
    config = config_of(len(sources), weights=weights, shuffle_buffer=window, **order)
    mix = Interleave(readers_of(sources), config)
    passes = [Counter(), Counter(), Counter()]
    while mix.epoch < 3:
        epoch, taken = mix.epoch, mix.next_row()
        if taken is not None and not (row := taken[1]).raw["text"].startswith("bad"):
            passes[epoch][row.where] += 2 if row.raw["text"].startswith("two") else 1
    taken = [Counter(), Counter(), Counter()]
    shares = []
    for rank in range(world_size):
        for each in windows_of(sources, config, rank=rank, world_size=world_size):
            epoch = each.start["mix"]["epoch"]
            if epoch > 2 + world_size:  # by then every rank had a window with a row
                break
            shares += [each] if epoch < 3 else []
            for unit in each.units if epoch < 3 else []:
                taken[epoch].update(row["origin"] for row in unit)
                assert sum(map(row_len, unit)) <= MAX_SEQ_LEN
    assert taken == passes
    if world_size == 1:
        assert all(len(each.units) <= 2 * window for each in shares)


def test_ranks_take_equal_shares_though_every_epoch_ends_with_a_short_window() -> None:
    # windows of 8 and 1 rows: a rank that always had the second would see its row eight times as often
    config = config_of(1, shuffle_buffer=8)
    seen = Counter()
    for rank in range(2):
        with closing(steps_of([texts("a", 9)], config, rank=rank, world_size=2)) as steps:
            seen.update(row["origin"] for step in take(steps, 0, 45) for micro in step for row in micro)
    assert max(seen.values()) - min(seen.values()) <= 2
    assert sum(seen.values()) == 45 * 4 * 2


def test_a_rank_does_not_tokenize_the_rows_of_others() -> None:
    config = config_of(1, shuffle_buffer=5)
    tokenized = []

    class Noting(Letters):
        def __call__(self, raw: RawRow) -> Tokenized:
            tokenized.append(raw.where)
            return super().__call__(raw)

    readers = readers_of([texts("a", 20)])
    run = dict(seed=0, rank=1, world_size=2, batch_size=5, grad_accum_steps=1, max_steps=2)
    with closing(StreamSteps(readers, [Noting(readers[0])], config, **run)) as steps:
        take(steps, 0, 2)
    assert tokenized == [f"a:{row}" for row in [*range(6, 11), *range(16, 21)]]


def test_windows_are_shuffled_each_epoch_anew() -> None:
    with closing(steps_of([texts("a", 16)], config_of(1, shuffle_buffer=100))) as steps:
        order = [row["origin"] for step in take(steps, 0, 8) for micro in step for row in micro]
    assert sorted(order[:16]) == sorted(order[16:]) != order[:16] != order[16:]


def test_order_of_the_source_without_shuffle() -> None:
    with closing(steps_of([texts("a", 6)], config_of(1, shuffle=False, shuffle_buffer=4))) as steps:
        order = [row["origin"] for step in take(steps, 0, 3) for micro in step for row in micro]
    assert order == [f"a:{row}" for row in [1, 2, 3, 4, 5, 6] * 2]


def test_steps_are_of_one_length_though_windows_end_within_a_step() -> None:
    rows = ["short", "as long as it gets"] * 33  # 16.5 steps an epoch
    with closing(steps_of([rows], config_of(1, group_by_length=True, shuffle_buffer=66))) as steps:
        taken = take(steps, 0, 132)
    uneven = [step for step in taken if len({row_len(row) for micro in step for row in micro}) > 1]
    # in each of eight windows the step in which it ends, and the one between the short rows and the long ones
    assert len(uneven) <= 16


# ---- resume


@settings(max_examples=60, deadline=None)
@given(
    sizes=SOURCES,
    weights=WEIGHTS,
    order=ORDERS,
    window=st.integers(1, 40),
    rank=st.integers(0, 2),
    world_size=st.integers(1, 3),
    part=st.floats(0, 1),
)
def test_resume_takes_what_the_uninterrupted_run_takes(
    sizes: list[tuple[int, str]],
    weights: list[float] | None,
    order: dict[str, Any],
    window: int,
    rank: int,
    world_size: int,
    part: float,
) -> None:
    sources = drawn(sizes)
    config = config_of(len(sources), weights=weights, shuffle_buffer=window, **order)
    run = dict(rank=rank % world_size, world_size=world_size)
    rows = sum(map(len, sources))
    last = 3 * rows // (4 * world_size) + 2  # three passes, where nothing is left out
    stop = round(part * last)
    whole = take(steps_of(sources, config, **run), 0, last + 3)
    first = steps_of(sources, config, **run)
    assert take(first, 0, stop) == whole[:stop]
    state = through_json(first.state())
    second = steps_of(sources, config, **run)
    second.sample(3)
    second.restore(state, stop)
    assert through_json(second.state()) == state
    assert take(second, stop, last + 3) == whole[stop:]
    assert second.row_ids(last + 2) == [row["origin"] for micro in whole[-1] for row in micro]
    assert second.report.source_rows >= second.report.rows / 2


def test_a_state_is_small() -> None:
    with closing(steps_of([texts("a", 500)], config_of(1, shuffle_buffer=400))) as steps:
        take(steps, 0, 60)
        assert len(json.dumps(steps.state())) < 600


@pytest.mark.parametrize("change", ["word", "shorter", "longer line before"])
def test_a_changed_file_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in texts("a", 40)]
    path.write_text("".join(lines))
    config = config_of(1, shuffle_buffer=10)

    def steps() -> StreamSteps:
        reader = open_reader(SourceConfig(path=str(path)), max_row_bytes=1000)
        run = dict(seed=0, rank=0, world_size=1, batch_size=4, grad_accum_steps=1, max_steps=20)
        return StreamSteps([reader], [Letters(reader)], config, **run)

    first = steps()
    take(first, 0, 4)  # the second window: rows 11 to 20
    state = through_json(first.state())
    lines[12 if change == "word" else 2] = json.dumps({"text": "changed"}) + "\n"
    path.write_text("".join(lines[: 15 if change == "shorter" else None]))
    with pytest.raises(
        UserError,
        match=r"^rows\.jsonl: rows .* changed since the checkpoint; restore them, or start a new run without resume",
    ):
        steps().restore(state, 4)


def test_other_settings_are_refused() -> None:
    first = steps_of([texts("a", 40)], config_of(1))
    take(first, 0, 3)
    with pytest.raises(UserError, match="or settings of data changed"):
        steps_of([texts("a", 40)], config_of(1, packing=True)).restore(first.state(), 3)


def test_steps_come_in_order() -> None:
    with closing(steps_of([texts("a", 40)], config_of(1), max_steps=2)) as steps:
        take(steps, 0, 1)
        with pytest.raises(ValueError, match="step 0: a stream gives its steps in order, now 1 of 2"):
            steps.micro_batches(0)
        take(steps, 1, 2)
        with pytest.raises(ValueError, match="step 2"):
            steps.micro_batches(2)
        with pytest.raises(ValueError, match="step 0: a stream knows the rows of its newest step, 1"):
            steps.row_ids(0)


# ---- what is left out


def test_bad_rows_are_listed_once_and_counted_each_time() -> None:
    with closing(steps_of([texts("a", 12, "xbx")], config_of(1, shuffle_buffer=6))) as steps:
        take(steps, 0, 4)  # two passes of 8 good rows
        assert [fault.where for fault in steps.bad_rows] == ["a:2", "a:5", "a:8", "a:11"]
        assert (steps.report.source_rows, steps.report.rows, steps.report.bad) == (24, 16, {"bad": 8})
        state = steps.state()
    with closing(steps_of([texts("a", 12, "xbx")], config_of(1, shuffle_buffer=6))) as steps:
        steps.restore(state, 4)
        assert steps.report.bad == {"bad": 8}


def test_a_bad_row_is_an_error() -> None:
    with closing(steps_of([texts("a", 12, "xxb")], config_of(1, on_bad_row=OnBadRow.error))) as steps:
        with pytest.raises(UserError, match="^a:3: it is bad; data.on_bad_row=skip leaves such rows out"):
            take(steps, 0, 1)
        with pytest.raises(UserError, match="^a:3: it is bad"):
            steps.sample(12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_pass_without_a_good_row_is_an_error(world_size: int) -> None:
    for rank in range(world_size):
        steps = steps_of([texts("a", 20, "b")], config_of(1), rank=rank, world_size=world_size)
        with pytest.raises(
            UserError, match=r"no row to train on .*20 left out \(20 bad\); the first: a:\d+: it is bad"
        ):
            take(steps, 0, 1)


def test_a_hopeless_source_is_given_up_early() -> None:
    steps = steps_of([texts("a", 5 * HOPELESS_ROWS, "b")], config_of(1, shuffle_buffer=10**6))
    with pytest.raises(UserError, match=f"of {HOPELESS_ROWS} so far, 0 are copies of .* {HOPELESS_ROWS} left out"):
        take(steps, 0, 1)


def test_held_out_rows_are_never_taken() -> None:
    rows = texts("a", 10)
    rows[7] = rows[1]
    behind = list(readers_of([rows])[0].raw())[2].behind
    held_out = frozenset(map(hash_of, rows[:3]))
    with closing(steps_of([rows], config_of(1), held_out=held_out, skip={0: HeldOut(behind, 3)})) as steps:
        taken = Counter(row["origin"] for step in take(steps, 0, 6) for micro in step for row in micro)
        assert taken == {f"a:{row}": 4 for row in (4, 5, 6, 7, 9, 10)}
        # the first rows, in their order, and never more than there are
        assert [row["origin"] for row in steps.sample(100)] == [f"a:{row}" for row in (4, 5, 6, 7, 9, 10)]
        assert all(isinstance(row["input_ids"], list) for row in steps.sample(2))
        assert steps.report.held_out == 4


# ---- workers


def test_rows_do_not_depend_on_workers() -> None:
    sources = [texts("a", 300, "xxtb"), texts("b", 70)]
    alone, helped = (
        steps_of(sources, config_of(2, weights=[2.0, 1.0], shuffle_buffer=350, packing=True, num_workers=workers))
        for workers in (0, 2)
    )
    with closing(helped):
        assert take(helped, 0, 30) == take(alone, 0, 30)
        assert through_json(helped.state()) == through_json(alone.state())
        assert helped.report == alone.report
        workers = active_children()
        assert len(workers) == 2
        os.kill(workers[0].pid, signal.SIGKILL)
        # what was under way is tokenized here
        assert take(helped, 30, 200) == take(alone, 30, 200)
    assert not active_children()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_next_window_does_not_spoil_this_one(workers: int) -> None:
    rows = [*texts("a", 8), "bad"]
    with closing(steps_of([rows], config_of(1, on_bad_row=OnBadRow.error, num_workers=workers))) as steps:
        take(steps, 0, 2)
        with pytest.raises(UserError, match="^a:9: it is bad; data.on_bad_row=skip"):
            take(steps, 2, 3)


INTERRUPTED = """
import signal
import sys
from multiprocessing import active_children
from tests.trainer.letters import texts
from tests.trainer.test_stream import config_of, steps_of, take
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    steps = steps_of([texts("a", 2000)], config_of(1, num_workers=1, shuffle_buffer=700))
    steps.micro_batches(0)
    try:
        print(active_children()[0].pid, flush=True)
        sys.stdin.readline()
    except KeyboardInterrupt:
        take(steps, 1, 900)  # of a worker that does not heed the interrupt
        raise RuntimeError("an exception, without close")
"""
KILLED = """
import sys
from multiprocessing import active_children
from tests.trainer.letters import Letters, Texts, texts
from trainer.data.tokenizer_pool import TokenizerPool
if __name__ == "__main__":
    reader = Texts("a", texts("a", 2000))
    pool = TokenizerPool([Letters(reader)], num_workers=1)
    rows = pool.tokenize((0, row) for row in reader.raw())
    next(rows)
    print(active_children()[0].pid, flush=True)
    sys.stdin.readline()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_nothing_is_left_running(tmp_path: Path) -> None:
    pipe, runs = subprocess.PIPE, []
    options = {"env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, "stdin": pipe, "text": True}
    for name, text in (("interrupted", INTERRUPTED), ("killed", KILLED)):
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        command = [sys.executable, str(script)]
        runs.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True, **options))
    workers = [int(run.stdout.readline()) for run in runs]
    assert all(map(is_running, workers))
    os.killpg(runs[0].pid, signal.SIGINT)  # as a terminal sends Ctrl-C: to workers too
    runs[1].kill()
    # they end when nobody has their pipes any more, workers included
    said = [run.communicate()[1] for run in runs]
    assert not any(map(is_running, workers))
    assert said[0].count("Traceback") == 2 and said[0].endswith("RuntimeError: an exception, without close\n")
    assert "Traceback" not in said[1]


# ---- memory, files


@pytest.fixture
def large_jsonl(tmp_path: Path) -> Callable[[int], Path]:
    def write(megabytes: int) -> Path:
        path = tmp_path / f"{megabytes}.jsonl"
        with path.open("w") as file:
            for row in range(megabytes * 100):
                file.write(json.dumps({"text": f"{row:09}" + "x" * 10_000}) + "\n")
        return path

    return write


def test_memory_is_that_of_a_window(large_jsonl: Callable[[int], Path]) -> None:
    def peak(path: Path) -> int:
        reader = open_reader(SourceConfig(path=str(path)), max_row_bytes=1 << 20)
        rows = path.stat().st_size // 10_000
        run = dict(seed=0, rank=0, world_size=1, batch_size=8, grad_accum_steps=1, max_steps=rows // 8)
        with closing(StreamSteps([reader], [Letters(reader)], config_of(1, shuffle_buffer=64), **run)) as steps:
            tracemalloc.start()
            for step in range(steps.num_steps):
                steps.micro_batches(step)
            size = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return size

    small, large = peak(large_jsonl(2)), peak(large_jsonl(50))
    assert large < small + (1 << 20)  # a file's buffer, and what Python keeps


def test_parquet_shards_through_datasets_streaming(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="writes shards")
    import pyarrow as pa

    rows = texts("a", 30)
    for shard in range(3):
        table = pa.table({"text": rows[shard * 10 : shard * 10 + 10]})
        parquet.write_table(table, tmp_path / f"train-0000{shard}-of-00003.parquet", row_group_size=4)
    source = SourceConfig(path=str(tmp_path), source=DataSource.hub)

    def steps() -> StreamSteps:
        reader = open_reader(source, max_row_bytes=1000, streaming=True)
        run = dict(seed=0, rank=0, world_size=1, batch_size=3, grad_accum_steps=1, max_steps=30)
        return StreamSteps([reader], [Letters(reader)], config_of(1, shuffle_buffer=7), **run)

    whole = take(steps(), 0, 30)
    taken = [bytes(row["input_ids"]).decode() for step in whole for micro in step for row in micro]
    assert all(sorted(taken[first : first + 30]) == sorted(rows) for first in (0, 30, 60))
    for stop in (4, 9, 17, 26):
        first, second = steps(), steps()
        take(first, 0, stop)
        second.restore(through_json(first.state()), stop)
        assert take(second, stop, 30) == whole[stop:]


def test_int32_arrays_become_lists() -> None:
    with closing(steps_of([texts("a", 5)], config_of(1))) as steps:
        row = steps.micro_batches(0)[0][0]
    assert type(row["input_ids"]) is list and type(row["input_ids"][0]) is int
    assert not any(isinstance(value, np.ndarray) for value in row.values())


def test_a_sample_of_nothing_says_why() -> None:
    config = config_of(1)
    steps = steps_of([["same"] * 3], config, held_out=frozenset({hash_of("same")}))
    with pytest.raises(UserError, match="of 3 so far, 3 are copies of held-out rows"):
        steps.sample(2)
