"""bitsandbytes' 4 bits, QLoRA's own layout: NF4 or FP4 in blocks, with or without double quantization.

Tensors of a layer:
    weight                               [ceil(numel / 2), 1] uint8   the even element in the high nibble
    weight.absmax                        one float32 a block, or uint8 codes with double quantization
    weight.quant_map                     [16] float32: the codebook
    weight.nested_absmax, .nested_quant_map   the scales of these scales, and their codebook
    weight.quant_state.bitsandbytes__nf4 JSON as bytes: block size, shape, dtype, nested offset

Our codes and scales are the same bytes. The surprising thing: blocks run over the flat weight and may cross rows, which
bitsandbytes 0.50 decodes wrongly on CPUs where rows do not end on a block; on GPUs it does not.
"""

import json
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.formats.codes import Read, coded_layers, require_shape, unsupported, write_codes
from trainer.formats.hf_folder import SHARD_BYTES
from trainer.kernels.codebook4 import FP4_CODEBOOK, NF4_CODEBOOK
from trainer.kernels.double_quant import DYNAMIC_MAP, NESTED_BLOCK_SIZE
from trainer.linear import QuantLinear
from trainer.quantizer import QuantizedTensor, Quantizer

LAYOUT = "bitsandbytes"
CODEBOOKS = {"nf4": NF4_CODEBOOK, "fp4": FP4_CODEBOOK}
"""What bitsandbytes has a layout for."""


def write_bnb(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a causal language model whose packed layers are NF4 or FP4; dense layers are listed as such.

    dtype   of everything but codes and scales, and the compute dtype
    raises  UserError naming a layer that the layout cannot hold, and what to do
    """
    layers = coded_layers(model, LAYOUT, tuple(CODEBOOKS))

    def tensors(name: str, layer: nn.Module) -> dict[str, Tensor]:
        return bnb_tensors(layer.quantized, dtype)

    write_codes(
        *(model, tokenizer, folder, LAYOUT),
        layers=layers,
        tensors=tensors,
        config=bnb_config(next(iter(layers.packed.values())).quantized.quantizer, dtype, layers.dense),
        dtype=dtype,
        provenance=provenance,
        shard_bytes=shard_bytes,
    )


def bnb_config(quantizer: Quantizer, dtype: torch.dtype, dense: list[str]) -> dict[str, Any]:
    """`quantization_config` of a folder; each layer says its own codebook and blocks beside its weight."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantizer.codebook,
        bnb_4bit_use_double_quant=quantizer.double_quant,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=dense,
    ).to_dict()


def bnb_tensors(quantized: QuantizedTensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Codes and scales as Linear4bit saves them: suffix -> tensor."""
    quantizer, nested = quantized.quantizer, None
    if quantizer.double_quant:
        nested = QuantState(
            absmax=quantized.nested_absmax, blocksize=NESTED_BLOCK_SIZE, code=DYNAMIC_MAP.cpu(), dtype=torch.float32
        )
    state = QuantState(
        absmax=quantized.absmax,
        shape=torch.Size(quantized.shape),
        code=torch.tensor(CODEBOOKS[quantizer.codebook]),
        blocksize=quantizer.block_size,
        quant_type=quantizer.codebook,
        dtype=dtype,
        offset=quantized.nested_offset,
        state2=nested,
    )
    tensors = {f"weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    return {"weight": quantized.packed.view(-1, 1), **tensors}


def bnb_reader(config: dict[str, Any]) -> Read:
    """How layers of a folder with this `quantization_config` are read: 4 bits.

    raises  UserError for 8 bits and for weights that are stored as floats
    """
    if not config.get("load_in_4bit"):
        raise unsupported(LAYOUT, "load_in_4bit", config.get("load_in_4bit", False), "true")
    if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise unsupported(LAYOUT, "bnb_4bit_quant_storage", config["bnb_4bit_quant_storage"], "uint8")

    def read(name: str, dense: nn.Linear, tensors: dict[str, Tensor]) -> QuantLinear | None:
        prefix = f"{name}.weight."
        own = {key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if key.startswith(prefix)}
        if not own:
            return None
        codes = tensors.pop(f"{name}.weight", None)
        require(codes is not None, f"{name} lacks its weight; copy the whole folder again")
        try:
            weight = _weight(name, codes, own, tuple(dense.weight.shape))
        except (KeyError, ValueError) as error:
            raise UserError(f"{name} cannot be read: {error}") from None
        return QuantLinear(weight, tensors.pop(f"{name}.bias", None))

    return read


def _weight(name: str, codes: Tensor, own: dict[str, Tensor], shape: tuple[int, int]) -> QuantizedTensor:
    states = [key for key in own if key.startswith("quant_state.")]
    require(len(states) == 1, f"{name} has the quantization states {states}, and needs one; the file is damaged")
    state = json.loads(own[states[0]].numpy().tobytes())
    require(tuple(state["shape"]) == shape, f"{name} is {state['shape']} and the config says {list(shape)}")
    kind, numel = state["quant_type"], shape[0] * shape[1]
    if kind not in CODEBOOKS:
        raise unsupported(LAYOUT, "quant_type", kind, ", ".join(CODEBOOKS))
    _require_map(name, own["quant_map"], torch.tensor(CODEBOOKS[kind]))
    quantizer = Quantizer(kind, block_size=state["blocksize"], double_quant="nested_absmax" in own)
    num_blocks = -(-numel // quantizer.block_size)
    require_shape(f"{name}.weight", codes.reshape(-1), torch.uint8, (numel + 1) // 2)
    tensors = {"packed": codes.reshape(-1), "absmax": own["absmax"], "nested_absmax": None, "nested_offset": None}
    if quantizer.double_quant:
        if state["nested_blocksize"] != NESTED_BLOCK_SIZE:
            raise unsupported(LAYOUT, "nested_blocksize", state["nested_blocksize"], str(NESTED_BLOCK_SIZE))
        _require_map(name, own["nested_quant_map"], DYNAMIC_MAP.cpu())
        tensors |= {"nested_absmax": own["nested_absmax"], "nested_offset": torch.tensor(state["nested_offset"])}
    dtype = torch.uint8 if quantizer.double_quant else torch.float32
    require_shape(f"{name}.weight.absmax", tensors["absmax"], dtype, num_blocks)
    return QuantizedTensor(tensors, shape, quantizer)


def _require_map(name: str, stored: Tensor, ours: Tensor) -> None:
    """Codebooks are computed in floats by each version of bitsandbytes: they may differ in a last bit."""
    require(
        stored.shape == ours.shape and torch.allclose(stored.float(), ours.float(), rtol=1e-6, atol=1e-7),
        f"{name} has another codebook than bitsandbytes 0.50 writes, and would be decoded to other weights",
    )
