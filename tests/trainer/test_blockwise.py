"""Block-wise training: errors that fall, on what the paper says, block by block, and again after a stop."""

import copy
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.blockwise.activation_stream import ActivationStream
from trainer.blockwise.block import lr_share, reconstruction_error
from trainer.blockwise.blocks import BlockwiseTraining
from trainer.blockwise.files import BlockReport
from trainer.config.blockwise import BlockInputs, BlockLoss, BlockwiseConfig
from trainer.config.errors import UserError
from trainer.linear import QuantLinear
from trainer.qat.scheme import Scheme

NUM_LAYERS = 2
SIZES = dict(
    vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
)  # fmt: skip
ROWS = [torch.randint(0, 24, (5 + 7 * i % 40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(24)]
"""Of few tokens, so that a block sees a part of what its inputs could be, and can be wrong about the rest."""
CONFIG = BlockwiseConfig(epochs=4, rows=None, val_rows=6, batch_size=3, weight_lr=5e-4, scale_lr=5e-4)
INT4 = Scheme.named("int4", learn_scales=True)


def build(model_type: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES))
    with torch.no_grad():
        for layer in model.model.layers:  # fresh ones barely change the stream, and nothing would be lost
            for parameter in layer.parameters():
                parameter.mul_(4 if parameter.ndim == 2 else 1)
    return model.requires_grad_(False).eval()


def schemes(scheme: Scheme = INT4) -> dict[str, Scheme]:
    names = [name for name, layer in build().named_modules() if type(layer) is nn.Linear and name != "lm_head"]
    return dict.fromkeys(names, scheme)


def training(
    folder: Path, model: nn.Module, config: BlockwiseConfig = CONFIG, *, max_pass_tokens: int = 4096, **changes: object
) -> BlockwiseTraining:
    arguments = {"schemes": schemes(), "rows": ROWS, **changes}
    return BlockwiseTraining(
        model,
        arguments["schemes"],
        arguments["rows"],
        config,
        folder,
        seed=0,
        device=torch.device("cpu"),
        max_pass_tokens=max_pass_tokens,
    )


def files(folder: Path) -> dict[str, str]:
    """Codes of the finished blocks, hashed; the header has the seconds that a block took."""
    return {
        path.name: hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in sorted(load_file(path).items()))).hexdigest()
        for path in sorted(folder.glob("block_*.safetensors"))
    }


