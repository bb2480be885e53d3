"""Quantize and dequantize in one pass, and the gradient through it: what quantization-aware training runs.

Formula. The last dimension is cut into groups; a group has one scale s and one zero point z:
    symmetric    s = max |x| / divisor                         z = 0
    asymmetric   s = (max(x, 0) - min(x, 0)) / 15              z = clamp(round(-min(x, 0) / s), 0, 15)
    code = clamp(round(x / s) + z, quant_min, quant_max)
    x'   = (code - z) * s                                      rounded once to x's dtype
That is int4_dequantize(int4_quantize(x)), int8_dequantize(int8_quantize(x)) or what quantize_activations stands for,
bit for bit. kernels/int4.py and int8.py define the grid (how scales are rounded, ties, groups of zeros): the reference
here calls them, and tests hold the other implementations to it. The codes themselves are never written.

Gradient. Rounding counts as the identity (arXiv:1308.3432, section 4) and a scale from the data as a constant:
    dx = g where the code was not clamped, else 0
The mask is computed from x again in backward, and x is a parameter or kept by the layer anyway: nothing is stored.
Where the largest value is itself a code (divisor <= quant_max) nothing is clamped, and dx is g without a pass.

Learned scales (LSQ, arXiv:1902.08153, equations 1-5 and section 2.2): s is a parameter and z a constant;
    ds = factor * sum over the group of g * (round(x / s) - x / s, or code - z where clamped)
    factor = 1 / sqrt(group_size * quant_max)
Clamped is a code, as above. The paper takes x / s > quant_max, half a step earlier: with scales that start at
max |x| / quant_max, rounding noise would decide there about the largest value of every group.

Inf and nan make their group nan (with learned scales, themselves), and so does a scale that is no positive number, on
every device: a check that raises would stall a GPU, and a loss of nan tells as well.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call_beside_torch, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles
from trainer.kernels.int4 import (
    DIVISORS,
    Int4Weight,
    int4_codes,
    int4_dequantize_reference,
    int4_quantize,
    int4_quantize_reference,
    int4_scales,
    pack_int4,
)
from trainer.kernels.int8 import (
    Int8Weight,
    check_dtype,
    check_group_size,
    check_scale_dtype,
    int8_dequantize_reference,
    int8_quantize,
    int8_quantize_reference,
)

MAX_BLOCK_K, TILE = 1024, 2048  # values of a group, and of all groups, that a Triton program holds; not timed yet
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # see cpp/lowbit.h


@dataclass(frozen=True, slots=True)
class Grid:
    """Which values a tensor can take; made by `Grid.int4` and `Grid.int8`.

    bits         4 or 8
    group_size   values that share a scale, along the last dimension; None: all of it
    symmetric    no zero point; always for 8 bits
    divisor      what the largest value of a symmetric group is divided by for the scale; the number of steps, 15,
                 for asymmetric ones
    scale_dtype  what scales are rounded to before codes are chosen
    raises       ValueError or TypeError naming what is not accepted
    """

    bits: int
    group_size: int | None
    symmetric: bool
    divisor: float
    scale_dtype: torch.dtype

    def __post_init__(self) -> None:
        check_scale_dtype(self.scale_dtype)
        accepted = {(4, True): DIVISORS, (4, False): (15.0,), (8, True): (127.0,)}.get((self.bits, self.symmetric))
        if accepted is None:
            raise ValueError(f"bits={self.bits}, symmetric={self.symmetric}: use 4 bits, or 8 bits and symmetric")
        if self.divisor not in accepted:
            raise ValueError(f"divisor={self.divisor} for bits={self.bits}, symmetric={self.symmetric}; use {accepted}")

    @classmethod
    def int4(
        cls,
        *,
        group_size: int | None = None,
        symmetric: bool = True,
        divisor: float = 7.0,
        scale_dtype: torch.dtype = torch.float32,
    ) -> "Grid":
        """The grid of `int4_quantize` with the same arguments; `divisor` is for symmetric groups."""
        return cls(4, group_size, symmetric, divisor if symmetric else 15.0, scale_dtype)

    @classmethod
    def int8(cls, *, group_size: int | None = None, scale_dtype: torch.dtype = torch.float32) -> "Grid":
        """The grid of `int8_quantize` with the same arguments; with none, also that of `quantize_activations`."""
        return cls(8, group_size, True, 127.0, scale_dtype)

    @property
    def range(self) -> tuple[int, int]:
        """quant_min, quant_max of the stored codes less 8 for symmetric 4 bits."""
        return _code_range(self.bits, self.symmetric)

    @property
    def clamps(self) -> bool:
        """Whether a code can lie outside of the range. A float16 scale can be a subnormal number, far off the ratio."""
        return not self.symmetric or self.divisor > self.range[1] or self.scale_dtype == torch.float16

    def quantize(self, weight: Tensor) -> Int4Weight | Int8Weight:
        """The codes and scales of a weight on this grid: what is exported and served.

        weight   [out_features, in_features] float
        raises   ValueError if a weight is inf or nan (names it), or if the groups do not fit in_features
        """
        _, group_size = self.groups_of(weight)
        options = {"group_size": group_size, "scale_dtype": self.scale_dtype}
        if self.bits == 8:
            return int8_quantize(weight, **options)
        if self.symmetric:
            options["divisor"] = self.divisor
        return int4_quantize(weight, symmetric=self.symmetric, **options)

    def groups_of(self, x: Tensor) -> tuple[int, int]:
        """num_groups, group_size of a tensor.

        raises  TypeError or ValueError naming the dtype or size that does not fit
        """
        check_dtype("x", x.dtype)
        size = x.shape[-1] if x.dim() else 0
        group_size = size if self.group_size is None else self.group_size
        check_group_size(group_size, size)
        return x.numel() // group_size, group_size


def _code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    if bits == 8:
        return -127, 127
    return (-8, 7) if symmetric else (0, 15)


# ---- reference: through codes, by the functions that define the grid


def fake_quant_reference(x: Tensor, grid: Grid) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    _, group_size = grid.groups_of(x)
    finite = torch.isfinite(rows.float().view(-1, group_size)).all(1, keepdim=True)
    rows = torch.where(finite, rows.reshape(-1, group_size), 0).view(rows.shape)
    if grid.bits == 4:
        options = {"symmetric": grid.symmetric, "divisor": grid.divisor, "scale_dtype": grid.scale_dtype}
        codes = int4_quantize_reference(rows, group_size=group_size, **options)
        values = int4_dequantize_reference(Int4Weight(*codes, None, *rows.shape, group_size), dtype=x.dtype)
    else:
        codes = int8_quantize_reference(rows, group_size=group_size, scale_dtype=grid.scale_dtype)
        values = int8_dequantize_reference(Int8Weight(*codes, *rows.shape, group_size), dtype=x.dtype)
    return torch.where(finite, values.view(-1, group_size), torch.nan).view(x.shape)


def fake_quant_backward_reference(grad: Tensor, x: Tensor, grid: Grid) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    _, group_size = grid.groups_of(x)
    rows = torch.where(torch.isfinite(rows), rows, 0)
    if grid.bits == 4:
        options = {"symmetric": grid.symmetric, "divisor": grid.divisor, "scale_dtype": grid.scale_dtype}
        scales, zeros = int4_scales(rows, group_size=group_size, **options)
    else:
        _, scales = int8_quantize_reference(rows, group_size=group_size, scale_dtype=grid.scale_dtype)
        zeros = None
    ratio = rows.float().view(*scales.shape, -1) / scales[..., None]
    return torch.where(_clamped(ratio, zeros, grid.range).view(x.shape), 0, grad)


def _clamped(ratio: Tensor, zeros: Tensor | None, code_range: tuple[int, int]) -> Tensor:
    """ratio [rows, groups, group_size] = x / s"""
    code = ratio.round() + (0 if zeros is None else zeros[..., None].float())
    return (code < code_range[0]) | (code > code_range[1])


def fake_quant_learned_reference(x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    group_size = x.shape[1] // scales.shape[1]
    steps = torch.where((scales > 0) & torch.isfinite(scales), scales, 1)
    finite = torch.isfinite(x)
    rows = torch.where(finite, x, 0)
    if bits == 4:
        packed = pack_int4(int4_codes(rows, steps, zeros))
        values = int4_dequantize_reference(Int4Weight(packed, steps, zeros, None, *x.shape, group_size), dtype=x.dtype)
    else:
        codes = (rows.float().view(*scales.shape, -1) / steps[..., None]).round().clamp(-127, 127).to(torch.int8)
        weight = Int8Weight(codes.view(x.shape), steps, *x.shape, group_size)
        values = int8_dequantize_reference(weight, dtype=x.dtype)
    good = finite.view(*scales.shape, -1) & (steps == scales)[..., None]
    return torch.where(good, values.view(*scales.shape, -1), torch.nan).view(x.shape)


def fake_quant_learned_backward_reference(
    grad: Tensor, x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int
) -> tuple[Tensor, Tensor]:
    code_range = _code_range(bits, zeros is None)
    zero = 0 if zeros is None else zeros[..., None].float()
    ratio = x.float().view(*scales.shape, -1) / scales[..., None]
    clamped = _clamped(ratio, zeros, code_range)
    by_scale = torch.where(clamped, (ratio.round() + zero).clamp(*code_range) - zero, ratio.round() - ratio)
    grad_scales = (grad.float().view(ratio.shape) * by_scale).sum(2) * _scale_factor(x, scales, code_range[1])
    return torch.where(clamped.view(x.shape), 0, grad), grad_scales


def _scale_factor(x: Tensor, scales: Tensor, quant_max: int) -> float:
    """LSQ's gradient scale: steps then move at the rate of weights, whatever the size of a group."""
    return 1 / math.sqrt(x.shape[1] // scales.shape[1] * quant_max)


# ---- C++


def _grid_arguments(grid: Grid) -> tuple[int, int, int, float, int]:
    return int(grid.symmetric), *grid.range, grid.divisor, _DTYPE_IDS[grid.scale_dtype]


def fake_quant_cpu(x: Tensor, grid: Grid) -> Tensor:
    if x.dtype == torch.float16:
        return fake_quant_reference(x, grid)
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    groups = _DTYPE_IDS[x.dtype], *grid.groups_of(x)
    call_beside_torch(kernel("fake_quant", "fake_quant"), *groups, x, out, *_grid_arguments(grid))
    return out


def fake_quant_backward_cpu(grad: Tensor, x: Tensor, grid: Grid) -> Tensor:
    if x.dtype == torch.float16:
        return fake_quant_backward_reference(grad, x, grid)
    grad, x, out = grad.contiguous(), x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    groups = _DTYPE_IDS[x.dtype], *grid.groups_of(x)
    call_beside_torch(kernel("fake_quant", "fake_quant_backward"), *groups, x, grad, out, *_grid_arguments(grid))
    return out


def fake_quant_learned_cpu(x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    if x.dtype == torch.float16:
        return fake_quant_learned_reference(x, scales, zeros, bits)
    out = torch.empty_like(x)
    groups = _DTYPE_IDS[x.dtype], scales.numel(), x.shape[1] // scales.shape[1]
    source = scales, zeros, *_code_range(bits, zeros is None)
    call_beside_torch(kernel("fake_quant", "fake_quant_learned"), *groups, x, out, *source)
    return out


def fake_quant_learned_backward_cpu(
    grad: Tensor, x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int
) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float16:
        return fake_quant_learned_backward_reference(grad, x, scales, zeros, bits)
    grad, out, grad_scales = grad.contiguous(), torch.empty_like(x), torch.empty_like(scales)
    groups = _DTYPE_IDS[x.dtype], scales.numel(), x.shape[1] // scales.shape[1]
    code_range = _code_range(bits, zeros is None)
    source = scales, zeros, *code_range, _scale_factor(x, scales, code_range[1])
    call_beside_torch(kernel("fake_quant", "fake_quant_learned_backward"), *groups, x, grad, out, grad_scales, *source)
    return out, grad_scales


# ---- Triton


@triton.jit
def _round(value):
    """To an integer, ties to even, for |value| < 2^22."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _clamp(value, lowest, highest):
    """nan stays nan"""
    value = tl.where(value < lowest, lowest, value)
    return tl.where(value > highest, highest, value)


@triton.jit
def _round_scale(scale, SCALE_DTYPE: tl.constexpr):
    """0, 1, 2: float32, bfloat16, float16. By bits for bfloat16, since the interpreter truncates."""
    if SCALE_DTYPE == 1:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    elif SCALE_DTYPE == 2:
        scale = scale.to(tl.float16).to(tl.float32)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _fake_quant_kernel(
    x_ptr, scales_ptr, zeros_ptr, grad_ptr, out_ptr, grad_scales_ptr,
    num_groups, group_size, quant_min, quant_max, divisor, factor,
    SYMMETRIC: tl.constexpr, LEARNED: tl.constexpr, BACKWARD: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M groups a program, BLOCK_K values of each at a time: once for the scale, once more (cached) for codes."""
    group = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group_mask = group < num_groups
    first = group.to(tl.int64)[:, None] * group_size
    column = tl.arange(0, BLOCK_K)[None, :]
    low = tl.zeros((BLOCK_M,), tl.float32)
    if LEARNED:
        scale = tl.load(scales_ptr + group, mask=group_mask, other=1.0)
        scale = tl.where(scale > 0.0, scale, float("nan"))
    else:
        high = tl.zeros((BLOCK_M,), tl.float32)
        largest = tl.zeros((BLOCK_M,), tl.int32)  # |x| as bits, which sort like the numbers, with inf and nan on top
        for start in range(0, group_size, BLOCK_K):
            mask = group_mask[:, None] & (start + column < group_size)
            x = tl.load(x_ptr + first + start + column, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
            if not SYMMETRIC:
                low = tl.minimum(low, tl.min(x, axis=1))
                high = tl.maximum(high, tl.max(x, axis=1))
        if SYMMETRIC:
            high = largest.to(tl.float32, bitcast=True)
        scale = _round_scale(tl.div_rn(high - low, tl.full((BLOCK_M,), divisor, tl.float32)), SCALE_DTYPE)
        scale = tl.where(largest >= 0x7F800000, float("nan"), scale)
    zero = tl.zeros((BLOCK_M,), tl.float32)
    if not SYMMETRIC:
        if LEARNED:
            zero = tl.load(zeros_ptr + group, mask=group_mask, other=0).to(tl.float32)
        else:
            zero = _clamp(_round(_clamp(tl.div_rn(0.0 - low, scale), -1.0, 16.0)), 0.0, 15.0)
    lowest = (quant_min - zero)[:, None]
    highest = (quant_max - zero)[:, None]
    by_scale = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, group_size, BLOCK_K):
        mask = group_mask[:, None] & (start + column < group_size)
        offset = first + start + column
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        code = _round(_clamp(ratio, lowest - 1.0, highest + 1.0))
        inner = _clamp(code, lowest, highest)
        if BACKWARD:
            grad = tl.load(grad_ptr + offset, mask=mask, other=0.0)
            outside = (code < lowest) | (code > highest)
            tl.store(out_ptr + offset, tl.where(outside, 0.0, grad), mask=mask)
            if LEARNED:
                by_scale += tl.sum(grad.to(tl.float32) * tl.where(outside, inner, code - ratio), axis=1)
        else:
            tl.store(out_ptr + offset, inner * scale[:, None] + (x - x), mask=mask)  # clamping would hide an infinity
    if BACKWARD and LEARNED:
        tl.store(grad_scales_ptr + group, by_scale * factor, mask=group_mask)


def _launch(
    x: Tensor, out: Tensor, num_groups: int, group_size: int, *, symmetric: bool, code_range: tuple[int, int],
    scales: Tensor | None = None, zeros: Tensor | None = None, grad: Tensor | None = None,
    grad_scales: Tensor | None = None, divisor: float = 1.0, factor: float = 1.0, scale_dtype: int = 0,
) -> None:  # fmt: skip
    if num_groups == 0:
        return
    block_k = min(MAX_BLOCK_K, triton.next_power_of_2(group_size))
    tile = dict(tiles("fake_quant", x.device, {"TILE": TILE}, itemsize=x.element_size()))
    block_m = max(1, tile.pop("TILE") // block_k)
    _fake_quant_kernel[(triton.cdiv(num_groups, block_m),)](
        x, scales, zeros, grad, out, grad_scales, num_groups, group_size, *map(float, code_range), divisor, factor,
        SYMMETRIC=symmetric, LEARNED=scales is not None, BACKWARD=grad is not None, SCALE_DTYPE=scale_dtype,
        BLOCK_M=block_m, BLOCK_K=block_k, **tile, enable_fp_fusion=False,
    )  # fmt: skip


def fake_quant_triton(x: Tensor, grid: Grid) -> Tensor:
    return _fake_quant_triton(x, None, grid)


def fake_quant_backward_triton(grad: Tensor, x: Tensor, grid: Grid) -> Tensor:
    return _fake_quant_triton(x, grad.contiguous(), grid)


def _fake_quant_triton(x: Tensor, grad: Tensor | None, grid: Grid) -> Tensor:
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = {"divisor": grid.divisor, "scale_dtype": _DTYPE_IDS[grid.scale_dtype]}
    _launch(x, out, *grid.groups_of(x), symmetric=grid.symmetric, code_range=grid.range, grad=grad, **scale)
    return out


def fake_quant_learned_triton(x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    out = torch.empty_like(x)
    groups = scales.numel(), x.shape[1] // scales.shape[1]
    code_range = _code_range(bits, zeros is None)
    _launch(x, out, *groups, symmetric=zeros is None, code_range=code_range, scales=scales, zeros=zeros)
    return out


def fake_quant_learned_backward_triton(
    grad: Tensor, x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int
) -> tuple[Tensor, Tensor]:
    out, grad_scales = torch.empty_like(x), torch.empty_like(scales)
    groups = scales.numel(), x.shape[1] // scales.shape[1]
    code_range = _code_range(bits, zeros is None)
    _launch(
        x, out, *groups, symmetric=zeros is None, code_range=code_range, scales=scales, zeros=zeros,
        grad=grad.contiguous(), grad_scales=grad_scales, factor=_scale_factor(x, scales, code_range[1]),
    )  # fmt: skip
    return out, grad_scales


# ---- registered ops

_IMPLEMENTATIONS = {
    "reference": (
        *(fake_quant_reference, fake_quant_backward_reference),
        *(fake_quant_learned_reference, fake_quant_learned_backward_reference),
    ),
    "cpu": (fake_quant_cpu, fake_quant_backward_cpu, fake_quant_learned_cpu, fake_quant_learned_backward_cpu),
    "triton": (
        *(fake_quant_triton, fake_quant_backward_triton),
        *(fake_quant_learned_triton, fake_quant_learned_backward_triton),
    ),
}
_grid = functools.lru_cache(maxsize=64)(Grid)


def _implementation(x: Tensor, index: int):
    return _IMPLEMENTATIONS[_cpp.choose("fake_quant", "cpu" if x.is_cpu else x.device.type)][index]


@torch.library.custom_op("lowbit::fake_quant", mutates_args=())
def _fake_quant(
    x: Tensor, bits: int, group_size: int, symmetric: bool, divisor: float, scale_dtype: torch.dtype
) -> Tensor:
    return _implementation(x, 0)(x, _grid(bits, group_size, symmetric, divisor, scale_dtype))


@_fake_quant.register_fake
def _(x, bits, group_size, symmetric, divisor, scale_dtype) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lowbit::fake_quant_backward", mutates_args=())
def _fake_quant_backward(
    grad: Tensor, x: Tensor, bits: int, group_size: int, symmetric: bool, divisor: float, scale_dtype: torch.dtype
) -> Tensor:
    return _implementation(x, 1)(grad, x, _grid(bits, group_size, symmetric, divisor, scale_dtype))


@_fake_quant_backward.register_fake
def _(grad, x, bits, group_size, symmetric, divisor, scale_dtype) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:
    x, *grid = inputs
    ctx.grid = tuple(grid)
    if _grid(*grid).clamps:
        ctx.save_for_backward(x)


def _backward(ctx, grad: Tensor):
    grid = _grid(*ctx.grid)
    return fake_quant_gradient(grad, *ctx.saved_tensors, grid) if grid.clamps else grad, None, None, None, None, None


_fake_quant.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("lowbit::fake_quant_learned", mutates_args=())
def _fake_quant_learned(x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    return _implementation(x, 2)(x, scales, zeros, bits)


@_fake_quant_learned.register_fake
def _(x, scales, zeros, bits) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lowbit::fake_quant_learned_backward", mutates_args=())
def _fake_quant_learned_backward(
    grad: Tensor, x: Tensor, scales: Tensor, zeros: Tensor | None, bits: int
) -> tuple[Tensor, Tensor]:
    return _implementation(x, 3)(grad, x, scales, zeros, bits)


@_fake_quant_learned_backward.register_fake
def _(grad, x, scales, zeros, bits) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(scales)


def _learned_setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.bits = inputs
    ctx.save_for_backward(*tensors)


def _learned_backward(ctx, grad: Tensor):
    return *_fake_quant_learned_backward(grad, *ctx.saved_tensors, ctx.bits), None, None


_fake_quant_learned.register_autograd(_learned_backward, setup_context=_learned_setup_context)


# ---- what the rest of the product calls


def fake_quant(x: Tensor, grid: Grid) -> Tensor:
    """x as its codes stand for it; the gradient passes where no code was clamped.

    x        [..., in_features] float32, bfloat16 or float16; any strides
    grid     Grid.int4(...) or Grid.int8(...); Grid.int8() is also that of activations, one scale per token
    returns  a new contiguous tensor like x: int4_dequantize(int4_quantize(x)) or its INT8 twin, bit for bit;
             a group with inf or nan, or whose scale exceeds scale_dtype, is nan
    raises   ValueError naming the group sizes that fit in_features, TypeError if x is no float
    """
    _, group_size = grid.groups_of(x)
    return _fake_quant(x, grid.bits, group_size, grid.symmetric, grid.divisor, grid.scale_dtype)


def fake_quant_gradient(grad: Tensor, x: Tensor, grid: Grid) -> Tensor:
    """What `fake_quant(x, grid)` passes back: grad, or a copy of it with 0 where x's code was clamped.

    For layers that compute fake_quant again in backward instead of keeping it in autograd's graph.
    """
    if not grid.clamps:
        return grad
    _, group_size = grid.groups_of(x)
    return _fake_quant_backward(grad, x, grid.bits, group_size, grid.symmetric, grid.divisor, grid.scale_dtype)


def fake_quant_learned(weight: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int = 4) -> Tensor:
    """A weight as its codes on given scales stand for it; weight and scales get LSQ's gradients (arXiv:1902.08153).

    weight   [out_features, in_features] float32, bfloat16 or float16, contiguous
    scales   [out_features, in_features / group_size] float32, positive; a good start is that of `int4_scales`
    zeros    the zero points, like scales, uint8 in 0..15, for 4 bits; None: symmetric codes
    returns  a new tensor like weight: int4_dequantize of int4_codes(weight, scales, zeros), bit for bit; a group whose
             scale is not positive and finite is nan, and so is a weight that is inf or nan
    raises   ValueError or TypeError naming the tensor that does not fit
    """
    _check_learned(weight, scales, zeros, bits)
    return _fake_quant_learned(weight, scales, zeros, bits)


def fake_quant_learned_gradient(
    grad: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int = 4
) -> tuple[Tensor, Tensor]:
    """What `fake_quant_learned` passes back to weight and scales, for layers that compute it again in backward."""
    _check_learned(weight, scales, zeros, bits)
    return _fake_quant_learned_backward(grad, weight, scales, zeros, bits)


def _check_learned(weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> None:
    check_dtype("weight", weight.dtype)
    if bits not in (4, 8) or (bits == 8 and zeros is not None):
        raise ValueError(f"bits={bits}, zeros={'None' if zeros is None else 'given'}: use 4 bits, or 8 without zeros")
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(
            f"weight is {list(weight.shape)} with strides {list(weight.stride())}; learned scales take a contiguous "
            "[out_features, in_features]; use .contiguous()"
        )
    for name, tensor, dtype in (("scales", scales, torch.float32), ("zeros", zeros, torch.uint8)):
        if tensor is None:
            continue
        fits = tensor.dim() == 2 and tensor.shape[0] == weight.shape[0] and tensor.shape == scales.shape
        if not fits or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != weight.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; a weight {list(weight.shape)} "
                f"needs it contiguous, {dtype} [{weight.shape[0]}, groups] on {weight.device}"
            )
    num_groups = scales.shape[1]
    check_group_size(weight.shape[1] // num_groups if num_groups else 0, weight.shape[1])
