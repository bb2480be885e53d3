"""y = x W^T over a weight in 4-bit codes (kernels/codebook4.py), with a gradient to x.

    y = round(sum_k x_k W_k)        dx = g W        W = dequantize(codes) in the dtype of x; sums are float32

While few rows share the weight it is decoded beside the dot products, which read an eighth of a float32 weight's bytes;
beyond MAX_FUSED_ROWS rows (MAX_FUSED_ROWS_GPU on GPUs) it is decoded once into a dense matrix that torch multiplies.
Nothing dense is kept for the backward, which decodes again. On CPUs AVX512-BF16 products take subnormal weights and
inputs (below 1.2e-38) for zeros.

The server has its own layout and kernel (kernels/packed_linear.py); this one serves training and evaluation.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles
from trainer.kernels.codebook4 import (
    DEVICES,
    DTYPE_IDS,
    CodebookWeight,
    check_dtype,
    check_float16_range,
    codebook_dequantize_cpu,
    codebook_dequantize_reference,
    codebook_dequantize_triton,
    weight_arguments,
    weight_tensors,
)
from trainer.kernels.double_quant import load_absmax
from trainer.kernels.split_k import MIN_SPAN, dot_dtype, launch_split, load_pairs, span, store_split

# 576x1536, bfloat16, 2 Zen 4 cores: 8 rows take 114 us fused and 203 us through a dense weight.
MAX_FUSED_ROWS = 8
MAX_FUSED_ROWS_GPU = 16  # one tile of rows; not timed yet
# By size of a float: float32 dots keep their operands in registers, so less fits. One warp, since a table of 16 values
# then lies in its registers and a look-up is a shuffle; more warps share it through memory, with barriers. Chosen for
# no spills on sm_80, sm_90, sm_100 and gfx942; not timed there yet.
LINEAR_TILES = {
    2: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 1, "PROGRAMS": 1024},
    4: {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 1, "PROGRAMS": 1024},
}


# ---- reference


def codebook_linear_reference(x: Tensor, weight: CodebookWeight) -> Tensor:
    return x @ codebook_dequantize_reference(weight, dtype=x.dtype).T


# ---- C++


def codebook_linear_cpu(x: Tensor, weight: CodebookWeight) -> Tensor:
    num_rows = x.numel() // max(1, x.shape[-1])
    if num_rows > MAX_FUSED_ROWS or num_rows == 0 or x.dtype == torch.float16:
        return x @ codebook_dequantize_cpu(weight, dtype=x.dtype).T
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], weight.out_features)
    _tape.call_beside_torch(
        _tape.kernel("codebook4_linear", "codebook4_linear"), x, *weight_arguments(weight), num_rows,
        weight.out_features, weight.in_features, weight.block_size, y, DTYPE_IDS[x.dtype],
    )  # fmt: skip
    return y


# ---- Triton


@triton.jit
def _linear_kernel(
    x_ptr, packed_ptr, absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, codebook_ptr, y_ptr,
    num_rows, in_features, out_features, row_bytes, features_per_split, stride_x_row,
    BLOCK_SIZE: tl.constexpr, SPAN: tl.constexpr, DOUBLE_QUANT: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [splits, num_rows, out_features]: what each part of in_features adds to the product.

    Even and odd k are summed in two dots: high nibbles meet x[0::2], low ones x[1::2]. SPAN weights of a row share a
    scale: they never cross a block, so that a scale is loaded once for them.
    """
    SPANS: tl.constexpr = BLOCK_K // SPAN
    feature = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    table = tl.load(codebook_ptr + tl.arange(0, 16))
    first_byte = tl.arange(0, SPANS)[None, :, None] * (SPAN // 2) + tl.arange(0, SPAN // 2)[None, None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = split * features_per_split
    for start in range(begin, tl.minimum(begin + features_per_split, in_features), BLOCK_K):
        even, odd = load_pairs(x_ptr, stride_x_row, row, num_rows, start, in_features, DOT, BLOCK_K)
        byte = start // 2 + first_byte
        mask = (byte < row_bytes) & (feature < out_features)[:, None, None]
        packed = tl.load(packed_ptr + feature[:, None, None] * row_bytes + byte, mask=mask, other=0).to(tl.int32)
        k = start + tl.arange(0, SPANS) * SPAN
        scale_mask = (k < in_features)[None, :] & (feature < out_features)[:, None]
        block = (feature[:, None] * in_features + k[None, :]) // BLOCK_SIZE
        absmax = load_absmax(absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, block, scale_mask, DOUBLE_QUANT)
        high = _look_up(table, packed >> 4) * absmax[:, :, None]
        low = _look_up(table, packed & 15) * absmax[:, :, None]
        high = tl.reshape(high.to(x_ptr.dtype.element_ty).to(DOT), (BLOCK_N, BLOCK_K // 2))
        low = tl.reshape(low.to(x_ptr.dtype.element_ty).to(DOT), (BLOCK_N, BLOCK_K // 2))
        acc = tl.dot(even, tl.trans(high), acc, input_precision="ieee")
        acc = tl.dot(odd, tl.trans(low), acc, input_precision="ieee")
    store_split(y_ptr, acc, split, row, feature, num_rows, out_features)


@triton.jit
def _look_up(table, code):
    return tl.reshape(tl.gather(table, tl.reshape(code, (code.numel,)), 0), code.shape)


def codebook_linear_triton(x: Tensor, weight: CodebookWeight) -> Tensor:
    rows = x.reshape(-1, weight.in_features).contiguous()
    if rows.shape[0] > MAX_FUSED_ROWS_GPU or rows.shape[0] == 0 or weight.in_features % MIN_SPAN:
        return x @ codebook_dequantize_triton(weight, dtype=x.dtype).T
    tile = tiles("codebook_linear", x.device, LINEAR_TILES[x.element_size()], itemsize=x.element_size())
    constants = {"BLOCK_SIZE": weight.block_size, "DOUBLE_QUANT": weight.double_quant, "DOT": dot_dtype(x.dtype)}
    y = launch_split(
        _linear_kernel, tile, rows, weight_tensors(weight), weight.out_features, weight.in_features // 2,
        span=span(weight.in_features, weight.block_size, tile["BLOCK_K"]), **constants,
    )  # fmt: skip
    return y.view(*x.shape[:-1], weight.out_features)


# ---- registered op

_IMPLEMENTATIONS = {
    "reference": codebook_linear_reference,
    "cpu": codebook_linear_cpu,
    "triton": codebook_linear_triton,
}


@torch.library.custom_op("lowbit::codebook_linear", mutates_args=())
def _linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    out_features: int,
    block_size: int,
    codebook: str,
) -> Tensor:
    sizes = out_features, x.shape[-1], block_size, codebook
    return _run("reference", x, CodebookWeight(packed, absmax, nested_absmax, nested_offset, *sizes))


@_linear.register_kernel(DEVICES)
def _(x, packed, absmax, nested_absmax, nested_offset, out_features, block_size, codebook) -> Tensor:
    sizes = out_features, x.shape[-1], block_size, codebook
    weight = CodebookWeight(packed, absmax, nested_absmax, nested_offset, *sizes)
    return _run(_cpp.choose("codebook4_linear", x.device.type), x, weight)


@_linear.register_fake
def _(x, packed, absmax, nested_absmax, nested_offset, out_features, block_size, codebook) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _run(implementation: str, x: Tensor, weight: CodebookWeight) -> Tensor:
    check_dtype("x", x.dtype)
    if x.dtype == torch.float16 and x.device.type == "cpu":  # on a GPU the check would wait for the device each call
        check_float16_range(weight)
    return _IMPLEMENTATIONS[implementation](x, weight)


def _setup_context(ctx, inputs, output) -> None:
    x, *weight, ctx.out_features, ctx.block_size, ctx.codebook = inputs
    ctx.in_features, ctx.dtype = x.shape[-1], x.dtype
    ctx.save_for_backward(*weight)


def _backward(ctx, grad: Tensor):
    sizes = ctx.out_features, ctx.in_features, ctx.block_size, ctx.codebook
    grad_x = grad @ torch.ops.lowbit.codebook_dequantize(*ctx.saved_tensors, *sizes, ctx.dtype)
    return grad_x, *[None] * 7


_linear.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def codebook_linear(x: Tensor, weight: CodebookWeight) -> Tensor:
    """y = x W^T over a packed weight; the gradient flows to x only, and no dense weight is kept for it.

    x        [..., in_features] float32, bfloat16 or float16; W is rounded to its dtype, sums are float32
    returns  [..., out_features] of x's dtype
    raises   ValueError if in_features does not fit, or if absmax > 65504 with a float16 x on a CPU;
             TypeError for another dtype
    """
    tensors = weight.packed, weight.absmax, weight.nested_absmax, weight.nested_offset
    return _linear(x, *tensors, weight.out_features, weight.block_size, weight.codebook)
