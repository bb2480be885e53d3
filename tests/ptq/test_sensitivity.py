"""What rounding a layer is expected to cost, against what it costs."""

import pytest
import torch

from tests.ptq.models import random_model
from trainer.evaluate.fidelity import Original
from trainer.ptq.sensitivity import plan_by_sensitivity, sensitivities
from trainer.quantizer import Quantizer

ROWS = torch.randint(4, 260, (24, 40), generator=torch.Generator().manual_seed(5)).tolist()
HIGH, LOW = Quantizer("int8"), Quantizer("int4")


def layers(model) -> list[str]:
    return [name for name, layer in model.named_modules() if type(layer) is torch.nn.Linear and "lm_head" not in name]


def measured(model, name: str, quantizer: Quantizer) -> float:
    """KL of the model with this layer rounded, nats a token."""
    original, layer = Original.of(model, ROWS), model.get_submodule(name)
    kept = layer.weight.data
    layer.weight.data = quantizer.quantize(kept).dequantize(torch.float32)
    kl = original.compare(model).kl
    layer.weight.data = kept
    return kl


def test_expected_costs_are_the_measured_ones():
    """To second order: INT8's errors are small, so that the rest does not count; 24 rows leave 30 % of chance each."""
    model = random_model()
    names = layers(model)
    (expected,) = sensitivities(model, [HIGH], names, ROWS, seed=0)
    found = {name: measured(model, name, HIGH) for name in names}
    ratios = torch.tensor([expected[name] / found[name] for name in names])
    assert 0.3 < ratios.min() and ratios.max() < 3
    assert 0.7 < ratios.log().mean().exp() < 1.4
    order = [sorted(names, key=costs.get) for costs in (expected, found)]
    ranks = torch.tensor([[order[0].index(name), order[1].index(name)] for name in names], dtype=torch.float64)
    assert torch.corrcoef(ranks.T)[0, 1] > 0.7


def test_the_plan_keeps_the_budget_and_serves_the_most_sensitive():
    model = random_model()
    names = layers(model)
    plan, gains = plan_by_sensitivity(model, LOW, HIGH, names, ROWS, bits_budget=5, seed=0)
    sizes = {name: model.get_submodule(name).weight.numel() for name in names}
    bits = sum(size * plan.of(name).code_bits for name, size in sizes.items()) / sum(sizes.values())
    assert 4 < bits <= 5
    chosen = [gains[name] / sizes[name] for name in names if name not in plan.low_layers]
    left = [gains[name] / sizes[name] for name in plan.low_layers]
    assert min(chosen) > sorted(left)[len(left) // 2]


def test_the_model_is_left_as_it_was():
    model = random_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = sensitivities(model, [LOW], layers(model), ROWS[:2], seed=3)
    assert first == sensitivities(model, [LOW], layers(model), ROWS[:2], seed=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_that_flatten_tokens_and_layers_that_are_not_reached():
    """As those of OPT, and as experts: a row that does not reach a layer adds nothing to its cost."""

    class Sometimes(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if x.shape[1] == 7:
                return torch.zeros_like(x)
            return self.inner(x.flatten(0, 1)).view(x.shape)

    model = random_model()
    name = "model.layers.0.mlp.inner.down_proj"
    rows = [ROWS[0], ROWS[1][:7]]
    model.model.layers[0].mlp = Sometimes(model.model.layers[0].mlp)
    (both,), (alone,) = (sensitivities(model, [LOW], [name], some, seed=0) for some in (rows, rows[:1]))
    assert both[name] * (40 + 7) == pytest.approx(alone[name] * 40)
    assert alone[name] > 0
