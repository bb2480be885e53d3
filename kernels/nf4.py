"""4-bit NormalFloat: quantize, dequantize, and the linear layer over packed weights (QLoRA, arXiv:2305.14314).

Formula. The weight, flattened row by row, is cut into blocks of `block_size`, which may cross rows:
    absmax[b] = max |w_i| over block b
    code_i    = the entry of NF4_CODEBOOK nearest to w_i / absmax[b], the lower one of a tie
    w'_i      = NF4_CODEBOOK[code_i] * absmax[b], computed in float32, rounded once to the dtype asked for
The division is a multiplication by the float32 reciprocal, and a block of zeros has absmax 0 and code 7, which is 0.0.

Bytes, those of bitsandbytes, so that checkpoints move both ways:
    packed   [ceil(numel / 2)] uint8    byte i = code[2i] << 4 | code[2i + 1]      (padding code: 7)
    absmax   [ceil(numel / block_size)] float32

Double quantization (section 3) stores absmax in 8 bits: minus its mean, in blocks of 256, on the signed dynamic map of
arXiv:2110.02861:
    absmax[b] = DYNAMIC_MAP[codes[b]] * nested_absmax[b // 256] + nested_offset      (two roundings, no fused multiply)

Why tables: the 16 possible weights of a block are computed once and looked up by nibble, so a 16-bit weight costs one
look-up. The linear layer decodes beside the dot product while few rows share the weight; from MAX_FUSED_ROWS rows on,
the weight is decoded once into a dense matrix that torch multiplies.
"""

import ctypes
import functools
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._triton import tl, triton

# arXiv:2305.14314, appendix E
NF4_CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# 576x1536, bfloat16, 2 Zen 4 cores: 8 rows take 114 us fused and 203 us through a dense weight.
MAX_FUSED_ROWS = 8
# BLOCK_M/N/K by size of a float: float32 dots keep their operands in registers, so less fits. Chosen for no spills on
# sm_80, sm_90, sm_100 and gfx942; not timed there yet.
LINEAR_TILES = {2: (16, 32, 128), 4: (16, 32, 32)}
_TINY = 1e-38  # keeps 1 / absmax finite
_LUT_STEPS = 65535


