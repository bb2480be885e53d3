"""scripts/quantize.py and scripts/export.py: every method from the command to what serves it, stopped and gone on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.e2e.conftest import ROOT
from trainer import LLM, SamplingParams, UserError
from trainer.agreement import following_logprobs, served_logprobs
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.ptq import PtqConfig
from trainer.layout_of_run import export_layout
from trainer.model import load_model
from trainer.ptq.run import quantize
from trainer.qat.packed_model import packed_layers, packed_sha256
from trainer.sources.tiny import tiny_model

METHODS = {
    "rtn": {},
    "gptq": {"match": "original"},
    "awq": {},
    "smoothquant": {"min_signal": 20.0},
    "int8_dynamic": {"min_signal": 0},
    "hqq": {},
    "mixed": {"method": "gptq", "bits_budget": 5.0},
    "nf4": {"method": "gptq", "codebook": "nf4", "block_size": 32},
    "groups": {"method": "gptq", "act_order": "groups", "symmetric": False},
}
SMALL = {"rows": 6, "eval_rows": 2, "max_seq_len": 64}


def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "scripts" / name, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of sizes that every layout takes, in float32, whose tied head no method may touch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=260,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model") / "llama"
    built = LlamaForCausalLM(config)
    for parameter in built.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)  # answers depend on inputs, without chaos
    built.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(folder)
    return folder


def run(model: Path, folder: Path, name: str = "gptq", **settings):
    given = {"method": name} | METHODS.get(name, {}) | SMALL | settings
    return quantize(PtqConfig(model=str(model), output_dir=str(folder), dtype="float32", **given))


@pytest.mark.parametrize("name", METHODS)
def test_what_is_quantized_is_written_and_served(name, model, tmp_path):
    result = run(model, tmp_path, name)
    report = json.loads((tmp_path / "quantize.json").read_text())
    assert len(report["layers"]) == 3 * 7 and not (tmp_path / ".blocks").exists()
    opened, tokenizer = load_model(ModelConfig(ModelSource.folder, str(result.exports["quantized"])))
    assert packed_sha256(opened) == report["packed_sha256"]
    head, embedding = opened.get_output_embeddings().weight, opened.get_input_embeddings().weight
    assert head is embedding and len(packed_layers(opened)) == 21
    rows = [list(range(4, 40)), list(range(100, 60, -1))]
    ours, served = following_logprobs(opened, rows), served_logprobs(opened, tokenizer, rows)
    rounds_inputs = name in ("smoothquant", "int8_dynamic")  # there a sum's last bit decides about a code
    assert (ours - served).abs().mean() < (0.05 if rounds_inputs else 1e-4)
    assert 0 < result.fidelity.kl < 0.1 and result.fidelity.tokens == 2 * 63  # 0.05 rounded to nearest
    card = (result.exports["quantized"] / "README.md").read_text()
    assert report["packed_sha256"] in card and "perplexity on held-out rows" in card
    if name == "mixed":
        kinds = {layer["scheme"]["weight"]["codebook"] for layer in report["layers"]}
        assert kinds == {"int4", "int8"}


def test_methods_that_look_at_inputs_beat_rounding(model, tmp_path):
    """On the layers' outputs, which they are after; random rows of a random model say little of its answers."""
    kl = {
        name: run(model, tmp_path / name, name, symmetric=True, rows=24).fidelity.kl for name in ("rtn", "awq", "gptq")
    }
    assert kl["gptq"] < kl["rtn"] and kl["awq"] < kl["rtn"]


def test_stopped_and_gone_on(model, tmp_path):
    """Killed after the second block, the same command gives the same bits; with other settings it is refused."""
    whole = run(model, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Stop

    settings = {"method": "gptq", **METHODS["gptq"], **SMALL, "dtype": "float32", "output_dir": str(tmp_path / "cut")}
    with pytest.raises(Stop):
        quantize(PtqConfig(model=str(model), **settings), progress=stop)
    assert not (tmp_path / "cut" / "export").exists()
    with pytest.raises(UserError, match="with other settings; give another output_dir"):
        quantize(PtqConfig(model=str(model), **settings | {"damping": 0.02}))
    again = quantize(PtqConfig(model=str(model), **settings))
    assert again.report["packed_sha256"] == whole.report["packed_sha256"]
    assert again.report["layers"] == whole.report["layers"]


def test_every_layout_of_one_run(model, tmp_path):
    """Codes that are chosen once are in all of them, whenever they are written."""
    result = run(model, tmp_path, "rtn", formats=["quantized", "merged", "gptq", "awq", "compressed_tensors", "gguf"])
    dense = AutoModelForCausalLM.from_pretrained(result.exports["merged"], dtype=torch.float32)
    original, _ = load_model(ModelConfig(ModelSource.folder, str(result.exports["quantized"])))
    for name in ("gptq", "awq", "compressed_tensors"):
        opened, _ = load_model(ModelConfig(ModelSource.folder, str(result.exports[name]), dtype=DType.float32))
        for layer, ours in packed_layers(original).items():
            values = ours.quantized.dequantize(torch.float32)
            assert torch.equal(opened.get_submodule(layer).quantized.dequantize(torch.float32), values), (name, layer)
            assert torch.equal(dense.get_submodule(layer).weight, values)
        again = export_layout(str(tmp_path), name)
        assert again == result.exports[name]
        assert "base_model_relation: quantized" in (again / "README.md").read_text()
    assert result.exports["gguf"].suffix == ".gguf" and result.exports["gguf"].stat().st_size > 0


def test_the_command_and_the_server(model, tmp_path):
    done = script(
        "quantize.py", f"model={model}", "method=rtn", f"output_dir={tmp_path / 'q'}", "eval_rows=2", "rows=2"
    )
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout and "bits a weight" in done.stdout
    llm = LLM(str(tmp_path / "q"))
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].choices[0].token_ids
    llm.close()
    exported = script("export.py", f"run={tmp_path / 'q'}", "format=gptq")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "q" / "export" / "gptq" / "quantize_config.json").is_file()


