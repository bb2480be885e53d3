"""A model as one GGUF file, which llama.cpp, Ollama and others load as it is.

A type such as Q4_K_M quantizes a model of floats. `as_trained` writes the codes of a packed model instead, as integers
(gguf_packed.py): what was trained is what is served. Each tensor is made, written and let go; the file is read back
before it gets its name.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION, GGUFReader, GGUFWriter, LlamaFileType
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.formats.gguf_config import add_architecture, architecture_of
from trainer.formats.gguf_file import GgufFile, TensorEntry, gguf_file
from trainer.formats.gguf_mix import FILE_TYPES, FLOATS, MixedModel, TensorType, tensor_types
from trainer.formats.gguf_names import head_counts, kind_of, to_pairs
from trainer.formats.gguf_packed import exact_type, to_blocks
from trainer.formats.gguf_read import QUANTIZERS, codes_of
from trainer.formats.gguf_report import GgufReport, TensorReport
from trainer.formats.gguf_tokenizer import add_tokenizer, describe_tokenizer
from trainer.formats.gguf_weights import AS_TRAINED, Weight, weights_of
from trainer.kernels.gguf_quants import gguf_dequantize, gguf_quantize
from trainer.qat.packed_linear import PackedLinear
from trainer.qat.packed_model import packed_sha256
from trainer.quantizer import QuantizedTensor

log = logging.getLogger(__name__)

FLOAT16_MAX = 65504.0
_ERROR_ROWS = 4096
"""Rows that are decoded at a time to measure what rounding lost: embeddings are the largest tensors."""


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    gguf_type: str,
    importance: Mapping[str, Tensor] | None = None,
    provenance: dict[str, Any] | None = None,
    requantize: bool = False,
    pre: str | None = None,
) -> GgufReport:
    """Write `model` as the file `path`, complete or not at all.

    model       a plain causal language model: Llama, Mistral, Qwen2 or Qwen3, of dense or packed layers
    gguf_type   one of GGUF_CHOICES
    importance  name of a layer -> mean square of each input channel [in_features], which weighs rounding errors
    provenance  goes into the keys lowbit.*; `name` and `license` into general.*
    requantize  round the values of packed layers anew
    pre         tokenizer.ggml.pre, where the tokenizer is none that is known here
    raises      UserError with the reason if llama.cpp would compute something else; RuntimeError if the file that was
                read back differs
    """
    weights = weights_of(model, gguf_type, requantize=requantize)
    _check_importance(importance, weights)
    described = describe_tokenizer(tokenizer, model, pre=pre)
    report = GgufReport(Path(path), gguf_type, described.pre)
    types = _types(model, weights, gguf_type, importance is not None, report)
    writer = GGUFWriter(None, architecture_of(model.config))
    _add_general(writer, model, _file_type(gguf_type, report), provenance)
    report.notes += add_architecture(writer, model)
    add_tokenizer(writer, described)
    report.notes += described.notes + _notes_on_inputs(weights)
    _add_origin(writer, model, weights, gguf_type, types, importance, provenance)
    entries = [TensorEntry(name, types[name].got, weight.shape) for name, weight in weights.items()]
    check = (lambda reader: _compare_codes(reader, report.path, weights, types)) if gguf_type == AS_TRAINED else None
    with gguf_file(report.path, writer, entries, check=check) as file, torch.no_grad():
        _write_tensors(file, weights, types, importance, report)
    for line in report.lines():
        log.info("gguf     %s", line)
    return report


def _check_importance(importance: Mapping[str, Tensor] | None, weights: Mapping[str, Weight]) -> None:
    columns = {weight.layer: weight.shape[1] for weight in weights.values() if len(weight.shape) == 2}
    for layer, values in (importance or {}).items():
        require(
            layer in columns,
            f"importance has {layer}, which is no matrix of the model; use names such as {next(iter(columns))}",
        )
        require(
            values.shape == (columns[layer],) and bool((torch.isfinite(values) & (values >= 0)).all()),
            f"importance of {layer} has shape {tuple(values.shape)}; give {columns[layer]} finite numbers of 0 or more",
        )


# ---- types


def _types(
    model: PreTrainedModel, weights: Mapping[str, Weight], gguf_type: str, has_importance: bool, report: GgufReport
) -> dict[str, TensorType]:
    """The type of each tensor; matrices go into the report."""
    reasons: dict[str, str] = {}
    if gguf_type == AS_TRAINED:
        types = {name: _exact(weight, name, reasons) for name, weight in weights.items()}
    else:
        mixed = MixedModel(
            architecture_of(model.config),
            model.config.num_hidden_layers,
            **head_counts(model.config),
            tied="output.weight" not in weights,
            has_importance=has_importance,
        )
        types = tensor_types({name: weight.shape for name, weight in weights.items()}, gguf_type, mixed)
    for name, weight in weights.items():
        if len(weight.shape) == 2:
            kind, reason = types[name], reasons.get(name, "")
            if not reason and kind.wanted != kind.got:
                reason = f"{weight.shape[1]} columns are no multiple of its block"
            num_weights = weight.shape[0] * weight.shape[1]
            report.tensors.append(TensorReport(name, weight.layer, kind.wanted, kind.got, num_weights, reason))
    return types


def _exact(weight: Weight, name: str, reasons: dict[str, str]) -> TensorType:
    """The type of a tensor that is written as it is; `reasons` learns why codes are not taken over."""
    if len(weight.shape) < 2:
        return TensorType("F32", "F32")
    if weight.quantized is None:
        return TensorType("F16", "F16")
    exact, reasons[name] = exact_type(weight.quantized)
    return TensorType(exact or "its codes", exact or "F16")


def _file_type(gguf_type: str, report: GgufReport) -> LlamaFileType:
    """general.file_type, which is only shown: that of most weights where codes are taken over."""
    if gguf_type in FILE_TYPES:
        return FILE_TYPES[gguf_type][1]
    sizes: dict[str, int] = {}
    for tensor in report.tensors:
        if kind_of(tensor.name) not in ("token_embd", "output"):
            sizes[tensor.got] = sizes.get(tensor.got, 0) + tensor.num_weights
    return FILE_TYPES[max(sizes, key=sizes.__getitem__)][1]


def _notes_on_inputs(weights: Mapping[str, Weight]) -> list[str]:
    rounding = [
        weight.layer
        for weight in weights.values()
        if isinstance(weight.owner, PackedLinear) and weight.owner.scheme.activations is not None
    ]
    if not rounding:
        return []
    return [
        f"{len(rounding)} layers were trained with rounded inputs; llama.cpp rounds inputs in its own way (8 bits in "
        "blocks), so their products differ by that"
    ]


# ---- keys


def _add_general(
    writer: GGUFWriter, model: PreTrainedModel, file_type: LlamaFileType, provenance: dict[str, Any] | None
) -> None:
    stated = provenance or {}
    writer.add_type("model")
    writer.add_name(str(stated.get("name") or Path(model.name_or_path or model.config.model_type).name))
    if stated.get("license"):
        writer.add_license(str(stated["license"]))
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_file_type(file_type)


def _add_origin(
    writer: GGUFWriter,
    model: PreTrainedModel,
    weights: Mapping[str, Weight],
    gguf_type: str,
    types: Mapping[str, TensorType],
    importance: Mapping[str, Tensor] | None,
    provenance: dict[str, Any] | None,
) -> None:
    """The keys lowbit.*: how the weights came about, as far as the file does not show it."""
    packed = any(weight.quantized is not None for weight in weights.values())
    stated = {key: value for key, value in (provenance or {}).items() if key not in ("name", "license")}
    origin: dict[str, Any] = {"method": gguf_type, **stated, "gguf_type": gguf_type}
    if packed:
        origin |= {"packed_sha256": packed_sha256(model), "requantized": gguf_type != AS_TRAINED}
    if importance is not None:
        origin["num_importances"] = len(importance)
    for key, value in origin.items():
        writer.add_string(f"lowbit.{key}", value if isinstance(value, str) else json.dumps(value))
    quantizers = {
        weight.layer: weight.quantized.quantizer.settings
        for name, weight in weights.items()
        if gguf_type == AS_TRAINED and types[name].got in ("Q4_0", "Q8_0")
    }
    if quantizers:
        writer.add_string(QUANTIZERS, json.dumps(quantizers))


# ---- tensors


def _write_tensors(
    file: GgufFile,
    weights: Mapping[str, Weight],
    types: Mapping[str, TensorType],
    importance: Mapping[str, Tensor] | None,
    report: GgufReport,
) -> None:
    squares: dict[str, list[float]] = {}
    for name, weight in weights.items():
        type_name = types[name].got
        if report.gguf_type == AS_TRAINED and type_name in ("Q4_0", "Q8_0"):
            rows = to_blocks(_on_cpu(weight.quantized))
        else:
            dense = weight.dense()
            rows = encode(dense, type_name, weight.layer, importance=(importance or {}).get(weight.layer))
            if type_name != "F32":
                error = squares.setdefault(kind_of(name), [0.0, 0.0])
                for part, values in zip(rows.split(_ERROR_ROWS), dense.split(_ERROR_ROWS), strict=True):
                    lost = _decode(part, type_name, dense.shape[1]) - values
                    error[0] += float(lost.square().sum(dtype=torch.float64))
                    error[1] += float(values.square().sum(dtype=torch.float64))
        file.write(to_pairs(rows, weight.heads))
    report.errors = {kind: (error / total) ** 0.5 for kind, (error, total) in squares.items() if error}


def encode(dense: Tensor, type_name: str, layer: str, *, importance: Tensor | None = None) -> Tensor:
    """Values as the bytes of a type.

    dense    [rows, columns] or [length] float32
    returns  [rows, row bytes] uint8, or [length, 4] for a vector
    raises   UserError if a value is too large for float16
    """
    if type_name == "F32":
        return dense.contiguous().view(torch.uint8).view(dense.shape[0], -1)
    if type_name == "BF16":
        return dense.bfloat16().view(torch.uint8)
    if type_name == "F16":
        largest = float(dense.abs().max()) if dense.numel() else 0.0
        require(
            largest <= FLOAT16_MAX, f"{layer} has a weight of {largest:.4g}, too large for float16; use gguf_type=BF16"
        )
        return dense.half().view(torch.uint8)
    try:
        return gguf_quantize(dense, type_name, importance=importance)
    except ValueError as error:
        raise UserError(f"{layer} as {type_name}: {error}") from None


def _decode(rows: Tensor, type_name: str, cols: int) -> Tensor:
    if type_name in FLOATS:
        return rows.view({"F16": torch.float16, "BF16": torch.bfloat16}[type_name]).float()
    return gguf_dequantize(rows, type_name, cols=cols)


def _on_cpu(quantized: QuantizedTensor) -> QuantizedTensor:
    tensors = {name: None if tensor is None else tensor.detach().cpu() for name, tensor in quantized.tensors.items()}
    return QuantizedTensor(tensors, quantized.shape, quantized.quantizer)


def _compare_codes(
    reader: GGUFReader, path: Path, weights: Mapping[str, Weight], types: Mapping[str, TensorType]
) -> None:
    """raises  RuntimeError if a layer's codes or scales are not in the file"""
    codes = codes_of(reader, path)
    for name, weight in weights.items():
        if types[name].got not in ("Q4_0", "Q8_0"):
            continue
        written, found = _on_cpu(weight.quantized), codes[weight.layer]
        for key, tensor in written.tensors.items():
            same = (tensor is None and found.tensors[key] is None) or torch.equal(tensor, found.tensors[key])
            if found.quantizer != written.quantizer or not same:
                raise RuntimeError(f"{path.name}: {key} of {weight.layer} differ from those that were trained")
