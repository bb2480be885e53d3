"""A model as one GGUF file, which llama.cpp, Ollama and others load as it is.

A type such as Q4_K_M quantizes a model of floats. `as_trained` writes the codes of a packed model instead, as integers
(gguf_packed.py): what was trained is what is served. Each tensor is made, written and let go; the file is read back
before it gets its name.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION, GGUFReader, GGUFWriter, LlamaFileType
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.formats.gguf_config import add_architecture, architecture_of, require_writable, rope_factors
from trainer.formats.gguf_file import GgufFile, TensorEntry, gguf_file
from trainer.formats.gguf_mix import FILE_TYPES, FLOATS, MixedModel, TensorType, tensor_types
from trainer.formats.gguf_names import BIASED, ROPE_FACTORS, head_counts, kind_of, to_gguf_name, to_pairs, turned_heads
from trainer.formats.gguf_packed import exact_type, to_blocks
from trainer.formats.gguf_read import QUANTIZERS, codes_of
from trainer.formats.gguf_tokenizer import add_tokenizer, describe_tokenizer
from trainer.kernels.gguf_quants import gguf_dequantize, gguf_quantize
from trainer.linear import QuantLinear
from trainer.qat.packed_linear import PackedEmbedding, PackedLinear
from trainer.qat.packed_model import packed_sha256
from trainer.quantizer import QuantizedTensor
from trainer.vocabulary import is_tied

log = logging.getLogger(__name__)

AS_TRAINED = "as_trained"
GGUF_CHOICES = (*FILE_TYPES, AS_TRAINED)
FLOAT16_MAX = 65504.0
_ERROR_ROWS = 4096
"""Rows that are decoded at a time to measure what rounding lost: embeddings are the largest tensors."""
_PACKED = (QuantLinear, PackedLinear, PackedEmbedding)


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A matrix of the file.

    name      in the file; layer: Hugging Face's name
    wanted    the type that was asked for; got: the one that it has
    reason    why got is another one, or why codes were not taken over
    """

    name: str
    layer: str
    wanted: str
    got: str
    num_weights: int
    reason: str = ""


@dataclass(slots=True)
class GgufReport:
    """What was written.

    tensors  the matrices, in the file's order
    errors   kind of tensor (`attn_q`, `token_embd`) -> |w' - w| / |w| over all layers, where weights were rounded
    notes    what llama.cpp does differently
    """

    path: Path
    gguf_type: str
    pre: str
    tensors: list[TensorReport] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_weights(self) -> int:
        """Weights in matrices."""
        return sum(tensor.num_weights for tensor in self.tensors)

    @property
    def fallbacks(self) -> list[TensorReport]:
        """Matrices that have another type than was asked for."""
        return [tensor for tensor in self.tensors if tensor.wanted != tensor.got]

    @property
    def fallback_share(self) -> float:
        """Their share of the weights."""
        return sum(tensor.num_weights for tensor in self.fallbacks) / max(1, self.num_weights)

    @property
    def bits_per_weight(self) -> float:
        """Of the whole file, metadata included."""
        return 8 * self.path.stat().st_size / max(1, self.num_weights)

    def lines(self) -> list[str]:
        """For a log or a model card."""
        lines = [
            f"{self.path.name}: {self.gguf_type}, {self.path.stat().st_size / 1e6:.1f} MB, "
            f"{self.bits_per_weight:.2f} bits a weight, tokenizer {self.pre}"
        ]
        changes: dict[tuple[str, str, str, str], int] = {}
        for tensor in self.fallbacks:
            key = kind_of(tensor.name), tensor.wanted, tensor.got, tensor.reason
            changes[key] = changes.get(key, 0) + tensor.num_weights
        for (kind, wanted, got, reason), num_weights in changes.items():
            share = 100 * num_weights / self.num_weights
            lines.append(f"{kind}: {got} instead of {wanted}, {share:.1f} % of the weights ({reason})")
        lines += [f"{kind}: relative error {error:.2g}" for kind, error in self.errors.items()]
        return lines + self.notes


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
    weights = _weights(model, gguf_type, requantize)
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


