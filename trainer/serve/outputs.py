"""What the engine tells about a request: a `Delta` each time a choice grows, a `RequestOutput` when all is done."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a choice ended. The first two are OpenAI's; `abort` and `error` come with `stop_reason` as text."""

    stop = "stop"
    length = "length"
    abort = "abort"
    error = "error"


@dataclass(slots=True)
class TokenLogprob:
    """One token with its log-probability under the model's raw logits (before temperature, penalties and masks).

    top  the likeliest tokens as (id, log-probability), best first, as many as asked; where the token itself is not
         among them it is appended, with the very same float
    rank  1 for the likeliest token
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Delta:
    """What is new in one choice. Joined texts and token ids of all deltas are the whole choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; the reason's text for `abort` and `error`."""


@dataclass(slots=True)
class Choice:
    """One finished answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities, where they were asked for (by logprobs or best_of)."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request.

    prompt_logprobs    an entry a prompt token from `prompt_logprobs_start` on (None for position 0); None if not asked
    num_cached_tokens  prompt tokens that came from the prefix cache
    """

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
