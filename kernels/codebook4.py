"""Weights in 4-bit codes of a codebook, NF4 or FP4, with one scale per block: quantize and dequantize.

Formula. The weight, flattened row by row, is cut into blocks of `block_size`, which may cross rows:
    absmax[b] = max |w_i| over block b
    code_i    = the entry of the codebook nearest to w_i / absmax[b], the lower one of a tie
    w'_i      = codebook[code_i] * absmax[b], computed in float32, rounded once to the dtype asked for
The division is a multiplication by the float32 reciprocal, and a block of zeros has absmax 0 and the code of 0.

Bytes, those of bitsandbytes, so that checkpoints move both ways:
    packed   [ceil(numel / 2)] uint8    byte i = code[2i] << 4 | code[2i + 1]      (padding: the code of 0)
    absmax   [ceil(numel / block_size)] float32, or 8-bit codes of it (kernels/double_quant.py)

The codebook is an argument by name: "nf4", with a face of its own in kernels/nf4.py, or "fp4", bitsandbytes' floats: a
sign over 0 0.0625 2 3 4 6 8 12 twelfths, codes 0 1 6 7 4 5 2 3. NF4 is better for normal weights (arXiv:2305.14314,
section 4); FP4 is for checkpoints and comparisons that use it. The nearest entry is found by counting thresholds, the
midpoints of neighbours, that lie below: `order` then says which code that interval has. The linear layer over such
weights is in kernels/codebook4_linear.py.

Why tables: the 16 possible weights of a block are computed once and looked up by nibble, so a 16-bit weight costs one
look-up. Decoding writes four times the bytes that it reads, so it runs at the speed of memory.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles
from trainer.kernels.double_quant import DYNAMIC_MAP, NESTED_BLOCK_SIZE, dequantize_absmax, dynamic_map, load_absmax

if TYPE_CHECKING:
    from trainer.kernels.codebook_bits import BitsWeight

# arXiv:2305.14314, appendix E
NF4_CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' FP4, one sign bit over 8 magnitudes in the order of their bits, over the largest: the code is the bits.
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4_CODEBOOK = (*_FP4_MAGNITUDES, *(-value or 0.0 for value in _FP4_MAGNITUDES))
# 0 is there twice: bitsandbytes gives code 0 to what rounds to 0 from below and to 0 itself, and 8 from above.
_FP4_ORDER = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # see cpp/lowbit.h
QUANTIZE_ELEMENTS = 1024  # weights a Triton program reads, and bytes one decodes; not timed on hardware yet
DEQUANTIZE_BYTES = 1024
_TINY = 1e-38  # keeps 1 / absmax finite


class Codebook:
    """The tables of one codebook, each for any device.

    values      [16] float32, by code; fewer in codebook_bits.py
    thresholds  [15] float32, ascending: midpoints of neighbouring values
    order       [16] uint8: the code of each interval between thresholds
    """

    def __init__(self, values: tuple[float, ...], order: tuple[int, ...] = tuple(range(16))) -> None:
        self.values, self.order = torch.tensor(values), torch.tensor(order, dtype=torch.uint8)
        ascending = self.values[self.order.long()]
        self.thresholds = (ascending[:-1] + ascending[1:]) / 2

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """values, thresholds, order"""
        return self.values.to(device), self.thresholds.to(device), self.order.to(device)


CODEBOOKS = {"nf4": Codebook(NF4_CODEBOOK), "fp4": Codebook(FP4_CODEBOOK, _FP4_ORDER)}


@functools.cache
def _tables(codebook: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return CODEBOOKS[codebook].on(device)


@dataclass(slots=True)
class CodebookWeight:
    """A packed weight as one argument; sizes are checked here, before a pointer leaves Python.

    packed         [ceil(numel / 2)] uint8
    absmax         [num_blocks] float32, or uint8 codes with double quantization
    nested_absmax  [ceil(num_blocks / 256)] float32, or None
    nested_offset  [] float32, or None
    codebook       "nf4" or "fp4"
    raises         ValueError if codebook, block_size or a size is wrong
    """

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_offset: Tensor | None
    out_features: int
    in_features: int
    block_size: int
    codebook: str = "nf4"

    def __post_init__(self) -> None:
        _check_format(self.codebook, self.block_size)
        check_buffers(self, (self.numel + 1) // 2)

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


# ---- checks shared by all implementations, and with codebook_bits.py


def _check_format(codebook: str, block_size: int) -> None:
    if codebook not in CODEBOOKS:
        raise ValueError(f"codebook={codebook!r} is unknown; use one of {', '.join(CODEBOOKS)}")
    check_block_size(block_size)


def check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not a power of two in 32..4096; use one of {BLOCK_SIZES}")


def check_buffers(weight: "CodebookWeight | BitsWeight", num_bytes: int) -> None:
    """Codes and scales have the dtypes and sizes of the weight, whose codes take num_bytes."""
    num_blocks = -(-weight.numel // weight.block_size)
    _check_buffer("packed", weight.packed, torch.uint8, num_bytes, weight)
    if weight.nested_absmax is None:
        _check_buffer("absmax", weight.absmax, torch.float32, num_blocks, weight)
    else:
        num_nested = -(-num_blocks // NESTED_BLOCK_SIZE)
        _check_buffer("absmax (with nested_absmax)", weight.absmax, torch.uint8, num_blocks, weight)
        _check_buffer("nested_absmax", weight.nested_absmax, torch.float32, num_nested, weight)
        _check_buffer("nested_offset", weight.nested_offset, torch.float32, 1, weight)


def _check_buffer(
    name: str, buffer: Tensor | None, dtype: torch.dtype, numel: int, weight: "CodebookWeight | BitsWeight"
) -> None:
    if buffer is None or buffer.dtype != dtype or buffer.numel() != numel or not buffer.is_contiguous():
        got = "None" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"
        raise ValueError(
            f"{name} is {got}; a [{weight.out_features}, {weight.in_features}] weight in blocks of {weight.block_size} "
            f"needs contiguous {dtype} of {numel}; check out_features, in_features and block_size"
        )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"{name} is {dtype}; use one of {', '.join(map(str, DTYPES))}")


def check_out(out: Tensor, weight: "CodebookWeight | BitsWeight") -> None:
    """out can hold the dense weight."""
    check_dtype("out", out.dtype)
    shape = (weight.out_features, weight.in_features)
    if out.shape != shape or not out.is_contiguous() or out.device != weight.device:
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()} on {out.device}; the weight needs contiguous "
            f"{shape} on {weight.device}; give rows of one matrix, not columns"
        )
    if out.dtype == torch.float16:
        check_float16_range(weight)


def check_float16_range(weight: "CodebookWeight | BitsWeight") -> None:
    largest = weight.plain_absmax().max().item() if weight.numel else 0.0
    if largest > torch.finfo(torch.float16).max:
        raise ValueError(f"absmax={largest:g} exceeds float16's 65504, use bfloat16 or float32")


def _raise_not_finite(weight: Tensor) -> None:
    flat = weight.reshape(-1)
    index = int((~torch.isfinite(flat)).nonzero()[0])
    position = f"[{', '.join(str(int(i)) for i in torch.unravel_index(torch.tensor(index), weight.shape))}]"
    raise ValueError(
        f"weight{position} (flat index {index}) is {flat[index].item()}; quantization needs finite weights; look "
        "for a damaged checkpoint or a diverged training run"
    )


# ---- reference


def normalized_blocks(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """w / absmax [num_blocks, block_size] float32, zeros after the last weight, and absmax [num_blocks]."""
    flat = weight.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    if not torch.isfinite(absmax).all():
        _raise_not_finite(weight)
    return blocks * (1 / absmax.clamp(min=_TINY))[:, None], absmax


def codebook_quantize_reference(weight: Tensor, *, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    _, thresholds, order = _tables(codebook, weight.device)
    normalized, absmax = normalized_blocks(weight, block_size)
    codes = order[torch.bucketize(normalized.view(-1), thresholds)]
    codes = codes[: weight.numel() + weight.numel() % 2]
    return codes[::2] << 4 | codes[1::2], absmax


def codebook_dequantize_reference(weight: CodebookWeight, *, dtype: torch.dtype) -> Tensor:
    codes = torch.stack([weight.packed >> 4, weight.packed & 15], dim=1).view(-1)[: weight.numel]
    scales = weight.plain_absmax().repeat_interleave(weight.block_size)[: weight.numel]
    values = _tables(weight.codebook, weight.device)[0][codes.int()] * scales
    return values.to(dtype).view(weight.out_features, weight.in_features)


# ---- C++, on torch's threads: these run between torch's products


def quantize_to_nibbles(weight: Tensor, thresholds: Tensor, order: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Packed codes and absmax, as `codebook_quantize` gives them, for any codebook of up to 16 values.

    thresholds [15] float32, ascending, infinite past the last; order [16] uint8: the code of each interval
    """
    dense = (weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous()
    packed = torch.empty((dense.numel() + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-dense.numel() // block_size))
    not_finite = torch.zeros((), dtype=torch.int64)
    _tape.call_beside_torch(
        _tape.kernel("codebook4", "codebook4_quantize"), DTYPE_IDS[dense.dtype], dense, dense.numel(), block_size,
        thresholds, order, packed, absmax, not_finite,
    )  # fmt: skip
    if not_finite.item():
        _raise_not_finite(weight)
    return packed, absmax


def codebook_quantize_cpu(weight: Tensor, *, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    tables = CODEBOOKS[codebook]
    return quantize_to_nibbles(weight, tables.thresholds, tables.order, block_size)


def weight_arguments(weight: CodebookWeight) -> tuple[Tensor | None, ...]:
    """packed, absmax, nested_absmax, nested_offset, map, codebook, as the C++ kernels take them."""
    nested = weight.nested_absmax, weight.nested_offset
    return weight.packed, weight.absmax, *nested, DYNAMIC_MAP, CODEBOOKS[weight.codebook].values


def codebook_dequantize_cpu(weight: CodebookWeight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype) if out is None else out
    _tape.call_beside_torch(
        _tape.kernel("codebook4", "codebook4_dequantize"), *weight_arguments(weight), weight.numel, weight.block_size,
        out, DTYPE_IDS[dtype],
    )  # fmt: skip
    return out


# ---- Triton


@triton.jit
def _quantize_kernel(
    weight_ptr, thresholds_ptr, order_ptr, packed_ptr, absmax_ptr, numel,
    BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """NUM_BLOCKS blocks a program; even and odd elements are loaded apart, so that bytes need no shuffle."""
    first = tl.program_id(0).to(tl.int64) * NUM_BLOCKS
    block = first + tl.arange(0, NUM_BLOCKS)
    even = block[:, None] * BLOCK_SIZE + 2 * tl.arange(0, BLOCK_SIZE // 2)[None, :]
    high = tl.load(weight_ptr + even, mask=even < numel, other=0.0).to(tl.float32)
    low = tl.load(weight_ptr + even + 1, mask=even + 1 < numel, other=0.0).to(tl.float32)
    # As integers the bits of |w| sort like the numbers, with inf and nan on top: tl.max alone would drop nan.
    high_bits = high.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    low_bits = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    absmax = tl.max(tl.maximum(high_bits, low_bits), axis=1).to(tl.float32, bitcast=True)
    tl.store(absmax_ptr + block, absmax, mask=block * BLOCK_SIZE < numel)
    inverse = tl.div_rn(1.0, tl.maximum(absmax, 1e-38))[:, None]
    high_interval = tl.zeros_like(high_bits)
    low_interval = tl.zeros_like(low_bits)
    for i in tl.static_range(15):
        threshold = tl.load(thresholds_ptr + i)
        high_interval += (high * inverse > threshold).to(tl.int32)
        low_interval += (low * inverse > threshold).to(tl.int32)
    high_code = tl.load(order_ptr + high_interval).to(tl.int32)
    low_code = tl.load(order_ptr + low_interval).to(tl.int32)
    tl.store(packed_ptr + even // 2, (high_code * 16 + low_code).to(tl.uint8), mask=even < numel)


@triton.jit
def _dequantize_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, codebook_ptr, out_ptr, numel,
    BLOCK_SIZE: tl.constexpr, DOUBLE_QUANT: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """NUM_BLOCKS blocks a program, a row each, so that a block's scale is loaded once and not for each byte."""
    block = tl.program_id(0).to(tl.int64) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    scale_mask = block * BLOCK_SIZE < numel
    absmax = load_absmax(absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, block, scale_mask, DOUBLE_QUANT)
    byte = block[:, None] * (BLOCK_SIZE // 2) + tl.arange(0, BLOCK_SIZE // 2)[None, :]
    packed = tl.load(packed_ptr + byte, mask=2 * byte < numel, other=0).to(tl.int32)
    high = tl.load(codebook_ptr + (packed >> 4)) * absmax[:, None]
    low = tl.load(codebook_ptr + (packed & 15)) * absmax[:, None]
    element = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    tl.store(out_ptr + element, tl.interleave(high, low).to(out_ptr.dtype.element_ty), mask=element < numel)


def codebook_quantize_triton(weight: Tensor, *, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    flat = weight.contiguous()
    numel = flat.numel()
    packed = torch.empty((numel + 1) // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(-(-numel // block_size), device=weight.device)
    num_blocks = max(1, QUANTIZE_ELEMENTS // block_size)
    if numel:
        _, thresholds, order = _tables(codebook, weight.device)
        _quantize_kernel[(triton.cdiv(absmax.numel(), num_blocks),)](
            flat, thresholds, order, packed, absmax, numel, BLOCK_SIZE=block_size, NUM_BLOCKS=num_blocks
        )
    if not torch.isfinite(absmax).all():
        _raise_not_finite(weight)
    return packed, absmax


def weight_tensors(weight: CodebookWeight) -> tuple[Tensor, ...]:
    """packed, absmax, nested_absmax, nested_offset, map, codebook, as the Triton kernels take them."""
    # A kernel without double quantization does not read the nested pointers, but it needs some.
    nested = (weight.nested_absmax, weight.nested_offset) if weight.double_quant else (weight.absmax, weight.absmax)
    tables = dynamic_map(weight.device), _tables(weight.codebook, weight.device)[0]
    return weight.packed, weight.absmax, *nested, *tables


def codebook_dequantize_triton(weight: CodebookWeight, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    out = weight.packed.new_empty(weight.out_features, weight.in_features, dtype=dtype) if out is None else out
    if weight.numel:
        default = {"NUM_BYTES": DEQUANTIZE_BYTES}
        tile = dict(tiles("codebook_dequantize", out.device, default, itemsize=out.element_size()))
        num_blocks = max(1, 2 * tile.pop("NUM_BYTES") // weight.block_size)
        _dequantize_kernel[(triton.cdiv(weight.absmax.numel(), num_blocks),)](
            *weight_tensors(weight), out, weight.numel,
            BLOCK_SIZE=weight.block_size, DOUBLE_QUANT=weight.double_quant, NUM_BLOCKS=num_blocks, **tile,
            enable_fp_fusion=False,  # absmax is rounded twice, as on the CPU
        )  # fmt: skip
    return out


# ---- registered ops

_IMPLEMENTATIONS = {
    "reference": (codebook_quantize_reference, codebook_dequantize_reference),
    "cpu": (codebook_quantize_cpu, codebook_dequantize_cpu),
    "triton": (codebook_quantize_triton, codebook_dequantize_triton),
}
DEVICES = ("cpu", "cuda")  # devices with fast paths; all others run an op's body, the reference


@torch.library.custom_op("lowbit::codebook_quantize", mutates_args=())
def _quantize(weight: Tensor, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    _check_format(codebook, block_size)
    return codebook_quantize_reference(weight, codebook=codebook, block_size=block_size)


@_quantize.register_kernel(DEVICES)
def _(weight: Tensor, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    _check_format(codebook, block_size)
    quantize = _IMPLEMENTATIONS[_cpp.choose("codebook4", weight.device.type)][0]
    return quantize(weight, codebook=codebook, block_size=block_size)


@_quantize.register_fake
def _(weight: Tensor, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    numel = weight.numel()
    packed = weight.new_empty((numel + 1) // 2, dtype=torch.uint8)
    return packed, weight.new_empty((numel + block_size - 1) // block_size, dtype=torch.float32)


@torch.library.custom_op("lowbit::codebook_dequantize", mutates_args=())
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
    return _run_dequantize("reference", CodebookWeight(packed, absmax, nested_absmax, nested_offset, *sizes), dtype)


@_dequantize.register_kernel(DEVICES)
def _(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size, codebook, dtype) -> Tensor:
    sizes = out_features, in_features, block_size, codebook
    weight = CodebookWeight(packed, absmax, nested_absmax, nested_offset, *sizes)
    return _run_dequantize(_cpp.choose("codebook4", packed.device.type), weight, dtype)


@_dequantize.register_fake
def _(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size, codebook, dtype) -> Tensor:
    return packed.new_empty(out_features, in_features, dtype=dtype)


def _run_dequantize(implementation: str, weight: CodebookWeight, dtype: torch.dtype) -> Tensor:
    check_dtype("dtype", dtype)
    if dtype == torch.float16:
        check_float16_range(weight)
    return _IMPLEMENTATIONS[implementation][1](weight, dtype=dtype)


# ---- what the rest of the product calls


def codebook_quantize(weight: Tensor, *, codebook: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize to the 4-bit codes of a codebook, one scale per block (QLoRA, arXiv:2305.14314, section 3).

    weight   [out_features, in_features] float, any strides; computed in float32
    codebook "nf4" or "fp4"
    returns  packed [ceil(numel / 2)] uint8, high nibble first; absmax [ceil(numel / block_size)] float32
    raises   ValueError if the codebook is unknown, if block_size is not a power of two in 32..4096, or if a weight is
             inf or nan (names it)
    """
    return _quantize(weight.detach(), codebook, block_size)


def codebook_dequantize(weight: CodebookWeight, *, dtype: torch.dtype) -> Tensor:
    """The dense weight behind the codes: codebook * absmax in float32, rounded once to dtype.

    dtype    float32, bfloat16 or float16
    returns  [out_features, in_features] of dtype
    raises   ValueError if absmax > 65504 with float16; TypeError for another dtype
    """
    tensors = weight.packed, weight.absmax, weight.nested_absmax, weight.nested_offset
    sizes = weight.out_features, weight.in_features, weight.block_size
    return _dequantize(*tensors, *sizes, weight.codebook, dtype)


def codebook_dequantize_into(weight: CodebookWeight, out: Tensor) -> None:
    """`codebook_dequantize` into memory of the caller, for instance rows of a larger matrix; autograd does not see it.

    out     [out_features, in_features] float32, bfloat16 or float16, contiguous, on the weight's device; overwritten
    raises  as `codebook_dequantize`, and ValueError if out does not fit
    """
    check_out(out, weight)
    match _cpp.choose("codebook4", weight.device.type):
        case "cpu":
            codebook_dequantize_cpu(weight, dtype=out.dtype, out=out)
        case "triton":
            codebook_dequantize_triton(weight, dtype=out.dtype, out=out)
        case _:
            out.copy_(codebook_dequantize_reference(weight, dtype=out.dtype))
