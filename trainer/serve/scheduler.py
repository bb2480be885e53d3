"""Scheduler: which tokens the next step computes (continuous batching, Orca, OSDI 2022; vLLM's token budget).

Each step has a budget of tokens. Running sequences that need one token come first, so that a long prompt never delays
an answer by more than the budget; then running prompts go on; then waiting requests are let in, in order. When blocks
run out, the last in order is preempted: swapped to host memory if there is room, else computed again later.

Why nothing hangs: the order (priority, raised with waiting time, then arrival) is fixed when a request arrives, victims
are taken from its end, and a request whose longest answer does not fit into the whole cache is refused at the door. So
the first in order always runs and always finishes.
"""

from bisect import insort
from dataclasses import dataclass, field

from trainer.config.errors import UserError
from trainer.serve.block_manager import BlockManager
from trainer.serve.ngram import propose
from trainer.serve.sequence import Request, Sequence, Status


@dataclass(slots=True)
class ScheduledSequence:
    """Tokens `start` to `start + num_tokens` of a sequence, then its drafts."""

    sequence: Sequence
    start: int
    num_tokens: int
    draft_token_ids: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft_token_ids)

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that a new one is sampled."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(slots=True)
class Step:
    """One forward. Block copies come first, in this order: swap_out, swap_in, copies."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_rows for item in self.scheduled)


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    preempted_recompute: int = 0
    preempted_swap: int = 0
    copies_on_write: int = 0
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache, on first admission."""
    prefix_hits: int = 0
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    drafted: int = 0
    accepted: int = 0


