"""Linear layers for serving: y = x W^T + bias over a weight that is laid out once, when a model is loaded.

    kind      weight                                                      arithmetic
    dense     floats                                                      float32 sums
    codebook  4-bit codes into a table of 16 values, one scale a group    float32 sums of table[code] * scale, rounded
              (NF4, FP4, symmetric INT4: the table is then -8..7)         once to the dtype of x
    integer   INT4 or INT8, and x in 8 bits, a scale a row or one for all  exact sums of integers: integer_linear.py
A bias is added where the trained layer adds it: `rounds_before_bias`, as QuantLinear does and layers with rounded
inputs, or inside the product as nn.Linear does. With `out_dtype=float32` nothing is rounded, for logits.

Layout of the C++ kernel ("rows"; other devices keep the tensors as they were loaded, "original"):
    dense     [out_features, in_features] as loaded: one weight of the right dtype is not copied
    codebook  codes  [out_features, in_features / 32, 16] uint8: 8 words of 16 bits; bits 4l..4l+3 of word w are
                     the code of k = 8l + w, so that one shift and one look-up give 32 weights in order
              absmax [out_features, in_features / group] float32, double quantization decoded;
                     group = gcd(block_size, in_features), since blocks may cross rows
    integer   panels of 32 features
What this layout cannot say is decoded to a dense weight, and `decoded` says why: groups that 32 does not divide, codes
of several tables in one stack, INT4 with zero points or act-order, INT8 with 16-bit x.

Batch invariance: an element of y is summed in an order that only in_features decides, so a row's result is the same
bits in every batch, with every number of threads. This is what keeps a server's answers reproducible under load. With
`batch_invariant=False` FREE_ORDER_ROWS rows and more go through torch's products, which choose their order by size:
where oneDNN has matrix units that this kernel does not use (AMX) they are faster. On GPUs the flag changes nothing, nor
does it for integers, whose sums are exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.kernels import _cpp, _huge_pages, _tape
from trainer.kernels.codebook4 import CODEBOOKS, CodebookWeight, codebook_dequantize
from trainer.kernels.codebook4_linear import codebook_linear
from trainer.kernels.int4 import SYMMETRIC_ZERO, Int4Weight, int4_dequantize, int4_linear
from trainer.kernels.int8 import Int8Weight, int8_dequantize, int8_linear
from trainer.kernels.integer_linear import (
    IntegerPanels,
    int4_linear_dynamic,
    int8_linear_dynamic,
    integer_linear,
    repack,
    unpack_panels,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPP_DTYPES = (torch.float32, torch.bfloat16)
INT4_TABLE = torch.arange(16, dtype=torch.float32) - SYMMETRIC_ZERO
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}
FREE_ORDER_ROWS = 128
_GROUP = 32  # weights that one look-up decodes

QuantizedWeight = CodebookWeight | Int4Weight | Int8Weight


@dataclass(slots=True)
class LinearWeight:
    """One weight, or several stacked along out_features, as `packed_linear` reads it; made by the `pack_` functions.

    kind        "dense", "codebook" or "integer"
    dtype       of x and of the products
    weight      "rows": [out_features, in_features] of dtype, or codes uint8; None in the other layouts
    absmax      [out_features, in_features / group] float32 beside codes, else None
    table       [16] float32 beside codes: the values that they mean, in units of absmax
    rounds_before_bias   y is rounded before a bias is added, and again after it
    panels      "integer" on a CPU, else None
    x_scale     "integer": [] float32, the static scale of every x; None: one scale a row
    originals   original layout: quantized weights, or one dense tensor
    decoded     why a quantized weight is kept dense; empty where it is not
    """

    kind: str
    dtype: torch.dtype
    out_features: int
    in_features: int
    weight: Tensor | None = None
    absmax: Tensor | None = None
    group: int = 0
    table: Tensor | None = None
    rounds_before_bias: bool = False
    panels: IntegerPanels | None = None
    x_scale: Tensor | None = None
    originals: list[QuantizedWeight | Tensor] = field(default_factory=list)
    decoded: str = ""

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept, but for tables, which all weights share."""
        kept = [self.weight, self.absmax]
        for holder in [*self.originals, self.panels]:
            kept += [holder] if isinstance(holder, Tensor) else [getattr(holder, name, None) for name in _BUFFERS]
        return [tensor for tensor in [*kept, self.x_scale] if tensor is not None]

    def dequantize(self) -> Tensor:
        """[out_features, in_features] of dtype: the weights that x is multiplied by; integer kinds round them once."""
        if self.weight is not None:
            dequantize = _dequantize_rows_cpu if _uses_cpp(self.device, self.dtype) else _dequantize_rows
            return dequantize(self.weight, self.absmax, self.table, self.group, self.in_features, self.dtype)
        if self.panels is not None:
            dense = decode(unpack_panels(self.panels), dtype=self.dtype)
            return dense if self.panels.order is None else dense[:, torch.argsort(self.panels.order)]
        return _cat([decode(original, dtype=self.dtype) for original in self.originals], dim=0)


