"""Rotary embedding against transformers' functions and the reference, its gradient against float64."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trainer.kernels import _cpp, _tape, rope
from trainer.kernels.rms_norm import add_rms_norm, rms_norm
from trainer.kernels.swiglu import swiglu

EPS = 1e-6
NUM_POSITIONS = 300
# tokens, num_heads, num_kv_heads, head_dim: halves that end inside a vector, on one; several; work for two threads
SHAPES = [(1, 9, 3, 64), (3, 1, 1, 2), (5, 4, 2, 34), (2, 3, 3, 96), (40, 9, 3, 128)]
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("elementwise") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(rope, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


class Case:
    """Random heads and positions, and cos and sin as transformers computes them."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, *, norm: bool, device: str = "cpu"
    ) -> None:
        self.tokens, num_heads, num_kv_heads, head_dim = shape
        self.sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        generator = torch.Generator().manual_seed(sum(shape))
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = torch.randn(self.tokens, width, generator=generator).to(dtype).to(device)
        self.positions = torch.randint(0, NUM_POSITIONS, (self.tokens,), generator=generator).to(device)
        weights = (2 * torch.randn(2, head_dim, generator=generator)).to(dtype).to(device)
        self.q_norm, self.k_norm = weights.unbind() if norm else (None, None)
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        )
        cos, sin = rotary(torch.empty(0, dtype=dtype), torch.arange(NUM_POSITIONS)[None])  # [1, positions, head_dim]
        self.cos, self.sin = cos[0].to(device), sin[0].to(device)
        half = head_dim // 2
        self.cos_sin = torch.stack([self.cos[:, :half], self.sin[:, :half]], dim=1).contiguous()

    def run(self, function: object, rows: slice = slice(None)) -> Tensor:
        qkv = self.qkv[rows].clone()
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}
        assert function(qkv, self.positions[rows], self.cos_sin, **self.sizes, **norms) is None
        return qkv

    def run_transformers(self) -> Tensor:
        heads = self.qkv.view(self.tokens, -1, self.sizes["head_dim"])
        q, k, v = heads.split([self.sizes["num_heads"], *[self.sizes["num_kv_heads"]] * 2], dim=1)
        if self.q_norm is not None:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        cos, sin = self.cos[self.positions][None], self.sin[self.positions][None]
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
        return torch.cat([q[0], k[0], v], dim=1).view_as(self.qkv)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        module = Qwen3RMSNorm(x.shape[-1], eps=EPS)
        return torch.func.functional_call(module, {"weight": weight}, x)

    def options(self) -> dict[str, object]:
        return {**self.sizes, "q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}

    def inputs(self) -> list[Tensor]:
        """What has a gradient; it is recorded from here on."""
        found = [self.qkv, *([] if self.q_norm is None else [self.q_norm, self.k_norm])]
        return [tensor.detach().requires_grad_() for tensor in found]

    def with_inputs(self, inputs: list[Tensor]) -> "Case":
        self.qkv, *norms = inputs
        self.q_norm, self.k_norm = norms or (None, None)
        return self

    def grad(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.tokens)
        return torch.randn(self.qkv.shape, generator=generator).to(self.qkv)

    def exact_gradient(self) -> tuple[Tensor, ...]:
        """Of qkv, q_norm and k_norm, by autograd in float64"""
        qkv, *norms = inputs = [tensor.double().requires_grad_() for tensor in self.inputs()]
        heads = qkv.view(self.tokens, -1, self.sizes["head_dim"])
        parts = list(heads.split([self.sizes["num_heads"], *[self.sizes["num_kv_heads"]] * 2], dim=1))
        cos, sin = self.cos_sin[self.positions].double()[:, None].unbind(2)
        for part in (0, 1):
            x = parts[part]
            if norms:
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * norms[part]
            x1, x2 = x.chunk(2, dim=-1)
            parts[part] = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
        return torch.autograd.grad(torch.cat(parts, dim=1).view_as(qkv), inputs, self.grad().double())

    def backward(self, function: object, *, with_norms: bool) -> tuple[Tensor, ...]:
        tensors = self.grad(), self.positions, self.cos_sin, None if self.q_norm is None else self.qkv
        options = {**self.sizes, "eps": EPS, "with_norms": with_norms}
        grad_qkv, grad_norms = function(*tensors, self.q_norm, self.k_norm, **options)
        assert (grad_norms is not None) == with_norms
        return grad_qkv, *(grad_norms.unbind() if with_norms else ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
class TestCpu:
    def test_equals_transformers(self, shape: tuple[int, int, int, int], dtype: torch.dtype, cpp: None) -> None:
        case = Case(shape, dtype, norm=False)
        assert torch.equal(case.run(rope.rope_cpu_), case.run_transformers())

    def test_with_norm_equals_transformers(self, shape: tuple, dtype: torch.dtype, cpp: None) -> None:
        case = Case(shape, dtype, norm=True)
        got, want = case.run(rope.rope_cpu_), case.run_transformers()
        # Only the order of the norm's sum differs: a few float32 roundings of values that reach about 16, before they
        # cancel. In bfloat16 these cross a rounding boundary once in some 2^13 values: one place of two such values.
        torch.testing.assert_close(got, want, rtol=0, atol=16 * (2**-21 if dtype == torch.float32 else 2**-7))
        if dtype == torch.bfloat16:
            assert (got != want).sum() <= max(2, got.numel() // 1000)  # a value enters two results

    @pytest.mark.parametrize("norm", [False, True])
    def test_same_bits_on_every_processor(self, shape: tuple, dtype: torch.dtype, norm: bool, cpp: None) -> None:
        case = Case(shape, dtype, norm=norm)
        got = case.run(rope.rope_cpu_)
        rope.kernel = _tape.kernel  # the fixture puts back what it found
        assert torch.equal(got, case.run(rope.rope_cpu_))

    @pytest.mark.parametrize("norm", [False, True])
    def test_reference_equals_transformers(self, shape: tuple, dtype: torch.dtype, norm: bool) -> None:
        case = Case(shape, dtype, norm=norm)
        assert torch.equal(case.run(rope.rope_reference_), case.run_transformers())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype, norm: bool) -> None:
    case = Case((40, 9, 3, 66), dtype, norm=norm)
    together = case.run(rope.rope_)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(case.run(rope.rope_), together)
    finally:
        torch.set_num_threads(threads)
    for rows in (slice(0, 1), slice(7, 8), slice(11, 40), slice(0, 0)):
        assert torch.equal(case.run(rope.rope_, rows), together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", [rope.rope_, rope.rope_reference_])
def test_a_position_outside_the_table_gives_nan_in_q_and_k(implementation: object, dtype: torch.dtype) -> None:
    case = Case((5, 4, 2, 34), dtype, norm=False)
    want = case.run(implementation)
    case.positions[1:4] = torch.tensor([NUM_POSITIONS, -1, 2**62])
    got = case.run(implementation)
    rotated = 6 * 34
    assert got[1:4, :rotated].isnan().all()
    got[1:4, :rotated] = want[1:4, :rotated]
    assert torch.equal(got, want)


# ---- the functional op and its gradient


def assert_gradient(got: tuple[Tensor, ...], case: Case) -> None:
    want = case.exact_gradient()
    half_place = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[case.qkv.dtype]
    # After half a place of the result, some 16 roundings of float32 (2^-24): of a value's two products, up to |grad|
    # each, times what a norm multiplies by and, for the norms' gradients, summed over tokens and heads.
    heads = case.qkv.detach().double().view(case.tokens, -1, case.sizes["head_dim"])
    size = case.grad().double().abs().view_as(heads).amax(-1, keepdim=True) * 2
    if case.q_norm is not None:
        scale = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPS)
        normed = (heads * scale).abs()
        sizes = [(size * normed).sum((0, 1))] * 2
        weight = torch.stack([case.q_norm, case.k_norm]).detach().abs().max().double()
        size = size * torch.maximum(scale * weight * (1 + normed), torch.ones_like(normed))
    else:
        sizes = []
    for result, exact, bound in zip(got, want, [size.expand_as(heads).reshape(case.qkv.shape), *sizes], strict=False):
        assert ((result.double() - exact).abs() <= half_place * exact.abs() + 2**-20 * bound).all()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestGradient:
    @pytest.mark.parametrize("shape", [*SHAPES, (1100, 2, 1, 34)])  # 1100 tokens: more than 16 in a chunk
    def test_equals_float64(self, shape: tuple, dtype: torch.dtype, norm: bool, cpp: None) -> None:
        case = Case(shape, dtype, norm=norm)
        got = case.backward(rope.rope_backward_cpu, with_norms=norm)
        assert_gradient(got, case)
        v = slice((case.sizes["num_heads"] + case.sizes["num_kv_heads"]) * case.sizes["head_dim"], None)
        assert torch.equal(got[0][:, v], case.grad()[:, v])
        assert torch.equal(case.backward(rope.rope_backward_cpu, with_norms=False)[0], got[0])
        assert_gradient(case.backward(rope.rope_backward_reference, with_norms=norm), case)

    @pytest.mark.parametrize("scale", [0, 1e-30, 1e-3, 1e17])  # squares of 1e17: half of what float32 holds
    def test_huge_and_tiny_heads(self, scale: float, dtype: torch.dtype, norm: bool, cpp: None) -> None:
        case = Case((5, 4, 2, 34), dtype, norm=norm)
        case.qkv = (case.qkv * scale).to(dtype)
        assert_gradient(case.backward(rope.rope_backward_cpu, with_norms=norm), case)

    def test_same_bits_on_every_processor(self, dtype: torch.dtype, norm: bool, cpp: None) -> None:
        case = Case((40, 9, 3, 98), dtype, norm=norm)
        got = case.backward(rope.rope_backward_cpu, with_norms=norm)
        rope.kernel = _tape.kernel  # the fixture puts back what it found
        assert all(map(torch.equal, got, case.backward(rope.rope_backward_cpu, with_norms=norm)))

    def test_through_autograd(self, dtype: torch.dtype, norm: bool) -> None:
        case = Case((40, 4, 2, 34), dtype, norm=norm)
        want, before = case.run(rope.rope_), case.qkv.clone()
        case.with_inputs(inputs := case.inputs())
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
            y = rope.rope(case.qkv, case.positions, case.cos_sin, **case.options())
        assert torch.equal(y, want) and torch.equal(case.qkv, before)
        kept = [case.positions, case.cos_sin, *inputs] if norm else [case.positions, case.cos_sin]
        assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in kept]
        strided = torch.stack([case.grad()] * 2, dim=-1)[..., 0]
        got = torch.autograd.grad(y, inputs, strided, retain_graph=True)
        assert_gradient(got, case)
        for i in range(1, len(inputs)):  # k_norm or q_norm alone
            assert torch.equal(torch.autograd.grad(y, inputs[i], strided, retain_graph=True)[0], got[i])

    def test_does_not_depend_on_the_number_of_threads(self, dtype: torch.dtype, norm: bool) -> None:
        case = Case((100, 9, 3, 66), dtype, norm=norm)
        want = case.backward(rope.rope_backward_cpu, with_norms=norm)
        threads = torch.get_num_threads()
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                assert all(map(torch.equal, case.backward(rope.rope_backward_cpu, with_norms=norm), want))
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("implementation", [rope.rope_backward_cpu, rope.rope_backward_reference])
    def test_a_position_outside_the_table_gives_nan(
        self, implementation: object, dtype: torch.dtype, norm: bool
    ) -> None:
        case = Case((5, 4, 2, 34), dtype, norm=norm)
        want = case.backward(implementation, with_norms=norm)
        case.positions[1:4] = torch.tensor([NUM_POSITIONS, -1, 2**62])
        got = case.backward(implementation, with_norms=norm)
        assert got[0][1:4, : 6 * 34].isnan().all() and all(weight.isnan().all() for weight in got[1:])
        got[0][1:4, : 6 * 34] = want[0][1:4, : 6 * 34]
        assert torch.equal(got[0], want[0])

    def test_no_tokens(self, dtype: torch.dtype, norm: bool) -> None:
        case = Case((1, 4, 2, 34), dtype, norm=norm)
        case.qkv, case.positions = case.qkv[:0], case.positions[:0]
        got = case.backward(rope.rope_backward_cpu, with_norms=norm)
        assert got[0].shape == (0, 8 * 34) and all((weight == 0).all() for weight in got[1:])


@pytest.mark.parametrize("norm", [False, True])
def test_gradient_is_no_less_exact_than_that_of_transformers(norm: bool) -> None:
    case = Case((64, 9, 3, 64), torch.bfloat16, norm=norm)
    want = case.exact_gradient()
    case.with_inputs(inputs := case.inputs())
    theirs = torch.autograd.grad(case.run_transformers(), inputs, case.grad())
    y = rope.rope(case.qkv, case.positions, case.cos_sin, **case.options())
    for our, their, exact in zip(torch.autograd.grad(y, inputs, case.grad()), theirs, want, strict=True):
        our_error, their_error = (our - exact).abs(), (their - exact).abs()
        assert our_error.mean() <= their_error.mean() and our_error.max() <= their_error.max()


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_between_the_other_ops_of_a_layer_without_a_graph_break(grad: bool) -> None:
    case = Case((5, 4, 2, 32), torch.float32, norm=True)  # 8 heads of 32
    weight = torch.linspace(0.5, 2, 256)

    def layer(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, weight: Tensor) -> Tensor:
        x = rms_norm(qkv, weight, eps=EPS)
        rotated = rope.rope(x, case.positions, case.cos_sin, **case.sizes, q_norm=q_norm, k_norm=k_norm, eps=EPS)
        y, total = add_rms_norm(rotated, x, weight, eps=EPS)
        return swiglu(torch.cat([y, total], dim=1))

    inputs = [tensor.requires_grad_(grad) for tensor in (case.qkv, case.q_norm.clone(), case.k_norm.clone(), weight)]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got, want = compiled(*inputs), layer(*inputs)
    assert torch.equal(got, want)
    if grad:
        grads = [torch.autograd.grad(result.square().sum(), inputs) for result in (got, want)]
        assert all(map(torch.equal, *grads))


def test_float16_runs_the_reference() -> None:
    case = Case((5, 4, 2, 34), torch.float16, norm=True)
    assert torch.equal(case.run(rope.rope_), case.run_transformers())
    assert torch.equal(rope.rope(case.qkv, case.positions, case.cos_sin, **case.options()), case.run_transformers())
    assert_gradient(case.backward(rope.rope_backward_cpu, with_norms=True), case)


@pytest.mark.parametrize("norm", [False, True])
def test_opcheck(norm: bool) -> None:
    case = Case((5, 4, 2, 34), torch.float32, norm=norm)
    rest = *case.sizes.values(), case.q_norm, case.k_norm, EPS
    torch.library.opcheck(torch.ops.lowbit.rope_, (case.qkv.clone(), case.positions, case.cos_sin, *rest))
    qkv = case.qkv.clone()
    torch.ops.lowbit.rope_(qkv, case.positions, case.cos_sin, *rest)
    assert torch.equal(qkv, case.run(rope.rope_))
    for with_norms in {False, norm}:
        tensors = case.grad(), case.positions, case.cos_sin, case.qkv if norm else None, case.q_norm, case.k_norm
        torch.library.opcheck(torch.ops.lowbit.rope_backward, (*tensors, *case.sizes.values(), EPS, with_norms))
    case.qkv.requires_grad_()
    torch.library.opcheck(torch.ops.lowbit.rope, (case.qkv, case.positions, case.cos_sin, *rest))
    if norm:
        case.with_inputs(case.inputs())
        rest = *case.sizes.values(), case.q_norm, case.k_norm, EPS
        torch.library.opcheck(torch.ops.lowbit.rope, (case.qkv, case.positions, case.cos_sin, *rest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.ones(2, 30)}, r"qkv is torch.float32 \[2, 30\] .* 2 \+ 2 \* 1 heads of 8 .* \[T, 32\]"),
        ({"qkv": torch.ones(32, 2).T}, r"qkv .* with strides \[1, 2\]; .* contiguous rows"),
        ({"head_dim": 7, "qkv": torch.ones(2, 28)}, r"heads of 7 \(an even number\)"),
        ({"positions": torch.zeros(2).int()}, r"positions is torch.int32 \[2\] .* contiguous, torch.int64 \[2\]"),
        ({"positions": torch.zeros(3).long()}, r"positions is torch.int64 \[3\] .* torch.int64 \[2\]"),
        ({"cos_sin": torch.ones(9, 8)}, r"cos_sin is torch.float32 \[9, 8\] .* torch.float32 \[9, 2, 4\]"),
        ({"cos_sin": torch.ones(9, 2, 4).half()}, r"cos_sin is torch.float16 .* torch.float32 \[9, 2, 4\]"),
        ({"cos_sin": torch.ones(9, 2, 4, device="meta")}, "cos_sin is .* on meta .* on cpu"),
        ({"q_norm": None}, "q_norm and k_norm come together; one of them is None"),
        ({"k_norm": torch.ones(4)}, r"k_norm is torch.float32 \[4\] .* torch.float32 \[8\]"),
    ],
)
def test_errors(change: dict[str, object], message: str) -> None:
    tensors = {"qkv": torch.ones(2, 32), "positions": torch.zeros(2).long(), "cos_sin": torch.ones(9, 2, 4)}
    rest = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "q_norm": torch.ones(8), "k_norm": torch.ones(8)}
    with pytest.raises(ValueError, match=message):
        rope.rope_(**{**tensors, **rest, **change})


