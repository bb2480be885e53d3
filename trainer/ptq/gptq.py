"""GPTQ: codes whose errors cancel in what a layer computes (arXiv:2210.17323, algorithm 1).

Of a weight W [out, in] and H = X^T X of its inputs, features are rounded one after the other; what one loses, the ones
that follow make up for:

    U = upper Cholesky factor of (H + damping)^-1
    for each feature j in the order:   Q_j = nearest code of W_j
                                       W_k -= (W_j - Q_j) U_jk / U_jj     for all k after j

Around it: the order is that of the largest H_jj first (act-order, with the groups of the file's order, so that nothing
has to be looked up at run time); scales are those with the smallest error weighted by H's diagonal; at the end the
scales are solved for by least squares, with the codes given. With the 16-bit model's inputs X16 the target is W X16
instead of W X, which is GPTQ of the weight W (X16^T X) H^-1.

The surprising thing: a channel that no calibration token reached has H_jj = 0, and any code costs nothing there. It
gets the nearest codes; the paper's code makes its weights 0, which the first such input in use would find out.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.quant_grid import WeightGrid, code_levels, code_values, nearest_codes
from trainer.quantizer import QuantizedTensor, Quantizer

log = logging.getLogger(__name__)

BLOCK_FEATURES = 128
"""Features whose corrections reach the rest of the weight at once (section 3.2, step 2)."""
MAX_DAMPING = 1.0
"""Where a Cholesky factor is given up: the damping is ten times larger with each trial."""
SHRINKS = tuple(1 - i / 40 for i in range(25))
"""Candidates of the scale search, as shares of the scale that reaches the largest weight."""
CHUNK = 1 << 25
"""Numbers of the least-squares fit that exist at a time."""


@dataclass(frozen=True)
class Inverse:
    """What a Hessian gives to GPTQ.

    order    [in] int64: features as they are rounded
    upper    [in, in] float32: U, over the features in that order
    damping  share of the mean diagonal that had to be added
    """

    order: Tensor
    upper: Tensor
    damping: float


def inverse_of(hessian: Tensor, *, damping: float, act_order: bool, name: str = "") -> Inverse:
    """The Cholesky factor of the damped inverse.

    hessian  [in, in] float64, symmetric
    damping  added to the diagonal, as a share of its mean; ten times more while there is no factor
    name     for the message
    raises   ValueError if there is none at a damping of 1
    """
    hessian = _without_zeros(hessian)
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(hessian))
    order = order.to(hessian.device)
    hessian, share = hessian[order][:, order], damping
    while share <= MAX_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(_damped(hessian, share))
        if not failed and bool(torch.isfinite(lower).all()):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                if share > damping:
                    log.info("gptq     %s: damping %g instead of %g, for want of tokens", name, share, damping)
                return Inverse(order, upper.float(), share)
        share = max(10 * share, 1e-4)
    raise ValueError(f"{name}: the inputs of calibration give no Cholesky factor at a damping of {MAX_DAMPING:g}")


def _without_zeros(hessian: Tensor) -> Tensor:
    """Channels without inputs get the mean of the others on their diagonal, which no other channel sees; or 1."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = mean if mean > 0 else 1.0
    return hessian


def _damped(hessian: Tensor, share: float) -> Tensor:
    """With a share of its mean diagonal added to the diagonal."""
    damped = hessian.clone()
    damped.diagonal().add_(share * hessian.diagonal().mean())
    return damped


def searched_grid(
    weight: Tensor, quantizer: Quantizer, importance: Tensor, *, order: Tensor | None = None
) -> WeightGrid:
    """The grid whose nearest codes have the smallest squared error, weighted feature by feature, group by group.

    weight      [out, in] float32
    importance  [in] float: H's diagonal
    order       as of `WeightGrid.spanning`
    """
    plain = WeightGrid.spanning(weight, quantizer, order=order)
    importance = plain.by_group(importance[None].to(weight.dtype))
    best, chosen = torch.full_like(plain.scales, torch.inf), torch.ones_like(plain.scales)
    for shrink in SHRINKS:
        grid = plain if shrink == 1 else WeightGrid.spanning(weight * shrink, quantizer, order=order)
        error = grid.errors(weight).square_().mul_(importance).sum(2)
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, shrink, chosen)
    return WeightGrid.spanning(weight * chosen[:, plain.group_of], quantizer, order=order)


