"""Quantization-aware training as a user runs it: train, stop, go on, export, open, serve; one function all the way."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import ROOT, environment, losses
from tests.e2e.test_resume import start, wait_for_step
from trainer import UserError, finetune, load_config
from trainer.config.model import ModelConfig, ModelSource
from trainer.data.dataset import load_data
from trainer.evaluate.perplexity import held_out_loss
from trainer.kernels import _cpp
from trainer.model import load_model
from trainer.objective import NextTokenLoss
from trainer.qat.packed_model import packed_layers, packed_sha256
from trainer.run import Result, export_run
from trainer.serve.llm import LLM

SETTINGS = (
    *("conf=qat", "model=tiny", "model.dtype=float32", "data=jsonl", "data.eval_rows=4", "data.max_seq_len=64"),
    *("evaluate.samples=1", "evaluate.max_new_tokens=3", "train.max_steps=6", "train.batch_size=4"),
    *("train.save_every=3", "optim.lr=0.01"),
)
TOKEN_IDS = torch.randint(0, 250, (1, 17), generator=torch.Generator().manual_seed(0))
RUNS = {
    "int4": (),
    "int4 in bfloat16": ("model.dtype=bfloat16",),
    "integer products": ("qat.scheme=int4_int8",),
    "static ranges": ("qat.scheme=int8_static", "qat.observer=percentile"),
    "static ranges and learned scales": (
        *("qat.scheme=int8_static", "qat.learn_scales=true", "qat.observer=moving_average"),
        "qat.freeze_observers=4",  # learned from there on
    ),
    "asymmetric, learned, 8-bit optimizer": (
        *("qat.learn_scales=true", "qat.symmetric=false", "optim.name=adamw_8bit", "qat.start=0.4"),
    ),
    "stochastic": ("qat.rounding=stochastic", "model.dtype=bfloat16"),
    "soft": ("qat.rounding=soft",),
    "lion, recomputed, accumulated": (
        *("optim.name=lion", "optim.lr=1e-3", "train.gradient_checkpointing=true"),
        *("train.batch_size=2", "train.grad_accum_steps=2"),
    ),
    "muon and an added token": ("optim.name=muon", "qat.learn_scales=true", "model.add_tokens=['<a>']"),
    "INT8 cache": ("qat.kv_cache=true",),
    "mixed": (
        "qat.schemes=[layers.0.*:none,down_proj:nf4,lm_head:int8_weight_only,embed_tokens:int8_weight_only]",
        "qat.start=2",
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, jsonl):
    """Trains model=tiny once for each set of overrides; returns the Result."""
    results: dict[str, Result] = {}

    def one(name: str) -> Result:
        if name not in results:
            folder = tmp_path_factory.mktemp("run") / "run"
            settings = (*SETTINGS, f"data.path={jsonl}", f"output_dir={folder}", *RUNS[name])
            results[name] = finetune(load_config(*settings))
        return results[name]

    return one


def held_out(result: Result, model: torch.nn.Module) -> float:
    """The run's own held-out loss, of another model."""
    config = load_config(f"resume={result.run_dir}")
    tokenizer = AutoTokenizer.from_pretrained(result.exports["quantized"])
    rows = load_data(config.data, config.preference.method, tokenizer, config.seed).held_out
    return held_out_loss(NextTokenLoss(model), rows, Accelerator(), batch_size=16)


