"""Fused linear and distillation against float64 autograd of torch's own kl_div over full logits."""

import functools
import math
import platform

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import kl_div

from trainer.kernels import _cpp, _tape, cross_entropy, distill_loss
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.kernels.distill_loss import (
    Options,
    TopK,
    Whole,
    distillation_gradient_cpu,
    distillation_gradient_reference,
    linear_distillation,
    top_k_log_probs,
)

FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]
# rows, in_features, vocab_size, k: one of each; vocabularies that end inside a vector, on one, after one; k = all; an
# odd number of rows over several chunks.
SHAPES = [(1, 1, 2, 1), (5, 8, 33, 33), (3, 1, 16, 5), (37, 24, 101, 8), (13, 40, 1031, 64)]
MIXTURES = [
    {"kl_weight": 1.0},
    {"kl_weight": 0.3, "temperature": 2.0},
    {"kl_weight": 0.0},
    {"kl_weight": 0.6, "reverse": True},
    {"kl_weight": 1.0, "temperature": 0.5, "reverse": True},
]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512 or what is here, AVX2, SSE2."""
    if _cpp.load("distill_loss") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(distill_loss, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


@pytest.fixture(params=["auto", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", request.param)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ROWS", 5)
    monkeypatch.setattr(cross_entropy, "BLOCK_VOCAB", 64)


def case(rows: int, in_features: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Whole]:
    """hidden_states, weight, labels, of which every fourth is none, and a teacher near the student"""
    randn = functools.partial(torch.randn, generator=(generator := torch.Generator().manual_seed(rows + vocab_size)))
    hidden_states, weight = randn(rows, in_features), 2 * randn(vocab_size, in_features) / in_features**0.5
    teacher = [tensor + 0.3 * randn(tensor.shape) for tensor in (hidden_states, weight)]
    labels = torch.randint(0, vocab_size, (rows,), generator=generator)
    labels[3::4] = -100
    student = [tensor.to(dtype).requires_grad_() for tensor in (hidden_states, weight)]
    return *student, labels, Whole(*(tensor.to(dtype) for tensor in teacher))


def truth(
    student: Tensor, labels: Tensor, teacher: Tensor, *, kl_weight: float, temperature: float = 1.0, reverse=False
):
    """The loss over float64 logits by torch's kl_div, and what it sums."""
    log_q, log_p = ((logits / temperature).log_softmax(-1) for logits in (student, teacher))
    one, other = (log_p, log_q) if reverse else (log_q, log_p)
    divergence = kl_div(one, other, reduction="sum", log_target=True)
    entropy = torch_cross_entropy(student, labels, reduction="sum", ignore_index=-100)
    return (1 - kl_weight) * entropy + kl_weight * temperature**2 * divergence, entropy, divergence


def merged(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """float64 logits whose softmax at `temperature` is that of k tokens and of all others as one outcome."""
    scaled = logits / temperature
    rest = scaled.scatter(-1, ids.long(), float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([scaled.gather(-1, ids.long()), rest], -1) * temperature


def loss_and_gradients(sums, *tensors: Tensor) -> list[Tensor]:
    return [sums[0].detach(), *torch.autograd.grad(0.3 * sums[0], tensors), sums[1].detach(), sums[2].detach()]


def assert_close(got: list[Tensor], want: list[Tensor], *, relative: float) -> None:
    for ours, exact in zip(got, want, strict=True):
        assert (ours.double() - exact).norm() < relative * exact.norm() + 1e-6


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_tokens_equal_torch_in_float64(shape, mixture, small_chunks, implementation) -> None:
    """Both ways of giving the whole distribution: a teacher beside the student, and the k = vocab_size likeliest."""
    hidden_states, weight, labels, teacher = case(*shape[:3], torch.float32)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden_states, weight)]
    said = teacher.hidden_states.double() @ teacher.weight.double().T
    want = loss_and_gradients(truth(wide[0] @ wide[1].T, labels, said, **mixture), *wide)
    whole = top_k_log_probs(said, shape[2], temperature=mixture.get("temperature", 1.0))
    for given in (teacher, whole):
        got = loss_and_gradients(
            linear_distillation(hidden_states, weight, labels, given, **mixture), hidden_states, weight
        )
        # float32 logits of size 5 are off by 1e-6, and a divergence is a difference of such: sums of it by 1e-5.
        assert_close(got, want, relative=2e-5)


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_top_k_equals_torch_on_merged_outcomes(shape, mixture, small_chunks, implementation) -> None:
    """The divergence is torch's over k + 1 outcomes, in value and gradient; the cross-entropy stays over all tokens."""
    hidden_states, weight, labels, teacher = case(*shape[:3], torch.float32)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden_states, weight)]
    temperature = mixture.get("temperature", 1.0)
    said = teacher.hidden_states.double() @ teacher.weight.double().T
    top = top_k_log_probs(said, shape[3], temperature=temperature)
    logits = wide[0] @ wide[1].T
    none = torch.full_like(labels, -100)
    pure = {**mixture, "kl_weight": 1.0}
    outcomes = merged(logits, top.ids, temperature), none, merged(said, top.ids, temperature)
    divergence, _, plain = truth(*outcomes, **pure)
    entropy = torch_cross_entropy(logits, labels, reduction="sum")
    kl_weight = mixture["kl_weight"]
    sums = (1 - kl_weight) * entropy + kl_weight * divergence, entropy, plain
    want = loss_and_gradients(sums, *wide)
    got = loss_and_gradients(linear_distillation(hidden_states, weight, labels, top, **mixture), hidden_states, weight)
    assert_close(got, want, relative=2e-5)  # as above


