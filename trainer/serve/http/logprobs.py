"""Log-probabilities as OpenAI writes them: parallel lists for completions, a list of objects for chat.

`top_logprobs` of completions is a dict keyed by strings, and evaluation harnesses take the maximum of its values to see
whether a token was the greedy one. So no two ids may share a key, and the actual token must be there with the very same
float as in `token_logprobs`; `Vocabulary.distinct` and `TokenLogprob` see to it.
"""

import codecs
from typing import Any

from trainer.serve.http.vocabulary import Vocabulary
from trainer.serve.outputs import TokenLogprob

LOWEST = -9999.0
"""JSON has no -inf; vLLM's stand-in."""


def json_logprob(value: float) -> float:
    """A finite float for JSON; a NaN stays one and fails loudly when it is written."""
    return LOWEST if value == float("-inf") else value


class CompletionLogprobs:
    """Writes one choice's `logprobs` object, piece by piece as a stream needs it.

    num_top  likeliest tokens wanted at each position
    offset   where in the choice's text the next token begins, in characters
    """

    def __init__(self, vocabulary: Vocabulary, *, num_top: int, skip_special_tokens: bool) -> None:
        self._vocabulary, self._num_top = vocabulary, num_top
        self._skip_special = skip_special_tokens
        self.offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def write(
        self, token_ids: list[int], entries: list[TokenLogprob | None], offsets: list[int] | None = None
    ) -> dict[str, list[Any]]:
        """The next tokens; an entry is None where nothing predicts the token (the prompt's first).

        offsets  where each token begins in the text, if known; else counted from the tokens' bytes
        """
        tops = [None if entry is None else self._top(entry) for entry in entries]
        return {
            "tokens": [self._vocabulary.text_of(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else json_logprob(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": self._count(token_ids) if offsets is None else offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        best = entry.top[: self._num_top]
        if all(token_id != entry.token_id for token_id, _ in best):
            best = [*best, (entry.token_id, entry.logprob)]
        others = [token_id for token_id, _ in best if token_id != entry.token_id]
        ids = [entry.token_id, *others]  # the actual token has the first claim to its string
        names = dict(zip(ids, self._vocabulary.distinct(ids), strict=True))
        return {names[token_id]: json_logprob(logprob) for token_id, logprob in best}

    def _count(self, token_ids: list[int]) -> list[int]:
        """A token that begins inside a character has that character's offset."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.offset)
            if not (self._skip_special and self._vocabulary.is_special(token_id)):
                self.offset += len(self._characters.decode(self._vocabulary.bytes_of(token_id) or b""))
        return offsets


def chat_logprobs(vocabulary: Vocabulary, entries: list[TokenLogprob], num_top: int) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        raw = vocabulary.bytes_of(token_id)
        return {
            "token": vocabulary.text_of(token_id),
            "logprob": json_logprob(logprob),
            "bytes": None if raw is None else list(raw),
        }

    content = [
        describe(entry.token_id, entry.logprob) | {"top_logprobs": [describe(*pair) for pair in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(vocabulary: Vocabulary, entries: list[TokenLogprob | None], num_top: int) -> list[Any]:
    """vLLM's `prompt_logprobs`: None, then for each token {token id: {logprob, rank, decoded_token}}."""
    return [None if entry is None else _by_id(vocabulary, entry, num_top) for entry in entries]


def _by_id(vocabulary: Vocabulary, entry: TokenLogprob, num_top: int) -> dict[str, Any]:
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], start=1)}
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token_id): {"logprob": json_logprob(logprob), "rank": rank, "decoded_token": vocabulary.text_of(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }
