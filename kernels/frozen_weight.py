"""Frozen weights of any storage, stacked: what a training projection multiplies by.

A `FrozenWeight` says how a matrix is stored and holds its tensors; adding a kind is one line in `_KINDS`. Projections
that read the same input (q, k, v; gate, up) are stacked, one below the other, and multiplied in one product:

    weights   q [576, 576] nf4 | k [192, 576] nf4 | v [192, 576] dense   ->   dense rows [960, 576] in the dtype of x

Packed weights are decoded into the rows of one buffer, in forward and again in backward. A caller with memory to spare
decodes some of them once, `weight.decoded(dtype)`: that is how a memory budget is spent. Dense weights that are rows of
one tensor, in this order, are multiplied where they lie, without a copy.

The surprising thing: on CPUs the buffer is kept between calls. The C library returns what is larger than 32 MB to the
system at once, and the system's fresh pages cost ten times as much as decoding into them: 20 ms for the 67 MB of a
[16384, 2048] stack, beside 158 ms for its product with 1024 rows (2 Zen 4 cores). What stays allocated is the largest
stack decoded so far, one for each thread that decodes at the same time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.kernels.codebook4 import CodebookWeight, codebook_dequantize_into
from trainer.kernels.codebook4_linear import MAX_FUSED_ROWS, codebook_linear
from trainer.kernels.codebook_bits import BitsWeight, bits_dequantize_into
from trainer.kernels.int4 import Int4Weight, int4_dequantize_into
from trainer.kernels.int8 import Int8Weight, int8_dequantize_into

PackedWeight = CodebookWeight | BitsWeight | Int4Weight | Int8Weight


@dataclass(frozen=True, slots=True)
class FrozenWeight:
    """One weight matrix without a gradient.

    kind     how it is stored: one of `KINDS`
    tensors  dense, decoded   the weight [out_features, in_features], float
             nf4, fp4         packed, absmax, nested_absmax or None, nested_offset or None; see kernels/codebook4.py
             nf3, nf2         the same; see kernels/codebook_bits.py
             int4             packed, scales, zeros or None, g_idx or None; see kernels/int4.py
             int8             packed, scales; see kernels/int8.py
    span     weights that share one scale: block_size of codebooks, group_size of int4 and int8, 0 of the others
    raises   ValueError if the kind is unknown, or if a dense weight has another shape

    "dense" never was packed, "decoded" is a copy of a packed weight: they differ in how a bias is rounded.
    """

    kind: str
    tensors: tuple[Tensor | None, ...]
    out_features: int
    in_features: int
    span: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind={self.kind!r} is no storage of a frozen weight; use one of {list(_KINDS)}")
        shape = list(self.tensors[0].shape)
        if self.kind in _PLAIN and shape != [self.out_features, self.in_features]:
            raise ValueError(
                f"a {self.kind} weight of shape {shape} was declared as [{self.out_features}, {self.in_features}]; "
                "give the matrix and its own sizes"
            )

    @classmethod
    def dense(cls, weight: Tensor) -> "FrozenWeight":
        """weight [out_features, in_features] float; used without a copy where its dtype is that of x."""
        return cls("dense", (weight.detach(),), *weight.shape)

    def decoded(self, dtype: torch.dtype) -> "FrozenWeight":
        """The same weight as a matrix of dtype, rounded once: more memory, and no decoding in each product."""
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.tensors[0].device)
        self.decode_into(out)
        return FrozenWeight("dense" if self.kind == "dense" else "decoded", (out,), *out.shape)

    def decode_into(self, out: Tensor) -> None:
        """Overwrite out [out_features, in_features], contiguous, float32, bfloat16 or float16, with the weight."""
        if self.kind in _PLAIN:
            out.copy_(self.tensors[0])
        else:
            _KINDS[self.kind].decode_into(self.packed(), out)

    def packed(self) -> PackedWeight:
        """The argument of the kernels of this kind, which check its sizes."""
        return _KINDS[self.kind].make(*self.tensors, self.out_features, self.in_features, self.span)


class _Kind(NamedTuple):
    make: Callable[..., PackedWeight]
    """From the tensors, out_features, in_features and the span."""
    decode_into: Callable[[PackedWeight, Tensor], None]
    few_rows: Callable[[Tensor, PackedWeight], Tensor] | None = None
    """x and a packed weight to x W^T, for up to MAX_FUSED_ROWS rows, decoded beside the sums; None: there is none."""


_PLAIN = ("dense", "decoded")
_KINDS: dict[str, _Kind | None] = {
    **dict.fromkeys(_PLAIN),
    "nf4": _Kind(CodebookWeight, codebook_dequantize_into, codebook_linear),
    "fp4": _Kind(functools.partial(CodebookWeight, codebook="fp4"), codebook_dequantize_into, codebook_linear),
    "nf3": _Kind(functools.partial(BitsWeight, codebook="nf3"), bits_dequantize_into),
    "nf2": _Kind(functools.partial(BitsWeight, codebook="nf2"), bits_dequantize_into),
    "int4": _Kind(Int4Weight, int4_dequantize_into),
    "int8": _Kind(Int8Weight, int8_dequantize_into),
}
KINDS = tuple(_KINDS)


# ---- weights as arguments of a registered op: a list of tensors and a string


def flatten(weights: Sequence[FrozenWeight]) -> tuple[list[Tensor], str]:
    """The tensors that are there, and the layout: "kind out_features in_features span present" for each weight."""
    tensors = [tensor for weight in weights for tensor in weight.tensors if tensor is not None]
    layout = ";".join(
        f"{w.kind} {w.out_features} {w.in_features} {w.span} {''.join('01'[t is not None] for t in w.tensors)}"
        for w in weights
    )
    return tensors, layout


def unflatten(tensors: Sequence[Tensor], layout: str) -> list[FrozenWeight]:
    """The weights behind `flatten`."""
    left = iter(tensors)
    return [
        FrozenWeight(kind, tuple(next(left) if there else None for there in present), *sizes)
        for kind, sizes, present in _parse(layout)
    ]


@functools.lru_cache(maxsize=1024)
def _parse(layout: str) -> tuple[tuple[str, tuple[int, int, int], tuple[bool, ...]], ...]:
    """A layout as (kind, (out_features, in_features, span), which tensors are there) for each weight."""
    fields = [part.split() for part in layout.split(";")]
    return tuple((kind, tuple(map(int, sizes)), tuple(c == "1" for c in present)) for kind, *sizes, present in fields)


def out_features(layout: str) -> tuple[int, ...]:
    """The rows of each weight of a layout."""
    return tuple(sizes[0] for _, sizes, _ in _parse(layout))


# ---- products


def multiply(x: Tensor, weights: Sequence[FrozenWeight], bias: Tensor | None = None) -> Tensor:
    """x times the stacked weights, x W^T + bias, without a gradient.

    x        [T, in_features] float32, bfloat16 or float16
    bias     [sum of out_features] of x's dtype
    returns  [T, sum of out_features] of x's dtype, contiguous; rounded once, and again with a bias unless all weights
             are dense: as the server adds the bias of a packed layer to a rounded y, and nn.Linear to the sum
    """
    kinds = [_KINDS[weight.kind] for weight in weights]
    if x.shape[0] <= MAX_FUSED_ROWS and all(kind is not None and kind.few_rows for kind in kinds):
        parts = [kind.few_rows(x, weight.packed()) for kind, weight in zip(kinds, weights, strict=True)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return y if bias is None else y.add_(bias)
    with _stacked(weights, x.dtype) as dense:
        if bias is not None and all(weight.kind == "dense" for weight in weights):
            return torch.nn.functional.linear(x, dense, bias)
        y = x @ dense.T
    return y if bias is None else y.add_(bias)


def multiply_transposed(grad: Tensor, weights: Sequence[FrozenWeight]) -> Tensor:
    """The gradient of `multiply`'s x: [T, sum of out_features] -> [T, in_features], grad W, rounded once."""
    with _stacked(weights, grad.dtype) as dense:
        return grad @ dense


