"""The real server under real clients: crowds, clients that go away, adapters swapped under load, signals, failures.

The block accounts are checked after each step. An answer given alone is the truth for the same request in company,
since the engine promises the same bits; transformers is the truth for scores and tokens.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from trainer.config.errors import UserError
from trainer.serve.async_engine import AsyncEngine
from trainer.serve.build import build_engine
from trainer.serve.config import ServeConfig
from trainer.serve.http.server import Server, create_app
from trainer.serve.interface import EngineDead
from trainer.serve.open_model import open_model
from trainer.serve.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent.parent
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""A block of the small model: layers, keys and values, heads, head_dim, tokens, float32."""
SERVE = [sys.executable, "-m", "trainer.serve", "model=tiny", "port=0", "check=true", "kv_cache_memory_bytes=33554432"]
FAILS = """
import sys
from trainer.serve.model_runner import ModelRunner
from trainer.serve.__main__ import main
execute, calls = ModelRunner.execute, []
def fail(self, step):
    calls.append(step)
    if len(calls) == 100:
        raise RuntimeError("the GPU fell off the bus")
    return execute(self, step)
ModelRunner.execute = fail
main()
"""


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[dict[str, subprocess.Popen]]:
    """Servers to be ended, each in its way; started before the other tests, for imports take seconds."""
    commands = {
        "drains": [*SERVE, "drain_s=30"],
        "cuts": [*SERVE, "drain_s=0"],
        "fails": [sys.executable, "-c", FAILS, *SERVE[3:]],
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {name: subprocess.Popen(command, env=environment, **pipes) for name, command in commands.items()}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def address(process: subprocess.Popen) -> str:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
    raise AssertionError(f"the server told no address: {''.join(lines)}")


@contextlib.contextmanager
def running(*, drain_s: float = 5, **settings: Any) -> Iterator[tuple[AsyncEngine, str, Server]]:
    """The product's engine and server in this process, on a free port."""
    config = ServeConfig(dtype="float32", check=True, **settings)
    engine = AsyncEngine(build_engine(open_model(config), config))
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        server = Server(create_app(engine), engine, drain_s)

        async def serve() -> None:
            await engine.start()
            await server.serve([listener])

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert soon(lambda: server.started)
        try:
            yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.should_exit = True
            thread.join()


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true; what is waited for takes less than a second, so the limit only ends a failure."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def reference(random_model) -> Any:
    """A small model whose greedy answers wander; transformers computes the truth with it."""
    return random_model("llama")


@pytest.fixture(scope="module")
def folder(reference, tokenizer, tmp_path_factory) -> Path:
    """The small model as a folder."""
    folder = tmp_path_factory.mktemp("small")
    reference.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(one_thread, folder) -> Iterator[tuple[AsyncEngine, str, Server]]:
    """A server with fewer places and blocks than the crowd wants: 16 places, 48 blocks of 16 tokens."""
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 48 * BLOCK_BYTES}
    with running(model=str(folder), served_model_name="small", **sizes) as served:
        yield served


