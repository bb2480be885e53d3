"""SwiGLU against torch's silu and the reference."""

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


def test_float16_runs_the_reference() -> None:
    gate_up = case((3, 40), torch.float16)
    assert torch.equal(swiglu.swiglu(gate_up), swiglu.swiglu_reference(gate_up))


def test_opcheck() -> None:
    gate_up = case((3, 40), torch.float32)
    torch.library.opcheck(torch.ops.lowbit.swiglu, (gate_up,))
    assert torch.equal(torch.ops.lowbit.swiglu(gate_up), swiglu.swiglu(gate_up))


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
print("interpreted")
"""


def test_triton_interpreted_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_triton_compiles_without_spills(dtype: str) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    sizes = dict.fromkeys(["size", "stride_row", "stride_out_row"], "i32")
    types = {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **sizes}
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(swiglu._swiglu_kernel, types, {"BLOCK_F": swiglu.BLOCK_F}, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_reference(dtype: torch.dtype) -> None:
    gate_up = case((16, 1537), dtype).cuda()
    # exponentials of few ulp; in 16 bits a rounding boundary at each of two places
    rtol = {4: 2e-6, 2: 2**-6}[gate_up.element_size()]
    torch.testing.assert_close(swiglu.swiglu(gate_up), swiglu.swiglu_reference(gate_up), rtol=rtol, atol=2**-23)
