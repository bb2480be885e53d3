import json

import pytest

from trainer import finetune, load_config

SETTINGS = ("conf=qlora", "model=tiny", "model.dtype=float32", "data=jsonl", "data.eval_rows=2", "evaluate.samples=0")


@pytest.fixture(scope="session")
def uneven_jsonl(tmp_path_factory):
    """Rows with 2 to 90 target tokens: a mean of means would differ from the mean."""
    path = tmp_path_factory.mktemp("data") / "uneven.jsonl"
    rows = [{"prompt": f"Repeat {i}", "completion": f"{i}" * (1 + (i * 13) % 30)} for i in range(20, 44)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path, uneven_jsonl):
    """Fine-tunes model=tiny in this process; returns the Result."""

    def start(name: str, *overrides: str):
        settings = (*SETTINGS, f"data.path={uneven_jsonl}", f"output_dir={tmp_path / name}")
        return finetune(load_config(*settings, *overrides))

    return start


def losses(run_dir) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
