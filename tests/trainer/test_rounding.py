"""The functions of AdaRound and the draws of stochastic rounding; test_fake_quant.py has the layers that use them."""

import math

import pytest
import torch

from trainer.qat.rounding import (
    annealed_beta,
    initial_soft_rounding,
    rectified_sigmoid,
    rectified_sigmoid_gradient,
    rounding_noise,
    rounding_seed,
    soft_rounding_penalty,
)


def test_rectified_sigmoid_by_hand() -> None:
    """sigmoid(ln 11) = 11/12: 1.2 * 11/12 - 0.1 = 1, where the clip begins; 0 by symmetry."""
    v = torch.tensor([-math.log(11), 0.0, math.log(11), 10.0, -10.0])
    torch.testing.assert_close(rectified_sigmoid(v), torch.tensor([0.0, 0.5, 1.0, 1.0, 0.0]), rtol=0, atol=1e-6)
    gradient = rectified_sigmoid_gradient(torch.tensor([0.0, 10.0, -10.0]))
    torch.testing.assert_close(gradient, torch.tensor([0.3, 0.0, 0.0]))  # 1.2 / 4


def test_gradient_is_that_of_autograd() -> None:
    v = torch.linspace(-3, 3, 101, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(rectified_sigmoid(v).sum(), v)
    torch.testing.assert_close(rectified_sigmoid_gradient(v.detach()), want)


def test_soft_rounding_starts_at_the_fraction() -> None:
    fractions = torch.linspace(0, 1, 1001)[:-1]
    # The ends start 1e-4 inside, where h has a gradient.
    torch.testing.assert_close(rectified_sigmoid(initial_soft_rounding(fractions)), fractions, rtol=0, atol=1.1e-4)
    assert (rectified_sigmoid_gradient(initial_soft_rounding(fractions)) > 0).all()


def test_penalty_by_hand() -> None:
    """h = 0.5 costs 1 and h = 1 costs 0, whatever beta; h = 0.8 costs 1 - 0.6^beta."""
    v = initial_soft_rounding(torch.tensor([0.8, 0.5])).requires_grad_()
    decided = torch.tensor([10.0], requires_grad=True)
    for beta in (2.0, 20.0):
        value = soft_rounding_penalty([v, decided], beta)
        assert value.item() == pytest.approx(2 - 0.6**beta, abs=1e-5)
    (gradient, none) = torch.autograd.grad(soft_rounding_penalty([v, decided], 2.0), [v, decided])
    assert gradient[0] < 0 and none == 0  # a step against it moves 0.8 towards 1; what has decided stays
    assert soft_rounding_penalty([], 2.0) == 0


def test_beta_falls_from_20_to_2() -> None:
    values = [annealed_beta(progress / 10) for progress in range(11)]
    assert values[0] == 20 and values[-1] == pytest.approx(2) and annealed_beta(7.0) == pytest.approx(2)
    assert all(a > b for a, b in zip(values, values[1:], strict=False))


def test_draws_are_a_function_of_seed_step_and_layer() -> None:
    seeds = {rounding_seed(seed, step, layer) for seed in range(3) for step in range(30) for layer in range(30)}
    assert len(seeds) == 3 * 30 * 30 and max(seeds) < 2**63
    assert rounding_seed(1, 23, 4) != rounding_seed(12, 3, 4)
    noise = rounding_noise(torch.empty(200, 300), rounding_seed(0, 0, 0))
    assert torch.equal(noise, rounding_noise(torch.empty(200, 300), rounding_seed(0, 0, 0)))
    assert -0.5 <= noise.min() and noise.max() < 0.5
    # 60,000 draws: a standard deviation of the mean of 0.0012
    assert abs(noise.mean().item()) < 0.006 and noise.std().item() == pytest.approx(12**-0.5, rel=0.02)
