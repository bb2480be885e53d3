"""What a LoRA layer says of itself, so that whole layers can be computed without calling it."""

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from trainer.config import LoraConfig
from trainer.kernels.lora_linear import lora_linear
from trainer.linear import quantize_linears
from trainer.lora import LoraQuantLinear, attach_lora
from trainer.quantizer import Quantizer


class Small(nn.Module):
    """One packed layer, with what PEFT asks of a model."""

    config = None

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(96, 40, bias=bias)
        self.norm = nn.RMSNorm(40)  # PEFT asks the first parameter for the device
        self.requires_grad_(False)

    def prepare_inputs_for_generation(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x))


def attached(dropout: float = 0.0, bias: bool = True) -> tuple[PeftModel, LoraQuantLinear]:
    model = Small(bias)
    quantize_linears(model, Quantizer(), skip=set())
    peft_model = attach_lora(model, LoraConfig(rank=4, dropout=dropout), seed=0)
    layer = peft_model.base_model.model.proj
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return peft_model, layer


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_its_frozen_weight_and_its_adapter(bias: bool) -> None:
    _, layer = attached(bias=bias)
    base, x = layer.get_base_layer(), torch.randn(2, 3, 96)
    y = lora_linear(x.view(6, 96), [base.frozen_weight], [layer.adapter], bias=base.bias)
    assert layer.fusable and torch.equal(layer(x), y.view(2, 3, 40))
    dense = base.quantized.dequantize(torch.float32)
    want = x @ (dense + layer.adapter.scaling * layer.adapter.lora_B @ layer.adapter.lora_A).T
    torch.testing.assert_close(layer(x), want if base.bias is None else want + base.bias, rtol=1e-4, atol=1e-5)


def test_a_disabled_adapter_is_none() -> None:
    model, layer = attached()
    x = torch.randn(5, 96)
    with model.disable_adapter():
        assert layer.fusable and layer.adapter is None
        assert torch.equal(layer(x), layer.get_base_layer()(x))
    assert layer.adapter is not None and not torch.equal(layer(x), layer.get_base_layer()(x))


def test_dropout_is_fusable_outside_training_alone() -> None:
    _, layer = attached(dropout=0.5)
    assert layer.train().fusable is False
    with pytest.raises(ValueError, match="dropout of adapter 'default' cannot be fused"):
        _ = layer.adapter
    assert layer.eval().fusable and layer.adapter.lora_A is layer.lora_A["default"].weight


def test_two_active_adapters_are_two_updates() -> None:
    model, layer = attached()
    model.add_adapter("other", model.peft_config["default"])
    nn.init.normal_(layer.lora_B["other"].weight, std=0.1)
    x = torch.randn(5, 96)
    base, one = layer.get_base_layer()(x), layer(x)
    model.base_model.set_adapter(["other"])
    assert layer.fusable and layer.adapter.lora_A is layer.lora_A["other"].weight
    other = layer(x)
    model.base_model.set_adapter(["default", "other"])
    assert not layer.fusable
    with pytest.raises(ValueError, match="2 active adapters"):
        _ = layer.adapter
    torch.testing.assert_close(layer(x), one + other - base, rtol=1e-4, atol=1e-5)  # order of sums
