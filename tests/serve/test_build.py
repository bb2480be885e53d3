"""How large the KV cache becomes, and what is refused before anything runs."""

import pytest
import torch

from trainer.config.errors import UserError
from trainer.serve import build
from trainer.serve.llm import LLM

BLOCK_BYTES = 2 * 2 * 16 * 32 * 2 * 2  # layers, K and V, tokens, head_dim 24 padded to 32 (V), KV heads, bytes; at most


def test_the_cache_takes_what_it_is_given() -> None:
    llm = LLM("tiny", kv_cache_memory_bytes=100_000, max_model_len=64)
    assert 0 < llm.runner.cache.nbytes <= 100_000
    assert llm.runner.cache.nbytes > 100_000 - BLOCK_BYTES  # no whole block was left over


def test_by_default_it_holds_every_sequence_at_its_longest() -> None:
    llm = LLM("tiny", max_num_seqs=2, max_model_len=64)
    assert llm.runner.cache.num_blocks == 2 * 64 // 16


def test_swap_space_is_counted_in_gib() -> None:
    llm = LLM("tiny", swap_space=0.001, max_model_len=64, max_num_seqs=2)
    assert 0 < llm.runner.swap.nbytes <= 0.001 * 2**30
    assert llm.engine.blocks.num_swap_blocks == llm.runner.swap.num_blocks


def test_no_room_for_a_block_is_refused() -> None:
    with pytest.raises(UserError, match="kv_cache_memory_bytes"):
        LLM("tiny", kv_cache_memory_bytes=10)


def test_longer_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="max_model_len=100000 exceeds the model's"):
        LLM("tiny", max_model_len=100_000)


def test_warm_up_runs_the_largest_step() -> None:
    """On GPUs its peak decides the cache's size; that it runs at all is checked everywhere."""
    llm = LLM("tiny", max_model_len=64)
    cache = llm.runner.cache
    sizes = {"num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim, "block_size": cache.block_size}
    sizes |= {"dtype": cache.dtype, "compute_dtype": cache.compute_dtype}
    build.warm_up(llm.runner.decoder, sizes, num_tokens=50)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_share_is_kept() -> None:
    LLM("tiny", gpu_memory_utilization=0.2, max_num_seqs=1024, max_model_len=2048)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.2 * total + 2**28
