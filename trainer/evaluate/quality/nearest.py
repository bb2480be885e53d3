"""The original rounded to nearest on the grid of a candidate: what a candidate is better than, if its method does much.

Each layer that holds codes there holds the nearest ones of the original's weight here, with the same groups, zero
points and type of scales; inputs are rounded as there. A static scale of inputs is no rounding to nearest but a
measurement, and codes that a file gave as plain values have no grid: there is none of these.
"""

from collections import Counter

import torch
from torch import nn

from trainer.architecture import base_model
from trainer.qat.packed_linear import PackedEmbedding, pack_layer
from trainer.qat.packed_model import packed_layers, scheme_of_layer
from trainer.qat.scheme import Scheme
from trainer.quantizer import WHOLE_ROW, Quantizer

_WRAPPED = ".base_layer"  # PEFT's name of a layer under an adapter


def grid_of(model: nn.Module) -> dict[str, Scheme] | str:
    """Layer of the base -> how it holds codes; or why rounding to nearest cannot be made."""
    layers = {name.removesuffix(_WRAPPED): layer for name, layer in packed_layers(model).items()}
    if not layers:
        return "it holds no codes whose grid is known"
    schemes = {name: scheme_of_layer(layer) for name, layer in layers.items()}
    for name, scheme in schemes.items():
        if scheme.activations is not None and scheme.activations.static:
            return "its inputs have static scales, which are measured and not rounded to nearest"
        if isinstance(layers[name], PackedEmbedding):
            return f"{name} is an embedding of codes"
    return schemes


@torch.no_grad()
def round_to_nearest(model: nn.Module, schemes: dict[str, Scheme]) -> None:
    """Pack layers of the original in place.

    raises  ValueError naming a layer that the original does not have, or has in another form
    """
    causal_lm = base_model(model)
    for name, scheme in schemes.items():
        try:
            layer = causal_lm.get_submodule(name)
        except AttributeError:
            raise ValueError(f"the original has no layer {name}") from None
        if type(layer) is not nn.Linear:
            raise ValueError(f"{name} of the original is a {type(layer).__name__}")
        bias = None if layer.bias is None else layer.bias.detach()
        packed = pack_layer(scheme, scheme.weight.quantize(layer.weight.detach()), bias)
        causal_lm.set_submodule(name, packed)


def describe_grid(schemes: dict[str, Scheme]) -> str:
    """`rounded to nearest: 210 layers int4, groups of 32`"""
    kinds = Counter(_words(scheme) for scheme in schemes.values())
    return "rounded to nearest: " + "; ".join(f"{count} layers {words}" for words, count in sorted(kinds.items()))


def _words(scheme: Scheme) -> str:
    weight, inputs = scheme.weight, "" if scheme.activations is None else ", inputs with a scale a token"
    if not isinstance(weight, Quantizer):
        return f"{scheme.weight_name}{inputs}"
    parts = [scheme.weight_name]
    if weight.block_size is not None:
        parts.append(f"blocks of {weight.block_size}{', double quantization' if weight.double_quant else ''}")
    if weight.group_size is not None:
        parts.append("whole rows" if weight.group_size == WHOLE_ROW else f"groups of {weight.group_size}")
    if weight.symmetric is False:
        parts.append("zero points")
    return ", ".join(parts) + inputs
