"""Memory in pages of 2 MB, for weights that are read from the first byte to the last at every step.

A processor fetches ahead within a page and looks up each page's address: streaming from pages of 4 KB, two Zen 4 cores
read 27 to 32 GB/s, from pages of 2 MB 34 to 52 GB/s in the same runs. The kernel is only asked (madvise): where it does
not know the request, or has no such pages left, the memory is as usual.
"""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
ALIGN_BYTES = 64  # a cache line


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor of undefined content that starts at a 2 MB page; small ones are ordinary."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype)
    region = mmap.mmap(-1, nbytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    memory = torch.frombuffer(region, dtype=torch.uint8)  # keeps the region
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + nbytes].view(dtype).view(*shape)


def side_by_side(shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Contiguous CPU tensors of undefined content, one after the other, each at a cache line."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    spans = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes]
    memory, tensors, begin = empty((sum(spans),), torch.uint8), [], 0
    for (shape, dtype), size, span in zip(shapes, sizes, spans, strict=True):
        tensors.append(memory[begin : begin + size].view(dtype).view(*shape))
        begin += span
    return tensors
