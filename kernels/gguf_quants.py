"""GGUF's blocks of codes: quantize and dequantize, byte for byte as llama.cpp does. For export: no gradient, no GPU.

Values of a block (d, m: float16; s, t: small integers of a group in a block of 256; all products in float32):
    Q4_0 Q5_0 Q8_0   d (q - 8)   d (q - 16)   d q                  32 weights a block
    Q4_1 Q5_1        d q + m
    Q4_K Q5_K        (d s) q - (m t)      s, t in 0..63             256 in 8 groups of 32
    Q6_K             (d s) (q - 32)       s in -128..127            256 in 16 groups of 16
Bytes of a block, in order ("nibbles h": byte j of each run of 2h codes holds the low 4 bits of codes j and j + h):
    Q8_0 d, 32 codes             Q4_0 d, nibbles 16              Q4_1 d, m, nibbles 16
    Q5_0 d, high, nibbles 16     Q5_1 d, m, high, nibbles 16     high: bit i of 32 is bit 4 of code i
    Q4_K d, m, 12 bytes of s and t, nibbles 32
    Q5_K d, m, 12 bytes of s and t, high, nibbles 32             high: bit g of byte j is bit 4 of code 32 g + j
    Q6_K nibbles 64, high, 16 s, d                               high: 2 bits, four codes 32 apart a byte
    12 bytes  s0..s3 | t0..t3 | low 4 bits of s4..s7 and t4..t7; bits 4 and 5 of the latter on top of the former two

How codes are chosen. Q8_0, and the types of 32 without importance: the extreme weights give the grid. Otherwise a grid
search: each trial rounds to a slightly different grid, fits scale (and offset) to the codes by weighted least squares,
and the trial with the smallest weighted error wins. A weight counts by importance * sqrt(mean square + w^2), in Q6_K by
importance; without importance in Q4_K and Q5_K by rms + |w|, in Q6_K by w^2. Scales of groups are then rounded to s and
t (with importance by a search of the same kind), and the codes once more, to the grid as stored.

"Byte for byte" fixes the order of every sum: along the group, one weight after the other. So both implementations put a
block in a lane and walk all lanes together: numpy over all blocks of a call, C++ over the lanes of a vector.

"As llama.cpp does" is ggml_quantize_chunk of ggml 0.25 (llama-cpp-python 0.3.36). A later one treats an offset near the
largest weight in another way, which needs blocks that span dozens of powers of two and importance that is mostly 0.
"""

import math
import os
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels.gguf_grids import (
    TINY,
    Array,
    extremes,
    fit_affine,
    fit_positive,
    fit_symmetric,
    largest,
    nearest,
    rounded,
    sum_places,
)
from trainer.kernels.int8 import check_weight, raise_not_finite


class GgufType(NamedTuple):
    """block_size: weights of a block; block_bytes: what they take; type_number: ggml's, as files hold it"""

    block_size: int
    block_bytes: int
    type_number: int


GGUF_TYPES = {
    "Q4_0": GgufType(32, 18, 2),
    "Q4_1": GgufType(32, 20, 3),
    "Q5_0": GgufType(32, 22, 6),
    "Q5_1": GgufType(32, 24, 7),
    "Q8_0": GgufType(32, 34, 8),
    "Q4_K": GgufType(256, 144, 12),
    "Q5_K": GgufType(256, 176, 13),
    "Q6_K": GgufType(256, 210, 14),
}
# llama.cpp's choice for rows that do not end on a block of 256
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Where float16 numbers lie in a block
_HALVES = {name: (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,) for name in GGUF_TYPES} | {"Q6_K": (208,)}
# Weights a call: they are copied to float32, and the reference has some ten arrays of that size.
_CALL_WEIGHTS = 1 << 24
_REFERENCE_WEIGHTS = 1 << 20
_F = np.float32


# ---- reference: arrays are [place in a group, lane], a lane is a block


def _half(v: Array) -> tuple[Array, Array]:
    """float16's two bytes [2, lanes], and its value as float32"""
    half = v.astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2).T, half.astype(_F)


