"""What Llama, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3 share, read from the modules of transformers.

Training (`fused_decoder.py`) and the server (`serve/decoder.py`) run these models through our own kernels; both learn
here which models those are, and take positions and windows from transformers' own modules and config.
"""

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

ARCHITECTURES = {
    "llama": "Llama, SmolLM2",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def base_model(model: nn.Module) -> PreTrainedModel:
    """The causal language model under PEFT's wrappers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_layer(module: nn.Module) -> nn.Module:
    """The layer under an adapter."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def active_module(module: nn.Module) -> nn.Module:
    """The module that runs now where PEFT keeps a trained copy (`modules_to_save`) beside the original."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    copies = module.modules_to_save
    names = [] if module.disable_adapters else [name for name in module.active_adapters if name in copies]
    return copies[names[0]] if names else module.original_module


def why_unsupported(config: PretrainedConfig) -> str | None:
    """What our decoders do not compute of such a model, as a clause with what they do; None if they compute all."""
    if config.model_type not in ARCHITECTURES:
        return f"model_type={config.model_type} is none of {', '.join(ARCHITECTURES.values())}"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act={config.hidden_act} is not silu"
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        return f"rope scaling {rope_type} is none of {', '.join(ROPE_TYPES)}"
    return None


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """Keys that a query of each layer sees, itself included; None for all before it."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if config.model_type == "mistral":  # one setting for all layers
        types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def rotary_table(rotary: nn.Module, num_positions: int, dtype: torch.dtype) -> Tensor:
    """cos and sin of each position, from transformers' own module, so that every rope scaling is its own.

    returns  [num_positions, 2, head_dim / 2] of dtype
    """
    device = rotary.inv_freq.device
    positions = torch.arange(num_positions, device=device)[None]
    cos, sin = rotary(torch.empty(1, dtype=torch.float32, device=device), positions)  # [1, P, head_dim], halves equal
    half = cos.shape[-1] // 2
    return torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=1).to(dtype).contiguous()
