"""RMS norm against transformers' modules and the reference, its gradient against float64."""

import functools
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trainer.kernels import _cpp, _tape, rms_norm

EPS = 1e-5
# Rows that end inside a vector, on one, after one; one element; enough of them for two threads.
SHAPES = [(1, 576), (3, 1), (2, 15), (7, 33), (5, 96), (2, 1023), (64, 576)]
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("elementwise") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(rms_norm, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


def case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual, weight"""
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(sum(shape)))
    return (3 * randn(shape)).to(dtype), randn(shape).to(dtype), randn(shape[1]).to(dtype)


def transformers_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    module = LlamaRMSNorm(x.shape[1], eps=EPS)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module(x)


def assert_same_up_to_the_order_of_the_sum(got: Tensor, want: Tensor) -> None:
    # The float32 scale moves by a few of its roundings, 2^-24 each. A bfloat16 result moves only where that crosses a
    # rounding boundary, once in some 2^13 values, and then by one place: 2^-7 of the value at most.
    rtol = 1e-6 if got.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)
    if got.dtype == torch.bfloat16:
        assert (got != want).sum() <= max(1, got.numel() // 1000)


def test_golden() -> None:
    """By hand: the mean square of 1, 7 is 25, so x / 5, times the weight."""
    got = rms_norm.rms_norm(torch.tensor([[1.0, 7.0]]), torch.tensor([1.0, 10.0]), eps=0.0)
    torch.testing.assert_close(got, torch.tensor([[0.2, 14.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
class TestCpu:
    def test_equals_transformers(self, shape: tuple[int, int], dtype: torch.dtype, cpp: None) -> None:
        x, residual, weight = case(shape, dtype)
        got = rms_norm.rms_norm_cpu(x, weight, eps=EPS)
        assert_same_up_to_the_order_of_the_sum(got, transformers_rms_norm(x, weight))
        got, total = rms_norm.add_rms_norm_cpu(x, residual, weight, eps=EPS)
        assert torch.equal(total, x + residual)
        assert_same_up_to_the_order_of_the_sum(got, transformers_rms_norm(total, weight))

    def test_same_bits_on_every_processor(self, shape: tuple[int, int], dtype: torch.dtype, cpp: None) -> None:
        x, residual, weight = case(shape, dtype)
        got, total = rms_norm.add_rms_norm_cpu(x, residual, weight, eps=EPS)
        wanted = torch.empty_like(x), torch.empty_like(x)
        arguments = rms_norm._DTYPE_IDS[dtype], x, residual, weight, *wanted, *shape, EPS
        _tape.call(_tape.kernel("elementwise", "rms_norm"), *arguments)
        assert torch.equal(got, wanted[0]) and torch.equal(total, wanted[1])

    def test_reference_equals_transformers(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        x, residual, weight = case(shape, dtype)
        assert torch.equal(rms_norm.rms_norm_reference(x, weight, eps=EPS), transformers_rms_norm(x, weight))
        got, total = rms_norm.add_rms_norm_reference(x, residual, weight, eps=EPS)
        assert torch.equal(got, transformers_rms_norm(x + residual, weight)) and torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, residual, weight = case((64, 577), dtype)
    together = rms_norm.add_rms_norm(x, residual, weight, eps=EPS)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(rms_norm.add_rms_norm(x, residual, weight, eps=EPS)[0], together[0])
    finally:
        torch.set_num_threads(threads)
    for start, stop in [(0, 1), (5, 6), (17, 40), (63, 64)]:
        alone = rms_norm.add_rms_norm(x[start:stop], residual[start:stop], weight, eps=EPS)
        assert torch.equal(alone[0], together[0][start:stop]) and torch.equal(alone[1], together[1][start:stop])
        assert torch.equal(rms_norm.rms_norm(alone[1], weight, eps=EPS), alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_inf_nan_and_no_rows(dtype: torch.dtype, cpp: None) -> None:
    x = torch.ones(4, 40, dtype=dtype)
    x[0], x[1, 3], x[2, 39] = 0, torch.inf, torch.nan
    weight = torch.ones(40, dtype=dtype)
    got = rms_norm.rms_norm_cpu(x, weight, eps=EPS)
    assert got.isnan().any(1).tolist() == [False, True, True, False]
    assert torch.equal(got.isnan(), rms_norm.rms_norm_reference(x, weight, eps=EPS).isnan())
    assert (got[0] == 0).all()
    assert rms_norm.rms_norm_cpu(x[:0], weight, eps=EPS).shape == (0, 40)


# ---- gradient


def exact_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dweight by autograd in float64"""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
    return torch.autograd.grad(y, (x, weight), grad.double())


def assert_gradient(got: tuple[Tensor, Tensor], grad: Tensor, x: Tensor, weight: Tensor, add: Tensor | None) -> None:
    want_x, want_weight = exact_gradient(grad, x, weight)
    scale = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    size = (scale * (grad.double() * weight.double()).abs().amax(-1, keepdim=True)).expand_as(x)
    if add is not None:
        want_x, size = want_x + add, size + add.abs()
    # The result's own rounding, half a place, after some 16 roundings of float32 (2^-24) of what is added up.
    half_place = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    assert ((got[0].double() - want_x).abs() <= half_place * want_x.abs() + 2**-20 * size).all()
    size = (grad.double() * x.double() * scale).abs().sum(0)
    assert ((got[1].double() - want_weight).abs() <= half_place * want_weight.abs() + 2**-20 * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestGradient:
    @pytest.mark.parametrize(
        "shape", [*SHAPES, (1, 65), (130, 65), (1100, 40)]
    )  # 1100 rows: more chunks than 16 rows each
    def test_equals_float64(self, shape: tuple[int, int], dtype: torch.dtype, cpp: None) -> None:
        grad, x, weight = case(shape, dtype)
        add = grad.flip(0).contiguous()
        for other in (None, add):
            got = rms_norm.rms_norm_backward_cpu(grad, x, weight, other, eps=EPS, with_weight=True)
            assert_gradient(got, grad, x, weight, other)
            alone = rms_norm.rms_norm_backward_cpu(grad, x, weight, other, eps=EPS, with_weight=False)
            assert torch.equal(alone[0], got[0]) and alone[1] is None
            assert_gradient(
                rms_norm.rms_norm_backward_reference(grad, x, weight, other, eps=EPS, with_weight=True),
                grad, x, weight, other,
            )  # fmt: skip

    @pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e18])  # squares are subnormal or 0, near eps, near the largest
    def test_huge_and_tiny_rows(self, scale: float, dtype: torch.dtype, cpp: None) -> None:
        grad, x, weight = case((7, 65), dtype)
        x = (x / 3 * scale).to(dtype)
        x[3] = 0
        got = rms_norm.rms_norm_backward_cpu(grad, x, weight, None, eps=EPS, with_weight=True)
        assert_gradient(got, grad, x, weight, None)

    def test_rows_whose_squares_overflow_have_no_gradient(self, dtype: torch.dtype, cpp: None) -> None:
        """As in transformers' module: the scale is 0, and so is the result."""
        grad, x, weight = case((3, 65), dtype)
        x = (x.sign() * 1e30).requires_grad_()
        got = rms_norm.rms_norm_backward_cpu(grad, x.detach(), weight, None, eps=EPS, with_weight=True)
        want = torch.autograd.grad(transformers_rms_norm(x, weight), x, grad)[0]
        assert torch.equal(got[0], want) and (got[0] == 0).all() and (got[1] == 0).all()

    def test_does_not_depend_on_the_number_of_threads(self, dtype: torch.dtype) -> None:
        grad, x, weight = case((300, 577), dtype)
        want = rms_norm.rms_norm_backward(grad, x, weight, eps=EPS, with_weight=True)
        threads = torch.get_num_threads()
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                got = rms_norm.rms_norm_backward(grad, x, weight, eps=EPS, with_weight=True)
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        finally:
            torch.set_num_threads(threads)

    def test_same_bits_on_every_processor(self, dtype: torch.dtype, cpp: None) -> None:
        grad, x, weight = case((64, 577), dtype)
        got = rms_norm.rms_norm_backward_cpu(grad, x, weight, grad, eps=EPS, with_weight=True)
        rms_norm.kernel = _tape.kernel  # the fixture puts back what it found
        want = rms_norm.rms_norm_backward_cpu(grad, x, weight, grad, eps=EPS, with_weight=True)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

    def test_of_both_ops_through_autograd(self, dtype: torch.dtype) -> None:
        grad, x, weight = case((7, 65), dtype)
        residual, grad_total = x.flip(0).contiguous(), grad.flip(1).contiguous()
        x.requires_grad_(), weight.requires_grad_(), residual.requires_grad_()
        strided = torch.stack([grad, grad], dim=-1)[..., 0]
        got = torch.autograd.grad(rms_norm.rms_norm(x, weight, eps=EPS), (x, weight), strided)
        assert_gradient(got, grad, x.detach(), weight.detach(), None)
        y, total = rms_norm.add_rms_norm(x, residual, weight, eps=EPS)
        got = torch.autograd.grad((y, total), (x, residual, weight), (strided, grad_total), retain_graph=True)
        assert torch.equal(got[0], got[1])
        assert_gradient((got[0], got[2]), grad, total.detach(), weight.detach(), grad_total)
        got = torch.autograd.grad(y, (x, weight), grad, retain_graph=True)  # nobody reads the sum
        assert_gradient(got, grad, total.detach(), weight.detach(), None)
        assert torch.equal(torch.autograd.grad(total, x, grad_total)[0], grad_total)  # nobody reads the norm


