"""Fake quantization against the quantizers themselves, and its gradients against autograd of the formula."""

import functools
import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels import fake_quant as op
from trainer.kernels.fake_quant import Grid, fake_quant, fake_quant_learned
from trainer.kernels.int4 import Int4Weight, int4_codes, int4_dequantize, int4_quantize, int4_scales, pack_int4
from trainer.kernels.int8 import int8_dequantize, int8_quantize, quantize_activations

DTYPES = [torch.float32, torch.bfloat16]
# Rows and groups that end inside a vector, on one, after one; one element; enough of them for two threads.
SHAPES = [(1, 64), (2, 192), (3, 80), (5, 48), (7, 33), (2, 16), (64, 48), (96, 64), (33, 65), (1, 1), (130, 256)]
GRIDS = {
    "int4": {"divisor": 7.0},
    "int4_7.5": {"divisor": 7.5},
    "int4_8": {"divisor": 8.0},
    "int4_asymmetric": {"symmetric": False},
    "int8": None,
}
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("fake_quant") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(op, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


@pytest.fixture(params=GRIDS)
def grid_of(request: pytest.FixtureRequest):
    """grid_of(group_size, scale_dtype)"""
    options = GRIDS[request.param]
    make = Grid.int8 if options is None else functools.partial(Grid.int4, **options)
    return lambda group_size=None, scale_dtype=torch.float32: make(group_size=group_size, scale_dtype=scale_dtype)


def group_sizes(in_features: int) -> list[int | None]:
    return [None, *(size for size in (32, 64, 96, 128) if in_features % size == 0)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def through_codes(x: Tensor, grid: Grid) -> Tensor:
    """By the public quantizers: what fake quantization stands for."""
    if grid.bits == 8:
        return int8_dequantize(
            int8_quantize(x, group_size=grid.group_size or x.shape[1], scale_dtype=grid.scale_dtype), dtype=x.dtype
        )
    options = {"divisor": grid.divisor} if grid.symmetric else {}
    quantized = int4_quantize(
        x,
        group_size=grid.group_size or x.shape[1],
        symmetric=grid.symmetric,
        scale_dtype=grid.scale_dtype,
        **options,
    )
    return int4_dequantize(quantized, dtype=x.dtype)


class RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def formula(x: Tensor, scales: Tensor, zeros: Tensor | None, code_range: tuple[int, int]) -> Tensor:
    """The definition, differentiable: torch's clamp passes the gradient on its bounds and stops it outside."""
    zero = 0 if zeros is None else zeros[:, :, None].to(x.dtype)
    groups = x.view(*scales.shape, -1)
    codes = (RoundStraightThrough.apply(groups / scales[:, :, None]) + zero).clamp(*code_range)
    return ((codes - zero) * scales[:, :, None]).view(x.shape)


def scales_of(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    group_size = grid.group_size or x.shape[1]
    if grid.bits == 8:
        return int8_quantize(x, group_size=group_size, scale_dtype=grid.scale_dtype).scales, None
    options = {"symmetric": grid.symmetric, "divisor": grid.divisor, "scale_dtype": grid.scale_dtype}
    return int4_scales(x, group_size=group_size, **options)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Equal, nan where nan, and no difference in the sign of a zero."""
    assert got.dtype == want.dtype and torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(got.nan_to_num().signbit(), want.nan_to_num().signbit())


def test_golden() -> None:
    """By hand: scale 7 / 7 = 1, ties to even; with divisor 8 the largest positive value is clamped to 7/8 of itself."""
    x = torch.tensor([[7.0, -7.0, 0.5, 1.5, 2.5, -0.5, 0.2, 3.6]])
    want = torch.tensor([[7.0, -7.0, 0.0, 2.0, 2.0, 0.0, 0.0, 4.0]])
    assert torch.equal(fake_quant(x, Grid.int4()), want)
    x = torch.tensor([[8.0, -8.0, 7.4]], requires_grad=True)
    y = fake_quant(x, Grid.int4(divisor=8.0))
    assert y.tolist() == [[7.0, -8.0, 7.0]]
    y.backward(torch.tensor([[1.0, 2.0, 3.0]]))
    assert x.grad.tolist() == [[0.0, 2.0, 3.0]]
    # asymmetric: low -2, high 5.5, scale 0.5, zero 4
    assert fake_quant(torch.tensor([[-2.0, 5.5, 0.3]]), Grid.int4(symmetric=False)).tolist() == [[-2.0, 5.5, 0.5]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpu_equals_the_quantizers(shape: tuple[int, int], dtype: torch.dtype, grid_of, cpp: None) -> None:
    x = randn(*shape, dtype=dtype)
    for group_size in group_sizes(shape[1]):
        for scale_dtype in op._DTYPE_IDS:
            grid = grid_of(group_size, scale_dtype)
            assert_same_bits(op.fake_quant_cpu(x, grid), through_codes(x, grid))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_values(implementation: str, dtype: torch.dtype, grid_of) -> None:
    """Zeros, one value, constants, one sign, tiny and huge ones."""
    if implementation == "cpu" and _cpp.load("fake_quant") is None:
        pytest.skip("no C++ compiler here")
    run = {"cpu": op.fake_quant_cpu, "reference": op.fake_quant_reference}[implementation]
    one_hot = torch.zeros(3, 64)
    one_hot[1, 5] = -2.0
    cases = [torch.zeros(3, 64), one_hot, torch.full((3, 64), -0.7), -randn(3, 64).abs(), randn(3, 64).abs()]
    cases += [randn(3, 64) * scale for scale in (1e-39, 1e-45, 1e-7, 1e-5, 1e4, 7e4)]
    for x in cases:
        x = x.to(dtype)
        if not x.isfinite().all():
            continue  # 7e4 in float16
        for scale_dtype in (torch.float32, torch.bfloat16):
            grid = grid_of(32, scale_dtype)
            assert_same_bits(run(x, grid), through_codes(x, grid))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-8, 1e-7, 1e-6, 1e-4, 1.0, 6e4])
def test_float16_scales(dtype: torch.dtype, scale: float, grid_of, cpp: None) -> None:
    """Scales that are normal, subnormal and too small in float16: their rounding in C++ is our own code."""
    x = randn(40, 96, dtype=dtype) * scale
    grid = grid_of(32, torch.float16)
    assert_same_bits(op.fake_quant_cpu(x, grid), through_codes(x, grid))
    grad = randn(40, 96, dtype=dtype, seed=1)
    assert_same_bits(op.fake_quant_backward_cpu(grad, x, grid), op.fake_quant_backward_reference(grad, x, grid))


def test_a_scale_too_large_for_its_dtype_is_nan() -> None:
    x = torch.tensor([[1e6, 1.0]])
    assert fake_quant(x, Grid.int4(scale_dtype=torch.float16)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype: torch.dtype) -> None:
    """Grid.int8() is the grid of quantize_activations, over any leading dimensions."""
    x = randn(2, 5, 48, dtype=dtype)
    x[1, 2] = 0
    codes, scales = quantize_activations(x)
    assert_same_bits(fake_quant(x, Grid.int8()), (codes.float() * scales[..., None]).to(dtype))
    assert fake_quant(x[:0], Grid.int8()).shape == (0, 5, 48)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype: torch.dtype, grid_of) -> None:
    base = randn(64, 96, dtype=dtype)
    for x in (base.T, base[::2], base[:, 32:], base[:, :64:2], base[32:, 32:64].T):
        assert not x.is_contiguous()
        got = fake_quant(x, grid_of(32))
        assert got.is_contiguous() and torch.equal(got, fake_quant(x.contiguous(), grid_of(32)))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_inf_and_nan_stay_in_their_group(implementation: str, bad: float, grid_of) -> None:
    if implementation == "cpu" and _cpp.load("fake_quant") is None:
        pytest.skip("no C++ compiler here")
    run = {"cpu": op.fake_quant_cpu, "reference": op.fake_quant_reference}[implementation]
    x = randn(2, 96)
    want = run(x, grid_of(32))
    x[1, 40] = bad
    want[1, 32:64] = math.nan
    assert_same_bits(run(x, grid_of(32)), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient(shape: tuple[int, int], dtype: torch.dtype, grid_of, cpp: None) -> None:
    """The mask is autograd's of the formula; what passes is the incoming gradient, bit for bit.

    In float32, the precision of the grid: with divisor 7.5 the largest value of each group lies on a tie."""
    x, grad = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    for group_size in group_sizes(shape[1]):
        grid = grid_of(group_size)
        leaf = x.float().clone().requires_grad_()
        scales, zeros = scales_of(x, grid)
        formula(leaf, scales, zeros, grid.range).backward(torch.ones(shape))
        passes = leaf.grad.round()  # 0 or 1, up to the two roundings of s * (1 / s)
        assert (leaf.grad - passes).abs().max() < 2**-22 and set(passes.unique().tolist()) <= {0.0, 1.0}
        want = grad * passes.to(dtype)
        assert torch.equal(op.fake_quant_backward_cpu(grad, x, grid), want)
        assert torch.equal(op.fake_quant_backward_reference(grad, x, grid), want)
        leaf = x.clone().requires_grad_()
        fake_quant(leaf, grid).backward(grad)
        assert torch.equal(leaf.grad, want)


def test_what_does_not_clamp_passes_everything() -> None:
    """Grid.clamps is False for divisor 7 and INT8: no code leaves the range, so backward is the identity."""
    x = torch.cat([randn(256, 64) * 10.0**power for power in range(-30, 31, 6)])
    grad = torch.ones_like(x)
    for scale_dtype in (torch.float32, torch.bfloat16):
        for grid in (Grid.int4(group_size=32, scale_dtype=scale_dtype), Grid.int8(scale_dtype=scale_dtype)):
            assert not grid.clamps and torch.equal(op.fake_quant_backward_reference(grad, x, grid), grad)
    for grid in (Grid.int4(divisor=7.5), Grid.int4(divisor=8.0)):
        assert grid.clamps and not torch.equal(op.fake_quant_backward_reference(grad, x, grid), grad)
    # Asymmetric: scale 1 and two ties that both round away from 0, zero 2 and code 14 + 2.
    x, grid = torch.tensor([[-1.5, 13.5]]), Grid.int4(symmetric=False)
    assert grid.clamps and op.fake_quant_backward_reference(torch.ones(1, 2), x, grid).tolist() == [[1.0, 0.0]]


# ---- learned scales


def learned_case(
    shape: tuple[int, int], group_size: int, bits: int, asymmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x, scales, zeros, grad. Scales are too small for some groups, so that codes are clamped at both ends."""
    x = randn(*shape, dtype=dtype)
    num_groups = shape[1] // group_size
    steps = (2.0 if bits == 4 else 100.0) * (1 + randn(shape[0], num_groups, seed=2).abs())
    scales = x.float().view(shape[0], num_groups, -1).abs().amax(2).clamp(min=0.1) / steps
    zeros = torch.arange(scales.numel()).remainder(16).view(scales.shape).to(torch.uint8) if asymmetric else None
    return x, scales, zeros, randn(*shape, dtype=dtype, seed=1)


LEARNED = [(4, False), (4, True), (8, False)]
LEARNED_SHAPES = [((2, 96), 32), ((7, 33), 33), ((65, 128), 64), ((1, 1), 1), ((3, 80), 80)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "asymmetric"), LEARNED)
@pytest.mark.parametrize(
    ("shape", "group_size"), [((2, 96), 32), ((7, 33), 33), ((65, 128), 64), ((1, 1), 1), ((3, 80), 80)]
)
def test_learned_scales(
    shape: tuple[int, int], group_size: int, bits: int, asymmetric: bool, dtype: torch.dtype, cpp: None
) -> None:
    x, scales, zeros, grad = learned_case(shape, group_size, bits, asymmetric, dtype)
    if bits == 4:
        packed = pack_int4(int4_codes(x, scales, zeros))
        want = int4_dequantize(Int4Weight(packed, scales, zeros, None, *shape, group_size), dtype=dtype)
        assert_same_bits(op.fake_quant_learned_cpu(x, scales, zeros, bits), want)
    forward = op.fake_quant_learned_cpu(x, scales, zeros, bits)
    assert_same_bits(forward, op.fake_quant_learned_reference(x, scales, zeros, bits))

    leaves = x.double().requires_grad_(), scales.double().requires_grad_()
    code_range = op._code_range(bits, zeros is None)
    formula(*leaves, zeros, code_range).backward(grad.double())
    factor = 1 / math.sqrt(group_size * code_range[1])
    # A sum of group_size terms of at most |g| times the range of codes, in float32: 2^-24 a term, and as much each for
    # the ratio's rounding, which is a part of 2^-24 of a code.
    bound = (grad.double().abs().view(*scales.shape, -1).sum(2) * code_range[1] * 2**-22 * factor) + 1e-30
    for backward in (op.fake_quant_learned_backward_cpu, op.fake_quant_learned_backward_reference):
        grad_x, grad_scales = backward(grad, x, scales, zeros, bits)
        assert torch.equal(grad_x, grad * (leaves[0].grad != 0))
        assert ((grad_scales - leaves[1].grad * factor).abs() <= bound).all()


def test_sums_have_the_same_bits_on_every_processor(cpp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, scales, _, grad = learned_case((65, 129), 129, 4, False, torch.float32)
    got = op.fake_quant_learned_backward_cpu(grad, x, scales, None, 4)[1]
    monkeypatch.setattr(op, "kernel", _tape.kernel)
    assert torch.equal(got, op.fake_quant_learned_backward_cpu(grad, x, scales, None, 4)[1])


def test_learned_scales_through_autograd() -> None:
    x, scales, zeros, grad = learned_case((6, 64), 32, 4, True, torch.bfloat16)
    leaves = x.requires_grad_(), scales.requires_grad_()
    fake_quant_learned(*leaves, zeros).backward(grad)
    want = op.fake_quant_learned_backward_reference(grad, x.detach(), scales.detach(), zeros, 4)
    assert torch.equal(x.grad, want[0]) and x.grad.count_nonzero() < grad.count_nonzero()
    # The order of a float32 sum of 32 terms near 1.
    torch.testing.assert_close(scales.grad, want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_bad_learned_scales_and_weights_are_nan(implementation: str, scale: float) -> None:
    if implementation == "cpu" and _cpp.load("fake_quant") is None:
        pytest.skip("no C++ compiler here")
    run = {"cpu": op.fake_quant_learned_cpu, "reference": op.fake_quant_learned_reference}[implementation]
    x, scales = randn(2, 64), torch.full((2, 2), 0.3)
    want = run(x, scales, None, 4)
    scales[1, 0], x[0, 3], x[0, 40] = scale, math.inf, math.nan
    want[1, :32], want[0, 3], want[0, 40] = math.nan, math.nan, math.nan
    assert_same_bits(run(x, scales, None, 4), want)


# ---- determinism, registration, errors


def test_any_number_of_threads_gives_the_same_bits() -> None:
    x, scales, _, grad = learned_case((300, 128), 32, 4, False, torch.bfloat16)
    grid = Grid.int4(group_size=32, divisor=7.5)

    def results() -> list[Tensor]:
        learned = op.fake_quant_learned_backward_cpu(grad, x, scales, None, 4)
        return [op.fake_quant_cpu(x, grid), op.fake_quant_backward_cpu(grad, x, grid), *learned]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = results()
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            assert all(torch.equal(a, b) for a, b in zip(results(), want, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_opcheck() -> None:
    x, scales, zeros, grad = learned_case((3, 64), 32, 4, True, torch.float32)
    arguments = 4, 32, True, 7.5, torch.float32
    torch.library.opcheck(torch.ops.lowbit.fake_quant, (x.requires_grad_(), *arguments))
    torch.library.opcheck(torch.ops.lowbit.fake_quant, (x.detach()[None, :, :], 8, 64, True, 127.0, torch.float32))
    torch.library.opcheck(torch.ops.lowbit.fake_quant_backward, (grad, x.detach(), *arguments))
    torch.library.opcheck(torch.ops.lowbit.fake_quant_learned, (x, scales.requires_grad_(), zeros, 4))
    torch.library.opcheck(torch.ops.lowbit.fake_quant_learned_backward, (grad, x.detach(), scales.detach(), zeros, 4))


def test_compiles_in_one_graph() -> None:
    x, scales, _, _ = learned_case((3, 64), 32, 4, False, torch.float32)

    def loss(x: Tensor, scales: Tensor) -> Tensor:
        return (fake_quant(x, Grid.int4(group_size=32, divisor=8.0)) * fake_quant_learned(x, scales)).sum()

    def gradients(f) -> tuple[Tensor, ...]:
        leaves = x.clone().requires_grad_(), scales.clone().requires_grad_()
        return torch.autograd.grad(f(*leaves), leaves)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled), gradients(loss), strict=True))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Grid.int4(divisor=6.0), ValueError, r"divisor=6.0 .* use \(7.0, 7.5, 8.0\)"),
        (lambda: Grid.int4(scale_dtype=torch.float64), TypeError, "scale_dtype is torch.float64"),
        (lambda: Grid(8, None, False, 127.0, torch.float32), ValueError, "bits=8, symmetric=False: use 4 bits, or 8"),
        (lambda: Grid(3, None, True, 7.0, torch.float32), ValueError, "bits=3"),
        (lambda: fake_quant(torch.ones(2, 48), Grid.int4(group_size=32)), ValueError, "group_size=32 .* use 48"),
        (lambda: fake_quant(torch.ones(2, 64).int(), Grid.int8()), TypeError, "x is torch.int32"),
        (lambda: fake_quant(torch.tensor(1.0), Grid.int8()), ValueError, "in_features=0"),
        (lambda: fake_quant_learned(torch.ones(2, 64), torch.ones(2, 3)), ValueError, "group_size=21"),
        (
            lambda: fake_quant_learned(torch.ones(2, 64), torch.ones(3, 2)),
            ValueError,
            r"scales is .* \[3, 2\]",
        ),
        (lambda: fake_quant_learned(torch.ones(2, 64), torch.ones(2, 0)), ValueError, "group_size=0"),
        (lambda: fake_quant_learned(torch.ones(64, 2).T, torch.ones(2, 2)), ValueError, r"use .contiguous\(\)"),
        (
            lambda: fake_quant_learned(torch.ones(2, 64), torch.ones(2, 2), torch.ones(2, 2)),
            ValueError,
            r"zeros is torch.float32 \[2, 2\]",
        ),
        (
            lambda: fake_quant_learned(torch.ones(2, 64), torch.ones(2, 2), torch.ones(2, 2).byte(), bits=8),
            ValueError,
            "bits=8, zeros=given",
        ),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ---- Triton

INTERPRETED = """
import torch
from trainer.kernels import fake_quant as op
from trainer.kernels.fake_quant import Grid

def same(got, want):
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())

torch.manual_seed(0)
op.MAX_BLOCK_K, op.TILE = 64, 256  # so that groups of 96 values take two blocks
for rows, size, group_size in [(1, 1, None), (3, 64, 32), (5, 33, None), (2, 96, None), (0, 64, 32)]:
    for dtype in (torch.float32, torch.float16):  # the interpreter truncates to bfloat16 where GPUs round
        x, grad = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype)
        if rows == 3:
            x[0, 3], x[1, 4], x[2] = torch.inf, torch.nan, 0
        finite = torch.where(x.isfinite(), x, 0.5)
        for scale_dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype == torch.float16 and scale_dtype != torch.float32:
                continue
            options = {"group_size": group_size, "scale_dtype": scale_dtype}
            for grid in (Grid.int4(**options), Grid.int4(divisor=7.5, **options),
                         Grid.int4(symmetric=False, **options), Grid.int8(**options)):
                if rows:
                    same(op.fake_quant_triton(x, grid), op.fake_quant_reference(x, grid))
                    got = op.fake_quant_backward_triton(grad, finite, grid)
                    same(got, op.fake_quant_backward_reference(grad, finite, grid))
                assert op.fake_quant(x, grid).shape == x.shape
        groups = size // (group_size or size)
        scales, zeros = torch.rand(rows, groups) + 0.05, torch.randint(0, 16, (rows, groups)).to(torch.uint8)
        for bits, zero in ((4, None), (4, zeros), (8, None)):
            if rows:
                arguments = scales, zero, bits
                same(op.fake_quant_learned_triton(x, *arguments), op.fake_quant_learned_reference(x, *arguments))
                got = op.fake_quant_learned_backward_triton(grad, finite, *arguments)
                want = op.fake_quant_learned_backward_reference(grad, finite, *arguments)
                same(got[0], want[0])
                torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)  # the order of up to 96 terms
print("interpreted")
"""


def test_triton_interpreted_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("block_k", [32, op.MAX_BLOCK_K])  # the shortest groups, and longer ones than a block
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str, block_k: int, backward: bool, learned: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "num_groups": "i32", "group_size": "i32"}
    types |= dict.fromkeys(("quant_min", "quant_max", "divisor", "factor"), "fp32")
    constants: dict[str, object] = {"SYMMETRIC": False, "LEARNED": learned, "BACKWARD": backward, "SCALE_DTYPE": 1}
    constants |= {"BLOCK_M": op.TILE // block_k, "BLOCK_K": block_k}
    pointers = {"scales_ptr": "*fp32", "zeros_ptr": "*u8", "grad_ptr": f"*{dtype}", "grad_scales_ptr": "*fp32"}
    present = {
        "scales_ptr": learned,
        "zeros_ptr": learned,
        "grad_ptr": backward,
        "grad_scales_ptr": backward and learned,
    }
    types |= {name: kind for name, kind in pointers.items() if present[name]}
    constants |= {name: None for name, there in present.items() if not there}
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(op._fake_quant_kernel, types, constants, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_cpu(dtype: torch.dtype, grid_of) -> None:
    x, grad = randn(65, 256, dtype=dtype), randn(65, 256, dtype=dtype, seed=1)
    for group_size in group_sizes(256):
        grid = grid_of(group_size)
        assert_same_bits(op.fake_quant_triton(x.cuda(), grid).cpu(), op.fake_quant_reference(x, grid))
        got = op.fake_quant_backward_triton(grad.cuda(), x.cuda(), grid).cpu()
        assert torch.equal(got, op.fake_quant_backward_reference(grad, x, grid))
