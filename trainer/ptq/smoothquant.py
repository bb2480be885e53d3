"""SmoothQuant: INT8 inputs and weights that are equally hard to round (arXiv:2211.10438), and static scales of inputs.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)         alpha searched on a grid, stage by stage, or given

Weights then get their codes by GPTQ, whose errors cancel. The loss is that of the very product that will be served:
rounded inputs times rounded weights, on tokens of the calibration. A static scale is the one of some clips of the
largest input with the smallest such loss: a few tokens of a Llama have inputs of its down projections that are a
thousand times those of the others, and one scale for all makes 0 of the rest. A signal to noise ratio says when that is
so: then the layer gets a scale a token, and where that is too little too its inputs stay in 16 bits. On SmolLM2-135M
that is nearly every down projection: quantize.json names them, docs/quality_ptq.md has what is left of the loss.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.kernels.fake_quant import Grid
from trainer.kernels.int8 import QUANT_MAX
from trainer.qat.fake_weight import PerLayer, PerToken
from trainer.quantizer import Quantizer

ALPHAS = tuple(i / 10 for i in range(11))
CLIPS = tuple(2.0 ** (-i / 4) for i in range(17))
"""Shares of the largest input: 1 down to 1/16; every fourth of them while alpha is searched."""


def round_inputs(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [T, in] float32 on the INT8 grid: of one scale [], or with None of a scale a token."""
    if scale is None:
        return PerToken(Grid.int8()).values(x)
    return PerLayer().values(x, scale)


def smoothing_factor(weights: Sequence[Tensor], absmax: Tensor, alpha: float) -> Tensor:
    """s [in] float32 for weights [out, in] that share inputs whose channels reach absmax [in]."""
    largest = torch.cat(list(weights)).abs().amax(0).clamp(min=1e-5)
    factor = absmax.clamp(min=1e-5).pow(alpha) / largest.pow(1 - alpha)
    return factor / factor.log().mean().exp()  # scaled so that norms stay where they were, on average


def searched_smoothing(
    weights: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    sample: Tensor,
    absmax: Tensor,
    usable: Callable[[Tensor], Tensor],
    *,
    static: bool,
    alphas: Sequence[float] = ALPHAS,
) -> tuple[float | None, Tensor]:
    """The alpha with the smallest loss and its factor [in]; None and ones if plain rounding loses less.

    sample  [T, in] float32: some inputs; absmax [in] float32: the largest of all
    usable  as of `awq.searched_factor`
    static  inputs have one scale, not one a token
    """
    best: tuple[float | None, Tensor] = None, torch.ones_like(absmax)
    smallest = product_error(weights, quantizers, sample, best[1], absmax if static else None)
    for alpha in alphas:
        factor = usable(smoothing_factor(weights, absmax, alpha))
        loss = product_error(weights, quantizers, sample, factor, absmax if static else None)
        if loss < smallest:
            best, smallest = (alpha, factor), loss
    return best


def product_error(
    weights: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    sample: Tensor,
    factor: Tensor,
    absmax: Tensor | None,
) -> float:
    """The error of the rounded products, weighted token by token.

    absmax  [in]: of static inputs, which get the best of some clips; None for a scale a token
    """
    x = sample / factor
    rounded = [q.quantize(w * factor).dequantize(torch.float32) for w, q in zip(weights, quantizers, strict=True)]
    wanted = sample @ torch.cat(list(weights)).T
    stacked = torch.cat(rounded)
    token_weights = _token_weights(wanted) if absmax is None else torch.ones(len(wanted), device=wanted.device)
    scales = [None] if absmax is None else [(absmax / factor).max() * clip / QUANT_MAX for clip in CLIPS[::4]]
    return min(_error(round_inputs(x, scale) @ stacked.T, wanted, token_weights) for scale in scales)


def _token_weights(wanted: Tensor) -> Tensor:
    """[T]: what a token's squared error counts: a loud token's is seen against its own size, which the next norm takes
    out; a quiet one's against that of the median token. Not for static scales, which could cut the loud ones: attention
    rests on them."""
    size = wanted.square().sum(1)
    return 1 / (size + size.median()).clamp(min=torch.finfo(torch.float32).tiny)


def _error(product: Tensor, wanted: Tensor, token_weights: Tensor) -> float:
    return ((product - wanted).square().sum(1) * token_weights).sum().item()


def static_scale(weights: Sequence[Tensor], values: Sequence[Tensor], sample: Tensor, absmax: Tensor) -> Tensor:
    """The scale [] float32 of static inputs with the smallest error of the products.

    weights, values  [out, in] float32: what should be multiplied, and what the codes stand for
    sample, absmax   [T, in] and [in] float32: inputs as the codes will see them
    """
    wanted, stacked = sample @ torch.cat(list(weights)).T, torch.cat(list(values))
    scales = [absmax.max() * clip / QUANT_MAX for clip in CLIPS]
    errors = [(round_inputs(sample, scale) @ stacked.T - wanted).square().sum().item() for scale in scales]
    scale = scales[errors.index(min(errors))].float()
    return torch.where(scale > 0, scale, 1.0)


def signal_to_noise(values: Sequence[Tensor], sample: Tensor, scale: Tensor | None) -> float:
    """What rounding inputs leaves of a product: 10 log10(|x W'|^2 / |error|^2) in dB, the mean over tokens.

    values  [out, in] float32: what the codes stand for
    sample  [T, in] float32; scale: as of `round_inputs`
    """
    stacked = torch.cat(list(values))
    wanted = sample @ stacked.T
    error = (round_inputs(sample, scale) @ stacked.T - wanted).square().sum(1)
    signal = wanted.square().sum(1)
    there = signal > 0
    ratio = signal[there] / error[there].clamp(min=torch.finfo(torch.float32).tiny)
    return 10 * ratio.log10().mean().item() if bool(there.any()) else float("inf")