# packed, absmax, ... of weights as they are stored; codes and order of panels
_BUFFERS = ("packed", "absmax", "nested_absmax", "nested_offset", "codes", "scales", "zeros", "g_idx", "order")


# ---- packing


def pack_linear(weight: Tensor | Sequence[Tensor], *, dtype: torch.dtype) -> LinearWeight:
    """A dense weight for `packed_linear`; several are stacked along out_features, as for a fused q, k, v.

    weight  [out_features, in_features] float each
    dtype   float32, bfloat16 or float16: the weight is rounded to it
    raises  ValueError if shapes do not stack; TypeError for another dtype
    """
    parts = [weight] if isinstance(weight, Tensor) else list(weight)
    _check_parts([tuple(part.shape) for part in parts], dtype)
    dense = _cat([part.detach().to(dtype) for part in parts], dim=0)
    out_features, in_features = dense.shape
    if _uses_cpp(dense.device, dtype):
        return LinearWeight("dense", dtype, out_features, in_features, weight=dense.contiguous())
    return LinearWeight("dense", dtype, out_features, in_features, originals=[dense])


def pack_codebook_linear(weights: Sequence[CodebookWeight], *, dtype: torch.dtype) -> LinearWeight:
    """NF4 or FP4 weights for `packed_linear`, stacked along out_features; the values stay exactly those of training.

    dtype   of x: float32, bfloat16 or float16
    raises  ValueError if shapes do not stack; TypeError for another dtype
    """
    return _pack_codes(weights, dtype, rounds_before_bias=True)


def pack_integer_linear(
    weights: Sequence[Int4Weight | Int8Weight],
    *,
    dtype: torch.dtype,
    rounds_input: bool,
    x_scale: Tensor | None = None,
) -> LinearWeight:
    """INT4 or INT8 weights for `packed_linear`, stacked along out_features; the values stay exactly those of training.

    dtype         of x: float32, bfloat16 or float16
    rounds_input  round x to 8 bits and multiply integers, as FakeQuantLinear(integer=True); else x is as it is
    x_scale       [] float32: by one scale for every x; None: by one scale a row
    raises        ValueError if shapes do not stack or, with rounds_input, if bits, groups, zero points or act-orders
                  differ; TypeError for another dtype
    """
    if not rounds_input:
        return _pack_codes(weights, dtype, rounds_before_bias=False)
    sizes = _check_parts([(weight.out_features, weight.in_features) for weight in weights], dtype)
    on_cpu = weights[0].device.type == "cpu" and dtype in CPP_DTYPES
    if not on_cpu or _cpp.choose("integer_linear", "cpu") != "cpu":
        originals = _merged(weights)
        return LinearWeight("integer", dtype, *sizes, rounds_before_bias=True, originals=originals, x_scale=x_scale)
    return LinearWeight("integer", dtype, *sizes, rounds_before_bias=True, panels=repack(weights), x_scale=x_scale)


