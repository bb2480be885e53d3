"""The chat template: a program that comes with the model, run here, and its faults told as faults of the row.

Below turns.py, which compares what it writes. A template that writes today's date gets one day for the whole run, so
that a table that is made around midnight holds one day's prompts, and a run that is resumed tomorrow goes on with them.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import date, datetime, time
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import TEMPLATE_FAULTS, template_message
from trainer.data.rows import Message, fail

Tools = list[dict[str, Any]] | None
_DATE_CALL = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(?P<quote>['"])(?P<format>[^'"\\]*)(?P=quote)\s*\)""")
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


class Template:
    """One tokenizer's chat template, as it was when this was made."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: str | None = None) -> None:
        """day: YYYY-MM-DD, what a template writes that writes today's date; None: today"""
        self._tokenizer = tokenizer
        self._day = datetime.combine(date.fromisoformat(day) if day else date.today(), time())
        self._sources: dict[bool, str] = {}

    def text(
        self, where: str, messages: Sequence[Message], tools: Tools = None, *, generation_prompt: bool = False
    ) -> str:
        """What the template writes.

        generation_prompt  also the beginning of the assistant's next turn, as the server asks for it
        raises             BadRow: no template, or one that refuses the messages
        """
        source = self.source(where, tools)
        given = [template_message(message) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                given, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=generation_prompt
            )
        except TEMPLATE_FAULTS as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            reason = str(error) or type(error).__name__
            fail(
                where,
                f"the chat template refuses the turns {roles[:200]}: {reason[:500]}; change the row's roles",
                kind="refused by the template",
            )

    def source(self, where: str, tools: Tools = None) -> str:
        """The template's program; some tokenizers have another one for tools."""
        if bool(tools) not in self._sources:
            if not self._tokenizer.chat_template:
                fail(
                    where,
                    "the tokenizer has no chat template; use an instruct model, set one, or give rows of text",
                    kind="no chat template",
                )
            try:
                source = self._tokenizer.get_chat_template(None, tools or None)
            except ValueError as error:
                fail(where, f"tokenizer.chat_template: {error}", kind="no chat template")
            self._sources[bool(tools)] = _DATE_CALL.sub(self._date, source)
        return self._sources[bool(tools)]

    def _date(self, call: re.Match[str]) -> str:
        return json.dumps(self._day.strftime(call["format"]), ensure_ascii=False)

    def identity(self) -> dict[str, Any]:
        """What decides the ids: equal for equal ids, whichever folder the tokenizer was loaded from."""
        template = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        return {
            "tokenizer": tokenizer_identity(self._tokenizer),
            "chat_template": template,
            "today": self._day.date().isoformat() if writes_date(self._tokenizer) else None,
            "versions": {name: version(name) for name in _LIBRARIES},
        }


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template asks for today's date."""
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What decides a text's ids, as JSON; a saved and reloaded tokenizer has the same."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    flags = {name: getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token")}
    added = {index: _added_token(token) for index, token in tokenizer.added_tokens_decoder.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words = hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()
    else:
        # Padding and truncation are how it was last called, not what it is.
        state = {key: value for key, value in json.loads(backend.to_str()).items() if key not in _CALLED}
        words = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    return {"class": type(tokenizer).__name__, "special": special, "flags": flags, "added": added, "words": words}


_CALLED = ("padding", "truncation", "version")


def _added_token(token: Any) -> list[Any]:
    return [getattr(token, name) for name in ("content", "special", "normalized", "lstrip", "rstrip", "single_word")]
