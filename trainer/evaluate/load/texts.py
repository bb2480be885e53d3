"""Texts of a wanted number of tokens, for servers whose tokenizer may be unknown.

Texts are common English words, since nearly every vocabulary has each of them as one token. How many tokens a word
takes, and how many a template adds, comes from a tokenizer (`tokenizer=`; words are then added and dropped until the
count is exact) or from the server itself: the usage counts of two short requests give the line through them. Reports
hold the tokens that the server counted, not the ones that were wanted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from trainer.config.errors import UserError

WORDS = (
    "the of and to in is was for that on with as his they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made "
    "over did down only way find use may water long little very after words called just where most know get through "
    "back much before go good new write our used me man too any day same right look think also around another came "
    "come work three word must because does part even place well such here take why things help put years different "
    "away again off went old number"
).split()


@dataclass(frozen=True)
class TextMaker:
    """Makes texts of about `num_tokens` tokens.

    tokens_per_word, overhead  the line: tokens = overhead + tokens_per_word * words
    count                      counts a text's tokens, template included; None where only the line is known
    """

    tokens_per_word: float = 1.0
    overhead: float = 0.0
    count: Callable[[str], int] | None = None

    def text(self, num_tokens: int, draw: Random, *, own: bool = False) -> str:
        """Random words of `num_tokens` tokens, at least one word.

        own  count the text alone, without what the template adds: for a prefix or a later turn
        """
        overhead = 0.0 if own else self.overhead
        words = draw.choices(WORDS, k=max(1, round((num_tokens - overhead) / self.tokens_per_word)))
        if self.count is not None:
            self._fit(words, num_tokens + round(self.overhead - overhead), draw)
        return " ".join(words)

    def _fit(self, words: list[str], num_tokens: int, draw: Random) -> None:
        while self.count(" ".join(words)) < num_tokens:
            words.append(draw.choice(WORDS))
        while len(words) > 1 and self.count(" ".join(words)) > num_tokens:
            words.pop()


def from_counts(few: tuple[int, int], many: tuple[int, int]) -> TextMaker:
    """The line through two (words, tokens) that a server counted."""
    tokens_per_word = (many[1] - few[1]) / (many[0] - few[0])
    if tokens_per_word <= 0:  # counts that do not grow are no counts
        return TextMaker()
    return TextMaker(tokens_per_word, few[1] - tokens_per_word * few[0])


def from_tokenizer(name: str, *, chat: bool) -> tuple[TextMaker, Callable[[str], int]]:
    """Counting by a tokenizer: a maker whose counts have the chat template in, and a counter of plain text.

    raises  UserError if there is no tokenizer of that name
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer={name} cannot be opened: {str(error).splitlines()[0]}") from None

    def plain(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def with_template(text: str) -> int:
        if not chat or not tokenizer.chat_template:
            return len(tokenizer(text)["input_ids"])
        messages = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return TextMaker(overhead=with_template("the") - plain("the"), count=with_template), plain
