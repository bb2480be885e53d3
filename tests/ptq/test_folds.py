"""Folds leave the function alone; AWQ's and SmoothQuant's factors make the rounded product better."""

import pytest
import torch
from torch import nn

from tests.ptq.models import CU_SEQLENS, hidden_states, random_model, through_block
from trainer.fused_decoder import STAGES, FusedDecoder
from trainer.ptq.awq import clipped_codes, searched_factor
from trainer.ptq.folds import BlockWeights
from trainer.ptq.smoothquant import (
    product_error,
    round_inputs,
    searched_smoothing,
    signal_to_noise,
    smoothing_factor,
    static_scale,
)
from trainer.quantizer import Quantizer

INT8 = Quantizer("int8")
INT4 = Quantizer("int4"), Quantizer("int4", symmetric=False)
MODELS = ("llama", 4, 2), ("llama", 6, 2), ("qwen2", 4, 1), ("qwen3", 4, 4)
"""Kind, query heads, key-value heads."""


def factor_of(width: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(width, generator=torch.Generator().manual_seed(seed)) * 4 + 0.1


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("kind", "heads", "kv_heads"), MODELS)
def test_the_function_stays(stage, kind, heads, kv_heads):
    model = random_model(kind, heads=heads, kv_heads=kv_heads, hidden_size=16 * heads)
    wanted, block = through_block(model), model.model.layers[0]
    before = {name: block.get_submodule(name).weight.clone() for names in STAGES for name in names}
    weights = BlockWeights(block)
    applied = weights.fold(stage, factor_of(block.get_submodule(STAGES[stage][0]).in_features))
    got = through_block(model)
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())  # float32 sums of 96
    for name in STAGES[stage]:
        assert torch.equal(weights.weights[name], before[name] * applied)
        assert torch.equal(weights.weights[name], block.get_submodule(name).weight)
    assert float(applied.max() / applied.min()) > 2  # something was folded


def test_the_factor_is_what_16_bits_leave_of_it():
    model = random_model().to(torch.bfloat16)
    block = model.model.layers[0]
    norm = block.input_layernorm.weight.float().clone()
    weights = BlockWeights(block)
    before = weights.weights["self_attn.q_proj"].clone()
    applied = weights.fold(0, factor_of(64))
    ratio = norm / (block.input_layernorm.weight.float() * applied)
    assert (ratio - 1).abs().max() < 1e-6  # float32's last bit, not bfloat16's: W diag(s) stays exact
    assert torch.equal(weights.weights["self_attn.q_proj"], before * applied)


def test_query_heads_that_share_values_share_factors():
    block = random_model(heads=6, kv_heads=2, hidden_size=96).model.layers[0]
    applied = BlockWeights(block).fold(1, factor_of(96)).view(2, 3, 16)
    assert torch.equal(applied, applied[:, :1].expand(2, 3, 16))


def test_dead_norms_and_wild_factors_are_left_alone():
    block = random_model().model.layers[0]
    block.input_layernorm.weight = nn.Parameter(block.input_layernorm.weight.clone(), requires_grad=False)
    block.input_layernorm.weight[3] = 0
    factor = factor_of(64)
    factor[4], factor[5], factor[6] = torch.nan, torch.inf, 0
    applied = BlockWeights(block).fold(0, factor)
    assert applied[[3, 4, 5]].tolist() == [1, 1, 1] and bool(applied.isfinite().all()) and bool((applied > 0).all())
    assert block.input_layernorm.weight[3] == 0


# ---- AWQ


def inputs(features: int = 64, tokens: int = 256) -> torch.Tensor:
    x = torch.randn(tokens, features, generator=torch.Generator().manual_seed(2))
    x[:, 7] *= 30
    return x


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_protects_the_weights_of_large_inputs(symmetric):
    quantizer = Quantizer("int4", symmetric=symmetric)
    weights = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (96, 33)]  # no multiple of 64
    x = inputs()
    found = searched_factor(weights, [quantizer] * 2, (x.T @ x).double(), x.abs().mean(0), lambda factor: factor)

    def error(factor: torch.Tensor) -> float:
        return sum(
            ((x / factor) @ quantizer.quantize(w * factor).dequantize(torch.float32).T - x @ w.T).square().sum().item()
            for w in weights
        )

    assert error(found) < 0.7 * error(torch.ones(64))
    assert found[7] > 2 * found.median()


def test_awq_is_neutral_about_silent_channels_and_no_inputs():
    quantizer, weight = Quantizer("int4"), torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for x in (inputs() * torch.ones(64).index_fill_(0, torch.tensor([3]), 0), torch.zeros(4, 64)):
        found = searched_factor([weight], [quantizer], (x.T @ x).double(), x.abs().mean(0), lambda factor: factor)
        assert bool(found.isfinite().all()) and bool((found > 0).all())


