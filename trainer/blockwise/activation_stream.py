"""ActivationStream: the residual stream of many documents between two blocks, in memory or mapped from a file.

Block-wise training passes documents through one block at a time, so what stands between blocks is kept for all of
them: [T, hidden_size] of the compute dtype, rewritten in place block by block. Where that is more than memory should
hold, it lies in a file, which the system pages in and out.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn


class ActivationStream:
    """Hidden states of documents, one after the other; row r has the tokens `starts[r]` to `starts[r + 1]`."""

    def __init__(self, lengths: Sequence[int], width: int, dtype: torch.dtype, *, path: Path | None = None) -> None:
        """lengths  tokens of each document

        path     a file to lie in, written over; None: memory. The caller removes it
        """
        self._starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        numel = self._starts[-1] * width
        if path is None:
            values = torch.empty(numel, dtype=dtype)
        else:
            path.unlink(missing_ok=True)
            values = torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
        self.values = values.view(-1, width)

    @property
    def num_rows(self) -> int:
        return len(self._starts) - 1

    def like(self, width: int) -> "ActivationStream":
        """An empty one of the same documents in memory, of another width."""
        lengths = [stop - start for start, stop in zip(self._starts, self._starts[1:], strict=False)]
        return ActivationStream(lengths, width, self.values.dtype)

    def put(self, rows: Sequence[int], values: Tensor) -> None:
        """What `take` gives for rows that follow one another becomes values [tokens, width]."""
        self.values[self._starts[rows[0]] : self._starts[rows[-1] + 1]] = values.to(self.values.device)

    @torch.no_grad()
    def fill(self, embedding: nn.Module, rows: Sequence[Sequence[int]]) -> None:
        """Start with the embeddings of each document's token ids."""
        for row, token_ids in enumerate(rows):
            ids = torch.tensor(list(token_ids), device=embedding.weight.device)
            self.values[self._starts[row] : self._starts[row + 1]] = embedding(ids)

    def take(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """The hidden states of some documents, one after the other: [tokens, width] on device."""
        return torch.cat([self.values[self._starts[row] : self._starts[row + 1]] for row in rows]).to(device)

    def every(self, stride: int, rows: Sequence[int]) -> Tensor:
        """Places in what `take` gives for rows that follow one another of each stride-th of all tokens, int64."""
        start, stop = self._starts[rows[0]], self._starts[rows[-1] + 1]
        return torch.arange(-(-start // stride) * stride, stop, stride) - start

    def num_tokens(self, num_rows: int) -> int:
        """Of the first num_rows documents."""
        return self._starts[num_rows]

    def cu_seqlens(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """[len(rows) + 1] int32: where each of these documents starts in what `take` gives."""
        lengths = [self._starts[row + 1] - self._starts[row] for row in rows]
        return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def passes(self, rows: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """Cut rows into runs of at most max_tokens; a single longer document is a run of its own."""
        run: list[int] = []
        num_tokens = 0
        for row in rows:
            length = self._starts[row + 1] - self._starts[row]
            if run and num_tokens + length > max_tokens:
                yield run
                run, num_tokens = [], 0
            run.append(row)
            num_tokens += length
        if run:
            yield run

    @torch.no_grad()
    def advance(self, block: Callable[[Tensor, Tensor], Tensor], device: torch.device, *, max_tokens: int) -> None:
        """Put `block(hidden_states, cu_seqlens)` in the place of each document's hidden states."""
        for rows in self.passes(range(self.num_rows), max_tokens):
            self.put(rows, block(self.take(rows, device), self.cu_seqlens(rows, device)))
