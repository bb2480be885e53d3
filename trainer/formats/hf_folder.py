"""A whole Hugging Face folder, of 16-bit weights or of codes in any layout: complete or absent.

    model.safetensors, or shards and their index   each tensor once, under the names of the base
    config.json, generation_config.json            of the base; what a layout says of its codes
    tokenizer files, chat template                 what training used
    lowbit.json                                    where it comes from

What is written for a linear layer, packed or adapted, is its caller's matter: a `Render`. Never more than one rendered
layer and one shard are in memory. A folder is written under a hidden name beside its place and renamed.
"""

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.architecture import base_layer, base_model
from trainer.config.errors import require
from trainer.linear import QuantLinear
from trainer.qat.packed_linear import PackedEmbedding, PackedLinear
from trainer.vocabulary import is_tied

SHARD_BYTES = 2**30
"""A file is begun when the one before would exceed this; a larger tensor has a file of its own."""

PACKED = QuantLinear | PackedLinear | PackedEmbedding
"""Layers whose buffers are codes and scales."""

Render = Callable[[str, nn.Module], dict[str, Tensor]]
"""What is written for the weight of a packed or adapted layer: suffix ("weight", "weight.absmax") -> tensor."""


def write_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    render: Render,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    stem: str = "model",
    **config: Any,
) -> None:
    """Weights, config, generation config and tokenizer into an empty folder.

    render   gives the tensors of packed and adapted linear layers; all others are written in dtype
    stem     of the names of the weights' files
    config   what config.json says besides the base's
    raises   UserError if a layer cannot be rendered, or a tensor would hold inf or nan
    """
    causal_lm = base_model(model)
    tied = _computes_tied(causal_lm)
    left_out = _head_names(causal_lm) if tied else ()
    shards = _Shards(folder, stem, shard_bytes)
    for name, tensor in _named_tensors(causal_lm, render, dtype):
        if name not in left_out:
            require(
                not tensor.is_floating_point() or bool(tensor.float().isfinite().all()),
                f"{name} would hold inf or nan; training diverged, export an earlier checkpoint",
            )
            shards.add(name, tensor)
    shards.close()
    _write_config(causal_lm, folder, dtype, tied=tied, **config)
    tokenizer.save_pretrained(folder)


