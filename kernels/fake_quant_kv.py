"""Keys and values as an INT8 KV cache gives them back, for training a model that is served from one.

Formula, for each token and KV head, keys and values apart (kernels/kv_cache.py):
    scale = max |x| / 127;  code = rint(x / scale);  x' = code * scale, rounded once to the dtype of x
Attention then reads x' in the place of x, queries stay. The largest value is a code, so nothing is clamped and the
gradient passes through as it is (arXiv:1308.3432). A server that keeps codes multiplies them before it scales; the two
differ by the rounding of x' to 16 bits, and in float32 by the order of two products.

It stands between rope and attention, where a cache is written: trainer/fused_decoder.py calls it there.
"""

import torch
from torch import Tensor

from trainer.kernels.fake_quant import Grid, fake_quant


def fake_quant_kv(qkv: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Queries as they are, keys and values rounded to 8 bits with a scale for each token and head.

    qkv      [T, (num_heads + 2 * num_kv_heads) * head_dim] float32, bfloat16 or float16, after rope
    returns  a new tensor like qkv; a head of a token with inf or nan is nan
    raises   ValueError if the widths do not fit
    """
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        raise ValueError(
            f"qkv is {list(qkv.shape)}; {num_heads} heads and twice {num_kv_heads} KV heads of {head_dim} are "
            f"[T, {width}]"
        )
    q, kv = qkv.split([num_heads * head_dim, 2 * num_kv_heads * head_dim], dim=1)
    heads = kv.reshape(-1, 2 * num_kv_heads, head_dim)  # [T, 2 * num_kv_heads, head_dim]
    return torch.cat([q, fake_quant(heads, Grid.int8()).flatten(1)], dim=1)
