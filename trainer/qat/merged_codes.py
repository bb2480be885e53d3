"""Codes of W + s B A, for which the sum exists a few rows at a time.

The merged weight is float32(W) + (s B) A in one fixed order (kernels/merged_weight.py), rounded from float32 and never
stored in 16 bits. Groups and rows of a chunk are whole, so codes do not depend on where chunks end; what is a function
of the whole weight, the second quantization of NF4's scales, comes after the last chunk.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.kernels.double_quant import quantize_absmax
from trainer.kernels.float_grids import FloatGrid, FloatWeight
from trainer.kernels.lora_linear import Adapter
from trainer.kernels.merged_weight import merge_rows
from trainer.qat.fake_weight import FromWeight, Learned
from trainer.quantizer import QuantizedTensor, Quantizer

CHUNK_WEIGHTS = 1 << 20
"""Merged weights that exist at a time: 4 MB, which stay in a processor's cache while they are rounded."""

Codes = QuantizedTensor | FloatWeight


class MergedWeight(NamedTuple):
    """W + s B A of one layer, as what it is made of.

    weight    [out_features, in_features] float
    lora_A    [rank, in_features] float32, rank 0 without an adapter
    scaled_B  [out_features, rank] float32: s B, rounded once
    """

    weight: Tensor
    lora_A: Tensor
    scaled_B: Tensor

    @classmethod
    def of(cls, weight: Tensor, adapter: Adapter | None) -> "MergedWeight":
        """weight [out_features, in_features] float; the adapter's factors fit it"""
        weight = weight.detach()
        if adapter is None:
            out_features, in_features = weight.shape
            empty = weight.new_empty(0, dtype=torch.float32)
            return cls(weight, empty.view(0, in_features), empty.view(out_features, 0))
        lora_A, lora_B, scaling = adapter
        return cls(weight, lora_A.detach().float(), lora_B.detach().float() * scaling)

    def chunks(self, quantizer: Quantizer | FloatGrid) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and their W + s B A [rows, in_features] float32, in one buffer that the next chunk overwrites."""
        num_rows, in_features = self.weight.shape
        step = _rows_of_a_chunk(quantizer, num_rows, in_features)
        buffer = torch.empty(min(step, num_rows), in_features, device=self.weight.device)
        for begin in range(0, num_rows, step):
            rows = slice(begin, min(begin + step, num_rows))
            chunk = buffer[: rows.stop - rows.start]
            merge_rows(self.weight[rows], self.lora_A, self.scaled_B[rows], chunk)
            yield rows, chunk

    def kept(self) -> "MergedWeight":
        """One that later steps do not change: A is copied, s B is a copy, W is frozen."""
        return self._replace(lora_A=self.lora_A.clone())

    def equals(self, other: "MergedWeight") -> bool:
        """Whether both are one weight, bit for bit; W, which is frozen, is compared by place."""
        same = self.weight.data_ptr() == other.weight.data_ptr() and self.weight.dtype == other.weight.dtype
        return same and equal_tensors(self[1:], other[1:])


def equal_tensors(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    """Whether tensors are equal one by one; None equals None."""
    return all(
        x is y or (x is not None and y is not None and x.device == y.device and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def merged_codes(
    merged: MergedWeight, function: FromWeight | Learned, parameters: tuple[Tensor | None, ...] = ()
) -> Codes:
    """`function.codes` of the whole merged weight, bit for bit; parameters have a row for each output feature.

    raises  ValueError naming a weight that is inf or nan, by its row in the chunk
    """
    quantizer = function.quantizer
    nested = isinstance(quantizer, Quantizer) and bool(quantizer.double_quant)
    plain = replace(function, quantizer=replace(quantizer, double_quant=False)) if nested else function
    parts = [plain.codes(chunk, *rows_of(parameters, rows)) for rows, chunk in merged.chunks(quantizer)]
    tensors = {name: joined([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    if nested:
        scales = quantize_absmax(tensors["absmax"])
        tensors |= dict(zip(("absmax", "nested_absmax", "nested_offset"), scales, strict=True))
    return replace(parts[0], tensors=tensors, shape=tuple(merged.weight.shape), quantizer=quantizer)


def rows_of(parameters: tuple[Tensor | None, ...], rows: slice) -> tuple[Tensor | None, ...]:
    """Some rows of each parameter that is there."""
    return tuple(None if parameter is None else parameter[rows] for parameter in parameters)


def joined(parts: list[Tensor | None]) -> Tensor | None:
    """Rows of chunks as one tensor."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)


def _rows_of_a_chunk(quantizer: Quantizer | FloatGrid, num_rows: int, in_features: int) -> int:
    """Rows of about CHUNK_WEIGHTS weights that end where a block of scales ends."""
    if isinstance(quantizer, FloatGrid) and quantizer.format == "nvfp4":
        return num_rows  # a scale of the whole tensor, in reference form
    step = max(1, CHUNK_WEIGHTS // in_features)
    if isinstance(quantizer, FloatGrid) or quantizer.block_size is None:
        return step
    # Blocks may cross rows; with in_features = 2^a times an odd number, 2^(b - a) rows hold whole blocks of 2^b.
    aligned = quantizer.block_size // min(in_features & -in_features, quantizer.block_size)
    return -(-step // aligned) * aligned
