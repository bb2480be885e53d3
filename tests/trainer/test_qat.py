"""Which layer gets which scheme, what a step is trained with, and what is refused before anything runs."""

import copy

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.test_convert import NextToken
from trainer.checkpoint import TrainState, save_checkpoint
from trainer.compose import load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.qat import QatConfig, SchemeName, moment_step
from trainer.model import load_model
from trainer.objective import NextTokenLoss
from trainer.optim import parameter_groups
from trainer.qat.fake_quant import FakeQuantEmbedding, FakeQuantLinear, fake_quant_layers
from trainer.qat.packed_model import packed_layers
from trainer.qat.prepare import QatSchedule, _by_pattern, calibrate, layer_schemes, prepare_qat, require_kv_cache
from trainer.qat.rounding import rectified_sigmoid

TOKEN_IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    return load_model(ModelConfig(ModelSource.tiny, dtype=DType.float32))[0].requires_grad_(True)


def test_the_default_is_every_layer_but_embedding_and_head(model) -> None:
    schemes = layer_schemes(model, QatConfig(scheme="int4"))
    assert len(schemes) == 14 and {scheme.weight.codebook for scheme in schemes.values()} == {"int4"}
    assert not {"lm_head", "model.embed_tokens"} & schemes.keys()
    assert {scheme.weight.group_size for scheme in schemes.values()} == {32}


