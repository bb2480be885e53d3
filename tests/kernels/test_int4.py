"""INT4 weights: the grid by hand, formulas of other projects, and every implementation against the reference."""

import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, int4, int8, split_k

# Rows that end inside a vector, inside a byte; one element; one row; many rows.
SHAPES = [(1, 64), (2, 192), (3, 80), (5, 48), (7, 33), (2, 16), (64, 48), (33, 65), (1, 1), (40, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]
GRIDS = [(True, 7.0), (True, 7.5), (True, 8.0), (False, 7.0)]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("integer") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    for module in (int4, int8):
        monkeypatch.setattr(module, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


def make_weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, where there are several one of zeros, one negative and one positive."""
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[-1])
    weight = torch.randn(shape, generator=generator)
    weight *= torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    if shape[0] > 4:
        weight[1], weight[2], weight[3] = 0, -weight[2].abs(), weight[3].abs() + 1
    return weight.to(dtype)


def make_x(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def group_sizes(in_features: int) -> list[int]:
    return [size for size in (*int8.GROUP_SIZES, 96) if in_features % size == 0 and size < in_features] + [in_features]


def act_order(in_features: int, group_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(in_features)
    return (torch.randperm(in_features, generator=generator) // group_size).to(torch.int32)


def with_g_idx(weight: int4.Int4Weight) -> int4.Int4Weight:
    fields = {name: getattr(weight, name) for name in int4.Int4Weight.__slots__}
    return int4.Int4Weight(**{**fields, "g_idx": act_order(weight.in_features, weight.group_size)})


class TestGrid:
    def test_golden_symmetric(self) -> None:
        """By hand: absmax 14 gives scale 2 and codes w / 2 + 8; 1 / 2 and 3 / 2 are ties, which go to even 0 and 2."""
        weight = int4.int4_quantize(torch.tensor([[14.0, -14.0, 1.0, 3.0, 0.0]]), group_size=5)
        assert weight.scales.tolist() == [[2.0]] and weight.zeros is None
        assert weight.packed.tolist() == [[15 | 1 << 4, 8 | 10 << 4, 8]]  # even features in low nibbles, then padding 0
        assert int4.int4_dequantize(weight, dtype=torch.float32).tolist() == [[14.0, -14.0, 0.0, 4.0, 0.0]]

    def test_golden_asymmetric(self) -> None:
        """By hand: -2..13 gives scale 1 and zero 2."""
        weight = int4.int4_quantize(torch.tensor([[-2.0, 13.0, 0.0, 2.5]]), group_size=4, symmetric=False)
        assert weight.scales.tolist() == [[1.0]] and weight.zeros.tolist() == [[2]]
        assert weight.packed.tolist() == [[0 | 15 << 4, 2 | 4 << 4]]
        assert int4.int4_dequantize(weight, dtype=torch.float32).tolist() == [[-2.0, 13.0, 0.0, 2.0]]

    @pytest.mark.parametrize(("sign", "zero"), [(1, 0), (-1, 15)])
    def test_one_sided_groups_contain_zero(self, sign: int, zero: int) -> None:
        """GPTQ's faults with zero points come from such groups: the zero is at an end of the codes, not beyond it."""
        weight = sign * (make_weight((3, 64)).abs() + 1)
        quantized = int4.int4_quantize(weight, group_size=32, symmetric=False)
        assert (quantized.zeros == zero).all()
        error = (int4.int4_dequantize(quantized, dtype=torch.float32) - weight).abs().view(3, 2, 32)
        assert (error <= 0.50001 * quantized.scales[:, :, None]).all()  # half a step, and float32

    def test_divisor_8_uses_the_lowest_code(self) -> None:
        weight = int4.int4_quantize(torch.tensor([[-8.0, 8.0, 7.0, 1.0]]), group_size=4, divisor=8.0)
        assert int4.unpack_int4(weight.packed, 4).tolist() == [[0, 15, 15, 9]]  # 8 is clamped to 7

    def test_compressed_tensors_by_formula(self) -> None:
        """scale = max |w| / 7.5, codes round(w / scale) in -8..7 (compressed_tensors calculate_qparams, quantize)."""
        weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
        got = int4.int4_quantize(weight, group_size=32, divisor=7.5)
        groups = weight.view(16, 4, 32)
        scales = torch.maximum(groups.amax(2).abs(), groups.amin(2).abs()) / 7.5
        codes = torch.clamp(torch.round(groups / scales[:, :, None]), -8, 7).view(16, 128)
        assert torch.equal(got.scales, scales)
        assert torch.equal(int4.unpack_int4(got.packed, 128).int() - 8, codes.int())

    def test_gptq_by_formula(self) -> None:
        """xmin <= 0 <= xmax, scale = (xmax - xmin) / 15, q = clamp(round(x / scale) + zero) (GPTQ quantizer.py)."""
        weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
        got = int4.int4_quantize(weight, group_size=64, symmetric=False)
        groups = weight.view(16, 2, 64)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = (high - low) / 15
        zero = torch.round(-low / scale)
        codes = torch.clamp(torch.round(groups / scale[:, :, None]) + zero[:, :, None], 0, 15)
        dense = scale[:, :, None] * (codes - zero[:, :, None])
        assert torch.equal(got.zeros.float(), zero)
        assert torch.equal(int4.int4_dequantize(got, dtype=torch.float32), dense.view(16, 128))

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("value", [0.0, 1e-45, -1e-39, 3e38])
    def test_zeros_tiny_and_huge(self, value: float, symmetric: bool, cpp: None) -> None:
        weight = torch.full((2, 32), value)
        options = {"symmetric": symmetric, "divisor": 7.0, "scale_dtype": torch.float32}
        got, want = (
            f(weight, group_size=32, **options) for f in (int4.int4_quantize_cpu, int4.int4_quantize_reference)
        )
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and (got[1] > 0).all()
        dense = int4.int4_dequantize(int4.Int4Weight(*got, None, 2, 32, 32), dtype=torch.float32)
        # 1e-45 is one step of subnormal float32, so the scale is 1 and the weight 0; 1e-39: scales are subnormal,
        # steps of 1.4e-45 in 6.7e-41
        torch.testing.assert_close(dense, torch.full((2, 32), 0.0 if abs(value) < 1e-44 else value), rtol=2e-4, atol=0)

    @pytest.mark.parametrize("scale_dtype", DTYPES)
    def test_scales_are_values_of_their_dtype(self, scale_dtype: torch.dtype) -> None:
        """What a checkpoint in 16 bits stores is what codes were chosen for."""
        for symmetric, divisor in GRIDS:
            options = {"group_size": 32, "symmetric": symmetric, "divisor": divisor}
            weight = int4.int4_quantize(make_weight((40, 96)), scale_dtype=scale_dtype, **options)
            assert torch.equal(weight.scales.to(scale_dtype).float(), weight.scales)


@pytest.mark.parametrize("shape", SHAPES)
class TestCpu:
    @pytest.mark.parametrize("scale_dtype", DTYPES)
    def test_quantize_equals_reference(self, shape: tuple[int, int], scale_dtype: torch.dtype, cpp: None) -> None:
        for dtype, (symmetric, divisor), scale in itertools.product(DTYPES, GRIDS, (1, 1e-6)):
            weight = (make_weight(shape) * scale).to(dtype)  # 1e-6: subnormal scales in float16
            for group_size in group_sizes(shape[1]):
                options = {"symmetric": symmetric, "divisor": divisor, "scale_dtype": scale_dtype}
                got = int4.int4_quantize_cpu(weight, group_size=group_size, **options)
                want = int4.int4_quantize_reference(weight, group_size=group_size, **options)
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
                assert got[2] is None if symmetric else torch.equal(got[2], want[2])

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_dequantize_equals_reference(self, shape: tuple[int, int], symmetric: bool, cpp: None) -> None:
        for group_size, dtype in itertools.product(group_sizes(shape[1]), DTYPES):
            weight = int4.int4_quantize(make_weight(shape), group_size=group_size, symmetric=symmetric)
            for quantized in (weight, with_g_idx(weight)):
                want = int4.int4_dequantize_reference(quantized, dtype=dtype)
                out = torch.full_like(want, torch.nan)
                int4.int4_dequantize_into(quantized, out)
                assert torch.equal(int4.int4_dequantize_cpu(quantized, dtype=dtype), want) and torch.equal(out, want)

    @pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11, 17])  # 11: 8 + 3; 17: through a dense weight
    def test_linear_equals_float64(self, shape: tuple[int, int], rows: int, cpp: None) -> None:
        for group_size, symmetric in itertools.product(group_sizes(shape[1]), (True, False)):
            weight = int4.int4_quantize(make_weight(shape), group_size=group_size, symmetric=symmetric)
            # float32: sums in another order; 16 bits: y is rounded once, half of 2^-7 and of 2^-10
            for dtype, tolerance in zip(DTYPES, (1e-5, 2**-8, 2**-10), strict=True):
                x = make_x((rows, shape[1])).to(dtype)
                want = x.double() @ int4.int4_dequantize_reference(weight, dtype=dtype).double().T
                error = (int4.int4_linear_cpu(x, weight).double() - want).abs()
                # the least steps of the dtype: half of 2^-24 in float16
                assert (error <= tolerance * want.abs().max() + (2**-25 if dtype == torch.float16 else 1e-40)).all()


