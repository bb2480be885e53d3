"""INT8: weights with a scale per output row or group, activations with a scale per token, and y = x W^T over 16-bit x.

Grid of weights (symmetric; arXiv:2103.13630, section III):
    scale[n, g] = max |w| over the group / 127     rounded to scale_dtype before any code is chosen; 0 becomes 1
    code        = clamp(round_half_even(w / scale), -127, 127)      a true division, in float32
    w'          = code * scale, computed in float32, rounded once to the dtype asked for
    bytes       packed [out_features, in_features] int8; scales [out_features, in_features / group_size] float32
A row of zeros has scale 1 and codes 0. Code -128 is never made and is read correctly.

Grid of activations, per token (row of x) and symmetric: the same with s_x = max |x| / 127 over the row, or with a given
(static) scale. A row with inf or nan has scale nan and codes 0, so that its whole y is nan.

`int8_linear` multiplies x by w' rounded to x's dtype, with float32 sums: few rows decode beside the products, more rows
multiply a dense copy. Products in integer arithmetic: kernels/integer_linear.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles
from trainer.kernels.split_k import MIN_SPAN, dot_dtype, launch_split, span, store_split

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP_SIZES = (32, 64, 128)  # the usual ones; any multiple of the first that divides in_features, or in_features
QUANT_MAX = 127
CPP_DTYPES = (torch.float32, torch.bfloat16)
# Up to so many rows decode weights beside the products; more multiply a dense copy. 4096x4096, INT4 in groups of 32, 2
# Zen 4 cores: 8 rows take 1.5 ms fused; 9 rows through a dense bfloat16 copy 18 ms.
MAX_FUSED_ROWS = 16
# Of the fused linear by size of a float; weights a program dequantizes; features of an activation that a program reads
# at a time. Chosen for no spills on sm_80, sm_90, sm_100 and gfx942; not timed there yet.
LINEAR_TILES = {
    2: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "PROGRAMS": 512},
    4: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "PROGRAMS": 512},
}
NUM_WEIGHTS = 2048
NUM_FEATURES = 1024
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # cpp/lowbit.h


@dataclass(slots=True)
class Int8Weight:
    """A weight of 8-bit codes as one argument; sizes are checked here, before a pointer leaves Python.

    packed      [out_features, in_features] int8
    scales      [out_features, in_features / group_size] float32
    group_size  a multiple of 32, such as 32, 64 or 128, or in_features (one scale per row)
    raises      ValueError if group_size or a size is wrong
    """

    packed: Tensor
    scales: Tensor
    out_features: int
    in_features: int
    group_size: int

    def __post_init__(self) -> None:
        check_group_size(self.group_size, self.in_features)
        shape = f"a [{self.out_features}, {self.in_features}] weight in groups of {self.group_size}"
        check_buffer("packed", self.packed, torch.int8, (self.out_features, self.in_features), shape)
        check_buffer("scales", self.scales, torch.float32, (self.out_features, self.num_groups), shape)

    @property
    def num_groups(self) -> int:
        return self.in_features // self.group_size

    @property
    def device(self) -> torch.device:
        return self.packed.device


# ---- checks shared by int4 and int8


def check_group_size(group_size: int, in_features: int) -> None:
    if in_features < 1:
        raise ValueError(f"in_features={in_features}; a quantized weight has at least 1 input feature")
    usual = group_size > 0 and group_size % GROUP_SIZES[0] == 0
    if not (usual or group_size == in_features) or in_features % group_size:
        fitting = [size for size in GROUP_SIZES if in_features % size == 0 and size != in_features]
        use = ", ".join(map(str, [*fitting, in_features]))
        raise ValueError(
            f"group_size={group_size} is neither a multiple of 32 nor in_features, or does not divide "
            f"in_features={in_features}; use {use}"
        )


def check_buffer(name: str, buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...], weight: str) -> None:
    if buffer.dtype != dtype or tuple(buffer.shape) != shape or not buffer.is_contiguous():
        raise ValueError(
            f"{name} is {buffer.dtype} {tuple(buffer.shape)}; {weight} needs contiguous {dtype} {shape}; "
            "check out_features, in_features and group_size"
        )


def check_scale_dtype(scale_dtype: torch.dtype) -> None:
    if scale_dtype not in SCALE_DTYPES:
        raise TypeError(f"scale_dtype is {scale_dtype}; use one of {', '.join(map(str, SCALE_DTYPES))}")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"{name} is {dtype}; use one of {', '.join(map(str, DTYPES))}")


def check_weight(weight: Tensor) -> None:
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight is {weight.dtype} {tuple(weight.shape)}; quantization takes floats [out_features, in_features]"
        )


def raise_not_finite(weight: Tensor) -> None:
    row, column = (~torch.isfinite(weight)).nonzero()[0].tolist()
    raise ValueError(
        f"weight[{row}, {column}] is {weight[row, column].item()}; quantization needs finite weights; look for a "
        "damaged checkpoint or a diverged training run"
    )


def check_scales(scales: Tensor, scale_dtype: torch.dtype) -> None:
    """raises ValueError where a scale of finite weights is too large for its dtype"""
    if not torch.isfinite(scales).all():
        row, group = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise ValueError(
            f"the scale of row {row}, group {group} exceeds {scale_dtype}'s {torch.finfo(scale_dtype).max:g}; use a "
            "wider scale_dtype, or look for weights that diverged"
        )


def rounded_scales(scales: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Rounded to scale_dtype, kept as float32; 0, from zeros or from weights too small for it, becomes 1."""
    scales = scales.to(scale_dtype).float()
    return torch.where(scales == 0, 1.0, scales)


