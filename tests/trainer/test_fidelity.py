"""Fidelity against the same figures from whole logits."""

import pytest
import torch

from tests.ptq.models import random_model
from trainer.evaluate.fidelity import Original, PromptMatch

ROWS = [torch.randint(4, 260, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (300, 2, 17)]


def changed(amount: float):
    model = random_model()
    for parameter in model.parameters():
        parameter.data += amount * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def test_figures_are_those_of_whole_logits():
    model, other = random_model(), changed(0.02)
    found = Original.of(model, ROWS).compare(other)
    wanted, ours = (
        torch.cat([each(torch.tensor([row])).logits[0, :-1].double().log_softmax(-1) for row in ROWS])
        for each in (model, other)
    )
    targets = torch.cat([torch.tensor(row[1:]) for row in ROWS])
    kl = (wanted.exp() * (wanted - ours)).sum(1)
    right, was_right = (each.argmax(1) == targets for each in (ours, wanted))
    assert found.tokens == 316
    assert found.perplexity == pytest.approx((-ours.gather(1, targets[:, None]).mean()).exp().item(), rel=1e-4)
    assert found.perplexity_original == pytest.approx(
        (-wanted.gather(1, targets[:, None]).mean()).exp().item(), rel=1e-4
    )
    assert found.kl == pytest.approx(kl.mean().item(), rel=1e-3)
    assert found.kl_99 == pytest.approx(torch.quantile(kl, 0.99).item(), rel=1e-3)
    assert found.same_token == (ours.argmax(1) == wanted.argmax(1)).double().mean().item()
    assert found.right_to_wrong == (was_right & ~right).double().mean().item()
    assert found.wrong_to_right == (right & ~was_right).double().mean().item()
    assert found.flips == found.right_to_wrong + found.wrong_to_right
    assert 0 < found.kl and found.same_token < 1


def test_a_model_is_equal_to_itself():
    found = Original.of(random_model(), ROWS).compare(random_model())
    assert (found.kl, found.same_token, found.flips) == (0, 1, 0) and found.perplexity == found.perplexity_original


def test_prompts():
    match = PromptMatch.of([[1, 2, 3], [1, 2], []], [[1, 2, 3], [1, 5, 6, 7], []])
    assert (match.prompts, match.exact) == (3, 2 / 3)
    assert match.mean_common == pytest.approx((1 + 1 / 4 + 1) / 3)