@pytest.fixture(scope="module")
def http(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1], timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory) -> dict[str, Path]:
    """Two adapters that change every answer: the update of each layer is of the layer's own size."""
    folders = {}
    for seed, name in enumerate(("a", "b")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


def figures(http: httpx.Client) -> dict[str, float]:
    """Sums over labels of /metrics; and by reason of how requests ended."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason") if sample.name.endswith("_total") else None
            for key in (sample.name, reason) if reason else (sample.name,):
                sums[key] = sums.get(key, 0) + sample.value
    return sums


def assert_drained(http: httpx.Client) -> None:
    """Nothing runs, waits or holds a block, and every request that was accepted has been counted as ended."""

    def idle() -> bool:
        state = http.get("/state").json()
        return not (state["running"] or state["num_waiting"])

    assert soon(idle)
    state, now = http.get("/state").json(), figures(http)
    assert state["num_free_blocks"] == state["num_blocks"]
    assert all(owner < 0 for owner in state["blocks"])
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert [now[name] for name in gauges] == [0, 0, 0]
    assert now["lowbit:requests_total"] == now["vllm:request_success_total"]


class LetGo(threading.Event):
    """Ends what holds the engine; `begun` says that it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()


@contextlib.contextmanager
def held(engine: AsyncEngine, error: BaseException | None = None) -> Iterator[LetGo]:
    """The engine's next step takes until `set`; then it raises `error`, if one is given, or goes on."""
    runner, let_go = engine._built.runner, LetGo()
    execute = runner.execute

    def wait(step: Any) -> Any:
        let_go.begun.set()
        let_go.wait(60)
        if error is not None:
            raise error
        return execute(step)

    runner.execute = wait
    try:
        yield let_go
    finally:
        let_go.set()
        runner.execute = execute


def loop_of(engine: AsyncEngine) -> asyncio.AbstractEventLoop:
    return engine._loop


# ---- a crowd

TEXT = "The quick brown fox jumps over the lazy dog. "
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMOJI = "👩‍👩‍👧 Grüße 漢字 🦊"
"""Every character but a few is several tokens of one byte."""
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "Käse", "🦊"]}, "wild": {"type": "boolean"}},
    "required": ["kind", "wild"],
    "additionalProperties": False,
}
LONG = {"max_tokens": 40, "ignore_eos": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "ab" * 20, "temperature": 0, **LONG}),
    "greedy ids": (COMPLETIONS, {"prompt": list(range(4, 100)), "temperature": 0, **LONG}),
    "seed": (COMPLETIONS, {"prompt": TEXT * 2, "seed": 1, **LONG}),
    "same prompt, other seed": (COMPLETIONS, {"prompt": TEXT * 2, "seed": 2, **LONG}),
    "three answers": (COMPLETIONS, {"prompt": TEXT[:21], "seed": 3, "n": 3, "logprobs": 0, **LONG}),
    "three prompts": (COMPLETIONS, {"prompt": ["a", TEXT, TEXT * 3], "seed": 4, "n": 2, "max_tokens": 20}),
    "best of four": (COMPLETIONS, {"prompt": TEXT, "seed": 5, "n": 2, "best_of": 4, **LONG}),
    "echo": (COMPLETIONS, {"prompt": TEXT * 2, "seed": 6, "echo": True, "logprobs": 3, **LONG}),
    "score": (COMPLETIONS, {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}),
    "hot": (COMPLETIONS, {"prompt": "x", "seed": 7, "temperature": 2, "top_p": 0.9, "logprobs": 20, **LONG}),
    "cuts": (COMPLETIONS, {"prompt": "y" * 70, "seed": 8, "top_k": 40, "min_p": 0.05, "logprobs": 1, **LONG}),
    "penalties": (
        COMPLETIONS,
        {"prompt": "z" * 9, "seed": 9, "presence_penalty": 2, "frequency_penalty": -1, "logit_bias": {"70": 5}, **LONG},
    ),
    "may end": (COMPLETIONS, {"prompt": "q", "seed": 10, "logit_bias": {"2": 6}, "max_tokens": 200}),
    "important": (COMPLETIONS, {"prompt": "r" * 33, "seed": 11, "priority": -5, "cache_salt": "mine", **LONG}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Grüße 👩‍👩‍👧"}], "seed": 12, **LONG}),
    "chat logprobs": (
        CHAT,
        {"messages": [{"role": "user", "content": TEXT}], "seed": 13, "logprobs": True, "top_logprobs": 2, "n": 2}
        | LONG,
    ),
    "longer than others": (CHAT, {"messages": [{"role": "user", "content": TEXT * 5}], "seed": 14, "max_tokens": 150}),
    "schema": (
        CHAT,
        {"messages": [{"role": "user", "content": "?"}], "seed": 15, "max_tokens": 60}
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}},
    ),
    "emoji": (
        CHAT,
        {"messages": [{"role": "user", "content": "!"}], "seed": 15, "max_tokens": 90}
        | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [EMOJI]}}}},
    ),
    "stop": (COMPLETIONS, {"prompt": TEXT, "seed": 16, **LONG}),
    "stop, shown": (CHAT, {"messages": [{"role": "user", "content": TEXT}], "seed": 17, **LONG}),
}
"""21 kinds of request; each is asked three times at once."""
UNKNOWN_TO_OPENAI = {"ignore_eos", "top_k", "min_p", "priority", "cache_salt", "include_stop_str_in_output"}


def bodies(http: httpx.Client) -> dict[str, tuple[str, dict[str, Any]]]:
    """BODIES, with stop strings that are known to come: taken from the answers without them."""
    wanted = dict(BODIES)
    for name, shown in (("stop", False), ("stop, shown", True)):
        path, body = BODIES[name]
        [answer] = whole(http.post(path, json=body).json())[0].values()
        stop = answer["text"][9:12]
        assert len(stop) == 3
        wanted[name] = path, {**body, "stop": ["never there", stop], "include_stop_str_in_output": shown}
    return wanted


