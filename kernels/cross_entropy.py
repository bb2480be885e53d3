"""Linear and cross-entropy in one op, in chunks of rows: the full logits never exist.

    l_i = h_i W^T + bias,   x_i = scale l_i,   z_i = cap tanh(x_i / cap), or x_i without a cap
    lse_i = log sum_j exp z_ij,   eps = label_smoothing,   V = vocab_size
    loss = sum_i  lse_i - (1 - eps) z_i[label_i] - eps / V sum_j z_ij + z_loss lse_i^2
    d loss / d z_ij = (1 + 2 z_loss lse_i) softmax(z_i)_j - (1 - eps) [j = label_i] - eps / V
    d loss / d l_ij = d loss / d z_ij (1 - (z_ij / cap)^2) scale =: G_ij,   d loss / d h = G W,   d loss / d W = G^T h

Label smoothing is that of Szegedy et al. (arXiv:1512.00567, section 7), the z-loss that of PaLM (arXiv:2204.02311,
section 5), the cap that of Gemma 2 (arXiv:2408.00118, section 2).

A chunk of rows has everything for its gradient at hand, so forward computes it at once (as Liger, arXiv:2410.10989,
section 3, does) and backward only multiplies it by the incoming scalar. Between the products one kernel turns the
logits, in place and in their dtype, into losses and G: 26 ms of 330 for SmolLM2-135M's head, 1022 rows, two Zen 4
cores. Rows whose label is ignored are dropped first and cost nothing.

Rounding: logits are rounded to their dtype after the product and after each step of scale and cap, where transformers
rounds, and all that follows is float32 (sums of a row) and float64 (sums over rows). The weight's gradient is summed
over chunks in float32: 32 chunks of bfloat16 logits end 0.25 % from the float64 gradient, as a bfloat16 sum 0.68 %, and
the unfused loss 0.19 % (1024 x 256, 8192 rows), for 4 % more time than the bfloat16 sum (SmolLM2-135M's head).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.kernels import _cpp
from trainer.kernels._tape import call_beside_torch, kernel
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORE_INDEX = -100
CHUNK_ROWS = 256
"""Rows of a chunk on CPUs: the products repack the weight for each chunk, which takes many rows to pay. GFLOP/s of the
two products, bfloat16, two Zen 4 cores with 32 MB of L3: head of SmolLM2-135M (49152 x 576) 128 rows 376 and 323, 256
rows 405 and 371, 512 rows 391 and 405; of Qwen3-0.6B (151936 x 1024) 64 rows 343 and 283, 256 rows 419 and 399, 512
rows 425 and 398. 256 rows are 25 MB of logits at 49152 tokens of vocabulary."""
CHUNK_ROWS_GPU = 2048  # not timed on hardware yet
BLOCK_VOCAB = 4096  # rows of the weight's gradient that are added while their product lies in the cache
BLOCK_V = 4096  # logits that a Triton program holds at a time; not timed on hardware yet
NUM_WARPS = 8
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


class Options(NamedTuple):
    """Numbers of the formula above, which the op takes as a list; linear_cross_entropy describes them."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    """0: none."""

    @property
    def inverse_softcap(self) -> float:
        return 1 / self.softcap if self.softcap else 0.0


PLAIN = Options()


def linear_cross_entropy_reference(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """The unfused truth, in float32 or the wider dtype of its input; arguments as in linear_cross_entropy."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    kept = labels != ignore_index
    labels = labels[kept, None]
    logits = hidden_states[kept].to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_sum = logits.logsumexp(-1)
    loss = log_sum - (1 - label_smoothing) * logits.gather(-1, labels)[:, 0] + z_loss * log_sum**2
    return (loss - label_smoothing * logits.mean(-1)).sum()


# ---- logits to losses and, in place, to their gradient: one signature
#
#   logits   [n, vocab_size] contiguous; z above, and afterwards G if with_grad
#   labels   [n] int64 in 0..vocab_size-1
#   returns  [n] float64 or float32, the loss of each row


