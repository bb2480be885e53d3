"""GPTQ against the textbook's form of it, and on the inputs that break others."""

import pytest
import torch

from trainer.ptq.gptq import (
    fitted_scales,
    gptq,
    gptq_codes,
    inverse_of,
    layer_error,
    searched_grid,
    towards_16bit,
)
from trainer.quant_grid import WeightGrid, code_values, nearest_codes
from trainer.quantizer import Quantizer

QUANTIZERS = [
    Quantizer("int4", scale_dtype="float16"),
    Quantizer("int4", symmetric=False, scale_dtype="float16"),
    Quantizer("int4", group_size=-1),
    Quantizer("int8"),
    Quantizer("nf4", block_size=32),
    Quantizer("nf2", block_size=32, double_quant=False),
]


def problem(out_features: int = 24, in_features: int = 64, tokens: int = 512, seed: int = 0):
    """A weight, and inputs whose channels say much of one another."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    mixing = torch.randn(in_features // 4, in_features, generator=generator)
    x = torch.randn(tokens, in_features // 4, generator=generator) @ mixing
    x += 0.3 * torch.randn(tokens, in_features, generator=generator)
    return weight, x, (x.T @ x).double()


def textbook(weight: torch.Tensor, grid: WeightGrid, hessian: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Optimal Brain Quantization in a given order: the inverse of what is left, anew for each feature (float64)."""
    left, weight = list(order), weight.double().clone()
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    groups = grid.group_of.tolist()
    for feature in order:
        inverse = torch.linalg.inv(hessian[left][:, left])
        scales = grid.scales[:, groups[feature]]
        zeros = None if grid.zeros is None else grid.zeros[:, groups[feature]]
        code = nearest_codes(weight[:, feature].float(), scales, zeros, grid.quantizer)
        error = weight[:, feature] - code_values(code, scales, zeros, grid.quantizer).double()
        weight[:, left] -= error[:, None] * inverse[0] / inverse[0, 0]
        codes[:, feature] = code
        left.remove(feature)
    return codes


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("in_features", [64, 160])  # inside a block of features, and beyond it
def test_codes_are_the_textbooks(symmetric, act_order, in_features):
    weight, _, hessian = problem(in_features=in_features)
    grid = WeightGrid.spanning(weight, Quantizer("int4", symmetric=symmetric))
    inverse = inverse_of(hessian, damping=0.01, act_order=act_order)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(in_features, dtype=torch.float64)
    wanted = textbook(weight, grid, damped, inverse.order.tolist())
    different = (gptq_codes(weight, grid, inverse) != wanted).double().mean().item()
    assert different < 0.01  # float32 sums turn a tie now and then, and what follows it
    errors = [layer_error(weight, grid.pack(codes).dequantize(torch.float32), hessian)
              for codes in (gptq_codes(weight, grid, inverse), wanted)]  # fmt: skip
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_outputs_are_nearer_than_rounding_to_nearest(quantizer):
    weight, x, hessian = problem()
    inverse = inverse_of(hessian, damping=0.01, act_order=True)
    quantized = gptq(weight, quantizer, hessian, inverse, damping=0.01)
    nearest = quantizer.quantize(weight)
    errors = [(x @ (each.dequantize(torch.float32) - weight).T).square().sum() for each in (quantized, nearest)]
    assert errors[0] < 0.6 * errors[1]
    assert quantized.quantizer == quantizer
    assert layer_error(weight, nearest.dequantize(torch.float32), hessian) == pytest.approx(errors[1].item(), rel=1e-3)


def test_inputs_that_say_nothing_of_one_another_leave_the_nearest_codes():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    hessian = torch.eye(64, dtype=torch.float64)
    inverse = inverse_of(hessian, damping=0.01, act_order=True)
    quantizer = Quantizer("int4")
    grid = WeightGrid.spanning(weight, quantizer)
    assert torch.equal(grid.pack(gptq_codes(weight, grid, inverse)).packed, quantizer.quantize(weight).packed)


def test_channels_without_inputs_get_the_nearest_codes():
    weight, x, _ = problem()
    x[:, [3, 40]] = 0
    hessian = (x.T @ x).double()
    inverse = inverse_of(hessian, damping=0.01, act_order=False)
    quantizer = Quantizer("int4")
    grid = WeightGrid.spanning(weight, quantizer)
    codes = gptq_codes(weight, grid, inverse)
    nearest = nearest_codes(weight, grid.scales[:, grid.group_of], None, quantizer)
    assert torch.equal(codes[:, [3, 40]], nearest[:, [3, 40]])
    assert hessian[3, 3] == 0  # the caller's own was not touched


