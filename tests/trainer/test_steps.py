"""Steps of a table: a function of the step; and that a stream and a table are asked the same things."""

import inspect

import pytest
from datasets import Dataset

from trainer.data.loader import BatchPlan
from trainer.data.steps import Steps, TableSteps
from trainer.data.streams.stream import StreamSteps


def table(num_rows: int, **plan: int | float) -> TableSteps:
    tokens = [[row, *range(row % 3)] for row in range(num_rows)]
    dataset = Dataset.from_dict(
        {"input_ids": tokens, "labels": tokens, "origin": [f"a:{row}" for row in range(num_rows)]}
    )
    run = dict(batch_size=2, grad_accum_steps=2, world_size=2, seed=3)
    return TableSteps(dataset, BatchPlan(num_rows, **{**run, **plan}), rank=1)


def test_a_table_gives_the_rows_of_its_plan_in_any_order_of_steps() -> None:
    steps = table(20, epochs=2)
    forward = [steps.micro_batches(step) for step in range(steps.num_steps)]
    assert [steps.micro_batches(step) for step in reversed(range(steps.num_steps))] == forward[::-1]
    plan = BatchPlan(20, 2, 2, 2, 3, epochs=2)
    for step, micro in enumerate(forward):
        ids = plan.micro_batches(step, 1)
        assert micro == [
            [{"input_ids": (ids := [row, *range(row % 3)]), "labels": ids, "origin": f"a:{row}"} for row in rows]
            for rows in ids
        ]
        assert steps.row_ids(step) == plan.row_ids(step)
    assert steps.state() is None


def test_a_short_last_step_has_empty_micro_batches() -> None:
    assert table(9, epochs=1).micro_batches(1) == [[], []]


def test_sample_is_the_first_rows() -> None:
    assert [row["origin"] for row in table(5).sample(3)] == ["a:0", "a:1", "a:2"]
    assert len(table(5).sample(30)) == 5


@pytest.mark.parametrize("steps", [TableSteps, StreamSteps])
def test_both_are_steps(steps: type) -> None:
    asked = {name: member for name, member in vars(Steps).items() if inspect.isfunction(member) and name[0] != "_"}
    assert len(asked) == 6
    for name, member in asked.items():
        assert list(inspect.signature(getattr(steps, name)).parameters) == list(inspect.signature(member).parameters)
