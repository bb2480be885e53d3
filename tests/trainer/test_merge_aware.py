"""Layers that round W + s B A: the codes that ship, the gradients of the dense formula, and what cannot be rounded."""

import math

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.trainer.test_fused_decoder import CU_SEQLENS, build, by_transformers, documents
from trainer.config.errors import UserError
from trainer.config.lora import LoraConfig
from trainer.config.optim import OptimConfig
from trainer.fused_decoder import FusedDecoder
from trainer.kernels.lora_linear import Adapter
from trainer.kernels.merged_weight import merge_rows_reference
from trainer.lora import LoraLinear
from trainer.optim import parameter_groups
from trainer.qat import merged_codes
from trainer.qat.fake_quant import FakeQuantLinear
from trainer.qat.lora import attach_merge_aware, rounding_layers
from trainer.qat.merge_aware import MergeAwareLinear
from trainer.qat.merged_codes import MergedWeight
from trainer.qat.packed_linear import pack_layer
from trainer.qat.prepare import set_enabled
from trainer.qat.scheme import Scheme

SCHEMES = {
    "int4": Scheme.named("int4"),
    "int4 asymmetric": Scheme.named("int4", symmetric=False),
    "int4 clamped": Scheme.named("int4", divisor=8.0),
    "int4 in bfloat16": Scheme.named("int4", scale_dtype="bfloat16"),
    "int4 learned": Scheme.named("int4", learn_scales=True),
    "int4 asymmetric learned": Scheme.named("int4", symmetric=False, learn_scales=True),
    "int4_int8": Scheme.named("int4_int8"),
    "int4_int8 in floats": Scheme.named("int4_int8", integer=False),
    "int8": Scheme.named("int8"),
    "int8 learned": Scheme.named("int8", learn_scales=True),
    "nf4": Scheme.named("nf4"),
    "nf4 plain scales": Scheme.named("nf4", double_quant=False),
    "nf4 in blocks of 256": Scheme.named("nf4", block_size=256),
    "fp8": Scheme.named("fp8"),
    "mxfp4": Scheme.named("mxfp4"),
    "nvfp4": Scheme.named("nvfp4"),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


class Small(nn.Module):
    """Two layers, with what PEFT asks of a model. Rows of 96 end inside of a block of 64."""

    config = None

    def __init__(self, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.head = nn.Linear(96, 40, bias=bias, dtype=dtype), nn.Linear(32, 8, dtype=dtype)
        self.norm = nn.RMSNorm(40)  # PEFT asks the first parameter for the device
        self.requires_grad_(False)

    def prepare_inputs_for_generation(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def attached(scheme: Scheme, *, dtype: torch.dtype = torch.float32, **config: object) -> tuple[PeftModel, nn.Module]:
    settings = {"rank": 4, "target_modules": ["proj"], **config}
    model = attach_merge_aware(Small(dtype), LoraConfig(**settings), {"proj": scheme}, seed=0)
    layer = model.get_base_model().proj
    nn.init.normal_(layer.lora_B["default"].weight, std=0.02, generator=torch.Generator().manual_seed(1))
    return model, layer


def merged_of(layer: MergeAwareLinear) -> Tensor:
    """float32(W) + (s B) A, whole, by the reference of its sum."""
    weight, adapter = layer.get_base_layer().weight.detach(), layer.adapter
    out = torch.empty(weight.shape)
    merge_rows_reference(weight, adapter.lora_A.detach(), adapter.lora_B.detach() * adapter.scaling, out)
    return out


def assert_same_codes(a: object, b: object) -> None:
    assert a.shape == b.shape and a.quantizer == b.quantizer and a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        other = b.tensors[name]
        assert (tensor is None) == (other is None), name
        if tensor is not None:
            assert torch.equal(
                tensor.view(torch.uint8) if tensor.dim() else tensor, other.view(torch.uint8) if other.dim() else other
            ), name


# ---- codes


@every_scheme
@pytest.mark.parametrize("chunk_weights", [1, 96 * 7, 1 << 20])
def test_codes_are_those_of_the_whole_merged_weight(
    scheme: Scheme, chunk_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the chunks: a row, seven rows where blocks end inside of rows, all of it."""
    monkeypatch.setattr(merged_codes, "CHUNK_WEIGHTS", chunk_weights)
    for dtype in (torch.float32, torch.bfloat16):
        _, layer = attached(scheme, dtype=dtype)
        if scheme.learn_scales:
            function, parameters = layer._weight_function()
            want = function.codes(merged_of(layer), *parameters)
        else:
            want = scheme.weight.quantize(merged_of(layer))
        assert_same_codes(layer.quantized, want)


@pytest.mark.parametrize("quantizer", [Scheme.named("int4").weight, Scheme.named("nf4", block_size=4096).weight])
def test_the_merged_weight_exists_a_few_rows_at_a_time(quantizer: object) -> None:
    merged = MergedWeight.of(torch.zeros(3000, 1056), None)  # 3.2 M weights; blocks of 4096 end after 128 rows
    chunks = [(rows, chunk.numel()) for rows, chunk in merged.chunks(quantizer)]
    assert [rows.start for rows, _ in chunks] == [0, *(rows.stop for rows, _ in chunks[:-1])]
    assert chunks[-1][0].stop == 3000 and all(rows.stop * 1056 % quantizer.span(1056) == 0 for rows, _ in chunks[:-1])
    assert max(numel for _, numel in chunks) <= 1.1 * merged_codes.CHUNK_WEIGHTS  # up to 127 rows more, for a block


def test_threads_do_not_change_codes() -> None:
    scheme, threads = Scheme.named("nf4"), torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    weight, lora_A = torch.randn(300, 576, generator=generator).bfloat16(), torch.randn(16, 576, generator=generator)
    merged = MergedWeight.of(weight, Adapter(lora_A, 0.01 * torch.randn(300, 16, generator=generator), 2.0))
    function = merged_codes.FromWeight(scheme.weight)
    one = merged_codes.merged_codes(merged, function)
    try:
        torch.set_num_threads(3)
        assert_same_codes(merged_codes.merged_codes(merged, function), one)
    finally:
        torch.set_num_threads(threads)


def test_codes_are_kept_until_a_factor_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is written without autograd noticing, as optimizers in C do."""
    _, layer = attached(Scheme.named("int4"))
    first = layer.quantized
    assert layer.quantized is first
    layer.lora_B["default"].weight.data.numpy()[0] += 0.5
    second = layer.quantized
    assert second is not first and not torch.equal(second.packed, first.packed)
    layer.lora_A["default"].weight.data.numpy()[0] += 0.5
    assert layer.quantized is not second
    assert_same_codes(layer.quantized, layer.scheme.weight.quantize(merged_of(layer)))


def test_learned_scales_count_as_factors() -> None:
    _, layer = attached(SCHEMES["int4 learned"])
    first = layer.quantized
    layer.lora_scales.data.numpy()[0] *= 2
    assert torch.equal(layer.quantized.tensors["scales"][0], 2 * first.tensors["scales"][0])


@torch.no_grad()
@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_that_of_the_layer_that_ships(scheme: Scheme, dtype: torch.dtype) -> None:
    """Bit for bit, with few rows and with many."""
    _, layer = attached(scheme, dtype=dtype)
    shipped = pack_layer(scheme, layer.quantized, layer.get_base_layer().bias)
    for rows in (3, 70):
        x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert torch.equal(layer(x), shipped(x))


@torch.no_grad()
def test_without_an_adapter_it_rounds_the_weight() -> None:
    model, layer = attached(Scheme.named("int4"))
    with model.disable_adapter():
        assert_same_codes(layer.quantized, layer.scheme.weight.quantize(layer.get_base_layer().weight))


@torch.no_grad()
def test_disabled_it_is_plain_lora() -> None:
    model, layer = attached(Scheme.named("int4"))
    x = torch.randn(5, 96)
    set_enabled(model, False)
    assert torch.equal(layer(x), LoraLinear.forward(layer, x)) and layer.fusable
    with model.disable_adapter():
        base = layer.get_base_layer()
        assert torch.equal(layer(x), linear(x, base.weight, base.bias))
    set_enabled(model, True)
    assert not layer.fusable and not torch.equal(layer(x), LoraLinear.forward(layer, x))


# ---- gradients


def dense_gradients(layer: MergeAwareLinear, x: Tensor, weight_of_y: Tensor) -> dict[str, Tensor]:
    """In float64 by autograd: straight-through, and LSQ with its gradient scale, for a y of the codes' values."""
    scheme, codes = layer.scheme, layer.quantized
    A, B = (factor.detach().double().requires_grad_() for factor in layer.adapter[:2])
    x64 = x.detach().double().requires_grad_()
    merged = layer.get_base_layer().weight.detach().double() + layer.adapter.scaling * B @ A
    values, size = codes.dequantize(torch.float32).double(), codes.shape[1]
    named = {"lora_A": A, "lora_B": B, "x": x64}
    if scheme.weight_name in ("int4", "int8"):
        scales = codes.tensors["scales"].double()
        zeros = codes.tensors.get("zeros")
        zeros = torch.zeros_like(scales) if zeros is None else zeros.double()
        lowest, highest = {"int8": (-127, 127)}.get(
            scheme.weight_name, (-8, 7) if codes.tensors.get("zeros") is None else (0, 15)
        )
        groups = merged.view(*scales.shape, -1)
        if scheme.learn_scales:
            group = size // scales.shape[1]
            factor, zero_factor = 1 / math.sqrt(group * highest), 1 / math.sqrt(group * 15)
            scales, zeros = scales.requires_grad_(), zeros.requires_grad_()
            named |= {"scales": scales, "zeros": zeros}
            s, z = _scaled(scales, factor), _scaled(zeros, zero_factor)
        else:
            s, z = scales, zeros
        ratio = groups / s[..., None]
        code = _straight(ratio.detach().round(), ratio) + z[..., None]
        clamped = code.clamp(lowest, highest)
        rounded = ((clamped - z[..., None]) * s[..., None]).view(merged.shape)
    else:
        rounded = _straight(values, merged)
    torch.testing.assert_close(rounded.detach(), values, rtol=1e-6, atol=1e-8)  # the formula is that of the codes
    inputs = x64
    if scheme.activations is not None:
        grid = scheme.activations.grid
        on_grid = grid.fake_quantize(x) if hasattr(grid, "format") else _int8(x)
        inputs = _straight(on_grid.double(), x64)
    bias = layer.get_base_layer().bias
    y = linear(inputs, rounded, bias.double())
    (y * weight_of_y.double()).sum().backward()
    return {name: tensor.grad for name, tensor in named.items()}


def _straight(value: Tensor, through: Tensor) -> Tensor:
    return value.detach() + (through - through.detach())


def _scaled(parameter: Tensor, factor: float) -> Tensor:
    """The parameter, whose gradient is multiplied by factor."""
    return parameter.detach() + factor * (parameter - parameter.detach())


def _int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@every_scheme
def test_gradients_are_those_of_the_dense_formula(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_codes, "CHUNK_WEIGHTS", 96 * 16)  # three chunks
    _, layer = attached(scheme)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(23, 96, generator=generator).requires_grad_()
    weight_of_y = torch.randn(23, 40, generator=generator)
    want = dense_gradients(layer, x, weight_of_y)
    (layer(x) * weight_of_y).sum().backward()
    got = {"lora_A": layer.lora_A["default"].weight.grad, "lora_B": layer.lora_B["default"].weight.grad, "x": x.grad}
    if scheme.learn_scales:
        got["scales"] = layer.lora_scales.grad
        if layer.lora_zeros is None:
            del want["zeros"]
        else:
            got["zeros"] = layer.lora_zeros.grad
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        # float32 sums of some hundred products of order 1: 1e-5 of the largest
        torch.testing.assert_close(gradient.double(), want[name], rtol=1e-4, atol=1e-5 * want[name].abs().max().item())


def test_clamped_codes_have_no_gradient() -> None:
    """The one weight of a group that the divisor 8 clamps (its largest, if positive) is out of reach of the factors."""
    _, layer = attached(Scheme.named("int4", divisor=8.0), rank=1)
    with torch.no_grad():
        layer.get_base_layer().weight.fill_(0.01)
        layer.get_base_layer().weight[:, ::32] = 1.0  # 1 / (1 / 8) = 8 is not a code
        layer.lora_A["default"].weight.fill_(1.0)
        layer.lora_B["default"].weight.zero_()
    x = torch.zeros(1, 96)
    x[0, 0] = 1.0
    layer(x).sum().backward()
    assert layer.lora_B["default"].weight.grad.abs().max() == 0
    layer.lora_B["default"].weight.grad = None
    layer(x.roll(1, 1)).sum().backward()
    assert (layer.lora_B["default"].weight.grad == layer.adapter.scaling).all()


def test_learned_scales_are_no_matrix_of_weights() -> None:
    """No decay pulls scales to 0, and zero points move in codes: optim.CODE_LR a step, ten times this rate."""
    model, _ = attached(Scheme.named("int4", symmetric=False, learn_scales=True))
    names = {id(parameter): name.rpartition(".")[2] for name, parameter in model.named_parameters()}
    settings = {
        names[id(parameter)]: (group["weight_decay"], round(group["lr_scale"], 6))
        for group in parameter_groups(model, OptimConfig(lr=1e-3, weight_decay=0.1))
        for parameter in group["params"]
    }
    assert settings == {"weight": (0.1, 1), "lora_scales": (0, 1), "lora_zeros": (0, 10)}


# ---- a model


def test_layers_without_an_adapter_round_their_weights() -> None:
    scheme = Scheme.named("int4")
    model = attach_merge_aware(
        Small(torch.float32), LoraConfig(rank=4, target_modules=["proj"]), {"proj": scheme, "head": scheme}, seed=0
    )
    layers = dict(rounding_layers(model.get_base_model()))
    assert {name: type(layer) for name, layer in layers.items()} == {"proj": MergeAwareLinear, "head": FakeQuantLinear}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in trained) and len(trained) == 2


def test_adapted_layers_without_a_scheme_stay_lora() -> None:
    config = LoraConfig(rank=4, target_modules=["proj", "head"])
    model = attach_merge_aware(Small(torch.float32), config, {"proj": Scheme.named("int4")}, seed=0).get_base_model()
    assert type(model.proj) is MergeAwareLinear and type(model.head) is LoraLinear


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme.named("int4", rounding="soft"), "proj: qat.rounding=soft draws or trains a direction for each weight"),
        (Scheme.named("int8_static"), "proj: qat.scheme=int8_static observes ranges of inputs"),
    ],
)
def test_what_factors_cannot_train_is_refused(scheme: Scheme, message: str) -> None:
    with pytest.raises(UserError, match=message):
        attached(scheme)