@contextmanager
def _stacked(weights: Sequence[FrozenWeight], dtype: torch.dtype) -> Iterator[Tensor]:
    """The weights one below the other, [sum of out_features, in_features] of dtype; on a CPU valid inside only."""
    sizes, in_features, device = [w.out_features for w in weights], weights[0].in_features, weights[0].tensors[0].device
    dense = _rows_of_one_tensor(weights, dtype)
    if dense is not None:
        yield dense.as_strided((sum(sizes), in_features), (in_features, 1))
        return
    nbytes = sum(sizes) * in_features * dtype.itemsize
    buffer = _take(nbytes) if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        out = buffer[:nbytes].view(dtype).view(sum(sizes), in_features)
        for weight, rows in zip(weights, out.split(sizes), strict=True):
            weight.decode_into(rows)
        yield out
    finally:
        if device.type == "cpu":
            _free.append(buffer)


_free: list[Tensor] = []


def _take(nbytes: int) -> Tensor:
    """A buffer that nobody uses; a smaller one is given up for it."""
    try:
        buffer = _free.pop()  # one step, so that two threads never get the same
    except IndexError:
        buffer = None
    if buffer is None or buffer.nbytes < nbytes:
        del buffer
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            buffer = torch.empty(nbytes, dtype=torch.uint8)
    return buffer


def _rows_of_one_tensor(weights: Sequence[FrozenWeight], dtype: torch.dtype) -> Tensor | None:
    """The first weight, if all are matrices of this dtype and each begins in memory where the one above it ends."""
    if any(weight.kind not in _PLAIN for weight in weights):
        return None
    first = weights[0].tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for weight in weights:
        rows = weight.tensors[0]
        adjacent = rows.data_ptr() == end and rows.untyped_storage().data_ptr() == storage
        if rows.dtype != dtype or not rows.is_contiguous() or not adjacent:
            return None
        end += rows.nbytes
    return first
