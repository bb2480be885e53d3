"""What every layout of codes shares: which layers it holds, nibbles in 32-bit words, the folder, reading.

Codes are re-packed as integers and never computed again. Output heads and embeddings that are packed are written dense,
with the values that they have: no other engine reads them packed.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.formats.hf_folder import PACKED, SHARD_BYTES, num_weights, whole_folder, write_identity, write_model
from trainer.formats.stored_scales import StoredScales
from trainer.kernels.int4 import SYMMETRIC_ZERO, pack_int4, unpack_int4
from trainer.linear import QuantLinear
from trainer.qat.packed_linear import PackedLinear
from trainer.qat.packed_model import scheme_of_layer
from trainer.quantizer import WHOLE_ROW, QuantizedTensor, Quantizer

log = logging.getLogger(__name__)

HOLDERS = {
    "int4": "gptq, awq, compressed-tensors",
    "int8": "compressed-tensors",
    "nf4": "bitsandbytes",
    "fp4": "bitsandbytes",
}
"""Weights -> the layouts that hold them; others have lowbit's own only."""


@dataclass(frozen=True)
class CodedLayers:
    """The linear layers of a model, by what becomes of them; names under the base model.

    packed  written as codes
    dense   written as they are, or decoded: the layers that a layout has to list as not quantized
    """

    packed: dict[str, QuantLinear | PackedLinear]
    dense: list[str]


def coded_layers(
    model: PreTrainedModel, layout: str, codebooks: tuple[str, ...], *, inputs: bool = False
) -> CodedLayers:
    """Sort the layers of a model for a layout.

    codebooks  weights that it holds
    inputs     whether it can say that inputs are rounded
    raises     UserError naming a layer that it cannot hold, and the layouts that can
    """
    outer = (model.get_output_embeddings(), model.get_input_embeddings())
    packed: dict[str, QuantLinear | PackedLinear] = {}
    dense: list[str] = []
    for name, layer in model.named_modules():
        require(
            not isinstance(layer, BaseTunerLayer),
            f"{name} has an adapter, which {layout} has no place for; merge it and quantize the merged model",
        )
        if isinstance(layer, QuantLinear | PackedLinear) and layer not in outer:
            _require_holds(name, layer, layout, codebooks, inputs)
            packed[name] = layer
        elif isinstance(layer, nn.Linear) or (isinstance(layer, PACKED) and layer is outer[0]):
            dense.append(name)
    require(bool(packed), f"no layer of the model is packed, so there is nothing for {layout}; quantize it first")
    return CodedLayers(packed, dense)


def _require_holds(name: str, layer: nn.Module, layout: str, codebooks: tuple[str, ...], inputs: bool) -> None:
    scheme = scheme_of_layer(layer)
    kind = scheme.weight_name
    holders = HOLDERS.get(kind)
    require(
        kind in codebooks,
        f"{name} holds {kind} codes and {layout} holds {', '.join(codebooks)}; "
        + (f"write {holders}" if holders else "only lowbit's own folders hold them: use export.formats=[quantized]"),
    )
    require(
        scheme.activations is None or (inputs and kind == "int8"),
        f"{name} rounds its inputs beside {kind} weights, which {layout} cannot say; "
        + ("write compressed-tensors" if kind == "int8" else "quantize with 16-bit inputs, or use lowbit's own folder"),
    )


def group_size_of(layers: CodedLayers, layout: str) -> int:
    """The one group size of all layers, -1 for whole rows.

    raises  UserError naming two layers that differ
    """
    first, *others = layers.packed
    size = layers.packed[first].quantized.quantizer.group_size
    for name in others:
        other = layers.packed[name].quantized.quantizer.group_size
        require(
            other == size,
            f"{first} has groups of {size} and {name} of {other}; {layout} has one group size for all layers: quantize "
            "with one, or write compressed-tensors",
        )
    return size


# ---- nibbles in words


def pack_words(codes: Tensor) -> Tensor:
    """[rows, n] codes 0..15 as [rows, ceil(n / 8)] int32, the first code in the lowest bits; padding 0."""
    codes = pad(codes, (0, -codes.shape[1] % 8))
    return words_of(pack_int4(codes))


def unpack_words(words: Tensor, count: int) -> Tensor:
    """[rows, count] uint8 codes behind `pack_words`' words."""
    return unpack_int4(bytes_of(words), count)


def words_of(rows: Tensor) -> Tensor:
    """[rows, 4 n] bytes as [rows, n] int32, the first byte lowest; safetensors and every CPU that we run on are so."""
    return rows.reshape(-1).contiguous().view(torch.int32).view(rows.shape[0], -1)


def bytes_of(words: Tensor) -> Tensor:
    """[rows, 4 n] uint8 behind `words_of`' words."""
    return words.reshape(-1).contiguous().view(torch.uint8).view(words.shape[0], -1)


def codes_of(quantized: QuantizedTensor) -> Tensor:
    """[out_features, in_features] uint8 codes 0..15 of an int4 weight."""
    return unpack_int4(quantized.packed, quantized.shape[1])


def zeros_of(quantized: QuantizedTensor) -> Tensor:
    """[out_features, groups] uint8 zero points of an int4 weight, 8 where it is symmetric."""
    zeros = quantized.tensors["zeros"]
    return torch.full_like(quantized.tensors["scales"], SYMMETRIC_ZERO, dtype=torch.uint8) if zeros is None else zeros


