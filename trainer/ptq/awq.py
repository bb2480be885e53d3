"""AWQ: factors that protect the weights of large inputs, and ranges that are cut (arXiv:2306.00978, section 3.2).

For a stage of a block with weights W_l [out, in] that share inputs X, of which H = X^T X is known:

    s(r)  = mean|X|^r, or mean|X|^r / mean|W|^(1 - r)       r on a grid of 10, scaled so that max s * min s = 1
    loss  = sum over l of ||(W_l - Q(W_l diag(s)) diag(1/s)) X||^2

and of each group of a weight the clip, as a share of its largest weight, with the smallest error of the group's own
output. The surprising thing: the loss needs no activations, since ||E X||^2 = tr(E H E^T).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.quant_grid import WeightGrid
from trainer.quantizer import QuantizedTensor, Quantizer

RATIOS = tuple(i / 10 for i in range(10))
CLIPS = tuple(1 - i / 20 for i in range(11))


def searched_factor(
    weights: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    hessian: Tensor,
    mean_abs: Tensor,
    usable: Callable[[Tensor], Tensor],
) -> Tensor:
    """The factor [in_features] float32 with the smallest loss; ones if none is better than no factor.

    weights   [out, in] float32 each; quantizers: of each
    hessian   [in, in] float64
    mean_abs  [in] float: mean |x| of each channel
    usable    what a factor becomes where channels must have the same one (`BlockWeights.usable`)
    """
    H = hessian.float()
    best, smallest = torch.ones_like(mean_abs, dtype=torch.float32), torch.inf
    for factor in map(usable, _candidates(weights, mean_abs.float())):
        loss = 0.0
        for weight, quantizer in zip(weights, quantizers, strict=True):
            error = weight - quantizer.quantize(weight * factor).dequantize(torch.float32) / factor
            loss += ((error @ H) * error).sum().item()
        if loss < smallest:
            best, smallest = factor, loss
    return best


def _candidates(weights: Sequence[Tensor], mean_abs: Tensor) -> list[Tensor]:
    """Ones first."""
    mean_weight = torch.cat(list(weights)).abs().mean(0).clamp(min=1e-4)
    found = [torch.ones_like(mean_abs)]
    for ratio in RATIOS:
        powers = [mean_abs.pow(ratio), mean_abs.pow(ratio) / mean_weight.pow(1 - ratio)]
        found += [_balanced(power) for power in powers]
    return found


def _balanced(factor: Tensor) -> Tensor:
    """Scaled so that its largest times its smallest is 1; channels without inputs are left alone."""
    factor = factor.clamp(min=1e-4)
    factor = factor / (factor.max() * factor.min()).sqrt()
    return torch.nan_to_num(factor, nan=1.0, posinf=1.0, neginf=1.0)


def clipped_codes(weight: Tensor, quantizer: Quantizer, hessian: Tensor) -> QuantizedTensor:
    """The nearest codes on ranges that are cut where the group's own output error is smallest.

    weight   [out, in] float32
    hessian  [in, in] float64
    """
    plain = WeightGrid.spanning(weight, quantizer)
    num_groups = plain.scales.shape[1]
    size = weight.shape[1] // num_groups
    blocks = hessian.float().view(num_groups, size, num_groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    best, chosen = torch.full_like(plain.scales, torch.inf), torch.ones_like(plain.scales)
    for clip in CLIPS:
        grid = plain if clip == 1 else WeightGrid.spanning(weight * clip, quantizer)
        error = grid.errors(weight)
        loss = torch.einsum("rgi,gij,rgj->rg", error, blocks, error)
        better = loss < best
        best, chosen = torch.where(better, loss, best), torch.where(better, clip, chosen)
    return WeightGrid.spanning(weight * chosen.repeat_interleave(size, 1), quantizer).nearest(weight)
