"""What the server keeps in memory: the process, weights as its kernels read them, and the KV cache.

The cache is counted in whole blocks, as the block manager hands them out, by the cache's own arithmetic. On a CPU its
pages become resident when they are first written to: what is counted here is the full cache.
"""

import math
import re

import torch

from trainer.config.errors import require
from trainer.config.model import ModelConfig
from trainer.kernels.greedy_head import PANEL as HEAD_PANEL
from trainer.kernels.integer_linear import PANEL
from trainer.kernels.kv_cache import KVCache
from trainer.model import compute_dtype
from trainer.plan.estimate import Estimate
from trainer.plan.sizes import Shape, Sizes, meta_model, num_parameters, packable, packed_bytes, sizes_of
from trainer.quantizer import Quantizer
from trainer.serve.config import ServeConfig
from trainer.serve.decoder import PLACED_BYTES
from trainer.serve.model_runner import MAX_LOGIT_ROWS
from trainer.serve.open_model import INTEGER_SCHEMES

MIB = 2**20
PROCESS_BYTES = 520 * MIB
"""Python, torch, transformers and the HTTP server on a CPU: `python -m trainer.serve model=tiny` is at 521 MiB when it
is ready (torch 2.13, transformers 5.24)."""
STEP_TOKENS = 512
"""Tokens of a step on a CPU, unless `max_num_batched_tokens` is set."""
PRECISIONS = {"none": "16 bit", "nf4": "NF4", "int4": "INT4", "int8_dynamic": "INT8"}
"""quantization= of the server -> what a plan calls it."""


def estimate_serving(model_config: ModelConfig, config: ServeConfig, *, num_seqs: int, length: int) -> Estimate:
    """Memory of `python -m trainer.serve` with `num_seqs` running sequences of `length` tokens.

    config  its quantization, kv_block_size and kv_cache_dtype count
    raises  UserError if the model cannot be read or is not served, or if length exceeds its positions
    """
    model, dtype = meta_model(model_config), compute_dtype(model_config.dtype)
    sizes, linears, quantization = sizes_of(model), packable(model), config.quantization or "none"
    require(
        length <= sizes.max_positions,
        f"length {length} exceeds the model's {sizes.max_positions} positions; lower max_model_len",
    )
    dense = num_parameters(model) * dtype.itemsize
    matrices = sum(rows * columns for rows, columns in linears.values()) * dtype.itemsize
    packed = _decoder_bytes(linears, quantization, dtype)
    on_cpu = not torch.cuda.is_available()
    parts = {
        "process": PROCESS_BYTES if on_cpu else 0,
        "weights": packed + dense - matrices,
        "head in 8 bits": _greedy_bytes(sizes) if config.screen_greedy and on_cpu else 0,
        "KV cache": kv_bytes(sizes, config, dtype, num_seqs=num_seqs, length=length),
        "a step": _step_bytes(sizes, config, dtype, num_seqs),
    }
    loading = parts["process"] + parts["head in 8 bits"] + dense
    if quantization in ("nf4", "fp4"):  # packed layer by layer from the mapped file, whose pages go
        codes = sum(packed_bytes(Quantizer(quantization), shape) for shape in linears.values())
        loading = parts["process"] + parts["head in 8 bits"] + dense - matrices + codes
    loading += min(PLACED_BYTES, packed) if quantization != "none" else 0
    moments = {"loading": loading, "full cache": sum(parts.values())}
    note = "" if sizes.computed else "this architecture is not served here"
    return Estimate(PRECISIONS.get(quantization, quantization), _present(parts), moments, note)


def kv_bytes(sizes: Sizes, config: ServeConfig, dtype: torch.dtype, *, num_seqs: int, length: int) -> int:
    """Bytes of the blocks that `num_seqs` sequences of `length` tokens hold."""
    return num_seqs * -(-length // config.kv_block_size) * block_bytes(sizes, config, dtype)


def block_bytes(sizes: Sizes, config: ServeConfig, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers."""
    return KVCache.block_bytes(
        sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=config.kv_block_size,
        dtype=torch.int8 if config.kv_cache_dtype == "int8" else dtype,
        compute_dtype=dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def sequences_that_fit(estimate: Estimate, available: int, *, num_seqs: int) -> int:
    """How many sequences of the estimate's length the cache can hold, if it gets all that is left."""
    cache = estimate.parts["KV cache"]
    return max(0, (available - sum(estimate.parts.values()) + cache) * num_seqs // cache)


def _decoder_bytes(linears: dict[str, Shape], quantization: str, dtype: torch.dtype) -> int:
    """Linear layers as kernels/packed_linear.py lays them out, q|k|v and gate|up as one."""
    return sum(_linear_bytes(shape, quantization, dtype) for shape in _stacked(linears))


def _stacked(linears: dict[str, Shape]) -> list[Shape]:
    stacks: dict[str, Shape] = {}
    for name, (rows, columns) in linears.items():
        group = re.sub(r"\.(q|k|v)_proj$", ".qkv", re.sub(r"\.(gate|up)_proj$", ".gate_up", name))
        stacks[group] = (stacks.get(group, (0, 0))[0] + rows, columns)
    return list(stacks.values())


def _linear_bytes(shape: Shape, quantization: str, dtype: torch.dtype) -> int:
    rows, columns = shape
    if quantization == "none":
        return rows * columns * dtype.itemsize
    if quantization in ("int4_dynamic", "int8_dynamic"):
        quantizer = INTEGER_SCHEMES[quantization].weight
        padded, width = -(-rows // PANEL) * PANEL, -(-columns // 8) * 8
        return padded * (width * quantizer.code_bits // 8 + 4 * (columns // quantizer.span(columns)))
    group = math.gcd(columns, 32 if quantization == "int4" else Quantizer(quantization).block_size)
    if group % 32:  # no layout for such groups: decoded
        return rows * columns * dtype.itemsize
    return rows * columns // 2 + 4 * rows * columns // group


def _greedy_bytes(sizes: Sizes) -> int:
    """kernels/greedy_head.py: codes in panels, and three bounds a feature."""
    panels = -(-sizes.vocab_size // HEAD_PANEL)
    return panels * -(-sizes.hidden_size // 4) * HEAD_PANEL * 4 + 12 * panels * HEAD_PANEL


def _step_bytes(sizes: Sizes, config: ServeConfig, dtype: torch.dtype, num_seqs: int) -> int:
    """The widest moment of a layer for all tokens of a step, and float32 logits."""
    values = 3 * sizes.hidden_size + sizes.qkv + sizes.attended + 3 * sizes.intermediate_size
    tokens = config.max_num_batched_tokens or (8192 if torch.cuda.is_available() else STEP_TOKENS)
    return tokens * values * dtype.itemsize + 4 * min(MAX_LOGIT_ROWS, num_seqs) * sizes.vocab_size


def _present(parts: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in parts.items() if value}
