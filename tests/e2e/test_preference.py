"""Preference tuning as a user runs it: steps that do not depend on how they are cut, references, exports."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import ROOT, losses
from trainer import UserError, finetune, load_config
from trainer.config.quant import QuantConfig
from trainer.export.adapter import read_adapter
from trainer.model import load_model, prepare_model

SETTINGS = (
    *("model=tiny", "model.dtype=float32", "data=jsonl", "data.eval_rows=4", "evaluate.samples=0", "optim.lr=0.01"),
    *("train.max_steps=3", "train.batch_size=6"),
)
METHODS = {
    "dpo": ("conf=dpo",),
    "ipo": ("conf=dpo", "preference.loss=ipo"),
    "orpo": ("conf=orpo",),
    "kto": ("conf=kto", "data.columns.label=good", "preference.desirable_weight=1.3"),
}
STARTS = {
    "LoRA": (),
    "DoRA": ("lora.use_dora=true",),
    "LoftQ": ("loftq.iterations=2",),
    "PiSSA": ("lora.init=pissa",),
    "PiSSA with DoRA": ("lora.init=pissa", "lora.use_dora=true"),
    "OLoRA of a 16-bit base": ("lora.init=olora", "quant.codebook=none"),
    "EVA": ("lora.init=eva", "lora.rank=4"),
    "saved modules": ("lora.modules_to_save=[embed_tokens,norm]",),
    "added tokens": ("model.add_tokens=['<|plus|>']",),
}


@pytest.fixture
def run(tmp_path, jsonl):
    """Fine-tunes in this process; returns the Result."""

    def start(name: str, *overrides: str):
        settings = (*SETTINGS, f"data.path={jsonl}", f"output_dir={tmp_path / name}")
        return finetune(load_config(*settings, *overrides))

    return start


def first_step(result) -> dict[str, float]:
    return json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("name", METHODS)
def test_steps_do_not_depend_on_how_they_are_cut(run, name):
    """Micro-steps, and passes that hold a pair or two: the large batch's losses, KTO's z_0 included."""
    whole = run("whole", *METHODS[name], "train.max_pass_tokens=100000")
    cut = ("train.batch_size=2", "train.grad_accum_steps=3", "train.max_pass_tokens=150")
    cut = run("cut", *METHODS[name], *cut)
    # the contract of docs/decisions.md on the first steps; then weights that differ in their last bits
    assert losses(cut.run_dir) == pytest.approx(losses(whole.run_dir), rel=1e-6)


def test_two_processes_equal_one(run, tmp_path, jsonl):
    """KTO: the gradient and z_0 are those of both processes together."""
    one = run("one", *METHODS["kto"])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    settings = [*SETTINGS, f"data.path={jsonl}", *METHODS["kto"], "train.batch_size=3", "output_dir=two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*launch, str(ROOT / "train.py"), *settings]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(one.run_dir), rel=1e-6)
    metrics = json.loads((tmp_path / "two" / "metrics.json").read_text())
    for name in ("eval_loss", "eval_accuracy", "eval_kl", "tokens"):
        assert metrics[name] == pytest.approx(one.metrics[name], rel=1e-5)  # after three steps


@pytest.mark.parametrize("name", STARTS)
def test_the_reference_is_where_training_starts(run, name):
    """Before the first update policy and reference are one function: no margin, and a loss of log 2."""
    result = run("run", "conf=dpo", "train.max_steps=1", *STARTS[name])
    first = first_step(result)
    # log-probabilities of up to 100 in float32; a 16-bit OLoRA computes W + B A - B A
    assert first["margin"] == pytest.approx(0, abs=1e-4)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert result.metrics["eval_loss_base"] == pytest.approx(math.log(2), abs=1e-4)
    assert result.metrics["eval_margin"] != 0


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_reference_computed_before_training_is_the_same(run, name):
    """One document's numbers do not depend on its neighbours, so neither do the losses."""
    settings = (*METHODS[name], "train.batch_size=3", "train.grad_accum_steps=2")
    during, before = run("during", *settings), run("before", *settings, "preference.precompute=true")
    assert losses(before.run_dir) == pytest.approx(losses(during.run_dir), rel=1e-6)
    assert before.metrics["eval_loss"] == pytest.approx(during.metrics["eval_loss"], rel=1e-6)
    saved = load_file(before.run_dir / "reference_log_probs.safetensors")
    assert {key: tuple(value.shape) for key, value in saved.items()} == {"train": (36, 2), "held_out": (4, 2)}
    assert all((value < 0).all() and value.dtype is torch.float64 for value in saved.values())


