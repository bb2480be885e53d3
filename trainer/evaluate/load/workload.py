"""What is asked, and when: the jobs of one point.

A job is a request, or a conversation whose turns follow one another. Arrivals and lengths depend on the seed alone, so
every server and every rate gets the same ones. Words depend on `salt` too: a server that cannot empty its prefix cache
must not find the prompts of an earlier point in it.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Any

from trainer.config.load import LoadConfig, Workload
from trainer.evaluate.load.arrivals import arrival_times, replayed_times
from trainer.evaluate.load.lengths import read_lengths
from trainer.evaluate.load.prompt_file import PromptRow, read_prompts
from trainer.evaluate.load.texts import TextMaker

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """One question: text for /v1/completions; messages to add to the history for /v1/chat/completions.

    think_s  seconds since the answer before
    """

    prompt: str | Messages
    output_len: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """A request or conversation that is due `due_s` seconds after the start.

    warmup  not measured; one that is due at 0 runs ahead of the start
    """

    due_s: float
    turns: tuple[Turn, ...]
    warmup: bool = False


class Workloads:
    """Makes the jobs of points; files and distributions are read once.

    raises  UserError for files and lengths that cannot be used
    """

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._input_len = read_lengths("input_len", config.input_len)
        self._output_len = read_lengths("output_len", config.output_len)
        self._trace = self._read(config.trace, needs_timestamp=True)
        self._prompts = self._read(config.prompts, needs_timestamp=False)

    def _read(self, path: str | None, *, needs_timestamp: bool) -> list[PromptRow]:
        if path is None:
            return []
        return read_prompts(path, needs_prompt=not needs_timestamp, needs_timestamp=needs_timestamp)

    @property
    def has_messages(self) -> bool:
        """Whether prompts are for the chat API only."""
        rows = self._trace + self._prompts
        return self._config.workload == Workload.conversation or any(isinstance(row.prompt, list) for row in rows)

    def jobs(self, rate: float | None, maker: TextMaker, *, chat: bool, salt: str, num: int | None = None) -> list[Job]:
        """The jobs of a point at `rate` jobs a second, in the order of their arrival; warm-up ones first.

        num   measured jobs; None for the settings' number
        salt  makes texts differ from those of other salts
        """
        config = self._config
        if num is None:
            num = config.requests_at(rate)
        if self._trace:
            num = min(num, len(self._trace)) if config.num_requests else len(self._trace)
        moments, warmup = self._moments(rate, num)
        writer = _Writer(config, self, maker, chat, salt)
        return [
            Job(due, writer.turns(i, self._trace[i - warmup] if self._trace and i >= warmup else None), i < warmup)
            for i, due in enumerate(moments)
        ]

    def _moments(self, rate: float | None, num: int) -> tuple[list[float], int]:
        """(when jobs are due, how many of them are warm-up)."""
        config, draw = self._config, Random(f"{self._config.seed} arrivals")
        if self._trace:
            timestamps = [row.timestamp for row in self._trace[:num]]
            times = replayed_times(timestamps, unit_s=config.timestamp_unit_s, rate=rate)
            rate = rate or (num / times[-1] if times[-1] > 0 else math.inf)
        else:
            times = arrival_times(config.arrivals, num, rate=rate, burstiness=config.burstiness, draw=draw)
        if math.isinf(rate):
            return [0.0] * config.warmup + times, config.warmup
        if not config.warmup:
            return times, 0
        ahead = arrival_times(config.arrivals, config.warmup, rate=rate, burstiness=config.burstiness, draw=draw)
        start = config.warmup / rate
        return ahead + [start + due for due in times], config.warmup


class _Writer:
    """Writes the turns of one point's jobs."""

    def __init__(self, config: LoadConfig, workloads: Workloads, maker: TextMaker, chat: bool, salt: str) -> None:
        self._config, self._maker, self._chat, self._salt = config, maker, chat, salt
        self._input_len, self._output_len = workloads._input_len, workloads._output_len
        self._rows = workloads._prompts
        self._lengths, self._words = Random(f"{config.seed} lengths"), Random(f"{config.seed} words {salt}")
        self._prefixes = []
        if config.workload == Workload.prefix:
            groups = range(config.prefix_groups)
            self._prefixes = [maker.text(config.prefix_len, self._words, own=True) for _ in groups]

    def turns(self, index: int, row: PromptRow | None) -> tuple[Turn, ...]:
        """The turns of job `index`; `row` is the trace's, where there is one."""
        output_len = self._output_len(self._lengths)
        if self._rows:
            row = self._rows[index % len(self._rows)] if row is None or row.prompt is None else row
        if row is not None and row.prompt is not None:
            return (Turn(self._given(row.prompt), row.output_len or output_len),)
        input_len = self._input_len(self._lengths)
        if row is not None:
            input_len, output_len = row.input_len or input_len, row.output_len or output_len
        first = Turn(self._asked(self._first_text(input_len)), output_len)
        if self._config.workload != Workload.conversation:
            return (first,)
        return (first, *(self._next_turn() for _ in range(self._config.turns - 1)))

    def _first_text(self, input_len: int) -> str:
        text = self._maker.text(input_len, self._words)
        return f"{self._lengths.choice(self._prefixes)} {text}" if self._prefixes else text

    def _next_turn(self) -> Turn:
        input_len, output_len = (length(self._lengths) for length in (self._input_len, self._output_len))
        think_s = self._config.think_time_s and self._lengths.expovariate(1 / self._config.think_time_s)
        return Turn(self._asked(self._maker.text(input_len, self._words, own=True)), output_len, think_s)

    def _asked(self, text: str) -> str | Messages:
        return [{"role": "user", "content": text}] if self._chat else text

    def _given(self, prompt: str | Messages) -> str | Messages:
        """A file's prompt, with the salt in front of its first text."""
        if isinstance(prompt, str):
            return self._asked(f"{self._salt} {prompt}" if self._salt else prompt)
        if not self._salt or not isinstance(prompt[0].get("content"), str):
            return prompt
        return [{**prompt[0], "content": f"{self._salt} {prompt[0]['content']}"}, *prompt[1:]]
