"""Stacks of frozen weights: decoded as their kernels decode, multiplied as one matrix."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.kernels import codebook4, codebook_bits, frozen_weight
from trainer.kernels.double_quant import quantize_absmax
from trainer.kernels.frozen_weight import KINDS, FrozenWeight, multiply, multiply_transposed
from trainer.kernels.int4 import int4_dequantize, int4_quantize
from trainer.kernels.int8 import int8_dequantize, int8_quantize

DTYPES = [torch.float32, torch.bfloat16]


def packed(kind: str, dense: Tensor, *, double_quant: bool = True) -> tuple[FrozenWeight, Callable]:
    """A weight of this kind near `dense`, and what its own kernel decodes it to."""
    sizes = tuple(dense.shape)
    match kind:
        case "nf4" | "fp4":
            codes, absmax = codebook4.codebook_quantize(dense, codebook=kind, block_size=32)
            tensors = (codes, *(quantize_absmax(absmax) if double_quant else (absmax, None, None)))
            weight = codebook4.CodebookWeight(*tensors, *sizes, 32, kind)
            return FrozenWeight(kind, tensors, *sizes, 32), lambda dtype: codebook4.codebook_dequantize(
                weight, dtype=dtype
            )
        case "nf3" | "nf2":
            codes, absmax = codebook_bits.bits_quantize(dense, codebook=kind, block_size=32)
            tensors = (codes, *(quantize_absmax(absmax) if double_quant else (absmax, None, None)))
            weight = codebook_bits.BitsWeight(*tensors, *sizes, 32, kind)
            return FrozenWeight(kind, tensors, *sizes, 32), lambda dtype: codebook_bits.bits_dequantize(
                weight, dtype=dtype
            )
        case "int4":
            weight = int4_quantize(dense, group_size=32, symmetric=not double_quant)
            tensors = (weight.packed, weight.scales, weight.zeros, weight.g_idx)
            return FrozenWeight(kind, tensors, *sizes, 32), lambda dtype: int4_dequantize(weight, dtype=dtype)
        case "int8":
            weight = int8_quantize(dense, group_size=sizes[1])
            tensors = weight.packed, weight.scales
            return FrozenWeight(kind, tensors, *sizes, sizes[1]), lambda dtype: int8_dequantize(weight, dtype=dtype)
    return FrozenWeight(kind, (dense,), *sizes), dense.to


def matrix(out_features: int, in_features: int) -> Tensor:
    generator = torch.Generator().manual_seed(out_features)
    return torch.randn(out_features, in_features, generator=generator) * 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_as_its_own_kernel(kind: str, double_quant: bool, dtype: torch.dtype) -> None:
    weight, dequantize = packed(kind, matrix(5, 96), double_quant=double_quant)
    decoded = weight.decoded(dtype)
    assert decoded.kind == ("dense" if kind == "dense" else "decoded")
    assert torch.equal(decoded.tensors[0], dequantize(dtype))
    tensors, layout = frozen_weight.flatten([weight, decoded])
    one, other = frozen_weight.unflatten(tensors, layout)
    assert (one.kind, one.out_features, one.in_features, one.span) == (kind, 5, 96, weight.span)
    assert [a is b for a, b in zip(one.tensors, weight.tensors, strict=True)] == [True] * len(weight.tensors)
    assert other.tensors[0] is decoded.tensors[0] and frozen_weight.out_features(layout) == (5, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kinds",
    [("nf4", "nf4"), ("nf4", "dense", "int8"), ("nf4", "nf2", "nf3"), ("fp4",), ("dense", "decoded"), ("int4",)],
)
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 40])  # up to 8 the codebooks are decoded beside the sums
def test_products_are_those_of_the_stacked_matrix(rows: int, kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    weights, stack = [], []
    for i, kind in enumerate(kinds):
        weight, dequantize = packed(kind, matrix(7 + 4 * i, 96))
        weights.append(weight)
        stack.append(dequantize(dtype))
    dense = torch.cat(stack).double()
    x, grad = matrix(rows + 1, 96)[:rows].to(dtype), matrix(rows + 1, len(dense))[:rows].to(dtype)
    y, grad_x = multiply(x, weights), multiply_transposed(grad, weights)
    assert y.dtype == grad_x.dtype == dtype and y.is_contiguous()
    # float32 sums of 96 terms below 0.5; a bfloat16 result is rounded once, by 2^-9 of its size.
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 2**-8}
    torch.testing.assert_close(y.double(), x.double() @ dense.T, **tolerance)
    torch.testing.assert_close(grad_x.double(), grad.double() @ dense, **tolerance)


@pytest.mark.parametrize("rows", [3, 40])
def test_a_bias_is_rounded_as_the_server_rounds_it(rows: int) -> None:
    """nn.Linear's bias is part of the sum; that of a packed layer is added to the rounded product."""
    x, dense = matrix(rows, 96).bfloat16() * 10, matrix(33, 96).bfloat16()
    bias = matrix(33, 1)[:, 0].bfloat16()
    once = torch.nn.functional.linear(x, dense, bias)
    twice = torch.nn.functional.linear(x, dense) + bias
    assert not torch.equal(once, twice)
    assert torch.equal(multiply(x, [FrozenWeight.dense(dense)], bias), once)
    assert torch.equal(multiply(x, [FrozenWeight("decoded", (dense,), 33, 96)], bias), twice)
    weight, dequantize = packed("nf4", dense)
    exact = x.double() @ dequantize(torch.bfloat16).double().T
    # At most a place (2^-8) for each of the two roundings, of the product and of the sum.
    error = (multiply(x, [weight], bias).double() - exact - bias.double()).abs()
    assert (error <= 2**-8 * (exact.abs() + (exact + bias.double()).abs())).all()


