import json

from trainer.metrics import JsonLines


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_resume_cuts_the_lines_past_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, keep_steps=0)
    for step in range(1, 8):
        sink.log({"step": step, "loss": 0.1 + step})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # what a kill in mid-line leaves
    sink = JsonLines(path, keep_steps=5)
    sink.log({"step": 6, "loss": 6.5})
    sink.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_floats_survive_to_the_last_bit(tmp_path):
    value = 0.1 + 0.2
    sink = JsonLines(tmp_path / "metrics.jsonl", keep_steps=0)
    sink.log({"step": 1, "loss": value})
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == value
