"""INT8 weights and activations: the grid by hand, and every implementation against the reference."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, int8, split_k

# Rows that end inside a vector, inside a byte; one element; one row; many rows.
SHAPES = [(1, 64), (2, 192), (3, 80), (5, 48), (7, 33), (2, 16), (64, 48), (33, 65), (1, 1), (40, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("integer") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(int8, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


def make_weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, one of them zero where there are several."""
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[-1])
    weight = torch.randn(shape, generator=generator)
    weight *= torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    if shape[0] > 2:
        weight[1] = 0
    return weight.to(dtype)


def make_x(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def group_sizes(in_features: int) -> list[int]:
    return [size for size in (*int8.GROUP_SIZES, 96) if in_features % size == 0 and size < in_features] + [in_features]


class TestGrid:
    def test_golden(self) -> None:
        """By hand: absmax 254 gives scale 2; 1 / 2 and 3 / 2 are ties, which go to the even codes 0 and 2."""
        weight = int8.int8_quantize(torch.tensor([[254.0, -254.0, 1.0, 3.0, 0.0, -5.0]]))
        assert weight.scales.tolist() == [[2.0]] and weight.packed.tolist() == [[127, -127, 0, 2, 0, -2]]
        assert int8.int8_dequantize(weight, dtype=torch.float32).tolist() == [[254.0, -254.0, 0.0, 4.0, 0.0, -4.0]]

    def test_scales_are_rounded_before_codes_are_chosen(self) -> None:
        """absmax 127 * (1 + 2^-9): scale 1 + 2^-9, which is 1 in bfloat16; 127.25 then clamps to 127."""
        value = 127 * (1 + 2**-9)
        weight = int8.int8_quantize(torch.tensor([[value, 64.0]]), scale_dtype=torch.bfloat16)
        assert weight.scales.tolist() == [[1.0]] and weight.packed.tolist() == [[127, 64]]
        assert int8.int8_quantize(torch.tensor([[value, 64.0]])).scales.tolist() == [[1 + 2**-9]]

    @pytest.mark.parametrize("group_size", [32, 128])
    def test_error_is_within_half_a_step(self, group_size: int) -> None:
        weight = make_weight((40, 256))
        quantized = int8.int8_quantize(weight, group_size=group_size)
        error = (int8.int8_dequantize(quantized, dtype=torch.float32) - weight).abs().view(40, -1, group_size)
        # half a step, and the float32 rounding of code * scale, 127 * 2^-24 of a step
        assert (error <= 0.50001 * quantized.scales[:, :, None]).all()

    @pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39, 3e38])
    def test_zeros_tiny_and_huge(self, value: float, cpp: None) -> None:
        weight = torch.full((2, 32), value)
        want = int8.int8_quantize_reference(weight, group_size=32, scale_dtype=torch.float32)
        got = int8.int8_quantize(weight, group_size=32)
        assert torch.equal(got.packed, want[0]) and torch.equal(got.scales, want[1])
        assert (got.scales > 0).all()
        # 1e-45 is one step of subnormal float32: a 127th of it is 0, so the scale is 1 and the weight becomes 0.
        # 1e-39: scales are subnormal too, steps of 1.4e-45 in 7.9e-42
        dense = int8.int8_dequantize(got, dtype=torch.float32)
        torch.testing.assert_close(dense, torch.full((2, 32), 0.0 if value < 1e-44 else value), rtol=2e-4, atol=0)

    def test_float16_scales_overflow(self) -> None:
        with pytest.raises(ValueError, match="scale of row 1, group 0 exceeds torch.float16's 65504; use a wider"):
            int8.int8_quantize(torch.tensor([[1.0], [1e7]]), scale_dtype=torch.float16)


