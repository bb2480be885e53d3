"""WeightGrid: the grid of one weight, its scales first and its codes later.

`Quantizer.quantize` fixes scales and the nearest codes at once. Methods that search scales (clipping, HQQ) or choose
codes by what a layer computes (GPTQ) need the two apart, on the same arithmetic: the nearest codes on the grid that
spans a weight are `quantize`'s, bit for bit. The surprising thing: with double quantization a scale is a function of
all scales of the weight, so a grid is made for the whole weight before the first code is chosen; its nearest codes are
then nearest to what is decoded, while `quantize` has bitsandbytes' codes, chosen before the scales are rounded.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.kernels.codebook4 import BLOCK_SIZES, CODEBOOKS, normalized_blocks
from trainer.kernels.codebook_bits import FORMATS, pack_bits
from trainer.kernels.double_quant import dequantize_absmax, quantize_absmax
from trainer.kernels.int4 import SYMMETRIC_ZERO, int4_scales, pack_int4
from trainer.kernels.int8 import QUANT_MAX, int8_quantize
from trainer.quantizer import QuantizedTensor, Quantizer

_TINY = 1e-38  # as the kernels of the codebooks, so that 1 / absmax is finite


@dataclass(frozen=True)
class WeightGrid:
    """What the codes of a weight [out_features, in_features] are multiplied by.

    scales   [out_features, groups] float32: of a codebook's blocks the absmax, as it is decoded
    zeros    [out_features, groups] uint8; None without zero points
    g_idx    [in_features] int32, the group of each feature; None where groups are contiguous
    stored   the tensors of scales as `QuantizedTensor` holds them
    """

    quantizer: Quantizer
    shape: tuple[int, int]
    scales: Tensor
    zeros: Tensor | None = None
    g_idx: Tensor | None = None
    stored: dict[str, Tensor | None] = field(default_factory=dict)

    @classmethod
    def spanning(cls, weight: Tensor, quantizer: Quantizer, *, order: Tensor | None = None) -> "WeightGrid":
        """The grid on which `quantizer.quantize(weight)` lies.

        weight  [out_features, in_features] float
        order   [in_features] int64, int4 only: groups are cut along this order of the features, and get a g_idx
        raises  ValueError if the weight holds inf or nan, groups do not divide it, or blocks cross its rows
        """
        if quantizer.block_size is not None:
            return cls._of_blocks(weight, quantizer)
        g_idx = None
        if order is not None:
            if quantizer.codebook != "int4":
                raise ValueError(f"groups of any order are for int4, not {quantizer.codebook}; use act_order=static")
            weight = weight[:, order]
            g_idx = torch.empty(len(order), dtype=torch.int32, device=order.device)
            g_idx[order] = (torch.arange(len(order), device=order.device) // quantizer.span(len(order))).int()
        scales, zeros = scales_of(weight, quantizer)
        return cls.of_scales(scales, zeros, tuple(weight.shape), quantizer, g_idx=g_idx)

    @classmethod
    def of_scales(
        cls,
        scales: Tensor,
        zeros: Tensor | None,
        shape: tuple[int, int],
        quantizer: Quantizer,
        *,
        g_idx: Tensor | None = None,
    ) -> "WeightGrid":
        """int4, int8: a grid of given scales, which are rounded to the quantizer's dtype; 0 becomes 1."""
        scales = scales.to(getattr(torch, quantizer.scale_dtype)).float()
        scales = torch.where(scales == 0, 1.0, scales).contiguous()
        stored = {"scales": scales} if quantizer.codebook == "int8" else {"scales": scales, "zeros": zeros}
        return cls(quantizer, shape, scales, zeros, g_idx, stored)

    @classmethod
    def _of_blocks(cls, weight: Tensor, quantizer: Quantizer) -> "WeightGrid":
        rows, cols = weight.shape
        require_own_rows(quantizer, cols)
        _, absmax = normalized_blocks(weight, quantizer.block_size)
        parts = quantize_absmax(absmax) if quantizer.double_quant else (absmax, None, None)
        decoded = dequantize_absmax(*parts) if quantizer.double_quant else absmax
        stored = dict(zip(("absmax", "nested_absmax", "nested_offset"), parts, strict=True))
        return cls(quantizer, (rows, cols), decoded.view(rows, -1), stored=stored)

    @property
    def group_of(self) -> Tensor:
        """[in_features] int64: the column of `scales` that each feature has."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.shape[1], device=self.scales.device) // (self.shape[1] // self.scales.shape[1])

    def nearest(self, weight: Tensor) -> QuantizedTensor:
        """The codes nearest to a weight [out_features, in_features] float."""
        group = self.group_of
        zeros = None if self.zeros is None else self.zeros[:, group]
        return self.pack(nearest_codes(weight.float(), self.scales[:, group], zeros, self.quantizer))

    def errors(self, weight: Tensor) -> Tensor:
        """What rounding to nearest adds to a weight [out_features, in_features] float32, group by group.

        returns  [out_features, groups, group_size] float32, the features of a group in the order of the weight
        """
        grouped = self.by_group(weight)
        scales = self.scales[..., None]
        zeros = None if self.zeros is None else self.zeros[..., None]
        codes = nearest_codes(grouped, scales, zeros, self.quantizer)
        return code_values(codes, scales, zeros, self.quantizer) - grouped

    def by_group(self, values: Tensor) -> Tensor:
        """[n, in_features] -> [n, groups, group_size]"""
        if self.g_idx is not None:
            values = values[:, torch.argsort(self.g_idx.long(), stable=True)]
        return values.view(len(values), self.scales.shape[1], -1)

    def pack(self, codes: Tensor) -> QuantizedTensor:
        """codes [out_features, in_features]: uint8, int8 for int8."""
        quantizer, codes = self.quantizer, codes.contiguous()
        match quantizer.codebook:
            case "int8":
                packed = codes.to(torch.int8)
            case "int4":
                packed = pack_int4(codes)
            case _:
                flat = codes.to(torch.uint8).reshape(-1)
                bits = quantizer.code_bits
                packed = _nibbles(flat) if bits == 4 else pack_bits(flat, bits)
        tensors = {"packed": packed, **self.stored, "g_idx": self.g_idx}
        own = {name: tensors.get(name) for name in quantizer.tensor_names}
        return QuantizedTensor(own, self.shape, quantizer)


def require_own_rows(quantizer: Quantizer, in_features: int) -> None:
    """raises  ValueError if blocks cross rows, so that a row has no grid of its own"""
    if quantizer.block_size is not None and in_features % quantizer.block_size:
        fitting = [size for size in BLOCK_SIZES if in_features % size == 0]
        use = f"block_size={' or '.join(map(str, fitting))}, or method=rtn" if fitting else "method=rtn"
        raise ValueError(
            f"blocks of {quantizer.block_size} cross the rows of in_features={in_features}, so that a row's scales are "
            f"also its neighbour's; use {use}"
        )


def _nibbles(flat: Tensor) -> Tensor:
    """4-bit codes as bitsandbytes' bytes, the even ones high; rows of whole blocks have an even number of codes."""
    return flat[::2] << 4 | flat[1::2]


