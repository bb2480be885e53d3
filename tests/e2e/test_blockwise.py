"""`python train.py conf=qat_blocks`: blocks, then scales, then a folder of codes; stopped, gone on with, served."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import ROOT, environment, losses
from trainer import UserError, finetune, load_config
from trainer.run import Result, export_run
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

SETTINGS = (
    *("conf=qat_blocks", "model=tiny", "model.dtype=float32", "data=jsonl", "data.eval_rows=4", "evaluate.samples=0"),
    *(
        "blockwise.epochs=3",
        "blockwise.val_rows=8",
        "blockwise.batch_size=4",
        "train.max_steps=4",
        "train.save_every=2",
    ),
    *("train.batch_size=4", "optim.lr=1e-3"),
)


@pytest.fixture(scope="module")
def start(jsonl, tmp_path_factory):
    """Trains model=tiny in this process; returns the Result."""

    def run(*overrides: str, folder: Path | None = None) -> Result:
        folder = folder or tmp_path_factory.mktemp("run") / "run"
        return finetune(load_config(*SETTINGS, f"data.path={jsonl}", f"output_dir={folder}", *overrides))

    return run


@pytest.fixture(scope="module")
def result(start) -> Result:
    return start()


def codes(run_dir: Path) -> dict[str, list]:
    return {
        name: tensor.tolist() for name, tensor in load_file(run_dir / "export/quantized/packed.safetensors").items()
    }


def test_the_run_says_what_each_block_gained(result):
    report = json.loads((result.run_dir / "blockwise.json").read_text())
    assert report["settings"]["epochs"] == 3 and report["accepted"] == len(report["blocks"]) == 2
    assert all(block["error_after"] < block["error_before"] for block in report["blocks"])
    metrics = result.metrics
    assert metrics["steps"] == 4
    assert metrics["eval_loss"] < metrics["qat"]["eval_loss_rounded"]
    assert metrics["qat"]["eval_loss_packed"] == pytest.approx(metrics["eval_loss"], abs=1e-4)  # sums in another order


def test_scales_alone_are_trained_after_the_blocks(result):
    """Codes of the export are those of the blocks; scales are not."""
    exported = load_file(result.exports["quantized"] / "packed.safetensors")
    for index in range(2):
        for name, tensor in load_file(result.run_dir / "blockwise" / f"block_{index:03d}.safetensors").items():
            same = bool((exported[f"model.layers.{index}.{name}"] == tensor).all())
            assert same is not name.endswith("scales"), name


def test_the_server_serves_what_was_trained(result):
    prompt, params = "Add 3 and 4?", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    folders = (result.run_dir, result.exports["quantized"])
    answers = [LLM(folder, max_model_len=64).generate([prompt], params)[0].choices[0].token_ids for folder in folders]
    assert answers[0] == answers[1] and len(answers[0]) == 8
    assert result.metrics["qat"]["agreement"]["served"]["max"] < 1e-2  # nats; float32, sums in another order


def test_a_run_killed_between_blocks_goes_on_bit_identical(result, tmp_path):
    """All that it had was its config and one finished block."""
    killed = tmp_path / "killed"
    (killed / "blockwise").mkdir(parents=True)
    for name in ("config.yaml", "blockwise/block_000.safetensors"):
        shutil.copy(result.run_dir / name, killed / name)
    resumed = finetune(load_config(f"resume={killed}"))
    assert losses(killed) == losses(result.run_dir)
    assert codes(killed) == codes(result.run_dir)
    for key in ("eval_loss_base", "eval_loss"):
        assert resumed.metrics[key] == result.metrics[key]


def test_a_run_killed_among_scales_goes_on_bit_identical(result, tmp_path, monkeypatch):
    killed = tmp_path / "killed"
    shutil.copytree(result.run_dir, killed)
    shutil.rmtree(killed / "checkpoints" / "step_4")
    monkeypatch.setattr(
        "trainer.blockwise.blocks.train_codes", lambda *args, **kwargs: pytest.fail("a block was trained again")
    )
    resumed = finetune(load_config(f"resume={killed}"))
    assert losses(killed) == losses(result.run_dir) and codes(killed) == codes(result.run_dir)
    assert resumed.metrics["qat"]["eval_loss_rounded"] == result.metrics["qat"]["eval_loss_rounded"]


@pytest.mark.parametrize("teacher", [("distill.weight=1",), ("distill.weight=0.5", "distill.top_k=0")])
def test_scales_follow_a_teacher(start, cache, monkeypatch, teacher):
    """The 16-bit model, whose weights are gone when the scales are trained; stopped, gone on with, exported again."""
    monkeypatch.setenv("LOWBIT_CACHE", cache["LOWBIT_CACHE"])
    whole = start(*teacher)
    # The base is its own teacher: what is left is float16 of the cache, 5e-4 of a log-probability, squared.
    assert abs(whole.metrics["eval_kl_base"]) < 1e-6 < whole.metrics["eval_kl_rounded"]
    killed = whole.run_dir.with_name("killed")
    shutil.copytree(whole.run_dir, killed)
    shutil.rmtree(killed / "checkpoints" / "step_4")
    resumed = finetune(load_config(f"resume={killed}"))
    assert losses(killed) == losses(whole.run_dir) and codes(killed) == codes(whole.run_dir)
    for key in ("eval_loss", "eval_kl", "eval_kl_base", "eval_kl_rounded"):
        assert resumed.metrics[key] == whole.metrics[key]
    shutil.rmtree(killed / "export")
    folder = export_run(str(killed))["quantized"]
    assert codes(killed) == codes(whole.run_dir)
    card = (folder / "README.md").read_text()
    assert (
        "block by block (epochs: 3) and then all scales, through INT4 in groups of 32, learned scales, taught by"
        in card
    )


def test_an_export_needs_no_training(result, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(result.run_dir, copied)
    shutil.rmtree(copied / "export")
    export_run(str(copied))
    assert codes(copied) == codes(result.run_dir)


def test_other_blocks_are_refused(result, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(result.run_dir, copied)
    path = copied / "blockwise" / "block_000.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {**metadata, "phase": "0" * 64})
    with pytest.raises(UserError, match="block_000.safetensors was trained from other weights"):
        finetune(load_config(f"resume={copied}"))


def test_without_the_second_phase(start):
    """What the blocks chose is what is exported."""
    result = start("train.max_steps=0")
    exported = load_file(result.exports["quantized"] / "packed.safetensors")
    for name, tensor in load_file(result.run_dir / "blockwise" / "block_001.safetensors").items():
        assert bool((exported[f"model.layers.1.{name}"] == tensor).all())
    assert result.metrics["steps"] == 0
    again = finetune(load_config(f"resume={result.run_dir}"))
    assert again.metrics["eval_loss"] == result.metrics["eval_loss"]


def test_without_the_first_phase(start):
    """Scales of the nearest codes (PEQA, arXiv:2305.14152)."""
    result = start("blockwise.epochs=0", "blockwise.val_rows=32", "blockwise.batch_size=8")
    assert not (result.run_dir / "blockwise").exists()
    assert result.metrics["eval_loss"] < result.metrics["qat"]["eval_loss_rounded"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("conf=qat", "blockwise.epochs=1"), "blockwise.epochs=1 fixes codes, and train.weights=all trains none"),
        (("conf=qat", "train.max_steps=0"), "train.max_steps=0 trains nothing without blockwise.epochs"),
        (("conf=full", "train.weights=scales", "export.formats=[merged]"), "qat.scheme=none has none"),
        (("conf=qat_blocks", "qat.start=2"), "qat.start=2 or .* has no effect with train.weights=scales"),
        (("conf=qat_blocks", "quant.codebook=nf4"), "trains codes made from 16-bit weights, and quant.codebook=nf4"),
        (("conf=qat_blocks", "model.add_tokens=[x]"), "does not train embeddings"),
        (("conf=qat_blocks", "optim.weight_decay=0.1"), "a smaller scale is another weight"),
        (("conf=qat_blocks", "blockwise.rows=8"), "blockwise.rows=8 leaves no row to train on"),
        (("conf=qat_blocks", "blockwise.epochs=-1"), "blockwise.epochs=-1; give 0 or more"),
        (("conf=qat", "blockwise.loss=mse"), "blockwise.loss has no effect with blockwise.epochs=0"),
    ],
)
def test_settings_that_do_not_go_together(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("model=tiny", *overrides)


MEMORY = """
import gc, re, sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from trainer.blockwise.blocks import BlockwiseTraining
from trainer.config.blockwise import BlockwiseConfig
from trainer.config.qat import QatConfig, SchemeName
from trainer.qat.fake_quant import fake_quantize_linears
from trainer.master_weights import with_master_weights
from trainer.objective import NextTokenLoss
from trainer.qat.prepare import layer_schemes

