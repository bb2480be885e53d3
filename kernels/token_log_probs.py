"""Log-probabilities of given tokens under an output head, a number a row: the full logits never exist.

    l_i = h_i W^T,   log p_i = l_i[label_i] - log sum_j exp l_ij
    d log p_i / d l_ij = [j = label_i] - softmax(l_i)_j =: -G_ij
    d loss / d h_i = g_i (-G_i W),   d loss / d W = sum_i g_i (-G_i)^T h_i,   g_i = d loss / d log p_i

What a preference loss needs: it weights each document's log-probability by numbers that are known only when all of
them are. cross_entropy.py sums over rows and can use up each chunk of logits at once; here a row's G_i W is kept
instead [N, in_features], and backward multiplies it by -g_i. A frozen head therefore costs the same two products,
and no logits are computed twice. Only a trained head needs g_i before its product, and computes its logits again.

Rounding: logits in their dtype, the rest of a row in float32, log p in float32. Chunks, kernels and their measured
sizes are cross_entropy.py's.
"""

import torch
from torch import Tensor

from trainer.kernels import cross_entropy
from trainer.kernels.cross_entropy import IGNORE_INDEX, PLAIN


def token_log_probs_reference(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The unfused truth, in float32 or the wider dtype of its input; arguments as in token_log_probs."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    logits = hidden_states.to(dtype) @ weight.to(dtype).T
    return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)


# ---- registered ops


@torch.library.custom_op("lowbit::token_log_probs", mutates_args=())
def _token_log_probs(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, with_hidden: bool, with_weight: bool
) -> tuple[Tensor, Tensor]:
    """log p [N] float32, and G_i W [N, in_features], empty unless `with_hidden`."""
    log_probs = torch.empty(len(labels), dtype=torch.float32, device=weight.device)
    grad_hidden = hidden_states.new_empty(hidden_states.shape if with_hidden else 0)
    for rows, logits in cross_entropy.chunks(hidden_states, weight):
        losses = cross_entropy.softmax_gradient(logits, labels[rows], PLAIN, with_grad=with_hidden)
        log_probs[rows] = losses.neg_()
        if with_hidden:
            torch.mm(logits, weight, out=grad_hidden[rows])
    return log_probs, grad_hidden


@_token_log_probs.register_fake
def _(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, with_hidden: bool, with_weight: bool
) -> tuple[Tensor, Tensor]:
    log_probs = labels.new_empty(labels.shape, dtype=torch.float32)
    return log_probs, hidden_states.new_empty(hidden_states.shape if with_hidden else 0)


@torch.library.custom_op("lowbit::token_log_probs_weight_gradient", mutates_args=())
def _weight_gradient(hidden_states: Tensor, weight: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    """sum_i g_i (-G_i)^T h_i [vocab_size, in_features] of the weight's dtype, summed in float32; grad is g [N]."""
    total = (weight.new_empty if len(labels) else weight.new_zeros)(weight.shape, dtype=torch.float32)
    for rows, logits in cross_entropy.chunks(hidden_states, weight):
        cross_entropy.softmax_gradient(logits, labels[rows], PLAIN, with_grad=True)
        weighted = (hidden_states[rows].float() * -grad[rows, None]).to(weight.dtype)
        cross_entropy.add_weight_gradient(total, logits, weighted, first=rows.start == 0)
    return total.to(weight.dtype)


@_weight_gradient.register_fake
def _(hidden_states: Tensor, weight: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    hidden_states, weight, labels, ctx.with_hidden, ctx.with_weight = inputs
    ctx.save_for_backward(output[1], *((hidden_states, weight, labels) if ctx.with_weight else ()))


def _backward(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_hidden, *arguments = ctx.saved_tensors
    hidden = (grad_hidden.float() * -grad[:, None]).to(grad_hidden.dtype) if ctx.with_hidden else None
    return hidden, _weight_gradient(*arguments, grad) if ctx.with_weight else None, None, None, None


_token_log_probs.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def token_log_probs(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each row's label under softmax(hidden_states @ weight.T), without the full logits.

    hidden_states  [N, in_features] float32, bfloat16 or float16; N may be 0
    weight         [vocab_size, in_features] of the same dtype; frozen or trainable
    labels         [N] int64, each in 0..vocab_size-1
    returns        [N] float32, in nats; differentiable once in hidden_states and weight
    raises         ValueError if shapes, dtypes, devices or a label do not fit
    """
    cross_entropy.check("token_log_probs", hidden_states, weight, labels)
    if cross_entropy.kept_rows(labels, IGNORE_INDEX, weight.shape[0]) is not None:
        raise ValueError(f"labels has {IGNORE_INDEX}; token_log_probs takes target rows only, leave the others out")
    with_grad = torch.is_grad_enabled()
    with_hidden, with_weight = (with_grad and tensor.requires_grad for tensor in (hidden_states, weight))
    return _token_log_probs(hidden_states, weight, labels.contiguous(), with_hidden, with_weight)[0]
