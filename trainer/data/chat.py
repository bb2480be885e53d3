"""Token ids and labels of a row: what the model reads, and which tokens it learns to write.

Between shapes.py (rows) and table.py (all of them). In a conversation the model learns each assistant turn's text and
the token that ends the turn, and nothing else. The mask comes from the chat template itself (turns.py): no marker is
searched for, so a one-letter answer, a user who quotes the answer, and a template without generation tags are all
masked right; and a template that renders the past differently from the present is found out, and its conversation is
cut into one row for each turn, as the server will see it.

Labels are `input_ids` or -100, not yet shifted: a loss compares the logits at t with the label at t + 1. The
label at 0 is always -100, for nothing predicts the first token.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig, RewrittenHistory, TrainOn
from trainer.config.errors import UserError
from trainer.data.encoding import Encoded, Encoder, shared_len, shared_tail
from trainer.data.generation_tags import check_tags
from trainer.data.left_out import check_shown
from trainer.data.loader import IGNORED
from trainer.data.long_rows import TokenizedRow, fit
from trainer.data.rows import BadRow, Row, fail
from trainer.data.template import Template
from trainer.data.turns import Conversation, Endings, Turn

logger = logging.getLogger(__name__)

_FEATURES = Features({"input_ids": List(Value("int64")), "labels": List(Value("int64")), "origin": Value("string")})
_DECIDING = ("max_seq_len", "on_long_row", "train_on", "train_thinking", "rewritten_history")


def tokenize(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_seq_len: int, **settings: Any) -> TokenizedRow:
    """Tokenize one row that stays one; see `Renderer.tokenize`.

    max_seq_len  tokens
    settings     other keys of `data.*`
    raises       UserError: as there, or where the row becomes several
    """
    rows = Renderer(tokenizer, DataConfig(max_seq_len=max_seq_len, **settings)).tokenize(row)
    if len(rows) > 1:
        fail(row.origin, f"the row becomes {len(rows)} rows; call Renderer.tokenize", kind="several rows")
    return rows[0]


def tokenize_rows(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_seq_len: int, **settings: Any
) -> Dataset:
    """Tokenize rows into a table in memory; nothing is cached on disk, so nothing can be stale.

    settings  other keys of `data.*`
    returns   Dataset in the order of the rows: `input_ids` and `labels` lists of int64, `origin` string
    raises    UserError about the first row that `Renderer.tokenize` refuses, with the number of others
    """
    renderer = Renderer(tokenizer, DataConfig(max_seq_len=max_seq_len, **settings))
    done: list[TokenizedRow] = []
    faults: list[UserError] = []
    for row in rows:
        try:
            done += renderer.tokenize(row)
        except UserError as error:
            faults.append(error)
    if faults:
        others = f" ({len(faults) - 1} more of {len(rows)} rows are refused too)" if len(faults) > 1 else ""
        raise UserError(f"{faults[0]}{others}")
    columns = {name: [getattr(row, name) for row in done] for name in ("input_ids", "labels", "origin")}
    num_targets = sum(label != IGNORED for labels in columns["labels"] for label in labels)
    logger.info(
        "%d rows: %d tokens, %d of them targets; %d rows cut to data.max_seq_len=%d",
        len(done),
        sum(map(len, columns["input_ids"])),
        num_targets,
        sum(row.truncated > 0 for row in done),
        max_seq_len,
    )
    return Dataset.from_dict(columns, features=_FEATURES)


@dataclass(frozen=True)
class _Rendered:
    """One row to come: its text, and the turns that are learned in it."""

    text: str
    turns: list[Turn]
    origin: str


class Renderer:
    """One tokenizer and its chat template, under one set of `data.*`. It may be pickled.

    A template that is changed later is not seen; make another Renderer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        self._template, self._encoder, self._endings = Template(tokenizer), Encoder(tokenizer), Endings(tokenizer)
        self._seen: set[tuple[Any, ...]] = set()

    def fingerprint(self) -> str:
        """64 hex digits, equal where equal rows become equal ids and labels.

        They stand for the tokenizer, its template, the deciding keys of `data.*`, the libraries' versions, and today's
        date where the template writes it.
        """
        decides = {name: str(getattr(self.config, name)) for name in _DECIDING} | self._template.identity()
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def tokenize(self, row: Row) -> list[TokenizedRow]:
        """Tokenize one row and mark its targets.

        A conversation follows the chat template to the letter, special tokens included. Plain text gets the
        tokenizer's own special tokens and EOS, each once, and all of it is learned but BOS. Token ids stay as they are.

        returns  at least one row: one for each learned turn where the template rewrites history, one for each piece of
                 a long text under `data.on_long_row=split`
        raises   BadRow: no target is left, the row is too long, there is no chat template or EOS, or the template
                 refuses, leaves out or rewrites what the row says
        """
        if row.messages is not None:
            rows = [self._labelled(row, rendered) for rendered in self._rendered(row)]
        else:
            rows = [(*(self._text(row) if row.tokens is None else self._tokens(row)), row.origin)]
        return fit(row, rows, self.config)

    # ---- conversations

    def _rendered(self, row: Row) -> list[_Rendered]:
        """The texts that a conversation becomes."""
        conversation, indices = self._conversation(row), self._learned(row)
        whole = conversation.whole
        turns = [conversation.turn(index) for index in indices]
        rewritten = next((turn for turn in turns if not whole.startswith(turn.served)), None)
        if rewritten is None:
            check_shown(conversation, row, len(row.messages))
            return [_Rendered(whole, turns, row.origin)]
        if self.config.rewritten_history is RewrittenHistory.error:
            fail(
                row.origin,
                f"the chat template rewrites history: turn {rewritten.index} reads differently once more turns follow "
                "(thinking that is stripped, as a rule), so what is trained would not be what is served; set "
                "data.rewritten_history=split, give rows with one assistant turn, or a tokenizer.chat_template that "
                "keeps earlier turns",
                kind="rewritten history",
            )
        check_shown(conversation, row, turns[-1].index + 1)
        return [_Rendered(turn.text, [turn], f"{row.origin} turn {turn.index}") for turn in turns]

    def _conversation(self, row: Row) -> Conversation:
        return Conversation(self._template, self._endings, row)

    def _learned(self, row: Row) -> list[int]:
        """The assistant turns that are learned."""
        assistant = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
        if self.config.train_on is TrainOn.last:
            assistant = assistant[-1:]
        learned = [index for index in assistant if index >= row.prompt_len and self._trains(row, index)]
        if not learned and self.config.train_on is not TrainOn.all:
            fail(
                row.origin,
                f"no target token is left: data.train_on={self.config.train_on.value} and the turns' own "
                '"train": false leave no assistant turn to learn; remove the row',
                kind="no target",
            )
        return learned

    @staticmethod
    def _trains(row: Row, index: int) -> bool:
        return row.messages[index].get("train") is not False

    def _labelled(self, row: Row, rendered: _Rendered) -> tuple[list[int], list[int], str]:
        conversation = self._conversation(row)
        encoded = self._encoder.encode(row.origin, rendered.text)
        self._check_first(row, conversation, encoded, rendered)
        spans = [(encoded.first_behind(turn.prompt), encoded.end_of(len(turn.served))) for turn in rendered.turns]
        labels = [IGNORED] * len(encoded.ids)
        if self.config.train_on is TrainOn.all:
            self._learn_all(row, conversation, encoded, rendered, labels)
        for start, end in spans:
            labels[start:end] = encoded.ids[start:end]
        for index in self._thought(conversation, encoded, rendered):
            labels[index] = IGNORED
        return encoded.ids, labels, rendered.origin

    def _thought(self, conversation: Conversation, encoded: Encoded, rendered: _Rendered) -> set[int]:
        """Tokens of thinking that is not learned."""
        if self.config.train_thinking:
            return set()
        return {
            index
            for turn in rendered.turns
            for start, end in conversation.thinking(turn)
            for index in encoded.touching(start, end)
        }

    def _check_first(self, row: Row, conversation: Conversation, encoded: Encoded, rendered: _Rendered) -> None:
        """What is checked once for each kind of conversation, for it is slow."""
        kind = tuple(
            (message["role"], *(name for name in ("content", "reasoning_content", "tool_calls") if message.get(name)))
            for message in row.messages
        )
        kind = (kind, bool(row.tools), tuple(turn.index for turn in rendered.turns))
        if kind in self._seen or not rendered.turns:
            return
        self._seen.add(kind)
        for turn in rendered.turns:
            ids, known = self._encoder.ids(turn.prompt), encoded.len_of(turn.prompt)
            if known is not None and encoded.ids[:known] != ids:
                logger.warning(
                    "%s: the tokenizer does not cut at its added tokens; prompts are tokenized whole", row.origin
                )
                self._encoder.cuts.clear()
                self._encoder.short_ids.cache_clear()
        ignored = self._thought(conversation, encoded, rendered)
        check_tags(self.tokenizer, self._template, row, conversation, encoded, rendered.turns, ignored=ignored)

    def _learn_all(
        self, row: Row, conversation: Conversation, encoded: Encoded, rendered: _Rendered, labels: list[int]
    ) -> None:
        """All that is said, but turns that are given or not to be learned; of a rewritten conversation what the turn
        before has not learned."""
        begin = self._begin_of_new(row, conversation, encoded, rendered)
        labels[begin:] = encoded.ids[begin:]
        for index in range(len(row.messages)):
            if index < row.prompt_len or not self._trains(row, index):
                before = conversation.upto(index) if index else ""
                start = shared_len(before, encoded.text)
                end = shared_len(conversation.upto(index + 1), encoded.text)
                for token in encoded.touching(start, max(start, end)):
                    labels[token] = IGNORED

    def _begin_of_new(self, row: Row, conversation: Conversation, encoded: Encoded, rendered: _Rendered) -> int:
        if rendered.text == conversation.whole and len(rendered.turns) != 1:
            return 0
        turn = rendered.turns[0]
        before = [index for index in self._learned(row) if index < turn.index]
        if not before:
            return 0
        content = str(row.messages[before[-1]].get("content", ""))
        texts = [
            conversation.changed(before[-1], turn.index, {"content": content + letter}, generation_prompt=True)
            for letter in "ab"
        ]
        tail = shared_tail(*texts) if texts[0] != texts[1] else ""
        return encoded.end_of(len(turn.prompt) - len(tail))

    # ---- text and token ids

    def _text(self, row: Row) -> tuple[list[int], list[int]]:
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if eos is None:
            fail(
                row.origin,
                "the tokenizer has no eos_token, so a model would never learn to stop; set one",
                kind="no end",
            )
        ids = self._with_special(row, row.text)
        # The text may hold what the tokenizer adds, when somebody rendered it with a chat template before.
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        while ids[-1:] == [eos]:
            ids = ids[:-1]
        ids = [*ids, eos]
        start = shared_len(self._with_special(row, row.text[: row.prompt_len]), ids) if row.prompt_len else 0
        return ids, [IGNORED] * start + ids[start:]

    def _with_special(self, row: Row, text: str) -> list[int]:
        try:
            return self.tokenizer(text, verbose=False)["input_ids"]
        except (TypeError, ValueError) as error:
            fail(row.origin, f"the tokenizer refuses the text ({error}); write valid Unicode", kind="no valid text")

    def _tokens(self, row: Row) -> tuple[list[int], list[int]]:
        ids, labels = row.tokens
        vocabulary = len(self.tokenizer)
        if outside := [token for token in (*ids, *labels) if not (0 <= token < vocabulary or token == IGNORED)]:
            fail(
                row.origin,
                f"token {outside[0]} is outside the vocabulary of {vocabulary}; tokenize with this model's tokenizer",
                kind="token outside the vocabulary",
            )
        if len(ids) != len(labels) or IGNORED in ids:
            fail(
                row.origin,
                f"{len(ids)} input_ids and {len(labels)} labels; give a label for each token, its id or -100",
                kind="labels do not fit",
            )
        return list(ids), list(labels)


__all__ = ["BadRow", "Renderer", "TokenizedRow", "tokenize", "tokenize_rows"]
