"""What stands in a product in the place of a layer's weight or input while it is trained, and the gradient through it.

Each class below is one way to choose values on a grid. All have
    values(tensor, *parameters)           what is multiplied, of the tensor's dtype
    gradients(grad, tensor, *parameters)  what goes back to the tensor and to each parameter; None: nothing
and those of weights
    codes(weight, *parameters)            the packed weight of which `values` is the dequantized one, bit for bit
They hold settings only. Parameters are the layer's, so that optimizer and checkpoints see them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels.fake_quant import (
    Grid,
    fake_quant,
    fake_quant_gradient,
    fake_quant_learned,
    fake_quant_learned_gradient,
)
from trainer.kernels.float_grids import FloatGrid, FloatWeight
from trainer.kernels.int4 import int4_codes, pack_int4
from trainer.qat.rounding import initial_soft_rounding, rectified_sigmoid, rectified_sigmoid_gradient, rounding_noise
from trainer.qat.scheme import ScaleInit, grid_of
from trainer.quant_grid import scales_of
from trainer.quantizer import QuantizedTensor, Quantizer

MIN_SCALE = 2.0**-23
"""Learned scales stop here: a number above 0 in float32, bfloat16 and float16."""
MSE_SHRINKS = tuple(1 - i / 40 for i in range(25))
"""Candidates of the MSE search, as shares of the min-max scale. Below 0.4 a 4-bit code clamps most of its group."""


@dataclass(frozen=True, slots=True)
class FromWeight:
    """The nearest codes, and scales that are functions of the weight."""

    quantizer: Quantizer | FloatGrid

    def values(self, weight: Tensor) -> Tensor:
        match self.quantizer:
            case FloatGrid():
                return self.quantizer.fake_quantize(weight)
            case Quantizer(codebook="int4" | "int8"):
                return fake_quant(weight, grid_of(self.quantizer))
        return self.quantizer.quantize(weight).dequantize(weight.dtype)

    def gradients(self, grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        match self.quantizer:
            case FloatGrid():
                return (self.quantizer.gradient(grad, weight),)
            case Quantizer(codebook="int4" | "int8"):
                return (fake_quant_gradient(grad, weight, grid_of(self.quantizer)),)
        return (grad,)  # a codebook's ends are where the largest weights are: nothing is clamped

    def codes(self, weight: Tensor) -> QuantizedTensor | FloatWeight:
        return self.quantizer.quantize(weight)


@dataclass(frozen=True, slots=True)
class Learned:
    """The nearest codes on scales, and with asymmetric groups zero points, that are parameters.

    LSQ (arXiv:1902.08153, equations 1-5) and LSQ+ (arXiv:2004.09576): zero points are floats that are rounded where
    they are used, and count as an integer multiple of the scale. A scale below `MIN_SCALE` or a zero point outside of
    the codes is used as its bound, and moves only back.
    """

    quantizer: Quantizer

    def values(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        return fake_quant_learned(weight, *self._used(scales, zeros), bits=self.quantizer.code_bits)

    def gradients(
        self, grad: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        used = self._used(scales, zeros)
        grad_weight, grad_scales = fake_quant_learned_gradient(grad, weight, *used, bits=self.quantizer.code_bits)
        grad_scales = torch.where((scales < MIN_SCALE) & (grad_scales > 0), 0, grad_scales)
        if zeros is None:
            return grad_weight, grad_scales, None
        # d/dz of (clamp(round(w / s) + z) - z) * s is -s where clamped, else 0; the factor is that of the scales
        stopped = (grad.float() - grad_weight.float()).view(*scales.shape, -1).sum(2)
        factor = (weight.shape[1] // scales.shape[1] * 15) ** -0.5
        grad_zeros = -stopped * used[0] * factor
        outwards = ((zeros < 0) & (grad_zeros > 0)) | ((zeros > 15) & (grad_zeros < 0))
        return grad_weight, grad_scales, torch.where(outwards, 0, grad_zeros)

    def codes(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedTensor:
        return packed_on_scales(weight, *self._used(scales, zeros), self.quantizer)

    def _used(self, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The scales as they are multiplied and stored, and the zero points in uint8."""
        used = scales.clamp(min=MIN_SCALE).to(getattr(torch, self.quantizer.scale_dtype)).float()
        return used, None if zeros is None else zeros.round().clamp(0, 15).to(torch.uint8)

    def start(self, weight: Tensor, how: ScaleInit) -> tuple[Tensor, Tensor | None]:
        """Scales [out_features, groups] float32, and zero points of that shape float32 or None."""
        scales, zeros = scales_of(weight, self.quantizer)
        if how is ScaleInit.mse:
            scales = self._smallest_error(weight, scales, zeros)
        return scales, None if zeros is None else zeros.float()

    def _smallest_error(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        best, smallest = scales, torch.full_like(scales, torch.inf)
        for shrink in MSE_SHRINKS:
            used, _ = self._used(scales * shrink, None)
            values = fake_quant_learned(weight.float().contiguous(), used, zeros, bits=self.quantizer.code_bits)
            error = (values - weight).square().view(*scales.shape, -1).sum(2)
            best, smallest = torch.where(error < smallest, used, best), torch.minimum(error, smallest)
        return best


@dataclass(frozen=True, slots=True)
class Stochastic:
    """Codes of the weight plus noise of up to half a step, on the weight's own scales; amount 0: the nearest codes."""

    quantizer: Quantizer
    amount: float
    seed: int

    def values(self, weight: Tensor) -> Tensor:
        scales, zeros = scales_of(weight, self.quantizer)
        return fake_quant_learned(self._noisy(weight, scales), scales, zeros, bits=self.quantizer.code_bits).to(
            weight.dtype
        )

    def gradients(self, grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        scales, zeros = scales_of(weight, self.quantizer)
        bits = self.quantizer.code_bits
        noisy = self._noisy(weight, scales)
        grad_noisy, _ = fake_quant_learned_gradient(grad.float(), noisy, scales, zeros, bits=bits)
        return (grad_noisy.to(weight.dtype),)

    def codes(self, weight: Tensor) -> QuantizedTensor:
        scales, zeros = scales_of(weight, self.quantizer)
        return packed_on_scales(self._noisy(weight, scales), scales, zeros, self.quantizer)

    def _noisy(self, weight: Tensor, scales: Tensor) -> Tensor:
        """float32: 16 bits would round the noise away"""
        noise = rounding_noise(weight, self.seed).view(*scales.shape, -1) * (self.amount * scales[..., None])
        return weight.float() + noise.view(weight.shape)


@dataclass(frozen=True, slots=True)
class Soft:
    """AdaRound: floor(w / s) plus h(V) on the scales of a frozen weight; hard: plus 1 where h(V) is at least 1/2."""

    quantizer: Quantizer
    hard: bool

    def values(self, weight: Tensor, variables: Tensor) -> Tensor:
        if self.hard:
            return self.codes(weight, variables).dequantize(weight.dtype)
        scales, codes, (lowest, highest) = self._parts(weight, rectified_sigmoid(variables))
        return (codes.clamp(lowest, highest) * scales[..., None]).view(weight.shape).to(weight.dtype)

    def gradients(self, grad: Tensor, weight: Tensor, variables: Tensor) -> tuple[None, Tensor | None]:
        if self.hard:
            return None, None
        scales, codes, (lowest, highest) = self._parts(weight, rectified_sigmoid(variables))
        inside = (codes >= lowest) & (codes <= highest)
        by_code = torch.where(inside, grad.float().view(codes.shape) * scales[..., None], 0)
        return None, by_code.view(weight.shape) * rectified_sigmoid_gradient(variables)

    def codes(self, weight: Tensor, variables: Tensor) -> QuantizedTensor:
        scales, codes, (lowest, highest) = self._parts(weight, (variables >= 0).float())
        _, zeros = scales_of(weight, self.quantizer)
        values = (codes.clamp(lowest, highest) * scales[..., None]).view(weight.shape)
        return packed_on_scales(values, scales, zeros, self.quantizer)

    def start(self, weight: Tensor) -> Tensor:
        """V for which the values are the weight; float32."""
        scales, _ = scales_of(weight, self.quantizer)
        ratio = weight.float().view(*scales.shape, -1) / scales[..., None]
        return initial_soft_rounding(ratio - ratio.floor()).view(weight.shape)

    def _parts(self, weight: Tensor, up: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor | int, Tensor | int]]:
        """scales; floor(w / s) + up [out_features, groups, group_size]; the codes' range, less the zero point"""
        scales, zeros = scales_of(weight, self.quantizer)
        codes = (weight.float().view(*scales.shape, -1) / scales[..., None]).floor() + up.view(*scales.shape, -1)
        lowest, highest = grid_of(self.quantizer).range
        zero = 0 if zeros is None else zeros[..., None].float()
        return scales, codes, (lowest - zero, highest - zero)


@dataclass(frozen=True, slots=True)
class PerToken:
    """Inputs with one scale a token, from the token."""

    grid: Grid | FloatGrid

    def values(self, x: Tensor) -> Tensor:
        return self.grid.fake_quantize(x) if isinstance(self.grid, FloatGrid) else fake_quant(x, self.grid)

    def gradients(self, grad: Tensor, x: Tensor) -> tuple[Tensor]:
        if isinstance(self.grid, FloatGrid):
            return (self.grid.gradient(grad, x),)
        return (fake_quant_gradient(grad, x, self.grid),)


@dataclass(frozen=True, slots=True)
class PerLayer:
    """INT8 inputs with one scale a layer, a parameter or from an observer: [] float32, positive."""

    def values(self, x: Tensor, scale: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return fake_quant_learned(rows, _of_each(rows, scale), bits=8).view(x.shape)

    def gradients(self, grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of a scale's gradient is 1 / sqrt(in_features * 127): LSQ's, with the features of one token."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        grad = grad.reshape(rows.shape).to(rows.dtype)
        grad_x, grad_scales = fake_quant_learned_gradient(grad, rows, _of_each(rows, scale), bits=8)
        grad_scale = grad_scales.sum()
        return grad_x.view(x.shape), torch.where((scale <= MIN_SCALE) & (grad_scale > 0), 0, grad_scale)


def _of_each(rows: Tensor, scale: Tensor) -> Tensor:
    return scale.detach().clamp(min=MIN_SCALE).expand(len(rows), 1).contiguous()


def packed_on_scales(weight: Tensor, scales: Tensor, zeros: Tensor | None, quantizer: Quantizer) -> QuantizedTensor:
    """The nearest codes of a weight [out_features, in_features] on given scales and zero points, as they are stored."""
    if quantizer.codebook == "int8":
        ratio = weight.float().view(*scales.shape, -1) / scales[..., None]
        packed = ratio.round().clamp(-127, 127).to(torch.int8).view(weight.shape)
        tensors = packed, scales
    else:
        tensors = pack_int4(int4_codes(weight, scales, zeros)), scales, zeros, None
    return QuantizedTensor(dict(zip(quantizer.tensor_names, tensors, strict=True)), tuple(weight.shape), quantizer)


WeightFunction = FromWeight | Learned | Stochastic | Soft
InputFunction = PerToken | PerLayer
