"""Shuffles as functions of numbers: nothing has a state, and no release of numpy may change them.

Raw Philox numbers and a stable sort, for numpy promises never to change these; `permutation` it may change, and a
resumed run would read other rows after an upgrade. Each purpose draws from a stream of its own: the key is
(seed, epoch), and the stream stands in the third word of the counter, which no run counts up to.
"""

import numpy as np

ROWS, UNITS, BATCHES, FIRST_SOURCE = range(4)
"""Streams: the rows of an epoch, its packed rows, its batches of similar length; and source i's cycles, at
`FIRST_SOURCE + i`."""


def permutation(size: int, *, seed: int, epoch: int, stream: int = ROWS) -> np.ndarray:
    """The numbers 0..size - 1 in an order that depends on (seed, epoch, stream) only.

    seed, epoch  0..2**64 - 1
    returns      [size] int64
    """
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, stream, 0], dtype=np.uint64)
    return np.argsort(np.random.Philox(counter=counter, key=key).random_raw(size), kind="stable")
