"""W + s B A in float32, rows of it: the weight that merge-aware training rounds; no registered op of its own.

    u[o, i] = (s B)[o, 0] * A[0, i] + (s B)[o, 1] * A[1, i] + ...        s B rounded once, then in this order
    w[o, i] = W[o, i] + u[o, i]

Each product and each sum is rounded to float32, without fused multiply-adds, so an element's bits depend on nothing but
its row of B, its column of A and its W: not on the rows that are merged beside it, on threads, on vectors, or on the
library that happens to multiply matrices. Codes of w are therefore the same in a training step, at its recomputation in
backward, and in an export on another machine. A library's product of the same factors differs in its last bits from
shape to shape, and where w lies between two codes the last bit decides.

Two roundings a term cost twice the instructions of a fused sum; they are still 4 % of the products of a step.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call_beside_torch, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = {"BLOCK_M": 16, "BLOCK_N": 128}  # weights that a Triton program merges; not timed on hardware yet
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ reads; see cpp/lowbit.h


# ---- reference


def merge_rows_reference(weight: Tensor, lora_A: Tensor, scaled_B: Tensor, out: Tensor) -> None:
    update = torch.zeros_like(out)
    for row, column in zip(lora_A, scaled_B.T, strict=True):
        update.add_(column[:, None] * row)
    torch.add(weight.float(), update, out=out)


# ---- C++


def merge_rows_cpu(weight: Tensor, lora_A: Tensor, scaled_B: Tensor, out: Tensor) -> None:
    if weight.dtype not in _DTYPE_IDS:
        weight = weight.float()
    sizes = *weight.shape, len(lora_A)
    arguments = _DTYPE_IDS[weight.dtype], weight.contiguous(), lora_A.contiguous(), scaled_B.contiguous(), out
    call_beside_torch(kernel("merged_weight", "merge_rows"), *arguments, *sizes)


# ---- Triton


@triton.jit
def _merge_rows_kernel(
    weight_ptr, lora_A_ptr, scaled_B_ptr, out_ptr, num_rows, in_features, rank,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (column < in_features)[None, :]
    update = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a_ptr, b_ptr = lora_A_ptr + column, scaled_B_ptr + row * rank
    for _ in range(0, rank):
        b = tl.load(b_ptr, mask=row < num_rows, other=0.0)
        a = tl.load(a_ptr, mask=column < in_features, other=0.0)
        update += b[:, None] * a[None, :]
        a_ptr, b_ptr = a_ptr + in_features, b_ptr + 1
    offset = row[:, None] * in_features + column[None, :]
    weight = tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, weight + update, mask=mask)


def merge_rows_triton(weight: Tensor, lora_A: Tensor, scaled_B: Tensor, out: Tensor) -> None:
    if out.numel() == 0:
        return
    tile = tiles("merge_rows", out.device, TILE, itemsize=weight.element_size())
    grid = triton.cdiv(weight.shape[0], tile["BLOCK_M"]), triton.cdiv(weight.shape[1], tile["BLOCK_N"])
    tensors = weight.contiguous(), lora_A.contiguous(), scaled_B.contiguous(), out
    _merge_rows_kernel[grid](*tensors, *weight.shape, len(lora_A), **tile, enable_fp_fusion=False)


# ---- what the rest of the product calls

_IMPLEMENTATIONS = {"reference": merge_rows_reference, "cpu": merge_rows_cpu, "triton": merge_rows_triton}


def merge_rows(weight: Tensor, lora_A: Tensor, scaled_B: Tensor, out: Tensor) -> None:
    """Overwrite out with weight + scaled_B lora_A; autograd does not see it.

    weight    [num_rows, in_features] float32, bfloat16 or float16: some rows of W
    lora_A    [rank, in_features] float32; rank 0 leaves weight as it is
    scaled_B  [num_rows, rank] float32: the same rows of s B
    out       [num_rows, in_features] float32, contiguous
    raises    ValueError if a shape, dtype or device does not fit
    """
    _check(weight, lora_A, scaled_B, out)
    implementation = _cpp.choose("merged_weight", "cpu" if out.is_cpu else out.device.type)
    with torch.no_grad():
        _IMPLEMENTATIONS[implementation](weight, lora_A, scaled_B, out)


def _check(weight: Tensor, lora_A: Tensor, scaled_B: Tensor, out: Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}; give [num_rows, in_features] of {DTYPES}")
    (num_rows, in_features), rank = weight.shape, lora_A.shape[0]
    for name, tensor, shape in (
        ("lora_A", lora_A, [rank, in_features]),
        ("scaled_B", scaled_B, [num_rows, rank]),
        ("out", out, [num_rows, in_features]),
    ):
        if list(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device != weight.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; a weight {list(weight.shape)} on "
                f"{weight.device} with rank {rank} needs float32 {shape} there"
            )
    if not out.is_contiguous():
        raise ValueError(f"out has strides {list(out.stride())}; give contiguous rows")
