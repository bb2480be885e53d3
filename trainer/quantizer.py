"""Quantizer: the mapping between weights and codes, the only one in the product.

Training, LoftQ, QAT, the exporters and the server all quantize and dequantize here, so that a weight has one grid from
the first step to the served model. The surprising thing: two grids for one scheme differ by more than quantization
itself loses, so nothing else in the product may compute codes or scales.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from trainer.kernels.codebook4 import BLOCK_SIZES, CODEBOOKS, CodebookWeight, codebook_dequantize, codebook_quantize
from trainer.kernels.codebook_bits import FORMATS, BitsWeight, bits_dequantize, bits_quantize
from trainer.kernels.double_quant import NESTED_BLOCK_SIZE, quantize_absmax
from trainer.kernels.frozen_weight import FrozenWeight, PackedWeight
from trainer.kernels.int4 import DIVISORS, Int4Weight, int4_dequantize, int4_quantize
from trainer.kernels.int8 import GROUP_SIZES, Int8Weight, int8_dequantize, int8_quantize

WHOLE_ROW = -1
"""The group_size of one scale per output row, as GPTQ's checkpoints write it."""
_BLOCKS = {"block_size": 64, "double_quant": True}
_GROUPS = {"group_size": 32, "symmetric": True, "divisor": 7.0, "scale_dtype": "float32"}
DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((*CODEBOOKS, *FORMATS), _BLOCKS),
    "int4": _GROUPS,
    "int8": {"group_size": WHOLE_ROW, "scale_dtype": "float32"},
}
"""Codebook -> the settings that it has, with their defaults."""
_CODE_BITS = {
    **dict.fromkeys(CODEBOOKS, 4),
    **{name: entry.bits for name, entry in FORMATS.items()},
    "int4": 4,
    "int8": 8,
}
_TENSORS = {
    **dict.fromkeys((*CODEBOOKS, *FORMATS), ("packed", "absmax", "nested_absmax", "nested_offset")),
    "int4": ("packed", "scales", "zeros", "g_idx"),
    "int8": ("packed", "scales"),
}