def test_the_first_pattern_that_matches_counts(model) -> None:
    patterns = ["layers.0.*:none", "mlp.down_proj:int4_int8", "*_proj:nf4", "lm_head:int8"]
    schemes = layer_schemes(model, QatConfig(scheme="int4", schemes=patterns, group_size=-1))
    assert schemes.keys() == {
        *(f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"),
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
        "lm_head",
    }
    names = {name.rpartition(".")[2]: scheme.weight_name for name, scheme in schemes.items()}
    assert names == {**dict.fromkeys([f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up")], "nf4")} | {
        "down_proj": "int4",
        "lm_head": "int8",
    }
    assert schemes["model.layers.1.mlp.down_proj"].integer and schemes["lm_head"].activations is not None
    assert prepare_qat(model, QatConfig(scheme="int4", schemes=patterns, group_size=-1)) == len(schemes)


def test_a_number_does_not_match_the_numbers_that_begin_with_it() -> None:
    """In a regular expression `layers.1.*` is layers 1 and 10 to 19."""
    names = [f"model.layers.{i}.q_proj" for i in range(12)]
    assert list(_by_pattern(names, {"layers.1.*": SchemeName.none})) == ["model.layers.1.q_proj"]
    assert list(_by_pattern(names, {"layers.1?.*": SchemeName.none})) == names[10:]


def test_tied_tables_share_what_is_trained(model) -> None:
    config = QatConfig(scheme="int4", learn_scales=True, schemes=["lm_head:int4", "embed_tokens:int4"])
    assert prepare_qat(model, config) == 16
    embedding, head = model.model.embed_tokens, model.lm_head
    assert isinstance(embedding, FakeQuantEmbedding) and isinstance(head, FakeQuantLinear)
    assert embedding.weight is head.weight and embedding.scales is head.scales


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schemes": ["down_poj:int8"]}, "'down_poj', which fits no layer; near it are down_proj"),
        ({"schemes": ["layers.2.*:none"]}, r"'layers.2.\*', which fits no layer"),
        ({"schemes": ["*_proj:int8", "down_proj:nf4"]}, "'down_proj' after patterns that match all of its layers"),
        (
            {"group_size": 128},
            r"model.layers.0.self_attn.q_proj: qat.group_size=128 does not divide in_features=96; use",
        ),
        ({"schemes": ["*_proj:none"]}, "leaves no layer with a scheme; use conf=full"),
        ({"schemes": ["embed_tokens:int8"]}, "gives model.embed_tokens, an embedding, int8, which rounds inputs"),
        ({"schemes": ["embed_tokens:nf4", "lm_head:int4"]}, "are tied to a head of"),
    ],
)
def test_what_does_not_fit_the_model_is_named(model, options: dict, message: str) -> None:
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UserError, match=message):
        prepare_qat(model, QatConfig(scheme="int4", **options))
    if "tied" not in message:
        assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("qat.scheme=int5",), "int5"),
        (("qat.schemes=[down_proj]",), "qat.schemes has 'down_proj'; give a pattern of the ends of layers' names and"),
        (("qat.schemes=[down_proj:int5]",), r"a scheme \(none, int4, int4_int8"),
        (("qat.schemes=['a:int4','a:nf4']",), "names .'a'. twice"),
        (("qat.start=5",), r"qat.start=5 is beyond the end of a run of 5 steps; give a step below that, a share"),
        (("qat.start=1.5",), "qat.start=1.5; give a whole number of steps, such as 100, or a share"),
        (("qat.start=-1",), "qat.start=-1.0; give a whole number"),
        (("qat.scheme=int8_static", "qat.freeze_observers=9"), "qat.freeze_observers=9 is beyond the end"),
        (("qat.group_size=48",), "qat.group_size=48; use -1 .one scale a row. or a multiple of 32"),
        (("qat.scheme=nf4", "qat.group_size=64"), "qat.group_size=64 has no effect with qat.scheme=nf4"),
        (("qat.scheme=nf4", "qat.learn_scales=true"), "qat.learn_scales=True has no effect with qat.scheme=nf4"),
        (("qat.scale_init=mse",), "qat.scale_init=mse has no effect with qat.learn_scales=false"),
        (("qat.observer=mse",), "qat.observer=mse has no effect with qat.scheme=int4 .*use one of int8_static"),
        (("qat.rounding=soft", "qat.learn_scales=true"), "choose one"),
        (("qat.compare_tokens=1",), "qat.compare_tokens=1; give at least 2"),
        (
            ("quant.codebook=nf4",),
            "qat.scheme=int4 quantizes the weights that are trained, and quant.codebook=nf4|packs",
        ),
        (("export.formats=[]",), "has no model of the codes that qat.scheme=int4 trains; add quantized"),
        (("qat.scheme=none",), "has quantized, the codes of quantization-aware training"),
        (("optim.name=adamw_schedule_free", "optim.schedule=constant"), "exports an average of weights"),
    ],
)
def test_what_does_not_fit_together_is_said_before_torch_loads(overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        load_config("conf=qat", "model=tiny", "train.max_steps=5", *overrides)


def test_a_share_of_a_short_run_is_a_step_of_it() -> None:
    assert [moment_step(share, 5) for share in (0.0, 0.1, 0.5, 0.99)] == [0, 0, 2, 4]
    assert moment_step(1.0, 5) == 1 and moment_step(3.0, 5) == 3


def layers_of(model: nn.Module) -> list[FakeQuantLinear]:
    return [layer for _, layer in fake_quant_layers(model)]


def test_the_schedule_is_a_function_of_the_step(model) -> None:
    config = QatConfig(scheme="int4", start=2, rounding="stochastic")
    prepare_qat(model, config)
    schedule, seen = QatSchedule.of(model, config, num_steps=6, seed=3), []
    for step in (0, 1, 2, 3, 4, 5, 3):
        schedule.before_step(step)
        layer = layers_of(model)[4]
        seen.append((layer.enabled, layer.rounding_amount, layer.rounding_seed))
    assert [enabled for enabled, _, _ in seen] == [False, False, True, True, True, True, True]
    assert [amount for _, amount, _ in seen[2:6]] == [1.0, 0.75, 0.5, 0.25]
    assert seen[3] == seen[6] and len({seed for _, _, seed in seen[2:6]}) == 4
    schedule.finish()
    assert all(layer.enabled and layer.rounding_amount == 0 for layer in layers_of(model))


def test_ranges_are_calibrated_and_then_frozen(model) -> None:
    config = QatConfig(scheme="int8_static", freeze_observers=2, observer="minmax")
    prepare_qat(model, config)
    objective, layer = NextToken(model), layers_of(model)[0]
    x: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, inputs: x.append(inputs[0].detach()))
    calibrate(objective, [{"input_ids": TOKEN_IDS}])
    assert layer.input_scale == x[-1].abs().max() / 127 and layer.enabled
    schedule = QatSchedule.of(model, config, num_steps=4, seed=0)
    scales = []
    for step in range(4):
        schedule.before_step(step)
        model.train()
        with torch.no_grad():
            model.model.embed_tokens.weight *= 2  # norms undo the size of a token, but not eps
            model.model.layers[0].input_layernorm.weight *= 2
        objective(TOKEN_IDS)
        scales.append(layer.input_scale.item())
        schedule.after_step(step)
    schedule.finish()
    # A step rounds by what the steps before it have shown.
    assert scales[0] < scales[1] < scales[2] == scales[3] == layer.input_scale.item()
    for index in (0, 1, 2):
        assert scales[index] == pytest.approx(x[index].abs().max().item() / 127)


