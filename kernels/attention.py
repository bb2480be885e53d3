"""Attention for training: causal, grouped-query, over documents packed into one row of tokens, forward and backward.

Formula (FlashAttention-2, arXiv:2307.08691, algorithms 1, 2). Document b owns rows cu_seqlens[b] .. cu_seqlens[b + 1]
of qkv; head h reads KV head h // (num_heads / num_kv_heads). Row i sees the rows j <= i of its own document, with a
sliding window also j > i - sliding_window:
    s_ij = scale * q_i . k_j       lse_i = log sum_j exp s_ij      p_ij = exp(s_ij - lse_i)      o_i = sum_j p_ij v_j
    dp_ij = do_i . v_j             delta_i = do_i . o_i            ds_ij = p_ij (dp_ij - delta_i)
    dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i    dv_j = sum_i p_ij do_i
with dk and dv summed over the query heads of a group. Forward keeps lse; backward recomputes p, so that nothing of the
size of a document squared is ever stored. There is no mask tensor: tiles of keys that no row of a query tile sees are
not visited, and packing costs what its documents cost.

Layout. qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: a row is the heads of q | k | v. The gradient has the same.

Rounding. Sums are float32. In 16 bits p and ds are rounded for the products that follow, as in torch's SDPA, and
outputs once at the end.

Invariance. On CPUs tiles start where a document starts and every sum has a fixed order: the bits of a document's output
and gradient do not depend on its neighbours, its place in the pack or the number of threads.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call_beside_torch, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
MIN_CHUNK, MAX_CHUNKS = 512, 4  # of keys in backward; see cpp/attention.cpp
# BLOCK_M, BLOCK_N, warps for a head_dim up to 64, 128 and 256, by size of a float: float32 dots keep operands in
# registers, so less fits. Chosen for no spills in 16 bits up to 128 on sm_80, sm_90, sm_100 and gfx942, where dkdv has
# tiles of its own; not timed there yet.
TILES = {
    "forward": {2: ((128, 64, 8), (64, 32, 8), (32, 32, 8)), 4: ((32, 32, 4), (16, 16, 4), (16, 16, 8))},
    "delta": {2: ((64, 0, 4), (32, 0, 4), (16, 0, 4)), 4: ((32, 0, 4), (16, 0, 4), (16, 0, 4))},
    "dq": {2: ((64, 32, 4), (64, 32, 8), (32, 32, 8)), 4: ((32, 16, 4), (16, 16, 4), (16, 16, 8))},
    "dkdv": {2: ((64, 32, 4), (32, 32, 8), (16, 32, 8)), 4: ((16, 32, 8), (16, 16, 8), (16, 16, 8))},
    "dkdv hip": {2: ((16, 64, 4), (16, 64, 8), (16, 32, 8)), 4: ((16, 32, 8), (16, 16, 8), (16, 16, 8))},
}
BACKEND = "hip" if torch.version.hip else "cuda"
NO_WINDOW = 1 << 30  # rows
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


class Shape(NamedTuple):
    """What the implementations need besides tensors; the arguments of `attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None


# ---- the reference


def attention_reference(qkv: Tensor, cu_seqlens: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """out and lse, one document at a time; computes in float32, or in float64 for float64 input."""
    q, k, v = _split(qkv, shape)
    out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3])
    for begin, end in pairwise(cu_seqlens.tolist()):
        rows = slice(begin, end)
        scores = _scores(q[rows], k[rows], shape)  # [kv_heads, group, Q, N]
        lse[rows] = scores.logsumexp(-1).permute(2, 0, 1)
        out[rows] = torch.einsum("kgqn,nkd->qkgd", scores.softmax(-1), v[rows])
    return out.flatten(1).to(qkv.dtype), lse.flatten(1).T.contiguous()


def attention_backward_reference(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, shape: Shape
) -> Tensor:
    q, k, v = _split(qkv, shape)
    do = grad.to(q.dtype).view_as(q)
    delta = (do * out.to(q.dtype).view_as(q)).sum(-1)  # [T, kv_heads, group]
    lse = lse.T.unflatten(1, (shape.num_kv_heads, -1))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for begin, end in pairwise(cu_seqlens.tolist()):
        rows = slice(begin, end)
        p = (_scores(q[rows], k[rows], shape) - lse[rows].permute(1, 2, 0)[..., None]).exp()
        dp = torch.einsum("qkgd,nkd->kgqn", do[rows], v[rows])
        ds = p * (dp - delta[rows].permute(1, 2, 0)[..., None]) * shape.scale
        dq[rows] = torch.einsum("kgqn,nkd->qkgd", ds, k[rows])
        dk[rows] = torch.einsum("kgqn,qkgd->nkd", ds, q[rows])
        dv[rows] = torch.einsum("kgqn,qkgd->nkd", p, do[rows])
    return torch.cat([dq.flatten(1), dk.flatten(1), dv.flatten(1)], dim=1).to(qkv.dtype)


def _split(qkv: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, num_kv_heads, group, head_dim]; k, v [T, num_kv_heads, head_dim], at least float32"""
    heads = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).unflatten(1, (-1, shape.head_dim))
    q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    return q.unflatten(1, (shape.num_kv_heads, -1)).contiguous(), k, v


def _scores(q: Tensor, k: Tensor, shape: Shape) -> Tensor:
    """Scaled scores [kv_heads, group, Q, N] of one document, -inf where a row does not see a key."""
    row = torch.arange(len(q), device=q.device)
    distance = row[:, None] - row
    seen = (distance >= 0) & (distance < (shape.sliding_window or len(q) + 1))
    return (torch.einsum("qkgd,nkd->kgqn", q, k) * shape.scale).masked_fill(~seen, -torch.inf)


# ---- C++


def _counts(qkv: Tensor, cu_seqlens: Tensor, shape: Shape) -> tuple[int | float, ...]:
    return len(qkv), len(cu_seqlens) - 1, *shape[:3], shape.scale, shape.sliding_window or 0


def attention_cpu(qkv: Tensor, cu_seqlens: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    if qkv.dtype == torch.float16:
        return attention_reference(qkv, cu_seqlens, shape)
    out = qkv.new_empty(len(qkv), shape.num_heads * shape.head_dim)
    lse = qkv.new_empty(shape.num_heads, len(qkv), dtype=torch.float32)
    call_beside_torch(
        kernel("attention", "attention"),
        _DTYPE_IDS[qkv.dtype], qkv, cu_seqlens, *_counts(qkv, cu_seqlens, shape), out, lse,
    )  # fmt: skip
    return out, lse


def attention_backward_cpu(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, shape: Shape
) -> Tensor:
    if qkv.dtype == torch.float16:
        return attention_backward_reference(grad, qkv, out, lse, cu_seqlens, shape)
    dqkv = torch.empty_like(qkv)
    # Only the rows of documents of several chunks are touched, and with them the memory that is really taken.
    long = any(end - begin > MIN_CHUNK for begin, end in pairwise(cu_seqlens.tolist()))
    partial = qkv.new_empty(MAX_CHUNKS, *out.shape, dtype=torch.float32) if long else None
    call_beside_torch(
        kernel("attention", "attention_backward"),
        _DTYPE_IDS[qkv.dtype], qkv, cu_seqlens, *_counts(qkv, cu_seqlens, shape), out, lse, grad, dqkv, partial,
    )  # fmt: skip
    return dqkv


# ---- Triton


@triton.jit
def _tile(cu_seqlens_ptr, num_docs, program, BLOCK: tl.constexpr):
    """The document of a program, and the first of the BLOCK rows in it that are the program's.

    Document b has the programs from cu_seqlens[b] // BLOCK + b on: room for its tiles, found by bisection, so that the
    grid depends on the numbers of rows and documents alone and a launch never waits for the device.
    """
    low = 0
    high = num_docs
    while high - low > 1:
        middle = (low + high) // 2
        starts = tl.load(cu_seqlens_ptr + middle) // BLOCK + middle <= program
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle)
    first_row = tl.load(cu_seqlens_ptr + low)
    length = tl.load(cu_seqlens_ptr + low + 1) - first_row
    return first_row, length, (program - first_row // BLOCK - low) * BLOCK


@triton.jit
def _load_rows(ptr, row, stride, dim, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    ptrs = ptr + (row.to(tl.int64) * stride)[:, None] + dim[None, :]
    if HEAD_DIM == BLOCK_K:
        rows = tl.load(ptrs)
    else:
        rows = tl.load(ptrs, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return rows


@triton.jit
def _store_rows(ptr, row, stride, dim, rows, row_mask, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    ptrs = ptr + (row.to(tl.int64) * stride)[:, None] + dim[None, :]
    mask = row_mask[:, None] if HEAD_DIM == BLOCK_K else row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(ptrs, rows.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _seen(row, key, sliding_window):
    """0 <= row - key < sliding_window as one unsigned comparison."""
    return (row - key).to(tl.uint32, bitcast=True) < tl.cast(sliding_window, tl.uint32)


@triton.jit
def _attention_kernel(
    qkv_ptr, cu_seqlens_ptr, out_ptr, lse_ptr,
    stride_qkv_row, stride_out_row, stride_lse_head, num_docs, num_heads, num_kv_heads, scale, sliding_window,
    HEAD_DIM: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes one head of BLOCK_M rows of a document."""
    head = tl.program_id(1)
    first_row, length, first = _tile(cu_seqlens_ptr, num_docs, tl.program_id(0), BLOCK_M)
    if first < length:
        kv_head = head // (num_heads // num_kv_heads)
        k_ptr = qkv_ptr + (num_heads + kv_head) * HEAD_DIM
        v_ptr = qkv_ptr + (num_heads + num_kv_heads + kv_head) * HEAD_DIM
        # Rows and keys behind the end are loaded from the last one: masks of whole tiles would cost registers.
        m = first + tl.arange(0, BLOCK_M)
        row = first_row + tl.minimum(m, length - 1)
        dim = tl.arange(0, BLOCK_K)
        q = _load_rows(qkv_ptr + head * HEAD_DIM, row, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)

        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        end = tl.minimum(first + BLOCK_M, length)
        for start in range(tl.maximum(first - sliding_window + 1, 0) // BLOCK_N * BLOCK_N, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            key = first_row + tl.minimum(n, end - 1)
            k = _load_rows(k_ptr, key, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.44269504)  # log2(e): powers of 2
            scores = tl.where(_seen(m[:, None], n[None, :], sliding_window), scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf would be nan
            weights = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(peak - shift)
            norm = norm * rescale + tl.sum(weights, axis=1)
            v = _load_rows(v_ptr, key, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
            acc = tl.dot(weights.to(DOT), v, acc * rescale[:, None], input_precision="ieee")
            peak = new_peak
        lse = (peak + tl.log2(norm)) * 0.693147181
        tl.store(lse_ptr + head.to(tl.int64) * stride_lse_head + row, lse, mask=m < length)
        out = acc / norm[:, None]
        _store_rows(out_ptr + head * HEAD_DIM, row, stride_out_row, dim, out, m < length, HEAD_DIM, BLOCK_K)


@triton.jit
def _delta_kernel(
    grad_ptr, out_ptr, delta_ptr, num_rows, stride_out_row, stride_lse_head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """delta [num_heads, T] = the sum over a head of grad * out."""
    head = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(m, num_rows - 1)
    dim = tl.arange(0, BLOCK_K)
    column = head * HEAD_DIM
    grad = _load_rows(grad_ptr + column, row, stride_out_row, dim, HEAD_DIM, BLOCK_K).to(tl.float32)
    out = _load_rows(out_ptr + column, row, stride_out_row, dim, HEAD_DIM, BLOCK_K).to(tl.float32)
    delta_ptrs = delta_ptr + head.to(tl.int64) * stride_lse_head + row
    tl.store(delta_ptrs, tl.sum(grad * out, axis=1), mask=m < num_rows)


@triton.jit
def _dq_kernel(
    grad_ptr, qkv_ptr, cu_seqlens_ptr, lse_ptr, delta_ptr, dqkv_ptr,
    stride_qkv_row, stride_out_row, stride_lse_head, num_docs, num_heads, num_kv_heads, scale, sliding_window,
    HEAD_DIM: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes dq of one head of BLOCK_M rows of a document."""
    head = tl.program_id(1)
    first_row, length, first = _tile(cu_seqlens_ptr, num_docs, tl.program_id(0), BLOCK_M)
    if first < length:
        kv_head = head // (num_heads // num_kv_heads)
        k_ptr = qkv_ptr + (num_heads + kv_head) * HEAD_DIM
        v_ptr = qkv_ptr + (num_heads + num_kv_heads + kv_head) * HEAD_DIM
        m = first + tl.arange(0, BLOCK_M)
        row = first_row + tl.minimum(m, length - 1)
        dim = tl.arange(0, BLOCK_K)
        q = _load_rows(qkv_ptr + head * HEAD_DIM, row, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
        grad = _load_rows(grad_ptr + head * HEAD_DIM, row, stride_out_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
        statistic = head.to(tl.int64) * stride_lse_head + row
        lse = tl.load(lse_ptr + statistic) * 1.44269504
        delta = tl.load(delta_ptr + statistic)
        dq = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        end = tl.minimum(first + BLOCK_M, length)
        for start in range(tl.maximum(first - sliding_window + 1, 0) // BLOCK_N * BLOCK_N, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            key = first_row + tl.minimum(n, end - 1)
            k = _load_rows(k_ptr, key, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
            v = _load_rows(v_ptr, key, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.44269504) - lse[:, None]
            dp = tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None]
            # p is at most 1; a rounded lse of huge scores must not make it more.
            scores = tl.where(_seen(m[:, None], n[None, :], sliding_window), scores, float("-inf"))
            p = tl.exp2(tl.minimum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL))
            dq = tl.dot((p * dp).to(DOT), k, dq, input_precision="ieee")
        _store_rows(dqkv_ptr + head * HEAD_DIM, row, stride_qkv_row, dim, dq * scale, m < length, HEAD_DIM, BLOCK_K)


@triton.jit
def _dkdv_kernel(
    grad_ptr, qkv_ptr, cu_seqlens_ptr, lse_ptr, delta_ptr, dqkv_ptr,
    stride_qkv_row, stride_out_row, stride_lse_head, num_docs, num_heads, num_kv_heads, scale, sliding_window,
    HEAD_DIM: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes dk and dv of one KV head of BLOCK_N keys: over its query heads, over tiles of BLOCK_M rows."""
    kv_head = tl.program_id(1)
    first_row, length, first = _tile(cu_seqlens_ptr, num_docs, tl.program_id(0), BLOCK_N)
    if first < length:
        k_column = (num_heads + kv_head) * HEAD_DIM
        v_column = (num_heads + num_kv_heads + kv_head) * HEAD_DIM
        n = first + tl.arange(0, BLOCK_N)
        key = first_row + tl.minimum(n, length - 1)
        dim = tl.arange(0, BLOCK_K)
        k = _load_rows(qkv_ptr + k_column, key, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
        v = _load_rows(qkv_ptr + v_column, key, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
        dk = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        group = num_heads // num_kv_heads
        end = tl.minimum(length, first + BLOCK_N - 1 + sliding_window)
        for head in range(kv_head * group, kv_head * group + group):
            statistic = tl.cast(head, tl.int64) * stride_lse_head + first_row
            for start in range(first // BLOCK_M * BLOCK_M, end, BLOCK_M):
                m = start + tl.arange(0, BLOCK_M)
                row = first_row + tl.minimum(m, length - 1)
                q = _load_rows(qkv_ptr + head * HEAD_DIM, row, stride_qkv_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
                grad = _load_rows(grad_ptr + head * HEAD_DIM, row, stride_out_row, dim, HEAD_DIM, BLOCK_K).to(DOT)
                # 2^-inf: rows behind the last one weigh nothing
                lse = tl.load(lse_ptr + statistic + m, mask=m < length, other=float("inf")) * 1.44269504
                delta = tl.load(delta_ptr + statistic + m, mask=m < length, other=0.0)
                scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * 1.44269504) - lse[None, :]
                scores = tl.where(_seen(m[None, :], n[:, None], sliding_window), scores, float("-inf"))
                p = tl.exp2(tl.minimum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL))
                dv = tl.dot(p.to(DOT), grad, dv, input_precision="ieee")
                ds = p * (tl.dot(v, tl.trans(grad), input_precision="ieee") - delta[None, :])
                dk = tl.dot(ds.to(DOT), q, dk, input_precision="ieee")
        _store_rows(dqkv_ptr + k_column, key, stride_qkv_row, dim, dk * scale, n < length, HEAD_DIM, BLOCK_K)
        _store_rows(dqkv_ptr + v_column, key, stride_qkv_row, dim, dv, n < length, HEAD_DIM, BLOCK_K)


def _tiles(name: str, head_dim: int, itemsize: int, backend: str = BACKEND) -> dict[str, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K and num_warps of a kernel."""
    block_k = max(16, triton.next_power_of_2(head_dim))
    by_head_dim = TILES.get(f"{name} {backend}", TILES[name])[itemsize]
    block_m, block_n, num_warps = by_head_dim[(block_k > 64) + (block_k > 128)]
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": num_warps}


def _measured(name: str, qkv: Tensor, head_dim: int) -> dict[str, int]:
    default = _tiles(name, head_dim, qkv.element_size())
    bucket = {"head_dim": default["BLOCK_K"], "itemsize": qkv.element_size()}
    return tiles(f"attention_{name}", qkv.device, default, **bucket)


def _window(shape: Shape) -> int:
    return min(shape.sliding_window or NO_WINDOW, NO_WINDOW)


def attention_triton(qkv: Tensor, cu_seqlens: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    num_rows, num_docs = len(qkv), len(cu_seqlens) - 1
    out = qkv.new_empty(num_rows, shape.num_heads * shape.head_dim)
    lse = qkv.new_empty(shape.num_heads, num_rows, dtype=torch.float32)
    if num_rows:
        tile = _measured("forward", qkv, shape.head_dim)
        _attention_kernel[(num_rows // tile["BLOCK_M"] + num_docs, shape.num_heads)](
            qkv, cu_seqlens, out, lse, qkv.stride(0), out.stride(0), lse.stride(0),
            num_docs, shape.num_heads, shape.num_kv_heads, shape.scale, _window(shape),
            HEAD_DIM=shape.head_dim, DOT=_TRITON_DTYPES[qkv.dtype], **tile,
        )  # fmt: skip
    return out, lse


def attention_backward_triton(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, shape: Shape
) -> Tensor:
    num_rows, num_docs = len(qkv), len(cu_seqlens) - 1
    dqkv = torch.empty_like(qkv)
    if not num_rows:
        return dqkv
    delta = torch.empty_like(lse)
    tile = _measured("delta", qkv, shape.head_dim)
    _delta_kernel[(triton.cdiv(num_rows, tile["BLOCK_M"]), shape.num_heads)](
        grad, out, delta, num_rows, out.stride(0), lse.stride(0),
        HEAD_DIM=shape.head_dim, BLOCK_M=tile["BLOCK_M"], BLOCK_K=tile["BLOCK_K"], num_warps=tile["num_warps"],
    )  # fmt: skip
    arguments = (
        grad, qkv, cu_seqlens, lse, delta, dqkv, qkv.stride(0), out.stride(0), lse.stride(0),
        num_docs, shape.num_heads, shape.num_kv_heads, shape.scale, _window(shape),
    )  # fmt: skip
    sizes = {"HEAD_DIM": shape.head_dim, "DOT": _TRITON_DTYPES[qkv.dtype]}
    tile = _measured("dq", qkv, shape.head_dim)
    _dq_kernel[(num_rows // tile["BLOCK_M"] + num_docs, shape.num_heads)](*arguments, **sizes, **tile)
    tile = _measured("dkdv", qkv, shape.head_dim)
    _dkdv_kernel[(num_rows // tile["BLOCK_N"] + num_docs, shape.num_kv_heads)](*arguments, **sizes, **tile)
    return dqkv


# ---- registered ops

_FORWARD = {"reference": attention_reference, "cpu": attention_cpu, "triton": attention_triton}
_BACKWARD = {
    "reference": attention_backward_reference,
    "cpu": attention_backward_cpu,
    "triton": attention_backward_triton,
}


def _check_documents(cu_seqlens: Tensor, num_rows: int) -> None:
    """raises ValueError unless the documents tile the rows; on GPUs reading them would wait for the device"""
    if not cu_seqlens.is_cpu:
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_rows or any(end < begin for begin, end in pairwise(bounds)):
        shown = bounds if len(bounds) <= 10 else [*bounds[:5], "...", *bounds[-4:]]
        raise ValueError(f"cu_seqlens={shown} must ascend from 0 to the {num_rows} rows of qkv; cumulate the lengths")


@torch.library.custom_op("lowbit::attention", mutates_args=())
def _attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor]:
    _check_documents(cu_seqlens, len(qkv))
    shape = Shape(num_heads, num_kv_heads, head_dim, scale, sliding_window)
    return _FORWARD[_cpp.choose("attention", qkv.device.type)](qkv, cu_seqlens, shape)


@_attention.register_fake
def _(qkv, cu_seqlens, num_heads, num_kv_heads, head_dim, scale, sliding_window) -> tuple[Tensor, Tensor]:
    out = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
    return out, qkv.new_empty(num_heads, qkv.shape[0], dtype=torch.float32)


@torch.library.custom_op("lowbit::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    _check_documents(cu_seqlens, len(qkv))
    shape = Shape(num_heads, num_kv_heads, head_dim, scale, sliding_window)
    implementation = _BACKWARD[_cpp.choose("attention", qkv.device.type)]
    return implementation(grad.contiguous(), qkv, out, lse, cu_seqlens, shape)


@_attention_backward.register_fake
def _(grad, qkv, out, lse, cu_seqlens, num_heads, num_kv_heads, head_dim, scale, sliding_window) -> Tensor:
    return torch.empty_like(qkv)


def _setup_context(ctx, inputs, output) -> None:
    qkv, cu_seqlens, *ctx.sizes = inputs
    ctx.set_materialize_grads(False)  # lse has no gradient
    ctx.save_for_backward(qkv, *output, cu_seqlens)


def _backward(ctx, grad: Tensor | None, _grad_lse: Tensor | None):
    qkv, out, lse, cu_seqlens = ctx.saved_tensors
    dqkv = None if grad is None else _attention_backward(grad, qkv, out, lse, cu_seqlens, *ctx.sizes)
    return dqkv, None, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention inside each packed document (FlashAttention-2, arXiv:2307.08691, algorithm 1).

    qkv             [T, (num_heads + 2 * num_kv_heads) * head_dim] float32, bfloat16 or float16, contiguous; a row is
                    the heads of q | k | v after rotation
    cu_seqlens      [num_documents + 1] int32 on qkv's device, ascending from 0 to T; a document may be empty
    head_dim        even, at most 256
    scale           of the scores before the softmax, positive; None: head_dim**-0.5
    sliding_window  rows that a row sees, itself among them; None: all before it in its document
    returns         [T, num_heads * head_dim] of qkv's dtype, differentiable in qkv
    raises          ValueError if a shape, dtype, device or stride does not fit; on CPUs also if cu_seqlens is not
                    ascending from 0 to T, which a GPU call does not read
    """
    _check(qkv, cu_seqlens, num_heads, num_kv_heads, head_dim)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: a row sees at least itself; use 1 or more, or None")
    scale = head_dim**-0.5 if scale is None else float(scale)
    return _attention(qkv, cu_seqlens, num_heads, num_kv_heads, head_dim, scale, sliding_window)[0]


def _check(qkv: Tensor, cu_seqlens: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    heads_fit = 0 < num_kv_heads <= num_heads and num_heads % num_kv_heads == 0
    if not heads_fit or head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"num_heads={num_heads} num_kv_heads={num_kv_heads} head_dim={head_dim}: heads must be a multiple of KV "
            f"heads, and head_dim an even number up to {MAX_HEAD_DIM}; this model is not supported"
        )
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.ndim != 2 or qkv.shape[1] != columns or qkv.dtype not in DTYPES or not qkv.is_contiguous():
        raise ValueError(
            f"qkv is {qkv.dtype} {list(qkv.shape)} with strides {list(qkv.stride())}; attention with "
            f"num_heads={num_heads} num_kv_heads={num_kv_heads} head_dim={head_dim} takes contiguous rows "
            f"[T, {columns}] of float32, bfloat16 or float16; use .contiguous() or .to()"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or not len(cu_seqlens) or not cu_seqlens.is_contiguous():
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; attention takes contiguous int32 "
            "[num_documents + 1], 0 first; use .int()"
        )
    if cu_seqlens.device != qkv.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and qkv on {qkv.device}; use .to()")
