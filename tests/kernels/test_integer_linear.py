"""Integer products: exact sums, one fixed order of groups, and the same bits from every implementation."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, int4, int8, integer_linear

Weight = int4.Int4Weight | int8.Int8Weight

# Features beside whole panels of 32, in_features beside steps of 8; one element; one row.
SHAPES = [(1, 64), (2, 192), (3, 80), (7, 33), (2, 16), (64, 48), (33, 65), (1, 1), (70, 256), (100, 132)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512-VNNI or what is here, AVX2, SSE2."""
    if _cpp.load("integer_linear") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(integer_linear, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


def randn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights(shape: tuple[int, int]) -> Iterator[Weight]:
    """8 bits, 4 bits symmetric, asymmetric and in act-order, in groups of every size that fits."""
    weight = randn(shape)
    weight[0] *= 1000
    for group_size in {size for size in (32, 64, 96, 128, shape[1]) if shape[1] % size == 0}:
        yield int8.int8_quantize(weight, group_size=group_size)
        yield int4.int4_quantize(weight, group_size=group_size)
        asymmetric = int4.int4_quantize(weight, group_size=group_size, symmetric=False)
        yield asymmetric
        g_idx = torch.arange(shape[1], dtype=torch.int32) % (shape[1] // group_size)
        yield int4.Int4Weight(asymmetric.packed, asymmetric.scales, asymmetric.zeros, g_idx, *shape, group_size)


def linear_dynamic(x: Tensor, weight: Weight, **options: object) -> Tensor:
    is_int4 = isinstance(weight, int4.Int4Weight)
    function = integer_linear.int4_linear_dynamic if is_int4 else integer_linear.int8_linear_dynamic
    return function(x, weight, **options)


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    is_int4 = isinstance(weight, int4.Int4Weight)
    return (int4.int4_dequantize if is_int4 else int8.int8_dequantize)(weight, dtype=dtype)


class TestReference:
    def test_golden(self) -> None:
        """By hand: x = 127, -63.5 has scale 1 and codes 127, -64 (a tie); W = 14, -4 has scale 2 and codes 7, -2."""
        weight = int4.int4_quantize(torch.tensor([[14.0, -4.0]]), group_size=2)
        y = integer_linear.int4_linear_dynamic(torch.tensor([[127.0, -63.5]]), weight)
        assert y.tolist() == [[2.0 * (127 * 7 + 64 * 2)]]

    @pytest.mark.parametrize("shape", [(7, 33), (70, 256)])
    def test_equals_sums_of_int64(self, shape: tuple[int, int]) -> None:
        x = randn((5, shape[1]))
        codes, scales = int8.quantize_activations(x)
        for weight in weights(shape):
            got = integer_linear.linear_dynamic_reference(x, weight, x_scale=None, out_dtype=torch.float32)
            group = torch.arange(shape[1]) // weight.group_size
            if isinstance(weight, int8.Int8Weight):
                centred = weight.packed.long()
            else:
                group = group if weight.g_idx is None else weight.g_idx.long()
                zeros = torch.full(weight.scales.shape, 8) if weight.zeros is None else weight.zeros.long()
                centred = int4.unpack_int4(weight.packed, shape[1]).long() - zeros[:, group]
            total = torch.zeros(5, shape[0])
            for g in range(weight.num_groups):
                total += (codes[:, group == g].long() @ centred[:, group == g].T).float() * weight.scales[:, g]
            assert torch.equal(got, total * scales[:, None])

    def test_near_the_product_that_is_not_rounded(self) -> None:
        """x is off by half a step of 8 bits, max |x| / 254, at most: |y - x W^T| <= sum |W| max |x| / 254."""
        x = randn((5, 256))
        for weight in weights((70, 256)):
            dense = dequantize(weight, torch.float32)
            bound = x.abs().amax(1, keepdim=True) / 254 * dense.abs().sum(1)
            assert ((linear_dynamic(x, weight) - x @ dense.T).abs() <= 1.001 * bound).all()  # and float32


@pytest.mark.parametrize("shape", SHAPES)
class TestCpu:
    @pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 17])
    def test_same_bits_as_the_reference(self, shape: tuple[int, int], rows: int, cpp: None) -> None:
        x = randn((rows, shape[1]))
        x[0] = 0
        for weight in weights(shape):
            panels = integer_linear.repack(weight)
            for dtype in DTYPES:
                options = {"x_scale": None, "out_dtype": dtype}
                want = integer_linear.linear_dynamic_reference(x.to(dtype), weight, **options)
                assert torch.equal(integer_linear.linear_dynamic_cpu(x.to(dtype), weight, **options), want)
                if dtype in int8.CPP_DTYPES:
                    assert torch.equal(integer_linear.integer_linear(x.to(dtype), panels), want)

    def test_static_scale_bias_and_float32_output(self, shape: tuple[int, int], cpp: None) -> None:
        x, bias = randn((7, shape[1])).bfloat16(), randn(shape[:1]).bfloat16()
        scale = torch.tensor(0.01)  # clamps beyond 1.27
        for weight in weights(shape):
            panels = integer_linear.repack(weight)
            for out_dtype in (torch.bfloat16, torch.float32):
                options = {"x_scale": scale, "out_dtype": out_dtype}
                want = integer_linear.linear_dynamic_reference(x, weight, **options)
                assert torch.equal(integer_linear.linear_dynamic_cpu(x, weight, **options), want)
                assert torch.equal(integer_linear.integer_linear(x, panels, **options), want)
                biased = want + bias.to(out_dtype)
                assert torch.equal(integer_linear.integer_linear(x, panels, bias, **options), biased)

    def test_repack(self, shape: tuple[int, int], cpp: None) -> None:
        for weight in weights(shape):
            if isinstance(weight, int4.Int4Weight) and weight.g_idx is not None:
                continue
            got, want = integer_linear.repack_cpu(weight), integer_linear.repack_reference(weight)
            for a, b in zip(got, want, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
            back = integer_linear.unpack_panels(integer_linear.repack(weight))
            for name in ("packed", "scales", "zeros"):
                a, b = getattr(back, name, None), getattr(weight, name, None)
                assert (a is None and b is None) or torch.equal(a, b)


class TestInvariance:
    def test_a_row_does_not_depend_on_the_others(self) -> None:
        x = randn((64, 256)).bfloat16()
        for weight in weights((70, 256)):
            panels = integer_linear.repack(weight)
            together = integer_linear.integer_linear(x, panels)
            assert torch.equal(linear_dynamic(x, weight), together)
            for start, stop in [(0, 1), (5, 7), (17, 40), (63, 64)]:
                alone = integer_linear.integer_linear(x[start:stop], panels)
                assert torch.equal(alone, together[start:stop])

    def test_threads_do_not_change_results(self) -> None:
        x, weight = randn((64, 256)).bfloat16(), int4.int4_quantize(randn((301, 256)), group_size=32)
        want, threads = linear_dynamic(x, weight), torch.get_num_threads()
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                assert torch.equal(linear_dynamic(x, weight), want)
        finally:
            torch.set_num_threads(threads)

    def test_int8_equals_int_mm(self) -> None:
        """torch's product of the same codes: the sums are integers, so nothing may differ."""
        weight = int8.int8_quantize(randn((64, 256)))
        x = randn((32, 256))
        codes, scales = int8.quantize_activations(x)
        sums = torch._int_mm(codes, weight.packed.T)
        assert torch.equal(linear_dynamic(x, weight), sums.float() * weight.scales.T * scales[:, None])

    def test_the_largest_sums(self, cpp: None) -> None:
        """All codes at their ends: an instruction that saturates 16-bit sums would show here."""
        x = torch.ones(3, 2048) * torch.tensor([[1.0], [-1.0], [2.0]])
        for value in (1.0, -1.0):
            for weight in (
                int8.int8_quantize(torch.full((5, 2048), value)),
                int8.Int8Weight(torch.full((5, 2048), -128, dtype=torch.int8), torch.ones(5, 1), 5, 2048, 2048),
                int4.int4_quantize(torch.full((5, 2048), value), group_size=2048),
                int4.int4_quantize(torch.full((5, 2048), value), group_size=64, symmetric=False),
            ):
                options = {"x_scale": None, "out_dtype": torch.float32}
                want = integer_linear.linear_dynamic_reference(x, weight, **options)
                assert torch.equal(integer_linear.linear_dynamic_cpu(x, weight, **options), want)


class TestServing:
    def test_stacked_weights_equal_each_alone(self) -> None:
        x = randn((3, 64))
        parts = [int4.int4_quantize(randn((n, 64)), group_size=32) for n in (5, 33, 7)]
        together = integer_linear.integer_linear(x, integer_linear.repack(parts))
        assert torch.equal(together, torch.cat([linear_dynamic(x, part) for part in parts], 1))

    def test_recorded_on_a_tape(self) -> None:
        if _cpp.load("integer_linear") is None:
            pytest.skip("no C++ compiler here")
        panels = integer_linear.repack(int4.int4_quantize(randn((40, 64)), group_size=32))
        x, tape = randn((3, 64)).bfloat16(), _tape.Tape()
        with tape.record():
            y = integer_linear.integer_linear(x, panels)
        x.copy_(randn((4, 64))[:3])
        tape.replay()
        assert torch.equal(y, integer_linear.integer_linear(x, panels)) and len(tape) == 1

    def test_reference_of_panels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, bias = randn((3, 96)).bfloat16(), randn((40,)).bfloat16()
        for weight in weights((40, 96)):
            panels = integer_linear.repack(weight)
            want = integer_linear.integer_linear(x, panels, bias)
            with monkeypatch.context() as patch:
                patch.setenv("LOWBIT_KERNELS", "reference")
                assert torch.equal(integer_linear.integer_linear(x, panels, bias), want)


class TestOps:
    def test_opcheck(self) -> None:
        x = randn((2, 96)).requires_grad_()
        for weight in weights((6, 96)):
            if isinstance(weight, int4.Int4Weight):
                arguments = (x, *int4.op_arguments(weight), None, torch.float32)
                torch.library.opcheck(torch.ops.lowbit.int4_linear_dynamic.default, arguments)
            else:
                arguments = (x, weight.packed, weight.scales, weight.group_size, None, torch.bfloat16)
                torch.library.opcheck(torch.ops.lowbit.int8_linear_dynamic.default, arguments)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradient_is_that_of_the_dequantized_weight(self, dtype: torch.dtype) -> None:
        grad = randn((2, 3, 12)).to(dtype)
        for weight in weights((12, 96)):
            x = randn((2, 3, 96)).to(dtype).requires_grad_()
            linear_dynamic(x, weight).backward(grad)
            assert torch.equal(x.grad, grad @ dequantize(weight, dtype))  # the same product of the same numbers

    def test_compiles(self) -> None:
        weight = int4.int4_quantize(randn((12, 96)), group_size=32)
        compiled = torch.compile(lambda x: linear_dynamic(x, weight) + 1, backend="aot_eager", fullgraph=True)
        x = randn((3, 96))
        assert torch.equal(compiled(x), linear_dynamic(x, weight) + 1)

    def test_strided_input_and_no_rows(self) -> None:
        x = randn((8, 192))[::2, ::2]
        for weight in weights((12, 96)):
            assert torch.equal(linear_dynamic(x, weight), linear_dynamic(x.contiguous(), weight))
            assert linear_dynamic(x[:0], weight).shape == (0, 12)
            assert linear_dynamic(x.view(2, 2, 96)[:, :0], weight).shape == (2, 0, 12)

    def test_inf_and_nan_stay_in_their_row(self) -> None:
        x = randn((3, 96))
        x[0, 5], x[2, 95] = torch.inf, torch.nan
        for weight in weights((12, 96)):
            assert linear_dynamic(x, weight).isnan().all(1).tolist() == [True, False, True]


class TestErrors:
    def test_act_order_with_unequal_groups(self) -> None:
        weight = int4.int4_quantize(randn((4, 64)), group_size=32)
        for g_idx, counts in [(torch.zeros(64), r"\[64, 0\]"), (torch.arange(64) // 31, r"\[31, 31, 2\]")]:
            bad = int4.Int4Weight(weight.packed, weight.scales, None, g_idx.to(torch.int32), 4, 64, 32)
            with pytest.raises(ValueError, match=rf"g_idx puts {counts} features .* exactly group_size=32"):
                linear_dynamic(torch.ones(1, 64), bad)

    def test_sums_that_could_overflow(self) -> None:
        weight = int8.int8_quantize(torch.ones(1, 140_000))
        with pytest.raises(ValueError, match="group_size=140000; sums of more than 132104 products may exceed 32 bits"):
            linear_dynamic(torch.ones(1, 140_000), weight)

    def test_weights_that_do_not_stack(self) -> None:
        parts = [int4.int4_quantize(randn((4, 64)), group_size=size) for size in (32, 64)]
        with pytest.raises(ValueError, match="2 weights do not stack on a cpu: .* groups of 32.* groups of 64"):
            integer_linear.repack(parts)

    def test_arguments(self) -> None:
        weight = int4.int4_quantize(randn((4, 64)), group_size=32)
        panels, x = integer_linear.repack(weight), torch.ones(1, 64)
        with pytest.raises(ValueError, match=r"x is \(1, 63\) on cpu; this weight takes \[..., 64\]"):
            linear_dynamic(torch.ones(1, 63), weight)
        with pytest.raises(TypeError, match="out_dtype is torch.float64; use one of"):
            linear_dynamic(x, weight, out_dtype=torch.float64)
        with pytest.raises(ValueError, match="scale of x is torch.int64"):
            linear_dynamic(x, weight, x_scale=torch.tensor(1))
        with pytest.raises(ValueError, match=r"x is torch.float16 \(1, 64\)"):
            integer_linear.integer_linear(x.half(), panels)
        with pytest.raises(ValueError, match=r"x is torch.float32 \(1, 64\) with strides \(128, 2\)"):
            integer_linear.integer_linear(torch.ones(1, 128)[:, ::2], panels)
        with pytest.raises(ValueError, match=r"bias is torch.float32 \(3,\); x needs torch.float32 \[4\]"):
            integer_linear.integer_linear(x, panels, torch.ones(3))
        with pytest.raises(ValueError, match="out_dtype=torch.bfloat16; use torch.float32"):
            integer_linear.integer_linear(x, panels, out_dtype=torch.bfloat16)


INTERPRETED = """
import torch
from tests.kernels.test_integer_linear import linear_dynamic, randn, weights
from trainer.kernels import integer_linear

for shape in [(7, 33), (70, 96), (1, 1), (3, 256)]:
    for weight in weights(shape):
        for dtype in (torch.float32, torch.float16):
            x = randn((5, shape[1])).to(dtype)
            want = integer_linear.linear_dynamic_reference(x, weight, x_scale=None, out_dtype=dtype)
            assert torch.equal(linear_dynamic(x, weight), want), (shape, weight.group_size, dtype)
print("interpreted")
"""


def test_triton_interpreted_gives_the_bits_of_the_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize(("four_bits", "zeros"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str, four_bits: bool, zeros: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    sizes = "num_rows in_features out_features group_size stride_packed_row".split()
    types = {"codes_ptr": "*i8", "x_scales_ptr": "*fp32", "packed_ptr": "*u8" if four_bits else "*i8"}
    types |= {"scales_ptr": "*fp32", "y_ptr": f"*{dtype}", **dict.fromkeys(sizes, "i32")}
    constants = {"FOUR_BITS": four_bits, "HAS_ZEROS": zeros}
    constants |= dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), integer_linear.PRODUCT_TILE, strict=True))
    types, constants = (types | {"zeros_ptr": "*u8"}, constants) if zeros else (types, constants | {"zeros_ptr": None})
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(integer_linear._integer_product_kernel, types, constants, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_gives_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    x = randn((37, 256)).to(dtype)
    for weight in weights((70, 256)):
        want = integer_linear.linear_dynamic_reference(x, weight, x_scale=None, out_dtype=dtype)
        fields = {name: getattr(weight, name) for name in type(weight).__slots__}
        moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in fields.items()}
        assert torch.equal(linear_dynamic(x.cuda(), type(weight)(**moved)).cpu(), want)
