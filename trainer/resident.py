"""What this process holds in memory, and giving back what it has read and needs no more.

A checkpoint is mapped, not read: its pages are resident once they were touched, and the mapping lives as long as one
tensor of the file does. A layer that was packed, or fused with others into a new tensor, would so stay resident beside
what was made of it until the last layer is done. `release_file_pages` lets its pages go at once: the system keeps them
in its page cache while there is room, and a later read finds the same bytes.

The surprising thing: a mapped weight that was written to (trained in place) is a private copy that the file does not
have. The kernel says of each page whether it is the file's (Documentation/admin-guide/mm/pagemap.rst, bit 61), and no
tensor with another page is touched.
"""

import ctypes
import functools
import mmap
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_PRESENT_OR_SWAPPED, _OF_A_FILE = np.uint64(3 << 62), np.uint64(1 << 61)  # bits of an entry of pagemap


def resident_bytes() -> dict[str, int]:
    """Memory of this process by the kernel's names: RssAnon (its own), RssFile (mapped from files), VmHWM (most ever).

    returns  bytes; empty where there is no /proc/self/status
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return {}
    fields = re.findall(r"^(RssAnon|RssFile|VmHWM):\s+(\d+) kB", status.read_text(), re.MULTILINE)
    return {name: 1024 * int(kib) for name, kib in fields}


def release_file_pages(tensors: Tensor | Iterable[Tensor]) -> int:
    """Let go of the pages of tensors that are mapped from a file; their content stays what it is.

    returns  bytes that need not be resident any more; 0 for memory that is no file's, for a tensor that was written to,
             and where the kernel does not tell
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    return sum(_release(tensor) for tensor in tensors if tensor.device.type == "cpu" and tensor.is_contiguous())


def _release(tensor: Tensor) -> int:
    page = mmap.PAGESIZE
    begin, end = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    if begin >= end or not _are_of_a_file(begin // page, (end - begin) // page):
        return 0
    advice = getattr(mmap, "MADV_DONTNEED", 4)
    done = _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
    return end - begin if done == 0 else 0


def _are_of_a_file(first: int, count: int) -> bool:
    """Whether each of these pages is the file's own, or was never touched."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * 8)
            entries = np.frombuffer(pagemap.read(count * 8), dtype=np.uint64)
    except OSError:
        return False
    touched = entries[entries & _PRESENT_OR_SWAPPED != 0]
    return len(entries) == count and len(touched) > 0 and bool((touched & _OF_A_FILE != 0).all())


def release_free_memory() -> None:
    """Give what was allocated and freed back to the system, where the C library can (glibc's malloc_trim)."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