@pytest.mark.parametrize("shape", SHAPES)
class TestCpu:
    @pytest.mark.parametrize("scale_dtype", DTYPES)
    def test_quantize_equals_reference(self, shape: tuple[int, int], scale_dtype: torch.dtype, cpp: None) -> None:
        for dtype in DTYPES:
            weight = make_weight(shape, dtype)
            for group_size in group_sizes(shape[1]):
                got = int8.int8_quantize_cpu(weight, group_size=group_size, scale_dtype=scale_dtype)
                want = int8.int8_quantize_reference(weight, group_size=group_size, scale_dtype=scale_dtype)
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

    def test_dequantize_equals_reference(self, shape: tuple[int, int], cpp: None) -> None:
        for group_size in group_sizes(shape[1]):
            weight = int8.int8_quantize(make_weight(shape), group_size=group_size)
            for dtype in DTYPES:
                want = int8.int8_dequantize_reference(weight, dtype=dtype)
                out = torch.full_like(want, torch.nan)
                int8.int8_dequantize_into(weight, out)
                assert torch.equal(int8.int8_dequantize_cpu(weight, dtype=dtype), want) and torch.equal(out, want)

    @pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11, 17])  # 11: 8 + 3; 17: through a dense weight
    def test_linear_equals_float64(self, shape: tuple[int, int], rows: int, cpp: None) -> None:
        for group_size in group_sizes(shape[1]):
            weight = int8.int8_quantize(make_weight(shape), group_size=group_size)
            # float32: sums in another order; 16 bits: y is rounded once, half of 2^-8 and of 2^-11
            for dtype, tolerance in zip(DTYPES, (1e-5, 2**-8, 2**-10), strict=True):
                x = make_x((rows, shape[1])).to(dtype)
                want = x.double() @ int8.int8_dequantize_reference(weight, dtype=dtype).double().T
                error = (int8.int8_linear_cpu(x, weight).double() - want).abs()
                # the least steps of the dtype: half of 2^-24 in float16
                assert (error <= tolerance * want.abs().max() + (2**-25 if dtype == torch.float16 else 1e-40)).all()

    def test_activations_equal_reference(self, shape: tuple[int, int], cpp: None) -> None:
        for dtype in DTYPES:
            x = make_weight((*shape, 3), dtype).transpose(1, 2)
            for scale in (None, torch.tensor(0.01)):
                got, want = (
                    function(x, scale=scale)
                    for function in (int8.quantize_activations_cpu, int8.quantize_activations_reference)
                )
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1].expand(got[1].shape))


