"""Batches of rows of similar length: steps that pad little where documents are padded."""

import numpy as np

from trainer.data.ordering.permutation import BATCHES, permutation

WINDOW_STEPS = 50
"""Steps whose rows are sorted by length together: a fiftieth of the spread is left in a batch, and an epoch of more
steps is not sorted as a whole."""


def group(
    lengths: np.ndarray, order: np.ndarray, unit_rows: int, *, seed: int, epoch: int, head: int = 0
) -> np.ndarray:
    """Put rows of similar length into one step.

    lengths    [R] int, tokens, by row number
    order      [N] int64, the rows of the epoch
    unit_rows  rows of a step
    head       rows that fill up the step in which the last epoch ended, so that later steps start with a batch
    returns    [N] int64: the head, batches in any order, and what is left over at the end; each sorted by length

    In epoch 0 the batch with the longest row comes first: memory runs out at once or never. Later epochs would gain
    nothing, and would each start with an untypical step.
    """
    if epoch == 0 and len(order) >= unit_rows:  # never among the rows that are left over
        order = order.copy()
        longest = int(np.argmax(lengths[order]))
        order[[0, longest]] = order[[longest, 0]]
    head = min(head, len(order))
    num_batches = (len(order) - head) // unit_rows
    end = head + num_batches * unit_rows
    cuts = [head, *range(head + WINDOW_STEPS * unit_rows, end, WINDOW_STEPS * unit_rows), end]
    windows = [_by_length(lengths, order[first:stop]) for first, stop in zip(cuts, cuts[1:], strict=False)]
    batches = np.concatenate(windows).reshape(num_batches, unit_rows)
    batches = batches[permutation(num_batches, seed=seed, epoch=epoch, stream=BATCHES)]
    if epoch == 0 and num_batches:
        longest = int(np.argmax(lengths[batches].max(axis=1)))
        batches[[0, longest]] = batches[[longest, 0]]
    return np.concatenate([_by_length(lengths, order[:head]), batches.ravel(), _by_length(lengths, order[end:])])


def _by_length(lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(lengths[rows], kind="stable")]