@pytest.mark.parametrize("name", RUNS)
def test_the_exported_codes_are_the_trained_ones(run, name):
    result = run(name)
    qat, metrics = result.metrics["qat"], result.metrics
    model, _ = load_model(ModelConfig(ModelSource.folder, str(result.exports["quantized"])))
    assert packed_sha256(model) == qat["packed_sha256"]
    assert qat["eval_loss_packed"] < metrics["eval_loss_base"]
    if "cache" not in name:  # a model in Python has 16-bit keys and values
        assert held_out(result, model) == qat["eval_loss_packed"]
    # Sums of 96 to 160 terms in another order; 16 bits round at each layer.
    in_16_bits = "model.dtype=bfloat16" in RUNS[name]
    assert qat["eval_loss_packed"] == pytest.approx(metrics["eval_loss"], abs=1e-2 if in_16_bits else 1e-4)
    assert qat["eval_loss_rounded"] != metrics["eval_loss_base"]
    for what in ("packed", "exported"):
        assert qat["agreement"][what]["max"] == 0  # one program, equal codes
    if name == "static ranges and learned scales":
        assert "do not round their input alike" in qat["agreement"]["served"]
    else:
        # Rounding of inputs to 8 bits turns a last bit of a sum into a code here and there.
        limit = 0.05 if in_16_bits or name in ("integer products", "static ranges") else 1e-4
        limit = 0.05 if name == "INT8 cache" else limit  # a last bit decides about a code there, too
        assert 0 <= qat["agreement"]["served"]["max"] < limit
    assert json.loads((result.run_dir / "metrics.json").read_text())["qat"] == qat
    card = (result.exports["quantized"] / "README.md").read_text()
    assert qat["packed_sha256"] in card and f"{metrics['eval_loss']:.4f}" in card


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_lost_its_end_resumes_bit_identical(run, tmp_path, name):
    """Ranges, learned scales and what is trained about rounding come back, and the schedule knows where it is."""
    result = run(name)
    stopped = tmp_path / "stopped"
    shutil.copytree(result.run_dir, stopped)
    for path in (*(stopped / "checkpoints").iterdir(), stopped / "export"):
        if path.name != "step_3":
            shutil.rmtree(path)
    (stopped / "metrics.json").unlink()
    resumed = finetune(load_config(f"resume={stopped}"))
    assert losses(stopped) == losses(result.run_dir)
    for key in ("eval_loss_base", "eval_loss"):
        assert resumed.metrics[key] == result.metrics[key]
    assert resumed.metrics["qat"] == result.metrics["qat"]
    ours, theirs = (load_file(r.exports["quantized"] / "packed.safetensors") for r in (resumed, result))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    shutil.rmtree(stopped / "export")
    again = load_file(export_run(str(stopped))["quantized"] / "packed.safetensors")
    assert again.keys() == theirs.keys() and all(torch.equal(again[name], theirs[name]) for name in again)


