"""The pool of threads behind the serving kernels: every chunk runs once, whoever calls, and nobody waits for ever."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from trainer.kernels import _cpp, _tape

pytestmark = pytest.mark.skipif(_cpp.load("runtime") is None, reason="no C++ compiler here")

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
CHILD_S = 20  # a child that hangs is killed; 60 calls take some milliseconds


def run(function: Callable[[int], None], num_chunks: int, threads: int) -> None:
    """`run_parallel` of cpp/runtime.cpp with a Python function for the task, which gets the chunk."""
    run_parallel = _tape._runtime().run_parallel
    run_parallel.argtypes = [TASK, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    run_parallel(TASK(lambda _, chunk: function(chunk)), None, num_chunks, threads)


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_chunk_runs_once(num_chunks: int, threads: int) -> None:
    """Jobs follow each other at once, with new tasks: a worker that is late must not run a chunk of the next one."""
    for _ in range(20):
        chunks: list[int] = []
        run(chunks.append, num_chunks, threads)
        assert sorted(chunks) == list(range(num_chunks))


def test_chunks_are_taken_in_order() -> None:
    """Attention sorts its tiles, the costliest first, so that the last ones end together."""
    chunks: list[int] = []
    run(chunks.append, 64, 2)
    late = sum(after < before for before, after in zip(chunks, chunks[1:], strict=False))
    assert late <= 32  # a thread may pause between taking a chunk and appending it; backwards there are 63


def test_workers_wake_up_again() -> None:
    """After a pause longer than a worker spins; each chunk waits for another thread to take part."""
    for _ in range(3):
        time.sleep(0.02)
        together = threading.Barrier(2, timeout=CHILD_S)  # breaks if one thread does both chunks
        run(lambda _, together=together: together.wait(), 2, 2)
        assert not together.broken


def test_the_number_of_threads_may_change_at_each_call() -> None:
    for threads in (4, 1, 2, 4, 3, 2, 1, 4):
        seen: set[int] = set()
        run(lambda _, seen=seen: (time.sleep(0.001), seen.add(threading.get_ident())), 16, threads)
        assert 1 <= len(seen) <= threads


def test_two_callers_and_calls_within_a_call() -> None:
    """Whoever finds the pool taken does its chunks alone."""
    counts = [0] * 4

    def caller(index: int) -> None:
        for _ in range(50):
            chunks: list[int] = []
            run(chunks.append, 8, 3)
            counts[index] += sorted(chunks) == list(range(8))

    callers = [threading.Thread(target=caller, args=(index,), daemon=True) for index in range(len(counts))]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(CHILD_S)
    assert counts == [50] * 4
    inner: list[int] = []
    run(lambda _: run(inner.append, 3, 3), 4, 3)
    assert sorted(inner) == sorted([0, 1, 2] * 4)


FORKS = """
import os, signal, time, torch
from trainer.kernels.rms_norm import rms_norm
x, weight = torch.randn(512, 576), torch.randn(576)
torch.set_num_threads(4)
want = rms_norm(x, weight, eps=1e-5).numpy().tobytes()  # torch's own threads do not survive a fork
for fork in range(60):
    for _ in range(3):
        rms_norm(x, weight, eps=1e-5)
    end = time.perf_counter() + fork % 20 * 1e-5  # workers are at work, awake, going to sleep, asleep
    while time.perf_counter() < end:
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        same = all(rms_norm(x, weight, eps=1e-5).numpy().tobytes() == want for _ in range(20))
        os._exit(0 if same else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"fork {fork}: status {status}"
"""

EXIT = """
import threading, time, torch
from trainer.kernels._tape import Tape
from trainer.kernels.rms_norm import rms_norm
x, weight, tape = torch.randn(4096, 576), torch.randn(576), Tape()
torch.set_num_threads(3)
with tape.record():
    y = rms_norm(x, weight, eps=1e-5)
def calls():  # not through torch: Python ends its daemon threads where torch aborts the process
    while True:
        tape.replay()
threading.Thread(target=calls, daemon=True).start()
time.sleep(0.1)
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=6 * CHILD_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes() -> None:
    """With a condition variable some children of 60 hung: they wait for workers that they do not have."""
    python(FORKS)


def test_the_process_ends_while_kernels_run() -> None:
    python(EXIT)