def _pack(codes: Array, shifts: int, distance: int) -> Array:
    """Each byte joins codes that are `distance` apart, `shifts` bits a code: [places, lanes] -> [bytes, lanes]."""
    together = 8 // shifts
    parts = codes.reshape(-1, together, distance, codes.shape[1]) & (1 << shifts) - 1
    return (parts << shifts * np.arange(together)[:, None, None]).sum(1).reshape(-1, codes.shape[1])


def _high_bits(name: str, codes: Array) -> Array:
    """The bytes of what 4 bits of a code do not hold."""
    if name == "Q6_K":
        return _pack(codes >> 4, 2, 32)
    return _pack(codes >> 4, 1, 32 if name == "Q5_K" else 1)


def _inverse(d: Array) -> Array:
    return np.where(d != 0, _F(1) / d, _F(0))


def _truncated(v: Array) -> Array:
    """int32; a scale so small that its inverse is infinite gives codes 0"""
    return np.where(np.abs(v) < 256, v, _F(0)).astype(np.int32)


def _encode_8(x: Array) -> list[Array]:
    d = np.abs(x).max(0) / _F(127)
    scaled = x * _inverse(d)
    away = np.trunc(scaled) + np.trunc(2 * (scaled - np.trunc(scaled)))  # half away from zero
    return [_half(d)[0], _truncated(away) & 255]


def _encode_32(name: str, x: Array, weights: Array | None) -> list[Array]:
    high, levels = (1 << int(name[1])) - 1, 1 << int(name[1]) - 1
    if name == "Q8_0":
        return _encode_8(x)
    if name.endswith("_0"):
        if weights is None:
            d = largest(x)[1] / _F(-levels)
            codes = np.minimum(_truncated(x * _inverse(d) + _F(levels + 0.5)), high)
        else:
            d, codes = fit_symmetric(x, weights, levels)
        halves = [_half(d)[0]]
    else:
        if weights is None:
            low, top = extremes(x)
            d = (top - low) / _F(high)
            codes = np.minimum(_truncated((x - low) * _inverse(d) + _F(0.5)), high)
        else:
            d, low, codes = fit_affine(x, weights, high, (-0.9, 0.05, 36))
        halves = [_half(d)[0], _half(low)[0]]
    return [*halves, *([_high_bits(name, codes)] if high == 31 else []), _pack(codes, 4, 16)]


def _pack_scales(s: Array, t: Array) -> Array:
    """[8, lanes] each -> [12, lanes]; shifts act on bytes as in ggml, should a number have more than 6 bits"""
    upper = (s[4:] >> 4 << 6, t[4:] >> 4 << 6)
    return np.concatenate([s[:4] | upper[0], t[:4] | upper[1], s[4:] & 15 | (t[4:] & 15) << 4]) & 255


def _unpack_scales(packed: Array) -> tuple[Array, Array]:
    first, second, last = packed[:4], packed[4:8], packed[8:]
    s = np.concatenate([first & 63, last & 15 | first >> 6 << 4])
    return s, np.concatenate([second & 63, last >> 4 | second >> 6 << 4])


def _encode_affine_k(name: str, x: Array, importance: Array | None) -> list[Array]:
    high = (1 << int(name[1])) - 1
    groups = x.reshape(8, 32, -1)
    if importance is None:
        weights = np.stack([np.sqrt(sum_places(x * x) / _F(32)) + np.abs(x) for x in groups])
        grids = (-1.0, 0.1, 20) if name == "Q4_K" else (-0.5, 0.1, 15)
    else:
        mean_square = _F(2) * sum_places(x * x) / _F(256)
        weights = (importance * np.sqrt(mean_square + x * x)).reshape(groups.shape)
        grids = (-0.9, 0.05, 36)
    fits = [fit_affine(x, weights, high, grids) for x, weights in zip(groups, weights, strict=True)]
    scales, lows, codes = (np.stack(parts) for parts in zip(*fits, strict=True))
    if importance is None:
        (d, s), (m, t) = (_scales_by_largest(v) for v in (scales, -lows))
    else:
        sums = np.stack([sum_places(w) for w in weights])
        (d, s), (m, t) = (fit_positive(v, sums, 63) for v in (scales, -lows))
        if name == "Q5_K":
            s, t = np.minimum(s, 63), np.minimum(t, 63)
    packed = _pack_scales(s, t)
    (d_bytes, d), (m_bytes, m) = _half(d), _half(m)
    s, t = ((v[:, None]).astype(_F) for v in _unpack_scales(packed))
    stored = rounded((groups + m * t) / (d * s), 0, high)
    codes = np.where(d * s != 0, stored, codes).reshape(x.shape)
    return [d_bytes, m_bytes, packed, *([_high_bits(name, codes)] if high == 31 else []), _pack(codes, 4, 32)]


