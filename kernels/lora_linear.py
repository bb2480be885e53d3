"""Frozen linear layers that share one input, with their LoRA updates, in one op, forward and backward.

    h    = x | rms_norm(x) | swiglu(x)                                      the prologue
    y    = residual + h W^T + bias + [s_i (h A_i^T) B_i^T]_i                W = the weights, one below the other
    gB_i = s_i g_i B_i                                                      g_i = the columns of g of projection i
    dh   = g W + sum_i gB_i A_i            dA_i = gB_i^T h            dB_i = s_i g_i^T (h A_i^T)
    dx   = the prologue's gradient of dh

Why one op: q, k and v (gate and up) are one product instead of three, forward and backward; the update is added into
the product in place; and autograd saves x and h A^T only. x is the residual stream, or gate and up, which is alive
anyway: h, of the size of the layer's input, is computed again in backward, and so is the dense weight (3.5 % of the
time of the four projections of a SmolLM2-135M layer at 1024 rows). Nothing of the dense weight's size outlives a call.

Rounding, the same in training and in serving: h as transformers rounds it, the product with the bias once, A and s B
to the dtype of x, h A^T once, the sum with the update once, the sum with the residual once. Products accumulate in
float32. The factors are float32 parameters and get float32 gradients; kernels/lora_products.py multiplies by them.

The surprising thing: the op is registered, for torch.compile and torch.library, but eager calls go through an autograd
function over the same two functions. A registered op with lists of tensors costs 0.3 ms a call, a tenth of a product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.kernels import frozen_weight
from trainer.kernels.frozen_weight import FrozenWeight, multiply, multiply_transposed
from trainer.kernels.lora_products import (
    Update,
    add_input_gradient,
    add_update,
    gradients_A,
    multiply_A,
    output_gradients,
)
from trainer.kernels.rms_norm import rms_norm, rms_norm_backward
from trainer.kernels.swiglu import swiglu, swiglu_backward


class Adapter(NamedTuple):
    """A low-rank update of one projection: scaling * lora_B @ lora_A.

    lora_A   [rank, in_features] float
    lora_B   [out_features, rank] float
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: float


def lora_linear_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    adapters: Sequence[Adapter | None],
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    with_swiglu: bool = False,
) -> Tensor:
    """The formula over dense weights, differentiable; see `lora_linear` for the shapes."""
    if norm is not None:
        weight, eps = norm
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    if with_swiglu:
        gate, up = x.chunk(2, dim=-1)
        x = torch.nn.functional.silu(gate) * up
    parts = []
    for dense, adapter in zip(weights, adapters, strict=True):
        y = x @ dense.T
        if adapter is not None:
            y = y + adapter.scaling * (x @ adapter.lora_A.to(x.dtype).T) @ adapter.lora_B.to(x.dtype).T
        parts.append(y)
    y = torch.cat(parts, dim=-1)
    y = y if bias is None else y + bias
    return y if residual is None else residual + y


# ---- forward and backward


class _Plan(NamedTuple):
    """What autograd does not see. One rank and scaling for each weight; rank 0 where no adapter is."""

    weights: Sequence[FrozenWeight]
    ranks: Sequence[int]
    scalings: Sequence[float]
    eps: float
    prologue: str
    merged: bool = False

    def updates(self, lora_A: Sequence[Tensor], lora_B: Sequence[Tensor]) -> list[Update]:
        """One for each weight, from the factors of those that have an adapter."""
        left_A, left_B = iter(lora_A), iter(lora_B)
        return [
            Update(weight.out_features, scaling, next(left_A) if rank else None, next(left_B) if rank else None)
            for weight, rank, scaling in zip(self.weights, self.ranks, self.scalings, strict=True)
        ]


def _input(plan: _Plan, x: Tensor, norm_weight: Tensor | None) -> Tensor:
    """h [T, in_features]"""
    match plan.prologue:
        case "rms_norm":
            return rms_norm(x, norm_weight, eps=plan.eps, beside_torch=True)
        case "swiglu":
            return swiglu(x, beside_torch=True)
    return x


