import pytest
import torch

from trainer.kernels import cross_entropy
from trainer.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


def case(dtype, rows=37, in_features=24, vocab_size=101):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, in_features, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, in_features, generator=generator).to(dtype)
    return hidden.requires_grad_(), weight, torch.randint(0, vocab_size, (rows,), generator=generator)


@pytest.fixture(params=[1, 101 * 4 * 5, 1 << 20], ids=["row by row", "chunks of 5", "one chunk"])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS_BYTES", request.param)


@pytest.mark.parametrize(
    ("dtype", "loss_rtol", "grad_rtol"),
    [
        (torch.float32, 1e-6, 1e-5),  # summation order only
        (torch.bfloat16, 2e-3, 2e-2),  # logits and softmax are rounded to 8 bits before the second product
    ],
)
def test_equals_the_unfused_loss_and_gradient(chunk_bytes, dtype, loss_rtol, grad_rtol):
    hidden, weight, labels = case(dtype)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    expected_loss, expected_grad = linear_cross_entropy_reference(hidden, weight, labels)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=loss_rtol, atol=0)
    error = (hidden.grad.float() - expected_grad).norm() / expected_grad.norm()
    assert error < grad_rtol


def test_incoming_gradient_scales_the_result():
    hidden, weight, labels = case(torch.float32)
    (once,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)
    (thrice,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels) * 3, hidden)
    assert torch.equal(thrice, once * 3)


def test_no_gradient_is_computed_when_none_is_wanted():
    hidden, weight, labels = case(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(linear_cross_entropy_reference(hidden, weight, labels)[0].item(), rel=1e-6)


def test_no_targets_is_zero_with_a_gradient():
    hidden, weight, labels = case(torch.float32, rows=0)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0 and hidden.grad.shape == (0, 24)


def test_large_logits_do_not_overflow():
    hidden, weight, labels = case(torch.float32)
    loss = linear_cross_entropy(hidden * 1e4, weight, labels)
    assert torch.isfinite(loss)


def test_opcheck():
    hidden, weight, labels = case(torch.float32)
    torch.library.opcheck(torch.ops.lowbit.linear_cross_entropy, (hidden, weight, labels, True))


def test_refuses_what_it_cannot_do():
    hidden, weight, labels = case(torch.float32)
    with pytest.raises(ValueError, match="frozen weight"):
        linear_cross_entropy(hidden, weight.requires_grad_(), labels)
    with pytest.raises(ValueError, match=r"hidden_states \(37, 24\).*36 labels"):
        linear_cross_entropy(hidden, weight.detach(), labels[:36])
