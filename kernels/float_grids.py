"""Weights in small floats, in reference form: FP8, and FP4 with a scale per block (MXFP4, NVFP4).

Formulas (float32; divisions are true divisions; rounding to nearest, ties to even):
    fp8     s = max |w| / 448 over a row, 0 becomes 1;    code = e4m3(clamp(w / s, -448, 448));      w' = code * s
    mxfp4   s = 2^ceil(log2(max |w| / 6)) over a block of 32, exponent in -127..127, 0 becomes 1
            code = e2m1(clamp(w / s, -6, 6));                                                        w' = code * s
            (OCP Microscaling Formats v1.0, sections 5.2 and 6.3; the ceiling, so that nothing is clamped)
    nvfp4   t = max |w| over the tensor / (448 * 6), 0 becomes 1
            s = e4m3(max |w| over a block of 16 / 6 / t), 0 becomes the smallest e4m3 number above it, 2^-9
            code = e2m1(clamp(w / (s * t), -6, 6));                                            w' = code * (s * t)
e4m3 is float8_e4m3fn; e2m1 has a sign and the magnitudes 0 0.5 1 1.5 2 3 4 6, in the order of their codes.

Bytes:
    fp8     packed [out_features, in_features] float8_e4m3fn, scales [out_features, 1] float32
    mxfp4   packed [out_features, in_features / 2] uint8, even features in the low nibble;
            scales [out_features, in_features / 32] uint8: the exponent plus 127 (e8m0)
    nvfp4   packed as mxfp4; scales [out_features, in_features / 16] float8_e4m3fn; tensor_scale [] float32

These are for training on a GPU's formats; there is no C++ or Triton of them: torch's own operations run anywhere.
The gradient is that of kernels/fake_quant.py: straight-through (arXiv:1308.3432), 0 where a code was clamped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels.int8 import check_dtype, divide, raise_not_finite

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_MIN = 2.0**-9  # the smallest above 0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_SIZES = {"fp8": None, "mxfp4": 32, "nvfp4": 16}
"""Format -> weights that share a scale along in_features; None: a row."""


@dataclass(frozen=True, slots=True)
class FloatGrid:
    """A format of small floats: which values a weight, or the rows of an activation, can take.

    format   fp8, mxfp4 or nvfp4
    raises   ValueError naming the formats
    """

    format: str

    def __post_init__(self) -> None:
        if self.format not in BLOCK_SIZES:
            raise ValueError(f"format={self.format}; use one of {', '.join(BLOCK_SIZES)}")

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """What a weight of this format consists of."""
        return ("packed", "scales", "tensor_scale") if self.format == "nvfp4" else ("packed", "scales")

    @property
    def bits_per_weight(self) -> float:
        """Codes and scales of blocks; a scale per row or tensor is not counted."""
        return {"fp8": 8.0, "mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16}[self.format]

    @property
    def clamps(self) -> bool:
        """Whether a code can lie outside of the range: NVFP4's smallest scales are multiples of 2^-9, half off."""
        return self.format == "nvfp4"

    def span(self, in_features: int) -> int:
        """Weights of a row of in_features that share a scale.

        raises  ValueError if the blocks do not divide the row
        """
        size = BLOCK_SIZES[self.format] or in_features
        if size == 0 or in_features % size:
            raise ValueError(
                f"{self.format} has blocks of {size} weights, which do not divide in_features={in_features}; "
                "use fp8, int8 or int4 with one scale per row for this layer"
            )
        return size

    def quantize(self, weight: Tensor) -> "FloatWeight":
        """Choose codes and scales.

        weight   [out_features, in_features] float
        raises   ValueError if a weight is inf or nan (names it), or if the blocks do not divide in_features
        """
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; a grid takes [out_features, in_features]")
        check_dtype("weight", weight.dtype)
        if not torch.isfinite(weight).all():
            raise_not_finite(weight)
        scales, tensor_scale = self._scales(weight)
        codes = self._round(weight, _steps(scales, tensor_scale))
        packed = codes.to(torch.float8_e4m3fn) if self.format == "fp8" else _pack_e2m1(codes)
        tensors = packed, scales, tensor_scale
        return FloatWeight(dict(zip(self.tensor_names, tensors, strict=False)), tuple(weight.shape), self)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """`quantize(x).dequantize(x.dtype)` of the rows of x, bit for bit; nan where a span's scale is not finite."""
        rows = x.reshape(-1, x.shape[-1])
        steps = _steps(*self._scales(rows))
        return (self._round(rows, steps) * steps.repeat_interleave(self.span(x.shape[-1]), 1)).to(x.dtype).view(x.shape)

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """What `fake_quantize(x)` passes back: grad, or a copy of it with 0 where x's code was clamped."""
        if not self.clamps:
            return grad
        rows = x.reshape(-1, x.shape[-1])
        ratio = self._ratio(rows, _steps(*self._scales(rows))).abs()
        # One code above 6 would be 8: half-way is 7.
        return torch.where((ratio > (E2M1_MAX + 8) / 2).view(x.shape), 0, grad)

    def _scales(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """scales [out_features, groups] as stored, tensor_scale [] float32 or None"""
        rows, columns = weight.shape
        span = self.span(columns)
        absmax = weight.float().reshape(rows, columns // span, span).abs().amax(2)
        match self.format:
            case "fp8":
                return _nonzero(divide(absmax, E4M3_MAX)), None
            case "mxfp4":
                return _exponents(absmax), None
            case _:
                largest = absmax.amax() if absmax.numel() else absmax.new_zeros(())
                tensor_scale = _nonzero(divide(largest, E4M3_MAX * E2M1_MAX))
                scales = divide(absmax, E2M1_MAX) / tensor_scale
                return scales.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn), tensor_scale

    def _ratio(self, weight: Tensor, steps: Tensor) -> Tensor:
        return weight.float() / steps.repeat_interleave(self.span(weight.shape[1]), 1)

    def _round(self, weight: Tensor, steps: Tensor) -> Tensor:
        """[out_features, in_features] float32: values of e4m3 or e2m1."""
        ratio = self._ratio(weight, steps)
        if self.format == "fp8":
            return ratio.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
        return round_to_e2m1(ratio)


@dataclass(frozen=True)
class FloatWeight:
    """Codes and scales of one weight; the tensors are described above.

    tensors    by the names of `FloatGrid.tensor_names`
    shape      (out_features, in_features)
    quantizer  the format
    """

    tensors: dict[str, Tensor]
    shape: tuple[int, int]
    quantizer: FloatGrid

    @property
    def packed(self) -> Tensor:
        """The codes."""
        return self.tensors["packed"]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight [out_features, in_features], computed in float32 and rounded once to dtype."""
        steps = _steps(self.tensors["scales"], self.tensors.get("tensor_scale"))
        values = self.packed.float() if self.quantizer.format == "fp8" else _unpack_e2m1(self.packed)
        return (values * steps.repeat_interleave(self.quantizer.span(self.shape[1]), 1)).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def round_to_e2m1(ratio: Tensor) -> Tensor:
    """The nearest of 0 0.5 1 1.5 2 3 4 6 and their negatives, ties to the even code; float32. nan stays nan."""
    magnitude = ratio.abs()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / spacing).round() * spacing).clamp(max=E2M1_MAX).copysign(ratio)


def _steps(scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
    """[out_features, groups] float32: the distance of codes 0 and 1.0."""
    if scales.dtype == torch.uint8:
        return torch.where(scales == 255, torch.nan, torch.exp2(scales.float() - 127))
    return scales.float() if tensor_scale is None else scales.float() * tensor_scale


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _exponents(absmax: Tensor) -> Tensor:
    """e8m0: the smallest power of two by which absmax fits into 6, as its exponent plus 127; 255 is nan, 127 is 1."""
    mantissa, exponent = torch.frexp(divide(absmax, E2M1_MAX))  # mantissa in [0.5, 1): a power of two has 0.5
    exponent = exponent - (mantissa == 0.5).int()
    stored = torch.where(absmax == 0, 127, (exponent + 127).clamp(0, 254))
    return torch.where(torch.isfinite(absmax), stored, 255).to(torch.uint8)


def _pack_e2m1(values: Tensor) -> Tensor:
    """Values of e2m1 as nibbles, even features low; [out_features, in_features / 2] uint8."""
    grid = torch.tensor(E2M1, device=values.device)
    codes = torch.bucketize(values.abs(), grid).to(torch.uint8) | values.signbit().to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def _unpack_e2m1(packed: Tensor) -> Tensor:
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    return values[codes.int()]
