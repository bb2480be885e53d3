"""RMS norm of rows, alone or of the sum of two tensors (Zhang and Sennrich, arXiv:1910.07467, equation 4), and its
gradient.

    rms_norm(x)         y = round(x * 1 / sqrt(mean(x^2) + eps)) * weight
    add_rms_norm(x, r)  s = round(x + r);  y = rms_norm(s)

Mean and scale are float32; `round` is to the dtype of x, and the product with the weight is rounded again: where
transformers' LlamaRMSNorm and Qwen3RMSNorm round, so that the server computes the function that was trained. Only the
order of the sum differs from theirs, which moves the scale by a few float32 roundings.

The sum comes with the norm because a decoder layer adds into the residual stream before each of its norms: one pass
over the rows instead of two.

The gradient needs the rows and the weight alone; it is computed in float32 and rounded once. With n = x * scale:

    dx        scale * (dy weight - n mean(dy weight n))  [+ add]
    dweight   sum over the rows of dy n

`add` is the gradient that the residual stream brings past the norm: adding it here saves a pass over the rows. The sum
over the rows runs in chunks that depend on their number only, so its bits do not depend on the number of threads.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, call_beside_torch, kernel
from trainer.kernels._triton import tl, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BLOCK_H = 4096  # columns a Triton program holds at a time: 8 warps of 16 values a thread
MAX_CHUNKS = 64  # partial sums of the weight's gradient
MIN_CHUNK_ROWS = 16
WEIGHT_BLOCK_ROWS, WEIGHT_BLOCK_H = 8, 128  # of the Triton program for such a sum; not timed on hardware yet
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None, **grads: Tensor | None) -> None:
    """raises ValueError unless the kernels can read these tensors; grads are made contiguous later"""
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
    for name, tensor in grads.items():
        if tensor is not None and (tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.device != x.device):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it needs the shape and dtype of x, "
                f"{x.dtype} {list(x.shape)} on {x.device}; use .to()"
            )


def _implementation(file: str, x: Tensor) -> str:
    return _cpp.choose(file, "cpu" if x.is_cpu else x.device.type)


def rows_per_chunk(rows: int) -> int:
    """Rows that enter one partial sum of a weight's gradient; rope.py's tokens too."""
    return max(MIN_CHUNK_ROWS, -(-rows // MAX_CHUNKS))


# ---- reference


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps=eps), total


def rms_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, add: Tensor | None, *, eps: float, with_weight: bool
) -> tuple[Tensor, Tensor | None]:
    grad, wide = grad.float(), x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed, weighted = wide * scale, grad * weight.float()
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    if add is not None:
        grad_x = grad_x + add.float()
    return grad_x.to(x.dtype), (grad * normed).sum(0).to(x.dtype) if with_weight else None


# ---- C++


def rms_norm_cpu(x: Tensor, weight: Tensor, *, eps: float, beside_torch: bool = False) -> Tensor:
    if x.dtype == torch.float16:
        return rms_norm_reference(x, weight, eps=eps)
    out = torch.empty_like(x)
    run = call_beside_torch if beside_torch else call
    run(kernel("elementwise", "rms_norm"), _DTYPE_IDS[x.dtype], x, None, weight, out, None, *x.shape, eps)
    return out


def add_rms_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, beside_torch: bool = False
) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float16:
        return add_rms_norm_reference(x, residual, weight, eps=eps)
    out, total = torch.empty_like(x), torch.empty_like(x)
    run = call_beside_torch if beside_torch else call
    run(kernel("elementwise", "rms_norm"), _DTYPE_IDS[x.dtype], x, residual, weight, out, total, *x.shape, eps)
    return out, total


def rms_norm_backward_cpu(
    grad: Tensor, x: Tensor, weight: Tensor, add: Tensor | None, *, eps: float, with_weight: bool
) -> tuple[Tensor, Tensor | None]:
    if x.dtype == torch.float16:
        return rms_norm_backward_reference(grad, x, weight, add, eps=eps, with_weight=with_weight)
    rows, size = x.shape
    chunk_rows = rows_per_chunk(rows)
    grad_x, grad_weight, partial = torch.empty_like(x), None, None
    if rows == 0:
        return grad_x, torch.zeros_like(weight) if with_weight else None
    if with_weight:
        grad_weight = torch.empty_like(weight)
        partial = weight.new_empty(-(-rows // chunk_rows), size, dtype=torch.float32)
    call_beside_torch(
        kernel("elementwise_backward", "rms_norm_backward"), _DTYPE_IDS[x.dtype], grad, x, weight, add, grad_x,
        grad_weight, partial, rows, size, chunk_rows, eps,
    )  # fmt: skip
    return grad_x, grad_weight


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


@triton.jit
def _rms_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, add_ptr, grad_x_ptr, scale_ptr, size, stride_row, eps,
    HAS_ADD: tl.constexpr, WITH_SCALE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One row a program, read twice, as forward; its scale is kept for _weight_partial_kernel."""
    row = tl.program_id(0).to(tl.int64)
    first = row * stride_row
    squares = tl.zeros((BLOCK_H,), tl.float32)
    products = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, size, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        mask = column < size
        x = tl.load(x_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        squares += x * x
        products += grad * weight * x
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, axis=0) / size + eps))
    mean = tl.sum(products, axis=0) * scale / size
    if WITH_SCALE:
        tl.store(scale_ptr + row, scale)
    for start in range(0, size, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        mask = column < size
        x = tl.load(x_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        grad_x = scale * (grad * weight - x * scale * mean)
        if HAS_ADD:
            grad_x += tl.load(add_ptr + first + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + first + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight_partial_kernel(
    grad_ptr, x_ptr, scale_ptr, partial_ptr, rows, size, stride_row, stride_partial, chunk_rows,
    BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """partial[chunk] = sum over the chunk's rows of grad * x * scale, for BLOCK_H columns a program."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column_mask = column < size
    total = tl.zeros((BLOCK_ROWS, BLOCK_H), tl.float32)
    stop = tl.minimum(rows, (chunk + 1) * chunk_rows)
    for start in range(chunk * chunk_rows, stop, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        row_mask = row < stop
        mask = row_mask[:, None] & column_mask[None, :]
        offset = row.to(tl.int64)[:, None] * stride_row + column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row_mask, other=0.0)
        total += grad * (x * scale[:, None])
    tl.store(partial_ptr + chunk.to(tl.int64) * stride_partial + column, tl.sum(total, axis=0), mask=column_mask)


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


def rms_norm_backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor, add: Tensor | None, *, eps: float, with_weight: bool
) -> tuple[Tensor, Tensor | None]:
    rows, size = x.shape
    grad_x = torch.empty_like(x)
    if x.numel() == 0:
        return grad_x, torch.zeros_like(weight) if with_weight else None
    scale = x.new_empty(rows, dtype=torch.float32) if with_weight else None
    block = min(MAX_BLOCK_H, triton.next_power_of_2(size))
    _rms_norm_backward_kernel[(rows,)](
        grad, x, weight, add, grad_x, scale, size, x.stride(0), eps, HAS_ADD=add is not None, WITH_SCALE=with_weight,
        BLOCK_H=block, num_warps=num_warps(block), enable_fp_fusion=False,
    )  # fmt: skip
    if scale is None:
        return grad_x, None
    chunk_rows = rows_per_chunk(rows)
    partial = x.new_empty(triton.cdiv(rows, chunk_rows), size, dtype=torch.float32)
    _weight_partial_kernel[(len(partial), triton.cdiv(size, WEIGHT_BLOCK_H))](
        grad, x, scale, partial, rows, size, x.stride(0), partial.stride(0), chunk_rows,
        BLOCK_ROWS=WEIGHT_BLOCK_ROWS, BLOCK_H=WEIGHT_BLOCK_H, enable_fp_fusion=False,
    )  # fmt: skip
    return grad_x, partial.sum(0).to(x.dtype)


# ---- registered ops

_BACKWARD = {
    "reference": rms_norm_backward_reference,
    "cpu": rms_norm_backward_cpu,
    "triton": rms_norm_backward_triton,
}


@torch.library.custom_op("lowbit::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _forward(x, weight, eps, beside_torch=True)


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lowbit::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _add_forward(x, residual, weight, eps, beside_torch=True)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("lowbit::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, add: Tensor | None, eps: float, with_weight: bool
) -> tuple[Tensor, Tensor]:
    """The weight's gradient is [0] where nobody wants it: an op cannot return None."""
    grad_x, grad_weight = rms_norm_backward(grad, x, weight, eps=eps, add=add, with_weight=with_weight)
    return grad_x, weight.new_empty(0) if grad_weight is None else grad_weight


@_rms_norm_backward.register_fake
def _(grad, x, weight, add, eps, with_weight) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(weight.shape[0] if with_weight else 0)


def _setup_context(ctx, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    with_weight = ctx.needs_input_grad[1]
    grad_x, grad_weight = _rms_norm_backward(grad, *ctx.saved_tensors, None, ctx.eps, with_weight)
    return grad_x, grad_weight if with_weight else None, None


def _add_setup_context(ctx, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.eps = inputs[3]
    ctx.save_for_backward(output[1], inputs[2])
    ctx.set_materialize_grads(False)  # the last sum of a model is used by its norm alone


def _add_backward(
    ctx, grad: Tensor | None, grad_total: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if grad is None:
        return grad_total, grad_total, None, None
    with_weight = ctx.needs_input_grad[2]
    grad_x, grad_weight = _rms_norm_backward(grad, *ctx.saved_tensors, grad_total, ctx.eps, with_weight)
    return grad_x, grad_x, grad_weight if with_weight else None, None


_rms_norm.register_autograd(_backward, setup_context=_setup_context)
_add_rms_norm.register_autograd(_add_backward, setup_context=_add_setup_context)


# ---- what the rest of the product calls


def _forward(x: Tensor, weight: Tensor, eps: float, beside_torch: bool) -> Tensor:
    _check(x, weight)
    match _implementation("elementwise", x):
        case "cpu":
            return rms_norm_cpu(x, weight, eps=eps, beside_torch=beside_torch)
        case "triton":
            return rms_norm_triton(x, weight, eps=eps)
        case _:
            return rms_norm_reference(x, weight, eps=eps)


def _add_forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float, beside_torch: bool) -> tuple[Tensor, Tensor]:
    _check(x, weight, residual)
    match _implementation("elementwise", x):
        case "cpu":
            return add_rms_norm_cpu(x, residual, weight, eps=eps, beside_torch=beside_torch)
        case "triton":
            return add_rms_norm_triton(x, residual, weight, eps=eps)
        case _:
            return add_rms_norm_reference(x, residual, weight, eps=eps)


def _recorded(*tensors: Tensor) -> bool:
    """Whether autograd or torch.compile has to see an op."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, beside_torch: bool = False) -> Tensor:
    """Each row over its root mean square, times the weight (arXiv:1910.07467, equation 4), differentiable.

    x             [T, H] float32, bfloat16 or float16, contiguous
    weight        [H] of x's dtype
    beside_torch  compute on torch's threads, for calls between torch's products; where autograd records it always does
    returns       [T, H] of x's dtype; a row's bits do not depend on the other rows
    raises        ValueError if a shape, dtype, device or stride does not fit
    """
    if _recorded(x, weight):
        return _rms_norm(x, weight, eps)
    return _forward(x, weight, eps, beside_torch)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, beside_torch: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum of two tensors, rounded to their dtype, and its RMS norm, differentiable.

    x, residual   [T, H] float32, bfloat16 or float16, contiguous
    weight        [H] of x's dtype
    beside_torch  compute on torch's threads, for calls between torch's products; where autograd records it always does
    returns       rms_norm(s) and s, two new tensors [T, H] of x's dtype, with s = x + residual
    raises        ValueError if a shape, dtype, device or stride does not fit
    """
    if _recorded(x, residual, weight):
        return _add_rms_norm(x, residual, weight, eps)
    return _add_forward(x, residual, weight, eps, beside_torch)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, eps: float, add: Tensor | None = None, with_weight: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradients of rms_norm's inputs, on torch's threads; see the module docstring for the formula.

    grad      [T, H] of x's dtype, any strides: the gradient of rms_norm's result
    x         [T, H] float32, bfloat16 or float16, contiguous; for add_rms_norm the sum s
    weight    [H] of x's dtype
    add       [T, H] of x's dtype, any strides: another gradient of x, added before the rounding
    returns   dx [T, H] of x's dtype, a new tensor; dweight [H] of x's dtype, summed in float32, or None unless
              with_weight
    raises    ValueError if a shape, dtype, device or stride does not fit
    """
    _check(x, weight, grad=grad, add=add)
    backward = _BACKWARD[_implementation("elementwise_backward", x)]
    add = None if add is None else add.contiguous()
    return backward(grad.contiguous(), x, weight, add, eps=eps, with_weight=with_weight)
