import pytest
import torch

from trainer.kernels.lora_linear import nf4_lora_linear, nf4_lora_linear_reference
from trainer.quantizer import Quantizer

SHAPES = [(1, 64, 64), (5, 33, 96), (40, 7, 65), (3, 1, 1023)]  # rows, out_features, in_features; blocks cross rows


def case(rows, out_features, in_features, dtype, double_quant=True):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(out_features, in_features, generator=generator) * 0.1
    quantized = Quantizer("nf4", block_size=64, double_quant=double_quant).quantize(dense)
    x = torch.randn(rows, in_features, generator=generator).to(dtype).requires_grad_()
    lora_A = (torch.randn(4, in_features, generator=generator) * 0.1).requires_grad_()
    lora_B = (torch.randn(out_features, 4, generator=generator) * 0.1).requires_grad_()
    weight = (quantized.packed, quantized.absmax, quantized.nested_absmax, quantized.nested_offset)
    return x, weight, quantized.dequantize(dtype), lora_A, lora_B


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-5),  # summation order
        (torch.bfloat16, 2e-2),  # inputs, factors and results are rounded to 8 bits
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_gradients_equal_the_dense_layer(shape, dtype, tolerance, double_quant):
    x, weight, dense, lora_A, lora_B = case(*shape, dtype, double_quant)
    inputs = (x, lora_A, lora_B)
    y = nf4_lora_linear(x, *weight, lora_A, lora_B, block_size=64, scaling=2.0)
    expected, _ = nf4_lora_linear_reference(x.double(), dense.double(), lora_A, lora_B, scaling=2.0)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(y, inputs, grad.to(dtype))
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    for a, w in zip((y, *actual), (expected, *wanted), strict=True):
        assert (a.double() - w.double()).norm() <= tolerance * w.double().norm()


def test_leading_dimensions_are_kept():
    x, weight, _, lora_A, lora_B = case(6, 33, 96, torch.float32)
    flat = nf4_lora_linear(x, *weight, lora_A, lora_B, block_size=64, scaling=1.0)
    deep = nf4_lora_linear(x.view(2, 3, 96), *weight, lora_A, lora_B, block_size=64, scaling=1.0)
    assert torch.equal(deep, flat.view(2, 3, 33))


def test_opcheck():
    x, weight, _, lora_A, lora_B = case(5, 33, 96, torch.float32)
    torch.library.opcheck(torch.ops.lowbit.nf4_lora_linear, (x, *weight, lora_A, lora_B, 64, 2.0))
