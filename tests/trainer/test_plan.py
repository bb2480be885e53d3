"""A plan's counts are those of the modules, and its peaks those of runs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer import LLM, load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import Codebook, QuantConfig
from trainer.kernels import _cpp
from trainer.lora import attach_lora
from trainer.model import load_model, prepare_model
from trainer.plan.advice import Load, advise
from trainer.plan.estimate import ACCURACY, Estimate, Verdict
from trainer.plan.machine import host_memory
from trainer.plan.post_training import estimate_post_training
from trainer.plan.serving import estimate_serving, kv_bytes, sequences_that_fit
from trainer.plan.sizes import meta_model, num_parameters, packed_bytes, sizes_of
from trainer.plan.training import estimate_training, pass_tokens
from trainer.quantizer import Quantizer
from trainer.serve.config import ServeConfig
from trainer.sources.tiny import tiny_model

ROOT = Path(__file__).parents[2]
TINY = ("model=tiny", "model.dtype=bfloat16")
GB = 10**9


def estimate(conf: str, *overrides: str) -> Estimate:
    return estimate_training(conf, load_config(f"conf={conf}", *TINY, *overrides))


def tiny(dtype: DType = DType.bfloat16):
    return load_model(ModelConfig(ModelSource.tiny, dtype=dtype))[0]


# ---- counts


@pytest.mark.parametrize(
    "settings",
    [
        *({"codebook": codebook} for codebook in ("nf4", "fp4", "nf3", "nf2", "int4", "int8")),
        {"codebook": "nf4", "double_quant": False, "block_size": 128},
        {"codebook": "nf3", "double_quant": False},
        {"codebook": "int4", "symmetric": False, "group_size": 64},
        {"codebook": "int4", "group_size": -1},
        {"codebook": "int8", "group_size": 32},
    ],
    ids=str,
)
def test_packed_bytes_are_the_quantizers(settings):
    quantizer = Quantizer(**settings)
    for shape in ((96, 192), (7, 64), (1000, 320)):
        assert packed_bytes(quantizer, shape) == quantizer.quantize(torch.randn(shape)).nbytes


def test_parameters_are_the_models():
    model = tiny()
    planned = meta_model(ModelConfig(ModelSource.tiny))
    assert num_parameters(planned) == model.num_parameters()
    assert all(parameter.is_meta for parameter in planned.parameters())


@pytest.mark.parametrize("codebook", ["nf4", "int8", "nf2"])
def test_a_packed_base_weighs_what_it_does_in_memory(codebook):
    model = tiny()
    prepare_model(model, QuantConfig(Codebook(codebook)))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    held = {tensor.data_ptr(): tensor.nbytes for name, tensor in tensors if "inv_freq" not in name}
    assert estimate("qlora", f"quant.codebook={codebook}").parts["weights"] == sum(held.values())


def test_bits_of_two_codebooks_are_added_up():
    low, mixed, high = (
        estimate("qlora", *settings).parts["weights"]
        for settings in (
            ("quant.codebook=nf2",),
            ("quant.codebook=nf4", "quant.bits_budget=3"),
            ("quant.codebook=nf4",),
        )
    )
    assert low < mixed < high


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("lora.rank=8", "lora.rank_pattern=[down_proj:32]"),
        ("lora.layers=[0]",),
        ("lora.use_dora=true",),
        ("lora.modules_to_save=[embed_tokens]",),
    ],
    ids=str,
)
def test_adapter_bytes_are_pefts(overrides):
    config = load_config("conf=lora", *TINY, *overrides)
    trained = attach_lora(tiny(), config.lora, seed=0)
    count = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    assert estimate("lora", *overrides).parts["adapter and scales"] == 4 * count


def test_full_training_has_twenty_bytes_a_weight_at_its_step():
    planned, count = estimate("full"), tiny().num_parameters()
    assert planned.parts["weights"] == planned.parts["gradients"] == 2 * count
    assert planned.parts["optimizer"] == 8 * count and planned.parts["masters"] == 4 * count
    assert planned.moments["the step"] == planned.parts["process"] + 20 * count  # and gradients of the masters
    in_float32 = estimate("full", "model.dtype=float32").parts
    assert "masters" not in in_float32 and in_float32["gradients"] == 4 * count


@pytest.mark.parametrize("name, share", [("adamw_8bit", 2), ("lion", 4), ("lion_8bit", 1), ("adamw_schedule_free", 8)])
def test_optimizers_keep_so_many_bytes_a_value(name, share):
    adapter = estimate("lora").parts["adapter and scales"]
    settings = ("optim.schedule=constant", "optim.warmup_ratio=0") if name == "adamw_schedule_free" else ()
    assert estimate("lora", f"optim.name={name}", *settings).parts["optimizer"] == adapter // 4 * share


@pytest.mark.parametrize(
    "overrides, tokens",
    [
        (("train.batch_size=2", "data.max_seq_len=256"), 512),
        (("train.batch_size=8", "data.max_seq_len=600"), 1800),  # whole rows below the limit of 2048
        (("train.batch_size=8", "data.max_seq_len=512", "train.max_pass_tokens=256"), 512),  # a row is never cut
    ],
)
def test_a_pass_is_whole_rows(overrides, tokens):
    assert pass_tokens(load_config("conf=qlora", *TINY, *overrides), "cpu") == tokens


def test_checkpointing_and_shorter_rows_need_less():
    plain, less = (
        estimate("lora", "data.max_seq_len=512", f"train.gradient_checkpointing={on}") for on in ("false", "true")
    )
    short = estimate("lora", "data.max_seq_len=64", "train.batch_size=1")
    assert less.parts["activations"] < plain.parts["activations"]
    assert short.parts["activations"] * 32 == plain.parts["activations"]  # 64 tokens of 2048


# ---- serving


@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize("block_size, length", [(16, 100), (64, 128)])
def test_kv_bytes_are_the_block_managers(cache, block_size, length):
    settings = {"kv_block_size": block_size, "kv_cache_dtype": cache}
    sizes = sizes_of(meta_model(ModelConfig(ModelSource.tiny)))
    planned = kv_bytes(sizes, ServeConfig(**settings), torch.bfloat16, num_seqs=3, length=length)
    llm = LLM("tiny", dtype="bfloat16", kv_cache_memory_bytes=planned, max_model_len=length, **settings)
    blocks = llm.engine.blocks
    assert blocks.num_blocks == 3 * blocks.num_blocks_for(length)
    assert llm.runner.cache.nbytes == planned


@pytest.mark.parametrize("quantization", ["none", "nf4", "int4", "int8_dynamic"])
def test_served_weights_are_the_decoders(quantization):
    if _cpp.choose("packed_linear", "cpu") != "cpu":
        pytest.skip("no C++ compiler here, so nothing is repacked")
    config = ServeConfig(quantization=quantization)
    planned = estimate_serving(ModelConfig(ModelSource.tiny, dtype=DType.bfloat16), config, num_seqs=1, length=16)
    llm = LLM("tiny", dtype="bfloat16", quantization=quantization, kv_cache_memory_bytes=1 << 20)
    decoder = llm.runner.decoder
    norms = sum(t.nbytes for layer in decoder.layers for t in (layer.input_norm, layer.mlp_norm)) + decoder.norm.nbytes
    greedy = 0 if decoder.greedy_head is None else decoder.greedy_head.nbytes
    tied = decoder.nbytes - decoder.head.nbytes - greedy  # one table for embedding and head
    assert planned.parts["weights"] == tied + norms
    assert greedy in (0, planned.parts["head in 8 bits"])


def test_what_is_left_holds_so_many_sequences():
    planned = Estimate("16 bit", {"weights": 4 * GB, "KV cache": 8 * GB}, {"full cache": 12 * GB})
    assert sequences_that_fit(planned, 7 * GB, num_seqs=16) == 6  # of half a GB each
    assert sequences_that_fit(planned, 3 * GB, num_seqs=16) == 0


def test_longer_than_the_model_is_refused():
    with pytest.raises(UserError, match="length 4096 exceeds the model's 2048 positions"):
        estimate_serving(ModelConfig(ModelSource.tiny), ServeConfig(), num_seqs=1, length=4096)


def test_calibration_needs_more_than_rounding():
    planned = [
        estimate_post_training(ModelConfig(ModelSource.tiny), length=512, device="cpu", calibrated=calibrated)
        for calibrated in (False, True)
    ]
    assert planned[0].peak < planned[1].peak
    assert planned[1].parts["moments of inputs"] == 3 * 8 * 160**2  # down_proj's inputs, float64


# ---- verdicts and words


def test_what_an_estimate_may_be_wrong_by_is_tight():
    planned = Estimate("qlora", {}, {"a pass": 100, "the step": 10})
    assert (planned.peak, planned.when) == (100, "a pass")
    edge = round(100 * (1 + ACCURACY))
    assert [planned.verdict(n) for n in (edge, edge - 1, 85, 84)] == [
        *(Verdict.fits, Verdict.tight, Verdict.tight, Verdict.does_not_fit)
    ]


def test_advice_follows_what_fits():
    def of(name: str, gigabytes: float, **parts: float) -> Estimate:
        return Estimate(
            name,
            {key.replace("_", " "): int(value * GB) for key, value in parts.items()},
            {"a pass": int(gigabytes * GB)},
        )

    training = [of("qlora", 4), of("qat_blocks", 8), of("full", 20, optimizer=8, weights=2), of("qat", 20, optimizer=8)]
    serving = [of("16 bit", 12, weights=8, KV_cache=2), of("INT4", 5, weights=2, KV_cache=2)]
    lines = advise(training, serving, 10 * GB, Load(16, 4096))
    assert lines[0] == "fits: qlora, qat_blocks; will not fit: full, qat"
    assert "full needs 20.0 of 10.0 GB, 8.0 of them optimizer: optim.name=adamw_8bit" in lines
    text = "\n".join(lines)
    for part in (
        "fine-tune in 4 bits, conf=qlora",
        "fits: conf=qat_blocks",
        "throughput on this machine: INT4, 16 sequences of 4096 tokens in 2 GB of cache",
        "16 bits do not fit: serve quantization=int4",
        "calibration rows (gptq, awq) and validate",
    ):
        assert part in text
    none = advise([], [of("INT4", 20, weights=2, KV_cache=20)], 10 * GB, Load(16, 4096))
    assert none == [
        "the KV cache decides: 16 sequences of 4096 tokens do not fit, 6 do with INT4; set max_num_seqs=6, a lower "
        "max_model_len, or kv_cache_dtype=int8"
    ]


def test_a_containers_limit_counts(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert host_memory(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("30000\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert host_memory(meminfo, tmp_path) == 20000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path) == 50 * 1024


# ---- the command


@pytest.fixture(scope="module")
def script():
    """scripts/plan.py as a module."""
    spec = importlib.util.spec_from_file_location("plan_script", ROOT / "scripts" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plan_reads_the_config_alone(tmp_path, script, capsys):
    (tmp_path / "config.json").write_text((tiny_model() / "config.json").read_text())
    report = script.plan(["model=folder", f"model.path={tmp_path}", "lora.rank=8", "available_gb=0.7"])
    printed = capsys.readouterr().out
    assert json.loads(json.dumps(report)) == report
    kinds = {row["kind"] for row in report["rows"]}
    assert kinds == {"train", "quantize", "serve"} and report["model"] == str(tmp_path)
    assert report["refused"].keys() == {"full", "qat", "qat_blocks"} and "lora.* has no effect" in printed
    verdicts = {row["name"]: row["verdict"] for row in report["rows"]}
    assert verdicts["qlora"] == "tight"  # 0.66 GB of process in 0.7
    assert report["advice"] and all(f"- {line}" in printed for line in report["advice"])
    assert report["load"] == {"num_seqs": 16, "length": 2048}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("model=folder", "model.path=nowhere"), "model.path=nowhere is not a folder"),
        (("conf=qlora", "model=tiny", "train.batchsize=2"), "train.batchsize is not a key; did you mean"),
        (("conf=qloro", "model=tiny"), "qlora"),
        (("model=tiny", "available_gb=much"), "available_gb=much; give a number of gigabytes"),
        (("model=tiny", "serve.max_seqs=2"), "max_seqs is not a key"),
        (("conf=full", "model=tiny", "lora.rank=8"), "lora.* has no effect"),
    ],
)
def test_a_mistake_is_named(script, arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        script.plan(list(arguments))


def test_a_mistake_is_one_line():
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), "model=tiny", "conf=qlora", "lora.rnk=1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: lora.rnk is not a key") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", ["{", '{"model_type": "no_such_model"}', "{}"])
def test_a_config_that_is_none_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="cannot be planned for"):
        meta_model(ModelConfig(ModelSource.folder, str(tmp_path)))


def test_a_quantized_model_is_refused(tmp_path):
    config = json.loads((tiny_model() / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(UserError, match="is quantized already; give the 16-bit model"):
        meta_model(ModelConfig(ModelSource.folder, str(tmp_path)))


# ---- against a run


@pytest.mark.skipif(torch.cuda.is_available(), reason="what was measured is resident memory of a CPU's process")
def test_a_planned_peak_is_the_measured_one(tmp_path):
    """SmolLM2-135M, two steps of rows as long as they may be: docs/planning.md has the other methods."""
    from trainer.sources.bundled import bundled_model

    try:
        bundled_model()
    except UserError as error:
        pytest.skip(f"the default model is not here: {error}")
    rows = tmp_path / "rows.jsonl"
    text = Path(argparse_source()).read_text()
    rows.write_text("".join(json.dumps({"text": text[i * 3000 :][:3000]}) + "\n" for i in range(12)))
    settings = ["conf=qlora", "data=jsonl", f"data.path={rows}", "data.columns.text=text", "data.eval_rows=2"]
    settings += ["train.batch_size=2", "data.max_seq_len=256", "train.max_steps=2", "evaluate.samples=0"]
    command = [sys.executable, "train.py", *settings, f"output_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "run" / "metrics.json").read_text())["peak_memory_bytes"]
    planned = estimate_training("qlora", load_config(*settings)).peak
    assert 1 - ACCURACY < planned / measured < 1 + ACCURACY


def argparse_source() -> str:
    import argparse

    return argparse.__file__