def whole(answer: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], tuple[int, int]]:
    """What a client sees of an answer: by choice its text, log-probabilities and reason; and the usage."""
    assert "error" not in answer, answer
    choices: dict[int, dict[str, Any]] = {}
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        choices[choice["index"]] = {"text": text, "logprobs": _lists(choice["logprobs"])} | {
            "reason": (choice["finish_reason"], choice["stop_reason"])
        }
    return choices, (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])


def joined(events: list[dict[str, Any]]) -> tuple[dict[int, dict[str, Any]], tuple[int, int]]:
    """The same of a stream's events, with include_usage."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        assert "error" not in event, event
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "reason": None})
            assert choice["reason"] is None, "something came after the end"
            choice["text"] += (piece["delta"].get("content") or "") if "delta" in piece else piece["text"]
            for name, values in (_lists(piece.get("logprobs")) or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
            if piece["finish_reason"]:
                choice["reason"] = piece["finish_reason"], piece["stop_reason"]
    assert events[-1]["choices"] == []
    return choices, (events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"])


def _lists(logprobs: dict[str, Any] | None) -> dict[str, list[Any]] | None:
    return {name: values for name, values in (logprobs or {}).items() if values is not None} or None


def for_openai(body: dict[str, Any]) -> dict[str, Any]:
    extra = {name: value for name, value in body.items() if name in UNKNOWN_TO_OPENAI}
    return {name: value for name, value in body.items() if name not in extra} | {"model": "small", "extra_body": extra}


def as_stream(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def ask_openai(client: openai.OpenAI, path: str, body: dict[str, Any]) -> Any:
    """Through the synchronous client: streamed where that is allowed."""
    create = client.chat.completions.create if path == CHAT else client.completions.create
    if "best_of" in body:
        return whole(create(**for_openai(body)).model_dump())
    return joined([event.model_dump() for event in create(**for_openai(as_stream(body)))])


async def ask_openai_async(client: openai.AsyncOpenAI, path: str, body: dict[str, Any]) -> Any:
    create = client.chat.completions.create if path == CHAT else client.completions.create
    return whole((await create(**for_openai(body))).model_dump())


async def ask_raw(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Through bare HTTP: streamed where that is allowed, and read line by line."""
    if "best_of" in body:
        return whole((await client.post(path, json=body)).json())
    async with client.stream("POST", path, json=as_stream(body)) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return joined([json.loads(line) for line in lines])


async def ask_all(url: str, wanted: dict[str, tuple[str, dict[str, Any]]]) -> dict[tuple[str, str], Any]:
    """Every request three times at once, each time through another client, in a random order."""
    limits = httpx.Limits(max_connections=None)
    with ThreadPoolExecutor(len(wanted)) as threads, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as async_client,
            httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as raw_client,
        ):
            loop, calls = asyncio.get_running_loop(), {}
            for name, (path, body) in wanted.items():
                calls[name, "sync"] = loop.run_in_executor(threads, ask_openai, client, path, body)
                calls[name, "async"] = ask_openai_async(async_client, path, body)
                calls[name, "raw"] = ask_raw(raw_client, path, body)
            order = random.Random(0).sample(sorted(calls), len(calls))
            answers = await asyncio.gather(*(calls[key] for key in order))
    return dict(zip(order, answers, strict=True))


def test_a_crowd_is_answered_as_each_is_alone(served, http):
    wanted = bodies(http)
    alone = {name: whole(http.post(path, json=body).json()) for name, (path, body) in wanted.items()}
    before = figures(http)
    together = asyncio.run(ask_all(served[1], wanted))
    assert len(together) == 3 * len(wanted) > 60
    for (name, way), answer in together.items():
        assert answer == alone[name], (name, way)
    assert figures(http)["vllm:num_preemptions_total"] > before["vllm:num_preemptions_total"]  # it was a crowd
    assert_drained(http)
    _check_what_was_asked(alone, wanted)


