"""Rotary position embedding (Su et al., arXiv:2104.09864) in place on the output of the stacked q, k, v projection.

    qkv row   q [num_heads * head_dim] | k [num_kv_heads * head_dim] | v, which stays as it is
    a head    x1 [head_dim / 2] | x2 [head_dim / 2]        the two halves, not neighbours: transformers' `rotate_half`
    x1'       = round(x1 cos) - round(x2 sin)
    x2'       = round(x2 cos) + round(x1 sin)              each rounded again; products and sums in float32

cos and sin are those of the token's position in `cos_sin`, which transformers' rotary module fills, so that every
scaling rule is its own. With `q_norm` and `k_norm`, each head is RMS normed first, as Qwen3 does; the roundings are
those of kernels/rms_norm.py. A position outside the table gives nan in q and k: checking would wait for the device.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels.rms_norm import rms_norm_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 1024  # values of each half that a Triton program holds, over as many heads as fit
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


def _check(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> None:
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.ndim != 2 or qkv.shape[1] != width or head_dim % 2 or qkv.dtype not in DTYPES or not qkv.is_contiguous():
        raise ValueError(
            f"qkv is {qkv.dtype} {list(qkv.shape)} with strides {list(qkv.stride())}; {num_heads} + 2 * {num_kv_heads} "
            f"heads of {head_dim} (an even number) need contiguous rows [T, {width}] of float32, bfloat16 or float16"
        )
    _check_tensor("positions", positions, torch.int64, qkv.shape[:1], qkv)
    _check_tensor("cos_sin", cos_sin, qkv.dtype, (cos_sin.shape[0], 2, head_dim // 2), qkv)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together; one of them is None")
    if q_norm is not None:
        _check_tensor("q_norm", q_norm, qkv.dtype, (head_dim,), qkv)
        _check_tensor("k_norm", k_norm, qkv.dtype, (head_dim,), qkv)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], qkv: Tensor) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != qkv.device:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} with strides {list(tensor.stride())}; "
            f"qkv [{qkv.shape[0]}, {qkv.shape[1]}] needs it contiguous, {dtype} {list(shape)} on {qkv.device}"
        )


# ---- reference


def rope_reference_(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    known = (positions >= 0) & (positions < len(cos_sin))
    cos, sin = cos_sin[positions.clamp(0, len(cos_sin) - 1)].masked_fill(~known[:, None, None], torch.nan).unbind(1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, head_dim / 2]
    for part, norm in ((slice(0, num_heads), q_norm), (slice(num_heads, num_heads + num_kv_heads), k_norm)):
        x = heads[:, part] if norm is None else rms_norm_reference(heads[:, part], norm, eps=eps)
        x1, x2 = x.chunk(2, dim=-1)
        heads[:, part] = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


# ---- C++


def rope_cpu_(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    if qkv.dtype == torch.float16:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        return rope_reference_(qkv, positions, cos_sin, **sizes, q_norm=q_norm, k_norm=k_norm, eps=eps)
    call(
        kernel("elementwise", "rope"), _DTYPE_IDS[qkv.dtype], qkv, positions, cos_sin, q_norm, k_norm, qkv.shape[0],
        num_heads, num_kv_heads, head_dim, cos_sin.shape[0], eps,
    )  # fmt: skip


# ---- Triton


@triton.jit
def _normed(x1, x2, norm_ptr, column, mask, head_dim, eps):
    """RMS norm of heads held as two halves; x1, x2 [BLOCK_N, BLOCK_D] float32."""
    dtype = norm_ptr.dtype.element_ty
    mean = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / head_dim
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    weight1 = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)[None, :]
    weight2 = tl.load(norm_ptr + head_dim // 2 + column, mask=mask, other=0.0).to(tl.float32)[None, :]
    x1 = ((x1 * scale).to(dtype).to(tl.float32) * weight1).to(dtype).to(tl.float32)
    x2 = ((x2 * scale).to(dtype).to(tl.float32) * weight2).to(dtype).to(tl.float32)
    return x1, x2


@triton.jit
def _rope_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr,
    num_heads, num_kv_heads, head_dim, max_positions, stride_token, stride_position, eps,
    HAS_NORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_N heads of one token a program; the programs of axis 1 take q's heads first, then k's."""
    token = tl.program_id(0).to(tl.int64)
    num_q_programs = tl.cdiv(num_heads, BLOCK_N)
    is_q = tl.program_id(1) < num_q_programs
    local = (tl.program_id(1) - tl.where(is_q, 0, num_q_programs)) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.where(is_q, local, num_heads + local)
    column = tl.arange(0, BLOCK_D)
    half = head_dim // 2
    column_mask = column < half
    mask = (local < tl.where(is_q, num_heads, num_kv_heads))[:, None] & column_mask[None, :]
    offset = token * stride_token + head[:, None] * head_dim + column[None, :]
    dtype = qkv_ptr.dtype.element_ty
    x1 = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(qkv_ptr + half + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        if is_q:
            x1, x2 = _normed(x1, x2, q_norm_ptr, column, column_mask, head_dim, eps)
        else:
            x1, x2 = _normed(x1, x2, k_norm_ptr, column, column_mask, head_dim, eps)
    position = tl.load(positions_ptr + token)
    known = column < tl.where((position >= 0) & (position < max_positions), half, 0)
    table = cos_sin_ptr + position * stride_position + column
    cos = tl.load(table, mask=known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(table + half, mask=known, other=float("nan")).to(tl.float32)[None, :]
    y1 = (x1 * cos).to(dtype).to(tl.float32) - (x2 * sin).to(dtype).to(tl.float32)
    y2 = (x2 * cos).to(dtype).to(tl.float32) + (x1 * sin).to(dtype).to(tl.float32)
    tl.store(qkv_ptr + offset, y1.to(dtype), mask=mask)
    tl.store(qkv_ptr + half + offset, y2.to(dtype), mask=mask)


def rope_triton_(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    if qkv.numel() == 0:
        return
    block_d = triton.next_power_of_2(head_dim // 2)
    block_n = min(triton.next_power_of_2(num_heads), max(1, TILE // block_d))
    _rope_kernel[(len(qkv), triton.cdiv(num_heads, block_n) + triton.cdiv(num_kv_heads, block_n))](
        qkv, positions, cos_sin, q_norm, k_norm, num_heads, num_kv_heads, head_dim, len(cos_sin), qkv.stride(0),
        cos_sin.stride(0), eps, HAS_NORM=q_norm is not None, BLOCK_N=block_n, BLOCK_D=block_d, enable_fp_fusion=False,
    )  # fmt: skip


# ---- registered op

_IMPLEMENTATIONS = {"reference": rope_reference_, "cpu": rope_cpu_, "triton": rope_triton_}


@torch.library.custom_op("lowbit::rope_", mutates_args={"qkv"})
def _rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    rope_(qkv, positions, cos_sin, **sizes, q_norm=q_norm, k_norm=k_norm, eps=eps)


@_rope.register_fake
def _(qkv, positions, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps) -> None:
    return None


# ---- what the rest of the product calls


def rope_(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate the q and k heads of every token by its position, in place (arXiv:2104.09864, equation 34).

    qkv        [T, (num_heads + 2 * num_kv_heads) * head_dim] float32, bfloat16 or float16, contiguous
    positions  [T] int64; one outside the table gives nan in q and k
    cos_sin    [max_positions, 2, head_dim / 2] of qkv's dtype: cos and sin from transformers' rotary module
    q_norm, k_norm   [head_dim] of qkv's dtype, weights of an RMS norm of every head before (Qwen3); or both None
    eps        of that norm
    raises     ValueError if a shape, dtype, device or stride does not fit
    """
    _check(qkv, positions, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm)
    implementation = _cpp.choose("elementwise", "cpu" if qkv.is_cpu else qkv.device.type)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    _IMPLEMENTATIONS[implementation](qkv, positions, cos_sin, **sizes, q_norm=q_norm, k_norm=k_norm, eps=eps)
