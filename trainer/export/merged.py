"""The merged model: one Hugging Face folder without an adapter, W' = round(dequantize(W) + s B A) layer by layer.

    model.safetensors, or shards and their index   weights of one dtype, each tensor once
    config.json, generation_config.json            of the base, with nothing about quantization left in them
    tokenizer files, chat template                 what training used
    lowbit.json                                    what was merged into what, and how much of the update is in the files
    README.md                                      model card

Never more than one dense layer and one shard are in memory. A folder is complete or absent: it is written under a
hidden name beside its place and renamed.

The surprising thing: rounding is not harmless. An update of 1 % of a weight is far below a step of a 4-bit grid, so a
merge into 4 bits puts most of it back to where it was (`write_merged_4bit` measures that, and has to be asked for); a
bfloat16 grid is fine enough, if the base is not on it already (see `_base_weight`).
"""

import copy
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from trainer.config.export import ExportConfig
from trainer.config.model import DType
from trainer.linear import QuantLinear
from trainer.lora import LoraLinear
from trainer.vocabulary import is_tied

log = logging.getLogger(__name__)

SHARD_BYTES = 2**30
"""A file is begun when the one before would exceed this; a larger tensor has a file of its own."""


@dataclass
class Survival:
    """How much of the update the rounded weights hold: <W' - W, d> / ||d||^2 with d = s B A, 1 if all of it.

    layers  name -> its share; a layer whose update is zero is left out
    """

    layers: dict[str, float] = field(default_factory=dict)
    _dot: float = 0.0
    _square: float = 0.0

    def add(self, name: str, base: Tensor, merged: Tensor, rounded: Tensor) -> None:
        """[out_features, in_features] float32 each: W, W + d, and what is written for it."""
        update = (merged - base).double()
        dot, square = ((rounded.double() - base) * update).sum().item(), update.square().sum().item()
        if square > 0:
            self.layers[name] = dot / square
            self._dot, self._square = self._dot + dot, self._square + square

    @property
    def overall(self) -> float | None:
        """Over all layers, as one vector; None without an update."""
        return self._dot / self._square if self._square else None


Render = Callable[[str, nn.Module], dict[str, Tensor]]
"""What is written for the weight of a linear layer, packed or adapted: suffix ("weight", "weight.absmax") -> tensor."""


def write_merged(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Survival:
    """Write `model` with its active adapter merged into the weights; the model itself is left as it is.

    model        a causal language model or PEFT's wrapper around one; layers packed or dense; trained in full as well
    dtype        of the files; the update is added in float32 and rounded once
    provenance   goes into lowbit.json
    returns      what of the update is in the files
    raises       UserError if a layer cannot be merged, a weight is inf or nan, the disk is too full, or `folder` holds
                 something else
    """
    survival = Survival()

    def render(name: str, layer: nn.Module) -> dict[str, Tensor]:
        base, merged = merge_layer(name, layer)
        rounded = merged.to(dtype)
        survival.add(name, base, merged, rounded)
        return {"weight": rounded}

    needs_bytes = num_weights(base_model(model)) * dtype.itemsize
    with whole_folder(folder, needs_bytes=needs_bytes) as partial:
        write_model(model, tokenizer, partial, render, dtype=dtype, shard_bytes=shard_bytes)
        figures = {"dtype": str(dtype).removeprefix("torch."), "update_survived": survival.overall}
        write_identity(partial, {**(provenance or {}), **figures})
    return survival


def write_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    render: Render,
    *,
    dtype: torch.dtype,
    shard_bytes: int,
    **config: Any,
) -> None:
    """Weights, config, generation config and tokenizer into an empty folder.

    render   gives the tensors of packed and adapted linear layers; all others are written in dtype
    config   what config.json says besides the base's
    raises   UserError as `write_merged`
    """
    causal_lm = base_model(model)
    tied = _computes_tied(causal_lm)
    left_out = _head_names(causal_lm) if tied else ()
    shards = _Shards(folder, shard_bytes)
    for name, tensor in _named_tensors(causal_lm, render, dtype):
        if name not in left_out:
            require(
                not tensor.is_floating_point() or bool(tensor.isfinite().all()),
                f"{name} would hold inf or nan; training diverged, export an earlier checkpoint",
            )
            shards.add(name, tensor)
    shards.close()
    _write_config(causal_lm, folder, dtype, tied=tied, **config)
    tokenizer.save_pretrained(folder)


