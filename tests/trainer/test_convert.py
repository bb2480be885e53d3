"""Convert, export, open: the codes that training multiplied, bit for bit, in memory and on disk."""

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.qat import QatConfig
from trainer.convert import convert
from trainer.export.quantized import write_quantized
from trainer.formats.lowbit import open_packed
from trainer.linear import QuantLinear
from trainer.model import load_model
from trainer.qat.fake_quant import fake_quant_layers
from trainer.qat.packed_linear import PackedEmbedding, PackedLinear
from trainer.qat.packed_model import decoded, packed_layers, packed_sha256
from trainer.qat.prepare import calibrate, prepare_qat

TOKEN_IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
CONFIGS = {
    "int4": {"scheme": "int4"},
    "int4 asymmetric": {"scheme": "int4", "symmetric": False, "group_size": -1},
    "int4 learned": {"scheme": "int4", "learn_scales": True},
    "int4 asymmetric learned": {"scheme": "int4", "learn_scales": True, "symmetric": False},
    "int4 stochastic": {"scheme": "int4", "rounding": "stochastic"},
    "int4 soft": {"scheme": "int4", "rounding": "soft"},
    "int4_int8": {"scheme": "int4_int8"},
    "int8": {"scheme": "int8"},
    "int8_static": {"scheme": "int8_static"},
    "nf4": {"scheme": "nf4"},
    "fp8": {"scheme": "fp8"},
    "mxfp4": {"scheme": "mxfp4"},
    "nvfp4": {"scheme": "nvfp4"},
    "tables": {"scheme": "int4", "schemes": ["lm_head:int4", "embed_tokens:int4", "layers.0.*:none"]},
    "head in 8 bits": {"scheme": "int4", "schemes": ["lm_head:int8"]},
}


class NextToken(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss


def trained(options: dict, dtype: DType = DType.bfloat16) -> tuple[PreTrainedModel, object]:
    """Tiny, some steps away from where it started, so that learned scales are no function of the weights."""
    model, tokenizer = load_model(ModelConfig(ModelSource.tiny, dtype=dtype))
    prepare_qat(model.requires_grad_(True), QatConfig(**options))
    objective = NextToken(model)
    calibrate(objective, [{"input_ids": TOKEN_IDS}])
    model.train()
    for layer in (layer for _, layer in fake_quant_layers(model)):
        layer.observing = False
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for _ in range(3):
        objective(TOKEN_IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=TOKEN_IDS, use_cache=False).logits


@pytest.fixture(params=CONFIGS)
def options(request: pytest.FixtureRequest) -> dict:
    return CONFIGS[request.param]


def test_what_is_exported_is_what_was_trained(options: dict, tmp_path) -> None:
    """Fake-quantized, packed, and opened from the folder: equal codes and equal logits, to the bit."""
    model, tokenizer = trained(options)
    before, sha256 = logits(model), packed_sha256(model)
    weights = {name: layer.quantized.dequantize(torch.float32) for name, layer in packed_layers(model).items()}
    assert convert(model) == len(weights)
    assert all(
        isinstance(layer, QuantLinear | PackedLinear | PackedEmbedding) for layer in packed_layers(model).values()
    )
    for name, layer in packed_layers(model).items():
        assert torch.equal(layer.quantized.dequantize(torch.float32), weights[name])
    assert packed_sha256(model) == sha256
    assert torch.equal(logits(model), before)
    opened = write_quantized(model, tokenizer, tmp_path / "out", trained_sha256=sha256)
    again, _ = load_model(ModelConfig(ModelSource.folder, str(tmp_path / "out")))
    for other in (opened, again):
        assert packed_sha256(other) == sha256
        assert torch.equal(logits(other), before)
        assert not any(p.requires_grad for p in other.parameters())
    if all(layer.scheme.activations is None for layer in packed_layers(model).values() if hasattr(layer, "scheme")):
        with decoded(model, torch.bfloat16):
            assert not packed_layers(model)
            assert torch.equal(logits(model), before)
        assert packed_sha256(model) == sha256


def test_training_moved_the_codes() -> None:
    """Or the test above would compare rounding to nearest with itself."""
    model, _ = trained(CONFIGS["int4 learned"])
    base, _ = load_model(ModelConfig(ModelSource.tiny, dtype=DType.bfloat16))
    prepare_qat(base.requires_grad_(True), QatConfig(scheme="int4"))
    ours, theirs = (dict(packed_layers(m)) for m in (model, base))
    changed = [name for name in ours if not torch.equal(ours[name].quantized.packed, theirs[name].quantized.packed)]
    assert len(changed) == len(ours)
    assert all(
        not torch.equal(ours[n].quantized.tensors["scales"], theirs[n].quantized.tensors["scales"]) for n in ours
    )


def test_the_layers_that_our_kernels_know_become_quant_linears() -> None:
    model, _ = trained(CONFIGS["head in 8 bits"])
    convert(model)
    kinds = {name: type(layer) for name, layer in packed_layers(model).items()}
    assert kinds.pop("lm_head") is PackedLinear
    assert set(kinds.values()) == {QuantLinear} and len(kinds) == 14


def test_a_layer_that_multiplies_something_else_is_found() -> None:
    """One scale, one part in a hundred; before the start; and a hash of other codes."""
    model, tokenizer = trained(CONFIGS["int4"])
    name, layer = next(iter(packed_layers(model).items()))

    class Wrong(type(layer)):
        @property
        def quantized(self):
            found = super().quantized
            found.tensors["scales"][3, 1] *= 1.01  # bfloat16 has steps of 0.4 to 0.8 %
            return found

    layer.__class__ = Wrong
    with pytest.raises(RuntimeError, match=f"{name} multiplies another weight than the codes"):
        convert(model)
    assert not any(isinstance(layer, QuantLinear) for layer in model.modules())
    layer.__class__ = Wrong.__base__
    layer.enabled = False
    with pytest.raises(RuntimeError, match=f"{name} multiplies another weight"):
        convert(model)
    layer.enabled = True
    convert(model)
    with pytest.raises(RuntimeError, match="the packed model holds codes .* and training multiplied 000000000000"):
        write_quantized(model, tokenizer, "nowhere", trained_sha256="0" * 64)


def test_a_static_scale_belongs_to_the_hash() -> None:
    model, _ = trained(CONFIGS["int8_static"])
    before = packed_sha256(model)
    layer = next(iter(packed_layers(model).values()))
    layer.input_scale *= 1.5
    assert packed_sha256(model) != before
    convert(model)
    assert packed_sha256(model) != before


def with_biases() -> Qwen2ForCausalLM:
    """Trained through INT4, in bfloat16; q, k and v have biases."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    prepare_qat(model.requires_grad_(True), QatConfig(scheme="int4"))
    return model.eval()


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_a_large_bias_hides_no_other_weight(what: str) -> None:
    """Qwen2's keys have biases of hundreds, where bfloat16 has steps of 2: more than any weight."""
    model = with_biases()
    name, layer = next((name, layer) for name, layer in packed_layers(model).items() if name.endswith("k_proj"))
    layer.bias.data += 300

    class Wrong(type(layer)):
        def forward(self, x):
            weight = self.quantized.dequantize(x.dtype)
            return linear(x, -weight, self.bias) if what == "weight" else linear(x, weight)

    layer.__class__ = Wrong
    with pytest.raises(RuntimeError, match=f"{name} multiplies another weight"):
        convert(model)


def test_biases_in_16_bits() -> None:
    """A packed layer rounds its product and then the sum, as the server does; training rounds the sum once."""
    model = with_biases()
    before = logits(model)
    assert convert(model) == 14
    # Three of fourteen layers round once more, 2^-9 of their value each.
    assert 0 < (logits(model).float() - before.float()).norm() / before.float().norm() < 2**-6


@pytest.fixture
def exported(tmp_path):
    model, tokenizer = trained(CONFIGS["int4"])
    sha256 = packed_sha256(model)
    convert(model)
    write_quantized(model, tokenizer, tmp_path / "out", trained_sha256=sha256)
    return tmp_path / "out"


def test_a_changed_folder_is_refused(exported) -> None:
    file = exported / "packed.safetensors"
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[-1000] ^= 1
    file.write_bytes(changed)
    with pytest.raises(UserError, match=r"sha256 is \w+ and was \w+ when the model was exported"):
        open_packed(exported, torch.bfloat16)
    file.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="packed.safetensors cannot be read: .*; copy it again"):
        open_packed(exported, torch.bfloat16)
    file.unlink()
    with pytest.raises(UserError, match="lacks packed.safetensors; copy the whole folder again"):
        open_packed(exported, torch.bfloat16)