def softmax_gradient_reference(logits: Tensor, labels: Tensor, options: Options, *, with_grad: bool) -> Tensor:
    z, label = logits.float(), labels[:, None]
    top = z.amax(-1, keepdim=True)
    exp = (z - top).exp_()
    exp_sum = exp.sum(-1, keepdim=True)
    log_sum, at_label = top + exp_sum.log(), z.gather(-1, label)
    # The difference first: large logits would cost it its places.
    loss = (top - at_label) + exp_sum.log() + options.label_smoothing * at_label + options.z_loss * log_sum**2
    if options.label_smoothing:
        loss -= options.label_smoothing * z.mean(-1, keepdim=True)
    if with_grad:
        grad = exp.mul_((1 + 2 * options.z_loss * log_sum) / exp_sum).sub_(options.label_smoothing / z.shape[1])
        grad.scatter_add_(-1, label, grad.new_full(label.shape, options.label_smoothing - 1))
        if options.softcap:
            grad *= 1 - (z * options.inverse_softcap) ** 2
        logits.copy_(grad.mul_(options.logit_scale))
    return loss[:, 0]


def softmax_gradient_cpu(logits: Tensor, labels: Tensor, options: Options, *, with_grad: bool) -> Tensor:
    losses = torch.empty(len(labels), dtype=torch.float64)
    call_beside_torch(
        kernel("cross_entropy", "softmax_gradient"), _DTYPE_IDS[logits.dtype], logits, *logits.shape, labels, losses,
        options.z_loss, options.label_smoothing, options.logit_scale, options.inverse_softcap, int(with_grad),
    )  # fmt: skip
    return losses


