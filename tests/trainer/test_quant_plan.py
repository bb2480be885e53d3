"""Plans: who gets more bits, within the budget, and how the choice travels."""

import logging

import pytest
import torch
from torch import nn

from trainer.config.errors import UserError
from trainer.config.model import ModelConfig, ModelSource
from trainer.config.quant import Codebook, MixedBits, QuantConfig
from trainer.linear import QuantLinear, weights_sha256
from trainer.model import load_model, plan_of_config, prepare_model
from trainer.quant_plan import QuantPlan, error_gain, first_layers, most_gaining_layers
from trainer.quantizer import Quantizer

NF4, NF3, NF2 = (Quantizer(name) for name in ("nf4", "nf3", "nf2"))


def mean_bits(plan: QuantPlan, sizes: dict[str, int]) -> float:
    return sum(size * plan.of(name).code_bits for name, size in sizes.items()) / sum(sizes.values())


def test_first_layers_get_more_bits() -> None:
    sizes = dict.fromkeys("abcdefgh", 100)
    assert first_layers(sizes, NF4, NF2, bits_budget=2.5).low_layers == set("cdefgh")  # 2 of 8 layers: 2 + 2 * 2 / 8
    assert first_layers(sizes, NF4, NF2, bits_budget=2.0).low_layers == set(sizes)
    assert not first_layers(sizes, NF4, NF2, bits_budget=4.0).low_layers
    assert first_layers(sizes, NF3, NF2, bits_budget=2.5).low_layers == set("efgh")


def test_the_first_layer_that_does_not_fit_ends_the_row() -> None:
    """Layers after it are smaller and would fit; the first ones are the rule."""
    sizes = {"a": 100, "b": 700, "c": 100, "d": 100}
    assert first_layers(sizes, NF4, NF2, bits_budget=2.5).low_layers == {"b", "c", "d"}


def test_the_largest_gain_a_bit_comes_first() -> None:
    sizes = {"a": 100, "b": 100, "c": 400, "d": 100}
    gains = {"a": 0.1, "b": 0.3, "c": 0.8, "d": 0.3}  # a bit: 0.1, 0.3, 0.2, 0.3 (in thousandths)
    chosen = [most_gaining_layers(sizes, gains, NF4, NF2, bits_budget=b).low_layers for b in (2.3, 2.6, 3.5)]
    assert chosen[0] == {"a", "c", "d"}  # 1 of 7 hundredths fits; b stands before d
    assert chosen[1] == {"a", "c"}
    assert chosen[2] == {"c"}  # c would be next and does not fit; a does


