"""Linear, cross-entropy and divergence from a teacher in one op, in chunks of rows: the full logits never exist.

    z_i = h_i W^T,   q_i = softmax(z_i / T),   p_i = the teacher's softmax at T,   w = kl_weight
    loss = sum_i  (1 - w) CE(z_i, label_i)  [a row without a label: 0]  +  w T^2 D_i
    D_i = sum_c p_c log(p_c / q_c)      forward; sum_c q_c log(q_c / p_c) for reverse
    d D_i / d z_ij = (q_c - p_c) q_j / (T q_c)   or   q_j (log(q_c / p_c) - D_i) / T,   c the outcome that token j is in

T^2 keeps the gradient's size when T changes (Hinton et al., arXiv:1503.02531, section 2). Outcomes c:

- `TopK`: the k likeliest tokens of the teacher, one each, and all other tokens together. Merging outcomes can only
  lower a divergence (data processing inequality), so D is a lower bound, 0 where the student equals the teacher, and
  what is missing is how the student divides the rest. Without the last outcome the teacher's k probabilities sum to
  less than 1 and D is no divergence: forward KL then pushes q above p on the k tokens, and normalised over the k tokens
  it does not see what the student puts elsewhere.
- `Whole`: every token; the teacher's hidden states and head stand in for its logits.

As in kernels/cross_entropy.py, forward computes the gradient of a chunk while its logits are there, in place, and
backward multiplies it by the incoming scalar. The student's mass outside the k tokens is summed by itself: 1 minus the
others would lose its places when it is small. Processor time of forward and backward over linear_cross_entropy's,
SmolLM2-135M's frozen head, 512 rows, bfloat16, a thread of Zen 4: 1.01 at k = 64, 1.05 with T = 2, 1.61 for `Whole`,
whose head is one product more.

Rounding: as there. The teacher's log-probabilities come in float16 (at most 1e-4 off in a probability: |log p| p 2^-11
for p in 0..1) and are normalised in float32, so that both sides sum to 1 and D is not negative by rounding of p.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.kernels import _cpp, cross_entropy
from trainer.kernels._tape import call_beside_torch, kernel

IGNORE_INDEX = cross_entropy.IGNORE_INDEX
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}  # what C++ computes; see cpp/lowbit.h


class TopK(NamedTuple):
    """A teacher's likeliest tokens at each row, at the temperature of the loss."""

    ids: Tensor
    """[N, k] int32, each token at most once in a row."""
    log_probs: Tensor
    """[N, k + 1] float: of these tokens, and of all others together; -inf for none."""


class Whole(NamedTuple):
    """A teacher that runs beside the student."""

    hidden_states: Tensor
    """[N, its hidden size], of the student's dtype."""
    weight: Tensor
    """[vocab_size, its hidden size]"""


class Options(NamedTuple):
    """Numbers of the formula above, which the op takes as a list."""

    kl_weight: float
    temperature: float
    reverse: float
    """0 or 1"""


class Sums(NamedTuple):
    """What `linear_distillation` returns."""

    loss: Tensor
    """[] float32, differentiable once in hidden states and weight."""
    cross_entropy: Tensor
    """[] float64, over the rows with a label, in nats."""
    divergence: Tensor
    """[] float64, over all rows, in nats, without the factor T^2."""