class TestActivations:
    def test_golden(self) -> None:
        codes, scales = int8.quantize_activations(torch.tensor([[[127.0, 0.5, 1.5, -127.0]], [[0.0, 0.0, 0.0, 0.0]]]))
        assert codes.tolist() == [[[127, 0, 2, -127]], [[0, 0, 0, 0]]] and scales.tolist() == [[1.0], [1.0]]

    def test_static_scale_clamps(self) -> None:
        codes, scales = int8.quantize_activations(torch.tensor([[200.0, -3e38, 2.5]]), scale=torch.tensor(1.0))
        assert codes.tolist() == [[127, -127, 2]] and scales.tolist() == [1.0]

    @pytest.mark.parametrize("implementation", ["reference", "auto"])
    @pytest.mark.parametrize("scale", [None, torch.tensor(0.1)])
    def test_a_row_with_inf_or_nan_is_nan(
        self, implementation: str, scale: Tensor | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", implementation)
        x = torch.ones(4, 20)
        x[0, 3], x[1, 19], x[2, 0] = torch.inf, torch.nan, -torch.inf
        codes, scales = int8.quantize_activations(x, scale=scale)
        assert scales.isnan().tolist() == [True, True, True, False]
        assert (codes[:3] == 0).all() and (codes[3] != 0).all()

    def test_errors(self) -> None:
        with pytest.raises(TypeError, match="x is torch.float64; use one of torch.float32"):
            int8.quantize_activations(torch.ones(2, 4).double())
        with pytest.raises(ValueError, match=r"scale of x is torch.float64 \(\) on cpu; use one float32 on cpu"):
            int8.quantize_activations(torch.ones(2, 4), scale=torch.tensor(1.0).double())


class TestOps:
    def test_opcheck(self) -> None:
        weight = int8.int8_quantize(make_weight((6, 96)), group_size=32)
        tensors = weight.packed, weight.scales
        x = make_weight((2, 96)).requires_grad_()
        torch.library.opcheck(torch.ops.lowbit.int8_quantize.default, (make_weight((6, 96)), 32, torch.bfloat16))
        torch.library.opcheck(torch.ops.lowbit.int8_dequantize.default, (*tensors, 32, torch.bfloat16))
        torch.library.opcheck(torch.ops.lowbit.int8_linear.default, (x, *tensors, 32))
        torch.library.opcheck(torch.ops.lowbit.quantize_activations.default, (x.detach(), None))
        torch.library.opcheck(torch.ops.lowbit.quantize_activations.default, (x.detach(), torch.tensor(0.1)))

    @pytest.mark.parametrize("rows", [1, 20])
    def test_gradient_equals_the_dense_one(self, rows: int) -> None:
        weight = int8.int8_quantize(make_weight((12, 96)))
        x, dense_x = (make_weight((rows, 96)).view(rows, 1, 96).requires_grad_() for _ in range(2))
        grad = make_weight((rows, 12)).view(rows, 1, 12)
        int8.int8_linear(x, weight).backward(grad)
        (dense_x @ int8.int8_dequantize_reference(weight, dtype=torch.float32).T).backward(grad)
        assert torch.equal(x.grad, dense_x.grad)  # the same product of the same numbers

    def test_compiles(self) -> None:
        weight = int8.int8_quantize(make_weight((12, 96)))
        compiled = torch.compile(lambda x: int8.int8_linear(x, weight) + 1, backend="aot_eager", fullgraph=True)
        x = make_weight((3, 96))
        assert torch.equal(compiled(x), int8.int8_linear(x, weight) + 1)

    @pytest.mark.parametrize(
        "view", [lambda w: w.T, lambda w: w[:, ::2], lambda w: w.view(-1)[64:].view(-1, 64), lambda w: w[:, 1:33]]
    )
    def test_any_strides_equal_contiguous(self, view: Callable[[Tensor], Tensor]) -> None:
        weight = view(make_weight((128, 64)))
        got, want = int8.int8_quantize(weight), int8.int8_quantize(weight.contiguous())
        assert torch.equal(got.packed, want.packed) and torch.equal(got.scales, want.scales)
        x = weight[:4]
        assert torch.equal(int8.int8_linear(x, got), int8.int8_linear(x.contiguous(), got))

    @pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
    def test_no_rows(self, shape: tuple[int, ...]) -> None:
        weight = int8.int8_quantize(make_weight((5, 64)))
        assert int8.int8_linear(torch.empty(shape), weight).shape == (*shape[:-1], 5)

    def test_threads_do_not_change_results(self) -> None:
        weight = int8.int8_quantize(make_weight((301, 512)), group_size=64)
        x, threads = make_weight((2, 512)).bfloat16(), torch.get_num_threads()
        want = int8.int8_linear(x, weight)
        try:
            torch.set_num_threads(3)
            assert torch.equal(int8.int8_linear(x, weight), want)
        finally:
            torch.set_num_threads(threads)


class TestErrors:
    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("implementation", ["reference", "auto"])
    def test_not_finite(self, bad: float, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", implementation)
        weight = torch.zeros(4, 80)
        weight[2, 5] = bad
        with pytest.raises(ValueError, match=rf"weight\[2, 5\] is {bad}; .*diverged training run"):
            int8.int8_quantize(weight)

    def test_group_size(self) -> None:
        with pytest.raises(ValueError, match="group_size=128 .* does not divide in_features=576; use 32, 64, 576"):
            int8.int8_quantize(torch.ones(1, 576), group_size=128)
        with pytest.raises(ValueError, match="group_size=0 is neither a multiple of 32 nor in_features"):
            int8.int8_quantize(torch.ones(1, 576), group_size=0)

    def test_float16_range(self) -> None:
        weight = int8.int8_quantize(torch.tensor([[1.0, 7e4]]))
        for function in (
            lambda: int8.int8_dequantize(weight, dtype=torch.float16),
            lambda: int8.int8_linear(torch.ones(1, 2).half(), weight),
        ):
            with pytest.raises(ValueError, match=r"weight\[0, 1\] exceeds float16's 65504, use bfloat16 or float32"):
                function()

    def test_sizes_are_checked_before_memory_is_read(self) -> None:
        weight = int8.int8_quantize(torch.ones(2, 64), group_size=32)
        for field, value, message in [
            ("packed", weight.packed[:1], r"packed is torch.int8 \(1, 64\); a \[2, 64\] weight in groups of 32 needs"),
            ("packed", weight.packed.T.contiguous().T, "needs contiguous torch.int8"),
            ("scales", weight.scales[:, :1], r"scales is torch.float32 \(2, 1\); .* \(2, 2\)"),
            ("scales", weight.scales.double(), "scales is torch.float64"),
        ]:
            arguments = {name: getattr(weight, name) for name in int8.Int8Weight.__slots__}
            with pytest.raises(ValueError, match=message):
                int8.Int8Weight(**{**arguments, field: value})
        with pytest.raises(ValueError, match=r"x is \(1, 63\) on cpu; this weight takes \[..., 64\]"):
            int8.int8_linear(torch.ones(1, 63), weight)
        with pytest.raises(ValueError, match=r"out is \(2, 63\).* needs it contiguous, \(2, 64\)"):
            int8.int8_dequantize_into(weight, torch.ones(2, 63))


INTERPRETED = """
import torch
from trainer.kernels import int8

torch.manual_seed(0)
# rows that divide by 16 are fused; 1040 features in several parts, the last one shorter
for shape, group_size in [((7, 33), 33), ((5, 96), 32), ((1, 1), 1), ((33, 128), 64), ((35, 1040), 1040)]:
    weight = int8.int8_quantize(torch.randn(shape), group_size=group_size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got, want = (f(weight, dtype=dtype) for f in (int8.int8_dequantize_triton, int8.int8_dequantize_reference))
        # the interpreter truncates float32 to bfloat16 where GPUs round: up to one ulp, 2^-7 of the value
        torch.testing.assert_close(got, want, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 0)
        # float32: sums in another order. float16: rounded once. bfloat16: weight and output truncated, 2^-7 each
        for rows in (1, 8, 17):
            x = torch.randn(rows, shape[1]).to(dtype)
            want = x.double() @ int8.int8_dequantize_reference(weight, dtype=dtype).double().T
            error = (int8.int8_linear(x, weight).double() - want).abs().max() / want.abs().max()
            assert error < {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-6}[dtype], (shape, dtype)

# Activations: zeros, inf, nan, subnormal scales, rows longer than a tile, another order, a given scale, strides.
for shape in [(6, 33), (6, 2100), (2, 3, 64)]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(shape).to(dtype)
        rows = x.view(-1, shape[-1])
        tiny = 1e-30 if dtype == torch.bfloat16 else 1e-40  # the interpreter widens bfloat16's subnormals to 0
        rows[1], rows[2, 3], rows[3, 4], rows[4] = 0, torch.inf, torch.nan, rows[4] * tiny
        order = torch.randperm(shape[-1], dtype=torch.int32)
        for scale in (None, torch.tensor(0.01)):
            want = int8.quantize_activations_reference(x, scale=scale)
            for got in (int8.quantize_activations(x, scale=scale), int8.quantize_activations_triton(x, scale=scale)):
                assert torch.equal(got[0], want[0]), (shape, dtype, scale)
                assert torch.equal(got[1].view(torch.int32), want[1].view(torch.int32)), (shape, dtype, scale)
            got = int8.quantize_activations_triton(x, scale=scale, order=order)
            assert torch.equal(got[0], want[0][..., order]), (shape, dtype, scale)
        strided = rows.float().T.contiguous().T
        assert torch.equal(int8.quantize_activations_triton(strided)[0], int8.quantize_activations_triton(rows)[0])
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
    sizes = "numel num_rows in_features out_features group_size num_groups features_per_split stride_x_row".split()
    types = {"packed_ptr": "*i8", "scales_ptr": "*fp32", **dict.fromkeys(sizes, "i32"), "numel": "i64"}
    types |= {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "y_ptr": "*fp32", "codes_ptr": "*i8", "order_ptr": "*i32"}
    tile = {**int8.LINEAR_TILES[4 if dtype == "fp32" else 2]}
    options = {"num_warps": tile.pop("num_warps"), "aligned": set(sizes) - {"num_rows", "num_groups"}}
    del tile["PROGRAMS"]
    dot = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    activations = {"given_scale_ptr": None, "NUM_FEATURES": int8.NUM_FEATURES}
    linear = {"DOT": split_k.dot_dtype(dot), **tile}
    for target in aot.TARGETS:
        for kernel, constants, given in [
            (int8._int8_dequantize_kernel, {"NUM_WEIGHTS": int8.NUM_WEIGHTS}, {}),
            (int8._int8_linear_kernel, {"SPAN": min(64, tile["BLOCK_K"]), **linear}, options),
            (int8._int8_linear_kernel, {"SPAN": split_k.MIN_SPAN, **linear}, options),
            (int8._quantize_activations_kernel, activations, {"aligned": ["in_features", "stride_x_row"]}),
        ]:
            used = {name: kind for name, kind in types.items() if name in kernel.arg_names}
            compiled = aot.compile_kernel(kernel, used, constants, target, **given)
            assert aot.spilled_registers(compiled, target) == 0, (target, kernel, constants)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_reference(dtype: torch.dtype) -> None:
    cpu = int8.int8_quantize(make_weight((130, 192)), group_size=64)
    weight = int8.int8_quantize(make_weight((130, 192)).cuda(), group_size=64)
    assert torch.equal(weight.packed.cpu(), cpu.packed) and torch.equal(weight.scales.cpu(), cpu.scales)
    dense = int8.int8_dequantize_triton(weight, dtype=dtype)
    assert torch.equal(dense.cpu(), int8.int8_dequantize_reference(cpu, dtype=dtype))
    x = torch.randn(3, 192, device="cuda").to(dtype)
    want = x.double() @ dense.double().T
    # y is rounded once (2^-8), sums are float32
    torch.testing.assert_close(int8.int8_linear(x, weight).double(), want, atol=1e-2, rtol=2**-7)
