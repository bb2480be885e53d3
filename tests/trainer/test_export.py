"""The merged model: equal to base and adapter, whole or absent, and honest about what rounding loses."""

import json
import weakref

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from trainer.config.errors import UserError
from trainer.config.export import ExportConfig
from trainer.config.lora import LoraConfig
from trainer.config.quant import QuantConfig
from trainer.export import merged as merged_module
from trainer.export.merged import Survival, merge_layer, write_merged
from trainer.export.merged_4bit import write_merged_4bit
from trainer.linear import QuantLinear, weights_sha256
from trainer.lora import attach_lora
from trainer.model import prepare_model
from trainer.sources.tiny import tiny_model

SIZES = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ATOL = 1e-5
"""Of float32 logits of size 1: W x + s B (A x) and (W + s B A) x sum in another order, which was seen to give 2e-6."""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(0, 250, (2, 23), generator=torch.Generator().manual_seed(0))


def tuned(*, packed: bool = True, kind: type = LlamaConfig, tied: bool = True, update: float = 0.1, **lora):
    """A random model in float32 with an adapter whose B is not zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES, tie_word_embeddings=tied), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.requires_grad_(False).eval()
    if packed:
        prepare_model(model, QuantConfig())
    model = attach_lora(model, LoraConfig(rank=8, **lora), seed=0).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=update)
        elif parameter.requires_grad and "lora_A" not in name:  # magnitudes, modules_to_save
            parameter.data *= 1 + 0.2 * torch.rand_like(parameter)
    return model


CASES = {
    "packed": {},
    "dense": {"packed": False},
    "untied": {"tied": False},
    "biases": {"kind": Qwen2Config},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora_dense": {"use_dora": True, "packed": False},
    "some_layers": {"target_modules": ["q_proj", "down_proj"]},
    "saved_norm": {"modules_to_save": ["norm"]},
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_unmerged_models(case, tokenizer, input_ids, tmp_path):
    model = tuned(**CASES[case])
    before, want = weights_sha256(model), model(input_ids=input_ids).logits
    with model.disable_adapter():
        assert (model(input_ids=input_ids).logits - want).abs().max() > 100 * ATOL  # the adapter does something
    survival = write_merged(model, tokenizer, tmp_path / "merged", dtype=torch.float32)
    loaded, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    torch.testing.assert_close(loaded(input_ids=input_ids).logits, want, atol=ATOL, rtol=0)
    torch.testing.assert_close(model(input_ids=input_ids).logits, want, atol=0, rtol=0)  # the model is as it was
    assert weights_sha256(model) == before
    assert survival.overall == pytest.approx(1, abs=1e-4)  # float32 rounds 2^-24 of a weight away


@torch.no_grad()
def test_a_model_without_adapter_is_written_as_it_is(tokenizer, input_ids, tmp_path):
    """A full fine-tuning, or a packed base alone."""
    model = tuned().unload()
    survival = write_merged(model, tokenizer, tmp_path / "merged", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(loaded(input_ids=input_ids).logits, model(input_ids=input_ids).logits, atol=ATOL, rtol=0)
    assert survival.overall is None and not survival.layers


@torch.no_grad()
def test_plain_peft_layers_merge_too(tokenizer, input_ids, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32).eval()
    model = get_peft_model(model, PeftLoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)).eval()
    write_merged(model, tokenizer, tmp_path / "merged", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    want = model(input_ids=input_ids).logits
    torch.testing.assert_close(loaded(input_ids=input_ids).logits, want, atol=ATOL, rtol=0)


@torch.no_grad()
def test_each_weight_is_rounded_once(tokenizer, tmp_path):
    """bfloat16 files hold round(dequantize(W) + s B A), computed in float32."""
    model = tuned()
    write_merged(model, tokenizer, tmp_path / "merged")
    written = load_file(tmp_path / "merged" / "model.safetensors")
    layer = model.get_base_model().get_submodule("model.layers.1.mlp.down_proj")
    lora_A, lora_B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    want = layer.get_base_layer().quantized.dequantize(torch.float32) + layer.scaling["default"] * lora_B @ lora_A
    error = (written["model.layers.1.mlp.down_proj.weight"].float() - want).abs()
    # Half a step of 8 significant bits; the product may differ in float32's last bit.
    assert (error <= want.abs() * 2**-8 * 1.001 + 1e-7).all() and error.max() > 0
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_the_config_is_that_of_a_plain_model(tokenizer, tmp_path):
    model = tuned()
    model.get_base_model().config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model.get_base_model().config._name_or_path = "/somewhere/else"
    write_merged(model, tokenizer, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and "_name_or_path" not in config
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "merged" / "generation_config.json").is_file()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer.chat_template
    assert model.get_base_model().config.quantization_config  # the model's own is left alone


@torch.no_grad()
def test_a_tied_tensor_is_written_once_and_a_head_that_left_it_is_kept(tokenizer, input_ids, tmp_path):
    write_merged(tuned(), tokenizer, tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    model = tuned()
    head = model.get_base_model().lm_head
    head.weight = nn.Parameter(head.weight.detach() * 2)  # what training two copies of a tied tensor comes to
    write_merged(model, tokenizer, tmp_path / "untied", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "untied", dtype=torch.float32)
    assert loaded.config.tie_word_embeddings is False
    want = model(input_ids=input_ids).logits
    torch.testing.assert_close(loaded(input_ids=input_ids).logits, want, atol=ATOL, rtol=0)


@torch.no_grad()
def test_shards_are_small_and_hold_everything(tokenizer, input_ids, tmp_path):
    model, limit = tuned(), 300_000
    write_merged(model, tokenizer, tmp_path / "merged", dtype=torch.float32, shard_bytes=limit)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / "merged" / name) for name in set(index["weight_map"].values())}
    assert len(files) > 3
    assert all(len(file) == 1 or sum(t.nbytes for t in file.values()) <= limit for file in files.values())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files.values() for t in file.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    want = model(input_ids=input_ids).logits
    torch.testing.assert_close(loaded(input_ids=input_ids).logits, want, atol=ATOL, rtol=0)


def test_memory_is_a_layer_and_a_shard(tokenizer, tmp_path, monkeypatch):
    """Dense weights that are alive when the next layer is merged: those of the shard, not of the model."""
    alive, peak = weakref.WeakSet(), 0
    merge = merged_module.merge_layer

    class Watched:
        """Stands for a tensor in a set of weak references, where tensors would be compared element by element."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.nbytes = tensor.untyped_storage().nbytes()

    def merge_watched(name: str, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal peak
        peak = max(peak, sum(watched.nbytes for watched in alive))
        weights = merge(name, layer)
        for weight in weights:
            weight.watched = Watched(weight)
            alive.add(weight.watched)
        return weights

    monkeypatch.setattr(merged_module, "merge_layer", merge_watched)
    write_merged(tuned(), tokenizer, tmp_path / "merged", dtype=torch.float32, shard_bytes=150_000)
    assert peak <= 2 * 128 * 256 * 4  # W and W + d of the largest layer; the model has fourteen


def test_a_merge_that_fails_leaves_the_old_folder(tokenizer, tmp_path):
    folder, model = tmp_path / "merged", tuned()
    write_merged(model, tokenizer, folder)
    before = (folder / "model.safetensors").read_bytes()
    model.get_base_model().get_submodule("model.layers.1.mlp.down_proj").lora_B["default"].weight.data[3, 2] = torch.nan
    with pytest.raises(UserError, match=r"model.layers.1.mlp.down_proj.weight would hold inf or nan"):
        write_merged(model, tokenizer, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_folder_of_other_files_is_left_alone(tokenizer, tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="holds files that are no export of lowbit's; give another folder"):
        write_merged(tuned(), tokenizer, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_survival_is_a_projection():
    update = torch.tensor([[3.0, 4.0]])
    base = torch.zeros(1, 2)
    survival = Survival()
    survival.add("half", base, update, torch.tensor([[3.0, 0.0]]))
    survival.add("none", base, update, torch.zeros(1, 2))
    survival.add("still", base, base, base)
    assert survival.layers == {"half": 9 / 25, "none": 0.0}
    assert survival.overall == 9 / 50


# ---- rounded to 4 bits again


@pytest.fixture(scope="module")
def rows(input_ids):
    labels = input_ids.clone()
    labels[:, :5] = -100
    return list(zip(input_ids, labels, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("quant", [QuantConfig(), QuantConfig(double_quant=False, block_size=128)])
def test_merged_4bit_opens_in_transformers_and_is_what_was_measured(tokenizer, input_ids, rows, tmp_path, quant):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32).requires_grad_(False).eval()
    prepare_model(model, quant)
    model = attach_lora(model, LoraConfig(rank=8, target_modules=["q_proj", "down_proj"]), seed=0).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    before = weights_sha256(model)
    merge = write_merged_4bit(model, tokenizer, tmp_path / "merged", rows)
    assert weights_sha256(model) == before
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, device_map="cpu")
    loaded.train()  # in eval mode bitsandbytes' CPU kernel rounds to bfloat16
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, QuantLinear):
            theirs = loaded.get_submodule(name.removesuffix(".base_layer")).weight
            adapted = name.endswith(".base_layer")
            whole = merge_layer(name, model.get_base_model().get_submodule(name.removesuffix(".base_layer")))[1]
            want = layer.quantizer.quantize(whole) if adapted else layer.quantized
            assert torch.equal(theirs.data.flatten(), want.packed), name
    kl = flips = 0.0
    for ids, labels in rows:
        ours = model(input_ids=ids[None]).logits[0, :-1][labels[1:] != -100].double().log_softmax(-1)
        theirs = loaded(input_ids=ids[None]).logits[0, :-1][labels[1:] != -100].double().log_softmax(-1)
        kl += (ours.exp() * (ours - theirs)).sum().item() / merge.num_tokens
        flips += (ours.argmax(-1) != theirs.argmax(-1)).sum().item() / merge.num_tokens
    assert merge.num_tokens == 2 * 18 and merge.kl > 0
    assert merge.kl == pytest.approx(kl, rel=1e-3)  # float32 sums in another order
    assert merge.flips == flips


def test_most_of_a_small_update_is_lost(tokenizer, rows, tmp_path):
    """An update of 1 % of the weight's norm: the published order is 2 % left, a 16-bit merge keeps it."""
    model = tuned(update=0.0003)
    layer = model.get_base_model().get_submodule("model.layers.0.self_attn.q_proj")
    base, whole = merge_layer("q_proj", layer)
    assert 0.005 < (whole - base).norm() / base.norm() < 0.02
    merge = write_merged_4bit(model, tokenizer, tmp_path / "merged", rows)
    assert merge.survival.overall < 0.1 and len(merge.survival.layers) == 14
    identity = json.loads((tmp_path / "merged" / "lowbit.json").read_text())["merged"]
    assert identity["update_survived"] == merge.survival.overall and identity["kl"] == merge.kl
    assert write_merged(model, tokenizer, tmp_path / "merged_16bit").overall > 0.95


def test_what_has_no_4bit_layout_is_refused(tokenizer, rows, tmp_path):
    with pytest.raises(UserError, match="is in 16 bits; the format holds nf4 and fp4: export merged"):
        write_merged_4bit(tuned(packed=False), tokenizer, tmp_path / "merged", rows)


def test_a_lossy_merge_has_to_be_asked_for():
    with pytest.raises(UserError, match=r"loses most of what was trained.*export.allow_lossy=true"):
        ExportConfig(formats=["merged_4bit"])
    ExportConfig(formats=["merged_4bit"], allow_lossy=True)
    with pytest.raises(UserError, match="export.allow_lossy=true has no effect"):
        ExportConfig(allow_lossy=True)