class Scheduler:
    """Waiting and running sequences, and the blocks they hold."""

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, aging_steps: int, num_drafts: int
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.aging_steps = aging_steps
        self.num_drafts = num_drafts
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counts = SchedulerCounts()
        self.num_steps = 0

    # ---- requests come and go

    def check(self, request: Request, max_num_tokens: int) -> None:
        """Refuse what could never run.

        max_num_tokens  tokens of prompt and longest answer
        raises          UserError with what is needed and what there is
        """
        needed = self.blocks.num_blocks_for(max_num_tokens)
        if needed > self.blocks.num_blocks:
            raise UserError(
                f"prompt ({len(request.prompt_token_ids)} tokens) and max_tokens need {needed} KV blocks of "
                f"{self.blocks.block_size} tokens, the whole cache has {self.blocks.num_blocks}; shorten the prompt, "
                "lower max_tokens, or start the server with more kv_cache_memory_bytes"
            )
        if request.params.best_of > self.max_num_seqs:
            raise UserError(
                f"best_of={request.params.best_of} exceeds the server's max_num_seqs={self.max_num_seqs}; lower it"
            )

    def add(self, request: Request) -> Sequence:
        """Queue a request as the sequence that will compute its prompt."""
        request.order = request.priority + self.num_steps / self.aging_steps
        sequence = Sequence.first(request)
        insort(self.waiting, sequence, key=_order)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever state it is in, also where Ctrl-C left it, and free its blocks."""
        if sequence.status is Status.running:
            # accepted drafts behind a stop were computed, but are no tokens of the sequence
            self.blocks.register(sequence, min(sequence.num_computed_tokens, sequence.num_tokens))
        for line in (self.running, self.waiting):
            if sequence in line:
                line.remove(sequence)
        sequence.status = Status.finished
        self.blocks.free(sequence)

    def fork(self, parent: Sequence) -> list[Sequence]:
        """The remaining answers to a request whose first one has just computed the prompt; they share its blocks."""
        twins = [parent.fork() for _ in range(parent.request.num_unforked)]
        for twin in twins:
            twin.status = Status.running
            twin.grammar = None if parent.grammar is None else parent.grammar.fork()
            self.blocks.share(parent, twin)
            insort(self.running, twin, key=_order)
        return twins

    @property
    def num_places_taken(self) -> int:
        return len(self.running) + sum(s.request.num_unforked for s in self.running if s.index == 0)

    # ---- one step

    def schedule(self) -> Step:
        """Choose the tokens of the next step and give them blocks."""
        self.num_steps += 1
        step = Step()
        preempted = self._schedule_running(step)
        if not preempted:
            self._admit(step)
        for item in step.scheduled:
            self.blocks.register(item.sequence, item.start + item.num_tokens)
        self.counts.copies_on_write += len(step.copies)
        return step

    def _schedule_running(self, step: Step) -> bool:
        budget, preempted = self.max_num_batched_tokens, False
        decodes = [s for s in self.running if s.num_tokens - s.num_computed_tokens == 1]
        prompts = [s for s in self.running if s.num_tokens - s.num_computed_tokens > 1]
        for sequence in decodes + prompts:
            if sequence.status is not Status.running or budget <= 0:
                continue
            item = ScheduledSequence(sequence, sequence.num_computed_tokens, 0)
            item.num_tokens = min(budget, sequence.num_tokens - sequence.num_computed_tokens)
            while self.blocks.num_missing(sequence, item.start + item.num_tokens) > self.blocks.num_free_blocks:
                victim, preempted = self.running[-1], True
                budget += self._preempt(victim, step)
                if victim is sequence:
                    break
            if sequence.status is Status.running:
                step.copies += self.blocks.allocate(sequence, item.start + item.num_tokens)
                step.scheduled.append(item)
                budget -= item.num_tokens
        self._propose(step, budget)
        return preempted

    def _preempt(self, victim: Sequence, step: Step) -> int:
        """Take the victim's blocks; returns the tokens that it had in this step already."""
        refund = sum(item.num_tokens for item in step.scheduled if item.sequence is victim)
        step.scheduled = [item for item in step.scheduled if item.sequence is not victim]
        pending = {target: source for source, target in step.copies if target in victim.block_table}
        step.copies = [(source, target) for source, target in step.copies if target not in pending]
        self.running.remove(victim)
        moved = self.blocks.swap_out(victim)
        if moved is None:
            self.blocks.free(victim)
            victim.num_lost_tokens, victim.num_computed_tokens = victim.num_computed_tokens, 0
            victim.status = Status.waiting
            self.counts.preempted_recompute += 1
        else:
            step.swap_out += [(pending.get(block, block), host) for block, host in moved]  # its copy will not be made
            victim.status = Status.swapped
            self.counts.swapped_out_blocks += len(moved)
            self.counts.preempted_swap += 1
        insort(self.waiting, victim, key=_order)
        return refund

    def _propose(self, step: Step, budget: int) -> None:
        """Add drafts to decodes, as far as budget and free blocks go; nobody is preempted for them."""
        for item in step.scheduled:
            sequence = item.sequence
            if budget <= 0 or self.num_drafts == 0 or not item.samples or sequence.grammar is not None:
                continue
            if sequence.request.num_unforked:  # its twins start after the prompt, so it must not be past that
                continue
            room = sequence.request.params.max_tokens - sequence.num_output_tokens - 1
            drafts = propose(sequence.token_ids, min(self.num_drafts, budget, room))
            end = item.start + item.num_tokens
            while drafts and self.blocks.num_missing(sequence, end + len(drafts)) > self.blocks.num_free_blocks:
                drafts.pop()
            if drafts:
                copies = self.blocks.allocate(sequence, end + len(drafts))
                assert not copies  # what lies behind a sequence's last token is nobody else's
                item.draft_token_ids = drafts
                budget -= len(drafts)

    def _admit(self, step: Step) -> None:
        """Let waiting sequences in, in order. The first that does not fit stops the rest: nobody is overtaken."""
        budget = self.max_num_batched_tokens - step.num_tokens
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            places = 1 + (sequence.request.num_unforked if sequence.index == 0 else 0)
            if self.num_places_taken + places > self.max_num_seqs:
                return
            if not (self._swap_in(sequence, step) if sequence.status is Status.swapped else self._begin(sequence)):
                return
            self.waiting.pop(0)
            sequence.status = Status.running
            insort(self.running, sequence, key=_order)
            num_tokens = min(budget, sequence.num_tokens - sequence.num_computed_tokens)
            item = ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens)
            step.copies += self.blocks.allocate(sequence, item.start + item.num_tokens)
            self.blocks.register(sequence, item.start + item.num_tokens)
            step.scheduled.append(item)
            budget -= num_tokens

    def _begin(self, sequence: Sequence) -> bool:
        """Take the known beginning of a prompt, if all the rest of it has room."""
        prefix = self.blocks.find_prefix(sequence)
        needed = self.blocks.num_blocks_for(sequence.num_tokens) - len(prefix)
        if needed + self._reserve > self.blocks.num_free_after(prefix):
            return False
        self.blocks.take_prefix(sequence, prefix)
        self.counts.recomputed_tokens += max(0, sequence.num_lost_tokens - sequence.num_computed_tokens)
        if sequence.request.first_scheduled_s is None:
            self.counts.prefix_queries += sequence.num_tokens
            self.counts.prefix_hits += sequence.num_computed_tokens
            sequence.request.num_cached_tokens = sequence.num_computed_tokens
        return True

    @property
    def _reserve(self) -> int:
        """Blocks that the running sequences will want within the next few steps: without them a newcomer would be
        preempted at once. With nobody running there is no reserve, so the first in order always gets in."""
        return -(-len(self.running) // 4)

    def _swap_in(self, sequence: Sequence, step: Step) -> bool:
        if self.blocks.num_blocks_for(sequence.num_tokens) + self._reserve > self.blocks.num_free_blocks:
            return False
        moved = self.blocks.swap_in(sequence)
        step.swap_in += moved
        self.counts.swapped_in_blocks += len(moved)
        return True


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
