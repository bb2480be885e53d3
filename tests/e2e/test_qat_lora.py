"""`python train.py conf=qat_lora`: what was trained is what ships, and how much the usual way would keep of it."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from tests.e2e.conftest import losses
from trainer import finetune, load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import Codebook, QuantConfig
from trainer.data.dataset import load_data
from trainer.evaluate.merge_gain import measure_merge_gain
from trainer.evaluate.perplexity import held_out_loss
from trainer.export.adapter import read_adapter, read_identity
from trainer.export.rounded_adapter import SCALES
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss
from trainer.qat.packed_model import packed_sha256
from trainer.run import export_run
from trainer.serve.llm import LLM

SETTINGS = ("model=tiny", "model.dtype=float32", "data=jsonl", "data.eval_rows=4", "evaluate.samples=0")
TRAIN = ("train.max_steps=6", "train.save_every=3", "train.batch_size=4", "lora.rank=8")


@pytest.fixture(scope="module")
def start(jsonl, tmp_path_factory):
    """Runs a recipe, conf=qat_lora unless another is named, on model=tiny in this process; returns the Result."""

    def run(*overrides: str, conf: str = "qat_lora"):
        folder = tmp_path_factory.mktemp("run") / "run"
        settings = (f"conf={conf}", *SETTINGS, *TRAIN, f"data.path={jsonl}", f"output_dir={folder}")
        return finetune(load_config(*settings, *overrides))

    return run


@pytest.fixture(scope="module")
def result(start):
    return start()


def base(dtype: DType = DType.float32):
    return load_model(ModelConfig(source=ModelSource.tiny, dtype=dtype))[0]


def trained_sha256(result) -> str:
    return result.metrics["qat"]["packed_sha256"]


def test_the_loss_falls_and_the_export_has_it(result) -> None:
    curve = list(losses(result.run_dir).values())
    assert curve[-1] < curve[0] - 0.1  # 6 steps at the default rate lower it by 0.5
    metrics = result.metrics
    assert metrics["eval_loss"] < metrics["qat"]["eval_loss_rounded"] - 0.1
    # One function; the products of codes and of the merged layers are the same calls
    assert metrics["qat"]["eval_loss_packed"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_codes_of_training_export_and_adapter_are_one(result) -> None:
    config = json.loads((result.exports["quantized"] / "config.json").read_text())
    assert config["quantization_config"]["packed_sha256"] == trained_sha256(result)
    adapter = read_adapter(base(), result.exports["adapter"])
    assert packed_sha256(adapter) == trained_sha256(result)
    rounded = json.loads((result.exports["adapter"] / "lowbit.json").read_text())["rounded"]
    assert rounded["packed_sha256"] == trained_sha256(result) and len(rounded["layers"]) == 14


@torch.no_grad()
def test_the_adapter_computes_what_the_packed_model_computes(result) -> None:
    quantized = load_model(ModelConfig(ModelSource.folder, str(result.exports["quantized"]), dtype=DType.float32))[0]
    adapter = read_adapter(base(), result.exports["adapter"])
    ids = torch.randint(0, 250, (2, 23), generator=torch.Generator().manual_seed(0))
    assert torch.equal(adapter(input_ids=ids).logits, quantized(input_ids=ids).logits)


@pytest.mark.parametrize(
    "overrides",
    [
        ("qat.scheme=nf4", "lora.init=pissa"),
        ("qat.scheme=int4_int8", "lora.use_rslora=true", "lora.rank_pattern=[down_proj:4]"),
        ("qat.learn_scales=true", "qat.symmetric=false", "lora.target_modules=[q_proj,down_proj]"),
        ("qat.schemes=['layers.0.*:none']", "qat.start=0.5", "model.add_tokens=['<a>']"),
        ("model.dtype=bfloat16", "qat.schemes=['o_proj:int8']", "train.max_pass_tokens=64"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_schemes_and_adapters(start, overrides) -> None:
    result = start("train.max_steps=2", *overrides)
    dtype = DType.bfloat16 if "model.dtype=bfloat16" in overrides else DType.float32
    added = ["<a>"] if any("add_tokens" in item for item in overrides) else []
    model, tokenizer = load_model(ModelConfig(source=ModelSource.tiny, dtype=dtype, add_tokens=added))
    assert packed_sha256(read_adapter(model, result.exports["adapter"], tokenizer)) == trained_sha256(result)
    assert (result.exports["adapter"] / SCALES).is_file() is ("qat.learn_scales=true" in overrides)


# ---- the usual way


@pytest.fixture(scope="module")
def naive(start):
    """QLoRA with the same grid, factors, rate and steps."""
    return start(
        *("quant.codebook=int4", "lora.target_modules=all-linear", "export.formats=[adapter]", "optim.lr=0.001"),
        conf="qlora",
    )


def gain_of(model, result, weights=None):
    config = load_config(f"resume={result.run_dir}")
    tokenizer = AutoTokenizer.from_pretrained(result.exports["adapter"])
    rows = load_data(config.data, config.preference.method, tokenizer, config.seed).held_out
    objective = NextTokenLoss(model)
    return measure_merge_gain(model, lambda: held_out_loss(objective, rows, Accelerator(), batch_size=16), weights)


def test_what_ships_keeps_the_gain_that_the_usual_way_loses(start, naive) -> None:
    """Of the loss that the same training took off, merge-aware ships all, and Q(W + s B A) of the usual way less."""
    ours = start("optim.lr=0.001")
    kept = gain_of(read_adapter(base(), ours.exports["adapter"]), ours)
    assert kept.trained == pytest.approx(ours.metrics["eval_loss"], rel=1e-6)  # the server's order of the same sums
    assert kept.shipped == kept.trained and kept.kept == 1
    dense = base()
    weights = {name: layer.weight.clone() for name, layer in dense.named_modules() if type(layer) is nn.Linear}
    prepare_model(dense, QuantConfig(Codebook.int4))
    lost = gain_of(read_adapter(dense, naive.exports["adapter"]), naive, weights)
    assert lost.trained == pytest.approx(naive.metrics["eval_loss"], rel=1e-6)
    # 0.958 here. A random model has little to lose by rounding: docs/quality_qat.md has what a trained one keeps
    assert lost.kept < 0.98


def test_the_usual_way_needs_the_weights(naive) -> None:
    dense = base()
    prepare_model(dense, QuantConfig(Codebook.int4))
    with pytest.raises(ValueError, match="q_proj is packed, and `weights` does not have it"):
        gain_of(read_adapter(dense, naive.exports["adapter"]), naive)


# ---- resume


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("qat.learn_scales=true", "qat.start=4", "optim.name=adamw_8bit"),
        ("distill.weight=1", "optim.name=lion", "optim.lr=1e-3"),
        ("distill.weight=0.5", "distill.top_k=0", "train.gradient_checkpointing=true", "train.grad_accum_steps=2"),
    ],
    ids=lambda overrides: " ".join(overrides[:2]),
)
def test_a_killed_run_resumes_bit_identical(start, overrides, cache, monkeypatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", cache["LOWBIT_CACHE"])
    whole = start(*overrides)
    run_dir = whole.run_dir.with_name("killed")
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_6")
    resumed = finetune(load_config(f"resume={run_dir}"))
    assert losses(run_dir) == losses(whole.run_dir)
    assert trained_sha256(resumed) == trained_sha256(whole)
    shutil.rmtree(run_dir / "export")
    again = export_run(str(run_dir))
    assert read_identity(again["adapter"])["rounded"]["packed_sha256"] == trained_sha256(whole)
    first = whole.exports["quantized"] / "packed.safetensors"
    assert (again["quantized"] / "packed.safetensors").read_bytes() == first.read_bytes()
    for folder in again.values():
        card = (folder / "README.md").read_text()
        assert "merge-aware, through INT4 in groups of 32" in card
        assert ("taught by the 16-bit model" in card) is any("distill" in item for item in overrides)


# ---- what does not fit is refused


def test_a_damaged_adapter_is_refused(start, tmp_path) -> None:
    result = start("train.max_steps=1", "qat.learn_scales=true")
    folder = tmp_path / "adapter"
    shutil.copytree(result.exports["adapter"], folder)
    scales = load_file(folder / SCALES)
    next(iter(scales.values())).mul_(2)
    save_file(scales, folder / SCALES)
    with pytest.raises(UserError, match="was trained to codes"):
        read_adapter(base(), folder)
    (folder / SCALES).unlink()
    with pytest.raises(UserError, match=f"{SCALES} is missing"):
        read_adapter(base(), folder)


def test_the_server_does_not_put_it_beside_its_base(result) -> None:
    llm = LLM(base(), AutoTokenizer.from_pretrained(result.exports["adapter"]), max_model_len=64)
    with pytest.raises(UserError, match="trained through the rounding of the weights that it merges into"):
        llm.load_adapter("a", result.exports["adapter"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("lora.dropout=0.1",), "lora.dropout=0.1 drops a part of the adapter's input"),
        (("lora.use_dora=true",), "lora.use_dora=true trains the length of rows"),
        (("loftq.iterations=1",), "loftq.iterations=1 makes up for codes that stay"),
        (("qat.rounding=soft",), "qat.rounding=soft draws or trains"),
        (("qat.scheme=int8_static",), "qat.scheme=int8_static observes ranges"),
        (("quant.codebook=nf4",), "quant.codebook=nf4 packs them before"),
        (("qat.start=9", "train.max_steps=6"), "qat.start=9.* is beyond the end of a run of 6 steps"),
    ],
)
def test_settings_that_do_not_go_together(overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        load_config("conf=qat_lora", "model=tiny", *overrides)
