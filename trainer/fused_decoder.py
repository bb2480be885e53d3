"""The decoder that training runs: whole layers through our kernels, over the modules that PEFT and transformers hold.

    s ─┬─ norm ─ q|k|v ─ rope ─ attention ─ o ─ + ─┬─ norm ─ gate|up ─ swiglu ─ down ─ + ─ s'
       └──────────────────────────────────────────┘└───────────────────────────────────┘

It owns no weight and changes no module. Documents lie one after the other, without padding, and attention stays inside
each: packing costs what its documents cost. Per layer autograd keeps s twice, q|k|v, the attention's output and
gate|up; norms, products of gate and up and dense weights are computed again in backward.

A projection whose modules cannot be fused (a trained weight, dropout, several adapters) is called as the module it is.
A merge-aware layer is the product of the codes of its merged weight, and gives its factors the gradients of plain LoRA.
DoRA's row factors multiply the product of base and adapter, before bias and residual stream.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainer.architecture import base_layer, rotary_table, sliding_windows, why_unsupported
from trainer.kernels.attention import attention
from trainer.kernels.fake_quant_kv import fake_quant_kv
from trainer.kernels.frozen_weight import FrozenWeight
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.kernels.rms_norm import rms_norm
from trainer.kernels.rope import rope
from trainer.kernels.swiglu import swiglu
from trainer.linear import QuantLinear
from trainer.lora import LoraLinear, frozen_weight
from trainer.qat.merge_aware import MergeAwareLinear


class FusedDecoder:
    """Hidden states of packed documents, differentiable in everything that is trained."""

    def __init__(self, model: PreTrainedModel, *, decoded_bytes: int = 0) -> None:
        """model: a causal language model of `ARCHITECTURES`, with or without adapters in it

        decoded_bytes  memory for packed layers that are kept in the compute dtype too, from the first layer on: they
                       are not decoded twice a pass
        raises         ValueError naming what is not computed here
        """
        reason = why_unsupported(model.config)
        if reason is None and model.config.attention_dropout:
            reason = f"attention_dropout={model.config.attention_dropout} is not 0"
        if reason is not None:
            raise ValueError(reason)
        self._body, self._config = model.model, model.config
        self._windows = sliding_windows(model.config)
        self._cos_sin: Tensor | None = None
        self._decoded = _decode(self._body.layers, decoded_bytes, self._body.norm.weight.dtype)

    def __call__(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states after the last norm.

        input_ids   [T] int64, documents one after the other
        cu_seqlens  [B + 1] int32: document b has the tokens cu_seqlens[b] to cu_seqlens[b + 1]
        returns     [T, hidden_size] of the compute dtype
        """
        positions = document_positions(cu_seqlens, len(input_ids))
        stream = self._body.embed_tokens(input_ids)
        cos_sin = self._rotary_table(int(cu_seqlens.diff().max()), stream)
        for layer, window in zip(self._body.layers, self._windows, strict=True):
            arguments = (layer, self._decoded, stream, positions, cos_sin, cu_seqlens, window)
            recompute = layer.training and layer.gradient_checkpointing  # as transformers' layers decide
            stream = checkpoint(_layer, *arguments, use_reentrant=False) if recompute else _layer(*arguments)
        return _norm(stream, self._body.norm)

    def layer(self, index: int, stream: Tensor, cu_seqlens: Tensor) -> Tensor:
        """What layer `index` makes of the residual stream [T, hidden_size]; for training one layer after the other."""
        positions = document_positions(cu_seqlens, len(stream))
        cos_sin = self._rotary_table(int(cu_seqlens.diff().max()), stream)
        layer, window = self._body.layers[index], self._windows[index]
        return _layer(layer, self._decoded, stream, positions, cos_sin, cu_seqlens, window)

    def projection_input(
        self, index: int, stage: int, stream: Tensor, cu_seqlens: Tensor, *, layer: nn.Module | None = None
    ) -> Tensor:
        """What the projections of a stage of layer `index` multiply; for quantizing one stage after the other.

        stage    of `STAGES`
        stream   [T, hidden_size]: the residual stream before the layer (0, 1) or after its attention (2, 3)
        layer    another module of the same function to take instead of the model's own
        returns  [T, in_features]
        """
        layer = self._body.layers[index] if layer is None else layer
        if stage == 0:
            return _norm(stream, layer.input_layernorm)
        if stage == 1:
            positions = document_positions(cu_seqlens, len(stream))
            cos_sin = self._rotary_table(int(cu_seqlens.diff().max()), stream)
            return _attended(layer, self._decoded, stream, positions, cos_sin, cu_seqlens, self._windows[index])
        if stage == 2:
            return _norm(stream, layer.post_attention_layernorm)
        return swiglu(_project(stream, _groups(layer)[2], self._decoded, norm=layer.post_attention_layernorm))

    def add_projection(self, x: Tensor, stage: int, stream: Tensor, layer: nn.Module) -> Tensor:
        """The residual stream [T, hidden_size] with the output of stage 1 or 3 of `layer`, given what it multiplies."""
        return _project(x, _groups(layer)[stage], self._decoded, residual=stream)

    def _rotary_table(self, num_positions: int, like: Tensor) -> Tensor:
        table = self._cos_sin
        if table is None or len(table) < num_positions or table.device != like.device or table.dtype != like.dtype:
            length = 1 << (num_positions - 1).bit_length()  # grows a few times, not at each longer document
            with torch.inference_mode(False):  # an evaluation may come first, and training goes on with its table
                self._cos_sin = table = rotary_table(self._body.rotary_emb, length, like.dtype)
        return table


