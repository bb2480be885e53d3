"""RMS norm of rows, alone or of the sum of two tensors (Zhang and Sennrich, arXiv:1910.07467, equation 4).

    rms_norm(x)         y = round(x * 1 / sqrt(mean(x^2) + eps)) * weight
    add_rms_norm(x, r)  s = round(x + r);  y = rms_norm(s)

Mean and scale are float32; `round` is to the dtype of x, and the product with the weight is rounded again: where
transformers' LlamaRMSNorm and Qwen3RMSNorm round, so that the server computes the function that was trained. Only the
order of the sum differs from theirs, which moves the scale by a few float32 roundings.

The sum comes with the norm because a decoder layer adds into the residual stream before each of its norms: one pass
over the rows instead of two.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, kernel
from trainer.kernels._triton import tl, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BLOCK_H = 4096  # columns a Triton program holds at a time: 8 warps of 16 values a thread
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """raises ValueError unless the kernels can read these tensors"""
    if x.ndim != 2 or x.dtype not in DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} with strides {list(x.stride())}; rms_norm takes contiguous rows [T, H] of "
            "float32, bfloat16 or float16; use .contiguous() or .to()"
        )
    for name, tensor, shape in (("weight", weight, x.shape[1:]), ("residual", residual, x.shape)):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != x.dtype or not tensor.is_contiguous() or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} with strides "
                f"{list(tensor.stride())}; x needs it contiguous, {x.dtype} {list(shape)} on {x.device}; use .to()"
            )


# ---- reference


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps=eps), total


# ---- C++


def rms_norm_cpu(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    if x.dtype == torch.float16:
        return rms_norm_reference(x, weight, eps=eps)
    out = torch.empty_like(x)
    call(kernel("elementwise", "rms_norm"), _DTYPE_IDS[x.dtype], x, None, weight, out, None, *x.shape, eps)
    return out


def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float16:
        return add_rms_norm_reference(x, residual, weight, eps=eps)
    out, total = torch.empty_like(x), torch.empty_like(x)
    call(kernel("elementwise", "rms_norm"), _DTYPE_IDS[x.dtype], x, residual, weight, out, total, *x.shape, eps)
    return out, total


# ---- Triton


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, size, stride_row, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One row a program, read twice: the second time from the cache, so that a row of any size keeps its registers."""
    dtype = x_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * stride_row
    squares = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, size, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        mask = column < size
        x = tl.load(x_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x = (x + tl.load(residual_ptr + first + column, mask=mask, other=0.0).to(tl.float32)).to(dtype)
            tl.store(sum_ptr + first + column, x, mask=mask)
            x = x.to(tl.float32)
        squares += x * x
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, axis=0) / size + eps))
    normed_ptr = sum_ptr if HAS_RESIDUAL else x_ptr
    for start in range(0, size, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        mask = column < size
        x = tl.load(normed_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + first + column, ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype), mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    rows, size = x.shape
    if x.numel() == 0:
        return
    block = min(MAX_BLOCK_H, triton.next_power_of_2(size))
    _rms_norm_kernel[(rows,)](
        x, residual, weight, out, total, size, x.stride(0), eps,
        HAS_RESIDUAL=residual is not None, BLOCK_H=block, num_warps=num_warps(block), enable_fp_fusion=False,
    )  # fmt: skip


def num_warps(block: int) -> int:
    """16 values a thread."""
    return max(1, block // 512)


def rms_norm_triton(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps)
    return out, total


# ---- registered ops

_IMPLEMENTATIONS = {
    "reference": (rms_norm_reference, add_rms_norm_reference),
    "cpu": (rms_norm_cpu, add_rms_norm_cpu),
    "triton": (rms_norm_triton, add_rms_norm_triton),
}


@torch.library.custom_op("lowbit::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps=eps)


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lowbit::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, weight, eps=eps)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


# ---- what the rest of the product calls


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Each row over its root mean square, times the weight (arXiv:1910.07467, equation 4).

    x        [T, H] float32, bfloat16 or float16, contiguous
    weight   [H] of x's dtype
    returns  [T, H] of x's dtype; a row's bits do not depend on the other rows
    raises   ValueError if a shape, dtype, device or stride does not fit
    """
    _check(x, weight)
    implementation = _cpp.choose("elementwise", "cpu" if x.is_cpu else x.device.type)
    return _IMPLEMENTATIONS[implementation][0](x, weight, eps=eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of two tensors, rounded to their dtype, and its RMS norm.

    x, residual   [T, H] float32, bfloat16 or float16, contiguous
    weight        [H] of x's dtype
    returns       rms_norm(s) and s, two new tensors [T, H] of x's dtype, with s = x + residual
    raises        ValueError if a shape, dtype, device or stride does not fit
    """
    _check(x, weight, residual)
    implementation = _cpp.choose("elementwise", "cpu" if x.is_cpu else x.device.type)
    return _IMPLEMENTATIONS[implementation][1](x, residual, weight, eps=eps)
