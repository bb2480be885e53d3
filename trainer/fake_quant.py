"""FakeQuantLinear: a trainable linear layer that computes what its quantized self will compute.

The layer of quantization-aware training: forward multiplies values that lie on the quantizer's grid, backward passes
the rounding straight through (kernels/fake_quant.py). The surprising thing: autograd keeps only the input and the
weight themselves, and both fake quantizations are computed again in backward, a few percent of the products' time.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.kernels.fake_quant import Grid, fake_quant, fake_quant_gradient
from trainer.kernels.int4 import Int4Weight
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic


class FakeQuantLinear(nn.Module):
    """y = Q(x) Q(W)^T + bias; W and bias are parameters like those of nn.Linear.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        weight_grid: Grid,
        activation_grid: Grid | None = None,
        integer: bool = False,
    ) -> None:
        """The grid of the weight, and that of x: `Grid.int8()` is one scale per token, None leaves x as it is.

        weight   [out_features, in_features] float; float32 beside a 16-bit x is a master copy, and only Q(W) is rounded
        integer  forward by the integer product of a server with dynamic INT8 activations, bit for bit
                 (kernels/integer_linear.py): a 16-bit product rounds Q(x) and Q(W) to 16 bits first. It needs finite
                 weights and took 4 % more time in a step of 1,024 tokens on two Zen 4 cores
        raises   ValueError naming the group sizes that fit in_features, or if `integer` has other activations
        """
        super().__init__()
        weight_grid.groups_of(weight)
        if activation_grid is not None:
            activation_grid.groups_of(weight)
        if integer and activation_grid != Grid.int8():
            raise ValueError(f"integer=True with activation_grid={activation_grid}; use Grid.int8(), or integer=False")
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.weight_grid, self.activation_grid, self.integer = weight_grid, activation_grid, integer

    def forward(self, x: Tensor) -> Tensor:
        grids = self.weight_grid, self.activation_grid
        return _FakeQuantLinear.apply(x, self.weight, self.bias, *grids, self.integer)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight={self.weight_grid}, activations={self.activation_grid}, integer={self.integer}"
        )


class _FakeQuantLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_grid: Grid,
        activation_grid: Grid | None,
        integer: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grids = weight_grid, activation_grid
        bias = None if bias is None else bias.to(x.dtype)
        if integer:
            codes = weight_grid.quantize(weight)
            multiply = int4_linear_dynamic if isinstance(codes, Int4Weight) else int8_linear_dynamic
            y = multiply(x, codes)
            return y if bias is None else y + bias
        return linear(_quantized(x, activation_grid), _quantized(weight, weight_grid).to(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        weight_grid, activation_grid = ctx.grids
        grad_x = grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])  # [T, out_features]
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ _quantized(weight, weight_grid).to(grad.dtype)).view(x.shape)
            if activation_grid is not None:
                grad_x = fake_quant_gradient(grad_x, x, activation_grid)
        if ctx.needs_input_grad[1]:
            grad_weight = rows.T @ _quantized(x, activation_grid).reshape(-1, x.shape[-1])
            grad_weight = fake_quant_gradient(grad_weight.to(weight.dtype), weight, weight_grid)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def _quantized(x: Tensor, grid: Grid | None) -> Tensor:
    return x if grid is None else fake_quant(x, grid)


def fake_quantize_linears(
    model: nn.Module,
    weight_grid: Grid,
    activation_grid: Grid | None = None,
    *,
    skip: set[nn.Module],
    integer: bool = False,
) -> int:
    """Replace each nn.Linear of `model` by a FakeQuantLinear over the same parameters, in place; returns how many.

    Grids and `integer` are those of FakeQuantLinear.

    skip    modules that stay as they are, such as the output head
    raises  ValueError naming the layer whose in_features the groups do not divide
    """
    replaced: dict[str, FakeQuantLinear] = {}
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear or layer in skip:
            continue
        options = {"weight_grid": weight_grid, "activation_grid": activation_grid, "integer": integer}
        try:
            replaced[name] = FakeQuantLinear(layer.weight, layer.bias, **options).train(layer.training)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name, layer in replaced.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return len(replaced)
