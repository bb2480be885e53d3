"""4-bit NormalFloat: the codebook of QLoRA (arXiv:2305.14314, section 3 and appendix E).

Its 16 values are quantiles of a normal distribution, so that normal weights use all codes about equally often, with an
exact 0. Formula, bytes and kernels are those of every 4-bit codebook: kernels/codebook4.py, codebook4_linear.py and
double_quant.py. Here is the face that takes a weight's tensors one by one, as modules and checkpoints hold them.
"""

import torch
from torch import Tensor

from trainer.kernels.codebook4 import (
    BLOCK_SIZES,
    NF4_CODEBOOK,
    CodebookWeight,
    codebook_dequantize,
    codebook_dequantize_into,
    codebook_dequantize_reference,
    codebook_quantize,
    codebook_quantize_reference,
)
from trainer.kernels.codebook4_linear import MAX_FUSED_ROWS, codebook_linear
from trainer.kernels.double_quant import NESTED_BLOCK_SIZE, dequantize_absmax, quantize_absmax

__all__ = [
    "BLOCK_SIZES", "MAX_FUSED_ROWS", "NESTED_BLOCK_SIZE", "NF4_CODEBOOK", "NF4Weight", "dequantize_absmax",
    "nf4_dequantize", "nf4_dequantize_into", "nf4_dequantize_reference", "nf4_linear", "nf4_quantize",
    "nf4_quantize_reference", "quantize_absmax",
]  # fmt: skip

NF4Weight = CodebookWeight
"""A weight whose codebook is the default one, "nf4"."""
nf4_dequantize_into = codebook_dequantize_into
nf4_dequantize_reference = codebook_dequantize_reference


def nf4_quantize_reference(weight: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    return codebook_quantize_reference(weight, codebook="nf4", block_size=block_size)


def nf4_quantize(weight: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize to NF4, one scale per block.

    weight   [out_features, in_features] float, any strides; computed in float32
    returns  packed [ceil(numel / 2)] uint8, high nibble first; absmax [ceil(numel / block_size)] float32
    raises   ValueError if block_size is not a power of two in 32..4096, or if a weight is inf or nan (names it)
    """
    return codebook_quantize(weight, codebook="nf4", block_size=block_size)


def nf4_dequantize(
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

    packed, absmax   as `nf4_quantize` returns them; absmax is uint8 with double quantization
    nested_absmax, nested_offset   as `quantize_absmax` returns them, or None
    dtype    float32, bfloat16 or float16
    returns  [out_features, in_features] of dtype
    raises   ValueError if a size does not fit, or if absmax > 65504 with float16; TypeError for another dtype
    """
    weight = NF4Weight(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size)
    return codebook_dequantize(weight, dtype=dtype)


def nf4_linear(
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
    packed, absmax, nested_absmax, nested_offset   the weight, as for `nf4_dequantize`
    returns  [..., out_features] of x's dtype
    raises   ValueError if a size does not fit, or if absmax > 65504 with a float16 x on a CPU;
             TypeError for another dtype
    """
    weight = NF4Weight(packed, absmax, nested_absmax, nested_offset, out_features, x.shape[-1], block_size)
    return codebook_linear(x, weight)
