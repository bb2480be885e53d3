"""What the loop takes its rows from, step by step: a table, or a stream (stream.py)."""

from collections.abc import Sequence
from typing import Any, Protocol

from datasets import Dataset

from trainer.data.loader import BatchPlan
from trainer.data.rows import TokenRow


class Steps(Protocol):
    """The rows of each step of a run, as one rank takes them."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""

    def micro_batches(self, step: int) -> list[list[TokenRow]]:
        """This rank's rows: `grad_accum_steps` lists, some of them empty in a short last step.

        step     0 <= step < num_steps; of a stream the steps come in order
        returns  rows with lists of int as `collate` takes them
        raises   ValueError for a step outside the run, or out of turn; UserError for a row that cannot be trained on
        """

    def row_ids(self, step: int) -> list[int] | list[str]:
        """The rows of a step over all ranks, every one of which calls this: a table's row numbers, a stream's origins.

        step     of a stream, the newest
        """

    def state(self) -> dict[str, Any] | None:
        """What `restore` needs of this rank beside the step; goes through JSON. None for a table, where the step says
        it all."""

    def restore(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on with `step`; `state` is what the same rank's `state()` was before it."""

    def sample(self, num_rows: int) -> list[TokenRow]:
        """The first rows, the same on each rank, without moving on; fewer where there are not so many."""

    def close(self) -> None:
        """End workers, let go of files; also after an exception."""


class TableSteps:
    """Steps of a table, in any order: a function of the step."""

    def __init__(self, dataset: Dataset, plan: BatchPlan, *, rank: int) -> None:
        self._dataset, self._plan, self._rank = dataset, plan, rank

    @property
    def num_steps(self) -> int:
        return self._plan.num_steps

    def micro_batches(self, step: int) -> list[list[TokenRow]]:
        return [self._rows(ids) for ids in self._plan.micro_batches(step, self._rank)]

    def row_ids(self, step: int) -> list[int]:
        return self._plan.row_ids(step)

    def state(self) -> None:
        return None

    def restore(self, state: dict[str, Any] | None, step: int) -> None:
        pass

    def sample(self, num_rows: int) -> list[TokenRow]:
        return self._rows(range(min(num_rows, len(self._dataset))))

    def close(self) -> None:
        pass

    def _rows(self, ids: Sequence[int]) -> list[TokenRow]:
        # one access: 9 us a row of 128 tokens where one by one takes 30
        return self._dataset.__getitems__(list(ids)) if ids else []