@pytest.mark.parametrize("budget", [2.0, 2.25, 2.5, 3.0, 3.999, 4.0])
def test_the_budget_is_never_exceeded(budget: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {str(i): int(n) for i, n in enumerate(torch.randint(1, 1000, (50,), generator=generator))}
    gains = {name: float(g) for name, g in zip(sizes, torch.rand(50, generator=generator), strict=True)}
    for plan in (
        first_layers(sizes, NF4, NF2, bits_budget=budget),
        most_gaining_layers(sizes, gains, NF4, NF2, bits_budget=budget),
    ):
        # At most one layer's bits stay unused in a row, and nothing is above the budget: 1 bit in all for rounding it.
        assert mean_bits(plan, sizes) <= budget + 1 / sum(sizes.values())
        assert mean_bits(plan, sizes) > budget - 2 * 1000 / sum(sizes.values())


def test_error_gain() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    # normal weights: 0.561 relative error at 2 bits and 0.092 at 4 (tests/kernels/test_codebook_bits.py)
    assert error_gain(weight, NF4, NF2) == pytest.approx(0.561 - 0.092, rel=0.02)
    assert error_gain(weight * 1e-3, NF4, NF2) == pytest.approx(error_gain(weight, NF4, NF2), rel=1e-3)  # relative
    assert error_gain(torch.zeros(2, 64), NF4, NF2) == 0
    on_grid = torch.tensor([-1.0, 0.0, 1.0]).repeat(32)[:64].expand(4, 64)  # NF2 holds these exactly
    assert error_gain(on_grid, Quantizer(double_quant=False), Quantizer("nf2", double_quant=False)) == 0


def test_a_plan_travels() -> None:
    for plan in (QuantPlan(Quantizer("int4")), QuantPlan(NF4, NF2, frozenset({"b", "a"}))):
        saved = plan.to_dict()
        assert QuantPlan.from_dict({**saved, "base_sha256": "..."}) == plan
    assert saved["low_layers"] == ["a", "b"]
    assert QuantPlan.of_layers({"a": NF2, "b": NF4, "c": NF2}) == QuantPlan(NF4, NF2, frozenset({"a", "c"}))
    with pytest.raises(ValueError, match="3 quantizers"):
        QuantPlan.of_layers({"a": NF2, "b": NF4, "c": NF3})
    with pytest.raises(ValueError, match="cannot be read: .*size"):
        QuantPlan.from_dict({"quantizer": {"size": 3}})


@pytest.fixture
def tiny() -> nn.Module:
    return load_model(ModelConfig(source=ModelSource.tiny))[0]


@pytest.mark.parametrize("mixed", MixedBits)
def test_a_model_is_packed_by_its_plan(tiny: nn.Module, mixed: MixedBits, caplog: pytest.LogCaptureFixture) -> None:
    config = QuantConfig(bits_budget=2.5, mixed=mixed)
    again = load_model(ModelConfig(source=ModelSource.tiny))[0]
    with caplog.at_level(logging.INFO, "trainer"):
        prepare_model(tiny, config)
    layers = {name: m for name, m in tiny.named_modules() if isinstance(m, QuantLinear)}
    sizes = {name: layer.in_features * layer.out_features for name, layer in layers.items()}
    plan = QuantPlan.of_layers({name: layer.quantizer for name, layer in layers.items()})
    assert mean_bits(plan, sizes) <= 2.5 and {q.codebook for q in (plan.quantizer, plan.low)} == {"nf4", "nf2"}
    for name, layer in layers.items():
        block, _, part = name.replace("self_attn.", "").replace("mlp.", "").rpartition(".")
        (line,) = [text for text in caplog.messages if text.startswith(f"bits     {block}: ")]
        assert f"{part} {layer.quantizer.codebook}" in line
    prepare_model(again, QuantConfig(), plan=QuantPlan.from_dict(plan.to_dict()))  # as an adapter's reader does
    assert weights_sha256(again) == weights_sha256(tiny)


def test_the_choice_is_that_of_the_weights(tiny: nn.Module) -> None:
    """By error, a layer whose weights NF2 holds exactly gains nothing and stays low, wherever it is."""
    names = [name for name, m in tiny.named_modules() if type(m) is nn.Linear and name != "lm_head"]
    exact = tiny.get_submodule(names[0])
    with torch.no_grad():
        exact.weight.copy_(exact.weight.sign())
    first, error = (plan_of_config(tiny, names, QuantConfig(bits_budget=3.0, mixed=m)) for m in MixedBits)
    assert names[0] in error.low_layers and names[0] not in first.low_layers


def test_a_damaged_weight_is_named(tiny: nn.Module) -> None:
    with torch.no_grad():
        tiny.model.layers[1].mlp.up_proj.weight[3, 7] = torch.nan
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight: .*\[3, 7\].*damaged"):
        prepare_model(tiny, QuantConfig(bits_budget=3.0, mixed=MixedBits.error))


def test_groups_that_do_not_fit_are_named(tiny: nn.Module) -> None:
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj: quant\.group_size=64 .*in_features=96.*32"):
        prepare_model(tiny, QuantConfig(Codebook.int4, group_size=64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits_budget": 5.0}, "between the 2 bits of nf2 and the 4 of nf4"),
        ({"bits_budget": 1.5}, "between the 2 bits of nf2"),
        (
            {"bits_budget": 2.5, "codebook": Codebook.int4},
            "quant.bits_budget=2.5 has no effect with quant.codebook=int4",
        ),
        ({"bits_budget": 2.5, "codebook": Codebook.nf2}, "use nf4, fp4 or nf3 with nf2"),
        ({"bits_budget": 3.5, "low_codebook": Codebook.fp4}, "use nf4, fp4 or nf3 with nf2"),
        ({"low_codebook": Codebook.nf2}, "quant.low_codebook=nf2 has no effect without quant.bits_budget"),
        ({"mixed": MixedBits.error}, "quant.mixed=error has no effect without quant.bits_budget"),
        ({"codebook": Codebook.none, "block_size": 64}, "quant.block_size=64 has no effect with quant.codebook=none"),
        ({"codebook": Codebook.int8, "symmetric": True}, "quant.symmetric=True has no effect .* use one of int4"),
    ],
)
def test_settings_are_validated(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        QuantConfig(**settings)
