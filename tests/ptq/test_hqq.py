"""HQQ with integer zero points: never a worse fit, by its own measure, than where it starts."""

import pytest
import torch

from trainer.ptq.hqq import P, hqq
from trainer.quant_grid import WeightGrid
from trainer.quantizer import Quantizer


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tail", [1.0, 3.0])
def test_the_fit_is_no_worse_and_with_outliers_better(symmetric, tail):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 128, generator=generator)
    weight = weight.sign() * weight.abs().pow(tail)
    quantizer = Quantizer("int4", symmetric=symmetric, scale_dtype="float16")
    first = WeightGrid.spanning(weight, quantizer).scales[..., None]
    found, plain = hqq(weight, quantizer), quantizer.quantize(weight)
    ours, theirs = (
        ((each.dequantize(torch.float32) - weight).view(16, 4, 32) / first).abs().pow(P).sum(2)
        for each in (found, plain)
    )
    assert bool((ours <= theirs * (1 + 1e-5)).all())
    assert ours.sum() < 0.995 * theirs.sum()  # 1 to 4 % less, by shape of the weights
    assert found.quantizer == quantizer


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_constant_groups(value):
    weight = torch.full((2, 64), value)
    quantized = hqq(weight, Quantizer("int4", symmetric=False))
    assert torch.allclose(quantized.dequantize(torch.float32), weight, rtol=1e-3)


def test_codebooks_are_refused():
    with pytest.raises(ValueError, match="not of nf4; use method=rtn"):
        hqq(torch.ones(2, 64), Quantizer("nf4"))
