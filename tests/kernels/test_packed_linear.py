"""Linear layers for serving: exact weights, roundings, and rows whose bits do not depend on their batch."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _huge_pages, _tape
from trainer.kernels.nf4 import (
    NF4Weight,
    nf4_dequantize_reference,
    nf4_linear,
    nf4_quantize_reference,
    quantize_absmax,
)
from trainer.kernels.packed_linear import (
    FREE_ORDER_ROWS,
    LinearWeight,
    pack_linear,
    pack_nf4_linear,
    packed_linear,
    place_linears,
)

DTYPES = [torch.float32, torch.bfloat16]
# out_features, in_features, block_size: a panel and more; blocks that cross rows (96, 160, 1536 in 4096); in_features
# that is no multiple of 32, odd, below one vector; fewer features than a tile; one feature
SHAPES = [(50, 576, 64), (17, 96, 64), (7, 48, 64), (97, 160, 64), (5, 1536, 4096), (13, 33, 32), (1, 7, 32)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nf4_weight(out_features: int, in_features: int, block_size: int, *, double_quant: bool = True, seed: int = 0):
    dense = random(out_features, in_features, seed=seed) * 0.1
    packed, absmax = nf4_quantize_reference(dense, block_size=block_size)
    scales = quantize_absmax(absmax) if double_quant else (absmax, None, None)
    return NF4Weight(packed, *scales, out_features, in_features, block_size)


def weights(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[LinearWeight, Tensor]:
    """A packed weight and the dense one that training multiplies by."""
    if kind == "nf4":
        weight = nf4_weight(*shape)
        return pack_nf4_linear([weight], dtype=dtype), nf4_dequantize_reference(weight, dtype=dtype)
    dense = random(*shape[:2])
    return pack_linear(dense, dtype=dtype), dense.to(dtype)


def expected(x: Tensor, dense: Tensor, bias: Tensor | None, kind: str, out_dtype: torch.dtype) -> Tensor:
    """Sums in float64, rounded where training rounds."""
    y = x.double() @ dense.double().T
    if kind == "nf4" and out_dtype == x.dtype:
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
    if _cpp.load("packed_linear") is None:
        pytest.skip("no C++ compiler here")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["dense", "nf4"])
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
        assert (weight.out_features, weight.in_features, weight.kind, weight.dtype) == (*shape[:2], kind, dtype)

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
@pytest.mark.parametrize("kind", ["dense", "nf4"])
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
    parts = [nf4_weight(n, 192, 64, double_quant=n != 64, seed=n) for n in (70, 64, 1)]
    x = random(3, 192, seed=1).to(dtype)
    alone = [packed_linear(x, pack_nf4_linear([part], dtype=dtype)) for part in parts]
    assert torch.equal(packed_linear(x, pack_nf4_linear(parts, dtype=dtype)), torch.cat(alone, 1))
    dense = [random(n, 192, seed=n) for n in (70, 64, 1)]
    alone = [packed_linear(x, pack_linear(part, dtype=dtype)) for part in dense]
    assert torch.equal(packed_linear(x, pack_linear(dense, dtype=dtype)), torch.cat(alone, 1))


def test_original_layout_stacks_parts_that_end_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", "reference")
    x = random(3, 96, seed=1)
    for rows in ((1, 3), (2, 4)):  # 96 and 288 weights do not fill blocks of 64, 192 and 384 do
        parts = [nf4_weight(n, 96, 64, seed=n) for n in rows]
        weight = pack_nf4_linear(parts, dtype=torch.float32)
        assert len(weight.originals) == (2 if rows == (1, 3) else 1)
        dense = torch.cat([nf4_dequantize_reference(part, dtype=torch.float32) for part in parts])
        assert torch.equal(weight.dequantize(), dense)
        torch.testing.assert_close(packed_linear(x, weight), x @ dense.T, rtol=1e-5, atol=1e-5)  # summation order


def test_equals_the_trained_layers(cpp: None) -> None:
    """nn.Linear and QuantLinear's kernel in bfloat16: one ulp apart at most, where sums of another order do."""
    weight = nf4_weight(192, 576, 64)
    x = random(40, 576, seed=1).bfloat16()
    bias = random(192, seed=2).bfloat16()
    scales = weight.absmax, weight.nested_absmax, weight.nested_offset
    trained = nf4_linear(x, weight.packed, *scales, out_features=192, block_size=64) + bias
    dense = random(192, 576).bfloat16()
    for got, want in (
        (packed_linear(x, pack_nf4_linear([weight], dtype=x.dtype), bias), trained),
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
    packed, absmax = nf4_quantize_reference(ones, block_size=32)
    nf4 = pack_nf4_linear([NF4Weight(packed, absmax, None, None, 1, 32, 32)], dtype=torch.bfloat16)
    assert packed_linear(x, pack_linear(ones, dtype=torch.bfloat16), bias).item() == 1 + 2**-7
    assert packed_linear(x, nf4, bias).item() == 1
    # In float32 nothing is rounded.
    assert packed_linear(x, nf4, bias, out_dtype=torch.float32).item() == 1 + 2**-8 + 2**-10


def test_long_k_and_many_rows(cpp: None) -> None:
    """More than a panel and a block of rows hold: 14336 columns as in a model of 8 B parameters."""
    weight = nf4_weight(20, 14336, 64)
    dense = nf4_dequantize_reference(weight, dtype=torch.bfloat16)
    packed = pack_nf4_linear([weight], dtype=torch.bfloat16)
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
    assert pack_nf4_linear([nf4_weight(8, 64, 64)], dtype=torch.bfloat16).nbytes == 8 * 64 // 2 + 8 * 4


def test_places_hold_the_same_weights(cpp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In reading order, in one piece of memory that begins at a 2 MB page; dense weights stay where they are."""
    packed = [pack_nf4_linear([nf4_weight(2048, 1056, 32, seed=seed)], dtype=torch.bfloat16) for seed in range(2)]
    packed.append(pack_nf4_linear([nf4_weight(7, 96, 32)], dtype=torch.bfloat16))
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
def test_batch_invariance_may_be_waived(dtype: torch.dtype) -> None:
    weight, dense = weights("nf4", (50, 576, 64), dtype)
    x = random(FREE_ORDER_ROWS, 576, seed=1).to(dtype)
    got = packed_linear(x, weight, batch_invariant=False)
    assert_equal_but_for_order(got, expected(x, dense, None, "nf4", dtype), x, dense)
    alone = [packed_linear(row, weight, batch_invariant=False) for row in x.split(1)]
    if dtype == torch.float32:  # else the flag, and the tests of invariance, would mean nothing; bfloat16 rounds it off
        assert not torch.equal(got, torch.cat(alone))
    assert torch.equal(packed_linear(x, weight), torch.cat(alone))


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_float16_runs_the_reference(kind: str) -> None:
    weight, dense = weights(kind, (50, 576, 64), torch.float16)
    x, bias = random(5, 576, seed=1).half(), random(50, seed=2).half()
    want = expected(x, dense, bias, kind, torch.float16)
    # one rounding of y and one of the sum, 2^-11 each, of values up to the largest
    scale = want.abs().max().item()
    torch.testing.assert_close(packed_linear(x, weight, bias), want, rtol=2**-10, atol=2**-10 * scale)


PROCESSORS = {"haswell": {"avx2", "fma"}, "x86-64": set(), "x86-64-v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_builds_for_other_processors(processor: str, monkeypatch: pytest.MonkeyPatch, cpp: None) -> None:
    if not PROCESSORS[processor] <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this machine cannot run {processor}")
    function, native = _tape.kernel("packed_linear", "packed_linear", f"-march={processor}"), _tape.kernel
    monkeypatch.setattr(_tape, "kernel", lambda file, name: function if file == "packed_linear" else native(file, name))
    for dtype in DTYPES:
        for kind in ("dense", "nf4"):
            for shape in SHAPES:
                weight, dense = weights(kind, shape, dtype)
                x, bias = random(13, shape[1], seed=1).to(dtype), random(shape[0], seed=2).to(dtype)
                got = packed_linear(x, weight, bias)
                assert_equal_but_for_order(got, expected(x, dense, bias, kind, dtype), x, dense)
                for rows in (1, 2, 3, 5, 8):
                    assert torch.equal(packed_linear(x[:rows], weight, bias), got[:rows]), (dtype, kind, shape, rows)


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_opcheck(kind: str, cpp: None) -> None:
    weight, _ = weights(kind, (17, 96, 64), torch.bfloat16)
    x, bias = random(5, 96, seed=1).bfloat16(), random(17, seed=2).bfloat16()
    arguments = (x, weight.weight, weight.absmax, bias, weight.group, kind == "nf4", torch.bfloat16, True)
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
        pack_nf4_linear([], dtype=torch.float32)
    with pytest.raises(TypeError, match="dtype is torch.int8; use one of torch.float32"):
        pack_linear(random(2, 8), dtype=torch.int8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_gpu(kind: str, dtype: torch.dtype) -> None:
    nf4 = nf4_weight(130, 192, 64)
    for name in ("packed", "absmax", "nested_absmax", "nested_offset"):
        setattr(nf4, name, getattr(nf4, name).cuda())
    dense = random(130, 192).cuda()
    weight = pack_nf4_linear([nf4, nf4], dtype=dtype) if kind == "nf4" else pack_linear([dense, dense], dtype=dtype)
    bias = random(260, seed=2).cuda().to(dtype)
    for rows in (1, 20):
        x = random(rows, 192, seed=1).cuda().to(dtype)
        for out_dtype in {dtype, torch.float32}:
            want = expected(x, weight.dequantize(), bias, kind, out_dtype)
            got = packed_linear(x, weight, bias, out_dtype=out_dtype)
            # float32: cuBLAS sums; the rest: one ulp of bfloat16's 8 bits, of values up to the largest
            tolerance = 1e-4 if out_dtype == torch.float32 else 2**-7 * want.abs().max().item()
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
