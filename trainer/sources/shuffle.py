"""Reorder a Llama's channels in ways that leave its function alone.

A model that was once rounded to 4 bits in groups of 32 neighbours lies on that grid ever after: a quantizer whose
groups fall on the same places finds nothing left to round, and every figure near the grid is bent. Reordering the
neighbours takes the grid away and keeps the model. Three kinds of channels are free to move:

    residual stream   columns of embedding, head and what reads it (q k v gate up), norm weights, rows of o and down
    MLP, per layer    rows of gate and up, columns of down
    v, per kv head    rows of v; columns of o, the same for each query head that reads this kv head

q and k stay: RoPE turns their channels in fixed pairs. Only the order of sums changes, hence float error only.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig


class _Orders(NamedTuple):
    """New order -> old index, int64, for each kind of channel that a weight of one layer can have."""

    residual: Tensor
    """[hidden_size]"""
    inner: Tensor
    """[intermediate_size]"""
    value: Tensor
    """[num_key_value_heads * head_dim]"""
    attention: Tensor
    """[num_attention_heads * head_dim]"""


_AXES = {
    "embed_tokens": (None, "residual"),
    "lm_head": (None, "residual"),
    "q_proj": (None, "residual"),
    "k_proj": (None, "residual"),
    "v_proj": ("value", "residual"),
    "o_proj": ("residual", "attention"),
    "gate_proj": ("inner", "residual"),
    "up_proj": ("inner", "residual"),
    "down_proj": ("residual", "inner"),
    "input_layernorm": ("residual",),
    "post_attention_layernorm": ("residual",),
    "norm": ("residual",),
}
"""Module -> the kind of each axis of its weight; a bias has the first axis only."""


def shuffle_channels(state_dict: dict[str, Tensor], config: LlamaConfig, *, seed: int) -> dict[str, Tensor]:
    """Reorder residual, MLP and v channels at random.

    state_dict  a LlamaForCausalLM's, any dtype; a tied head may be absent
    returns     a new dict with the same names, shapes and dtypes; the same function up to float rounding
    raises      ValueError for a weight that a Llama does not have
    """
    # Adapters fit one order only, so it must never change: RandomState's stream is frozen, torch's and
    # numpy's newer ones are not.
    random = np.random.RandomState(seed)
    residual = _permutation(random, config.hidden_size)
    layers = [_layer_orders(random, config, residual) for _ in range(config.num_hidden_layers)]
    return {name: _reorder(name, weight, layers) for name, weight in state_dict.items()}


def _layer_orders(random: np.random.RandomState, config: LlamaConfig, residual: Tensor) -> _Orders:
    heads = torch.stack([_permutation(random, config.head_dim) for _ in range(config.num_key_value_heads)])
    num_groups = config.num_attention_heads // config.num_key_value_heads
    return _Orders(
        residual=residual,
        inner=_permutation(random, config.intermediate_size),
        value=_concatenated(heads),
        attention=_concatenated(heads.repeat_interleave(num_groups, dim=0)),
    )


def _permutation(random: np.random.RandomState, size: int) -> Tensor:
    return torch.from_numpy(random.permutation(size)).long()


def _concatenated(heads: Tensor) -> Tensor:
    """Orders within heads, [num_heads, head_dim], as one order of all their channels, [num_heads * head_dim]."""
    num_heads, head_dim = heads.shape
    return (heads + head_dim * torch.arange(num_heads)[:, None]).flatten()


def _reorder(name: str, weight: Tensor, layers: list[_Orders]) -> Tensor:
    parts = name.split(".")
    module = parts[-2]
    if module not in _AXES:
        raise ValueError(f"{name} is no weight of a Llama; shuffle_channels knows {', '.join(_AXES)}")
    orders = layers[int(parts[2])] if "layers" in parts else layers[0]
    for axis, kind in enumerate(_AXES[module][: weight.dim()]):
        if kind is not None:
            weight = weight.index_select(axis, getattr(orders, kind))
    return weight
