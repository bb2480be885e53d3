"""Decoder: the transformer that Llama, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3 share, written once with options.

It is built from the module that was trained (`decoder_from_module`): the same packed codes, the same adapter factors,
so there is no second reading of a checkpoint that could differ. The arithmetic follows that module's, rounding for
rounding; what differs is the memory (paged) and the batch (rows of many sequences, prompts and single tokens mixed).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from trainer.architecture import base_layer, base_model, rotary_table, sliding_windows, why_unsupported
from trainer.config.errors import UserError, require
from trainer.kernels.codebook4 import CodebookWeight
from trainer.kernels.codebook_bits import BitsWeight
from trainer.kernels.embedding import embed_tokens
from trainer.kernels.fake_quant import Grid
from trainer.kernels.float_grids import FloatWeight
from trainer.kernels.greedy_head import GreedyHead, greedy_head, pack_greedy_head
from trainer.kernels.int4 import Int4Weight
from trainer.kernels.int8 import Int8Weight
from trainer.kernels.lora_rows import LoraTable, lora_rows_
from trainer.kernels.packed_linear import (
    LinearWeight,
    QuantizedWeight,
    decode,
    pack_codebook_linear,
    pack_integer_linear,
    pack_linear,
    packed_linear,
    place_linears,
)
from trainer.kernels.paged_attention import AttentionBatch, KVCache, paged_attention, write_kv
from trainer.kernels.rms_norm import add_rms_norm, rms_norm
from trainer.kernels.rope import rope_
from trainer.kernels.swiglu import swiglu
from trainer.linear import QuantLinear
from trainer.qat.fake_quant import FakeQuantLinear, FakeQuantWeight
from trainer.qat.packed_linear import PackedEmbedding, PackedLinear
from trainer.quantizer import QuantizedTensor
from trainer.resident import release_file_pages, release_free_memory
from trainer.serve.tensor_parallel import TensorParallel, slice_columns, slice_rows

log = logging.getLogger(__name__)

MAX_GREEDY_ROWS = 32
"""Rows of a step up to which the greedy head is used. SmolLM2-135M on 2 Zen 4 cores, milliseconds, and logits with
their argmax: 1 row 0.8 and 2.1, 16 rows 2.9 and 3.9; from some 40 rows on products of integers are no faster."""

PLACED_BYTES = 64 << 20
"""Packed weights that wait to be placed together: pages of 2 MB are filled well, and so much is held twice."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and options of the decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(slots=True)
class Linear:
    """A fused linear layer: its parts (q, k, v or gate, up) lie side by side in the output.

    name  e.g. "layers.0.self_attn.qkv_proj"; parts: the modules' names with their output sizes
    """

    name: str
    weight: LinearWeight
    bias: Tensor | None
    parts: dict[str, int]
    lora: LoraTable | None = None
    partial: TensorParallel | None = None
    """Set where the input features are shared out: outputs are then partial sums."""

    def __call__(self, x: Tensor, adapter_ids: Tensor | None, batch_invariant: bool) -> Tensor:
        if self.partial is not None:
            return self._add_up(x, adapter_ids, batch_invariant)
        y = packed_linear(x, self.weight, self.bias, batch_invariant=batch_invariant)
        if adapter_ids is not None:
            lora_rows_(y, x, adapter_ids, self.lora)
        return y

    def _add_up(self, x: Tensor, adapter_ids: Tensor | None, batch_invariant: bool) -> Tensor:
        y = packed_linear(x, self.weight, out_dtype=torch.float32, batch_invariant=batch_invariant)
        if adapter_ids is not None:
            update = torch.zeros_like(y, dtype=x.dtype)
            lora_rows_(update, x, adapter_ids, self.lora)
            y += update
        y = self.partial.add_up(y)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


