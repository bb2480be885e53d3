"""The exported adapter, opened by plain PEFT, transformers and bitsandbytes."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from trainer import finetune, load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import QuantConfig
from trainer.export.adapter import read_adapter
from trainer.model import load_model, prepare_model


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
def result(base, tmp_path_factory, jsonl):
    settings = ("conf=qlora", "model=folder", f"model.path={base}", "model.dtype=float32", "data=jsonl")
    train = ("train.max_steps=4", "optim.lr=0.02", "evaluate.samples=1", "evaluate.max_new_tokens=4")
    return finetune(
        load_config(*settings, f"data.path={jsonl}", *train, f"output_dir={tmp_path_factory.mktemp('run') / 'run'}")
    )


@pytest.fixture(scope="module")
def ours(base, result):
    model, _ = load_model(ModelConfig(source=ModelSource.folder, path=str(base), dtype=DType.float32))
    prepare_model(model, QuantConfig())
    return read_adapter(model, result.exports["adapter"])


@pytest.fixture
def input_ids():
    return torch.randint(0, 250, (2, 23), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_plain_peft_over_bitsandbytes_gives_equal_logits(result, ours, input_ids):
    folder = result.exports["adapter"]
    path = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=quantization, dtype=torch.float32, device_map="cpu"
    )
    theirs = PeftModel.from_pretrained(theirs, folder).train()  # in eval mode its CPU kernel rounds to bfloat16
    with_adapter = theirs(input_ids=input_ids).logits
    torch.testing.assert_close(with_adapter, ours(input_ids=input_ids).logits, rtol=1e-4, atol=1e-4)  # order of sums
    with theirs.disable_adapter():
        assert (theirs(input_ids=input_ids).logits - with_adapter).abs().max() > 0.01  # the adapter does something


@torch.no_grad()
def test_reading_back_gives_what_was_trained(result, ours):
    """The held-out loss of the read adapter is the run's, so base, codes and factors are the trained ones."""
    from accelerate import Accelerator

    from trainer.data.dataset import load_data
    from trainer.evaluate.perplexity import held_out_loss
    from trainer.objective import NextTokenLoss

    config = load_config(f"resume={result.run_dir}")
    tokenizer = AutoTokenizer.from_pretrained(result.exports["adapter"])
    held_out = load_data(config.data, config.preference.method, tokenizer, config.seed).held_out
    loss = held_out_loss(NextTokenLoss(ours), held_out, Accelerator(), batch_size=16)
    assert loss == result.metrics["eval_loss"]


@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj", "layers.1.input_layernorm", "embed_tokens"])
def test_another_base_is_refused(base, result, tmp_path, name):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    weights[f"model.{name}.weight"] *= -1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    model, _ = load_model(ModelConfig(source=ModelSource.folder, path=str(other), dtype=DType.float32))
    prepare_model(model, QuantConfig())
    with pytest.raises(UserError, match="was trained on a base"):
        read_adapter(model, result.exports["adapter"])


def test_a_missing_tensor_is_an_error(base, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_project.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks the weights.*up_proj"):
        load_model(ModelConfig(source=ModelSource.folder, path=str(other)))


def test_model_card_holds_the_figures(result):
    card = (result.exports["adapter"] / "README.md").read_text()
    assert f"{result.metrics['eval_loss']:.4f}" in card and "PeftModel.from_pretrained" in card