INTERPRETED = """
import torch
from trainer.kernels import rope as op

torch.manual_seed(0)
# one head; odd sizes; more heads than a program takes (8 of 128); none; two chunks of tokens
shapes = [(1, 1, 1, 2), (3, 5, 2, 34), (2, 19, 3, 256), (0, 2, 1, 8), (18, 1, 1, 6)]
for tokens, num_heads, num_kv_heads, head_dim in shapes:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    # float32: bit for bit without the norm. The interpreter truncates to bfloat16 where GPUs round: 2^-7 of values up
    # to about 8 at each of four places; float16: the order of the norm's sum moves a value at a rounding boundary.
    for dtype, atol in ((torch.float32, 0), (torch.float16, 0), (torch.bfloat16, 2**-2)):
        for norm in (False, True):
            qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
            positions = torch.randint(0, 9, (tokens,))
            cos_sin = torch.randn(9, 2, head_dim // 2).clamp(-1, 1).to(dtype)
            norms = dict(zip(("q_norm", "k_norm"), torch.randn(2, head_dim).to(dtype))) if norm else {}
            got, want = qkv.clone(), qkv.clone()
            op.rope_(got, positions, cos_sin, **sizes, **norms)
            op.rope_reference_(want, positions, cos_sin, **sizes, **norms)
            extra = {torch.float32: 2**-18, torch.float16: 2**-6, torch.bfloat16: 0}[dtype] if norm else 0
            torch.testing.assert_close(got, want, rtol=0, atol=atol + extra)
            assert torch.equal(op.rope(qkv, positions, cos_sin, **sizes, **norms), got)
            if dtype == torch.bfloat16:
                continue
            grad = torch.randn_like(qkv)
            tensors = grad, positions, cos_sin, qkv if norm else None, norms.get("q_norm"), norms.get("k_norm")
            for with_norms in {False, norm}:
                got = op.rope_backward_triton(*tensors, **sizes, eps=1e-6, with_norms=with_norms)
                want = op.rope_backward_reference(*tensors, **sizes, eps=1e-6, with_norms=with_norms)
                # some float32 roundings of values up to about 16; float16: half a place of these
                atol_of_grad = {torch.float32: 2**-18, torch.float16: 2**-7}[dtype]
                torch.testing.assert_close(got[0], want[0], rtol=0, atol=atol_of_grad)
                if with_norms:
                    torch.testing.assert_close(got[1], want[1], rtol=0, atol=4 * atol_of_grad)  # over up to 38 heads
            if tokens == 3:
                op.rope_(qkv, torch.tensor([9, -1, 2**40]), cos_sin, **sizes, **norms)
                assert qkv[:, : 7 * 34].isnan().all() and not qkv[:, 7 * 34 :].isnan().any()
print("interpreted")
"""