@dataclass(frozen=True)
class Quantizer:
    """How weights become codes. Two equal quantizers give equal bytes.

    codebook      nf4 (arXiv:2305.14314, appendix E), fp4 (bitsandbytes' 4-bit floats), nf3, nf2 (NormalFloat of 3 and 2
                  bits, see kernels/codebook_bits.py), int4, int8 (round to nearest; see kernels/int4.py, int8.py)
    block_size    nf4, fp4, nf3, nf2: weights that share one scale, counted along the flattened weight: a power of two
                  in 32..4096
    double_quant  nf4, fp4, nf3, nf2: store the scales in 8 bits too (arXiv:2305.14314, section 3)
    group_size    int4, int8: input features that share one scale: a multiple of 32, or -1 for a whole row
    symmetric     int4: no zero point
    divisor       int4, symmetric: the scale is max |w| / divisor: 7, 7.5 or 8
    scale_dtype   int4, int8: "float32", "bfloat16" or "float16": scales are rounded to it, and stored as float32
    raises        ValueError naming the setting that is not accepted, or that this codebook does not have

    None is the codebook's default (`DEFAULTS`), and what it does not have stays None.
    """

    codebook: str = "nf4"
    block_size: int | None = None
    double_quant: bool | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    divisor: float | None = None
    scale_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.codebook not in DEFAULTS:
            raise ValueError(f"quant.codebook={self.codebook}; use one of {', '.join(DEFAULTS)}")
        defaults = DEFAULTS[self.codebook]
        for name, value in self.settings.items():
            if name not in defaults and name != "codebook":
                users = ", ".join(codebook for codebook, has in DEFAULTS.items() if name in has)
                raise ValueError(
                    f"quant.{name}={value} has no effect with quant.codebook={self.codebook}; leave it out, or use "
                    f"one of {users}"
                )
        if self.symmetric is False and self.divisor is not None:
            raise ValueError(
                f"quant.divisor={self.divisor} has no effect with quant.symmetric=false, whose groups span 15 steps; "
                "leave it out"
            )
        for name, default in defaults.items():
            if getattr(self, name) is None and not (name == "divisor" and self.symmetric is False):
                object.__setattr__(self, name, default)
        self._check_values()

    def _check_values(self) -> None:
        accepted = {
            "block_size": (None, *BLOCK_SIZES),
            "divisor": (None, *DIVISORS),
            "scale_dtype": (None, "float32", "bfloat16", "float16"),
        }
        for name, values in accepted.items():
            if getattr(self, name) not in values:
                use = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values[1:])
                rule = " is not a power of two in 32..4096" if name == "block_size" else ""
                raise ValueError(f"quant.{name}={getattr(self, name)}{rule}; use one of {use}")
        size = self.group_size
        if size not in (None, WHOLE_ROW) and (size < 1 or size % GROUP_SIZES[0]):
            use = ", ".join(map(str, (WHOLE_ROW, *GROUP_SIZES)))
            raise ValueError(f"quant.group_size={size} is no multiple of {GROUP_SIZES[0]}; use one of {use}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are not None; `Quantizer(**settings)` is this quantizer again."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def code_bits(self) -> int:
        """Bits of one code, scales aside."""
        return _CODE_BITS[self.codebook]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """What a weight of this quantizer consists of, in the kernels' order; some may be None."""
        return _TENSORS[self.codebook]

    @property
    def bits_per_weight(self) -> float:
        """Codes and scales as they are stored, for a weight much larger than a block: 4.127 for the defaults."""
        if self.block_size is not None:
            scale_bits = 8 + 32 / NESTED_BLOCK_SIZE if self.double_quant else 32
            return self.code_bits + scale_bits / self.block_size
        if self.group_size == WHOLE_ROW:
            return float(self.code_bits)
        return self.code_bits + (32 if self.symmetric is not False else 32 + 8) / self.group_size

    def span(self, in_features: int) -> int:
        """Weights of a row of in_features that share one scale; blocks may cross rows.

        raises  ValueError if the groups do not divide the row
        """
        if self.block_size is not None:
            return self.block_size
        if self.group_size == WHOLE_ROW:
            return in_features
        if in_features % self.group_size:
            use = ", ".join(str(size) for size in (*GROUP_SIZES, WHOLE_ROW) if in_features % abs(size) == 0)
            raise ValueError(
                f"quant.group_size={self.group_size} does not divide in_features={in_features}; use one of {use} "
                f"({WHOLE_ROW}: one scale per row)"
            )
        return self.group_size

    def quantize(self, weight: Tensor) -> "QuantizedTensor":
        """Choose codes and scales.

        weight   [out_features, in_features] float, any strides
        raises   ValueError if weight is not 2-D, holds inf or nan (names it), or is not divided by the groups
        """
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; a quantizer takes [out_features, in_features]")
        span = self.span(weight.shape[1])
        match self.codebook:
            case "int4":
                options = {"symmetric": self.symmetric, "scale_dtype": getattr(torch, self.scale_dtype)}
                options |= {"divisor": self.divisor} if self.symmetric else {}
                packed = int4_quantize(weight, group_size=span, **options)
                tensors = packed.packed, packed.scales, packed.zeros, packed.g_idx
            case "int8":
                packed = int8_quantize(weight, group_size=span, scale_dtype=getattr(torch, self.scale_dtype))
                tensors = packed.packed, packed.scales
            case _:
                quantize = codebook_quantize if self.codebook in CODEBOOKS else bits_quantize
                codes, absmax = quantize(weight, codebook=self.codebook, block_size=span)
                tensors = codes, *(quantize_absmax(absmax) if self.double_quant else (absmax, None, None))
        return QuantizedTensor(dict(zip(self.tensor_names, tensors, strict=True)), tuple(weight.shape), self)

    def dequantize(self, quantized: "QuantizedTensor", dtype: torch.dtype) -> Tensor:
        """The dense weight [out_features, in_features], computed in float32 and rounded once to dtype.

        raises   ValueError if another quantizer made the codes, or if a weight exceeds float16's range
        """
        if quantized.quantizer != self:
            raise ValueError(f"the codes were made by {quantized.quantizer}, not by {self}; use quantized.dequantize")
        return quantized.dequantize(dtype)

    def fake_quantize(self, weight: Tensor) -> Tensor:
        """`dequantize(quantize(weight))` in weight's dtype, bit for bit; the gradient passes straight through."""
        return _StraightThrough.apply(weight, self)


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of one weight.

    tensors    by the names of `Quantizer.tensor_names`
      codebooks  packed [ceil(numel * code_bits / 8)] uint8; absmax [ceil(numel / block_size)] float32, or uint8 codes
                 with nested_absmax [ceil(num_blocks / 256)] and nested_offset [] float32; 4 bits as in bitsandbytes
      int4       packed [out_features, ceil(in_features / 2)] uint8, scales [out_features, groups] float32, zeros or
                 None, g_idx (None)
      int8       packed [out_features, in_features] int8, scales [out_features, groups] float32
    shape      (out_features, in_features)
    """

    tensors: dict[str, Tensor | None]
    shape: tuple[int, int]
    quantizer: Quantizer

    @property
    def packed(self) -> Tensor:
        """The codes."""
        return self.tensors["packed"]

    @property
    def absmax(self) -> Tensor | None:
        """The scales of a codebook's blocks."""
        return self.tensors.get("absmax")

    @property
    def nested_absmax(self) -> Tensor | None:
        """The scales of those scales, with double_quant."""
        return self.tensors.get("nested_absmax")

    @property
    def nested_offset(self) -> Tensor | None:
        """What was taken off the scales before they were quantized, with double_quant."""
        return self.tensors.get("nested_offset")

    @property
    def frozen_weight(self) -> FrozenWeight:
        """The same tensors, as a projection of `lora_linear` takes them."""
        quantizer, tensors = self.quantizer, tuple(self.tensors.values())
        return FrozenWeight(quantizer.codebook, tensors, *self.shape, quantizer.span(self.shape[1]))

    @property
    def weight(self) -> PackedWeight:
        """The same tensors, as the kernels of the codebook take them."""
        return self.frozen_weight.packed()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight; see `Quantizer.dequantize`."""
        match weight := self.weight:
            case CodebookWeight():
                return codebook_dequantize(weight, dtype=dtype)
            case BitsWeight():
                return bits_dequantize(weight, dtype=dtype)
            case Int4Weight():
                return int4_dequantize(weight, dtype=dtype)
            case Int8Weight():
                return int8_dequantize(weight, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in self.tensors.values() if tensor is not None)


class _StraightThrough(torch.autograd.Function):
    """Rounding has gradient 0 almost everywhere; as usual it is taken for 1 (arXiv:1308.3432, section 4)."""

    @staticmethod
    def forward(ctx, weight: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer.quantize(weight).dequantize(weight.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