def place_linears(weights: Sequence[LinearWeight]) -> None:
    """Move packed CPU weights, in place, side by side into large pages, in the order in which a forward reads them.

    Dense weights stay: they are often shared with the module they come from. Each weight is freed as it is moved, so
    the most that is held is all of them and the largest one more.
    """
    moved = []
    for weight in weights:
        if weight.panels is not None:
            moved += [(weight.panels, name) for name in ("codes", "scales", "zeros")]
        elif weight.absmax is not None and weight.device.type == "cpu":
            moved += [(weight, name) for name in ("weight", "absmax")]
    moved = [(holder, name) for holder, name in moved if getattr(holder, name) is not None]
    tensors = [getattr(holder, name) for holder, name in moved]
    places = _huge_pages.side_by_side([(tensor.shape, tensor.dtype) for tensor in tensors])
    del tensors
    for (holder, name), place in zip(moved, places, strict=True):
        setattr(holder, name, place.copy_(getattr(holder, name)))


def decode(weight: QuantizedWeight | Tensor, *, dtype: torch.dtype) -> Tensor:
    """[out_features, in_features] of dtype behind a weight of any kind, each value rounded once."""
    match weight:
        case CodebookWeight():
            return codebook_dequantize(weight, dtype=dtype)
        case Int4Weight():
            return int4_dequantize(weight, dtype=dtype)
        case Int8Weight():
            return int8_dequantize(weight, dtype=dtype)
    return weight.to(dtype)


def _pack_codes(weights: Sequence[QuantizedWeight], dtype: torch.dtype, *, rounds_before_bias: bool) -> LinearWeight:
    sizes = _check_parts([(weight.out_features, weight.in_features) for weight in weights], dtype)
    if not _uses_cpp(weights[0].device, dtype):
        originals = _merged(weights)
        return LinearWeight("codebook", dtype, *sizes, rounds_before_bias=rounds_before_bias, originals=originals)
    tables = [_table(weight) for weight in weights]
    group = math.gcd(sizes[1], *(_span(weight) for weight in weights))
    decoded = _why_decoded(tables, group)
    if decoded:
        dense = _cat([decode(weight, dtype=dtype) for weight in weights], dim=0)
        return LinearWeight(
            "dense", dtype, *sizes, weight=dense, rounds_before_bias=rounds_before_bias, decoded=decoded
        )
    codes = _cat([_rows_of_codes(weight) for weight in weights], dim=0)
    absmax = _cat([_spread_absmax(weight, group) for weight in weights], dim=0)
    layout = {"weight": codes, "absmax": absmax, "group": group, "table": tables[0]}
    return LinearWeight("codebook", dtype, *sizes, rounds_before_bias=rounds_before_bias, **layout)


def _why_decoded(tables: list[Tensor | None], group: int) -> str:
    if any(table is None for table in tables):
        return "8-bit codes, zero points or act-order have no table of 16 values"
    if any(table is not tables[0] for table in tables):
        return "their parts are of several codebooks"
    return f"groups of {group} are no multiple of {_GROUP}" if group % _GROUP else ""


def _table(weight: QuantizedWeight) -> Tensor | None:
    """The values of the codes in units of a group's scale, where 16 values say it all."""
    if isinstance(weight, CodebookWeight):
        return CODEBOOKS[weight.codebook].values
    symmetric = isinstance(weight, Int4Weight) and weight.zeros is None and weight.g_idx is None
    return INT4_TABLE if symmetric else None


def _span(weight: QuantizedWeight) -> int:
    return weight.block_size if isinstance(weight, CodebookWeight) else weight.group_size


def _uses_cpp(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in CPP_DTYPES and _cpp.choose("packed_linear", "cpu") == "cpu"


def _check_parts(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[int, int]:
    """[out_features, in_features] of the stack"""
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}; use one of {', '.join(map(str, DTYPES))}")
    if not shapes or any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) != 1:
        raise ValueError(f"weights of shapes {shapes} do not stack; each must be [out_features, same in_features]")
    if shapes[0][1] == 0:
        raise ValueError(f"weights of shapes {shapes} have no input features; give at least 1")
    return sum(shape[0] for shape in shapes), shapes[0][1]


def _cat(tensors: list[Tensor], *, dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)  # torch.cat copies even one