def test_triton_interpreted_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str, head_dim: int, norm: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    sizes = "num_heads num_kv_heads head_dim max_positions stride_token stride_position".split()
    norms = ["q_norm_ptr", "k_norm_ptr"]
    types = {"positions_ptr": "*i64", "eps": "fp32", **dict.fromkeys(sizes, "i32")}
    types |= dict.fromkeys(["qkv_ptr", "out_ptr", "cos_sin_ptr", *(norms if norm else [])], f"*{dtype}")
    constants = {} if norm else dict.fromkeys(norms)
    constants |= {"HAS_NORM": norm, "BLOCK_N": 2 * rope.TILE // head_dim, "BLOCK_D": head_dim // 2}
    for target in aot.TARGETS:
        aligned = ("head_dim", "stride_token", "stride_position")
        compiled = aot.compile_kernel(rope._rope_kernel, types, constants, target, aligned=aligned)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize(("norm", "with_norms"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_backward_compiles_without_spills(dtype: str, head_dim: int, norm: bool, with_norms: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    sizes = "tokens num_heads num_kv_heads head_dim max_positions stride_token stride_position chunk_tokens".split()
    norms = ["qkv_ptr", "q_norm_ptr", "k_norm_ptr"]
    types = {"positions_ptr": "*i64", "eps": "fp32", **dict.fromkeys(sizes, "i32")}
    types |= dict.fromkeys(["grad_ptr", "grad_qkv_ptr", "cos_sin_ptr", *(norms if norm else [])], f"*{dtype}")
    types |= {"partial_ptr": "*fp32"} if with_norms else {}
    constants = dict.fromkeys([*norms, "partial_ptr"]) | {"HAS_NORM": norm, "WITH_NORMS": with_norms}
    constants |= {"BLOCK_N": 2 * rope.TILE // head_dim, "BLOCK_D": head_dim // 2}
    constants = {name: value for name, value in constants.items() if name not in types}
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(rope._rope_backward_kernel, types, constants, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_reference(dtype: torch.dtype, norm: bool) -> None:
    case = Case((40, 19, 3, 128), dtype, norm=norm, device="cuda")
    got, want = case.run(rope.rope_), case.run(rope.rope_reference_)
    # as on the CPU
    atol = 16 * (2**-21 if dtype == torch.float32 else 2**-7) if norm else 0
    torch.testing.assert_close(got, want, rtol=0, atol=atol)
    assert torch.equal(rope.rope(case.qkv, case.positions, case.cos_sin, **case.options()), got)
    for with_norms in {False, norm}:
        assert_gradient(case.backward(rope.rope_backward_triton, with_norms=with_norms), case)