def _check_what_was_asked(alone: dict[str, Any], wanted: dict[str, tuple[str, dict[str, Any]]]) -> None:
    texts = {name: [choice["text"] for choice in choices.values()] for name, (choices, _) in alone.items()}
    assert texts["seed"] != texts["same prompt, other seed"]
    assert len(set(texts["three answers"])) == 3
    assert [len(texts[name]) for name in ("three prompts", "best of four", "chat logprobs")] == [6, 2, 2]
    assert texts["echo"][0].startswith(TEXT * 2) and texts["score"] == [TEXT]
    assert alone["best of four"][1][1] == 2 * 40  # what was generated and dropped is no completion token
    assert alone["may end"][0][0]["reason"] == ("stop", None)
    animal = json.loads(texts["schema"][0])
    assert json.loads(texts["emoji"][0]) == EMOJI
    assert alone["greedy ids"][1] == (96, 40) and alone["three answers"][1] == (21, 3 * 40)
    assert animal["kind"] in SCHEMA["properties"]["kind"]["enum"] and isinstance(animal["wild"], bool)
    for name in ("stop", "stop, shown"):
        stop = wanted[name][1]["stop"][1]
        assert alone[name][0][0]["reason"] == ("stop", stop)
        assert texts[name][0].endswith(stop) == (name == "stop, shown")
        assert texts[name][0].count(stop) == (name == "stop, shown")


# ---- requests at the edge, while others run

ACCEPTED: dict[str, dict[str, Any]] = {
    **{f"temperature {value}": {"temperature": value} for value in (0, 1e-9, 1e-4, 2)},
    **{f"top_p {value}": {"top_p": value} for value in (1e-9, 1)},
    **{f"top_k {value}": {"top_k": value} for value in (-1, 0, 1, 10**6)},
    **{f"min_p {value}": {"min_p": value} for value in (0, 1)},
    "all at once": {"temperature": 2, "top_p": 1e-9, "top_k": 10**6, "min_p": 1, "repetition_penalty": 1e-3},
    "a bias on every token": {"logit_bias": {str(token_id): -100 for token_id in range(260)}},
    "seed": {"seed": -(2**63)},
    "a special token alone": {"prompt": [0]},
    "no answer": {"max_tokens": 0},
    "a longest answer that is cut": {"max_tokens": 10**9, "ignore_eos": True},
    "no stop string can come": {"stop": ["\x00\u202e", "👩‍👩‍👧" * 200]},
    "text of all kinds": {"prompt": "\x00\u202e\ufffd\u0085𝕏"},
    "many prompts": {"prompt": ["a"] * 500, "max_tokens": 1},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_values_at_the_edge_have_an_answer(http, name):
    body = {"prompt": TEXT, "max_tokens": 4, "logprobs": 1, **ACCEPTED[name]}
    answer = http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == (500 if name == "many prompts" else 1)
    most = {"no answer": 0, "many prompts": 1, "a longest answer that is cut": 512 - len(TEXT)}.get(name, 4)
    for choice in choices:
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == most or (len(values) < most and choice["finish_reason"] == "stop")
        assert all(-9999 <= value <= 0 for value in values)


REFUSED = {
    "longer than the model": ({"prompt": [4] * 513}, "prompt has 513 tokens, the model takes 512"),
    "no room for a token": ({"prompt": [4] * 512}, "prompt has 512 tokens, the model takes 512"),
    "a megabyte of one letter": ({"prompt": "a" * 10**6}, "prompt has 1000000 tokens"),
    "more answers than places": ({"n": 17}, "max_num_seqs=16"),
    "10,000 prompts": ({"prompt": ["a"] * 10_000}, "max_prompts=2048"),
    "an unknown id": ({"prompt": [260]}, "token id 260"),
    "a bias on an unknown id": ({"logit_bias": {"260": 1}}, "token id 260"),
    "an adapter of nobody": ({"model": "nobody"}, "nobody"),
    "a schema that would not be enforced": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "not": {}}}}},
        "not",
    ),
    "a pattern that is none": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}},
        "Regex parsing error",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_before_a_stream_begins_and_others_go_on(http, name):
    body, says = REFUSED[name]
    with http.stream("POST", COMPLETIONS, json={"prompt": "a", "seed": 1, "stream": True, **LONG}) as other:
        answer = http.post(COMPLETIONS, json={"prompt": "a", "stream": True, **body})
        assert answer.status_code == (404 if "model" in body else 400)
        assert says in answer.json()["error"]["message"]
        assert [line for line in other.iter_lines() if line][-1] == "data: [DONE]"
    assert_drained(http)


