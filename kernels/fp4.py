"""4-bit floating point as bitsandbytes has it: a sign over 8 magnitudes, two exponent bits and one of mantissa.

    0  0.0625  2  3  4  6  8  12, over 12: codes 0 1 6 7 4 5 2 3, and 8 more for the sign
NF4 is better for normal weights (QLoRA, arXiv:2305.14314, section 4); this is for the checkpoints and the comparisons
that use FP4. Formula, bytes and kernels are those of every 4-bit codebook: kernels/codebook4.py, codebook4_linear.py
and double_quant.py.
"""

import torch
from torch import Tensor

from trainer.kernels.codebook4 import (
    CodebookWeight,
    codebook_dequantize,
    codebook_dequantize_into,
    codebook_quantize,
)
from trainer.kernels.codebook4_linear import codebook_linear

fp4_dequantize_into = codebook_dequantize_into


def FP4Weight(
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    out_features: int,
    in_features: int,
    block_size: int,
) -> CodebookWeight:
    """A weight whose codebook is "fp4"; the arguments are those of `NF4Weight`."""
    sizes = out_features, in_features, block_size
    return CodebookWeight(packed, absmax, nested_absmax, nested_offset, *sizes, codebook="fp4")


def fp4_quantize(weight: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize to FP4, one scale per block.

    weight   [out_features, in_features] float, any strides; computed in float32
    returns  packed [ceil(numel / 2)] uint8, high nibble first; absmax [ceil(numel / block_size)] float32
    raises   ValueError if block_size is not a power of two in 32..4096, or if a weight is inf or nan (names it)
    """
    return codebook_quantize(weight, codebook="fp4", block_size=block_size)


def fp4_dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None = None,
    nested_offset: Tensor | None = None,
    *,
    out_features: int,
    in_features: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The dense weight behind the codes: codebook * absmax in float32, rounded once to dtype.

    packed, absmax   as `fp4_quantize` returns them; absmax is uint8 with double quantization
    nested_absmax, nested_offset   as `quantize_absmax` returns them, or None
    dtype    float32, bfloat16 or float16
    returns  [out_features, in_features] of dtype
    raises   ValueError if a size does not fit, or if absmax > 65504 with float16; TypeError for another dtype
    """
    weight = FP4Weight(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size)
    return codebook_dequantize(weight, dtype=dtype)


def fp4_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None = None,
    nested_offset: Tensor | None = None,
    *,
    out_features: int,
    block_size: int,
) -> Tensor:
    """y = x W^T over a packed weight; the gradient flows to x only, and no dense weight is kept for it.

    x        [..., in_features] float32, bfloat16 or float16; W is rounded to its dtype, sums are float32
    packed, absmax, nested_absmax, nested_offset   the weight, as for `fp4_dequantize`
    returns  [..., out_features] of x's dtype
    raises   ValueError if a size does not fit, or if absmax > 65504 with a float16 x on a CPU;
             TypeError for another dtype
    """
    weight = FP4Weight(packed, absmax, nested_absmax, nested_offset, out_features, x.shape[-1], block_size)
    return codebook_linear(x, weight)
