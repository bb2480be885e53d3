"""Where an assistant's turn stands in what the template writes: found by comparing texts, never by searching one.

    before:   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n                       messages[:k], what is served
    through:  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n      messages[:k + 1]
                                                                     [-answer-)              learned

What `through` has more is what the model must write. Where the template shows the past in another way once the turn is
there (gpt-oss drops earlier thinking), the two are compared from their ends: what follows the last message in both.
Where the template writes no thinking into any turn but opens one in the prompt (DeepSeek-R1), the turn is laid behind
the prompt as the model wrote it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import REASONING
from trainer.data.rendering.conversation import PROBES, Conversation
from trainer.data.rendering.encoding import shared_len, shared_tail
from trainer.data.rows import BadRow, Message, fail

_OPENED = re.compile(r"<think>\s*\Z")
_CLOSE = "</think>"
_CLOSED = re.compile(r"\s*</think>")
_BLOCK = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    index: int
    prompt: str
    """What the server gives to the model."""
    answer: str
    """What the template writes behind it: the turn, its end, and perhaps a newline."""
    end: int
    """Characters of `answer` that the model writes, the token that ends the turn included."""
    is_written: bool = True
    """Whether the template writes it so; false where it was laid behind the prompt, for the template drops thoughts."""

    @property
    def text(self) -> str:
        return self.prompt + self.answer

    @property
    def served(self) -> str:
        """Prompt and answer as the model reads and writes them."""
        return self.prompt + self.answer[: self.end]


class Endings:
    """The tokens that can end a turn, and what was found out about the kinds of turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.special = set(tokenizer.all_special_tokens) | {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self.added = self.special | set(tokenizer.get_added_vocab())
        self.known: dict[tuple[Any, ...], tuple[str, str]] = {}
        """Kind of turn -> the token that ends it, and what the template writes behind."""

    def split(self, tail: str, *, calls: bool) -> tuple[str, str] | None:
        """The last such token of a text, and what stands behind it. An added token that is not special (`</tool_call>`)
        may end a plain turn only."""
        for tokens in (self.special, *(() if calls else (self.added,))):
            found = [(place + len(token), token) for token in tokens if (place := tail.rfind(token)) >= 0]
            if found:
                end, token = max(found, key=lambda place: (place[0], len(place[1])))
                return token, tail[end:]
        return None


class Turns:
    """The assistant's turns of one conversation."""

    def __init__(self, conversation: Conversation, endings: Endings) -> None:
        self._conversation, self._endings = conversation, endings

    def turn(self, index: int) -> Turn:
        """raises  BadRow: the template does not begin the turn as it is served, or gives it no end"""
        if index == 0:
            self._fail(
                "the row begins with an assistant turn, before which a server has no prompt; begin with a user's or a "
                'system turn, or write "train": false into the turn',
                kind="no prompt",
            )
        prompt, through = self._conversation.upto(index, generation_prompt=True), self._conversation.upto(index + 1)
        is_written = True
        if through.startswith(prompt):
            answer = through[len(prompt) :]
        elif (answer := self._answer_behind_last_message(index)) is None:
            is_written = False
            if (answer := self._answer_in_opened_thought(index, prompt)) is None:
                self._fail_to_begin(index, prompt, through)
        _, behind = self._ending(index, through)
        return Turn(index, prompt, answer, len(answer) - len(behind), is_written)

    def _fail_to_begin(self, index: int, prompt: str, through: str) -> NoReturn:
        start = shared_len(prompt, through)
        thought = "<think>" in prompt[start - 8 :]
        self._fail(
            f"the chat template does not begin turn {index} with its own generation prompt, so what is trained would "
            f"not be what is served: a server's prompt goes on with {prompt[start : start + 80]!r} where the row has "
            f"{through[start : start + 80]!r}; "
            + ("give the turn reasoning_content as the prompt expects it, or " if thought else "")
            + "correct tokenizer.chat_template",
            kind="other prompt than served",
        )

    def _answer_behind_last_message(self, index: int) -> str | None:
        """What follows the message before the turn, less what the generation prompt has of it."""
        try:
            prompts = self._conversation.probed(index - 1, index, generation_prompt=True)
            throughs = self._conversation.probed(index - 1, index + 1)
        except BadRow:
            return None
        if prompts[0] == prompts[1] or throughs[0] == throughs[1]:
            return None
        prompt, through = shared_tail(*prompts), shared_tail(*throughs)
        return through[len(prompt) :] if through.startswith(prompt) else None

    def _answer_in_opened_thought(self, index: int, prompt: str) -> str | None:
        """The turn as the model wrote it, where the prompt opens a thought and the template would leave it out."""
        message = self._conversation.messages[index]
        thinking = next((message[name] for name in REASONING if message.get(name)), None)
        content = message.get("content") or ""
        content = content if thinking is None else f"<think>\n{thinking}\n</think>\n\n{content}"
        opened = _OPENED.search(prompt)
        if (
            opened is None
            or not content.startswith(opened[0])
            or "</think>" not in content
            or message.get("tool_calls")
        ):
            return None
        plain = {**dict.fromkeys(REASONING), "content": ""}
        texts = [self._conversation.changed(index, index + 1, {**plain, "content": probe}) for probe in PROBES]
        head = texts[0][: shared_len(*texts)]
        if head + opened[0] != prompt:
            return None
        return content[len(opened[0]) :] + shared_tail(*texts)

    def _ending(self, index: int, through: str) -> tuple[str, str]:
        """The token that ends the turn and what the template writes behind it: ChatML `<|im_end|>` and a newline."""
        message = self._conversation.messages[index]
        fields = (name for name in ("content", "tool_calls", *REASONING) if message.get(name))
        kind = (self._conversation.messages[index - 1].get("role"), *fields)
        token, behind = self._endings.known.get(kind, ("", ""))
        if not token or not through.endswith(token + behind):
            token, behind = self._endings.known[kind] = self._find_ending(index)
        return token, behind

    def _find_ending(self, index: int) -> tuple[str, str]:
        """Two turns that differ in the end of what they say share what the template writes behind it."""
        tails = []
        for one, other in self._probes(index):
            try:
                texts = [self._conversation.changed(index, index + 1, change) for change in (one, other)]
            except BadRow:
                continue
            if texts[0] != texts[1]:
                tails.append(shared_tail(*texts))
        where = "tokenizer.chat_template"
        if not tails:
            fail(where, "the template leaves out what the assistant says; correct it", kind="template leaves out")
        tail = min(tails, key=len)
        found = self._endings.split(tail, calls=bool(self._conversation.messages[index].get("tool_calls")))
        if found is None:
            fail(
                where,
                f"the template ends an assistant turn with {tail!r}, which holds no special token, so a model would "
                "never learn to stop; let the template write eos_token there",
                kind="no end of turn",
            )
        return found

    def _probes(self, index: int) -> Iterator[list[Message]]:
        message = self._conversation.messages[index]
        yield [{"content": (message.get("content") or "") + probe} for probe in PROBES]
        for calls in [message["tool_calls"]] if message.get("tool_calls") else []:
            last = calls[-1]["function"]
            arguments = last.get("arguments") or {}
            changed = [{**last, "arguments": {**arguments, "probe": probe}} for probe in PROBES]
            yield [{"tool_calls": [*calls[:-1], {**calls[-1], "function": function}]} for function in changed]

    def thinking(self, turn: Turn) -> list[tuple[int, int]]:
        """Where in the turn's text its thinking stands, with the tags around it: what a turn without it has less.

        returns  [start, end) in characters of `turn.text`
        """
        return [
            self._with_tags(turn, span) for change in self._unthought(turn.index) if (span := self._less(turn, change))
        ]

    def _unthought(self, index: int) -> Iterator[Message]:
        message = self._conversation.messages[index]
        if any(message.get(name) for name in REASONING):
            yield dict.fromkeys(REASONING)
        content = message.get("content") or ""
        for block in _BLOCK.finditer(content):
            yield {"content": content[: block.start()] + content[block.end() :]}

    def _less(self, turn: Turn, change: Message) -> tuple[int, int] | None:
        """What the turn's text has more than with the change; as early as it can be told."""
        messages = [*self._conversation.messages[: turn.index], {**self._conversation.messages[turn.index], **change}]
        full = turn.answer
        try:
            less = self._like(messages).turn(turn.index).answer
        except BadRow:
            # Only with its thought can the turn stand behind a prompt that opens one.
            end = full.find(_CLOSE) + len(_CLOSE)
            return (
                (len(turn.prompt), len(turn.prompt) + end) if _OPENED.search(turn.prompt) and _CLOSE in full else None
            )
        start = shared_len(full, less)
        end = len(full) - min(len(shared_tail(full, less)), len(less) - start)
        while start > 0 and full[start - 1] == full[end - 1] and end > start:
            start, end = start - 1, end - 1
        return (len(turn.prompt) + start, len(turn.prompt) + end) if end > start else None

    @staticmethod
    def _with_tags(turn: Turn, span: tuple[int, int]) -> tuple[int, int]:
        start, end = span
        opened, closed = _OPENED.search(turn.text[:start]), _CLOSED.match(turn.text, end)
        if closed is None:
            return span
        return max(opened.start() if opened else start, len(turn.prompt)), closed.end()

    def _like(self, messages: list[Message]) -> "Turns":
        return Turns(self._conversation.with_messages(messages), self._endings)

    def _fail(self, what: str, *, kind: str) -> NoReturn:
        fail(self._conversation.origin, what, kind=kind)
