"""Packed codes as GGUF blocks and back, as integers: nothing is rounded that was not rounded before.

Two types of ours are types of GGUF's, if their groups are multiples of 32 and their scales are exact in float16:

    INT4, symmetric   w = (q - 8) d   Q4_0   [float16 d][16 bytes: q[j] | q[j + 16] << 4]   32 weights in 18 bytes
    INT8              w = q d         Q8_0   [float16 d][32 int8]                           32 weights in 34 bytes

A group of more than 32 weights becomes several blocks with the same d; what the group was stands in the file's
`lowbit.quantizers`. In our bytes neighbours share a byte, in GGUF's weight j and j + 16 of a block.
"""

import torch
from torch import Tensor

from trainer.kernels.int4 import Int4Weight, pack_int4, unpack_int4
from trainer.kernels.int8 import Int8Weight
from trainer.qat.packed_linear import Packed
from trainer.quantizer import QuantizedTensor, Quantizer

BLOCK = 32
"""Weights of a block of Q4_0 and Q8_0."""


def exact_type(quantized: Packed) -> tuple[str | None, str]:
    """The GGUF type that holds the codes as they are, or None with the reason."""
    if not isinstance(quantized, QuantizedTensor) or quantized.quantizer.codebook not in ("int4", "int8"):
        codebook = quantized.quantizer.codebook if isinstance(quantized, QuantizedTensor) else "a table of floats"
        return None, f"no type has the values of {codebook}"
    weight: Int4Weight | Int8Weight = quantized.weight
    if isinstance(weight, Int4Weight) and weight.zeros is not None:
        return None, "no type has integer zero points"
    if isinstance(weight, Int4Weight) and weight.g_idx is not None:
        return None, "no type has groups in another order than the columns"
    if weight.group_size % BLOCK:
        return None, f"groups of {weight.group_size} are no multiple of {BLOCK}"
    if not torch.equal(weight.scales.half().float(), weight.scales):
        return None, "its scales are not exact in float16 (scale_dtype=float16 makes them so)"
    return ("Q4_0" if isinstance(weight, Int4Weight) else "Q8_0"), ""


def to_blocks(quantized: QuantizedTensor) -> Tensor:
    """The codes as blocks of `exact_type`.

    returns  [out_features, in_features / 32 * block bytes] uint8
    """
    weight: Int4Weight | Int8Weight = quantized.weight
    repeats = weight.group_size // BLOCK
    d = weight.scales.half().repeat_interleave(repeats, dim=1)[:, :, None].contiguous().view(torch.uint8)
    if isinstance(weight, Int4Weight):
        codes = unpack_int4(weight.packed, weight.in_features).view(*d.shape[:2], 2, BLOCK // 2)
        codes = codes[:, :, 0] | codes[:, :, 1] << 4
    else:
        codes = weight.packed.view(*d.shape[:2], BLOCK).view(torch.uint8)
    return torch.cat([d, codes], dim=2).flatten(1)


def from_blocks(data: Tensor, type_name: str, quantizer: Quantizer | None = None) -> QuantizedTensor:
    """The codes behind the blocks of a Q4_0 or Q8_0 tensor.

    data       [out_features, row bytes] uint8
    quantizer  whose codes they were; None: groups of 32
    raises     ValueError if the type is another one, or if blocks of one group have several scales
    """
    sizes = {"Q4_0": ("int4", 18), "Q8_0": ("int8", 34)}
    if type_name not in sizes:
        raise ValueError(f"a tensor of {type_name} has no codes of ours; use one of {', '.join(sizes)}")
    codebook, block_bytes = sizes[type_name]
    quantizer = quantizer or Quantizer(codebook, group_size=BLOCK, scale_dtype="float16")
    blocks = data.reshape(data.shape[0], -1, block_bytes)
    shape = data.shape[0], blocks.shape[1] * BLOCK
    d = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0].float()
    groups = d.view(shape[0], -1, quantizer.span(shape[1]) // BLOCK)
    if not torch.equal(groups, groups[:, :, :1].expand_as(groups)):
        raise ValueError(f"blocks of one group of {quantizer.group_size} have several scales; read it in groups of 32")
    tensors: dict[str, Tensor | None] = {"scales": groups[:, :, 0].contiguous()}
    codes = blocks[:, :, 2:]
    if codebook == "int8":
        return QuantizedTensor({"packed": codes.contiguous().view(torch.int8).view(shape)} | tensors, shape, quantizer)
    codes = torch.stack([codes & 15, codes >> 4], dim=2).view(shape)
    return QuantizedTensor({"packed": pack_int4(codes)} | tensors | {"zeros": None, "g_idx": None}, shape, quantizer)
