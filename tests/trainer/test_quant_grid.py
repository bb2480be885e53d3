"""WeightGrid: scales apart from codes, on the quantizer's own arithmetic."""

import pytest
import torch

from trainer.quant_grid import WeightGrid, code_values, nearest_codes
from trainer.quantizer import Quantizer

QUANTIZERS = [
    *(Quantizer("int4", symmetric=True, divisor=divisor) for divisor in (7.0, 7.5, 8.0)),
    Quantizer("int4", symmetric=False),
    Quantizer("int4", group_size=-1, scale_dtype="float16"),
    Quantizer("int4", group_size=64, scale_dtype="bfloat16", symmetric=False),
    Quantizer("int8"),
    Quantizer("int8", group_size=32, scale_dtype="float16"),
    *(Quantizer(name, block_size=32, double_quant=False) for name in ("nf4", "fp4", "nf3", "nf2")),
]


def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 128, generator=generator)
    weight[0] = 0
    weight[1] = 0.25  # constant
    weight[2] = weight[2].abs() + 1  # no zero inside
    weight[3] = -weight[3].abs() - 1
    weight[4, 5] = 1000
    return weight


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_codes_on_the_grid_of_a_weight_are_the_quantizers(quantizer, dtype):
    weight = weights().to(dtype)
    ours, wanted = WeightGrid.spanning(weight, quantizer).nearest(weight), quantizer.quantize(weight)
    for name, tensor in wanted.tensors.items():
        assert (tensor is None) == (ours.tensors[name] is None)
        assert tensor is None or torch.equal(ours.tensors[name], tensor), name


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_errors_are_the_difference_group_by_group(quantizer):
    weight = weights()
    grid = WeightGrid.spanning(weight, quantizer)
    wanted = quantizer.quantize(weight).dequantize(torch.float32) - weight
    assert torch.equal(grid.errors(weight).reshape(weight.shape), wanted)


def test_double_quantization_decides_scales_before_codes():
    quantizer = Quantizer("nf4", block_size=32)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    ours, plain = WeightGrid.spanning(weight, quantizer).nearest(weight), quantizer.quantize(weight)
    assert torch.equal(ours.absmax, plain.absmax)
    errors = [(each.dequantize(torch.float32) - weight).norm() for each in (ours, plain)]
    assert errors[0] < errors[1]  # nearest to what is decoded


def test_groups_along_an_order_are_contiguous_groups_of_the_sorted_weight():
    weight, quantizer = weights()[2:], Quantizer("int4", symmetric=False)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    ours = WeightGrid.spanning(weight, quantizer, order=order).nearest(weight)
    wanted = torch.empty_like(weight)
    wanted[:, order] = quantizer.quantize(weight[:, order]).dequantize(torch.float32)
    assert ours.tensors["g_idx"].bincount().tolist() == [32] * 4
    assert torch.equal(ours.dequantize(torch.float32), wanted)


def test_given_scales_are_rounded_and_zero_becomes_one():
    quantizer = Quantizer("int4", scale_dtype="float16")
    grid = WeightGrid.of_scales(torch.tensor([[0.1, 0.0]]), None, (1, 64), quantizer)
    assert grid.scales.tolist() == [[torch.tensor(0.1).half().item(), 1.0]]


def test_codes_stand_for_their_values():
    codes = torch.tensor([0, 8, 15], dtype=torch.uint8)
    scales = torch.full((3,), 0.5)
    assert code_values(codes, scales, None, Quantizer("int4")).tolist() == [-4.0, 0.0, 3.5]
    zeros = torch.full((3,), 15, dtype=torch.uint8)
    assert code_values(codes, scales, zeros, Quantizer("int4", symmetric=False)).tolist() == [-7.5, -3.5, 0.0]
    assert nearest_codes(torch.tensor([63.4, -1e9]), torch.ones(2), None, Quantizer("int8")).tolist() == [63, -127]


def test_blocks_that_cross_rows_have_no_grid():
    with pytest.raises(ValueError, match="in_features=96.*use block_size=32, or method=rtn"):
        WeightGrid.spanning(torch.ones(2, 96), Quantizer("nf4"))
    with pytest.raises(ValueError, match="for int4, not int8; use act_order=static"):
        WeightGrid.spanning(torch.ones(2, 32), Quantizer("int8"), order=torch.arange(32))
