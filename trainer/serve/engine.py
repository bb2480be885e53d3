"""Engine: requests in, tokens out. One `step` schedules, computes, samples and tells what is new.

Scheduler (who), BlockManager (where), ModelRunner (what), Detokenizer (as text): the engine only lets them talk. It
runs in one thread and knows neither HTTP nor asyncio; `LLM` drives it directly, `AsyncEngine` from a thread of its own.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.serve.adapters import Adapter
from trainer.serve.block_manager import BlockManager
from trainer.serve.config import ServeConfig
from trainer.serve.detokenizer import Detokenizer
from trainer.serve.grammar import Grammar, GrammarCompiler
from trainer.serve.metrics import Metrics
from trainer.serve.outputs import Choice, Delta, FinishReason, RequestOutput, TokenLogprob
from trainer.serve.sampling_params import SamplingParams
from trainer.serve.scheduler import ScheduledSequence, Scheduler, Step
from trainer.serve.sequence import Request, Sequence, Status

MAX_PRIORITY = 1_000_000
"""Far from where float64 would lose the fractions that waiting adds."""


@dataclass(slots=True)
class ItemOutput:
    """What a step gave for one scheduled sequence.

    tokens           the sampled token, after the drafts that were accepted before it; empty inside a prompt
    twins            first tokens of the sequences to fork, where the request wants several answers
    prompt_logprobs  (position, its token's log-probability) of the prompt tokens that this chunk predicts
    """

    tokens: list[TokenLogprob] = field(default_factory=list)
    twins: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)


class Runner(Protocol):
    """What computes a step; tests put an oracle here."""

    def execute(self, step: Step) -> list[ItemOutput]: ...


@dataclass(slots=True)
class Event:
    """Something new about a request."""

    request: Request
    delta: Delta


class Engine:
    """The engine's state; see the module docstring. Not thread-safe."""

    def __init__(
        self,
        config: ServeConfig,
        runner: Runner,
        blocks: BlockManager,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.runner, self.tokenizer = config, runner, tokenizer
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos_token_ids
        self.scheduler = Scheduler(
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            aging_steps=config.priority_aging_steps,
            num_drafts=config.num_speculative_tokens,
        )
        self.blocks, self.metrics, self._clock = blocks, metrics or Metrics(), clock
        self.requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self.grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self._ttfts_s: deque[float] = deque(maxlen=64)

    # ---- requests

    def _check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Refuse what this model cannot answer, and fill in the longest answer."""
        num_prompt = len(prompt_token_ids)
        require(num_prompt > 0, "prompt is empty; give at least one token")
        room = self.max_model_len - num_prompt
        wants_tokens = params.max_tokens != 0
        require(
            room >= wants_tokens,
            f"prompt has {num_prompt} tokens, the model takes {self.max_model_len} (max_model_len) for prompt and "
            "answer together; shorten the prompt",
        )
        if not all(isinstance(token_id, int) and 0 <= token_id < self.vocab_size for token_id in prompt_token_ids):
            wrong = next(t for t in prompt_token_ids if not isinstance(t, int) or not 0 <= t < self.vocab_size)
            raise UserError(f"prompt has token id {wrong!r}; this model's ids are 0..{self.vocab_size - 1}")
        params.check_vocabulary(self.vocab_size)
        if params.max_tokens is None:  # as long as model and cache allow
            params.max_tokens = max(1, self.blocks.num_blocks * self.blocks.block_size - num_prompt)
        params.max_tokens = min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)

    def request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """A checked request, not yet queued; changes nothing but the count of requests, so any thread may call it.

        raises  UserError naming the field, the value and what is accepted: what passes here will be answered
        """
        params = replace(params)
        self._check(prompt_token_ids, params)
        require(
            isinstance(priority, int) and abs(priority) <= MAX_PRIORITY,
            f"priority={priority!r:.40}; give a whole number in -{MAX_PRIORITY}..{MAX_PRIORITY}",
        )
        number = next(self._numbers)
        request = Request(
            request_id=request_id or f"request-{number}",
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=params.seed if params.seed is not None else hash((self.config.seed, number)),
            adapter=adapter,
            priority=priority,
            cache_salt=cache_salt,
            grammar=None if params.json_schema is None else self.grammars.compile(params.json_schema),
            arrival_s=self._clock(),
        )
        self.scheduler.check(request, len(prompt_token_ids) + params.max_tokens)
        return request

    def add(self, request: Request) -> None:
        """Queue a request.

        raises  UserError if its id is taken
        """
        require(
            request.request_id not in self.requests,
            f"request_id={request.request_id} is running already; give another one",
        )
        self.requests[request.request_id] = request
        if request.params.prompt_logprobs is not None and request.params.prompt_logprobs_start == 0:
            request.prompt_logprobs.append(None)  # nothing predicts the first token
        if request.adapter is not None:
            request.adapter.num_requests += 1
        sequence = self.scheduler.add(request)
        if request.grammar is not None:
            sequence.grammar = Grammar(request.grammar)
        self.metrics.arrival()

    def abort(self, request_id: str, reason: str = "aborted by the client") -> list[Event]:
        """End a request in whatever state it is and free what it holds; unknown ids are none of our business."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        events = []
        for sequence in request.sequences:
            if sequence.status is not Status.finished:
                events.append(self._finish(sequence, FinishReason.abort, reason))
        for index in range(len(request.sequences), request.params.best_of):  # answers that were never forked
            events.append(Event(request, Delta(index, "", [], None, FinishReason.abort, reason)))
        self._close(request)
        self._measure()  # there may be no further step
        return events

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    # ---- one step

    def step(self) -> list[Event]:
        """Compute up to `max_num_batched_tokens` tokens; returns what is new, in order.

        raises  what the runner raises; every request must be aborted then, after which the engine can go on
        """
        try:
            return self._step()
        except BaseException:  # Ctrl-C too, wherever it strikes
            self.blocks.forget()  # blocks of this step can be found already, and were perhaps not computed
            raise

    def _step(self) -> list[Event]:
        step = self.scheduler.schedule()
        now = self._clock()
        for item in step.scheduled:
            if item.sequence.request.first_scheduled_s is None:
                item.sequence.request.first_scheduled_s = now
        outputs = self.runner.execute(step)
        now = self._clock()
        events: list[Event] = []
        for item, output in zip(step.scheduled, outputs, strict=True):
            self._update(item, output, now, events)
        if self.config.check:
            self.blocks.check(self.unfinished)
        self.metrics.step(step.num_tokens)
        self._measure()
        return events

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _update(self, item: ScheduledSequence, output: ItemOutput, now: float, events: list[Event]) -> None:
        sequence, request = item.sequence, item.sequence.request
        for position, logprob in output.prompt_logprobs:
            if position == request.next_prompt_logprob:  # else it was known before a preemption
                request.prompt_logprobs.append(logprob)
        samples = item.samples
        accepted = max(0, len(output.tokens) - 1)
        sequence.num_computed_tokens = item.start + item.num_tokens + accepted
        self.num_prompt_tokens += max(0, min(item.start + item.num_tokens, sequence.num_prompt_tokens) - item.start)
        self.scheduler.counts.drafted += len(item.draft_token_ids)
        self.scheduler.counts.accepted += accepted
        if not samples:
            return
        twins = self.scheduler.fork(sequence) if request.num_unforked else []
        if request.params.max_tokens == 0:
            events += [self._finish(answer, FinishReason.length) for answer in (sequence, *twins)]
        else:
            events += [self._extend(twin, [token], now) for twin, token in zip(twins, output.twins, strict=True)]
            events.append(self._extend(sequence, output.tokens, now))
        if request.finished:
            self._close(request)

    def _extend(self, sequence: Sequence, tokens: list[TokenLogprob], now: float) -> Event:
        """Append sampled tokens until one of them ends the answer."""
        request = sequence.request
        if sequence.detokenizer is None:
            self._begin_answer(sequence)
        reason: FinishReason | None = None
        stop: str | int | None = None
        taken: list[TokenLogprob] = []
        for token in tokens:
            sequence.token_ids.append(token.token_id)
            taken.append(token)
            reason, stop = self._finish_reason(sequence, token.token_id)
            if reason is not None:
                break
        self._time(sequence, len(taken), now)
        self.num_generated_tokens += len(taken)
        choice = sequence.choice
        choice.token_ids += [token.token_id for token in taken]
        if choice.cumulative_logprob is not None:
            choice.cumulative_logprob += sum(token.logprob for token in taken)
        if choice.logprobs is not None:
            choice.logprobs += taken
        if reason is not None:
            return self._finish(sequence, reason, stop, taken)
        return Event(request, self._delta(sequence, taken))

    def _begin_answer(self, sequence: Sequence) -> None:
        request, params = sequence.request, sequence.request.params
        sequence.detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids, params)
        if params.logprobs is not None or params.best_of > params.n:
            sequence.choice.cumulative_logprob = 0.0
        if params.logprobs is not None:
            sequence.choice.logprobs = []

    def _finish_reason(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, str | int | None]:
        """Whether the token that was just appended ends the answer: EOS, stop ids, stop strings, then the length."""
        params, num_output = sequence.request.params, sequence.num_output_tokens
        may_stop = num_output > params.min_tokens
        if sequence.grammar is not None and not sequence.grammar.accept(token_id):
            raise RuntimeError(f"token {token_id} was sampled against the grammar")
        if may_stop and not params.ignore_eos and token_id in self.eos_token_ids:
            return FinishReason.stop, None
        if may_stop and token_id in params.stop_token_ids:
            return FinishReason.stop, token_id
        stop = sequence.detokenizer.append(token_id, may_stop=num_output >= params.min_tokens)
        if stop is not None:
            return FinishReason.stop, stop
        if sequence.grammar is not None and sequence.grammar.terminated:
            return FinishReason.stop, None
        if num_output >= params.max_tokens:
            return FinishReason.length, None
        return None, None

    def _delta(self, sequence: Sequence, taken: list[TokenLogprob]) -> Delta:
        text = sequence.detokenizer.take()
        sequence.choice.text += text
        wanted = sequence.request.params.logprobs is not None
        return Delta(sequence.index, text, [token.token_id for token in taken], taken if wanted else None)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop: str | int | None = None,
        taken: list[TokenLogprob] | None = None,
    ) -> Event:
        if sequence.detokenizer is not None:
            sequence.detokenizer.finish()
            delta = self._delta(sequence, taken or [])
        else:
            delta = Delta(sequence.index, "", [])
        delta.finish_reason, delta.stop_reason = reason, stop
        sequence.choice.finish_reason, sequence.choice.stop_reason = reason, stop
        self.scheduler.finish(sequence)
        return Event(sequence.request, delta)

    def _close(self, request: Request) -> None:
        """Forget a finished request."""
        del self.requests[request.request_id]
        if request.adapter is not None:
            request.adapter.release()
        reasons = [sequence.choice.finish_reason for sequence in request.sequences]
        self.metrics.finished(
            reason=FinishReason.abort if FinishReason.abort in reasons else reasons[0],
            prompt_tokens=len(request.prompt_token_ids),
            generation_tokens=sum(s.num_output_tokens for s in request.sequences),
            e2e_s=self._clock() - request.arrival_s,
            n=request.params.n,
        )

    # ---- figures

    def _time(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        request = sequence.request
        if request.first_token_s is None:
            request.first_token_s = now
            self._ttfts_s.append(now - request.arrival_s)
            self.metrics.first_token(now - request.arrival_s, request.first_scheduled_s - request.arrival_s)
        elif sequence.last_token_s is not None:
            self.metrics.tokens((now - sequence.last_token_s) / num_tokens, num_tokens)
        sequence.last_token_s = now

    def recent_ttft_s(self) -> float | None:
        """Median time to the first token of the last 64 requests."""
        return statistics.median(self._ttfts_s) if self._ttfts_s else None

    def _measure(self) -> None:
        self.metrics.gauges(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            usage=1 - self.blocks.num_free_blocks / self.blocks.num_blocks,
        )
        self.metrics.counts(self.scheduler.counts)


def request_output(request: Request) -> RequestOutput:
    """The finished request: of best_of answers the n with the highest mean log-probability, best first."""
    choices = [sequence.choice for sequence in request.sequences]
    params = request.params
    if params.best_of > params.n:
        choices = sorted(choices, key=_mean_logprob, reverse=True)[: params.n]
        choices = [_renumbered(choice, index, params) for index, choice in enumerate(choices)]
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        choices=choices,
        prompt_logprobs=request.prompt_logprobs if params.prompt_logprobs is not None else None,
        num_cached_tokens=request.num_cached_tokens,
    )


def _mean_logprob(choice: Choice) -> float:
    return (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids))


def _renumbered(choice: Choice, index: int, params: SamplingParams) -> Choice:
    cumulative = None if params.logprobs is None else choice.cumulative_logprob
    return replace(choice, index=index, cumulative_logprob=cumulative)