def test_gradient_is_no_less_exact_than_that_of_transformers() -> None:
    grad, x, weight = case((64, 576), torch.bfloat16)
    want = exact_gradient(grad, x, weight)
    module = LlamaRMSNorm(x.shape[1], eps=EPS)
    module.weight = torch.nn.Parameter(weight)
    theirs = torch.autograd.grad(module(x.requires_grad_()), (x, module.weight), grad)
    ours = rms_norm.rms_norm_backward(grad, x.detach(), weight, eps=EPS, with_weight=True)
    for our, their, exact in zip(ours, theirs, want, strict=True):
        our_error, their_error = (our - exact).abs(), (their - exact).abs()
        assert our_error.mean() <= their_error.mean() and our_error.max() <= their_error.max()


def test_autograd_keeps_the_rows_and_the_weight_alone() -> None:
    _, x, weight = case((7, 65), torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y, total = rms_norm.add_rms_norm(x.requires_grad_(), x.detach(), weight, eps=EPS)
        rms_norm.rms_norm(x, weight, eps=EPS)
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in (total, weight, x, weight)]
    assert y.requires_grad and not rms_norm.rms_norm(x.detach(), weight, eps=EPS).requires_grad


def test_backward_of_no_rows_and_errors() -> None:
    grad, x, weight = case((3, 40), torch.bfloat16)
    got = rms_norm.rms_norm_backward(grad[:0], x[:0], weight, eps=EPS, with_weight=True)
    assert got[0].shape == (0, 40) and torch.equal(got[1], torch.zeros_like(weight))
    with pytest.raises(ValueError, match=r"grad is torch.float32 \[3, 40\] .* torch.bfloat16 \[3, 40\] on cpu"):
        rms_norm.rms_norm_backward(grad.float(), x, weight, eps=EPS)
    with pytest.raises(ValueError, match=r"add is torch.bfloat16 \[2, 40\] .* torch.bfloat16 \[3, 40\]"):
        rms_norm.rms_norm_backward(grad, x, weight, eps=EPS, add=grad[:2])


