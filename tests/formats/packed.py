"""Small models of codes with all that layouts treat specially, and their layouts unpacked as documented.

The unpackers are numpy and bit by bit: they share nothing with trainer/formats.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trainer.kernels.fake_quant import Grid
from trainer.linear import QuantLinear
from trainer.qat.observers import ObserverSettings
from trainer.qat.packed_linear import PackedLinear
from trainer.qat.scheme import Activations, Scheme
from trainer.quantizer import QuantizedTensor, Quantizer
from trainer.sources.tiny import tiny_model

TOKEN_IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
SYM = Quantizer("int4", scale_dtype="float16", divisor=7.5)
ASYM = Quantizer("int4", scale_dtype="float16", symmetric=False)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,  # 5 groups of 32
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 256,
}


def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


def dense_model(kind: str = "llama", *, dtype: torch.dtype = torch.float32, tied: bool = False) -> PreTrainedModel:
    """Random; Qwen2 has biases, which are not zero. Rows without a negative weight, and without a positive one."""
    torch.manual_seed(0)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    built = model(config(**SIZES, tie_word_embeddings=tied, pad_token_id=3)).to(dtype).eval()
    built.config.dtype = dtype
    for name, layer in built.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            nn.init.normal_(layer.weight, std=0.1)
            layer.weight.data[0] = layer.weight[0].abs()
            layer.weight.data[1] = -layer.weight[1].abs()
            if layer.bias is not None:
                nn.init.normal_(layer.bias)
    return built.requires_grad_(False)


def pack(
    model: PreTrainedModel,
    quantizer: Quantizer,
    *,
    dense: tuple[str, ...] = (),
    act_order: bool = False,
    inputs: str | None = None,
    other: dict[str, Quantizer] | None = None,
) -> PreTrainedModel:
    """Codes in the place of linear layers, in place.

    dense      ends of the names of layers that stay as they are, beside the head
    act_order  groups of random features
    inputs     "token" or "tensor": INT8 inputs
    other      end of a name -> its own quantizer
    """
    for name, layer in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]:
        if name.endswith(("lm_head", *dense)):
            continue
        own = next((q for end, q in (other or {}).items() if name.endswith(end)), quantizer)
        weight = own.quantize(layer.weight)
        if act_order:
            order = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(len(name)))
            g_idx = (order // own.span(layer.in_features)).int()
            weight = QuantizedTensor({**weight.tensors, "g_idx": g_idx}, weight.shape, own)
        if inputs is None:
            packed = QuantLinear(weight, layer.bias)
        else:
            static = ObserverSettings() if inputs == "tensor" else None
            scheme = Scheme(own, Activations(Grid.int8(), static), integer=True)
            # 2^-3 is a value of every dtype, and 127 of it cover the inputs of this model.
            scale = torch.tensor(0.125) if static else None
            packed = PackedLinear(weight, scheme, layer.bias, input_scale=scale)
        model.set_submodule(name, packed)
    return model


def layers_of(model: PreTrainedModel) -> dict[str, QuantLinear | PackedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear | PackedLinear)}


def dequantized(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The dense model of the same weights, in place: codes times scales, rounded once to dtype."""
    for name, layer in layers_of(model).items():
        dense = nn.Linear(
            layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype or model.dtype
        )
        dense.weight = nn.Parameter(layer.quantized.dequantize(dtype or model.dtype), requires_grad=False)
        dense.bias = layer.bias
        model.set_submodule(name, dense)
    return model if dtype is None else model.to(dtype)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=TOKEN_IDS, use_cache=False).logits


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def files_of(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def nibble(words: np.ndarray, place: np.ndarray) -> np.ndarray:
    return (words.view(np.uint32) >> (4 * place).astype(np.uint32)) & 15


def unpack_gptq(tensors: dict[str, np.ndarray], name: str, *, version: int) -> np.ndarray:
    """AutoGPTQ's documentation: W[n, k] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])"""
    qweight, qzeros, scales, g_idx = (tensors[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx"))
    k, n = np.arange(qweight.shape[0] * 8), np.arange(qweight.shape[1])
    codes = nibble(qweight[k // 8], (k % 8)[:, None]).astype(np.int32)
    zeros = nibble(qzeros[:, n // 8], (n % 8)[None]).astype(np.int32)
    zeros = (zeros + 1) % 16 if version == 1 else zeros
    return ((codes - zeros[g_idx]).astype(np.float32) * scales.astype(np.float32)[g_idx]).T


def unpack_awq(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """AutoAWQ packs column 8 c + order_map[i] at bits 4 i of word c."""
    order_map = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    place_of = np.array([int(np.where(order_map == column)[0][0]) for column in range(8)])
    qweight, qzeros, scales = (tensors[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales"))
    n = np.arange(scales.shape[1])
    codes, zeros = (nibble(words[:, n // 8], place_of[n % 8][None]).astype(np.int32) for words in (qweight, qzeros))
    group = np.arange(qweight.shape[0]) // (qweight.shape[0] // scales.shape[0])
    return ((codes - zeros[group]).astype(np.float32) * scales.astype(np.float32)[group]).T


def unpack_compressed(tensors: dict[str, np.ndarray], name: str, *, bits: int) -> np.ndarray:
    """compressed-tensors: element i of a row at bit i * bits, offset by 2^(bits - 1); zero points along the outputs."""
    packed, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"].astype(np.float32)
    out_features, in_features = tensors[f"{name}.weight_shape"]
    per, offset = 32 // bits, 1 << (bits - 1)

    def element(words: np.ndarray, i: np.ndarray) -> np.ndarray:
        return (
            (words.view(np.uint32)[:, i // per] >> (bits * (i % per)).astype(np.uint32)) & (2**bits - 1)
        ) - np.int64(offset)

    codes = element(packed, np.arange(in_features))
    group = np.arange(in_features) // (in_features // scales.shape[1])
    zeros = 0
    if f"{name}.weight_zero_point" in tensors:
        along_outputs = np.ascontiguousarray(tensors[f"{name}.weight_zero_point"].T)
        zeros = element(along_outputs, np.arange(out_features)).T[:, group]
    return (codes - zeros).astype(np.float32) * scales[:, group]


def unpack_bnb(tensors: dict[str, np.ndarray], name: str, kind: str) -> np.ndarray:
    """bitsandbytes: the even element in the high nibble, a scale for each block of the flat weight."""
    state = json.loads(tensors[f"{name}.weight.quant_state.bitsandbytes__{kind}"].tobytes())
    codes = tensors[f"{name}.weight"].reshape(-1)
    codes = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)
    absmax = tensors[f"{name}.weight.absmax"]
    if "nested_offset" in state:
        block = np.arange(len(absmax)) // state["nested_blocksize"]
        absmax = tensors[f"{name}.weight.nested_quant_map"][absmax] * tensors[f"{name}.weight.nested_absmax"][block]
        absmax = absmax + np.float32(state["nested_offset"])
    values = tensors[f"{name}.weight.quant_map"][codes] * absmax[np.arange(len(codes)) // state["blocksize"]]
    return values.reshape(state["shape"])
