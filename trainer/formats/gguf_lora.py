"""A LoRA adapter as a GGUF file, which llama.cpp puts over the base that it belongs to.

    general.type = adapter, adapter.type = lora, adapter.lora.alpha
    <tensor of the base>.lora_a [rank, in_features], .lora_b [out_features, rank], float32

llama.cpp scales a layer by adapter.lora.alpha / rank, with one alpha for all. What PEFT multiplies a layer with
(alpha / sqrt(rank) of rsLoRA, an alpha of the layer's own) becomes that alpha where it is the same for all; where it
is not, the rest goes into lora_b: exact if it is a power of two, otherwise rounded once to float32. A Llama's q and k
have their rows of lora_b in llama.cpp's order.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from trainer.architecture import base_model
from trainer.config.errors import UserError, require
from trainer.formats.gguf_config import architecture_of, require_writable
from trainer.formats.gguf_file import TensorEntry, gguf_file, open_gguf, read_keys
from trainer.formats.gguf_names import (
    head_counts,
    layer_of,
    to_gguf_name,
    to_halves,
    to_hf_name,
    to_pairs,
    turned_heads,
)
from trainer.qat.merge_aware import MergeAwareLinear

_PREFIX = "base_model.model."
_UNSUPPORTED = {
    "use_dora": "DoRA scales each row by a norm of the merged weight",
    "modules_to_save": "whole modules were trained beside the factors",
    "trainable_token_indices": "rows of the embedding were trained",
    "target_parameters": "factors of parameters that are no layers",
    "alora_invocation_tokens": "its factors work after certain tokens only",
    "lora_bias": "its factors have a bias",
    "megatron_config": "its layers are split over processes",
    "layer_replication": "it repeats layers of the base",
}
"""Settings of an adapter that llama.cpp's LoRA has no place for, and what they mean."""
_ROUNDED = (
    "was trained through the rounding of the merged weights, and factors over a 16-bit base are another function; "
    "write the quantized model with write_gguf and gguf_type=as_trained"
)
_INSTEAD = "merge the adapter and write the merged model with write_gguf"


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """One layer's part of an adapter: the layer adds scaling * x A^T B^T.

    lora_A   [rank, in_features]
    lora_B   [out_features, rank]
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: float


@dataclass(slots=True)
class GgufAdapterReport:
    """What was written; folded: layer -> what went into its lora_b, where its scaling is not alpha / rank."""

    path: Path
    alpha: float
    num_layers: int
    folded: dict[str, float] = field(default_factory=dict)

    @property
    def num_rounded(self) -> int:
        """Layers whose lora_b was rounded to float32 by it."""
        return sum(math.frexp(factor)[0] != 0.5 for factor in self.folded.values())


def write_gguf_adapter(
    adapter: Path | PeftModel,
    path: Path,
    *,
    config: PretrainedConfig | None = None,
    adapter_name: str = "default",
    name: str | None = None,
) -> GgufAdapterReport:
    """Write a LoRA adapter as the file `path`, complete or not at all.

    adapter       a folder as PEFT writes it, or a model with the adapter over it
    config        the base's, needed for a folder
    adapter_name  which adapter of the model
    name          general.name; the folder's name by default
    raises        UserError with the reason if llama.cpp would compute something else; RuntimeError if the file that was
                  read back differs
    """
    factors, config = _factors(adapter, config, adapter_name)
    alpha = _common_alpha(factors)
    report = GgufAdapterReport(Path(path), alpha, len(factors))
    architecture, heads = architecture_of(config), head_counts(config)
    writer = GGUFWriter(None, architecture)
    writer.add_type("adapter")
    writer.add_name(name or (adapter.name if isinstance(adapter, Path) else adapter_name))
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    tensors: dict[str, Tensor] = {}
    for layer, part in factors.items():
        tensor = to_gguf_name(f"{layer}.weight")
        rank = part.lora_A.shape[0]
        factor = part.scaling * rank / alpha
        lora_B = part.lora_B.detach().cpu().float()
        if not math.isclose(factor, 1.0, rel_tol=2**-23):
            report.folded[layer] = factor
            lora_B = (lora_B.double() * factor).float()
        tensors[f"{tensor}.lora_a"] = part.lora_A.detach().cpu().float()
        tensors[f"{tensor}.lora_b"] = to_pairs(lora_B, turned_heads(tensor, architecture, **heads))
    entries = [TensorEntry(key, "F32", tuple(tensor.shape)) for key, tensor in tensors.items()]
    with gguf_file(report.path, writer, entries) as file:
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8))
    return report


def read_gguf_adapter(path: Path, config: PretrainedConfig) -> dict[str, LoraFactors]:
    """The adapter in a file, in Hugging Face's order of rows.

    config   of the base
    returns  Hugging Face name of the layer -> float32 factors and what llama.cpp scales them by
    raises   UserError if the file is damaged, no LoRA adapter, or of another architecture
    """
    reader = open_gguf(path)
    keys = read_keys(reader)
    kind = keys.get("general.type"), keys.get("adapter.type")
    require(kind == ("adapter", "lora"), f"{path} holds {kind[0]} {kind[1] or ''} and no LoRA adapter")
    architecture, heads = architecture_of(config), head_counts(config)
    found = keys["general.architecture"]
    require(found == architecture, f"{path} is an adapter of {found}, and the base is {architecture}")
    tensors = {tensor.name: torch.tensor(tensor.data).float() for tensor in reader.tensors}
    factors = {}
    for key, lora_a in tensors.items():
        if not key.endswith(".lora_a"):
            continue
        name = key.removesuffix(".lora_a")
        layer = to_hf_name(name)
        require(layer is not None and f"{name}.lora_b" in tensors, f"{path}: {name} is no layer with two factors")
        lora_b = to_halves(tensors[f"{name}.lora_b"], turned_heads(name, architecture, **heads))
        scaling = keys["adapter.lora.alpha"] / lora_a.shape[0] if keys["adapter.lora.alpha"] else 1.0
        factors[layer.removesuffix(".weight")] = LoraFactors(lora_a, lora_b, scaling)
    return factors


# ---- what PEFT holds


def _factors(
    adapter: Path | PeftModel, config: PretrainedConfig | None, adapter_name: str
) -> tuple[dict[str, LoraFactors], PretrainedConfig]:
    """Layer -> factors, with the base's config."""
    if isinstance(adapter, PeftModel):
        config = base_model(adapter).config
        known = adapter.peft_config
        require(adapter_name in known, f"adapter_name={adapter_name}; the model has {', '.join(known)}")
        settings = known[adapter_name]
    else:
        require(config is not None, "an adapter in a folder does not say how many heads its base has; give config=")
        settings = _settings(adapter)
    require_writable(config)
    _require_plain(settings)
    found = _of_model(adapter, adapter_name) if isinstance(adapter, PeftModel) else _of_folder(adapter, settings)
    require(bool(found), "the adapter has no factors; give one that was trained")
    for layer, part in found.items():
        _require_layer(layer, part, config)
    return dict(sorted(found.items(), key=_place)), config


