"""A model of codes in each layout that others load: one door to trainer/formats/, for quantize.py, export.py and runs.

    quantized            lowbit's own folder: what the server multiplies, whatever the codes are
    merged               the values of the codes in 16 bits, which every engine loads
    gptq, awq            INT4 for vLLM, SGLang, transformers
    compressed_tensors   INT4 and INT8, with or without rounded inputs, for vLLM
    bnb                  NF4 and FP4 for transformers
    gguf                 one file for llama.cpp: the codes as they are where a type holds them

Codes are re-packed and never chosen again; a layout that cannot hold them says which can.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import require
from trainer.config.ptq import EXPORTS
from trainer.export.merged import write_merged
from trainer.export.quantized import write_quantized
from trainer.formats.awq import write_awq
from trainer.formats.bnb import write_bnb
from trainer.formats.card import write_card
from trainer.formats.compressed_tensors import write_compressed_tensors
from trainer.formats.gguf_weights import AS_TRAINED
from trainer.formats.gguf_write import write_gguf
from trainer.formats.gptq import write_gptq
from trainer.qat.packed_model import decoded, packed_layers, packed_sha256, scheme_of_layer
from trainer.qat.scheme import Scheme
from trainer.quantizer import WHOLE_ROW
from trainer.vocabulary import is_tied

log = logging.getLogger(__name__)

_CARD_NAMES = {
    "quantized": "quantized",
    "merged": "merged",
    "gptq": "gptq",
    "awq": "awq",
    "compressed_tensors": "compressed-tensors",
    "bnb": "bitsandbytes",
}


_HOLDS: dict[str, tuple[tuple[str, ...], int, bool]] = {
    "gptq": (("int4",), 32, False),
    "awq": (("int4",), 32, False),
    "compressed_tensors": (("int4", "int8"), 1, True),
    "bnb": (("nf4", "fp4"), 1, False),
}
"""Layout -> the codes that it holds, what sizes are multiples of, and whether inputs may be rounded."""


@dataclass(frozen=True)
class Provenance:
    """Where codes come from, for lowbit.json and the model card.

    base     the 16-bit model, org/name where it has one
    method   how codes were chosen, as the beginning of a sentence; data: on what, or empty
    figures  label -> figure
    """

    base: str
    method: str
    data: str = ""
    figures: dict[str, float | int | str] = field(default_factory=dict)
    packed_sha256: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """For lowbit.json."""
        return {"base": self.base, "method": self.method, "data": self.data, "packed_sha256": self.packed_sha256}


def require_layout(
    name: str,
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, int]],
    *,
    grouped_order: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Whether a layout holds layers that are still to be quantized, before hours go into their codes.

    schemes, shapes  by the layers' names; (out_features, in_features)
    grouped_order    groups will be cut along another order than the file's
    dtype            as of `write_layout`
    raises           UserError naming the first layer that it does not hold
    """
    require(
        not grouped_order or name not in ("awq", "compressed_tensors"),
        f"formats has {name!r}, which has no g_idx that engines still read; use act_order=static, or gptq",
    )
    codebooks, multiple, inputs = _HOLDS.get(name, (None, 1, True))
    sizes = set()
    for layer, scheme in schemes.items():
        kind = scheme.weight_name
        require(
            codebooks is None or kind in codebooks,
            f"formats has {name!r}, which holds {' and '.join(codebooks or ())}, and {layer} gets {kind}; use "
            "quantized, which holds everything, or another codebook",
        )
        require(
            scheme.activations is None or (inputs and kind == "int8"),
            f"formats has {name!r}, which cannot say that {layer} rounds its inputs; use quantized or "
            "compressed_tensors",
        )
        sizes.add(getattr(scheme.weight, "group_size", None))
        require(
            name != "compressed_tensors" or scheme.activations is None or scheme.weight.group_size == WHOLE_ROW,
            f"formats has {name!r}, whose engines multiply INT8 with one scale a row, and {layer} gets groups of "
            f"{scheme.weight.group_size}; use group_size=-1",
        )
        _require_scales(name, scheme, dtype)
        require(
            all(size % multiple == 0 for size in shapes[layer]),
            f"formats has {name!r}, whose loaders need multiples of {multiple}, and {layer} is {shapes[layer]}; "
            "exclude it, or use compressed_tensors",
        )
    require(
        name not in ("gptq", "awq") or len(sizes) == 1,
        f"formats has {name!r}, which has one group size, and the layers have {sorted(sizes)}; use compressed_tensors",
    )


