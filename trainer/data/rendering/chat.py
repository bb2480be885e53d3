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
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import REASONING
from trainer.config.data import DataConfig, RewrittenHistory, TrainOn
from trainer.data.rendering.conversation import Conversation
from trainer.data.rendering.encoding import Encoded, Encoder
from trainer.data.rendering.generation_tags import check_tags
from trainer.data.rendering.left_out import check_shown
from trainer.data.rendering.long_rows import TokenizedRow, fit
from trainer.data.rendering.plain_rows import text_row, token_row
from trainer.data.rendering.targets import Labelled, LearnedText, is_trained, learn_all, learn_turns, parted
from trainer.data.rendering.template import Template
from trainer.data.rendering.turns import Endings, Turns
from trainer.data.rows import Row, fail

logger = logging.getLogger(__name__)

_DECIDING = ("max_seq_len", "long_rows", "train_on", "train_thinking", "rewritten_history")


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


class Renderer:
    """One tokenizer and its chat template, under one set of `data.*`. It may be pickled.

    A template that is changed later is not seen; make another Renderer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        self._template, self._encoder, self._endings = (
            Template(tokenizer, config.date),
            Encoder(tokenizer),
            Endings(tokenizer),
        )
        self._seen: set[tuple[Any, ...]] = set()

    def fingerprint(self) -> str:
        """64 hex digits, equal where equal rows become equal ids and labels.

        They stand for the tokenizer, its template, the deciding keys of `data.*`, the libraries' versions, and the date
        where the template writes it.
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
            rows = [labelled for text in self._texts(row) for labelled in self._labelled(row, text)]
        else:
            rows = [text_row(row, self.tokenizer) if row.tokens is None else token_row(row, self.tokenizer)]
        return fit(row, rows, self.config)

    # ---- conversations

    def _texts(self, row: Row) -> list[LearnedText]:
        """What the template writes for a conversation, once or for each learned turn."""
        conversation, indices = Conversation(self._template, row), self._learned(row)
        whole, found = conversation.whole, Turns(conversation, self._endings)
        turns = [found.turn(index) for index in indices]
        rewritten = next((turn for turn in turns if not whole.startswith(turn.served)), None)
        if rewritten is None:
            check_shown(conversation, row, turns, len(row.messages))
            return [LearnedText(conversation, found, whole, turns, row.origin)]
        if self.config.rewritten_history is RewrittenHistory.error:
            fail(
                row.origin,
                f"the chat template rewrites history: turn {rewritten.index} reads differently once more turns follow "
                "(thinking that is stripped, as a rule), so what is trained would not be what is served; set "
                "data.rewritten_history=split, give rows with one assistant turn, or a tokenizer.chat_template that "
                "keeps earlier turns",
                kind="rewritten history",
            )
        check_shown(conversation, row, turns, turns[-1].index + 1)
        origins = [row.origin] if len(turns) == 1 else [f"{row.origin} turn {turn.index}" for turn in turns]
        return [
            LearnedText(conversation, found, turn.text, [turn], origin)
            for turn, origin in zip(turns, origins, strict=True)
        ]

    def _learned(self, row: Row) -> list[int]:
        """The assistant turns that are learned."""
        assistant = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
        if self.config.train_on is TrainOn.last:
            assistant = assistant[-1:]
        learned = [index for index in assistant if index >= row.prompt_len and is_trained(row.messages[index])]
        if not learned and self.config.train_on is not TrainOn.all:
            fail(
                row.origin,
                f"no target token is left: data.train_on={self.config.train_on.value} and the turns' own "
                '"train": false leave no assistant turn to learn; remove the row',
                kind="no target",
            )
        return learned

    def _labelled(self, row: Row, text: LearnedText) -> list[Labelled]:
        encoded = self._encoder.encode(row.origin, text.text)
        kind = _kind(row, text)
        if text.turns and kind not in self._seen:
            self._seen.add(kind)
            self._check_cuts(row, text, encoded)
            check_tags(self.tokenizer, self._template, row, text, encoded, thinking=self.config.train_thinking)
        if self.config.train_on is TrainOn.all:
            return [learn_all(row, text, encoded, thinking=self.config.train_thinking)]
        apart = self.config.rewritten_history is RewrittenHistory.split
        parts = parted(self._encoder, text, encoded) if apart else [(text, encoded)]
        return [learn_turns(part, tokens, thinking=self.config.train_thinking) for part, tokens in parts]

    def _check_cuts(self, row: Row, text: LearnedText, encoded: Encoded) -> None:
        """Whether prompts have the ids that encoding.py says, for that they are cut out of the whole is a shortcut."""
        for turn in text.turns:
            known = encoded.len_of(turn.prompt)
            if known is not None and encoded.ids[:known] != self._encoder.ids(turn.prompt):
                logger.warning(
                    "%s: the tokenizer joins text over its added tokens; it is read anew for each turn", row.origin
                )
                self._encoder.distrust_cuts()


def _kind(row: Row, text: LearnedText) -> tuple[Any, ...]:
    """What is checked once for all rows that are alike."""
    fields = ("content", *REASONING, "tool_calls")
    turns = tuple((message["role"], *(name for name in fields if message.get(name))) for message in row.messages)
    return turns, bool(row.tools), tuple(turn.index for turn in text.turns)
