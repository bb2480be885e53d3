"""The products of LoRA updates beside the big one of their layer, forward and backward; no registered op of their own.

    multiply_A           h A^T                       [T, sum of ranks]
    add_update           y_i += (h A_i^T) (s_i B_i)^T, and y += residual
    output_gradients     gB_i = g_i (s_i B_i)        dB_i = s_i g_i^T (h A_i^T)
    add_input_gradient   dh += sum_i gB_i A_i
    gradients_A          dA_i = gB_i^T h

The index i runs over the projections of one layer call (q, k, v), which lie side by side in y, g and h A^T. Rounding:
A and s B to the dtype of x; h A^T, the sum y, the sum with the residual, gB and dh once each, after a sum in float32;
dA and dB are float32.

Why not torch's products alone: one side is a rank, so each of them is a pass over a tall matrix and little else, and
torch packs that matrix first, casts the factors and copies the gradients in operations of their own. The four groups of
a SmolLM2-135M layer (1024 rows, rank 16, bfloat16, 2 Zen 4 cores) take 5.8 ms by torch and 3.7 ms here, where the rate
of a large product would need 2.3 ms.

The surprising thing: C++ is used for bfloat16 with float32 factors only, and on processors whose dot product of
bfloat16 pairs makes it pay; torch's products are at once the reference and the path of everything else.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call_beside_torch, kernel

MAX_RANKS = 384
"""Sum of the ranks of a call up to which C++ is used: 0.87 of torch's time at 3 * 128, the same time at 3 * 256."""


class Update(NamedTuple):
    """One projection of a layer call: its width in y, and its adapter if it has one.

    out_features   its columns in y, after those of the projections before it
    scaling        s
    lora_A         [rank, in_features] float, or None
    lora_B         [out_features, rank] float, or None
    """

    out_features: int
    scaling: float
    lora_A: Tensor | None
    lora_B: Tensor | None

    @property
    def rank(self) -> int:
        return 0 if self.lora_A is None else self.lora_A.shape[0]


def num_ranks(updates: Sequence[Update]) -> int:
    """The columns of h A^T."""
    return sum(update.rank for update in updates)


# ---- torch


class _Place(NamedTuple):
    """An update with an adapter, its columns in y and its columns in h A^T."""

    update: Update
    columns: slice
    ranks: slice


def _places(updates: Sequence[Update]) -> list[_Place]:
    places, column, rank = [], 0, 0
    for update in updates:
        next_column, next_rank = column + update.out_features, rank + update.rank
        if update.rank:
            places.append(_Place(update, slice(column, next_column), slice(rank, next_rank)))
        column, rank = next_column, next_rank
    return places