def test_a_trained_copy_has_no_codes() -> None:
    scheme = Scheme.named("int4")
    config = LoraConfig(rank=4, target_modules=["proj"], modules_to_save=["head"])
    with pytest.raises(UserError, match=r"codes to \['head'\], and lora.modules_to_save"):
        attach_merge_aware(Small(torch.float32), config, {"proj": scheme, "head": scheme}, seed=0)


def test_two_active_adapters_have_no_one_merged_weight() -> None:
    model, layer = attached(Scheme.named("int4"))
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="2 active adapters"):
        layer(torch.randn(2, 96))


# ---- in whole layers


@pytest.mark.parametrize("left_out", ["", "k_proj"], ids=["all layers", "k_proj in 16 bits"])
def test_the_fused_decoder_computes_what_the_modules_compute(left_out: str) -> None:
    """Values and gradients; with k_proj in 16 bits q, k and v are no single product."""
    model = build("llama")
    schemes = {
        name: Scheme.named("int4")
        for name, layer in model.model.named_modules(prefix="model")
        if type(layer) is nn.Linear and not (left_out and name.endswith(left_out))
    }
    peft_model = attach_merge_aware(model, LoraConfig(rank=4), schemes, seed=0)
    generator = torch.Generator().manual_seed(1)
    factors = [parameter for parameter in peft_model.parameters() if parameter.requires_grad]
    for parameter in factors:
        nn.init.normal_(parameter, std=0.02, generator=generator)
    ids, gradients = documents(), []
    decoder = FusedDecoder(peft_model.get_base_model())
    for hidden_states in (decoder(torch.cat(ids), CU_SEQLENS), by_transformers(peft_model.get_base_model(), ids)):
        hidden_states.square().sum().backward()
        gradients.append([hidden_states.detach(), *(parameter.grad for parameter in factors)])
        peft_model.zero_grad()
    for ours, theirs in zip(*gradients, strict=True):
        # float32, two layers of sums in another order; gradients of factors are sums over 73 tokens
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())