def _dynamic_map() -> Tensor:
    """The signed 8-bit dynamic map (arXiv:2110.02861, section 1.3): 7 decades, each cut twice as finely, and 0, 1."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        means = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values))


_CODEBOOK = torch.tensor(NF4_CODEBOOK)
_THRESHOLDS = (_CODEBOOK[:-1] + _CODEBOOK[1:]) / 2
DYNAMIC_MAP = _dynamic_map()


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return _CODEBOOK.to(device), _THRESHOLDS.to(device), DYNAMIC_MAP.to(device)


@dataclass(slots=True)
class NF4Weight:
    """A packed weight as one argument; sizes are checked here, before a pointer leaves Python.

    packed         [ceil(numel / 2)] uint8
    absmax         [num_blocks] float32, or uint8 codes with double quantization
    nested_absmax  [ceil(num_blocks / 256)] float32, or None
    nested_offset  [] float32, or None
    raises         ValueError if block_size or a size is wrong
    """

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_offset: Tensor | None
    out_features: int
    in_features: int
    block_size: int

    def __post_init__(self) -> None:
        _check_block_size(self.block_size)
        num_blocks = -(-self.numel // self.block_size)
        _check_buffer("packed", self.packed, torch.uint8, (self.numel + 1) // 2, self)
        if self.nested_absmax is None:
            _check_buffer("absmax", self.absmax, torch.float32, num_blocks, self)
        else:
            num_nested = -(-num_blocks // NESTED_BLOCK_SIZE)
            _check_buffer("absmax (with nested_absmax)", self.absmax, torch.uint8, num_blocks, self)
            _check_buffer("nested_absmax", self.nested_absmax, torch.float32, num_nested, self)
            _check_buffer("nested_offset", self.nested_offset, torch.float32, 1, self)

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


# ---- checks shared by all implementations


def _check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not a power of two in 32..4096; use one of {BLOCK_SIZES}")


def _check_buffer(name: str, buffer: Tensor | None, dtype: torch.dtype, numel: int, weight: NF4Weight) -> None:
    if buffer is None or buffer.dtype != dtype or buffer.numel() != numel or not buffer.is_contiguous():
        got = "None" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"
        raise ValueError(
            f"{name} is {got}; a [{weight.out_features}, {weight.in_features}] weight in blocks of {weight.block_size} "
            f"needs contiguous {dtype} of {numel}; check out_features, in_features and block_size"
        )


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"{name} is {dtype}; use one of {', '.join(map(str, DTYPES))}")


def _check_float16_range(weight: NF4Weight) -> None:
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


# ---- double quantization of absmax, on any device


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize scales to 8 bits, one float32 per 256 and one offset (QLoRA, arXiv:2305.14314, section 3).

    absmax   [num_blocks] float32
    returns  codes [num_blocks] uint8; nested_absmax [ceil(num_blocks / 256)] float32; nested_offset [] float32

    The nearest entry is found on a grid of 65,536 steps, as bitsandbytes does on CPUs, and codes equal its codes; about
    0.2 % differ by one from the exact nearest entry, in places where both are equally good to 3e-5 of nested_absmax.
    """
    if absmax.numel() == 0:
        return absmax.to(torch.uint8), absmax.clone(), absmax.new_zeros(())
    offset = absmax.mean()
    blocks = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % NESTED_BLOCK_SIZE))
    blocks = blocks.view(-1, NESTED_BLOCK_SIZE)
    nested_absmax = blocks.abs().amax(1)
    normalized = (blocks * (1 / nested_absmax.clamp(min=_TINY))[:, None]).clamp(-1, 1)
    step = ((normalized + 1) * 0.5 * _LUT_STEPS + 0.5).to(torch.int64)
    codes = _nearest_code_of_step(absmax.device)[step]
    codes[nested_absmax == 0] = 0
    return codes.view(-1)[: absmax.numel()].contiguous(), nested_absmax, offset


@functools.cache
def _nearest_code_of_step(device: torch.device) -> Tensor:
    grid = 2.0 * torch.arange(_LUT_STEPS + 1, dtype=torch.float32) / _LUT_STEPS - 1.0
    return torch.bucketize(grid, 0.5 * (DYNAMIC_MAP[:-1] + DYNAMIC_MAP[1:])).to(torch.uint8).to(device)


def dequantize_absmax(codes: Tensor, nested_absmax: Tensor, nested_offset: Tensor) -> Tensor:
    """The scales behind `quantize_absmax`'s codes.

    codes    [num_blocks] uint8; nested_absmax [ceil(num_blocks / 256)] float32; nested_offset [] float32
    returns  [num_blocks] float32
    """
    scales = nested_absmax.repeat_interleave(NESTED_BLOCK_SIZE)[: codes.numel()]
    return _tables(codes.device)[2][codes.int()] * scales + nested_offset


# ---- reference


