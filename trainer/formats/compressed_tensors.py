"""compressed-tensors, as llm-compressor writes it: what vLLM and transformers read best.

    pack-quantized   weights of 4 or 8 bits, inputs as they are
        weight_packed      [out_features, ceil(in_features * bits / 32)] int32   code + 2^(bits - 1), the first lowest
        weight_scale       [out_features, groups] of the model's dtype
        weight_shape       [2] int64
        weight_zero_point  [ceil(out_features * bits / 32), groups] int32        packed along outputs; asymmetric only
        weight_g_idx       [in_features] int32                                   groups of inputs: act-order, read only
    int-quantized    INT8 weights and inputs
        weight             [out_features, in_features] int8
        weight_scale       [out_features, 1]
        input_scale        [1], with static scales; else each token has its own, computed when it comes

config.json has a group of layers for each scheme, with their names as targets where there are several. The surprising
thing: codes and zero points are signed there, so that ours are the same bytes.
"""

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
    bytes_of,
    coded_layers,
    codes_of,
    int4_weight,
    num_groups,
    pack_words,
    require_shape,
    take,
    unpack_words,
    unsupported,
    words_of,
    write_codes,
)
from trainer.formats.hf_folder import SHARD_BYTES
from trainer.formats.stored_scales import StoredScales
from trainer.kernels.fake_quant import Grid
from trainer.linear import QuantLinear
from trainer.qat.observers import ObserverSettings
from trainer.qat.packed_linear import PackedLinear, pack_layer
from trainer.qat.packed_model import scheme_of_layer
from trainer.qat.scheme import Activations, Scheme
from trainer.quantizer import WHOLE_ROW, QuantizedTensor, Quantizer

LAYOUT = "compressed-tensors"
PACKED, INTEGER, MIXED = "pack-quantized", "int-quantized", "mixed-precision"


def write_compressed_tensors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    allow_rounded_scales: bool = False,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> StoredScales:
    """Write a causal language model whose packed layers are INT4 or INT8, in any mixture; dense layers are ignored.

    dtype    of scales and of everything else but codes
    returns  what rounding scales to dtype changed
    raises   UserError naming a layer that the layout cannot hold, and what to do
    """
    layers = coded_layers(model, LAYOUT, ("int4", "int8"), inputs=True)
    for name, layer in layers.packed.items():
        _require_fits(name, layer)
    scales = StoredScales(dtype, LAYOUT, allow_rounded_scales)

    def tensors(name: str, layer: nn.Module) -> dict[str, Tensor]:
        return _tensors(name, layer, scales)

    write_codes(
        *(model, tokenizer, folder, LAYOUT),
        layers=layers,
        tensors=tensors,
        config=_config(layers),
        dtype=dtype,
        scales=scales,
        provenance=provenance,
        shard_bytes=shard_bytes,
    )
    return scales


def _require_fits(name: str, layer: QuantLinear | PackedLinear) -> None:
    scheme = scheme_of_layer(layer)
    require(
        scheme.activations is None or scheme.weight.group_size == WHOLE_ROW,
        f"{name} has groups of {scheme.weight.group_size} beside INT8 inputs, and engines multiply INT8 with one scale "
        "a row; quantize with group_size=-1",
    )
    require(
        layer.quantized.tensors.get("g_idx") is None,
        f"{name} has groups in act-order (g_idx), which compressed-tensors 0.20 and vLLM 0.32 no longer open; write "
        "gptq, which GPTQModel opens, or quantize without act-order",
    )


# ---- config.json


def _config(layers: CodedLayers) -> dict[str, Any]:
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, layer in layers.packed.items():
        scheme = _scheme_entry(layer)
        names = next((names for entry, names in groups if entry == scheme), None)
        if names is None:
            groups.append((scheme, [name]))
        else:
            names.append(name)
    formats = {entry["format"] for entry, _ in groups}
    return {
        "quant_method": LAYOUT,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": layers.dense,
        "config_groups": {
            f"group_{i}": {"targets": ["Linear"] if len(groups) == 1 else names, **entry}
            for i, (entry, names) in enumerate(groups)
        },
    }


