"""OracleRunner: a runner without a model that knows what every KV slot holds, and Harness, an engine around it.

A slot does not hold keys and values but the fingerprint of what they depend on: the namespace (adapter, salt) and all
tokens up to its own. A step's blocks are moved and its rows written as the real runner does it; then every slot that a
row would read must hold the fingerprint of that row's own prefix. The next token is a pure function of the prefix, so
what a request must be answered is known without an engine: `expected_answer`.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from trainer.serve.block_manager import BlockManager
from trainer.serve.config import ServeConfig
from trainer.serve.engine import Engine, Event, ItemOutput
from trainer.serve.outputs import FinishReason, TokenLogprob
from trainer.serve.sampling_params import SamplingParams
from trainer.serve.scheduler import ScheduledSequence, Step
from trainer.serve.sequence import Request, Sequence, Status

EOS = 0
VOCAB_SIZE = 9
"""EOS and eight letters: so few that prompt lookup finds something."""
MAX_MODEL_LEN = 8192


class OracleError(AssertionError):
    """The engine asked for something that a model would have answered wrongly, and in silence."""


class LetterTokenizer:
    """Ids 1 to 8 are the letters a to h, id 0 is EOS."""

    added_tokens_decoder: dict[int, Any] = {}
    all_special_ids = [EOS]
    eos_token_id = EOS

    def get_vocab(self) -> dict[str, int]:
        return {self.convert_ids_to_tokens(token_id): token_id for token_id in range(VOCAB_SIZE)}

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return "</s>" if token_id == EOS else chr(ord("a") + token_id - 1)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        tokens = [t for t in token_ids if t != EOS or not skip_special_tokens]
        return "".join(self.convert_ids_to_tokens(token_id) for token_id in tokens)


@dataclass(eq=False)
class LetterAdapter:
    """What the engine knows of an adapter."""

    sha256: str
    slot: int = 0
    num_requests: int = 0

    def release(self) -> None:
        self.num_requests -= 1


def ids(text: str) -> list[int]:
    """Token ids of letters."""
    return [ord(letter) - ord("a") + 1 for letter in text]


# ---- the function that the oracle computes


def root(adapter: LetterAdapter | None, cache_salt: str | None) -> int:
    """Fingerprint of nothing, in a namespace. Apart from the engine's own hash of it, which may be wrong."""
    return crc32(repr((adapter and adapter.sha256, cache_salt or None)).encode())


def extend(fingerprint: int, token_id: int) -> int:
    """Fingerprint of a prefix and one more token; 61 bits, so that two prefixes do not meet in a test."""
    return hash((fingerprint, token_id))


def next_token(fingerprint: int, last: list[int], index: int) -> TokenLogprob:
    """The token after a prefix that ends with the tokens `last`, in answer number `index`.

    Of 16 tokens one is EOS, some 11 follow from the last two alone, so that drafts are often right, and the others are
    another in each answer.
    """
    chance = hash((fingerprint, index, 1))
    if chance % 16 == 0:
        token_id = EOS
    elif chance % 4:
        token_id = 1 + hash(tuple(last[-2:])) % (VOCAB_SIZE - 1)
    else:
        token_id = 1 + (chance >> 8) % (VOCAB_SIZE - 1)
    return score(fingerprint, token_id)


def score(fingerprint: int, token_id: int) -> TokenLogprob:
    """A made-up log-probability of a token after a prefix, in (-1, 0]."""
    return TokenLogprob(token_id, -(extend(fingerprint, token_id) % 1024) / 1024, 1)


@dataclass
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None


def expected_answer(request: Request, index: int) -> Answer:
    """What answer number `index` must be, token by token and by the slowest search for stop strings."""
    params, tokens = request.params, list(request.prompt_token_ids)
    fingerprint = root(request.adapter, request.cache_salt)
    for token_id in tokens:
        fingerprint = extend(fingerprint, token_id)
    answer = Answer([], "", FinishReason.length, None)
    while len(answer.token_ids) < params.max_tokens:
        token_id = next_token(fingerprint, tokens, index).token_id
        fingerprint = extend(fingerprint, token_id)
        tokens.append(token_id)
        answer.token_ids.append(token_id)
        num_tokens = len(answer.token_ids)
        if num_tokens > params.min_tokens:
            if token_id == EOS and not params.ignore_eos:
                return Answer(answer.token_ids, answer.text, FinishReason.stop, None)
            if token_id in params.stop_token_ids:
                return Answer(answer.token_ids, answer.text, FinishReason.stop, token_id)
        if token_id == EOS:
            continue
        answer.text += LetterTokenizer().convert_ids_to_tokens(token_id)
        found = [stop for stop in params.stop if answer.text.endswith(stop)]
        if found and num_tokens >= params.min_tokens:
            stop = max(found, key=len)
            text = answer.text if params.include_stop_str_in_output else answer.text.removesuffix(stop)
            return Answer(answer.token_ids, text, FinishReason.stop, stop)
    return answer


