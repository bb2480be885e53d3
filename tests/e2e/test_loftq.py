"""`python train.py conf=loftq`: the codes that were chosen travel with the adapter and come back to the same bits."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.e2e.conftest import ROOT, environment, losses
from trainer import finetune, load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import QuantConfig
from trainer.export.adapter import base_plan, read_adapter
from trainer.linear import weights_sha256
from trainer.model import load_model, prepare_model
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

TRAIN = (
    *("data=jsonl", "model.dtype=float32", "data.eval_rows=4", "evaluate.samples=0", "train.batch_size=4"),
    *("train.max_steps=6", "train.save_every=3", "lora.rank=8", "lora.dropout=0.1"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random Llama whose rows end on a block of 64: the shapes that bitsandbytes gets right on CPUs."""
    folder = tmp_path_factory.mktemp("base")
    model, tokenizer = load_model(ModelConfig(source=ModelSource.tiny))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(base, jsonl, tmp_path_factory):
    """Runs conf=loftq over `base` in this process; returns the Result."""

    def run(*overrides: str):
        folder = tmp_path_factory.mktemp("run") / "run"
        settings = ("conf=loftq", "model=folder", f"model.path={base}", *TRAIN, f"data.path={jsonl}")
        return finetune(load_config(*settings, f"output_dir={folder}", *overrides))

    return run


@pytest.fixture(scope="module")
def result(start):
    return start("loftq.calibration_rows=0")  # a random model's activations say little


def packed(base, folder=None):
    model, _ = load_model(ModelConfig(source=ModelSource.folder, path=str(base), dtype=DType.float32))
    prepare_model(model, QuantConfig(), plan=folder and base_plan(folder))
    return model


@pytest.fixture(scope="module")
def ours(base, result):
    return read_adapter(packed(base), result.exports["adapter"])


def identity(folder) -> dict:
    return json.loads((folder / "lowbit.json").read_text())


def held_out_loss_of(model, run_dir) -> float:
    from accelerate import Accelerator

    from trainer.data.dataset import load_data
    from trainer.evaluate.perplexity import held_out_loss
    from trainer.objective import NextTokenLoss

    config = load_config(f"resume={run_dir}")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export" / "adapter")
    rows = load_data(config.data, config.preference.method, tokenizer, config.seed).held_out
    return held_out_loss(NextTokenLoss(model), rows, Accelerator(), batch_size=16)


def test_the_run_says_what_loftq_did(result):
    report = json.loads((result.run_dir / "loftq.json").read_text())
    assert report["settings"] == {"iterations": 5, "calibration_rows": 0, "fallback": True}
    assert len(report["layers"]) == 14 and all(layer["ratio"] < 0.95 for layer in report["layers"])


@torch.no_grad()
def test_base_and_adapter_come_back_to_the_same_bits(base, result, ours):
    folder = result.exports["adapter"]
    says = identity(folder)
    codes = load_file(folder / "base_codes.safetensors")
    assert says["base_codes"]["num_layers"] == len({name.rpartition(".")[0] for name in codes}) > 0
    assert weights_sha256(ours) == says["base_sha256"] != weights_sha256(packed(base))
    assert held_out_loss_of(ours, result.run_dir) == result.metrics["eval_loss"]


def test_the_trained_run_begins_below_qlora(base, jsonl, result, start, tmp_path):
    """What the first step starts from is closer to the 16-bit model than plain NF4 is."""
    dense, _ = load_model(ModelConfig(source=ModelSource.folder, path=str(base), dtype=DType.float32))
    wanted = held_out_loss_of(dense, result.run_dir)
    plain = held_out_loss_of(packed(base), result.run_dir)
    assert abs(result.metrics["eval_loss_base"] - wanted) < 0.8 * abs(plain - wanted)


def test_one_iteration_needs_no_codes(base, start):
    result = start("loftq.iterations=1")
    folder = result.exports["adapter"]
    assert not (folder / "base_codes.safetensors").exists() and "base_codes" not in identity(folder)
    plain = packed(base)
    assert weights_sha256(plain) == identity(folder)["base_sha256"]
    assert held_out_loss_of(read_adapter(plain, folder), result.run_dir) == result.metrics["eval_loss"]
    assert "bitsandbytes" in (folder / "README.md").read_text()


@pytest.mark.parametrize("codebook", ["nf2", "int4"])
def test_other_bases(base, start, codebook):
    result = start(f"quant.codebook={codebook}", "train.max_steps=2", "lora.use_rslora=true")
    folder = result.exports["adapter"]
    model = read_adapter(packed(base, folder), folder)
    assert weights_sha256(model) == identity(folder)["base_sha256"]
    assert held_out_loss_of(model, result.run_dir) == result.metrics["eval_loss"]


def test_calibration_rows_weight_the_error(start):
    result = start("loftq.calibration_rows=6", "loftq.iterations=2", "train.max_steps=1")
    report = json.loads((result.run_dir / "loftq.json").read_text())
    assert all(layer["weighted"] and layer["ratio"] < 0.95 for layer in report["layers"])


# ---- opened elsewhere


