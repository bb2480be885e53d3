"""FakeQuantLinear: the function that will be served, its gradients, and what autograd keeps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.fake_quant import FakeQuantLinear, fake_quantize_linears
from trainer.kernels.fake_quant import Grid, fake_quant
from trainer.kernels.int4 import int4_dequantize, int4_quantize
from trainer.kernels.int8 import int8_quantize
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic

WEIGHT_GRIDS = {
    "int4": Grid.int4(group_size=32),
    "int4_clamped": Grid.int4(group_size=32, divisor=8.0),
    "int4_asymmetric": Grid.int4(group_size=64, symmetric=False),
    "int8": Grid.int8(),
}
ACTIVATION_GRIDS = {"weight_only": None, "int8_dynamic": Grid.int8()}


@pytest.fixture(params=WEIGHT_GRIDS)
def weight_grid(request: pytest.FixtureRequest) -> Grid:
    return WEIGHT_GRIDS[request.param]


@pytest.fixture(params=ACTIVATION_GRIDS)
def activation_grid(request: pytest.FixtureRequest) -> Grid | None:
    return ACTIVATION_GRIDS[request.param]


def case(dtype: torch.dtype, weight_dtype: torch.dtype | None = None, bias: bool = True) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(64, 40, bias=bias).to(weight_dtype or dtype)
    return torch.randn(2, 9, 64).to(dtype).requires_grad_(), layer


def fake_quantized(layer: nn.Linear, weight_grid: Grid, activation_grid: Grid | None) -> FakeQuantLinear:
    return FakeQuantLinear(layer.weight, layer.bias, weight_grid=weight_grid, activation_grid=activation_grid)


def composed(x: Tensor, layer: nn.Linear, weight_grid: Grid, activation_grid: Grid | None) -> Tensor:
    """The same through autograd of each step."""
    x = x if activation_grid is None else fake_quant(x, activation_grid)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return linear(x, fake_quant(layer.weight, weight_grid).to(x.dtype), bias)


def test_forward_is_the_quantized_layer() -> None:
    """What a server computes that multiplies the dequantized weight, bit for bit."""
    x, layer = case(torch.bfloat16)
    got = fake_quantized(layer, Grid.int4(group_size=32), None)(x)
    weight = int4_dequantize(int4_quantize(layer.weight.detach(), group_size=32), dtype=torch.bfloat16)
    assert torch.equal(got, linear(x, weight, layer.bias))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_gradients_are_those_of_the_composition(
    dtype: torch.dtype, weight_dtype: torch.dtype, bias: bool, weight_grid: Grid, activation_grid: Grid | None
) -> None:
    x, layer = case(dtype, weight_dtype, bias)
    leaves = [x, *layer.parameters()]
    got, want = fake_quantized(layer, weight_grid, activation_grid)(x), composed(x, layer, weight_grid, activation_grid)
    assert torch.equal(got, want)
    grad = torch.randn_like(want)
    ours, theirs = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad)
    for a, b in zip(ours, theirs, strict=True):
        # The same products; torch may take another order of the sum over 18 rows or 40 outputs, each term near 1.
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert a.count_nonzero() == b.count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_against_float64(dtype: torch.dtype) -> None:
    """With grids that clamp nothing: dx = g Q(W), dW = g^T Q(x), in float64 from the same rounded operands."""
    x, layer = case(dtype)
    grids = Grid.int4(group_size=32), Grid.int8()
    y = fake_quantized(layer, *grids)(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    rows, quantized = grad.double().flatten(0, 1), fake_quant(layer.weight.detach(), grids[0]).double()
    activations = fake_quant(x.detach(), grids[1]).double().flatten(0, 1)
    # Float32 sums of at most 40 terms near 1, then one rounding: 2^-9 of the value in bfloat16.
    rtol, atol = (2**-8, 1e-5) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(x.grad.double().flatten(0, 1), rows @ quantized, rtol=rtol, atol=atol)
    torch.testing.assert_close(layer.weight.grad.double(), rows.T @ activations, rtol=rtol, atol=atol)
    torch.testing.assert_close(layer.bias.grad.double(), rows.sum(0), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_forward_is_the_servers(dtype: torch.dtype, weight_grid: Grid) -> None:
    x, layer = case(dtype)
    weight = layer.weight.detach()
    if weight_grid.bits == 8:
        want = int8_linear_dynamic(x.detach(), int8_quantize(weight))
    else:
        options = {"divisor": weight_grid.divisor} if weight_grid.symmetric else {"symmetric": False}
        codes = int4_quantize(weight, group_size=weight_grid.group_size, **options)
        want = int4_linear_dynamic(x.detach(), codes)
    grids = {"weight_grid": weight_grid, "activation_grid": Grid.int8()}
    integer, floating = (FakeQuantLinear(layer.weight, layer.bias, **grids, integer=i) for i in (True, False))
    assert torch.equal(integer(x), want + layer.bias)
    # Operands rounded to the dtype of x, 2^-9 each of up to 64 terms near 0.1, of both signs.
    torch.testing.assert_close(integer(x), floating(x), rtol=0, atol=0.03 if dtype == torch.bfloat16 else 1e-5)
    leaves, grad = (x, layer.weight, layer.bias), torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(module(x), leaves, grad) for module in (integer, floating))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_integer_forward_needs_integer_activations() -> None:
    _, layer = case(torch.float32)
    with pytest.raises(ValueError, match=r"integer=True with activation_grid=None; use Grid.int8\(\)"):
        FakeQuantLinear(layer.weight, None, weight_grid=Grid.int4(), integer=True)


def test_autograd_keeps_the_input_and_the_weight_only(weight_grid: Grid, activation_grid: Grid | None) -> None:
    x, layer = case(torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fake_quantized(layer, weight_grid, activation_grid)(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), layer.weight.data_ptr()}


def test_frozen_parts_get_no_gradient() -> None:
    x, layer = case(torch.float32)
    layer.weight.requires_grad_(False)
    fake_quantized(layer, Grid.int4(), Grid.int8())(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None and layer.bias.grad is not None
    x, layer = case(torch.float32)
    fake_quantized(layer, Grid.int4(), Grid.int8())(x.detach()).sum().backward()
    assert layer.weight.grad is not None


def test_a_row_without_tokens() -> None:
    _, layer = case(torch.float32)
    y = fake_quantized(layer, Grid.int4(), Grid.int8())(torch.ones(0, 64, requires_grad=True))
    assert y.shape == (0, 40)
    y.sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(40, 64))


@pytest.mark.parametrize("integer", [False, True])
def test_compiles_in_one_graph(integer: bool) -> None:
    x, layer = case(torch.float32)
    grids = {"weight_grid": Grid.int4(divisor=7.5), "activation_grid": Grid.int8()}
    module = FakeQuantLinear(layer.weight, layer.bias, **grids, integer=integer)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    leaves = x, layer.weight, layer.bias
    ours, theirs = (torch.autograd.grad(f(x).square().sum(), leaves) for f in (compiled, module))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # the order of sums of 40 terms


def test_fake_quantize_linears_keeps_parameters_and_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 32)), nn.Linear(32, 7))
    parameters = dict(model.named_parameters())
    x = torch.randn(3, 32)
    dense = model(x)
    assert fake_quantize_linears(model, Grid.int4(group_size=32), Grid.int8(), skip={model[2]}) == 2
    assert [type(module) for module in (model[0], model[1][1], model[2])] == [FakeQuantLinear] * 2 + [nn.Linear]
    assert all(after is parameters[name] for name, after in model.named_parameters())
    assert list(dict(model.named_parameters())) == list(parameters)
    assert not torch.equal(model(x), dense)
    assert "group_size=32" in repr(model[0])


def test_the_layer_that_groups_do_not_fit_is_named() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    with pytest.raises(ValueError, match="1: group_size=64 .* in_features=48; use 48"):
        fake_quantize_linears(model, Grid.int4(group_size=64), skip=set())
    assert all(type(layer) is nn.Linear for layer in model)