def test_a_request_larger_than_the_whole_cache_is_refused_and_others_go_on(folder):
    with running(model=str(folder), kv_cache_memory_bytes=8 * BLOCK_BYTES, max_num_seqs=4) as (_, url, _):
        with httpx.Client(base_url=url) as http:
            for body in ({"prompt": [4] * 130, "max_tokens": 1}, {"prompt": [4] * 100, "max_tokens": 100}):
                refused = http.post(COMPLETIONS, json=body)
                assert refused.status_code == 400
                assert "the whole cache has 8" in refused.json()["error"]["message"]
            fits = [[4 + number] * 100 for number in range(6)]
            answer = http.post(COMPLETIONS, json={"prompt": fits, "max_tokens": 28, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 6 * 28
            assert_drained(http)


# ---- clients that go away


async def leave(url: str, body: dict[str, Any], path: str, draw: random.Random) -> None:
    """Send a request and close the connection: before an answer, at its first bytes, or some bytes later."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    writer.write(f"{head}\r\n\r\n".encode() + content[: draw.choice([len(content)] * 9 + [len(content) // 2])])
    match draw.randrange(4):
        case 0:
            await writer.drain()
        case 1 | 2:
            await asyncio.sleep(draw.random() * 0.1)
        case 3:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.readexactly(draw.randrange(1, 4000)), 0.3)
    if draw.random() < 0.5:
        writer.transport.abort()  # a reset, without a goodbye
    writer.close()


def test_two_hundred_clients_that_go_away_leave_nothing(served, http):
    draw = random.Random(0)
    endless = {"max_tokens": 300, "ignore_eos": True}
    kinds = [
        (COMPLETIONS, {"prompt": ["a", "b" * 40], "n": 2, **endless}),
        (COMPLETIONS, {"prompt": TEXT * 3, "n": 3, "best_of": 5, **endless}),
        (CHAT, {"messages": [{"role": "user", "content": TEXT}], **endless}),
        ("/v1/loglikelihood", {"context": TEXT * 8, "continuations": ["a", "b", "c"]}),
    ]
    stays = {"prompt": TEXT, "seed": 1, "max_tokens": 100, "ignore_eos": True}
    alone = whole(http.post(COMPLETIONS, json=stays).json())

    async def storm() -> Any:
        places = asyncio.Semaphore(25)

        async def one() -> None:
            path, body = draw.choice(kinds)
            streams = path != "/v1/loglikelihood" and "best_of" not in body and draw.random() < 0.5
            async with places:
                await leave(served[1], {**body, "stream": True} if streams else body, path, draw)

        async with httpx.AsyncClient(base_url=served[1], timeout=60) as client:
            return (await asyncio.gather(ask_raw(client, COMPLETIONS, stays), *(one() for _ in range(200))))[0]

    before = figures(http)
    assert asyncio.run(storm()) == alone  # whoever stays is answered
    assert_drained(http)
    # Of some 300 requests half are answers of 300 tokens, which nobody awaited: those were not computed to their end.
    assert figures(http)["abort"] - before.get("abort", 0) > 100
    assert http.get("/health").status_code == 200


# ---- scores and tokens


def test_scores_and_tokens_equal_those_of_transformers(http, reference, hf_greedy):
    draw = random.Random(1)
    prompts = [[draw.randrange(4, 260) for _ in range(length)] for length in (2, 15, 16, 17, 33, 90)]
    with torch.inference_mode():
        logprobs = [reference(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in prompts]
    truth = [
        [float(row[at, ids[at + 1]]) for at in range(len(ids) - 1)] for row, ids in zip(logprobs, prompts, strict=True)
    ]
    echo = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    for _ in range(2):  # unknown prefixes, then known ones
        for choice, want in zip(http.post(COMPLETIONS, json=echo).json()["choices"], truth, strict=True):
            assert choice["logprobs"]["token_logprobs"][0] is None
            # 1e-4: both sum some 100 float32 products of size 1 in another order, then take a logarithm
            assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(want, abs=1e-4)
    pairs = [{"context": ids[: len(ids) // 2], "continuations": [ids[len(ids) // 2 :], [7, 8]]} for ids in prompts]
    scores = [http.post("/v1/loglikelihood", json={"requests": pairs}).json() for _ in range(2)]
    assert scores[0]["results"] == scores[1]["results"]
    assert scores[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32 * 2  # of 45 tokens before each border
    for ids, of_prompt, result in zip(prompts, truth, scores[0]["results"], strict=True):
        own = result["continuations"][0]
        assert own["token_logprobs"] == pytest.approx(of_prompt[len(ids) // 2 - 1 :], abs=1e-4)
    generate = {"prompt": prompts, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answers = [choice["logprobs"]["tokens"] for choice in http.post(COMPLETIONS, json=generate).json()["choices"]]
    want = [hf_greedy(reference, ids, 24) for ids in prompts]
    assert answers == [choice["logprobs"]["tokens"] for choice in echoed(http, want)]


def echoed(http: httpx.Client, prompts: list[list[int]]) -> list[dict[str, Any]]:
    return http.post(COMPLETIONS, json={"prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 0}).json()[
        "choices"
    ]


# ---- adapters


async def swap(client: httpx.AsyncClient, name: str, folder: Path) -> None:
    (await client.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()
    await load(client, name, folder)


async def load(client: httpx.AsyncClient, name: str, folder: Path) -> None:
    body = {"lora_name": name, "lora_path": str(folder)}
    (await client.post("/v1/load_lora_adapter", json=body)).raise_for_status()


def test_answers_under_swaps_are_of_one_content_each(served, http, adapters):
    """Two contents take turns under one name while everybody asks: each answer is wholly of one of them."""
    prompts = [TEXT, TEXT * 2, "ab" * 30]
    body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}
    seen: dict[str, int] = {"a": 0, "b": 0, "none": 0}

    async def read(client: httpx.AsyncClient, model: str, prompt: str) -> Any:
        answer = await client.post(COMPLETIONS, json={**body, "model": model, "prompt": prompt})
        if answer.status_code in (400, 404):
            assert "hot" in answer.json()["error"]["message"]
            return None
        return whole(answer.json())

    async def ask(client: httpx.AsyncClient, truth: dict[tuple[str, str], Any], done: asyncio.Event) -> None:
        draw = random.Random(2)
        while not done.is_set():
            prompt, model = draw.choice(prompts), draw.choice(["hot", "hot", "small"])
            answer = await read(client, model, prompt)
            if model == "small":
                assert answer == truth["small", prompt]
                continue
            [content] = ["none"] if answer is None else [name for name in "ab" if answer == truth[name, prompt]]
            seen[content] += 1

    async def run() -> None:
        async with httpx.AsyncClient(base_url=served[1], timeout=60) as client:
            for name, folder in adapters.items():
                await load(client, name, folder)
            truth = {(m, p): await read(client, m, p) for m in ("small", "a", "b") for p in prompts}
            assert len({choices[0]["text"] for choices, _ in truth.values()}) == 9
            for name in adapters:
                (await client.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()
            await load(client, "hot", adapters["a"])
            done = asyncio.Event()
            asking = asyncio.gather(*(ask(client, truth, done) for _ in range(8)))
            for number in range(16):
                await swap(client, "hot", adapters["ab"[(number + 1) % 2]])
                await asyncio.sleep(0.05)
            done.set()
            await asking
            (await client.post("/v1/unload_lora_adapter", json={"lora_name": "hot"})).raise_for_status()

    asyncio.run(run())
    assert seen["a"] > 5 and seen["b"] > 5
    assert_drained(http)
    assert not http.get("/state").json()["adapters"]


def test_cached_tokens_belong_to_a_content(served, adapters):
    body = {"model": "hot", "prompt": "cd" * 40, "temperature": 0, "max_tokens": 8, "ignore_eos": True}

    async def ask(client: httpx.AsyncClient) -> tuple[str, int]:
        answer = (await client.post(COMPLETIONS, json=body)).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=served[1], timeout=60) as client:
            await load(client, "hot", adapters["a"])
            first, again = await ask(client), await ask(client)
            assert (first[1], again) == (0, (first[0], 64))  # 80 tokens: the fifth block has the last one, left out
            await swap(client, "hot", adapters["b"])
            other = await ask(client)
            assert other[1] == 0 and other[0] != first[0]
            await swap(client, "hot", adapters["a"])
            assert await ask(client) == again  # the first content's own keys are still there
            (await client.post("/v1/unload_lora_adapter", json={"lora_name": "hot"})).raise_for_status()

    asyncio.run(run())


def test_adapters_that_cannot_be_loaded_or_unloaded_are_refused(http, adapters, tmp_path):
    def post(what: str, **body: str) -> tuple[int, str]:
        answer = http.post(f"/v1/{what}_lora_adapter", json=body)
        return answer.status_code, answer.json().get("error", {}).get("message", "")

    (tmp_path / "adapter_config.json").write_text((adapters["a"] / "adapter_config.json").read_text())
    assert post("load", lora_name="hot", lora_path=str(adapters["a"])) == (200, "")
    for what, body, says in (
        ("load", {"lora_name": "hot", "lora_path": str(adapters["b"])}, "is loaded already"),
        ("load", {"lora_name": "small", "lora_path": str(adapters["b"])}, "is the base model's name"),
        ("load", {"lora_name": "x", "lora_path": "/nowhere"}, "is not a folder"),
        ("load", {"lora_name": "x", "lora_path": str(tmp_path)}, "is missing"),
        ("unload", {"lora_name": "x"}, "lora_name=x is not loaded; loaded are: hot"),
    ):
        status, message = post(what, **body)
        assert (status, says in message) == (400, True), message
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["small", "hot"]
    assert post("unload", lora_name="hot") == (200, "")
    assert post("unload", lora_name="hot")[0] == 400


@pytest.mark.parametrize("first", ["submit", "unload"])
def test_a_request_and_an_unload_that_meet(served, adapters, first):
    """The engine is held in a step while both arrive: the request has the adapter to its end, or is refused."""
    engine = served[0]
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}

    async def run() -> None:
        await engine.load_adapter("hot", str(adapters["a"]))
        alone = await engine.submit([9] * 20, SamplingParams(**params), adapter="hot").wait()
        with held(engine) as let_go:
            busy = engine.submit([7] * 5, SamplingParams(**params))
            await asyncio.to_thread(let_go.begun.wait)
            meets = engine.submit([9] * 20, SamplingParams(**params), adapter="hot") if first == "submit" else None
            unloading = asyncio.create_task(engine.unload_adapter("hot"))
            await asyncio.sleep(0)
            with pytest.raises(UserError, match="hot"):
                engine.submit([9] * 20, SamplingParams(**params), adapter="hot")
            assert not engine.adapters()
            with pytest.raises(UserError, match="hot"):
                await engine.unload_adapter("hot")
            let_go.set()
            await unloading
            # Its slot is free again only if nobody uses it: the other content goes elsewhere.
            await engine.load_adapter("hot", str(adapters["b"]))
            await busy.wait()
            if meets is not None:
                assert (await meets.wait()).choices == alone.choices
            await engine.unload_adapter("hot")

    asyncio.run_coroutine_threadsafe(run(), loop_of(engine)).result(60)


# ---- a full queue


def test_a_full_queue_refuses_and_those_who_come_again_are_served(folder):
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with running(model=str(folder), max_num_seqs=1, max_queue=2) as (engine, url, _):
        with httpx.Client(base_url=url) as http, contextlib.ExitStack() as streams:
            with held(engine) as let_go:
                for number in range(3):
                    assert streams.enter_context(http.stream("POST", COMPLETIONS, json=body)).status_code == 200
                    if number == 0:
                        assert let_go.begun.wait(30)  # it runs; the next ones wait
                full = http.post(COMPLETIONS, json={"prompt": "b"})
                assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
                assert "max_queue=2" in full.json()["error"]["message"]
                assert 1 <= int(full.headers["retry-after"]) <= 60
                let_go.set()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=10) as client:
            ask = lambda number: client.completions.create(model=folder.name, prompt="a", max_tokens=5, seed=number)  # noqa: E731
            with ThreadPoolExecutor(12) as threads:
                assert all(answer.choices for answer in threads.map(ask, range(12)))
        with httpx.Client(base_url=url) as http:
            assert figures(http)["vllm:admission_rejections_total"] >= 1
            assert_drained(http)


# ---- an engine that fails


def test_a_failure_reaches_everybody_who_waits(folder, caplog):
    """Streams, whole answers, requests that were not yet begun, and questions about the state."""
    body = {"prompt": "a", "max_tokens": 100}
    with running(model=str(folder), max_num_seqs=2) as (engine, url, server):
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            ThreadPoolExecutor(8) as threads,
            held(engine, RuntimeError("the GPU fell off the bus")) as let_go,
        ):
            calls = [
                threads.submit(http.post, COMPLETIONS, json={**body, **extra})
                for extra in ({}, {"n": 2}, {"stream": True}, {"stream": True, "n": 2}, {"prompt": ["a", "b", "c"]})
            ]
            calls.append(threads.submit(http.post, CHAT, json={"messages": [{"role": "user", "content": "a"}]}))
            assert soon(lambda: len(engine._streams) == 8)
            state = threads.submit(http.get, "/state")
            assert soon(lambda: len(engine._commands) > 0)
            let_go.set()
            statuses = [call.result().status_code for call in calls]
            assert statuses == [500, 500, 200, 200, 500, 500]
            for call in calls:
                last = [line for line in call.result().text.split("\n") if line][-1].removeprefix("data: ")
                assert json.loads(last)["error"]["code"] == "generation_failed"
                assert "fell off the bus" in last
            assert state.result().status_code == 503
        assert not engine.is_healthy()
        assert soon(lambda: server.engine_failed)
        with pytest.raises(EngineDead, match="fell off the bus"):
            engine.submit([4], SamplingParams())
    assert "the engine has failed" in caplog.text


def test_work_between_steps_that_is_given_up_or_fails_is_nobody_elses_trouble(served, http, monkeypatch):
    engine = served[0]

    async def give_up() -> None:
        with held(engine) as let_go:
            busy = engine.submit([7] * 5, SamplingParams(max_tokens=3, ignore_eos=True))
            await asyncio.to_thread(let_go.begun.wait)
            asking = asyncio.create_task(engine.state())
            await asyncio.sleep(0.01)
            asking.cancel()
            let_go.set()
            assert len((await busy.wait()).choices[0].token_ids) == 3
        assert (await engine.state())["num_blocks"] == 48

    asyncio.run_coroutine_threadsafe(give_up(), loop_of(engine)).result(60)
    monkeypatch.setattr(engine._live, "snapshot", lambda: 1 // 0)
    assert http.get("/state").status_code == 500
    monkeypatch.undo()
    assert http.get("/state").status_code == 200
    assert http.get("/health").status_code == 200


# ---- processes that end


def ask_stream(url: str, body: dict[str, Any], begun: threading.Barrier) -> list[str]:
    with httpx.Client(base_url=url, timeout=120) as http, http.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        begun.wait(60)
        return [line.removeprefix("data: ") for line in [first, *lines] if line]


def end_during_streams(process: subprocess.Popen, num_tokens: int, number: int) -> tuple[str, list[list[str]]]:
    """The lines that each of ten streams got when a signal came in the middle of them; and the address."""
    url = address(process)
    body = {"prompt": TEXT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    begun = threading.Barrier(11)
    with ThreadPoolExecutor(10) as threads:
        calls = [threads.submit(ask_stream, url, {**body, "seed": seed}, begun) for seed in range(10)]
        begun.wait(60)
        process.send_signal(number)
        return url, [call.result() for call in calls]


def assert_ended(process: subprocess.Popen, url: str, code: int) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    host, port = url.removeprefix("http://").split(":")
    with socket.create_server((host, int(port))):
        pass  # the port is free
    return output


def test_sigterm_lets_streams_end(processes):
    process = processes["drains"]
    url, streams = end_during_streams(process, 500, signal.SIGTERM)
    for lines in streams:
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in assert_ended(process, url, 0)


def test_sigterm_without_patience_ends_streams_with_the_reason(processes):
    process = processes["cuts"]
    url, streams = end_during_streams(process, 2000, signal.SIGTERM)
    for lines in streams:
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "abort"
        assert "shutting down" in json.loads(lines[-1])["error"]["message"]
    assert "Traceback" not in assert_ended(process, url, 0)


def test_a_second_interrupt_ends_streams_at_once_and_still_says_why(folder, caplog):
    body = {"prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with running(model=str(folder), drain_s=600) as (engine, url, server):
        with held(engine) as let_go, ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(httpx.post, f"{url}{COMPLETIONS}", json=body, timeout=60) for _ in range(3)]
            assert soon(lambda: len(engine._streams) == 3)
            for _ in range(2):
                loop_of(engine).call_soon_threadsafe(server.handle_exit, signal.SIGINT, None)
            assert soon(lambda: server.force_exit)
            let_go.set()
            for call in calls:
                last = [line for line in call.result().text.split("\n") if line][-1]
                assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert "Traceback" not in caplog.text


def test_a_failed_engine_ends_the_process_with_1(processes):
    process = processes["fails"]
    url = address(process)
    answer = httpx.post(f"{url}{COMPLETIONS}", json={"prompt": TEXT, "max_tokens": 500, "ignore_eos": True}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
    assert "RuntimeError: the GPU fell off the bus" in assert_ended(process, url, 1)


def test_a_short_soak(folder):
    """scripts/soak_serve.py: overload, clients that leave, swaps; it ends with 1 if anything is lost or leaked."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "soak_serve.py"), "--requests", "150", "--model", str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    outcomes = {row["work"]: row["ours"] for row in report["rows"] if row["unit"] == "requests"}
    assert sum(outcomes.values()) == 150 and outcomes["lost"] == 0
    assert outcomes["answered"] > 50  # most of those who stay
    assert outcomes["left"] > 10  # of the third who mean to
