"""The fused projection against its formula in float64, and what it keeps between forward and backward."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from trainer.kernels import frozen_weight
from trainer.kernels.frozen_weight import FrozenWeight
from trainer.kernels.lora_linear import Adapter, lora_linear, lora_linear_reference
from trainer.quantizer import Quantizer

EPS = 1e-5
SIZES, RANKS, SCALINGS = (40, 24, 33), (4, 0, 7), (2.0, 0.0, 0.5)  # rank 0: a projection without an adapter
PROLOGUES = ["", "rms_norm", "swiglu"]


@dataclass
class Case:
    """Arguments of `lora_linear`, all of them with a gradient that can have one."""

    x: Tensor
    weights: list[FrozenWeight]
    adapters: list[Adapter | None]
    options: dict = field(default_factory=dict)

    def inputs(self) -> list[Tensor]:
        factors = [factor for adapter in self.adapters if adapter for factor in adapter[:2]]
        others = [t for name in ("bias", "residual") if (t := self.options.get(name)) is not None]
        norm = [self.options["norm"][0]] if "norm" in self.options else []
        return [self.x, *factors, *others, *norm]

    def run(self) -> Tensor:
        return lora_linear(self.x, self.weights, self.adapters, **self.options)

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """The formula in dtype over the same decoded weights: y, and the inputs to differentiate by."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).requires_grad_()

        adapters = [a and Adapter(leaf(a.lora_A), leaf(a.lora_B), a.scaling) for a in self.adapters]
        options = {k: leaf(v) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        if "norm" in options:
            options["norm"] = (leaf(options["norm"][0]), EPS)
        same = Case(leaf(self.x), self.weights, adapters, options)
        dense = [weight.decoded(self.x.dtype).tensors[0].to(dtype) for weight in self.weights]
        return lora_linear_reference(same.x, dense, adapters, **options), same.inputs()


def nf4(weight: Tensor) -> FrozenWeight:
    q = Quantizer().quantize(weight)
    return FrozenWeight("nf4", (q.packed, q.absmax, q.nested_absmax, q.nested_offset), *weight.shape, 64)


def case(
    rows: int,
    dtype: torch.dtype,
    prologue: str = "",
    *,
    sizes: Sequence[int] = SIZES,
    ranks: Sequence[int] = RANKS,
    in_features: int = 96,
    scale: float = 1.0,
    bias: bool = True,
    residual: bool = True,
) -> Case:
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(rows))
    weights = [nf4(randn(size, in_features) * 0.1) for size in sizes]
    weights[-1] = weights[-1].decoded(dtype)
    adapters = [
        Adapter((randn(r, in_features) * 0.1).requires_grad_(), (randn(n, r) * 0.1).requires_grad_(), s) if r else None
        for n, r, s in zip(sizes, ranks, SCALINGS, strict=False)
    ]
    x = (scale * randn(rows, in_features * (2 if prologue == "swiglu" else 1))).to(dtype).requires_grad_()
    options = {"with_swiglu": True} if prologue == "swiglu" else {}
    if prologue == "rms_norm":
        options["norm"] = (randn(in_features).to(dtype).requires_grad_(), EPS)
    if bias:
        options["bias"] = randn(sum(sizes)).to(dtype).requires_grad_()
    if residual:
        options["residual"] = randn(rows, sum(sizes)).to(dtype).requires_grad_()
    return Case(x, weights, adapters, options)


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Relative to the norm of the whole tensor, 0 for an empty one."""
    return [
        ((g.double() - w.double()).norm() / w.double().norm().clamp(min=1e-300)).item()
        for g, w in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize("prologue", PROLOGUES)
@pytest.mark.parametrize("rows", [0, 1, 17, 64])
def test_float32_is_the_formula_in_float64(rows: int, prologue: str) -> None:
    given = case(rows, torch.float32, prologue)
    y = given.run()
    expected, inputs = given.reference(torch.float64)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(y, given.inputs(), grad)
    want = torch.autograd.grad(expected, inputs, grad.double())
    assert y.shape == (rows, sum(SIZES)) and y.is_contiguous()
    # Sums of up to 97 float32 products: a few roundings, 2^-24 each, of a quantity of the size of the result.
    assert max(errors((y, *got), (expected, *want))) < 1e-6


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("prologue", PROLOGUES)
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_bfloat16_is_as_near_as_the_formula_in_torch(rows: int, prologue: str, scale: float) -> None:
    given = case(rows, torch.bfloat16, prologue, scale=scale)
    y = given.run()
    exact, inputs = given.reference(torch.float64)
    torchs, torch_inputs = given.reference(torch.bfloat16)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = errors((y, *torch.autograd.grad(y, given.inputs(), grad)), (exact, *torch.autograd.grad(exact, inputs, grad)))
    peers = torch.autograd.grad(torchs, torch_inputs, grad)
    peer = errors((torchs, *peers), (exact, *torch.autograd.grad(*given.reference(torch.float64), grad.double())))
    # torch rounds at more places; of one row there are few numbers, and luck decides between equal roundings.
    assert all(ours <= 1.5 * theirs + 2**-9 for ours, theirs in zip(got, peer, strict=True))


def test_zeros_and_one_column() -> None:
    given = case(3, torch.float32, sizes=(1,), ranks=(1,), in_features=64, bias=False, residual=False)
    given.x = torch.zeros_like(given.x, requires_grad=True)
    y = given.run()
    grads = torch.autograd.grad(y, given.inputs(), torch.ones_like(y))
    assert y.shape == (3, 1) and not y.any() and grads[0].any() and not grads[1].any() and not grads[2].any()


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_a_group_is_its_projections_one_by_one(prologue: str) -> None:
    given = case(17, torch.float32, prologue, bias=False, residual=False)
    together = given.run()
    apart = [Case(given.x, [w], [a], given.options).run() for w, a in zip(given.weights, given.adapters, strict=True)]
    torch.testing.assert_close(together, torch.cat(apart, dim=1), rtol=1e-5, atol=1e-6)  # order of sums


def test_the_mlp_rounds_where_transformers_rounds() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=96, intermediate_size=160)
    mlp, norm = LlamaMLP(config).bfloat16().requires_grad_(False), LlamaRMSNorm(96, eps=EPS).bfloat16()
    stream = torch.randn(64, 96).bfloat16()
    up = [FrozenWeight.dense(layer.weight) for layer in (mlp.gate_proj, mlp.up_proj)]
    gate_up = lora_linear(stream, up, norm=(norm.weight.detach(), EPS))
    got = lora_linear(gate_up, [FrozenWeight.dense(mlp.down_proj.weight)], with_swiglu=True, residual=stream)
    want = stream + mlp(norm(stream))
    # The same roundings at the same places; another order of a float32 sum moves a value across a rounding boundary now
    # and then. One rounding left out, or one more, moves a quarter of all values.
    assert (got != want).float().mean() < 0.02
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_the_same_input_gives_the_same_bits(prologue: str) -> None:
    given = case(64, torch.bfloat16, prologue)

    def everything() -> list[Tensor]:
        y = given.run()
        return [y, *torch.autograd.grad(y, given.inputs(), torch.ones_like(y))]

    first = everything()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(everything(), first, strict=True))


# ---- what it costs


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_autograd_keeps_the_input_and_the_small_product_alone(prologue: str) -> None:
    given = case(17, torch.bfloat16, prologue)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        given.run()
    arguments = [*given.inputs(), *(t for w in given.weights for t in w.tensors)]
    pointers = {tensor.data_ptr() for tensor in arguments}
    own = [tensor for tensor in kept if tensor.data_ptr() not in pointers]
    assert [list(tensor.shape) for tensor in own] == [[17, sum(RANKS)]]
    of_tokens = [t for t in kept if t.ndim == 2 and t.shape[0] == 17 and t.data_ptr() != own[0].data_ptr()]
    assert [t.data_ptr() for t in of_tokens] == [given.x.data_ptr()]  # neither the residual nor h


def test_backward_makes_nothing_of_the_dense_gradients_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense weight itself appears in a buffer, which is given back; no other tensor is that large."""
    given = case(8, torch.float32, sizes=(256, 256), ranks=(2, 2), in_features=512, bias=False, residual=False)
    y = given.run()
    largest = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.autograd.grad(y, given.inputs(), torch.ones_like(y))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 256 * 512 * 4  # the dense gradient of one of the two
    assert sum(buffer.nbytes for buffer in frozen_weight._free) >= 512 * 512 * 4