# ---- what the model holds


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of the model.

    owner    a packed layer, or the dense tensor itself
    layer    Hugging Face's name without .weight or .bias
    heads    heads whose rows are reordered, or None
    """

    owner: nn.Module | Tensor
    layer: str
    shape: tuple[int, ...]
    heads: int | None

    @property
    def quantized(self) -> Any:
        """Codes and scales; None for floats."""
        return None if isinstance(self.owner, Tensor) else self.owner.quantized

    def dense(self) -> Tensor:
        """float32, on the CPU, in the model's order of rows; raises UserError if it holds inf or nan."""
        tensor = self.owner if isinstance(self.owner, Tensor) else self.owner.quantized.dequantize(torch.float32)
        tensor = tensor.detach().float().cpu()
        require(
            bool(torch.isfinite(tensor).all()), f"{self.layer} holds inf or nan; a model that diverged is not written"
        )
        return tensor


def _weights(model: PreTrainedModel, gguf_type: str, requantize: bool) -> dict[str, _Weight]:
    """GGUF name -> what stands there; raises UserError if the model cannot be written."""
    require(gguf_type in GGUF_CHOICES, f"gguf_type={gguf_type}; use one of {', '.join(GGUF_CHOICES)}")
    require(
        not hasattr(model, "peft_config"),
        "a model with an adapter over it is no plain model; merge the adapter first, or write it with "
        "write_gguf_adapter",
    )
    require_writable(model.config)
    architecture, heads = architecture_of(model.config), head_counts(model.config)
    weights: dict[str, _Weight] = {}
    for name, owner, shape in _tensors(model):
        gguf_name = to_gguf_name(name)
        biased = gguf_name is not None and (gguf_name.endswith(".weight") or kind_of(gguf_name) in BIASED[architecture])
        require(biased, f"{name} has no place in a GGUF file of {architecture}; export the model in 16 bits instead")
        weights[gguf_name] = _Weight(
            owner, name.rpartition(".")[0], shape, turned_heads(gguf_name, architecture, **heads)
        )
    factors = rope_factors(model)
    if factors is not None:
        weights[ROPE_FACTORS] = _Weight(factors, "rope_freqs", tuple(factors.shape), None)
    packed = [weight.layer for weight in weights.values() if weight.quantized is not None]
    require(
        not packed or requantize or gguf_type == AS_TRAINED,
        f"gguf_type={gguf_type} would round the {len(packed)} packed layers a second time ({packed[:1]}); use "
        f"gguf_type={AS_TRAINED} for their codes, or requantize=True",
    )
    require(
        bool(packed) or gguf_type != AS_TRAINED,
        f"gguf_type={AS_TRAINED}, and no layer of the model is packed; use one of {', '.join(FILE_TYPES)}",
    )
    return weights


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module | Tensor, tuple[int, ...]]]:
    """Name, owner and shape of each tensor of the file, in the model's order; a tied head is left out."""
    head = model.get_output_embeddings()
    tied = _is_tied_head(model)
    for prefix, module in model.named_modules():
        if module is head and tied:
            continue
        if isinstance(module, _PACKED):
            yield f"{prefix}.weight", module, tuple(module.quantized.shape)
        else:
            require(
                not hasattr(type(module), "quantized"),
                f"{prefix} is still trained through the quantizer; convert the model first",
            )
        for name, tensor in module.named_parameters(recurse=False):
            require(
                tensor.is_floating_point() and tensor.dim() <= 2,
                f"{prefix}.{name} holds {tensor.dtype} {tuple(tensor.shape)} of another library "
                f"({type(module).__name__}); load the model in 16 bits",
            )
            yield f"{prefix}.{name}", tensor, tuple(tensor.shape)


def _is_tied_head(model: PreTrainedModel) -> bool:
    """Whether the head is the embedding, in what it holds and not only in the config."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not is_tied(model) or isinstance(head, _PACKED) != isinstance(embedding, _PACKED):
        return False
    if not isinstance(head, _PACKED):
        return head.weight is embedding.weight or torch.equal(head.weight, embedding.weight)
    pairs = zip(head.quantized.tensors.values(), embedding.quantized.tensors.values(), strict=False)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _check_importance(importance: Mapping[str, Tensor] | None, weights: Mapping[str, _Weight]) -> None:
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
    model: PreTrainedModel, weights: Mapping[str, _Weight], gguf_type: str, has_importance: bool, report: GgufReport
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


def _exact(weight: _Weight, name: str, reasons: dict[str, str]) -> TensorType:
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


def _notes_on_inputs(weights: Mapping[str, _Weight]) -> list[str]:
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
    weights: Mapping[str, _Weight],
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
    weights: Mapping[str, _Weight],
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
    reader: GGUFReader, path: Path, weights: Mapping[str, _Weight], types: Mapping[str, TensorType]
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