@dataclass(slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(slots=True)
class Rows:
    """The input of a forward: one row a token.

    token_ids, positions  [T] int64
    attention             where each row's keys and values go and what it sees
    adapter_ids           [T] int32, -1 for the base; None where no row has an adapter
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    adapter_ids: Tensor | None


class Decoder:
    """The model as kernels see it. `forward` gives hidden states, `logits` the output head over chosen rows, and
    `likeliest` only the argmax of the logits, where that is cheaper."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: list[Layer],
        norm: Tensor,
        head: LinearWeight,
        head_bias: Tensor | None,
        cos_sin: Tensor,
        greedy_head: GreedyHead | None = None,
    ) -> None:
        self.config, self.layers = config, layers
        self.embedding, self.norm, self.head, self.head_bias, self.cos_sin = embedding, norm, head, head_bias, cos_sin
        self.greedy_head = greedy_head

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, rows: Rows, cache: KVCache, *, batch_invariant: bool) -> Tensor:
        """Hidden states after the last norm.

        returns  [T, hidden_size] of the compute dtype; keys and values of all rows are in the cache
        """
        config = self.config
        residual = embed_tokens(rows.token_ids, self.embedding)
        x = rms_norm(residual, self.layers[0].input_norm, eps=config.eps)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(x, rows.adapter_ids, batch_invariant)
            rope_(
                qkv,
                rows.positions,
                self.cos_sin,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=config.eps,
            )
            write_kv(qkv, cache, index, rows.attention.slot_mapping, num_heads=config.num_heads)
            attended = paged_attention(
                qkv,
                cache,
                index,
                rows.attention,
                num_heads=config.num_heads,
                scale=config.scale,
                sliding_window=config.sliding_windows[index],
            )
            attended = layer.output(attended, rows.adapter_ids, batch_invariant)
            x, residual = add_rms_norm(attended, residual, layer.mlp_norm, eps=config.eps)
            x = swiglu(layer.gate_up(x, rows.adapter_ids, batch_invariant))
            x = layer.down(x, rows.adapter_ids, batch_invariant)
            next_norm = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.norm
            x, residual = add_rms_norm(x, residual, next_norm, eps=config.eps)
        return x

    def logits(self, hidden_states: Tensor, *, batch_invariant: bool) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32"""
        return packed_linear(
            hidden_states, self.head, self.head_bias, out_dtype=torch.float32, batch_invariant=batch_invariant
        )

    def likeliest(self, hidden_states: Tensor) -> Tensor | None:
        """The argmax of each row's logits, the lowest id of equals, without computing them.

        hidden_states  [R, hidden_size]
        returns        [R] int64, -1 where the largest logit is not finite; None where logits are the way to it: without
                       a greedy head, and for more rows than it is faster for
        """
        if self.greedy_head is None or hidden_states.shape[0] > MAX_GREEDY_ROWS:
            return None
        return greedy_head(hidden_states, self.greedy_head)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        linears = [linear.weight.nbytes for layer in self.layers for linear in layer.linears]
        greedy = 0 if self.greedy_head is None else self.greedy_head.nbytes
        return sum(linears) + self.embedding.nbytes + self.head.nbytes + greedy


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse a model that this decoder does not compute.

    raises  UserError listing what is served
    """
    reason = why_unsupported(config)
    require(reason is None, f"this model is not served: {reason}")


def decoder_from_module(
    model: PreTrainedModel,
    *,
    max_model_len: int,
    parallel: TensorParallel | None = None,
    screen_greedy: bool = True,
    disposable: bool = False,
) -> Decoder:
    """Build the decoder from a module in memory, packed or dense; adapters on it are left out (see adapters.py).

    screen_greedy  keep an 8-bit copy of the output head for greedy tokens, where it can be used (greedy_head.py)
    disposable     take the module's layers away as they are read, so that at most one is held twice; nothing else of it
                   changes
    raises  UserError if the architecture is not served, or cannot be shared out over `parallel`
    """
    parallel = parallel or TensorParallel()
    model = base_model(model)
    check_architecture(model.config)
    _check_dtype(model)
    config = _decoder_config(model, parallel)
    body = model.model
    cos_sin = rotary_table(body.rotary_emb, max_model_len, config.dtype)
    layers = _layers(body.layers, config, parallel, disposable=disposable)
    _log_decoded([linear for layer in layers for linear in layer.linears])
    output = model.get_output_embeddings()
    head = pack_linear(_table("lm_head", output, config.dtype), dtype=config.dtype)
    screen = pack_greedy_head(head) if screen_greedy and output.bias is None else None
    release_free_memory()  # what packing took
    return Decoder(
        config,
        _table("embed_tokens", body.embed_tokens, config.dtype),
        layers,
        body.norm.weight.detach(),
        head,
        None if output.bias is None else output.bias.detach(),
        cos_sin,
        screen,
    )


def _layers(
    modules: nn.ModuleList, config: DecoderConfig, parallel: TensorParallel, *, disposable: bool
) -> list[Layer]:
    """The layers, repacked and placed some at a time: what is not in its place yet is held twice."""
    layers: list[Layer] = []
    waiting: list[LinearWeight] = []
    for index in range(len(modules)):
        layers.append(_layer(f"layers.{index}", modules[index], config, parallel))
        waiting += [linear.weight for linear in layers[-1].linears]
        if disposable:
            _dispose(modules, index, kept=waiting)
        if sum(weight.nbytes for weight in waiting) >= PLACED_BYTES or index + 1 == len(modules):
            place_linears(waiting)
            waiting.clear()
    return layers


