"""y = x W^T in integer arithmetic: x in 8 bits, one scale per row, W in 4 or 8 bits (kernels/int4.py, kernels/int8.py).

    y[m, n] = s_x[m] * sum_g float32(sum_{k in g} x_code (code - zero)) * scale[n, g]
The inner sum is an exact int32; the outer one is float32, each product and each addition rounded, in ascending order of
g; s_x comes last. Every implementation keeps this order, so all give the same bits, with any number of threads, and a
row's bits do not depend on the other rows. y is rounded once to out_dtype; a bias is added to the rounded y and the sum
rounded again, as a training module does that adds it after the product. With out_dtype=float32 nothing else is rounded.

Why this is the fast way to multiply 4-bit weights on CPUs: a 512-bit VNNI instruction multiplies 64 bytes where its
bfloat16 sister multiplies 32 values, and 4-bit codes become bytes with one mask. The gradient is straight-through:
grad_x = grad_y W' with the dequantized W', as if x had not been rounded.

Layout. The ops take weights as they are stored, and lay out 32 output features at a time in scratch. `repack` does it
once, in memory only, for a server: panels, as cpp/integer_linear.cpp describes. The act-order of GPTQ (g_idx) becomes
an order in which x is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles
from trainer.kernels.int4 import SYMMETRIC_ZERO, Int4Weight, op_arguments, pack_int4, unpack_int4
from trainer.kernels.int8 import (
    CPP_DTYPES,
    DTYPE_IDS,
    Int8Weight,
    check_dtype,
    check_x,
    check_x_scale,
    quantize_activations_reference,
    quantize_activations_triton,
)

PANEL = 32
MAX_DYNAMIC_GROUP = 2**31 // (128 * 127)  # an int32 holds the sum of so many products
# BLOCK_M/N/K: K of the smallest group. Chosen for no spills on sm_80, sm_90, sm_100 and gfx942; not timed there yet.
PRODUCT_TILE = (32, 32, 32)


@dataclass(slots=True)
class IntegerPanels:
    """One weight, or several stacked along out_features, laid out for the C++ kernel; made by `repack`.

    codes   [panels, dwords, 32, 4] uint8: see cpp/integer_linear.cpp
    scales  [panels, groups, 32] float32
    zeros   [panels, groups, 32] uint8, or None: 8 (4 bits), 128 (8 bits, stored plus 128)
    order   [in_features] int32, or None: x is read as x[order[k]]
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    bits: int
    out_features: int
    in_features: int
    group_size: int

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.zeros, self.order) if t is not None)


# ---- layouts


def regroup(weight: Int4Weight) -> tuple[Int4Weight, Tensor | None]:
    """The weight with contiguous groups, and the order [in_features] int32 in which it takes x; None: as it is.

    raises  ValueError unless every group of g_idx has exactly group_size features
    """
    if weight.g_idx is None:
        return weight, None
    counts = torch.bincount(weight.g_idx, minlength=weight.num_groups)
    if counts.numel() != weight.num_groups or (counts != weight.group_size).any():
        raise ValueError(
            f"g_idx puts {counts.tolist()} features into its groups; each of {weight.num_groups} groups needs exactly "
            f"group_size={weight.group_size}; check the checkpoint's g_idx and group_size"
        )
    order = torch.argsort(weight.g_idx, stable=True)
    packed = pack_int4(unpack_int4(weight.packed, weight.in_features)[:, order])
    sizes = weight.out_features, weight.in_features, weight.group_size
    return Int4Weight(packed, weight.scales, weight.zeros, None, *sizes), order.to(torch.int32)


def _padded(in_features: int) -> int:
    return (in_features + 7) // 8 * 8