def peak_mb():  # of this program; ru_maxrss begins with that of the one that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10

def build(num_layers):
    torch.manual_seed(0)
    sizes = dict(hidden_size=384, intermediate_size=1152, num_attention_heads=6, num_key_value_heads=6, vocab_size=256)
    torch.set_default_dtype(torch.bfloat16)  # float32 weights, rounded afterwards, would be the peak
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **sizes))
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)

def train_blocks(model, folder):
    schemes = layer_schemes(model, QatConfig(scheme=SchemeName.int4, learn_scales=True))
    config = BlockwiseConfig(epochs=1, rows=None, val_rows=2, batch_size=4)
    rows = [list(range(64))] * 10
    options = dict(seed=0, device=torch.device("cpu"), max_pass_tokens=256)
    BlockwiseTraining(model, schemes, rows, config, Path(folder), **options).run()

train_blocks(build(1), sys.argv[1] + "/warm")
model = build(12)
gc.collect()
before = peak_mb()
train_blocks(model, sys.argv[1] + "/deep")
blocks = peak_mb() - before
del model
model = build(12).requires_grad_(True)
schemes = layer_schemes(model, QatConfig(scheme=SchemeName.int4, learn_scales=True))
fake_quantize_linears(model, schemes.get)
optimizer = with_master_weights(torch.optim.AdamW(model.parameters(), fused=True))
ids = torch.arange(64).repeat(4, 1)
NextTokenLoss(model)(ids, ids).backward()
optimizer.step()
print(blocks, peak_mb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_blocks_need_a_part_of_the_memory_of_full_qat(tmp_path):
    """12 blocks of 1.9 M weights. Full QAT has 14 bytes a weight beside the model, 320 MB; a block a twelfth of that.

    Packed layers are kept beside it: 0.6 byte a weight of all blocks, 14 MB, while 16-bit weights are freed.
    """
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    blocks, full = map(float, done.stdout.split()[-2:])
    assert full > 250  # MB: the measurement sees masters and Adam's state
    # A block's masters are 7 MB, its gradients and Adam's state 22; freed memory is not always given back
    assert 10 < blocks < 0.3 * full
