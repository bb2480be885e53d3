"""Tensor parallelism: each process holds a slice of every layer (Megatron-LM, arXiv:1909.08053, section 3).

Heads and the MLP's inner channels are shared out; the outputs of `o_proj` and `down_proj` are partial sums, added up
over the processes in float32. Rank 0 schedules and samples; the others wait for its messages and compute the same rows.
Started by torchrun: `torchrun --standalone --nproc_per_node=2 -m trainer.serve model=... tensor_parallel_size=2`.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config.errors import UserError, require
from trainer.kernels.codebook4 import CodebookWeight
from trainer.kernels.int4 import Int4Weight
from trainer.kernels.int8 import Int8Weight
from trainer.kernels.packed_linear import QuantizedWeight

IDLE_LIMIT = timedelta(days=365)
"""The others wait in a collective for rank 0's next step; torch's 30 minutes would end an idle server. A process that
dies is noticed at once, by its closed connection."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among `size` processes."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, size: int, device: torch.device) -> "TensorParallel":
        """Meet the other processes.

        raises  UserError if torchrun did not start as many as the setting says
        """
        if size == 1:
            return cls()
        world = int(os.environ.get("WORLD_SIZE", "1"))
        require(
            world == size,
            f"tensor_parallel_size={size}, but {world} processes run; start with torchrun --standalone "
            f"--nproc_per_node={size} -m trainer.serve ...",
        )
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=IDLE_LIMIT)
        return cls(dist.get_rank(), size)

    def check(self, sizes: dict[str, int]) -> None:
        """Refuse what cannot be shared out evenly.

        raises  UserError naming the size
        """
        for name, value in sizes.items():
            if value % self.size:
                raise UserError(f"tensor_parallel_size={self.size} does not divide {name}={value}; use a divisor")

    def slice(self, length: int) -> slice:
        """This process's part of a dimension."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of all processes' tensors, in place."""
        dist.all_reduce(partial)
        return partial

    def least(self, count: int) -> int:
        """The smallest count of all processes."""
        if self.size == 1:
            return count
        box = torch.tensor(count)
        dist.all_reduce(box, dist.ReduceOp.MIN)
        return int(box)

    def send(self, message: Any) -> None:
        """From rank 0 to all others."""
        if self.size > 1:
            dist.broadcast_object_list([message], src=0)

    def receive(self) -> Any:
        """The next message of rank 0."""
        box = [None]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def slice_rows(weight: QuantizedWeight | Tensor, part: slice) -> QuantizedWeight | Tensor:
    """Output features `part` of a weight.

    raises  UserError if a block of codes would be cut
    """
    if isinstance(weight, Tensor):
        return weight[part].contiguous()
    return _slice(weight, part, slice(0, weight.in_features))


def slice_columns(weight: QuantizedWeight | Tensor, part: slice) -> QuantizedWeight | Tensor:
    """Input features `part` of a weight.

    raises  UserError if a block of codes would be cut
    """
    if isinstance(weight, Tensor):
        return weight[:, part].contiguous()
    return _slice(weight, slice(0, weight.out_features), part)


def _slice(weight: QuantizedWeight, rows: slice, columns: slice) -> QuantizedWeight:
    if isinstance(weight, CodebookWeight):
        return _slice_codebook(weight, rows, columns)
    return _slice_groups(weight, rows, columns)


def _slice_codebook(weight: CodebookWeight, rows: slice, columns: slice) -> CodebookWeight:
    """Blocks run through the flattened weight and may cross rows."""
    size = weight.block_size
    whole_rows = columns.stop - columns.start == weight.in_features
    aligned = (rows.start * weight.in_features) % size == 0 and (rows.stop * weight.in_features) % size == 0
    if not whole_rows:
        aligned = all(edge % size == 0 for edge in (weight.in_features, columns.start, columns.stop))
    _require_whole_blocks(aligned, weight, size, rows, columns)
    absmax = weight.plain_absmax()
    if whole_rows:
        first, last = rows.start * weight.in_features, rows.stop * weight.in_features
        packed, scales = weight.packed[first // 2 : last // 2], absmax[first // size : last // size]
    else:
        packed = weight.packed.view(weight.out_features, -1)[rows, columns.start // 2 : columns.stop // 2]
        scales = absmax.view(weight.out_features, -1)[rows, columns.start // size : columns.stop // size]
    shape = rows.stop - rows.start, columns.stop - columns.start
    buffers = packed.reshape(-1).contiguous(), scales.reshape(-1).contiguous(), None, None
    return CodebookWeight(*buffers, *shape, size, weight.codebook)


def _slice_groups(weight: Int4Weight | Int8Weight, rows: slice, columns: slice) -> Int4Weight | Int8Weight:
    """Groups lie within a row; without act-order each is a run of features."""
    size, g_idx = weight.group_size, getattr(weight, "g_idx", None)
    whole_rows = columns.stop - columns.start == weight.in_features
    aligned = whole_rows or (g_idx is None and columns.start % size == 0 and columns.stop % size == 0)
    _require_whole_blocks(aligned, weight, size, rows, columns)
    shape = rows.stop - rows.start, columns.stop - columns.start
    groups = slice(columns.start // size, columns.stop // size)
    scales = weight.scales[rows, groups].contiguous()
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.packed[rows, columns].contiguous(), scales, *shape, size)
    # An odd last feature has a byte of its own; a cut at a whole group is at a whole byte, since groups are even then.
    packed = weight.packed[rows, columns.start // 2 : (columns.stop + 1) // 2].contiguous()
    zeros = None if weight.zeros is None else weight.zeros[rows, groups].contiguous()
    return Int4Weight(packed, scales, zeros, g_idx, *shape, size)


def _require_whole_blocks(aligned: bool, weight: QuantizedWeight, size: int, rows: slice, columns: slice) -> None:
    require(
        aligned,
        f"a [{weight.out_features}, {weight.in_features}] weight in blocks of {size} cannot be cut at rows "
        f"{rows.start}:{rows.stop}, columns {columns.start}:{columns.stop}; use another tensor_parallel_size, or "
        "quantization=none",
    )
