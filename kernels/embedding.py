"""Rows of a matrix by id: the embedding of tokens, and the choice of the hidden states whose logits are wanted.

    y[i] = weight[ids[i]]

An id that is no row gives a row of nan, on every device: ids may come from another process's bookkeeping, checking
them would wait for the device, and a nan shows up where a stray read would not.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, kernel
from trainer.kernels._triton import tl, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_H = 1024  # columns a Triton program copies: 8 values a thread


def _check(token_ids: Tensor, weight: Tensor) -> None:
    if weight.ndim != 2 or weight.dtype not in DTYPES or not weight.is_contiguous():
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)} with strides {list(weight.stride())}; embed_tokens takes "
            "contiguous rows [V, H] of float32, bfloat16 or float16; use .contiguous() or .to()"
        )
    if token_ids.ndim != 1 or token_ids.dtype != torch.int64 or not token_ids.is_contiguous():
        raise ValueError(
            f"token_ids is {token_ids.dtype} {list(token_ids.shape)} with strides {list(token_ids.stride())}; "
            "embed_tokens takes contiguous int64 [T]; use .to(torch.int64).contiguous()"
        )
    if token_ids.device != weight.device:
        raise ValueError(f"token_ids is on {token_ids.device} and weight on {weight.device}; use .to()")


def embed_tokens_reference(token_ids: Tensor, weight: Tensor) -> Tensor:
    known = (token_ids >= 0) & (token_ids < weight.shape[0])
    rows = weight.new_full((len(token_ids), weight.shape[1]), torch.nan)
    rows[known] = weight[token_ids[known]]
    return rows


def embed_tokens_cpu(token_ids: Tensor, weight: Tensor) -> Tensor:
    num_rows, size = weight.shape
    num_ids = token_ids.shape[0]
    out = weight.new_empty(num_ids, size)
    row_bytes = size * weight.element_size()
    call(kernel("elementwise", "gather_rows"), weight, num_rows, row_bytes, token_ids, num_ids, out)
    return out


@triton.jit
def _embed_tokens_kernel(
    token_ids_ptr, weight_ptr, out_ptr, num_rows, size, stride_weight_row, stride_out_row, BLOCK_H: tl.constexpr
):
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    token_id = tl.load(token_ids_ptr + position)
    known_size = tl.where((token_id >= 0) & (token_id < num_rows), size, 0)
    row = tl.load(weight_ptr + token_id * stride_weight_row + column, mask=column < known_size, other=float("nan"))
    tl.store(out_ptr + position * stride_out_row + column, row, mask=column < size)


def embed_tokens_triton(token_ids: Tensor, weight: Tensor) -> Tensor:
    num_rows, size = weight.shape
    out = weight.new_empty(len(token_ids), size)
    if out.numel():
        _embed_tokens_kernel[(len(token_ids), triton.cdiv(size, BLOCK_H))](
            token_ids, weight, out, num_rows, size, weight.stride(0), out.stride(0), BLOCK_H=BLOCK_H
        )
    return out


_IMPLEMENTATIONS = {"reference": embed_tokens_reference, "cpu": embed_tokens_cpu, "triton": embed_tokens_triton}


@torch.library.custom_op("lowbit::embed_tokens", mutates_args=())
def _embed_tokens(token_ids: Tensor, weight: Tensor) -> Tensor:
    return embed_tokens(token_ids, weight)


@_embed_tokens.register_fake
def _(token_ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(token_ids.shape[0], weight.shape[1])


def embed_tokens(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a matrix by id. With hidden states [T, H] for the weight, it gathers the rows to compute logits for.

    token_ids  [N] int64, contiguous
    weight     [V, H] float32, bfloat16 or float16, contiguous
    returns    [N, H] of weight's dtype; nan where an id is not in 0..V-1
    raises     ValueError if a shape, dtype, device or stride does not fit
    """
    _check(token_ids, weight)
    implementation = _cpp.choose("elementwise", "cpu" if weight.is_cpu else weight.device.type)
    return _IMPLEMENTATIONS[implementation](token_ids, weight)
