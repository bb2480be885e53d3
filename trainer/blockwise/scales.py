"""ScaledLinear: a packed linear layer whose scales are trained and whose codes stay.

End-to-end training of quantization parameters (EfficientQAT, arXiv:2407.11062, section 3.3, "E2E-QP"): after codes are
chosen, the scales of all layers are trained on the model's own loss. A model in 4 bits and the optimizer's state of one
value a group are all that it needs in memory. The surprising thing: the gradient of a scale is a sum over its group of
the weight's gradient times code - zero, so the weight's gradient is formed, one layer at a time, and never kept.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.linear import QuantLinear
from trainer.qat.scheme import Scheme
from trainer.quantizer import QuantizedTensor


class ScaledLinear(nn.Module):
    """y = x ((codes - zeros) * scales)^T + bias; `scales` is the one parameter, codes and zeros are buffers.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype
    """

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None = None, *, dtype: torch.dtype) -> None:
        """weight  int4 or int8 codes; raises ValueError for codebooks, whose scales are stored as codes themselves

        dtype  of x: the model's compute dtype
        """
        super().__init__()
        if weight.tensors.get("scales") is None:
            raise ValueError(
                f"a weight in {weight.quantizer.codebook} has no scales to train; use a scheme of int4 or int8"
            )
        self.out_features, self.in_features = weight.shape
        self.quantizer, self.scheme, self.dtype = weight.quantizer, Scheme(weight.quantizer), dtype
        self.enabled = True  # as of layers that have 16-bit weights beside their codes; there are none here
        for name, tensor in weight.tensors.items():
            if name == "scales":
                self.scales = nn.Parameter(tensor.detach().clone())
            else:
                self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """The codes and scales that forward multiplies by: what ships. Scales are rounded to the quantizer's dtype."""
        scales = self.scales.detach().to(getattr(torch, self.quantizer.scale_dtype)).float()
        tensors = {name: getattr(self, name) for name in self.quantizer.tensor_names} | {"scales": scales}
        return QuantizedTensor(tensors, (self.out_features, self.in_features), self.quantizer)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] of `dtype`, decoded at each access."""
        return self.quantized.dequantize(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _ScaledProduct.apply(x, self.scales, self.quantized, bias)

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.quantizer.settings.items())
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {settings}"


class _ScaledProduct(torch.autograd.Function):
    """Keeps x alone; the weight is decoded in forward and again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, scales: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return linear(x, weight.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x = grad_scales = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.dequantize(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])).float()
            grad_scales = _sum_of_groups(grad_weight * _codes(weight), weight)
        return grad_x, grad_scales, None, None


def _codes(weight: QuantizedTensor) -> Tensor:
    """code - zero, [out_features, in_features] float32."""
    ones = {**weight.tensors, "scales": torch.ones_like(weight.tensors["scales"])}
    return replace(weight, tensors=ones).dequantize(torch.float32)


def _sum_of_groups(values: Tensor, weight: QuantizedTensor) -> Tensor:
    """[out_features, in_features] -> [out_features, groups], by the order of the scales."""
    scales, g_idx = weight.tensors["scales"], weight.tensors.get("g_idx")
    if g_idx is not None:
        return torch.zeros_like(scales).index_add_(1, g_idx, values)
    return values.view(*scales.shape, -1).sum(-1)


def train_scales(model: nn.Module, *, dtype: torch.dtype) -> list[str]:
    """Replace each QuantLinear of `model` by a ScaledLinear of the same codes, in place; nothing else is trained.

    dtype    of what goes through the layers
    returns  their names
    raises   ValueError naming the layer whose codes have no scales to train
    """
    model.requires_grad_(False)
    names = [name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)]
    for name in names:
        layer = model.get_submodule(name)
        try:
            scaled = ScaledLinear(layer.quantized, layer.bias, dtype=dtype).train(layer.training)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, scaled)
    return names
