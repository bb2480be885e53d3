"""Codes of the base that travel with an adapter: those that packing the 16-bit weights anew would not give.

    base_codes.safetensors   for each such layer, `<layer>.<buffer>` as its QuantLinear holds it

LoftQ with more than one iteration chooses codes that fit its adapter, not the nearest ones. They are written when the
base is packed, read when the run resumes or another process joins, and copied into the export; whoever opens the
adapter packs the base plainly and puts them in. The hash over the whole base, in lowbit.json, is compared after that.
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.config.errors import UserError, require
from trainer.linear import QuantLinear

FILE_NAME = "base_codes.safetensors"


def write_base_codes(model: nn.Module, layers: Iterable[str], folder: Path) -> None:
    """Write the codes of `layers`, by their names under the base model, into `folder`; no file for no layers."""
    packed = _packed_layers(model)
    tensors = {
        f"{name}.{key}": tensor.cpu().contiguous() for name in layers for key, tensor in _buffers(packed[name]).items()
    }
    path = folder / FILE_NAME
    path.unlink(missing_ok=True)  # what a run that ended before its first checkpoint left
    if tensors:
        partial = path.with_name(f".{FILE_NAME}.partial")
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(path)


@torch.no_grad()
def load_base_codes(model: nn.Module, folder: Path) -> int:
    """Put the codes of `folder` into the packed layers of `model`, in place; returns the number of layers.

    raises  UserError if the file is damaged, or if a layer of it is not there, or packed with other settings
    """
    packed, path = _packed_layers(model), folder / FILE_NAME
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read(path).items():
        layer, _, key = name.rpartition(".")
        layers.setdefault(layer, {})[key] = tensor
    for name, tensors in layers.items():
        require(name in packed, f"{path} has codes of {name}, which this base does not pack; give its own base")
        here = _buffers(packed[name])
        fits = here.keys() == tensors.keys() and all(
            (here[key].shape, here[key].dtype) == (tensor.shape, tensor.dtype) for key, tensor in tensors.items()
        )
        require(fits, f"{path}: {name} was packed with other quant settings than this base; use its own")
        for key, tensor in tensors.items():
            here[key].copy_(tensor)
    return len(layers)


def copy_base_codes(model: nn.Module, source: Path, folder: Path) -> dict[str, Any] | None:
    """Let the codes of the run folder `source` travel with the export in `folder`; None if it has none.

    returns  what lowbit.json says of them: `num_layers` and the file's `sha256`
    raises   RuntimeError if the file differs from the model
    """
    path = folder / FILE_NAME
    path.unlink(missing_ok=True)
    if not (source / FILE_NAME).is_file():
        return None
    shutil.copyfile(source / FILE_NAME, path)
    packed, written = _packed_layers(model), load_file(path)
    for name, tensor in written.items():
        layer, _, key = name.rpartition(".")
        if not torch.equal(_buffers(packed[layer])[key].cpu(), tensor):
            raise RuntimeError(f"{path} differs from the base that was trained, in {name}")
    return {"num_layers": len({name.rpartition(".")[0] for name in written}), "sha256": _sha256(path)}


def restore_base(model: nn.Module, folder: Path, identity: dict[str, Any]) -> None:
    """Make a plainly packed `model` the base of the adapter in `folder`, whose lowbit.json is `identity`.

    raises  UserError if the codes that the adapter needs are missing, or are not those that were written
    """
    says = identity.get("base_codes")
    if not says:
        return
    path = folder / FILE_NAME
    require(path.is_file(), f"{path} is missing; the adapter was trained over these codes: copy the whole folder again")
    require(_sha256(path) == says["sha256"], f"{path} is not the file that was exported; copy the whole folder again")
    load_base_codes(model, folder)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}; copy it again") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _packed_layers(model: nn.Module) -> dict[str, QuantLinear]:
    """Name under the base model -> packed layer, whether there are adapters over them or not."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = {name: layer for name, layer in base.named_modules() if isinstance(layer, QuantLinear)}
    return {name.removesuffix(".base_layer"): layer for name, layer in layers.items()}


def _buffers(layer: QuantLinear) -> dict[str, Tensor]:
    return dict(layer.named_buffers(recurse=False))