def divergence_reference(log_p: Tensor, log_q: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """D of each row, and its gradient to the logits of outcomes that are single tokens (times T).

    log_p, log_q  [..., outcomes] float, teacher and student
    returns       [...]; [..., outcomes]
    """
    p, q = log_p.exp(), log_q.exp()
    if not reverse:
        return torch.where(p > 0, p * (log_p - log_q), 0).sum(-1), q - p
    ratio = torch.where(q > 0, log_q - log_p, 0)
    divergence = (q * ratio).sum(-1)
    return divergence, q * (ratio - divergence[..., None])


def top_k_log_probs(logits: Tensor, k: int, *, temperature: float) -> TopK:
    """What a teacher says at each row, in float32.

    logits   [N, vocab_size] float
    k        1..vocab_size tokens; the likeliest, in no order
    """
    scaled = logits.float() / temperature
    values, ids = scaled.topk(k, sorted=False)
    rest = scaled.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    log_probs = torch.cat([values, rest], dim=-1)
    return TopK(ids.int(), log_probs - log_probs.logsumexp(-1, keepdim=True))


# ---- logits to losses and, in place, to their gradient: one signature
#
#   logits   [n, vocab_size] contiguous; z above, and afterwards the gradient of the loss if with_grad
#   labels   [n] int64 in 0..vocab_size-1, or IGNORE_INDEX
#   teacher  TopK, its log_probs float32; or its logits [n, vocab_size] of the dtype of `logits`
#   returns  [n, 2] float, cross-entropy (0 without a label) and divergence of each row


def distillation_gradient_reference(
    logits: Tensor, labels: Tensor, teacher: TopK | Tensor, options: Options, *, with_grad: bool
) -> Tensor:
    z, reverse = logits.to(torch.promote_types(logits.dtype, torch.float32)), bool(options.reverse)
    scaled = z / options.temperature
    if isinstance(teacher, TopK):
        ids = teacher.ids.long()
        rest = scaled.scatter(-1, ids, float("-inf"))
        log_rest = rest.logsumexp(-1, keepdim=True)
        log_q = torch.cat([scaled.gather(-1, ids), log_rest], dim=-1)
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
        divergence, slopes = divergence_reference(teacher.log_probs.to(z.dtype), log_q, reverse=reverse)
        inside = torch.where(log_rest > float("-inf"), (rest - log_rest).exp(), 0)  # of the last outcome
        slope = (inside * slopes[:, -1:]).scatter(-1, ids, slopes[:, :-1])
    else:
        log_p = (teacher.to(z.dtype) / options.temperature).log_softmax(-1)
        divergence, slope = divergence_reference(log_p, scaled.log_softmax(-1), reverse=reverse)
    labelled = labels != IGNORE_INDEX
    log_softmax, label = z.log_softmax(-1), labels.clamp(min=0)[:, None]
    losses = torch.stack([torch.where(labelled, -log_softmax.gather(-1, label)[:, 0], 0), divergence], dim=-1)
    if with_grad:
        weights = (1 - options.kl_weight) * labelled[:, None].to(z.dtype)
        grad = log_softmax.exp().scatter_add(-1, label, z.new_full(label.shape, -1.0)).mul_(weights)
        logits.copy_(grad.add_(slope, alpha=options.kl_weight * options.temperature))
    return losses


def distillation_gradient_cpu(
    logits: Tensor, labels: Tensor, teacher: TopK | Tensor, options: Options, *, with_grad: bool
) -> Tensor:
    losses = torch.empty(len(labels), 2, dtype=torch.float64)
    weights = 1 - options.kl_weight, options.kl_weight * options.temperature**2
    numbers = *weights, 1 / options.temperature, int(options.reverse), int(with_grad)
    arguments = _DTYPE_IDS[logits.dtype], logits, *logits.shape, *numbers, labels, losses
    if isinstance(teacher, TopK):
        function = kernel("distill_loss", "distill_top_k")
        call_beside_torch(function, *arguments, *teacher, teacher.ids.shape[1])
    else:
        call_beside_torch(kernel("distill_loss", "distill_whole"), *arguments, teacher)
    return losses


def _distillation_gradient(
    logits: Tensor, labels: Tensor, teacher: TopK | Tensor, options: Options, *, with_grad: bool
) -> Tensor:
    """C++ on CPUs; there is no Triton kernel, so GPUs run the reference."""
    on_cpu = logits.is_cpu and logits.dtype in _DTYPE_IDS and _cpp.choose("distill_loss", "cpu") == "cpu"
    implementation = distillation_gradient_cpu if on_cpu else distillation_gradient_reference
    return implementation(logits, labels, teacher, options, with_grad=with_grad)


# ---- registered op


@torch.library.custom_op("lowbit::linear_distillation", mutates_args=())
def _linear_distillation(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Tensor,
    teacher_values: Tensor,
    options: list[float],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, sums [2] float64, and the gradients to hidden states and weight; empty where not `wanted`.

    teacher, teacher_values  the fields of TopK (teacher is int32), or of Whole
    """
    num_rows, vocab_size = len(hidden_states), len(weight)
    chunk_rows = min(num_rows, cross_entropy.CHUNK_ROWS if weight.is_cpu else cross_entropy.CHUNK_ROWS_GPU)
    buffer = hidden_states.new_empty(chunk_rows, vocab_size)
    top_k = teacher.dtype == torch.int32
    teacher_buffer = hidden_states.new_empty(0 if top_k else chunk_rows, vocab_size)
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
    with_hidden, with_weight = wanted
    grad_hidden = hidden_states.new_empty(hidden_states.shape if with_hidden else 0)
    new = weight.new_empty if num_rows else weight.new_zeros  # the first chunk writes it
    grad_weight = new(weight.shape if with_weight else 0, dtype=torch.float32)
    for start in range(0, num_rows, chunk_rows or 1):
        rows = slice(start, min(start + chunk_rows, num_rows))
        logits = torch.mm(hidden_states[rows], weight.T, out=buffer[: rows.stop - start])
        if top_k:
            said = TopK(teacher[rows], teacher_values[rows])
        else:
            said = torch.mm(teacher[rows], teacher_values.T, out=teacher_buffer[: rows.stop - start])
        sums += _distillation_gradient(logits, labels[rows], said, Options(*options), with_grad=any(wanted)).sum(
            0, dtype=torch.float64
        )
        if with_hidden:
            torch.mm(logits, weight, out=grad_hidden[rows])
        if with_weight:
            cross_entropy.add_weight_gradient(grad_weight, logits, hidden_states[rows], first=start == 0)
    return _mixed(sums, Options(*options)).float(), sums, grad_hidden, grad_weight.to(weight.dtype)


@_linear_distillation.register_fake
def _(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Tensor,
    teacher_values: Tensor,
    options: list[float],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = zip((hidden_states.shape, weight.shape), wanted, strict=True)
    grads = [weight.new_empty(shape if with_grad else 0) for shape, with_grad in shapes]
    return weight.new_empty((), dtype=torch.float32), weight.new_empty(2, dtype=torch.float64), *grads


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[-1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output[2:])


def _backward(ctx, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    pairs = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    return *(cross_entropy.scaled(grad, grad_loss) if wanted else None for grad, wanted in pairs), *[None] * 5


_linear_distillation.register_autograd(_backward, setup_context=_setup_context)


# ---- what the rest of the product calls


def linear_distillation(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TopK | Whole,
    *,
    kl_weight: float,
    temperature: float = 1.0,
    reverse: bool = False,
) -> Sums:
    """(1 - kl_weight) cross-entropy + kl_weight T^2 divergence of `hidden_states @ weight.T`, summed over rows.

    hidden_states  [N, in_features] float32, bfloat16 or float16; N may be 0
    weight         [vocab_size, in_features] of the same dtype; frozen or trainable
    labels         [N] int64, each in 0..vocab_size-1, or -100: no cross-entropy at this row
    teacher        what it says at each row; nothing flows back to it
    kl_weight      0..1
    temperature    T above 0, of both sides' softmax in the divergence
    reverse        KL(student || teacher) instead of KL(teacher || student)
    raises         ValueError if shapes, dtypes, devices, numbers, a label or a token id do not fit
    """
    _check_numbers(kl_weight, temperature)
    cross_entropy.check("linear_distillation", hidden_states, weight, labels)
    cross_entropy.kept_rows(labels, IGNORE_INDEX, len(weight))
    _check_teacher(teacher, hidden_states, weight)
    if isinstance(teacher, TopK):
        given = [teacher.ids.contiguous(), teacher.log_probs.float().log_softmax(-1)]
    else:
        given = [teacher.hidden_states.detach(), teacher.weight.detach()]
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_states, weight)]
    options = [float(kl_weight), float(temperature), float(reverse)]
    loss, sums, *_ = _linear_distillation(hidden_states, weight, labels.contiguous(), *given, options, wanted)
    return Sums(loss, *sums.unbind())


def distillation(
    logits: Tensor,
    labels: Tensor,
    teacher: TopK | Tensor,
    *,
    kl_weight: float,
    temperature: float = 1.0,
    reverse: bool = False,
) -> Sums:
    """The same for a model whose logits are there as a whole.

    logits   [N, vocab_size] float; left as they are
    teacher  TopK, or its logits [N, vocab_size] of the same dtype
    """
    _check_numbers(kl_weight, temperature)
    cross_entropy.kept_rows(labels, IGNORE_INDEX, logits.shape[1])
    if isinstance(teacher, TopK):
        teacher = TopK(teacher.ids.contiguous(), teacher.log_probs.float().log_softmax(-1))
    options = Options(float(kl_weight), float(temperature), float(reverse))
    return Sums(*_Distillation.apply(logits, labels.contiguous(), teacher, options))


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, teacher: TopK | Tensor, options: Options) -> tuple[Tensor, ...]:
        grad = logits.detach().clone(memory_format=torch.contiguous_format)
        teacher = teacher if isinstance(teacher, TopK) else teacher.detach().contiguous()
        losses = _distillation_gradient(grad, labels, teacher, options, with_grad=ctx.needs_input_grad[0])
        ctx.save_for_backward(grad)
        sums = losses.sum(0, dtype=torch.float64)
        parts = [part.clone() for part in sums]
        ctx.mark_non_differentiable(*parts)
        return _mixed(sums, options).float(), *parts

    @staticmethod
    def backward(ctx, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return cross_entropy.scaled(*ctx.saved_tensors, grad_loss), None, None, None


def _mixed(sums: Tensor, options: Options) -> Tensor:
    return (1 - options.kl_weight) * sums[0] + options.kl_weight * options.temperature**2 * sums[1]


def _check_numbers(kl_weight: float, temperature: float) -> None:
    if not (0 <= kl_weight <= 1 and 0 < temperature < math.inf):
        raise ValueError(
            f"kl_weight={kl_weight}, temperature={temperature}; linear_distillation takes a kl_weight in 0..1 and a "
            "finite temperature above 0"
        )


def _check_teacher(teacher: TopK | Whole, hidden_states: Tensor, weight: Tensor) -> None:
    """raises ValueError unless it speaks about these rows and this vocabulary"""
    rows, vocab_size = len(hidden_states), len(weight)
    if isinstance(teacher, TopK):
        ids, log_probs = teacher
        fits = ids.ndim == 2 and len(ids) == rows and log_probs.shape == (rows, ids.shape[1] + 1)
        fits = fits and ids.dtype == torch.int32 and 0 < ids.shape[1] <= vocab_size
        if fits and ids.numel() and bool(((ids < 0) | (ids >= vocab_size)).any()):
            raise ValueError(
                f"teacher.ids reach from {int(ids.min())} to {int(ids.max())}, and the weight has {vocab_size} rows; "
                "the teacher must have the student's vocabulary"
            )
        wanted = f"ids [{rows}, k] int32 with k in 1..{vocab_size} and log_probs [{rows}, k + 1]"
    else:
        states, head = teacher
        fits = states.ndim == 2 and len(states) == rows and head.shape == (vocab_size, states.shape[1])
        fits = fits and states.dtype == head.dtype == hidden_states.dtype
        wanted = f"hidden_states [{rows}, size] and weight [{vocab_size}, size] of {hidden_states.dtype}"
    if not (fits and all(tensor.device == weight.device for tensor in teacher)):
        got = ", ".join(f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" for tensor in teacher)
        raise ValueError(f"teacher has {got}; linear_distillation takes {wanted}, on {weight.device}")
