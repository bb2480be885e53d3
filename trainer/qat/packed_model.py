"""The layers of a model that are codes: which they are, how they multiply, and their hash."""

import hashlib

import torch
from torch import nn

from trainer.architecture import base_model
from trainer.qat.packed_linear import Packed
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