def test_rows_of_one_tensor_are_not_copied() -> None:
    base = matrix(12, 96).bfloat16()
    above, below, apart = (FrozenWeight.dense(rows) for rows in (base[:5], base[5:9], base[10:]))
    with frozen_weight._stacked([above, below], torch.bfloat16) as dense:
        assert dense.data_ptr() == base.data_ptr() and torch.equal(dense, base[:9])
    for weights in ([below, above], [below, apart]):  # the other order, a gap
        with frozen_weight._stacked(weights, torch.bfloat16) as dense:
            assert not base.data_ptr() <= dense.data_ptr() < base.data_ptr() + base.nbytes
            assert torch.equal(dense, torch.cat([weight.tensors[0] for weight in weights]))
    with frozen_weight._stacked([above, below], torch.float32) as dense:  # another dtype
        assert torch.equal(dense, base[:9].float())
    columns = FrozenWeight.dense(base[:, :64])  # rows with gaps
    with frozen_weight._stacked([columns], torch.bfloat16) as dense:
        assert torch.equal(dense, base[:, :64])


def test_the_buffer_is_used_again_and_by_one_thread_at_a_time() -> None:
    small, large = packed("nf4", matrix(5, 96))[0], packed("nf4", matrix(50, 96))[0]
    with torch.inference_mode():
        multiply(matrix(20, 96), [large])
    with frozen_weight._stacked([large], torch.float32) as first:
        address = first.data_ptr()
        with frozen_weight._stacked([small], torch.float32) as inner:
            assert inner.data_ptr() != address
    with frozen_weight._stacked([large], torch.float32), frozen_weight._stacked([large], torch.float32):
        pass
    # Two buffers are free now, and both fit: whoever comes gets one of them, and nothing is allocated.
    free = {buffer.data_ptr() for buffer in frozen_weight._free}
    with frozen_weight._stacked([small], torch.bfloat16) as again:
        assert again.data_ptr() in free

    x = matrix(20, 96)
    want, wrong = multiply(x, [large]), []

    def compute() -> None:
        wrong.extend(1 for _ in range(50) if not torch.equal(multiply(x, [large]), want))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_buffer_is_free_again_after_an_error() -> None:
    weight, _ = packed("nf4", matrix(5, 96))
    multiply(matrix(20, 96), [weight])
    before = len(frozen_weight._free)
    damaged = FrozenWeight("nf4", weight.tensors, 6, 96, 32)
    with pytest.raises(ValueError, match=r"packed is torch.uint8 .* a \[6, 96\] weight"):
        multiply(matrix(20, 96), [damaged])
    assert len(frozen_weight._free) == before


def test_errors() -> None:
    with pytest.raises(ValueError, match="kind='int3' is no storage .* 'nf4'"):
        FrozenWeight("int3", (torch.ones(2, 2),), 2, 2)
    with pytest.raises(ValueError, match=r"a dense weight of shape \[2, 3\] was declared as \[3, 2\]"):
        FrozenWeight("dense", (torch.ones(2, 3),), 3, 2)