def divide(value: Tensor, divisor: float) -> Tensor:
    """A true division: on GPUs torch multiplies by the reciprocal of a Python number."""
    return value / value.new_full((), divisor)


def check_x(x: Tensor, in_features: int, device: torch.device) -> None:
    check_dtype("x", x.dtype)
    if x.dim() < 1 or x.shape[-1] != in_features or x.device != device:
        raise ValueError(
            f"x is {tuple(x.shape)} on {x.device}; this weight takes [..., {in_features}] on {device}; check "
            "in_features or move x"
        )


def check_x_scale(scale: Tensor | None, device: torch.device) -> None:
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device):
        raise ValueError(
            f"the scale of x is {scale.dtype} {tuple(scale.shape)} on {scale.device}; use one float32 on {device}"
        )


def check_out(out: Tensor, shape: torch.Size, device: torch.device) -> None:
    check_dtype("out", out.dtype)
    if out.shape != shape or not out.is_contiguous() or out.device != device:
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()} on {out.device}; the weight needs it contiguous, "
            f"{tuple(shape)} on {device}"
        )


def check_float16_range(dense: Tensor) -> None:
    if dense.dtype == torch.float16 and not torch.isfinite(dense).all():
        row, column = (~torch.isfinite(dense)).nonzero()[0].tolist()
        raise ValueError(f"weight[{row}, {column}] exceeds float16's 65504, use bfloat16 or float32")


# ---- reference


