"""Linear layers for serving: y = x W^T + bias over a dense or NF4 weight that is laid out once, when a model is loaded.

    nf4    y = round(round(sum_k x_k W_k) + bias)     as QuantLinear: the bias is added to a rounded y
    dense  y = round(sum_k x_k W_k + bias)            as nn.Linear's addmm: one rounding
Sums are float32. W is what training multiplies: CODEBOOK[code] * absmax in float32, rounded once to the dtype of x.
With `out_dtype=float32` nothing is rounded, for logits.

Layout of the C++ kernel ("rows"; other devices keep the tensors as they were loaded, "original"):
    dense  [out_features, in_features] as loaded: one weight of the right dtype is not copied
    nf4    codes  [out_features, in_features / 32, 16] uint8: 8 words of 16 bits; bits 4l..4l+3 of word w are
                  the code of k = 8l + w, so that one shift and one look-up give 32 weights in order
           absmax [out_features, in_features / group] float32, double quantization decoded;
                  group = gcd(block_size, in_features), since blocks may cross rows
    nf4 weights with in_features not divisible by 32 (no model of any size has them) are decoded to dense ones.

Batch invariance: an element of y is summed in an order that only in_features decides, so a row's result is the same
bits in every batch, with every number of threads. This is what keeps a server's answers reproducible under load. With
`batch_invariant=False` FREE_ORDER_ROWS rows and more go through torch's products, which choose their order by size:
where oneDNN has matrix units that this kernel does not use (AMX) they are faster. On GPUs the flag changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.kernels import _cpp, _huge_pages, _tape
from trainer.kernels.nf4 import NF4_CODEBOOK, NF4Weight, nf4_dequantize, nf4_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPP_DTYPES = (torch.float32, torch.bfloat16)
_CODEBOOK = torch.tensor(NF4_CODEBOOK)
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}
FREE_ORDER_ROWS = 128
_GROUP = 32  # weights that one look-up decodes


@dataclass(slots=True)
class LinearWeight:
    """One weight, or several stacked along out_features, as `packed_linear` reads it; made by `pack_linear`.

    kind        "dense" or "nf4": decides how a bias is rounded
    dtype       of x and of the products
    weight      "rows": [out_features, in_features] of dtype, or codes uint8; None in the original layout
    absmax      [out_features, in_features / group] float32 beside codes, else None
    originals   original layout: NF4Weights, or one dense tensor
    """

    kind: str
    dtype: torch.dtype
    out_features: int
    in_features: int
    weight: Tensor | None = None
    absmax: Tensor | None = None
    group: int = 0
    originals: list[NF4Weight | Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.originals[0].device if self.weight is None else self.weight.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept."""
        kept = [self.weight, self.absmax]
        for original in self.originals:
            if isinstance(original, Tensor):
                kept.append(original)
            else:
                kept += [original.packed, original.absmax, original.nested_absmax, original.nested_offset]
        return [tensor for tensor in kept if tensor is not None]

    def dequantize(self) -> Tensor:
        """[out_features, in_features] of dtype: the exact weights that x is multiplied by."""
        if self.weight is not None:
            dequantize = _dequantize_rows_cpu if _uses_cpp(self.device, self.dtype) else _dequantize_rows
            return dequantize(self.weight, self.absmax, self.group, self.in_features, self.dtype)
        return _cat([_dense(original, self.dtype) for original in self.originals], dim=0)


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


def pack_nf4_linear(weights: Sequence[NF4Weight], *, dtype: torch.dtype) -> LinearWeight:
    """NF4 weights for `packed_linear`, stacked along out_features; the values stay exactly those of training.

    dtype   of x: float32, bfloat16 or float16
    raises  ValueError if shapes do not stack; TypeError for another dtype
    """
    _check_parts([(weight.out_features, weight.in_features) for weight in weights], dtype)
    out_features, in_features = sum(weight.out_features for weight in weights), weights[0].in_features
    if not _uses_cpp(weights[0].device, dtype):
        return LinearWeight("nf4", dtype, out_features, in_features, originals=_merged(weights))
    group = math.gcd(in_features, *(weight.block_size for weight in weights))
    if group % _GROUP:
        dense = torch.cat([_dense(weight, dtype) for weight in weights])
        return LinearWeight("nf4", dtype, out_features, in_features, weight=dense)
    codes = torch.cat([_pack_codes(weight) for weight in weights])
    absmax = torch.cat([_spread_absmax(weight, group) for weight in weights])
    return LinearWeight("nf4", dtype, out_features, in_features, weight=codes, absmax=absmax, group=group)


def place_linears(weights: Sequence[LinearWeight]) -> None:
    """Move packed CPU weights, in place, side by side into large pages, in the order in which a forward reads them.

    Dense weights stay: they are often shared with the module they come from. Each weight is freed as it is moved, so
    the most that is held is all of them and the largest one more.
    """
    packed = [weight for weight in weights if weight.absmax is not None and weight.device.type == "cpu"]
    shapes = [(t.shape, t.dtype) for weight in packed for t in (weight.weight, weight.absmax)]
    places = iter(_huge_pages.side_by_side(shapes))
    for weight in packed:
        weight.weight = next(places).copy_(weight.weight)
        weight.absmax = next(places).copy_(weight.absmax)


def _uses_cpp(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in CPP_DTYPES and _cpp.choose("packed_linear", "cpu") == "cpu"


def _check_parts(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}; use one of {', '.join(map(str, DTYPES))}")
    if not shapes or any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) != 1:
        raise ValueError(f"weights of shapes {shapes} do not stack; each must be [out_features, same in_features]")
    if shapes[0][1] == 0:
        raise ValueError(f"weights of shapes {shapes} have no input features; give at least 1")


