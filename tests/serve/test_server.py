"""The server as clients see it: the openai client over a real port, hostile bytes, clients that go away, signals."""

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.serve.fake_engine import FakeEngine, serving
from trainer.config.errors import UserError
from trainer.serve.config import ServeConfig
from trainer.serve.http import api
from trainer.serve.http.prompts import INLINE_CHARS
from trainer.serve.http.server import Server, create_app, serve
from trainer.sources.tiny import tiny_model

ROOT = Path(__file__).parent.parent.parent
JSON = {"Content-Type": "application/json"}
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture(scope="module")
def engine(tokenizer):
    """One for the tests that leave it as it was."""
    return FakeEngine(tokenizer, ServeConfig(model="tiny", max_body_bytes=50_000, max_prompts=20, max_queue=16))


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url) as http:
        yield http


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true; what is waited for takes milliseconds, so the limit only ends a failure."""
    end = time.monotonic() + 10
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def events(lines: list[str]) -> list[dict]:
    """The JSON events of a stream, which must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert all(line.startswith("data: ") for line in lines if line)
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def stream(http: httpx.Client, path: str, body: dict) -> list[dict]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(list(response.iter_lines()))


# ---- answers


def test_completion_through_the_openai_client(client, engine):
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=100)
    assert answer.object == "text_completion"
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (engine.answer, "stop", None)
    num_tokens = len(engine.tokenizer(engine.answer)["input_ids"]) + 1  # and EOS
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, num_tokens)
    assert answer.usage.total_tokens == 2 + num_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_choices_come_in_the_order_of_prompts_n_for_each(client, engine):
    answer = client.completions.create(model="fake", prompt=["a", "bc", "d"], n=2, max_tokens=100)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [engine.answer, f"1: {engine.answer}"] * 3
    assert answer.usage.prompt_tokens == 4  # a prompt counts once, whatever n


def test_a_default_answer_has_sixteen_tokens(client):
    answer = client.completions.create(model="fake", prompt="ab")
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_a_prompt_that_leaves_little_room_does_not_shorten_the_others(client, engine):
    client.completions.create(model="fake", prompt=["a" * 500, "b"], max_tokens=100)
    assert [stream.params.max_tokens for stream in engine.submitted[-2:]] == [12, 100]  # the model takes 512


def test_no_tokens_is_an_answer_too(client):
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 0


