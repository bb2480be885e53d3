"""The likeliest token of each row, argmax_i x . w_i over the output head, without computing all logits.

A server that samples greedily needs one number of each row of logits, and reading the head is a third of a small
model's step. Beside the head [V, K] stands a copy in 8 bits, and only what that copy cannot rule out is computed:

    w_i = s_i q_i + d_i      q_i int8, s_i = max |w_i| / 127, per feature, when the head is loaded
    x   = u (256 high + low) + r      two digits of 8 bits, per row: 16 bits, since hidden states have outliers
    estimate_i = s_i u (256 high . q_i + low . q_i)      integer sums
    | x . w_i - estimate_i | <= |x| |d_i| + |r| |s_i q_i|      Cauchy-Schwarz, twice

Logits are themselves float32 sums, so what is compared are computed numbers, and the bound b_i has room for their
rounding: at most (K + 8) 2^-23 |x| |w_i| in any order of summation (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1), and a little for the estimate's own. Then

    candidates = {i: estimate_i + b_i >= max_j (estimate_j - b_j)}

contain every feature whose computed logit is the largest. Their logits are computed by packed_linear's own kernel, so
the token is, bit for bit, the argmax of packed_linear's logits, the lowest id of equals. It does not depend on the
batch. On real text SmolLM2-135M has 8 candidates of 49,152 in the median, 112 in the 99th percentile and 228 at most;
where a row has more than 1024 in a part of the vocabulary (all logits equal, say), or its values leave what the bounds
cover, all its logits are computed.

Layout of the copy: [ceil(V / 64), ceil(K / 4), 64, 4] uint8, code + 128. A vector of 64 bytes is 4 values along k of 16
features: what AVX512-VNNI multiplies by 4 bytes of x, without a sum across lanes, reading memory in order.

On GPUs the logits are computed: the copy would save as little there as the head is small beside the layers.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels import _cpp, _huge_pages, _tape
from trainer.kernels.packed_linear import CPP_DTYPES, LinearWeight, packed_linear

PANEL = 64
MAX_IN_FEATURES = 65536  # an int32 holds so many products of 255 and 127
CHUNK = 8 * PANEL  # features whose float64 errors are computed at a time
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}
_UP = 1 + 2**-20  # more than a rounding to float32 takes away


@dataclass(slots=True)
class GreedyHead:
    """An output head with its copy in 8 bits; made by `pack_greedy_head`.

    head     the dense weight [V, K] that logits are computed from
    codes    [ceil(V / 64), ceil(K / 4), 64, 4] uint8
    bounds   [3, ceil(V / 64) * 64] float32: scales, |d_i| and max(|w_i|, |s_i q_i|), the last two rounded up
    """

    head: LinearWeight
    codes: Tensor
    bounds: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of what stands beside the head."""
        return self.codes.nbytes + self.bounds.nbytes


def pack_greedy_head(head: LinearWeight) -> GreedyHead | None:
    """The copy in 8 bits of a dense head; half the bytes of a bfloat16 one.

    returns  None where logits are the way to the token: on a GPU, without C++ kernels, for a head that is not dense or
             has a value that is not finite, and for more than 65,536 input features
    """
    if head.kind != "dense" or head.weight is None or head.dtype not in CPP_DTYPES:
        return None
    if head.in_features > MAX_IN_FEATURES or _cpp.choose("greedy_head", head.device.type) != "cpu":
        return None
    num_panels, num_fours = -(-head.out_features // PANEL), -(-head.in_features // 4)
    codes = _huge_pages.empty((num_panels, num_fours, PANEL, 4), torch.uint8)
    bounds = torch.tensor([0, torch.inf, 0])[:, None].repeat(1, num_panels * PANEL)  # padding is never a lower bound
    for begin in range(0, head.out_features, CHUNK):
        weight = head.weight[begin : begin + CHUNK].float()
        if not weight.isfinite().all():
            return None
        part, bounds[:, begin : begin + len(weight)] = _quantize(weight)
        padding = (0, -head.in_features % 4, 0, -len(weight) % PANEL)
        part = torch.nn.functional.pad(part, padding, value=128).view(-1, PANEL, num_fours, 4)
        codes[begin // PANEL :][: len(part)] = part.transpose(1, 2)
    return GreedyHead(head, codes, bounds)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[F, K] float32 -> codes + 128 [F, K] uint8, bounds [3, F] float32"""
    smallest = torch.finfo(torch.float32).tiny
    scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=smallest)
    codes = (weight / scales).round().clamp(-127, 127)
    near = codes.double() * scales.double()
    exact = weight.double()
    errors = (exact - near).square_().sum(1).sqrt_()
    norms = torch.maximum(exact.square().sum(1), near.square().sum(1)).sqrt_()
    bounds = torch.stack([scales[:, 0].double(), errors * _UP, norms * _UP]).float()
    return (codes + 128).to(torch.uint8), bounds


# ---- reference


def greedy_head_reference(x: Tensor, head: LinearWeight) -> Tensor:
    """The formula: all logits, then the lowest id of the largest; -1 where that is not finite."""
    logits = packed_linear(x, head, out_dtype=torch.float32)
    peaks = logits.amax(-1, keepdim=True)  # nan where a row has one
    ids = torch.arange(logits.shape[1], device=x.device).expand_as(logits)
    first = ids.where(logits == peaks, logits.shape[1]).amin(-1)
    return first.where(peaks[:, 0].isfinite(), -1)


# ---- C++


def greedy_head_cpu(x: Tensor, weight: Tensor, codes: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and how many logits of each row were computed: [R] int64 each."""
    tokens, counts = torch.empty(2, x.shape[0], dtype=torch.int64).unbind()
    if x.shape[0]:
        _tape.call(
            _tape.kernel("greedy_head", "greedy_head"),
            x, x.shape[0], weight, *weight.shape, _DTYPE_IDS[x.dtype], codes, *bounds.unbind(), _linear_address(),
            tokens, counts,
        )  # fmt: skip
    return tokens, counts


@functools.cache
def _linear_address() -> int:
    return ctypes.cast(_tape.kernel("packed_linear", "packed_linear"), ctypes.c_void_p).value


# ---- registered op


@torch.library.custom_op("lowbit::greedy_head", mutates_args=())
def _greedy_head(x: Tensor, weight: Tensor, codes: Tensor, bounds: Tensor) -> Tensor:
    if _cpp.choose("greedy_head", x.device.type) == "cpu":
        return greedy_head_cpu(x, weight, codes, bounds)[0].clone()
    return greedy_head_reference(x, LinearWeight("dense", x.dtype, *weight.shape, weight=weight))


@_greedy_head.register_fake
def _(x: Tensor, weight: Tensor, codes: Tensor, bounds: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.int64)


# ---- what the rest of the product calls


def greedy_head(x: Tensor, head: GreedyHead) -> Tensor:
    """The argmax of `packed_linear(x, head.head, out_dtype=torch.float32)`, the lowest id of equals.

    x        [R, K] of the head's dtype, contiguous
    returns  [R] int64; -1 where the largest logit is not finite (nan counts as largest)
    raises   ValueError if x does not fit
    """
    weight = head.head
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != weight.dtype or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; this head takes contiguous {weight.dtype} [R, {weight.in_features}]; "
            "reshape x, or pack the head for its dtype"
        )
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} and the head on {weight.device}; use .to()")
    if _cpp.choose("greedy_head", x.device.type) == "cpu":
        return greedy_head_cpu(x, weight.weight, head.codes, head.bounds)[0]
    return greedy_head_reference(x, weight)