def layer_inputs_and_outputs(model: nn.Module, row: list[int]) -> list[tuple[Tensor, Tensor]]:
    """[T, hidden_size] before and after each block, by transformers' own forward over one document."""
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        layer.register_forward_hook(lambda _, args, output: seen.append((args[0][0], output[0])))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model.model(input_ids=torch.tensor([row]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("scheme", "loss"),
    [
        (INT4, BlockLoss.relative),
        (INT4, BlockLoss.mse),
        (Scheme.named("int4", learn_scales=False), BlockLoss.relative),
        (Scheme.named("int4", symmetric=False, learn_scales=True), BlockLoss.relative),
        (Scheme.named("nf4"), BlockLoss.mse),
    ],
    ids=["int4", "int4 by mse", "int4 with fixed scales", "int4 asymmetric", "nf4 by mse"],
)
def test_each_block_comes_nearer(tmp_path: Path, scheme: Scheme, loss: BlockLoss) -> None:
    model = build()
    reports = training(tmp_path, model, replace(CONFIG, loss=loss), schemes=schemes(scheme)).run()
    assert [report.index for report in reports] == list(range(NUM_LAYERS))
    assert all(report.accepted and report.error_after < 0.95 * report.error_before for report in reports)
    packed = {name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    assert packed == set(schemes())
    assert all(model.get_submodule(name).quantizer == scheme.weight for name in packed)


@pytest.mark.parametrize("inputs", BlockInputs)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_reported_errors_are_those_of_transformers(tmp_path: Path, model_type: str, inputs: BlockInputs) -> None:
    """Of the model that comes out: what its blocks give for each unseen document alone, against the 16-bit model's.

    With inputs=original each packed block is given what the 16-bit model's block was given.
    """
    model, dense = build(model_type), build(model_type)
    phase = training(tmp_path, model, replace(CONFIG, inputs=inputs), max_pass_tokens=50)
    reports = phase.run()
    unseen = phase._rows[: CONFIG.val_rows]
    targets = [layer_inputs_and_outputs(dense, row) for row in unseen]
    for index, report in enumerate(reports):
        mixed = copy.deepcopy(model)
        if inputs is BlockInputs.original:
            for before in range(index):
                mixed.model.layers[before] = dense.model.layers[before]
        outputs = [layer_inputs_and_outputs(mixed, row)[index][1] for row in unseen]
        errors = [
            ((ours - target[index][1]).square().sum(1) / target[index][1].square().sum(1)).double()
            for ours, target in zip(outputs, targets, strict=True)
        ]
        # float32, and an error is a difference of values ten times its size: sums in another order show at 1e-4
        assert torch.cat(errors).mean().item() == pytest.approx(report.error_after, rel=1e-3)


def test_the_whole_model_comes_nearer_than_by_rounding(tmp_path: Path) -> None:
    """Errors of blocks add up: what counts is the last one's output on documents that no step saw."""
    trained, nearest, dense = build(), build(), build()
    phase = training(tmp_path, trained)
    phase.run()
    for name, scheme in schemes().items():
        layer = nearest.get_submodule(name)
        nearest.set_submodule(name, QuantLinear(scheme.weight.quantize(layer.weight)))

    def error(model: nn.Module) -> float:
        pairs = [
            (layer_inputs_and_outputs(m, row)[-1][1] for m in (model, dense)) for row in phase._rows[: CONFIG.val_rows]
        ]
        return sum((ours - theirs).square().sum().item() for ours, theirs in pairs)

    assert error(trained) < 0.8 * error(nearest)  # measured: see the figures of each block, 0.6 to 0.7


def test_pass_size_is_not_part_of_the_result(tmp_path: Path) -> None:
    """Documents of a step go through in passes; attention stays inside each, and the gradient is that of the step."""
    config = replace(CONFIG, epochs=1, batch_size=18)  # one step: more of them drift apart by rounding to other codes
    one = training(tmp_path / "one", build(), config).run()[0]
    many = training(tmp_path / "many", build(), config, max_pass_tokens=1).run()[0]
    assert one.error_before == pytest.approx(many.error_before, rel=1e-4)  # float32 sums in another order
    # Adam's first step is lr times the sign of the gradient, and signs of gradients near 0 are the order's
    assert one.error_after == pytest.approx(many.error_after, rel=0.01) and one.error_after != one.error_before


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, nn.Module, list[BlockReport]]:
    """A phase that nobody stopped: its folder, model and reports."""
    folder, model = tmp_path_factory.mktemp("whole"), build()
    return folder, model, training(folder, model).run()


@pytest.mark.parametrize("finished", [1, NUM_LAYERS])
def test_a_stopped_phase_goes_on_bit_identical(tmp_path: Path, whole: tuple, finished: int) -> None:
    folder, expected_model, expected = whole
    for index in range(finished):
        shutil.copy(folder / f"block_{index:03d}.safetensors", tmp_path)
    (tmp_path / f"block_{finished:03d}.partial").write_bytes(b"half of it")
    model = build()
    reports = training(tmp_path, model).run()
    assert files(tmp_path) == files(folder)
    assert [replace(r, seconds=0.0) for r in reports] == [replace(r, seconds=0.0) for r in expected]
    for name in schemes():
        ours, theirs = (m.get_submodule(name).quantized.tensors for m in (model, expected_model))
        assert all(torch.equal(ours[key], theirs[key]) for key in ("packed", "scales"))


def build_with_biases() -> nn.Module:
    model, generator = build("qwen2"), torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def test_biases_stay(tmp_path: Path) -> None:
    """A file of a block holds codes: with another bias a run that goes on would compute another function."""
    model, resumed = build_with_biases(), build_with_biases()
    biases = {name: bias.clone() for name, bias in model.named_parameters() if name.endswith("bias")}
    training(tmp_path, model).run()
    training(tmp_path, resumed).run()
    for name, bias in biases.items():
        assert torch.equal(model.get_parameter(name), bias) and torch.equal(resumed.get_parameter(name), bias), name
    assert len(biases) == 3 * NUM_LAYERS


def test_streams_on_disk_change_nothing_and_go(tmp_path: Path, whole: tuple) -> None:
    training(tmp_path, build(), replace(CONFIG, activations_mb=0)).run()
    assert files(tmp_path) == files(whole[0])
    assert not list(tmp_path.glob("*.bin"))


def test_a_block_that_does_not_gain_keeps_its_nearest_codes(tmp_path: Path) -> None:
    model, dense = build(), build()
    reports = training(tmp_path, model, replace(CONFIG, weight_lr=0.9, scale_lr=0.9)).run()
    assert not any(report.accepted for report in reports)
    for name, scheme in schemes().items():
        nearest = scheme.weight.quantize(dense.get_submodule(name).weight)
        found = model.get_submodule(name).quantized
        assert all(torch.equal(found.tensors[key], nearest.tensors[key]) for key in ("packed", "scales"))


def test_layers_without_a_scheme_stay_dense(tmp_path: Path) -> None:
    some = {name: scheme for name, scheme in schemes().items() if ".0." not in name and "down_proj" not in name}
    model, dense = build(), build()
    reports = training(tmp_path, model, schemes=some).run()
    assert reports[0].error_before == reports[0].error_after == 0 and not reports[0].accepted
    for name in set(schemes()) - set(some):
        assert torch.equal(model.get_submodule(name).weight, dense.get_submodule(name).weight)


@pytest.mark.parametrize("what", ["weights", "rows", "settings", "schemes"])
def test_blocks_of_another_phase_are_refused(whole: tuple, what: str) -> None:
    model, config, changes = build(), CONFIG, {}
    match what:
        case "weights":
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        case "rows":
            changes["rows"] = ROWS[1:]
        case "settings":
            config = replace(CONFIG, weight_lr=2e-3)
        case "schemes":
            changes["schemes"] = schemes(Scheme.named("int4", learn_scales=True, divisor=8))
    with pytest.raises(UserError, match=r"block_000.safetensors was trained from other weights, other rows"):
        training(whole[0], model, config, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ROWS[:6]}, "blockwise.val_rows=6 leaves none of the 6 training rows"),
        ({"schemes": {"lm_head": INT4}}, "lm_head lies in no block"),
        ({"schemes": {"model.layers.0.mlp.up_proj": Scheme.named("int8")}}, "up_proj: .* inputs stay in 16 bits"),
        ({"schemes": {"model.layers.0.mlp.up_proj": Scheme.named("mxfp4")}}, "up_proj: .* inputs stay in 16 bits"),
    ],
    ids=["rows", "head", "activations", "floats"],
)
def test_what_is_not_trained_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        training(tmp_path, build(), **changes)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=250, n_embd=64, n_layer=1, n_head=4)
    with pytest.raises(UserError, match="model_type=gpt2 is left to transformers"):
        training(tmp_path, AutoModelForCausalLM.from_config(config).requires_grad_(False), schemes={})


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = build()
    model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj.weight holds inf or nan"):
        training(tmp_path, model).run()


