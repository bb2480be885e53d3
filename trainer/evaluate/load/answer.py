"""An answer as it streams in: when its pieces arrived, what it used, and what went wrong.

Server-sent events are cut at blank lines, whatever the network's packets are. A piece counts as output when it carries
text: OpenAI's chat stream opens with a role and no text, others do not, and some servers hold a token back until its
characters are whole, so "the first token" is the first one that a reader sees.
"""

import json
from dataclasses import dataclass, field
from typing import Any

TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Where a chat's piece can carry output."""
MESSAGE_LEN = 300


@dataclass
class Outcome:
    """One request. Moments are of time.perf_counter, in seconds.

    due        when it was to be sent: latencies count from here
    sent       when it was; the client's lateness is the difference
    pieces_at  when each piece with text arrived
    ended      when the last byte of the body did, or the request failed
    """

    due: float
    asked_tokens: int
    warmup: bool = False
    turn: int = 0
    sent: float = 0.0
    ended: float = 0.0
    pieces_at: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    """Kind of failure, e.g. `http 404`, `stream`, `cut off`, `timeout`."""
    message: str = ""

    def fail(self, kind: str, message: str) -> None:
        """Note the first thing that went wrong."""
        if self.error is None:
            self.error, self.message = kind, message[:MESSAGE_LEN]


class AnswerReader:
    """Fills an Outcome from the body's bytes."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._rest, self._data, self._name = outcome, b"", [], b""
        self.whole = bytearray()
        """The body, where it is no stream."""
        self.is_stream = True
        self.done = False

    def head(self, status: int, content_type: str) -> None:
        """What the head says about the body."""
        self.is_stream = status == 200 and content_type.startswith("text/event-stream")

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that arrived at `now`."""
        self._outcome.ended = now
        if not self.is_stream:
            self.whole += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.rstrip(b"\r"), now)

    def close(self, status: int) -> None:
        """The body is complete."""
        if not self.is_stream:
            kind = f"http {status}" if status != 200 else "no stream"
            self._outcome.fail(kind, error_text(bytes(self.whole)))
            return
        self._line(self._rest.rstrip(b"\r"), self._outcome.ended)
        self._line(b"", self._outcome.ended)
        if not self.done and self._outcome.finish_reason is None:
            self._outcome.fail("cut off", "the stream ended without [DONE] and without a finish_reason")
        if not self._outcome.pieces_at:
            self._outcome.fail("empty", "no piece of the stream carried text")

    def _line(self, line: bytes, now: float) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()
        elif not line and self._data:
            data, name, self._data, self._name = b"\n".join(self._data), self._name, [], b""
            self._event(name, data, now)

    def _event(self, name: bytes, data: bytes, now: float) -> None:
        if data.strip() == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self._outcome.fail("stream", f"an event is no JSON: {data[:80]!r}")
            return
        if not isinstance(event, dict) or event.get("error") or name == b"error" or event.get("object") == "error":
            self._outcome.fail("stream", error_text(data))
            return
        choices = event.get("choices")
        self._choices(choices if isinstance(choices, list) else [], now)
        self._usage(_object(event.get("usage")))

    def _choices(self, choices: list[dict], now: float) -> None:
        for choice in (choice for choice in choices if isinstance(choice, dict)):
            text = choice.get("text") or piece_text(_object(choice.get("delta")))
            if text:
                self._outcome.pieces_at.append(now)
                self._outcome.text += text
            self._outcome.finish_reason = choice.get("finish_reason") or self._outcome.finish_reason

    def _usage(self, usage: dict) -> None:
        if usage:
            self._outcome.prompt_tokens = usage.get("prompt_tokens")
            self._outcome.output_tokens = usage.get("completion_tokens")
            self._outcome.cached_tokens = _object(usage.get("prompt_tokens_details")).get("cached_tokens")


def piece_text(delta: dict) -> str:
    """The output in a chat's piece."""
    found = next((delta[name] for name in TEXTS if delta.get(name)), "")
    return found if isinstance(found, str) else json.dumps(found)


def _object(value: Any) -> dict[str, Any]:
    """`value` where it is an object, else an empty one: servers send null, and worse."""
    return value if isinstance(value, dict) else {}


def error_text(body: bytes) -> str:
    """What an error's body says, in OpenAI's form or another."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:MESSAGE_LEN]
    for key in ("error", "message", "detail"):
        while isinstance(found, dict) and found.get(key):
            found = found[key]
    return found if isinstance(found, str) else json.dumps(found)[:MESSAGE_LEN]
