"""FakeQuantLinear: the function that will be served, its gradients, and what autograd keeps."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint

from trainer.kernels.fake_quant import Grid, fake_quant
from trainer.kernels.int4 import Int4Weight, int4_dequantize, int4_quantize
from trainer.kernels.int8 import quantize_activations
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.linear import QuantLinear, weights_sha256
from trainer.qat.fake_quant import (
    FakeQuantEmbedding,
    FakeQuantLinear,
    commit_observers,
    fake_quant_layers,
    fake_quantize_embeddings,
    fake_quantize_linears,
    head_operands,
    set_rounding,
)
from trainer.qat.fake_weight import MIN_SCALE, Learned
from trainer.qat.packed_linear import PackedLinear
from trainer.qat.rounding import soft_rounding_penalty
from trainer.qat.scheme import NAMES, Scheme
from trainer.quantizer import Quantizer

SCHEMES = {
    **{name: Scheme.named(name) for name in NAMES},
    "int4_clamped": Scheme.named("int4", divisor=8.0),
    "int4_row": Scheme.named("int4", group_size=-1),
    "int4_g192": Scheme.named("int4", group_size=192, scale_dtype="bfloat16"),
    "int4_asymmetric": Scheme.named("int4", group_size=64, symmetric=False),
    "int4_int8_asymmetric": Scheme.named("int4_int8", symmetric=False),
    "int4_int8_floats": Scheme.named("int4_int8", integer=False),
    "int8_static_floats": Scheme.named("int8_static", integer=False),
    "nf4_plain": Scheme.named("nf4", double_quant=False),
    "int4_learned": Scheme.named("int4", learn_scales=True),
    "int4_learned_mse": Scheme.named("int4", learn_scales=True, scale_init="mse", scale_dtype="bfloat16"),
    "int4_learned_zeros": Scheme.named("int4", symmetric=False, learn_scales=True),
    "int4_int8_learned": Scheme.named("int4_int8", learn_scales=True),
    "int8_static_learned": Scheme.named("int8_static", learn_scales=True),
    "int4_stochastic": Scheme.named("int4", rounding="stochastic"),
    "int8_stochastic": Scheme.named("int8", rounding="stochastic", integer=False),
    "int4_soft": Scheme.named("int4", rounding="soft"),
    "int4_soft_asymmetric": Scheme.named("int4", symmetric=False, rounding="soft"),
    "int8_soft": Scheme.named("int8", rounding="soft"),
}
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
IN, OUT = 192, 40


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return SCHEMES[request.param]


def case(dtype: torch.dtype, weight_dtype: torch.dtype | None = None, bias: bool = True) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(IN, OUT, bias=bias).to(weight_dtype or dtype)
    return torch.randn(2, 9, IN).to(dtype).requires_grad_(), layer


def fake_quantized(layer: nn.Linear, scheme: Scheme) -> FakeQuantLinear:
    """With parameters off their start, so that what is trained beside the weight counts."""
    module = FakeQuantLinear(layer.weight, layer.bias, scheme)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (module.scales, module.zeros):
            if parameter is not None:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator) - 0.15)
        if module.soft_rounding is not None:
            module.soft_rounding.copy_(torch.randn(layer.weight.shape, generator=generator))
        if module.input_scale is not None:
            module.input_scale.fill_(0.02)  # clamps what is beyond 2.54: some of the normal values
            module.observing = False
    return module


def rounded_input(x: Tensor, module: FakeQuantLinear) -> Tensor:
    """By the functions that define the grids of inputs."""
    activations = module.scheme.activations
    if activations is None:
        return x
    if activations.grid != Grid.int8():
        rows = x.reshape(-1, x.shape[-1])
        return activations.grid.quantize(rows).dequantize(x.dtype).view(x.shape)
    codes, scales = quantize_activations(x, scale=module.input_scale)
    return (codes.float() * scales[..., None]).to(x.dtype)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_forward_multiplies_what_the_codes_stand_for(
    dtype: torch.dtype, weight_dtype: torch.dtype, training: bool, scheme: Scheme
) -> None:
    """Bit for bit: `quantized` is the weight of the last forward, whatever chose its codes."""
    x, layer = case(dtype, weight_dtype)
    module = fake_quantized(layer, scheme).train(training)
    if module.soft_rounding is not None:
        module.rounding_amount = 0.0  # hard: soft values are on no grid
    got, quantized = module(x.detach()), module.quantized
    bias = layer.bias.detach().to(dtype)
    if scheme.integer:
        multiply = int4_linear_dynamic if isinstance(quantized.weight, Int4Weight) else int8_linear_dynamic
        want = multiply(x.detach(), quantized.weight, x_scale=module.input_scale) + bias
    else:
        weight = quantized.dequantize(weight_dtype).to(dtype)
        want = linear(rounded_input(x.detach(), module), weight, bias)
    assert torch.equal(got, want)
    assert torch.equal(got, module(x.detach()))  # and again: no state moved
    # A master copy that is rounded to the compute dtype once has the values of codes decoded to that dtype.
    assert torch.equal(quantized.dequantize(weight_dtype).to(dtype), quantized.dequantize(dtype)) or (
        weight_dtype == torch.float32
    )


def test_codes_of_the_plain_schemes_are_the_quantizers(scheme: Scheme) -> None:
    if scheme.learn_scales or scheme.rounding != "nearest":
        return
    _, layer = case(torch.bfloat16)
    got, want = fake_quantized(layer, scheme).quantized, scheme.weight.quantize(layer.weight.detach())
    assert all(torch.equal(*pair) for pair in zip(_bytes(got), _bytes(want), strict=True))
    assert got.quantizer == scheme.weight and got.shape == (OUT, IN)


def _bytes(quantized) -> list[Tensor]:
    return [tensor.reshape(-1).view(torch.uint8) for tensor in quantized.tensors.values() if tensor is not None]


def test_learned_scales_start_as_the_quantizers() -> None:
    _, layer = case(torch.float32)
    for symmetric in (True, False):
        options = {"symmetric": symmetric}
        learned = FakeQuantLinear(layer.weight, None, Scheme.named("int4", learn_scales=True, **options)).quantized
        plain = Scheme.named("int4", **options).weight.quantize(layer.weight.detach())
        assert all(torch.equal(*pair) for pair in zip(_bytes(learned), _bytes(plain), strict=True))


def test_mse_start_has_the_smallest_error_of_its_candidates() -> None:
    _, layer = case(torch.float32)
    weight = layer.weight.detach()
    minmax, mse = (
        FakeQuantLinear(layer.weight, None, Scheme.named("int4", learn_scales=True, scale_init=how))
        for how in ("minmax", "mse")
    )
    errors = [(m.quantized.dequantize(torch.float32) - weight).view(OUT, -1, 32).square().sum(2) for m in (minmax, mse)]
    assert (errors[1] <= errors[0]).all()
    # A uniform weight gains little; that some groups gain shows that the search moves at all.
    assert errors[1].sum() < 0.99 * errors[0].sum()
    by_hand = minmax.scales.detach()[3, 2] * 0.9
    codes = (weight[3, 64:96] / by_hand).round().clamp(-8, 7)
    assert errors[1][3, 2] <= (codes * by_hand - weight[3, 64:96]).square().sum() * (1 + 1e-6)


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_disabled_is_the_plain_layer(dtype: torch.dtype, weight_dtype: torch.dtype, scheme: Scheme) -> None:
    x, layer = case(dtype, weight_dtype)
    module = fake_quantized(layer, scheme)
    module.enabled = False
    want = linear(x, layer.weight.to(dtype), layer.bias.to(dtype))
    assert torch.equal(module(x), want)
    assert torch.equal(module.multiplied_weight(dtype), layer.weight.to(dtype))


def composed(x: Tensor, layer: nn.Linear, scheme: Scheme) -> Tensor:
    """INT4 and INT8 through autograd of each step."""
    grid = Grid.int8()
    if scheme.weight.codebook == "int4":
        divisor = {} if scheme.weight.divisor is None else {"divisor": scheme.weight.divisor}
        grid = Grid.int4(group_size=scheme.weight.group_size, symmetric=scheme.weight.symmetric, **divisor)
    x = x if scheme.activations is None else fake_quant(x, Grid.int8())
    return linear(x, fake_quant(layer.weight, grid).to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("name", ["int4", "int4_clamped", "int4_asymmetric", "int4_int8_floats"])
def test_gradients_are_those_of_the_composition(
    dtype: torch.dtype, weight_dtype: torch.dtype, bias: bool, name: str
) -> None:
    x, layer = case(dtype, weight_dtype, bias)
    leaves = [x, *layer.parameters()]
    got, want = FakeQuantLinear(layer.weight, layer.bias, SCHEMES[name])(x), composed(x, layer, SCHEMES[name])
    assert torch.equal(got, want)
    grad = torch.randn_like(want)
    ours, theirs = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad)
    for a, b in zip(ours, theirs, strict=True):
        # The same products; torch may take another order of the sum over 18 rows or 40 outputs, each term near 1.
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert a.count_nonzero() == b.count_nonzero()


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def formula(module: FakeQuantLinear, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """y and its float64 leaves, by the papers' formulas and torch's autograd; scales as parameters."""
    leaves = {"x": x.detach().double().requires_grad_()}
    leaves |= {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    scheme, low, high = module.scheme, -8, 7
    if scheme.weight.codebook == "int8":
        low, high = -127, 127
    elif not scheme.weight.symmetric:
        low, high = 0, 15
    zeros = _Round.apply(leaves["zeros"])[..., None] if "zeros" in leaves else 0
    scales = leaves["scales"][..., None]
    codes = (_Round.apply(leaves["weight"].view(*scales.shape[:2], -1) / scales) + zeros).clamp(low, high)
    weight = ((codes - zeros) * scales).view(leaves["weight"].shape)
    inputs = leaves["x"]
    if "input_scale" in leaves:
        inputs = _Round.apply(inputs / leaves["input_scale"]).clamp(-127, 127) * leaves["input_scale"]
    return inputs.flatten(0, 1) @ weight.T + leaves["bias"], leaves


@pytest.mark.parametrize("name", ["int4_learned", "int4_learned_zeros", "int8_static_learned"])
def test_learned_gradients_against_float64(name: str) -> None:
    """LSQ: a scale's gradient is autograd's of the formula over sqrt(values that share it * largest code)."""
    x, layer = case(torch.float32)
    module = fake_quantized(layer, SCHEMES[name])
    if module.scales.shape[1] > 1:
        with torch.no_grad():
            module.scales.mul_(0.7)  # clamp some codes
    y, leaves = formula(module, x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True))
    module(x).backward(grad.float().view(2, 9, OUT))
    largest = 127 if module.scheme.weight.codebook == "int8" else 7 if module.zeros is None else 15
    span = IN // module.scales.shape[1]
    factors = {"scales": (span * largest) ** -0.5, "zeros": (span * largest) ** -0.5, "input_scale": (IN * 127) ** -0.5}
    got = {"x": x.grad, **{key: p.grad for key, p in module.named_parameters()}}
    assert {"int4_learned_zeros": "zeros", "int8_static_learned": "input_scale"}.get(name, "scales") in got
    for key, value in got.items():
        expected = want[key] * factors.get(key, 1.0)
        # float32 sums of up to 7,680 terms near 1 that partly cancel
        torch.testing.assert_close(value.double().view(expected.shape), expected, rtol=1e-4, atol=2e-4)
        assert value.count_nonzero() > 0, key


def test_scales_and_zero_points_at_their_bounds_move_only_back() -> None:
    function = Learned(Scheme.named("int4", symmetric=False).weight)
    weight, grad = torch.linspace(-1, 1, 64).view(2, 32), torch.ones(2, 32)
    scales, zeros = torch.tensor([[-0.5], [0.1]]), torch.tensor([[7.0], [-2.0]])
    values = function.values(weight, scales, zeros)
    assert values.isfinite().all() and values[0].abs().max() <= 15 * MIN_SCALE
    quantized = function.codes(weight, scales, zeros)
    assert quantized.tensors["scales"].tolist() == [[MIN_SCALE], [pytest.approx(0.1)]]
    assert quantized.tensors["zeros"].tolist() == [[7], [0]]
    for sign in (1, -1):
        _, grad_scales, grad_zeros = function.gradients(sign * grad, weight, scales, zeros)
        # A step goes against the gradient: a positive one would push the scale, or the zero point, further out.
        assert grad_scales[0] <= 0 and grad_zeros[1] <= 0


def test_soft_rounding_starts_at_the_weight_and_ends_on_its_grid() -> None:
    x, layer = case(torch.float32)
    module = FakeQuantLinear(layer.weight, layer.bias, Scheme.named("int4", rounding="soft"))
    assert not layer.weight.requires_grad and module.soft_rounding.requires_grad
    scales = Scheme.named("int4").weight.quantize(layer.weight.detach()).tensors["scales"].repeat_interleave(32, 1)
    # Fractions within 1e-4 of a code start just inside; a step of the scale is at most max |w| / 7.
    assert ((module.multiplied_weight(torch.float32) - layer.weight).abs() <= 2e-4 * scales + 1e-7).all()
    optimizer = torch.optim.Adam([module.soft_rounding], lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        soft_rounding_penalty([module.soft_rounding], 2.0).backward()
        optimizer.step()
    soft = module.multiplied_weight(torch.float32).detach()
    hard = module.quantized.dequantize(torch.float32)
    # 60 steps of 0.2 carry V past the clip of h at 2.4: nothing is left between codes.
    assert torch.equal(soft, hard)
    # Each weight went to a neighbouring code, up or down.
    assert ((hard - layer.weight).abs() <= scales * (1 + 1e-5)).all()


def test_soft_rounding_gradient_against_float64() -> None:
    x, layer = case(torch.float32)
    module = fake_quantized(layer, SCHEMES["int4_soft_asymmetric"])
    quantized = Scheme.named("int4", symmetric=False).weight.quantize(layer.weight.detach()).tensors
    scales, zeros = (quantized[name].double()[..., None] for name in ("scales", "zeros"))
    variables = module.soft_rounding.detach().double().requires_grad_()
    h = (torch.sigmoid(variables) * 1.2 - 0.1).clamp(0, 1).view(OUT, -1, 32)
    ratio = (layer.weight.detach().view(OUT, -1, 32) / scales.float()).double()
    weight = (((ratio.floor() + h + zeros).clamp(0, 15) - zeros) * scales).view(OUT, IN)
    y = x.detach().double().flatten(0, 1) @ weight.T + layer.bias.double()
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (want,) = torch.autograd.grad(y, variables, grad)
    got = module(x)
    torch.testing.assert_close(got.double().flatten(0, 1), y, rtol=1e-5, atol=1e-5)  # sums of 192 terms
    got.backward(grad.float().view(got.shape))
    torch.testing.assert_close(module.soft_rounding.grad.double(), want, rtol=1e-4, atol=1e-5)


def test_stochastic_rounding_is_a_function_of_the_step() -> None:
    _, layer = case(torch.float32)
    model = nn.ModuleDict({name: FakeQuantLinear(layer.weight, None, SCHEMES["int4_stochastic"]) for name in "ab"})
    other = FakeQuantLinear(nn.Parameter(layer.weight.detach().clone()), None, SCHEMES["int4_stochastic"])
    model["c"] = other

    def packed(step: int, amount: float = 1.0, seed: int = 0) -> list[Tensor]:
        set_rounding(model, amount=amount, seed=seed, step=step)
        return [layer.quantized.packed for _, layer in fake_quant_layers(model)]

    first = packed(3)
    assert torch.equal(first[0], first[1])  # one weight, one draw: tied tables stay tied
    assert not torch.equal(first[0], first[2])
    assert all(torch.equal(a, b) for a, b in zip(first, packed(3), strict=True))
    assert not torch.equal(first[0], packed(4)[0]) and not torch.equal(first[0], packed(3, seed=1)[0])
    nearest = Scheme.named("int4").weight.quantize(layer.weight.detach()).packed
    assert torch.equal(packed(3, amount=0.0)[0], nearest)
    packed(3)
    assert torch.equal(model["a"].eval().quantized.packed, nearest)


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    weight = nn.Parameter(torch.cat([torch.full((1, 31), 2.3), torch.tensor([[7.0]])], 1))  # scale 1
    module = FakeQuantLinear(weight, None, SCHEMES["int4_stochastic"])
    values = []
    for step in range(200):
        set_rounding(module, amount=1.0, seed=0, step=step)
        values.append(module.quantized.dequantize(torch.float32)[0, :31])
    values = torch.stack(values)
    assert set(values.unique().tolist()) == {2.0, 3.0}
    # 6,200 draws of a share of 0.3: a standard deviation of 0.006
    assert abs(values.mean().item() - 2.3) < 0.025


@pytest.mark.parametrize("name", ["int4", "int4_int8", "nf4", "fp8", "int4_learned"])
def test_autograd_keeps_the_input_and_the_weight_only(name: str) -> None:
    x, layer = case(torch.bfloat16)
    module = fake_quantized(layer, SCHEMES[name])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    allowed = {tensor.data_ptr() for tensor in (x, layer.weight, module.scales) if tensor is not None}
    assert {tensor.data_ptr() for tensor in kept} == allowed


@pytest.mark.parametrize("name", ["int4_int8", "nf4", "int4_learned_zeros"])
def test_frozen_parts_get_no_gradient(name: str) -> None:
    x, layer = case(torch.float32)
    module = fake_quantized(layer, SCHEMES[name])
    layer.weight.requires_grad_(False)
    module(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None and layer.bias.grad is not None
    assert (module.scales is None) or module.scales.grad is not None  # scales alone can be trained
    layer.weight.requires_grad_(True)
    module(x.detach()).sum().backward()
    assert layer.weight.grad is not None


def test_a_row_without_tokens(scheme: Scheme) -> None:
    _, layer = case(torch.float32)
    y = fake_quantized(layer, scheme)(torch.ones(0, IN, requires_grad=True))
    assert y.shape == (0, OUT)
    y.sum().backward()
    assert layer.weight.grad is None or torch.equal(layer.weight.grad, torch.zeros(OUT, IN))


@pytest.mark.parametrize("name", ["int4_int8", "int4_clamped", "int4_learned"])
def test_compiles_in_one_graph(name: str) -> None:
    x, layer = case(torch.float32)
    module = fake_quantized(layer, SCHEMES[name])
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    leaves = x, layer.weight, layer.bias
    ours, theirs = (torch.autograd.grad(f(x).square().sum(), leaves) for f in (compiled, module))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # the order of sums of 40 terms


# ---- static inputs


def test_static_ranges_are_observed_frozen_and_saved() -> None:
    x, layer = case(torch.float32)
    module = FakeQuantLinear(layer.weight, layer.bias, Scheme.named("int8_static", observer="minmax"))
    plain = linear(x, module.quantized.dequantize(torch.float32), layer.bias)
    assert torch.equal(module.eval()(x), plain)  # no range is known yet: inputs as they are
    module.train()(x)
    assert module.input_scale == x.detach().abs().max() / 127
    commit_observers(module)
    module(2 * x)
    commit_observers(module)
    assert module.input_scale == 2 * x.detach().abs().max() / 127
    module.observing = False
    module(4 * x)
    commit_observers(module)
    module.observing = True
    module.eval()(8 * x)  # evaluation shows nothing
    assert module.input_scale == 2 * x.detach().abs().max() / 127
    other = FakeQuantLinear(nn.Parameter(torch.zeros(OUT, IN)), nn.Parameter(torch.zeros(OUT)), module.scheme)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(x), module(x))


def test_passes_of_a_step_share_a_scale() -> None:
    """However a step is cut: the range of the steps before it, though the last pass shows a larger value."""
    x, layer = case(torch.float32)
    x = x.detach().flatten(0, 1) * torch.linspace(1, 9, 18)[:, None]
    outputs = []
    for num_passes in (1, len(x)):
        module = FakeQuantLinear(layer.weight, None, Scheme.named("int8_static", observer="minmax"))
        module(x / 5)
        commit_observers(module)
        outputs.append(torch.cat([module(part) for part in x.tensor_split(num_passes)]))
    assert torch.allclose(*outputs, atol=1e-4)  # the order of sums; one code is 0.01 and more


@pytest.mark.parametrize("enabled", [True, False])
def test_a_head_that_a_loss_multiplies_observes(enabled: bool) -> None:
    x, layer = case(torch.float32)
    head = FakeQuantLinear(layer.weight, None, Scheme.named("int8_static"))
    head.enabled = enabled
    head_operands(head, x)
    assert head.input_scale == x.detach().abs().max() / 127


@pytest.mark.parametrize("kind", ["minmax", "moving_average", "percentile", "mse"])
def test_neither_passes_nor_recomputation_change_a_step(kind: str) -> None:
    """Once a range is known: what a pass computes, and what the step leaves, however it was cut."""
    x, layer = case(torch.float32)
    outputs, states = [], []
    for parts in (x.split(len(x)), x.flip(0).split(1)):
        module = FakeQuantLinear(layer.weight, layer.bias, Scheme.named("int8_static", observer=kind))
        module(x / 2)
        commit_observers(module)
        passes = [checkpoint(module, part, use_reentrant=False) for part in parts]
        torch.cat(passes).sum().backward()  # recomputes each pass, which shows the observer nothing new
        commit_observers(module)
        outputs.append(torch.cat(passes) if len(parts) == 1 else torch.cat(passes).flip(0))
        states.append(module.state_dict())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)  # the order of sums of 40 terms
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    if kind in ("percentile", "mse"):
        assert states[0]["observer.counts"].sum() == 2 * x.numel()


def test_ranges_are_observed_before_the_start() -> None:
    x, layer = case(torch.float32)
    module = FakeQuantLinear(layer.weight, None, Scheme.named("int8_static"))
    module.enabled = False
    assert torch.equal(module(x), linear(x, layer.weight)) and module.input_scale > 0


def test_a_learned_input_scale_follows_the_observer_until_it_freezes() -> None:
    x, layer = case(torch.float32)
    module = FakeQuantLinear(layer.weight, None, Scheme.named("int8_static", learn_scales=True))
    assert isinstance(module.input_scale, nn.Parameter)
    module(x).sum().backward()
    assert module.input_scale == x.detach().abs().max() / 127
    with torch.no_grad():
        module.input_scale.mul_(0.5)
    module.observing = False
    assert torch.equal(module.input_scale * 254, x.detach().abs().max() / 127 * 127) or math.isclose(
        module.input_scale.item() * 254, x.detach().abs().max().item(), rel_tol=1e-6
    )


# ---- embeddings, heads, models


@pytest.mark.parametrize("name", ["int4", "nf4", "mxfp4", "int4_learned", "int4_soft"])
def test_embedding_gives_rows_of_its_codes(name: str) -> None:
    torch.manual_seed(0)
    table, ids = nn.Embedding(50, 64, padding_idx=3), torch.tensor([[1, 3, 7], [7, 7, 49]])
    layer = FakeQuantEmbedding(table.weight, SCHEMES[name], padding_idx=3).eval()
    assert torch.equal(layer(ids), layer.quantized.dequantize(torch.float32)[ids])
    layer.enabled = False
    assert torch.equal(layer(ids), table(ids))


def test_embedding_gradient_is_straight_through() -> None:
    torch.manual_seed(0)
    weight, ids = nn.Parameter(torch.randn(50, 64)), torch.tensor([[1, 3, 7], [7, 7, 49]])
    layer = FakeQuantEmbedding(weight, Scheme.named("int4"), padding_idx=3)
    grad = torch.randn(2, 3, 64)
    layer(ids).backward(grad)
    plain = weight.detach().clone().requires_grad_()
    embedding(ids, plain, 3).backward(grad)
    assert torch.equal(weight.grad, plain.grad) and weight.grad[3].count_nonzero() == 0


def tied_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(50, 64), "hidden": nn.Linear(64, 64), "head": nn.Linear(64, 50)})
    model["head"] = nn.Linear(64, 50, bias=False)
    model["head"].weight = model["embed"].weight
    return model


def test_tied_tables_are_one_function_of_one_weight() -> None:
    model, scheme = tied_model(), SCHEMES["int4_learned"]
    assert fake_quantize_linears(model, lambda name: scheme if name == "head" else None) == 1
    assert fake_quantize_embeddings(model, lambda name: scheme) == 1
    embed, head = model["embed"], model["head"]
    assert embed.scales is head.scales and embed.weight is head.weight
    assert len(list(model.parameters())) == 4  # table, its scales, and the layer between
    assert torch.equal(embed.quantized.packed, head.quantized.packed)
    hidden_states = torch.randn(5, 64)
    x, weight = head_operands(head, hidden_states)
    assert torch.equal(x @ weight.T, head(hidden_states))
    (x @ weight.T).sum().backward()
    assert head.weight.grad is not None and head.scales.grad is not None
    other = tied_model()
    fake_quantize_linears(other, lambda name: Scheme.named("int4") if name == "head" else None)
    with pytest.raises(ValueError, match="embed: embeddings of .*nf4.* are tied to a head of .*int4.*give both one"):
        fake_quantize_embeddings(other, lambda name: Scheme.named("nf4"))


def test_head_operands_round_the_input_too() -> None:
    x, layer = case(torch.float32, bias=False)
    head = FakeQuantLinear(layer.weight, None, Scheme.named("int8", integer=False))
    rows, weight = head_operands(head, x.flatten(0, 1))
    assert torch.equal(rows @ weight.T, head(x.flatten(0, 1)))
    rows, weight = head_operands(layer, x.flatten(0, 1))
    assert weight is layer.weight


def test_fake_quantize_linears_keeps_parameters_and_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 32)), nn.Linear(32, 7)).eval()
    parameters = dict(model.named_parameters())
    x = torch.randn(3, 32)
    dense = model(x)
    schemes = {"0": Scheme.named("int4"), "1.1": Scheme.named("int8")}
    assert fake_quantize_linears(model, schemes.get) == 2
    assert [type(module) for module in (model[0], model[1][1], model[2])] == [FakeQuantLinear] * 2 + [nn.Linear]
    assert [(name, layer.scheme) for name, layer in fake_quant_layers(model)] == list(schemes.items())
    assert all(after is parameters[name] for name, after in model.named_parameters())
    assert list(dict(model.named_parameters())) == list(parameters)
    assert not model[0].training and not torch.equal(model(x), dense)
    assert "group_size=32" in repr(model[0])


def test_the_layer_that_groups_do_not_fit_is_named() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    with pytest.raises(ValueError, match="1: quant.group_size=32 does not divide in_features=48; use one of -1"):
        fake_quantize_linears(model, lambda name: Scheme.named("int4"))
    with pytest.raises(ValueError, match="1: mxfp4 has blocks of 32 weights, which do not divide in_features=48"):
        fake_quantize_linears(model, lambda name: Scheme.named("mxfp4"))
    assert all(type(layer) is nn.Linear for layer in model)


def test_hashes_tell_functions_of_the_same_tensors_apart() -> None:
    _, layer = case(torch.float32)
    models = [nn.Sequential(nn.Linear(IN, OUT)) for _ in range(4)]
    for model in models:
        model[0].weight, model[0].bias = layer.weight, layer.bias
    for model, name in zip(models[1:], ("int4", "int4_row", "int4_int8"), strict=True):
        fake_quantize_linears(model, lambda _, name=name: SCHEMES[name])
    assert len({weights_sha256(model) for model in models}) == 4
    again = nn.Sequential(FakeQuantLinear(layer.weight, layer.bias, SCHEMES["int4_stochastic"]))
    assert weights_sha256(again) == weights_sha256(models[1])  # how it is trained is not what it computes


def test_hashes_tell_which_layer_rounds_its_inputs() -> None:
    """Equal codes in equal order: one of two layers rounds its inputs, or both do, by a token or by a layer."""
    codes = Quantizer("int8").quantize(torch.randn(IN, IN, generator=torch.Generator().manual_seed(0)))

    def layer(kind: str) -> nn.Module:
        if kind == "plain":
            return QuantLinear(codes)
        name, _, scale = kind.partition(" ")
        return PackedLinear(codes, Scheme.named(name), input_scale=torch.tensor(float(scale)) if scale else None)

    pairs = [("plain", "plain"), ("plain", "int8"), ("int8", "plain"), ("int8", "int8")]
    pairs += [("int8", "int8_static 0.1"), ("int8", "int8_static 0.2"), ("int8_static 0.2", "int8")]
    assert len({weights_sha256(nn.Sequential(*map(layer, pair))) for pair in pairs}) == len(pairs)
    weight = nn.Parameter(torch.zeros(IN, IN))
    live = [
        nn.Sequential(*(FakeQuantLinear(weight, None, Scheme.named(name)) for name in names))
        for names in (("int8", "int4"), ("int4", "int8"), ("int8", "int8"))
    ]
    assert len(set(map(weights_sha256, live))) == 3


def test_forward_against_the_int4_kernels() -> None:
    """Not through our own Quantizer: what a server computes that multiplies the dequantized weight, bit for bit."""
    x, layer = case(torch.bfloat16)
    got = FakeQuantLinear(layer.weight, layer.bias, Scheme.named("int4"))(x)
    weight = int4_dequantize(int4_quantize(layer.weight.detach(), group_size=32), dtype=torch.bfloat16)
    assert torch.equal(got, linear(x, weight, layer.bias))