class TestActOrder:
    def test_dequantize_takes_each_columns_group(self) -> None:
        weight = with_g_idx(int4.int4_quantize(make_weight((6, 96)), group_size=32, symmetric=False))
        codes = int4.unpack_int4(weight.packed, 96)
        dense = int4.int4_dequantize(weight, dtype=torch.float32)
        for n, k in itertools.product(range(6), range(96)):
            g = weight.g_idx[k]
            assert dense[n, k] == (codes[n, k].float() - weight.zeros[n, g].float()) * weight.scales[n, g]

    @pytest.mark.parametrize("rows", [1, 20])
    def test_linear(self, rows: int) -> None:
        weight = with_g_idx(int4.int4_quantize(make_weight((6, 96)), group_size=32))
        x = make_weight((rows, 96))
        assert torch.equal(int4.int4_linear(x, weight), x @ int4.int4_dequantize(weight, dtype=x.dtype).T)


class TestOps:
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("g_idx", [False, True])
    def test_opcheck(self, symmetric: bool, g_idx: bool) -> None:
        weight = int4.int4_quantize(make_weight((6, 96)), group_size=32, symmetric=symmetric)
        arguments = int4.op_arguments(with_g_idx(weight) if g_idx else weight)
        x = make_weight((2, 96)).requires_grad_()
        torch.library.opcheck(
            torch.ops.lowbit.int4_quantize.default, (make_weight((6, 96)), 32, symmetric, 7.0, torch.float32)
        )
        torch.library.opcheck(torch.ops.lowbit.int4_dequantize.default, (*arguments, torch.bfloat16))
        torch.library.opcheck(torch.ops.lowbit.int4_linear.default, (x, *arguments))

    @pytest.mark.parametrize("rows", [1, 20])
    def test_gradient_equals_the_dense_one(self, rows: int) -> None:
        weight = int4.int4_quantize(make_weight((12, 96)), group_size=32, symmetric=False)
        x, dense_x = (make_weight((rows, 96)).view(rows, 1, 96).requires_grad_() for _ in range(2))
        grad = make_weight((rows, 12)).view(rows, 1, 12)
        int4.int4_linear(x, weight).backward(grad)
        (dense_x @ int4.int4_dequantize_reference(weight, dtype=torch.float32).T).backward(grad)
        assert torch.equal(x.grad, dense_x.grad)  # the same product of the same numbers

    def test_nothing_dense_is_saved_for_backward(self) -> None:
        weight = int4.int4_quantize(make_weight((64, 128)), group_size=32)
        x = make_weight((16, 128)).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            int4.int4_linear(x, weight)
        # an eighth of the float32 weight's bytes; nothing saved may be larger than it
        assert saved and max(t.nbytes for t in saved if t is not None) == weight.packed.nbytes

    def test_compiles(self) -> None:
        weight = int4.int4_quantize(make_weight((12, 96)), group_size=32)
        compiled = torch.compile(lambda x: int4.int4_linear(x, weight) + 1, backend="aot_eager", fullgraph=True)
        x = make_weight((3, 96))
        assert torch.equal(compiled(x), int4.int4_linear(x, weight) + 1)

    @pytest.mark.parametrize(
        "view", [lambda w: w.T, lambda w: w[:, ::2], lambda w: w.view(-1)[64:].view(-1, 64), lambda w: w[:, 1:33]]
    )
    def test_any_strides_equal_contiguous(self, view: Callable[[Tensor], Tensor]) -> None:
        weight = view(make_weight((128, 64)))
        got, want = (int4.int4_quantize(w, group_size=32) for w in (weight, weight.contiguous()))
        assert torch.equal(got.packed, want.packed) and torch.equal(got.scales, want.scales)
        x = weight[:4]
        assert torch.equal(int4.int4_linear(x, got), int4.int4_linear(x.contiguous(), got))

    @pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
    def test_no_rows(self, shape: tuple[int, ...]) -> None:
        weight = int4.int4_quantize(make_weight((5, 64)), group_size=64)
        assert int4.int4_linear(torch.empty(shape), weight).shape == (*shape[:-1], 5)

    def test_threads_do_not_change_results(self) -> None:
        weight = int4.int4_quantize(make_weight((301, 512)), group_size=64)
        x, threads = make_weight((2, 512)).bfloat16(), torch.get_num_threads()
        want = int4.int4_linear(x, weight)
        try:
            torch.set_num_threads(3)
            assert torch.equal(int4.int4_linear(x, weight), want)
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("in_features", [1, 2, 33])
    def test_pack_and_unpack_are_inverse(self, in_features: int) -> None:
        codes = torch.arange(5 * in_features, dtype=torch.uint8).view(5, in_features) % 16
        assert torch.equal(int4.unpack_int4(int4.pack_int4(codes), in_features), codes)


