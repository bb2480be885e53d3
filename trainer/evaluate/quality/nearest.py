"""The original rounded to nearest on the grid of a candidate: what a candidate is better than, if its method does much.

Each layer that holds codes there holds the nearest ones of the original's weight here, with the same groups, zero points
and type of scales; inputs are rounded as there. A static scale of inputs is no rounding to nearest but a measurement, and
codes that a file gave as plain values have no grid: there is none of these.
"""

import torch
from torch import nn

from trainer.architecture import base_model
from trainer.qat.packed_linear import pack_layer
from trainer.qat.packed_model import packed_layers, scheme_of_layer
from trainer.qat.scheme import Scheme

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
        if not isinstance(layers[name], nn.Module) or len(layers[name].quantized.shape) != 2:
            return f"{name} is no linear layer"
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
    """`210 layers int4, groups of 32`: the rounding, in words."""
    kinds = sorted({scheme.function for scheme in schemes.values()})
    return f"{len(schemes)} layers rounded to nearest: {'; '.join(kinds)}"