def test_the_input_needs_no_gradient() -> None:
    """The first layer over frozen embeddings: its factors are trained all the same."""
    given = case(17, torch.float32, "rms_norm")
    with_x = torch.autograd.grad(given.run().sum(), given.inputs())
    x, norm_weight = given.x.detach(), given.options["norm"][0].detach()
    y = lora_linear(x, given.weights, given.adapters, norm=(norm_weight, EPS))
    factors = given.inputs()[1:5]
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y.sum(), factors), with_x[1:5], strict=True))


def test_without_anything_to_train_nothing_is_recorded() -> None:
    given = case(17, torch.float32)
    assert not lora_linear(given.x.detach(), given.weights).requires_grad
    with torch.no_grad():
        assert not given.run().requires_grad


def test_strided_input_and_gradient() -> None:
    given = case(17, torch.float32, "rms_norm")
    x = torch.randn(17, 200, generator=torch.Generator().manual_seed(0))[:, :96].requires_grad_()
    contiguous = x.detach().contiguous().requires_grad_()
    given.x = x
    y = given.run()
    got = torch.autograd.grad(y, x, torch.ones(sum(SIZES), 17).T)
    given.x = contiguous
    assert torch.equal(given.run(), y)
    assert torch.equal(torch.autograd.grad(given.run(), contiguous, torch.ones(17, sum(SIZES)))[0], got[0])


