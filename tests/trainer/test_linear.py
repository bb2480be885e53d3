import pytest
import torch
from torch import nn

from trainer.config.errors import UserError
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig, ModelSource
from trainer.config.quant import QuantConfig
from trainer.linear import QuantLinear, quantize_linears, weights_sha256
from trainer.lora import LoraLinear, attach_lora
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss
from trainer.quantizer import Quantizer


def small(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 40, bias=bias), nn.GELU(), nn.Linear(40, 33)).requires_grad_(False)


@pytest.fixture
def tiny():
    model, tokenizer = load_model(ModelConfig(source=ModelSource.tiny))
    return model.float(), tokenizer


@pytest.mark.parametrize("double_quant", [True, False])
def test_forward_is_the_dequantized_layer(double_quant):
    model, quantizer = small(), Quantizer(double_quant=double_quant)
    dense = [quantizer.quantize(layer.weight).dequantize(torch.float32) for layer in (model[0], model[2])]
    biases = [model[0].bias, model[2].bias]
    quantize_linears(model, quantizer, skip=set())
    for rows in (1, 3, 50):  # decode kernel and dense product
        x = torch.randn(rows, 96)
        hidden = nn.functional.gelu(x @ dense[0].T + biases[0])
        torch.testing.assert_close(model(x), hidden @ dense[1].T + biases[1], rtol=1e-4, atol=1e-5)  # order of sums


def test_forward_never_changes_the_weights():
    model = small()
    quantize_linears(model, Quantizer(), skip=set())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for mode in (True, False):
        model.train(mode)(torch.randn(4, 96))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_state_dict_round_trip():
    one, other = small(), small()
    with torch.no_grad():
        other[0].weight.mul_(2)
    for model in (one, other):
        quantize_linears(model, Quantizer(), skip=set())
    other.load_state_dict(one.state_dict())
    x = torch.randn(5, 96)
    assert torch.equal(one(x), other(x)) and weights_sha256(one) == weights_sha256(other)


BUFFERS = {
    **dict.fromkeys(("nf4", "fp4", "nf3", "nf2"), ["packed", "absmax", "nested_absmax", "nested_offset"]),
    "int4": ["packed", "scales"],
    "int8": ["packed", "scales"],
}


@pytest.mark.parametrize(("codebook", "names"), BUFFERS.items())
def test_every_base_multiplies_its_dequantized_weight(codebook, names):
    """Its tensors are buffers under names that checkpoints and `weights_sha256` rely on, in this order."""
    model, quantizer = small(), Quantizer(codebook, group_size=-1 if codebook == "int4" else None)
    dense, bias = quantizer.quantize(model[0].weight).dequantize(torch.float32), model[0].bias
    quantize_linears(model, quantizer, skip=set())
    assert [key.removeprefix("0.") for key in model.state_dict() if key.startswith("0.")] == ["bias", *names]
    assert torch.equal(model[0].quantized.dequantize(torch.float32), dense)
    for rows in (1, 50):  # decoded beside the sums, and a dense product
        x = torch.randn(rows, 96, requires_grad=True)
        y = model[0](x)
        torch.testing.assert_close(y, x @ dense.T + bias, rtol=1e-4, atol=1e-5)  # order of sums
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, dense.sum(0).expand(rows, -1), rtol=1e-4, atol=1e-5)


def test_each_layer_can_have_its_own_quantizer():
    model = small()
    quantize_linears(model, lambda name: Quantizer("nf2" if name == "0" else "int8"), skip=set())
    assert [model[i].quantizer.codebook for i in (0, 2)] == ["nf2", "int8"]


def test_the_hash_sees_one_code():
    model = small()
    quantize_linears(model, Quantizer(), skip=set())
    before = weights_sha256(model)
    model[2].packed[-1] ^= 1
    assert weights_sha256(model) != before


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_damaged_weight_is_named(value):
    model = small()
    model[2].weight[3, 7] = value
    with pytest.raises(ValueError, match=r"^2\.weight: .*\[3, 7\]"):
        quantize_linears(model, Quantizer(), skip=set())


def test_head_and_embeddings_stay_in_16_bits(tiny):
    model, _ = tiny
    head = model.lm_head.weight
    assert head is model.model.embed_tokens.weight  # tied
    prepare_model(model, QuantConfig())
    assert model.lm_head.weight is head and type(model.lm_head) is nn.Linear
    assert sum(isinstance(layer, QuantLinear) for layer in model.modules()) == 14  # 7 a layer, 2 layers


def test_an_architecture_whose_weights_are_not_linear_layers_is_refused(tiny):
    """Fused experts are bare parameters: packing the rest would leave the model in 16 bits while claiming 4."""
    model, _ = tiny
    model.experts = nn.Parameter(torch.zeros(8, 1000, 1000), requires_grad=False)
    with pytest.raises(UserError, match="only .*% of llama's weights"):
        prepare_model(model, QuantConfig())


def test_adapter_starts_as_zero_and_every_factor_gets_a_gradient(tiny):
    model, _ = tiny
    prepare_model(model, QuantConfig())
    ids = torch.randint(0, 250, (2, 9))
    base = model(ids).logits.detach()
    objective = NextTokenLoss(attach_lora(model, LoraConfig(rank=4), seed=0))
    assert torch.equal(objective.model(ids).logits, base)
    for _ in range(2):  # A's gradient is zero while B is zero
        objective(ids, ids).backward()
        with torch.no_grad():
            params = [p for p in objective.parameters() if p.requires_grad]
            for p in params:
                p -= 0.01 * p.grad
    assert len(params) == 28 and all(p.dtype is torch.float32 and p.grad.abs().sum() > 0 for p in params)


def test_dropout_and_fused_path_agree_when_nothing_is_dropped(tiny):
    model, _ = tiny
    prepare_model(model, QuantConfig())
    peft_model = attach_lora(model, LoraConfig(rank=4, dropout=0.5), seed=0)
    for layer in (m for m in peft_model.modules() if isinstance(m, LoraLinear)):
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    ids = torch.randint(0, 250, (2, 9))
    fused = peft_model.eval()(ids).logits
    for layer in (m for m in peft_model.modules() if isinstance(m, LoraLinear)):
        layer.lora_dropout["default"].p = 0.0
    torch.testing.assert_close(peft_model.train()(ids).logits, fused, rtol=1e-4, atol=1e-5)  # order of sums


def test_merging_is_refused(tiny):
    model, _ = tiny
    prepare_model(model, QuantConfig())
    with pytest.raises(ValueError, match="unmerged"):
        attach_lora(model, LoraConfig(rank=4), seed=0).merge_and_unload()


def test_unknown_target_modules_are_named(tiny):
    model, _ = tiny
    prepare_model(model, QuantConfig())
    with pytest.raises(UserError, match="'qproj'.*q_proj"):
        attach_lora(model, LoraConfig(target_modules=["qproj"]), seed=0)


def test_loss_falls_back_to_logits_where_the_head_does_more(tiny, caplog):
    """A head with a bias: only the path through the full logits knows it."""
    model, _ = tiny
    ids = torch.randint(0, 250, (2, 9))
    fused = NextTokenLoss(model)
    assert fused.fused_head
    logits = model(ids).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(fused(ids, ids), expected, rtol=1e-5, atol=0)
    model.lm_head.bias = nn.Parameter(torch.randn(model.config.vocab_size), requires_grad=False)
    biased = NextTokenLoss(model)
    assert not biased.fused_head and "full logits" in caplog.text
    logits = model(ids).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(biased(ids, ids), expected, rtol=1e-5, atol=0)
