"""SwiGLU (Shazeer, arXiv:2002.05202, equation 6) over one tensor that holds both halves, and its gradient.

    gate_up   [T, 2F], the product with the stacked weights:   gate [0, F) | up [F, 2F)
    y         round(silu(gate)) * up          silu(g) = g / (1 + exp(-g)) in float32

silu and the product are each rounded to the dtype, where transformers' LlamaMLP rounds. The gradient needs gate_up
alone, is computed in float32 and rounded once:

    dgate     dy up (s + silu(gate) (1 - s))  with s = sigmoid(gate)
    dup       dy silu(gate)

It is a new tensor, not gate_up overwritten: autograd cannot prove that nobody else holds gate_up.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, call_beside_torch, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_F = 1024  # columns a Triton program computes: 8 values a thread
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


def _check(gate_up: Tensor, grad: Tensor | None = None) -> None:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in DTYPES or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up is {gate_up.dtype} {list(gate_up.shape)} with strides {list(gate_up.stride())}; swiglu takes "
            "contiguous rows [T, 2F], gate before up, of float32, bfloat16 or float16; use .contiguous() or .to()"
        )
    if grad is None:
        return
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    if grad.shape != shape or grad.dtype != gate_up.dtype or grad.device != gate_up.device:
        raise ValueError(
            f"grad is {grad.dtype} {list(grad.shape)} on {grad.device}; the gradient of swiglu's result is "
            f"{gate_up.dtype} {list(shape)} on {gate_up.device}; use .to()"
        )


def _implementation(file: str, gate_up: Tensor) -> str:
    return _cpp.choose(file, "cpu" if gate_up.is_cpu else gate_up.device.type)


# ---- reference


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def swiglu_backward_reference(grad: Tensor, gate_up: Tensor, *, with_output: bool) -> tuple[Tensor, Tensor | None]:
    grad = grad.float()
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = 1 / (1 + torch.exp(-gate))
    silu = gate * sigmoid
    grad_gate_up = torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], dim=-1)
    return grad_gate_up.to(gate_up.dtype), swiglu_reference(gate_up) if with_output else None


# ---- C++


def swiglu_cpu(gate_up: Tensor, *, beside_torch: bool = False) -> Tensor:
    if gate_up.dtype == torch.float16:
        return swiglu_reference(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    run = call_beside_torch if beside_torch else call
    run(kernel("elementwise", "swiglu"), _DTYPE_IDS[gate_up.dtype], gate_up, out, rows, size)
    return out


def swiglu_backward_cpu(grad: Tensor, gate_up: Tensor, *, with_output: bool) -> tuple[Tensor, Tensor | None]:
    if gate_up.dtype == torch.float16:
        return swiglu_backward_reference(grad, gate_up, with_output=with_output)
    grad_gate_up = torch.empty_like(gate_up)
    out = torch.empty_like(grad) if with_output else None
    function = kernel("elementwise_backward", "swiglu_backward")
    call_beside_torch(function, _DTYPE_IDS[gate_up.dtype], grad, gate_up, grad_gate_up, out, *grad.shape)
    return grad_gate_up, out


# ---- Triton


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, size, stride_row, stride_out_row, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = column < size
    offset = row * stride_row + column
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + size + offset, mask=mask, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * stride_out_row + column, (silu * up).to(dtype), mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    grad_ptr, gate_up_ptr, grad_gate_up_ptr, out_ptr, size, stride_grad_row, stride_row,
    WITH_OUTPUT: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Rows of grad and out, and rows of gate_up and its gradient, have the same stride."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = column < size
    offset = row * stride_row + column
    dtype = grad_gate_up_ptr.dtype.element_ty
    grad = tl.load(grad_ptr + row * stride_grad_row + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + size + offset, mask=mask, other=0.0).to(tl.float32)
    one_plus_exp = 1.0 + tl.exp(-gate)
    sigmoid = tl.div_rn(1.0, one_plus_exp)
    silu = tl.div_rn(gate, one_plus_exp)
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(grad_gate_up_ptr + offset, grad_gate.to(dtype), mask=mask)
    tl.store(grad_gate_up_ptr + size + offset, (grad * silu).to(dtype), mask=mask)
    if WITH_OUTPUT:
        out = silu.to(dtype).to(tl.float32) * up
        tl.store(out_ptr + row * stride_grad_row + column, out.to(dtype), mask=mask)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if out.numel():
        tile = tiles("swiglu", out.device, {"BLOCK_F": BLOCK_F}, itemsize=out.element_size())
        _swiglu_kernel[(rows, triton.cdiv(size, tile["BLOCK_F"]))](
            gate_up, out, size, gate_up.stride(0), out.stride(0), **tile, enable_fp_fusion=False
        )
    return out


def swiglu_backward_triton(grad: Tensor, gate_up: Tensor, *, with_output: bool) -> tuple[Tensor, Tensor | None]:
    rows, size = grad.shape
    grad_gate_up = torch.empty_like(gate_up)
    out = torch.empty_like(grad) if with_output else None
    if grad.numel():
        _swiglu_backward_kernel[(rows, triton.cdiv(size, BLOCK_F))](
            grad, gate_up, grad_gate_up, out, size, grad.stride(0), gate_up.stride(0),
            WITH_OUTPUT=with_output, BLOCK_F=BLOCK_F, enable_fp_fusion=False,
        )  # fmt: skip
    return grad_gate_up, out


# ---- registered ops

_BACKWARD = {
    "reference": swiglu_backward_reference,
    "cpu": swiglu_backward_cpu,
    "triton": swiglu_backward_triton,
}


@torch.library.custom_op("lowbit::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor) -> Tensor:
    return _forward(gate_up, beside_torch=True)


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("lowbit::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    return swiglu_backward(grad, gate_up)


@_swiglu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> Tensor:
    return _swiglu_backward(grad, *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def _forward(gate_up: Tensor, beside_torch: bool) -> Tensor:
    _check(gate_up)
    match _implementation("elementwise", gate_up):
        case "cpu":
            return swiglu_cpu(gate_up, beside_torch=beside_torch)
        case "triton":
            return swiglu_triton(gate_up)
        case _:
            return swiglu_reference(gate_up)


def swiglu(gate_up: Tensor, *, beside_torch: bool = False) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202, equation 6), differentiable.

    gate_up       [T, 2F] float32, bfloat16 or float16, contiguous; gate is the first half of a row
    beside_torch  compute on torch's threads, for calls between torch's products; where autograd records it always does
    returns       [T, F] of gate_up's dtype; a row's bits do not depend on the other rows
    raises        ValueError if the shape, dtype or stride does not fit
    """
    if (torch.is_grad_enabled() and gate_up.requires_grad) or torch.compiler.is_compiling():
        return _swiglu(gate_up)
    return _forward(gate_up, beside_torch)


@overload
def swiglu_backward(grad: Tensor, gate_up: Tensor, *, with_output: Literal[False] = False) -> Tensor: ...
@overload
def swiglu_backward(grad: Tensor, gate_up: Tensor, *, with_output: Literal[True]) -> tuple[Tensor, Tensor]: ...
def swiglu_backward(grad: Tensor, gate_up: Tensor, *, with_output: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The gradient of swiglu's input, on torch's threads; see the module docstring for the formula.

    grad      [T, F] of gate_up's dtype, any strides: the gradient of swiglu's result
    gate_up   [T, 2F] float32, bfloat16 or float16, contiguous
    returns   [T, 2F] of gate_up's dtype, dgate before dup, a new tensor; with_output: that and swiglu(gate_up) [T, F]
    raises    ValueError if a shape, dtype, device or stride does not fit
    """
    _check(gate_up, grad)
    backward = _BACKWARD[_implementation("elementwise_backward", gate_up)]
    grad_gate_up, out = backward(grad.contiguous(), gate_up, with_output=with_output)
    return (grad_gate_up, out) if with_output else grad_gate_up
