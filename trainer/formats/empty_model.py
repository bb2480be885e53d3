"""From a folder of packed weights to a module: built without memory, then filled from memory-mapped files.

Layers are put in by whoever knows their layout, who takes their tensors out of the dictionary; what is left fills the
dense rest. The surprising thing: transformers loads what it does not recognise as random weights with a warning, so
that here every tensor of the files has a place, and every weight of the model a tensor, or there is no model.
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from trainer.config.errors import UserError, require


def quantization_config(path: str | Path) -> dict[str, Any] | None:
    """What config.json of a folder says of its codes; None for any other model, or no folder."""
    file = Path(path) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")).get("quantization_config") if file.is_file() else None


def empty_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The dense model that config.json describes, its parameters on the meta device."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with init_empty_weights(include_buffers=False):  # rotary frequencies are buffers, computed and not loaded
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def read_tensors(folder: Path, stem: str = "model") -> dict[str, Tensor]:
    """Name -> tensor of `<stem>.safetensors` or its shards; mapped, and read when they are used.

    raises  UserError if a file is missing or damaged
    """
    index = folder / f"{stem}.safetensors.index.json"
    names = [f"{stem}.safetensors"]
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


def fill(model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """What is not packed, in the compute dtype; afterwards the model is whole, frozen and in eval mode.

    raises  UserError naming weights that the model lacks, or the files
    """
    rest = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    loading = model.load_state_dict(rest, strict=False, assign=True)
    require(not loading.unexpected_keys, f"{folder} has weights that its config lacks: {loading.unexpected_keys[:3]}")
    model.tie_weights()
    missing = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    require(
        not missing, f"{folder} lacks the weights {missing[:3]} ({len(missing)} in all); copy the whole folder again"
    )
    model.requires_grad_(False).eval()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)
