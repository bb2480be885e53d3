"""Token ids and labels of a row: what the model reads, and which tokens it learns to write.

Between formats.py (rows) and loader.py (batches). In a conversation the model learns each assistant turn's text
and the token that ends the turn, and nothing else. The mask comes from the chat template itself: the
conversation is rendered up to the turn and through the turn, and what the second has more is the turn. No marker
is searched for, so a one-letter answer, a user who quotes the answer, and a template without generation tags are
all masked right; and a template that renders the past differently from the present is found out.

Labels are `input_ids` or -100, not yet shifted: a loss compares the logits at t with the label at t + 1. The
label at 0 is always -100, for nothing predicts the first token.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from datasets import Dataset, Features, List, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError
from trainer.data.formats import Row
from trainer.data.loader import IGNORED

logger = logging.getLogger(__name__)

_FEATURES = Features({"input_ids": List(Value("int64")), "labels": List(Value("int64")), "origin": Value("string")})


@dataclass(frozen=True)
class TokenizedRow:
    input_ids: list[int]
    """[T], T <= max_seq_len; begins with BOS where the template (chat) or the tokenizer (text) writes one, once."""
    labels: list[int]
    """[T]: the token id where it is a target, else -100; at least one target, never at position 0."""
    origin: str
    truncated: int
    """Tokens cut off at the end."""


def tokenize(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_seq_len: int) -> TokenizedRow:
    """Tokenize one row and mark its targets.

    A conversation follows the chat template to the letter, special tokens included. Plain text gets the
    tokenizer's own special tokens and EOS, each once, and all of it is learned but BOS.

    max_seq_len  tokens; what lies behind is cut
    raises       UserError naming the row: no target is left, no chat template or EOS, or a template whose turns
                 cannot be told apart
    """
    return _Renderer(tokenizer).tokenize(row, max_seq_len=max_seq_len)


def tokenize_rows(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> Dataset:
    """Tokenize rows into a table in memory; nothing is cached on disk, so nothing can be stale.

    returns  Dataset of len(rows), in order: `input_ids` and `labels` lists of int64, `origin` string
    raises   UserError about the first row that `tokenize` refuses, with the number of others
    """
    renderer = _Renderer(tokenizer)
    done: list[TokenizedRow] = []
    faults: list[UserError] = []
    for row in rows:
        try:
            done.append(renderer.tokenize(row, max_seq_len=max_seq_len))
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


class _Renderer:
    """One tokenizer and its chat template; lives as long as one call, so that it cannot outlive a changed template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokenize(self, row: Row, *, max_seq_len: int) -> TokenizedRow:
        ids, labels = self._text(row) if row.messages is None else self._conversation(row)
        labels[0] = IGNORED
        if all(label == IGNORED for label in labels[:max_seq_len]):
            first = next((index for index, label in enumerate(labels) if label != IGNORED), len(labels))
            _fail(
                row,
                f"no target token is left: the row has {len(ids)} tokens, its first target is token {first + 1}, and "
                f"data.max_seq_len={max_seq_len} cuts before it; set data.max_seq_len to at least {first + 1}, or "
                "shorten or remove the row",
            )
        return TokenizedRow(ids[:max_seq_len], labels[:max_seq_len], row.origin, max(0, len(ids) - max_seq_len))

    def _text(self, row: Row) -> tuple[list[int], list[int]]:
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if eos is None:
            _fail(row, "the tokenizer has no eos_token, so a model would never learn to stop; set one")
        ids = self.tokenizer(row.text, verbose=False)["input_ids"]
        # The text may hold what the tokenizer adds, when somebody rendered it with a chat template before.
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        while ids[-1:] == [eos]:
            ids = ids[:-1]
        ids = [*ids, eos]
        start = self._prompt_tokens(row, ids)
        return ids, [IGNORED] * start + ids[start:]

    def _prompt_tokens(self, row: Row, ids: list[int]) -> int:
        """Tokens at the beginning of `ids` that the text's prompt is tokenized to as well; the next is learned."""
        if not row.prompt_len:
            return 0
        return _shared_len(self.tokenizer(row.text[: row.prompt_len], verbose=False)["input_ids"], ids)

    def _conversation(self, row: Row) -> tuple[list[int], list[int]]:
        whole = self._render(row, row.messages)
        labels = [IGNORED] * len(whole)
        for index, message in enumerate(row.messages):
            if message["role"] == "assistant" and index >= row.prompt_len:
                start, end = self._turn(row, index, whole)
                labels[start:end] = whole[start:end]
        return whole, labels

    def _turn(self, row: Row, index: int, whole: list[int]) -> tuple[int, int]:
        """[start, end) of the targets of assistant turn `index` in `whole`, the token that ends the turn included."""
        before, through = row.messages[:index], row.messages[: index + 1]
        prompt = self._render(row, before, add_generation_prompt=True)
        turn = whole if len(through) == len(row.messages) else self._render(row, through)
        end = len(turn) - len(self._ending) + 1
        if turn[end - 1 :] != self._ending:
            _fail(row, f"the chat template ends turn {index} differently from others; correct tokenizer.chat_template")
        if whole[:end] != turn[:end]:
            _fail(
                row,
                f"the chat template rewrites history: turn {index} reads differently once more turns follow (thinking "
                "that is stripped, as a rule), so what is trained would not be what is served; give rows with one "
                "assistant turn, or a tokenizer.chat_template that keeps earlier turns",
            )
        return self._start(row, before, through, prompt, turn), end

    def _start(
        self, row: Row, before: list[dict[str, str]], through: list[dict[str, str]], prompt: list[int], turn: list[int]
    ) -> int:
        if turn[: len(prompt)] == prompt:
            return len(prompt)
        text = self._render_text(row, before, add_generation_prompt=True)
        if not self._render_text(row, through).startswith(text):
            _fail(
                row,
                f"the chat template does not begin turn {len(before)} with its own generation prompt, so what is "
                "trained would not be what is served; correct tokenizer.chat_template",
            )
        # The answer's first characters merge with the template's last ones ("\n" + "\nYes" -> "\n\n", "Yes"). Such a
        # token is half template and is never generated after the prompt, so targets begin behind it.
        start = _shared_len(prompt, turn)
        num_chars = len(self._decode(prompt[start:]))
        behind = (end for end in range(start, len(turn)) if len(self._decode(turn[start:end])) >= num_chars)
        return next(behind, len(turn))

    @cached_property
    def _ending(self) -> list[int]:
        """Tokens from the one that ends an assistant's turn to the end of what the template writes for the turn.

        ChatML: <|im_end|> and a newline; Llama 3: <|eot_id|>. Two turns that differ in the answer share their ending.
        """
        probe = Row([{"role": "user", "content": "x"}], None, "tokenizer.chat_template")
        one, other = (
            self._render(probe, [*probe.messages, {"role": "assistant", "content": answer}]) for answer in ("a", "b")
        )
        if one == other:
            _fail(probe, "the template leaves out what the assistant says; correct it")
        tail = one[len(one) - _shared_len(one[::-1], other[::-1]) :]
        control = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        ends = [index for index, token_id in enumerate(tail) if token_id in control]
        if not ends:
            _fail(
                probe,
                f"the template ends an assistant turn with {self._decode(tail)!r}, which holds no special token, so a "
                "model would never learn to stop; let the template write eos_token there",
            )
        return tail[ends[-1] :]

    def _render(self, row: Row, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> list[int]:
        text = self._render_text(row, messages, add_generation_prompt=add_generation_prompt)
        # The template has written BOS if it wants one; the tokenizer must not add another.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _render_text(self, row: Row, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        if not self.tokenizer.chat_template:
            _fail(row, "the tokenizer has no chat template; use an instruct model, set one, or give rows of text")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            _fail(row, f"the chat template refuses the turns {roles}: {error}; change the row's roles")

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _shared_len(one: list[int], other: list[int]) -> int:
    """How many tokens two lists share from their beginnings on."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _fail(row: Row, what: str) -> NoReturn:
    raise UserError(f"{row.origin}: {what}")
