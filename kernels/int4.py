"""INT4: weights in groups along the input, symmetric or with a zero point, and the linear layers over them.

Grid, one scale per group of `group_size` input features (all in float32, divisions are true divisions):
    symmetric    scale = max |w| / divisor                  divisor 7 (default), 7.5 (GPTQ, compressed-tensors) or 8
                 zero  = 8, not stored
    asymmetric   low = min(min w, 0), high = max(max w, 0);  scale = (high - low) / 15
                 zero  = clamp(round_half_even(-low / scale), 0, 15)
    code         = clamp(round_half_even(w / scale) + zero, 0, 15)
    w'           = (code - zero) * scale, rounded once to the dtype asked for
The scale is rounded to scale_dtype before zero and codes are chosen, so that a checkpoint that stores it in 16 bits
gives the same weights. A scale of 0 (zeros, or weights too small for scale_dtype) becomes 1: its weights are exactly 0.

Bytes:
    packed   [out_features, ceil(in_features / 2)] uint8    byte i = code[2i] | code[2i + 1] << 4   (padding code: 0)
    scales   [out_features, in_features / group_size] float32
    zeros    [out_features, in_features / group_size] uint8, or None if symmetric
    g_idx    [in_features] int32, or None: the group of each input feature where groups are not contiguous (act-order of
             GPTQ, arXiv:2210.17323); each group then has exactly group_size features

`int4_linear` multiplies x by w' rounded to x's dtype, with float32 sums: few rows decode beside the products, more rows
multiply a dense copy. Products in integer arithmetic: kernels/integer_linear.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles
from trainer.kernels.int8 import (
    CPP_DTYPES,
    DTYPE_IDS,
    MAX_FUSED_ROWS,
    NUM_WEIGHTS,
    check_buffer,
    check_dtype,
    check_float16_range,
    check_group_size,
    check_out,
    check_scale_dtype,
    check_scales,
    check_weight,
    check_x,
    divide,
    few_rows_in_cpp,
    quantize_in_cpp,
    raise_not_finite,
    rounded_scales,
)
from trainer.kernels.split_k import MIN_SPAN, dot_dtype, launch_split, load_pairs, span, store_split

DIVISORS = (7.0, 7.5, 8.0)
SYMMETRIC_ZERO = 8
# Of the fused linear by size of a float, chosen for no spills on sm_80, sm_90, sm_100 and gfx942; not timed there yet.
LINEAR_TILES = {
    2: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "PROGRAMS": 512},
    4: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "PROGRAMS": 512},
}


@dataclass(slots=True)
class Int4Weight:
    """A weight of 4-bit codes as one argument; sizes are checked here, before a pointer leaves Python.

    packed      [out_features, ceil(in_features / 2)] uint8
    scales      [out_features, in_features / group_size] float32
    zeros       [out_features, in_features / group_size] uint8, or None: 8 everywhere
    g_idx       [in_features] int32, or None: group of feature k is k // group_size
    raises      ValueError if group_size or a size is wrong
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    out_features: int
    in_features: int
    group_size: int

    def __post_init__(self) -> None:
        check_group_size(self.group_size, self.in_features)
        shape = f"a [{self.out_features}, {self.in_features}] weight in groups of {self.group_size}"
        groups = self.out_features, self.num_groups
        check_buffer("packed", self.packed, torch.uint8, (self.out_features, (self.in_features + 1) // 2), shape)
        check_buffer("scales", self.scales, torch.float32, groups, shape)
        if self.zeros is not None:
            check_buffer("zeros", self.zeros, torch.uint8, groups, shape)
        if self.g_idx is not None:
            check_buffer("g_idx", self.g_idx, torch.int32, (self.in_features,), shape)

    @property
    def num_groups(self) -> int:
        return self.in_features // self.group_size

    @property
    def device(self) -> torch.device:
        return self.packed.device


# ---- reference


def int4_scales(
    weight: Tensor, *, group_size: int, symmetric: bool, divisor: float, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The grid of each group: scales [out_features, groups] float32, zeros of the same shape uint8 or None."""
    groups = weight.float().reshape(weight.shape[0], -1, group_size)
    absmax = groups.abs().amax(2)
    if not torch.isfinite(absmax).all():
        raise_not_finite(weight)
    if symmetric:
        scales = rounded_scales(divide(absmax, divisor), scale_dtype)
        check_scales(scales, scale_dtype)
        return scales, None
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = rounded_scales(divide(high - low, 15), scale_dtype)
    check_scales(scales, scale_dtype)
    return scales, (-low / scales).round().clamp(0, 15).to(torch.uint8)


def int4_codes(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """[out_features, in_features] uint8 in 0..15, for a given grid."""
    groups = weight.float().reshape(*scales.shape, -1)
    zero = SYMMETRIC_ZERO if zeros is None else zeros[:, :, None].float()
    return ((groups / scales[:, :, None]).round() + zero).clamp(0, 15).to(torch.uint8).view(weight.shape)


def pack_int4(codes: Tensor) -> Tensor:
    """[out_features, in_features] codes 0..15 as bytes [out_features, ceil(in_features / 2)] uint8, even ones low."""
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """[out_features, in_features] uint8 codes in 0..15 behind `pack_int4`'s bytes."""
    return torch.stack([packed & 15, packed >> 4], dim=2).view(packed.shape[0], -1)[:, :in_features]


def int4_quantize_reference(
    weight: Tensor, *, group_size: int, symmetric: bool, divisor: float, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    options = {"symmetric": symmetric, "divisor": divisor, "scale_dtype": scale_dtype}
    scales, zeros = int4_scales(weight, group_size=group_size, **options)
    return pack_int4(int4_codes(weight, scales, zeros)), scales, zeros


def int4_dequantize_reference(weight: Int4Weight, *, dtype: torch.dtype) -> Tensor:
    codes = unpack_int4(weight.packed, weight.in_features).to(torch.int32)
    if weight.g_idx is not None:
        group = weight.g_idx.long()
        zero = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.int()[:, group]
        return ((codes - zero).float() * weight.scales[:, group]).to(dtype)
    groups = codes.view(weight.out_features, -1, weight.group_size)
    zero = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.int()[:, :, None]
    return ((groups - zero).float() * weight.scales[:, :, None]).view(codes.shape).to(dtype)


def int4_linear_reference(x: Tensor, weight: Int4Weight) -> Tensor:
    return x @ int4_dequantize_reference(weight, dtype=x.dtype).T


# ---- C++


def int4_quantize_cpu(
    weight: Tensor, *, group_size: int, symmetric: bool, divisor: float, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    packed = torch.empty(weight.shape[0], (weight.shape[1] + 1) // 2, dtype=torch.uint8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size)
    zeros = None if symmetric else torch.empty(scales.shape, dtype=torch.uint8)
    if not quantize_in_cpp(weight, 4, symmetric, divisor, scale_dtype, group_size, packed, scales, zeros):
        options = {"symmetric": symmetric, "divisor": divisor, "scale_dtype": scale_dtype}
        return int4_quantize_reference(weight, group_size=group_size, **options)  # names what is wrong
    return packed, scales, zeros


def int4_dequantize_cpu(weight: Int4Weight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty(weight.out_features, weight.in_features, dtype=dtype)
    if dtype not in CPP_DTYPES or weight.g_idx is not None:
        return out.copy_(int4_dequantize_reference(weight, dtype=dtype))
    call(kernel("integer", "integer_dequantize"), *_arguments(weight), out, DTYPE_IDS[dtype])
    return out


def int4_linear_cpu(x: Tensor, weight: Int4Weight) -> Tensor:
    few = 0 < x.numel() // weight.in_features <= MAX_FUSED_ROWS
    if not few or x.dtype not in CPP_DTYPES or weight.g_idx is not None:
        dense = int4_dequantize_cpu(weight, dtype=x.dtype)
        check_float16_range(dense)
        return x @ dense.T
    return few_rows_in_cpp(x, weight.out_features, _arguments(weight))


def _arguments(weight: Int4Weight) -> tuple[Tensor | int | None, ...]:
    """As cpp/integer.cpp reads a weight."""
    sizes = weight.out_features, weight.in_features, weight.group_size
    return weight.packed, weight.scales, weight.zeros, 4, *sizes


# ---- Triton


@triton.jit
def _load_zero(zeros_ptr, group, mask, HAS_ZEROS: tl.constexpr):
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + group, mask=mask, other=0).to(tl.int32)
    else:
        zero = tl.zeros_like(group).to(tl.int32) + 8
    return zero


@triton.jit
def _int4_dequantize_kernel(
    packed_ptr, scales_ptr, zeros_ptr, out_ptr, num_bytes, in_features, group_size, num_groups,
    HAS_ZEROS: tl.constexpr, NUM_BYTES: tl.constexpr,
):  # fmt: skip
    """in_features must be even. NUM_BYTES bytes of the flat weight a program; a byte's two codes share their group."""
    byte = tl.program_id(0).to(tl.int64) * NUM_BYTES + tl.arange(0, NUM_BYTES)
    mask = byte < num_bytes
    packed = tl.load(packed_ptr + byte, mask=mask, other=0).to(tl.int32)
    row_bytes = in_features // 2
    group = byte // row_bytes * num_groups + 2 * (byte % row_bytes) // group_size
    scale = tl.load(scales_ptr + group, mask=mask, other=0.0)
    zero = _load_zero(zeros_ptr, group, mask, HAS_ZEROS)
    low = ((packed & 15) - zero).to(tl.float32) * scale
    high = ((packed >> 4) - zero).to(tl.float32) * scale
    element = tl.program_id(0).to(tl.int64) * NUM_BYTES * 2 + tl.arange(0, NUM_BYTES * 2)
    tl.store(out_ptr + element, tl.interleave(low, high).to(out_ptr.dtype.element_ty), mask=element < 2 * num_bytes)


@triton.jit
def _int4_linear_kernel(
    x_ptr, packed_ptr, scales_ptr, zeros_ptr, y_ptr,
    num_rows, in_features, out_features, row_bytes, group_size, num_groups, features_per_split, stride_x_row,
    HAS_ZEROS: tl.constexpr, SPAN: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [splits, num_rows, out_features]: what each part of in_features adds to the product.

    Even and odd k are summed in two dots: low nibbles meet x[0::2], high ones x[1::2]. SPAN weights share a group.
    """
    SPANS: tl.constexpr = BLOCK_K // SPAN
    dtype = x_ptr.dtype.element_ty
    feature = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    first_byte = tl.arange(0, SPANS)[None, :, None] * (SPAN // 2) + tl.arange(0, SPAN // 2)[None, None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = split * features_per_split
    for start in range(begin, tl.minimum(begin + features_per_split, in_features), BLOCK_K):
        even, odd = load_pairs(x_ptr, stride_x_row, row, num_rows, start, in_features, DOT, BLOCK_K)
        byte = start // 2 + first_byte
        mask = (byte < row_bytes) & (feature < out_features)[:, None, None]
        packed = tl.load(packed_ptr + feature[:, None, None] * row_bytes + byte, mask=mask, other=0).to(tl.int32)
        k = start + tl.arange(0, SPANS) * SPAN
        group_mask = (k < in_features)[None, :] & (feature < out_features)[:, None]
        group = feature[:, None] * num_groups + k[None, :] // group_size
        scale = tl.load(scales_ptr + group, mask=group_mask, other=0.0)[:, :, None]
        zero = _load_zero(zeros_ptr, group, group_mask, HAS_ZEROS)[:, :, None]
        low = (((packed & 15) - zero).to(tl.float32) * scale).to(dtype).to(DOT)
        high = (((packed >> 4) - zero).to(tl.float32) * scale).to(dtype).to(DOT)
        low = tl.trans(tl.reshape(low, (BLOCK_N, BLOCK_K // 2)))
        high = tl.trans(tl.reshape(high, (BLOCK_N, BLOCK_K // 2)))
        acc = tl.dot(even, low, acc, input_precision="ieee")
        acc = tl.dot(odd, high, acc, input_precision="ieee")
    store_split(y_ptr, acc, split, row, feature, num_rows, out_features)


def int4_dequantize_triton(weight: Int4Weight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.device)
    if weight.g_idx is not None or weight.in_features % 2:
        return out.copy_(int4_dequantize_reference(weight, dtype=dtype))
    num_bytes = weight.packed.numel()
    if num_bytes:
        tile = tiles("int4_dequantize", out.device, {"NUM_BYTES": NUM_WEIGHTS // 2}, itemsize=out.element_size())
        _int4_dequantize_kernel[(triton.cdiv(num_bytes, tile["NUM_BYTES"]),)](
            weight.packed, weight.scales, weight.zeros, out, num_bytes, weight.in_features, weight.group_size,
            weight.num_groups, HAS_ZEROS=weight.zeros is not None, **tile,
        )  # fmt: skip
    return out


def int4_linear_triton(x: Tensor, weight: Int4Weight) -> Tensor:
    rows = x.reshape(-1, weight.in_features).contiguous()
    few = 0 < rows.shape[0] <= MAX_FUSED_ROWS
    if not few or weight.in_features % MIN_SPAN or weight.g_idx is not None:
        return x @ int4_dequantize_triton(weight, dtype=x.dtype).T
    tile = tiles("int4_linear", x.device, LINEAR_TILES[x.element_size()], itemsize=x.element_size())
    y = launch_split(
        _int4_linear_kernel, tile, rows, (weight.packed, weight.scales, weight.zeros), weight.out_features,
        weight.in_features // 2, weight.group_size, weight.num_groups,
        span=span(weight.in_features, weight.group_size, tile["BLOCK_K"]),
        HAS_ZEROS=weight.zeros is not None, DOT=dot_dtype(x.dtype),
    )  # fmt: skip
    return y.view(*x.shape[:-1], weight.out_features)


# ---- registered ops

# Weights are quantized once, so torch's own kernels do it on GPUs.
_IMPLEMENTATIONS = {
    "reference": (int4_quantize_reference, int4_dequantize_reference, int4_linear_reference),
    "cpu": (int4_quantize_cpu, int4_dequantize_cpu, int4_linear_cpu),
    "triton": (int4_quantize_reference, int4_dequantize_triton, int4_linear_triton),
}


@torch.library.custom_op("lowbit::int4_quantize", mutates_args=())
def _int4_quantize(
    weight: Tensor, group_size: int, symmetric: bool, divisor: float, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """zeros is empty if symmetric: an op cannot return None"""
    quantize = _IMPLEMENTATIONS[_cpp.choose("integer", weight.device.type)][0]
    options = {"symmetric": symmetric, "divisor": divisor, "scale_dtype": scale_dtype}
    packed, scales, zeros = quantize(weight, group_size=group_size, **options)
    return packed, scales, packed.new_empty(0) if zeros is None else zeros


@_int4_quantize.register_fake
def _(weight, group_size, symmetric, divisor, scale_dtype) -> tuple[Tensor, Tensor, Tensor]:
    packed = weight.new_empty(weight.shape[0], (weight.shape[1] + 1) // 2, dtype=torch.uint8)
    groups = weight.shape[0], weight.shape[1] // group_size
    zeros = weight.new_empty(0 if symmetric else groups, dtype=torch.uint8)
    return packed, weight.new_empty(groups, dtype=torch.float32), zeros


@torch.library.custom_op("lowbit::int4_dequantize", mutates_args=())
def _int4_dequantize(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    check_dtype("dtype", dtype)
    weight = Int4Weight(packed, scales, zeros, g_idx, packed.shape[0], in_features, group_size)
    dense = _IMPLEMENTATIONS[_cpp.choose("integer", packed.device.type)][1](weight, dtype=dtype)
    check_float16_range(dense)
    return dense


@_int4_dequantize.register_fake
def _(packed, scales, zeros, g_idx, in_features, group_size, dtype) -> Tensor:
    return packed.new_empty(packed.shape[0], in_features, dtype=dtype)


@torch.library.custom_op("lowbit::int4_linear", mutates_args=())
def _int4_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    in_features: int,
    group_size: int,
) -> Tensor:
    weight = Int4Weight(packed, scales, zeros, g_idx, packed.shape[0], in_features, group_size)
    check_x(x, in_features, weight.device)
    return _IMPLEMENTATIONS[_cpp.choose("integer", x.device.type)][2](x, weight)


@_int4_linear.register_fake
def _(x, packed, scales, zeros, g_idx, in_features, group_size) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _setup_context(ctx, inputs, output) -> None:
    x, *weight, ctx.in_features, ctx.group_size = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(*weight)


def _backward(ctx, grad: Tensor):
    dense = torch.ops.lowbit.int4_dequantize(*ctx.saved_tensors, ctx.in_features, ctx.group_size, ctx.dtype)
    return grad @ dense, None, None, None, None, None, None


_int4_linear.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def int4_quantize(
    weight: Tensor,
    *,
    group_size: int,
    symmetric: bool = True,
    divisor: float = 7.0,
    scale_dtype: torch.dtype = torch.float32,
) -> Int4Weight:
    """Quantize a weight to 4 bits, round to nearest, with the grid of the module's docstring.

    weight       [out_features, in_features] float, any strides; computed in float32
    group_size   a multiple of 32, such as 32, 64, 128 or 192, or in_features
    divisor      7, 7.5 or 8: what max |w| is divided by, for symmetric groups
    scale_dtype  float32, bfloat16 or float16: scales are rounded to it, and stored as float32
    raises       ValueError if group_size or divisor does not fit, if a weight is inf or nan (names it), or if a scale
                 is too large for scale_dtype; TypeError for another scale_dtype
    """
    check_weight(weight)
    check_scale_dtype(scale_dtype)
    check_group_size(group_size, weight.shape[1])
    if divisor not in DIVISORS:
        raise ValueError(f"divisor={divisor}; use one of {', '.join(f'{d:g}' for d in DIVISORS)}")
    packed, scales, zeros = _int4_quantize(weight.detach(), group_size, symmetric, divisor, scale_dtype)
    return Int4Weight(packed, scales, None if symmetric else zeros, None, *weight.shape, group_size)


def int4_dequantize(weight: Int4Weight, *, dtype: torch.dtype) -> Tensor:
    """The dense weight [out_features, in_features]: (code - zero) * scale in float32, rounded once to dtype.

    dtype    float32, bfloat16 or float16
    raises   ValueError if a weight is too large for float16; TypeError for another dtype
    """
    return _int4_dequantize(*op_arguments(weight), dtype)


def op_arguments(weight: Int4Weight) -> tuple[Tensor | int | None, ...]:
    """A weight as the registered ops take it."""
    return weight.packed, weight.scales, weight.zeros, weight.g_idx, weight.in_features, weight.group_size


def int4_dequantize_into(weight: Int4Weight, out: Tensor) -> None:
    """`int4_dequantize` into an existing tensor, without a gradient.

    out     [out_features, in_features] float32, bfloat16 or float16, contiguous, on the weight's device
    raises  ValueError if it is not
    """
    check_out(out, torch.Size((weight.out_features, weight.in_features)), weight.device)
    implementation = _cpp.choose("integer", weight.device.type)
    if implementation == "reference":
        out.copy_(int4_dequantize_reference(weight, dtype=out.dtype))
    else:
        _IMPLEMENTATIONS[implementation][1](weight, dtype=out.dtype, out=out)
    check_float16_range(out)


def int4_linear(x: Tensor, weight: Int4Weight) -> Tensor:
    """y = x W^T with W dequantized and rounded to x's dtype; the gradient flows to x only, no dense weight is kept.

    x        [..., in_features] float32, bfloat16 or float16; sums are float32
    returns  [..., out_features] of x's dtype
    raises   ValueError if a size or device does not fit; TypeError for another dtype
    """
    return _int4_linear(x, *op_arguments(weight))