def gptq_codes(weight: Tensor, grid: WeightGrid, inverse: Inverse) -> Tensor:
    """Codes [out, in], uint8 or int8, of a weight [out, in] float32 on a grid that stays."""
    out_features, in_features = weight.shape
    quantizer, groups = grid.quantizer, grid.group_of.tolist()
    scales = grid.scales.T.contiguous()  # a group's scales lie together
    zeros = None if grid.zeros is None else grid.zeros.T.contiguous()
    # [in, out]: a feature is a row, so that each step works on memory that lies together
    left = weight.T[inverse.order].contiguous()
    codes = torch.empty(in_features, out_features, dtype=torch.int16, device=weight.device)
    order = inverse.order.tolist()
    for start in range(0, in_features, BLOCK_FEATURES):
        stop = min(start + BLOCK_FEATURES, in_features)
        block = left[start:stop]
        upper = inverse.upper[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            feature = order[start + i]
            group = groups[feature]
            own = block[i], scales[group], None if zeros is None else zeros[group]
            code = nearest_codes(*own, quantizer)
            codes[feature] = code
            errors[i] = (block[i] - code_values(code, *own[1:], quantizer)) / upper[i, i]
            if i + 1 < stop - start:
                block[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
        if stop < in_features:
            left[stop:].addmm_(inverse.upper[start:stop, stop:].T, errors, alpha=-1)
    return codes.T.to(torch.int8 if quantizer.codebook == "int8" else torch.uint8)


def fitted_scales(weight: Tensor, codes: Tensor, grid: WeightGrid, hessian: Tensor, *, damping: float) -> Tensor:
    """Scales [out, groups] float32 with the smallest ||(W - codes * scales) X||, for codes that stay.

    weight   [out, in] float32
    hessian  [in, in] float64; damping as of `inverse_of`, here towards the weights one by one
    """
    num_groups, in_features = grid.scales.shape[1], weight.shape[1]
    by_group = torch.argsort(grid.group_of, stable=True)
    H = (
        _damped(hessian, damping)[by_group][:, by_group]
        .float()
        .view(num_groups, -1, num_groups, in_features // num_groups)
    )
    zeros = None if grid.zeros is None else grid.zeros[..., None]
    levels, weight = code_levels(grid.by_group(codes), zeros, grid.quantizer), grid.by_group(weight)
    fitted = torch.empty_like(grid.scales)
    for rows in torch.arange(len(weight), device=weight.device).split(max(1, CHUNK // weight[0].numel() // num_groups)):
        q = levels[rows]  # [R, G, g]
        Hq = torch.einsum("akbl,rbl->rakb", H, q)  # [R, G, g, G]
        normal = torch.einsum("rak,rakb->rab", q, Hq).double()
        wanted = torch.einsum("rak,rakb->rb", weight[rows], Hq).double()
        # A group whose codes are all 0 has no scale to fit: it keeps its own.
        empty = normal.diagonal(dim1=1, dim2=2) <= 0
        normal = normal + torch.diag_embed(empty.double())
        # Codes that say the same of two groups leave their scales undecided: a little pulls towards the old ones.
        pull = 1e-6 * normal.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(num_groups).to(normal)
        old = grid.scales[rows].double()
        solved = torch.linalg.solve(normal + pull, (wanted + (pull @ old[:, :, None])[:, :, 0])[:, :, None])[:, :, 0]
        # Nor has a scale that the others' errors would turn around.
        solved = torch.where(empty | ~torch.isfinite(solved) | (solved <= 0), old, solved)
        fitted[rows] = solved.float()
    return fitted


def layer_error(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    """||(W - W') X||^2, the sum over tokens and features; [out, in] float32 each, hessian [in, in] float64."""
    error = (weight - values).float()
    return ((error @ hessian.float()) * error).sum().item()


def _row_errors(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor) -> Tensor:
    """`layer_error` of each row, [out] float32."""
    error = weight - quantized.dequantize(torch.float32)
    return ((error @ hessian.float()) * error).sum(1)


def gptq(
    weight: Tensor,
    quantizer: Quantizer,
    hessian: Tensor,
    inverse: Inverse,
    *,
    damping: float,
    search: bool = True,
    refit: bool = True,
    grouped_order: bool = False,
) -> QuantizedTensor:
    """Codes and scales of one weight.

    weight         [out, in] float; what W X should be is in it already (see `towards_16bit`)
    search, refit  scales by search before, by least squares after; refit is for int4 and int8
    grouped_order  groups are cut along the order too, and get a g_idx: int4
    raises         ValueError as `WeightGrid.spanning`
    """
    weight = weight.float()
    order = inverse.order if grouped_order else None
    if search:
        grid = searched_grid(weight, quantizer, hessian.diagonal(), order=order)
    else:
        grid = WeightGrid.spanning(weight, quantizer, order=order)
    codes = gptq_codes(weight, grid, inverse)
    if not refit or quantizer.block_size is not None:
        return grid.pack(codes)
    fitted = fitted_scales(weight, codes, grid, hessian, damping=damping)
    refitted = WeightGrid.of_scales(fitted, grid.zeros, grid.shape, quantizer, g_idx=grid.g_idx)
    before, after = (_row_errors(weight, each.pack(codes), hessian) for each in (grid, refitted))
    scales = torch.where((after < before)[:, None], refitted.scales, grid.scales)  # rounding may cost what was won
    return WeightGrid.of_scales(scales, grid.zeros, grid.shape, quantizer, g_idx=grid.g_idx).pack(codes)


def towards_16bit(weight: Tensor, hessian: Tensor, cross: Tensor, *, damping: float) -> Tensor:
    """The weight W' [out, in] float32 for which W' X is nearest to W X16: W + W (X16^T X - H) (H + damping)^-1.

    weight   [out, in] float; hessian X^T X and cross X16^T X, [in, in] float64
    """
    damped = _damped(_without_zeros(hessian), damping)
    moved = torch.linalg.solve(damped, (weight.double() @ (cross - hessian)).T).T
    return (weight.double() + moved).float()
