"""GPTQ's layout, as AutoGPTQ and GPTQModel write it: INT4 in groups, symmetric or with zero points, act-order or not.

Tensors of a layer, words of 8 nibbles, the first in the lowest bits:
    qweight  [in_features / 8, out_features] int32    word r of a column: input features 8r .. 8r + 7
    qzeros   [groups, out_features / 8] int32         along the outputs
    scales   [groups, out_features] float16
    g_idx    [in_features] int32                      the group of each input feature
    bias     [out_features], if there is one
config.json and quantize_config.json say bits, group_size (-1: whole rows), sym, desc_act, checkpoint_format.

The surprising thing: version 1 ("gptq") stores zero - 1 in each nibble, version 2 ("gptq_v2") the zero itself, and a
wrong label moves every weight by one step. A zero of 0 becomes 15 in version 1, from which loaders make 16 or 0:
AutoGPTQ masks the sum, Exllama's kernels do not, GPTQModel adds 0x11111111 to whole words, whose carry also changes the
neighbour. It is refused in version 1, and read as 0, which is the only zero that it can have been.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.formats.codes import (
    CodedLayers,
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

LAYOUT = "gptq"
VERSIONS = {1: "gptq", 2: "gptq_v2"}
"""Number -> `checkpoint_format`."""
MULTIPLE = 32
"""Of in_features and out_features: what kernels of GPTQModel and vLLM need."""


def write_gptq(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float16,
    version: int | None = None,
    allow_rounded_scales: bool = False,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> StoredScales:
    """Write a causal language model whose packed layers are INT4; dense layers are listed as such.

    dtype     of everything but codes and scales
    version   1 is what most loaders read, 2 holds zero points of 0; None: 1, or 2 where a layer has zero points, since
              GPTQModel opens such a version 1 from itself only
    returns   what rounding scales to float16 changed
    raises    UserError naming a layer that the layout cannot hold, and what to do
    """
    require(version in (None, *VERSIONS), f"version={version}; GPTQ's layout has 1 and 2")
    layers = coded_layers(model, LAYOUT, ("int4",))
    if version is None:
        version = 1 if all(layer.quantized.tensors["zeros"] is None for layer in layers.packed.values()) else 2
    for name, layer in layers.packed.items():
        _require_fits(name, layer.quantized, version)
    config, scales = _config(layers, version), StoredScales(torch.float16, LAYOUT, allow_rounded_scales)

    def tensors(name: str, layer: nn.Module) -> dict[str, Tensor]:
        return _tensors(name, layer.quantized, scales, version)

    write_codes(
        *(model, tokenizer, folder, LAYOUT),
        layers=layers,
        tensors=tensors,
        config=config,
        dtype=dtype,
        scales=scales,
        provenance=provenance,
        shard_bytes=shard_bytes,
        files={"quantize_config.json": json.dumps(config, indent=2) + "\n"},
    )
    return scales


def _require_fits(name: str, quantized: QuantizedTensor, version: int) -> None:
    sizes = dict(zip(("out_features", "in_features"), quantized.shape, strict=True))
    for key, size in sizes.items():
        require(
            size % MULTIPLE == 0,
            f"{name} has {key}={size}, and loaders of GPTQ need a multiple of {MULTIPLE}; keep this layer dense, or "
            "write compressed-tensors, which takes any",
        )
    require(
        version == 2 or bool((zeros_of(quantized) != 0).all()),
        f"{name} has zero points of 0 (groups without a negative weight), from which loaders of version 1 make 16 or "
        "0; use version=2, or write awq or compressed-tensors",
    )


def _config(layers: CodedLayers, version: int) -> dict[str, Any]:
    weights = [layer.quantized.tensors for layer in layers.packed.values()]
    return {
        "quant_method": LAYOUT,
        "bits": 4,
        "group_size": group_size_of(layers, LAYOUT),
        "sym": all(tensors["zeros"] is None for tensors in weights),
        "desc_act": any(tensors["g_idx"] is not None for tensors in weights),
        "lm_head": False,
        "checkpoint_format": VERSIONS[version],
        "pack_dtype": "int32",
        # How GPTQModel and vLLM are told of layers that are not quantized.
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in layers.dense},
        "meta": {"quantizer": ["lowbit:0.1.0"]},
    }


def _tensors(name: str, quantized: QuantizedTensor, scales: StoredScales, version: int) -> dict[str, Tensor]:
    zeros, in_features = zeros_of(quantized).T, quantized.shape[1]
    g_idx = quantized.tensors["g_idx"]
    if g_idx is None:
        g_idx = torch.arange(in_features, dtype=torch.int32) // quantized.quantizer.span(in_features)
    return {
        "qweight": pack_words(codes_of(quantized)).T,
        "qzeros": pack_words(zeros if version == 2 else (zeros - 1) & 15),
        "scales": scales.store(name, quantized.tensors["scales"], num_weights=math.prod(quantized.shape)).T,
        "g_idx": g_idx,
    }


def gptq_reader(config: dict[str, Any]) -> Read:
    """How layers of a folder with this `quantization_config` are read, version 1 or 2.

    raises  UserError for other bits and layouts
    """
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in VERSIONS.values() or config.get("is_marlin_format"):
        raise unsupported(LAYOUT, "checkpoint_format", layout, "gptq, gptq_v2")
    if config["bits"] != 4:
        raise unsupported(LAYOUT, "bits", config["bits"], "4")
    if config.get("pack_dtype", "int32") != "int32":
        raise unsupported(LAYOUT, "pack_dtype", config["pack_dtype"], "int32")
    group_size = config["group_size"]

    def read(name: str, dense: nn.Linear, tensors: dict[str, Tensor]) -> QuantLinear | None:
        if f"{name}.qweight" not in tensors:
            return None
        qweight, qzeros, scales = take(tensors, name, "qweight", "qzeros", "scales")
        g_idx, (out_features, in_features) = tensors.pop(f"{name}.g_idx", None), dense.weight.shape
        groups = num_groups(in_features, group_size)
        require_shape(f"{name}.qweight", qweight, torch.int32, in_features // 8, out_features)
        require_shape(f"{name}.qzeros", qzeros, torch.int32, groups, out_features // 8)
        require_shape(f"{name}.scales", scales, scales.dtype, groups, out_features)
        zeros = unpack_words(qzeros, out_features)
        zeros = zeros if layout == VERSIONS[2] else (zeros + 1) & 15
        try:
            weight = int4_weight(
                unpack_words(qweight.T, in_features), scales.T, zeros.T, g_idx=g_idx, group_size=group_size
            )
        except ValueError as error:
            raise UserError(f"{name} cannot be read: {error}") from None
        return QuantLinear(weight, tensors.pop(f"{name}.bias", None))

    return read
