"""Weights in 2- and 3-bit codes of a NormalFloat, NF2 and NF3, with one scale per block: quantize and dequantize.

Formula: that of kernels/codebook4.py (blocks along the flattened weight, absmax, the nearest entry of the codebook,
float32 products rounded once), with these codebooks. For k bits and an offset d they are quantiles of the normal
distribution, scaled to end at 1 (QLoRA, arXiv:2305.14314, section 3, as LoftQ, arXiv:2310.08659, takes it to 2 bits):
    q(p)    = quantile of the standard normal distribution at p
    upper   = q(p) / q(d) for the first 2^(k-1) of 2^(k-1) + 1 evenly spaced p from d down to 1/2
    lower   = -q(p) / q(d) for the first 2^(k-1) - 1 of 2^(k-1) evenly spaced p from d down to 1/2
    codes   = lower, 0, upper in ascending order;  d = 0.9677083, the mean of 1 - 1/30 and 1 - 1/32
d is that of NF4 for every k, as in LoftQ's reference: at k = 4 this gives NF4 to the last bit (tests compare). One
value less below 0 than above keeps an exact 0; NF2 is -1, 0, 0.338 and 1.

Bytes: one stream of bits, least significant first, without gaps:
    packed   [ceil(numel * k / 8)] uint8    code i lies in bits k i .. k i + k - 1 of the stream    (padding bits: 0)
             2 bits: 4 codes a byte; 3 bits: 8 codes in 3 bytes. A block of 32 fills whole bytes.
    absmax   [ceil(numel / block_size)] float32, or 8-bit codes of it (kernels/double_quant.py)

Few rows have no fused product: a layer is decoded and multiplied (kernels/frozen_weight.py). Weights are quantized
once, so on GPUs torch's own kernels do it; decoding is in Triton.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels._triton import tl, triton
from trainer.kernels.codebook4 import (
    DEVICES,
    DTYPE_IDS,
    Codebook,
    check_block_size,
    check_buffers,
    check_dtype,
    check_float16_range,
    check_out,
    normalized_blocks,
    quantize_to_nibbles,
)
from trainer.kernels.double_quant import DYNAMIC_MAP, dequantize_absmax, dynamic_map, load_absmax

# The construction above with d = 0.9677083, probabilities and results in float32
NF2_CODEBOOK = (-1.0, 0.0, 0.33791524171829224, 1.0)
NF3_CODEBOOK = (
    -1.0, -0.4786292016506195, -0.217141792178154, 0.0,
    0.16093020141124725, 0.33791524171829224, 0.5626170039176941, 1.0,
)  # fmt: skip
DEQUANTIZE_WEIGHTS = 1024  # weights a Triton program decodes; not timed on hardware yet


class _Format(NamedTuple):
    bits: int
    tables: Codebook


FORMATS = {
    "nf3": _Format(3, Codebook(NF3_CODEBOOK, tuple(range(8)))),
    "nf2": _Format(2, Codebook(NF2_CODEBOOK, tuple(range(4)))),
}


@functools.cache
def _tables(codebook: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return FORMATS[codebook].tables.on(device)


@dataclass(slots=True)
class BitsWeight:
    """A weight of 2- or 3-bit codes as one argument; sizes are checked here, before a pointer leaves Python.

    packed         [ceil(numel * bits / 8)] uint8
    absmax         [num_blocks] float32, or uint8 codes with double quantization
    nested_absmax  [ceil(num_blocks / 256)] float32, or None
    nested_offset  [] float32, or None
    codebook       "nf3" or "nf2"
    raises         ValueError if codebook, block_size or a size is wrong
    """

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_offset: Tensor | None
    out_features: int
    in_features: int
    block_size: int
    codebook: str

    def __post_init__(self) -> None:
        _check_format(self.codebook, self.block_size)
        check_buffers(self, packed_bytes(self.numel, self.bits))

    @property
    def bits(self) -> int:
        return FORMATS[self.codebook].bits

    @property
    def numel(self) -> int:
        return self.out_features * self.in_features

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def double_quant(self) -> bool:
        return self.nested_absmax is not None

    def plain_absmax(self) -> Tensor:
        """[num_blocks] float32"""
        if not self.double_quant:
            return self.absmax
        return dequantize_absmax(self.absmax, self.nested_absmax, self.nested_offset)


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of `numel` codes."""
    return -(-numel * bits // 8)


def _check_format(codebook: str, block_size: int) -> None:
    if codebook not in FORMATS:
        raise ValueError(f"codebook={codebook!r} has no 2- or 3-bit codes; use one of {', '.join(FORMATS)}")
    check_block_size(block_size)


# ---- reference


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """[numel] uint8 codes below 2^bits as a stream of bits: [ceil(numel * bits / 8)] uint8."""
    eights = torch.nn.functional.pad(codes, (0, -codes.numel() % 8)).view(-1, 8).int()
    words = (eights << bits * torch.arange(8, device=codes.device, dtype=torch.int32)).sum(1, dtype=torch.int32)
    shifts = 8 * torch.arange(bits, device=codes.device, dtype=torch.int32)
    return (words[:, None] >> shifts & 255).to(torch.uint8).view(-1)[: packed_bytes(codes.numel(), bits)]


def unpack_bits(packed: Tensor, numel: int, bits: int) -> Tensor:
    """The codes [numel] uint8 behind `pack_bits`'s bytes."""
    groups = torch.nn.functional.pad(packed, (0, -packed.numel() % bits)).view(-1, bits).int()
    shifts = 8 * torch.arange(bits, device=packed.device, dtype=torch.int32)
    words = (groups << shifts).sum(1, dtype=torch.int32)
    places = bits * torch.arange(8, device=packed.device, dtype=torch.int32)
    return (words[:, None] >> places & (1 << bits) - 1).to(torch.uint8).view(-1)[:numel]


def bits_quantize_reference(weight: Tensor, *, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    _, thresholds, order = _tables(codebook, weight.device)
    normalized, absmax = normalized_blocks(weight, block_size)
    codes = order[torch.bucketize(normalized.view(-1)[: weight.numel()], thresholds)]
    return pack_bits(codes, FORMATS[codebook].bits), absmax


def bits_dequantize_reference(weight: BitsWeight, *, dtype: torch.dtype) -> Tensor:
    codes = unpack_bits(weight.packed, weight.numel, weight.bits)
    scales = weight.plain_absmax().repeat_interleave(weight.block_size)[: weight.numel]
    values = _tables(weight.codebook, weight.device)[0][codes.int()] * scales
    return values.to(dtype).view(weight.out_features, weight.in_features)


# ---- C++, on torch's threads: these run between torch's products


@functools.cache
def _padded_tables(codebook: str) -> tuple[Tensor, Tensor]:
    """thresholds [15], order [16] as the 4-bit kernel reads them: nothing lies above a threshold of infinity."""
    tables = FORMATS[codebook].tables
    thresholds = torch.full((15,), torch.inf)
    thresholds[: tables.thresholds.numel()] = tables.thresholds
    order = torch.zeros(16, dtype=torch.uint8)
    order[: tables.order.numel()] = tables.order
    return thresholds, order


def bits_quantize_cpu(weight: Tensor, *, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    nibbles, absmax = quantize_to_nibbles(weight, *_padded_tables(codebook), block_size)
    bits, numel = FORMATS[codebook].bits, weight.numel()
    packed = torch.empty(packed_bytes(numel, bits), dtype=torch.uint8)
    _tape.call_beside_torch(_tape.kernel("codebook_bits", "codebook_bits_pack"), nibbles, bits, numel, packed)
    return packed, absmax


def bits_dequantize_cpu(weight: BitsWeight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype) if out is None else out
    nested = weight.nested_absmax, weight.nested_offset
    _tape.call_beside_torch(
        _tape.kernel("codebook_bits", "codebook_bits_dequantize"), weight.packed, weight.absmax, *nested, DYNAMIC_MAP,
        FORMATS[weight.codebook].tables.values, weight.bits, weight.numel, weight.block_size, out, DTYPE_IDS[dtype],
    )  # fmt: skip
    return out


# ---- Triton


@triton.jit
def _dequantize_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, codebook_ptr, out_ptr, numel, num_bytes,
    BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DOUBLE_QUANT: tl.constexpr,
    NUM_ROWS: tl.constexpr, ROW_SIZE: tl.constexpr,
):  # fmt: skip
    """NUM_ROWS rows a program; a row is a block, or a part of a large one, so that its scale is loaded once."""
    row = tl.program_id(0).to(tl.int64) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    block = row * ROW_SIZE // BLOCK_SIZE
    scale_mask = row * ROW_SIZE < numel
    absmax = load_absmax(absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, block, scale_mask, DOUBLE_QUANT)
    element = row[:, None] * ROW_SIZE + tl.arange(0, ROW_SIZE)[None, :]
    mask = element < numel
    byte = element * BITS // 8
    low = tl.load(packed_ptr + byte, mask=mask, other=0).to(tl.int32)
    high = tl.load(packed_ptr + byte + 1, mask=mask & (byte + 1 < num_bytes), other=0).to(tl.int32)
    shift = (element * BITS % 8).to(tl.int32)
    code = ((low | (high << 8)) >> shift) & ((1 << BITS) - 1)
    weights = tl.load(codebook_ptr + code) * absmax[:, None]
    tl.store(out_ptr + element, weights.to(out_ptr.dtype.element_ty), mask=mask)


def tile_of(block_size: int) -> dict[str, int]:
    """What a program of `_dequantize_kernel` decodes: whole blocks, or a part of one."""
    row_size = min(block_size, DEQUANTIZE_WEIGHTS)
    return {"NUM_ROWS": DEQUANTIZE_WEIGHTS // row_size, "ROW_SIZE": row_size}


def bits_dequantize_triton(weight: BitsWeight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    out = weight.packed.new_empty(weight.out_features, weight.in_features, dtype=dtype) if out is None else out
    # A kernel without double quantization does not read the nested pointers, but it needs some.
    nested = (weight.nested_absmax, weight.nested_offset) if weight.double_quant else (weight.absmax, weight.absmax)
    if weight.numel:
        _dequantize_kernel[(triton.cdiv(weight.numel, DEQUANTIZE_WEIGHTS),)](
            weight.packed, weight.absmax, *nested, dynamic_map(weight.device),
            _tables(weight.codebook, weight.device)[0], out, weight.numel, weight.packed.numel(), BITS=weight.bits,
            BLOCK_SIZE=weight.block_size, DOUBLE_QUANT=weight.double_quant, **tile_of(weight.block_size),
            enable_fp_fusion=False,  # absmax is rounded twice, as on the CPU
        )  # fmt: skip
    return out


# ---- registered ops

_IMPLEMENTATIONS = {
    "reference": (bits_quantize_reference, bits_dequantize_reference),
    "cpu": (bits_quantize_cpu, bits_dequantize_cpu),
    "triton": (bits_quantize_reference, bits_dequantize_triton),
}


@torch.library.custom_op("lowbit::bits_quantize", mutates_args=())
def _quantize(weight: Tensor, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    _check_format(codebook, block_size)
    return bits_quantize_reference(weight, codebook=codebook, block_size=block_size)


@_quantize.register_kernel(DEVICES)
def _(weight: Tensor, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    _check_format(codebook, block_size)
    quantize = _IMPLEMENTATIONS[_choose(weight.device)][0]
    return quantize(weight, codebook=codebook, block_size=block_size)


@_quantize.register_fake
def _(weight: Tensor, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    numel = weight.numel()
    packed = weight.new_empty((numel * FORMATS[codebook].bits + 7) // 8, dtype=torch.uint8)
    return packed, weight.new_empty((numel + block_size - 1) // block_size, dtype=torch.float32)


@torch.library.custom_op("lowbit::bits_dequantize", mutates_args=())
def _dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    out_features: int,
    in_features: int,
    block_size: int,
    codebook: str,
    dtype: torch.dtype,
) -> Tensor:
    sizes = out_features, in_features, block_size, codebook
    return _run_dequantize("reference", BitsWeight(packed, absmax, nested_absmax, nested_offset, *sizes), dtype)


@_dequantize.register_kernel(DEVICES)
def _(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size, codebook, dtype) -> Tensor:
    sizes = out_features, in_features, block_size, codebook
    weight = BitsWeight(packed, absmax, nested_absmax, nested_offset, *sizes)
    return _run_dequantize(_choose(packed.device), weight, dtype)


@_dequantize.register_fake
def _(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size, codebook, dtype) -> Tensor:
    return packed.new_empty(out_features, in_features, dtype=dtype)


def _choose(device: torch.device) -> str:
    """The implementation; C++ needs both files, since the 4-bit one finds the codes."""
    chosen = _cpp.choose("codebook_bits", device.type)
    return _cpp.choose("codebook4", device.type) if chosen == "cpu" else chosen


def _run_dequantize(implementation: str, weight: BitsWeight, dtype: torch.dtype) -> Tensor:
    check_dtype("dtype", dtype)
    if dtype == torch.float16:
        check_float16_range(weight)
    return _IMPLEMENTATIONS[implementation][1](weight, dtype=dtype)


# ---- what the rest of the product calls


def bits_quantize(weight: Tensor, *, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize to the 2- or 3-bit codes of a NormalFloat, one scale per block (formula in the module's docstring).

    weight   [out_features, in_features] float, any strides; computed in float32
    codebook "nf3" or "nf2"
    returns  packed [ceil(numel * bits / 8)] uint8; absmax [ceil(numel / block_size)] float32
    raises   ValueError if the codebook is unknown, if block_size is not a power of two in 32..4096, or if a weight is
             inf or nan (names it)
    """
    return _quantize(weight.detach(), codebook, block_size)


def bits_dequantize(weight: BitsWeight, *, dtype: torch.dtype) -> Tensor:
    """The dense weight behind the codes: codebook * absmax in float32, rounded once to dtype.

    dtype    float32, bfloat16 or float16
    returns  [out_features, in_features] of dtype
    raises   ValueError if absmax > 65504 with float16; TypeError for another dtype
    """
    tensors = weight.packed, weight.absmax, weight.nested_absmax, weight.nested_offset
    sizes = weight.out_features, weight.in_features, weight.block_size
    return _dequantize(*tensors, *sizes, weight.codebook, dtype)


def bits_dequantize_into(weight: BitsWeight, out: Tensor) -> None:
    """`bits_dequantize` into memory of the caller, for instance rows of a larger matrix; autograd does not see it.

    out     [out_features, in_features] float32, bfloat16 or float16, contiguous, on the weight's device; overwritten
    raises  as `bits_dequantize`, and ValueError if out does not fit
    """
    check_out(out, weight)
    match _choose(weight.device):
        case "cpu":
            bits_dequantize_cpu(weight, dtype=out.dtype, out=out)
        case "triton":
            bits_dequantize_triton(weight, dtype=out.dtype, out=out)
        case _:
            out.copy_(bits_dequantize_reference(weight, dtype=out.dtype))
