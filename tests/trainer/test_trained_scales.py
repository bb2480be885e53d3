"""ScaledLinear: the product of its packed codes, and the gradient of their scales."""

import pytest
import torch
from torch import nn

from trainer.blockwise.scales import ScaledLinear, train_scales
from trainer.linear import QuantLinear, quantize_linears
from trainer.quantizer import Quantizer

QUANTIZERS = {
    "int4": Quantizer("int4"),
    "int4 asymmetric": Quantizer("int4", group_size=64, symmetric=False),
    "int4 of whole rows": Quantizer("int4", group_size=-1),
    "int4 with float16 scales": Quantizer("int4", scale_dtype="float16"),
    "int8": Quantizer("int8"),
}


def layer(quantizer: Quantizer, *, bias: bool = False) -> ScaledLinear:
    torch.manual_seed(0)
    weight = quantizer.quantize(torch.randn(48, 128))
    return ScaledLinear(weight, torch.randn(48) if bias else None, dtype=torch.float32)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_it_multiplies_what_ships(name: str) -> None:
    """After a step that moved the scales, too: bit for bit the product with the weight of `quantized`."""
    scaled = layer(QUANTIZERS[name], bias=True)
    with torch.no_grad():
        scaled.scales.mul_(1 + 0.1 * torch.randn_like(scaled.scales))
    x = torch.randn(5, 128)
    packed = scaled.quantized
    assert torch.equal(scaled(x), nn.functional.linear(x, packed.dequantize(x.dtype), scaled.bias))
    assert torch.equal(
        packed.tensors["scales"], packed.tensors["scales"].to(getattr(torch, scaled.quantizer.scale_dtype))
    )


@pytest.mark.parametrize("name", QUANTIZERS)
def test_gradients_are_those_of_the_formula(name: str) -> None:
    """(codes - zeros) * scales written out in float64."""
    scaled = layer(QUANTIZERS[name])
    codes = scaled.quantized
    ones = {**codes.tensors, "scales": torch.ones_like(codes.tensors["scales"])}
    steps = type(codes)(ones, codes.shape, codes.quantizer).dequantize(torch.float32).double()
    x, scales = torch.randn(7, 128, dtype=torch.float64, requires_grad=True), scaled.scales.detach().double()
    scales.requires_grad_()
    spread = scales.repeat_interleave(128 // scales.shape[1], dim=1)
    target = torch.randn(7, 48, dtype=torch.float64)
    expected = torch.autograd.grad((x @ (steps * spread).T * target).sum(), (x, scales))
    single = x.detach().float().requires_grad_()
    found = torch.autograd.grad((scaled(single) * target.float()).sum(), (single, scaled.scales))
    for mine, theirs in zip(found, expected, strict=True):
        # float32 sums of 128 products; float16 scales are used as they are stored, up to 5e-4 off the parameter
        rtol = 1e-3 if scaled.quantizer.scale_dtype == "float16" else 1e-5
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


def test_codes_of_act_order_sum_into_their_groups() -> None:
    scaled = layer(Quantizer("int4", group_size=32))
    shuffled = torch.randperm(128).remainder(4).to(torch.int32)
    scaled.g_idx = shuffled
    x = torch.randn(3, 128)
    scaled(x).sum().backward()
    steps = scaled.quantized.dequantize(torch.float32) / scaled.scales.detach()[:, shuffled.long()]
    expected = torch.stack([(x.sum(0) * steps)[:, shuffled == group].sum(1) for group in range(4)], dim=1)
    torch.testing.assert_close(scaled.scales.grad, expected, rtol=1e-4, atol=1e-4)  # float32 sums in another order


def test_a_model_trains_its_scales_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32))
    quantize_linears(model, Quantizer("int4"), skip=set())
    before = model(torch.ones(2, 64))
    assert train_scales(model, dtype=torch.float32) == ["0", "2"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.scales", "2.scales"]
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    torch.testing.assert_close(model(torch.ones(2, 64)), before, rtol=1e-5, atol=1e-6)  # sums in another order


def test_codebooks_have_no_scales_to_train() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_linears(model, Quantizer("nf4"), skip=set())
    with pytest.raises(ValueError, match="0: a weight in nf4 has no scales to train"):
        train_scales(model, dtype=torch.float32)
