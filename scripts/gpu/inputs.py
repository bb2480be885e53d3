"""Random inputs of the kinds that several units of the GPU report take."""

import itertools
from dataclasses import dataclass

import torch
from gpu.bench import DTYPE, Bench
from torch import Tensor, nn

from trainer.kernels.codebook4 import CodebookWeight, codebook_quantize
from trainer.kernels.double_quant import quantize_absmax
from trainer.kernels.frozen_weight import FrozenWeight
from trainer.kernels.lora_linear import Adapter
from trainer.kernels.paged_attention import AttentionBatch, KVCache, paged_attention, write_kv

RANK, ALPHA = 16, 32


def codebook_weight(weight: Tensor, codebook: str = "nf4") -> CodebookWeight:
    packed, absmax = codebook_quantize(weight, codebook=codebook, block_size=64)
    return CodebookWeight(packed, *quantize_absmax(absmax), *weight.shape, 64, codebook)


def lora_layer(bench: Bench, sizes: list[int], in_features: int) -> tuple[list[FrozenWeight], list[Adapter]]:
    """NF4 weights of one input and an adapter for each."""
    weights, adapters = [], []
    for out_features in sizes:
        w = codebook_weight(bench.randn(out_features, in_features, std=0.02))
        tensors = w.packed, w.absmax, w.nested_absmax, w.nested_offset
        weights.append(FrozenWeight("nf4", tensors, out_features, in_features, 64))
        lora_A = bench.randn(RANK, in_features, dtype=torch.float32, std=in_features**-0.5).requires_grad_()
        lora_B = bench.randn(out_features, RANK, dtype=torch.float32, std=0.1).requires_grad_()
        adapters.append(Adapter(lora_A, lora_B, ALPHA / RANK))
    return weights, adapters


def rotary(bench: Bench, num_positions: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[num_positions, 2, head_dim / 2]"""
    exponent = torch.arange(0, head_dim, 2, device=bench.device) / head_dim
    angles = torch.arange(num_positions, device=bench.device)[:, None] / 10000**exponent
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype).contiguous()


def documents(bench: Bench, lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=bench.device)


@dataclass
class Paged:
    """A step over a cache that holds random keys and values."""

    qkv: Tensor
    cache: KVCache
    batch: AttentionBatch
    num_heads: int

    @classmethod
    def random(
        cls,
        bench: Bench,
        lengths: list[tuple[int, int]],
        heads: tuple[int, int, int],
        *,
        dtype: torch.dtype = DTYPE,
        int8: bool = False,
    ) -> "Paged":
        """lengths: rows of this step and tokens in the cache after it, for each sequence; heads: q, kv, head_dim"""
        num_heads, num_kv_heads, head_dim = heads
        block_size, query_lens = 16, [rows for rows, _ in lengths]
        blocks = [-(-length // block_size) for _, length in lengths]
        cache = KVCache.allocate(
            1, sum(blocks), num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
            dtype=torch.int8 if int8 else dtype, compute_dtype=dtype, device=bench.device,
        )  # fmt: skip
        for tensor in (cache.k, cache.v):
            tensor.random_(-127, 128) if int8 else tensor.normal_()
        for scale in (cache.k_scale, cache.v_scale):
            if scale is not None:
                scale.uniform_(0.005, 0.01)
        order = torch.randperm(sum(blocks), dtype=torch.int32, device=bench.device).split(blocks)
        tables = nn.utils.rnn.pad_sequence(list(order), batch_first=True)
        positions = [torch.arange(length - rows, length, device=bench.device) for rows, length in lengths]
        slots = [
            table[p // block_size].long() * block_size + p % block_size
            for table, p in zip(tables, positions, strict=True)
        ]
        lens = torch.tensor([length for _, length in lengths], dtype=torch.int32, device=bench.device)
        batch = AttentionBatch(documents(bench, query_lens), lens, tables, torch.cat(slots))
        qkv = bench.randn(sum(query_lens), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        return cls(qkv, cache, batch, num_heads)

    def write(self) -> None:
        write_kv(self.qkv, self.cache, 0, self.batch.slot_mapping, num_heads=self.num_heads)

    def attend(self, window: int | None = None) -> Tensor:
        options = {"num_heads": self.num_heads, "scale": self.cache.head_dim**-0.5, "sliding_window": window}
        return paged_attention(self.qkv, self.cache, 0, self.batch, **options)