def _require_scales(name: str, scheme: Scheme, dtype: torch.dtype | None) -> None:
    """Scales are values of what the layout stores; bfloat16's are float16's too, unless they are tiny."""
    stored = {"gptq": torch.float16, "awq": torch.float16, "compressed_tensors": dtype}.get(name)
    scales = getattr(scheme.weight, "scale_dtype", None)
    if stored is None or scales is None:
        return
    accepted = {torch.float16: ("float16", "bfloat16"), torch.bfloat16: ("bfloat16",)}.get(stored)
    require(
        accepted is None or scales in accepted,
        f"formats has {name!r}, which would round scales of scale_dtype={scales} to "
        f"{str(stored).removeprefix('torch.')}; use scale_dtype={accepted and accepted[0]}",
    )


def write_layout(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    provenance: Provenance,
    *,
    dtype: torch.dtype | None = None,
    gguf_type: str = AS_TRAINED,
    kv_cache: bool = False,
    allow_rounded_scales: bool = False,
) -> Path:
    """Write a model of codes in the layout `name`, complete or not at all.

    dtype      of what is dense; None: float16 where scales are float16, which all layouts store, else the model's own
    gguf_type  gguf: as_trained, or a type to round the values to again
    kv_cache   quantized: trained for an INT8 cache
    allow_rounded_scales  gptq, awq, compressed_tensors: see StoredScales
    returns    the folder, or for gguf the file in it
    raises     UserError naming what the layout cannot hold, and which can
    """
    require(name in EXPORTS, f"format={name}; use one of {', '.join(EXPORTS)}")
    rounds = {"allow_rounded_scales": allow_rounded_scales}
    options: dict[str, Any] = {"dtype": dtype or dense_dtype(model), "provenance": provenance.identity}
    match name:
        case "quantized":
            options = {"trained_sha256": packed_sha256(model), "provenance": provenance.identity}
            write_quantized(model, tokenizer, folder, kv_cache=kv_cache, **options)
        case "merged":
            write_dense(model, tokenizer, folder, dtype=dtype or model.dtype, provenance=provenance.identity)
        case "gptq":
            write_gptq(model, tokenizer, folder, **options, **rounds)
        case "awq":
            write_awq(model, tokenizer, folder, **options, **rounds)
        case "compressed_tensors":
            write_compressed_tensors(model, tokenizer, folder, **options, **rounds)
        case "bnb":
            write_bnb(model, tokenizer, folder, **options | {"dtype": dtype or model.dtype})
        case "gguf":
            return _write_gguf(model, tokenizer, folder, provenance, gguf_type=gguf_type)
    write_card(
        folder,
        base=provenance.base,
        method=provenance.method,
        data=provenance.data,
        figures=provenance.figures,
        format_name=_CARD_NAMES[name],
    )
    return folder


def _write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    provenance: Provenance,
    *,
    gguf_type: str,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(provenance.base).name}-{gguf_type}.gguf"
    requantize = gguf_type != AS_TRAINED
    write_gguf(*(model, tokenizer, path), gguf_type=gguf_type, provenance=provenance.identity, requantize=requantize)
    return path


def dense_dtype(model: PreTrainedModel) -> torch.dtype:
    """float16 if every scale of the codes is a value of it, else the model's own dtype."""
    for layer in packed_layers(model).values():
        scales = layer.quantized.tensors.get("scales")
        if scales is not None and not torch.equal(scales.half().float(), scales):
            return model.dtype
    return torch.float16


def write_dense(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype,
    provenance: dict[str, Any] | None = None,
) -> None:
    """The values of the codes as plain weights, which any engine reads; read back and compared with the codes.

    raises  RuntimeError if the files hold other values than the codes stand for
    """
    with decoded(model, dtype):
        write_merged(model, tokenizer, folder, dtype=dtype, provenance=provenance)
    if any(scheme_of_layer(layer).activations is not None for layer in packed_layers(model).values()):
        log.warning("merged   its inputs are not rounded, as those of the codes are: another function; serve quantized")
    left = set(packed_layers(model))
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name, layer in packed_layers(model).items():
                key = f"{name}.weight"
                if key not in names:
                    continue
                left.discard(name)
                if not torch.equal(file.get_tensor(key), layer.quantized.dequantize(dtype).cpu()):
                    raise RuntimeError(f"{path} holds other values of {name} than its codes stand for")
    if is_tied(model):  # the embedding's values stand for both
        left = {name for name in left if model.get_submodule(name) is not model.get_output_embeddings()}
    if left:
        raise RuntimeError(f"{folder} does not hold {', '.join(sorted(left))}, which are codes in the model")
