"""ModelRunner: turns a step into rows, runs the decoder on them, and samples.

The forward of a small step is recorded once and replayed from then on: on a CPU on a tape, on a GPU as a CUDA graph
(recording.py says which steps). Long pieces of prompts run op by op.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.kernels.embedding import embed_tokens
from trainer.kernels.paged_attention import AttentionBatch, KVCache
from trainer.serve.adapters import AdapterRegistry
from trainer.serve.decoder import Decoder, Rows
from trainer.serve.engine import ItemOutput
from trainer.serve.outputs import TokenLogprob
from trainer.serve.recording import Recordings
from trainer.serve.sampler import SampleRow, likeliest, needs_argmax_only, prompt_logprobs, sample
from trainer.serve.scheduler import ScheduledSequence, Step
from trainer.serve.sequence import Request, Sequence
from trainer.serve.tensor_parallel import TensorParallel

MIN_RECORDED_ROWS = 32
"""Rows up to which a step is recorded, where max_num_seqs is lower: room for drafts and the ends of prompts."""
MAX_LOGIT_ROWS = 64
"""Prompt positions whose logits are held at a time: 64 x 150,000 float32 are 38 MB."""


class ModelRunner:
    """The decoder, its KV cache, and the buffers that a step is written into."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        swap: KVCache | None,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        batch_invariant: bool,
        eos_token_ids: tuple[int, ...],
        parallel: TensorParallel,
    ) -> None:
        self.parallel = parallel
        self.decoder, self.cache, self.swap = decoder, cache, swap
        self.batch_invariant, self.eos_token_ids = batch_invariant, eos_token_ids
        self._max_recorded_rows = min(max(max_num_seqs, MIN_RECORDED_ROWS), max_num_tokens)
        max_blocks = -(-max_model_len // cache.block_size)
        max_seqs = max(max_num_seqs, self._max_recorded_rows) + 8  # padding
        self._inputs = _Inputs(max(max_num_tokens, max_seqs), max_seqs, max_blocks, decoder.device)
        self._recordings = Recordings.on(decoder.device, decoder.config.dtype) if parallel.size == 1 else None
        self.watch: Callable[[Request, int, Tensor], None] | None = None
        """For evaluations: is shown the request, a prompt position, and the hidden states [n, hidden_size] there and
        behind it, before they become log-probabilities."""

    # ---- one step

    def execute(self, step: Step) -> list[ItemOutput]:
        """Move blocks, compute all rows of the step, and sample for the sequences that reached their last token."""
        chunks = [Chunk.of(item) for item in step.scheduled]
        self.parallel.send(("step", step.swap_out, step.swap_in, step.copies, chunks))
        self.move_blocks(step.swap_out, step.swap_in, step.copies)
        if not chunks:
            return []
        hidden_states = self.forward(chunks)
        outputs = [ItemOutput() for _ in step.scheduled]
        self._score_prompts(step.scheduled, hidden_states, outputs)
        self._sample(step.scheduled, hidden_states, outputs)
        return outputs

    def follow(self, registry: AdapterRegistry) -> None:
        """On every process but rank 0: compute what it says, until it stops."""
        while (message := self.parallel.receive()) is not None:
            match message:
                case "step", swap_out, swap_in, copies, chunks:
                    self.move_blocks(swap_out, swap_in, copies)
                    if chunks:
                        self.forward(chunks)
                case "adapter", slot, factors:
                    registry.write(slot, factors)

    def move_blocks(self, swap_out: list[tuple], swap_in: list[tuple], copies: list[tuple]) -> None:
        if swap_out:
            self.cache.copy_to(self.swap, swap_out)
        if swap_in:
            self.swap.copy_to(self.cache, swap_in)
        if copies:
            self.cache.copy_blocks(copies)

    @torch.inference_mode()
    def forward(self, chunks: "list[Chunk]") -> Tensor:
        """Hidden states [T, hidden_size] of all rows of a step, in its order."""
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        shape = None
        if self._recordings is not None and num_rows <= self._max_recorded_rows:
            shape = self._recordings.shape(num_rows, len(chunks))
        rows = self._inputs.fill(chunks, self.cache.block_size, pad_to=shape)
        if shape is None:
            return self.decoder.forward(rows, self.cache, batch_invariant=self.batch_invariant)
        key = (rows.token_ids.shape[0], rows.adapter_ids is not None)
        # Only our own kernels can be recorded, and they are invariant.
        forward = functools.partial(self.decoder.forward, rows, self.cache, batch_invariant=True)
        return self._recordings.run(key, forward)[:num_rows]

    # ---- prompt log-probabilities

    def _score_prompts(self, scheduled: list[ScheduledSequence], hidden: Tensor, outputs: list[ItemOutput]) -> None:
        row = 0
        for item, output in zip(scheduled, outputs, strict=True):
            request = item.sequence.request
            wanted = request.next_prompt_logprob
            if wanted is not None:
                # the row of position p predicts the token at p + 1
                first = max(item.start, wanted - 1)
                last = min(item.start + item.num_tokens, item.sequence.num_prompt_tokens - 1)
                for begin in range(first, last, MAX_LOGIT_ROWS):
                    end = min(last, begin + MAX_LOGIT_ROWS)
                    chunk = hidden[row + begin - item.start : row + end - item.start].contiguous()
                    if self.watch is not None:
                        self.watch(request, begin, chunk)
                    logits = self._logits(chunk)
                    targets = item.sequence.token_ids[begin + 1 : end + 1]
                    found = prompt_logprobs(logits, targets, request.params.prompt_logprobs)
                    output.prompt_logprobs += zip(range(begin + 1, end + 1), found, strict=True)
            row += item.num_rows

    @torch.inference_mode()
    def _logits(self, hidden_states: Tensor) -> Tensor:
        return self.decoder.logits(hidden_states, batch_invariant=self.batch_invariant)

    # ---- sampling

    def _sample(self, scheduled: list[ScheduledSequence], hidden: Tensor, outputs: list[ItemOutput]) -> None:
        """One row for each sampled token: a sequence's last row and its drafts' rows."""
        row_ids: list[int] = []
        rows: list[SampleRow] = []
        owners: list[tuple[int, int]] = []  # (item, draft position, or -1 - i for twin i)
        row = 0
        for number, item in enumerate(scheduled):
            if item.samples and item.sequence.request.params.max_tokens > 0:
                last = row + item.num_tokens - 1
                for position in range(len(item.draft_token_ids) + 1):
                    row_ids.append(last + position)
                    rows.append(self._sample_row(item.sequence, item.draft_token_ids[:position]))
                    owners.append((number, position))
                for twin in range(item.sequence.request.num_unforked):
                    row_ids.append(last)
                    rows.append(self._sample_row(item.sequence, [], index=1 + twin))
                    owners.append((number, -1 - twin))
            row += item.num_rows
        if not rows:
            return
        sampled = self._tokens(self._rows(hidden, row_ids), rows)
        for (number, position), token in zip(owners, sampled, strict=True):
            output = outputs[number]
            if position < 0:
                output.twins.append(token)
            elif position == len(output.tokens) and _accepted(scheduled[number], output.tokens):
                output.tokens.append(token)

    @torch.inference_mode()
    def _tokens(self, hidden: Tensor, rows: list[SampleRow]) -> list[TokenLogprob]:
        """A token for each row of hidden states. Only where every row of a step is plainly greedy is there no need for
        logits: computing them for some rows reads the whole head anyway."""
        if all(needs_argmax_only(row) for row in rows):
            token_ids = self.decoder.likeliest(hidden)
            if token_ids is not None:
                return likeliest(token_ids)
        return sample(self._logits(hidden), rows)

    @torch.inference_mode()
    def _rows(self, hidden: Tensor, row_ids: list[int]) -> Tensor:
        if row_ids == list(range(hidden.shape[0])):
            return hidden
        return embed_tokens(torch.tensor(row_ids, device=hidden.device), hidden)

    def _sample_row(self, sequence: Sequence, drafts: list[int], index: int | None = None) -> SampleRow:
        request, grammar = sequence.request, sequence.grammar
        return SampleRow(
            params=request.params,
            seed=request.seed,
            index=sequence.index if index is None else index,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=sequence.output_token_ids + drafts,
            eos_token_ids=self.eos_token_ids,
            bitmask=None if grammar is None else grammar.bitmask(),
        )


def _accepted(item: ScheduledSequence, tokens: list[TokenLogprob]) -> bool:
    """Whether every token sampled so far equals its draft: only then does the next row follow from real tokens."""
    return all(token.token_id == draft for token, draft in zip(tokens, item.draft_token_ids, strict=False))


@dataclass(slots=True)
class Chunk:
    """One sequence's rows of a step, as every process needs them."""

    token_ids: list[int]
    start: int
    block_table: list[int]
    adapter_slot: int

    @classmethod
    def of(cls, item: ScheduledSequence) -> "Chunk":
        sequence, adapter = item.sequence, item.sequence.request.adapter
        known = sequence.token_ids[item.start : item.start + item.num_tokens]
        return cls(
            known + item.draft_token_ids, item.start, sequence.block_table, -1 if adapter is None else adapter.slot
        )


class _Inputs:
    """Buffers of fixed address that a step is written into; recordings read them."""

    def __init__(self, max_num_tokens: int, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")

        self.device = device
        self.token_ids = zeros(max_num_tokens, dtype=torch.int64)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.slot_mapping = zeros(max_num_tokens, dtype=torch.int64)
        self.adapter_ids = zeros(max_num_tokens, dtype=torch.int32)
        self.cu_seqlens = zeros(max_num_seqs + 1, dtype=torch.int32)
        self.seq_lens = zeros(max_num_seqs, dtype=torch.int32)
        self.block_tables = zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self._host = [self.token_ids, self.positions, self.slot_mapping, self.adapter_ids]
        self._host += [self.cu_seqlens, self.seq_lens, self.block_tables]
        self._numpy = [tensor.numpy() for tensor in self._host]
        self._device = self._host if device.type == "cpu" else [tensor.to(device) for tensor in self._host]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, chunks: list[Chunk], block_size: int, *, pad_to: tuple[int, int] | None) -> Rows:
        """Write a step into the buffers; returns views of its rows and sequences.

        pad_to  rows and sequences to fill up to; what is added is not kept and sees nothing
        """
        if self._copied is not None:
            self._copied.synchronize()  # a step that sampled nothing was not waited for: its copies may still be queued
        token_ids, positions, slots, adapter_ids, cu_seqlens, seq_lens, block_tables = self._numpy
        row, any_adapter = 0, False
        for number, chunk in enumerate(chunks):
            num_rows = len(chunk.token_ids)
            end, stop = row + num_rows, chunk.start + num_rows
            table = block_tables[number]
            table[: len(chunk.block_table)] = chunk.block_table
            if num_rows == 1:
                token_ids[row], positions[row] = chunk.token_ids[0], chunk.start
                slots[row] = chunk.block_table[chunk.start // block_size] * block_size + chunk.start % block_size
            else:
                steps = np.arange(chunk.start, stop)
                token_ids[row:end], positions[row:end] = chunk.token_ids, steps
                slots[row:end] = table[steps // block_size].astype(np.int64) * block_size + steps % block_size
            adapter_ids[row:end] = chunk.adapter_slot
            any_adapter |= chunk.adapter_slot >= 0
            seq_lens[number] = stop
            row = cu_seqlens[number + 1] = end
        num_seqs = len(chunks)
        if pad_to is not None:
            rows, sequences = slice(row, pad_to[0]), slice(num_seqs, pad_to[1])
            token_ids[rows], positions[rows], slots[rows], adapter_ids[rows] = 0, 0, -1, -1
            seq_lens[sequences] = 0
            cu_seqlens[num_seqs + 1 : pad_to[1] + 1] = np.minimum(row + 1 + np.arange(pad_to[1] - num_seqs), pad_to[0])
            row, num_seqs = pad_to
        if self._device is not self._host:
            for host, device in zip(self._host, self._device, strict=True):
                device.copy_(host, non_blocking=True)
            self._copied.record()
        return self._views(row, num_seqs, any_adapter)

    def _views(self, num_rows: int, num_seqs: int, any_adapter: bool) -> Rows:
        token_ids, positions, slots, adapter_ids, cu_seqlens, seq_lens, block_tables = self._device
        attention = AttentionBatch(
            cu_seqlens=cu_seqlens[: num_seqs + 1],
            seq_lens=seq_lens[:num_seqs],
            block_tables=block_tables[:num_seqs],
            slot_mapping=slots[:num_rows],
        )
        return Rows(
            token_ids[:num_rows], positions[:num_rows], attention, adapter_ids[:num_rows] if any_adapter else None
        )
