"""LiveState: what GET /state and the page show: who holds which KV block, who runs, who waits, how fast.

A snapshot is made in the engine's thread, between steps, when somebody asks.
"""

import time
from collections import deque
from typing import Any

from trainer.serve.engine import Engine
from trainer.serve.sequence import Sequence

MAX_BLOCKS = 8192
"""Blocks of a larger cache that are told one by one; counts are always of all."""
WINDOW_S = 5.0
FREE, CACHED, SHARED = -1, -2, -3
"""What a block is that no single sequence holds; others are told as the position of their sequence in the list."""


class LiveState:
    """Snapshots of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._history: deque[tuple[float, int, int]] = deque()

    def snapshot(self) -> dict[str, Any]:
        """The present state, as plain values for JSON."""
        engine, blocks = self._engine, self._engine.blocks
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        counts = engine.scheduler.counts
        return {
            "blocks": self._owners(running),
            "num_blocks": blocks.num_blocks,
            "num_free_blocks": blocks.num_free_blocks,
            "num_cached_blocks": blocks.num_cached_blocks,
            "block_size": blocks.block_size,
            "running": [self._sequence(sequence) for sequence in running],
            "waiting": [self._sequence(sequence) for sequence in waiting[:100]],
            "num_waiting": len(waiting),
            "num_steps": engine.scheduler.num_steps,
            "preemptions": counts.preempted_recompute + counts.preempted_swap,
            "prefix_hit_rate": counts.prefix_hits / counts.prefix_queries if counts.prefix_queries else None,
            "draft_acceptance_rate": counts.accepted / counts.drafted if counts.drafted else None,
            "ttft_s": engine.recent_ttft_s(),
            **self._rates(),
        }

    def _rates(self) -> dict[str, float]:
        """Tokens a second over the last few seconds."""
        now = time.monotonic()
        self._history.append((now, self._engine.num_prompt_tokens, self._engine.num_generated_tokens))
        while len(self._history) > 2 and self._history[0][0] < now - WINDOW_S:
            self._history.popleft()
        then, prompt, generated = self._history[0]
        elapsed = max(now - then, 1e-9)
        return {
            "prompt_tokens_per_s": (self._engine.num_prompt_tokens - prompt) / elapsed,
            "generated_tokens_per_s": (self._engine.num_generated_tokens - generated) / elapsed,
        }

    def _owners(self, running: list[Sequence]) -> list[int]:
        blocks = self._engine.blocks.blocks[:MAX_BLOCKS]
        owners = [CACHED if block.hash is not None else FREE for block in blocks]
        for position, sequence in enumerate(running):
            for block_id in sequence.block_table:
                if block_id < len(owners):
                    owners[block_id] = SHARED if blocks[block_id].num_references > 1 else position
        return owners

    @staticmethod
    def _sequence(sequence: Sequence) -> dict[str, Any]:
        request = sequence.request
        return {
            "request_id": request.request_id,
            "index": sequence.index,
            "status": sequence.status.value,
            "adapter": request.adapter.name if request.adapter else None,
            "priority": request.priority,
            "num_prompt_tokens": sequence.num_prompt_tokens,
            "num_computed_tokens": sequence.num_computed_tokens,
            "num_output_tokens": sequence.num_output_tokens,
            "max_tokens": request.params.max_tokens,
            "num_blocks": len(sequence.block_table),
        }
