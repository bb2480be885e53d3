"""Quantization-aware training as a user runs it: train, stop, go on, export, open, serve; one function all the way."""

import json
import shutil
import signal

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import losses
from tests.e2e.test_resume import start, wait_for_step
from trainer import UserError, finetune, load_config
from trainer.config.model import ModelConfig, ModelSource
from trainer.data.chat import tokenize_rows
from trainer.data.formats import load_rows
from trainer.evaluate.perplexity import held_out_loss
from trainer.model import load_model
from trainer.objective import NextTokenLoss
from trainer.qat.packed_model import packed_sha256
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
    "static ranges and learned scales": (
        *("qat.scheme=int8_static", "qat.learn_scales=true", "qat.observer=moving_average"),
        "qat.freeze_observers=4",  # learned from there on
    ),
    "asymmetric, learned, 8-bit optimizer": (
        *("qat.learn_scales=true", "qat.symmetric=false", "optim.name=adamw_8bit", "qat.start=0.4"),
    ),
    "stochastic": ("qat.rounding=stochastic", "model.dtype=bfloat16"),
    "soft": ("qat.rounding=soft",),
    "INT8 cache": ("qat.kv_cache=true",),
    "mixed": ("qat.schemes=[layers.0.*:none,down_proj:nf4,lm_head:int4,embed_tokens:int4]", "qat.start=2"),
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
    rows = load_rows(config.data, config.seed)[1]
    tokenizer = AutoTokenizer.from_pretrained(result.exports["quantized"])
    rows = tokenize_rows(rows, tokenizer, config.data.max_seq_len)
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
    if "static" in name:
        assert "each token to INT8" in qat["agreement"]["served"]
    else:
        # Rounding of inputs to 8 bits turns a last bit of a sum into a code here and there.
        limit = 0.05 if in_16_bits or name == "integer products" else 1e-4
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
    with pytest.raises(UserError, match="quantization=int4 would round .* again, which holds the codes"):
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
        with pytest.raises(UserError, match="is packed: its codes are what was trained.*train from the 16-bit model"):
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
