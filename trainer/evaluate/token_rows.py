"""Two models on the same rows, token by token: what every figure of fidelity is taken from.

Values are kept for each position that has a next token, so that figures can be summed over rows, tokens or samples of
rows. Logits are not: a chunk of positions has both models' at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOSS, LOSS_ORIGINAL, KL, SAME, RIGHT, WAS_RIGHT = range(6)
"""What a position holds: loss of both in nats, KL(original || other), whether both have the same likeliest token, and
whether the text's token is the likeliest of the other and of the original."""


def compare_logits(logits: Tensor, wanted: Tensor, targets: Tensor) -> Tensor:
    """Positions of one row, compared.

    logits, wanted  [n, vocab_size] of the other model and of the original, float
    targets         [n] int64, the tokens that follow
    returns         [6, n] float64, see LOSS and those after it
    """
    ours, theirs, targets = logits.float().log_softmax(1), wanted.float().log_softmax(1), targets[:, None]
    kl = (theirs.exp() * (theirs - ours)).sum(1)
    first, wanted_first = ours.argmax(1, keepdim=True), theirs.argmax(1, keepdim=True)
    parts = [
        -ours.gather(1, targets)[:, 0],
        -theirs.gather(1, targets)[:, 0],
        kl,
        (first == wanted_first)[:, 0],
        (first == targets)[:, 0],
        (wanted_first == targets)[:, 0],
    ]
    return torch.stack([part.double() for part in parts]).cpu()


@dataclass(frozen=True)
class TokenRows:
    """A tensor [6, len(row) - 1] float64 for each row, see LOSS and those after it."""

    rows: list[Tensor]

    @property
    def counts(self) -> list[int]:
        """Positions of each row."""
        return [row.shape[1] for row in self.rows]

    def sums(self, what: int) -> list[float]:
        """Of each row."""
        return [row[what].sum().item() for row in self.rows]

    def flips(self, *, to_right: bool) -> list[float]:
        """Of each row, the positions that became right, or wrong."""
        pairs = [(row[RIGHT] > row[WAS_RIGHT]) if to_right else (row[RIGHT] < row[WAS_RIGHT]) for row in self.rows]
        return [pair.sum().item() for pair in pairs]

    def all(self, what: int) -> Tensor:
        """[positions] float64"""
        return torch.cat([row[what] for row in self.rows])

    def mean(self, what: int) -> float:
        return self.all(what).mean().item()

    def to_rows(self) -> list[dict[str, float]]:
        """A line a row, for a file."""
        names = {"loss": LOSS, "loss_original": LOSS_ORIGINAL, "kl": KL, "same_token": SAME}
        lines = []
        for row, broken, mended in zip(self.rows, self.flips(to_right=False), self.flips(to_right=True), strict=True):
            means = {name: row[what].mean().item() for name, what in names.items()}
            most = {"kl_max": row[KL].max().item(), "right_to_wrong": broken, "wrong_to_right": mended}
            lines.append({"tokens": row.shape[1], **means, **most})
        return lines


class RowCollector:
    """Chunks of rows as they come; a row's own come in order, those of several rows mixed."""

    def __init__(self, num_rows: int) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(num_rows)]

    def add(self, row: int, part: Tensor) -> None:
        """part  [6, n]"""
        self._parts[row].append(part)

    def finish(self, rows: Sequence[Sequence[int]]) -> TokenRows:
        """raises  RuntimeError if a position was not seen"""
        found = [torch.cat(parts, dim=1) if parts else torch.empty(6, 0) for parts in self._parts]
        for number, (row, part) in enumerate(zip(rows, found, strict=True)):
            if part.shape[1] != len(row) - 1:
                raise RuntimeError(f"row {number} has {len(row) - 1} positions, {part.shape[1]} were computed")
        return TokenRows(found)