def _named_tensors(model: PreTrainedModel, render: Render, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the merged model under the base's names, one dense layer at a time."""
    for name, module in _leaves(model):
        prefix = f"{name}." if name else ""
        for key, tensor in _tensors(name, module, render, dtype):
            yield f"{prefix}{key}", tensor


def merged_dtype(config: ExportConfig) -> torch.dtype:
    """The torch dtype for `export.dtype`."""
    return torch.bfloat16 if config.dtype is DType.auto else getattr(torch, config.dtype.value)


def export_bytes(model: nn.Module, config: ExportConfig) -> int:
    """What the merged formats of `config` will take on disk, about."""
    itemsizes = {"merged": merged_dtype(config).itemsize, "merged_4bit": 1, "quantized": 2}
    return num_weights(model) * sum(itemsizes.get(name, 0) for name in config.formats)


def num_weights(model: nn.Module) -> int:
    """Weights of the merged model, those that are packed now included."""
    packed = sum(m.out_features * m.in_features for m in model.modules() if isinstance(m, QuantLinear))
    return packed + sum(parameter.numel() for parameter in model.parameters())


def _leaves(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each module that holds tensors of its own, by its name in the base; adapters and wrappers are one leaf."""
    if isinstance(module, ModulesToSaveWrapper):
        trained = [adapter for adapter in _active(module) if adapter in module.modules_to_save]
        yield from _leaves(module.modules_to_save[trained[0]] if trained else module.original_module, name)
    elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | QuantLinear):
        yield name, module
    else:
        yield name, module
        for child_name, child in module.named_children():
            yield from _leaves(child, f"{name}.{child_name}" if name else child_name)


def _tensors(name: str, module: nn.Module, render: Render, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What the module's own tensors become in the merged model."""
    if isinstance(module, TrainableTokensWrapper):
        yield "weight", token_rows(module).to(dtype)
        yield from _rest(module.original_module, dtype)
    elif isinstance(module, LoraLayer | QuantLinear):
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
    buffers = {} if isinstance(module, QuantLinear) else module._buffers
    kept = {name: tensor for name, tensor in buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in {**module._parameters, **kept}.items():
        if tensor is not None and name != "weight":
            yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def merge_layer(name: str, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """A linear layer's weight before training, and as it computes now: what it was plus the update.

    name     for messages
    returns  [out_features, in_features] float32 each, the same tensor without an adapter
    raises   UserError if the adapter is not LoRA or DoRA of a linear layer
    """
    weight = _base_weight(name, base_layer(layer))
    if not isinstance(layer, LoraLayer):
        return weight, weight
    adapters = [adapter for adapter in _active(layer) if adapter in layer.lora_A]
    merged = weight
    for adapter in adapters:
        require(not layer.lora_bias[adapter], f"{name} has lora_bias, which is not merged; use lora_bias=False")
        merged = _plus(merged, *_factors(layer, adapter), layer.scaling[adapter])
    magnitudes = [layer.lora_magnitude_vector[a] for a in adapters if a in layer.lora_magnitude_vector]
    if magnitudes:  # DoRA (arXiv:2402.09353, equation 5): W' = m (W + s B A) / ||W + s B A||, row by row
        require(len(adapters) == 1, f"{name} has several adapters and DoRA among them; activate one and merge that")
        magnitude = magnitudes[0].weight.detach().float().flatten()
        merged = merged * (magnitude / merged.norm(dim=1))[:, None]
    start = layer.start if isinstance(layer, LoraLinear) else None
    if start is not None:  # LoftQ, PiSSA, OLoRA over a packed base: the codes and these factors were the model
        weight = _plus(weight, start.lora_A, start.lora_B, start.scaling)
    return weight, merged if adapters else weight


def _plus(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """W + s B A, float32"""
    return torch.addmm(weight, lora_B.detach().float(), lora_A.detach().float(), alpha=scaling)


def _factors(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """A and B; with what PiSSA and OLoRA took out of a dense base."""
    if isinstance(layer, LoraLinear):
        return layer.factors(adapter)
    return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def _base_weight(name: str, layer: nn.Module) -> Tensor:
    """[out_features, in_features] float32, codes times scales before they are rounded to the compute dtype.

    Values that lie on a bfloat16 grid already swallow every update below half a step: after 40 steps of `conf=qlora`
    on SmolLM2-135M (updates of 0.7 % of the weight's norm) 99.5 % of the update were left, 95.4 % in the worst layer;
    from float32 values 99.9 % and 99.4 %.
    """
    if isinstance(layer, QuantLinear):
        return layer.quantized.dequantize(torch.float32)
    require(
        isinstance(layer, nn.Linear),
        f"{name} adapts a {type(layer).__name__}, which cannot be merged; merge LoRA of linear layers",
    )
    return layer.weight.detach().float()


def _active(module: BaseTunerLayer | AuxiliaryTrainingWrapper) -> list[str]:
    """Adapters that the base weight does not hold yet and that are switched on."""
    if module.disable_adapters:
        return []
    merged = getattr(module, "merged_adapters", ())
    return [adapter for adapter in module.active_adapters if adapter not in merged]


def token_rows(module: TrainableTokensWrapper) -> Tensor:
    """The embedding or head with its trained rows."""
    adapter = module.token_adapter
    return adapter.get_merged_weights(_active(adapter)).detach()


def _head_names(model: PreTrainedModel) -> tuple[str, ...]:
    head = model.get_output_embeddings()
    return tuple(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _computes_tied(model: PreTrainedModel) -> bool:
    """Whether one tensor is embedding and head in what the model computes: a config that ties two different ones would
    lose the head when the folder is loaded."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not is_tied(model):
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


def write_identity(folder: Path, identity: dict[str, Any]) -> None:
    """lowbit.json of a merged model."""
    (folder / "lowbit.json").write_text(json.dumps({"merged": identity}, indent=2) + "\n", encoding="utf-8")


class _Shards:
    """Safetensors files that are begun anew before one grows too large."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
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
            self._path(1).rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self.files, 1):
            file_name = f"model-{number:05}-of-{len(self.files):05}.safetensors"
            self._path(number).rename(self.folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


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
        f"{folder.parent} has {free / 1e9:.2f} GB free, a merged model needs {needed / 1e9:.2f} GB; free some",
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
