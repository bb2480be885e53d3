"""Merge-aware LoRA: a frozen 16-bit layer with an adapter, trained through the rounding of the two merged.

    y = x Q(W + s B A)^T        dB = s G A^T        dA = s B^T G        G = g^T x where no code was clamped, else 0

Q(W) x + s B A x is what others train, and Q(W + s B A) what they ship: another function, which keeps little of the
update, since the update is smaller than a step of the grid. Here the codes that ship are those that were trained (L4Q,
arXiv:2402.04902, section 3; straight-through, arXiv:1308.3432; scales are trained with `learn_scales` only).

The codes are those of one float32 sum (merged_codes.py): the same in every step, in `convert` and in every
export, whatever the chunks and the threads. W + s B A exists a few rows at a time. Where rounding clamps nothing (INT4
by 7, INT8, NF4), G is not formed either: the factors' gradients are those of plain LoRA, and the layer costs what QLoRA
costs, beside one rounding a step.

The surprising thing: codes are kept until the factors change, 0.6 bytes a weight in INT4, so that the passes of a step,
their backward and an evaluation round once. That factors changed is found by comparing them with a copy: optimizers
that write through pointers leave no version counter behind.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.kernels.float_grids import FloatGrid
from trainer.kernels.frozen_weight import FrozenWeight, multiply, multiply_transposed
from trainer.kernels.int4 import Int4Weight
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.kernels.lora_products import Update, gradients_A, multiply_A, output_gradients
from trainer.lora import LoraLinear
from trainer.qat.fake_weight import FromWeight, InputFunction, Learned, PerToken
from trainer.qat.merged_codes import Codes, MergedWeight, equal_tensors, joined, merged_codes, rows_of
from trainer.qat.scheme import Scheme, grid_of
from trainer.quantizer import QuantizedTensor


class MergeAwareLinear(LoraLinear):
    """A frozen nn.Linear and its adapters, whose merged weight is rounded in every forward.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype

    scheme   how it is rounded
    enabled  False: x (W + s B A)^T as LoraLinear computes it, before the schedule's start
    lora_scales, lora_zeros  learned: [out_features, groups] float32 parameters, zeros for asymmetric groups

    With adapters disabled it computes Q(W), rounding to nearest, or W if not enabled.
    """

    def __init__(self, base_layer: nn.Linear, adapter_name: str, config: Any, *, scheme: Scheme, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, config, **kwargs)
        self.scheme, self.enabled = scheme, True
        self.lora_scales: nn.Parameter | None = None  # PEFT and the base's hash know what is trained by this prefix
        self.lora_zeros: nn.Parameter | None = None
        self._kept: tuple[MergedWeight, tuple[Tensor | None, ...], Codes] | None = None
        if scheme.learn_scales:
            weight = base_layer.weight.detach().float()
            scales, zeros = Learned(scheme.weight).start(weight, scheme.scale_init)
            self.lora_scales = nn.Parameter(scales)
            self.lora_zeros = None if zeros is None else nn.Parameter(zeros)

    @property
    def fusable(self) -> bool:
        return not self.enabled and super().fusable

    @property
    def function(self) -> str:
        """What the layer computes from its tensors; part of the hash of a base (see `weights_sha256`)."""
        return f"merged, then {self.scheme.function}"

    @property
    def quantized(self) -> Codes:
        """The codes of the merged weight as it is: those that the last forward multiplied, if no step was taken since.

        raises  ValueError naming a weight that is inf or nan, or if several adapters are active
        """
        function, parameters = self._weight_function()
        parameters = tuple(parameter if parameter is None else parameter.detach() for parameter in parameters)
        merged = MergedWeight.of(self.get_base_layer().weight, self.adapter)
        if self._kept is not None:
            kept, kept_parameters, codes = self._kept
            if merged.equals(kept) and equal_tensors(parameters, kept_parameters):
                return codes
        with torch.inference_mode(False), torch.no_grad():  # an evaluation may come first, and training uses its codes
            codes = merged_codes(merged, function, parameters)
            kept_parameters = tuple(None if parameter is None else parameter.clone() for parameter in parameters)
            self._kept = merged.kept(), kept_parameters, codes
        return codes

    def _weight_function(self) -> tuple[FromWeight | Learned, tuple[Tensor | None, ...]]:
        if self.lora_scales is None:
            return FromWeight(self.scheme.weight), ()
        return Learned(self.scheme.weight), (self.lora_scales, self.lora_zeros)

    @property
    def part(self) -> FrozenWeight | None:
        """The rounded weight for one product with `merged=True`, if the factors' gradients are those of plain LoRA."""
        return self.quantized.frozen_weight if self.scheme.activations is None and self._is_straight else None

    @property
    def _is_straight(self) -> bool:
        """Whether rounding is the identity to the gradient: nothing is clamped, and no scale is trained."""
        quantizer = self.scheme.weight
        if self.lora_scales is not None or isinstance(quantizer, FloatGrid):
            return False
        return quantizer.block_size is not None or not grid_of(quantizer).clamps

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return super().forward(x)
        rows, bias = x.reshape(-1, self.in_features), self.get_base_layer().bias
        bias, weight = None if bias is None else bias.to(x.dtype), self.part
        if weight is not None:
            y = lora_linear(rows, [weight], [self.adapter], bias=bias, merged=True)
        else:
            y = self._general(rows, bias)
        return y.view(*x.shape[:-1], self.out_features)

    def _general(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in_features] -> [T, out_features]"""
        function, parameters = self._weight_function()
        activations, adapter = self.scheme.activations, self.adapter
        plan = _Plan(
            self.quantized,
            self.get_base_layer().weight.detach(),
            0.0 if adapter is None else adapter.scaling,
            function,
            None if activations is None else PerToken(activations.grid),
            self.scheme.integer,
            self._is_straight,
        )
        factors = (None, None) if adapter is None else adapter[:2]
        return _MergedLinear.apply(plan, x, *factors, bias, *parameters)

    def extra_repr(self) -> str:
        return f"{self.scheme}"


class _Plan(NamedTuple):
    """What autograd does not see."""

    codes: Codes
    weight: Tensor
    scaling: float
    function: FromWeight | Learned
    inputs: InputFunction | None
    integer: bool
    straight: bool

    def input_values(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else self.inputs.values(x)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As what ships computes it: QuantLinear adds the bias to a rounded y, PackedLinear to the sum."""
        if self.inputs is None and isinstance(self.codes, QuantizedTensor):
            return multiply(x, [self.codes.frozen_weight], bias)
        return linear(self.input_values(x), self.codes.dequantize(x.dtype), bias)