def _scales_by_largest(v: Array) -> tuple[Array, Array]:
    top = np.where(v > 0, v, _F(0)).max(0)
    inverse = np.where(top > 0, _F(63) / top, _F(0))
    return top / _F(63), np.minimum(nearest(inverse * v) & 255, 63)


def _encode_q6_k(x: Array, importance: Array | None) -> list[Array]:
    weights = x * x if importance is None else importance
    pairs = zip(x.reshape(16, 16, -1), weights.reshape(16, 16, -1), strict=True)
    scales, codes = (np.stack(parts) for parts in zip(*(fit_symmetric(*pair, 32) for pair in pairs), strict=True))
    size, extreme = largest(np.where(np.isnan(scales), _F(0), scales))
    inverse = _F(-128) / extreme
    d_bytes, d = _half(_F(1) / inverse)
    s = np.minimum(nearest(inverse * scales), 127).astype(np.int8)
    scale = d * s[:, None].astype(_F)
    stored = rounded(x.reshape(16, 16, -1) / scale, -32, 31) + 32
    codes = np.where(scale != 0, stored, codes).reshape(x.shape)
    parts = [_pack(codes, 4, 64), _high_bits("Q6_K", codes), s.view(np.uint8), d_bytes]
    return [np.where(size < TINY, 0, part) for part in parts]


