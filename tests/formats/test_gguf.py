"""Models as GGUF files: what llama.cpp, transformers and our own reader make of them."""

import ctypes
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.formats.gguf_models import (
    distance,
    llama_logits,
    logits,
    open_llama,
    random_ids,
    small_model,
    tokenizer_of,
    with_weights,
)
from trainer.config.errors import UserError
from trainer.formats import gguf_file, gguf_write
from trainer.formats.gguf_config import architecture_of
from trainer.formats.gguf_file import read_keys
from trainer.formats.gguf_mix import FILE_TYPES, MixedModel, tensor_types
from trainer.formats.gguf_names import head_counts, to_gguf_name, to_halves, to_hf_name, to_pairs
from trainer.formats.gguf_packed import from_blocks, to_blocks
from trainer.formats.gguf_read import read_gguf, read_gguf_codes
from trainer.formats.gguf_write import GgufReport, write_gguf
from trainer.linear import quantize_linears
from trainer.qat.fake_quant import FakeQuantLinear
from trainer.qat.packed_linear import PackedEmbedding, PackedLinear
from trainer.qat.packed_model import packed_layers, packed_sha256
from trainer.qat.scheme import Scheme
from trainer.quantizer import Quantizer

F16_DISTANCE = 3e-3
"""llama.cpp rounds the inputs of a product with float16 weights to float16, by 2^-11 at most: 5e-4, over two layers."""
SIZES = {"of_256": {}, "others": {"hidden": 192, "heads": 6, "kv_heads": 3}}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
Q4_0 = Quantizer("int4", group_size=32, scale_dtype="float16")


def write(model: nn.Module, path: Path, gguf_type: str = "F16", **options: Any) -> GgufReport:
    return write_gguf(model, tokenizer_of("smollm"), path / "model.gguf", gguf_type=gguf_type, **options)


def keys_of(path: Path) -> dict[str, Any]:
    return read_keys(GGUFReader(path))


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


def compare_with_llama(model: nn.Module, report: GgufReport, tolerance: float = F16_DISTANCE) -> None:
    """Logits and greedy tokens of llama.cpp beside transformers' over the values in the file."""
    dense = with_weights(model, read_gguf(report.path, dtype=torch.float32))
    ids = random_ids(model)
    found, expected = llama_logits(open_llama(report.path), ids), logits(dense, ids)
    assert distance(found, expected) < tolerance
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 4 * tolerance * expected.std()  # nearer ones may change places by rounding
    assert clear.sum() > len(ids) // 2 and torch.equal(found.argmax(1)[clear], expected.argmax(1)[clear])


# ---- names and rows


@pytest.mark.parametrize(
    "name", ["blk.3.attn_q.weight", "blk.12.ffn_norm.weight", "token_embd.weight", "output.weight"]
)
def test_names_come_back(name: str) -> None:
    assert to_gguf_name(to_hf_name(name)) == name


def test_other_names_have_no_place() -> None:
    assert to_gguf_name("model.layers.0.mlp.experts.0.w1.weight") is None and to_gguf_name("model.norm.scale") is None
    assert to_hf_name("blk.0.ssm_a.weight") is None and to_hf_name("rope_freqs.weight") is None


def test_rows_of_pairs() -> None:
    rows = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])[:, None]  # two heads of x0 x1 y0 y1
    assert to_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 10, 12, 11, 13]
    assert torch.equal(to_halves(to_pairs(rows, 2), 2), rows) and to_pairs(rows, None) is rows


