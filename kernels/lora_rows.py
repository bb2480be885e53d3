"""LoRA updates of many adapters in one batch, added in place to the output of a fused linear layer.

    y[t, part] += round(x[t] A^T) (s B)^T        A, B, s of slot adapter_ids[t] and this part; -1: no update
A layer has one to three parts (q, k, v or gate, up), each with factors of its own that write its own columns of y.
Rounding is that of training (kernels/lora_linear.py): A and s B are rounded to the dtype of x, x A^T is summed in
float32 and rounded, the update is summed in float32 and added to y with one rounding.

Addresses and ranks lie in one int64 table [num_slots, num_parts, 3] that never moves, and the kernels read it when they
run: a recorded tape or CUDA graph sees adapters that are loaded later. Layout of the factors:
    A [rank, in_features]
    B [rank, out_features]; for the C++ kernel in bfloat16 [ceil(rank / 2), out_features, 2], the pairs that a bfloat16
      dot product takes, an odd rank padded with zeros
A row's result is the same bits in every batch (C++ kernel).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels._triton import tl, triton

MAX_RANK = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPP_DTYPES = (torch.float32, torch.bfloat16)
_DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}


class LoraTable:
    """The adapters of one fused layer, by slot. Factors are copied, so the caller's tensors may go.

    part_out_features  columns of y of each part, in order
    dtype              of x, y and the factors
    """

    def __init__(
        self,
        part_out_features: Sequence[int],
        in_features: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in DTYPES:
            raise TypeError(f"dtype is {dtype}; use one of {', '.join(map(str, DTYPES))}")
        if not part_out_features or min(*part_out_features, in_features, num_slots) < 1:
            raise ValueError(f"{part_out_features=}, {in_features=}, {num_slots=}; each must be at least 1")
        self.part_out_features, self.in_features, self.num_slots = list(part_out_features), in_features, num_slots
        self.out_features = sum(part_out_features)
        self.dtype, self.device = dtype, torch.device(device)
        ends = [sum(part_out_features[: i + 1]) for i in range(len(part_out_features))]
        self.offsets = torch.tensor([0, *ends], device=device)  # int64
        self.pointers = torch.zeros(num_slots, self.num_parts, 3, dtype=torch.int64, device=device)
        self.implementation = _implementation(self.device, dtype)  # decides the layout of B, so it stays
        self.pairs = dtype == torch.bfloat16 and self.implementation == "cpu"
        empty = torch.empty(0, dtype=dtype, device=device)
        self.factors = [empty] * (num_slots * self.num_parts * 2)  # A, B of each part of each slot

    @property
    def num_parts(self) -> int:
        return len(self.part_out_features)

    def set(self, slot: int, part: int, lora_A: Tensor | None, lora_B: Tensor | None, scaling: float) -> None:
        """Load one part's factors into a slot, or None and None: this part has no update.

        lora_A   [rank, in_features] float; lora_B [out_features of the part, rank] float; rank in 1..256
        raises   ValueError if a shape does not fit; IndexError for an unknown slot or part
        """
        self._check_place(slot, part)
        if lora_A is None or lora_B is None:
            if lora_A is not lora_B:
                raise ValueError(f"slot {slot}, part {part}: lora_A and lora_B come together; give both or neither")
            return self._write(slot, part, None)
        rank, shapes = lora_A.shape[0], (tuple(lora_A.shape), tuple(lora_B.shape))
        wanted = (rank, self.in_features), (self.part_out_features[part], rank)
        if shapes != wanted or not 1 <= rank <= MAX_RANK:
            raise ValueError(
                f"slot {slot}, part {part}: lora_A, lora_B are {shapes[0]}, {shapes[1]}; this layer takes "
                f"[rank, {self.in_features}], [{self.part_out_features[part]}, rank] with a rank of 1..{MAX_RANK}"
            )
        A = torch.empty(shapes[0], dtype=self.dtype, device=self.device).copy_(lora_A.detach())
        B = (scaling * lora_B.detach()).to(device=self.device, dtype=self.dtype).T  # [rank, out_features]
        self._write(slot, part, (A, _pack_pairs(B) if self.pairs else B.contiguous(), rank))

    def clear(self, slot: int) -> None:
        """Empty a slot: its rows get no update."""
        for part in range(self.num_parts):
            self._check_place(slot, part)
            self._write(slot, part, None)

    def _check_place(self, slot: int, part: int) -> None:
        if not (0 <= slot < self.num_slots and 0 <= part < self.num_parts):
            raise IndexError(f"slot {slot}, part {part}; this table has {self.num_slots} slots of {self.num_parts}")

    def _write(self, slot: int, part: int, entry: tuple[Tensor, Tensor, int] | None) -> None:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        A, B, rank = entry or (empty, empty, 0)
        self.pointers[slot, part] = torch.tensor([A.data_ptr(), B.data_ptr(), rank])
        place = (slot * self.num_parts + part) * 2
        self.factors[place : place + 2] = [A, B]


def _implementation(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cpu" and dtype not in CPP_DTYPES:
        return "reference"
    return _cpp.choose("lora_rows", device.type)


def _pack_pairs(B: Tensor) -> Tensor:
    """[rank, out_features] -> [ceil(rank / 2), out_features, 2]"""
    padded = torch.nn.functional.pad(B, (0, 0, 0, B.shape[0] % 2))
    return padded.view(-1, 2, B.shape[1]).transpose(1, 2).contiguous()


# ---- reference


def lora_rows_reference(
    y: Tensor, x: Tensor, adapter_ids: Tensor, factors: Sequence[Tensor], offsets: Sequence[int]
) -> None:
    """The formula, slot by slot; `factors` as LoraTable keeps them."""
    num_parts = len(offsets) - 1
    for slot in adapter_ids.unique().tolist():
        rows = (adapter_ids == slot).nonzero()[:, 0]
        for part in range(num_parts if 0 <= slot < len(factors) // (2 * num_parts) else 0):
            A, B = factors[(slot * num_parts + part) * 2 :][:2]
            if A.numel():
                B = B.transpose(1, 2).reshape(-1, B.shape[1])[: A.shape[0]] if B.dim() == 3 else B
                columns = slice(offsets[part], offsets[part + 1])
                y[rows, columns] = torch.addmm(y[rows, columns], x[rows] @ A.T, B)


# ---- C++


def lora_rows_cpu(y: Tensor, x: Tensor, adapter_ids: Tensor, pointers: Tensor, offsets: Tensor) -> None:
    num_slots, num_parts, _ = pointers.shape
    _tape.call(
        _tape.kernel("lora_rows", "lora_rows"),
        y, x, adapter_ids, pointers, offsets, x.shape[0], x.shape[1], num_parts, num_slots, _DTYPE_IDS[x.dtype],
    )  # fmt: skip


# ---- Triton


@triton.jit
def _lora_shrink_kernel(
    x_ptr, adapter_ids_ptr, pointers_ptr, x_A_ptr, in_features, num_parts, num_slots, stride_x_row, stride_x_A_row,
    MAX_RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x_A[row, part, :rank] = round(x[row] A^T): one row and part a program, BLOCK_N ranks at a time."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(adapter_ids_ptr + row).to(tl.int64)
    valid = (slot >= 0) & (slot < num_slots)
    entry = pointers_ptr + (slot * num_parts + part) * 3
    A_ptr = tl.load(entry, mask=valid, other=0).to(x_ptr.dtype)
    rank = tl.load(entry + 2, mask=valid, other=0)
    for start in range(0, rank, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for k_start in range(0, in_features, BLOCK_K):
            k = k_start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + row * stride_x_row + k, mask=k < in_features, other=0.0).to(tl.float32)
            mask = (j[:, None] < rank) & (k[None, :] < in_features)
            A = tl.load(A_ptr + j[:, None].to(tl.int64) * in_features + k[None, :], mask=mask, other=0.0)
            acc += tl.sum(A.to(tl.float32) * x[None, :], axis=1)
        x_A_ptrs = x_A_ptr + row * stride_x_A_row + part * MAX_RANK + j
        tl.store(x_A_ptrs, acc.to(x_A_ptr.dtype.element_ty), mask=j < rank)


@triton.jit
def _lora_expand_kernel(
    y_ptr, adapter_ids_ptr, pointers_ptr, offsets_ptr, x_A_ptr, num_parts, num_slots, stride_y_row, stride_x_A_row,
    MAX_RANK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[row, columns of part] += x_A[row, part] B: BLOCK_N columns a program."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(adapter_ids_ptr + row).to(tl.int64)
    valid = (slot >= 0) & (slot < num_slots)
    entry = pointers_ptr + (slot * num_parts + part) * 3
    B_ptr = tl.load(entry + 1, mask=valid, other=0).to(y_ptr.dtype)
    rank = tl.load(entry + 2, mask=valid, other=0)
    begin = tl.load(offsets_ptr + part)
    out_features = tl.load(offsets_ptr + part + 1) - begin
    n = tl.program_id(2).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < tl.where(rank > 0, out_features, 0)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for j in range(0, rank):
        x_A = tl.load(x_A_ptr + row * stride_x_A_row + part * MAX_RANK + j).to(tl.float32)
        acc += x_A * tl.load(B_ptr + j * out_features + n, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + row * stride_y_row + begin + n
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, (y + acc).to(y_ptr.dtype.element_ty), mask=mask)


SHRINK_TILE = (16, 128)  # BLOCK_N ranks, BLOCK_K columns
EXPAND_COLUMNS = 256


def lora_rows_triton(y: Tensor, x: Tensor, adapter_ids: Tensor, pointers: Tensor, offsets: Tensor) -> None:
    """The grid depends on shapes only, so that a CUDA graph can hold the call. Rows are not grouped by slot: the
    factors of a slot that many rows share come from the second-level cache."""
    num_slots, num_parts, _ = pointers.shape
    x_A = x.new_empty(x.shape[0], num_parts, MAX_RANK)
    block_n, block_k = SHRINK_TILE
    _lora_shrink_kernel[(x.shape[0], num_parts)](
        x, adapter_ids, pointers, x_A, x.shape[1], num_parts, num_slots, x.stride(0), x_A.stride(0),
        MAX_RANK=MAX_RANK, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    # The widest part is at most all of y; programs past a part's end find their mask empty.
    _lora_expand_kernel[(x.shape[0], num_parts, triton.cdiv(y.shape[1], EXPAND_COLUMNS))](
        y, adapter_ids, pointers, offsets, x_A, num_parts, num_slots, y.stride(0), x_A.stride(0),
        MAX_RANK=MAX_RANK, BLOCK_N=EXPAND_COLUMNS,
    )  # fmt: skip


# ---- registered op


@torch.library.custom_op("lowbit::lora_rows_", mutates_args=("y",))
def _lora_rows_(
    y: Tensor, x: Tensor, adapter_ids: Tensor, pointers: Tensor, factors: list[Tensor], offsets: Tensor
) -> None:
    """`pointers` holds the addresses of `factors`, which the reference reads instead."""
    in_pairs = any(factor.dim() == 3 for factor in factors)
    match _implementation(x.device, x.dtype):
        case "cpu" if in_pairs or x.dtype == torch.float32:
            lora_rows_cpu(y, x, adapter_ids, pointers, offsets)
        case "triton" if x.numel():
            lora_rows_triton(y, x, adapter_ids, pointers, offsets)
        case _:
            lora_rows_reference(y, x, adapter_ids, factors, offsets.tolist())


@_lora_rows_.register_fake
def _(y, x, adapter_ids, pointers, factors, offsets) -> None:
    return None


# ---- what the rest of the product calls


def lora_rows_(y: Tensor, x: Tensor, adapter_ids: Tensor, table: LoraTable) -> None:
    """Add each row's update to y in place; no gradient.

    y            [num_tokens, out_features of all parts] of table.dtype, contiguous
    x            [num_tokens, in_features] of table.dtype, contiguous
    adapter_ids  [num_tokens] int32 slots of the table; rows of -1, and of empty slots, stay as they are
    raises       ValueError if a shape or dtype does not fit
    """
    _check(y, x, adapter_ids, table)
    if table.implementation == "cpu":
        return lora_rows_cpu(y, x, adapter_ids, table.pointers, table.offsets)
    return _lora_rows_(y, x, adapter_ids, table.pointers, table.factors, table.offsets)


def _check(y: Tensor, x: Tensor, adapter_ids: Tensor, table: LoraTable) -> None:
    num_tokens = adapter_ids.shape[0]
    expected = {"y": (num_tokens, table.out_features), "x": (num_tokens, table.in_features)}
    for name, tensor in (("y", y), ("x", x)):
        if tensor.shape != expected[name] or tensor.dtype != table.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; this table takes contiguous {table.dtype} "
                f"{list(expected[name])} for {num_tokens} adapter_ids"
            )
    if adapter_ids.dtype != torch.int32 or adapter_ids.dim() != 1 or not adapter_ids.is_contiguous():
        raise ValueError(f"adapter_ids is {adapter_ids.dtype} {tuple(adapter_ids.shape)}; use contiguous int32 [T]")
