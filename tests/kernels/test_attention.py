"""Attention over packed documents against float64, torch's SDPA, and itself in another pack."""

import itertools
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.kernels import _cpp, _tape, attention
from trainer.kernels.attention import Shape

# Documents that end inside a vector, a strip and a tile, on one, after one; empty; of several tiles.
LENGTHS = [1, 2, 17, 64, 65, 200, 0]
LONG = [1100, 30]  # backward takes three chunks of keys
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]
# Relative error of the whole tensor. float32: sums of up to 200 terms, some 2^-24 each and partly cancelling. bfloat16:
# outputs are rounded, 2^-9 at most; p and ds as well, whose errors average out over the keys.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("attention") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(attention, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


def pack(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def sizes(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None, scale: float = 0) -> Shape:
    return Shape(num_heads, num_kv_heads, head_dim, scale or head_dim**-0.5, window)


def case(lengths: list[int], shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, cu_seqlens, the gradient of the output"""
    generator = torch.Generator().manual_seed(sum(lengths) + shape.head_dim)
    columns = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(sum(lengths), columns, generator=generator).to(dtype)
    grad = torch.randn(sum(lengths), shape.num_heads * shape.head_dim, generator=generator).to(dtype)
    return qkv, pack(lengths), grad


def sdpa(qkv: Tensor, lengths: list[int], shape: Shape) -> Tensor:
    """torch's SDPA, each document with an explicit mask."""
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    outs = []
    for rows in qkv.split(lengths):
        q, k, v = (x.transpose(0, 1)[None] for x in rows.unflatten(1, (-1, shape.head_dim)).split(heads, dim=1))
        row = torch.arange(len(rows))
        distance = row[:, None] - row
        mask = (distance >= 0) & (distance < (shape.sliding_window or len(rows) + 1))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outs)


def exact(qkv: Tensor, lengths: list[int], shape: Shape, grad: Tensor) -> tuple[Tensor, Tensor]:
    """out and dqkv of the documents in float64, by autograd."""
    wide = qkv.double().requires_grad_()
    out = sdpa(wide, lengths, shape)
    return out.detach(), torch.autograd.grad(out, wide, grad.double())[0]


def run(qkv: Tensor, cu_seqlens: Tensor, shape: Shape, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, dqkv of the C++ kernels"""
    out, lse = attention.attention_cpu(qkv, cu_seqlens, shape)
    return out, lse, attention.attention_backward_cpu(grad, qkv, out, lse, cu_seqlens, shape)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def parts(dqkv: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    return dqkv.split([count * shape.head_dim for count in heads], dim=1)


def test_golden() -> None:
    """By hand: row 0 sees itself; row 1 sees scores 0 and ln 3, so a quarter of v0 and three quarters of v1."""
    qkv = torch.tensor([[0.0, 0, 0, 0, 4, 8], [1.0, 0, torch.tensor(3.0).log(), 0, 8, 16]])
    got = attention.attention(qkv, pack([2]), num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    torch.testing.assert_close(got, torch.tensor([[4.0, 8.0], [7.0, 14.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (4, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
class TestCpu:
    @pytest.mark.parametrize("window", [None, 1, 40])
    def test_equals_float64(
        self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, window: int | None, cpp: None
    ) -> None:
        shape = sizes(*heads, head_dim, window)
        qkv, cu_seqlens, grad = case(LENGTHS, shape, dtype)
        out, _, dqkv = run(qkv, cu_seqlens, shape, grad)
        want, want_dqkv = exact(qkv, LENGTHS, shape, grad)
        assert error(out, want) < TOLERANCE[dtype]
        for got, part in zip(parts(dqkv, shape), parts(want_dqkv, shape), strict=True):
            if part.norm() < 1e-6 * want_dqkv.norm():  # a window of 1 leaves no choice: dq and dk are zero
                assert got.norm() < TOLERANCE[dtype] * want_dqkv.norm()
            else:
                assert error(got, part) < TOLERANCE[dtype]

    def test_reference_equals_float64(self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
        shape = sizes(*heads, head_dim, 40)
        qkv, cu_seqlens, grad = case(LENGTHS, shape, dtype)
        out, lse = attention.attention_reference(qkv, cu_seqlens, shape)
        dqkv = attention.attention_backward_reference(grad, qkv, out, lse, cu_seqlens, shape)
        want, want_dqkv = exact(qkv, LENGTHS, shape, grad)
        assert error(out, want) < TOLERANCE[dtype] and error(dqkv, want_dqkv) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 600])
def test_chunks_of_a_long_document(dtype: torch.dtype, window: int | None, cpp: None) -> None:
    shape = sizes(2, 1, 32, window)
    qkv, cu_seqlens, grad = case(LONG, shape, dtype)
    out, _, dqkv = run(qkv, cu_seqlens, shape, grad)
    want, want_dqkv = exact(qkv, LONG, shape, grad)
    assert error(out, want) < TOLERANCE[dtype] and error(dqkv, want_dqkv) < TOLERANCE[dtype]


def test_lse(cpp: None) -> None:
    shape = sizes(4, 2, 32)
    qkv, cu_seqlens, _ = case(LENGTHS, shape, torch.float32)
    _, want = attention.attention_reference(qkv.double(), cu_seqlens, shape)
    torch.testing.assert_close(  # float32 scores of some units: a few of their roundings
        attention.attention_cpu(qkv, cu_seqlens, shape)[1].double(), want, atol=2e-6, rtol=0
    )


@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 2), 128)])
def test_bfloat16_is_as_exact_as_sdpa(heads: tuple[int, int], head_dim: int) -> None:
    lengths = [300, 200]
    shape = sizes(*heads, head_dim)
    qkv, cu_seqlens, grad = case(lengths, shape, torch.bfloat16)
    leaf = qkv.clone().requires_grad_()
    peer = sdpa(leaf, lengths, shape)
    peer.backward(grad)
    peer = peer.detach()
    want, want_dqkv = exact(qkv, lengths, shape, grad)
    out, _, dqkv = run(qkv, cu_seqlens, shape, grad)
    # Both round p and ds to bfloat16 at the same places; 1.2 leaves room for luck.
    assert error(out, want) < 1.2 * error(peer, want)
    for got, peers, part in zip(*(parts(x, shape) for x in (dqkv, leaf.grad, want_dqkv)), strict=True):
        assert error(got, part) < 1.2 * error(peers, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [LENGTHS, LONG])
def test_a_document_does_not_depend_on_its_neighbours(dtype: torch.dtype, lengths: list[int], cpp: None) -> None:
    shape = sizes(6, 2, 48)
    qkv, cu_seqlens, grad = case(lengths, shape, dtype)
    together = run(qkv, cu_seqlens, shape, grad)
    for rows, grad_rows, out, dqkv in zip(*(x.split(lengths) for x in (qkv, grad, *together[::2])), strict=True):
        alone = run(rows.contiguous(), pack([len(rows)]), shape, grad_rows.contiguous())
        assert torch.equal(alone[0], out) and torch.equal(alone[2], dqkv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [LENGTHS, LONG])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype, lengths: list[int]) -> None:
    shape = sizes(6, 2, 64)
    threads = torch.get_num_threads()
    runs = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            runs.append(run(*case(lengths, shape, dtype)[:2], shape, case(lengths, shape, dtype)[2]))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_scores(dtype: torch.dtype, cpp: None) -> None:
    """Scores of some 1e7, of which each row sees one: no overflow, in backward neither, where lse lacks digits."""
    shape = sizes(2, 1, 16)
    qkv, cu_seqlens, grad = case([70], shape, dtype)
    qkv[:, : 3 * 16] *= 4096
    out, lse, dqkv = run(qkv, cu_seqlens, shape, grad)
    assert out.isfinite().all() and lse.isfinite().all() and dqkv.isfinite().all()
    assert error(out, exact(qkv, [70], shape, grad)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros(dtype: torch.dtype, cpp: None) -> None:
    """Equal scores: each row is the mean of the values so far."""
    shape = sizes(2, 1, 16)
    qkv, cu_seqlens, grad = case([70], shape, dtype)
    qkv[:, : 3 * 16] = 0
    out, _, dqkv = run(qkv, cu_seqlens, shape, grad)
    values = qkv[:, -16:].double()
    want = values.cumsum(0) / torch.arange(1, 71)[:, None]
    assert error(out, want.repeat(1, 2)) < TOLERANCE[dtype]
    assert (dqkv[:, : 3 * 16] == 0).all()  # dq is a sum of keys, dk of queries


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("column", [0, 2 * 16, 3 * 16])  # of q, k, v
def test_a_bad_value_stays_in_its_document(bad: float, column: int, cpp: None) -> None:
    lengths = [37, 70, 33]
    shape = sizes(2, 1, 16)
    qkv, cu_seqlens, grad = case(lengths, shape, torch.bfloat16)
    clean = run(qkv, cu_seqlens, shape, grad)
    qkv[37 + 20, column] = bad
    out, _, dqkv = run(qkv, cu_seqlens, shape, grad)
    assert not out[37:107].isfinite().all() and not dqkv[37:107].isfinite().all()
    for rows in (slice(0, 37), slice(107, None)):
        assert torch.equal(out[rows], clean[0][rows]) and torch.equal(dqkv[rows], clean[2][rows])


def test_tiny_and_large_values(cpp: None) -> None:
    for magnitude in (1e-30, 1e4):
        shape = sizes(2, 1, 16, scale=1e-8 if magnitude > 1 else 1.0)
        qkv, cu_seqlens, grad = case([70], shape, torch.float32)
        qkv *= magnitude
        out, _, dqkv = run(qkv, cu_seqlens, shape, grad)
        want, want_dqkv = exact(qkv, [70], shape, grad)
        assert error(out, want) < TOLERANCE[torch.float32]
        assert error(dqkv, want_dqkv) < TOLERANCE[torch.float32]


def test_no_rows_and_float16() -> None:
    shape = sizes(2, 1, 16)
    arguments = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    for lengths in ([], [0, 0]):
        qkv = torch.empty(0, 64, requires_grad=True)
        out = attention.attention(qkv, pack(lengths), **arguments)
        out.sum().backward()
        assert out.shape == (0, 32) and qkv.grad.shape == (0, 64)
    qkv, cu_seqlens, grad = case([5, 33], shape, torch.float16)
    out = attention.attention(qkv.requires_grad_(), cu_seqlens, **arguments)
    out.backward(grad)
    want, want_dqkv = exact(qkv.detach(), [5, 33], shape, grad)
    assert error(out.detach(), want) < 2**-11 and error(qkv.grad, want_dqkv) < 2**-10  # the output's rounding, twice


def test_public_function_gradient_of_a_strided_output_gradient() -> None:
    shape = sizes(4, 2, 16, 20)
    qkv, cu_seqlens, grad = case([40, 9], shape, torch.float32)
    leaf = qkv.requires_grad_()
    out = attention.attention(leaf, cu_seqlens, **shape._asdict())
    out.backward(grad.T.contiguous().T)
    assert error(leaf.grad, exact(qkv.detach(), [40, 9], shape, grad)[1]) < TOLERANCE[torch.float32]


def test_opcheck_and_compile() -> None:
    shape = sizes(4, 2, 16, 20)
    qkv, cu_seqlens, grad = case([40, 9], shape, torch.float32)
    torch.library.opcheck(torch.ops.lowbit.attention, (qkv.requires_grad_(), cu_seqlens, *shape))
    out, lse = torch.ops.lowbit.attention(qkv.detach(), cu_seqlens, *shape)
    torch.library.opcheck(torch.ops.lowbit.attention_backward, (grad, qkv.detach(), out, lse, cu_seqlens, *shape))
    compiled = torch.compile(attention.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(qkv, cu_seqlens, **shape._asdict()), out)
    got, want = (f(qkv, cu_seqlens, **shape._asdict()) for f in (compiled, attention.attention))
    assert torch.equal(*(torch.autograd.grad(out, qkv, grad)[0] for out in (got, want)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.ones(5, 63)}, r"qkv is torch.float32 \[5, 63\] .* \[T, 64\]"),
        ({"qkv": torch.ones(64, 5).T}, r"strides \[1, 5\]; .* use .contiguous\(\)"),
        ({"qkv": torch.ones(5, 64, dtype=torch.float64)}, "qkv is torch.float64 .* float32, bfloat16 or float16"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens is torch.int64 \[2\]; .* use .int\(\)"),
        ({"cu_seqlens": torch.empty(0, dtype=torch.int32)}, r"cu_seqlens is torch.int32 \[0\]"),
        ({"cu_seqlens": torch.empty(2, dtype=torch.int32, device="meta")}, "cu_seqlens is on meta and qkv on cpu"),
        ({"cu_seqlens": torch.tensor([0, 4]).int()}, r"cu_seqlens=\[0, 4\] must ascend from 0 to the 5 rows"),
        ({"cu_seqlens": torch.tensor([0, 6]).int()}, r"cu_seqlens=\[0, 6\] must ascend"),
        ({"cu_seqlens": torch.tensor([1, 5]).int()}, r"cu_seqlens=\[1, 5\] must ascend"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5]).int()}, r"cu_seqlens=\[0, 4, 3, 5\] must ascend"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads=3 num_kv_heads=2 head_dim=16: heads must be a multiple"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"head_dim": 15}, "head_dim=15: .* even number up to 256"),
        ({"head_dim": 258}, "head_dim=258"),
        ({"sliding_window": 0}, "sliding_window=0: a row sees at least itself"),
    ],
)
def test_errors(change: dict, message: str) -> None:
    arguments = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "qkv": torch.ones(5, 64), "cu_seqlens": pack([5])}
    with pytest.raises(ValueError, match=message):
        attention.attention(**{**arguments, **change})


INTERPRETED = """
import torch
from tests.kernels.test_attention import case, error, exact, sizes
from trainer.kernels import attention as op

# float32: the order of the sums. float16: outputs, p and ds are rounded, 2^-12 on average each.
for lengths, shape in [
    ([1, 17, 0, 40], sizes(4, 2, 16)),
    ([70, 3], sizes(3, 1, 64, 20)),
    ([33], sizes(2, 2, 80)),
    ([0], sizes(2, 2, 16)),
]:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2**-10)):
        qkv, cu_seqlens, grad = case(lengths, shape, dtype)
        leaf = qkv.clone().requires_grad_()
        out = op.attention(leaf, cu_seqlens, **shape._asdict())
        out.backward(grad)
        if sum(lengths):
            want, want_dqkv = exact(qkv, lengths, shape, grad)
            assert error(out.detach(), want) < tolerance, (lengths, dtype)
            assert error(leaf.grad, want_dqkv) < tolerance, (lengths, dtype)
            lse = op.attention_triton(qkv, cu_seqlens, shape)[1]
            want_lse = op.attention_reference(qkv, cu_seqlens, shape)[1]
            torch.testing.assert_close(lse, want_lse, atol=2e-6, rtol=0)
