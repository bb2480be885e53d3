"""HQQ: scales and zero points by half-quadratic splitting, without data.

Half-Quadratic Quantization, Badri and Shaji, 2023 (mobiusml.github.io/hqq_blog):

    minimise  |e|_p^p + beta / 2 |e - (W - W_q)|^2       W_q = (codes - zeros) * scales, p = 0.7

taking turns: e by shrinkage, then zero point and scale of each group by least squares of W - e, then the nearest codes;
beta grows. Outliers may keep their error, since p < 1 charges them little for it.

What differs from the authors' code: zero points are integers, which INT4 kernels and files have, so the scale moves too
(a rounded zero point alone hardly moves); errors are measured in steps of the group, so that the same beta serves every
layer; of each group the iterate with the smallest |W - W_q|_p is kept, the one that it starts from included.
"""

import torch
from torch import Tensor

from trainer.quant_grid import WeightGrid
from trainer.quantizer import QuantizedTensor, Quantizer

P, BETA, KAPPA, ITERATIONS = 0.7, 10.0, 1.01, 20
"""The authors' defaults (hqq/core/optimize.py)."""


def hqq(weight: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """Codes and scales of a weight [out, in] float; int4.

    raises  ValueError for a codebook whose scales are no free numbers
    """
    if quantizer.codebook != "int4":
        raise ValueError(f"HQQ moves scales and zero points of int4, not of {quantizer.codebook}; use method=rtn")
    weight = weight.float()
    start = WeightGrid.spanning(weight, quantizer)
    shape = *start.scales.shape, -1
    w, first = weight.view(shape), start.scales[..., None]
    scales, zeros = start.scales, start.zeros
    best_scales, best_zeros = scales, zeros
    smallest = torch.full_like(scales, torch.inf)
    beta = BETA
    for _ in range(ITERATIONS):
        grid = WeightGrid.of_scales(scales, zeros, start.shape, quantizer)
        packed = grid.nearest(weight)
        error = w - packed.dequantize(torch.float32).view(shape)
        loss = (error / first).abs().pow(P).sum(2)
        better = loss < smallest
        smallest, best_scales = torch.where(better, loss, smallest), torch.where(better, grid.scales, best_scales)
        best_zeros = None if zeros is None else torch.where(better, zeros, best_zeros)
        rest = w - _shrink(error / first, beta) * first
        scales, zeros = _fit(rest, packed, grid)
        beta *= KAPPA
    return WeightGrid.of_scales(best_scales, best_zeros, start.shape, quantizer).nearest(weight)


def _shrink(x: Tensor, beta: float) -> Tensor:
    """The e with the smallest |e|^p + beta / 2 (e - x)^2, to first order."""
    magnitude = x.abs()
    return x.sign() * (magnitude - magnitude.clamp(min=1e-8).pow(P - 1) / beta).clamp(min=0)


def _fit(rest: Tensor, packed: QuantizedTensor, grid: WeightGrid) -> tuple[Tensor, Tensor | None]:
    """Zero points, then scales, by least squares of `rest` [out, groups, group_size] on the codes."""
    levels = packed.dequantize(torch.float32).view(rest.shape) / grid.scales[..., None]
    zeros = grid.zeros
    if zeros is not None:
        codes = levels + zeros[..., None].float()
        zeros = (codes - rest / grid.scales[..., None]).mean(2).round().clamp(0, 15)
        levels = codes - zeros[..., None]
        zeros = zeros.to(torch.uint8)
    square = levels.square().sum(2)
    scales = torch.where(square > 0, (levels * rest).sum(2) / square.clamp(min=1e-12), grid.scales)
    return torch.where(scales > 0, scales, grid.scales), zeros
