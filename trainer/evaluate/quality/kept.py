"""Kept: what the original says of some rows, kept to compare other models with, exactly and without the model.

Hidden states and the output head are kept in memory where a program has them. Where it has logits only, these are
kept as they are in a file of the system's temporary folder: vocab_size numbers a token, removed at the end. Nothing is
cut to the likeliest tokens, which would make every divergence smaller than it is.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trainer.config.errors import require
from trainer.evaluate.quality.program import Program
from trainer.evaluate.token_rows import RowCollector, TokenRows, compare_logits

CHUNK = 128
"""Positions whose logits are held at a time, of both models."""
SPARE_BYTES = 1 << 30
"""Of the disk, left free."""


class Kept:
    """See the module."""

    def __init__(self, rows: Sequence[Sequence[int]], head: Callable[[Tensor], Tensor], kind: str) -> None:
        self.rows, self.kind, self._head = rows, kind, head
        counts = torch.tensor([0, *(len(row) - 1 for row in rows)])
        self._starts = counts.cumsum(0).tolist()
        self._values: Tensor | None = None
        self._folder: tempfile.TemporaryDirectory | None = None

    @classmethod
    def of(cls, program: Program, rows: Sequence[Sequence[int]]) -> "Kept":
        """Read the rows, token ids of at least two each.

        raises  UserError if the disk has no room for logits
        """
        kept = cls(rows, program.head, program.kept)
        program.read(rows, kept._add)
        return kept

    def _add(self, row: int, start: int, x: Tensor) -> None:
        if self._values is None:
            self._values = self._room(x)
        first = self._starts[row] + start
        self._values[first : first + len(x)] = x.detach().cpu()

    def _room(self, x: Tensor) -> Tensor:
        shape = (self._starts[-1], *x.shape[1:])
        if self.kind == "hidden states":
            return torch.empty(shape, dtype=x.dtype)
        self._folder = tempfile.TemporaryDirectory(prefix="lowbit_logits_")
        needed, free = prod(shape) * x.element_size(), shutil.disk_usage(self._folder.name).free
        require(
            needed + SPARE_BYTES <= free,
            f"{shape[0]} positions have {needed / 1e9:.1f} GB of logits, {self._folder.name} has {free / 1e9:.1f} GB "
            "free; lower windows or window, set TMPDIR, or use path=server, which keeps hidden states",
        )
        path = str(Path(self._folder.name, "logits"))
        return torch.from_file(path, shared=True, size=prod(shape), dtype=x.dtype).view(shape)

    @property
    def description(self) -> str:
        """What is kept, in words."""
        where = "memory" if self._folder is None else "a file"
        values = self._values
        size = values.numel() * values.element_size() / 1e6
        return f"{self.kind} of {len(values)} positions in {where}, {size:.1f} MB, {str(values.dtype)[6:]}, exact"

    @torch.inference_mode()
    def compare(self, program: Program) -> TokenRows:
        """Another model on the same rows, token by token, as far as both vocabularies go."""
        found, head = RowCollector(len(self.rows)), program.head

        def show(row: int, start: int, x: Tensor) -> None:
            first = self._starts[row] + start
            for begin in range(0, len(x), CHUNK):
                part = x[begin : begin + CHUNK]
                place = slice(first + begin, first + begin + len(part))
                logits, wanted = head(part).cpu(), self._head(self._values[place].to(x.device)).cpu()
                width = min(logits.shape[1], wanted.shape[1])
                targets = self.rows[row][start + begin + 1 : start + begin + 1 + len(part)]
                found.add(row, compare_logits(logits[:, :width], wanted[:, :width], torch.tensor(targets)))

        program.read(self.rows, show)
        return found.finish(self.rows)

    def close(self) -> None:
        """Remove the file, if there is one."""
        self._values = None
        if self._folder is not None:
            self._folder.cleanup()


@torch.inference_mode()
def loglikelihoods(program: Program, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[float]:
    """Of each row's tokens from `start` on, given those before: the sum of log-probabilities, in nats.

    starts  at least 1 each
    """
    totals, head = [0.0] * len(rows), program.head

    def show(row: int, start: int, x: Tensor) -> None:
        wanted = max(0, starts[row] - 1 - start)  # position p predicts the token at p + 1
        if wanted < len(x):
            targets = torch.tensor(rows[row][start + wanted + 1 : start + 1 + len(x)])
            logits = head(x[wanted:].contiguous()).float().cpu().log_softmax(1)
            totals[row] += logits.gather(1, targets[:, None]).double().sum().item()

    program.read(rows, show)
    return totals