print("interpreted")
"""


def test_triton_interpreted_equals_float64() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


KERNELS = {
    "forward": attention._attention_kernel,
    "delta": attention._delta_kernel,
    "dq": attention._dq_kernel,
    "dkdv": attention._dkdv_kernel,
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str, name: str, head_dim: int) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    kernel = KERNELS[name]
    types = {
        **dict.fromkeys(("qkv_ptr", "out_ptr", "grad_ptr", "dqkv_ptr"), f"*{dtype}"),
        **dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32"),
        **{name: "i32" for name in kernel.arg_names if name.startswith(("stride", "num_")) or name == "sliding_window"},
        "cu_seqlens_ptr": "*i32",
        "scale": "fp32",
    }
    types = {name: value for name, value in types.items() if name in kernel.arg_names}
    for target in aot.TARGETS:
        tiles = attention._tiles(name, head_dim, 4 if dtype == "fp32" else 2, target.backend)
        constants = {"HEAD_DIM": head_dim, "DOT": aot.triton.language.str_to_ty(dtype, None), **tiles}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        compiled = aot.compile_kernel(kernel, types, constants, target, num_warps=tiles["num_warps"])
        used = aot.resources(compiled, target)
        # In float32 up to a head_dim of 64; beyond, AMD's scalar registers go to lanes of a vector register, no memory.
        scalar = 0 if dtype == "fp32" and head_dim > 64 else used.scalar_spilled
        assert used.spilled + scalar == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_gpu_equals_float64(dtype: torch.dtype, head_dim: int) -> None:
    shape = sizes(6, 2, head_dim, 100)
    qkv, cu_seqlens, grad = case(LENGTHS, shape, dtype)
    leaf = qkv.cuda().requires_grad_()
    out = attention.attention(leaf, cu_seqlens.cuda(), **shape._asdict())
    out.backward(grad.cuda())
    want, want_dqkv = exact(qkv, LENGTHS, shape, grad)
    tolerance = TOLERANCE.get(dtype, 2**-10)
    assert error(out.detach().cpu(), want) < tolerance and error(leaf.grad.cpu(), want_dqkv) < tolerance