def test_gguf_with_an_importance_matrix(model, tmp_path):
    plain = run(model, tmp_path / "plain", "gguf", gguf_type="Q4_0", imatrix=False)
    weighed = run(model, tmp_path / "weighed", "gguf", gguf_type="Q4_0", rows=24)
    assert plain.exports["gguf"].read_bytes() != weighed.exports["gguf"].read_bytes()
    assert weighed.fidelity.kl < plain.fidelity.kl
    assert weighed.report["notes"] and "importance matrix" not in plain.report["data"]


UNREAD = {"gptq": "gguf_type", "bnb": "allow_rounded_scales", "gguf": "dtype", "gguf_adapter": "dtype"}


@pytest.mark.parametrize(("name", "key"), UNREAD.items())
def test_keys_that_a_layout_does_not_read_are_refused(name, key, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import export as command

    with pytest.raises(UserError, match=f"{key} is not a key of format={name}"):
        command.parse(["run=r", f"format={name}", f"{key}=true"])
    assert set(command.LAYOUT_KEYS) == set(command.LAYOUTS)


MISTAKES = {
    "group": (["group_size=96"], "does not divide in_features=128 of|group_size=96 does not divide in_features=128"),
    "unknown key": (["metod=rtn"], "did you mean method"),
    "method": (["method=gtpq"], "gtpq"),
    "pattern": (["exclude=[foo]"], "'foo', which ends no layer's name"),
    "budget": (["bits_budget=9"], "not between the 4 bits of int4 and the 8"),
    "layout": (["method=smoothquant", "formats=[gptq]"], "gptq', which holds int4"),
    "inputs": (["method=int8_dynamic", "codebook=int4", "formats=[awq]"], "cannot say that"),
    "g_idx": (["act_order=groups", "formats=[awq]"], "no g_idx that engines still read"),
    "act order": (["method=rtn", "act_order=groups"], "no effect with method=rtn"),
    "data": (["data=nothing.jsonl"], "is not a file"),
    "blocks": (["codebook=nf4", "block_size=64"], "cross the rows of in_features=160"),
    "hqq": (["method=hqq", "codebook=nf4"], "use method=rtn"),
    "no such group": (["group_size=33"], "group_size=33 is no multiple of 32"),
    "no such scales": (["scale_dtype=half"], "scale_dtype=half; use one of"),
    "scales of GPTQ": (
        ["scale_dtype=float32", "formats=[gptq]"],
        "would round scales of scale_dtype=float32 to float16",
    ),
    "scales": (
        ["dtype=bfloat16", "formats=[compressed_tensors]"],
        "would round scales of scale_dtype=float16 to bfloat16; use scale_dtype=bfloat16",
    ),
    "groups": (["method=smoothquant", "group_size=32", "formats=[compressed_tensors]"], "use group_size=-1"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_answered_before_any_block(case, model, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import quantize as command

    arguments, message = MISTAKES[case]
    monkeypatch.setattr(sys, "argv", ["quantize.py", f"model={model}", f"output_dir={tmp_path / 'q'}", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert any(part in error for part in message.split("|")), error
    assert not (tmp_path / "q").exists()


def test_models_that_are_none(model, tmp_path):
    """Each is answered before a block is touched, with what can be given instead."""
    for name, kind in (("config.yaml", "a run"), ("quantize.json", "a quantized model"), ("adapter_config.json", "an")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(UserError, match=f"is the folder of {kind}.*format=merged"):
            run(folder, tmp_path / "q")
    with_dropout = tmp_path / "dropout"
    shutil.copytree(model, with_dropout)
    config = json.loads((model / "config.json").read_text())
    (with_dropout / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    with pytest.raises(UserError, match="attention_dropout=0.1 is not 0; use method=rtn, hqq, or int8_dynamic with"):
        run(with_dropout, tmp_path / "q")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 260}
    others = {
        "granite": (
            GraniteConfig(**small, num_attention_heads=2, num_key_value_heads=2, logits_scaling=4.0),
            "compared",
        ),
        "gpt2": (GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=260), "only 0% of gpt2's weights"),
    }
    for name, (config, message) in others.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match=message):
            run(tmp_path / name, tmp_path / "q", "rtn")
    assert not (tmp_path / "q").exists()


def test_a_folder_holds_one_set_of_codes(model, tmp_path):
    """Exports of two settings would lie beside each other, and later ones be made of the older codes."""
    folder = tmp_path / "q"
    first = run(model, folder, "rtn", formats=["gptq"])
    with pytest.raises(UserError, match=r"codes with other settings \(group_size\)"):
        run(model, folder, "rtn", group_size=-1)
    with pytest.raises(UserError, match=r"holds no export/quantized.*formats=\[quantized\]"):
        export_layout(str(folder), "awq")
    with pytest.raises(UserError, match="which has no adapter"):
        export_layout(str(folder), "gguf_adapter")
    more = run(model, folder, "rtn")
    assert more.report["packed_sha256"] == first.report["packed_sha256"]
    assert export_layout(str(folder), "awq").is_dir()
    report = json.loads((folder / "quantize.json").read_text())
    (folder / "quantize.json").write_text(json.dumps(report | {"packed_sha256": "0" * 64}))
    with pytest.raises(UserError, match="holds other codes than"):
        export_layout(str(folder), "awq")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(UserError, match="holds a config.yaml, of something else"):
        run(model, tmp_path / "run", "rtn")


def test_two_processes_do_not_write_one_folder(model, tmp_path):
    def second(done: int, total: int) -> None:
        if done > 1:
            return
        with pytest.raises(UserError, match="is being written by another process"):
            run(model, tmp_path)

    quantize(PtqConfig(model=str(model), output_dir=str(tmp_path), dtype="float32", **SMALL), progress=second)
    assert not (tmp_path / ".lock").exists()


def test_a_format_that_fails_costs_no_block(model, tmp_path, monkeypatch):
    """The disk is full when the export is written: the same command reads the blocks and writes it."""
    with monkeypatch.context() as patched:
        patched.setattr("trainer.ptq.run.write_layout", Mock(side_effect=UserError("disk is full")))
        with pytest.raises(UserError, match="disk is full"):
            run(model, tmp_path)
    assert len(list((tmp_path / ".blocks").iterdir())) == 3 and not (tmp_path / "quantize.json").exists()
    with monkeypatch.context() as patched:
        patched.setattr("trainer.ptq.block.gptq", Mock(side_effect=AssertionError("a block was quantized again")))
        run(model, tmp_path, formats=["merged"])


def test_blocks_of_another_pass_size_are_not_gone_on_with(model, tmp_path):
    """The order of GPTQ's sums is another, and so are some of its codes."""

    def stop(done: int, total: int) -> None:
        raise InterruptedError

    settings = {"model": str(model), "dtype": "float32", "output_dir": str(tmp_path / "cut"), **SMALL}
    with pytest.raises(InterruptedError):
        quantize(PtqConfig(**settings), progress=stop)
    with pytest.raises(UserError, match="another device"):
        quantize(PtqConfig(**settings, max_pass_tokens=100))


def damaged(model: Path, folder: Path, change) -> Path:
    built = AutoModelForCausalLM.from_pretrained(model)
    change(built)
    built.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_damaged_and_odd_weights(model, tmp_path):
    def infinite(built) -> None:
        built.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.inf

    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj.weight holds inf or nan"):
        run(damaged(model, tmp_path / "inf", infinite), tmp_path / "q")

    def odd(built) -> None:
        layer = built.model.layers[0]
        layer.self_attn.q_proj.weight.data[:, :32] = 0  # groups of zeros
        layer.self_attn.k_proj.weight.data[:] = 0.5  # constant
        layer.self_attn.v_proj.weight.data[:] = 0
        layer.mlp.up_proj.weight.data[7] = 0  # a channel of down that is never hit
        layer.input_layernorm.weight.data[4] = 0  # and one of q, k, v

    folder = damaged(model, tmp_path / "odd", odd)
    for name in ("gptq", "awq", "smoothquant", "hqq"):
        result = run(folder, tmp_path / name, name)
        assert result.fidelity.kl == result.fidelity.kl < 1  # a number
        notes = {layer["name"]: layer["note"] for layer in result.report["layers"]}
        if name == "gptq":
            assert "1 channels without inputs" in notes["model.layers.0.mlp.down_proj"]
            assert "1 channels without inputs" in notes["model.layers.0.self_attn.q_proj"]


def test_a_quantized_model_is_refused(model, tmp_path):
    result = run(model, tmp_path / "q", "rtn", formats=["quantized", "gptq"])
    for name in ("quantized", "gptq"):
        with pytest.raises(UserError, match="quantized already; rounding it again would lose more"):
            run(result.exports[name], tmp_path / "again")


def test_calibration_that_cannot_do_is_said(model, tmp_path, caplog):
    rows = tmp_path / "short.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": "y"}) + "\n" for i in range(40)))
    result = run(model, tmp_path / "q", data=str(rows), rows=4)
    said = " ".join(result.report["warnings"])
    assert "tokens of calibration for layers of 160 inputs: too few" in said
    assert "attention is hardly used" in said
    assert "none that the model knows" in said or result.fidelity.perplexity_original < 400
    assert all(line in caplog.text for line in result.report["warnings"])