@pytest.mark.parametrize("case", ["few tokens", "one token", "equal channels", "no inputs", "one loud channel"])
def test_hopeless_hessians_are_damped_and_never_crash(case, caplog):
    caplog.set_level("INFO", "trainer")
    weight, x, _ = problem()
    x = {
        "few tokens": x[:16],
        "one token": x[:1],
        "equal channels": x[:, :1].expand(-1, 64).clone(),
        "no inputs": torch.zeros_like(x),
        "one loud channel": x * torch.eye(64)[5].mul(1e6).add(1e-6),
    }[case]
    hessian = (x.T @ x).double()
    inverse = inverse_of(hessian, damping=1e-18, act_order=True, name="layer")
    quantized = gptq(weight, Quantizer("int4"), hessian, inverse, damping=inverse.damping)
    assert bool(quantized.dequantize(torch.float32).isfinite().all())
    if inverse.damping > 1e-18:
        assert "layer: damping" in caplog.text


def test_searched_scales_have_no_larger_error():
    weight, _, hessian = problem()
    weight[:, 7] *= 6  # a range that the rest of its group hardly uses
    quantizer = Quantizer("int4")
    importance = hessian.diagonal().float()
    for order in (None, torch.randperm(64, generator=torch.Generator().manual_seed(0))):
        found = searched_grid(weight, quantizer, importance, order=order)
        plain = WeightGrid.spanning(weight, quantizer, order=order)
        errors = [(each.nearest(weight).dequantize(torch.float32) - weight).square() @ importance
                  for each in (found, plain)]  # fmt: skip
        assert bool((errors[0] <= errors[1] * (1 + 1e-6)).all())
        assert errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_fitted_scales_are_the_least_squares_ones(symmetric):
    weight, x, hessian = problem(out_features=5)
    quantizer = Quantizer("int4", symmetric=symmetric)
    grid = WeightGrid.spanning(weight, quantizer)
    codes = grid.nearest(weight)
    levels = codes.dequantize(torch.float32).view(5, 2, 32) / grid.scales[..., None]
    unpacked = levels + (8 if grid.zeros is None else grid.zeros[..., None].float())
    fitted = fitted_scales(weight, unpacked.round().to(torch.uint8).view(5, 64), grid, hessian, damping=1e-9)
    for row in range(5):  # y = sum over groups of s_g (X_g q_g)
        design = torch.stack([x[:, :32] @ levels[row, 0], x[:, 32:] @ levels[row, 1]], 1).double()
        wanted = torch.linalg.lstsq(design, (x @ weight[row]).double()[:, None]).solution[:, 0]
        assert fitted[row].double() == pytest.approx(wanted, rel=1e-3)


def test_groups_along_the_order_of_inputs():
    weight, _, hessian = problem(in_features=128)
    inverse = inverse_of(hessian, damping=0.01, act_order=True)
    quantized = gptq(weight, Quantizer("int4"), hessian, inverse, damping=0.01, grouped_order=True)
    assert quantized.tensors["g_idx"][inverse.order].tolist() == [i // 32 for i in range(128)]
    nearest = Quantizer("int4").quantize(weight).dequantize(torch.float32)
    errors = [layer_error(weight, values, hessian) for values in (quantized.dequantize(torch.float32), nearest)]
    assert errors[0] < 0.6 * errors[1]


def test_matching_the_16bit_model():
    weight, x, _ = problem()
    x16 = x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    hessian, cross = x.double().T @ x.double(), x16.double().T @ x.double()
    moved = towards_16bit(weight, hessian, cross, damping=1e-9)
    before, after = ((x @ each.T - x16 @ weight.T).square().sum() for each in (weight, moved))
    assert after < before
    wanted = torch.linalg.lstsq(x.double(), (x16 @ weight.T).double()).solution.T
    assert torch.allclose(moved.double(), wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(towards_16bit(weight, hessian, hessian, damping=0.01), weight)
    nothing = torch.zeros_like(hessian)
    assert torch.equal(towards_16bit(weight, nothing, nothing, damping=0.01), weight)


def test_no_row_loses_by_being_refitted():
    """What a row wins can be less than what rounding its new scales costs; bfloat16's are rounded by up to 2^-9."""
    weight, _, hessian = problem(out_features=256)
    inverse, quantizer = (
        inverse_of(hessian, damping=0.01, act_order=True),
        Quantizer("int4", group_size=-1, scale_dtype="bfloat16"),
    )
    refitted, plain = (
        gptq(weight, quantizer, hessian, inverse, damping=0.01, refit=refit).dequantize(torch.float32) - weight
        for refit in (True, False)
    )
    ours, theirs = (((error @ hessian.float()) * error).sum(1) for error in (refitted, plain))
    assert bool((ours <= theirs).all()) and bool((ours < theirs).any()) and bool((ours == theirs).any())


def test_fitted_scales_are_never_negative():
    """Two groups of the same inputs and opposite weights pull each other's scales through zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=generator)
    x = torch.cat([x, x + 1e-3 * torch.randn(512, 32, generator=generator)], 1)
    hessian, quantizer = (x.T @ x).double(), Quantizer("int4")
    weight = torch.randn(16, 64, generator=generator)
    grid = WeightGrid.spanning(weight, quantizer)
    codes = torch.randint(0, 16, weight.shape, generator=generator).to(torch.uint8)
    fitted = fitted_scales(weight, codes, grid, hessian, damping=1e-9)
    assert bool((fitted > 0).all())
    assert bool((fitted == grid.scales).any())  # where there was a choice
