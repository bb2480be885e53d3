"""Float32 copies behind 16-bit weights: the trajectory of float32 training, and an exact state."""

import copy

import pytest
import torch
from torch import nn

from trainer.config.errors import UserError
from trainer.config.optim import OptimConfig, OptimizerName, Schedule
from trainer.master_weights import MasterWeights, with_master_weights
from trainer.optim import Optimizer, build_optimizer

LR = 1e-5


def trained(
    dtype: torch.dtype, *, steps: int, name: OptimizerName = OptimizerName.adamw
) -> tuple[nn.Linear, Optimizer]:
    """A layer after the first `steps` steps."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 8)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(param.bfloat16())
    layer = layer.to(dtype)
    schedule = Schedule.constant if name is OptimizerName.adamw_schedule_free else Schedule.cosine
    optimizer = with_master_weights(build_optimizer(layer, OptimConfig(name=name, lr=LR, schedule=schedule)))
    go_on(layer, optimizer, range(steps))
    return layer, optimizer


def go_on(layer: nn.Linear, optimizer: Optimizer, steps: range) -> None:
    """Steps with gradients that depend on the step's number and are exact in 16 bits."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for param in layer.parameters():
            param.grad = torch.randn(param.shape, generator=generator).add(0.5).bfloat16().to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", [OptimizerName.adamw, OptimizerName.lion])
def test_sixteen_bits_follow_float32(name: OptimizerName) -> None:
    """Steps of 1e-5 are below half a bfloat16 step of most weights; a hundred of them are not lost."""
    wide, _ = trained(torch.float32, steps=100, name=name)
    narrow, _ = trained(torch.bfloat16, steps=100, name=name)
    start, _ = trained(torch.bfloat16, steps=0, name=name)
    assert torch.equal(narrow.weight, wide.weight.bfloat16()) and torch.equal(narrow.bias, wide.bias.bfloat16())
    assert (narrow.weight != start.weight).float().mean() > 0.5  # the mean gradient is 0.5: most weights moved by 5e-4


def test_the_state_is_exact() -> None:
    whole, optimizer = trained(torch.bfloat16, steps=6)
    layer, half = trained(torch.bfloat16, steps=3)
    saved = copy.deepcopy(half.state_dict())
    other, fresh = trained(torch.bfloat16, steps=0)
    fresh.load_state_dict(saved)
    assert torch.equal(other.weight, layer.weight)
    go_on(other, fresh, range(3, 6))
    assert torch.equal(other.weight, whole.weight) and torch.equal(other.bias, whole.bias)
    masters = zip(fresh.state_dict()["masters"], optimizer.state_dict()["masters"], strict=True)
    assert all(torch.equal(one, two) for one, two in masters)


def test_float32_parameters_need_none() -> None:
    _, optimizer = trained(torch.float32, steps=0)
    assert not isinstance(optimizer, MasterWeights)


def test_the_gradient_is_gone_after_a_step() -> None:
    layer, _ = trained(torch.bfloat16, steps=2)
    assert all(param.grad is None for param in layer.parameters())


def test_schedule_free_averages_are_refused_in_16_bits() -> None:
    with pytest.raises(UserError, match="adamw_schedule_free averages weights in place.*model.dtype=float32"):
        trained(torch.bfloat16, steps=0, name=OptimizerName.adamw_schedule_free)
