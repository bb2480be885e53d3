"""What a GGUF file says of the architecture, read from the config and the modules of a model.

What llama.cpp would compute differently is refused with the reason, or said in a note where it only matters beyond a
number of tokens. Rope factors and scalings are read off transformers' own rotary module, so no formula stands here
twice.
"""

import math
from typing import Any

import torch
from gguf import GGUFWriter, RopeScalingType
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from trainer.architecture import sliding_windows, why_unsupported
from trainer.config.errors import require
from trainer.formats.gguf_names import ARCHITECTURES

_ANY: Any = object()
_YARN: dict[str, Any] = {
    **dict.fromkeys(
        ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"), _ANY
    ),
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "partial_rotary_factor": 1.0},
}
"""Settings of yarn that a file can state, and those that llama.cpp has fixed for these architectures."""


def require_writable(config: PretrainedConfig) -> None:
    """raises  UserError if llama.cpp does not compute such a model, or not as transformers does"""
    why = why_unsupported(config)
    require(why is None, f"a model with {why} cannot be written as GGUF; export it in 16 bits instead")
    rope = config.rope_parameters or {}
    rotary_share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    require(
        rotary_share == 1.0,
        f"partial_rotary_factor={rotary_share} turns a part of each head, which llama.cpp does not for this "
        "architecture; export the model in 16 bits instead",
    )
    if rope.get("rope_type") == "yarn":
        other = {k: v for k, v in rope.items() if v is not None and _YARN.get(k) not in (_ANY, v)}
        require(
            not other,
            f"rope scaling yarn with {other} is not what llama.cpp computes for this architecture; export the model in "
            "16 bits instead",
        )


def add_architecture(writer: GGUFWriter, model: PreTrainedModel) -> list[str]:
    """Write the architecture's keys; `require_writable` comes first.

    returns  notes on what llama.cpp computes differently beyond some length
    """
    config = model.config
    head_dim = head_size(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(model.get_input_embeddings().weight.shape[0])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)  # readers fall back on hidden_size / heads, or on a number of the architecture's
    writer.add_value_length(head_dim)
    _add_rope(writer, model)
    return _add_window(writer, config)


def head_size(config: PretrainedConfig) -> int:
    """head_dim, stated or not."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_rope(writer: GGUFWriter, model: PreTrainedModel) -> None:
    rope = model.config.rope_parameters or {}
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or model.config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        # llama.cpp always scales q and k by the first formula of the paper; the file says what comes on top.
        usual = 0.1 * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0
        extra = model.model.rotary_emb.attention_scaling / usual
        if abs(extra - 1.0) > 1e-6:
            writer.add_rope_scaling_attn_factors(extra)


def _add_window(writer: GGUFWriter, config: PretrainedConfig) -> list[str]:
    windows = {window for window in sliding_windows(config) if window is not None}
    if not windows or min(windows) >= config.max_position_embeddings:
        return []
    window = min(windows)
    writer.add_sliding_window(window)
    return [
        f"layers see the last {window} tokens only, and llama.cpp shows a {config.model_type} all of them: beyond "
        f"{window} tokens it computes another function"
    ]


def rope_factors(model: PreTrainedModel) -> Tensor | None:
    """What Llama 3 divides its inverse frequencies by, [head_dim / 2] float32; None without such scaling."""
    rope = model.config.rope_parameters or {}
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = head_size(model.config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    unscaled = 1.0 / (rope["rope_theta"] ** exponents)  # as transformers computes them without scaling
    return (unscaled / model.model.rotary_emb.inv_freq.detach().float().cpu()).contiguous()


def architecture_of(config: PretrainedConfig) -> str:
    """general.architecture."""
    return ARCHITECTURES[config.model_type]
