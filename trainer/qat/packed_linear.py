"""Layers of codes that QuantLinear does not compute: rounded inputs, weights in small floats, embeddings.

What a FakeQuantLinear becomes when training ends (trainer/convert.py): the same product of the same codes, without the
weight that they were made from. A layer that takes its inputs as they are and has a weight of `Quantizer` becomes the
QuantLinear of every packed base instead, which our kernels and the server know best.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as rows_of
from torch.nn.functional import linear

from trainer.kernels.float_grids import FloatGrid, FloatWeight
from trainer.kernels.int4 import Int4Weight
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.linear import QuantLinear
from trainer.qat.fake_weight import PerLayer, PerToken
from trainer.qat.scheme import Scheme
from trainer.quantizer import QuantizedTensor

Packed = QuantizedTensor | FloatWeight
"""Codes and scales of one weight."""


class _Codes(nn.Module):
    """Codes and scales as buffers."""

    def __init__(self, weight: Packed, scheme: Scheme) -> None:
        super().__init__()
        self.shape, self.scheme = tuple(weight.shape), scheme
        for name, tensor in weight.tensors.items():
            self.register_buffer(name, tensor)

    @property
    def quantized(self) -> Packed:
        """The weight as codes and scales; a view of the buffers."""
        tensors = {name: getattr(self, name) for name in self.scheme.weight.tensor_names}
        kind = FloatWeight if isinstance(self.scheme.weight, FloatGrid) else QuantizedTensor
        return kind(tensors, self.shape, self.scheme.weight)

    @property
    def function(self) -> str:
        """What `weights_sha256` adds to the tensors."""
        return self.scheme.function

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight, computed in float32 and rounded once."""
        return self.quantized.dequantize(dtype)


class PackedLinear(_Codes):
    """y = Q(x) W^T + bias with a packed W; no gradient flows.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype
    """

    def __init__(
        self, weight: Packed, scheme: Scheme, bias: Tensor | None = None, *, input_scale: Tensor | None = None
    ) -> None:
        """input_scale  [] float32: what static activations are divided by; None for a scale a token"""
        super().__init__(weight, scheme)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("input_scale", input_scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.scheme.integer:
            codes = self.quantized.weight
            multiply = int4_linear_dynamic if isinstance(codes, Int4Weight) else int8_linear_dynamic
            y = multiply(x, codes, x_scale=self.input_scale)
            return y if bias is None else y + bias
        return linear(self.rounded_input(x), self.dequantize(x.dtype), bias)

    def rounded_input(self, x: Tensor) -> Tensor:
        """Q(x), of x's dtype; x itself where inputs are not rounded."""
        activations = self.scheme.activations
        if activations is None:
            return x
        return PerLayer().values(x, self.input_scale) if activations.static else PerToken(activations.grid).values(x)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.function}"


class PackedEmbedding(_Codes):
    """Rows of a packed table.

    in   token ids [...] int64
    out  [..., embedding_dim] of `dtype`
    """

    def __init__(self, weight: Packed, scheme: Scheme, dtype: torch.dtype) -> None:
        super().__init__(weight, scheme)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """[num_embeddings, embedding_dim], decoded at each access"""
        return self.dequantize(self.dtype)

    @torch.no_grad()
    def forward(self, token_ids: Tensor) -> Tensor:
        return rows_of(token_ids, self.weight)


def pack_layer(
    scheme: Scheme, weight: Packed, bias: Tensor | None = None, *, input_scale: Tensor | None = None
) -> QuantLinear | PackedLinear:
    """The linear layer that multiplies `weight` as `scheme` says; frozen."""
    if scheme.activations is None and isinstance(weight, QuantizedTensor):
        return QuantLinear(weight, bias)
    return PackedLinear(weight, scheme, bias, input_scale=input_scale)


def packed_weight(scheme: Scheme, tensors: Mapping[str, Tensor | None], shape: tuple[int, int]) -> Packed:
    """The weight whose tensors were read from a file."""
    own = {name: tensors.get(name) for name in scheme.weight.tensor_names}
    kind = FloatWeight if isinstance(scheme.weight, FloatGrid) else QuantizedTensor
    return kind(own, shape, scheme.weight)
