"""Prompt lookup: propose the tokens that followed the last few tokens the last time they occurred (Saxena, 2023).

Free of a draft model, and exact: a proposal is only kept where the sampler would have chosen the same token.
"""

from array import array

MAX_NGRAM = 4
MIN_NGRAM = 2
"""One token alone recurs too often by chance: its continuation is rarely right."""


def propose(token_ids: list[int], num_tokens: int) -> list[int]:
    """Up to `num_tokens` tokens that may come next; empty where the last tokens have not occurred before."""
    if num_tokens <= 0:
        return []
    history = array("i", token_ids)
    data, size = history.tobytes(), history.itemsize
    for length in range(min(MAX_NGRAM, len(token_ids) - 1), MIN_NGRAM - 1, -1):
        pattern = data[-length * size :]
        end = len(data) - size
        while (at := data.rfind(pattern, 0, end)) >= 0:
            if at % size == 0:
                return _copied(token_ids, at // size + length, num_tokens)
            end = at + len(pattern) - 1
    return []


def _copied(token_ids: list[int], begin: int, num_tokens: int) -> list[int]:
    """Tokens from `begin` on; where they end the copy runs on into itself, as a repetition does."""
    drafts: list[int] = []
    for at in range(begin, begin + num_tokens):
        drafts.append(token_ids[at] if at < len(token_ids) else drafts[at - len(token_ids)])
    return drafts
