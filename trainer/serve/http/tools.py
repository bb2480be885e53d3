"""Tool calls in an answer: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the Hermes form that Qwen and
SmolLM2 are trained on too.

One parser serves streams and whole answers, so both say the same. Text that may turn out to be the tag is held back,
and so is white space before it; a call is given out whole. What does not parse stays text: nothing is lost.
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

BEGIN, END = "<tool_call>", "</tool_call>"


def writes_tool_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template teaches this form."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return any(BEGIN in text for text in texts)


@dataclass(slots=True)
class ToolCallParser:
    """Feed it text as it comes; it returns content and calls in order of appearance."""

    num_calls: int = 0
    _held: str = ""
    _space: str = ""
    """White space before the call that is being read."""
    _inside: bool = False
    _just_called: bool = False
    """Whether nothing but white space followed the last call."""

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What the new text makes certain: content, and calls in OpenAI's form with their `index`."""
        self._held += text
        content, calls = "", []
        while True:
            if self._inside:
                inner, end, rest = self._held.partition(END)
                if not end:
                    return content, calls
                self._held, self._inside = rest, False
                call = self._call(inner)
                content += "" if call else self._space + BEGIN + inner + END
                calls += [call] if call else []
                self._just_called = call is not None
            elif BEGIN in self._held:
                before, _, self._held = self._held.partition(BEGIN)
                self._inside, self._space = True, before[len(before.rstrip()) :]
                content += before.rstrip()
            else:
                certain = len(self._held) - _uncertain_len(self._held)
                self._just_called = self._just_called and certain == 0
                content, self._held = content + self._held[:certain], self._held[certain:]
                return content, calls

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back, at the end; a call whose closing tag is missing counts if it is complete."""
        held, inside = self._held, self._inside
        self._held, self._inside = "", False
        if not inside:
            return ("" if self._just_called and not held.strip() else held), []
        call = self._call(held)
        return ("", [call]) if call else (self._space + BEGIN + held, [])

    def _call(self, inner: str) -> dict[str, Any] | None:
        try:
            call = json.loads(inner)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call["name"], "arguments": text},
        }


def _uncertain_len(text: str) -> int:
    """Length of the end of `text` that may belong to a tag: white space, then a beginning of the tag."""
    tag = next((n for n in range(min(len(BEGIN) - 1, len(text)), 0, -1) if text.endswith(BEGIN[:n])), 0)
    rest = text[: len(text) - tag]
    return tag + len(rest) - len(rest.rstrip())