def _merged(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """One weight for one call, where every part ends with a group and is coded alike; otherwise the parts."""
    first = weights[0]
    alike = {(type(weight), _span(weight), _table(weight) is _table(first)) for weight in weights}
    if len(weights) == 1 or len(alike) > 1:
        return list(weights)
    sizes = sum(weight.out_features for weight in weights), first.in_features
    packed = torch.cat([weight.packed for weight in weights])
    if isinstance(first, CodebookWeight):
        if any(weight.numel % weight.block_size for weight in weights):
            return list(weights)
        absmax = torch.cat([weight.plain_absmax() for weight in weights])
        return [CodebookWeight(packed, absmax, None, None, *sizes, first.block_size, first.codebook)]
    scales = torch.cat([weight.scales for weight in weights])
    if isinstance(first, Int8Weight):
        return [Int8Weight(packed, scales, *sizes, first.group_size)]
    if _table(first) is None:
        return list(weights)
    return [Int4Weight(packed, scales, None, None, *sizes, first.group_size)]


def _rows_of_codes(weight: CodebookWeight | Int4Weight) -> Tensor:
    """[out_features, in_features / 2] uint8, in the order of the module's docstring."""
    flat = weight.packed.reshape(-1)
    first, second = (flat >> 4, flat & 15) if isinstance(weight, CodebookWeight) else (flat & 15, flat >> 4)
    codes = torch.stack([first, second], dim=1).view(-1, 4, 8)  # [groups of 32, l, w]
    low, high = codes[:, 0] | codes[:, 1] << 4, codes[:, 2] | codes[:, 3] << 4
    return torch.stack([low, high], dim=2).view(weight.out_features, weight.in_features // 2)


def _spread_absmax(weight: CodebookWeight | Int4Weight, group: int) -> Tensor:
    scales = weight.plain_absmax() if isinstance(weight, CodebookWeight) else weight.scales.view(-1)
    per_group = scales.repeat_interleave(_span(weight) // group)
    return per_group[: weight.out_features * weight.in_features // group].view(weight.out_features, -1)


def _dequantize_rows(
    weight: Tensor, absmax: Tensor | None, table: Tensor | None, group: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    if absmax is None:
        return weight
    low, high = weight.view(-1, 8, 2).unbind(2)
    codes = torch.stack([low & 15, low >> 4, high & 15, high >> 4], dim=1)  # [groups of 32, l, w]
    values = table.to(weight.device)[codes.view(-1, group).int()] * absmax.view(-1, 1)
    return values.view(-1, in_features).to(dtype)


# ---- reference


def packed_linear_reference(
    x: Tensor, dense: Tensor, bias: Tensor | None, *, rounds_before_bias: bool, out_dtype: torch.dtype
) -> Tensor:
    """The formula over a dense weight of x's dtype; float16 and bfloat16 sums are float32 inside torch's products."""
    if out_dtype != x.dtype:
        y = _product_in_float32(x, dense)
        return y if bias is None else y + bias.float()
    if bias is not None and not rounds_before_bias:
        return torch.nn.functional.linear(x, dense, bias)
    y = x @ dense.T
    return y if bias is None else y + bias


def _product_in_float32(x: Tensor, dense: Tensor) -> Tensor:
    if x.device.type == "cuda":
        return torch.mm(x, dense.T, out_dtype=torch.float32)  # no float32 copy of the weight
    return x.float() @ dense.float().T


# ---- C++


def packed_linear_cpu(
    x: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    *,
    group: int,
    rounds_before_bias: bool,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Tensor:
    if not batch_invariant and x.shape[0] >= FREE_ORDER_ROWS:
        dense = _dequantize_rows_cpu(weight, absmax, table, group, x.shape[1], x.dtype)
        return packed_linear_reference(x, dense, bias, rounds_before_bias=rounds_before_bias, out_dtype=out_dtype)
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    if y.numel():
        _tape.call(
            _tape.kernel("packed_linear", "packed_linear"),
            x, x.shape[0], weight, absmax, group, table, bias, int(rounds_before_bias),
            y, weight.shape[0], x.shape[1], _DTYPE_IDS[x.dtype], _DTYPE_IDS[out_dtype],
        )  # fmt: skip
    return y


def _dequantize_rows_cpu(
    weight: Tensor, absmax: Tensor | None, table: Tensor | None, group: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    if absmax is None:
        return weight
    dense = torch.empty(weight.shape[0], in_features, dtype=dtype)
    if dense.numel():
        _tape.call(
            _tape.kernel("packed_linear", "dequantize"),
            weight, absmax, group, table, dense, *dense.shape, _DTYPE_IDS[dtype],
        )  # fmt: skip
    return dense


# ---- registered op: the "rows" layout


@torch.library.custom_op("lowbit::packed_linear", mutates_args=())
def _packed_linear(
    x: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    group: int,
    rounds_before_bias: bool,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Tensor:
    if x.dtype in CPP_DTYPES and _cpp.choose("packed_linear", x.device.type) == "cpu":
        options = {"rounds_before_bias": rounds_before_bias, "batch_invariant": batch_invariant}
        return packed_linear_cpu(x, weight, absmax, table, bias, group=group, out_dtype=out_dtype, **options)
    dense = _dequantize_rows(weight, absmax, table, group, x.shape[1], x.dtype)
    return packed_linear_reference(x, dense, bias, rounds_before_bias=rounds_before_bias, out_dtype=out_dtype)


@_packed_linear.register_fake
def _(x, weight, absmax, table, bias, group, rounds_before_bias, out_dtype, batch_invariant) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


# ---- what the rest of the product calls


def packed_linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = True,
) -> Tensor:
    """y = x W^T + bias, without a gradient.

    x        [num_tokens, in_features] of weight.dtype, contiguous
    bias     [out_features] of weight.dtype
    out_dtype        weight.dtype (default) or float32
    batch_invariant  every row the same bits in every batch, see above; False allows other orders, and no tape
    returns  [num_tokens, out_features] of out_dtype
    raises   ValueError if a shape or dtype does not fit
    """
    out_dtype = out_dtype or x.dtype
    _check(x, weight, bias, out_dtype)
    if weight.panels is not None:
        return integer_linear(x, weight.panels, bias, x_scale=weight.x_scale, out_dtype=out_dtype)
    options = {"rounds_before_bias": weight.rounds_before_bias, "out_dtype": out_dtype}
    if weight.weight is not None:
        tensors = weight.weight, weight.absmax, weight.table, bias
        if _cpp.choose("packed_linear", x.device.type) == "cpu":
            return packed_linear_cpu(x, *tensors, group=weight.group, batch_invariant=batch_invariant, **options)
        return _packed_linear(x, *tensors, weight.group, *options.values(), batch_invariant)
    return _linear_of_originals(x, weight, bias, **options)


def _linear_of_originals(
    x: Tensor, weight: LinearWeight, bias: Tensor | None, *, rounds_before_bias: bool, out_dtype: torch.dtype
) -> Tensor:
    if weight.kind == "integer":
        y = _cat([_integer_part(x, part, weight.x_scale, out_dtype) for part in weight.originals], dim=1)
        return y if bias is None else y + bias.to(out_dtype)
    # The ops of quantized weights round y to x's dtype, before a bias.
    fits = out_dtype == x.dtype and (bias is None or rounds_before_bias)
    if weight.kind == "dense" or not fits:
        options = {"rounds_before_bias": rounds_before_bias, "out_dtype": out_dtype}
        return packed_linear_reference(x, weight.dequantize(), bias, **options)
    y = _cat([_part(x, part) for part in weight.originals], dim=1)
    return y if bias is None else y + bias


def _part(x: Tensor, part: QuantizedWeight) -> Tensor:
    match part:
        case CodebookWeight():
            return codebook_linear(x, part)
        case Int4Weight():
            return int4_linear(x, part)
    return int8_linear(x, part)


def _integer_part(x: Tensor, part: Int4Weight | Int8Weight, x_scale: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    multiply = int4_linear_dynamic if isinstance(part, Int4Weight) else int8_linear_dynamic
    return multiply(x, part, x_scale=x_scale, out_dtype=out_dtype)


def _check(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != weight.dtype or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; this weight takes contiguous {weight.dtype} "
            f"[num_tokens, {weight.in_features}]; reshape x, or pack the weight for its dtype"
        )
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != (weight.out_features,)):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}; this weight takes {weight.dtype} [{weight.out_features}]"
        )
    if out_dtype not in (weight.dtype, torch.float32):
        raise ValueError(f"out_dtype={out_dtype}; use {weight.dtype} or torch.float32")
