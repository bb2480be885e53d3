"""Keys and values of training against what the paged cache of the server gives back."""

import pytest
import torch

from trainer.kernels.fake_quant_kv import fake_quant_kv
from trainer.kernels.kv_cache import KVLayer, gather_kv, write_kv_reference

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24}


def make_qkv(tokens: int = 33, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, 8 * 24, generator=generator) * torch.logspace(-2, 2, tokens)[:, None]
    qkv[3] = 0
    return qkv.to(dtype)


def through_the_cache(qkv: torch.Tensor) -> torch.Tensor:
    """Keys and values of the 33 tokens of one sequence, in three blocks of an INT8 cache; [T, 4 * 24] float32"""
    shape = 3, SIZES["num_kv_heads"], 16
    codes = [torch.zeros(*shape, 24, dtype=torch.int8) for _ in range(2)]
    layer = KVLayer(*codes, *(torch.zeros(shape) for _ in range(2)))
    write_kv_reference(qkv, layer, torch.arange(len(qkv)), num_heads=SIZES["num_heads"])
    k, v = gather_kv(layer, torch.arange(3), len(qkv))
    return torch.cat([k.flatten(1), v.flatten(1)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_cache_gives_back(dtype: torch.dtype) -> None:
    qkv = make_qkv(dtype=dtype)
    got = fake_quant_kv(qkv, **SIZES)
    assert torch.equal(got[:, : 4 * 24], qkv[:, : 4 * 24])
    assert torch.equal(got[:, 4 * 24 :], through_the_cache(qkv).to(dtype))
    assert not torch.equal(got, qkv)


def test_the_gradient_passes_through() -> None:
    qkv = make_qkv().requires_grad_()
    grad = torch.randn(qkv.shape)
    fake_quant_kv(qkv, **SIZES).backward(grad)
    assert torch.equal(qkv.grad, grad)


def test_no_tokens_and_no_numbers() -> None:
    assert fake_quant_kv(torch.empty(0, 8 * 24), **SIZES).shape == (0, 8 * 24)
    qkv = make_qkv()
    qkv[5, 4 * 24 + 1] = float("inf")  # the first key head of token 5
    got = fake_quant_kv(qkv, **SIZES)
    assert got[5, 4 * 24 : 5 * 24].isnan().all() and got.isnan().sum() == 24


def test_widths_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"qkv is \[3, 100\]; 4 heads and twice 2 KV heads of 24 are \[T, 192\]"):
        fake_quant_kv(torch.ones(3, 100), **SIZES)
