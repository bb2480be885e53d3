"""Raw rows of one source to rows of tokens: parse, shape, render. What a worker process runs.

Between readers.py and tokenizer_pool.py. A row of tokens is a dict of `input_ids`, `labels` (lists of int, and int32
arrays behind the pool), `origin` (str), `content` (63 bits, equal where two source rows say the same), `truncated`
(tokens cut off), `special_word` (a special token that somebody says, or empty), for pairs also `rejected_input_ids` and
`rejected_labels`, for labelled answers `desirable`. A source row may become several of them: a conversation whose
template rewrites history, a long text.
"""

from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig
from trainer.data.reading.readers import RawRow, Reader
from trainer.data.rendering.chat import Renderer, TokenizedRow
from trainer.data.rendering.special_words import SpecialWords
from trainer.data.rows import BadRow, Example, Labelled, Pair, Row, Tokenized, TokenRow, content_hash, fail
from trainer.data.shaping.shapes import Shaper


class ExampleTokenizer:
    """Rows, pairs and labelled answers to rows of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._renderer, self._max_seq_len = Renderer(tokenizer, config), config.max_seq_len
        self._special_words = SpecialWords(tokenizer)

    def __call__(self, example: Example) -> list[TokenRow]:
        """One row of tokens at least.

        raises  BadRow where a target, an answer or a template is missing
        """
        shared = {"content": content_hash(example), "special_word": self._special_words.first_in(example)}
        match example:
            case Pair():
                row = self._pair(example)
            case Labelled():
                row = {**_columns(self._only(example.row, "the answer")), "desirable": example.desirable}
            case _:
                parts = self._renderer.tokenize(example)
                return [{**_columns(part), "origin": part.origin, **shared} for part in parts]
        return [{**row, "origin": example.origin, **shared}]

    def _pair(self, pair: Pair) -> TokenRow:
        chosen, rejected = self._only(pair.chosen, "chosen"), self._only(pair.rejected, "rejected")
        if chosen.input_ids == rejected.input_ids:
            fail(
                pair.origin,
                f"the two answers are equal in the first {len(chosen.input_ids)} tokens, to which data.max_seq_len="
                f"{self._max_seq_len} cuts them; raise it, or remove the row",
                kind="equal answers",
            )
        columns = {**_columns(rejected, "rejected_"), **_columns(chosen)}
        columns["truncated"] += columns.pop("rejected_truncated")
        return columns

    def _only(self, row: Row, what: str) -> TokenizedRow:
        """The one row of tokens that an answer is compared by."""
        parts = self._renderer.tokenize(row)
        if len(parts) > 1:
            fail(
                row.origin,
                f"{what} becomes {len(parts)} rows of tokens (the template rewrites earlier turns, or it is too long), "
                "and an answer is compared as a whole; give one assistant turn that fits data.max_seq_len",
                kind="split answer",
            )
        return parts[0]


class RowTokenizer:
    """Raw rows of one source to rows of tokens; pickled into worker processes."""

    def __init__(self, reader: Reader, shaper: Shaper, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._reader, self._shaper, self._tokenize = reader, shaper, ExampleTokenizer(tokenizer, config)

    def __call__(self, raw: RawRow) -> Tokenized:
        """The rows of tokens that a raw row gives, one at least, or what is wrong with it."""
        try:
            return self._tokenize(self._shaper.row(self._reader.parse(raw), raw.where))
        except BadRow as fault:
            return fault


def _columns(row: TokenizedRow, prefix: str = "") -> TokenRow:
    return {f"{prefix}{name}": getattr(row, name) for name in ("input_ids", "labels", "truncated")}