def _place(item: tuple[str, LoraFactors]) -> tuple[int, str]:
    """Layer after layer, so that a folder and a model give one file."""
    number = layer_of(to_gguf_name(f"{item[0]}.weight"))
    return -1 if number is None else number, item[0]


def _settings(folder: Path) -> Any:
    try:
        return LoraConfig.from_pretrained(folder)
    except (ValueError, OSError, TypeError) as error:
        raise UserError(f"{folder} has no adapter_config.json of PEFT's LoRA: {error}") from None


def _require_plain(settings: Any) -> None:
    kind = getattr(settings.peft_type, "value", settings.peft_type)
    require(kind == "LORA", f"peft_type={kind} is no LoRA, which is all that GGUF has a layout for; {_INSTEAD}")
    for name, meaning in _UNSUPPORTED.items():
        value = getattr(settings, name, None)
        require(not value, f"an adapter with {name}={value} cannot be written as GGUF ({meaning}); {_INSTEAD}")
    bias = getattr(settings, "bias", "none")
    require(bias == "none", f"an adapter with bias={bias} changes biases of the base, and GGUF's does not; {_INSTEAD}")
    require(not settings.fan_in_fan_out, f"fan_in_fan_out=true is for layers that no Llama or Qwen has; {_INSTEAD}")


