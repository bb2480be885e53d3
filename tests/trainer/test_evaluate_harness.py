"""Tasks of lm-evaluation-harness: files and their data, and the engine as the harness asks it."""

import importlib.util
import json

import pytest
import yaml

from trainer.config.errors import UserError
from trainer.config.evaluation import EvaluationConfig
from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.harness import SHIPPED, compare_tasks, run_tasks, write_tasks
from trainer.evaluate.quality.program import open_program
from trainer.evaluate.quality.subject import Subject

PROBLEMS = [{"question": f"{n} plus 1?", "answer": f"#### {n + 1}"} for n in range(5)]
CHOICES = [{"prompt": "a b a b", "choices": [" a", " x", " qq"], "gold": n % 3} for n in range(6)]


@pytest.fixture
def data(tmp_path):
    for name, records in (("gsm8k", PROBLEMS), ("choices", CHOICES)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def config(data, *names, **settings):
    task_data = [f"{name}={data / name}.jsonl" for name in names]
    return EvaluationConfig(run="tiny", tasks="shipped", task_data=task_data, **settings)


def test_places_become_paths_and_tasks_without_data_are_left_out(data, tmp_path):
    said, folder = [], tmp_path / "tasks"
    folder.mkdir()
    assert write_tasks(config(data, "choices"), folder, said.append) == ["lowbit_choices"]
    task = yaml.safe_load((folder / "lowbit_choices.yaml").read_text())
    assert task["dataset_kwargs"]["data_files"]["test"] == str(data / "choices.jsonl")
    assert said == ["left out: lowbit_gsm8k.yaml needs gsm8k=<file>, in task_data"]


def test_shipped_tasks_fetch_nothing():
    for path in SHIPPED.glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        assert task["dataset_path"] == "json" and task["dataset_kwargs"]["data_files"]["test"].startswith("@")


def test_data_that_no_task_reads_is_refused(data, tmp_path):
    settings = EvaluationConfig(run="tiny", tasks="shipped", task_data=[f"arc={data / 'choices.jsonl'}"])
    with pytest.raises(UserError, match="task_data names arc, and no task"):
        write_tasks(settings, tmp_path, print)
    with pytest.raises(UserError, match="no task that can run: lowbit_choices.yaml needs choices=<file>"):
        write_tasks(EvaluationConfig(run="tiny", tasks="shipped"), tmp_path, print)


def test_figures_of_base_and_tuned():
    acc, ppl = "acc,none", "ppl,none"
    original = {"t": {acc: {"value": 0.5, "items": [1.0, 0.0, 1.0, 0.0]}, ppl: {"value": 3.0, "items": None}}}
    found = {"t": {acc: {"value": 0.75, "items": [1.0, 1.0, 1.0, 0.0]}, ppl: {"value": 2.0, "items": None}}}
    compared = compare_tasks(original, found, Resampler)["t"]
    assert compared["acc,none"]["difference"]["value"] == 0.25 and compared["acc,none"]["wrong_to_right"] == 1
    assert compared["ppl,none"] == {"value": 2.0, "original": 3.0}


@pytest.mark.skipif(bool(importlib.util.find_spec("lm_eval")), reason="lm-eval is installed here")
def test_without_the_harness_the_message_says_how_to_get_it(data):
    with open_program(Subject.of("tiny", "server"), longest=64) as program:
        with pytest.raises(UserError, match=r"pip install -e '\.\[eval\]'"):
            run_tasks(program, config(data, "choices"), print)


def test_the_engine_answers_the_harness(data):
    """Scores are those of log-likelihoods asked directly."""
    pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")
    with open_program(Subject.of("tiny", "server", dtype="float32"), longest=511) as program:
        found = run_tasks(program, config(data, "choices", "gsm8k"), print)
        pairs = program.llm.loglikelihood(["a b a b"] * 3, [" a", " x", " qq"])
    likeliest = max(range(3), key=lambda place: pairs[place][0])
    items = [float(record["gold"] == likeliest) for record in CHOICES]
    assert found["lowbit_choices"]["acc,none"]["items"] == items
    assert found["lowbit_gsm8k"]["exact_match,last-number"]["items"] == [0.0] * 5  # a random model
    again = compare_tasks(found, found, Resampler)
    assert again["lowbit_choices"]["acc,none"]["difference"]["value"] == 0


def test_rolling_and_generation_through_the_harness():
    pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")
    from types import SimpleNamespace

    from trainer.evaluate.quality.harness import model_of

    with open_program(Subject.of("tiny", "server", dtype="float32"), longest=63) as program:
        model, text = model_of(program.llm), "more text than the sixty-four tokens that this engine takes at a time"
        rolling = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])[0]
        ids = program.tokenizer(text)["input_ids"]
        first, second = ids[:63], ids[63:]
        # 64 tokens at a time: each token is scored once, behind as many as there is room for
        wanted = program.llm.loglikelihood([[model.prefix_token_id], ids[len(ids) - 64 : 63]], [first, second])
        assert rolling == pytest.approx(wanted[0][0] + wanted[1][0], rel=1e-4)
        asked = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
        answer = model.generate_until([SimpleNamespace(args=("Question:", asked))])[0]
        assert len(program.tokenizer(answer)["input_ids"]) <= 5