def nearest_codes(weight: Tensor, scales: Tensor, zeros: Tensor | None, quantizer: Quantizer) -> Tensor:
    """The nearest codes, all arguments of one shape: [...] uint8, or int8 for int8.

    weight, scales  float32; zeros uint8 or None
    """
    match quantizer.codebook:
        case "int8":
            return (weight / scales).round().clamp(-QUANT_MAX, QUANT_MAX).to(torch.int8)
        case "int4":
            zero = SYMMETRIC_ZERO if zeros is None else zeros.float()
            return ((weight / scales).round() + zero).clamp(0, 15).to(torch.uint8)
    _, thresholds, order = _tables(quantizer, weight.device)
    return order[torch.bucketize(weight * (1 / scales.clamp(min=_TINY)), thresholds)]


def code_values(codes: Tensor, scales: Tensor, zeros: Tensor | None, quantizer: Quantizer) -> Tensor:
    """What codes stand for, float32; arguments as of `nearest_codes`."""
    return code_levels(codes, zeros, quantizer) * scales


def code_levels(codes: Tensor, zeros: Tensor | None, quantizer: Quantizer) -> Tensor:
    """What codes stand for at a scale of 1, float32."""
    match quantizer.codebook:
        case "int8":
            return codes.float()
        case "int4":
            return codes.float() - (SYMMETRIC_ZERO if zeros is None else zeros.float())
    return _tables(quantizer, codes.device)[0][codes.int()]


def _tables(quantizer: Quantizer, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """values, thresholds, order of a codebook"""
    tables = CODEBOOKS.get(quantizer.codebook) or FORMATS[quantizer.codebook].tables
    return tables.on(device)


def scales_of(weight: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor | None]:
    """int4, int8: scales and zero points of `quantizer.quantize(weight)`; [out_features, groups] float32 and uint8."""
    span, scale_dtype = quantizer.span(weight.shape[1]), getattr(torch, quantizer.scale_dtype)
    if quantizer.codebook == "int8":
        return int8_quantize(weight, group_size=span, scale_dtype=scale_dtype).scales, None
    options = {"symmetric": quantizer.symmetric, "divisor": quantizer.divisor or 7.0, "scale_dtype": scale_dtype}
    return int4_scales(weight, group_size=span, **options)
