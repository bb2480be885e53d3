"""AWQ's GEMM layout, as AutoAWQ writes it: INT4 in groups with zero points, packed along the outputs.

Tensors of a layer:
    qweight  [in_features, out_features / 8] int32
    qzeros   [groups, out_features / 8] int32
    scales   [groups, out_features] float16
    bias     [out_features], if there is one

The surprising thing is the order within a word: nibble i, from the lowest bits, is output 8c + ORDER[i].
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.formats.codes import (
    Read,
    coded_layers,
    codes_of,
    group_size_of,
    int4_weight,
    num_groups,
    pack_words,
    require_shape,
    take,
    unpack_words,
    unsupported,
    write_codes,
    zeros_of,
)
from trainer.formats.hf_folder import SHARD_BYTES
from trainer.formats.stored_scales import StoredScales
from trainer.linear import QuantLinear
from trainer.quantizer import QuantizedTensor

LAYOUT = "awq"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MULTIPLE = 32
"""Of in_features and out_features: what the kernels of vLLM need."""


def write_awq(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float16,
    allow_rounded_scales: bool = False,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> StoredScales:
    """Write a causal language model whose packed layers are INT4; dense layers are listed as such.

    dtype    of everything but codes and scales
    returns  what rounding scales to float16 changed
    raises   UserError naming a layer that the layout cannot hold, and what to do
    """
    layers = coded_layers(model, LAYOUT, ("int4",))
    for name, layer in layers.packed.items():
        _require_fits(name, layer.quantized)
    scales = StoredScales(torch.float16, LAYOUT, allow_rounded_scales)
    config = {
        "quant_method": LAYOUT,
        "bits": 4,
        "group_size": group_size_of(layers, LAYOUT),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": layers.dense,
    }

    def tensors(name: str, layer: nn.Module) -> dict[str, Tensor]:
        return _tensors(name, layer.quantized, scales)

    write_codes(
        *(model, tokenizer, folder, LAYOUT),
        layers=layers,
        tensors=tensors,
        config=config,
        dtype=dtype,
        scales=scales,
        provenance=provenance,
        shard_bytes=shard_bytes,
    )
    return scales


def _require_fits(name: str, quantized: QuantizedTensor) -> None:
    for key, size in zip(("out_features", "in_features"), quantized.shape, strict=True):
        require(
            size % MULTIPLE == 0,
            f"{name} has {key}={size}, and loaders of AWQ need a multiple of {MULTIPLE}; keep this layer dense, or "
            "write compressed-tensors, which takes any",
        )
    require(
        quantized.tensors["g_idx"] is None,
        f"{name} has groups in act-order (g_idx), which AWQ has no place for; write gptq, or "
        "quantize without act-order",
    )


def _tensors(name: str, quantized: QuantizedTensor, scales: StoredScales) -> dict[str, Tensor]:
    return {
        "qweight": _pack(codes_of(quantized).T),
        "qzeros": _pack(zeros_of(quantized).T),
        "scales": scales.store(name, quantized.tensors["scales"], num_weights=math.prod(quantized.shape)).T,
    }


def _pack(codes: Tensor) -> Tensor:
    """[rows, out_features] codes -> [rows, out_features / 8] int32"""
    return pack_words(codes.reshape(codes.shape[0], -1, 8)[:, :, list(ORDER)].flatten(1))


def _unpack(words: Tensor, out_features: int) -> Tensor:
    """[rows, out_features / 8] int32 -> [rows, out_features] uint8 codes"""
    places = sorted(range(8), key=ORDER.__getitem__)
    return unpack_words(words, out_features).reshape(words.shape[0], -1, 8)[:, :, places].flatten(1)


def awq_reader(config: dict[str, Any]) -> Read:
    """How layers of a folder with this `quantization_config` are read.

    raises  UserError for other bits and layouts
    """
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise unsupported(LAYOUT, "version", version, "gemm")
    if bits != 4:
        raise unsupported(LAYOUT, "bits", bits, "4")
    if not config.get("zero_point", True):
        raise unsupported(LAYOUT, "zero_point", False, "true")
    group_size = config.get("group_size", config.get("q_group_size"))

    def read(name: str, dense: nn.Linear, tensors: dict[str, Tensor]) -> QuantLinear | None:
        if f"{name}.qweight" not in tensors:
            return None
        qweight, qzeros, scales = take(tensors, name, "qweight", "qzeros", "scales")
        out_features, in_features = dense.weight.shape
        groups = num_groups(in_features, group_size)
        require_shape(f"{name}.qweight", qweight, torch.int32, in_features, out_features // 8)
        require_shape(f"{name}.qzeros", qzeros, torch.int32, groups, out_features // 8)
        require_shape(f"{name}.scales", scales, scales.dtype, groups, out_features)
        codes, zeros = _unpack(qweight, out_features).T, _unpack(qzeros, out_features).T
        try:
            weight = int4_weight(codes, scales.T, zeros, group_size=group_size)
        except ValueError as error:
            raise UserError(f"{name} cannot be read: {error}") from None
        return QuantLinear(weight, tensors.pop(f"{name}.bias", None))

    return read
