"""SamplingParams: how a request wants its tokens chosen and where it ends; every value is checked here, once."""

import math
from dataclasses import dataclass, field

from trainer.config.errors import UserError, require

MAX_LOGPROBS = 20
"""OpenAI's chat limit on `top_logprobs`; a larger top list costs a partial sort of the vocabulary for each token."""
MAX_STOPS = 16


@dataclass(slots=True)
class SamplingParams:
    """What one request asks for. Field names are vLLM's, and so OpenAI's where both have one.

    raises  UserError naming the field, the value and what is accepted
    """

    temperature: float = 1.0
    """0 takes the likeliest token (greedy); at most 2."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches p; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or answer (arXiv:1909.05858); above 0."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the answer; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token stands in the answer; in [-2, 2]."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to logits, by token id; values in [-100, 100]."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch; None draws one for the request."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer; they are not part of its text."""
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """Tokens before which nothing but `max_tokens` ends the answer."""
    max_tokens: int | None = None
    """Longest answer; None for what the model's length leaves."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of each token of the answer and of this many likeliest ones; 0 for the token's own only."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    prompt_logprobs_start: int = 0
    """First prompt position whose log-probability is wanted; what lies before it may come from the prefix cache."""
    n: int = 1
    """Answers to return."""
    best_of: int | None = None
    """Answers to generate, of which the n with the highest mean log-probability are returned; None for n."""
    skip_special_tokens: bool = True
    json_schema: str | None = None
    """A JSON schema, as text, that the answer must follow (needs xgrammar); "{}" for any JSON value."""

    def __post_init__(self) -> None:
        self.stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self.stop_token_ids = tuple(self.stop_token_ids or ())
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            setattr(self, name, _number(name, getattr(self, name)))
        for name in ("top_k", "min_tokens", "n", "prompt_logprobs_start"):
            _integer(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "best_of"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name))
        self._check_ranges()
        self._check_lists()
        if self.best_of is None:
            self.best_of = self.n

    def _check_ranges(self) -> None:
        _between("temperature", self.temperature, 0, 2)
        require(0 < self.top_p <= 1, f"top_p={self.top_p}; give a number in (0, 1]")
        require(self.top_k >= -1, f"top_k={self.top_k}; give at least 1, or 0 or -1 for all tokens")
        _between("min_p", self.min_p, 0, 1)
        require(self.repetition_penalty > 0, f"repetition_penalty={self.repetition_penalty}; give a number above 0")
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        require(self.seed is None or -(2**63) <= self.seed < 2**63, f"seed={self.seed}; give a 64-bit whole number")
        require(self.max_tokens is None or self.max_tokens >= 0, f"max_tokens={self.max_tokens}; give 0 or more")
        require(self.min_tokens >= 0, f"min_tokens={self.min_tokens}; give 0 or more")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_LOGPROBS, f"{name}={value}; give a number in 0..{MAX_LOGPROBS}")
        require(self.prompt_logprobs_start >= 0, f"prompt_logprobs_start={self.prompt_logprobs_start}; give 0 or more")
        require(1 <= self.n <= 128, f"n={self.n}; give a number in 1..128")
        require(
            self.best_of is None or self.n <= self.best_of <= 128,
            f"best_of={self.best_of}; give a number from n={self.n} to 128",
        )

    def _check_lists(self) -> None:
        require(len(self.stop) <= MAX_STOPS, f"stop has {len(self.stop)} strings; give at most {MAX_STOPS}")
        for stop in self.stop:
            require(isinstance(stop, str) and bool(stop), f"stop has {stop!r}; give strings of at least one character")
        require(len(self.stop_token_ids) <= 128, f"stop_token_ids has {len(self.stop_token_ids)} ids; give at most 128")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id)
        require(isinstance(self.logit_bias, dict), f"logit_bias={self.logit_bias!r}; give {{token id: bias}}")
        require(len(self.logit_bias) <= 1024, f"logit_bias has {len(self.logit_bias)} entries; give at most 1024")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id)
            _between(f"logit_bias[{token_id}]", _number(f"logit_bias[{token_id}]", bias), -100, 100)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: temperatures below 1e-5 would only overflow."""
        return self.temperature < 1e-5

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        raises  UserError naming the field and the id
        """
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(self, name):
                require(
                    0 <= token_id < vocab_size,
                    f"{name} has token id {token_id}; this model's ids are 0..{vocab_size - 1}",
                )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name}={value!r}; give a finite number")
    return float(value)


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name}={value!r}; give a whole number")


def _between(name: str, value: float, low: float, high: float) -> None:
    require(low <= value <= high, f"{name}={value}; give a number in [{low}, {high}]")
