"""Attention over the paged KV cache of kernels/kv_cache.py (PagedAttention, arXiv:2309.06180).

Formula. Row j of sequence b, of q_len rows, has position p = seq_lens[b] - q_len + j. Head h reads KV head
h // (num_heads / num_kv_heads), and of that the keys n with max(0, p - sliding_window + 1) <= n <= p:
    s_n = scale * q . k_n;   out = sum_n exp(s_n - max s) v_n / sum_n exp(s_n - max s)
q, k and v are read in the compute dtype, everything between is float32, the output is rounded once, as in torch's SDPA.
Decode (q_len 1), chunks of a prompt and mixtures are the same call. A row without keys, or of no sequence, gives zeros.
Codes of an int8 cache are summed first, q . codes, and multiplied by the scale after it.

Batch invariance. Keys are cut into chunks at multiples of a fixed size from position 0, and the bits of a row depend on
its own q, keys and values alone.
    C++     a row runs through its chunks in order, with the same arithmetic in a decode step and in a tile of a prompt.
    Triton  each chunk starts a softmax of its own (peak, norm, sum of values), and a row's chunks are merged in
            ascending order: in registers, or, where sequences are too few to fill a GPU, by a second kernel after
            programs that took a chunk each (flash-decoding, arXiv:2311.01282). Merging is elementwise and nothing is
            contracted to fused multiply-adds, so both ways give the same bits. Norms are summed in an order that is
            written down, not left to the layout of a tile, so that tiles of 16 rows (decode) and of 32 (prompts)
            agree wherever the compiler multiplies both with one instruction: on NVIDIA below the 64 rows of Hopper's
            wgmma. On AMD, whose tiles of 32 rows have an instruction of their own, bits hold among decode steps.
The grid depends on the numbers of tokens, sequences and columns of block_tables alone, so that CUDA graphs can hold it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.kernels import _tape
from trainer.kernels._triton import tl, triton
from trainer.kernels._tuning import tiles
from trainer.kernels.kv_cache import (
    DTYPE_IDS,
    KVCache,
    KVLayer,
    check_qkv,
    gather_kv,
    implementation,
    split_qkv,
    write_kv,
    write_kv_reference,
)

__all__ = ["AttentionBatch", "KVCache", "KVLayer", "paged_attention", "write_kv", "write_kv_reference"]

NO_WINDOW = 1 << 30  # keys
# Keys of a chunk, a multiple of every BLOCK_N: 1 x 131,072 tokens of 8 KV heads are 1,024 programs, 8 for each
# multiprocessor of an H200. Not timed yet.
CHUNK = 1024
SPLIT_BYTES = 256 << 20  # of partial sums; batches that need more have sequences enough to fill a GPU
MERGED_CHUNKS = 8  # chunks whose partial sums are loaded at a time
# BLOCK_M of tiles of a prompt up to a head_dim of 128 (64 in int8; then 16), and BLOCK_N, by size of a float: float32
# dots keep operands in registers, so less fits. Chosen for no spills on sm_80, sm_90, sm_100 and gfx942 (float32: up to
# a head_dim of 64); not timed there yet.
PREFILL_ROWS = {2: 32, 4: 16}
TILE_KEYS = {2: 32, 4: 16}
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(slots=True)
class AttentionBatch:
    """What one step computes: which rows belong to which sequence, and where its keys and values lie.

    cu_seqlens    [num_seqs + 1] int32; rows cu_seqlens[b] .. cu_seqlens[b + 1] of qkv are sequence b's, maybe none
    seq_lens      [num_seqs] int32, tokens in the cache after this step
    block_tables  [num_seqs, max_blocks] int32; entries behind a sequence's last block are not read
    slot_mapping  [num_tokens] int64, -1 for a row that is not kept
    raises        ValueError if a shape, a dtype or a stride does not fit
    The values are read when a kernel runs: a tape replays with new values in the same tensors.
    """

    cu_seqlens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    num_seqs: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_seqs, self.num_tokens = self.seq_lens.shape[0], self.slot_mapping.shape[0]
        _check_index("cu_seqlens", self.cu_seqlens, torch.int32, (self.num_seqs + 1,))
        _check_index("seq_lens", self.seq_lens, torch.int32, (self.num_seqs,))
        _check_index("block_tables", self.block_tables, torch.int32, (self.num_seqs, *self.block_tables.shape[1:2]))
        _check_index("slot_mapping", self.slot_mapping, torch.int64, (self.num_tokens,))


def _check_index(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; a batch needs contiguous {dtype} {shape}")


# ---- the reference


def paged_attention_reference(
    qkv: Tensor, layer: KVLayer, batch: AttentionBatch, *, num_heads: int, scale: float, sliding_window: int | None
) -> Tensor:
    out = torch.zeros(len(qkv), num_heads, layer.head_dim, dtype=torch.float32, device=qkv.device)
    q = split_qkv(qkv, layer, num_heads)[0].float()
    rows = batch.cu_seqlens.tolist()
    for b, seq_len in enumerate(batch.seq_lens.tolist()):
        begin, end = rows[b], rows[b + 1]
        if begin == end or seq_len == 0:
            continue
        k, v = gather_kv(layer, batch.block_tables[b].long(), seq_len)  # [N, kv_heads, head_dim]
        queries = q[begin:end].unflatten(1, (layer.num_kv_heads, -1))  # [Q, kv_heads, group, head_dim]
        scores = torch.einsum("qkgd,nkd->qkgn", queries, k) * scale
        position = torch.arange(seq_len - (end - begin), seq_len, device=qkv.device)[:, None, None, None]
        key = torch.arange(seq_len, device=qkv.device)
        seen = key <= position
        if sliding_window is not None:
            seen &= key > position - sliding_window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)  # a row without keys: zeros
        out[begin:end] = torch.einsum("qkgn,nkd->qkgd", weights, v).flatten(1, 2)
    return out.flatten(1).to(qkv.dtype)


# ---- C++


def paged_attention_cpu(
    qkv: Tensor, layer: KVLayer, batch: AttentionBatch, *, num_heads: int, scale: float, sliding_window: int | None
) -> Tensor:
    out = qkv.new_empty(qkv.shape[0], num_heads * layer.head_dim)
    tables = batch.block_tables
    _tape.call(
        _tape.kernel("paged_attention", "paged_attention"),
        qkv, qkv.stride(0), DTYPE_IDS[qkv.dtype], qkv.shape[0], out, num_heads, layer.descriptor,
        batch.cu_seqlens, batch.seq_lens, tables, batch.num_seqs, tables.shape[1], float(scale), sliding_window or 0,
    )  # fmt: skip
    return out


# ---- Triton, on the plain layout


@triton.jit
def _paged_attention_kernel(
    qkv_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, cu_seqlens_ptr, seq_lens_ptr, block_tables_ptr, out_ptr, stats_ptr,
    stride_qkv_row, stride_out_row, stride_table_row, num_seqs, num_kv_heads, block_size, scale, sliding_window, splits,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, DOT: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes the GROUP heads of one KV head for TOKENS tokens of one sequence, over all chunks or one.

    Sequence b has the programs from cu_seqlens[b] // TOKENS + b on: room for its tiles, found by bisection.
    SPLIT: out [rows, heads, splits, HEAD_DIM] and stats [rows, heads, splits, 2] (peak, norm), both float32, take what
    each chunk gives, chunk c at c % splits; programs of chunks that a sequence does not have end at once.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _sequence_of(cu_seqlens_ptr, num_seqs, program, TOKENS)
    first_row = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - first_row
    first_token = (program - first_row // TOKENS - seq) * TOKENS
    if first_token < query_len:
        first_position = tl.load(seq_lens_ptr + seq) - query_len + first_token
        begin = tl.maximum(first_position - sliding_window + 1, 0)
        end = first_position + tl.minimum(TOKENS, query_len - first_token)
        m = tl.arange(0, BLOCK_M)
        token = first_token + m // GROUP
        # Rows and keys behind the end are loaded from the last one: masks of whole tiles would cost registers.
        row = (first_row + tl.minimum(token, query_len - 1)).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        row_mask = (m < TOKENS * GROUP) & (token < query_len)
        dim = tl.arange(0, BLOCK_K)
        mask = row_mask[:, None] if HEAD_DIM == BLOCK_K else row_mask[:, None] & (dim < HEAD_DIM)[None, :]
        position = first_position + m // GROUP
        table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table_row
        if SPLIT:
            first_chunk = begin // CHUNK + tl.program_id(2)
            last_chunk = tl.minimum(first_chunk + 1, tl.cdiv(end, CHUNK))
        else:
            first_chunk = begin // CHUNK
            last_chunk = tl.cdiv(end, CHUNK)
        q = _load_rows(qkv_ptr + row * stride_qkv_row + head * HEAD_DIM, dim, HEAD_DIM, BLOCK_K).to(DOT)
        peak, norm, acc = _nothing(BLOCK_M, BLOCK_K)
        for chunk in range(first_chunk, last_chunk):
            chunk_peak, _, chunk_acc = _nothing(BLOCK_M, BLOCK_K)
            norms = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            first_key = tl.maximum(begin // BLOCK_N * BLOCK_N, chunk * CHUNK)
            for start in range(first_key, tl.minimum(end, (chunk + 1) * CHUNK), BLOCK_N):
                n = start + tl.arange(0, BLOCK_N)
                key = tl.minimum(n, end - 1)
                block = tl.load(table_ptr + key // block_size).to(tl.int64)
                head_slot = (block * num_kv_heads + kv_head) * block_size + key % block_size
                k = _load_rows(k_ptr + head_slot * HEAD_DIM, dim, HEAD_DIM, BLOCK_K).to(DOT)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                if INT8:
                    scores *= tl.load(k_scale_ptr + head_slot)[None, :]
                # 0 <= position - n < sliding_window as one unsigned comparison
                seen = (position[:, None] - n[None, :]).to(tl.uint32, bitcast=True) < tl.cast(sliding_window, tl.uint32)
                scores = tl.where(seen, scores * 1.44269504, float("-inf"))  # log2(e): the softmax has powers of 2
                new_peak = tl.maximum(chunk_peak, tl.max(scores, axis=1))
                shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf would be nan
                weights = tl.exp2(scores - shift[:, None])
                rescale = tl.exp2(chunk_peak - shift)
                norms = norms * rescale[:, None] + weights
                if INT8:
                    weights *= tl.load(v_scale_ptr + head_slot)[None, :]
                v = _load_rows(v_ptr + head_slot * HEAD_DIM, dim, HEAD_DIM, BLOCK_K).to(DOT)
                chunk_acc = tl.dot(weights.to(DOT), v, chunk_acc * rescale[:, None], input_precision="ieee")
                chunk_peak = new_peak
            chunk_norm = _sum_columns(norms)
            if SPLIT:
                slot = (row * num_kv_heads * GROUP + head) * splits + chunk % splits
                tl.store(stats_ptr + 2 * slot, chunk_peak, mask=row_mask)
                tl.store(stats_ptr + 2 * slot + 1, chunk_norm, mask=row_mask)
                tl.store(out_ptr + (slot * HEAD_DIM)[:, None] + dim[None, :], chunk_acc, mask=mask)
            else:
                peak, norm, acc = _merge(peak, norm, acc, chunk_peak, chunk_norm, chunk_acc)
        if not SPLIT:
            out = acc / tl.where(norm > 0, norm, 1.0)[:, None]
            out_ptrs = out_ptr + (row * stride_out_row + head * HEAD_DIM)[:, None] + dim[None, :]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge_kernel(
    acc_ptr, stats_ptr, cu_seqlens_ptr, seq_lens_ptr, out_ptr,
    stride_out_row, num_seqs, num_heads, sliding_window, splits,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, MERGED_CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program merges the chunks of one head of one row: the order and the arithmetic of the kernel above."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    seq = _sequence_of(cu_seqlens_ptr, num_seqs, row, 0)
    after = tl.load(cu_seqlens_ptr + seq + 1)
    end = tl.where(row < after, tl.load(seq_lens_ptr + seq) - after + row + 1, 0)  # behind the row's position
    last_chunk = tl.cdiv(end, CHUNK)
    dim = tl.arange(0, BLOCK_K)
    slots = (row.to(tl.int64) * num_heads + head) * splits
    one = tl.arange(0, 1)
    peak, norm, acc = _nothing(1, BLOCK_K)
    for first in range(tl.maximum(end - sliding_window, 0) // CHUNK, last_chunk, MERGED_CHUNKS):
        for i in tl.static_range(MERGED_CHUNKS):  # beyond the last: nothing, which changes no bit
            there = one + first + i < last_chunk
            slot = slots + (first + i) % splits + one
            chunk_peak = tl.load(stats_ptr + 2 * slot, mask=there, other=float("-inf"))
            chunk_norm = tl.load(stats_ptr + 2 * slot + 1, mask=there, other=0.0)
            acc_ptrs = acc_ptr + (slot * HEAD_DIM)[:, None] + dim[None, :]
            chunk_acc = tl.load(acc_ptrs, mask=there[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
            peak, norm, acc = _merge(peak, norm, acc, chunk_peak, chunk_norm, chunk_acc)
    out = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    out_ptrs = out_ptr + row.to(tl.int64) * stride_out_row + head * HEAD_DIM + one[:, None] + dim[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(dim < HEAD_DIM)[None, :])


@triton.jit
def _sequence_of(cu_seqlens_ptr, num_seqs, index, TOKENS: tl.constexpr):
    """The last sequence that starts at or before program `index` of tiles of TOKENS, or 0: at or before row `index`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens_ptr + middle)
        starts = (start if TOKENS == 0 else start // TOKENS + middle) <= index
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle)
    return low


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """peak, norm and sum of values of no keys"""
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    return peak, tl.zeros((BLOCK_M,), dtype=tl.float32), tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)


