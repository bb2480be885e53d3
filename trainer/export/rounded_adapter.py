"""An adapter whose merged weights are rounded (qat/merge_aware.py): what its folder says of that, and reading it.

    lowbit.json                `rounded`: the scheme of each layer, and the hash of the codes
    merged_scales.safetensors  learned scales and zero points by layer, where they are trained

Plain PEFT reads the folder too, and computes x (W + s B A)^T, the function without the rounding.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.architecture import base_model
from trainer.config.errors import UserError, require
from trainer.lora import register_layers
from trainer.qat.lora import merge_aware_over, round_others, rounding_layers
from trainer.qat.merge_aware import MergeAwareLinear
from trainer.qat.packed_model import packed_sha256
from trainer.qat.scheme import Scheme

SCALES = "merged_scales.safetensors"


def rounding_identity(model: PeftModel) -> dict[str, Any]:
    """What lowbit.json says of layers that round; nothing where none does."""
    layers = dict(rounding_layers(base_model(model)))
    if not layers:
        return {}
    schemes: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for name, layer in layers.items():
        settings = layer.scheme.settings | ({"learn_scales": True} if layer.scheme.learn_scales else {})
        if settings not in schemes:
            schemes.append(settings)
        numbers[name] = schemes.index(settings)
    return {"rounded": {"schemes": schemes, "layers": numbers, "packed_sha256": packed_sha256(model)}}


def write_scales(model: PeftModel, folder: Path) -> None:
    """Learned scales and zero points into `folder`; no file where none are trained."""
    tensors = {f"{name}.{key}": tensor.detach().cpu().contiguous() for name, key, tensor in _learned(base_model(model))}
    (folder / SCALES).unlink(missing_ok=True)
    if tensors:
        save_file(tensors, folder / SCALES, metadata={"format": "pt"})


def read_rounded(model: nn.Module, folder: Path, config: PeftLoraConfig, rounded: dict[str, Any]) -> PeftModel:
    """Put the adapter over a 16-bit `model`, with layers that round as in training; frozen, in eval mode.

    rounded  of `rounding_identity`
    raises   UserError if a scheme is not known, a file is damaged, or the codes are not those that were trained
    """
    schemes = _schemes(folder, rounded)
    register_layers(config, over_dense=merge_aware_over(model, schemes))
    peft_model = PeftModel.from_pretrained(model, folder, config=config)
    round_others(peft_model, schemes)
    _read_scales(base_model(peft_model), folder)
    peft_model.requires_grad_(False).eval()
    found, trained = packed_sha256(peft_model), rounded["packed_sha256"]
    require(
        found == trained,
        f"{folder} was trained to codes {trained[:12]}, and over this base it gives {found[:12]}; use the base that "
        "its config.yaml names, or copy the whole folder again",
    )
    return peft_model


def _schemes(folder: Path, rounded: dict[str, Any]) -> dict[str, Scheme]:
    try:
        schemes = [_scheme(dict(settings)) for settings in rounded["schemes"]]
        return {name: schemes[number] for name, number in rounded["layers"].items()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{folder / 'lowbit.json'} has a scheme that is not known here: {error}; update lowbit"
        ) from None


def _scheme(settings: dict[str, Any]) -> Scheme:
    learned = settings.pop("learn_scales", False)
    scheme = Scheme.from_settings(settings)
    return Scheme(scheme.weight, scheme.activations, scheme.integer, learned)


def _learned(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """Layer, "scales" or "zeros", and the parameter."""
    layers = [(name, layer) for name, layer in rounding_layers(model) if isinstance(layer, MergeAwareLinear)]
    found = [(name, "scales", layer.lora_scales) for name, layer in layers]
    found += [(name, "zeros", layer.lora_zeros) for name, layer in layers]
    return [(name, key, tensor) for name, key, tensor in found if tensor is not None]


@torch.no_grad()
def _read_scales(model: nn.Module, folder: Path) -> None:
    wanted = {f"{name}.{key}": tensor for name, key, tensor in _learned(model)}
    if not wanted:
        return
    require((folder / SCALES).is_file(), f"{folder / SCALES} is missing; copy the whole folder again")
    try:
        found = load_file(folder / SCALES)
    except SafetensorError as error:
        raise UserError(f"{folder / SCALES} cannot be read: {error}; copy it again") from None
    fits = wanted.keys() == found.keys() and all(wanted[name].shape == found[name].shape for name in wanted)
    require(fits, f"{folder / SCALES} holds scales of other layers than lowbit.json names; copy the whole folder again")
    for name, tensor in wanted.items():
        tensor.copy_(found[name])