def test_a_checkpoint_has_the_range_of_all_that_was_seen(model, tmp_path) -> None:
    """What is pending is a process's own, and a file has one: a step ends with folding it in."""
    config = QatConfig(scheme="int8_static", observer="minmax")
    prepare_qat(model, config)
    layer, schedule = layers_of(model)[0], QatSchedule.of(model, config, num_steps=4, seed=0)
    schedule.before_step(0)
    NextToken(model.train())(TOKEN_IDS)
    seen = layer.observer.pending.clone()
    assert seen > 0
    schedule.after_step(0)
    optimizer = torch.optim.SGD(model.parameters())
    path = save_checkpoint(tmp_path, TrainState(step=1), model, optimizer, Accelerator(), keep=1)
    saved = load_file(path / "trainable.safetensors")
    ranges, pending = (
        [t for name, t in saved.items() if name.endswith(f"observer.{key}")] for key in ("range", "pending")
    )
    assert len(ranges) == 14 and seen in ranges and all(range > 0 for range in ranges)
    assert not any(pending)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_integers_is_trained_as_it_is_served(model, dtype: torch.dtype) -> None:
    """The loss is that of the model's own logits, and an INT8 cache is not left out in silence."""
    model.to(dtype)
    prepare_qat(model, QatConfig(scheme="int4", schemes=["lm_head:int8"]))
    objective = NextTokenLoss(model.eval())
    assert not objective.fused_head
    wanted = cross_entropy(model(TOKEN_IDS).logits[:, :-1].flatten(0, 1).float(), TOKEN_IDS[:, 1:].flatten())
    assert objective(TOKEN_IDS, TOKEN_IDS).item() == pytest.approx(wanted.item() * 46, rel=1e-6)
    beside_a_teacher = nn.Module()
    beside_a_teacher.next_token = objective
    for each in (objective, beside_a_teacher):
        with pytest.raises(UserError, match="qat.kv_cache=true .* head that multiplies integers"):
            require_kv_cache(each)


def test_ranges_are_calibrated_in_16_bits(model) -> None:
    """Other layers do not round while a static one looks on: its range is that of the model before."""
    scales = []
    for others in ("none", "mxfp4"):
        fresh = copy.deepcopy(model)
        prepare_qat(fresh, QatConfig(scheme=others, schemes=["down_proj:int8_static"]))
        calibrate(NextToken(fresh), [{"input_ids": TOKEN_IDS}])
        static = [layer for layer in layers_of(fresh) if layer.observer is not None]
        scales.append([layer.input_scale.item() for layer in static])
        assert all(layer.enabled for layer in layers_of(fresh))
    assert scales[0] == scales[1] and len(scales[0]) == 2


def test_an_embedding_that_changes_its_rows_is_refused(model) -> None:
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(UserError, match="embed_tokens has max_norm or scale_grad_by_freq"):
        prepare_qat(model, QatConfig(scheme="int4", schemes=["embed_tokens:int4", "lm_head:int4"]))


def test_soft_rounding_is_pulled_to_up_or_down(model) -> None:
    """Without a loss the penalty alone decides: nobody moves in the warm-up, all have chosen at the end."""
    config = QatConfig(scheme="int4", rounding="soft")
    prepare_qat(model, config)
    layer = layers_of(model)[0]
    assert not layer.weight.requires_grad and layer.soft_rounding.requires_grad
    start = layer.soft_rounding.detach().clone()
    nearest = layer.quantized.packed
    num_steps = 400
    schedule = QatSchedule.of(model, config, num_steps=num_steps, seed=0)
    optimizer = torch.optim.AdamW([layer.soft_rounding], lr=0.05, weight_decay=0)
    for other in layers_of(model)[1:]:
        other.soft_rounding = None  # what is left of the test's time
    for step in range(num_steps):
        schedule.before_step(step)
        if step < num_steps // 5:
            assert layer.soft_rounding.grad is None
        optimizer.step()
        optimizer.zero_grad()
    h = rectified_sigmoid(layer.soft_rounding.detach())
    assert ((h < 0.01) | (h > 0.99)).float().mean() > 0.99
    assert torch.equal(h > 0.5, start > 0)  # each went to its side
    assert torch.equal(layer.quantized.packed, nearest)


def test_what_is_trained_beside_a_weight_is_no_matrix_of_weights(model) -> None:
    """No decay pulls scales to 0, no Muon orthogonalises them, and what is counted in codes moves in codes."""
    config = load_config("conf=qat", "model=tiny", "qat.learn_scales=true", "qat.symmetric=false", "optim.lr=1e-3")
    config.optim.weight_decay = 0.1
    prepare_qat(model, config.qat)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in parameter_groups(model, config.optim):
        for parameter in group["params"]:
            kind = names[id(parameter)].rpartition(".")[2]
            assert group["weight_decay"] == (0.1 if kind == "weight" and parameter.ndim == 2 else 0), names[
                id(parameter)
            ]
            assert group["hidden"] == ("_proj.weight" in names[id(parameter)])
            assert group["lr_scale"] == pytest.approx(10 if kind == "zeros" else 1)
    assert len(packed_layers(model)) == 14
