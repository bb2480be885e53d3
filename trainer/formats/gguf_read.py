"""Weights of a GGUF file under Hugging Face's names, as floats or as the codes that were written.

The order of rows that llama.cpp wants of a Llama's q and k is undone. What is no weight of Hugging Face's (the rope
factors of Llama 3) is left out.
"""

import json
from pathlib import Path

import torch
from gguf import GGUFReader, ReaderTensor
from torch import Tensor

from trainer.config.errors import require
from trainer.formats.gguf_file import open_gguf
from trainer.formats.gguf_names import ARCHITECTURES, ROPE_FACTORS, to_halves, to_hf_name, turned_heads
from trainer.formats.gguf_packed import from_blocks
from trainer.kernels.gguf_quants import GGUF_TYPES, gguf_dequantize
from trainer.quantizer import QuantizedTensor, Quantizer

QUANTIZERS = "lowbit.quantizers"
"""The key under which `write_gguf` keeps the quantizer of each layer, as JSON."""


def read_gguf(path: Path, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight, decoded in float32 and rounded once; a tied head is not among them.

    dtype    of the weights returned
    returns  Hugging Face name -> [rows, columns] or [length]
    raises   UserError if the file is damaged, of another architecture, or holds a type that is not read here
    """
    reader = open_gguf(path)
    heads = _heads(reader, path)
    weights = {}
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = to_hf_name(tensor.name)
        require(name is not None, f"{path}: the tensor {tensor.name} is none of {', '.join(ARCHITECTURES)}")
        weights[name] = to_halves(_decoded(tensor, path), turned_heads(tensor.name, **heads)).to(dtype)
    return weights


def read_gguf_codes(path: Path) -> dict[str, QuantizedTensor]:
    """The codes of every matrix of Q4_0 or Q8_0, as INT4 or INT8.

    returns  Hugging Face name of the layer, without .weight -> codes and scales, with the quantizer that `write_gguf`
             wrote down, or groups of 32
    raises   UserError if the file is damaged or of another architecture
    """
    return codes_of(open_gguf(path), path)


def codes_of(reader: GGUFReader, path: Path) -> dict[str, QuantizedTensor]:
    """`read_gguf_codes` of an open file; path: for messages."""
    heads = _heads(reader, path)
    stated = json.loads(reader.fields[QUANTIZERS].contents() if QUANTIZERS in reader.fields else "{}")
    codes = {}
    for tensor in reader.tensors:
        name, type_name = to_hf_name(tensor.name), tensor.tensor_type.name
        if name is None or type_name not in ("Q4_0", "Q8_0"):
            continue
        layer = name.removesuffix(".weight")
        rows = to_halves(_rows(tensor), turned_heads(tensor.name, **heads))
        quantizer = Quantizer(**stated[layer]) if layer in stated else None
        codes[layer] = from_blocks(rows, type_name, quantizer)
    return codes


def _heads(reader: GGUFReader, path: Path) -> dict[str, int | str]:
    """What `turned_heads` must know of the file."""
    # Not all keys: tokens and merges are slow to read.
    keys = {key: field for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    architecture = keys["general.architecture"].contents() if "general.architecture" in keys else None
    kind = keys["general.type"].contents() if "general.type" in keys else "model"
    require(
        architecture in ARCHITECTURES.values() and f"{architecture}.block_count" in keys,
        f"{path} holds the {kind} of {architecture!r}; models of {', '.join(sorted(set(ARCHITECTURES.values())))} are "
        "read here",
    )
    num_heads = keys[f"{architecture}.attention.head_count"].contents()
    stated = keys.get(f"{architecture}.attention.head_count_kv")
    num_kv_heads = num_heads if stated is None else stated.contents()
    return {"architecture": architecture, "num_heads": num_heads, "num_kv_heads": num_kv_heads}


def _rows(tensor: ReaderTensor) -> Tensor:
    """The bytes of a tensor by rows, a copy: the file is mapped and may be closed."""
    return torch.tensor(tensor.data)


def _decoded(tensor: ReaderTensor, path: Path) -> Tensor:
    """[rows, columns] or [length] float32"""
    type_name = tensor.tensor_type.name
    if type_name in ("F32", "F16"):
        return _rows(tensor).float()
    if type_name == "BF16":
        return _rows(tensor).view(torch.bfloat16).float()
    require(
        type_name in GGUF_TYPES,
        f"{path}: {tensor.name} is of {type_name}; {', '.join(('F32', *GGUF_TYPES))} are read",
    )
    return gguf_dequantize(_rows(tensor), type_name, cols=int(tensor.shape[0]))