def repack_reference(weight: Int4Weight | Int8Weight) -> tuple[Tensor, Tensor, Tensor | None]:
    """codes, scales, zeros of `IntegerPanels`"""
    four_bits = isinstance(weight, Int4Weight)
    rows = weight.packed if four_bits else weight.packed.view(torch.uint8)
    num_bytes = _padded(weight.in_features) // (2 if four_bits else 1)
    features = -weight.out_features % PANEL
    codes = torch.nn.functional.pad(rows, (0, num_bytes - rows.shape[1], 0, features))
    codes = codes.view(-1, PANEL, num_bytes // 4, 4).transpose(1, 2).contiguous()

    def panels(grid: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(grid, (0, 0, 0, features))
        return padded.view(-1, PANEL, weight.num_groups).transpose(1, 2).contiguous()

    zeros = panels(weight.zeros) if four_bits and weight.zeros is not None else None
    return codes if four_bits else codes ^ 0x80, panels(weight.scales), zeros


def repack_cpu(weight: Int4Weight | Int8Weight) -> tuple[Tensor, Tensor, Tensor | None]:
    four_bits = isinstance(weight, Int4Weight)
    panels, dwords = -(-weight.out_features // PANEL), _padded(weight.in_features) // (8 if four_bits else 4)
    codes = torch.empty(panels, dwords, PANEL, 4, dtype=torch.uint8)
    scales = torch.empty(panels, weight.num_groups, PANEL)
    weight_zeros = weight.zeros if four_bits else None
    zeros = None if weight_zeros is None else torch.empty(scales.shape, dtype=torch.uint8)
    sizes = 4 if four_bits else 8, weight.out_features, weight.in_features, weight.group_size
    function = kernel("integer_linear", "integer_repack")
    call(function, weight.packed, weight.scales, weight_zeros, *sizes, codes, scales, zeros)
    return codes, scales, zeros


# ---- reference


def integer_product_reference(x_codes: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The formula above: codes x [M, K] and W [N, K], zeros subtracted, scales [M] and [N, groups]; [M, N] float32."""
    group_size = weight.shape[1] // scales.shape[1]
    total = torch.zeros(x_codes.shape[0], weight.shape[0], device=x_codes.device)
    for g in range(scales.shape[1]):
        group = slice(g * group_size, (g + 1) * group_size)
        sums = x_codes[:, group].double() @ weight[:, group].double().T  # integers below 2^53: exact
        total = total + sums.float() * scales[:, g]
    return total * x_scales[:, None]


def _codes_of(weight: Int4Weight | Int8Weight) -> Tensor:
    """[out_features, in_features] integers, zeros subtracted."""
    if isinstance(weight, Int8Weight):
        return weight.packed
    codes = unpack_int4(weight.packed, weight.in_features).to(torch.int16)
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.short().repeat_interleave(weight.group_size, 1)
    return codes - zeros


def linear_dynamic_reference(
    x: Tensor, weight: Int4Weight | Int8Weight, *, x_scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    order = None
    if isinstance(weight, Int4Weight):
        weight, order = regroup(weight)
    codes, scales = quantize_activations_reference(x, scale=x_scale)
    codes = codes if order is None else codes[:, order]
    return integer_product_reference(codes, scales, _codes_of(weight), weight.scales).to(out_dtype)


# ---- C++


def integer_linear_cpu(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    *,
    bits: int,
    panels: bool,
    out_features: int,
    group_size: int,
    x_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """x [M, K] contiguous; weight in panels or as it is stored."""
    num_rows, in_features = x.shape
    y = torch.empty(num_rows, out_features, dtype=out_dtype)
    if y.numel():
        row_bytes = ((in_features + 63) // 64 * 64 | 64) + 4 * (in_features // group_size) + 4
        scratch = torch.empty(num_rows * row_bytes, dtype=torch.uint8)
        call(
            kernel("integer_linear", "integer_linear"),
            x, DTYPE_IDS[x.dtype], num_rows, x_scale, order, codes, scales, zeros, bits, int(panels),
            out_features, in_features, group_size, bias, y, DTYPE_IDS[out_dtype], scratch,
        )  # fmt: skip
    return y


def linear_dynamic_cpu(
    x: Tensor, weight: Int4Weight | Int8Weight, *, x_scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    zeros, order, bits = None, None, 8
    if isinstance(weight, Int4Weight):
        weight, order = regroup(weight)
        zeros, bits = weight.zeros, 4
    # float16 widens to float32 without a loss; C++ writes x's dtype or float32
    wide = x.float() if x.dtype not in CPP_DTYPES else x
    y = integer_linear_cpu(
        wide.contiguous(), weight.packed, weight.scales, zeros, order, None,
        bits=bits, panels=False, out_features=weight.out_features, group_size=weight.group_size, x_scale=x_scale,
        out_dtype=out_dtype if out_dtype == wide.dtype else torch.float32,
    )  # fmt: skip
    return y.to(out_dtype)


# ---- Triton


@triton.jit
def _integer_product_kernel(
    codes_ptr, x_scales_ptr, packed_ptr, scales_ptr, zeros_ptr, y_ptr,
    num_rows, in_features, out_features, group_size, stride_packed_row,
    FOUR_BITS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    feature = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    num_groups = in_features // group_size
    feature_mask = feature < out_features
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for g in range(0, num_groups):
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + feature * num_groups + g, mask=feature_mask, other=0).to(tl.int8)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for start in range(0, group_size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x_mask = (row[:, None] < num_rows) & (k[None, :] < group_size)
            x_ptrs = codes_ptr + row[:, None] * in_features + g * group_size + k[None, :]
            x = tl.load(x_ptrs, mask=x_mask, other=0)  # zeros beyond the group: what weights are there does not matter
            if FOUR_BITS:
                byte = start // 2 + tl.arange(0, BLOCK_K // 2)
                mask = feature_mask[:, None] & (2 * byte[None, :] < group_size)
                packed_ptrs = packed_ptr + feature[:, None] * stride_packed_row + g * group_size // 2 + byte[None, :]
                packed = tl.load(packed_ptrs, mask=mask, other=0)
                code = tl.interleave(packed & 15, packed >> 4).to(tl.int8)  # [BLOCK_N, BLOCK_K]
                code = code - zero[:, None] if HAS_ZEROS else code - 8
            else:
                mask = feature_mask[:, None] & (k[None, :] < group_size)
                packed_ptrs = packed_ptr + feature[:, None] * stride_packed_row + g * group_size + k[None, :]
                code = tl.load(packed_ptrs, mask=mask, other=0)
            acc = tl.dot(x, tl.trans(code.to(tl.int8)), acc, out_dtype=tl.int32)
        scale = tl.load(scales_ptr + feature * num_groups + g, mask=feature_mask, other=0.0)
        total += acc.to(tl.float32) * scale[None, :]
    x_scale = tl.load(x_scales_ptr + row, mask=row < num_rows, other=0.0)
    y_ptrs = y_ptr + row[:, None] * out_features + feature[None, :]
    y = (total * x_scale[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptrs, y, mask=(row[:, None] < num_rows) & feature_mask[None, :])


def linear_dynamic_triton(
    x: Tensor, weight: Int4Weight | Int8Weight, *, x_scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    zeros, order, four_bits = None, None, isinstance(weight, Int4Weight)
    if four_bits:
        weight, order = regroup(weight)
        zeros = weight.zeros
    codes, scales = quantize_activations_triton(x, scale=x_scale, order=order)
    y = torch.empty(x.shape[0], weight.out_features, dtype=out_dtype, device=x.device)
    default = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), PRODUCT_TILE, strict=True))
    tile = tiles("integer_linear", x.device, default, bits=4 if four_bits else 8)
    grid = triton.cdiv(x.shape[0], tile["BLOCK_M"]), triton.cdiv(weight.out_features, tile["BLOCK_N"])
    if y.numel():
        _integer_product_kernel[grid](
            codes, scales, weight.packed, weight.scales, zeros, y, x.shape[0], weight.in_features, weight.out_features,
            weight.group_size, weight.packed.stride(0), FOUR_BITS=four_bits, HAS_ZEROS=zeros is not None,
            **tile, enable_fp_fusion=False,
        )  # fmt: skip
    return y


# ---- registered ops

_IMPLEMENTATIONS = {
    "reference": linear_dynamic_reference,
    "cpu": linear_dynamic_cpu,
    "triton": linear_dynamic_triton,
}


def _linear_dynamic(
    x: Tensor, weight: Int4Weight | Int8Weight, x_scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    check_x(x, weight.in_features, weight.device)
    check_dtype("out_dtype", out_dtype)
    check_x_scale(x_scale, x.device)
    if weight.group_size > MAX_DYNAMIC_GROUP:
        raise ValueError(
            f"group_size={weight.group_size}; sums of more than {MAX_DYNAMIC_GROUP} products may exceed 32 bits; use "
            "smaller groups, or a 16-bit x"
        )
    linear = _IMPLEMENTATIONS[_cpp.choose("integer_linear", x.device.type)]
    y = linear(x.reshape(-1, weight.in_features), weight, x_scale=x_scale, out_dtype=out_dtype)
    return y.view(*x.shape[:-1], weight.out_features)


@torch.library.custom_op("lowbit::int4_linear_dynamic", mutates_args=())
def _int4_linear_dynamic(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    in_features: int,
    group_size: int,
    x_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    weight = Int4Weight(packed, scales, zeros, g_idx, packed.shape[0], in_features, group_size)
    return _linear_dynamic(x, weight, x_scale, out_dtype)


@_int4_linear_dynamic.register_fake
def _(x, packed, scales, zeros, g_idx, in_features, group_size, x_scale, out_dtype) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0], dtype=out_dtype)


def _setup_int4(ctx, inputs, output) -> None:
    x, *weight, ctx.in_features, ctx.group_size, _, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(*weight)


def _int4_backward(ctx, grad: Tensor):
    dense = torch.ops.lowbit.int4_dequantize(*ctx.saved_tensors, ctx.in_features, ctx.group_size, ctx.dtype)
    return grad.to(ctx.dtype) @ dense, None, None, None, None, None, None, None, None


_int4_linear_dynamic.register_autograd(_int4_backward, setup_context=_setup_int4)


@torch.library.custom_op("lowbit::int8_linear_dynamic", mutates_args=())
def _int8_linear_dynamic(
    x: Tensor, packed: Tensor, scales: Tensor, group_size: int, x_scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return _linear_dynamic(x, Int8Weight(packed, scales, *packed.shape, group_size), x_scale, out_dtype)


@_int8_linear_dynamic.register_fake
def _(x, packed, scales, group_size, x_scale, out_dtype) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0], dtype=out_dtype)


def _setup_int8(ctx, inputs, output) -> None:
    x, packed, scales, ctx.group_size, _, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(packed, scales)


def _int8_backward(ctx, grad: Tensor):
    dense = torch.ops.lowbit.int8_dequantize(*ctx.saved_tensors, ctx.group_size, ctx.dtype)
    return grad.to(ctx.dtype) @ dense, None, None, None, None, None


_int8_linear_dynamic.register_autograd(_int8_backward, setup_context=_setup_int8)


# ---- what the rest of the product calls


def int4_linear_dynamic(
    x: Tensor, weight: Int4Weight, *, x_scale: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y = x W^T with x rounded to 8 bits per row, exact integer sums, one rounding of y; formula and gradient: above.

    x          [..., in_features] float32, bfloat16 or float16
    x_scale    [] float32: the static scale of all rows; None: max |x| / 127 of each row
    out_dtype  of y; None: x's
    returns    [..., out_features]; a row with inf or nan in x is nan
    raises     ValueError if a size, device or group does not fit; TypeError for another dtype
    """
    return _int4_linear_dynamic(x, *op_arguments(weight), x_scale, out_dtype or x.dtype)


def int8_linear_dynamic(
    x: Tensor, weight: Int8Weight, *, x_scale: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`int4_linear_dynamic` with 8-bit weights."""
    return _int8_linear_dynamic(x, weight.packed, weight.scales, weight.group_size, x_scale, out_dtype or x.dtype)


def repack(weight: Int4Weight | Int8Weight | Sequence[Int4Weight | Int8Weight]) -> IntegerPanels:
    """A weight for `integer_linear`, or several stacked along out_features, as for a fused q, k, v; on a CPU.

    raises  ValueError if the weights differ in bits, in_features, group_size, symmetry or g_idx, or if g_idx has groups
            of other sizes than group_size
    """
    weights = [weight] if isinstance(weight, Int4Weight | Int8Weight) else list(weight)
    stacked, order = _stack(weights)
    pack = repack_cpu if _cpp.choose("integer_linear", "cpu") == "cpu" else repack_reference
    bits = 4 if isinstance(stacked, Int4Weight) else 8
    return IntegerPanels(*pack(stacked), order, bits, stacked.out_features, stacked.in_features, stacked.group_size)


def _stack(weights: list[Int4Weight | Int8Weight]) -> tuple[Int4Weight | Int8Weight, Tensor | None]:
    def kind(weight: Int4Weight | Int8Weight) -> tuple:
        zeros, g_idx = getattr(weight, "zeros", None), getattr(weight, "g_idx", None)
        order = None if g_idx is None else tuple(g_idx.tolist())
        return type(weight).__name__, weight.in_features, weight.group_size, zeros is not None, order

    kinds = {kind(weight) for weight in weights}
    if len(kinds) != 1 or any(weight.device.type != "cpu" for weight in weights):
        seen = sorted(f"{name} of {k} features in groups of {g}" for name, k, g, _, _ in kinds)
        raise ValueError(
            f"{len(weights)} weights do not stack on a cpu: {seen}; they need the same bits, in_features, group_size, "
            "symmetry and g_idx, on a cpu"
        )
    first = weights[0]
    packed, scales = (torch.cat([getattr(w, name) for w in weights]) for name in ("packed", "scales"))
    if isinstance(first, Int8Weight):
        return Int8Weight(packed, scales, packed.shape[0], first.in_features, first.group_size), None
    zeros = None if first.zeros is None else torch.cat([weight.zeros for weight in weights])
    return regroup(Int4Weight(packed, scales, zeros, first.g_idx, packed.shape[0], first.in_features, first.group_size))


def integer_linear(
    x: Tensor,
    weight: IntegerPanels,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`int4_linear_dynamic` or `int8_linear_dynamic` over a repacked weight, for a server: no gradient, recordable.

    x          [num_tokens, in_features] float32 or bfloat16, contiguous, on a CPU
    bias       [out_features] of x's dtype
    x_scale    [] float32, or None: one scale a row
    out_dtype  x's (None) or float32
    returns    [num_tokens, out_features]; the same bits as the op, then round(y + bias)
    raises     ValueError if a shape or dtype does not fit
    """
    out_dtype = out_dtype or x.dtype
    _check(x, weight, bias, out_dtype)
    check_x_scale(x_scale, x.device)
    sizes = {"out_features": weight.out_features, "group_size": weight.group_size}
    tensors = weight.codes, weight.scales, weight.zeros, weight.order, bias
    if _cpp.choose("integer_linear", "cpu") == "cpu":
        options = {"bits": weight.bits, "panels": True, "x_scale": x_scale, "out_dtype": out_dtype}
        return integer_linear_cpu(x, *tensors, **sizes, **options)
    codes, scales = quantize_activations_reference(x, scale=x_scale)
    codes = codes if weight.order is None else codes[:, weight.order]
    original = unpack_panels(weight)
    y = integer_product_reference(codes, scales, _codes_of(original), original.scales).to(out_dtype)
    return y if bias is None else y + bias.to(out_dtype)


def unpack_panels(weight: IntegerPanels) -> Int4Weight | Int8Weight:
    """The weight behind panels, with contiguous groups: x must be read in `weight.order`."""

    def rows(panels: Tensor) -> Tensor:
        return panels.transpose(1, 2).reshape(-1, panels.shape[1])[: weight.out_features].contiguous()

    codes = weight.codes.transpose(1, 2).reshape(-1, weight.codes.shape[1] * 4)[: weight.out_features]
    sizes = weight.out_features, weight.in_features, weight.group_size
    if weight.bits == 8:
        packed = (codes ^ 0x80)[:, : weight.in_features].contiguous().view(torch.int8)
        return Int8Weight(packed, rows(weight.scales), *sizes)
    zeros = None if weight.zeros is None else rows(weight.zeros)
    packed = codes[:, : (weight.in_features + 1) // 2].contiguous()
    return Int4Weight(packed, rows(weight.scales), zeros, None, *sizes)


def _check(x: Tensor, weight: IntegerPanels, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype not in CPP_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; this weight takes contiguous float32 or "
            f"bfloat16 [num_tokens, {weight.in_features}]; reshape or convert x"
        )
    if not x.is_cpu:
        raise ValueError(f"x is on {x.device}; panels are for CPUs; use int4_linear_dynamic or int8_linear_dynamic")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (weight.out_features,)):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; x needs {x.dtype} [{weight.out_features}]")
    if out_dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out_dtype={out_dtype}; use {x.dtype} or torch.float32")
