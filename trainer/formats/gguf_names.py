"""Names of tensors in GGUF files, and the order of rows in which Llama's q and k stand there.

llama.cpp turns neighbouring channels of a Llama's q and k where Hugging Face turns channel i and i + head_dim / 2, so
the rows of each head are reordered: (x0 x1 ... y0 y1 ...) becomes (x0 y0 x1 y1 ...). Heads of k are fewer than those
of q. Everything that belongs to a row goes with it: codes, scales, biases, the rows of lora_B. Qwen's stay.
"""

import re
from typing import TypeVar

import numpy as np
from torch import Tensor
from transformers import PretrainedConfig

Rows = TypeVar("Rows", Tensor, np.ndarray)

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Hugging Face's model_type -> general.architecture; llama.cpp computes a Mistral as a Llama."""
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3 divides its inverse frequencies by, [head_dim / 2]: in GGUF a tensor, in Hugging Face a formula."""
BIASED = {
    "llama": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "qwen2": ("attn_q", "attn_k", "attn_v", "output"),
    "qwen3": ("attn_q", "attn_k", "attn_v"),
}
"""Tensors whose bias llama.cpp adds (src/models/llama.cpp, qwen2.cpp, qwen3.cpp); it refuses a file with others."""
_LAYER_MODULES = {short: long for long, short in LAYER_NAMES.items()}
_OTHER_MODULES = {short: long for long, short in OTHER_NAMES.items()}


def to_gguf_name(name: str) -> str | None:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`; None for what has no name there."""
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in OTHER_NAMES:
        return f"{OTHER_NAMES[module]}.{kind}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is None or layer[2] not in LAYER_NAMES:
        return None
    return f"blk.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"


def to_hf_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for what is none of these tensors."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None and layer[2] in _LAYER_MODULES:
        return f"model.layers.{layer[1]}.{_LAYER_MODULES[layer[2]]}.{layer[3]}"
    module, _, kind = name.rpartition(".")
    return f"{_OTHER_MODULES[module]}.{kind}" if module in _OTHER_MODULES and kind in ("weight", "bias") else None


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor of a GGUF file belongs to."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else None


def kind_of(name: str) -> str:
    """What a tensor of a GGUF file is in every layer: `attn_q`, `token_embd`, `output`."""
    return name.split(".")[-2]


def turned_heads(name: str, architecture: str, *, num_heads: int, num_kv_heads: int) -> int | None:
    """How many heads the rows of a tensor have, where they are reordered; None where they stay.

    name  in the GGUF file
    """
    if architecture != "llama":
        return None
    return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(kind_of(name))


def head_counts(config: PretrainedConfig) -> dict[str, int]:
    """num_heads and num_kv_heads, as `turned_heads` takes them."""
    return {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}


def to_pairs(rows: Rows, num_heads: int | None) -> Rows:
    """Rows [num_heads * head_dim, ...] from (x0 x1 ... y0 y1 ...) in each head to (x0 y0 x1 y1 ...); None: as is."""
    return _turn(rows, num_heads, halves_first=True)


def to_halves(rows: Rows, num_heads: int | None) -> Rows:
    """The inverse of `to_pairs`."""
    return _turn(rows, num_heads, halves_first=False)


def _turn(rows: Rows, num_heads: int | None, *, halves_first: bool) -> Rows:
    if num_heads is None:
        return rows
    half = rows.shape[0] // num_heads // 2
    grid = (num_heads, 2, half) if halves_first else (num_heads, half, 2)
    return rows.reshape(*grid, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
