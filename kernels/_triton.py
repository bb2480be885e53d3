"""`triton` and `tl`, or stand-ins where triton is not installed (macOS, Windows, CPU-only servers).

Kernel files decorate functions and annotate arguments at import time; the stand-ins let them, so that one file holds
all implementations of an op. Launching a kernel through a stand-in raises ImportError.
"""

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Missing:
        """Answers every attribute and call with itself; as a decorator it returns what it decorates, unlaunchable."""

        def __getattr__(self, name: str) -> "_Missing":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _Unlaunchable(args[0]) if args and callable(args[0]) else self

    class _Unlaunchable:
        def __init__(self, function: Callable) -> None:
            self.function = function

        def __getitem__(self, grid: Any) -> Callable:
            raise ImportError(
                f"{getattr(self.function, '__name__', 'this kernel')} needs triton; pip install triton, "
                "or set LOWBIT_KERNELS=reference"
            )

    triton = tl = _Missing()

__all__ = ["HAS_TRITON", "tl", "triton"]