@triton.jit
def _softmax_gradient_kernel(
    logits_ptr, labels_ptr, losses_ptr, stride_row, vocab_size, z_loss, label_smoothing, logit_scale, inverse_softcap,
    HAS_SOFTCAP: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row a program: largest logit and sums in a pass, the gradient in a second that finds the row in the cache."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    label = tl.load(labels_ptr + row)
    # Read before the first reduction below, which every thread passes before any of them overwrites the row.
    at_label = tl.load(row_ptr + label).to(tl.float32)
    top = tl.full((), float("-inf"), tl.float32)
    exp_sums = tl.zeros((BLOCK_V,), tl.float32)
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        mask = column < vocab_size
        z = tl.load(row_ptr + column, mask=mask, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # so far only -inf, whose exponential is 0
        exp_sums = exp_sums * tl.exp(top - shift) + tl.exp(z - shift)
        sums += tl.where(mask, z, 0.0)
        top = higher
    exp_sum = tl.sum(exp_sums, axis=0)
    log_sum = top + tl.log(exp_sum)
    # The difference first: large logits would cost it its places.
    loss = (top - at_label) + tl.log(exp_sum) + label_smoothing * at_label + z_loss * log_sum * log_sum
    if label_smoothing != 0.0:
        loss -= label_smoothing * (tl.sum(sums, axis=0) / vocab_size)
    tl.store(losses_ptr + row, loss)
    if WITH_GRAD:
        factor = (1.0 + 2.0 * z_loss * log_sum) / exp_sum
        for start in range(0, vocab_size, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            mask = column < vocab_size
            z = tl.load(row_ptr + column, mask=mask, other=float("-inf")).to(tl.float32)
            grad = tl.exp(z - top) * factor - label_smoothing / vocab_size
            grad = tl.where(column == label, grad - (1.0 - label_smoothing), grad)
            if HAS_SOFTCAP:
                capped = z * inverse_softcap
                grad *= 1.0 - capped * capped
            tl.store(row_ptr + column, (grad * logit_scale).to(logits_ptr.dtype.element_ty), mask=mask)


def softmax_gradient_triton(logits: Tensor, labels: Tensor, options: Options, *, with_grad: bool) -> Tensor:
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    default = {"BLOCK_V": BLOCK_V, "num_warps": NUM_WARPS}
    tile = tiles("cross_entropy", logits.device, default, itemsize=logits.element_size())
    _softmax_gradient_kernel[(len(labels),)](
        logits, labels, losses, logits.stride(0), logits.shape[1],
        options.z_loss, options.label_smoothing, options.logit_scale, options.inverse_softcap,
        HAS_SOFTCAP=options.softcap != 0, WITH_GRAD=with_grad, **tile,
    )  # fmt: skip
    return losses


_IMPLEMENTATIONS = {
    "reference": softmax_gradient_reference,
    "cpu": softmax_gradient_cpu,
    "triton": softmax_gradient_triton,
}


def softmax_gradient(logits: Tensor, labels: Tensor, options: Options, *, with_grad: bool) -> Tensor:
    """By the implementation for these logits."""
    name = _cpp.choose("cross_entropy", logits.device.type)
    if name == "cpu" and logits.dtype not in _DTYPE_IDS:
        name = "reference"
    return _IMPLEMENTATIONS[name](logits, labels, options, with_grad=with_grad)


def chunks(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, options: Options = PLAIN
) -> Iterator[tuple[slice, Tensor]]:
    """z of the module's docstring, some rows at a time: the rows, and their logits in a buffer that the next reuse."""
    num_rows = len(hidden_states)
    chunk_rows = min(num_rows, CHUNK_ROWS if weight.is_cpu else CHUNK_ROWS_GPU)
    buffer = hidden_states.new_empty(chunk_rows, weight.shape[0])
    for start in range(0, num_rows, chunk_rows or 1):
        rows = slice(start, min(start + chunk_rows, num_rows))
        logits = buffer[: rows.stop - start]
        _logits(hidden_states[rows], weight, bias, options, out=logits)
        yield rows, logits


# ---- registered op


def _chunked(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    options: list[float],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients to hidden states, weight and bias; empty where not `wanted`. Arguments as the op's."""
    kept = kept_rows(labels, ignore_index, weight.shape[0])
    if kept is not None:
        hidden_states, labels = hidden_states[kept], labels[kept]
    labels = labels.contiguous()
    with_hidden, with_weight, with_bias = wanted
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    grad_hidden = hidden_states.new_empty(hidden_states.shape if with_hidden else 0)
    # Written by the first chunk; zeros are for no chunk at all, and one more pass over the largest tensor here.
    new = weight.new_empty if len(labels) else weight.new_zeros
    grad_weight = new(weight.shape if with_weight else 0, dtype=torch.float32)
    grad_bias = weight.new_zeros(weight.shape[:1] if with_bias else 0, dtype=torch.float32)
    for rows, logits in chunks(hidden_states, weight, bias, Options(*options)):
        losses = softmax_gradient(logits, labels[rows], Options(*options), with_grad=any(wanted))
        loss += losses.sum(dtype=torch.float64)
        if with_hidden:
            torch.mm(logits, weight, out=grad_hidden[rows])
        if with_weight:
            add_weight_gradient(grad_weight, logits, hidden_states[rows], first=rows.start == 0)
        if with_bias:
            grad_bias += logits.sum(0, dtype=torch.float32)
    if with_hidden and kept is not None:
        grad_hidden = grad_hidden.new_zeros(len(kept), weight.shape[1]).index_put_((kept,), grad_hidden)
    return loss.float(), grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def kept_rows(labels: Tensor, ignore_index: int, vocab_size: int) -> Tensor | None:
    """Which rows are not ignored [N] bool; None for all.

    raises  ValueError if a label is neither ignore_index nor a row of the weight
    """
    ignored = labels == ignore_index
    wrong = ((labels < 0) | (labels >= vocab_size)) & ~ignored
    any_wrong, any_ignored = torch.stack([wrong.any(), ignored.any()]).tolist()  # a GPU waits once
    if any_wrong:
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"labels[{row}]={int(labels[row])} of {len(labels)}; the weight has {vocab_size} rows, so a label is "
            f"0..{vocab_size - 1}, or ignore_index={ignore_index}; does the tokenizer belong to this model?"
        )
    return ~ignored if any_ignored else None


def _logits(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, options: Options, *, out: Tensor) -> None:
    """z of the module's docstring, each step rounded as Gemma 2, Granite and Cohere do in transformers."""
    if bias is None:
        torch.mm(hidden_states, weight.T, out=out)
    else:
        torch.addmm(bias, hidden_states, weight.T, out=out)
    if options.logit_scale != 1:
        out *= options.logit_scale
    if options.softcap:
        out.div_(options.softcap).tanh_().mul_(options.softcap)


def add_weight_gradient(total: Tensor, grad_logits: Tensor, hidden_states: Tensor, *, first: bool) -> None:
    """total [vocab_size, in_features] float32 += grad_logits^T hidden_states, or = for the first, in blocks of rows."""
    product = hidden_states.new_empty(min(BLOCK_VOCAB, len(total)), total.shape[1])
    for start in range(0, len(total), BLOCK_VOCAB):
        block = total[start : start + BLOCK_VOCAB]
        out = product[: len(block)]
        torch.mm(grad_logits[:, start : start + BLOCK_VOCAB].T, hidden_states, out=out)
        block.copy_(out) if first else block.add_(out)


@torch.library.custom_op("lowbit::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    options: list[float],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _chunked(hidden_states, weight, bias, labels, ignore_index, options, wanted)


@_linear_cross_entropy.register_fake
def _(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    options: list[float],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = (hidden_states.shape, weight.shape, weight.shape[:1])
    grads = [weight.new_empty(shape if with_grad else 0) for shape, with_grad in zip(shapes, wanted, strict=True)]
    return weight.new_empty((), dtype=torch.float32), *grads


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[-1]
    ctx.save_for_backward(*output[1:])


def _backward(ctx, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden_states, weight, bias = (
        scaled(grad, grad_loss) if wanted else None for grad, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return hidden_states, weight, bias, *[None] * 4


def scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """grad * scale with the scale in float32: rounded to bfloat16 it would change the length of every gradient alike.

    On CPUs torch does so by itself for a scalar tensor; other devices round it first.
    """
    if grad.is_cpu or grad.dtype == torch.float32:
        return grad * scale
    return (grad.float() * scale).to(grad.dtype)


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Sum of the cross-entropies of `hidden_states @ weight.T` against `labels`, without the full logits.

    hidden_states    [N, in_features] float32, bfloat16 or float16; N may be 0
    weight           [vocab_size, in_features] of the same dtype; frozen or trainable
    labels           [N] int64, each in 0..vocab_size-1, or ignore_index: no loss and no gradient from this row
    bias             [vocab_size] of the same dtype, or None
    z_loss           weight of the squared log of the softmax's sum (PaLM: 1e-4)
    label_smoothing  share of the target that is spread over the vocabulary, 0 <= label_smoothing < 1
    logit_scale      factor of the logits (Granite: 1 / config.logits_scaling; Cohere: config.logit_scale)
    softcap          Gemma's config.final_logit_softcapping, or None
    returns          [] float32, the sum over the rows that are not ignored, in nats; differentiable once in
                     hidden_states, weight and bias
    raises           ValueError if shapes, dtypes, devices, numbers or a label do not fit
    """
    check("linear_cross_entropy", hidden_states, weight, labels, bias)
    if not (z_loss >= 0 and math.isfinite(z_loss) and 0 <= label_smoothing < 1):
        raise ValueError(
            f"z_loss={z_loss}, label_smoothing={label_smoothing}; linear_cross_entropy takes a finite z_loss from 0 "
            "and a label_smoothing from 0 to below 1; 0 turns either off"
        )
    if not (math.isfinite(logit_scale) and (softcap is None or (softcap > 0 and math.isfinite(softcap)))):
        raise ValueError(
            f"logit_scale={logit_scale}, softcap={softcap}; linear_cross_entropy takes a finite logit_scale and a "
            "finite softcap above 0, or None for no cap"
        )
    wanted = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (hidden_states, weight, bias)
    ]
    options = [float(z_loss), float(label_smoothing), float(logit_scale), float(softcap or 0)]
    return _linear_cross_entropy(hidden_states, weight, bias, labels, ignore_index, options, wanted)[0]


def check(op: str, hidden_states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> None:
    """raises ValueError unless `op` can read these tensors"""
    fit = (
        hidden_states.ndim == 2
        and weight.ndim == 2
        and hidden_states.shape[1] == weight.shape[1]
        and labels.shape == hidden_states.shape[:1]
        and labels.dtype == torch.int64
        and hidden_states.dtype == weight.dtype in DTYPES
        and hidden_states.device == weight.device == labels.device
        and (bias is None or bias.shape == weight.shape[:1] and bias.dtype == weight.dtype)
        and (bias is None or bias.device == weight.device)
    )
    if not fit:
        got = ", ".join(
            f"{name} {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            for name, tensor in (
                ("hidden_states", hidden_states),
                ("weight", weight),
                ("labels", labels),
                ("bias", bias),
            )
            if tensor is not None
        )
        raise ValueError(
            f"{op} got {got}; it takes hidden_states [N, in_features] and weight [vocab_size, "
            "in_features] of one dtype (float32, bfloat16 or float16), labels [N] int64 and bias [vocab_size] of the "
            "weight's dtype, all on one device; use .to()"
        )