def document_positions(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64: each token's place in its document, counted from 0."""
    lengths = cu_seqlens.diff()
    starts = cu_seqlens[:-1].repeat_interleave(lengths, output_size=num_tokens)
    return torch.arange(num_tokens, device=cu_seqlens.device) - starts


Decoded = dict[nn.Module, FrozenWeight]


STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The projections of a layer by name, those of one input together, in the order in which they are computed."""


def _groups(layer: nn.Module) -> tuple[list[nn.Module], ...]:
    """The modules of `STAGES`."""
    return tuple([layer.get_submodule(name) for name in names] for names in STAGES)


def _decode(layers: nn.ModuleList, budget: int, dtype: torch.dtype) -> Decoded:
    """Packed layers as matrices, group by group while the budget lasts; a group's lie one below the other."""
    decoded: Decoded = {}
    for modules in (group for layer in layers for group in _groups(layer)):
        packed = [base_layer(module) for module in modules]
        if not all(isinstance(module, QuantLinear) for module in packed):
            continue
        sizes, in_features = [module.out_features for module in packed], packed[0].in_features
        budget -= sum(sizes) * in_features * dtype.itemsize
        if budget < 0:
            break
        stacked = torch.empty(sum(sizes), in_features, dtype=dtype, device=packed[0].packed.device)
        for module, rows in zip(packed, stacked.split(sizes), strict=True):
            module.frozen_weight.decode_into(rows)
            decoded[module] = FrozenWeight("decoded", (rows,), *rows.shape)
    return decoded


def _layer(
    layer: nn.Module,
    decoded: Decoded,
    stream: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
) -> Tensor:
    """[T, hidden_size] -> [T, hidden_size]"""
    _, output, gate_and_up, down = _groups(layer)
    attended = _attended(layer, decoded, stream, positions, cos_sin, cu_seqlens, window)
    stream = _project(attended, output, decoded, residual=stream)
    gate_up = _project(stream, gate_and_up, decoded, norm=layer.post_attention_layernorm)
    return _project(gate_up, down, decoded, with_swiglu=True, residual=stream)


def _attended(
    layer: nn.Module,
    decoded: Decoded,
    stream: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
) -> Tensor:
    """[T, hidden_size] -> [T, num_heads * head_dim]: what the output projection multiplies."""
    block = layer.self_attn
    qkv = _project(stream, _groups(layer)[0], decoded, norm=layer.input_layernorm)
    num_heads = block.config.num_attention_heads
    sizes = {"num_heads": num_heads, "num_kv_heads": block.config.num_key_value_heads, "head_dim": block.head_dim}
    q_norm, k_norm = getattr(block, "q_norm", None), getattr(block, "k_norm", None)
    norms = {} if q_norm is None else {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": _eps(q_norm)}
    qkv = rope(qkv, positions, cos_sin, **sizes, **norms)
    if getattr(block, "int8_kv_cache", False):  # see fake_quantize_kv_cache
        qkv = fake_quant_kv(qkv, **sizes)
    return attention(qkv, cu_seqlens, **sizes, scale=block.scaling, sliding_window=window)


def _project(
    x: Tensor,
    modules: Sequence[nn.Module],
    decoded: Decoded,
    *,
    norm: nn.Module | None = None,
    with_swiglu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The modules' outputs side by side, of norm(x) or swiglu(x), added to the residual stream if there is one."""
    parts = [_frozen(module, decoded, x.dtype) for module in modules]
    if all(part is not None for part in parts) and len({part.merged for part in parts}) == 1:
        weights, adapters, scales, (merged, *_) = zip(*parts, strict=True)
        prologue = {"norm": None if norm is None else (norm.weight, _eps(norm)), "with_swiglu": with_swiglu}
        bias = _bias(modules, x)
        if all(scale is None for scale in scales):
            return lora_linear(x, weights, adapters, bias=bias, residual=residual, merged=merged, **prologue)
        y = lora_linear(x, weights, adapters, **prologue) * _row_scales(weights, scales).to(x.dtype)
        y = y if bias is None else y + bias
        return y if residual is None else residual + y
    h = _norm(x, norm) if norm is not None else swiglu(x) if with_swiglu else x
    outputs = [module(h) for module in modules]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return y if residual is None else residual + y


class _Part(NamedTuple):
    """A module that is a frozen product, at most one adapter and at most a factor for each row of the two.

    merged  the weight holds the adapter's update already
    """

    weight: FrozenWeight
    adapter: Adapter | None = None
    row_scale: Tensor | None = None
    merged: bool = False


def _frozen(module: nn.Module, decoded: Decoded, dtype: torch.dtype) -> _Part | None:
    """What `module` computes, if that is a `_Part`; None for any other."""
    adapter = row_scale = None
    if isinstance(module, MergeAwareLinear) and module.enabled:
        weight = module.part
        return None if weight is None else _Part(weight, module.adapter, merged=True)
    if isinstance(module, LoraLinear):
        if not module.fusable:
            return None
        module, adapter, row_scale = base_layer(module), module.adapter, module.row_scale
    if isinstance(module, QuantLinear):
        return _Part(decoded.get(module) or frozen_weight(module), adapter, row_scale)
    if type(module) is nn.Linear and not module.weight.requires_grad and module.weight.dtype == dtype:
        return _Part(frozen_weight(module), adapter, row_scale)
    return None


def _row_scales(weights: Sequence[FrozenWeight], scales: Sequence[Tensor | None]) -> Tensor:
    """[sum of out_features] float32"""
    ones = [weight.tensors[0].new_ones(weight.out_features, dtype=torch.float32) for weight in weights]
    return torch.cat([one if scale is None else scale for one, scale in zip(ones, scales, strict=True)])


def _bias(modules: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    layers = [base_layer(module) for module in modules]
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [x.new_zeros(layer.out_features) if layer.bias is None else layer.bias.to(x.dtype) for layer in layers]
    )


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    return rms_norm(x, norm.weight, eps=_eps(norm))


def _eps(norm: nn.Module) -> float:
    return norm.variance_epsilon
