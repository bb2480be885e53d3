"""The order of the data as a pure function of (seed, step), and the tensors that rows become."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.loader import BatchPlan, collate, eval_batches, group_by_length


def plan(**changes: object) -> BatchPlan:
    keys = dict(num_rows=10, batch_size=2, grad_accum_steps=2, world_size=1, seed=3)
    return BatchPlan(**{**keys, **changes})


def stream(batch_plan: BatchPlan) -> list[int]:
    return [row for step in range(batch_plan.num_steps) for row in batch_plan.row_ids(step)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 5),
    accum=st.integers(1, 3),
    world=st.integers(1, 3),
    epochs=st.floats(0.1, 3),
    max_steps=st.none() | st.integers(1, 12),
)
def test_every_row_once_an_epoch(
    rows: int, batch: int, accum: int, world: int, epochs: float, max_steps: int | None
) -> None:
    p = BatchPlan(rows, batch, accum, world, 7, epochs, max_steps)
    taken = stream(p)
    assert len(taken) == (max_steps * batch * accum * world if max_steps else max(1, round(epochs * rows)))
    for start in range(0, len(taken), rows):
        part = taken[start : start + rows]
        assert len(set(part)) == len(part)
        assert len(part) < rows or set(part) == set(range(rows))
    for step in range(p.num_steps):
        shares = [p.micro_batches(step, rank) for rank in range(world)]
        assert all(len(share) == accum and max(map(len, share)) <= batch for share in shares)
        assert sorted(row for share in shares for micro in share for row in micro) == sorted(p.row_ids(step))


def test_order_needs_no_state() -> None:
    steps = plan(epochs=3).num_steps
    forward = [plan(epochs=3).row_ids(step) for step in range(steps)]
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    # Asked for backwards, with other global seeds, from new objects: what a resumed run does.
    assert [plan(epochs=3).row_ids(step) for step in reversed(range(steps))] == forward[::-1]


def test_order_depends_on_seed_and_epoch() -> None:
    rows = stream(plan(num_rows=50, epochs=2))
    assert rows[:50] != rows[50:]
    assert rows != stream(plan(num_rows=50, epochs=2, seed=4))
    assert rows[:50] != list(range(50))


def test_order_is_pinned() -> None:
    # A change of this order would make every run that is resumed under a newer version read other rows.
    # Checked by hand: the ranks of np.random.Philox(key=[3, 0]).random_raw(10).
    assert stream(plan()) == [6, 1, 8, 5, 2, 7, 9, 4, 3, 0]


def test_short_last_step() -> None:
    p = plan(num_rows=9, world_size=2, epochs=1)  # steps of 8 rows: one full, one with a single row
    assert p.num_steps == 2
    assert [len(p.row_ids(step)) for step in range(2)] == [8, 1]
    assert p.micro_batches(1, 0) == [p.row_ids(1), []]
    assert p.micro_batches(1, 1) == [[], []]


def test_short_last_step_is_shared_out() -> None:
    p = plan(num_rows=12, world_size=2, epochs=1)  # the second step has four of eight rows
    rows = p.row_ids(1)
    # Both ranks work in the first micro-batch, before either gets a second.
    assert [p.micro_batches(1, rank) for rank in range(2)] == [[rows[:2], []], [rows[2:], []]]


def test_max_steps_are_full_and_start_over() -> None:
    p = plan(num_rows=3, max_steps=2, epochs=0.1)
    assert [len(p.row_ids(step)) for step in range(p.num_steps)] == [4, 4]
    assert sorted(stream(p)[:3]) == sorted(stream(p)[3:6]) == [0, 1, 2]


@pytest.mark.parametrize("shape", [(8, 1, 1), (4, 2, 1), (4, 1, 2), (1, 4, 2)])
def test_ranks_and_accumulation_share_one_order(shape: tuple[int, int, int]) -> None:
    # The same eight rows a step, however they are dealt out: a figure does not move with the number of GPUs.
    batch, accum, world = shape
    p = plan(num_rows=20, batch_size=batch, grad_accum_steps=accum, world_size=world, epochs=2)
    assert stream(p) == stream(plan(num_rows=20, batch_size=8, grad_accum_steps=1, epochs=2))


@pytest.mark.parametrize(
    "change", [{"num_rows": 0}, {"batch_size": 0}, {"world_size": -1}, {"epochs": 0.0}, {"max_steps": -1}]
)
def test_senseless_plans(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))}="):
        plan(**change)


def test_outside_the_run() -> None:
    with pytest.raises(IndexError, match="step 3 is outside this run of 3 steps"):
        plan().row_ids(3)
    with pytest.raises(IndexError, match="step -1"):
        plan().row_ids(-1)
    with pytest.raises(IndexError, match="rank 1 is outside world_size=1"):
        plan().micro_batches(0, 1)


def test_collate_lays_rows_one_after_the_other() -> None:
    """A row's first token has nothing before it in its row, and must not be predicted from the row before."""
    batch = collate([{"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}, {"input_ids": [7, 2], "labels": [7, 2]}])
    assert batch["input_ids"].tolist() == [5, 6, 2, 7, 2]
    assert batch["labels"].tolist() == [-100, 6, 2, -100, 2]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5]
    assert [tensor.dtype for tensor in batch.values()] == [torch.int64, torch.int64, torch.int32]


def test_collate_of_no_rows_has_no_target() -> None:
    batch = collate([])
    assert [tensor.tolist() for tensor in batch.values()] == [[0], [-100], [0, 1]]


def test_collate_moves_to_the_device() -> None:
    batch = collate([{"input_ids": [1], "labels": [-100]}], device="meta")
    assert {tensor.device.type for tensor in batch.values()} == {"meta"}


def test_eval_batches_are_sorted_and_complete() -> None:
    lengths = [3, 9, 1, 9, 4]
    assert eval_batches(5, lengths, 2) == [[1, 3], [4, 0], [2]]  # longest first, equal lengths in order
    with pytest.raises(ValueError, match="num_rows=4, 5 lengths"):
        eval_batches(4, lengths, 2)


def test_eval_batches_waste_little() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(10, 500) for _ in range(256)]

    def padded(batches: list[list[int]]) -> int:
        return sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)

    in_order = [list(range(start, start + 16)) for start in range(0, 256, 16)]
    # In order a batch of 16 pads to about 16/17 of the longest: 1.8 times the tokens. Sorted, a batch spans a
    # sixteenth of the range: 490 / 16 / 2 = 15 tokens a row on a mean of 255, 6 %.
    assert padded(in_order) > 1.6 * sum(lengths)
    assert padded(eval_batches(256, lengths, 16)) < 1.08 * sum(lengths)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=12), max_tokens=st.integers(1, 200))
def test_passes_hold_every_row_once_within_the_budget(lengths, max_tokens):
    rows = [{"input_ids": [index] * length} for index, length in enumerate(lengths)]
    passes = group_by_length(rows, max_tokens)
    assert sorted((row for rows in passes for row in rows), key=str) == sorted(rows, key=str)
    sizes = [sum(len(row["input_ids"]) for row in rows) for rows in passes if rows]
    assert all(size <= max_tokens or len(rows) == 1 for size, rows in zip(sizes, passes, strict=False))
    assert len(passes) >= 1


def test_similar_lengths_share_a_pass():
    rows = [{"input_ids": [0] * length} for length in (9, 2, 8, 3)]
    assert [[len(row["input_ids"]) for row in rows] for rows in group_by_length(rows, 17)] == [[2, 3, 8], [9]]
