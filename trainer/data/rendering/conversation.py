"""One row's messages and what the chat template makes of them, whole, in part, and with changes.

Between template.py, which runs the template, and turns.py, which compares what it writes. What a text has of a message
is found by changing the message: two renderings that differ in one letter share what stands before and behind it.
"""

from dataclasses import replace
from functools import cached_property

from trainer.data.rendering.encoding import shared_len, shared_tail
from trainer.data.rendering.template import Template, Tools
from trainer.data.rows import BadRow, Message, Row, fail

PROBES = ("a", "b")


class Conversation:
    """One row's messages and what the template makes of them."""

    def __init__(self, template: Template, row: Row) -> None:
        self._template, self._row = template, row
        self.origin, self.messages = row.origin, row.messages
        self._texts: dict[tuple[int, bool], str] = {}

    @cached_property
    def whole(self) -> str:
        return self.upto(len(self.messages))

    def upto(self, num_messages: int, *, generation_prompt: bool = False) -> str:
        """The first messages, as the template writes them."""
        key = (num_messages, generation_prompt)
        if key not in self._texts:
            self._texts[key] = self.render(self.messages[:num_messages], generation_prompt=generation_prompt)
        return self._texts[key]

    def render(self, messages: list[Message], *, generation_prompt: bool = False) -> str:
        return self._template.text(self.origin, messages, self._row.tools or None, generation_prompt=generation_prompt)

    def changed(self, index: int, num_messages: int, changes: Message, *, generation_prompt: bool = False) -> str:
        """The first messages, one of them with other fields."""
        messages = list(self.messages[:num_messages])
        messages[index] = {**messages[index], **changes}
        return self.render(messages, generation_prompt=generation_prompt)

    def probed(self, index: int, num_messages: int, *, generation_prompt: bool = False) -> tuple[str, str]:
        """The first messages twice, with another letter at the end of what one of them says."""
        content = self.messages[index].get("content") or ""
        one, other = (
            self.changed(index, num_messages, {"content": content + probe}, generation_prompt=generation_prompt)
            for probe in PROBES
        )
        return one, other

    def place(self, index: int, text: str) -> tuple[int, int]:
        """Where in a text of the first messages, or all, one message stands.

        returns  [start, end) in characters; only what it says, where the template does not write it as a whole
        """
        try:
            before, through = self.upto(index) if index else "", self.upto(index + 1)
            if text.startswith(before) and text.startswith(through):
                return len(before), len(through)
        except BadRow:
            pass
        return self.place_of_content(index, text)

    def place_of_content(self, index: int, text: str) -> tuple[int, int]:
        """Where in a text of the first messages, or all, a message's content stands; [start, end) in characters.

        raises  BadRow: the template does not write the text's beginning from any number of messages
        """
        for num_messages in range(index + 1, len(self.messages) + 1):
            for generation_prompt in (False, True):
                beginning = self._beginning(text, num_messages, generation_prompt)
                if beginning is not None:
                    return self._between_probes(index, num_messages, beginning, generation_prompt)
        fail(self.origin, f"turn {index} is not found in what the template writes", kind="template leaves out")

    def _beginning(self, text: str, num_messages: int, generation_prompt: bool) -> str | None:
        try:
            beginning = self.upto(num_messages, generation_prompt=generation_prompt)
        except BadRow:
            return None
        return beginning if text.startswith(beginning) else None

    def _between_probes(
        self, index: int, num_messages: int, beginning: str, generation_prompt: bool
    ) -> tuple[int, int]:
        content = self.messages[index].get("content") or ""
        ends = self.probed(index, num_messages, generation_prompt=generation_prompt)
        starts = [
            self.changed(index, num_messages, {"content": probe + content}, generation_prompt=generation_prompt)
            for probe in PROBES
        ]
        start = min(shared_len(*starts), len(beginning))
        return start, max(start, len(beginning) - len(shared_tail(*ends)))

    def with_messages(self, messages: list[Message]) -> "Conversation":
        """Other messages in their place."""
        return Conversation(self._template, replace(self._row, messages=messages))

    def with_tools(self, tools: Tools) -> "Conversation":
        """Other tools in their place."""
        return Conversation(self._template, replace(self._row, tools=tools))