def _dense(original: NF4Weight | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(original, Tensor):
        return original
    sizes = {"out_features": original.out_features, "in_features": original.in_features}
    scales = original.absmax, original.nested_absmax, original.nested_offset
    return nf4_dequantize(original.packed, *scales, **sizes, block_size=original.block_size, dtype=dtype)


def _cat(tensors: list[Tensor], *, dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)  # torch.cat copies even one


def _merged(weights: Sequence[NF4Weight]) -> list[NF4Weight]:
    """One weight for one call, where every part ends with a block; otherwise the parts."""
    block_size, in_features = weights[0].block_size, weights[0].in_features
    if len(weights) == 1 or any(w.block_size != block_size or w.numel % block_size for w in weights):
        return list(weights)
    packed, absmax = torch.cat([w.packed for w in weights]), torch.cat([w.plain_absmax() for w in weights])
    return [NF4Weight(packed, absmax, None, None, sum(w.out_features for w in weights), in_features, block_size)]


def _pack_codes(weight: NF4Weight) -> Tensor:
    """[out_features, in_features / 2] uint8, in the order of the module's docstring."""
    codes = torch.stack([weight.packed >> 4, weight.packed & 15], dim=1)
    codes = codes.view(-1, 4, 8)  # [groups of 32, l, w]
    low, high = codes[:, 0] | codes[:, 1] << 4, codes[:, 2] | codes[:, 3] << 4
    return torch.stack([low, high], dim=2).view(weight.out_features, weight.in_features // 2)


def _spread_absmax(weight: NF4Weight, group: int) -> Tensor:
    per_group = weight.plain_absmax().repeat_interleave(weight.block_size // group)
    return per_group[: weight.numel // group].view(weight.out_features, -1)


def _dequantize_rows(weight: Tensor, absmax: Tensor | None, group: int, in_features: int, dtype: torch.dtype) -> Tensor:
    if absmax is None:
        return weight
    low, high = weight.view(-1, 8, 2).unbind(2)
    codes = torch.stack([low & 15, low >> 4, high & 15, high >> 4], dim=1)  # [groups of 32, l, w]
    values = _CODEBOOK.to(weight.device)[codes.view(-1, group).int()] * absmax.view(-1, 1)
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
    bias: Tensor | None,
    *,
    group: int,
    rounds_before_bias: bool,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Tensor:
    if not batch_invariant and x.shape[0] >= FREE_ORDER_ROWS:
        dense = _dequantize_rows_cpu(weight, absmax, group, x.shape[1], x.dtype)
        return packed_linear_reference(x, dense, bias, rounds_before_bias=rounds_before_bias, out_dtype=out_dtype)
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    if y.numel():
        _tape.call(
            _tape.kernel("packed_linear", "packed_linear"),
            x, x.shape[0], weight, absmax, group, _CODEBOOK, bias, int(rounds_before_bias),
            y, weight.shape[0], x.shape[1], _DTYPE_IDS[x.dtype], _DTYPE_IDS[out_dtype],
        )  # fmt: skip
    return y


def _dequantize_rows_cpu(
    weight: Tensor, absmax: Tensor | None, group: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    if absmax is None:
        return weight
    dense = torch.empty(weight.shape[0], in_features, dtype=dtype)
    if dense.numel():
        _tape.call(
            _tape.kernel("packed_linear", "dequantize"),
            weight, absmax, group, _CODEBOOK, dense, *dense.shape, _DTYPE_IDS[dtype],
        )  # fmt: skip
    return dense


# ---- registered op: the "rows" layout


@torch.library.custom_op("lowbit::packed_linear", mutates_args=())
def _packed_linear(
    x: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    bias: Tensor | None,
    group: int,
    rounds_before_bias: bool,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Tensor:
    if x.dtype in CPP_DTYPES and _cpp.choose("packed_linear", x.device.type) == "cpu":
        options = {"rounds_before_bias": rounds_before_bias, "batch_invariant": batch_invariant}
        return packed_linear_cpu(x, weight, absmax, bias, group=group, out_dtype=out_dtype, **options)
    dense = _dequantize_rows(weight, absmax, group, x.shape[1], x.dtype)
    return packed_linear_reference(x, dense, bias, rounds_before_bias=rounds_before_bias, out_dtype=out_dtype)


@_packed_linear.register_fake
def _(x, weight, absmax, bias, group, rounds_before_bias, out_dtype, batch_invariant) -> Tensor:
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
    options = {"rounds_before_bias": weight.kind == "nf4", "out_dtype": out_dtype}
    if weight.weight is not None:
        tensors = weight.weight, weight.absmax, bias
        if _cpp.choose("packed_linear", x.device.type) == "cpu":
            return packed_linear_cpu(x, *tensors, group=weight.group, batch_invariant=batch_invariant, **options)
        return _packed_linear(x, *tensors, weight.group, *options.values(), batch_invariant)
    if weight.kind == "dense" or out_dtype != x.dtype:
        return packed_linear_reference(x, weight.dequantize(), bias, **options)
    y = _cat([_nf4_part(x, part) for part in weight.originals], dim=1)
    return y if bias is None else y + bias


def _nf4_part(x: Tensor, part: NF4Weight) -> Tensor:
    scales = part.absmax, part.nested_absmax, part.nested_offset
    return nf4_linear(x, part.packed, *scales, out_features=part.out_features, block_size=part.block_size)


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
