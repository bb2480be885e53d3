"""The product of fake-quantized operands, Q(x) Q(W)^T, and its gradient.

Backward computes both fake quantizations again: autograd keeps x, W and what is trained beside W, and nothing of the
size of either more.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from trainer.kernels.int4 import Int4Weight
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.qat.fake_weight import InputFunction, WeightFunction


def fake_values(tensor: Tensor, function: WeightFunction | InputFunction, *parameters: Tensor | None) -> Tensor:
    """What stands for a weight or an input, of its shape and dtype, with the gradients of `function`."""
    return _FakeValues.apply(tensor, function, *parameters)


def fake_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    functions: tuple[WeightFunction, InputFunction | None],
    integer: bool,
    *parameters: Tensor | None,
) -> Tensor:
    """Q(x) Q(W)^T + bias, of x's dtype.

    x            [..., in_features]; weight [out_features, in_features]; bias [out_features] or None
    input_scale  [] float32 of inputs with one scale a layer, else None
    functions    how the weight is rounded, and the input; None: x as it is
    integer      forward by the integer product of a server, bit for bit: a 16-bit product rounds Q(x) and Q(W) to 16
                 bits first. It needs finite weights
    parameters   of the weight's function
    """
    return _FakeProduct.apply(x, weight, bias, input_scale, functions, integer, *parameters)


class _FakeValues(torch.autograd.Function):
    """The values of a weight or input function; backward computes from the tensor again."""

    @staticmethod
    def forward(ctx, weight: Tensor, function: WeightFunction | InputFunction, *parameters: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, *parameters)
        ctx.function = function
        return function.values(weight, *parameters)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight, *grads = ctx.function.gradients(grad.contiguous(), *ctx.saved_tensors)
        return grad_weight, None, *grads


class _FakeProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_scale: Tensor | None,
        functions: tuple[WeightFunction, InputFunction | None],
        integer: bool,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.functions, ctx.num_inputs = functions, 0 if input_scale is None else 1
        # A copy: an observer may move the scale before backward comes.
        inputs = () if input_scale is None else (input_scale.detach().clone(),)
        ctx.save_for_backward(x, weight, *inputs, *parameters)
        weight_function, input_function = functions
        bias = None if bias is None else bias.to(x.dtype)
        if integer:
            codes = weight_function.codes(weight, *parameters).weight
            multiply = int4_linear_dynamic if isinstance(codes, Int4Weight) else int8_linear_dynamic
            y = multiply(x, codes, x_scale=inputs[0] if inputs else None)
            return y if bias is None else y + bias
        values = weight_function.values(weight, *parameters).to(x.dtype)
        return linear(x if input_function is None else input_function.values(x, *inputs), values, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rest = ctx.saved_tensors
        inputs, parameters = rest[: ctx.num_inputs], rest[ctx.num_inputs :]
        weight_function, input_function = ctx.functions
        needs_x, needs_weight, needs_bias, needs_scale, _, _, *needs_parameters = ctx.needs_input_grad
        grad_x = grad_weight = grad_scale = None
        grads: tuple[Tensor | None, ...] = (None,) * len(parameters)
        rows = grad.reshape(-1, grad.shape[-1])  # [T, out_features]
        if needs_x or needs_scale:
            grad_x = (rows @ weight_function.values(weight, *parameters).to(grad.dtype)).view(x.shape)
            if input_function is not None:
                grad_x, *grad_scales = input_function.gradients(grad_x, x, *inputs)
                grad_scale = grad_scales[0] if grad_scales else None
        if needs_weight or any(needs_parameters):
            used = x if input_function is None else input_function.values(x, *inputs)
            product = (rows.T @ used.reshape(-1, x.shape[-1])).to(weight.dtype)
            grad_weight, *grads = weight_function.gradients(product, weight, *parameters)
        grad_bias = rows.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, grad_scale, None, None, *grads