def test_float16_runs_the_reference() -> None:
    x, residual, weight = case((3, 40), torch.float16)
    assert torch.equal(rms_norm.rms_norm(x, weight, eps=EPS), transformers_rms_norm(x, weight))
    assert torch.equal(rms_norm.add_rms_norm(x, residual, weight, eps=EPS)[1], x + residual)
    got = rms_norm.rms_norm_backward(residual, x, weight, eps=EPS, with_weight=True)
    assert_gradient(got, residual, x, weight, None)


def test_opcheck() -> None:
    x, residual, weight = case((3, 40), torch.float32)
    torch.library.opcheck(torch.ops.lowbit.rms_norm, (x, weight, EPS))
    torch.library.opcheck(torch.ops.lowbit.add_rms_norm, (x, residual, weight, EPS))
    assert torch.equal(torch.ops.lowbit.rms_norm(x, weight, EPS), rms_norm.rms_norm(x, weight, eps=EPS))
    for add, with_weight in ((None, True), (residual, False)):
        torch.library.opcheck(torch.ops.lowbit.rms_norm_backward, (x, residual, weight, add, EPS, with_weight))
    x.requires_grad_()
    for parameter in (weight, weight.clone().requires_grad_()):
        torch.library.opcheck(torch.ops.lowbit.rms_norm, (x, parameter, EPS))
        torch.library.opcheck(torch.ops.lowbit.add_rms_norm, (x, residual, parameter, EPS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 8, 1)}, r"x is torch.float32 \[2, 8, 1\] .* contiguous rows \[T, H\]"),
        ({"x": torch.ones(8, 2).T}, r"x is torch.float32 \[2, 8\] with strides \[1, 2\]; .* use .contiguous\(\)"),
        ({"x": torch.ones(2, 8, dtype=torch.float64)}, "x is torch.float64 .* float32, bfloat16 or float16"),
        ({"weight": torch.ones(7)}, r"weight is torch.float32 \[7\] on cpu .* torch.float32 \[8\] on cpu"),
        ({"weight": torch.ones(8).bfloat16()}, r"weight is torch.bfloat16 \[8\] .* torch.float32 \[8\]"),
        ({"residual": torch.ones(1, 8)}, r"residual is torch.float32 \[1, 8\] .* torch.float32 \[2, 8\]"),
        ({"residual": torch.ones(2, 8, device="meta")}, "residual is .* on meta .* on cpu"),
    ],
)
def test_errors(change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.ones(2, 8), "residual": torch.ones(2, 8), "weight": torch.ones(8)}
    with pytest.raises(ValueError, match=message):
        rms_norm.add_rms_norm(**{**arguments, **change}, eps=EPS)