class TestErrors:
    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("implementation", ["reference", "auto"])
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_not_finite(
        self, bad: float, implementation: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", implementation)
        weight = torch.zeros(4, 96)
        weight[2, 5] = bad
        with pytest.raises(ValueError, match=rf"weight\[2, 5\] is {bad}; .*diverged training run"):
            int4.int4_quantize(weight, group_size=32, symmetric=symmetric)

    @pytest.mark.parametrize("implementation", ["reference", "auto"])
    def test_scales_overflow(self, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", implementation)
        weight = torch.zeros(2, 64)
        weight[1, 40] = 7 * 65520.0  # a scale that float16 rounds to inf; 65519 it would round to 65504
        with pytest.raises(ValueError, match="scale of row 1, group 1 exceeds torch.float16's 65504; use a wider"):
            int4.int4_quantize(weight, group_size=32, scale_dtype=torch.float16)
        weight[1, 40] = 7 * 65519.0
        assert int4.int4_quantize(weight, group_size=32, scale_dtype=torch.float16).scales[1, 1] == 65504
        weight[1, 40], weight[1, 41] = 3e38, -3e38
        with pytest.raises(ValueError, match="row 1, group 1 exceeds torch.float32's 3.40282e"):
            int4.int4_quantize(weight, group_size=32, symmetric=False)

    def test_arguments(self) -> None:
        with pytest.raises(ValueError, match="group_size=128 .* does not divide in_features=576; use 32, 64, 576"):
            int4.int4_quantize(torch.ones(1, 576), group_size=128)
        with pytest.raises(ValueError, match="group_size=64 .* in_features=96; use 32, 96"):
            int4.int4_quantize(torch.ones(1, 96), group_size=64)
        with pytest.raises(ValueError, match="divisor=6.0; use one of 7, 7.5, 8"):
            int4.int4_quantize(torch.ones(1, 96), group_size=32, divisor=6.0)
        with pytest.raises(TypeError, match="scale_dtype is torch.float64; use one of torch.float32"):
            int4.int4_quantize(torch.ones(1, 96), group_size=32, scale_dtype=torch.float64)
        with pytest.raises(ValueError, match=r"weight is torch.float32 \(96,\); .* \[out_features, in_features\]"):
            int4.int4_quantize(torch.ones(96), group_size=32)

    def test_sizes_are_checked_before_memory_is_read(self) -> None:
        weight = int4.int4_quantize(torch.ones(2, 64), group_size=32, symmetric=False)
        for field, value, message in [
            ("packed", weight.packed[:1], r"packed is torch.uint8 \(1, 32\); a \[2, 64\] weight in groups of 32 needs"),
            ("scales", weight.scales[:, :1], r"scales is torch.float32 \(2, 1\); .* \(2, 2\)"),
            ("zeros", weight.zeros.int(), "zeros is torch.int32"),
            ("g_idx", torch.zeros(63, dtype=torch.int32), r"g_idx is torch.int32 \(63,\); .* \(64,\)"),
        ]:
            arguments = {name: getattr(weight, name) for name in int4.Int4Weight.__slots__}
            with pytest.raises(ValueError, match=message):
                int4.Int4Weight(**{**arguments, field: value})
        with pytest.raises(ValueError, match=r"x is \(1, 63\) on cpu; this weight takes \[..., 64\]"):
            int4.int4_linear(torch.ones(1, 63), weight)

    def test_float16_range(self) -> None:
        weight = int4.int4_quantize(torch.tensor([[1.0, 7e4]]), group_size=2)
        for function in (
            lambda: int4.int4_dequantize(weight, dtype=torch.float16),
            lambda: int4.int4_linear(torch.ones(1, 2).half(), weight),
        ):
            with pytest.raises(ValueError, match=r"weight\[0, 1\] exceeds float16's 65504, use bfloat16 or float32"):
                function()


INTERPRETED = """
import torch
from trainer.kernels import int4

torch.manual_seed(0)
# rows that divide by 16 are fused; 1040 features in several parts, the last one shorter
for shape, group_size in [((7, 34), 34), ((5, 96), 32), ((3, 33), 33), ((33, 128), 64), ((35, 1040), 1040)]:
    for symmetric in (True, False):
        weight = int4.int4_quantize(torch.randn(shape), group_size=group_size, symmetric=symmetric)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got, want = (f(weight, dtype=dtype) for f in (int4.int4_dequantize_triton, int4.int4_dequantize_reference))
            # the interpreter truncates float32 to bfloat16 where GPUs round: up to one ulp, 2^-7 of the value
            torch.testing.assert_close(got, want, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 0)
            # float32: sums in another order. float16: rounded once. bfloat16: weight and output truncated, 2^-7 each
            for rows in (1, 16, 17):
                x = torch.randn(rows, shape[1]).to(dtype)
                want = x.double() @ int4.int4_dequantize_reference(weight, dtype=dtype).double().T
                error = (int4.int4_linear(x, weight).double() - want).abs().max() / want.abs().max()
                tolerance = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-6}[dtype]
                assert error < tolerance, (shape, dtype)
print("interpreted")
"""


def test_triton_interpreted_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    sizes = "num_rows in_features out_features row_bytes group_size num_groups features_per_split stride_x_row".split()
    types = {"packed_ptr": "*u8", "scales_ptr": "*fp32", "zeros_ptr": "*u8", **dict.fromkeys(sizes, "i32")}
    types |= {"num_bytes": "i64", "x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "y_ptr": "*fp32"}
    tile = {**int4.LINEAR_TILES[4 if dtype == "fp32" else 2]}
    options = {"num_warps": tile.pop("num_warps"), "aligned": set(sizes) - {"num_rows", "num_groups"}}
    del tile["PROGRAMS"]
    dot = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    linear = {"HAS_ZEROS": True, "DOT": split_k.dot_dtype(dot), **tile}
    for target in aot.TARGETS:
        for kernel, constants, given in [
            (int4._int4_dequantize_kernel, {"HAS_ZEROS": True, "NUM_BYTES": int4.NUM_WEIGHTS // 2}, {}),
            (int4._int4_linear_kernel, {"SPAN": 32, **linear}, options),
            (int4._int4_linear_kernel, {"SPAN": split_k.MIN_SPAN, **linear}, options),
        ]:
            used = {name: kind for name, kind in types.items() if name in kernel.arg_names}
            compiled = aot.compile_kernel(kernel, used, constants, target, **given)
            assert aot.spilled_registers(compiled, target) == 0, (target, kernel, constants)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_reference(dtype: torch.dtype) -> None:
    for symmetric in (True, False):
        options = {"group_size": 64, "symmetric": symmetric}
        cpu = int4.int4_quantize(make_weight((130, 192)), **options)
        weight = int4.int4_quantize(make_weight((130, 192)).cuda(), **options)
        assert torch.equal(weight.packed.cpu(), cpu.packed) and torch.equal(weight.scales.cpu(), cpu.scales)
        dense = int4.int4_dequantize_triton(weight, dtype=dtype)
        assert torch.equal(dense.cpu(), int4.int4_dequantize_reference(cpu, dtype=dtype))
        x = torch.randn(3, 192, device="cuda").to(dtype)
        want = x.double() @ dense.double().T
        # y is rounded once (2^-8), sums are float32
        torch.testing.assert_close(int4.int4_linear(x, weight).double(), want, atol=1e-2, rtol=2**-7)