def expected_prompt_logprobs(request: Request) -> list[float | None]:
    fingerprint = root(request.adapter, request.cache_salt)
    found: list[float | None] = []
    for position, token_id in enumerate(request.prompt_token_ids):
        found.append(score(fingerprint, token_id).logprob if position else None)
        fingerprint = extend(fingerprint, token_id)
    return found[request.params.prompt_logprobs_start :]


# ---- the runner


class OracleRunner:
    """Executes steps on fingerprints.

    raises  OracleError, from `execute`, naming request, slot and what is wrong
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int = 0
    ) -> None:
        self.block_size = blocks.block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.num_drafts = num_drafts
        self.slots: list[list[int | None]] = [[None] * blocks.block_size for _ in range(blocks.num_blocks)]
        self.host: list[list[int | None]] = [[None] * blocks.block_size for _ in range(blocks.num_swap_blocks)]
        self.num_restarts = 0
        """Sequences that came back behind where they had been."""
        self.num_recomputed_tokens = 0
        self.num_rows = 0
        self.scheduled: list[ScheduledSequence] = []
        """Of the last step."""
        self._next_start: dict[int, int] = {}
        self._paths: dict[int, tuple[list[int], list[int]]] = {}

    def execute(self, step: Step) -> list[ItemOutput]:
        self.scheduled = step.scheduled
        self._check_step(step)
        self._move_blocks(step)
        paths = [self._path(item) for item in step.scheduled]
        self._write(step.scheduled, paths)
        for item, path in zip(step.scheduled, paths, strict=True):
            self._check_reads(item, path)
        return [self._output(item, path) for item, path in zip(step.scheduled, paths, strict=True)]

    def _check_step(self, step: Step) -> None:
        num_rows = sum(item.num_tokens + len(item.draft_token_ids) for item in step.scheduled)
        self.num_rows += num_rows
        _require(num_rows <= self.max_num_batched_tokens, f"{num_rows} rows exceed {self.max_num_batched_tokens}")
        owners = {item.sequence.sequence_id for item in step.scheduled}
        _require(len(owners) == len(step.scheduled), "a sequence is scheduled twice")
        _require(len(owners) <= self.max_num_seqs, f"{len(owners)} sequences exceed {self.max_num_seqs}")
        held = {block_id for item in step.scheduled for block_id in item.sequence.block_table}
        for name, pairs in (("swap_in", step.swap_in), ("copies", step.copies)):
            targets = [target for _, target in pairs]
            _require(len(set(targets)) == len(targets), f"{name} has a target twice")
            _require(held.issuperset(targets), f"{name} has a target that no scheduled sequence holds")
        for item in step.scheduled:
            self._check_item(item)

    def _check_item(self, item: ScheduledSequence) -> None:
        sequence, name = item.sequence, _name(item.sequence)
        end = item.start + item.num_tokens
        _require(sequence.status is Status.running, f"{name} is {sequence.status}")
        _require(item.start == sequence.num_computed_tokens, f"{name}: rows start at {item.start}")
        _require(item.num_tokens >= 1 and end <= sequence.num_tokens, f"{name}: rows {item.start}..{end}")
        drafts = len(item.draft_token_ids)
        _require(drafts <= self.num_drafts, f"{name}: {drafts} drafts")
        _require(drafts == 0 or end == sequence.num_tokens, f"{name}: drafts inside the prompt")
        params = sequence.request.params
        longest = len(sequence.request.prompt_token_ids) + max(0, params.max_tokens - 1)
        _require(end + drafts <= longest, f"{name}: {end + drafts} rows, the longest answer needs {longest}")
        expected = self._next_start.get(sequence.sequence_id)
        if expected is None:
            expected = len(sequence.request.prompt_token_ids) if sequence.index else 0
        if item.start != expected:
            # a prefix from the cache, at first or after a preemption
            _require(item.start % self.block_size == 0, f"{name}: rows start at {item.start} instead of {expected}")
        if item.start < expected:
            self.num_restarts += 1
            self.num_recomputed_tokens += expected - item.start

    def _move_blocks(self, step: Step) -> None:
        for sources, targets, pairs in (
            (self.slots, self.host, step.swap_out),
            (self.host, self.slots, step.swap_in),
            (self.slots, self.slots, step.copies),
        ):
            read = [list(sources[source]) for source, _ in pairs]  # all sources are read before a target is written
            for (_, target), block in zip(pairs, read, strict=True):
                targets[target] = block

    def _path(self, item: ScheduledSequence) -> list[int]:
        """Fingerprints of the prefixes that end at positions 0, 1, ... of the sequence, drafts included."""
        sequence = item.sequence
        tokens, nodes = self._paths.setdefault(sequence.sequence_id, ([], []))
        _require(sequence.token_ids[: len(tokens)] == tokens, f"{_name(sequence)}: tokens have changed")
        for token_id in sequence.token_ids[len(tokens) :]:
            nodes.append(extend(nodes[-1] if nodes else _root(sequence), token_id))
            tokens.append(token_id)
        path = nodes[: item.start + item.num_tokens]
        for token_id in item.draft_token_ids:
            path.append(extend(path[-1], token_id))
        return path

    def _write(self, scheduled: list[ScheduledSequence], paths: list[list[int]]) -> None:
        written: dict[tuple[int, int], Sequence] = {}
        for item, path in zip(scheduled, paths, strict=True):
            table = item.sequence.block_table
            for position in range(item.start, item.start + item.num_rows):
                _require(position // self.block_size < len(table), f"{_name(item.sequence)}: no block for {position}")
                slot = table[position // self.block_size], position % self.block_size
                _require(
                    slot not in written, f"{_name(item.sequence)} and {_name(written.get(slot))} both write slot {slot}"
                )
                written[slot] = item.sequence
                self.slots[slot[0]][slot[1]] = path[position]

    def _check_reads(self, item: ScheduledSequence, path: list[int]) -> None:
        held: Iterable[int | None] = itertools.chain.from_iterable(self.slots[b] for b in item.sequence.block_table)
        for position, (found, wanted) in enumerate(zip(held, path, strict=False)):
            if found != wanted:
                block_id = item.sequence.block_table[position // self.block_size]
                raise OracleError(
                    f"{_name(item.sequence)} reads position {position} in slot {position % self.block_size} of block "
                    f"{block_id}, which holds {'nothing' if found is None else 'the keys of another prefix'}"
                )

    def _output(self, item: ScheduledSequence, path: list[int]) -> ItemOutput:
        sequence, request, output = item.sequence, item.sequence.request, ItemOutput()
        end = item.start + item.num_tokens
        if request.params.prompt_logprobs is not None:
            for position in range(item.start + 1, min(end + 1, len(request.prompt_token_ids))):
                output.prompt_logprobs.append((position, score(path[position - 1], sequence.token_ids[position])))
        self._next_start[sequence.sequence_id] = end
        if end < sequence.num_tokens or request.params.max_tokens == 0:
            return output
        tokens = list(sequence.token_ids)
        for place in range(len(item.draft_token_ids) + 1):
            output.tokens.append(next_token(path[end - 1 + place], tokens, sequence.index))
            if item.draft_token_ids[place : place + 1] != [output.tokens[-1].token_id]:
                break
            tokens.append(output.tokens[-1].token_id)
        self._next_start[sequence.sequence_id] += len(output.tokens) - 1
        if len(request.sequences) < request.params.best_of:
            indices = range(len(request.sequences), request.params.best_of)
            output.twins = [next_token(path[end - 1], sequence.token_ids, index) for index in indices]
        return output


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise OracleError(message)


def _name(sequence: Sequence | None) -> str:
    return "nobody" if sequence is None else f"{sequence.request.request_id}[{sequence.index}]"


def _root(sequence: Sequence) -> int:
    return root(sequence.request.adapter, sequence.request.cache_salt)


# ---- an engine around it


@dataclass
class Harness:
    """An engine over the oracle that checks, after each step, what must always be true."""

    num_blocks: int = 64
    block_size: int = 4
    num_swap_blocks: int = 0
    enable_prefix_caching: bool = True
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    priority_aging_steps: int = 256
    num_speculative_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    events: dict[tuple[str, int], list[Event]] = field(default_factory=dict)
    """By request id and answer."""

    def __post_init__(self) -> None:
        self.blocks = BlockManager(
            self.num_blocks,
            self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            num_swap_blocks=self.num_swap_blocks,
        )
        self.runner = OracleRunner(
            self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_drafts=self.num_speculative_tokens,
        )
        config = ServeConfig(
            model="tiny",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            priority_aging_steps=self.priority_aging_steps,
            num_speculative_tokens=self.num_speculative_tokens,
            check=True,
        )
        self.engine = Engine(
            config,
            self.runner,
            self.blocks,
            LetterTokenizer(),
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            clock=itertools.count().__next__,
        )
        self.scheduler, self.counts = self.engine.scheduler, self.engine.scheduler.counts

    def add(
        self,
        prompt: str | list[int],
        *,
        adapter: LetterAdapter | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **params: Any,
    ) -> Request:
        """Queue a request; raises UserError if it is refused."""
        token_ids = ids(prompt) if isinstance(prompt, str) else prompt
        request = self.engine.request(
            token_ids, SamplingParams(**params), adapter=adapter, priority=priority, cache_salt=cache_salt
        )
        self.engine.add(request)
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        self.aborted.add(request.request_id)
        self._take(self.engine.abort(request.request_id))
        self.blocks.check(self.engine.unfinished)

    def step(self) -> None:
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        before = {sequence: sequence.num_tokens for sequence in self.scheduler.running}
        decodes = [s for s in before if s.num_tokens - s.num_computed_tokens == 1 and s.num_output_tokens]
        self._take(self.engine.step())
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert oldest is None or oldest.status in (Status.running, Status.finished), "the oldest was preempted"
        assert self.runner.scheduled, "a step without a row"
        scheduled = {item.sequence for item in self.runner.scheduled}
        assert oldest is None or oldest in scheduled, "the oldest did not advance"
        for sequence in decodes:
            if sequence.status in (Status.running, Status.finished):
                assert sequence.num_tokens > before[sequence], "a decode was passed over"
        for queue in (running, waiting):
            assert queue == sorted(queue, key=lambda s: s.order)
        assert all(s.status is Status.running for s in running)
        assert all(s.status is (Status.swapped if s.swapped_blocks else Status.waiting) for s in waiting)
        assert all(not s.block_table for s in waiting)
        assert self.scheduler.num_places_taken <= self.max_num_seqs
        assert self.runner.num_restarts <= self.counts.preempted_recompute
        assert self.runner.num_recomputed_tokens == self.counts.recomputed_tokens

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self.events.setdefault((event.request.request_id, event.delta.index), []).append(event)

    def drain(self) -> None:
        """Run until nothing is left, check every answer, and that nothing is held any more."""
        # The first in order of those running loses no work, so it needs at most a step a token of its own; until it
        # is done, each of the others can get in before it once. Without progress the count is passed soon.
        unfinished = [r for r in self.requests if r.request_id in self.engine.requests]
        work = sum((len(r.prompt_token_ids) + r.params.max_tokens) * r.params.best_of for r in unfinished)
        bound = work * (1 + sum(r.params.best_of for r in unfinished))
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"not done after {bound} steps"
        self.check_answers()
        self.check_drained()

    def check_answers(self) -> None:
        """Every finished request against `expected_answer`; of an aborted one, what came of it."""
        for request in self.requests:
            whole = request.request_id not in self.aborted
            assert not whole or len(request.sequences) == request.params.best_of
            for sequence in request.sequences:
                self._check_answer(request, sequence)
            if request.params.prompt_logprobs is not None:
                got = [entry and entry.logprob for entry in request.prompt_logprobs]
                want = expected_prompt_logprobs(request)
                assert got == (want if whole else want[: len(got)])
            assert request.num_cached_tokens % self.block_size == 0
            assert request.num_cached_tokens < len(request.prompt_token_ids)

    def _check_answer(self, request: Request, sequence: Sequence) -> None:
        want, got = expected_answer(request, sequence.index), sequence.choice
        if got.finish_reason is FinishReason.abort:
            assert request.request_id in self.aborted
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
        else:
            assert (got.token_ids, got.finish_reason, got.stop_reason) == (
                want.token_ids,
                want.finish_reason,
                want.stop_reason,
            )
            assert got.text == want.text
        events = self.events[request.request_id, sequence.index]
        assert "".join(event.delta.text for event in events) == got.text
        assert [t for event in events for t in event.delta.token_ids] == got.token_ids
        assert [event.delta.finish_reason for event in events if event.delta.finish_reason] == [got.finish_reason]
        assert events[-1].delta.finish_reason is got.finish_reason

    def check_drained(self) -> None:
        assert self.blocks.num_free_blocks == self.num_blocks
        assert self.blocks.num_free_swap_blocks == self.num_swap_blocks
        assert not self.engine.requests and not self.engine.has_work
        assert all(r.adapter is None or r.adapter.num_requests == 0 for r in self.requests)
        self.blocks.check([])
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert self.metric(f"vllm:{name}") == 0, name
        assert self.metric("lowbit:requests_total") == len(self.requests)
        assert self.metric("vllm:request_success_total") == len(self.requests)
        assert self.metric("vllm:prompt_tokens_total") == sum(len(r.prompt_token_ids) for r in self.requests)
        generated = sum(len(s.choice.token_ids) for r in self.requests for s in r.sequences)
        assert self.metric("vllm:generation_tokens_total") == generated == self.engine.num_generated_tokens

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        found = [s for family in self.engine.metrics.registry.collect() for s in family.samples if s.name == name]
        return sum(sample.value for sample in found)