def _named_tensors(model: PreTrainedModel, render: Render, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What is written, under the base's names, one rendered layer at a time."""
    for name, module in _leaves(model):
        prefix = f"{name}." if name else ""
        for key, tensor in _tensors(name, module, render, dtype):
            yield f"{prefix}{key}", tensor


def num_weights(model: nn.Module) -> int:
    """Weights of a model, those that are packed included."""
    packed = sum(math.prod(m.quantized.shape) for m in model.modules() if isinstance(m, PACKED))
    return packed + sum(parameter.numel() for parameter in model.parameters())


def _leaves(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each module that holds tensors of its own, by its name in the base; adapters and wrappers are one leaf."""
    if isinstance(module, ModulesToSaveWrapper):
        trained = [adapter for adapter in active_adapters(module) if adapter in module.modules_to_save]
        yield from _leaves(module.modules_to_save[trained[0]] if trained else module.original_module, name)
    elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | PACKED):
        yield name, module
    else:
        yield name, module
        for child_name, child in module.named_children():
            yield from _leaves(child, f"{name}.{child_name}" if name else child_name)


def _tensors(name: str, module: nn.Module, render: Render, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What the module's own tensors become in the file."""
    if isinstance(module, TrainableTokensWrapper):
        yield "weight", token_rows(module).to(dtype)
        yield from _rest(module.original_module, dtype)
    elif isinstance(module, LoraLayer | PACKED):
        yield from render(name, module).items()
        yield from _rest(base_layer(module), dtype)
    else:
        require(
            not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper),
            f"{name} is adapted by {type(module).__name__}, which cannot be merged; merge LoRA of linear layers",
        )
        if module._parameters.get("weight") is not None:
            yield "weight", module.weight.detach().to(dtype)
        yield from _rest(module, dtype)


def _rest(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of the module itself, its weight aside; a packed layer's buffers are its weight."""
    buffers = {} if isinstance(module, PACKED) else module._buffers
    kept = {name: tensor for name, tensor in buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in {**module._parameters, **kept}.items():
        if tensor is not None and name != "weight":
            yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def active_adapters(module: BaseTunerLayer | AuxiliaryTrainingWrapper) -> list[str]:
    """Adapters that the base weight does not hold yet and that are switched on."""
    if module.disable_adapters:
        return []
    merged = getattr(module, "merged_adapters", ())
    return [adapter for adapter in module.active_adapters if adapter not in merged]


def token_rows(module: TrainableTokensWrapper) -> Tensor:
    """The embedding or head with its trained rows."""
    adapter = module.token_adapter
    return adapter.get_merged_weights(active_adapters(adapter)).detach()


def _head_names(model: PreTrainedModel) -> tuple[str, ...]:
    head = model.get_output_embeddings()
    return tuple(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _computes_tied(model: PreTrainedModel) -> bool:
    """Whether one tensor is embedding and head in what the model computes: a config that ties two different ones would
    lose the head when the folder is loaded."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not is_tied(model) or isinstance(head, PACKED) or isinstance(embedding, PACKED):
        return False
    ours, theirs = (
        token_rows(module) if isinstance(module, TrainableTokensWrapper) else module.weight
        for module in (embedding, head)
    )
    return ours is theirs or torch.equal(ours, theirs)


def _write_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype, *, tied: bool, **extra: Any) -> None:
    config = copy.deepcopy(model.config)
    for stale in ("quantization_config", "_name_or_path"):
        vars(config).pop(stale, None)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = tied
    vars(config).update(extra)
    config.save_pretrained(folder)
    if model.generation_config is not None:  # not through save_pretrained, which refuses what some hub models say
        model.generation_config.to_json_file(folder / "generation_config.json")


def write_identity(folder: Path, kind: str, identity: dict[str, Any]) -> None:
    """lowbit.json: what kind of export it is ("merged", "quantized", "gptq"), and where it comes from."""
    (folder / "lowbit.json").write_text(json.dumps({kind: identity}, indent=2) + "\n", encoding="utf-8")


class _Shards:
    """Safetensors files that are begun anew before one grows too large."""

    def __init__(self, folder: Path, stem: str, max_bytes: int) -> None:
        self.folder, self.stem, self.max_bytes = folder, stem, max_bytes
        self.files: list[list[str]] = []
        self.total_bytes = 0
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if self._tensors and sum(t.nbytes for t in self._tensors.values()) + tensor.nbytes > self.max_bytes:
            self._flush()
        # A copy of its own: safetensors refuses shared memory, and a view would keep a whole tensor alive.
        self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.total_bytes += tensor.nbytes

    def _flush(self) -> None:
        self.files.append(list(self._tensors))
        save_file(self._tensors, self._path(len(self.files)), metadata={"format": "pt"})
        self._tensors = {}

    def _path(self, number: int) -> Path:
        return self.folder / f"part{number}.safetensors"

    def close(self) -> None:
        """Write what is left and give the files the names that transformers looks for."""
        self._flush()
        if len(self.files) == 1:
            self._path(1).rename(self.folder / f"{self.stem}.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self.files, 1):
            file_name = f"{self.stem}-{number:05}-of-{len(self.files):05}.safetensors"
            self._path(number).rename(self.folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / f"{self.stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def whole_folder(folder: Path, *, needs_bytes: int) -> Iterator[Path]:
    """A hidden folder that takes the place of `folder` when the body ends, and is removed if it fails.

    raises  UserError if the disk is too full, or if `folder` holds anything but an export of ours
    """
    ours = (folder / "lowbit.json").is_file()
    require(
        ours or not folder.exists() or not any(folder.iterdir()),
        f"{folder} holds files that are no export of lowbit's; give another folder",
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed, free = needs_bytes + 50_000_000, shutil.disk_usage(folder.parent).free  # tokenizers take some megabytes
    require(
        free >= needed,
        f"{folder.parent} has {free / 1e9:.2f} GB free, the model needs {needed / 1e9:.2f} GB; free some",
    )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes 0600; a model may be shared
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
