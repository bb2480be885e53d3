"""A frozen NF4 linear layer and its LoRA update in one op, forward and backward.

    y    = x W^T + s (x A^T) B^T          W = dequantize(packed, absmax, ...)
    dx   = g W + s (g B) A                dA = s (g B)^T x          dB = s g^T (x A^T)

Why one op: the update is added into the base product in place, so neither forward nor backward holds a second
tensor of the output's or the input's size, and autograd has one node to walk instead of seven. Nothing of the
dense weight's size outlives the call: backward dequantizes again (5 % of the matrix product at 256 rows, less above).
The factors are float32 parameters; they are rounded to the dtype of x for the products, which accumulate in float32.
"""

import torch
from torch import Tensor

import trainer.kernels.nf4  # noqa: F401  registers lowbit::nf4_dequantize and lowbit::nf4_linear


def nf4_lora_linear_reference(
    x: Tensor, weight: Tensor, lora_A: Tensor, lora_B: Tensor, *, scaling: float
) -> tuple[Tensor, Tensor]:
    """The formula over a dense weight: returns y [..., out_features] and x A^T [..., rank]."""
    x_A = x @ lora_A.to(x.dtype).T
    return x @ weight.to(x.dtype).T + x_A @ (scaling * lora_B).to(x.dtype).T, x_A


@torch.library.custom_op("lowbit::nf4_lora_linear", mutates_args=())
def _nf4_lora_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    block_size: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    out_features = lora_B.shape[0]
    y = torch.ops.lowbit.nf4_linear(rows, packed, absmax, nested_absmax, nested_offset, out_features, block_size)
    x_A = rows @ lora_A.to(x.dtype).T
    y.addmm_(x_A, (scaling * lora_B).to(x.dtype).T)
    return y.view(*x.shape[:-1], out_features), x_A.view(*x.shape[:-1], lora_A.shape[0])


@_nf4_lora_linear.register_fake
def _(x, packed, absmax, nested_absmax, nested_offset, lora_A, lora_B, block_size, scaling) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], lora_B.shape[0]), x.new_empty(*x.shape[:-1], lora_A.shape[0])


@torch.library.custom_op("lowbit::nf4_lora_linear_backward", mutates_args=())
def _nf4_lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    x_A: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    block_size: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    shape = (lora_B.shape[0], lora_A.shape[1])
    weight = torch.ops.lowbit.nf4_dequantize(packed, absmax, nested_absmax, nested_offset, *shape, block_size, x.dtype)
    grad_A = grad_rows @ (scaling * lora_B).to(x.dtype)  # [N, rank]
    grad_x = torch.addmm(grad_rows @ weight, grad_A, lora_A.to(x.dtype))
    grad_lora_A = (grad_A.T @ rows).to(lora_A.dtype)
    grad_lora_B = (grad_rows.T @ x_A.reshape(-1, lora_A.shape[0])).to(lora_B.dtype) * scaling
    return grad_x.view(x.shape), grad_lora_A, grad_lora_B


@_nf4_lora_linear_backward.register_fake
def _(grad, x, x_A, packed, absmax, nested_absmax, nested_offset, lora_A, lora_B, block_size, scaling):
    return x.new_empty(x.shape), torch.empty_like(lora_A), torch.empty_like(lora_B)


def _setup_context(ctx, inputs, output) -> None:
    x, packed, absmax, nested_absmax, nested_offset, lora_A, lora_B, ctx.block_size, ctx.scaling = inputs
    ctx.save_for_backward(x, output[1], packed, absmax, nested_absmax, nested_offset, lora_A, lora_B)


def _backward(ctx, grad: Tensor, _grad_x_A: Tensor | None):
    grads = _nf4_lora_linear_backward(grad, *ctx.saved_tensors, ctx.block_size, ctx.scaling)
    return grads[0], None, None, None, None, grads[1], grads[2], None, None


_nf4_lora_linear.register_autograd(_backward, setup_context=_setup_context)


def nf4_lora_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    *,
    block_size: int,
    scaling: float,
) -> Tensor:
    """x through a frozen NF4 weight plus `scaling * lora_B @ lora_A` (arXiv:2305.14314, section 3, equation 5).

    x        [..., in_features] float
    packed, absmax, nested_absmax, nested_offset   the weight, as kernels/nf4.py packs it
    lora_A   [rank, in_features] float; lora_B [out_features, rank] float; both get gradients, as does x
    returns  [..., out_features] of x's dtype
    """
    return _nf4_lora_linear(x, packed, absmax, nested_absmax, nested_offset, lora_A, lora_B, block_size, scaling)[0]