def _dispose(modules: nn.ModuleList, index: int, *, kept: Sequence[LinearWeight]) -> None:
    """Take a layer's module away, and what it has mapped from a file out of memory, but for tensors that are kept."""
    pointers = {tensor.data_ptr() for weight in kept for tensor in weight.tensors()}
    tensors = [tensor.detach() for tensor in (*modules[index].parameters(), *modules[index].buffers())]
    modules[index] = nn.Identity()
    release_file_pages(tensor for tensor in tensors if tensor.data_ptr() not in pointers)


def _table(name: str, layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight of an embedding or output head as training multiplies it; codes are decoded to dtype."""
    if isinstance(layer, QuantLinear):
        return layer.quantized.dequantize(dtype)
    packed = isinstance(layer, PackedLinear | PackedEmbedding)
    if not packed and (not isinstance(layer, FakeQuantWeight) or not layer.enabled):
        return layer.weight.detach()
    require(
        layer.scheme.activations is None,
        f"{name} rounds its input to {layer.scheme.activations}; the server's output head takes it as it is: leave "
        "lm_head out, or give it a scheme of weights only",
    )
    return layer.quantized.dequantize(dtype)


def _check_dtype(model: PreTrainedModel) -> None:
    """Norms in float32 over a bfloat16 model, as PEFT's prepare_model_for_kbit_training leaves them, are two dtypes."""
    weights = [p for name, p in model.named_parameters() if "norm" in name] + [model.get_input_embeddings().weight]
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    require(
        len(dtypes) == 1,
        f"the embedding and the norms are in {' and '.join(dtypes)}; the server computes in one dtype: load the model "
        "in one, and leave out prepare_model_for_kbit_training",
    )


def _decoder_config(model: PreTrainedModel, parallel: TensorParallel) -> DecoderConfig:
    config = model.config
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    parallel.check({name: getattr(config, name) for name in sizes})
    layer = model.model.layers[0]
    return DecoderConfig(
        vocab_size=model.get_input_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads // parallel.size,
        num_kv_heads=config.num_key_value_heads // parallel.size,
        head_dim=layer.self_attn.head_dim,
        intermediate_size=config.intermediate_size // parallel.size,
        eps=config.rms_norm_eps,
        sliding_windows=tuple(sliding_windows(config)),
        dtype=model.model.norm.weight.dtype,
    )


def _layer(name: str, layer: nn.Module, config: DecoderConfig, parallel: TensorParallel) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, norm, None) for norm in ("q_norm", "k_norm"))

    def fuse(module: nn.Module, path: str, *parts: str, partial: bool = False) -> Linear:
        modules = {f"{name}.{path}.{part}": base_layer(getattr(module, part)) for part in parts}
        return _fuse(f"{name}.{path}.{'+'.join(parts)}", modules, config.dtype, parallel, partial)

    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=fuse(attention, "self_attn", "q_proj", "k_proj", "v_proj"),
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        output=fuse(attention, "self_attn", "o_proj", partial=True),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=fuse(mlp, "mlp", "gate_proj", "up_proj"),
        down=fuse(mlp, "mlp", "down_proj", partial=True),
    )


