"""SwiGLU against torch's silu and the reference, its gradient against float64."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, swiglu

# F that ends inside a vector, on one, after one; one element; enough work for two threads.
SHAPES = [(1, 1536), (3, 1), (2, 15), (7, 33), (5, 96), (2, 1023), (16, 1536)]
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("elementwise") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(swiglu, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


def case(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    rows, size = shape
    return (4 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size))).to(dtype)


def torch_swiglu(gate_up: Tensor) -> Tensor:
    """As transformers' LlamaMLP writes it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def assert_same_up_to_exp(got: Tensor, want: Tensor) -> None:
    # Both exponentials are within an ulp, and three roundings follow: 6 * 2^-24 is below 1e-6. In bfloat16 that shows
    # at a rounding boundary, once in some 2^13 values: 2^-7 of the value for one place, and once more for the product.
    torch.testing.assert_close(got, want, rtol=1e-6 if got.dtype == torch.float32 else 2**-6, atol=0, equal_nan=True)
    if got.dtype == torch.bfloat16:
        different = (got != want) & ~(got.isnan() & want.isnan())
        assert different.sum() <= max(1, got.numel() // 1000)


def test_golden() -> None:
    """silu(ln 3) = ln 3 * 3/4, times up = 8; gate is the first half."""
    got = swiglu.swiglu(torch.tensor([[3.0, 8.0]]).log() * torch.tensor([1.0, 0.0]) + torch.tensor([[0.0, 8.0]]))
    torch.testing.assert_close(got, torch.tensor([[6.591673732]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
class TestCpu:
    def test_equals_torch(self, shape: tuple[int, int], dtype: torch.dtype, cpp: None) -> None:
        gate_up = case(shape, dtype)
        assert_same_up_to_exp(swiglu.swiglu_cpu(gate_up), torch_swiglu(gate_up))

    def test_same_bits_on_every_processor(self, shape: tuple[int, int], dtype: torch.dtype, cpp: None) -> None:
        gate_up, want = case(shape, dtype), torch.empty(shape, dtype=dtype)
        _tape.call(_tape.kernel("elementwise", "swiglu"), swiglu._DTYPE_IDS[dtype], gate_up, want, *shape)
        assert torch.equal(swiglu.swiglu_cpu(gate_up), want)

    def test_reference_equals_torch(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        gate_up = case(shape, dtype)
        assert_same_up_to_exp(swiglu.swiglu_reference(gate_up), torch_swiglu(gate_up))


def test_silu_is_accurate_from_end_to_end(cpp: None) -> None:
    """Against float64, over every gate whose silu is a normal float32; below, float32's exp(-gate) is inf."""
    gate = torch.linspace(-88.7, 100, 400_001)
    got = swiglu.swiglu_cpu(torch.stack([gate, torch.ones_like(gate)], dim=1))[:, 0].double()
    want = gate.double() / (1 + torch.exp(-gate.double()))
    # an exponential within an ulp (2 * 2^-24), and the roundings of the sum and the quotient; torch's own reaches 2.9
    assert ((got - want).abs() <= 4 * 2**-24 * want.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_gates_and_special_values(dtype: torch.dtype, cpp: None) -> None:
    """Every bfloat16 there is, with inf, nan and subnormal numbers, as a gate."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).to(dtype)
    gate_up = torch.stack([gate, torch.ones_like(gate)], dim=1)
    got, want = swiglu.swiglu_cpu(gate_up), torch_swiglu(gate_up)
    normal = (want.abs() >= torch.finfo(dtype).tiny) | want.isnan()
    assert_same_up_to_exp(got[normal], want[normal])
    # torch's vector code may flush subnormal results; both are closer to 0 than float32 can divide
    assert (got[~normal].abs() < torch.finfo(dtype).tiny).all()
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    gate_up = case((40, 577), dtype)
    together = swiglu.swiglu(gate_up)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(swiglu.swiglu(gate_up), together)
    finally:
        torch.set_num_threads(threads)
    for start, stop in [(0, 1), (5, 6), (17, 40)]:
        assert torch.equal(swiglu.swiglu(gate_up[start:stop]), together[start:stop])
    assert swiglu.swiglu(gate_up[:0]).shape == (0, 577)


# ---- gradient


def exact_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate_up = gate_up.double().requires_grad_()
    return torch.autograd.grad(torch_swiglu(gate_up), gate_up, grad.double())[0]


def assert_gradient(got: Tensor, grad: Tensor, gate_up: Tensor) -> None:
    want = exact_gradient(grad, gate_up)
    # Half a place of the result, after some 16 roundings of float32 (2^-24). Those of dgate's factor are of values up
    # to 1 and 1 + |gate|, which cancel. A sigmoid below 2^-125 may be 0, where float32's exp(-gate) is inf; below its
    # smallest normal number a dtype has steps of a fixed size.
    half_place = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[got.dtype]
    gate, up = gate_up.double().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    bound = sigmoid + 2**-105
    factor = torch.cat([up * bound * (1 + (gate * (1 - sigmoid)).abs() + gate.abs() * 2**-4), gate * bound], dim=-1)
    size = (torch.cat([grad, grad], dim=-1).double() * factor).abs()
    tiny = torch.finfo(got.dtype).tiny
    assert ((got.double() - want).abs() <= half_place * want.abs() + 2**-20 * size + tiny).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestGradient:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_equals_float64(self, shape: tuple[int, int], dtype: torch.dtype, cpp: None) -> None:
        gate_up, grad = case(shape, dtype), case(shape, dtype)[:, : shape[1]].flip(1).contiguous()
        got, out = swiglu.swiglu_backward_cpu(grad, gate_up, with_output=False)
        assert_gradient(got, grad, gate_up)
        assert out is None
        assert_gradient(swiglu.swiglu_backward_reference(grad, gate_up, with_output=False)[0], grad, gate_up)
        again, out = swiglu.swiglu_backward_cpu(grad, gate_up, with_output=True)
        assert torch.equal(again, got) and torch.equal(out, swiglu.swiglu_cpu(gate_up))

    @pytest.mark.parametrize("scale", [0, 1e-30, 1e-3, 30, 1e18])
    def test_huge_and_tiny_values(self, scale: float, dtype: torch.dtype, cpp: None) -> None:
        gate_up, grad = (case((3, 65), dtype) * scale).to(dtype), case((3, 65), dtype)[:, :65].contiguous()
        assert_gradient(swiglu.swiglu_backward_cpu(grad, gate_up, with_output=False)[0], grad, gate_up)

    def test_same_bits_on_every_processor(self, dtype: torch.dtype, cpp: None) -> None:
        gate_up, grad = case((7, 1023), dtype), case((7, 1023), dtype)[:, :1023].contiguous()
        got = swiglu.swiglu_backward_cpu(grad, gate_up, with_output=True)
        swiglu.kernel = _tape.kernel  # the fixture puts back what it found
        want = swiglu.swiglu_backward_cpu(grad, gate_up, with_output=True)
        assert torch.equal(got[1], want[1])
        if dtype == torch.float32:
            assert torch.equal(got[0], want[0])
        else:  # AVX512's sigmoid is good to 2^-21: a place at a rounding boundary, once in some 2^12 values
            torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=0)
            assert (got[0] != want[0]).sum() <= got[0].numel() // 500

    @pytest.mark.parametrize("size", [1, 16, 64])  # parts of a vector, whole ones, pairs
    def test_every_bfloat16_gate(self, size: int, dtype: torch.dtype, cpp: None) -> None:
        gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).to(dtype).view(-1, size)
        gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
        _, out = swiglu.swiglu_backward_cpu(torch.ones_like(gate), gate_up, with_output=True)
        want = swiglu.swiglu_cpu(gate_up.float()).to(dtype)  # no shortcut there, and up is 1
        forward = swiglu.swiglu_cpu(gate_up)
        assert torch.equal(out.isnan(), forward.isnan()) and torch.equal(out.nan_to_num(), forward.nan_to_num())
        assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(), want.nan_to_num())
        assert torch.equal(out.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
        finite = torch.where(gate_up.isfinite(), gate_up, 0)
        got, _ = swiglu.swiglu_backward_cpu(torch.ones_like(gate), finite, with_output=False)
        assert_gradient(got, torch.ones_like(gate), finite)

    def test_does_not_depend_on_the_number_of_threads(self, dtype: torch.dtype) -> None:
        gate_up, grad = case((40, 577), dtype), case((40, 577), dtype)[:, :577].contiguous()
        want = swiglu.swiglu_backward(grad, gate_up)
        threads = torch.get_num_threads()
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                assert torch.equal(swiglu.swiglu_backward(grad, gate_up), want)
        finally:
            torch.set_num_threads(threads)

    def test_through_autograd(self, dtype: torch.dtype) -> None:
        gate_up, grad = case((3, 65), dtype).requires_grad_(), case((3, 65), dtype)[:, :65]  # strided
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
            y = swiglu.swiglu(gate_up)
        assert [tensor.data_ptr() for tensor in saved] == [gate_up.data_ptr()]
        assert torch.equal(y, swiglu.swiglu(gate_up.detach()))
        got = torch.autograd.grad(y, gate_up, grad)[0]
        assert torch.equal(got, swiglu.swiglu_backward(grad.contiguous(), gate_up.detach()))
        assert_gradient(got, grad, gate_up.detach())


def test_gradient_is_no_less_exact_than_that_of_transformers() -> None:
    gate_up, grad = case((64, 576), torch.bfloat16), case((64, 576), torch.bfloat16)[:, :576].flip(1).contiguous()
    want = exact_gradient(grad, gate_up)
    our_error = (swiglu.swiglu_backward(grad, gate_up) - want).abs()
    theirs = torch.autograd.grad(torch_swiglu(gate_up.requires_grad_()), gate_up, grad)[0]
    their_error = (theirs - want).abs()
    assert our_error.mean() <= their_error.mean() and our_error.max() <= their_error.max()


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (torch.ones(2, 8), r"grad is torch.float32 \[2, 8\] .* torch.float32 \[2, 4\] on cpu"),
        (torch.ones(2, 4).bfloat16(), r"grad is torch.bfloat16 \[2, 4\] .* torch.float32 \[2, 4\]"),
    ],
)
def test_gradient_errors(grad: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu.swiglu_backward(grad, torch.ones(2, 8))


def test_float16_runs_the_reference() -> None:
    gate_up = case((3, 40), torch.float16)
    assert torch.equal(swiglu.swiglu(gate_up), swiglu.swiglu_reference(gate_up))
    grad = gate_up[:, :40].contiguous()
    assert_gradient(swiglu.swiglu_backward(grad, gate_up), grad, gate_up)


def test_opcheck() -> None:
    gate_up = case((3, 40), torch.float32)
    torch.library.opcheck(torch.ops.lowbit.swiglu, (gate_up,))
    assert torch.equal(torch.ops.lowbit.swiglu(gate_up), swiglu.swiglu(gate_up))
    torch.library.opcheck(torch.ops.lowbit.swiglu_backward, (gate_up[:, :40], gate_up))
    torch.library.opcheck(torch.ops.lowbit.swiglu, (gate_up.requires_grad_(),))


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.ones(8), r"gate_up is torch.float32 \[8\] .* contiguous rows \[T, 2F\]"),
        (torch.ones(2, 7), r"gate_up is torch.float32 \[2, 7\] .* \[T, 2F\], gate before up"),
        (torch.ones(8, 2).T, r"with strides \[1, 2\]; .* use .contiguous\(\)"),
        (torch.ones(2, 8, dtype=torch.int32), "gate_up is torch.int32 .* float32, bfloat16 or float16"),
    ],
)
def test_errors(gate_up: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu.swiglu(gate_up)


INTERPRETED = """
import torch
from trainer.kernels import swiglu as op

torch.manual_seed(0)
for rows, size in [(1, 1), (3, 33), (2, 1536), (0, 8)]:
    # float32: two exponentials. float16: a rounding boundary at each of two places, 2^-10 each. The interpreter
    # truncates to bfloat16 where GPUs round, up to 2^-7 at each of two places.
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)):
        gate_up = (4 * torch.randn(rows, 2 * size)).to(dtype)
        # products of float16 below 2^-14 have fewer digits, steps of 2^-24
        torch.testing.assert_close(op.swiglu(gate_up), op.swiglu_reference(gate_up), rtol=rtol, atol=2**-23)
        if dtype == torch.bfloat16:
            continue
        grad = torch.randn(rows, size).to(dtype)
        got, out = op.swiglu_backward(grad, gate_up, with_output=True)
        want = op.swiglu_backward_reference(grad, gate_up, with_output=True)[0]
        # dgate's factor has some roundings of values up to 16 that cancel
        torch.testing.assert_close(got, want, rtol=rtol, atol=2**-18)
        assert torch.equal(out, op.swiglu(gate_up)) and torch.equal(op.swiglu_backward(grad, gate_up), got)
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
    sizes = dict.fromkeys(["size", "stride_row", "stride_out_row"], "i32")
    types = {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **sizes}
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(swiglu._swiglu_kernel, types, {"BLOCK_F": swiglu.BLOCK_F}, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.parametrize("with_output", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_backward_compiles_without_spills(dtype: str, with_output: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    names = ["grad_ptr", "gate_up_ptr", "grad_gate_up_ptr", *(["out_ptr"] if with_output else [])]
    types = dict.fromkeys(names, f"*{dtype}") | dict.fromkeys(["size", "stride_grad_row", "stride_row"], "i32")
    constants = {"WITH_OUTPUT": with_output, "BLOCK_F": swiglu.BLOCK_F} | ({} if with_output else {"out_ptr": None})
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(swiglu._swiglu_backward_kernel, types, constants, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_reference(dtype: torch.dtype) -> None:
    gate_up = case((16, 1537), dtype).cuda()
    # exponentials of few ulp; in 16 bits a rounding boundary at each of two places
    rtol = {4: 2e-6, 2: 2**-6}[gate_up.element_size()]
    torch.testing.assert_close(swiglu.swiglu(gate_up), swiglu.swiglu_reference(gate_up), rtol=rtol, atol=2**-23)
    grad = gate_up[:, :1537].flip(0).contiguous()
    assert_gradient(swiglu.swiglu_backward(grad, gate_up), grad, gate_up)
