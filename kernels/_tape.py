"""Call the serving kernels in C++, and record calls so that a whole forward replays in one.

A decode step of a small model is some hundred kernels of a few microseconds each; called one by one from Python they
cost more outside the kernels than inside. A tape is to these calls what a CUDA graph is to launches: the addresses are
fixed when it is recorded, so inputs are copied into the same tensors before each replay and outputs are read from the
same tensors after it.
"""

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.kernels import _cpp


class _State(threading.local):
    tape: "Tape | None" = None


_state = _State()
_ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}


class Pool:
    """Memory for the tensors that kernels allocate while a tape is recorded.

    A buffer is handed out again as soon as no tensor uses it, so a forward needs the memory of its widest point and not
    of all its layers. Tapes that never run at the same time can share a pool: each replay writes what it reads.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._addresses: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in this pool's memory."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in the smallest free buffer that is large enough, or in a new one."""
        nbytes = math.prod(shape) * dtype.itemsize
        fitting = [buffer for buffer in self._buffers if nbytes <= buffer.nbytes <= 4 * nbytes and _is_free(buffer)]
        buffer = min(fitting, key=lambda buffer: buffer.nbytes, default=None)
        if buffer is None:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self._buffers.append(buffer)
            self._addresses.add(buffer.data_ptr())
        return buffer[:nbytes].view(dtype).view(shape)


def _is_free(buffer: Tensor) -> bool:
    """Whether the buffer and the handle made to ask are all that refer to its memory."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2


class Tape:
    """Recorded kernel calls, and every tensor they touch, kept alive.

    pool  the memory of tensors that are allocated while recording; without one the tape has its own
    """

    def __init__(self, pool: Pool | None = None) -> None:
        self._calls: list[int] = []
        self._kept: list[object] = []
        self._packed: ctypes.Array | None = None
        self._pool = Pool() if pool is None else pool

    def __len__(self) -> int:
        return len(self._calls) // 2

    @contextmanager
    def record(self) -> Iterator[None]:
        """Calls made inside run as usual, and are recorded.

        raises  AssertionError at a torch operation that computes: a replay would leave it out
        """
        assert self._packed is None and _state.tape is None, "a tape is recorded once, alone"
        _state.tape = self
        try:
            with _NoComputation(self._pool):
                yield
        except BaseException:
            self._calls, self._kept = [], []
            raise
        finally:
            _state.tape = None
        self._packed = (ctypes.c_int64 * len(self._calls))(*self._calls)

    def replay(self) -> None:
        assert self._packed is not None, "record first"
        _replay()(self._packed, len(self))

    def add(self, kernel: ctypes._CFuncPtr, packed: bytes, kept: tuple) -> None:
        arguments = (ctypes.c_int64 * (len(packed) // 8)).from_buffer_copy(packed)
        self._calls += [ctypes.cast(kernel, ctypes.c_void_p).value, ctypes.addressof(arguments)]
        # Tensors of the pool are left out: its memory stays, and is used again when they are gone.
        self._kept += [arguments, [x for x in kept if isinstance(x, Tensor) and not self._pool.holds(x)]]


class _NoComputation(TorchDispatchMode):
    """Lets torch allocate, from a pool, and view, and nothing else."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        name = func.name().partition(".")[0]
        if name in _ALLOCATIONS:
            like = func(*args, **{**(kwargs or {}), "device": "meta"})
            return self._pool.take(like.shape, like.dtype)
        assert func.is_view, f"{name} cannot be recorded on a tape; keep it outside record()"
        return func(*args, **(kwargs or {}))


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = _cpp.load("runtime")
    assert library is not None, "choose() sends calls to the reference when nothing can be built"
    return library


@functools.cache
def _replay() -> ctypes._CFuncPtr:
    library = _runtime()
    library.replay.argtypes, library.replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
    return library.replay


@functools.cache
def kernel(file: str, name: str, *flags: str) -> ctypes._CFuncPtr:
    """The boxed function `name` of `cpp/<file>.cpp` (see cpp/lowbit.h); `choose` said that the file can be built.

    flags  processor flags instead of the native ones, e.g. "-march=haswell"
    """
    library = _cpp.load(file, flags) if flags else _cpp.load(file)
    assert library is not None, "choose() sends calls to the reference when there is no library"
    library.use_pool.argtypes = [ctypes.c_void_p]
    library.use_pool(ctypes.cast(_runtime().run_parallel, ctypes.c_void_p))
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


def call(function: ctypes._CFuncPtr, *arguments: Tensor | int | float | None) -> None:
    """Run a boxed kernel; the number of threads is appended. Record it too, where a tape is recording.

    Tensors travel as pointers: the caller has checked device, dtype, shape and strides.
    """
    _call(function, arguments, torch.get_num_threads())


def call_beside_torch(function: ctypes._CFuncPtr, *arguments: Tensor | int | float | None) -> None:
    """`call` on torch's own threads: for kernels between torch's products, see cpp/runtime.cpp."""
    _call(function, arguments, -torch.get_num_threads())


def _call(function: ctypes._CFuncPtr, arguments: tuple[Tensor | int | float | None, ...], threads: int) -> None:
    # A call of ten arguments takes 2.5 us, a third of it in this list.
    values = [
        argument if (kind := type(argument)) is int
        else 0 if argument is None
        else _bits(argument) if kind is float
        else argument.data_ptr()
        for argument in arguments
    ]  # fmt: skip
    packed = struct.pack(f"{len(values) + 1}q", *values, threads)
    function(packed)  # ctypes passes the address of the bytes
    tape = _state.tape
    if tape is not None:
        tape.add(function, packed, arguments)


@functools.lru_cache(maxsize=64)
def _bits(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]
