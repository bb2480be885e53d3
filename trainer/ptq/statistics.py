"""InputStatistics: what calibration keeps of the inputs of some projections, so that no activation has to be kept.

    hessian     X^T X, the curvature of the layer's squared error (GPTQ, arXiv:2210.17323, section 3.1)
    cross       X16^T X where the 16-bit model's inputs go beside: what a layer should have multiplied
    mean_abs    mean |x| of a channel (AWQ, arXiv:2306.00978, section 3.2), absmax its largest (SmoothQuant),
                mean_square (llama.cpp's imatrix)
    sample      some tokens themselves, for methods that round inputs, which no sum of squares describes

Sums over tokens are float32 products of float32 inputs, added in float64 pass by pass: TF32 and bfloat16 would cost the
Cholesky factor its last digits.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

SAMPLE_TOKENS = 1024
"""Tokens that are kept, at least, where there are so many: rows of a product large enough to tell scales apart."""


@dataclass
class InputStatistics:
    """Of inputs [T, in_features] that were added; every tensor is None before the first.

    hessian, cross   [in_features, in_features] float64
    sum_abs, sum_square, absmax  [in_features] float64, float64 and float32
    sample           [about SAMPLE_TOKENS, in_features] float32
    """

    with_hessian: bool = True
    num_tokens: int = 0
    hessian: Tensor | None = None
    cross: Tensor | None = None
    sum_abs: Tensor | None = None
    sum_square: Tensor | None = None
    absmax: Tensor | None = None
    _samples: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def add(self, x: Tensor, x16: Tensor | None = None, *, sample: Tensor | None = None) -> None:
        """x [T, in_features] of the quantized model, x16 the same tokens in the 16-bit model; sample: which to keep"""
        x = x.detach().float()
        if sample is not None:
            self._samples.append(x[sample.to(x.device)])
        self.num_tokens += len(x)
        magnitude = x.abs()
        self.sum_abs = _plus(self.sum_abs, magnitude.sum(0).double())
        self.sum_square = _plus(self.sum_square, x.square().sum(0).double())
        largest = magnitude.amax(0)
        self.absmax = largest if self.absmax is None else torch.maximum(self.absmax, largest)
        if self.with_hessian:
            self.hessian = _plus(self.hessian, (x.T @ x).double())
            if x16 is not None:
                self.cross = _plus(self.cross, (x16.detach().float().T @ x).double())

    @property
    def sample(self) -> Tensor:
        """[tokens, in_features] float32"""
        return torch.cat(self._samples)

    @property
    def mean_abs(self) -> Tensor:
        """[in_features] float64"""
        return self.sum_abs / max(1, self.num_tokens)

    @property
    def mean_square(self) -> Tensor:
        """[in_features] float64"""
        return self.sum_square / max(1, self.num_tokens)

    @property
    def num_dead(self) -> int:
        """Channels that were 0 at every token."""
        return int((self.absmax == 0).sum())


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