@pytest.mark.parametrize("folder", ["run", "export"])
def test_the_server_serves_what_was_trained(result, ours, folder):
    path = result.run_dir if folder == "run" else result.exports["adapter"]
    llm = LLM(path, max_model_len=128)
    text, ids = "Add 3 and 4?", torch.tensor([llm.tokenizer("Add 3 and 4?")["input_ids"]])
    with torch.no_grad():
        expected = ours.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=12, max_new_tokens=12
        )
    output = llm.generate([text], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
    assert output.choices[0].token_ids == expected[0, ids.shape[1] :].tolist()


def test_a_server_with_the_plain_base_refuses_the_adapter(base, result):
    llm = LLM(str(base), quantization="nf4", dtype="float32", max_model_len=64)
    with pytest.raises(UserError, match=r"codes in its base_codes.safetensors \(start the server with model="):
        llm.load_adapter("a", result.exports["adapter"])


@torch.no_grad()
def test_the_model_card_loads_it_with_bitsandbytes(result, ours):
    """The card's own lines, over the layers that bitsandbytes packs: equal logits."""
    folder = result.exports["adapter"]
    lines = (folder / "README.md").read_text().split("```python")[-1].split("```")[0]
    assert "quant_state" in lines
    names: dict = {}
    exec(lines.replace("<this folder>", str(folder)), names)
    assert isinstance(names["model"], PeftModel)
    theirs = names["model"].train()  # in eval mode its CPU kernel rounds to bfloat16
    for layer in theirs.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    ids = torch.randint(0, 250, (2, 23), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


# ---- what does not fit is refused


@pytest.fixture
def copied(result, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(result.exports["adapter"], folder)
    return folder


def test_missing_codes_are_refused(base, copied):
    (copied / "base_codes.safetensors").unlink()
    with pytest.raises(UserError, match="base_codes.safetensors is missing"):
        read_adapter(packed(base), copied)


def test_codes_of_another_adapter_are_refused(base, copied):
    codes = load_file(copied / "base_codes.safetensors")
    first = next(name for name in codes if name.endswith("packed"))
    codes[first][0] ^= 1
    save_file(codes, copied / "base_codes.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is not the file that was exported"):
        read_adapter(packed(base), copied)


def test_another_base_is_refused(base, copied, tmp_path):
    """A layer whose codes do not travel, or the embedding, is still the base that the hash covers."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] *= -1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="was trained on a base"):
        read_adapter(packed(other), copied)


def test_a_base_packed_otherwise_is_refused(base, copied):
    model, _ = load_model(ModelConfig(source=ModelSource.folder, path=str(base), dtype=DType.float32))
    prepare_model(model, QuantConfig(block_size=128))
    with pytest.raises(UserError, match="packed with other quant settings"):
        read_adapter(model, copied)


# ---- resume


def test_a_killed_run_resumes_bit_identical(result, monkeypatch):
    """From the checkpoint at step 3: codes and start come from the run folder, not from another round of LoftQ."""
    run_dir = result.run_dir.with_name("killed")
    shutil.copytree(result.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_6")
    monkeypatch.setattr("trainer.loftq.fit_layer", lambda *args, **kwargs: pytest.fail("LoftQ ran again"))
    resumed = finetune(load_config(f"resume={run_dir}"))
    assert losses(run_dir) == losses(result.run_dir)
    assert resumed.metrics["eval_loss"] == result.metrics["eval_loss"]
    a, b = (load_file(r.exports["adapter"] / "adapter_model.safetensors") for r in (result, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert identity(resumed.exports["adapter"]) == identity(result.exports["adapter"])


def test_resume_refuses_other_codes(result):
    run_dir = result.run_dir.with_name("tampered")
    shutil.copytree(result.run_dir, run_dir)
    codes = load_file(run_dir / "base_codes.safetensors")
    next(iter(codes.values())).zero_()
    save_file(codes, run_dir / "base_codes.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="base model's weights changed"):
        finetune(load_config(f"resume={run_dir}"))


def test_what_an_unfinished_start_left_is_not_taken(start, result, tmp_path):
    """A run that died before its first checkpoint begins anew; its codes and factors are written over."""
    folder = tmp_path / "left"
    folder.mkdir()
    for name in ("base_codes.safetensors", "initial_factors.safetensors", "loftq.json"):
        (folder / name).write_bytes(b"half of it")
    other = start("loftq.calibration_rows=0", f"output_dir={folder}")
    assert losses(other.run_dir) == losses(result.run_dir)


def test_two_processes_have_one_base(base, jsonl, start, tmp_path):
    """The second process reads the codes and the start that the first one chose: with others, losses would differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as below: the SVD's last bits may choose another code
    one = start("lora.dropout=0", "train.max_steps=3")
    torch.set_num_threads(threads)
    settings = ("conf=loftq", "model=folder", f"model.path={base}", *TRAIN, f"data.path={jsonl}", "lora.dropout=0")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launch, str(ROOT / "train.py"), *settings, "train.max_steps=3", "train.batch_size=2", "output_dir=two"]
    env = {**environment(), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    two = tmp_path / "two"
    assert losses(two) == pytest.approx(losses(one.run_dir), rel=1e-5)  # gradients are summed in another order
    a, b = (identity(run_dir / "export" / "adapter") for run_dir in (one.run_dir, two))
    assert a["base_codes"] == b["base_codes"] and a["base_sha256"] == b["base_sha256"]


# ---- settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("conf=qlora", "loftq.calibration_rows=8"), "has no effect with loftq.iterations=0"),
        (("conf=loftq", "quant.codebook=none"), "loftq.iterations=5 makes up for quantization"),
        (("conf=loftq", "lora.init=pissa"), "both choose where the adapter starts"),
    ],
)
def test_settings_that_do_not_go_together(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("model=tiny", *overrides)