def test_on_one_layout_of_passes_it_is_the_same_to_the_bit(run):
    """All rows in one pass, in the order of their lengths, then and now."""
    settings = ("conf=dpo", "data.max_rows=8", "data.eval_rows=1", "train.batch_size=7", "train.max_pass_tokens=100000")
    during, before = run("during", *settings), run("before", *settings, "preference.precompute=true")
    assert losses(before.run_dir) == losses(during.run_dir)


def test_every_weight_can_be_trained_against_a_computed_reference(run):
    """The model before training is gone after the first step; a resumed run reads what it said."""
    settings = ("conf=full", "preference.method=dpo", "preference.precompute=true", "optim.lr=0.001")
    whole = run("whole", *settings, "train.save_every=2", "train.max_steps=4")
    assert first_step(whole)["loss"] == pytest.approx(math.log(2), abs=1e-6)  # float32 sums of the same passes
    stopped = run("stopped", *settings, "train.max_steps=2", "optim.schedule=constant", "optim.warmup_ratio=0")
    steady = run("steady", *settings, "train.max_steps=4", "optim.schedule=constant", "optim.warmup_ratio=0")
    finetune(load_config(f"resume={stopped.run_dir}", "train.max_steps=4"))
    assert losses(stopped.run_dir) == losses(steady.run_dir)


@pytest.mark.parametrize("name", METHODS)
def test_training_prefers_what_is_chosen(run, jsonl, tmp_path, name):
    """Held-out pairs of one rule (the odd number is right): the margin grows with the rewards that are learned."""
    path, rows = tmp_path / "rows.jsonl", [json.loads(line) for line in jsonl.read_text().splitlines()]
    for number, row in enumerate(rows):  # each second answer is a bad one, for KTO
        row |= {"completion": row["rejected"] if number % 2 else row["chosen"], "good": number % 2 == 0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = run("run", *METHODS[name], f"data.path={path}", "data.eval_rows=8", "train.max_steps=30").metrics
    assert metrics["eval_loss"] < metrics["eval_loss_base"]
    assert metrics["eval_margin"] > 0 and metrics["eval_accuracy"] >= 0.75


def test_what_a_run_leaves(run):
    """Figures of the preference, not of the next token; an adapter like any other, whose card names the method."""
    result = run("run", "conf=dpo", "preference.beta=0.2", "lora.use_rslora=true", "train.eval_every=1")
    assert {"eval_loss", "eval_accuracy", "eval_margin", "eval_prefers_chosen"} <= result.metrics.keys()
    assert "perplexity" not in result.metrics and result.metrics["eval_rows"] == 4
    assert {"rewards_chosen", "rewards_rejected", "margin", "accuracy", "eval_accuracy"} <= first_step(result).keys()
    folder = result.exports["adapter"]
    card = (folder / "README.md").read_text()
    assert "rsLoRA of rank 16, alpha 32, on all linear layers" in card and "by DPO (beta 0.2)" in card
    assert "| margin of the reward |  |" in card and "perplexity" not in card
    model, tokenizer = load_model(load_config(f"resume={result.run_dir}").model)
    prepare_model(model, QuantConfig())
    assert read_adapter(model, folder, tokenizer).peft_config["default"].use_rslora


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_recipes_run_without_a_file(tmp_path, recipe):
    """Pairs are made of docstrings."""
    settings = ("model=tiny", "train.max_steps=2", "data.max_rows=40", "data.eval_rows=4", "evaluate.max_new_tokens=4")
    result = finetune(load_config(f"conf={recipe}", *settings, f"output_dir={tmp_path / 'run'}"))
    assert result.metrics["steps"] == 2 and result.samples[0].reference


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("conf=dpo", "train.neftune_alpha=5"),
            "train.neftune_alpha=5.0 cannot be combined with preference.method=dpo",
        ),
        (("conf=full", "preference.method=kto"), "leaves no model before training .*preference.precompute=true"),
        (("conf=orpo", "preference.precompute=true"), "preference.precompute=true has no effect"),
        (("conf=kto", "data=jsonl", "data.path=PATH", "data.columns.chosen=a"), "data.columns.chosen=a has no effect"),
        (("conf=qlora", "data=jsonl", "data.path=PATH", "data.columns.label=a"), "data.columns.label=a has no effect"),
        (("conf=dpo", "data=jsonl", "data.path=PATH", "data.columns.text=a"), "which reads prompt, chosen, rejected"),
        (("conf=dpo", "preference.method=ppo"), "preference.method"),
    ],
)
def test_what_does_not_fit_together_is_said_in_the_first_second(jsonl, overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("model=tiny", *(item.replace("PATH", str(jsonl)) for item in overrides))
