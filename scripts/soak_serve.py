"""The included server under more load than it can take, by clients that leave: nothing lost, nothing leaked.

    python scripts/soak_serve.py [--requests 2000] [--model tiny] [--overload 1.5] [--out DIR]

A server of its own, with few KV blocks, a bounded queue and the block accounts checked after each step. A first tenth
of the requests measures what it can take; the rest arrive at `overload` times that rate, at random moments: whole and
streamed, completions, chats and scores, n up to 3, two adapters that take turns under one name, and a third of the
clients leave early. Every request must have an outcome: answered and complete, refused (429), without its adapter
(404), or left. Afterwards every block is free, every gauge 0, and memory where it was. Last line: JSON. Exits with 1 if
something was lost or leaked.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save_file

NUM_BLOCKS, NUM_SWAP_BLOCKS, BLOCK_SIZE = 64, 16, 16
"""1,024 tokens: 16 sequences of up to 290 do not all fit, so some are preempted, and not all of those swapped."""
SERVER = ("port=0", "check=true", "max_num_seqs=16", "max_queue=16", "max_num_batched_tokens=128", "max_loras=4")
MEMORY_GROWTH = 1.03
"""The last third's median memory over the middle third's, at most. Allocators settle within some percent."""
WORDS = "the of and to in is it was that for on are with as his they be at one have this from or had by hot".split()


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    tokens: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2_135m or a Hugging Face folder")
    parser.add_argument("--overload", type=float, default=1.5, help="arrivals over what the server can take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for soak_serve.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, faults = asyncio.run(_soak(args, Path(folder)))
    _print_table(rows)
    for fault in faults:
        print(f"fault: {fault}")
    report = {"name": "soak_serve", "machine": _machine(), "versions": _versions(), "faults": faults, "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "soak_serve.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    sys.exit(bool(faults))


async def _soak(args: argparse.Namespace, folder: Path) -> tuple[list[dict], list[str]]:
    sizes = json.loads((_model_folder(args.model) / "config.json").read_text())
    adapters = [_write_adapter(folder / name, sizes, seed) for seed, name in enumerate("ab")]
    process, url = _start(args.model, sizes)
    tally, draw = Tally(), random.Random(args.seed)
    try:
        limits, timeout = httpx.Limits(max_connections=None, max_keepalive_connections=64), httpx.Timeout(300)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
            await _load(client, adapters[0])
            calm = await _at_most(client, tally, draw, num=max(20, args.requests // 10), places=32)
            watching = [asyncio.create_task(_watch(process.pid, tally)), asyncio.create_task(_swap(client, adapters))]
            rate = args.overload * calm
            elapsed = await _arrivals(client, tally, draw, num=args.requests - sum(tally.outcomes.values()), rate=rate)
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            state, figures = await _drained(client)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    faults = _faults(args.requests, tally, state, figures, process.returncode, output)
    return _rows(args.requests, tally, state, figures, calm=calm, rate=rate, elapsed=elapsed), faults


# ---- the server


def _start(model: str, sizes: dict) -> tuple[subprocess.Popen, str]:
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    of_block = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head_dim * 2 * BLOCK_SIZE
    command = [sys.executable, "-m", "trainer.serve", f"model={model}", "served_model_name=soak", "dtype=bfloat16"]
    command += [*SERVER, f"kv_block_size={BLOCK_SIZE}", f"kv_cache_memory_bytes={NUM_BLOCKS * of_block}"]
    command.append(f"swap_space={NUM_SWAP_BLOCKS * of_block / 2**30:.9f}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://\S+:\d+", line):
            return process, found[0]
    raise SystemExit(f"the server did not start: {''.join(lines)}")


def _model_folder(model: str) -> Path:
    if model == "tiny":
        from trainer.sources.tiny import tiny_model

        return tiny_model()
    if model == "smollm2_135m":
        from trainer.sources.bundled import bundled_model

        return bundled_model()
    return Path(model)


def _write_adapter(folder: Path, sizes: dict, seed: int) -> Path:
    """A LoRA adapter of rank 4 on each layer's queries, with random factors."""
    folder.mkdir()
    random_, hidden = np.random.default_rng(seed), sizes["hidden_size"]
    out = sizes["num_attention_heads"] * (sizes.get("head_dim") or hidden // sizes["num_attention_heads"])
    factors = {}
    for layer in range(sizes["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        factors[f"{name}.lora_A.weight"] = random_.normal(0, 0.1, (4, hidden)).astype(np.float32)
        factors[f"{name}.lora_B.weight"] = random_.normal(0, 0.1, (out, 4)).astype(np.float32)
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def _load(client: httpx.AsyncClient, folder: Path) -> None:
    body = {"lora_name": "hot", "lora_path": str(folder)}
    (await client.post("/v1/load_lora_adapter", json=body)).raise_for_status()


async def _swap(client: httpx.AsyncClient, adapters: list[Path]) -> None:
    """Two contents take turns under one name."""
    number = 0
    while True:
        await asyncio.sleep(0.5)
        number += 1
        (await client.post("/v1/unload_lora_adapter", json={"lora_name": "hot"})).raise_for_status()
        await _load(client, adapters[number % 2])


async def _watch(pid: int, tally: Tally) -> None:
    """Resident memory of the server, in bytes, twenty times a second."""
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tally.memory.append((time.perf_counter(), pages * os.sysconf("SC_PAGE_SIZE")))
        await asyncio.sleep(0.05)


# ---- the clients


async def _at_most(client: httpx.AsyncClient, tally: Tally, draw: random.Random, *, num: int, places: int) -> float:
    """`num` requests, `places` of them at a time; returns the requests a second."""
    free, began = asyncio.Semaphore(places), time.perf_counter()

    async def one() -> None:
        async with free:
            await _request(client, tally, draw)

    await asyncio.gather(*(one() for _ in range(num)))
    return num / (time.perf_counter() - began)


async def _arrivals(client: httpx.AsyncClient, tally: Tally, draw: random.Random, *, num: int, rate: float) -> float:
    """`num` requests that wait for nobody: Poisson arrivals, `rate` a second; returns the seconds until all ended."""
    began = due = time.perf_counter()
    tasks = []
    for _ in range(num):
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_request(client, tally, draw)))
    await asyncio.gather(*tasks)
    return time.perf_counter() - began


async def _request(client: httpx.AsyncClient, tally: Tally, draw: random.Random) -> None:
    path, body = _draw_request(draw)
    leaves_after = draw.expovariate(10) if draw.random() < 1 / 3 else None
    try:
        ask = _streamed if body.get("stream") else _whole
        async with asyncio.timeout(leaves_after):
            outcome = await ask(client, path, body, tally)
    except TimeoutError:
        outcome = "left"
    except (httpx.HTTPError, KeyError, ValueError) as error:
        outcome = f"lost: {type(error).__name__} {error} {path} {str(body)[:200]}"
    tally.outcomes["lost" if outcome.startswith("lost") else outcome] += 1
    if outcome.startswith("lost"):
        tally.lost.append(outcome)


def _draw_request(draw: random.Random) -> tuple[str, dict]:
    text = " ".join(draw.choices(WORDS, k=draw.choice([2, 8, 20, 40])))
    if draw.random() < 0.3:
        text = "Answer in one word, or two if one will not do, and be brief. " + text[:80]  # a prefix that is shared
    body = {"max_tokens": draw.randint(1, 64), "ignore_eos": True, "seed": draw.randrange(1000)}
    body |= {"n": draw.choice([1, 1, 1, 2, 3]), "model": draw.choice(["soak", "soak", "hot"])}
    match draw.randrange(10):
        case 0:
            return "/v1/loglikelihood", {"context": text, "continuations": [" hot", " cold"], "model": body["model"]}
        case 1:
            return "/v1/completions", {**body, "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "n": 1}
        case 2:
            return "/v1/completions", {**body, "prompt": text, "best_of": body["n"] + 1}
        case 3 | 4:
            body["messages"], path = [{"role": "user", "content": text}], "/v1/chat/completions"
        case _:
            body["prompt"], path = text, "/v1/completions"
    if draw.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return path, body


def _refusal(response: httpx.Response) -> str | None:
    """The outcome of an answer that is none, None for one that is."""
    match response.status_code:
        case 200:
            return None
        case 429:
            return "refused" if int(response.headers["retry-after"]) >= 1 else "lost: 429 without a time"
        case 400 | 404 if "hot" in response.text:
            return "without its adapter"
    return f"lost: {response.status_code} {response.text[:300]}"


async def _whole(client: httpx.AsyncClient, path: str, body: dict, tally: Tally) -> str:
    began = time.perf_counter()
    response = await client.post(path, json=body)
    if refusal := _refusal(response):
        return refusal
    answer = response.json()
    if path == "/v1/loglikelihood":
        return "answered" if len(answer["continuations"]) == 2 else "lost: a score is missing"
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    return _complete(body, reasons, answer["usage"]["completion_tokens"], tally, time.perf_counter() - began)


async def _streamed(client: httpx.AsyncClient, path: str, body: dict, tally: Tally) -> str:
    began, reasons, used, last = time.perf_counter(), {}, 0, ""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return _refusal(response)
        async for line in response.aiter_lines():
            if not line:
                continue
            if not last:
                tally.ttft_s.append(time.perf_counter() - began)
            if (last := line.removeprefix("data: ")) == "[DONE]":
                break
            event = json.loads(last)
            if "error" in event:
                return f"lost: {event['error']['message']}"
            reasons |= {c["index"]: c["finish_reason"] for c in event["choices"] if c["finish_reason"]}
            used = (event.get("usage") or {}).get("completion_tokens", used)
    if last != "[DONE]":
        return "lost: the stream broke off"
    return _complete(body, list(reasons.values()), used, tally, time.perf_counter() - began)


def _complete(body: dict, reasons: list[str], num_tokens: int, tally: Tally, latency_s: float) -> str:
    if reasons != ["length"] * body["n"] or num_tokens != body["n"] * body["max_tokens"]:
        return f"lost: answered with {reasons} and {num_tokens} tokens: {body}"
    tally.tokens += num_tokens
    tally.latency_s.append(latency_s)
    return "answered"


# ---- afterwards


async def _drained(client: httpx.AsyncClient) -> tuple[dict, dict[str, float]]:
    """The state and the figures once nothing runs, or after ten seconds."""
    for _ in range(100):
        state = (await client.get("/state")).json()
        if not state["running"] and not state["num_waiting"]:
            break
        await asyncio.sleep(0.1)
    figures: Counter[str] = Counter()
    for line in (await client.get("/metrics")).text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            figures[name.partition("{")[0]] += float(value)
    return state, dict(figures)


def _faults(num: int, tally: Tally, state: dict, figures: dict[str, float], returncode: int, output: str) -> list[str]:
    faults = tally.lost[:20]
    if (known := sum(tally.outcomes.values())) != num:
        faults.append(f"{num} requests, {known} outcomes")
    if state["num_free_blocks"] != state["num_blocks"]:
        faults.append(f"{state['num_blocks'] - state['num_free_blocks']} of {state['num_blocks']} blocks are not free")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        if figures[name]:
            faults.append(f"{name} is {figures[name]} after the drain")
    if figures["lowbit:requests_total"] != figures["vllm:request_success_total"]:
        faults.append(f"{figures['lowbit:requests_total']} accepted, {figures['vllm:request_success_total']} ended")
    if _growth(tally.memory) > MEMORY_GROWTH:
        faults.append(f"memory grew by {100 * _growth(tally.memory) - 100:.1f} % from the middle to the last third")
    if returncode != 0 or "Traceback" in output:
        faults.append(f"the server ended with {returncode}: {output[-2000:]}")
    return faults


def _thirds(memory: list[tuple[float, int]]) -> list[float]:
    """Median bytes in each third of the time."""
    third = max(1, len(memory) // 3)
    return [statistics.median(size for _, size in memory[part * third :][:third]) for part in range(3)]


def _growth(memory: list[tuple[float, int]]) -> float:
    _, middle, last = _thirds(memory)
    return last / middle


def _rows(
    num: int, tally: Tally, state: dict, figures: dict[str, float], *, calm: float, rate: float, elapsed: float
) -> list[dict]:
    outcomes = ("answered", "left", "refused", "without its adapter", "lost")
    rows = [_row(name, tally.outcomes[name], num, "all requests", "requests") for name in outcomes]
    rows.append(_row("arrivals", rate, calm, "what the server takes", "requests/s"))
    rows.append(_row("free blocks", state["num_free_blocks"], state["num_blocks"], "all blocks", "blocks"))
    rows.append(_row("ended", figures["vllm:request_success_total"], figures["lowbit:requests_total"], "accepted", ""))
    first, middle, last = _thirds(tally.memory)
    rows.append(_row("memory, last third", last / 1e6, middle / 1e6, "middle third", "MB"))
    rows.append(_row("memory, last third", last / 1e6, first / 1e6, "first third", "MB"))
    for name, values in (("time to first token", tally.ttft_s), ("latency", tally.latency_s)):
        cuts = statistics.quantiles(values, n=100)
        rows.append(_row(f"{name}, p99", cuts[98], cuts[49], "p50", "s"))
    rows.append(_row("answered tokens", tally.tokens / elapsed, None, "", "tokens/s"))
    counts = (
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "lowbit:cow_copies_total",
        "lowbit:swapped_blocks_total",
    )
    return rows + [_row(name, figures[name], None, "", "") for name in counts]


def _row(work: str, ours: float, peer: float | None, peer_name: str, unit: str) -> dict:
    figures = {"work": work, "ours": ours, "peer": peer, "peer_name": peer_name, "unit": unit}
    return {**figures, "ratio": ours / peer if peer else None, "of_limit": None}


def _print_table(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    table = Table("work", "ours", "peer", "unit", "ratio", "peer is")
    for row in rows:
        figures = (shown(row["ours"]), shown(row["peer"]), row["unit"], shown(row["ratio"]))
        table.add_row(row["work"], *figures, row["peer_name"])
    Console(width=120).print(table)


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def _versions() -> dict[str, str]:
    found = {}
    for name in ("lowbit", "torch", "transformers", "fastapi", "uvicorn", "httpx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
