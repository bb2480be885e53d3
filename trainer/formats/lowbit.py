"""A model whose layers are codes, in a folder: what quantization-aware training exports, and how it is opened again.

    config.json                  of the 16-bit model, with `quantization_config`: quant_method "lowbit", the scheme of
                                 each layer, the compute dtype, two hashes
    packed.safetensors           `<layer>.<tensor>` for codes and scales (or shards and their index), and all other
                                 weights in the compute dtype
    generation_config.json, tokenizer files, chat template

No code is computed when a folder is opened: what is on disk is what is multiplied. The file has a name of its own since
transformers, which knows no method "lowbit", would open `model.safetensors` with a warning and random weights.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.config.errors import UserError, require
from trainer.formats.empty_model import empty_model, fill, quantization_config, read_tensors
from trainer.linear import weights_sha256
from trainer.qat.packed_linear import PackedEmbedding, pack_layer, packed_weight
from trainer.qat.packed_model import packed_layers, packed_sha256, scheme_of_layer
from trainer.qat.scheme import Scheme

METHOD, FORMAT = "lowbit", 1
"""What config.json calls this layout, and its number: another one is refused."""
WEIGHTS = "packed"
"""The files are called packed.safetensors, or packed-00001-of-00002.safetensors and packed.safetensors.index.json."""


def describe_packed(model: nn.Module, dtype: torch.dtype, *, kv_cache: bool = False) -> dict[str, Any]:
    """`quantization_config` of a model whose layers are all packed; kv_cache: trained for keys and values in INT8."""
    schemes: list[dict[str, Any]] = []
    layers: dict[str, int] = {}
    for name, layer in packed_layers(model).items():
        settings = scheme_of_layer(layer).settings
        if settings not in schemes:
            schemes.append(settings)
        layers[name] = schemes.index(settings)
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_cache": "int8" if kv_cache else "auto",
        "schemes": schemes,
        "layers": layers,
        "packed_sha256": packed_sha256(model),
        "weights_sha256": weights_sha256(model),
    }


def packed_entry(path: str | Path) -> dict[str, Any] | None:
    """`quantization_config` of a folder with a packed model of ours; None for any other model."""
    entry = quantization_config(path)
    return entry if entry and entry.get("quant_method") == METHOD else None


def open_packed(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a folder that `write_packed` wrote, on the CPU, every parameter frozen.

    dtype   the compute dtype
    raises  UserError if a file is missing, damaged, or not the one that was exported
    """
    entry = packed_entry(folder)
    require(
        entry["format"] == FORMAT,
        f"{folder} has format {entry['format']} of packed models, and this version reads {FORMAT}; update lowbit",
    )
    model, tensors = empty_model(folder, dtype), read_tensors(folder, WEIGHTS)
    _put_layers(model, folder, entry, tensors)
    fill(model, folder, tensors, dtype)
    _require_hashes(model, folder, entry, dtype)
    return model


def _put_layers(model: PreTrainedModel, folder: Path, entry: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Packed layers in the place of dense ones; their tensors are taken out of `tensors`."""
    try:
        schemes = [Scheme.from_settings(settings) for settings in entry["schemes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}/config.json has a scheme that is not known here: {error}; update lowbit") from None
    for name, number in entry["layers"].items():
        scheme, dense = schemes[number], model.get_submodule(name)
        own = {key: tensors.pop(f"{name}.{key}", None) for key in (*scheme.weight.tensor_names, "input_scale")}
        require(own["packed"] is not None, f"{folder} lacks the codes of {name}; copy the whole folder again")
        weight = packed_weight(scheme, own, tuple(dense.weight.shape))
        if isinstance(dense, nn.Embedding):
            layer = PackedEmbedding(weight, scheme, dense.weight.dtype)
        else:
            bias = tensors.pop(f"{name}.bias", None)
            layer = pack_layer(scheme, weight, bias, input_scale=own["input_scale"])
        model.set_submodule(name, layer)


def _require_hashes(model: PreTrainedModel, folder: Path, entry: dict[str, Any], dtype: torch.dtype) -> None:
    """The weights are those that were written; in another compute dtype, the codes are."""
    same_dtype = str(dtype).removeprefix("torch.") == entry["dtype"]
    found = {"packed_sha256": packed_sha256(model)}
    if same_dtype:
        found["weights_sha256"] = weights_sha256(model)
    for name, value in found.items():
        require(
            value == entry[name],
            f"{folder}: {name} is {value[:12]} and was {entry[name][:12]} when the model was exported; the files were "
            "changed or damaged: copy the whole folder again",
        )
