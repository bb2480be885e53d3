import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.kernels import _cpp

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory):
    """Forty short exchanges, for every method; lengths differ, so that padding, accumulation and order matter."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {"prompt": f"Add {i} and {i + 1}" + "?" * (i % 7), "completion": f"{2 * i + 1}" * (1 + i % 5)}
        for i in range(40)
    ]
    for i, row in enumerate(rows):
        row |= {
            "chosen": row["completion"],
            "rejected": f"{2 * i}" * (1 + i % 4),
            "good": i % 3 > 0,
        }  # label would ask for kto
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train(tmp_path):
    """Runs `python train.py <overrides>` in a folder of its own, as a user would; returns the finished process."""

    def run(*overrides: str, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
        done = subprocess.run(
            command(*overrides), cwd=tmp_path, env=environment(), capture_output=True, text=True, **kwargs
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def cache(tmp_path):
    """A cache folder of this test, which holds no teacher yet, over the compiled kernels; returns its environment."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kernels").symlink_to(_cpp.cache_dir(), target_is_directory=True)
    return {**environment(), "LOWBIT_CACHE": str(folder)}


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "COLUMNS": "120"}


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}
