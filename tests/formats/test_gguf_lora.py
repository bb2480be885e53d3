"""LoRA adapters as GGUF files: llama.cpp computes what PEFT computes, or the adapter is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from tests.formats.gguf_models import distance, llama_logits, logits, open_llama, random_ids, small_model, tokenizer_of
from trainer.config.errors import UserError
from trainer.formats.gguf_file import read_keys
from trainer.formats.gguf_lora import read_gguf_adapter, write_gguf_adapter
from trainer.formats.gguf_read import read_gguf
from trainer.formats.gguf_write import write_gguf
from trainer.lora import register_layers
from trainer.qat.lora import merge_aware_over
from trainer.qat.scheme import Scheme

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOLERANCE = 3e-3
"""As of a float16 model without an adapter (test_gguf.py); the factors are float32."""


def adapted(model: nn.Module, seed: int = 0, **settings: Any) -> PeftModel:
    """An adapter with random factors whose part of the logits is large."""
    peft = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": ALL, **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in peft.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.06)
    return peft.eval()


def plain(model: PeftModel) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    return {
        name: (layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"])
        for name, layer in model.get_base_model().named_modules()
        if hasattr(layer, "lora_A")
    }


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("mistral", {"target_modules": ["q_proj", "k_proj"]}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {"target_modules": [*ALL, "lm_head"]}),
        ("llama", {"use_rslora": True}),
        ("llama", {"rank_pattern": {"q_proj": 4, "layers.1.mlp.up_proj": 16}}),
        ("llama", {"rank_pattern": {"q_proj": 4, "down_proj": 6}, "use_rslora": True}),
        ("llama", {"alpha_pattern": {"q_proj": 4, "layers.1.mlp.up_proj": 20}}),
    ],
    ids=["llama", "mistral", "qwen2", "qwen3", "head", "rslora", "ranks", "rslora_ranks", "alphas"],
)
def test_llama_cpp_computes_the_adapter(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = small_model(architecture, hidden=192, heads=6, kv_heads=3)
    write_gguf(base, tokenizer_of("smollm"), tmp_path / "base.gguf", gguf_type="F16")
    base.load_state_dict(read_gguf(tmp_path / "base.gguf", dtype=torch.float32))
    ids = random_ids(base)
    alone = logits(base, ids)
    model = adapted(base, **settings)
    report = write_gguf_adapter(model, tmp_path / "adapter.gguf")
    found = llama_logits(open_llama(tmp_path / "base.gguf", lora_path=str(report.path)), ids)
    expected = logits(model, ids)
    assert distance(alone, expected) > 0.1  # the adapter matters
    assert distance(found, expected) < TOLERANCE


def test_the_folder_and_the_model_give_one_file(tmp_path: Path) -> None:
    settings = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"k_proj": 5}, "use_rslora": True}
    model = adapted(small_model("llama"), **settings)
    model.save_pretrained(tmp_path / "adapter")
    config = model.get_base_model().config
    write_gguf_adapter(model, tmp_path / "model.gguf", name="adapter")
    report = write_gguf_adapter(tmp_path / "adapter", tmp_path / "folder.gguf", config=config)
    assert report.path.read_bytes() == (tmp_path / "model.gguf").read_bytes()
    assert report.num_layers == 14


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_read_back(architecture: str, tmp_path: Path) -> None:
    model = adapted(small_model(architecture))
    report = write_gguf_adapter(model, tmp_path / "adapter.gguf")
    read = read_gguf_adapter(report.path, model.get_base_model().config)
    expected = plain(model)
    assert read.keys() == expected.keys() and not report.folded and report.alpha == 16
    for name, (lora_A, lora_B, scaling) in expected.items():
        assert torch.equal(read[name].lora_A, lora_A) and torch.equal(read[name].lora_B, lora_B)
        assert read[name].scaling == scaling


def test_an_alpha_of_its_own_goes_into_lora_b(tmp_path: Path) -> None:
    """4 of 16 is a power of two, and exact; 5 of 16 is rounded once to float32: 2^-24."""
    model = adapted(small_model("llama"), alpha_pattern={"q_proj": 4, "layers.0.self_attn.k_proj": 5})
    report = write_gguf_adapter(model, tmp_path / "adapter.gguf")
    assert report.folded["model.layers.1.self_attn.q_proj"] == 0.25 and len(report.folded) == 3
    assert report.num_rounded == 1
    read, expected = read_gguf_adapter(report.path, model.get_base_model().config), plain(model)
    for name, (_, lora_B, scaling) in expected.items():
        product = read[name].lora_B.double() * read[name].scaling
        exact = lora_B.double() * scaling
        tolerance = 2**-23 if "layers.0.self_attn.k" in name else 0
        torch.testing.assert_close(product, exact, atol=0, rtol=tolerance)


def test_keys(tmp_path: Path) -> None:
    report = write_gguf_adapter(adapted(small_model("mistral"), use_rslora=True), tmp_path / "a.gguf", name="mine")
    keys = read_keys(GGUFReader(report.path))
    assert keys["general.type"] == "adapter" and keys["adapter.type"] == "lora" and keys["general.name"] == "mine"
    assert keys["general.architecture"] == "llama"
    # alpha / sqrt(8) of rsLoRA is what llama.cpp makes of this by dividing by 8; float32.
    assert keys["adapter.lora.alpha"] == pytest.approx(16 * 8**0.5, rel=1e-7)


# ---- what is refused


def with_rounding(model: nn.Module) -> PeftModel:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    register_layers(config, over_dense=merge_aware_over(model, dict.fromkeys(SCHEME_LAYERS, Scheme.named("int4"))))
    return get_peft_model(model, config)


SCHEME_LAYERS = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]


def with_nan(model: PeftModel) -> PeftModel:
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"].weight[0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapted(small_model("llama"), use_dora=True), "use_dora=True cannot be written as GGUF .*each row"),
        (lambda: adapted(small_model("llama"), modules_to_save=["lm_head"]), "modules_to_save=.*lm_head"),
        (lambda: adapted(small_model("llama"), trainable_token_indices=[1]), r"trainable_token_indices=\[1\] cannot"),
        (lambda: adapted(small_model("llama", attention_bias=True), bias="lora_only"), "bias=lora_only changes biases"),
        (lambda: adapted(small_model("llama"), lora_bias=True), "lora_bias=True cannot be written as GGUF"),
        (lambda: adapted(small_model("llama"), target_modules=["embed_tokens"]), "embed_tokens, an embedding"),
        (
            lambda: adapted(small_model("llama", tie_word_embeddings=True), target_modules=["lm_head"]),
            "lm_head, which is the embedding of this base and no tensor of its GGUF file",
        ),
        (lambda: adapted(small_model("llama"), lora_alpha=0), "by 0, which llama.cpp takes for 1"),
        (lambda: with_nan(adapted(small_model("llama"))), "factors of model.layers.0.self_attn.q_proj hold inf or nan"),
        (lambda: with_rounding(small_model("llama")), "was trained through the rounding of the merged weights"),
        (
            lambda: get_peft_model(
                small_model("llama"), AdaLoraConfig(target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1)
            ),
            "peft_type=ADALORA is no LoRA",
        ),
        (
            lambda: adapted(
                small_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
            ),
            "rope scaling dynamic",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        write_gguf_adapter(make(), tmp_path / "adapter.gguf")
    assert not list(tmp_path.iterdir())


def saved(path: Path) -> tuple[Path, Any]:
    model = adapted(small_model("llama"))
    model.save_pretrained(path / "adapter")
    return path / "adapter", model.get_base_model().config


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json of PEFT's LoRA"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "adapter_model.safetensors cannot be read"),
        (lambda f: (f / "lowbit.json").write_text(json.dumps({"rounded": {}})), "was trained through the rounding"),
        (lambda f: change_tensors(f, lambda t: t.pop(next(iter(t)))), "has one factor of model.layers.0"),
        (lambda f: change_tensors(f, lambda t: t.update(x=torch.ones(1))), "holds x, which is no factor of a layer"),
        (lambda f: change_tensors(f, lambda t: t.clear()), "the adapter has no factors"),
        (
            lambda f: change_tensors(
                f, lambda t: t.update({f"base_model.model.a.lora_{x}.weight": torch.ones(1, 1) for x in "AB"})
            ),
            "the adapter changes a, which is no layer of llama",
        ),
    ],
)
def test_folders_that_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder, config = saved(tmp_path)
    change(folder)
    with pytest.raises(UserError, match=message):
        write_gguf_adapter(folder, tmp_path / "adapter.gguf", config=config)


def test_arguments(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    with pytest.raises(UserError, match="does not say how many heads its base has; give config="):
        write_gguf_adapter(folder, tmp_path / "adapter.gguf")
    with pytest.raises(UserError, match="adapter_name=other; the model has default"):
        write_gguf_adapter(adapted(small_model("llama")), tmp_path / "adapter.gguf", adapter_name="other")


def test_other_files_are_no_adapters(tmp_path: Path) -> None:
    model = small_model("llama")
    path = write_gguf(model, tokenizer_of("smollm"), tmp_path / "model.gguf", gguf_type="F16").path
    with pytest.raises(UserError, match="holds model  and no LoRA adapter"):
        read_gguf_adapter(path, model.config)
    adapter = write_gguf_adapter(adapted(model), tmp_path / "adapter.gguf").path
    with pytest.raises(UserError, match="is an adapter of llama, and the base is qwen2"):
        read_gguf_adapter(adapter, small_model("qwen2").config)
    with pytest.raises(UserError, match="holds the adapter of 'llama'"):
        read_gguf(adapter, dtype=torch.float32)