def _require_layer(layer: str, part: LoraFactors, config: PretrainedConfig) -> None:
    name = to_gguf_name(f"{layer}.weight")
    require(name is not None, f"the adapter changes {layer}, which is no layer of {config.model_type}; {_INSTEAD}")
    require(
        name != "token_embd.weight",
        f"the adapter changes {layer}; its factors of an embedding are not written as GGUF: {_INSTEAD}",
    )
    require(
        name != "output.weight" or not config.tie_word_embeddings,
        f"the adapter changes {layer}, which is the embedding of this base and no tensor of its GGUF file; {_INSTEAD}",
    )
    require(part.scaling != 0, f"the adapter scales {layer} by 0, which llama.cpp takes for 1; leave the layer out")
    finite = bool(torch.isfinite(part.lora_A).all() and torch.isfinite(part.lora_B).all())
    require(finite, f"the factors of {layer} hold inf or nan; an adapter that diverged is not written")


def _of_model(model: PeftModel, adapter_name: str) -> dict[str, LoraFactors]:
    factors = {}
    for layer, module in base_model(model).named_modules():
        if not isinstance(module, LoraLayer) or adapter_name not in module.scaling:
            continue
        require(not isinstance(module, MergeAwareLinear), f"{layer} {_ROUNDED}")
        require(adapter_name in module.lora_A, f"the adapter changes {layer}, an embedding; {_INSTEAD}")
        lora_A, lora_B = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
        factors[layer] = LoraFactors(lora_A, lora_B, float(module.scaling[adapter_name]))
    return factors


def _of_folder(folder: Path, settings: LoraConfig) -> dict[str, LoraFactors]:
    identity = folder / "lowbit.json"
    rounded = identity.is_file() and "rounded" in json.loads(identity.read_text(encoding="utf-8"))
    require(
        not rounded,
        f"{folder} {_ROUNDED}",
    )
    file = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}; export the adapter again") from None
    factors, pairs = {}, _pairs(tensors)
    for layer, pair in pairs.items():
        require(len(pair) == 2, f"{file} has one factor of {layer}; export the adapter again")
        scaling = _scaling(settings, layer, rank=pair["lora_A"].shape[0])
        factors[layer] = LoraFactors(pair["lora_A"], pair["lora_B"], scaling)
    return factors


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Layer -> lora_A and lora_B; raises UserError for a tensor that is neither."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, _, factor = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        require(
            factor in ("lora_A", "lora_B"),
            f"the adapter holds {key}, which is no factor of a layer; {_INSTEAD}",
        )
        pairs.setdefault(layer, {})[factor] = tensor
    return pairs


def _scaling(settings: LoraConfig, layer: str, *, rank: int) -> float:
    """What PEFT multiplies the layer's product with."""
    patterns = settings.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(patterns.keys(), layer), settings.lora_alpha)
    return alpha / math.sqrt(rank) if settings.use_rslora else alpha / rank


def _common_alpha(factors: Mapping[str, LoraFactors]) -> float:
    """The alpha that is right for the most layers; exact in float32, as the file holds it."""
    counts: dict[float, int] = {}
    for part in factors.values():
        alpha = float(torch.tensor(part.scaling * part.lora_A.shape[0], dtype=torch.float32))
        counts[alpha] = counts.get(alpha, 0) + 1
    return max(counts, key=counts.__getitem__)
