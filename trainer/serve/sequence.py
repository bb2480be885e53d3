"""Request and Sequence: what was asked, and how far one answer to it has come.

A request with n > 1 starts as one sequence; when its prompt is computed the others are forked from it and share its KV
blocks. A sequence has no phases: `num_computed_tokens` chases `num_tokens`, whether the tokens came from the prompt,
from sampling, or have to be computed again after a preemption.
"""

import hashlib
import itertools
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from trainer.serve.outputs import Choice, TokenLogprob
from trainer.serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trainer.serve.adapters import Adapter
    from trainer.serve.detokenizer import Detokenizer
    from trainer.serve.grammar import CompiledGrammar, Grammar


class Status(Enum):
    waiting = "waiting"
    running = "running"
    swapped = "swapped"
    finished = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what is wanted from it. `sequences` holds its answers, best_of of them once they are forked."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    adapter: "Adapter | None" = None
    priority: int = 0
    cache_salt: str | None = None
    grammar: "CompiledGrammar | None" = None
    arrival_s: float = 0.0
    order: float = 0.0
    """Who goes first: priority, raised with waiting time; the smallest is served first and never preempted."""
    sequences: list["Sequence"] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_cached_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_unforked(self) -> int:
        """Sequences that are still to be forked: they have a place reserved."""
        return self.params.best_of - len(self.sequences)

    @property
    def finished(self) -> bool:
        return self.num_unforked == 0 and all(s.status is Status.finished for s in self.sequences)

    @property
    def next_prompt_logprob(self) -> int | None:
        """The first prompt position whose log-probability is wanted and missing."""
        if self.params.prompt_logprobs is None:
            return None
        position = self.params.prompt_logprobs_start + len(self.prompt_logprobs)
        return position if position < len(self.prompt_token_ids) else None

    def namespace(self) -> bytes:
        """What must agree before KV blocks may be shared: the adapter's content and the caller's salt."""
        adapter = self.adapter.sha256 if self.adapter else ""
        salt = self.cache_salt or ""
        return hashlib.sha256(f"{len(adapter)}:{adapter}:{len(salt)}:{salt}".encode("utf-8", "surrogatepass")).digest()


_sequence_ids = itertools.count()


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer: its tokens so far, the KV blocks that hold them, and the state of its text."""

    request: Request
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    sequence_id: int = field(default_factory=lambda: next(_sequence_ids))
    status: Status = Status.waiting
    num_computed_tokens: int = 0
    num_lost_tokens: int = 0
    """Computed before the last preemption that dropped its blocks."""
    block_table: list[int] = field(default_factory=list)
    num_registered_blocks: int = 0
    """Full blocks, from the first on, that the prefix cache knows about."""
    swapped_blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """The hash chain of its full blocks, as far as it was needed."""
    detokenizer: "Detokenizer | None" = None
    grammar: "Grammar | None" = None
    choice: Choice = field(default_factory=lambda: Choice(0))
    last_token_s: float | None = None

    @classmethod
    def first(cls, request: Request) -> "Sequence":
        prompt = request.prompt_token_ids
        sequence = cls(request, 0, list(prompt), len(prompt))
        request.sequences.append(sequence)
        return sequence

    def fork(self) -> "Sequence":
        """A further answer to the same prompt; the caller shares the blocks."""
        index = len(self.request.sequences)
        twin = Sequence(self.request, index, list(self.token_ids), self.num_prompt_tokens)
        twin.num_computed_tokens = self.num_computed_tokens
        twin.block_hashes = list(self.block_hashes)
        twin.num_registered_blocks = self.num_registered_blocks
        twin.choice.index = index
        self.request.sequences.append(twin)
        return twin

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def order(self) -> tuple[float, int]:
        return self.request.order, self.sequence_id

    def block_hash(self, block_index: int, block_size: int) -> bytes:
        """Hash of the tokens of full block `block_index` and of all before it, within the request's namespace."""
        while len(self.block_hashes) <= block_index:
            begin = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else self.request.namespace()
            tokens = array("q", self.token_ids[begin : begin + block_size])
            self.block_hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return self.block_hashes[block_index]
