"""With `-n auto` (pytest-xdist) tests run in a process a core that this one may use, each with its share of threads.

Threads of several processes on the same cores wait for one another at every kernel.
"""

import os
import shutil

import pytest

MAX_WORKERS = 8
"""Each holds torch and models of its own; a machine of many cores need not have the memory for one a core."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // int(workers))))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return min(CORES, MAX_WORKERS)


@pytest.fixture(scope="module")
def browser():
    """A Chromium that is on PATH, for pages of ours."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the playwright package: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs user namespaces, which containers often lack; the page is our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()