def test_golden() -> None:
    """By hand: p = (1/2, 1/2), q = (3/4, 1/4). Forward 1/2 ln(4/3), reverse 3/4 ln 3 - ln 2."""
    hidden_states, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[math.log(3)], [0.0]])
    teacher = TopK(torch.tensor([[1]], dtype=torch.int32), torch.tensor([[0.5, 0.5]]).log())
    none = torch.tensor([-100])
    forward = linear_distillation(hidden_states, weight, none, teacher, kl_weight=1.0)
    assert forward.loss.item() == pytest.approx(math.log(4 / 3) / 2, rel=1e-6)
    (grad,) = torch.autograd.grad(forward.loss, hidden_states)
    assert grad.item() == pytest.approx((0.75 - 0.5) * math.log(3), rel=1e-6)
    reverse = linear_distillation(hidden_states, weight, none, teacher, kl_weight=1.0, reverse=True)
    assert reverse.divergence.item() == pytest.approx(0.75 * math.log(3) - math.log(2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("top", [True, False], ids=["top", "whole"])
@pytest.mark.usefixtures("cpp")
def test_cpp_equals_reference(dtype, mixture, top) -> None:
    options = Options(mixture["kl_weight"], mixture.get("temperature", 1.0), float(mixture.get("reverse", False)))
    for vocab_size in (7, 33, 1031):
        generator = torch.Generator().manual_seed(vocab_size)
        logits = (4 * torch.randn(9, vocab_size, generator=generator)).to(dtype)
        labels = torch.randint(0, vocab_size, (9,), generator=generator)
        labels[::3] = -100
        said = (logits + torch.randn(9, vocab_size, generator=generator)).to(dtype)
        teacher = top_k_log_probs(said, 7, temperature=options.temperature) if top else said
        grads = [logits.clone(), logits.clone()]
        losses = [
            f(grad, labels, teacher, options, with_grad=True)
            for f, grad in zip((distillation_gradient_cpu, distillation_gradient_reference), grads, strict=True)
        ]
        # Two orders of the same float32 sums; in bfloat16 a gradient may then round to the neighbour, 2^-8 away.
        torch.testing.assert_close(losses[0].float(), losses[1].float(), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4 if dtype == torch.float32 else 2**-7, atol=5e-6)
        untouched = logits.clone()
        assert torch.equal(
            distillation_gradient_cpu(untouched.clone(), labels, teacher, options, with_grad=False), losses[0]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_a_teacher_it_is_the_cross_entropy(dtype, small_chunks) -> None:
    hidden_states, weight, labels, teacher = case(37, 24, 101, dtype)
    top = top_k_log_probs(teacher.hidden_states.float() @ teacher.weight.float().T, 8, temperature=1.0)
    sums = linear_distillation(hidden_states, weight, labels, top, kl_weight=0.0)
    got = torch.autograd.grad(sums.loss, (hidden_states, weight))
    loss = linear_cross_entropy(hidden_states, weight, labels)
    want = torch.autograd.grad(loss, (hidden_states, weight))
    torch.testing.assert_close(sums.loss, loss, rtol=1e-6, atol=0)
    for ours, theirs in zip(got, want, strict=True):  # the same chunks differ by ignored rows: one rounding of G each
        assert (ours.double() - theirs.double()).norm() < 4 * torch.finfo(dtype).eps * theirs.double().norm()


@pytest.mark.parametrize("reverse", [False, True])
def test_equal_models_have_no_divergence_and_no_gradient(reverse, implementation) -> None:
    hidden_states, weight, labels, _ = case(37, 24, 101, torch.float32)
    logits = (hidden_states @ weight.T).detach()
    for teacher in (Whole(hidden_states.detach(), weight.detach()), top_k_log_probs(logits, 9, temperature=2.0)):
        sums = linear_distillation(
            hidden_states, weight, labels, teacher, kl_weight=1.0, temperature=2.0, reverse=reverse
        )
        # float32: each of 37 divergences is a sum of terms whose ratio is off by 1e-6, which cancel to second order
        assert abs(sums.divergence) < 37 * 2e-6
        for grad in torch.autograd.grad(sums.loss, (hidden_states, weight)):
            assert grad.norm() < 1e-4 * weight.norm()


def test_merging_outcomes_lowers_the_divergence() -> None:
    hidden_states, weight, labels, teacher = case(37, 24, 101, torch.float32)
    said = teacher.hidden_states @ teacher.weight.T
    whole = linear_distillation(hidden_states, weight, labels, teacher, kl_weight=1.0).divergence.item()
    found = [
        linear_distillation(
            hidden_states, weight, labels, top_k_log_probs(said, k, temperature=1.0), kl_weight=1.0
        ).divergence.item()
        for k in (1, 4, 16, 64, 101)
    ]
    assert 0 < found[0] < found[-1] and found == sorted(found)
    assert found[-1] == pytest.approx(whole, rel=1e-5)


def test_a_sure_student_has_finite_numbers(implementation) -> None:
    """Its mass outside the k tokens is e^-200: 1 minus the others would be 0 and the divergence infinite."""
    weight = torch.tensor([[100.0], [-100.0], [-101.0], [-102.0]], requires_grad=True)
    teacher = TopK(torch.tensor([[0]], dtype=torch.int32), torch.tensor([[0.5, 0.5]]).log())
    sums = linear_distillation(torch.ones(1, 1), weight, torch.tensor([-100]), teacher, kl_weight=1.0)
    rest = math.log(math.exp(0) + math.exp(-1) + math.exp(-2)) - 200
    assert sums.loss.item() == pytest.approx(-math.log(2) - rest / 2, rel=1e-6)
    (grad,) = torch.autograd.grad(sums.loss, weight)
    # q - p: half of the mass goes from the first token to the others, as they share it
    shares = torch.tensor([0.0, -1.0, -2.0]).softmax(0)
    torch.testing.assert_close(grad[:, 0], torch.cat([torch.tensor([0.5]), -0.5 * shares]), rtol=1e-5, atol=0)


def test_not_a_number_is_not_hidden(implementation) -> None:
    for place in (0, 40):
        hidden_states, weight, labels, teacher = case(3, 8, 101, torch.float32)
        top = TopK(torch.arange(4, dtype=torch.int32).expand(3, 4), torch.full((3, 5), -math.log(5)))
        broken = weight.detach().clone()
        broken[place] = math.nan
        for given in (top, teacher):
            assert linear_distillation(hidden_states, broken, labels, given, kl_weight=0.5).loss.isnan()


@pytest.mark.parametrize("top", [True, False], ids=["top", "whole"])
def test_no_rows(top) -> None:
    weight = torch.randn(11, 4, requires_grad=True)
    teacher = TopK(torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 4)) if top else Whole(torch.empty(0, 4), weight)
    sums = linear_distillation(torch.empty(0, 4), weight, torch.empty(0, dtype=torch.int64), teacher, kl_weight=0.5)
    (grad,) = torch.autograd.grad(sums.loss, weight)
    assert sums.loss == 0 and not grad.any()


def test_opcheck() -> None:
    hidden_states, weight, labels, teacher = case(7, 8, 33, torch.float32)
    top = top_k_log_probs(teacher.hidden_states @ teacher.weight.T, 5, temperature=1.0)
    for given in (top, teacher):
        arguments = hidden_states, weight, labels, *given, [0.5, 1.0, 0.0], [True, True]
        torch.library.opcheck(torch.ops.lowbit.linear_distillation.default, arguments)


def test_top_k_log_probs_is_the_softmax() -> None:
    logits = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    ids, log_probs = top_k_log_probs(logits, 6, temperature=1.7)
    probs = (logits / 1.7).softmax(-1)
    torch.testing.assert_close(log_probs[:, :-1].exp(), probs.gather(-1, ids.long()))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(5))
    assert all(set(row) == set(want) for row, want in zip(ids.tolist(), probs.topk(6).indices.tolist(), strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kl_weight": 1.5}, "kl_weight=1.5.*0..1"),
        ({"temperature": 0.0}, "temperature=0.0.*above 0"),
        ({"labels": torch.tensor([0, 1, 99])}, r"labels\[2\]=99"),
        ({"teacher": TopK(torch.tensor([[12]] * 3, dtype=torch.int32), torch.zeros(3, 2))}, "11 rows.*vocabulary"),
        ({"teacher": TopK(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))}, r"log_probs \[3, k \+ 1\]"),
        ({"teacher": Whole(torch.zeros(3, 4), torch.zeros(10, 4))}, r"weight \[11, size\]"),
    ],
)
def test_errors(change, text) -> None:
    arguments = {
        "hidden_states": torch.zeros(3, 4),
        "weight": torch.zeros(11, 4),
        "labels": torch.tensor([0, 1, 2]),
        "teacher": Whole(torch.zeros(3, 4), torch.zeros(11, 4)),
        "kl_weight": 0.5,
    }
    with pytest.raises(ValueError, match=text):
        linear_distillation(**{**arguments, **change})