def test_a_streamed_completion_joined_is_the_whole(client, http):
    body = {"model": "fake", "prompt": ["ab", "c"], "n": 2, "max_tokens": 40, "stop": "fi"}
    whole = client.completions.create(**body)
    texts, reasons = [""] * 4, [None] * 4
    chunks = stream(http, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            assert reasons[choice["index"]] is None  # nothing comes after the end
            assert "\ufffd" not in choice["text"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice.text for choice in whole.choices]
    assert all("fi" not in text for text in texts)
    assert reasons == ["stop"] * 4 == [choice.finish_reason for choice in whole.choices]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole.usage.model_dump(exclude_none=True)


def test_a_stream_without_usage_does_not_speak_of_it(http):
    assert all("usage" not in chunk for chunk in stream(http, "/v1/completions", {"prompt": "a"}))


def test_a_streamed_chat_joined_is_the_whole(client):
    body = {**CHAT, "max_tokens": 50, "n": 2, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**body)
    assert whole.object == "chat.completion"
    texts, logprobs, reasons, roles = ["", ""], [[], []], [None, None], [[], []]
    usage = None
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
            roles[choice.index].append(choice.delta.role)
    assert texts == [choice.message.content for choice in whole.choices]
    assert [role[0] for role in roles] == ["assistant"] * 2
    assert not any(any(role[1:]) for role in roles)
    assert reasons == [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    for streamed, choice in zip(logprobs, whole.choices, strict=True):
        assert [t.model_dump() for t in streamed] == [t.model_dump() for t in choice.logprobs.content]
    assert usage.model_dump() == whole.usage.model_dump()


def test_tool_calls_streamed_or_not(tokenizer):
    engine = FakeEngine(tokenizer, answer=f"I add.\n{CALL}\n{CALL}")
    original = tokenizer.chat_template
    tokenizer.chat_template = "{% if tools %}<tool_call>{% endif %}" + original
    try:
        with serving(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            body = {**CHAT, "tools": [TOOL], "max_tokens": 200}
            [choice] = client.chat.completions.create(**body).choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
            assert [call.function.arguments for call in choice.message.tool_calls] == ['{"x": 1}'] * 2
            content, calls, reason = "", [], None
            for chunk in client.chat.completions.create(**body, stream=True):
                content += chunk.choices[0].delta.content or ""
                calls += chunk.choices[0].delta.tool_calls or []
                reason = chunk.choices[0].finish_reason
            assert (content, reason) == ("I add.", "tool_calls")
            assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "add")]
            cut = client.chat.completions.create(**{**body, "max_tokens": 80}).choices[0]
            assert (cut.finish_reason, len(cut.message.tool_calls)) == ("length", 1)  # the second is cut off
            plain = client.chat.completions.create(**body, tool_choice="none").choices[0].message
            assert (plain.tool_calls, plain.content) == (None, engine.answer)
    finally:
        tokenizer.chat_template = original


def test_adapters_are_models(http, engine, client):
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/nowhere"}).status_code == 400
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "org/a:1", "lora_path": "/adapter"})
    assert loaded.status_code == 200
    models = {model.id: model for model in client.models.list()}
    assert models.keys() == {"fake", "org/a:1"}
    assert (models["org/a:1"].parent, models["fake"].parent) == ("fake", None)
    assert client.models.retrieve("org/a:1").root == "/adapter"
    client.completions.create(model="org/a:1", prompt="a")
    assert engine.submitted[-1].adapter == "org/a:1"
    client.completions.create(model="fake", prompt="a")
    assert engine.submitted[-1].adapter is None
    taken = http.post("/v1/load_lora_adapter", json={"lora_name": "fake", "lora_path": "/adapter"})
    assert "base model's name" in taken.json()["error"]["message"]
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "org/a:1"}).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "org/a:1"}).status_code == 400
    with pytest.raises(openai.NotFoundError, match="not served here; use one of fake") as caught:
        client.completions.create(model="org/a:1", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/a:1")


def test_the_served_name_means_what_was_trained(tokenizer):
    """With an adapter as default, the name serves it, and `base` the model under it."""
    engine = FakeEngine(tokenizer)
    engine.default_adapter, engine.loaded = "trained", {"trained": "/adapter"}
    with TestClient(create_app(engine)) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["fake", "base", "trained"]
        for name, adapter in (("fake", "trained"), (None, "trained"), ("trained", "trained"), ("base", None)):
            assert http.post("/v1/completions", json={"prompt": "a", "model": name}).status_code == 200
            assert engine.submitted[-1].adapter == adapter
        assert http.get("/v1/models/base").json()["parent"] is None


def test_tokens_to_and_fro(http, tokenizer):
    ids = http.post("/tokenize", json={"prompt": "Hé", "add_special_tokens": False}).json()
    assert ids == {"tokens": tokenizer("Hé")["input_ids"], "count": 3, "max_model_len": 512}
    assert http.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": "Hé"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    assert chat == tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True, return_dict=False)
    assert http.post("/detokenize", json={"tokens": [len(tokenizer)]}).status_code == 400
    long = http.post("/tokenize", json={"prompt": "a" * (INLINE_CHARS + 1)}).json()  # beside the event loop
    assert long["count"] == INLINE_CHARS + 1
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == (tokenizer.eos_token, tokenizer.bos_token)
    assert info["chat_template"] == tokenizer.chat_template


def test_small_pages(http, engine):
    assert http.get("/health").status_code == http.head("/health").status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+", http.get("/version").json()["version"])
    assert http.get("/state").json()["model"] == "fake"
    engine.metrics.arrival()
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'lowbit:requests_total{model_name="fake"} 1.0' in metrics.text


def test_the_page_is_served_where_it_exists(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "PAGE_DIR", tmp_path)
    (tmp_path / "index.html").write_text("<p>page")
    (tmp_path / "app.js").write_text("1")
    with TestClient(create_app(FakeEngine(tokenizer, ServeConfig(model="tiny", api_key="k")))) as http:
        assert (http.get("/").text, http.get("/app.js").text) == ("<p>page", "1")
        assert (http.head("/").status_code, http.head("/").text) == (200, "")
        assert "javascript" in http.get("/app.js").headers["content-type"]
        assert http.get("/style.css").status_code == 401  # no file, so no exception from the key
        assert http.get("/%2e%2e/server.py").status_code == 401


# ---- refusals


HOSTILE = [
    (b"", None),
    (b"{", None),
    (b"null", None),
    (b"[]", None),
    (b"\xff", None),
    (b'{"prompt": "a", "temperature": NaN}', None),
    (b'{"prompt": "\\ud800"}', None),
    (b'{"prompt": "a", "stop": ["\\udc00"]}', None),
    (b"[" * 40_000, None),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None),
    (b'{"prompt": "a", "n": 1, "n": 2}', None),
    (b"{}", "prompt"),
    (b'{"prompt": ""}', "prompt"),
    (b'{"prompt": [""]}', "prompt"),
    (b'{"prompt": []}', "prompt"),
    (b'{"prompt": [[]]}', "prompt"),
    (b'{"prompt": 5}', "prompt"),
    (b'{"prompt": [true]}', "prompt"),
    (b'{"prompt": [-1]}', "prompt"),
    (b'{"prompt": [264]}', "prompt"),
    (b'{"prompt": [1' + b"0" * 400 + b"]}", "prompt"),
    (b'{"prompt": ["a", 5]}', "prompt"),
    (json.dumps({"prompt": ["a"] * 21}).encode(), "prompt"),
    (json.dumps({"prompt": "a" * 513}).encode(), "prompt"),
    (b'{"prompt": "a", "nonsense": 1}', "nonsense"),
    (b'{"prompt": "a", "\\u0000": 1}', "\x00"),
    (b'{"prompt": "a", "temperature": "1"}', "temperature"),
    (b'{"prompt": "a", "temperature": true}', "temperature"),
    (b'{"prompt": "a", "temperature": -1}', "temperature"),
    (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
    (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature"),
    (b'{"prompt": "a", "top_p": 0}', "top_p"),
    (b'{"prompt": "a", "n": 1.0}', "n"),
    (b'{"prompt": "a", "n": 99999}', "n"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}", "seed"),
    (b'{"prompt": "a", "max_tokens": -1}', "max_tokens"),
    (b'{"prompt": "a", "logprobs": 21}', "logprobs"),
    (b'{"prompt": "a", "logprobs": true}', "logprobs"),
    (b'{"prompt": "a", "stop": 5}', "stop"),
    (b'{"prompt": "a", "stop": [""]}', "stop"),
    (b'{"prompt": "a", "stop_token_ids": ["a"]}', "stop_token_ids.0"),
    (b'{"prompt": "a", "stop_token_ids": [999999]}', "stop_token_ids"),
    (b'{"prompt": "a", "logit_bias": {"999999": 1}}', "logit_bias"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
    (b'{"prompt": "a", "logit_bias": [1]}', "logit_bias"),
    (b'{"prompt": "a", "suffix": "b"}', "suffix"),
    (b'{"prompt": "a", "stream": true, "best_of": 2}', "best_of"),
    (b'{"prompt": "a", "cache_salt": ""}', "cache_salt"),
    (b'{"prompt": "a", "priority": 99999999999}', "priority"),
    (b'{"prompt": "a", "response_format": {"type": "json_schema"}}', "response_format"),
]


@pytest.mark.parametrize(("body", "param"), HOSTILE, ids=lambda value: repr(value)[:60])
def test_what_cannot_be_served_is_a_400_that_names_it(http, engine, body, param):
    answer = http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").split("[")[0] == (param or "")
    assert 10 < len(error["message"]) < 500
    assert not engine.active


@pytest.mark.parametrize(
    "text", ["\x00", "a\x00b", "\u202e\u200f", "𝕏" * 100, "\r\n\u2028\u0085", "\ufffd\ufffe", "a" * 500]
)
def test_strange_text_is_text(http, text):
    """All of it is Unicode, so it is served and comes back as it was."""
    body = {"prompt": text, "echo": True, "max_tokens": 0, "stop": text[:1]}
    answer = http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == text
    assert "".join(chunk["choices"][0]["text"] for chunk in stream(http, "/v1/completions", body)) == text


def test_chat_refusals_have_the_templates_reason(client):
    for messages in ([], [{"role": "wizard", "content": "a"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="fake", messages=messages)
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/docs", 404),
    ],
)
def test_wrong_paths_and_methods_have_the_one_shape(http, method, path, status):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_only_json_is_read(http):
    """A web page elsewhere may send text/plain or a form without asking; it may not send this."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert http.post("/v1/completions", content=b'{"prompt": "a"}', headers=kind).status_code == 200


def test_long_bodies_are_refused_with_a_length_or_without(url):
    body = json.dumps({"prompt": "a" * 50_000}).encode()

    def in_pieces():
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    for content in (body, in_pieces()):
        answer = httpx.post(f"{url}/v1/completions", content=content, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
    fits = b'{"prompt": "a"' + b" " * 40_000 + b"}"
    assert httpx.post(f"{url}/v1/completions", content=iter([fits]), headers=JSON).status_code == 200


@pytest.mark.parametrize("from_environment", [False, True])
def test_the_key_opens_everything_but_health(tokenizer, monkeypatch, from_environment):
    if from_environment:
        monkeypatch.setenv("LOWBIT_API_KEY", "schlüssel")
    config = ServeConfig(model="tiny", api_key=None if from_environment else "schlüssel")
    with TestClient(create_app(FakeEngine(tokenizer, config))) as http:
        assert http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/state", "/openapi.json", "/nope", "/health/"):
            answer = http.get(path)
            assert answer.status_code == 401
            assert (answer.json()["error"]["code"], answer.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")
        right = "Bearer schlüssel".encode()
        for wrong in (b"", b"Bearer", b"Bearer x", b"Basic schl\xc3\xbcssel", b"Bearer schl", right + b"x"):
            assert http.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
        assert http.get("/v1/models", headers={"Authorization": right}).status_code == 200
        assert http.post("/v1/completions", content=b"{", headers=JSON).status_code == 401  # before it is parsed


# ---- a queue that is full, requests that fail half-way


def test_a_full_queue_says_when_to_come_again(tokenizer):
    engine = FakeEngine(tokenizer, ServeConfig(model="tiny", max_queue=2), step_s=0.05)
    with serving(engine) as url, httpx.Client(base_url=url) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 500}) as first:
            assert first.status_code == 200
            answer = http.post("/v1/completions", json={"prompt": ["a", "b"]})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")  # the engine says 2.4 s
            assert answer.json()["error"]["code"] == "queue_full"
            assert len(engine.submitted) == 2  # b found no place
            assert engine.submitted[1].abort_reason is not None
        too_many = http.post("/v1/completions", json={"prompt": ["a"] * 3})
        assert too_many.status_code == 400  # waiting would not help
        assert "max_queue=2" in too_many.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_running(http, engine, streamed):
    before = len(engine.submitted)
    answer = http.post("/v1/completions", json={"prompt": ["a", "b", "c" * 600, "d"], "stream": streamed})
    assert answer.status_code == 400
    assert "max_model_len" in answer.json()["error"]["message"]
    assert "request 2" in answer.json()["error"]["message"]
    assert [s.abort_reason is not None for s in engine.submitted[before:]] == [True, True]


def test_an_engine_that_fails_tells_everybody_and_ends_the_server(tokenizer):
    engine = FakeEngine(tokenizer, step_s=0.01)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    answers = []
    with serving(engine) as url, httpx.Client(base_url=url) as http:
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body)))
        waiting.start()
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
            lines = streamed.iter_lines()
            assert next(lines).startswith("data: {")
            assert soon(lambda: len(engine.active) == 2)
            engine.fail()
            *_, last, _ = lines
        waiting.join()
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")
    assert "the engine has failed" in error["message"]
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (500, "generation_failed")
    with TestClient(create_app(engine)) as http:
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json=body).status_code == 503


# ---- clients that go away


def send_raw(url: str, path: str, body: dict) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


ENDLESS = {"max_tokens": 400, "ignore_eos": True, "n": 2}
GOES_AWAY = [
    ("/v1/completions", {"prompt": ["a", "b", "c"], **ENDLESS, "stream": True}, 3),
    ("/v1/completions", {"prompt": ["a", "b", "c"], **ENDLESS}, 3),
    ("/v1/chat/completions", {**CHAT, **ENDLESS, "stream": True}, 1),
    ("/v1/chat/completions", {**CHAT, **ENDLESS}, 1),
    ("/v1/loglikelihood", {"context": "a", "continuations": ["b", "c"]}, 2),
]


@pytest.mark.parametrize(("path", "body", "num_requests"), GOES_AWAY)
def test_a_client_that_goes_away_takes_its_requests_along(tokenizer, caplog, path, body, num_requests):
    # A score is one step of the fake engine, so that step is long enough to go away in.
    engine = FakeEngine(tokenizer, step_s=0.5 if path.endswith("loglikelihood") else 0.02)
    with serving(engine) as url:
        connection = send_raw(url, path, body)
        assert soon(lambda: len(engine.active) == num_requests)
        if body.get("stream"):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
        assert soon(lambda: len(engine.aborted) == num_requests)
        assert soon(lambda: not engine.active)
    gc.collect()
    assert "never retrieved" not in caplog.text  # asyncio's complaint about an exception that nobody looked at


def test_many_clients_that_go_away_leave_nothing(tokenizer):
    """A storm of cancels at every moment of a request's life."""
    engine = FakeEngine(tokenizer, step_s=0.001)
    with serving(engine) as url:
        for number in range(60):
            body = {"prompt": ["a", "b"], "max_tokens": 300, "ignore_eos": True, "stream": number % 2 == 0}
            connection = send_raw(url, "/v1/completions", body)
            if number % 3:
                time.sleep(0.002 * (number % 7))
            connection.close()
        assert soon(lambda: not engine.active)
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_client_that_stays_is_not_taken_for_gone(http, engine):
    """Two requests on one connection: the first one's end is no disconnect."""
    before = len(engine.aborted)
    for _ in range(2):
        assert http.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 200
        stream(http, "/v1/completions", {"prompt": "a"})
    assert len(engine.aborted) == before


# ---- signals

SERVE = """
import logging, sys
from transformers import AutoTokenizer
from tests.serve.fake_engine import FakeEngine
from trainer.serve.config import ServeConfig
from trainer.serve.http.server import serve
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
engine = FakeEngine(AutoTokenizer.from_pretrained(sys.argv[1]), step_s=0.02)
sys.exit(serve(engine, ServeConfig(model="tiny", port=0, drain_s=float(sys.argv[2]))))
"""


@pytest.fixture(scope="module", autouse=True)
def processes(tokenizer):
    """A server for each way to end, by its drain_s; started before the other tests, for imports take seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = {}
    for drain_s in (20, 0.2):
        command = [sys.executable, "-c", SERVE, tokenizer.name_or_path, str(drain_s)]
        started[drain_s] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def address(process: subprocess.Popen) -> str:
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
    raise AssertionError("the server told no address")


@pytest.mark.parametrize(
    ("number", "drain_s", "num_tokens"), [(signal.SIGTERM, 20, 40), (signal.SIGINT, 0.2, 400)], ids=["ends", "is cut"]
)
def test_a_signal_lets_streams_end_or_tells_why_not(processes, number, drain_s, num_tokens):
    process = processes[drain_s]
    url = address(process)
    finished: list[list[str]] = []

    def read(begun: threading.Barrier) -> None:
        body = {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            begun.wait()
            finished.append([line for line in [first, *lines] if line])

    begun = threading.Barrier(11)
    readers = [threading.Thread(target=read, args=(begun,)) for _ in range(10)]
    with httpx.Client(base_url=url, timeout=30) as http:
        for reader in readers:
            reader.start()
        begun.wait(timeout=30)
        process.send_signal(number)
        for reader in readers:
            reader.join()
    assert process.wait(timeout=30) == 0
    assert len(finished) == 10
    for lines in finished:
        if num_tokens == 40:
            assert events(lines)[-1]["choices"][0]["finish_reason"] == "length"
        else:
            last = json.loads(lines[-1].removeprefix("data: "))
            assert "the server is shutting down" in last["error"]["message"]
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_server((host, int(port))):
        pass  # the port is free


def test_a_failed_engine_ends_the_server_with_1(tokenizer):
    engine = FakeEngine(tokenizer)
    engine.fail()
    assert serve(engine, ServeConfig(model="tiny", port=0, drain_s=0)) == 1
    assert engine.stopped


def test_small_pieces_are_not_held_back(tokenizer):
    """Nagle's algorithm would keep a token's few bytes until the client acknowledged those before: 40 ms."""
    engine = FakeEngine(tokenizer)

    async def option() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = Server(create_app(engine), engine, 1.0)
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.005)
            found = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            server.should_exit = True
            await serving
            return found

    assert asyncio.run(option())


def test_a_taken_port_is_a_users_mistake(tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(model="tiny", port=taken.getsockname()[1])
        with pytest.raises(UserError, match=rf"port={config.port} on host=127.0.0.1 cannot be opened"):
            serve(FakeEngine(tokenizer), config)
    with pytest.raises(UserError, match="host=no.such.host.invalid"):
        serve(FakeEngine(tokenizer), ServeConfig(model="tiny", host="no.such.host.invalid"))


# ---- whatever the schema allows


def test_nothing_that_the_schema_allows_is_a_server_error(tokenizer):
    """Schemathesis writes requests from our own OpenAPI, valid ones and broken ones; none may be answered with 5xx."""
    engine = FakeEngine(tokenizer, ServeConfig(model="tiny", max_queue=16, max_prompts=8))
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(engine))
    statuses = set()
    for operation in schema.get_all_operations():

        @settings(
            max_examples=12,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.ok().as_strategy())
        def check(case: schemathesis.Case) -> None:
            answer = case.call()
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (case.body, answer.text)

        check()
    assert {200, 400} <= statuses
    assert not engine.active
