"""SwiGLU (Shazeer, arXiv:2002.05202, equation 6) over one tensor that holds both halves.

    gate_up   [T, 2F], the product with the stacked weights:   gate [0, F) | up [F, 2F)
    y         round(silu(gate)) * up          silu(g) = g / (1 + exp(-g)) in float32

silu and the product are each rounded to the dtype, where transformers' LlamaMLP rounds.
"""

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call, kernel
from trainer.kernels._triton import tl, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_F = 1024  # columns a Triton program computes: 8 values a thread
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


def _check(gate_up: Tensor) -> None:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in DTYPES or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up is {gate_up.dtype} {list(gate_up.shape)} with strides {list(gate_up.stride())}; swiglu takes "
            "contiguous rows [T, 2F], gate before up, of float32, bfloat16 or float16; use .contiguous() or .to()"
        )


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def swiglu_cpu(gate_up: Tensor) -> Tensor:
    if gate_up.dtype == torch.float16:
        return swiglu_reference(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    call(kernel("elementwise", "swiglu"), _DTYPE_IDS[gate_up.dtype], gate_up, out, rows, size)
    return out


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, size, stride_row, stride_out_row, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = column < size
    offset = row * stride_row + column
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + size + offset, mask=mask, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * stride_out_row + column, (silu * up).to(dtype), mask=mask)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if out.numel():
        _swiglu_kernel[(rows, triton.cdiv(size, BLOCK_F))](
            gate_up, out, size, gate_up.stride(0), out.stride(0), BLOCK_F=BLOCK_F, enable_fp_fusion=False
        )
    return out


_IMPLEMENTATIONS = {"reference": swiglu_reference, "cpu": swiglu_cpu, "triton": swiglu_triton}


@torch.library.custom_op("lowbit::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor) -> Tensor:
    return swiglu(gate_up)


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202, equation 6).

    gate_up  [T, 2F] float32, bfloat16 or float16, contiguous; gate is the first half of a row
    returns  [T, F] of gate_up's dtype; a row's bits do not depend on the other rows
    raises   ValueError if the shape, dtype or stride does not fit
    """
    _check(gate_up)
    return _IMPLEMENTATIONS[_cpp.choose("elementwise", "cpu" if gate_up.is_cpu else gate_up.device.type)](gate_up)