def _scheme_entry(layer: QuantLinear | PackedLinear) -> dict[str, Any]:
    """A config group, its targets left out."""
    quantizer, inputs = layer.quantized.quantizer, scheme_of_layer(layer).activations
    size = quantizer.group_size
    weights = {
        **_arguments(quantizer.code_bits, "channel" if size == WHOLE_ROW else "group"),
        "symmetric": quantizer.symmetric is not False,
        "group_size": None if size == WHOLE_ROW else size,
    }
    entry = {"weights": weights, "input_activations": None, "output_activations": None, "format": PACKED}
    if inputs is not None:
        strategy = "tensor" if inputs.static else "token"
        entry |= {"input_activations": _arguments(8, strategy, dynamic=not inputs.static), "format": INTEGER}
    return entry


def _arguments(bits: int, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    fixed = {"type": "int", "symmetric": True, "group_size": None, "block_structure": None, "actorder": None}
    observer = {} if dynamic else {"observer": "minmax"}
    return {"num_bits": bits, "strategy": strategy, "dynamic": dynamic, **fixed, **observer}


# ---- tensors


def _tensors(name: str, layer: QuantLinear | PackedLinear, scales: StoredScales) -> dict[str, Tensor]:
    quantized = layer.quantized
    stored = scales.store(name, quantized.tensors["scales"], num_weights=math.prod(quantized.shape))
    if scheme_of_layer(layer).activations is not None:
        static = {} if layer.input_scale is None else {"input_scale": scales.store(name, layer.input_scale.view(1))}
        return {"weight": quantized.packed, "weight_scale": stored, **static}
    tensors = {"weight_scale": stored, "weight_shape": torch.tensor(quantized.shape)}
    if quantized.quantizer.codebook == "int8":
        return {"weight_packed": _pack_bytes(quantized.packed), **tensors}
    tensors["weight_packed"] = pack_words(codes_of(quantized))
    zeros = quantized.tensors["zeros"]
    return tensors if zeros is None else {**tensors, "weight_zero_point": pack_words(zeros.T).T}


def _pack_bytes(codes: Tensor) -> Tensor:
    """[rows, n] int8 codes -> [rows, ceil(n / 4)] int32 of codes + 128"""
    codes = nn.functional.pad(codes.view(torch.uint8) ^ 0x80, (0, -codes.shape[1] % 4))
    return words_of(codes)


def _unpack_bytes(words: Tensor, count: int) -> Tensor:
    """[rows, count] int8 codes behind `_pack_bytes`' words"""
    return (bytes_of(words)[:, :count] ^ 0x80).contiguous().view(torch.int8)


# ---- reading


def compressed_tensors_reader(config: dict[str, Any]) -> Read:
    """How layers of a folder with this `quantization_config` are read: INT4 and INT8 weights, INT8 inputs.

    raises  UserError for other schemes
    """
    if config.get("kv_cache_scheme"):
        raise unsupported(LAYOUT, "kv_cache_scheme", config["kv_cache_scheme"], "null")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise unsupported(LAYOUT, "sparsity_config.format", config["sparsity_config"]["format"], "dense")
    if config.get("transform_config"):
        raise unsupported(LAYOUT, "transform_config", "...", "null")
    if config.get("quantization_status", "compressed") != "compressed":
        raise unsupported(LAYOUT, "quantization_status", config["quantization_status"], "compressed")
    for group in config["config_groups"].values():
        _require_known(group)

    def read(name: str, dense: nn.Linear, tensors: dict[str, Tensor]) -> QuantLinear | PackedLinear | None:
        codes = tensors.get(f"{name}.weight_packed", tensors.get(f"{name}.weight"))
        if codes is None or codes.is_floating_point():
            return None
        group = _group_of(name, config)
        try:
            weight = _weight(name, dense, group["weights"], tensors)
        except ValueError as error:
            raise UserError(f"{name} cannot be read: {error}") from None
        return _layer(name, weight, group.get("input_activations"), tensors)

    return read


def _require_known(group: dict[str, Any]) -> None:
    """raises  UserError naming what of a config group is not read"""
    weights, inputs = group["weights"], group.get("input_activations")
    accepted = {"num_bits": (4, 8), "type": ("int",), "strategy": ("group", "channel", "tensor"), "dynamic": (False,)}
    for key, values in accepted.items():
        if weights.get(key, False) not in values:
            raise unsupported(LAYOUT, f"weights.{key}", weights.get(key), ", ".join(map(str, values)))
    if weights["num_bits"] == 8 and not weights["symmetric"]:
        raise unsupported(LAYOUT, "weights.symmetric", False, "INT4 without symmetry, INT8 with it")
    if group.get("output_activations"):
        raise unsupported(LAYOUT, "output_activations", group["output_activations"], "null")
    if inputs is None:
        return
    accepted = {"num_bits": (8,), "type": ("int",), "symmetric": (True,)}
    for key, values in accepted.items():
        if inputs.get(key) not in values:
            raise unsupported(LAYOUT, f"input_activations.{key}", inputs.get(key), ", ".join(map(str, values)))
    if (inputs["strategy"], inputs.get("dynamic")) not in (("token", True), ("tensor", False)):
        what = f"{inputs['strategy']} (dynamic={inputs.get('dynamic')})"
        raise unsupported(LAYOUT, "input_activations.strategy", what, "a dynamic scale a token, a static one a tensor")


def _group_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config group of a layer: one with its name as a target rather than one for all linear layers."""
    groups = list(config["config_groups"].values())
    for matches in (lambda target: _names(target, name), lambda target: target == "Linear"):
        for group in groups:
            if any(matches(target) for target in group["targets"]):
                return group
    raise UserError(f"{name} is packed, and no config group of quantization_config targets it; the file is damaged")


def _names(target: str, name: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


def _weight(name: str, dense: nn.Linear, weights: dict[str, Any], tensors: dict[str, Tensor]) -> QuantizedTensor:
    out_features, in_features = shape = tuple(dense.weight.shape)
    bits, packed = weights["num_bits"], f"{name}.weight_packed" in tensors
    group_size = weights["group_size"] if weights["strategy"] == "group" else WHOLE_ROW
    codes, scales = take(tensors, name, "weight_packed" if packed else "weight", "weight_scale")
    if packed:
        (stored_shape,) = take(tensors, name, "weight_shape")
        require_shape(f"{name}.weight", torch.empty(stored_shape.tolist(), device="meta"), torch.float32, *shape)
        require_shape(f"{name}.weight_packed", codes, torch.int32, out_features, -(-in_features * bits // 32))
    else:
        require_shape(f"{name}.weight", codes, torch.int8, *shape)
    if weights["strategy"] == "tensor":
        scales = scales.reshape(1, 1).expand(out_features, 1)
    groups = num_groups(in_features, group_size)
    require_shape(f"{name}.weight_scale", scales, scales.dtype, out_features, groups)
    if bits == 8:
        codes = _unpack_bytes(codes, in_features) if packed else codes
        quantizer = Quantizer("int8", group_size=group_size, scale_dtype=str(scales.dtype).removeprefix("torch."))
        return QuantizedTensor({"packed": codes, "scales": scales.float().contiguous()}, shape, quantizer)
    codes = unpack_words(codes, in_features) if packed else (codes + 8).to(torch.uint8)
    zeros = None if weights["symmetric"] else _zeros(name, out_features, groups, tensors)
    g_idx = tensors.pop(f"{name}.weight_g_idx", None)
    return int4_weight(codes, scales, zeros, g_idx=g_idx, group_size=group_size)


def _zeros(name: str, out_features: int, groups: int, tensors: dict[str, Tensor]) -> Tensor:
    """[out_features, groups] uint8 zero points 0..15"""
    (packed,) = take(tensors, name, "weight_zero_point")
    if packed.dtype == torch.int8:  # not packed, as int-quantized has it
        return (packed + 8).to(torch.uint8)
    require_shape(f"{name}.weight_zero_point", packed, torch.int32, -(-out_features // 8), groups)
    return unpack_words(packed.T, out_features).T


def _layer(
    name: str, weight: QuantizedTensor, inputs: dict[str, Any] | None, tensors: dict[str, Tensor]
) -> QuantLinear | PackedLinear:
    bias = tensors.pop(f"{name}.bias", None)
    if inputs is None:
        return QuantLinear(weight, bias)
    static = inputs["strategy"] == "tensor"
    scheme = Scheme(weight.quantizer, Activations(Grid.int8(), ObserverSettings() if static else None), integer=True)
    input_scale = None
    if static:
        input_scale = take(tensors, name, "input_scale")[0].float().reshape(())
    return pack_layer(scheme, weight, bias, input_scale=input_scale)