def _forward(
    plan: _Plan,
    x: Tensor,
    lora_A: Sequence[Tensor],
    lora_B: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and h A^T [T, sum of ranks]"""
    h = _input(plan, x, norm_weight)
    y = multiply(h, plan.weights, bias)
    if not lora_A:
        return (y if residual is None else y.add_(residual)), x.new_empty(x.shape[0], 0)
    updates = plan.updates(lora_A, lora_B)
    h_A = multiply_A(h, updates)
    if plan.merged:
        return (y if residual is None else y.add_(residual)), h_A
    add_update(y, h_A, updates, residual)
    return y, h_A


def _gradients(
    plan: _Plan,
    grad: Tensor,
    x: Tensor,
    h_A: Tensor,
    lora_A: Sequence[Tensor],
    lora_B: Sequence[Tensor],
    norm_weight: Tensor | None,
    with_x: bool,
    with_norm_weight: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """dx and d norm_weight, both [0] where not asked for, dA and dB of each adapter."""
    grad = grad.contiguous()
    grad_x, grad_norm_weight, h = x.new_empty(0), x.new_empty(0), None
    updates = plan.updates(lora_A, lora_B)
    grad_h_A, grad_B = output_gradients(grad, h_A, updates)
    if with_x or with_norm_weight:
        grad_h = multiply_transposed(grad, plan.weights)
        if lora_A and not plan.merged:
            add_input_gradient(grad_h, grad_h_A, updates)
        match plan.prologue:
            case "rms_norm":
                options = {"eps": plan.eps, "with_weight": with_norm_weight}
                grad_x, of_weight = rms_norm_backward(grad_h, x, norm_weight, **options)
                grad_norm_weight = grad_norm_weight if of_weight is None else of_weight
            case "swiglu":
                grad_x, h = swiglu_backward(grad_h, x, with_output=True)
            case _:
                grad_x = grad_h
    if not lora_A:
        return grad_x, grad_norm_weight, [], []
    h = _input(plan, x, norm_weight) if h is None else h
    return grad_x, grad_norm_weight, gradients_A(h, grad_h_A, updates), grad_B


class _LoraLinear(torch.autograd.Function):
    """The same in eager mode; the factors come as all A, then all B."""

    @staticmethod
    def forward(
        ctx,
        plan: _Plan,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        half = len(factors) // 2
        y, h_A = _forward(plan, x, factors[:half], factors[half:], bias, residual, norm_weight)
        ctx.plan = plan
        ctx.save_for_backward(x, h_A, norm_weight, *factors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h_A, norm_weight, *factors = ctx.saved_tensors
        half = len(factors) // 2
        _, with_x, with_bias, with_residual, with_norm, *_ = ctx.needs_input_grad
        grad_x, grad_norm, grad_A, grad_B = _gradients(
            ctx.plan, grad, x, h_A, factors[:half], factors[half:], norm_weight, with_x, with_norm
        )
        return (
            None,
            grad_x if with_x else None,
            grad.sum(0) if with_bias else None,
            grad if with_residual else None,
            grad_norm if with_norm else None,
            *grad_A,
            *grad_B,
        )


# ---- registered ops


@torch.library.custom_op("lowbit::lora_linear", mutates_args=())
def _lora_linear(
    x: Tensor,
    weights: list[Tensor],
    layout: str,
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    ranks: list[int],
    scalings: list[float],
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    prologue: str,
) -> tuple[Tensor, Tensor]:
    """y and h A^T [T, sum of ranks]; weights and layout as from `frozen_weight.flatten`, the rest as in `_Plan`."""
    plan = _Plan(frozen_weight.unflatten(weights, layout), ranks, scalings, eps, prologue)
    return _forward(plan, x, lora_A, lora_B, bias, residual, norm_weight)


@_lora_linear.register_fake
def _(x, weights, layout, lora_A, lora_B, ranks, scalings, bias, residual, norm_weight, eps, prologue):
    y = x.new_empty(x.shape[0], sum(frozen_weight.out_features(layout)))
    return y, x.new_empty(x.shape[0], sum(ranks))


@torch.library.custom_op("lowbit::lora_linear_backward", mutates_args=())
def _lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    h_A: Tensor,
    weights: list[Tensor],
    layout: str,
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    ranks: list[int],
    scalings: list[float],
    norm_weight: Tensor | None,
    eps: float,
    prologue: str,
    with_x: bool,
    with_norm_weight: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    plan = _Plan(frozen_weight.unflatten(weights, layout), ranks, scalings, eps, prologue)
    return _gradients(plan, grad, x, h_A, lora_A, lora_B, norm_weight, with_x, with_norm_weight)


@_lora_linear_backward.register_fake
def _(
    grad, x, h_A, weights, layout, lora_A, lora_B, ranks, scalings, norm_weight, eps, prologue, with_x, with_norm_weight
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    grad_x = torch.empty_like(x) if with_x or with_norm_weight else x.new_empty(0)
    grad_norm_weight = torch.empty_like(norm_weight) if with_norm_weight else x.new_empty(0)
    return grad_x, grad_norm_weight, [torch.empty_like(a) for a in lora_A], [torch.empty_like(b) for b in lora_B]


def _setup_context(ctx, inputs, output) -> None:
    x, weights, ctx.layout, lora_A, lora_B, ctx.ranks, ctx.scalings, _, _, norm_weight, ctx.eps, ctx.prologue = inputs
    ctx.num_weights = len(weights)
    ctx.save_for_backward(x, output[1], norm_weight, *weights, *lora_A, *lora_B)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad: Tensor | None, _grad_h_A: Tensor | None):
    x, h_A, norm_weight, *others = ctx.saved_tensors
    weights, factors = others[: ctx.num_weights], others[ctx.num_weights :]
    lora_A, lora_B = factors[: len(factors) // 2], factors[len(factors) // 2 :]
    no_weights = [None] * len(weights)
    if grad is None:
        nothing = [None] * len(lora_A)
        return None, no_weights, None, nothing, nothing, None, None, None, None, None, None, None
    with_x, with_bias, with_residual, with_norm = (ctx.needs_input_grad[i] for i in (0, 7, 8, 9))
    grad_x, grad_norm, grads_A, grads_B = _lora_linear_backward(
        grad, x, h_A, weights, ctx.layout, lora_A, lora_B, ctx.ranks, ctx.scalings, norm_weight, ctx.eps,
        ctx.prologue, with_x, with_norm,
    )  # fmt: skip
    return (
        grad_x if with_x else None,
        no_weights,
        None,
        grads_A,
        grads_B,
        None,
        None,
        grad.sum(0) if with_bias else None,
        grad if with_residual else None,
        grad_norm if with_norm else None,
        None,
        None,
    )


_lora_linear.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def lora_linear(
    x: Tensor,
    weights: Sequence[FrozenWeight],
    adapters: Sequence[Adapter | None] | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    with_swiglu: bool = False,
    merged: bool = False,
) -> Tensor:
    """Frozen projections of one input plus their LoRA updates (arXiv:2305.14314, section 3, equation 5).

    x            [T, in_features] float32, bfloat16 or float16; with_swiglu: [T, 2 in_features], gate before up
    weights      one for each projection, all with the same in_features
    adapters     one or None for each weight; ranks may differ
    bias         [sum of out_features] of x's dtype
    residual     [T, sum of out_features] of x's dtype, added to the rounded result
    norm         (weight [in_features] of x's dtype, eps): multiply rms_norm(x) instead of x
    with_swiglu  multiply silu(gate) * up instead of x
    merged       the weights hold the updates already, rounded with them (trainer/qat/merge_aware.py): the product
                 leaves the updates out, and the factors get the same gradients. Eager only
    returns      [T, sum of out_features] of x's dtype, contiguous, the projections side by side
    raises       ValueError if a shape, dtype or device does not fit

    x, the factors, bias, residual and the norm's weight get gradients where they require them. Autograd keeps x, the
    product with the A factors [T, sum of ranks] and the arguments that are weights; nothing else.
    """
    adapters = [None] * len(weights) if adapters is None else adapters
    _check(x, weights, adapters, bias, residual, norm, with_swiglu)
    present = [adapter for adapter in adapters if adapter is not None]
    lora_A, lora_B = [adapter.lora_A for adapter in present], [adapter.lora_B for adapter in present]
    ranks = [0 if adapter is None else adapter.lora_A.shape[0] for adapter in adapters]
    scalings = [0.0 if adapter is None else float(adapter.scaling) for adapter in adapters]
    norm_weight, eps = (None, 0.0) if norm is None else norm
    prologue = "rms_norm" if norm is not None else "swiglu" if with_swiglu else ""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        assert not merged, "codes of merged weights are made outside a graph"
        tensors, layout = frozen_weight.flatten(weights)
        others = bias, residual, norm_weight, eps, prologue
        return _lora_linear(x, tensors, layout, lora_A, lora_B, ranks, scalings, *others)[0]
    plan = _Plan(weights, ranks, scalings, eps, prologue, merged)
    return _LoraLinear.apply(plan, x, bias, residual, norm_weight, *lora_A, *lora_B)


def _check(
    x: Tensor,
    weights: Sequence[FrozenWeight],
    adapters: Sequence[Adapter | None],
    bias: Tensor | None,
    residual: Tensor | None,
    norm: tuple[Tensor, float] | None,
    with_swiglu: bool,
) -> None:
    """raises ValueError unless all fits; the norm and swiglu check x further"""
    if not weights or len(adapters) != len(weights):
        raise ValueError(f"{len(weights)} weights and {len(adapters)} adapters; give one adapter or None a weight")
    if norm is not None and with_swiglu:
        raise ValueError("norm and with_swiglu were both given; an op has one prologue")
    in_features = weights[0].in_features
    columns = 2 * in_features if with_swiglu else in_features
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x is {list(x.shape)}; the weights need [T, {columns}]; use .view(-1, {columns})")
    for i, (weight, adapter) in enumerate(zip(weights, adapters, strict=True)):
        if weight.in_features != in_features:
            raise ValueError(
                f"weights[{i}] has in_features={weight.in_features} and weights[0] {in_features}; "
                "projections of one call read one input"
            )
        if adapter is None:
            continue
        rank, shapes = adapter.lora_A.shape[0], (list(adapter.lora_A.shape), list(adapter.lora_B.shape))
        if rank == 0 or shapes != ([rank, in_features], [weight.out_features, rank]):
            raise ValueError(
                f"adapters[{i}] has lora_A {shapes[0]} and lora_B {shapes[1]}; a [{weight.out_features}, "
                f"{in_features}] weight needs [rank, {in_features}] and [{weight.out_features}, rank]"
            )
    out_features = sum(weight.out_features for weight in weights)
    for name, tensor, shape in (("bias", bias, [out_features]), ("residual", residual, [x.shape[0], out_features])):
        if tensor is not None and (list(tensor.shape) != shape or tensor.dtype != x.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; x and the weights need {x.dtype} {shape}; use .to()"
            )
