"""A model whose layers are codes, in a folder: what quantization-aware training exports, and how it is opened again.

    config.json                  of the 16-bit model, with `quantization_config`: quant_method "lowbit", the scheme of
                                 each layer, the compute dtype, two hashes
    packed.safetensors           `<layer>.<tensor>` for codes and scales (or shards and their index), and all other
                                 weights in the compute dtype
    generation_config.json, tokenizer files, chat template

No code is computed when a folder is opened: what is on disk is what is multiplied. The file has a name of its own since
transformers, which knows no method "lowbit", would open `model.safetensors` with a warning and random weights.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from trainer.architecture import base_model
from trainer.config.errors import UserError, require
from trainer.linear import weights_sha256
from trainer.qat.packed_linear import Packed, PackedEmbedding, pack_layer, packed_weight
from trainer.qat.scheme import Scheme

METHOD, FORMAT = "lowbit", 1
"""What config.json calls this layout, and its number: another one is refused."""
WEIGHTS = "packed"
"""The files are called packed.safetensors, or packed-00001-of-00002.safetensors and packed.safetensors.index.json."""


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
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    entry = json.loads(file.read_text(encoding="utf-8")).get("quantization_config") or {}
    return entry if entry.get("quant_method") == METHOD else None


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
    tensors = _read(folder)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with init_empty_weights(include_buffers=False):  # rotary frequencies are buffers, computed and not loaded
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _put_layers(model, folder, entry, tensors)
    _put_rest(model, folder, tensors, dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    _require_hashes(model, folder, entry, dtype)
    model.name_or_path = str(folder)
    return model


def _read(folder: Path) -> dict[str, Tensor]:
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    names = [f"{WEIGHTS}.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        require((folder / name).is_file(), f"{folder} lacks {name}; copy the whole folder again")
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}
        except SafetensorError as error:
            raise UserError(f"{folder / name} cannot be read: {error}; copy it again") from None
    return tensors


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


def _put_rest(model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """What is not packed, in the compute dtype."""
    rest = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    loading = model.load_state_dict(rest, strict=False, assign=True)
    require(not loading.unexpected_keys, f"{folder} has weights that its config lacks: {loading.unexpected_keys[:3]}")
    model.tie_weights()
    missing = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    require(
        not missing, f"{folder} lacks the weights {missing[:3]} ({len(missing)} in all); copy the whole folder again"
    )
    model.requires_grad_(False).eval()


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