# ---- parts


def test_errors_are_those_of_their_formulas() -> None:
    output, target = torch.randn(7, 16), torch.randn(7, 16)
    difference = (output.double() - target.double()).square()
    mse, relative = (reconstruction_error(output, target, loss).item() for loss in BlockLoss)
    assert mse == pytest.approx(difference.mean(1).sum().item(), rel=1e-5)
    assert relative == pytest.approx((difference.sum(1) / target.double().square().sum(1)).sum().item(), rel=1e-5)
    assert reconstruction_error(torch.ones(1, 4), torch.zeros(1, 4), BlockLoss.relative).isfinite()


def test_rates_fall_to_a_twentieth_along_a_cosine() -> None:
    assert [lr_share(step, 10) for step in (0, 5, 10)] == pytest.approx([1, 0.525, 0.05])


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_stream_gives_documents_and_takes_what_a_block_makes_of_them(tmp_path: Path, on_disk: bool) -> None:
    embedding, device = nn.Embedding(20, 4), torch.device("cpu")
    stream = ActivationStream([2, 3, 1], 4, torch.float32, path=tmp_path / "x.bin" if on_disk else None)
    stream.fill(embedding, [[1, 2], [3, 4, 5], [6]])
    assert torch.equal(stream.take([2, 0], device), embedding(torch.tensor([6, 1, 2])))
    assert stream.cu_seqlens([2, 0], device).tolist() == [0, 1, 3]
    assert list(stream.passes([0, 1, 2], 3)) == [[0], [1], [2]] and list(stream.passes([2, 0, 1], 3)) == [[2, 0], [1]]
    seen: list[list[int]] = []

    def block(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        seen.append(cu_seqlens.tolist())
        return x + len(seen)

    stream.advance(block, device, max_tokens=5)
    assert seen == [[0, 2, 5], [0, 1]]
    torch.testing.assert_close(stream.values[-1], embedding.weight[6] + 2, rtol=0, atol=0)