@triton.jit
def _merge(peak, norm, acc, new_peak, new_norm, new_acc):
    """Those of the keys of both; merging nothing changes no bit."""
    top = tl.maximum(peak, new_peak)
    shift = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(peak - shift)
    new = tl.exp2(new_peak - shift)
    return top, norm * old + new_norm * new, acc * old[:, None] + new_acc * new[:, None]


@triton.jit
def _sum_columns(x):
    """tl.sum over axis 1 (up to 2^10) by neighbours: in an order that is not the compiler's, as tl.sum's is."""
    for _ in tl.static_range(10):
        if x.shape[1] > 1:
            even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
            x = even + odd
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def _load_rows(row_ptrs, dim, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    if HEAD_DIM == BLOCK_K:
        rows = tl.load(row_ptrs[:, None] + dim[None, :])
    else:
        rows = tl.load(row_ptrs[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return rows


def paged_attention_triton(
    qkv: Tensor, layer: KVLayer, batch: AttentionBatch, *, num_heads: int, scale: float, sliding_window: int | None
) -> Tensor:
    num_rows, head_dim, int8 = len(qkv), layer.head_dim, layer.k_scale is not None
    decode, window = batch.num_tokens <= batch.num_seqs, sliding_window or NO_WINDOW
    tile = _tile(num_heads // layer.num_kv_heads, head_dim, qkv, decode=decode, int8=int8)
    tokens = tile["BLOCK_M"] // (num_heads // layer.num_kv_heads)
    splits = _splits(batch.block_tables.shape[1] * layer.block_size, window, tokens)
    split = decode and splits > 1 and 4 * num_rows * num_heads * splits * (head_dim + 2) <= SPLIT_BYTES
    out = torch.empty if split else torch.zeros  # a row of no sequence has no program but in the merging kernel
    out = out(num_rows, num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    if not num_rows:
        return out
    acc = stats = out  # not read or written, but a kernel needs pointers
    if split:
        acc = torch.empty(num_rows * num_heads * splits * head_dim, dtype=torch.float32, device=qkv.device)
        stats = torch.empty(num_rows * num_heads * splits * 2, dtype=torch.float32, device=qkv.device)
    scales = (layer.k_scale, layer.v_scale) if int8 else (layer.k, layer.v)
    grid = num_rows // tokens + batch.num_seqs, layer.num_kv_heads, splits if split else 1
    _paged_attention_kernel[grid](
        qkv, layer.k, layer.v, *scales, batch.cu_seqlens, batch.seq_lens, batch.block_tables, acc, stats,
        qkv.stride(0), out.stride(0), batch.block_tables.stride(0),
        batch.num_seqs, layer.num_kv_heads, layer.block_size, scale, window, splits,
        HEAD_DIM=head_dim, GROUP=num_heads // layer.num_kv_heads, INT8=int8, DOT=_TRITON_DTYPES[qkv.dtype],
        CHUNK=CHUNK, SPLIT=split, **tile, enable_fp_fusion=False,
    )  # fmt: skip
    if split:
        _merge_kernel[(num_rows, num_heads)](
            acc, stats, batch.cu_seqlens, batch.seq_lens, out, out.stride(0), batch.num_seqs, num_heads, window, splits,
            HEAD_DIM=head_dim, CHUNK=CHUNK, MERGED_CHUNKS=MERGED_CHUNKS, BLOCK_K=tile["BLOCK_K"],
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _splits(capacity: int, sliding_window: int, tokens: int) -> int:
    """Chunks that a tile of `tokens` rows can see, of a sequence of up to `capacity` tokens."""
    return min(-(-capacity // CHUNK), (sliding_window + tokens - 2) // CHUNK + 2)


def _tile(group: int, head_dim: int, qkv: Tensor, *, decode: bool, int8: bool) -> dict[str, int]:
    """Tiles of a prompt have the BLOCK_N of "paged_decode", whatever "paged_prefill" says: the order of all sums."""
    itemsize = qkv.element_size()
    default = _default_tile(group, head_dim, itemsize, decode=decode, int8=int8)
    bucket = {"head_dim": default["BLOCK_K"], "itemsize": itemsize, "int8": int(int8)}
    tile = tiles("paged_decode", qkv.device, default, **bucket)
    if not decode:
        tile = {**tiles("paged_prefill", qkv.device, default, **bucket), "BLOCK_N": tile["BLOCK_N"]}
    return {**tile, "BLOCK_M": max(tile["BLOCK_M"], triton.next_power_of_2(group))}


def _default_tile(group: int, head_dim: int, itemsize: int, *, decode: bool, int8: bool) -> dict[str, int]:
    """tl.dot takes no side below 16; a decode step has `group` rows a tile."""
    rows = 16 if decode or head_dim > (64 if int8 else 128) else PREFILL_ROWS[itemsize]
    sides = {"BLOCK_M": max(rows, triton.next_power_of_2(group)), "BLOCK_N": TILE_KEYS[itemsize]}
    sides["BLOCK_K"] = max(16, triton.next_power_of_2(head_dim))
    return {**sides, "num_warps": 8 if itemsize == 4 or (rows > 16 and head_dim > 64) else 4}


# ---- registered ops

_ATTEND = {"reference": paged_attention_reference, "cpu": paged_attention_cpu, "triton": paged_attention_triton}


@torch.library.custom_op("lowbit::paged_attention", mutates_args=())
def _paged_attention(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    layer = KVLayer(k, v, k_scale, v_scale)
    batch = AttentionBatch(cu_seqlens, seq_lens, block_tables, slot_mapping)
    check_qkv(qkv, layer, batch.num_tokens, num_heads)
    attend = _ATTEND[implementation(layer)]
    return attend(qkv, layer, batch, num_heads=num_heads, scale=scale, sliding_window=sliding_window)


@_paged_attention.register_fake
def _(
    qkv, k, v, k_scale, v_scale, cu_seqlens, seq_lens, block_tables, slot_mapping, num_heads, scale, sliding_window
) -> Tensor:
    head_dim = k.shape[2] * k.shape[4] if k.dim() == 5 else k.shape[3]
    return qkv.new_empty(qkv.shape[0], num_heads * head_dim)


# ---- what the rest of the product calls


def paged_attention(
    qkv: Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    *,
    num_heads: int,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of a step's queries over the cached keys, grouped-query heads (arXiv:2309.06180, section 4).

    qkv             as `write_kv` took it, which ran before
    scale           of the scores before the softmax, positive; head_dim**-0.5 in most models
    sliding_window  keys that a row sees, its own among them; None: all before it
    returns         [T, num_heads * head_dim] of qkv's dtype; zeros where a row has no sequence or no keys
    raises          ValueError if a shape or dtype does not fit the cache
    """
    kv = cache.layers[layer]
    check_qkv(qkv, kv, batch.num_tokens, num_heads)
    attend = _ATTEND[implementation(kv)]
    return attend(qkv, kv, batch, num_heads=num_heads, scale=scale, sliding_window=sliding_window)