# ---- floats


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_computes_the_model(architecture: str, sizes: str, tmp_path: Path) -> None:
    model = small_model(architecture, **SIZES[sizes], tie_word_embeddings=sizes == "others")
    report = write(model, tmp_path)
    assert ("output.weight" in types_of(report.path)) == (sizes == "of_256")  # a tied head is left out
    compare_with_llama(model, report)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            }
        },
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
                **{"original_max_position_embeddings": 64},
            }
        },
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "attention_factor": 1.5},
                **{"original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
            }
        },
        {"head_dim": 32},
        {"head_dim": 96, "attention_bias": True, "mlp_bias": True},
    ],
    ids=["linear", "llama3", "yarn", "yarn_with_settings", "narrow_heads", "wide_heads_and_biases"],
)
def test_llama_cpp_computes_variants(settings: dict[str, Any], tmp_path: Path) -> None:
    model = small_model("llama", **settings)
    compare_with_llama(model, write(model, tmp_path))


def test_head_sizes_are_stated(tmp_path: Path) -> None:
    keys = keys_of(write(small_model("qwen3", head_dim=32), tmp_path).path)
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    assert {keys[f"qwen3.{name}"] for name in names} == {32}


def test_sliding_window_is_stated_and_said(tmp_path: Path) -> None:
    report = write(small_model("mistral", sliding_window=32), tmp_path)
    assert keys_of(report.path)["llama.attention.sliding_window"] == 32
    assert "beyond 32 tokens it computes another function" in report.notes[0]
    layers = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    assert "beyond 32 tokens" in write(small_model("qwen2", **layers), tmp_path).notes[0]  # in one of two layers
    report = write(small_model("mistral", sliding_window=4096), tmp_path)  # wider than any text
    assert not report.notes and "llama.attention.sliding_window" not in keys_of(report.path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_opens_the_file(architecture: str, tmp_path: Path) -> None:
    # transformers reads no head size of a Qwen3 and takes 128.
    model = small_model(architecture, num_hidden_layers=1, **({"head_dim": 128} if architecture == "qwen3" else {}))
    # By another name: transformers takes a Llama with "mistral" in its name for an architecture that GGUF lacks.
    report = write(model, tmp_path, provenance={"name": "small"})
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=report.path.name, dtype=torch.float32)
    dense = with_weights(model, read_gguf(report.path, dtype=torch.float32))
    ids = random_ids(model, 20)
    # The same weights in the same code.
    torch.testing.assert_close(logits(opened, ids), logits(dense, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("gguf_type", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_16_bit_files_hold_the_model(gguf_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model("llama").to(dtype)
    weights = read_gguf(write(model, tmp_path, gguf_type).path, dtype=dtype)
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_metadata(tmp_path: Path) -> None:
    origin = {"name": "little", "license": "apache-2.0", "base": "none", "steps": 3}
    keys = keys_of(write(small_model("qwen2"), tmp_path, "Q8_0", provenance=origin).path)
    expected = {
        "general.architecture": "qwen2",
        "general.type": "model",
        "general.name": "little",
        "general.license": "apache-2.0",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "qwen2.block_count": 2,
        "qwen2.context_length": 256,
        "qwen2.embedding_length": 256,
        "qwen2.feed_forward_length": 512,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.rope.freq_base": 10000.0,
        "lowbit.base": "none",
        "lowbit.steps": "3",
        "lowbit.gguf_type": "Q8_0",
    }
    assert {key: keys.get(key) for key in expected} == expected
    assert keys["qwen2.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6, rel=1e-6)  # float32
    rows = keys["qwen2.vocab_size"]
    assert rows == len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"])
    assert keys["tokenizer.ggml.tokens"][-1] == f"[PAD{rows - 1}]" and keys["tokenizer.ggml.token_type"][-1] == 5


# ---- quantized


def quantize_with_llama(
    source: Path, target: Path, gguf_type: str, importance: dict[str, np.ndarray] | None = None
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is compiled on installation: extra [bench]")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(FILE_TYPES[gguf_type][1]), 1
    if importance is not None:
        entry = llama_cpp.llama_model_imatrix_data
        array = (entry * (len(importance) + 1))()
        for place, (name, values) in zip(array, importance.items(), strict=False):
            place.name, place.size = name.encode(), values.size
            place.data = ctypes.cast(values.ctypes.data, type(place.data))
        params.imatrix = array
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0


MIXES = {
    "12_layers": {"num_hidden_layers": 12, "intermediate_size": 256},
    "rows_of_192": {"hidden": 192, "heads": 6, "kv_heads": 3, "num_hidden_layers": 9, "tie_word_embeddings": True},
    "80_layers": {"hidden": 32, "heads": 2, "kv_heads": 1, "num_hidden_layers": 80, "intermediate_size": 32},
    "rows_of_48": {"hidden": 48, "heads": 2, "kv_heads": 1, "intermediate_size": 48},
}


@pytest.mark.parametrize("sizes", MIXES)
def test_mixes_are_llama_cpps(sizes: str, tmp_path: Path) -> None:
    """Every tensor has the type that llama.cpp gives it from the same float16 file."""
    compare_mixes(small_model("llama", **MIXES[sizes]).half(), tmp_path, FILE_TYPES)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_mixes_of_80_layers_differ_by_architecture(architecture: str, tmp_path: Path) -> None:
    compare_mixes(small_model(architecture, **MIXES["80_layers"]).half(), tmp_path, ["Q4_K_S"])


def compare_mixes(model: nn.Module, path: Path, gguf_types: Iterable[str]) -> None:
    source = write(model, path).path
    shapes = {t.name: tuple(int(size) for size in reversed(t.shape)) for t in GGUFReader(source).tensors}
    mixed = MixedModel(
        architecture_of(model.config),
        model.config.num_hidden_layers,
        **head_counts(model.config),
        tied="output.weight" not in shapes,
    )
    for gguf_type in gguf_types:
        quantize_with_llama(source, path / "theirs.gguf", gguf_type)
        ours = {name: kind.got for name, kind in tensor_types(shapes, gguf_type, mixed).items()}
        assert ours == types_of(path / "theirs.gguf"), gguf_type


@pytest.mark.parametrize("gguf_type", FILE_TYPES)
def test_files_are_llama_cpps(gguf_type: str, tmp_path: Path) -> None:
    """Types, bytes and general.file_type are those that llama.cpp makes of the same float16 file."""
    model = small_model("llama").half()
    quantize_with_llama(write(model, tmp_path).path, tmp_path / "theirs.gguf", gguf_type)
    ours = write_gguf(model, tokenizer_of("smollm"), tmp_path / "ours.gguf", gguf_type=gguf_type)
    require_same_tensors(ours.path, tmp_path / "theirs.gguf")
    assert keys_of(ours.path)["general.file_type"] == keys_of(tmp_path / "theirs.gguf")["general.file_type"]


def require_same_tensors(path: Path, other: Path) -> None:
    assert types_of(path) == types_of(other)
    expected = {tensor.name: tensor.data for tensor in GGUFReader(other).tensors}
    for tensor in GGUFReader(path).tensors:
        assert np.array_equal(tensor.data, expected[tensor.name]), tensor.name


@pytest.mark.parametrize("gguf_type", ["Q4_0", "Q5_0", "Q4_K_M"])
def test_importance_goes_to_its_layer(gguf_type: str, tmp_path: Path) -> None:
    """Types and bytes are those that llama.cpp makes with the same importances, the reordered rows of q included."""
    model = small_model("llama", num_hidden_layers=9).half()
    generator = torch.Generator().manual_seed(2)
    importance = {
        name: torch.rand(layer.in_features, generator=generator) + 0.01
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and name != "lm_head"
    }
    write(model, tmp_path)
    theirs = {to_gguf_name(f"{name}.weight"): values.numpy() for name, values in importance.items()}
    quantize_with_llama(tmp_path / "model.gguf", tmp_path / "theirs.gguf", gguf_type, theirs)
    ours = write_gguf(model, tokenizer_of("smollm"), tmp_path / "ours.gguf", gguf_type=gguf_type, importance=importance)
    require_same_tensors(ours.path, tmp_path / "theirs.gguf")


@pytest.mark.parametrize("gguf_type", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_llama_cpp_computes_the_quantized_model(gguf_type: str, tmp_path: Path) -> None:
    """Over such weights llama.cpp rounds inputs to 8 bits in blocks of 32 or 256: 1 % of a product, over two layers."""
    model = small_model("llama")
    compare_with_llama(model, write(model, tmp_path, gguf_type), tolerance=0.04)


def test_report_of_fallbacks(tmp_path: Path) -> None:
    report = write(small_model("llama", **SIZES["others"]), tmp_path, "Q4_K_M")
    found = {(tensor.name, tensor.wanted, tensor.got) for tensor in report.fallbacks}
    assert ("output.weight", "Q6_K", "Q8_0") in found and ("blk.1.attn_q.weight", "Q4_K", "Q5_0") in found
    assert report.fallback_share == 1.0 and report.tensors[0].layer == "model.embed_tokens"
    text = "\n".join(report.lines())
    assert "attn_q: Q5_0 instead of Q4_K" in text and "192 columns are no multiple of its block" in text
    assert not write(small_model("llama"), tmp_path, "Q4_K_M").fallbacks


def test_report_of_errors(tmp_path: Path) -> None:
    model = small_model("llama")
    report = write(model, tmp_path, "Q4_0")
    weights = read_gguf(report.path, dtype=torch.float32)
    layers = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    errors = sum((weights[name] - model.state_dict()[name]).square().sum() for name in layers)
    expected = (errors / sum(model.state_dict()[name].square().sum() for name in layers)).sqrt()
    assert report.errors["ffn_down"] == pytest.approx(float(expected), rel=1e-4)  # float32 sums in another order
    assert 0.02 < report.errors["ffn_down"] < 0.2  # 4 bits of normal weights
    assert write(model.half().float(), tmp_path, "F16").errors == {}


# ---- codes as they were trained


def packed_model(quantizer: Quantizer, architecture: str = "llama", **settings: Any) -> nn.Module:
    model = small_model(architecture, **settings)
    quantize_linears(model, quantizer, skip={model.lm_head})
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (Q4_0, "Q4_0"),
        (Quantizer("int4", group_size=64, scale_dtype="float16", divisor=8.0), "Q4_0"),
        (Quantizer("int4", group_size=-1, scale_dtype="float16"), "Q4_0"),
        (Quantizer("int8", group_size=-1, scale_dtype="float16"), "Q8_0"),
        (Quantizer("int8", group_size=32, scale_dtype="float16"), "Q8_0"),
    ],
    ids=["int4", "int4_64", "int4_row", "int8_row", "int8_32"],
)
def test_codes_are_taken_over(quantizer: Quantizer, expected: str, architecture: str, tmp_path: Path) -> None:
    model = packed_model(quantizer, architecture, **SIZES["others"], intermediate_size=320)
    report = write(model, tmp_path, "as_trained")
    types = types_of(report.path)
    assert {types[name] for name in types if name.startswith("blk") and types[name] != "F32"} == {expected}
    assert types["token_embd.weight"] == types["output.weight"] == "F16" and not report.fallbacks
    codes, weights = read_gguf_codes(report.path), read_gguf(report.path, dtype=torch.float32)
    for name, layer in packed_layers(model).items():
        assert codes[name].quantizer == quantizer
        for key, tensor in layer.quantized.tensors.items():
            assert (tensor is None and codes[name].tensors[key] is None) or torch.equal(
                codes[name].tensors[key], tensor
            )
        assert torch.equal(weights[f"{name}.weight"], layer.quantized.dequantize(torch.float32))
    assert keys_of(report.path)["lowbit.packed_sha256"] == packed_sha256(model)
    assert keys_of(report.path)["general.file_type"] == FILE_TYPES[expected][1]


def test_llama_cpp_computes_the_codes(tmp_path: Path) -> None:
    model = packed_model(Q4_0)
    report = write(model, tmp_path, "as_trained")
    ids = random_ids(model)
    # Inputs are rounded to 8 bits in blocks of 32 there.
    assert distance(llama_logits(open_llama(report.path), ids), logits(model, ids)) < 0.04


def test_packed_embedding_head_and_rounded_inputs(tmp_path: Path) -> None:
    model = small_model("llama")
    scheme = Scheme(Quantizer("int8", scale_dtype="float16"))
    table = scheme.weight.quantize(model.model.embed_tokens.weight)
    model.model.embed_tokens = PackedEmbedding(table, scheme, torch.float32)
    dynamic = Scheme(scheme.weight, Scheme.named("int8").activations)
    model.lm_head = PackedLinear(scheme.weight.quantize(model.lm_head.weight), dynamic)
    report = write(model, tmp_path, "as_trained")
    types = types_of(report.path)
    assert types["token_embd.weight"] == types["output.weight"] == "Q8_0"
    codes = read_gguf_codes(report.path)
    assert torch.equal(codes["model.embed_tokens"].packed, table.packed)
    assert torch.equal(codes["lm_head"].packed, model.lm_head.packed)
    assert any("rounds inputs in its own way" in note for note in report.notes)


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [
        (Quantizer("nf4"), "no type has the values of nf4"),
        (Quantizer("int4", symmetric=False, scale_dtype="float16"), "no type has integer zero points"),
        (Quantizer("int4"), r"scales are not exact in float16 \(scale_dtype=float16"),
        (Quantizer("int4", group_size=-1, scale_dtype="float16"), "groups of 48 are no multiple of 32"),
    ],
    ids=["nf4", "zeros", "float32_scales", "rows_of_48"],
)
def test_codes_without_a_type_become_float16(quantizer: Quantizer, reason: str, tmp_path: Path) -> None:
    size = {"hidden": 48, "heads": 2, "kv_heads": 1} if "48" in reason else {}
    model = packed_model(quantizer, **size, num_hidden_layers=1)
    report = write(model, tmp_path, "as_trained")
    fallbacks = {tensor.name: tensor for tensor in report.fallbacks}
    assert fallbacks["blk.0.attn_q.weight"].got == "F16" and re.search(reason, fallbacks["blk.0.attn_q.weight"].reason)
    expected = model.model.layers[0].self_attn.q_proj.quantized.dequantize(torch.float16)
    assert torch.equal(read_gguf(report.path, dtype=torch.float16)["model.layers.0.self_attn.q_proj.weight"], expected)


def test_packed_layers_are_not_rounded_twice_unasked(tmp_path: Path) -> None:
    model = packed_model(Q4_0)
    with pytest.raises(UserError, match="gguf_type=Q4_K_M would round the 14 packed layers .* or requantize=True"):
        write(model, tmp_path, "Q4_K_M")
    assert not list(tmp_path.iterdir())
    report = write(model, tmp_path, "Q4_K_M", requantize=True)
    assert 0.01 < report.errors["attn_q"] < 0.2 and keys_of(report.path)["lowbit.requantized"] == "true"


def test_blocks_of_several_scales_are_no_wider_group() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    blocks = to_blocks(Q4_0.quantize(weight))
    assert blocks.shape == (4, 36) and from_blocks(blocks, "Q4_0").shape == (4, 64)
    wide = Quantizer("int4", group_size=64, scale_dtype="float16")
    with pytest.raises(ValueError, match="blocks of one group of 64 have several scales"):
        from_blocks(blocks, "Q4_0", wide)
    with pytest.raises(ValueError, match="a tensor of Q4_K has no codes of ours; use one of Q4_0, Q8_0"):
        from_blocks(blocks, "Q4_K")


# ---- files


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama", num_hidden_layers=1)
    report = write(model, tmp_path)
    before = hashlib.sha256(report.path.read_bytes()).digest()
    real = gguf_write.encode

    def fail(dense: torch.Tensor, type_name: str, layer: str, **options: Any) -> torch.Tensor:
        if "mlp" in layer:
            raise KeyboardInterrupt
        return real(dense, type_name, layer, **options)

    monkeypatch.setattr(gguf_write, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        write(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert hashlib.sha256(report.path.read_bytes()).digest() == before


def test_a_file_that_differs_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama", num_hidden_layers=1)
    real = gguf_file.GgufFile.write

    def damage(file: gguf_file.GgufFile, data: torch.Tensor) -> None:
        real(file, data)
        if len(file.hashes) == 3:
            file.hashes[-1] = "0" * 64

    monkeypatch.setattr(gguf_file.GgufFile, "write", damage)
    with pytest.raises(RuntimeError, match=r"the bytes of blk\.0\.attn_k\.weight differ"):
        write(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"has 0.00 GB free, model.gguf needs 0.05 GB"):
        write(small_model("llama", num_hidden_layers=1), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is no file; give the path of a .gguf file"),
        (lambda path: path.write_bytes(b"PK" + bytes(100)), "is not a GGUF file"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "is cut off or damaged"),
    ],
)
def test_files_that_are_not_read(change: Any, message: str, tmp_path: Path) -> None:
    path = write(small_model("llama", num_hidden_layers=1), tmp_path).path
    change(path)
    with pytest.raises(UserError, match=message):
        read_gguf(path, dtype=torch.float32)


# ---- what is refused


def with_inf(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    return model


def with_large(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    return model


def with_bytes(model: nn.Module) -> nn.Module:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.uint8), requires_grad=False)
    return model


def still_trained(model: nn.Module) -> nn.Module:
    model.lm_head = FakeQuantLinear(model.lm_head.weight, None, Scheme.named("int4"))
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: with_bytes(small_model("llama")),
            {},
            r"lm_head.weight holds torch.uint8 .* of another library \(Linear",
        ),
        (lambda: still_trained(small_model("llama")), {}, "lm_head is still trained through the quantizer; convert"),
        (lambda: small_model("llama"), {"gguf_type": "Q3_K"}, "gguf_type=Q3_K; use one of F16, BF16, Q8_0.*as_trained"),
        (lambda: small_model("llama"), {"gguf_type": "as_trained"}, "no layer of the model is packed; use one of F16"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2)), {}, "model_type=gpt2 is none of Llama"),
        (lambda: get_peft_model(small_model("llama"), LoraConfig(target_modules=["q_proj"])), {}, "merge the adapter"),
        (lambda: with_inf(small_model("llama")), {}, r"model\.layers\.0\.mlp\.up_proj holds inf or nan"),
        (
            lambda: with_large(small_model("llama")),
            {},
            "up_proj has a weight of 1e.06, too large for float16",
        ),
        (
            lambda: small_model("qwen3", attention_bias=True),
            {},
            r"self_attn.o_proj.bias has no place in a GGUF file of qwen3",
        ),
        (
            lambda: small_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "rope scaling dynamic is none of default, linear, llama3, yarn",
        ),
        (
            lambda: small_model(
                "llama",
                rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False},
            ),
            {},
            r"rope scaling yarn with {'truncate': False} is not what llama.cpp computes",
        ),
        (
            lambda: small_model(
                "llama",
                rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_slow": 2.0},
            ),
            {},
            "rope scaling yarn with {'beta_slow': 2.0} is not",
        ),
        (
            lambda: small_model(
                "llama",
                rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.7},
            ),
            {},
            "rope scaling yarn with {'mscale': 0.7} is not",
        ),
        (
            lambda: small_model(
                "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            {},
            "partial_rotary_factor=0.5 turns a part of each head",
        ),
        (
            lambda: small_model("llama"),
            {"importance": {"model.x": torch.ones(3)}},
            "importance has model.x, which is no",
        ),
        (
            lambda: small_model("llama"),
            {"importance": {"lm_head": torch.ones(3)}},
            r"importance of lm_head has shape \(3,\); give 256 finite numbers of 0 or more",
        ),
    ],
)
def test_what_is_refused(make: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        write(make(), tmp_path, **{"gguf_type": "F16", **options})
    assert not list(tmp_path.iterdir())
