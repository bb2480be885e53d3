"""Rounding to nearest on a candidate's grid, and the short form of fidelity that runs write."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from trainer.config.model import DType, ModelConfig, ModelSource, named_model
from trainer.config.quant import Codebook, QuantConfig
from trainer.evaluate.fidelity import Original
from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.figures import recovered_share
from trainer.evaluate.quality.nearest import describe_grid, grid_of, round_to_nearest
from trainer.evaluate.run_fidelity import run_fidelity
from trainer.lora import register_layers
from trainer.model import load_model, prepare_model
from trainer.qat.packed_linear import pack_layer
from trainer.qat.packed_model import packed_sha256
from trainer.qat.scheme import Scheme

ROWS = [torch.randint(4, 260, (30,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(5)]
TINY = named_model("tiny", DType.float32)


def packed(**settings):
    model, _ = load_model(TINY)
    prepare_model(model, QuantConfig(**settings))
    return model


@pytest.mark.parametrize("settings", [{"codebook": Codebook.int4, "group_size": 32}, {"codebook": Codebook.nf4}])
def test_a_rounded_model_is_its_own_nearest(settings):
    """Codes that were rounded to nearest are those that a candidate's grid gives, bit for bit."""
    candidate, (nearest, _) = packed(**settings), load_model(TINY)
    round_to_nearest(nearest, grid_of(candidate))
    assert packed_sha256(nearest) == packed_sha256(candidate)


def test_recovered_is_a_share_of_what_rounding_adds():
    from trainer.evaluate.token_rows import TokenRows

    def losses(own):
        return TokenRows([torch.tensor([[own] * 3, [2.0] * 3] + [[0.0] * 3] * 4) for _ in range(4)])

    assert recovered_share(losses(2.25), losses(3.0), Resampler(4)).value == 0.75
    assert recovered_share(losses(1.5), losses(3.0), Resampler(4)).value == 1.5  # better than the original was
    assert recovered_share(losses(2.0), losses(1.9), Resampler(4)) is None


def test_the_grid_is_described():
    text = describe_grid(grid_of(packed(codebook=Codebook.int4, group_size=32, symmetric=False)))
    assert text == "rounded to nearest: 14 layers int4, groups of 32, zero points"


def test_what_has_no_nearest_says_why():
    model, _ = load_model(TINY)
    assert "no codes whose grid is known" in grid_of(model)
    layer, scheme = model.model.layers[0].mlp.up_proj, Scheme.named("int8_static")
    scale = torch.tensor(0.1)
    static = pack_layer(scheme, scheme.weight.quantize(layer.weight.detach()), input_scale=scale)
    model.set_submodule("model.layers.0.mlp.up_proj", static)
    assert "measured and not rounded" in grid_of(model)


def test_a_layer_that_the_original_lacks_is_named():
    schemes = {"model.layers.9.mlp.up_proj": Scheme.named("int8")}
    with pytest.raises(ValueError, match="no layer model.layers.9"):
        round_to_nearest(load_model(TINY)[0], schemes)


# ---- at the end of a run


def test_a_run_without_codes_has_no_fidelity():
    assert run_fidelity(load_model(TINY)[0], TINY, ROWS) is None


def test_codes_are_compared_with_the_base():
    model = packed(codebook=Codebook.int4, group_size=32)
    found, before = run_fidelity(model, TINY, ROWS), packed_sha256(model)
    direct = Original.of(load_model(TINY)[0], ROWS).compare(model)
    assert found["kl"]["value"] == pytest.approx(direct.kl) and found["kl"]["value"] > 1e-5
    assert found["same_token"]["value"] == direct.same_token and found["tokens"] == 5 * 29
    assert found["compared"].startswith("packed model") and packed_sha256(model) == before


def test_an_adapter_is_off_while_its_base_is_compared():
    plain = run_fidelity(packed(codebook=Codebook.nf4), TINY, ROWS)
    config = LoraConfig(r=2, target_modules=["up_proj"])
    register_layers(config)
    model = get_peft_model(packed(codebook=Codebook.nf4), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)  # trained: it changes the answers
    found = run_fidelity(model, TINY, ROWS)
    assert found["compared"].startswith("packed base, adapter off")
    assert found["kl"]["value"] == pytest.approx(plain["kl"]["value"], rel=1e-3)
    assert not any(layer.disable_adapters for layer in model.modules() if isinstance(layer, LoraLayer))  # on again


@pytest.mark.parametrize(
    ("source", "rows", "reason"),
    [
        (ModelConfig(ModelSource.tiny, add_tokens=["<a>"]), ROWS, "another vocabulary"),
        (TINY, [[1]], "no held-out row has two tokens"),
    ],
)
def test_what_cannot_be_compared_is_skipped_with_the_reason(source, rows, reason):
    assert reason in run_fidelity(packed(codebook=Codebook.nf4), source, rows)["skipped"]
