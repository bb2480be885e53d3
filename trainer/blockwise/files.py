"""Finished blocks of block-wise training, a file each, whole or absent.

    <run folder>/blockwise/block_000.safetensors   codes and scales by layer; what the phase was and the block's report

A file is written beside its place, flushed and renamed. Each has a hash of what decides a phase (weights, rows,
settings): a run that would go on from the blocks of another one is refused.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from trainer.blockwise.block import Codes
from trainer.config.blockwise import BlockwiseConfig
from trainer.config.errors import require
from trainer.linear import weights_sha256
from trainer.qat.scheme import Scheme
from trainer.quantizer import QuantizedTensor


@dataclass(frozen=True)
class BlockReport:
    """One block's line in blockwise.json.

    error_before, error_after  `blockwise.loss` a token on rows that no step saw: of the nearest codes, of the trained
    accepted                   whether the trained codes are kept
    seconds                    of this block, the passes of all rows through it included
    """

    index: int
    error_before: float
    error_after: float
    accepted: bool
    seconds: float


def phase_sha256(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    rows: Sequence[Sequence[int]],
    config: BlockwiseConfig,
    *,
    seed: int,
) -> str:
    """What decides the codes of a phase: weights, layers and schemes, rows in their order, settings, seed."""
    settings = asdict(config)
    del settings["activations_mb"]  # where streams lie changes nothing
    layers = {name: f"{scheme.settings} {scheme.learn_scales} {scheme.scale_init}" for name, scheme in schemes.items()}
    digest = hashlib.sha256(json.dumps([weights_sha256(model), layers, settings, seed]).encode())
    for row in rows:
        digest.update(np.asarray([len(row), *row], dtype=np.int64))
    return digest.hexdigest()


def save_block(folder: Path, report: BlockReport, codes: Codes, *, phase: str) -> None:
    """Write a finished block; phase: its `phase_sha256`."""
    tensors = {f"{name}.{key}": tensor for name, code in codes.items() for key, tensor in code.tensors.items()}
    held = {key: tensor.cpu().contiguous() for key, tensor in tensors.items() if tensor is not None}
    path = _path(folder, report.index)
    partial = path.with_suffix(".partial")
    save_file(held, partial, {"phase": phase, "report": json.dumps(asdict(report))})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load_block(
    folder: Path, index: int, block: nn.Module, schemes: Mapping[str, Scheme], *, phase: str
) -> tuple[BlockReport, Codes] | None:
    """A finished block; None if it is not finished.

    block, schemes  its layers by their names inside it, and their schemes
    raises          UserError if the file is of another phase
    """
    path = _path(folder, index)
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        require(
            metadata["phase"] == phase,
            f"{path} was trained from other weights, other rows or with other settings of blockwise and qat than this "
            "run has; restore them, or start a new run without resume",
        )
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    codes: Codes = {}
    for name, scheme in schemes.items():
        parts = {key: tensors.get(f"{name}.{key}") for key in scheme.weight.tensor_names}
        codes[name] = QuantizedTensor(parts, tuple(block.get_submodule(name).weight.shape), scheme.weight)
    return BlockReport(**json.loads(metadata["report"])), codes


def write_report(reports: Sequence[BlockReport], config: BlockwiseConfig, path: Path) -> None:
    """blockwise.json: settings, totals and a line for each block."""
    report = {
        "settings": asdict(config),
        "seconds": sum(block.seconds for block in reports),
        "accepted": sum(block.accepted for block in reports),
        "blocks": [asdict(block) for block in reports],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _path(folder: Path, index: int) -> Path:
    return folder / f"block_{index:03d}.safetensors"
