"""Read a Llama with a byte-level BPE tokenizer out of a GGUF file, as Hugging Face's names and layouts.

Of our own and not transformers' reader, since the default model hangs on it: these numbers must not move with a
release (a test compares both). Surprising in the format: llama.cpp turns neighbouring channels of q and k where
Hugging Face turns channel i and i + head_dim / 2, so its converter reorders their rows, which is undone here.
"""

from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from trainer.sources.hf_folder import byte_level_tokenizer, split_digits

DIGIT_SPLITTING = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
"""Values of tokenizer.ggml.pre for which llama.cpp (src/llama-vocab.cpp) splits off digits, then splits as GPT-2."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """GGUF key -> value: numbers, strings, lists of them."""
    return {key: field.contents() for key, field in reader.fields.items()}


def read_config(metadata: dict[str, Any], *, tied: bool, pad_token_id: int) -> LlamaConfig:
    """The LlamaConfig of the file; `tied` if it has no head of its own."""
    value = {key.removeprefix("llama."): item for key, item in metadata.items()}
    num_heads = value["attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=value["embedding_length"],
        intermediate_size=value["feed_forward_length"],
        num_hidden_layers=value["block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=value["attention.head_count_kv"],
        head_dim=value["rope.dimension_count"],
        max_position_embeddings=value["context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": value["rope.freq_base"]},
        # Stored in float32: its shortest decimal is what was meant (1e-05).
        rms_norm_eps=float(str(np.float32(value["attention.layer_norm_rms_epsilon"]))),
        tie_word_embeddings=tied,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=pad_token_id,
    )


def read_weights(reader: GGUFReader, config: LlamaConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor, dequantized in float32, under its Hugging Face name; a tied head is not among them."""
    rope_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state_dict = {}
    for tensor in reader.tensors:
        module = tensor.name.split(".")[-2]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=dtype)
        if module in rope_heads:
            weight = _undo_rope_order(weight, rope_heads[module])
        state_dict[_hf_name(tensor.name)] = weight
    return state_dict


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_OTHER_NAMES[parts[0]]}.{parts[1]}"


def _undo_rope_order(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (x0 y0 x1 y1 ...) to (x0 x1 ... y0 y1 ...), where RoPE turns x_i with y_i."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])  # [H, head_dim / 2, 2, in_features]
    return pairs.transpose(1, 2).reshape(weight.shape)


def read_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer with its special tokens and chat template, as the file has them but for the pad token.

    A pad token that is the eos token makes programs that mask by value mask the end of each answer too, so
    <|endoftext|> pads where the vocabulary has it.
    """
    assert metadata["tokenizer.ggml.model"] == "gpt2" and metadata["tokenizer.ggml.pre"] in DIGIT_SPLITTING
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    special = {f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL.items()}
    if special["pad_token"] == special["eos_token"] and "<|endoftext|>" in tokens:
        special["pad_token"] = "<|endoftext|>"
    return byte_level_tokenizer(
        {token: index for index, token in enumerate(tokens)},
        [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        control=[token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL],
        pre_tokenizer=split_digits(),
        max_len=metadata["llama.context_length"],
        chat_template=metadata["tokenizer.chat_template"],
        **special,
    )


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