@pytest.mark.parametrize("quantizer", [*INT4, Quantizer("nf4", block_size=32)], ids=str)
def test_clips_have_no_larger_error_of_their_groups(quantizer):
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 9] *= 5
    x = inputs()
    x[:, 9] *= 0.01  # nobody needs the large weight
    hessian = (x.T @ x).double()
    plain = quantizer.quantize(weight).dequantize(torch.float32)
    clipped = clipped_codes(weight, quantizer, hessian).dequantize(torch.float32)
    for group in range(2):
        part = slice(32 * group, 32 * group + 32)
        H = hessian.float()[part, part]
        errors = clipped[:, part] - weight[:, part], plain[:, part] - weight[:, part]
        ours, theirs = (torch.einsum("ri,ij,rj->r", error, H, error) for error in errors)
        assert bool((ours <= theirs * (1 + 1e-4) + 1e-4).all())
    assert (clipped - weight)[:, :32].abs().max() > (plain - weight)[:, :32].abs().max()  # the large weight was cut


# ---- SmoothQuant


def test_smoothing_makes_both_sides_equally_hard():
    weight, absmax = torch.rand(8, 4) + 0.5, torch.tensor([1.0, 100.0, 4.0, 0.0])
    factor = smoothing_factor([weight], absmax, 0.5)
    ranges = (absmax / factor)[:3], (weight * factor).abs().amax(0)[:3]
    assert torch.allclose(ranges[0] / ranges[1], (ranges[0] / ranges[1])[0].expand(3), rtol=1e-5)
    assert bool(factor.isfinite().all())


@pytest.mark.parametrize("static", [True, False])
def test_the_alpha_that_is_found_loses_least(static):
    weights, x = [torch.randn(24, 64, generator=torch.Generator().manual_seed(0))], inputs()
    absmax = x.abs().amax(0)
    alpha, factor = searched_smoothing(weights, [INT8], x, absmax, lambda factor: factor, static=static)
    plain = product_error(weights, [INT8], x, torch.ones(64), absmax if static else None)
    assert alpha is not None
    assert product_error(weights, [INT8], x, factor, absmax if static else None) < 0.5 * plain


def test_static_scales_are_clipped_where_that_loses_less():
    weight, x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), inputs()
    x[:, 7] /= 30
    x[0, 0] = 40  # one value of 16,384
    values = INT8.quantize(weight).dequantize(torch.float32)
    scale = static_scale([weight], [values], x, x.abs().amax(0))
    errors = [(round_inputs(x, s) @ values.T - x @ weight.T).square().sum() for s in (scale, x.abs().max() / 127)]
    assert errors[0] <= errors[1]


def test_one_loud_token_is_found_out():
    """A channel that is a thousand times louder at a token leaves nothing of the other tokens under one scale."""
    weight, x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), inputs()
    x[:, 7] /= 30
    values = INT8.quantize(weight).dequantize(torch.float32)
    quiet = signal_to_noise([values], x, static_scale([weight], [values], x, x.abs().amax(0)))
    x[0, 3] *= 1e4
    scale = static_scale([weight], [values], x, x.abs().amax(0))
    assert scale * 127 > 0.5 * x[0, 3].abs()  # it is not cut: attention may rest on it
    assert quiet > 30 > 20 > signal_to_noise([values], x, scale)
    assert signal_to_noise([values], x, None) > 30  # a scale a token


def test_rounding_inputs():
    x = torch.tensor([[1.0, -0.5, 0.0], [0.0, 0.0, 0.0]])
    assert round_inputs(x, None)[1].tolist() == [0, 0, 0]
    assert torch.allclose(round_inputs(x, None)[0], x[0], atol=1 / 254)
    assert round_inputs(x, torch.tensor(0.001))[0].tolist() == pytest.approx([0.127, -0.127, 0])


def test_stages_are_computed_as_the_layer_is():
    """Stage by stage, as quantization runs a block, gives the block's own output."""
    model = random_model("qwen2")
    decoder, block, stream = FusedDecoder(model), model.model.layers[0], hidden_states(model)
    for stage in range(4):
        x = decoder.projection_input(0, stage, stream, CU_SEQLENS)
        assert x.shape == (48, block.get_submodule(STAGES[stage][0]).in_features)
        if stage % 2:
            stream = decoder.add_projection(x, stage, stream, block)
    assert torch.allclose(stream, through_block(model), rtol=1e-5, atol=1e-4)