def test_a_folder_of_another_time_is_refused(exported) -> None:
    path = exported / "config.json"
    config = json.loads(path.read_text())
    for key, value, message in (
        ("format", 2, "has format 2 of packed models, and this version reads 1"),
        ("schemes", [{"weight": {"codebook": "int5"}}], "has a scheme that is not known here: .*int5"),
    ):
        entry = {**config["quantization_config"], key: value}
        path.write_text(json.dumps({**config, "quantization_config": entry}))
        with pytest.raises(UserError, match=message):
            open_packed(exported, torch.bfloat16)


def test_transformers_does_not_open_it_with_random_weights(exported) -> None:
    with pytest.raises(OSError, match="no file named model.safetensors"):
        AutoModelForCausalLM.from_pretrained(exported)


def test_another_compute_dtype_keeps_the_codes(exported) -> None:
    model, _ = load_model(ModelConfig(ModelSource.folder, str(exported), dtype=DType.float32))
    assert model.dtype is torch.float32
    packed, _ = load_model(ModelConfig(ModelSource.folder, str(exported)))
    assert packed.dtype is torch.bfloat16 and packed_sha256(model) == packed_sha256(packed)
    # Products of bfloat16 numbers, rounded to 2^-9 in some dozens of places.
    assert (logits(model) - logits(packed).float()).norm() / logits(model).norm() < 0.05


def test_shards(tmp_path) -> None:
    model, tokenizer = trained(CONFIGS["int4"])
    sha256, before = packed_sha256(model), logits(model)
    convert(model)
    opened = write_quantized(model, tokenizer, tmp_path / "out", trained_sha256=sha256, shard_bytes=40_000)
    assert len(list((tmp_path / "out").glob("packed-*.safetensors"))) > 2
    assert torch.equal(logits(opened), before)
