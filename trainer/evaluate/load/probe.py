"""What a server is and takes, asked before any load: its models, which fields of a request, its own figures.

Nobody's documentation says what a given build does with `ignore_eos`, so a request of two tokens tries. A refused field
is left out from then on and the report says so; one that is taken and ignored shows in the answers' lengths later.
"""

import contextlib
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from trainer.config.load import LoadConfig
from trainer.evaluate.load.answer import AnswerReader, Outcome, error_text
from trainer.evaluate.load.client import Client
from trainer.evaluate.load.framing import HttpError, Response
from trainer.evaluate.load.texts import WORDS, TextMaker, from_counts

RESETS = (("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"))
"""vLLM's and SGLang's."""
FIELDS = ("stream_options", "ignore_eos", "min_tokens")
"""Left out if a server refuses them."""
REFUSALS = ("http 400", "http 422")
PROBE_TIMEOUT_S = 120.0
"""A first request may compile kernels."""


@dataclass
class Server:
    """A server under load, as found."""

    label: str
    client: Client
    chat: bool
    model: str = ""
    fields: tuple[str, ...] = FIELDS
    usage_in_stream: bool = False
    version: str | None = None
    metrics: bool = False
    reset: tuple[str, str] | None = None
    salts_cache: bool = False
    """Keeps the cached prefixes of requests with another `cache_salt` apart."""
    maker: TextMaker = field(default_factory=TextMaker)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    """Kind of what makes a load pointless, with `message`."""
    message: str = ""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, config: LoadConfig, prompt: Any, output_len: int, *, stream: bool = True) -> dict[str, Any]:
        """A request's fields."""
        body = {"model": self.model, "messages" if self.chat else "prompt": prompt, "max_tokens": output_len}
        body |= {"temperature": config.temperature, "stream": stream}
        if stream and "stream_options" in self.fields:
            body["stream_options"] = {"include_usage": True}
        if config.ignore_eos:
            body |= {"ignore_eos": True} if "ignore_eos" in self.fields else {}
            body |= {"min_tokens": output_len} if "min_tokens" in self.fields else {}
        return body | json.loads(config.extra_body or "{}")

    async def empty_cache(self) -> bool:
        """Empty the prefix cache; False if the server cannot, or not now."""
        if self.reset is None:
            return False
        try:
            return (await self.client.fetch(*self.reset, b"{}")).status == 200
        except (HttpError, TimeoutError):
            return False


async def probe(label: str, client: Client, config: LoadConfig, *, chat: bool, maker: TextMaker | None) -> Server:
    """Ask a server what it takes; what makes a load pointless stands in `.error`, never raised.

    maker  None: how long texts are is asked from the server
    """
    server = Server(label, client, chat)
    try:
        await _find_model(server, config)
        if server.error is None:
            await _find_fields(server, config)
        if server.error is None:
            await _find_endpoints(server, config)
            server.maker = maker or await _measure_words(server, config)
    except HttpError as error:
        server.error, server.message = error.kind, f"{client.url}: {error}; is a server running there?"
    except TimeoutError:
        server.error, server.message = "timeout", f"{client.url} gave no answer within {PROBE_TIMEOUT_S:g} s"
    return server


async def _find_model(server: Server, config: LoadConfig) -> None:
    response = await server.client.fetch("GET", "/v1/models", timeout_s=PROBE_TIMEOUT_S)
    names = _model_names(response)
    server.model = config.model or (names[0] if names else "")
    if response.status in (401, 403):
        _give_up(server, response, "give api_key=<key>")
    elif not server.model:
        _give_up(server, response, "/v1/models names no model; give model=<name>")
    elif names and server.model not in names:
        server.notes.append(f"model={server.model} is not in /v1/models, which has {', '.join(names)}")


def _model_names(response: Response) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(bytes(response.body))["data"]]
    except (ValueError, KeyError, TypeError):
        return []


async def _find_fields(server: Server, config: LoadConfig) -> None:
    """Stream two tokens with all fields; if they are refused, with each alone, and go on with those that were taken."""
    wanted = [name for name in FIELDS if config.ignore_eos or name == "stream_options"]
    outcome, response = await _stream_two(server, config, wanted)
    if outcome.error in REFUSALS:
        taken = [name for name in wanted if (await _stream_two(server, config, [name]))[0].error not in REFUSALS]
        outcome, response = await _stream_two(server, config, taken)
    if outcome.error is not None and outcome.error != "empty":
        _give_up(server, response, "", outcome)
        return
    server.usage_in_stream = outcome.output_tokens is not None
    if refused := [name for name in wanted if name not in server.fields]:
        server.notes.append(f"the server refuses {', '.join(refused)}")
    if not server.usage_in_stream:
        server.notes.append("streams tell no usage: without tokenizer= a piece with text counts as one token")


async def _stream_two(server: Server, config: LoadConfig, fields: list[str]) -> tuple[Outcome, Response]:
    server.fields = tuple(fields)
    outcome = Outcome(due=0.0, asked_tokens=2)
    reader = AnswerReader(outcome)
    body = json.dumps(server.body(config, _prompt(server, "Once upon a time"), 2)).encode()
    response = await server.client.fetch("POST", server.path, body, timeout_s=PROBE_TIMEOUT_S)
    reader.head(response.status, response.headers.get("content-type", ""))
    reader.feed(bytes(response.body), 0.0)
    reader.close(response.status)
    return outcome, response


async def _find_endpoints(server: Server, config: LoadConfig) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        server.version = str(json.loads(bytes((await server.client.fetch("GET", "/version")).body))["version"])
    metrics = await server.client.fetch("GET", "/metrics")
    server.metrics = metrics.status == 200 and b"# TYPE" in metrics.body
    if not server.metrics:
        server.notes.append("no /metrics: what happens inside is not reported")
    if not config.reset_cache:
        return
    for server.reset in RESETS:
        if await server.empty_cache():
            return
    server.reset = None
    # vLLM's names, and ours after them: both keep salts apart. Others would ignore the field and say nothing.
    server.salts_cache = server.metrics and b"vllm:" in metrics.body
    how = "their cache_salt" if server.salts_cache else "their words"
    server.notes.append(f"the prefix cache cannot be emptied from outside: points are kept apart by {how}")


async def _measure_words(server: Server, config: LoadConfig) -> TextMaker:
    """How many tokens words take, by the usage of two whole answers."""
    counts, draw = [], Random(0)
    for num in (8, 72):
        body = server.body(config, _prompt(server, " ".join(draw.choices(WORDS, k=num))), 1, stream=False)
        response = await server.client.fetch("POST", server.path, json.dumps(body).encode(), timeout_s=PROBE_TIMEOUT_S)
        try:
            counts.append((num, int(json.loads(bytes(response.body))["usage"]["prompt_tokens"])))
        except (ValueError, KeyError, TypeError):
            server.notes.append("the server counts no prompt tokens: input_len counts words; give tokenizer=")
            return TextMaker()
    return from_counts(*counts)


def _prompt(server: Server, text: str) -> Any:
    return [{"role": "user", "content": text}] if server.chat else text


def _give_up(server: Server, response: Response, hint: str, outcome: Outcome | None = None) -> None:
    said = outcome.message if outcome else error_text(bytes(response.body))
    server.error = outcome.error if outcome else "no model" if response.status == 200 else f"http {response.status}"
    server.message = "; ".join(filter(None, (f"{server.client.url} says: {said}", hint, *server.notes)))
