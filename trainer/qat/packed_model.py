"""The layers of a model that are codes: which they are, how they multiply, and their hash."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer.architecture import base_model
from trainer.qat.packed_linear import Packed, PackedEmbedding
from trainer.qat.scheme import Scheme


def packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name under the base model -> layer that multiplies codes, while it is trained or afterwards."""
    return {name: layer for name, layer in base_model(model).named_modules() if hasattr(type(layer), "quantized")}


def packed_sha256(model: nn.Module) -> str:
    """A hash of all codes and scales of a model and of how they are multiplied: the same before and after `convert`."""
    digest = hashlib.sha256()
    for name, layer in sorted(packed_layers(model).items()):
        quantized: Packed = layer.quantized
        digest.update(f"{name} {quantized.shape} {scheme_of_layer(layer).function}".encode())
        tensors = {**quantized.tensors, "input_scale": getattr(layer, "input_scale", None)}
        for key, tensor in tensors.items():
            if tensor is not None:
                digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def scheme_of_layer(layer: nn.Module) -> Scheme:
    """How a layer multiplies its codes; a QuantLinear takes inputs as they are."""
    scheme = getattr(layer, "scheme", None)
    return Scheme(layer.quantized.quantizer) if scheme is None else scheme


@contextmanager
def decoded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Dense layers of the same values in the place of packed ones, for an export in 16 bits.

    dtype  of their weights; inputs are no longer rounded
    """
    causal_lm, packed = base_model(model), packed_layers(model)
    try:
        for name, layer in packed.items():
            causal_lm.set_submodule(name, _dense(layer, dtype))
        yield
    finally:
        for name, layer in packed.items():
            causal_lm.set_submodule(name, layer)


def _dense(layer: nn.Module, dtype: torch.dtype) -> nn.Linear | nn.Embedding:
    weight = nn.Parameter(layer.quantized.dequantize(dtype), requires_grad=False)
    if isinstance(layer, PackedEmbedding):
        return nn.Embedding.from_pretrained(weight)
    dense = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    dense.weight, dense.bias = weight, layer.bias
    return dense
