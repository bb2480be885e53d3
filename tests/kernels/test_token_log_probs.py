"""Token log-probabilities against float64 autograd of the unfused formula; no tensor of the size of the full logits."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.kernels import cross_entropy
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.kernels.token_log_probs import _token_log_probs, token_log_probs, token_log_probs_reference

# rows, in_features, vocab_size: one of each; an odd number of rows over several chunks; vocabularies beside a vector's
SHAPES = [(0, 8, 33), (1, 1, 1), (1, 24, 33), (37, 24, 101), (13, 40, 1031)]


@pytest.fixture(params=["auto", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", request.param)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ROWS", 5)
    monkeypatch.setattr(cross_entropy, "BLOCK_VOCAB", 64)


def case(rows: int, in_features: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden_states, weight, labels, and the incoming gradient, of both signs"""
    generator = torch.Generator().manual_seed(rows + vocab_size)
    hidden_states = torch.randn(rows, in_features, generator=generator).to(dtype).requires_grad_()
    weight = (2 * torch.randn(vocab_size, in_features, generator=generator) / in_features**0.5).to(dtype)
    labels = torch.randint(0, vocab_size, (rows,), generator=generator)
    return hidden_states, weight.requires_grad_(), labels, torch.randn(rows, generator=generator)


def outcome(function, hidden_states: Tensor, weight: Tensor, labels: Tensor, grad: Tensor) -> list[Tensor]:
    log_probs = function(hidden_states, weight, labels)
    return [log_probs.detach(), *torch.autograd.grad((grad * log_probs).sum(), (hidden_states, weight))]


def truth(hidden_states: Tensor, weight: Tensor, labels: Tensor, grad: Tensor) -> list[Tensor]:
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden_states, weight)]
    return outcome(token_log_probs_reference, *wide, labels, grad)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_equals_float64_autograd(shape, implementation) -> None:
    arguments = case(*shape, torch.float32)
    for got, want in zip(outcome(token_log_probs, *arguments), truth(*arguments), strict=True):
        # sums of up to 1031 float32 terms of size 1; with one token of vocabulary they cancel to 0
        assert (got - want).norm() <= 3e-6 * want.norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, implementation) -> None:
    arguments = case(37, 24, 101, dtype)
    log_probs, *gradients = outcome(token_log_probs, *arguments)
    want, *want_gradients = truth(*arguments)
    ulp = torch.finfo(dtype).eps
    # logits up to 8 are rounded to their dtype: half a step of 8, at the label and in the sum
    torch.testing.assert_close(log_probs.double(), want, atol=8 * ulp, rtol=0)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        # logits, G, product and scaling are each rounded once; the relative error of a norm is a few half steps
        assert (got.double() - wanted).norm() < 3 * ulp * wanted.norm()


def test_their_sum_is_the_cross_entropy(implementation) -> None:
    """Same rows, same kernel: minus the loss, and with a gradient of -1 its gradients, to the last bit or two."""
    hidden_states, weight, labels, _ = case(37, 24, 101, torch.float32)
    loss = linear_cross_entropy(hidden_states, weight, labels)
    log_probs, *gradients = outcome(token_log_probs, hidden_states, weight, labels, torch.full((37,), -1.0))
    assert -log_probs.double().sum().item() == pytest.approx(loss.item(), rel=1e-6)
    for got, want in zip(gradients, torch.autograd.grad(loss, (hidden_states, weight)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_a_frozen_head_or_stream_gets_no_gradient() -> None:
    hidden_states, weight, labels, grad = case(13, 40, 1031, torch.float32)
    want = truth(hidden_states, weight, labels, grad)
    (got,) = torch.autograd.grad((grad * token_log_probs(hidden_states, weight.detach(), labels)).sum(), hidden_states)
    assert (got - want[1]).norm() < 3e-6 * want[1].norm()
    (got,) = torch.autograd.grad((grad * token_log_probs(hidden_states.detach(), weight, labels)).sum(), weight)
    assert (got - want[2]).norm() < 3e-6 * want[2].norm()
    with torch.no_grad():
        assert not token_log_probs(hidden_states, weight, labels).requires_grad


class Largest(TorchDispatchMode):
    """The most values of any tensor that an op returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf)), 0)
        return out


def test_full_logits_never_exist() -> None:
    """Forward and backward of a frozen head: nothing is larger than a chunk of logits, the weight or the stream."""
    rows, in_features, vocab_size = 400, 8, 1000
    hidden_states, weight, labels, grad = case(rows, in_features, vocab_size, torch.float32)
    weight = weight.detach()
    with Largest() as largest:  # inside the op, which hides its tensors from the mode
        _token_log_probs._init_fn(hidden_states.detach(), weight, labels, True, False)
    chunk = cross_entropy.CHUNK_ROWS * vocab_size
    assert chunk <= largest.numel <= max(chunk, weight.numel(), hidden_states.numel()) < rows * vocab_size / 10
    with Largest() as largest:
        torch.autograd.grad((grad * token_log_probs(hidden_states, weight, labels)).sum(), hidden_states)
    assert largest.numel <= max(chunk, weight.numel(), hidden_states.numel())


def test_opcheck() -> None:
    hidden_states, weight, labels, grad = case(13, 40, 101, torch.float32)
    operators = torch.ops.lowbit
    for wanted in ([True, True], [True, False], [False, False]):
        stream, head = hidden_states.detach().requires_grad_(wanted[0]), weight.detach().requires_grad_(wanted[1])
        torch.library.opcheck(operators.token_log_probs, (stream, head, labels, *wanted))
    arguments = hidden_states.detach(), weight.detach(), labels, grad
    torch.library.opcheck(operators.token_log_probs_weight_gradient, arguments)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 33]), r"labels\[1\]=33 of 2; the weight has 33 rows"),
        (torch.tensor([0, -100]), "labels has -100; token_log_probs takes target rows only"),
        (torch.tensor([0.0, 1.0]), r"token_log_probs got .*labels torch.float32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused(labels, message) -> None:
    with pytest.raises(ValueError, match=message):
        token_log_probs(torch.zeros(2, 8), torch.zeros(33, 8), labels)
