"""After each test of a kernel the x87 unit, which MMX instructions occupy, must be free: see kernels/_cpp.py."""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def x87_is_left_free() -> Iterator[None]:
    yield
    one = np.longdouble(1)
    assert one + one == 2, "long doubles of this thread are nan: a kernel has left MMX registers in use"
