"""Linear layers for serving: exact weights, roundings, and rows whose bits do not depend on their batch."""

import dataclasses
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _huge_pages, _tape
from trainer.kernels.codebook4 import CodebookWeight, codebook_dequantize_reference, codebook_quantize_reference
from trainer.kernels.codebook4_linear import codebook_linear
from trainer.kernels.double_quant import quantize_absmax
from trainer.kernels.int4 import Int4Weight, int4_dequantize_reference, int4_quantize
from trainer.kernels.int8 import Int8Weight, int8_quantize
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.kernels.packed_linear import (
    FREE_ORDER_ROWS,
    LinearWeight,
    decode,
    pack_codebook_linear,
    pack_integer_linear,
    pack_linear,
    packed_linear,
    place_linears,
)

DTYPES = [torch.float32, torch.bfloat16]
KINDS = ["dense", "nf4", "fp4", "int4"]
# out_features, in_features, block_size: a panel and more; blocks that cross rows (96, 160, 1536 in 4096); in_features
# that is no multiple of 32, odd, below one vector; fewer features than a tile; one feature
SHAPES = [(50, 576, 64), (17, 96, 64), (7, 48, 64), (97, 160, 64), (5, 1536, 4096), (13, 33, 32), (1, 7, 32)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codebook_weight(
    out_features: int,
    in_features: int,
    block_size: int,
    *,
    codebook: str = "nf4",
    double_quant: bool = True,
    seed: int = 0,
) -> CodebookWeight:
    dense = random(out_features, in_features, seed=seed) * 0.1
    packed, absmax = codebook_quantize_reference(dense, codebook=codebook, block_size=block_size)
    scales = quantize_absmax(absmax) if double_quant else (absmax, None, None)
    return CodebookWeight(packed, *scales, out_features, in_features, block_size, codebook)


def int4_weight(
    out_features: int, in_features: int, *, group_size: int | None = None, seed: int = 0, symmetric: bool = True
) -> Int4Weight:
    """Every code 0..15 is there: a divisor of 7.5 rounds the lowest weights to -8."""
    dense = random(out_features, in_features, seed=seed) * 0.1
    divisor = 7.5 if symmetric else 7.0
    return int4_quantize(dense, group_size=group_size or in_features, symmetric=symmetric, divisor=divisor)


def int8_weight(out_features: int, in_features: int, *, group_size: int | None = None, seed: int = 0) -> Int8Weight:
    return int8_quantize(random(out_features, in_features, seed=seed) * 0.1, group_size=group_size or in_features)


def act_order(weight: Int4Weight, *, seed: int = 0) -> Int4Weight:
    """The same codes with features shuffled over the groups, as GPTQ's act-order leaves them."""
    order = torch.randperm(weight.in_features, generator=torch.Generator().manual_seed(seed))
    g_idx = (torch.arange(weight.in_features) // weight.group_size)[order].to(torch.int32)
    sizes = weight.out_features, weight.in_features, weight.group_size
    return Int4Weight(weight.packed, weight.scales, weight.zeros, g_idx, *sizes)


def weights(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[LinearWeight, Tensor]:
    """A packed weight and the dense one that training multiplies by."""
    if kind in ("nf4", "fp4"):
        weight = codebook_weight(*shape, codebook=kind)
        return pack_codebook_linear([weight], dtype=dtype), codebook_dequantize_reference(weight, dtype=dtype)
    if kind == "int4":
        weight = int4_weight(*shape[:2], group_size=32 if shape[1] % 32 == 0 else None)
        packed = pack_integer_linear([weight], dtype=dtype, rounds_input=False)
        return packed, int4_dequantize_reference(weight, dtype=dtype)
    dense = random(*shape[:2])
    return pack_linear(dense, dtype=dtype), dense.to(dtype)


def expected(x: Tensor, dense: Tensor, bias: Tensor | None, kind: str, out_dtype: torch.dtype) -> Tensor:
    """Sums in float64, rounded where training rounds."""
    y = x.double() @ dense.double().T
    if kind in ("nf4", "fp4") and out_dtype == x.dtype:
        y = y.to(out_dtype)
    return (y if bias is None else (y.double() + bias.double())).to(out_dtype)


def assert_equal_but_for_order(got: Tensor, want: Tensor, x: Tensor, dense: Tensor) -> None:
    """float32 sums in another order differ by about sqrt(K) / 2 ulp of the absolute terms' sum, 2^-20 is ample for our
    K; where such sums straddle a rounding boundary of bfloat16, y (and y + bias) may move by one ulp, 2^-7 of it."""
    terms = (x.double().abs() @ dense.double().abs().T).max().item()
    rtol = 2**-7 if got.dtype == torch.bfloat16 else 0.0
    assert got.dtype == want.dtype
    # With cancellation by the bias, one ulp of the rounded y exceeds one ulp of the result.
    atol = terms * 2**-20 + (2**-8 * want.double().abs().max().item() if got.dtype == torch.bfloat16 else 0.0)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    if got.dtype == torch.bfloat16:
        assert (got != want).double().mean() < 0.02  # such places are rare


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def cpp() -> None:
    if _cpp.choose("packed_linear", "cpu") != "cpu":
        pytest.skip("no C++ compiler here")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
class TestAgainstFloat64:
    @pytest.mark.parametrize("rows", [1, 6, 13])  # decoded in registers, the same with a wide tile, through a panel
    def test_values(self, kind: str, shape: tuple[int, int, int], dtype: torch.dtype, rows: int) -> None:
        weight, dense = weights(kind, shape, dtype)
        x, bias = random(rows, shape[1], seed=1).to(dtype), random(shape[0], seed=2).to(dtype)
        for b in (None, bias):
            for out_dtype in {dtype, torch.float32}:
                got = packed_linear(x, weight, b, out_dtype=out_dtype)
                assert_equal_but_for_order(got, expected(x, dense, b, kind, out_dtype), x, dense)

    def test_dequantize_is_exact(self, kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        weight, dense = weights(kind, shape, dtype)
        assert torch.equal(weight.dequantize(), dense)
        table = kind != "dense" and (shape[1] % 32 == 0 or _cpp.choose("packed_linear", "cpu") != "cpu")
        facts = weight.out_features, weight.in_features, weight.kind, weight.dtype, bool(weight.decoded)
        decoded = kind != "dense" and not table
        assert facts == (*shape[:2], "codebook" if table else "dense", dtype, decoded)

    def test_the_reference_reads_the_same_weight(
        self, kind: str, shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, bias = random(5, shape[1], seed=1).to(dtype), random(shape[0], seed=2).to(dtype)
        packed, dense = weights(kind, shape, dtype)
        monkeypatch.setenv("LOWBIT_KERNELS", "reference")
        original, _ = weights(kind, shape, dtype)
        assert original.weight is None and torch.equal(original.dequantize(), dense)
        for weight in (packed, original):
            got = packed_linear(x, weight, bias)
            assert_equal_but_for_order(got, expected(x, dense, bias, kind, dtype), x, dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_in_every_batch(kind: str, dtype: torch.dtype, threads: Callable, cpp: None) -> None:
    shape = (205, 1056, 32)  # features and k that fill no tile, panel or chunk
    weight, _ = weights(kind, shape, dtype)
    bias = random(shape[0], seed=2).to(dtype)
    x = random(513, shape[1], seed=1).to(dtype)
    threads(1)
    full = packed_linear(x, weight, bias)
    for num_threads in (1, 2):
        threads(num_threads)
        for rows in (*range(1, 41), 100, 513):
            assert torch.equal(packed_linear(x[:rows], weight, bias), full[:rows]), (num_threads, rows)
        # The same row elsewhere in another batch
        assert torch.equal(packed_linear(x[7:20].flip(0).contiguous(), weight, bias), full[7:20].flip(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_features_are_the_same_bits_in_every_stack(dtype: torch.dtype, cpp: None) -> None:
    """A fused q, k, v gives what three layers give; so does each tensor-parallel slice of a weight."""
    parts = [codebook_weight(n, 192, 64, double_quant=n != 64, seed=n) for n in (70, 64, 1)]
    x = random(3, 192, seed=1).to(dtype)
    alone = [packed_linear(x, pack_codebook_linear([part], dtype=dtype)) for part in parts]
    assert torch.equal(packed_linear(x, pack_codebook_linear(parts, dtype=dtype)), torch.cat(alone, 1))
    dense = [random(n, 192, seed=n) for n in (70, 64, 1)]
    alone = [packed_linear(x, pack_linear(part, dtype=dtype)) for part in dense]
    assert torch.equal(packed_linear(x, pack_linear(dense, dtype=dtype)), torch.cat(alone, 1))


def test_original_layout_stacks_parts_that_end_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", "reference")
    x = random(3, 96, seed=1)
    for rows in ((1, 3), (2, 4)):  # 96 and 288 weights do not fill blocks of 64, 192 and 384 do
        parts = [codebook_weight(n, 96, 64, seed=n) for n in rows]
        weight = pack_codebook_linear(parts, dtype=torch.float32)
        assert len(weight.originals) == (2 if rows == (1, 3) else 1)
        dense = torch.cat([codebook_dequantize_reference(part, dtype=torch.float32) for part in parts])
        assert torch.equal(weight.dequantize(), dense)
        torch.testing.assert_close(packed_linear(x, weight), x @ dense.T, rtol=1e-5, atol=1e-5)  # summation order


def test_equals_the_trained_layers(cpp: None) -> None:
    """nn.Linear and QuantLinear's kernel in bfloat16: one ulp apart at most, where sums of another order do."""
    weight = codebook_weight(192, 576, 64)
    x = random(40, 576, seed=1).bfloat16()
    bias = random(192, seed=2).bfloat16()
    trained = codebook_linear(x, weight) + bias
    dense = random(192, 576).bfloat16()
    for got, want in (
        (packed_linear(x, pack_codebook_linear([weight], dtype=x.dtype), bias), trained),
        (packed_linear(x, pack_linear(dense, dtype=x.dtype), bias), torch.nn.functional.linear(x, dense, bias)),
    ):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * want.abs().max().item() / 4)
        assert (got != want).double().mean() < 0.02  # ties and near-ties of the rounding


def test_bias_is_rounded_as_in_training(cpp: None) -> None:
    """1 + 2^-9 rounds to 1 in bfloat16, and 2^-9 more makes 1 + 2^-8, a tie that goes to even 1; rounded once, the sum
    1 + 2^-8 + 2^-10 of a dense layer is above the tie."""
    x = torch.tensor([[1.0, 2**-9 + 2**-10, *[0.0] * 30]]).bfloat16()
    bias = torch.tensor([2**-9]).bfloat16()
    ones = torch.ones(1, 32)
    packed, absmax = codebook_quantize_reference(ones, codebook="nf4", block_size=32)
    nf4 = pack_codebook_linear([CodebookWeight(packed, absmax, None, None, 1, 32, 32)], dtype=torch.bfloat16)
    assert packed_linear(x, pack_linear(ones, dtype=torch.bfloat16), bias).item() == 1 + 2**-7
    assert packed_linear(x, nf4, bias).item() == 1
    # In float32 nothing is rounded.
    assert packed_linear(x, nf4, bias, out_dtype=torch.float32).item() == 1 + 2**-8 + 2**-10


def test_long_k_and_many_rows(cpp: None) -> None:
    """More than a panel and a block of rows hold: 14336 columns as in a model of 8 B parameters."""
    weight = codebook_weight(20, 14336, 64)
    dense = codebook_dequantize_reference(weight, dtype=torch.bfloat16)
    packed = pack_codebook_linear([weight], dtype=torch.bfloat16)
    x = random(70, 14336, seed=1).bfloat16()
    got = packed_linear(x, packed)
    assert_equal_but_for_order(got, expected(x, dense, None, "nf4", torch.bfloat16), x, dense)
    assert torch.equal(packed_linear(x[69:], packed), got[69:])


def test_values_that_are_not_finite_stay_in_their_row(cpp: None) -> None:
    weight, _ = weights("dense", (8, 40, 32), torch.bfloat16)
    x = random(6, 40, seed=1).bfloat16()
    clean = packed_linear(x, weight)
    x[2, 39], x[4, 0] = float("nan"), float("inf")
    got = packed_linear(x, weight)
    assert got[2].isnan().all() and not got[4].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


def test_no_rows_and_no_copy(cpp: None) -> None:
    dense = random(8, 64).bfloat16()
    weight = pack_linear(dense, dtype=torch.bfloat16)
    assert weight.weight.data_ptr() == dense.data_ptr()  # a tied embedding is held once
    assert weight.nbytes == dense.nbytes
    assert packed_linear(dense[:0], weight).shape == (0, 8)
    # 4 bits a weight and one float32 scale per 64
    assert pack_codebook_linear([codebook_weight(8, 64, 64)], dtype=torch.bfloat16).nbytes == 8 * 64 // 2 + 8 * 4


def test_places_hold_the_same_weights(cpp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In reading order, in one piece of memory that begins at a 2 MB page; dense weights stay where they are."""
    packed = [
        pack_codebook_linear([codebook_weight(2048, 1056, 32, seed=seed)], dtype=torch.bfloat16) for seed in range(2)
    ]
    packed.append(pack_codebook_linear([codebook_weight(7, 96, 32)], dtype=torch.bfloat16))
    dense = pack_linear(random(8, 64), dtype=torch.bfloat16)
    want, address = [weight.dequantize() for weight in packed], dense.weight.data_ptr()
    place_linears([*packed, dense])
    for weight, values in zip(packed, want, strict=True):
        assert torch.equal(weight.dequantize(), values)
    tensors = [tensor for weight in packed for tensor in weight.tensors()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert addresses == sorted(addresses) and all(at % _huge_pages.ALIGN_BYTES == 0 for at in addresses)
    if hasattr(_huge_pages.mmap, "MADV_HUGEPAGE"):
        assert addresses[0] % _huge_pages.PAGE_BYTES == 0
    assert addresses[-1] - addresses[0] < sum(tensor.nbytes + 64 for tensor in tensors)
    assert dense.weight.data_ptr() == address
    # Elsewhere than on Linux the memory is ordinary.
    monkeypatch.delattr(_huge_pages.mmap, "MADV_HUGEPAGE", raising=False)
    place_linears(packed)
    assert all(torch.equal(weight.dequantize(), values) for weight, values in zip(packed, want, strict=True))
    place_linears([])


def test_a_tape_replays_with_new_inputs(cpp: None) -> None:
    weight, _ = weights("nf4", (50, 576, 64), torch.bfloat16)
    x = random(2, 576, seed=1).bfloat16()
    tape = _tape.Tape()
    with tape.record():
        y = packed_linear(x, weight)
    x.copy_(random(2, 576, seed=2))
    tape.replay()
    assert torch.equal(y, packed_linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariance_may_be_waived(dtype: torch.dtype, cpp: None) -> None:
    weight, dense = weights("nf4", (50, 576, 64), dtype)
    x = random(FREE_ORDER_ROWS, 576, seed=1).to(dtype)
    got = packed_linear(x, weight, batch_invariant=False)
    assert_equal_but_for_order(got, expected(x, dense, None, "nf4", dtype), x, dense)
    alone = [packed_linear(row, weight, batch_invariant=False) for row in x.split(1)]
    if dtype == torch.float32:  # else the flag, and the tests of invariance, would mean nothing; bfloat16 rounds it off
        assert not torch.equal(got, torch.cat(alone))
    assert torch.equal(packed_linear(x, weight), torch.cat(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_float16_runs_the_reference(kind: str) -> None:
    weight, dense = weights(kind, (50, 576, 64), torch.float16)
    x, bias = random(5, 576, seed=1).half(), random(50, seed=2).half()
    want = expected(x, dense, bias, kind, torch.float16)
    # one rounding of y and one of the sum, 2^-11 each, of values up to the largest
    scale = want.abs().max().item()
    torch.testing.assert_close(packed_linear(x, weight, bias), want, rtol=2**-10, atol=2**-10 * scale)


# ---- INT4 and INT8

MIXED = "their parts are of several codebooks"
NO_TABLE = "8-bit codes, zero points or act-order have no table of 16 values"


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_groups_of_several_sizes_stack_exactly(dtype: torch.dtype, cpp: None) -> None:
    """The look-up's table[code] * scale is int4_dequantize's (code - 8) * scale, bit for bit, down to tiny scales."""
    parts = [int4_weight(5, 576, group_size=size, seed=size) for size in (32, 64, 576)]
    parts.append(int4_quantize(random(3, 576) * 1e-30, group_size=64))
    parts.append(int4_quantize(random(3, 576) * 1e30, group_size=32))
    parts.append(int4_quantize(torch.zeros(2, 576), group_size=32))
    weight = pack_integer_linear(parts, dtype=dtype, rounds_input=False)
    assert (weight.kind, weight.group, weight.decoded) == ("codebook", 32, "")
    dense = torch.cat([int4_dequantize_reference(part, dtype=dtype) for part in parts])
    assert torch.equal(weight.dequantize(), dense)
    assert {int(code) for part in parts for code in (part.packed & 15).unique()} == set(range(16))
    assert weight.nbytes == weight.out_features * (576 // 2 + 576 // 32 * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "parts, reason",
    [
        ([codebook_weight(5, 96, 32), codebook_weight(3, 96, 32, codebook="fp4")], MIXED),
        ([codebook_weight(5, 48, 64, codebook="fp4")], "groups of 16 are no multiple of 32"),
        ([int4_weight(7, 96, group_size=32, symmetric=False)], NO_TABLE),
        ([act_order(int4_weight(7, 96, group_size=32))], NO_TABLE),
        ([int4_weight(7, 33)], "groups of 33 are no multiple of 32"),
        ([int8_weight(7, 96), int8_weight(2, 96, group_size=32)], NO_TABLE),
        ([int8_weight(7, 96), int4_weight(2, 96)], NO_TABLE),
    ],
    ids=["nf4+fp4", "fp4-blocks-cross-rows", "asymmetric", "act-order", "odd-groups", "int8", "int8+int4"],
)
def test_other_codes_are_decoded_and_say_so(parts: list, reason: str, dtype: torch.dtype, cpp: None) -> None:
    is_codebook = isinstance(parts[0], CodebookWeight)
    options = {"dtype": dtype} if is_codebook else {"dtype": dtype, "rounds_input": False}
    weight = (pack_codebook_linear if is_codebook else pack_integer_linear)(parts, **options)
    assert (weight.kind, weight.decoded) == ("dense", reason)
    dense = torch.cat([decode(part, dtype=dtype) for part in parts])
    assert torch.equal(weight.dequantize(), dense) and weight.nbytes == dense.nbytes
    x, bias = random(5, dense.shape[1], seed=1).to(dtype), random(dense.shape[0], seed=2).to(dtype)
    kind = "nf4" if is_codebook else "dense"  # where the bias is rounded
    assert weight.rounds_before_bias == is_codebook
    assert_equal_but_for_order(packed_linear(x, weight, bias), expected(x, dense, bias, kind, dtype), x, dense)


INTEGERS = {
    "int4": lambda n, k: int4_weight(n, k, group_size=32, seed=n),
    "int4-row": lambda n, k: int4_weight(n, k, seed=n),
    "int4-asymmetric": lambda n, k: int4_weight(n, k, group_size=64, symmetric=False, seed=n),
    "int4-act-order": lambda n, k: act_order(int4_weight(n, k, group_size=32, seed=n)),
    "int8": lambda n, k: int8_weight(n, k, seed=n),
    "int8-groups": lambda n, k: int8_weight(n, k, group_size=32, seed=n),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", INTEGERS)
class TestRoundedInputs:
    def test_equals_the_trained_layers(self, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """FakeQuantLinear(integer=True): each layer of the stack, then its bias, rounded each; with and without C++."""
        parts = [INTEGERS[kind](n, 192) for n in (70, 33, 1)]
        x, bias = random(9, 192, seed=1).to(dtype), random(104, seed=2).to(dtype)
        multiply = int8_linear_dynamic if kind.startswith("int8") else int4_linear_dynamic
        want = torch.cat([multiply(x, part) for part in parts], 1) + bias
        in_float32 = torch.cat([multiply(x, part, out_dtype=torch.float32) for part in parts], 1)
        for implementation in ("auto", "reference"):
            if implementation == "reference":
                monkeypatch.setenv("LOWBIT_KERNELS", "reference")
            x_scale = torch.tensor(0.02)
            static = pack_integer_linear(parts, dtype=dtype, rounds_input=True, x_scale=x_scale)
            wanted = torch.cat([multiply(x, part, x_scale=x_scale) for part in parts], 1) + bias
            assert torch.equal(packed_linear(x, static, bias), wanted) and not torch.equal(wanted, want)
            weight = pack_integer_linear(parts, dtype=dtype, rounds_input=True)
            assert (weight.kind, weight.out_features, weight.in_features) == ("integer", 104, 192)
            assert torch.equal(packed_linear(x, weight, bias), want)
            assert torch.equal(packed_linear(x, weight, out_dtype=torch.float32), in_float32)
            assert torch.equal(weight.dequantize(), torch.cat([decode(part, dtype=dtype) for part in parts]))
        bits = 8 if kind.startswith("int8") else 4
        assert weight.nbytes >= 104 * 192 * bits // 8

    def test_a_row_is_the_same_bits_in_every_batch(
        self, kind: str, dtype: torch.dtype, threads: Callable, cpp: None
    ) -> None:
        weight = pack_integer_linear([INTEGERS[kind](205, 576)], dtype=dtype, rounds_input=True)
        x = random(513, 576, seed=1).to(dtype)
        threads(1)
        full = packed_linear(x, weight)
        for num_threads in (1, 2):
            threads(num_threads)
            for rows in (*range(1, 20), 33, 513):
                for batch_invariant in (True, False):
                    y = packed_linear(x[:rows], weight, batch_invariant=batch_invariant)
                    assert torch.equal(y, full[:rows]), (num_threads, rows)
            assert torch.equal(packed_linear(x[7:20].flip(0).contiguous(), weight), full[7:20].flip(0))

    def test_a_tape_replays_with_new_inputs(self, kind: str, dtype: torch.dtype, cpp: None) -> None:
        weight = pack_integer_linear([INTEGERS[kind](50, 576)], dtype=dtype, rounds_input=True)
        x, bias = random(2, 576, seed=1).to(dtype), random(50, seed=2).to(dtype)
        tape = _tape.Tape()
        with tape.record():
            y = packed_linear(x, weight, bias)
        x.copy_(random(2, 576, seed=2))
        tape.replay()
        assert torch.equal(y, packed_linear(x, weight, bias))


def test_panels_are_placed_too(cpp: None) -> None:
    int4 = pack_integer_linear(
        [int4_weight(50, 96, group_size=32, symmetric=False)], dtype=DTYPES[0], rounds_input=True
    )
    int8 = pack_integer_linear([int8_weight(50, 96)], dtype=DTYPES[0], rounds_input=True)
    x, before = random(3, 96), [int4.panels.codes.data_ptr(), int8.panels.codes.data_ptr()]
    want = [packed_linear(x, weight) for weight in (int4, int8)]
    place_linears([int4, int8])
    assert all(torch.equal(packed_linear(x, w), y) for w, y in zip((int4, int8), want, strict=True))
    addresses = [
        t.data_ptr() for w in (int4, int8) for t in (w.panels.codes, w.panels.scales, w.panels.zeros) if t is not None
    ]
    assert addresses == sorted(addresses) and before[0] not in addresses and before[1] not in addresses
    assert addresses[-1] - addresses[0] < int4.nbytes + int8.nbytes + 64 * len(addresses)


@pytest.mark.parametrize("dynamic", [False, True])
def test_float16_integers_keep_their_tensors(dynamic: bool) -> None:
    """As on a GPU: the ops of training over merged parts, or over parts that do not merge."""
    x, bias = random(5, 96, seed=1).half(), random(12, seed=2).half()
    for parts, num_originals in (
        ([int4_weight(n, 96, group_size=32, seed=n) for n in (5, 7)], 1),
        ([int8_weight(n, 96, seed=n) for n in (5, 7)], 1),
        ([int4_weight(5, 96, group_size=32), int4_weight(7, 96, group_size=96)], 2),
        ([int4_weight(n, 96, group_size=32, symmetric=False, seed=n) for n in (5, 7)], 2),
        ([int4_weight(5, 96), int8_weight(7, 96)], 2),
    ):
        weight = pack_integer_linear(parts, dtype=torch.float16, rounds_input=dynamic)
        assert len(weight.originals) == num_originals and not weight.decoded
        dense = torch.cat([decode(part, dtype=torch.float16) for part in parts])
        assert torch.equal(weight.dequantize(), dense)
        for b in (None, bias):
            got = packed_linear(x, weight, b)
            if dynamic:
                ops = [int8_linear_dynamic if isinstance(part, Int8Weight) else int4_linear_dynamic for part in parts]
                want = torch.cat([op(x, part) for op, part in zip(ops, parts, strict=True)], 1)
                assert torch.equal(got, want if b is None else want + b)
            else:
                want = expected(x, dense, b, "dense", torch.float16)
                # one rounding of y, 2^-11 of it, and float32 sums whose order moves near-ties
                torch.testing.assert_close(got, want, rtol=2**-10, atol=2**-10 * want.abs().max().item())


def test_int4_adds_a_bias_inside_the_product(cpp: None) -> None:
    """As FakeQuantLinear without rounded inputs does; see test_bias_is_rounded_as_in_training for the numbers."""
    x = torch.tensor([[1.0, 2**-9 + 2**-10, *[0.0] * 30]]).bfloat16()
    bias = torch.tensor([2**-9]).bfloat16()
    ones = int4_quantize(torch.full((1, 32), 7.0), group_size=32)  # codes 7 + 8, scale 1
    ones.scales.fill_(1 / 7)
    weight = pack_integer_linear([ones], dtype=torch.bfloat16, rounds_input=False)
    assert weight.dequantize().eq(1).all()
    assert packed_linear(x, weight, bias).item() == 1 + 2**-7


PROCESSORS = {"haswell": {"avx2", "fma"}, "x86-64": set(), "x86-64-v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_builds_for_other_processors(processor: str, monkeypatch: pytest.MonkeyPatch, cpp: None) -> None:
    if not PROCESSORS[processor] <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this machine cannot run {processor}")
    function, native = _tape.kernel("packed_linear", "packed_linear", f"-march={processor}"), _tape.kernel
    monkeypatch.setattr(_tape, "kernel", lambda file, name: function if file == "packed_linear" else native(file, name))
    for dtype in DTYPES:
        for kind in KINDS:
            for shape in SHAPES:
                weight, dense = weights(kind, shape, dtype)
                x, bias = random(13, shape[1], seed=1).to(dtype), random(shape[0], seed=2).to(dtype)
                got = packed_linear(x, weight, bias)
                assert_equal_but_for_order(got, expected(x, dense, bias, kind, dtype), x, dense)
                for rows in (1, 2, 3, 5, 8):
                    assert torch.equal(packed_linear(x[:rows], weight, bias), got[:rows]), (dtype, kind, shape, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str, cpp: None) -> None:
    weight, _ = weights(kind, (17, 96, 64), torch.bfloat16)
    x, bias = random(5, 96, seed=1).bfloat16(), random(17, seed=2).bfloat16()
    arguments = (x, weight.weight, weight.absmax, weight.table, bias, weight.group, weight.rounds_before_bias)
    arguments += (torch.bfloat16, True)
    torch.library.opcheck(torch.ops.lowbit.packed_linear, arguments)
    assert torch.equal(torch.ops.lowbit.packed_linear(*arguments), packed_linear(x, weight, bias))


def test_errors_name_the_argument() -> None:
    weight = pack_linear(random(4, 8), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x is torch.float32 \(2, 7\); this weight takes contiguous .*num_tokens, 8"):
        packed_linear(random(2, 7), weight)
    with pytest.raises(ValueError, match="x is torch.bfloat16"):
        packed_linear(random(2, 8).bfloat16(), weight)
    with pytest.raises(ValueError, match="contiguous"):
        packed_linear(random(8, 2).T, weight)
    with pytest.raises(ValueError, match=r"bias is torch.float32 \(5,\); this weight takes torch.float32 \[4\]"):
        packed_linear(random(2, 8), weight, random(5))
    with pytest.raises(ValueError, match="out_dtype=torch.bfloat16"):
        packed_linear(random(2, 8), weight, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not stack"):
        pack_linear([random(2, 8), random(2, 9)], dtype=torch.float32)
    with pytest.raises(ValueError, match="do not stack"):
        pack_codebook_linear([], dtype=torch.float32)
    with pytest.raises(TypeError, match="dtype is torch.int8; use one of torch.float32"):
        pack_linear(random(2, 8), dtype=torch.int8)
    with pytest.raises(ValueError, match="do not stack"):
        pack_integer_linear([int4_weight(2, 32), int4_weight(2, 64)], dtype=torch.float32, rounds_input=False)
    with pytest.raises(TypeError, match="dtype is torch.int8"):
        pack_integer_linear([int4_weight(2, 32)], dtype=torch.int8, rounds_input=True)


def test_rounded_inputs_of_other_groups_do_not_stack(cpp: None) -> None:
    parts = [int4_weight(2, 64, group_size=32), int4_weight(2, 64, group_size=64)]
    with pytest.raises(ValueError, match="2 weights do not stack.*same bits, in_features, group_size"):
        pack_integer_linear(parts, dtype=torch.float32, rounds_input=True)


def on_gpu(
    weight: CodebookWeight | Int4Weight | Int8Weight | Tensor,
) -> CodebookWeight | Int4Weight | Int8Weight | Tensor:
    if isinstance(weight, Tensor):
        return weight.cuda()
    values = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return type(weight)(**{name: v.cuda() if isinstance(v, Tensor) else v for name, v in values.items()})


GPU_WEIGHTS = {
    "dense": lambda: random(130, 192),
    "nf4": lambda: codebook_weight(130, 192, 64),
    "fp4": lambda: codebook_weight(130, 192, 64, codebook="fp4"),
    "int4": lambda: int4_weight(130, 192, group_size=32),
    "int8": lambda: int8_weight(130, 192),
    "int4_dynamic": lambda: int4_weight(130, 192, group_size=32),
    "int8_dynamic": lambda: int8_weight(130, 192),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("kind", GPU_WEIGHTS)
def test_gpu(kind: str, dtype: torch.dtype) -> None:
    part, bias = on_gpu(GPU_WEIGHTS[kind]()), random(260, seed=2).cuda().to(dtype)
    dynamic = kind.endswith("dynamic")
    if kind == "dense":
        weight = pack_linear([part, part], dtype=dtype)
    elif isinstance(part, CodebookWeight):
        weight = pack_codebook_linear([part, part], dtype=dtype)
    else:
        weight = pack_integer_linear([part, part], dtype=dtype, rounds_input=dynamic)
    assert not weight.decoded and len(weight.originals) == 1
    for rows in (1, 20):
        x = random(rows, 192, seed=1).cuda().to(dtype)
        for out_dtype in {dtype, torch.float32}:
            got = packed_linear(x, weight, bias, out_dtype=out_dtype)
            if dynamic:
                multiply = int8_linear_dynamic if isinstance(part, Int8Weight) else int4_linear_dynamic
                y = multiply(x, part, out_dtype=out_dtype)
                assert torch.equal(got, torch.cat([y, y], 1) + bias.to(out_dtype))
                continue
            want = expected(x, weight.dequantize(), bias, kind, out_dtype)
            # float32: cuBLAS sums; the rest: one ulp of bfloat16's 8 bits, of values up to the largest
            tolerance = 1e-4 if out_dtype == torch.float32 else 2**-7 * want.abs().max().item()
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