@np.errstate(all="ignore")
def gguf_quantize_reference(weight: Tensor, type_name: str, importance: Tensor | None) -> Tensor:
    """weight [rows, cols] and importance [cols] are finite float32 on the CPU."""
    rows, cols = weight.shape
    block, block_bytes, _ = GGUF_TYPES[type_name]
    weights = weight.numpy()
    lanes = weights.reshape(-1, block).T.copy()
    counts = None if importance is None else np.tile(importance.numpy().reshape(-1, block), (rows, 1)).T
    if type_name == "Q6_K":
        parts = _encode_q6_k(lanes, counts)
    elif type_name.endswith("_K"):
        parts = _encode_affine_k(type_name, lanes, counts)
    else:
        if counts is not None:
            mean_square = sum_places((weights * weights).T) / _F(cols)
            counts = counts * np.sqrt(np.repeat(mean_square, cols // block) + lanes * lanes)
        parts = _encode_32(type_name, lanes, counts)
    encoded = np.concatenate([part.astype(np.uint8) for part in parts]).T
    assert encoded.shape == (rows * cols // block, block_bytes)
    return torch.from_numpy(np.ascontiguousarray(encoded)).view(rows, cols // block * block_bytes)


def _unpack(data: Array, bits: int, distance: int) -> Array:
    """What `_pack` packed: [blocks, bytes] -> [blocks, places]."""
    together = 8 // bits
    parts = data.reshape(len(data), -1, 1, distance) >> bits * np.arange(together, dtype=np.uint8)[:, None]
    return (parts & (1 << bits) - 1).reshape(len(data), -1)


def _stored_codes(name: str, data: Array) -> Array:
    """[blocks, weights] int32, before the middle is subtracted"""
    if name == "Q6_K":
        return (_unpack(data[:, :128], 4, 64) | _unpack(data[:, 128:192], 2, 32) << 4).astype(np.int32)
    size = GGUF_TYPES[name].block_size
    codes = _unpack(data[:, -size // 2 :], 4, 32 if size == 256 else 16).astype(np.int32)
    if name[1] == "5":
        high = data[:, -size // 2 - size // 8 : -size // 2]
        codes |= _unpack(high, 1, 32 if size == 256 else 1).astype(np.int32) << 4
    return codes


def gguf_dequantize_reference(data: Tensor, type_name: str) -> Tensor:
    """[blocks, block_bytes] -> [blocks, block_size]"""
    blocks = data.numpy()
    halves = [blocks[:, i : i + 2].copy().view(np.float16).astype(_F) for i in _HALVES[type_name]]
    if type_name == "Q8_0":
        return torch.from_numpy(halves[0] * blocks[:, 2:].view(np.int8).astype(_F))
    codes = _stored_codes(type_name, blocks)
    if type_name.endswith("_0"):
        values = halves[0] * (codes - (1 << int(type_name[1]) - 1)).astype(_F)
    elif type_name.endswith("_1"):
        values = halves[0] * codes.astype(_F) + halves[1]
    elif type_name == "Q6_K":
        scales = halves[0] * blocks[:, 192:208].view(np.int8).astype(_F)
        values = scales[:, :, None] * (codes - 32).astype(_F).reshape(-1, 16, 16)
    else:
        s, t = (v.T.astype(_F) for v in _unpack_scales(blocks[:, 4:16].T.astype(np.int32)))
        values = (halves[0] * s)[:, :, None] * codes.astype(_F).reshape(-1, 8, 32) - (halves[1] * t)[:, :, None]
    return torch.from_numpy(values.reshape(len(blocks), GGUF_TYPES[type_name].block_size))


# ---- C++, on torch's threads


def gguf_quantize_cpu(weight: Tensor, type_name: str, importance: Tensor | None) -> Tensor:
    """weight [rows, cols] and importance [cols] are finite, contiguous float32 on the CPU."""
    rows, cols = weight.shape
    block, block_bytes, type_number = GGUF_TYPES[type_name]
    out = torch.empty(rows, cols // block * block_bytes, dtype=torch.uint8)
    function = _tape.kernel("gguf_quants", "gguf_quantize")
    _tape.call_beside_torch(function, weight, importance, rows, cols, type_number, out)
    return out


def gguf_dequantize_cpu(data: Tensor, type_name: str) -> Tensor:
    """[blocks, block_bytes], contiguous -> [blocks, block_size]"""
    block, _, type_number = GGUF_TYPES[type_name]
    out = torch.empty(len(data), block)
    _tape.call_beside_torch(_tape.kernel("gguf_quants", "gguf_dequantize"), data, len(data), type_number, out)
    return out


# ---- what the rest of the product calls


def fitting_type(type_name: str, cols: int) -> str:
    """What llama.cpp takes for rows of `cols` weights where `type_name` is wanted: that, or a type that fits.

    returns  type_name; for K types and cols without 256 as a divisor Q5_0, Q5_1 or Q8_0; "F16" where 32 is none either
    raises   ValueError for an unknown type
    """
    _check_type(type_name)
    if cols % GGUF_TYPES[type_name].block_size:
        type_name = _FALLBACK.get(type_name, type_name)
    return "F16" if cols % GGUF_TYPES[type_name].block_size else type_name


def gguf_quantize(weight: Tensor, type_name: str, *, importance: Tensor | None = None) -> Tensor:
    """Quantize rows to GGUF's bytes.

    weight      [rows, cols] float, any strides, on any device; computed in float32 on the CPU
    type_name   a key of GGUF_TYPES
    importance  [cols] float >= 0: how much each input counts, the mean of its squares (llama.cpp's imatrix). As in
                llama.cpp Q8_0 ignores it, and a block where all of it is 0 becomes zeros (Q4_1, Q5_1: is kept).
    returns     [rows, cols / block_size * block_bytes] uint8 on the CPU
    raises      ValueError if cols does not divide by the block, if weight or importance is not finite, if importance is
                negative or of another shape, or if a scale exceeds float16, from weights of about 5e5 (Q4_0) on
    """
    check_weight(weight)
    _check_type(type_name)
    _check_cols(weight.shape[1], type_name)
    block, block_bytes, _ = GGUF_TYPES[type_name]
    if importance is not None:
        importance = _checked_importance(importance, weight.shape[1])
    if not weight.shape[0]:
        return torch.empty(0, weight.shape[1] // block * block_bytes, dtype=torch.uint8)
    in_cpp = _in_cpp()
    quantize = gguf_quantize_cpu if in_cpp else gguf_quantize_reference
    rows = max(1, (_CALL_WEIGHTS if in_cpp else _REFERENCE_WEIGHTS) // weight.shape[1])
    parts = []
    for part in weight.detach().split(rows):
        part = part.to("cpu", torch.float32).contiguous()
        if not all(map(math.isfinite, part.aminmax())):  # a pass less than isfinite
            raise_not_finite(weight.float())
        parts.append(quantize(part, type_name, importance))
    data = torch.cat(parts)
    _check_halves(data, type_name)
    return data


def gguf_dequantize(data: Tensor, type_name: str, *, cols: int) -> Tensor:
    """The weights behind GGUF's bytes.

    data     [rows, cols / block_size * block_bytes] uint8 on the CPU, any strides
    returns  [rows, cols] float32, the numbers that llama.cpp and the gguf package compute
    raises   ValueError for an unknown type, or if cols does not divide by the block or does not fit data
    """
    _check_type(type_name)
    _check_cols(cols, type_name)
    block, block_bytes, _ = GGUF_TYPES[type_name]
    row_bytes = cols // block * block_bytes
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != row_bytes or data.device.type != "cpu":
        raise ValueError(
            f"data is {data.dtype} {tuple(data.shape)} on {data.device}; cols={cols} of {type_name} takes uint8 "
            f"[rows, {row_bytes}] on cpu; check cols, and that the tensor's type is {type_name}"
        )
    if not data.shape[0]:
        return torch.empty(0, cols)
    dequantize = gguf_dequantize_cpu if _in_cpp() else gguf_dequantize_reference
    return dequantize(data.contiguous().view(-1, block_bytes), type_name).view(-1, cols)


def _in_cpp() -> bool:
    # All tensors are on the CPU, and Triton has no part in this: with LOWBIT_KERNELS=triton the reference runs.
    return os.environ.get("LOWBIT_KERNELS") != "triton" and _cpp.choose("gguf_quants", "cpu") == "cpu"


def _check_type(type_name: str) -> None:
    if type_name not in GGUF_TYPES:
        raise ValueError(f"type_name={type_name!r} is unknown; use one of {', '.join(GGUF_TYPES)}")


def _check_cols(cols: int, type_name: str) -> None:
    block = GGUF_TYPES[type_name].block_size
    if cols < 1 or cols % block:
        raise ValueError(
            f"cols={cols} is not a multiple of {block}, the block of {type_name}; use {fitting_type(type_name, cols)}"
        )


def _checked_importance(importance: Tensor, cols: int) -> Tensor:
    if tuple(importance.shape) != (cols,) or not importance.is_floating_point():
        raise ValueError(
            f"importance is {importance.dtype} {tuple(importance.shape)}; the weight has cols={cols}: use float "
            f"({cols},), a number for each input"
        )
    importance = importance.detach().to("cpu", torch.float32).contiguous()
    wrong = ~(torch.isfinite(importance) & (importance >= 0))
    if wrong.any():
        column = int(wrong.nonzero()[0])
        raise ValueError(
            f"importance[{column}] is {importance[column].item()}; a mean of squares is finite and not negative; "
            "collect it again, or leave importance out"
        )
    return importance


def _check_halves(data: Tensor, type_name: str) -> None:
    block, block_bytes, _ = GGUF_TYPES[type_name]
    blocks = data.view(data.shape[0], data.shape[1] // block_bytes, block_bytes)
    for place in _HALVES[type_name]:
        infinite = blocks[:, :, place + 1] & 0x7C == 0x7C  # all bits of the exponent
        if infinite.any():
            row, column = infinite.nonzero()[0].tolist()
            raise ValueError(
                f"weight[{row}, {column * block}:{(column + 1) * block}] needs a scale beyond float16's 65504 in "
                f"{type_name}; look for weights that diverged, or use F32 for this tensor"
            )
