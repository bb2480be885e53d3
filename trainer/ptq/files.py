"""Finished blocks of a quantization, a file each, whole or absent: what a run that was stopped goes on from.

    <output_dir>/.blocks/block_000.safetensors   every tensor of the block; in its metadata the scheme of each packed
                                                 layer, the reports, and a hash of what decides them

Norms and biases are among the tensors, since methods fold factors into them.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config.errors import require
from trainer.config.ptq import PtqConfig
from trainer.linear import weights_sha256
from trainer.ptq.block import LayerReport
from trainer.qat.packed_linear import pack_layer, packed_weight
from trainer.qat.packed_model import scheme_of_layer
from trainer.qat.scheme import Scheme

_NO_INFLUENCE = ("model", "output_dir", "formats", "eval_rows", "max_pass_tokens")
"""Settings that decide no code, or that `place` has."""


def phase_sha256(
    model: nn.Module, schemes: Mapping[str, Scheme], rows: Sequence[Sequence[int]], config: PtqConfig, *, place: str
) -> str:
    """What decides the codes of a run: weights, schemes, rows in their order, settings.

    place  device and size of a pass, on which the last bits of sums over tokens depend
    """
    settings = {name: str(value) for name, value in asdict(config).items() if name not in _NO_INFLUENCE}
    layers = {name: scheme.settings for name, scheme in schemes.items()}
    digest = hashlib.sha256(json.dumps([weights_sha256(model), layers, settings, place]).encode())
    for row in rows:
        digest.update(np.asarray([len(row), *row], dtype=np.int64))
    return digest.hexdigest()


def save_block(
    folder: Path, index: int, block: nn.Module, names: Sequence[str], reports: Sequence[LayerReport], *, phase: str
) -> None:
    """Write a finished block; names: its packed layers."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in block.state_dict().items()}
    schemes = {name: scheme_of_layer(block.get_submodule(name)).settings for name in names}
    metadata = {
        "phase": phase,
        "schemes": json.dumps(schemes),
        "reports": json.dumps([report.to_dict() for report in reports]),
    }
    path = _path(folder, index)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load_block(folder: Path, index: int, block: nn.Module, *, phase: str) -> list[LayerReport] | None:
    """Make a finished block of a block in 16 bits; None, and no change, if it is not finished.

    raises  UserError if the file is of another run
    """
    path = _path(folder, index)
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        require(
            metadata["phase"] == phase,
            f"{path} is of a run on other weights, other rows, another device or with other settings; give another "
            f"output_dir, or remove {folder} to begin anew",
        )
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    for name, settings in json.loads(metadata["schemes"]).items():
        _put_layer(block, name, Scheme.from_settings(settings), tensors)
    block.load_state_dict(tensors, assign=True)
    block.requires_grad_(False)
    return [LayerReport(**report) for report in json.loads(metadata["reports"])]


def _put_layer(block: nn.Module, name: str, scheme: Scheme, tensors: Mapping[str, Tensor]) -> None:
    dense = block.get_submodule(name)
    own = {key: tensors.get(f"{name}.{key}") for key in (*scheme.weight.tensor_names, "input_scale")}
    weight = packed_weight(scheme, own, tuple(dense.weight.shape))
    block.set_submodule(name, pack_layer(scheme, weight, dense.bias, input_scale=own["input_scale"]))


def _path(folder: Path, index: int) -> Path:
    return folder / f"block_{index:03d}.safetensors"
