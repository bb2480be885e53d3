"""Record a forward of a few rows once, replay it from then on: a tape on CPUs, a CUDA graph on GPUs.

Both are bound to addresses and to shapes, not to values: inputs are written into the same buffers before each replay,
and the result is always the same tensor, valid until the next replay.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import Pool, Tape
from trainer.kernels.packed_linear import CPP_DTYPES


class OnTape:
    """A forward of compiled CPU kernels; its memory comes from a pool that all tapes of a runner share."""

    def __init__(self, forward: Callable[[], Tensor], pool: Pool) -> None:
        self._tape, self._fresh = Tape(pool), True
        with self._tape.record():
            self._result = forward()

    @staticmethod
    def shape(num_rows: int, num_seqs: int) -> tuple[int, int] | None:
        """The rows and sequences that are recorded for a step. Which rows are whose is read at each replay, so one tape
        serves every step of so many rows: single tokens, drafts, the end of a prompt."""
        return num_rows, num_rows

    def replay(self) -> Tensor:
        if self._fresh:
            self._fresh = False  # recording has computed it
        else:
            self._tape.replay()
        return self._result


class OnGraph:
    """A forward of GPU kernels; its memory comes from a pool that all graphs of a runner share."""

    def __init__(self, forward: Callable[[], Tensor], pool: tuple[int, int]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()  # kernels are compiled here, which a capture could not do
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._result = forward()

    @staticmethod
    def shape(num_rows: int, num_seqs: int) -> tuple[int, int] | None:
        """Single tokens only, for launches depend on the longest run of rows; padded to 1, 2, 4, 8, 16, 24, 32 ...,
        since a graph for each size would cost memory and start-up time."""
        if num_rows > num_seqs:
            return None
        padded = -(-num_seqs // 8) * 8 if num_seqs > 8 else 1 << (num_seqs - 1).bit_length()
        return padded, padded

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._result


class Recordings:
    """The recorded forwards of a runner, by their key; one memory pool for all of them."""

    def __init__(self, device: torch.device) -> None:
        self._kind = OnGraph if device.type == "cuda" else OnTape
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else Pool()
        self._recorded: dict[Hashable, OnTape | OnGraph] = {}

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> "Recordings | None":
        """Recordings for a device and compute dtype; None where the references run, which cannot be recorded."""
        if device.type == "cuda":
            return cls(device) if _cpp.choose("paged_attention", "cuda") == "triton" else None
        return cls(device) if dtype in CPP_DTYPES and _cpp.choose("runtime", "cpu") == "cpu" else None

    def shape(self, num_rows: int, num_seqs: int) -> tuple[int, int] | None:
        """Rows and sequences to pad a step to; None if it is not to be recorded."""
        return self._kind.shape(num_rows, num_seqs)

    def run(self, key: Hashable, forward: Callable[[], Tensor]) -> Tensor:
        """The result of `forward`, recorded under `key` the first time and replayed from then on."""
        if key not in self._recorded:
            self._recorded[key] = self._kind(forward, self._pool)
        return self._recorded[key].replay()