def int8_quantize_reference(weight: Tensor, *, group_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    groups = weight.float().reshape(weight.shape[0], -1, group_size)
    absmax = groups.abs().amax(2)
    if not torch.isfinite(absmax).all():
        raise_not_finite(weight)
    scales = rounded_scales(divide(absmax, QUANT_MAX), scale_dtype)
    check_scales(scales, scale_dtype)
    codes = (groups / scales[:, :, None]).round().clamp(-QUANT_MAX, QUANT_MAX)
    return codes.to(torch.int8).view(weight.shape), scales


def int8_dequantize_reference(weight: Int8Weight, *, dtype: torch.dtype) -> Tensor:
    groups = weight.packed.view(weight.out_features, -1, weight.group_size).float() * weight.scales[:, :, None]
    return groups.view(weight.packed.shape).to(dtype)


def quantize_activations_reference(x: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide = x.float()
    if scale is None:
        absmax = wide.abs().amax(-1)
        scales = divide(absmax, QUANT_MAX)
        scales = torch.where(scales == 0, 1.0, torch.where(torch.isfinite(scales), scales, torch.nan))
    else:
        finite = torch.isfinite(wide).all(-1)
        scales = torch.where(finite, scale.float(), torch.nan)
    codes = (wide / scales[..., None]).nan_to_num(nan=0.0).round().clamp(-QUANT_MAX, QUANT_MAX)
    return codes.to(torch.int8), scales


def int8_linear_reference(x: Tensor, weight: Int8Weight) -> Tensor:
    return x @ int8_dequantize_reference(weight, dtype=x.dtype).T


# ---- C++


def int8_quantize_cpu(weight: Tensor, *, group_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size)
    if not quantize_in_cpp(weight, 8, True, QUANT_MAX, scale_dtype, group_size, packed, scales, None):
        return int8_quantize_reference(weight, group_size=group_size, scale_dtype=scale_dtype)  # names what is wrong
    return packed, scales


def quantize_in_cpp(
    weight: Tensor,
    bits: int,
    symmetric: bool,
    divisor: float,
    scale_dtype: torch.dtype,
    group_size: int,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
) -> bool:
    """Whether the weights and their scales are finite; otherwise what was written has no meaning."""
    source = (weight if weight.dtype in CPP_DTYPES else weight.float()).contiguous()
    status = torch.empty(1, dtype=torch.int64)
    options = bits, int(symmetric), float(divisor), DTYPE_IDS[scale_dtype]
    dtype = DTYPE_IDS[source.dtype]
    function = kernel("integer", "integer_quantize")
    call(function, source, dtype, *source.shape, group_size, *options, packed, scales, zeros, status)
    return not status.item()


def int8_dequantize_cpu(weight: Int8Weight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if dtype not in CPP_DTYPES:
        return int8_dequantize_reference(weight, dtype=dtype)
    out = torch.empty(weight.packed.shape, dtype=dtype) if out is None else out
    call(kernel("integer", "integer_dequantize"), *_arguments(weight), out, DTYPE_IDS[dtype])
    return out


def int8_linear_cpu(x: Tensor, weight: Int8Weight) -> Tensor:
    if x.dtype not in CPP_DTYPES or not 0 < x.numel() // weight.in_features <= MAX_FUSED_ROWS:
        dense = int8_dequantize_cpu(weight, dtype=x.dtype)
        check_float16_range(dense)
        return x @ dense.T
    return few_rows_in_cpp(x, weight.out_features, _arguments(weight))


def few_rows_in_cpp(x: Tensor, out_features: int, weight: tuple[Tensor | int | None, ...]) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], out_features)
    call(kernel("integer", "integer_few_rows"), *weight, x, y, DTYPE_IDS[x.dtype], x.numel() // x.shape[-1])
    return y


def _arguments(weight: Int8Weight) -> tuple[Tensor | int | None, ...]:
    """As cpp/integer.cpp reads a weight."""
    return weight.packed, weight.scales, None, 8, weight.out_features, weight.in_features, weight.group_size


def quantize_activations_cpu(x: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    source = (x if x.dtype in CPP_DTYPES else x.float()).contiguous()
    codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[:-1])
    function = kernel("integer_linear", "quantize_activations")
    call(function, source, DTYPE_IDS[source.dtype], scales.numel(), x.shape[-1], scale, codes, scales)
    return codes, scales


# ---- Triton


@triton.jit
def _int8_dequantize_kernel(
    packed_ptr, scales_ptr, out_ptr, numel, in_features, group_size, NUM_WEIGHTS: tl.constexpr
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * NUM_WEIGHTS + tl.arange(0, NUM_WEIGHTS)
    mask = element < numel
    code = tl.load(packed_ptr + element, mask=mask, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + element // group_size, mask=mask, other=0.0)  # groups do not cross rows
    tl.store(out_ptr + element, (code * scale).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _int8_linear_kernel(
    x_ptr, packed_ptr, scales_ptr, y_ptr,
    num_rows, in_features, out_features, group_size, num_groups, features_per_split, stride_x_row,
    SPAN: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [splits, num_rows, out_features]: what each part of in_features adds. SPAN weights share a group."""
    SPANS: tl.constexpr = BLOCK_K // SPAN
    feature = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    span_k = tl.arange(0, SPANS) * SPAN
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = split * features_per_split
    for start in range(begin, tl.minimum(begin + features_per_split, in_features), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (row < num_rows)[:, None] & (k < in_features)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x_row + k[None, :], mask=x_mask, other=0.0).to(tl.float32).to(DOT)
        k = start + span_k[None, :, None] + tl.arange(0, SPAN)[None, None, :]
        mask = (k < in_features) & (feature < out_features)[:, None, None]
        code = tl.load(packed_ptr + feature[:, None, None] * in_features + k, mask=mask, other=0).to(tl.float32)
        k = start + span_k
        group = feature[:, None] * num_groups + k[None, :] // group_size
        group_mask = (k < in_features)[None, :] & (feature < out_features)[:, None]
        scale = tl.load(scales_ptr + group, mask=group_mask, other=0.0)[:, :, None]
        dense = tl.reshape((code * scale).to(x_ptr.dtype.element_ty).to(DOT), (BLOCK_N, BLOCK_K))
        acc = tl.dot(x, tl.trans(dense), acc, input_precision="ieee")
    store_split(y_ptr, acc, split, row, feature, num_rows, out_features)


@triton.jit
def _quantize_activations_kernel(
    x_ptr, given_scale_ptr, order_ptr, codes_ptr, scales_ptr, in_features, stride_x_row, NUM_FEATURES: tl.constexpr
):  # fmt: skip
    """A program quantizes a row; codes[k] is of x[order[k]]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, NUM_FEATURES)
    # As integers the bits of |x| sort like the numbers, with inf and nan on top: tl.max alone would drop nan.
    bits = tl.zeros((NUM_FEATURES,), dtype=tl.int32)
    for start in range(0, in_features, NUM_FEATURES):
        x = tl.load(x_ptr + row * stride_x_row + start + column, mask=start + column < in_features, other=0.0)
        bits = tl.maximum(bits, x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(bits, axis=0)
    finite = bits < 0x7F800000
    if given_scale_ptr is None:
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
        scale = tl.where(scale == 0, 1.0, scale)
    else:
        scale = tl.load(given_scale_ptr)
    tl.store(scales_ptr + row, tl.where(finite, scale, float("nan")))
    for start in range(0, in_features, NUM_FEATURES):
        k = start + column
        mask = k < in_features
        source = k if order_ptr is None else tl.load(order_ptr + k, mask=mask, other=0)
        x = tl.load(x_ptr + row * stride_x_row + source, mask=mask, other=0.0).to(tl.float32)
        code = tl.div_rn(tl.where(finite, x, 0.0), tl.zeros_like(x) + tl.where(finite, scale, 1.0))
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        code = (code + 12582912.0 - 12582912.0).to(tl.int8)  # 1.5 * 2^23: the sum rounds half to even
        tl.store(codes_ptr + row * in_features + k, code, mask=mask)


def quantize_activations_triton(
    x: Tensor, *, scale: Tensor | None = None, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """order  [in_features] int32, or None: codes are those of x[..., order]"""
    in_features = x.shape[-1]
    rows = x.reshape(-1, in_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if codes.numel():
        _quantize_activations_kernel[(rows.shape[0],)](
            rows, scale, order, codes, scales, in_features, rows.stride(0),
            NUM_FEATURES=min(NUM_FEATURES, triton.next_power_of_2(in_features)), enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


def int8_dequantize_triton(weight: Int8Weight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    out = torch.empty(weight.packed.shape, dtype=dtype, device=weight.device) if out is None else out
    if out.numel():
        tile = tiles("int8_dequantize", out.device, {"NUM_WEIGHTS": NUM_WEIGHTS}, itemsize=out.element_size())
        _int8_dequantize_kernel[(triton.cdiv(out.numel(), tile["NUM_WEIGHTS"]),)](
            weight.packed, weight.scales, out, out.numel(), weight.in_features, weight.group_size, **tile
        )
    return out


def int8_linear_triton(x: Tensor, weight: Int8Weight) -> Tensor:
    rows = x.reshape(-1, weight.in_features).contiguous()
    if not 0 < rows.shape[0] <= MAX_FUSED_ROWS or weight.in_features % MIN_SPAN:
        return x @ int8_dequantize_triton(weight, dtype=x.dtype).T
    tile = tiles("int8_linear", x.device, LINEAR_TILES[x.element_size()], itemsize=x.element_size())
    y = launch_split(
        _int8_linear_kernel, tile, rows, (weight.packed, weight.scales), weight.out_features,
        weight.group_size, weight.num_groups, DOT=dot_dtype(x.dtype),
        span=span(weight.in_features, weight.group_size, tile["BLOCK_K"]),
    )  # fmt: skip
    return y.view(*x.shape[:-1], weight.out_features)


# ---- registered ops

# Weights are quantized once, so torch's own kernels do it on GPUs.
_IMPLEMENTATIONS = {
    "reference": (int8_quantize_reference, int8_dequantize_reference, int8_linear_reference),
    "cpu": (int8_quantize_cpu, int8_dequantize_cpu, int8_linear_cpu),
    "triton": (int8_quantize_reference, int8_dequantize_triton, int8_linear_triton),
}


@torch.library.custom_op("lowbit::int8_quantize", mutates_args=())
def _int8_quantize(weight: Tensor, group_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    quantize = _IMPLEMENTATIONS[_cpp.choose("integer", weight.device.type)][0]
    return quantize(weight, group_size=group_size, scale_dtype=scale_dtype)


@_int8_quantize.register_fake
def _(weight: Tensor, group_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = weight.new_empty(weight.shape[0], weight.shape[1] // group_size, dtype=torch.float32)
    return weight.new_empty(weight.shape, dtype=torch.int8), scales


@torch.library.custom_op("lowbit::int8_dequantize", mutates_args=())
def _int8_dequantize(packed: Tensor, scales: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    check_dtype("dtype", dtype)
    weight = Int8Weight(packed, scales, *packed.shape, group_size)
    dense = _IMPLEMENTATIONS[_cpp.choose("integer", packed.device.type)][1](weight, dtype=dtype)
    check_float16_range(dense)
    return dense


@_int8_dequantize.register_fake
def _(packed: Tensor, scales: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(packed.shape, dtype=dtype)


@torch.library.custom_op("lowbit::int8_linear", mutates_args=())
def _int8_linear(x: Tensor, packed: Tensor, scales: Tensor, group_size: int) -> Tensor:
    weight = Int8Weight(packed, scales, *packed.shape, group_size)
    check_x(x, weight.in_features, weight.device)
    return _IMPLEMENTATIONS[_cpp.choose("integer", x.device.type)][2](x, weight)


@_int8_linear.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, group_size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _setup_context(ctx, inputs, output) -> None:
    x, packed, scales, ctx.group_size = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(packed, scales)


def _backward(ctx, grad: Tensor):
    dense = torch.ops.lowbit.int8_dequantize(*ctx.saved_tensors, ctx.group_size, ctx.dtype)
    return grad @ dense, None, None, None


_int8_linear.register_autograd(_backward, setup_context=_setup_context)


_QUANTIZE_ACTIVATIONS = {
    "reference": quantize_activations_reference,
    "cpu": quantize_activations_cpu,
    "triton": quantize_activations_triton,
}


@torch.library.custom_op("lowbit::quantize_activations", mutates_args=())
def _quantize_activations(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return _QUANTIZE_ACTIVATIONS[_cpp.choose("integer_linear", x.device.type)](x, scale=scale)


@_quantize_activations.register_fake
def _(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


# ---- what the rest of the product calls


def int8_quantize(
    weight: Tensor, *, group_size: int | None = None, scale_dtype: torch.dtype = torch.float32
) -> Int8Weight:
    """Quantize a weight to 8 bits, round to nearest, with the grid of the module's docstring.

    weight       [out_features, in_features] float, any strides; computed in float32
    group_size   a multiple of 32 or in_features; None: in_features, one scale per row
    scale_dtype  float32, bfloat16 or float16: scales are rounded to it, and stored as float32
    raises       ValueError if group_size does not fit, if a weight is inf or nan (names it), or if a scale is too large
                 for scale_dtype; TypeError for another scale_dtype
    """
    check_weight(weight)
    check_scale_dtype(scale_dtype)
    group_size = weight.shape[1] if group_size is None else group_size
    check_group_size(group_size, weight.shape[1])
    return Int8Weight(*_int8_quantize(weight.detach(), group_size, scale_dtype), *weight.shape, group_size)


def int8_dequantize(weight: Int8Weight, *, dtype: torch.dtype) -> Tensor:
    """The dense weight [out_features, in_features]: code * scale in float32, rounded once to dtype.

    dtype    float32, bfloat16 or float16
    raises   ValueError if a weight is too large for float16; TypeError for another dtype
    """
    return _int8_dequantize(weight.packed, weight.scales, weight.group_size, dtype)


def int8_dequantize_into(weight: Int8Weight, out: Tensor) -> None:
    """`int8_dequantize` into an existing tensor, without a gradient.

    out     [out_features, in_features] float32, bfloat16 or float16, contiguous, on the weight's device
    raises  ValueError if it is not
    """
    check_out(out, weight.packed.shape, weight.device)
    implementation = _cpp.choose("integer", weight.device.type)
    if implementation == "reference" or (implementation == "cpu" and out.dtype not in CPP_DTYPES):
        out.copy_(int8_dequantize_reference(weight, dtype=out.dtype))
    else:
        _IMPLEMENTATIONS[implementation][1](weight, dtype=out.dtype, out=out)
    check_float16_range(out)


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """y = x W^T with W dequantized and rounded to x's dtype; the gradient flows to x only, no dense weight is kept.

    x        [..., in_features] float32, bfloat16 or float16; sums are float32
    returns  [..., out_features] of x's dtype
    raises   ValueError if a size or device does not fit; TypeError for another dtype
    """
    return _int8_linear(x, weight.packed, weight.scales, weight.group_size)


def quantize_activations(x: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize each row of x to 8 bits, symmetric, with a scale of its own or a given one; without a gradient.

    x        [..., in_features] float32, bfloat16 or float16; computed in float32
    scale    [] float32, positive: the static scale of every row; values outside of 127 * scale are clamped
    returns  codes [..., in_features] int8 in -127..127; scales [...] float32, nan where a row has inf or nan
    raises   ValueError if scale is not one float32 on x's device; TypeError for another dtype
    """
    check_dtype("x", x.dtype)
    check_x_scale(scale, x.device)
    return _quantize_activations(x.detach(), scale)