INTERPRETED = """
import torch
from trainer.kernels import rms_norm as op

torch.manual_seed(0)
for rows, size in [(1, 1), (3, 33), (2, 576), (2, 5000), (0, 8), (37, 130)]:  # 5000: two blocks; 37: three chunks
    # float32, float16: the order of the sum, and then a rounding boundary. The interpreter truncates to bfloat16 where
    # GPUs round, up to 2^-7 at each of two places.
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-6)):
        x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
        x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
        got = op.rms_norm(x, weight, eps=1e-5)
        torch.testing.assert_close(got, op.rms_norm_reference(x, weight, eps=1e-5), rtol=rtol, atol=0)
        got, total = op.add_rms_norm(x, residual, weight, eps=1e-5)
        torch.testing.assert_close(total, x + residual, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)
        torch.testing.assert_close(got, op.rms_norm_reference(total, weight, eps=1e-5), rtol=rtol, atol=0)
        if dtype == torch.bfloat16:
            continue
        # float32: some roundings of sums of values up to about 16, or over 130 rows; float16: half a place of these
        atol = {torch.float32: 2**-18, torch.float16: 2**-7}[dtype]
        for add, with_weight in ((None, False), (residual, True)):
            arguments = residual.flip(0).contiguous(), x, weight
            got = op.rms_norm_backward(*arguments, eps=1e-5, add=add, with_weight=with_weight)
            want = op.rms_norm_backward_reference(*arguments, add, eps=1e-5, with_weight=with_weight)
            torch.testing.assert_close(got[0], want[0], rtol=0, atol=atol)
            if with_weight:
                torch.testing.assert_close(got[1], want[1], rtol=0, atol=atol)
print("interpreted")
"""


def test_triton_interpreted_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("block", [32, rms_norm.MAX_BLOCK_H])  # fewest and most warps
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str, block: int, residual: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    names = ["x_ptr", "weight_ptr", "out_ptr", *(["residual_ptr", "sum_ptr"] if residual else [])]
    types = {**dict.fromkeys(names, f"*{dtype}"), "size": "i32", "stride_row": "i32", "eps": "fp32"}
    constants = {} if residual else {"residual_ptr": None, "sum_ptr": None}
    constants |= {"HAS_RESIDUAL": residual, "BLOCK_H": block}
    for target in aot.TARGETS:
        num_warps = rms_norm.num_warps(block)
        compiled = aot.compile_kernel(rms_norm._rms_norm_kernel, types, constants, target, num_warps=num_warps)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.parametrize("block", [32, rms_norm.MAX_BLOCK_H])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_backward_compiles_without_spills(dtype: str, block: int, everything: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    names = ["grad_ptr", "x_ptr", "weight_ptr", "grad_x_ptr", *(["add_ptr"] if everything else [])]
    types = {**dict.fromkeys(names, f"*{dtype}"), "size": "i32", "stride_row": "i32", "eps": "fp32"}
    types |= {"scale_ptr": "*fp32"} if everything else {}
    constants = {} if everything else {"add_ptr": None, "scale_ptr": None}
    constants |= {"HAS_ADD": everything, "WITH_SCALE": everything, "BLOCK_H": block}
    for target in aot.TARGETS:
        num_warps = rms_norm.num_warps(block)
        compiled = aot.compile_kernel(rms_norm._rms_norm_backward_kernel, types, constants, target, num_warps=num_warps)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_weight_partial_compiles_without_spills(dtype: str) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    types = {"grad_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "scale_ptr": "*fp32", "partial_ptr": "*fp32"}
    types |= dict.fromkeys(["rows", "size", "stride_row", "stride_partial", "chunk_rows"], "i32")
    constants = {"BLOCK_ROWS": rms_norm.WEIGHT_BLOCK_ROWS, "BLOCK_H": rms_norm.WEIGHT_BLOCK_H}
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(rms_norm._weight_partial_kernel, types, constants, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_reference(dtype: torch.dtype) -> None:
    x, residual, weight = (tensor.cuda() for tensor in case((64, 577), dtype))
    got, total = rms_norm.add_rms_norm(x, residual, weight, eps=EPS)
    assert torch.equal(total, x + residual)
    want = rms_norm.rms_norm_reference(total, weight, eps=EPS)
    # the order of the sum; in 16 bits a place at a rounding boundary
    torch.testing.assert_close(got, want, rtol={4: 2e-6, 2: 2**-7}[x.element_size()], atol=0)
    got = rms_norm.rms_norm_backward(residual, x, weight, eps=EPS, add=total, with_weight=True)
    assert_gradient(got, residual, x, weight, total)
