"""Which tensor of a GGUF file gets which type.

llama.cpp's mixes (src/llama-quant.cpp, llama_tensor_get_type), for dense Llamas and Qwens. A name such as Q4_K_M says
what most matrices are; the output head and a few that lose most get more bits, norms and biases stay in float32. A row
that does not end on a block takes the type that its columns allow. Tests compare every tensor with llama.cpp's own
quantizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gguf import LlamaFileType

from trainer.formats.gguf_names import kind_of, layer_of
from trainer.kernels.gguf_quants import fitting_type

FILE_TYPES = {
    "F16": ("F16", LlamaFileType.MOSTLY_F16),
    "BF16": ("BF16", LlamaFileType.MOSTLY_BF16),
    "Q8_0": ("Q8_0", LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": ("Q4_0", LlamaFileType.MOSTLY_Q4_0),
    "Q4_1": ("Q4_1", LlamaFileType.MOSTLY_Q4_1),
    "Q5_0": ("Q5_0", LlamaFileType.MOSTLY_Q5_0),
    "Q5_1": ("Q5_1", LlamaFileType.MOSTLY_Q5_1),
    "Q4_K_S": ("Q4_K", LlamaFileType.MOSTLY_Q4_K_S),
    "Q4_K_M": ("Q4_K", LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K_M": ("Q5_K", LlamaFileType.MOSTLY_Q5_K_M),
    "Q6_K": ("Q6_K", LlamaFileType.MOSTLY_Q6_K),
}
"""Name of a mix -> the type of most matrices, and general.file_type."""
FLOATS = ("F32", "F16", "BF16")
_LAYERS_OF_70B = 80
"""llama.cpp knows the Llama of 70 billion weights, and Qwen2's of 72, by their number of layers."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """wanted: what the mix asks for; got: what the columns allow."""

    wanted: str
    got: str


@dataclass(frozen=True, slots=True)
class MixedModel:
    """What the choice depends on beside a tensor's name and shape.

    tied            the file has no head of its own
    has_importance  importances of input channels are given
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tied: bool
    has_importance: bool = False

    @property
    def shares_values(self) -> bool:
        """Whether attn_v is so small beside attn_q that it gets more bits."""
        grouped = self.architecture == "qwen2" or (self.architecture == "llama" and self.num_heads != self.num_kv_heads)
        return self.num_layers == _LAYERS_OF_70B and grouped


def tensor_types(shapes: Mapping[str, tuple[int, ...]], gguf_type: str, model: MixedModel) -> dict[str, TensorType]:
    """The type of each tensor.

    shapes     name in the GGUF file -> [rows, columns] or [length]
    gguf_type  one of FILE_TYPES
    """
    types = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            types[name] = TensorType("F32", "F32")
            continue
        wanted = _wanted(name, gguf_type, model)
        types[name] = TensorType(wanted, wanted if wanted in FLOATS else fitting_type(wanted, shape[1]))
    return types


def _wanted(name: str, gguf_type: str, model: MixedModel) -> str:
    base, kind = FILE_TYPES[gguf_type][0], kind_of(name)
    if base in FLOATS:
        return base
    if kind == "output" or (kind == "token_embd" and model.tied):
        return "Q8_0" if base == "Q8_0" else "Q6_K"
    if kind == "attn_v":
        return _values(gguf_type, base, layer_of(name), model)
    if kind == "ffn_down":
        return _down(gguf_type, base, layer_of(name), model)
    return base


def _values(gguf_type: str, base: str, layer: int, model: MixedModel) -> str:
    if gguf_type in ("Q4_K_M", "Q5_K_M") and _gets_more_bits(layer, model.num_layers):
        return "Q6_K"
    if (gguf_type == "Q4_K_S" and layer < 4) or (base == "Q4_K" and model.shares_values):
        return "Q5_K"
    return base


def _down(gguf_type: str, base: str, layer: int, model: MixedModel) -> str:
    if gguf_type in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if _gets_more_bits(layer, model.num_layers) else base
    if layer < model.num_layers // 8:
        if gguf_type == "Q4_K_S":
            return "Q5_K"
        if gguf_type in ("Q4_0", "Q5_0") and model.has_importance:
            return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[gguf_type]
    return base


def _gets_more_bits(layer: int, num_layers: int) -> bool:
    """The first and last eighth of the layers, and each third one between."""
    return layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2