def _fuse(
    name: str, layers: dict[str, nn.Module], dtype: torch.dtype, parallel: TensorParallel, partial: bool
) -> Linear:
    """One linear layer out of several with the same input; packed if all of them are packed alike.

    partial  share the input features out over the processes, not the output features
    """
    weights = [_stored_weight(part, layer, dtype) for part, layer in layers.items()]
    rounds_input, x_scale = _rounds_input(name, layers)
    require(
        not rounds_input or parallel.size == 1,
        f"{name} rounds its input to 8 bits, and tensor_parallel_size={parallel.size} processes hold only a part of a "
        "token each; use tensor_parallel_size=1, or weights without rounded inputs",
    )
    biases = [layer.bias for layer in layers.values()]
    parts = {part: layer.out_features for part, layer in layers.items()}
    if parallel.size > 1 and partial:
        part = parallel.slice(next(iter(layers.values())).in_features)
        weights = [slice_columns(weight, part) for weight in weights]
    elif parallel.size > 1:
        slices = [parallel.slice(layer.out_features) for layer in layers.values()]
        weights = [slice_rows(weight, part) for weight, part in zip(weights, slices, strict=True)]
        biases = [None if bias is None else bias[part] for bias, part in zip(biases, slices, strict=True)]
        parts = {part: size // parallel.size for part, size in parts.items()}
    try:
        weight = _pack(weights, dtype, rounds_input, x_scale)
    except ValueError as error:
        raise UserError(f"{name}: {error}; the server multiplies these layers as one: prepare them alike") from None
    packed = [layer.quantized.weight for layer in layers.values() if isinstance(layer, QuantLinear)]
    if any(isinstance(part, BitsWeight) for part in packed):
        weight.decoded = "2- and 3-bit codes have no kernel that multiplies them as they are"
    bias = _fuse_biases(biases, list(parts.values()), dtype)
    return Linear(name, weight, bias, parts, partial=parallel if partial and parallel.size > 1 else None)


def _rounds_input(name: str, layers: dict[str, nn.Module]) -> tuple[bool, Tensor | None]:
    """Whether the layers round their input to 8 bits, and by which scale if it is not one a token."""
    rounds = [isinstance(layer, PackedLinear) or _is_fake(layer) for layer in layers.values()]
    inputs = {
        part: layer.scheme.activations if on else None for (part, layer), on in zip(layers.items(), rounds, strict=True)
    }
    for part, activations in inputs.items():
        require(
            activations is None or activations.grid == Grid.int8(),
            f"{part} rounds its input to FP8; the server takes inputs as they are, or rounds them to INT8 (schemes "
            "int4_int8, int8 and int8_static)",
        )
    static = {part for part, activations in inputs.items() if activations is not None and activations.static}
    scales = {float(layer.input_scale) if part in static else None for part, layer in layers.items()}
    require(
        len(scales) == len({activations is None for activations in inputs.values()}) == 1,
        f"{name}: {', '.join(layers)} do not round their input alike; the server multiplies these layers as one: "
        "prepare them alike, static scales without qat.learn_scales",
    )
    first = next(iter(layers))
    return inputs[first] is not None, layers[first].input_scale.detach().float() if first in static else None


def _is_fake(layer: nn.Module) -> bool:
    return isinstance(layer, FakeQuantLinear) and layer.enabled


def _stored_weight(name: str, layer: nn.Module, dtype: torch.dtype) -> QuantizedWeight | Tensor:
    """A layer's weight as training multiplies it: codes where it has some, else floats."""
    match layer:
        case QuantLinear() | PackedLinear():
            return _codes(layer.quantized, dtype)
        case nn.Linear():
            return layer.weight.detach()
        case FakeQuantLinear():
            return _fake_quantized(name, layer, dtype)
    raise UserError(f"{name} is a {type(layer).__name__}; the server reads nn.Linear, QuantLinear and FakeQuantLinear")


def _fake_quantized(name: str, layer: FakeQuantLinear, dtype: torch.dtype) -> QuantizedWeight | Tensor:
    if not layer.enabled:
        return layer.weight.detach()
    try:
        quantized = layer.quantized
    except ValueError as error:
        raise UserError(f"{name}.weight: {error}") from None
    if layer.scheme.activations is None and layer.weight.dtype not in (torch.float32, dtype):
        return quantized.dequantize(layer.weight.dtype)  # training rounds to the weight's own 16 bits first
    return _codes(quantized, dtype)


def _codes(quantized: QuantizedTensor | FloatWeight, dtype: torch.dtype) -> QuantizedWeight | Tensor:
    """Codes that a kernel multiplies as they are, or what they stand for."""
    if isinstance(quantized, FloatWeight) or isinstance(quantized.weight, BitsWeight):
        return quantized.dequantize(dtype)
    return quantized.weight


def _pack(
    weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype, rounds_input: bool, x_scale: Tensor | None
) -> LinearWeight:
    if all(isinstance(weight, CodebookWeight) for weight in weights):
        return pack_codebook_linear(weights, dtype=dtype)
    if all(isinstance(weight, Int4Weight | Int8Weight) for weight in weights):
        return pack_integer_linear(weights, dtype=dtype, rounds_input=rounds_input, x_scale=x_scale)
    dense = pack_linear([decode(weight, dtype=dtype) for weight in weights], dtype=dtype)
    if not all(isinstance(weight, Tensor) for weight in weights):
        dense.decoded = "their parts are quantized in different ways, or only some of them"
    return dense


def _log_decoded(linears: Sequence[Linear]) -> None:
    """Say what is kept dense although it was quantized, and what that costs."""
    for reason in sorted({linear.weight.decoded for linear in linears} - {""}):
        dense = [linear.weight for linear in linears if linear.weight.decoded == reason]
        log.warning(
            "serve    %d of %d fused layers are decoded to %s, %.1f MB: %s",
            len(dense),
            len(linears),
            str(dense[0].dtype).removeprefix("torch."),
            sum(weight.nbytes for weight in dense) / 1e6,
            reason,
        )


def _fuse_biases(biases: list[Tensor | None], sizes: list[int], dtype: torch.dtype) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    device = next(bias.device for bias in biases if bias is not None)
    return torch.cat(
        [
            torch.zeros(size, dtype=dtype, device=device) if bias is None else bias.detach().to(dtype)
            for bias, size in zip(biases, sizes, strict=True)
        ]
    )
