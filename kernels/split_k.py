"""What the Triton products of a few rows with quantized weights share: sums cut into parts, and added in order.

    y[m, n] = round(sum_s part[s, m, n]),  s ascending;   part[s] = x[:, k of s] W[:, k of s]^T, float32

Why: a product of 16 rows reads its weight once, so it must keep every multiprocessor loading. 4096 x 4096 weights in
tiles of 32 output features are 128 programs, fewer than an H200's 132 multiprocessors; cut along in_features they are
enough. A second kernel adds the parts, not atomics, whose order changes from run to run. The number of parts depends on
the weight's shape alone: not on the number of rows and not on the device's load, so that the bits of a row never depend
on its batch.
"""

import os
from typing import Any

import torch
from torch import Tensor

from trainer.kernels._triton import tl, triton

SUM_ELEMENTS = 256  # of y that a program adds up; not timed on hardware yet
MAX_SPLITS = 16
MIN_SPAN = 16  # what divides in_features: less would load a scale for every few weights, and spill


def dot_dtype(dtype: torch.dtype) -> "tl.dtype":
    """The operand type of tl.dot; Triton's interpreter multiplies bfloat16 bit patterns, so there it is float32."""
    if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") != "1":
        return tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


def span(in_features: int, group_size: int, block_k: int) -> int:
    """The most neighbouring weights of a row, a power of two, that always share a group and a tile."""
    return min(block_k, group_size & -group_size, in_features & -in_features)


def splits(in_features: int, out_features: int, tile: dict[str, int]) -> tuple[int, int]:
    """Parts of a product, about tile["PROGRAMS"] programs in all, and the features of each, whole tiles."""
    wanted = tile["PROGRAMS"] // -(-out_features // tile["BLOCK_N"])
    blocks = -(-in_features // tile["BLOCK_K"])
    per_split = -(-blocks // max(1, min(wanted, MAX_SPLITS, blocks)))
    return -(-blocks // per_split), per_split * tile["BLOCK_K"]


@triton.jit
def load_pairs(
    x_ptr, stride_x_row, row, num_rows, start, in_features, DOT: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """x[row, start::2] and x[row, start + 1::2] of a tile, each [BLOCK_M, BLOCK_K / 2]"""
    k = start + tl.arange(0, BLOCK_K)
    mask = (row < num_rows)[:, None] & (k < in_features)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x_row + k[None, :], mask=mask, other=0.0).to(tl.float32).to(DOT)
    return tl.split(tl.reshape(x, (row.shape[0], BLOCK_K // 2, 2)))


@triton.jit
def store_split(y_ptr, acc, split, row, feature, num_rows, out_features):
    y_ptrs = y_ptr + (split * num_rows + row).to(tl.int64)[:, None] * out_features + feature[None, :]
    mask = (row < num_rows)[:, None] & (feature < out_features)[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(parts_ptr, y_ptr, numel, SPLITS: tl.constexpr, ELEMENTS: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = element < numel
    total = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * numel + element, mask=mask, other=0.0)
    tl.store(y_ptr + element, total.to(y_ptr.dtype.element_ty), mask=mask)


def launch_split(
    kernel: Any,
    tile: dict[str, int],
    x: Tensor,
    weight: tuple[Tensor | None, ...],
    out_features: int,
    *scalars: int,
    span: int,
    **constants: Any,
) -> Tensor:
    """Run a kernel of products over the parts of in_features, and add them up.

    x        [num_rows <= BLOCK_M, in_features] contiguous
    scalars  what the kernel takes behind the sizes that all have
    returns  [num_rows, out_features] of x's dtype
    """
    num_rows, in_features = x.shape
    num_splits, features_per_split = splits(in_features, out_features, tile)
    y = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    parts = y if num_splits == 1 else torch.empty(num_splits, *y.shape, dtype=torch.float32, device=x.device)
    options = {name: value for name, value in tile.items() if name != "PROGRAMS"}
    kernel[(triton.cdiv(out_features, tile["BLOCK_N"]), num_splits)](
        x, *weight, parts, num_rows, in_features, out_features, *scalars, features_per_split, x.stride(0),
        SPAN=span, **constants, **options, enable_fp_fusion=False,
    )  # fmt: skip
    if num_splits > 1:
        _sum_kernel[(triton.cdiv(y.numel(), SUM_ELEMENTS),)](
            parts, y, y.numel(), SPLITS=num_splits, ELEMENTS=SUM_ELEMENTS
        )
    return y
