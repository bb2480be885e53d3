"""Double quantization: the scales of a 4-bit weight in 8 bits (QLoRA, arXiv:2305.14314, section 3).

The scales, minus their mean, are cut into nested blocks of 256 on the signed dynamic map of arXiv:2110.02861:
    absmax[b] = DYNAMIC_MAP[codes[b]] * nested_absmax[b // 256] + nested_offset      (two roundings, no fused multiply)
The bytes are those of bitsandbytes. Any device; the kernels decode scales themselves (`load_absmax` on GPUs).
"""

import functools

import torch
from torch import Tensor

from trainer.kernels._triton import tl, triton

NESTED_BLOCK_SIZE = 256
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


DYNAMIC_MAP = _dynamic_map()


@functools.cache
def dynamic_map(device: torch.device) -> Tensor:
    """[256] float32 on a device"""
    return DYNAMIC_MAP.to(device)


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
    return codes.view(-1)[: absmax.numel()].clone(), nested_absmax, offset  # files hold whole storages only


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
    return dynamic_map(codes.device)[codes.int()] * scales + nested_offset


@triton.jit
def load_absmax(absmax_ptr, nested_absmax_ptr, nested_offset_ptr, map_ptr, block, mask, DOUBLE_QUANT: tl.constexpr):
    """The scales of blocks `block`, as float32."""
    if DOUBLE_QUANT:
        code = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        nested = tl.load(nested_absmax_ptr + block // 256, mask=mask, other=0.0)
        absmax = tl.load(map_ptr + code) * nested + tl.load(nested_offset_ptr)
    else:
        absmax = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    return absmax