# ---- torch.library and torch.compile


def op_arguments(given: Case) -> tuple:
    tensors, layout = frozen_weight.flatten(given.weights)
    present = [adapter for adapter in given.adapters if adapter]
    norm_weight, eps = given.options.get("norm", (None, 0.0))
    prologue = "rms_norm" if norm_weight is not None else "swiglu" if "with_swiglu" in given.options else ""
    return (
        *(given.x, tensors, layout, [a.lora_A for a in present], [a.lora_B for a in present], list(RANKS)),
        *(list(SCALINGS), given.options.get("bias"), given.options.get("residual"), norm_weight, eps, prologue),
    )


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_opcheck(prologue: str) -> None:
    given = case(17, torch.float32, prologue)
    torch.library.opcheck(torch.ops.lowbit.lora_linear, op_arguments(given))


def test_opcheck_without_adapters() -> None:
    given = case(17, torch.float32, ranks=(0, 0, 0), bias=False)
    x, tensors, layout, _, _, _, _, *others = op_arguments(given)
    torch.library.opcheck(torch.ops.lowbit.lora_linear, (x, tensors, layout, [], [], [0] * 3, [0.0] * 3, *others))


def test_torch_compile() -> None:
    given = case(17, torch.float32, "rms_norm")
    want = given.run()
    got = torch.compile(given.run, backend="aot_eager", fullgraph=True)()
    assert torch.equal(got, want)
    grad = torch.ones_like(got)
    for a, b in zip(
        torch.autograd.grad(got, given.inputs(), grad), torch.autograd.grad(want, given.inputs(), grad), strict=True
    ):
        assert torch.equal(a, b)


# ---- errors


def changed(given: Case, **change: object) -> Tensor:
    positional = {"x": given.x, "weights": given.weights, "adapters": given.adapters}
    options = {**given.options, **{k: v for k, v in change.items() if k not in positional}}
    return lora_linear(*{**positional, **{k: v for k, v in change.items() if k in positional}}.values(), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 95)}, r"x is \[2, 95\]; the weights need \[T, 96\]; use .view\(-1, 96\)"),
        ({"x": torch.ones(1, 2, 96)}, r"x is \[1, 2, 96\]; .* use .view\(-1, 96\)"),
        ({"with_swiglu": True}, r"x is \[17, 96\]; the weights need \[T, 192\]"),
        ({"with_swiglu": True, "norm": (torch.ones(96), EPS)}, "one prologue"),
        ({"adapters": [None]}, "3 weights and 1 adapters"),
        ({"weights": [], "adapters": []}, "0 weights"),
        (
            {"adapters": [None, Adapter(torch.ones(2, 96), torch.ones(40, 2), 1.0), None]},
            r"adapters\[1\] .* \[24, rank",
        ),
        ({"adapters": [Adapter(torch.ones(2, 96), torch.ones(40, 3), 1.0), None, None]}, r"adapters\[0\] .* \[40, 3\]"),
        ({"adapters": [Adapter(torch.ones(0, 96), torch.ones(40, 0), 1.0), None, None]}, r"adapters\[0\] .* \[0, 96\]"),
        ({"bias": torch.ones(96)}, r"bias is torch.float32 \[96\]; .* torch.float32 \[97\]"),
        ({"residual": torch.ones(17, 97).bfloat16()}, r"residual is torch.bfloat16 \[17, 97\]; .* torch.float32"),
        ({"norm": (torch.ones(95), EPS)}, r"weight is torch.float32 \[95\]"),
    ],
)
def test_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(case(17, torch.float32), **change)


def test_projections_of_one_call_read_one_input() -> None:
    weights = [FrozenWeight.dense(torch.ones(4, 96)), FrozenWeight.dense(torch.ones(4, 95))]
    with pytest.raises(ValueError, match=r"weights\[1\] has in_features=95 and weights\[0\] 96"):
        lora_linear(torch.ones(2, 96), weights)