def int4_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, g_idx: Tensor | None = None, group_size: int
) -> QuantizedTensor:
    """The weight that was read from a folder.

    codes   [out_features, in_features] uint8
    scales  [out_features, groups] float16, bfloat16 or float32
    zeros   [out_features, groups] uint8; 8 everywhere is the same as None
    g_idx   [in_features] the group of each input feature; contiguous groups are the same as None
    raises  ValueError if group_size is not one that our kernels read
    """
    symmetric = zeros is None or bool((zeros == SYMMETRIC_ZERO).all())
    settings = {"divisor": 7.5} if symmetric else {}  # a label: codes and scales are there already
    scale_dtype = str(scales.dtype).removeprefix("torch.")
    quantizer = Quantizer("int4", group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, **settings)
    out_features, in_features = codes.shape
    span = quantizer.span(in_features)
    if g_idx is not None and torch.equal(g_idx.long(), torch.arange(in_features) // span):
        g_idx = None
    tensors = {
        "packed": pack_int4(codes).contiguous(),
        "scales": scales.float().contiguous(),
        "zeros": None if symmetric else zeros.contiguous(),
        "g_idx": None if g_idx is None else g_idx.int().contiguous(),
    }
    quantized = QuantizedTensor(tensors, (out_features, in_features), quantizer)
    if g_idx is not None:
        _require_full_groups(g_idx, span, in_features // span)
    return quantized


def _require_full_groups(g_idx: Tensor, span: int, num_groups: int) -> None:
    counts = torch.bincount(g_idx.long(), minlength=num_groups)
    if counts.tolist() != [span] * num_groups:
        raise ValueError(f"g_idx puts {counts.tolist()} features into its groups; each needs {span}")


# ---- the folder


def write_codes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    layout: str,
    *,
    layers: CodedLayers,
    tensors: Callable[[str, nn.Module], dict[str, Tensor]],
    config: dict[str, Any],
    dtype: torch.dtype,
    scales: StoredScales | None = None,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    files: dict[str, str] | None = None,
) -> None:
    """Write a model whose packed layers are `tensors(name, layer)`.

    config      `quantization_config` of config.json
    dtype       of what is dense
    scales      filled while tensors are written; its figures go into lowbit.json beside the provenance
    files       name -> text of other files
    raises      UserError if a tensor cannot be written, the disk is too full, or `folder` holds something else
    """

    def render(name: str, layer: nn.Module) -> dict[str, Tensor]:
        return tensors(name, layer) if name in layers.packed else {"weight": _decoded(name, layer, layout, dtype)}

    packed = [layer.quantized for layer in layers.packed.values()]
    num_dense = num_weights(model) - sum(math.prod(quantized.shape) for quantized in packed)
    needs_bytes = num_dense * dtype.itemsize + sum(quantized.nbytes for quantized in packed)
    with whole_folder(folder, needs_bytes=needs_bytes) as partial:
        write_model(
            *(model, tokenizer, partial, render),
            dtype=dtype,
            shard_bytes=shard_bytes,
            quantization_config=config,
        )
        for name, text in (files or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        figures = {} if scales is None else scales.figures
        identity = {"dtype": str(dtype).removeprefix("torch."), "num_packed_layers": len(layers.packed), **figures}
        write_identity(partial, layout, {**(provenance or {}), **identity})


def _decoded(name: str, layer: nn.Module, layout: str, dtype: torch.dtype) -> Tensor:
    """The weight of a packed head or embedding."""
    require(
        scheme_of_layer(layer).activations is None,
        f"{name} rounds its inputs, which {layout} cannot say of an output head; leave the head in 16 bits, or use "
        "lowbit's own folder",
    )
    log.warning("%s    %s is written dense in %s: no loader of %s reads it packed", layout, name, dtype, layout)
    return layer.quantized.dequantize(dtype)


# ---- reading


Read = Callable[[str, nn.Linear, dict[str, Tensor]], QuantLinear | PackedLinear | None]
"""The packed layer of that name, whose tensors are taken out of the dictionary; None if it is dense."""


def take(tensors: dict[str, Tensor], layer: str, *suffixes: str) -> list[Tensor]:
    """The tensors of a layer, out of the dictionary.

    raises  UserError naming those that are not there
    """
    missing = [suffix for suffix in suffixes if f"{layer}.{suffix}" not in tensors]
    require(not missing, f"{layer} lacks {', '.join(missing)}; copy the whole folder again")
    return [tensors.pop(f"{layer}.{suffix}") for suffix in suffixes]


def require_shape(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """raises  UserError if a tensor of a file is not what its layer needs"""
    require(
        tensor.dtype == dtype and tuple(tensor.shape) == shape,
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} and the layer needs {dtype} {shape}; the file is damaged, or "
        "its quantization config does not belong to it",
    )


def unsupported(layout: str, key: str, value: object, accepted: str) -> UserError:
    """The error for a setting of a foreign folder that is not read."""
    return UserError(
        f"quantization_config of this {layout} folder has {key}={value}; read here: {accepted}. Give the 16-bit model, "
        "and quantize it here"
    )


def num_groups(in_features: int, group_size: int) -> int:
    """Groups of a row."""
    return 1 if group_size == WHOLE_ROW else in_features // group_size