def nf4_quantize_reference(weight: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    flat = weight.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    if not torch.isfinite(absmax).all():
        _raise_not_finite(weight)
    normalized = blocks * (1 / absmax.clamp(min=_TINY))[:, None]
    codes = torch.bucketize(normalized.view(-1), _tables(weight.device)[1]).to(torch.uint8)
    codes = codes[: flat.numel() + flat.numel() % 2]
    return codes[::2] << 4 | codes[1::2], absmax


def nf4_dequantize_reference(weight: NF4Weight, *, dtype: torch.dtype) -> Tensor:
    codes = torch.stack([weight.packed >> 4, weight.packed & 15], dim=1).view(-1)[: weight.numel]
    scales = weight.plain_absmax().repeat_interleave(weight.block_size)[: weight.numel]
    values = _tables(weight.device)[0][codes.int()] * scales
    return values.to(dtype).view(weight.out_features, weight.in_features)


def nf4_linear_reference(x: Tensor, weight: NF4Weight) -> Tensor:
    return x @ nf4_dequantize_reference(weight, dtype=x.dtype).T


# ---- C++


_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.nf4_quantize.argtypes = [_POINTER, _LONG, _LONG, *[_POINTER] * 3, _INT]
    library.nf4_dequantize.argtypes = [*[_POINTER] * 7, _LONG, _LONG, _POINTER, _INT, _INT]
    library.nf4_linear.argtypes = [*[_POINTER] * 8, *[_LONG] * 4, _POINTER, _INT, _INT]
    library.nf4_dequantize.restype = library.nf4_linear.restype = None
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    library = _cpp.load("nf4")
    assert library is not None, "choose() sends calls to the reference when there is no library"
    return _declare(library)


_CODEBOOK_POINTER, _MAP_POINTER = _CODEBOOK.data_ptr(), DYNAMIC_MAP.data_ptr()


def _weight_pointers(weight: NF4Weight) -> tuple[int | None, ...]:
    """packed, absmax, codes, nested_absmax, nested_offset, map, codebook, as the C functions take them."""
    packed, absmax = weight.packed.data_ptr(), weight.absmax.data_ptr()
    if not weight.double_quant:
        return packed, absmax, None, None, None, _MAP_POINTER, _CODEBOOK_POINTER
    nested = weight.nested_absmax.data_ptr(), weight.nested_offset.data_ptr()
    return packed, None, absmax, *nested, _MAP_POINTER, _CODEBOOK_POINTER


def nf4_quantize_cpu(weight: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    flat = weight.float().contiguous()
    packed = torch.empty((flat.numel() + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-flat.numel() // block_size))
    pointers = flat.data_ptr(), flat.numel(), block_size, _THRESHOLDS.data_ptr(), packed.data_ptr(), absmax.data_ptr()
    if _library().nf4_quantize(*pointers, torch.get_num_threads()):
        _raise_not_finite(weight)
    return packed, absmax


def nf4_dequantize_cpu(weight: NF4Weight, *, dtype: torch.dtype) -> Tensor:
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype)
    sizes = weight.numel, weight.block_size
    threads = torch.get_num_threads()
    _library().nf4_dequantize(*_weight_pointers(weight), *sizes, out.data_ptr(), _DTYPE_IDS[dtype], threads)
    return out


def nf4_linear_cpu(x: Tensor, weight: NF4Weight) -> Tensor:
    num_rows = x.numel() // max(1, x.shape[-1])
    if num_rows > MAX_FUSED_ROWS or num_rows == 0 or x.dtype == torch.float16:
        return x @ nf4_dequantize_cpu(weight, dtype=x.dtype).T
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], weight.out_features)
    sizes = num_rows, weight.out_features, weight.in_features, weight.block_size
    out = y.data_ptr(), _DTYPE_IDS[x.dtype], torch.get_num_threads()
    _library().nf4_linear(x.data_ptr(), *_weight_pointers(weight), *sizes, *out)
    return y


# ---- Triton


@triton.jit
def _load_absmax(absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, block, mask, DOUBLE_QUANT: tl.constexpr):
    if DOUBLE_QUANT:
        code = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        nested = tl.load(nested_absmax_ptr + block // 256, mask=mask, other=0.0)
        absmax = tl.load(map_ptr + code) * nested + tl.load(nested_offset_ptr)
    else:
        absmax = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    return absmax


@triton.jit
def _nf4_quantize_kernel(
    weight_ptr, thresholds_ptr, packed_ptr, absmax_ptr, numel, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr
):
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
    high_code = tl.zeros_like(high_bits)
    low_code = tl.zeros_like(low_bits)
    for i in tl.static_range(15):
        threshold = tl.load(thresholds_ptr + i)
        high_code += (high * inverse > threshold).to(tl.int32)
        low_code += (low * inverse > threshold).to(tl.int32)
    tl.store(packed_ptr + even // 2, (high_code * 16 + low_code).to(tl.uint8), mask=even < numel)


@triton.jit
def _nf4_dequantize_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, codebook_ptr, out_ptr, numel,
    BLOCK_SIZE: tl.constexpr, DOUBLE_QUANT: tl.constexpr, NUM_BYTES: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * NUM_BYTES + tl.arange(0, NUM_BYTES)
    mask = 2 * byte < numel
    packed = tl.load(packed_ptr + byte, mask=mask, other=0).to(tl.int32)
    block = 2 * byte // BLOCK_SIZE
    absmax = _load_absmax(absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, block, mask, DOUBLE_QUANT)
    high = tl.load(codebook_ptr + (packed >> 4)) * absmax
    low = tl.load(codebook_ptr + (packed & 15)) * absmax
    element = tl.program_id(0).to(tl.int64) * NUM_BYTES * 2 + tl.arange(0, NUM_BYTES * 2)
    tl.store(out_ptr + element, tl.interleave(high, low).to(out_ptr.dtype.element_ty), mask=element < numel)


@triton.jit
def _nf4_linear_kernel(
    x_ptr, packed_ptr, absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, codebook_ptr, y_ptr,
    num_rows, in_features, out_features, stride_x_row, stride_y_row,
    BLOCK_SIZE: tl.constexpr, DOUBLE_QUANT: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """in_features must be even. Even and odd k are summed in two dots: high nibbles meet x[0::2], low ones x[1::2]."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    feature = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        k = start + 2 * tl.arange(0, BLOCK_K // 2)
        x_mask = (row[:, None] < num_rows) & (k[None, :] < in_features)
        x_ptrs = x_ptr + row[:, None] * stride_x_row + k[None, :]
        x_even = tl.load(x_ptrs, mask=x_mask, other=0.0).to(tl.float32).to(DOT)
        x_odd = tl.load(x_ptrs + 1, mask=x_mask, other=0.0).to(tl.float32).to(DOT)
        mask = (k[:, None] < in_features) & (feature[None, :] < out_features)
        element = feature[None, :] * in_features + k[:, None]  # [BLOCK_K / 2, BLOCK_N]
        packed = tl.load(packed_ptr + element // 2, mask=mask, other=0).to(tl.int32)
        block = element // BLOCK_SIZE
        absmax = _load_absmax(absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, block, mask, DOUBLE_QUANT)
        high = (tl.load(codebook_ptr + (packed >> 4)) * absmax).to(x_ptr.dtype.element_ty).to(DOT)
        low = (tl.load(codebook_ptr + (packed & 15)) * absmax).to(x_ptr.dtype.element_ty).to(DOT)
        acc = tl.dot(x_even, high, acc, input_precision="ieee")
        acc = tl.dot(x_odd, low, acc, input_precision="ieee")
    y_mask = (row[:, None] < num_rows) & (feature[None, :] < out_features)
    y_ptrs = y_ptr + row[:, None] * stride_y_row + feature[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=y_mask)


def nf4_quantize_triton(weight: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    flat = weight.contiguous()
    numel = flat.numel()
    packed = torch.empty((numel + 1) // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(-(-numel // block_size), device=weight.device)
    num_blocks = max(1, 1024 // block_size)  # 1024 elements a program and more
    if numel:
        grid = (triton.cdiv(absmax.numel(), num_blocks),)
        _nf4_quantize_kernel[grid](
            flat, _tables(weight.device)[1], packed, absmax, numel, BLOCK_SIZE=block_size, NUM_BLOCKS=num_blocks
        )
    if not torch.isfinite(absmax).all():
        _raise_not_finite(weight)
    return packed, absmax


def _weight_tensors(weight: NF4Weight) -> tuple[Tensor, ...]:
    """packed, absmax, nested_absmax, nested_offset, map, codebook, as the kernels take them."""
    codebook, _, dynamic_map = _tables(weight.device)
    # A kernel without double quantization does not read the nested pointers, but it needs some.
    nested = (weight.nested_absmax, weight.nested_offset) if weight.double_quant else (weight.absmax, weight.absmax)
    return weight.packed, weight.absmax, *nested, dynamic_map, codebook


def nf4_dequantize_triton(weight: NF4Weight, *, dtype: torch.dtype) -> Tensor:
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.device)
    num_bytes = 1024
    if weight.numel:
        _nf4_dequantize_kernel[(triton.cdiv(weight.packed.numel(), num_bytes),)](
            *_weight_tensors(weight), out, weight.numel,
            BLOCK_SIZE=weight.block_size, DOUBLE_QUANT=weight.double_quant, NUM_BYTES=num_bytes,
            enable_fp_fusion=False,  # absmax is rounded twice, as on the CPU
        )  # fmt: skip
    return out


def nf4_linear_triton(x: Tensor, weight: NF4Weight) -> Tensor:
    rows = x.reshape(-1, weight.in_features).contiguous()
    if rows.shape[0] > MAX_FUSED_ROWS or rows.shape[0] == 0 or weight.in_features % 2:
        return x @ nf4_dequantize_triton(weight, dtype=x.dtype).T
    y = rows.new_empty(rows.shape[0], weight.out_features)
    block_m, block_n, block_k = LINEAR_TILES[x.element_size()]
    _nf4_linear_kernel[(triton.cdiv(rows.shape[0], block_m), triton.cdiv(weight.out_features, block_n))](
        rows, *_weight_tensors(weight), y, *rows.shape, weight.out_features, rows.stride(0), y.stride(0),
        BLOCK_SIZE=weight.block_size, DOUBLE_QUANT=weight.double_quant, DOT=_dot_dtype(x.dtype),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, enable_fp_fusion=False,
    )  # fmt: skip
    return y.view(*x.shape[:-1], weight.out_features)


def _dot_dtype(dtype: torch.dtype) -> "tl.dtype":
    """The operand type of tl.dot; Triton's interpreter multiplies bfloat16 bit patterns, so there it is float32."""
    if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") != "1":
        return tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


# ---- registered ops

_IMPLEMENTATIONS = {
    "reference": (nf4_quantize_reference, nf4_dequantize_reference, nf4_linear_reference),
    "cpu": (nf4_quantize_cpu, nf4_dequantize_cpu, nf4_linear_cpu),
    "triton": (nf4_quantize_triton, nf4_dequantize_triton, nf4_linear_triton),
}
_DEVICES = ("cpu", "cuda")  # devices with fast paths; all others run an op's body, the reference


@torch.library.custom_op("lowbit::nf4_quantize", mutates_args=())
def _nf4_quantize(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    _check_block_size(block_size)
    return nf4_quantize_reference(weight, block_size=block_size)


@_nf4_quantize.register_kernel(_DEVICES)
def _(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    _check_block_size(block_size)
    quantize = _IMPLEMENTATIONS[_cpp.choose("nf4", weight.device.type)][0]
    return quantize(weight, block_size=block_size)


@_nf4_quantize.register_fake
def _(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    numel = weight.numel()
    packed = weight.new_empty((numel + 1) // 2, dtype=torch.uint8)
    return packed, weight.new_empty((numel + block_size - 1) // block_size, dtype=torch.float32)


@torch.library.custom_op("lowbit::nf4_dequantize", mutates_args=())
def _nf4_dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    out_features: int,
    in_features: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    weight = NF4Weight(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size)
    return _dequantize("reference", weight, dtype)


@_nf4_dequantize.register_kernel(_DEVICES)
def _(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size, dtype) -> Tensor:
    weight = NF4Weight(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size)
    return _dequantize(_cpp.choose("nf4", packed.device.type), weight, dtype)


@_nf4_dequantize.register_fake
def _(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size, dtype) -> Tensor:
    return packed.new_empty(out_features, in_features, dtype=dtype)


def _dequantize(implementation: str, weight: NF4Weight, dtype: torch.dtype) -> Tensor:
    _check_dtype("dtype", dtype)
    if dtype == torch.float16:
        _check_float16_range(weight)
    return _IMPLEMENTATIONS[implementation][1](weight, dtype=dtype)


@torch.library.custom_op("lowbit::nf4_linear", mutates_args=())
def _nf4_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    out_features: int,
    block_size: int,
) -> Tensor:
    weight = NF4Weight(packed, absmax, nested_absmax, nested_offset, out_features, x.shape[-1], block_size)
    return _linear("reference", x, weight)


@_nf4_linear.register_kernel(_DEVICES)
def _(x, packed, absmax, nested_absmax, nested_offset, out_features, block_size) -> Tensor:
    weight = NF4Weight(packed, absmax, nested_absmax, nested_offset, out_features, x.shape[-1], block_size)
    return _linear(_cpp.choose("nf4", x.device.type), x, weight)


@_nf4_linear.register_fake
def _(x, packed, absmax, nested_absmax, nested_offset, out_features, block_size) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _linear(implementation: str, x: Tensor, weight: NF4Weight) -> Tensor:
    _check_dtype("x", x.dtype)
    if x.dtype == torch.float16 and x.device.type == "cpu":  # on a GPU the check would wait for the device each call
        _check_float16_range(weight)
    return _IMPLEMENTATIONS[implementation][2](x, weight)


def _setup_context(ctx, inputs, output) -> None:
    x, *weight, ctx.out_features, ctx.block_size = inputs
    ctx.in_features, ctx.dtype = x.shape[-1], x.dtype
    ctx.save_for_backward(*weight)


def _backward(ctx, grad: Tensor):
    sizes = ctx.out_features, ctx.in_features, ctx.block_size
    grad_x = grad @ torch.ops.lowbit.nf4_dequantize(*ctx.saved_tensors, *sizes, ctx.dtype)
    return grad_x, None, None, None, None, None, None


_nf4_linear.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def nf4_quantize(weight: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize to 4-bit NormalFloat, one scale per block (QLoRA, arXiv:2305.14314, section 3).

    weight   [out_features, in_features] float, any strides; computed in float32
    returns  packed [ceil(numel / 2)] uint8, high nibble first; absmax [ceil(numel / block_size)] float32
    raises   ValueError if block_size is not a power of two in 32..4096, or if a weight is inf or nan (names it)
    """
    return _nf4_quantize(weight.detach(), block_size)


def nf4_dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None = None,
    nested_offset: Tensor | None = None,
    *,
    out_features: int,
    in_features: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The dense weight behind the codes: codebook * absmax in float32, rounded once to dtype.

    packed, absmax   as `nf4_quantize` returns them; absmax is uint8 with double quantization
    nested_absmax, nested_offset   as `quantize_absmax` returns them, or None
    dtype    float32, bfloat16 or float16
    returns  [out_features, in_features] of dtype
    raises   ValueError if a size does not fit, or if absmax > 65504 with float16; TypeError for another dtype
    """
    return _nf4_dequantize(packed, absmax, nested_absmax, nested_offset, out_features, in_features, block_size, dtype)


def nf4_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None = None,
    nested_offset: Tensor | None = None,
    *,
    out_features: int,
    block_size: int,
) -> Tensor:
    """y = x W^T over a packed weight; the gradient flows to x only, and no dense weight is kept for it.

    x        [..., in_features] float32, bfloat16 or float16; W is rounded to its dtype, sums are float32
    packed, absmax, nested_absmax, nested_offset   the weight, as for `nf4_dequantize`
    returns  [..., out_features] of x's dtype
    raises   ValueError if a size does not fit, or if absmax > 65504 with a float16 x on a CPU;
             TypeError for another dtype
    """
    return _nf4_linear(x, packed, absmax, nested_absmax, nested_offset, out_features, block_size)