class _MergedLinear(torch.autograd.Function):
    """The layer with rounded inputs, clamped codes or learned scales; autograd keeps x, and the codes in the plan."""

    @staticmethod
    def forward(
        ctx,
        plan: _Plan,
        x: Tensor,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        bias: Tensor | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, lora_A, lora_B, *parameters)
        if plan.integer:
            codes = plan.codes.weight
            product = int4_linear_dynamic if isinstance(codes, Int4Weight) else int8_linear_dynamic
            y = product(x, codes)
            return y if bias is None else y.add_(bias)
        return plan.product(x, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x, lora_A, lora_B, *parameters = ctx.saved_tensors
        grad = grad.contiguous()
        _, needs_x, needs_A, needs_B, needs_bias, *needs_parameters = ctx.needs_input_grad
        grad_x = grad_A = grad_B = None
        grads: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if needs_x:
            grad_x = multiply_transposed(grad, [_frozen(plan.codes, grad.dtype)])
            if plan.inputs is not None:
                (grad_x,) = plan.inputs.gradients(grad_x, x)
        if needs_A or needs_B or any(needs_parameters):
            h = plan.input_values(x)
            if plan.straight:
                grad_A, grad_B = _straight_gradients(grad, h, lora_A, lora_B, plan.scaling)
            else:
                grad_A, grad_B, *grads = _clamped_gradients(plan, grad, h, lora_A, lora_B, tuple(parameters))
        return None, grad_x, grad_A, grad_B, grad.sum(0) if needs_bias else None, *grads


def _frozen(codes: Codes, dtype: torch.dtype) -> FrozenWeight:
    if isinstance(codes, QuantizedTensor):
        return codes.frozen_weight
    return FrozenWeight("decoded", (codes.dequantize(dtype),), *codes.shape)


def _straight_gradients(
    grad: Tensor, h: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """dA and dB of plain LoRA: grad [T, out_features] and h [T, in_features] meet in the rank."""
    updates = [Update(len(lora_B), scaling, lora_A, lora_B)]
    grad_h_A, (grad_B,) = output_gradients(grad, multiply_A(h, updates), updates)
    (grad_A,) = gradients_A(h, grad_h_A, updates)
    return grad_A, grad_B


def _clamped_gradients(
    plan: _Plan,
    grad: Tensor,
    h: Tensor,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    parameters: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """dA, dB and those of the parameters, from the gradient of each chunk of the merged weight, in float32."""
    merged = MergedWeight.of(plan.weight, None if lora_A is None else Adapter(lora_A, lora_B, plan.scaling))
    grad_A, parts_B = torch.zeros_like(merged.lora_A), []
    parts: list[list[Tensor | None]] = [[] for _ in parameters]
    for rows, chunk in merged.chunks(plan.function.quantizer):
        grad_chunk = (grad[:, rows].T @ h).float()
        grad_chunk, *others = plan.function.gradients(grad_chunk, chunk, *rows_of(parameters, rows))
        parts_B.append(plan.scaling * (grad_chunk @ merged.lora_A.T))
        grad_A.addmm_(merged.scaled_B[rows].T, grad_chunk)
        for part, other in zip(parts, others, strict=True):
            part.append(other)
    factors = (None, None) if lora_A is None else (grad_A, torch.cat(parts_B))
    return *factors, *(joined(part) for part in parts)
