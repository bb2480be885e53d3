"""Quantizer: the mapping between weights and 4-bit codes, the only one in the product.

Training, LoftQ, QAT, the exporters and the server all quantize and dequantize here, so that a weight has one grid from
the first step to the served model. The surprising thing: two grids for one scheme differ by more than quantization
itself loses, so nothing else in the product may compute codes or scales.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels.codebook4 import BLOCK_SIZES, CODEBOOKS, CodebookWeight, codebook_dequantize, codebook_quantize
from trainer.kernels.double_quant import NESTED_BLOCK_SIZE, quantize_absmax


@dataclass(frozen=True)
class Quantizer:
    """How weights become codes. Two equal quantizers give equal bytes.

    codebook      "nf4" (arXiv:2305.14314, appendix E) or "fp4" (bitsandbytes' 4-bit floating point)
    block_size    weights that share one scale, counted along the flattened weight: a power of two in 32..4096
    double_quant  store the scales in 8 bits too (section 3 there)
    raises        ValueError naming the setting that is not accepted
    """

    codebook: str = "nf4"
    block_size: int = 64
    double_quant: bool = True

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS:
            raise ValueError(f"quant.codebook={self.codebook}; use one of {', '.join(CODEBOOKS)}")
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(
                f"quant.block_size={self.block_size} is not a power of two in 32..4096; use one of {sizes}"
            )

    @property
    def bits_per_weight(self) -> float:
        """Codes and scales, for a weight much larger than a block: 4.127 for the defaults."""
        if not self.double_quant:
            return 4 + 32 / self.block_size
        return 4 + (8 + 32 / NESTED_BLOCK_SIZE) / self.block_size

    def quantize(self, weight: Tensor) -> "QuantizedTensor":
        """Choose codes and scales.

        weight   [out_features, in_features] float, any strides
        raises   ValueError if weight is not 2-D, or holds inf or nan (names it)
        """
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; a quantizer takes [out_features, in_features]")
        packed, absmax = codebook_quantize(weight, codebook=self.codebook, block_size=self.block_size)
        scales = quantize_absmax(absmax) if self.double_quant else (absmax, None, None)
        return QuantizedTensor(packed, *scales, tuple(weight.shape), self)

    def dequantize(self, quantized: "QuantizedTensor", dtype: torch.dtype) -> Tensor:
        """The dense weight [out_features, in_features], computed in float32 and rounded once to dtype.

        raises   ValueError if another quantizer made the codes, or if a scale exceeds float16's range
        """
        if quantized.quantizer != self:
            raise ValueError(f"the codes were made by {quantized.quantizer}, not by {self}; use quantized.dequantize")
        return quantized.dequantize(dtype)

    def fake_quantize(self, weight: Tensor) -> Tensor:
        """`dequantize(quantize(weight))` in weight's dtype, bit for bit; the gradient passes straight through."""
        return _StraightThrough.apply(weight, self)


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of one weight, as bitsandbytes lays them out (kernels/codebook4.py has the bytes).

    packed         [ceil(numel / 2)] uint8
    absmax         [ceil(numel / block_size)] float32; uint8 codes with double_quant
    nested_absmax  [ceil(num_blocks / 256)] float32 with double_quant, else None
    nested_offset  [] float32 with double_quant, else None
    shape          (out_features, in_features)
    """

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_offset: Tensor | None
    shape: tuple[int, int]
    quantizer: Quantizer

    @property
    def weight(self) -> CodebookWeight:
        """The same tensors, as the kernels take them."""
        scales = self.absmax, self.nested_absmax, self.nested_offset
        return CodebookWeight(self.packed, *scales, *self.shape, self.quantizer.block_size, self.quantizer.codebook)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight; see `Quantizer.dequantize`."""
        return codebook_dequantize(self.weight, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (self.packed, self.absmax, self.nested_absmax, self.nested_offset)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _StraightThrough(torch.autograd.Function):
    """Rounding has gradient 0 almost everywhere; as usual it is taken for 1 (arXiv:1308.3432, section 4)."""

    @staticmethod
    def forward(ctx, weight: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer.quantize(weight).dequantize(weight.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