def _stacked_A(updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """[sum of ranks, in_features]"""
    factors = [update.lora_A for update in updates if update.lora_A is not None]
    return factors[0].to(dtype) if len(factors) == 1 else torch.cat([factor.to(dtype) for factor in factors])


def _scaled_B(update: Update, dtype: torch.dtype) -> Tensor:
    """s B [out_features, rank], rounded once"""
    return torch.mul(update.lora_B, update.scaling, out=torch.empty_like(update.lora_B, dtype=dtype))


def multiply_A_reference(h: Tensor, updates: Sequence[Update]) -> Tensor:
    return h @ _stacked_A(updates, h.dtype).T


def add_update_reference(y: Tensor, h_A: Tensor, updates: Sequence[Update], residual: Tensor | None) -> None:
    for update, columns, ranks in _places(updates):
        y[:, columns].addmm_(h_A[:, ranks], _scaled_B(update, y.dtype).T)
    if residual is not None:
        y.add_(residual)


def output_gradients_reference(grad: Tensor, h_A: Tensor, updates: Sequence[Update]) -> tuple[Tensor, list[Tensor]]:
    grad_h_A, grads = torch.empty_like(h_A), []
    for update, columns, ranks in _places(updates):
        grad_y = grad[:, columns]
        torch.mm(grad_y, _scaled_B(update, grad.dtype), out=grad_h_A[:, ranks])
        # The product is made transposed, [rank, out_features]: 1.5 times as fast as the other way round.
        product = (h_A[:, ranks].T @ grad_y).T
        grads.append(torch.empty_like(update.lora_B).copy_(product).mul_(update.scaling))
    return grad_h_A, grads


def add_input_gradient_reference(grad_h: Tensor, grad_h_A: Tensor, updates: Sequence[Update]) -> None:
    grad_h.addmm_(grad_h_A, _stacked_A(updates, grad_h.dtype))


def gradients_A_reference(h: Tensor, grad_h_A: Tensor, updates: Sequence[Update]) -> list[Tensor]:
    factors = [update.lora_A for update in updates if update.lora_A is not None]
    parts = (grad_h_A.T @ h).split([factor.shape[0] for factor in factors])
    return [torch.empty_like(factor).copy_(part) for factor, part in zip(factors, parts, strict=True)]


# ---- C++: bfloat16, float32 factors, all contiguous


def _arguments(
    updates: Sequence[Update], name: str, gradients: Sequence[Tensor] | None = None
) -> list[Tensor | int | float | None]:
    """The factors called `name` as the kernels read them, with the gradients of those that are there."""
    arguments, left = [len(updates)], iter(gradients or ())
    for update in updates:
        factor = getattr(update, name)
        gradient = None if gradients is None or factor is None else next(left)
        arguments += [factor, gradient, update.rank, update.out_features, float(update.scaling)]
    return arguments


def multiply_A_cpu(h: Tensor, updates: Sequence[Update]) -> Tensor:
    h_A = h.new_empty(h.shape[0], num_ranks(updates))
    call_beside_torch(kernel("lora_products", "thin_A"), h, h_A, *h.shape, *_arguments(updates, "lora_A"))
    return h_A


def add_update_cpu(y: Tensor, h_A: Tensor, updates: Sequence[Update], residual: Tensor | None) -> None:
    residual = None if residual is None else residual.contiguous()
    arguments = _arguments(updates, "lora_B")
    call_beside_torch(kernel("lora_products", "wide_B"), y, residual, h_A, y.shape[0], *arguments)


def output_gradients_cpu(grad: Tensor, h_A: Tensor, updates: Sequence[Update]) -> tuple[Tensor, list[Tensor]]:
    grad_h_A = torch.empty_like(h_A)
    grads = [torch.empty_like(update.lora_B) for update in updates if update.lora_B is not None]
    arguments = _arguments(updates, "lora_B", grads)
    call_beside_torch(kernel("lora_products", "grad_B"), grad, h_A, grad_h_A, grad.shape[0], *arguments)
    return grad_h_A, grads


def add_input_gradient_cpu(grad_h: Tensor, grad_h_A: Tensor, updates: Sequence[Update]) -> None:
    arguments = *grad_h.shape, *_arguments(updates, "lora_A")
    call_beside_torch(kernel("lora_products", "wide_A"), grad_h, grad_h_A, *arguments)


def gradients_A_cpu(h: Tensor, grad_h_A: Tensor, updates: Sequence[Update]) -> list[Tensor]:
    grads = [torch.empty_like(update.lora_A) for update in updates if update.lora_A is not None]
    arguments = *h.shape, *_arguments(updates, "lora_A", grads)
    call_beside_torch(kernel("lora_products", "grad_A"), h, grad_h_A, *arguments)
    return grads


# ---- what lora_linear calls


@functools.cache
def _pays() -> bool:
    """Whether the library was compiled for a processor where it is faster than torch."""
    return bool(_cpp.load("lora_products").is_fast())


def _in_cpp(x: Tensor, updates: Sequence[Update]) -> bool:
    if x.dtype != torch.bfloat16 or _cpp.choose("lora_products", x.device.type) != "cpu" or not _pays():
        return False
    factors = [factor for update in updates for factor in (update.lora_A, update.lora_B) if factor is not None]
    plain = all(factor.dtype == torch.float32 and factor.is_contiguous() for factor in factors)
    return plain and x.is_contiguous() and 0 < num_ranks(updates) <= MAX_RANKS


def multiply_A(h: Tensor, updates: Sequence[Update]) -> Tensor:
    """h A^T [T, sum of ranks] of h's dtype; one adapter at least.

    h  [T, in_features] float
    """
    return (multiply_A_cpu if _in_cpp(h, updates) else multiply_A_reference)(h, updates)


def add_update(y: Tensor, h_A: Tensor, updates: Sequence[Update], residual: Tensor | None = None) -> None:
    """Add the updates to y, then the residual, in place.

    y         [T, sum of out_features] float
    h_A       [T, sum of ranks] of y's dtype, from `multiply_A`
    residual  [T, sum of out_features] of y's dtype
    """
    (add_update_cpu if _in_cpp(y, updates) else add_update_reference)(y, h_A, updates, residual)


def output_gradients(grad: Tensor, h_A: Tensor, updates: Sequence[Update]) -> tuple[Tensor, list[Tensor]]:
    """The gradients of h A^T [T, sum of ranks] and of each lora_B.

    grad  [T, sum of out_features] float, the gradient of y
    h_A   [T, sum of ranks] of grad's dtype
    """
    return (output_gradients_cpu if _in_cpp(grad, updates) else output_gradients_reference)(grad, h_A, updates)


def add_input_gradient(grad_h: Tensor, grad_h_A: Tensor, updates: Sequence[Update]) -> None:
    """Add what comes through h A^T to the gradient of h, in place.

    grad_h    [T, in_features] float
    grad_h_A  [T, sum of ranks] of grad_h's dtype, from `output_gradients`
    """
    (add_input_gradient_cpu if _in_cpp(grad_h, updates) else add_input_gradient_reference)(grad_h, grad_h_A, updates)


def gradients_A(h: Tensor, grad_h_A: Tensor, updates: Sequence[Update]) -> list[Tensor]:
    """The gradient of each lora_A.

    h         [T, in_features] float
    grad_h_A  [T, sum of ranks] of h's dtype
    """
    return (gradients_A_cpu if _in_cpp(h, updates) else gradients_A_reference)(h, grad_h_A, updates)