def test_a_killed_run_resumes_bit_identical(tmp_path, jsonl):
    """With observers that go on, scales that are learned, and optimizer state in 8 bits."""
    settings = (*SETTINGS, f"data.path={jsonl}", "qat.scheme=int8_static", "qat.learn_scales=true")
    settings = (*settings, "optim.name=adamw_8bit", "train.max_steps=12", "train.save_every=2", "evaluate.samples=0")
    whole = finetune(load_config(*settings, f"output_dir={tmp_path / 'whole'}"))
    run_dir = tmp_path / "killed"
    process = start(tmp_path, *settings, f"output_dir={run_dir}")
    wait_for_step(run_dir, 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(losses(run_dir)) < 12, "the run ended before the kill"
    resumed = finetune(load_config(f"resume={run_dir}"))
    assert losses(run_dir) == losses(whole.run_dir)
    assert resumed.metrics["qat"] == whole.metrics["qat"]


def test_before_the_start_training_is_in_16_bits(run, tmp_path, jsonl):
    """Step for step the run of conf=full; from the start on another one."""
    mixed = losses(run("mixed").run_dir)
    full = (*SETTINGS[1:], "conf=full", f"data.path={jsonl}", f"output_dir={tmp_path / 'full'}")
    plain = losses(finetune(load_config(*full)).run_dir)
    assert [mixed[step] == plain[step] for step in (1, 2, 3)] == [True, True, False]


def test_the_server_serves_a_run(run):
    result = run("mixed")
    model, _ = load_model(ModelConfig(ModelSource.folder, str(result.exports["quantized"])))
    with torch.no_grad():
        logprobs = model(input_ids=TOKEN_IDS).logits[0, 3:-1].log_softmax(-1)
    expected = logprobs.gather(-1, TOKEN_IDS[0, 4:, None]).sum().item()
    ids = TOKEN_IDS[0].tolist()
    for served in (result.run_dir, result.exports["quantized"]):
        llm = LLM(served, max_model_len=64, max_num_seqs=4)
        [(found, _)] = llm.loglikelihood([ids[:4]], [ids[4:]])
        assert found == pytest.approx(expected, abs=1e-3)  # thirteen float32 log-probabilities
    assert LLM(run("INT8 cache").run_dir, max_model_len=64).runner.cache.dtype is torch.int8
    with pytest.raises(UserError, match="quantization=int4 would round .* again, which holds codes already"):
        LLM(result.run_dir, quantization="int4")


def test_a_merged_export_holds_the_values_of_the_codes(run, tmp_path):
    """What transformers opens computes what was trained, and a stopped run can be exported."""
    result = run("int4")
    stopped = tmp_path / "stopped"
    shutil.copytree(result.run_dir, stopped, ignore=shutil.ignore_patterns("export", "metrics.json"))
    folders = export_run(str(stopped), "export.formats=[merged,quantized]", "export.dtype=float32")
    dense = AutoModelForCausalLM.from_pretrained(folders["merged"], dtype=torch.float32)
    # transformers' modules under the same decoder: float32 sums of 96 to 160 terms in another order
    assert held_out(result, dense) == pytest.approx(result.metrics["eval_loss"], abs=1e-5)
    again, first = (folder / "packed.safetensors" for folder in (folders["quantized"], result.exports["quantized"]))
    assert again.read_bytes() == first.read_bytes()
    weights, packed = load_file(folders["merged"] / "model.safetensors"), load_file(first)
    assert weights.keys() == {name.replace(".packed", ".weight") for name in packed if not name.endswith(".scales")}


def test_a_packed_base_is_not_trained_again(run, jsonl, tmp_path):
    folder = run("int4").exports["quantized"]
    for recipe in ("conf=qat", "conf=qlora"):
        config = load_config(
            *(recipe, "model=folder", f"model.path={folder}", "data=jsonl", f"data.path={jsonl}"),
            f"output_dir={tmp_path / recipe.partition('=')[2]}",
        )
        with pytest.raises(UserError, match="is packed: steps smaller than the grid.*train from the 16-bit model"):
            finetune(config)


def test_a_mistake_in_a_pattern_leaves_one_line(train, jsonl):
    done = train(*SETTINGS, f"data.path={jsonl}", "qat.schemes=[dwon_proj:int8]", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert "qat.schemes has 'dwon_proj', which fits no layer; near it are down_proj" in done.stdout + done.stderr


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_five_steps_are_enough_for_a_share_of_the_run(share, tmp_path, jsonl):
    settings = [item for item in SETTINGS if "max_steps" not in item]
    config = load_config(
        *settings, f"data.path={jsonl}", "train.max_steps=5", f"qat.start={share}", f"output_dir={tmp_path / 'run'}"
    )
    assert finetune(config).metrics["steps"] == 5


# ---- two processes

PROCESSES = """
import json, shutil, sys
import torch.distributed as dist
from trainer import finetune, load_config

for settings in json.loads(sys.argv[1]):
    finetune(load_config(*settings))
if dist.get_rank() == 0:
    shutil.copytree("static", "stopped")
    for lost in ("checkpoints/step_3", "checkpoints/step_2", "export"):
        shutil.rmtree(f"stopped/{lost}")
dist.barrier()
finetune(load_config("resume=stopped"))
"""
SHARED = {
    "int4": ("conf=qat", "distill.weight=0.5", "optim.lr=0.01"),
    "static": ("conf=qat", "qat.scheme=int8_static", "qat.observer=percentile", "train.save_every=1", "optim.lr=1e-3"),
    "merge-aware": ("conf=qat_lora", "distill.weight=1"),
    "blocks": (
        *("conf=qat_blocks", "distill.weight=0.5", "optim.lr=1e-3"),
        *("blockwise.val_rows=8", "blockwise.batch_size=4"),
    ),
}


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory, jsonl):
    """Each of SHARED in one process, and all of them in turn in two processes; returns the folder of both.

    Two processes end without waiting for each other, and one of them asks the teacher and writes.
    """
    folder = tmp_path_factory.mktemp("shared")
    (folder / "runs.py").write_text(PROCESSES)
    (folder / "cache").mkdir()
    (folder / "cache" / "kernels").symlink_to(_cpp.cache_dir(), target_is_directory=True)
    settings = ("train.max_steps=3", "train.keep_checkpoints=3", "train.save_every=0", "evaluate.samples=0")
    runs = {name: (*SETTINGS[1:], f"data.path={jsonl}", *settings, *own) for name, own in SHARED.items()}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "runs.py"]
    shares = [[*run, "train.batch_size=2", f"output_dir={name}"] for name, run in runs.items()]
    env = {**environment(), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    env["LOWBIT_CACHE"] = str(folder / "cache")
    done = subprocess.run([*launch, json.dumps(shares)], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_CACHE", env["LOWBIT_CACHE"])
        for name, run in runs.items():
            finetune(load_config(*run, "train.batch_size=4", f"output_dir={folder / 'one' / name}"))
    return folder


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_equal_one(shared_runs, name):
    """Sums of gradients in another order: a last bit of them decides about a code of an input here and there."""
    one, two = shared_runs / "one" / name, shared_runs / name
    rel = 1e-4 if name == "static" else 1e-6
    assert losses(two) == pytest.approx(losses(one), rel=rel)
    ours, theirs = (json.loads((run / "metrics.json").read_text()) for run in (two, one))
    assert ours.keys() == theirs.keys() and ours["tokens"] == theirs["tokens"]
    for key in (key for key in ours if key.startswith("eval_")):
        assert ours[key] == pytest.approx(theirs[key], rel=10 * rel, abs=1e-7), key  # after three steps
    assert ours["qat"]["eval_loss_packed"] == pytest.approx(ours["eval_loss"], rel=1e-6)
    assert ours["qat"]["agreement"].keys() == {"packed", "exported", "served"}
    models = [load_model(ModelConfig(ModelSource.folder, str(run / "export" / "quantized")))[0] for run in (two, one)]
    assert packed_sha256(models[0]) == ours["qat"]["packed_sha256"]
    for (layer_name, layer), other in zip(
        packed_layers(models[0]).items(), packed_layers(models[1]).values(), strict=True
    ):
        a, b = (each.quantized.dequantize(torch.float32) for each in (layer, other))
        assert (a - b).norm() < 1e-3 * b.norm(), layer_name  # Adam divides what differs by the size of a gradient


def test_two_processes_observe_the_ranges_of_one(shared_runs):
    """After a step on equal weights: each value was counted once, whoever saw it, and resuming keeps all of it."""
    path = "checkpoints/step_1/trainable.safetensors"
    ours, theirs = load_file(shared_runs / "static" / path), load_file(shared_runs / "one" / "static" / path)
    counts = [name for name in ours if name.endswith("observer.counts")]
    assert len(counts) == 14
    for name in counts:
        assert ours[name].sum() == theirs[name].sum() > 0
        observed = name.removesuffix("counts") + "range"
        range_ = ours[observed].item()
        assert range_ == pytest.approx(theirs[observed].item(), rel=1e-5) and range_ > 0  # float32 sums
    assert losses(shared_runs / "stopped") == losses(shared_runs / "static")
    stopped, whole = (
        json.loads((shared_runs / name / "metrics.json").read_text())["qat"] for name in ("stopped", "static")
    )
    assert stopped == whole


def test_two_processes_ask_the_teacher_once(shared_runs):
    """Three runs of one model and one table of rows: one folder of answers, nothing left beside it."""
    folders = [path.name for path in (shared_runs / "cache" / "teachers").iterdir() if path.is_dir()]
    assert len(folders) == 1 and not folders[0].startswith(".")
