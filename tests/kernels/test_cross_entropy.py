"""Fused linear and cross-entropy against float64 autograd of the unfused formula, and torch's own bfloat16 path."""

import functools
import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.kernels import _cpp, _tape, cross_entropy
from trainer.kernels.cross_entropy import (
    Options,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    softmax_gradient_cpu,
    softmax_gradient_reference,
)

FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]
# rows, in_features, vocab_size: one of each; vocabularies that end inside a vector, on one, after one; an odd number
# of rows over several chunks.
SHAPES = [(1, 1, 1), (5, 8, 1), (1, 24, 33), (3, 1, 16), (37, 24, 101), (13, 40, 1031)]
OPTIONS = [
    {},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.1},
    {"logit_scale": 0.25},
    {"softcap": 3.0},
    {"z_loss": 1e-2, "label_smoothing": 0.3, "logit_scale": -0.5, "softcap": 2.0},
]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("cross_entropy") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(cross_entropy, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


@pytest.fixture(params=["auto", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", request.param)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ROWS", 5)
    monkeypatch.setattr(cross_entropy, "BLOCK_VOCAB", 64)


def case(rows: int, in_features: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden_states, weight, bias, which want gradients, and labels, of which every fourth is ignored"""
    generator = torch.Generator().manual_seed(rows + vocab_size)
    randn = functools.partial(torch.randn, generator=generator)
    hidden_states = randn(rows, in_features).to(dtype).requires_grad_()
    weight = (2 * randn(vocab_size, in_features) / in_features**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, (rows,), generator=generator)
    labels[3::4] = cross_entropy.IGNORE_INDEX
    return hidden_states, weight, randn(vocab_size).to(dtype).requires_grad_(), labels


def loss_and_gradients(function, hidden_states: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, **options):
    """Of `function`; the incoming gradient is 0.3."""
    loss = function(hidden_states, weight, labels, bias=bias, **options)
    return [loss.detach(), *torch.autograd.grad(0.3 * loss, (hidden_states, weight, bias))]


def truth(hidden_states: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, **options) -> list[Tensor]:
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden_states, weight, bias)]
    return loss_and_gradients(linear_cross_entropy_reference, *wide, labels, **options)


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def test_reference_equals_torch() -> None:
    """Label smoothing and ignored rows as torch has them; the z-loss by hand."""
    hidden_states, weight, bias, labels = (tensor.detach() for tensor in case(9, 8, 33, torch.float32))
    logits = hidden_states @ weight.T + bias
    want = torch_cross_entropy(logits, labels, reduction="sum", label_smoothing=0.2)
    got = linear_cross_entropy_reference(hidden_states, weight, labels, bias=bias, label_smoothing=0.2)
    torch.testing.assert_close(got, want)
    want = want + 0.5 * (logits[labels >= 0].logsumexp(-1) ** 2).sum()
    got = linear_cross_entropy_reference(hidden_states, weight, labels, bias=bias, label_smoothing=0.2, z_loss=0.5)
    torch.testing.assert_close(got, want)


def test_golden() -> None:
    """By hand: two equal logits are ln 2 each, and the gradient to the hidden state is half the difference of rows."""
    hidden_states = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[2.0], [2.0]])
    loss = linear_cross_entropy(hidden_states, weight, torch.tensor([0]))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-7)
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden_states, weight + 0.0, torch.tensor([1])), hidden_states)
    assert grad.item() == 0
    loss = linear_cross_entropy(hidden_states, torch.tensor([[0.0], [math.log(3)]]), torch.tensor([0]))
    (grad,) = torch.autograd.grad(loss, hidden_states)
    assert loss.item() == pytest.approx(math.log(4), rel=1e-6) and grad.item() == pytest.approx(0.75 * math.log(3))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_equals_float64_autograd(shape, options, small_chunks, implementation) -> None:
    arguments = case(*shape, torch.float32)
    for got, want in zip(
        loss_and_gradients(linear_cross_entropy, *arguments, **options), truth(*arguments, **options), strict=True
    ):
        # Sums of up to 1031 float32 terms of size 1; with one token of vocabulary they cancel to 0.
        assert (got - want).norm() < 3e-6 * want.norm() + 1e-6
        assert got.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_16_bits_err_no_more_than_torch(dtype, options, small_chunks, implementation) -> None:
    arguments = case(37, 24, 1031, dtype)

    def unfused(hidden_states: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor, **options: float) -> Tensor:
        """transformers' way: logits in 16 bits, each step rounded, then the float32 loss."""
        logits = torch.nn.functional.linear(hidden_states, weight, bias) * options.get("logit_scale", 1)
        if "softcap" in options:
            logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
        kept, logits = labels != -100, logits.float()
        smoothing = options.get("label_smoothing", 0.0)
        loss = torch_cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        return loss + options.get("z_loss", 0.0) * (logits[kept].logsumexp(-1) ** 2).sum()

    want = truth(*arguments, **options)
    got = loss_and_gradients(linear_cross_entropy, *arguments, **options)
    theirs = loss_and_gradients(unfused, *arguments, **options)
    # Both round logits and G; what we round besides is the gradient after its scale and a chunk's part of the
    # weight's, half a place each beside their two or three. The losses differ in float32 roundings only.
    assert abs(got[0] - theirs[0]) <= 2e-6 * abs(theirs[0])
    for ours, other, exact in zip(got[1:], theirs[1:], want[1:], strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) < 1.5 * error(other, exact) + torch.finfo(dtype).eps / 4


def test_frozen_tensors_have_no_gradient_and_change_none() -> None:
    hidden_states, weight, bias, labels = case(37, 24, 101, torch.float32)
    all_gradients = loss_and_gradients(linear_cross_entropy, hidden_states, weight, bias, labels)
    for i in range(3):
        tensors = [tensor.detach() for tensor in (hidden_states, weight, bias)]
        tensors[i].requires_grad_()
        loss = linear_cross_entropy(tensors[0], tensors[1], labels, bias=tensors[2])
        assert torch.equal(loss.detach(), all_gradients[0])
        (0.3 * loss).backward()
        assert torch.equal(tensors[i].grad, all_gradients[1 + i])
        assert [tensor.grad is not None for tensor in tensors] == [j == i for j in range(3)]


def test_no_gradient_is_computed_when_none_is_wanted() -> None:
    hidden_states, weight, _, labels = case(37, 24, 101, torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden_states, weight, labels)
    assert not loss.requires_grad
    assert torch.equal(loss, linear_cross_entropy(hidden_states, weight, labels).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_twice_scales_by_the_incoming_gradient(dtype) -> None:
    hidden_states, weight, _, labels = case(37, 24, 101, dtype)
    loss = linear_cross_entropy(hidden_states, weight, labels)
    once = torch.autograd.grad(loss, (hidden_states, weight), retain_graph=True)
    scale = torch.tensor(1 / 3)  # rounded to bfloat16 it would be 0.2 % larger
    again = torch.autograd.grad(loss, (hidden_states, weight), scale)
    for first, second in zip(once, again, strict=True):
        assert torch.equal(second, (first.float() * scale).to(dtype))


@pytest.mark.parametrize("rows", [0, 6])
def test_nothing_but_ignored_rows_is_zero_with_zero_gradients(rows, implementation) -> None:
    hidden_states, weight, bias, _ = case(rows, 24, 33, torch.float32)
    labels = torch.full((rows,), 5)
    got = loss_and_gradients(linear_cross_entropy, hidden_states, weight, bias, labels, ignore_index=5)
    assert [gradient.shape for gradient in got[1:]] == [(rows, 24), (33, 24), (33,)]
    assert all((tensor == 0).all() for tensor in got)


def test_ignored_rows_cost_nothing_and_have_no_gradient() -> None:
    hidden_states, weight, _, labels = case(37, 24, 101, torch.float32)
    kept = labels >= 0
    alone = hidden_states.detach()[kept].requires_grad_()
    loss, loss_alone = (
        linear_cross_entropy(*pair) for pair in ((hidden_states, weight, labels), (alone, weight, labels[kept]))
    )
    assert torch.equal(loss, loss_alone)  # the same rows in the same chunks
    got, want = torch.autograd.grad(loss, hidden_states)[0], torch.autograd.grad(loss_alone, alone)[0]
    assert torch.equal(got[kept], want) and (got[~kept] == 0).all()
    assert torch.isfinite(
        linear_cross_entropy(hidden_states.detach().masked_fill(~kept[:, None], torch.nan), weight, labels)
    )


def test_layouts(small_chunks) -> None:
    """Transposed hidden states, every other row of a weight, every third label."""
    hidden_states, weight, _, labels = (tensor.detach() for tensor in case(37, 24, 101, torch.float32))
    spread = torch.zeros(37, 3, dtype=torch.int64)
    spread[:, 0] = labels
    wanted = linear_cross_entropy(hidden_states.requires_grad_(), weight.requires_grad_(), labels)
    views = [hidden_states.detach().T.contiguous().T, weight.detach().repeat_interleave(2, 0)[::2], spread[:, 0]]
    got = linear_cross_entropy(views[0].requires_grad_(), views[1].requires_grad_(), views[2])
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)  # torch may choose another product: order of sums
    for one, other in zip(
        torch.autograd.grad(got, views[:2]), torch.autograd.grad(wanted, (hidden_states, weight)), strict=True
    ):
        assert error(one, other.double()) < 1e-6  # the same


# ---- the kernel between the products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 33, 64, 100, 1031])
@pytest.mark.parametrize(
    "options", [Options(), Options(1e-2, 0.3, -0.5, 2.0)], ids=["plain", "all options"]
)  # logits are the capped ones
def test_kernel_equals_float64(dtype, vocab_size, options, cpp) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (2 * torch.randn(7, vocab_size, generator=generator)).to(dtype)
    if options.softcap:
        logits = torch.tanh(logits) * options.softcap
    labels = torch.randint(0, vocab_size, (7,), generator=generator)
    z = logits.double().requires_grad_()
    log_sum = z.logsumexp(-1)
    losses = torch_cross_entropy(z, labels, reduction="none", label_smoothing=options.label_smoothing)
    losses = losses + options.z_loss * log_sum**2
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    gradient *= options.logit_scale * (1 - (z.detach() * options.inverse_softcap) ** 2)
    rounding = torch.finfo(dtype).eps
    for implementation in (softmax_gradient_cpu, softmax_gradient_reference):
        written = logits.clone()
        # A float32 softmax: its exponentials, their sum and its use are within 4 places of it.
        torch.testing.assert_close(
            implementation(written, labels, options, with_grad=False).double(), losses.detach(), rtol=5e-7, atol=5e-7
        )
        assert torch.equal(written, logits)
        implementation(written, labels, options, with_grad=True)
        torch.testing.assert_close(written.double(), gradient, rtol=rounding / 2 + 5e-7, atol=5e-7)


def test_exponential_is_exact_to_a_few_places(cpp) -> None:
    """softmax of (0, x...) is e^x over a sum of some 500: down to the smallest normal numbers of float32."""
    x = -torch.linspace(0, 80, 40_001)
    logits = torch.cat([torch.zeros(1), x])[None]
    want = logits.double().softmax(-1)[0, 1:]
    softmax_gradient_cpu(logits, torch.tensor([0]), Options(), with_grad=True)
    # 1.5 places of e^x, half of one for the product with the inverse sum, one for that, and the float32 sum, 5 more at
    # most; a place is 2^-23 at most.
    torch.testing.assert_close(logits[0, 1:].double(), want, rtol=8 * 2**-23, atol=0)
    far = torch.tensor([[0.0, -88.0, -104.0, -1e4, -torch.inf]])
    losses = softmax_gradient_cpu(far, torch.tensor([0]), Options(), with_grad=True)
    assert losses.item() == 0 and far.tolist() == [[0, 0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_every_processor_and_number_of_threads(dtype, cpp) -> None:
    options = Options(1e-3, 0.1, 0.5, 30.0)
    logits = torch.randn(33, 1031, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.arange(33)
    want = logits.clone()
    want_losses = torch.empty(33, dtype=torch.float64)
    native = _tape.kernel("cross_entropy", "softmax_gradient")
    numbers = options.z_loss, options.label_smoothing, options.logit_scale, options.inverse_softcap
    _tape.call(native, cross_entropy._DTYPE_IDS[dtype], want, 33, 1031, labels, want_losses, *numbers, 1)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            got = logits.clone()
            assert torch.equal(softmax_gradient_cpu(got, labels, options, with_grad=True), want_losses)
            assert torch.equal(got, want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_and_two_threads_agree_to_the_bit(dtype) -> None:
    """Torch's products included, which hold to it unless there are only a few float32 rows."""
    hidden_states, weight, bias, labels = case(400, 64, 1031, dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(loss_and_gradients(linear_cross_entropy, hidden_states, weight, bias, labels))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits(dtype, cpp) -> None:
    """Neither overflow nor a lost place at 1e4; infinities are those of the formula; a nan stays in its row."""
    logits = torch.full((6, 37), -1e4).to(dtype)
    logits[:, 36] = logits[:, 3] = 1e4  # one in a whole vector, one in the rest of the row
    logits[1, 36] = -torch.inf
    logits[2, 5] = torch.nan
    logits[3, 36] = torch.nan
    logits[4, 0] = torch.inf
    logits[5] = torch.finfo(dtype).tiny
    written = logits.clone()
    losses = softmax_gradient_cpu(written, torch.tensor([3, 3, 3, 3, 3, 36]), Options(), with_grad=True)
    torch.testing.assert_close(losses[[0, 1, 5]].float(), torch.tensor([2.0, 1.0, 37.0]).log(), rtol=2e-7, atol=1e-9)
    assert losses.isnan().tolist() == written.isnan().any(1).tolist() == [False, False, True, True, True, False]
    assert written[0, 3] == -0.5 and written[0, 36] == 0.5 and written[0].sum() == 0
    assert (written[1] == 0).all()
    # infinite loss without a label's probability, and nothing but zeros and ones in the gradient
    losses = softmax_gradient_cpu(logits[1:2].clone(), torch.tensor([36]), Options(), with_grad=False)
    assert losses.item() == torch.inf


# ---- memory, registration, errors


class _Memory(TorchDispatchMode):
    """Bytes of the storages that ops have returned and that are still alive, without views of the inputs; `peak` is the
    most at any time."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.alive: dict[int, tuple[object, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.lowbit.linear_cross_entropy.default:
            with self:  # what an op does inside is otherwise not seen
                return cross_entropy._chunked(*args)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self.inputs:
                    continue
                self.alive[storage.data_ptr()] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.alive = {address: entry for address, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return result


@pytest.mark.parametrize("train_weight", [False, True])
def test_memory_is_one_chunk_of_logits_and_the_gradients(train_weight, monkeypatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ROWS", 16)
    rows, in_features, vocab_size = 1024, 8, 20_000
    hidden_states, weight, _, labels = case(rows, in_features, vocab_size, torch.bfloat16)
    weight.requires_grad_(train_weight)
    with _Memory(hidden_states, weight, labels) as memory:
        linear_cross_entropy(hidden_states, weight, labels).backward()
    chunk, grad_hidden, grad_weight = 2 * 16 * vocab_size, 2 * rows * in_features, 2 * vocab_size * in_features
    product = 2 * cross_entropy.BLOCK_VOCAB * in_features
    # Hidden states: the kept rows, their gradient, its place among all rows. The weight's gradient in its dtype and in
    # float32, twice as large. Labels and their masks are up to 32 bytes a row.
    allowed = chunk + 3 * grad_hidden + train_weight * (3 * grad_weight + product) + 32 * rows
    assert chunk < memory.peak <= allowed
    logits = 2 * rows * vocab_size
    assert allowed < logits / 20


def test_opcheck() -> None:
    hidden_states, weight, bias, labels = case(9, 8, 33, torch.float32)
    operator = torch.ops.lowbit.linear_cross_entropy
    numbers = cross_entropy.IGNORE_INDEX, [0.1, 0.1, 0.5, 3.0]
    torch.library.opcheck(operator, (hidden_states, weight, bias, labels, *numbers, [True, True, True]))
    torch.library.opcheck(operator, (hidden_states, weight, None, labels, *numbers, [True, False, False]))


def test_compiles_without_a_graph_break() -> None:
    hidden_states, weight, bias, labels = case(9, 8, 33, torch.float32)
    options = {"z_loss": 0.1, "softcap": 3.0}
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    got = loss_and_gradients(compiled, hidden_states, weight, bias, labels, **options)
    want = loss_and_gradients(linear_cross_entropy, hidden_states, weight, bias, labels, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.ones(5, 7)}, r"hidden_states torch.float32 \[5, 7\].*\[N, in_features\]"),
        ({"hidden_states": torch.ones(5, 8, 1)}, r"hidden_states torch.float32 \[5, 8, 1\]"),
        ({"hidden_states": torch.ones(5, 8).double(), "weight": torch.ones(9, 8).double()}, "float32, bfloat16 or"),
        ({"weight": torch.ones(9, 8).bfloat16()}, r"weight torch.bfloat16 \[9, 8\].*of one dtype"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels torch.int64 \[4\]"),
        ({"labels": torch.zeros(5, dtype=torch.int32)}, r"labels torch.int32 .*\[N\] int64"),
        ({"labels": torch.zeros(5, dtype=torch.int64, device="meta")}, "labels .* on meta.* all on one device"),
        ({"bias": torch.ones(8)}, r"bias torch.float32 \[8\].*bias \[vocab_size\]"),
        ({"labels": torch.tensor([0, -100, 9, 8, -1])}, r"labels\[2\]=9 of 5; the weight has 9 rows.*0\.\.8"),
        ({"labels": torch.tensor([0, 8, 0, -1, 10])}, r"labels\[3\]=-1 .*ignore_index=-100"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"z_loss": math.inf}, "z_loss=inf.*finite"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0; .* from 0 to below 1"),
        ({"logit_scale": math.nan}, "logit_scale=nan"),
        ({"softcap": 0.0}, "softcap=0.0; .* or None for no cap"),
    ],
)
def test_errors(change, message) -> None:
    arguments = {
        "hidden_states": torch.ones(5, 8),
        "weight": torch.ones(9, 8),
        "labels": torch.zeros(5, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**arguments, **change})


# ---- Triton

INTERPRETED = """
import torch
from trainer.kernels import cross_entropy as op

op.BLOCK_V = 64
generator = torch.Generator().manual_seed(0)
for options in (op.Options(), op.Options(z_loss=1e-2, label_smoothing=0.3, logit_scale=-0.5, softcap=2.0)):
    for vocab_size in (1, 33, 64, 200):
        # float32: exponentials and the order of sums. 16 bits: a rounding boundary of the gradient, and the interpreter
        # truncates to bfloat16 where GPUs round.
        for dtype, rtol in ((torch.float32, 2e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
            logits = torch.randn(3, vocab_size, generator=generator).to(dtype)
            if dtype == torch.float32 and not options.softcap:
                logits[0] *= 1e4
                logits[1, :-1] = -torch.inf  # whole blocks of it
            labels = torch.randint(0, vocab_size, (3,), generator=generator)
            labels[1] = vocab_size - 1
            want, got = logits.clone(), logits.clone()
            for with_grad in (False, True):
                losses = op.softmax_gradient_triton(got, labels, options, with_grad=with_grad)
                wanted = op.softmax_gradient_reference(want, labels, options, with_grad=with_grad)
                torch.testing.assert_close(losses, wanted, rtol=2e-6, atol=1e-6)
                torch.testing.assert_close(got, want, rtol=rtol, atol=1e-6)
x = torch.randn(7, 8, generator=generator, requires_grad=True)
weight = torch.randn(100, 8, generator=generator, requires_grad=True)
labels = torch.tensor([0, 99, -100, 64, 63, 5, 7])
loss = op.linear_cross_entropy(x, weight, labels)
wanted = op.linear_cross_entropy_reference(x, weight, labels)
torch.testing.assert_close(loss, wanted)
for got, want in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(wanted, (x, weight))):
    torch.testing.assert_close(got, want)
print("interpreted")
"""


def test_triton_interpreted_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp16", "*fp32"])
def test_triton_compiles_without_spills(dtype: str, softcap: bool) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    names = ["z_loss", "label_smoothing", "logit_scale", "inverse_softcap"]
    types = {"logits_ptr": dtype, "labels_ptr": "*i64", "losses_ptr": "*fp32", **dict.fromkeys(names, "fp32")}
    types |= {"stride_row": "i32", "vocab_size": "i32"}
    constants = {"HAS_SOFTCAP": softcap, "WITH_GRAD": True, "BLOCK_V": cross_entropy.BLOCK_V}
    for target in aot.TARGETS:
        options = {"num_warps": cross_entropy.NUM_WARPS, "aligned": ("stride_row",)}
        compiled = aot.compile_kernel(cross_entropy._softmax_gradient_kernel, types, constants, target, **options)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_reference(dtype: torch.dtype) -> None:
    hidden_states, weight, bias, labels = (tensor.detach().cuda() for tensor in case(300, 64, 5000, dtype))
    arguments = hidden_states.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels
    options = {"z_loss": 1e-2, "label_smoothing": 0.1, "softcap": 5.0}
    for got, want in zip(
        loss_and_gradients(linear_cross_entropy, *arguments, **options), truth(*arguments, **options), strict=True
    ):
        assert error(got, want) < {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
