"""Put an engine together: model, KV cache, runner, adapters. The only place that knows all of them."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from trainer.architecture import base_model
from trainer.config.errors import require
from trainer.kernels.paged_attention import AttentionBatch, KVCache
from trainer.serve.adapters import AdapterRegistry, factors_from_module
from trainer.serve.block_manager import BlockManager
from trainer.serve.config import ServeConfig
from trainer.serve.decoder import Decoder, Rows, check_architecture, decoder_from_module
from trainer.serve.engine import Engine
from trainer.serve.metrics import Metrics
from trainer.serve.model_runner import MAX_LOGIT_ROWS, ModelRunner
from trainer.serve.open_model import OpenedModel, eos_token_ids
from trainer.serve.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)

GIB = 2**30
LONGEST_DEFAULT = 8192
LIVE_ADAPTER = "live"


@dataclass(slots=True)
class Built:
    """An engine and what hangs on it."""

    engine: Engine
    runner: ModelRunner
    adapters: AdapterRegistry
    name: str
    default_adapter: str | None

    closed: bool = False

    def close(self) -> None:
        """Let the other processes go; harmless twice."""
        if not self.closed and self.runner.parallel.rank == 0:
            self.closed = True
            self.runner.parallel.send(None)


def build_engine(opened: OpenedModel, config: ServeConfig) -> Built:
    """Build the engine for an opened model; `config` gets its derived values filled in.

    A disposable module has no layers afterwards.

    raises  UserError if the architecture is not served, or if the KV cache has no room for one sequence
    """
    check_architecture(base_model(opened.module).config)
    device = next(opened.module.parameters()).device
    num_tokens = config.max_num_batched_tokens or (512 if device.type == "cpu" else 8192)
    config.max_num_batched_tokens = max(num_tokens, config.max_num_seqs)
    longest = base_model(opened.module).config.max_position_embeddings
    require(
        config.max_model_len is None or config.max_model_len <= longest,
        f"max_model_len={config.max_model_len} exceeds the model's {longest} positions; lower it",
    )
    config.max_model_len = config.max_model_len or min(longest, LONGEST_DEFAULT)
    parallel = TensorParallel.join(config.tensor_parallel_size, device)
    decoder = decoder_from_module(
        opened.module,
        max_model_len=config.max_model_len,
        parallel=parallel,
        screen_greedy=config.screen_greedy,
        disposable=opened.disposable,
    )
    cache, swap = _allocate(decoder, config, parallel)
    ends = eos_token_ids(opened)
    runner = ModelRunner(
        decoder,
        cache,
        swap=swap,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        batch_invariant=config.batch_invariant,
        eos_token_ids=ends,
        parallel=parallel,
    )
    blocks = BlockManager(
        cache.num_blocks,
        config.kv_block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_swap_blocks=swap.num_blocks if swap else 0,
    )
    engine = Engine(
        config,
        runner,
        blocks,
        opened.tokenizer,
        vocab_size=decoder.config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=ends,
        metrics=Metrics(opened.name),
    )
    engine.metrics.cache_config(
        block_size=cache.block_size,
        num_gpu_blocks=cache.num_blocks,
        cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    registry = AdapterRegistry(decoder, config.max_loras, opened.base_sha256, parallel, tokenizer=opened.tokenizer)
    built = Built(engine, runner, registry, opened.name, None)
    if parallel.rank == 0:
        _load_adapters(built, opened)
    log.info(
        "serve    %s: %d KV blocks of %d tokens (%.0f MB), weights %.0f MB, %d adapters",
        opened.name,
        cache.num_blocks,
        cache.block_size,
        cache.nbytes / 1e6,
        decoder.nbytes / 1e6,
        len(built.adapters.by_name),
    )
    return built


def _load_adapters(built: Built, opened: OpenedModel) -> None:
    live = factors_from_module(opened.module)
    if live is not None:
        built.adapters.install(LIVE_ADAPTER, "in memory", live)
        built.default_adapter = LIVE_ADAPTER
    for name, folder in opened.adapters.items():
        taken = name in (built.name, "base") and name != opened.default_adapter
        require(not taken, f"adapters names {name}, which already means the model itself; use another name")
        built.adapters.install(name, folder, built.adapters.read(name, folder))
    built.default_adapter = built.default_adapter or opened.default_adapter


def _allocate(decoder: Decoder, config: ServeConfig, parallel: TensorParallel) -> tuple[KVCache, KVCache | None]:
    sizes = {
        "num_kv_heads": decoder.config.num_kv_heads,
        "head_dim": decoder.config.head_dim,
        "block_size": config.kv_block_size,
        "dtype": torch.int8 if config.kv_cache_dtype == "int8" else decoder.config.dtype,
        "compute_dtype": decoder.config.dtype,
    }
    block_bytes = KVCache.block_bytes(decoder.config.num_layers, device=decoder.device, **sizes)
    num_blocks = parallel.least(_cache_bytes(decoder, config, block_bytes, sizes) // block_bytes)
    longest = -(-config.max_model_len // config.kv_block_size)
    require(
        num_blocks >= 1,
        f"the KV cache has room for {num_blocks} blocks of {block_bytes} bytes; raise kv_cache_memory_bytes",
    )
    if num_blocks < longest:
        log.warning(
            "the KV cache holds %d tokens, less than max_model_len=%d: longer requests will be refused",
            num_blocks * config.kv_block_size,
            config.max_model_len,
        )
    cache = KVCache.allocate(decoder.config.num_layers, num_blocks, device=decoder.device, **sizes)
    num_swap = int(config.swap_space * GIB) // block_bytes
    swap = KVCache.allocate(decoder.config.num_layers, num_swap, device="cpu", **sizes) if num_swap else None
    return cache, swap


def warm_up(decoder: Decoder, sizes: dict[str, Any], *, num_tokens: int) -> None:
    """The largest forward that a step can ask for, over a cache of its own: compiles kernels, and shows what they need.

    sizes  of the KV cache, as `KVCache.allocate` takes them
    """
    block_size = sizes["block_size"]
    num_blocks = -(-num_tokens // block_size)
    cache = KVCache.allocate(decoder.config.num_layers, num_blocks, device=decoder.device, **sizes)
    positions = torch.arange(num_tokens, device=decoder.device)
    batch = AttentionBatch(
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32, device=decoder.device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=decoder.device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=decoder.device)[None],
        slot_mapping=positions,
    )
    rows = Rows(torch.zeros_like(positions), positions % decoder.cos_sin.shape[0], batch, None)
    with torch.inference_mode():
        hidden_states = decoder.forward(rows, cache, batch_invariant=True)
        decoder.logits(hidden_states[:MAX_LOGIT_ROWS], batch_invariant=True)


def _cache_bytes(decoder: Decoder, config: ServeConfig, block_bytes: int, sizes: dict[str, Any]) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    wanted = config.max_num_seqs * -(-config.max_model_len // config.kv_block_size) * block_bytes
    if decoder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(decoder.device)
        before = torch.cuda.memory_allocated(decoder.device)
        warm_up(decoder, sizes, num_tokens=config.max_num_batched_tokens)
        activations = torch.cuda.max_memory_allocated(decoder.device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(decoder.device)
        return min(wanted, int(config.gpu_memory_utilization * total) - (total - free) - activations)
    return min(wanted, 4 * GIB, _free_memory_bytes() // 4)


def _free_memory_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            values = dict(line.split(":", 1) for line in lines)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
