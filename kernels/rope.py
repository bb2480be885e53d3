"""Rotary position embedding (Su et al., arXiv:2104.09864) of the output of the stacked q, k, v projection.

    qkv row   q [num_heads * head_dim] | k [num_kv_heads * head_dim] | v, which stays as it is
    a head    x1 [head_dim / 2] | x2 [head_dim / 2]        the two halves, not neighbours: transformers' `rotate_half`
    x1'       = round(x1 cos) - round(x2 sin)
    x2'       = round(x2 cos) + round(x1 sin)              each rounded again; products and sums in float32

cos and sin are those of the token's position in `cos_sin`, which transformers' rotary module fills, so that every
scaling rule is its own. With `q_norm` and `k_norm`, each head is RMS normed first, as Qwen3 does; the roundings are
those of kernels/rms_norm.py. A position outside the table gives nan in q and k: checking would wait for the device.

`rope_` works in place, for the server; `rope` returns a new tensor and has a gradient: a rotation by minus the angle,
then the norm's gradient (kernels/rms_norm.py), in float32 and rounded once. Without norms it saves positions and the
table alone; with norms also qkv as it came in.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, call_beside_torch, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels.rms_norm import rms_norm_backward_reference, rms_norm_reference, rows_per_chunk

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


def _implementation(file: str, qkv: Tensor) -> str:
    return _cpp.choose(file, "cpu" if qkv.is_cpu else qkv.device.type)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], qkv: Tensor) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != qkv.device:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} with strides {list(tensor.stride())}; "
            f"qkv [{qkv.shape[0]}, {qkv.shape[1]}] needs it contiguous, {dtype} {list(shape)} on {qkv.device}"
        )


# ---- reference


def _cos_and_sin(positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 1, head_dim / 2] each; nan where the position is not in the table."""
    known = (positions >= 0) & (positions < len(cos_sin))
    rows = cos_sin[positions.clamp(0, len(cos_sin) - 1)].masked_fill(~known[:, None, None], torch.nan)
    return rows[:, 0, None], rows[:, 1, None]


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
    out: Tensor | None = None,
) -> None:
    """In place, or into `out`; the other implementations likewise."""
    heads = (qkv if out is None else out.copy_(qkv)).view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = _cos_and_sin(positions, cos_sin)
    for part, norm in ((slice(0, num_heads), q_norm), (slice(num_heads, num_heads + num_kv_heads), k_norm)):
        x = heads[:, part] if norm is None else rms_norm_reference(heads[:, part], norm, eps=eps)
        x1, x2 = x.chunk(2, dim=-1)
        heads[:, part] = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def rope_backward_reference(
    grad: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    qkv: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    with_norms: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of qkv, and of q_norm and k_norm [2, head_dim] if asked."""
    shape = (len(grad), num_heads + 2 * num_kv_heads, head_dim)
    out, grad_norms = grad.view(shape).clone(), []
    cos, sin = (tensor.float() for tensor in _cos_and_sin(positions, cos_sin))
    for part, norm in ((slice(0, num_heads), q_norm), (slice(num_heads, num_heads + num_kv_heads), k_norm)):
        g1, g2 = grad.view(shape)[:, part].float().chunk(2, dim=-1)
        rotated = torch.cat([g1 * cos + g2 * sin, g2 * cos - g1 * sin], dim=-1)
        if norm is not None:
            rows = qkv.view(shape)[:, part].reshape(-1, head_dim)
            rotated, grad_norm = rms_norm_backward_reference(
                rotated.reshape(-1, head_dim), rows, norm, None, eps=eps, with_weight=True
            )
            rotated = rotated.view(*g1.shape[:2], head_dim)
            grad_norms.append(grad_norm)
        out[:, part] = rotated.to(grad.dtype)
    return out.view_as(grad), torch.stack(grad_norms) if with_norms else None


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
    out: Tensor | None = None,
) -> None:
    if qkv.dtype == torch.float16:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        return rope_reference_(qkv, positions, cos_sin, **sizes, q_norm=q_norm, k_norm=k_norm, eps=eps, out=out)
    run = call if out is None else call_beside_torch  # serving, training
    run(
        kernel("elementwise", "rope"), _DTYPE_IDS[qkv.dtype], qkv, qkv if out is None else out, positions, cos_sin,
        q_norm, k_norm, qkv.shape[0], num_heads, num_kv_heads, head_dim, cos_sin.shape[0], eps,
    )  # fmt: skip


def rope_backward_cpu(
    grad: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    qkv: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    with_norms: bool,
) -> tuple[Tensor, Tensor | None]:
    if grad.dtype == torch.float16:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        tensors = (grad, positions, cos_sin, qkv, q_norm, k_norm)
        return rope_backward_reference(*tensors, **sizes, eps=eps, with_norms=with_norms)
    tokens = len(grad)
    grad_qkv, grad_norms, partial, rows = torch.empty_like(grad), None, None, rows_per_chunk(tokens)
    if tokens == 0:
        return grad_qkv, grad.new_zeros(2, head_dim) if with_norms else None
    if with_norms:
        grad_norms = grad.new_empty(2, head_dim)
        partial = grad.new_empty(-(-tokens // rows), 2, head_dim, dtype=torch.float32)
    call_beside_torch(
        kernel("elementwise_backward", "rope_backward"), _DTYPE_IDS[grad.dtype], grad, positions, cos_sin, qkv, q_norm,
        k_norm, grad_qkv, grad_norms, partial, tokens, num_heads, num_kv_heads, head_dim, cos_sin.shape[0], rows, eps,
    )  # fmt: skip
    return grad_qkv, grad_norms


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
def _cos_sin_of(table_ptr, position, max_positions, stride_position, column, half):
    """[1, BLOCK_D] float32 each; nan where the position is not in the table."""
    known = column < tl.where((position >= 0) & (position < max_positions), half, 0)
    row_ptr = table_ptr + position * stride_position + column
    cos = tl.load(row_ptr, mask=known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(row_ptr + half, mask=known, other=float("nan")).to(tl.float32)[None, :]
    return cos, sin


@triton.jit
def _heads_of(program, num_heads, num_kv_heads, BLOCK_N: tl.constexpr):
    """Which heads a program of axis 1 takes, and which of these exist: q's programs come first, then k's, then v's."""
    num_q_programs, num_kv_programs = tl.cdiv(num_heads, BLOCK_N), tl.cdiv(num_kv_heads, BLOCK_N)
    is_q = program < num_q_programs
    is_k = program < num_q_programs + num_kv_programs
    first = tl.where(is_q, 0, tl.where(is_k, num_q_programs, num_q_programs + num_kv_programs))
    local = (program - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = local + tl.where(is_q, 0, tl.where(is_k, num_heads, num_heads + num_kv_heads))
    return head, local < tl.where(is_q, num_heads, num_kv_heads)


@triton.jit
def _rope_kernel(
    qkv_ptr, out_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr,
    num_heads, num_kv_heads, head_dim, max_positions, stride_token, stride_position, eps,
    HAS_NORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_N heads of one token a program; in place where out_ptr is qkv_ptr, and then there are no programs for v."""
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    num_q_programs, num_kv_programs = tl.cdiv(num_heads, BLOCK_N), tl.cdiv(num_kv_heads, BLOCK_N)
    head, head_mask = _heads_of(program, num_heads, num_kv_heads, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    half = head_dim // 2
    column_mask = column < half
    mask = head_mask[:, None] & column_mask[None, :]
    offset = token * stride_token + head[:, None] * head_dim + column[None, :]
    dtype = qkv_ptr.dtype.element_ty
    x1 = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(qkv_ptr + half + offset, mask=mask, other=0.0).to(tl.float32)
    if program < num_q_programs + num_kv_programs:
        if HAS_NORM:
            if program < num_q_programs:
                x1, x2 = _normed(x1, x2, q_norm_ptr, column, column_mask, head_dim, eps)
            else:
                x1, x2 = _normed(x1, x2, k_norm_ptr, column, column_mask, head_dim, eps)
        position = tl.load(positions_ptr + token)
        cos, sin = _cos_sin_of(cos_sin_ptr, position, max_positions, stride_position, column, half)
        y1 = (x1 * cos).to(dtype).to(tl.float32) - (x2 * sin).to(dtype).to(tl.float32)
        x2 = (x2 * cos).to(dtype).to(tl.float32) + (x1 * sin).to(dtype).to(tl.float32)
        x1 = y1
    tl.store(out_ptr + offset, x1.to(dtype), mask=mask)
    tl.store(out_ptr + half + offset, x2.to(dtype), mask=mask)


@triton.jit
def _rope_backward_kernel(
    grad_ptr, grad_qkv_ptr, positions_ptr, cos_sin_ptr, qkv_ptr, q_norm_ptr, k_norm_ptr, partial_ptr,
    tokens, num_heads, num_kv_heads, head_dim, max_positions, stride_token, stride_position, chunk_tokens, eps,
    HAS_NORM: tl.constexpr, WITH_NORMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_N heads of chunk_tokens tokens a program; partial [chunks, programs of axis 1, head_dim] where asked."""
    program = tl.program_id(1)
    num_q_programs, num_kv_programs = tl.cdiv(num_heads, BLOCK_N), tl.cdiv(num_kv_heads, BLOCK_N)
    head, head_mask = _heads_of(program, num_heads, num_kv_heads, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    half = head_dim // 2
    column_mask = column < half
    mask = head_mask[:, None] & column_mask[None, :]
    dtype = grad_ptr.dtype.element_ty
    is_rotated = program < num_q_programs + num_kv_programs
    weight1 = tl.zeros((1, BLOCK_D), tl.float32)
    weight2 = weight1
    if HAS_NORM:
        norm_ptr = k_norm_ptr
        if program < num_q_programs:
            norm_ptr = q_norm_ptr
        weight1 = tl.load(norm_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        weight2 = tl.load(norm_ptr + half + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    sum1 = tl.zeros((BLOCK_D,), tl.float32)
    sum2 = tl.zeros((BLOCK_D,), tl.float32)
    first = tl.program_id(0) * chunk_tokens
    for i in range(0, tl.minimum(tokens - first, chunk_tokens)):
        token = first.to(tl.int64) + i
        offset = token * stride_token + head[:, None] * head_dim + column[None, :]
        g1 = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        g2 = tl.load(grad_ptr + half + offset, mask=mask, other=0.0).to(tl.float32)
        if is_rotated:
            position = tl.load(positions_ptr + token)
            cos, sin = _cos_sin_of(cos_sin_ptr, position, max_positions, stride_position, column, half)
            rotated1 = g1 * cos + g2 * sin
            g2 = g2 * cos - g1 * sin
            g1 = rotated1
            if HAS_NORM:
                x1 = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
                x2 = tl.load(qkv_ptr + half + offset, mask=mask, other=0.0).to(tl.float32)
                squares = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / head_dim
                scale = tl.div_rn(1.0, tl.sqrt_rn(squares + eps))[:, None]
                # The table holds nan past the last column, which must not enter the sums.
                g1 = tl.where(mask, g1, 0.0)
                g2 = tl.where(mask, g2, 0.0)
                x1 *= scale
                x2 *= scale
                products = tl.sum(g1 * weight1 * x1, axis=1) + tl.sum(g2 * weight2 * x2, axis=1)
                mean = (products / head_dim)[:, None]
                if WITH_NORMS:
                    sum1 += tl.sum(g1 * x1, axis=0)
                    sum2 += tl.sum(g2 * x2, axis=0)
                g1 = scale * (g1 * weight1 - x1 * mean)
                g2 = scale * (g2 * weight2 - x2 * mean)
        tl.store(grad_qkv_ptr + offset, g1.to(dtype), mask=mask)
        tl.store(grad_qkv_ptr + half + offset, g2.to(dtype), mask=mask)
    if WITH_NORMS:
        row = partial_ptr + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + program) * head_dim + column
        tl.store(row, sum1, mask=column_mask)
        tl.store(row + half, sum2, mask=column_mask)


def _blocks(num_heads: int, head_dim: int) -> tuple[int, int]:
    """BLOCK_N, BLOCK_D"""
    block_d = triton.next_power_of_2(head_dim // 2)
    return min(triton.next_power_of_2(num_heads), max(1, TILE // block_d)), block_d


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
    out: Tensor | None = None,
) -> None:
    if qkv.numel() == 0:
        return
    block_n, block_d = _blocks(num_heads, head_dim)
    programs = triton.cdiv(num_heads, block_n) + triton.cdiv(num_kv_heads, block_n) * (1 if out is None else 2)
    _rope_kernel[(len(qkv), programs)](
        qkv, qkv if out is None else out, positions, cos_sin, q_norm, k_norm, num_heads, num_kv_heads, head_dim,
        len(cos_sin), qkv.stride(0), cos_sin.stride(0), eps,
        HAS_NORM=q_norm is not None, BLOCK_N=block_n, BLOCK_D=block_d, enable_fp_fusion=False,
    )  # fmt: skip


def rope_backward_triton(
    grad: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    qkv: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    with_norms: bool,
) -> tuple[Tensor, Tensor | None]:
    grad_qkv = torch.empty_like(grad)
    if grad.numel() == 0:
        return grad_qkv, grad.new_zeros(2, head_dim) if with_norms else None
    block_n, block_d = _blocks(num_heads, head_dim)
    q_programs, kv_programs = triton.cdiv(num_heads, block_n), triton.cdiv(num_kv_heads, block_n)
    chunk_tokens = rows_per_chunk(len(grad)) if with_norms else 1
    grid = (triton.cdiv(len(grad), chunk_tokens), q_programs + 2 * kv_programs)
    partial = grad.new_empty(*grid, head_dim, dtype=torch.float32) if with_norms else None
    _rope_backward_kernel[grid](
        grad, grad_qkv, positions, cos_sin, qkv, q_norm, k_norm, partial, len(grad), num_heads, num_kv_heads,
        head_dim, len(cos_sin), grad.stride(0), cos_sin.stride(0), chunk_tokens, eps,
        HAS_NORM=qkv is not None, WITH_NORMS=with_norms, BLOCK_N=block_n, BLOCK_D=block_d, enable_fp_fusion=False,
    )  # fmt: skip
    if partial is None:
        return grad_qkv, None
    of_q, of_k, _ = partial.split([q_programs, kv_programs, kv_programs], dim=1)
    return grad_qkv, torch.stack([of_q.sum((0, 1)), of_k.sum((0, 1))]).to(grad.dtype)


# ---- registered ops

_IMPLEMENTATIONS = {
    "reference": (rope_reference_, rope_backward_reference),
    "cpu": (rope_cpu_, rope_backward_cpu),
    "triton": (rope_triton_, rope_backward_triton),
}


@torch.library.custom_op("lowbit::rope_", mutates_args={"qkv"})
def _rope_(
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


@_rope_.register_fake
def _(qkv, positions, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps) -> None:
    return None


@torch.library.custom_op("lowbit::rope", mutates_args=())
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
) -> Tensor:
    _check(qkv, positions, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm)
    forward, out = _IMPLEMENTATIONS[_implementation("elementwise", qkv)][0], torch.empty_like(qkv)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    forward(qkv, positions, cos_sin, **sizes, q_norm=q_norm, k_norm=k_norm, eps=eps, out=out)
    return out


@_rope.register_fake
def _(qkv, positions, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps) -> Tensor:
    return torch.empty_like(qkv)


@torch.library.custom_op("lowbit::rope_backward", mutates_args=())
def _rope_backward(
    grad: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    qkv: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    with_norms: bool,
) -> tuple[Tensor, Tensor]:
    """qkv comes with the norms alone. Their gradients are [0, head_dim] where nobody wants them."""
    _check(grad.contiguous(), positions, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm)
    backward = _IMPLEMENTATIONS[_implementation("elementwise_backward", grad)][1]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    tensors = (grad.contiguous(), positions, cos_sin, qkv, q_norm, k_norm)
    grad_qkv, grad_norms = backward(*tensors, **sizes, eps=eps, with_norms=with_norms)
    return grad_qkv, grad.new_empty(0, head_dim) if grad_norms is None else grad_norms


@_rope_backward.register_fake
def _(grad, positions, cos_sin, qkv, q_norm, k_norm, num_heads, num_kv_heads, head_dim, eps, with_norms):
    return grad.new_empty(grad.shape), grad.new_empty(2 if with_norms else 0, head_dim)


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    qkv, positions, cos_sin, *ctx.sizes, q_norm, k_norm, ctx.eps = inputs
    ctx.save_for_backward(positions, cos_sin, None if q_norm is None else qkv, q_norm, k_norm)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    with_q, with_k = ctx.needs_input_grad[6:8]
    grad_qkv, grad_norms = _rope_backward(grad, *ctx.saved_tensors, *ctx.sizes, ctx.eps, with_q or with_k)
    grad_q_norm, grad_k_norm = grad_norms[0] if with_q else None, grad_norms[1] if with_k else None
    return grad_qkv, None, None, None, None, None, grad_q_norm, grad_k_norm, None


_rope.register_autograd(_backward, setup_context=_setup_context)


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
    forward = _IMPLEMENTATIONS[_implementation("elementwise", qkv)][0]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    forward(qkv, positions, cos_sin, **sizes, q_norm=q_norm, k_norm=k_norm, eps=eps)


def rope(
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
) -> Tensor:
    """`rope_` into a new tensor, on torch's threads, differentiable by qkv, q_norm and k_norm.

    Arguments and errors are those of rope_. Autograd saves positions and cos_sin, and with norms qkv and the norms.
    returns    [T, (num_heads + 2 * num_kv_heads) * head_dim]: q and k rotated, v copied
    """
    return _rope(qkv, positions, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps)
