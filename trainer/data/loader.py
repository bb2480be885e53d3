"""Which rows a step takes, and how they become tensors.

The last stop of the data before the loop. The order is a pure function of (seed, step): no iterator has a state,
so resuming at step s needs the number s and nothing else, in any epoch and after any kill.

      epoch 0, shuffled        epoch 1, shuffled anew
    | 4 1 0 3 2 5 6        |  2 0 6 5 1 4 3        | ...
    |--step 0--|--step 1--|--step 2--|--step 3--| ...        a step may span two epochs

Every rank gets the same number of micro-batches in every step, some of them empty in a short last step, because
ranks wait for each other in each backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.ordering.order import RunOrder
from trainer.data.ordering.permutation import permutation

IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out


@dataclass(frozen=True)
class BatchPlan:
    """The steps of a run. Runs with equal seed, rows and rows a step agree on them, however ranks share a step."""

    num_rows: int
    """Rows of the training set."""
    batch_size: int
    """Units one rank takes in one micro-batch: rows, or with packing several rows in one."""
    grad_accum_steps: int
    """Micro-batches one rank takes in one step."""
    world_size: int
    """Ranks."""
    seed: int
    """Chooses the order; 0..2**32 - 1."""
    epochs: float = 1.0
    """Passes over the data, rounded to whole units, when `max_steps` is None."""
    max_steps: int | None = None
    """Steps, each of them full; the data starts over as often as needed."""
    order: RunOrder | None = None
    """Mixed, packed or by length; None: each row once an epoch, shuffled."""

    def __post_init__(self) -> None:
        for name in ("num_rows", "batch_size", "grad_accum_steps", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; give at least 1")
        if self.epochs <= 0 or (self.max_steps is not None and self.max_steps < 0):
            raise ValueError(
                f"epochs={self.epochs}, max_steps={self.max_steps}; give epochs above 0, and max_steps of 0 or more"
            )
        if self.order is not None:
            mine = self.num_rows, self.seed, self.rows_per_step
            given = self.order.num_rows, self.order.seed, self.order.rows_per_step
            if mine != given:
                raise ValueError(f"(num_rows, seed, rows_per_step)={mine}, and of the order {given}; give equal ones")

    @property
    def rows_per_step(self) -> int:
        """Units of a full step, over all ranks."""
        return self.batch_size * self.grad_accum_steps * self.world_size

    @property
    def total_units(self) -> int:
        """Units of the whole run, repeats counted."""
        if self.max_steps is not None:
            return self.max_steps * self.rows_per_step
        if self.order is None:
            return max(1, round(self.epochs * self.num_rows))
        whole, part = divmod(self.epochs, 1)
        part *= self.order.num_units(int(whole)) if part else 0
        return max(1, round(self.order.first_unit(int(whole)) + part))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return -(-self.total_units // self.rows_per_step)

    def units(self, step: int) -> list[list[int]]:
        """What a step takes, over all ranks; fewer than `rows_per_step` units only in the last step.

        step     0 <= step < num_steps
        returns  row numbers in 0..num_rows - 1, in lists of one each where nothing is packed
        raises   IndexError for a step outside the run
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside this run of {self.num_steps} steps")
        first = step * self.rows_per_step
        return [self._unit(position) for position in range(first, min(first + self.rows_per_step, self.total_units))]

    def _unit(self, position: int) -> list[int]:
        if self.order is not None:
            epoch, index = self.order.place(position)
            return self.order.epoch(epoch)[index]
        epoch, index = divmod(position, self.num_rows)
        return [int(_epoch_order(self.num_rows, self.seed, epoch)[index])]

    def row_ids(self, step: int) -> list[int]:
        """The rows of a step, over all ranks, one after the other; see `units`."""
        return list(chain.from_iterable(self.units(step)))

    def micro_batches(self, step: int, rank: int) -> list[list[int]]:
        """The rows that one rank takes in a step.

        rank     0 <= rank < world_size
        returns  `grad_accum_steps` lists of the row numbers of `batch_size` units; shorter or empty at the end of a
                 short last step
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside world_size={self.world_size}")
        units = self.units(step)
        starts = [(micro * self.world_size + rank) * self.batch_size for micro in range(self.grad_accum_steps)]
        return [list(chain.from_iterable(units[start : start + self.batch_size])) for start in starts]


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(num_rows, seed=seed, epoch=epoch)


def collate(rows: Sequence[dict[str, Any]], device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Lay rows one after the other, without padding; attention stays inside each by `cu_seqlens`.

    rows     `input_ids` and `labels` of equal length each; no rows give one token without a target, so that a rank
             whose share of a short step is empty still runs its backward pass, with a zero gradient
    returns  input_ids [T] int64; labels [T] int64, -100 where there is no target, which a row's first token never is:
             nothing stands before it; cu_seqlens [B + 1] int32, row b has the tokens cu_seqlens[b] to cu_seqlens[b + 1]
    """
    rows = rows or [{"input_ids": [0], "labels": [IGNORED]}]
    labels = [[IGNORED, *row["labels"][1:]] for row in rows]
    cu_seqlens = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    return {
        "input_ids": torch.tensor([token for row in rows for token in row["input_ids"]]).to(device),
        "labels": torch.tensor([label for row in labels for label in row]).to(device),
        "cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32).to(device),
    }


def group_by_length(rows: Sequence[dict[str, Any]], max_tokens: int) -> list[list[dict[str, Any]]]:
    """Cut a micro-batch into passes of at most `max_tokens`, so that activation memory is that of a pass.

    The loss is a sum, so the gradient is that of the whole. Rows of similar length share a pass: models that our
    decoder does not compute are padded to the longest.

    max_tokens  tokens of a pass; a single longer row is a pass of its own
    returns     every row once, shortest first; one empty pass for no rows, for `collate` to fill
    """
    passes: list[list[dict[str, Any]]] = [[]]
    num_tokens = 0
    for row in sorted(rows, key=row_len):
        if passes[-1] and num_tokens + row_len(row) > max_tokens:
            passes.append([])
            num_tokens = 0
        passes[-1].append(row)
        num_tokens += row_len(row)
    return passes


def row_len(row: dict[str, Any]) -> int:
    """Tokens that a row trains on: both of its documents, where it is a pair."""
    return len(row["input_ids"]) + len(row.get("rejected_input_ids", ()))


def eval_batches(num_rows: int, lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Cut an evaluation set into batches of similar length, the longest first: memory runs out at once or never.

    lengths  tokens of each row
    returns  row numbers, each of 0..num_rows - 1 once; only the last batch may be smaller than batch_size
    raises   ValueError when `lengths` has not num_rows entries
    """
    if len(lengths) != num_rows or batch_size < 1:
        raise ValueError(f"num_rows={num_rows}, {len(lengths)} lengths, batch_size={batch_size}; give a length a row")
    order = sorted(range(num_rows), key=lambda row: (-lengths[row], row))
    return [order[start : start + batch_size] for start in range(0, num_rows, batch_size)]
