"""One cell of the study, measured through quantize.py's own path: settings, folder, and what the folder answers."""

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from study.cell import Cell
from study.ptq.cells import CALIBRATION_FILE, PYTHONS, TEST_FILE
from study.text import text_windows
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainer import LLM, SamplingParams
from trainer.config.model import DType, ModelConfig, ModelSource, named_model
from trainer.config.ptq import PtqConfig
from trainer.data.pydocs import load_questions
from trainer.evaluate.fidelity import Original, PromptMatch
from trainer.formats.gguf_write import write_gguf
from trainer.model import load_model
from trainer.ptq.calibration import load_calibration
from trainer.ptq.run import bits_per_weight, quantize
from trainer.settings import read_settings
from trainer.sources.resolve import resolve_model


def measure(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """The figures of a cell; `folder` is emptied first and removed at the end.

    data  holds WikiText-2's validation and test text
    """
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    kinds = {"16bit": _original, "ptq": _quantized, "peer": _by_peer, "llama": _in_llama}
    figures = kinds[cell.kind](cell, data, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return {**figures, "cell_s": time.monotonic() - began, "threads": torch.get_num_threads()}


# ---- kinds of cells


def _original(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """The 16-bit model against itself: what 0 looks like."""
    model, tokenizer = _load(cell)
    return _compared(model, tokenizer, cell, data, folder.parent)


def _quantized(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """What quantize.py wrote, opened as the server opens it."""
    settings = [*_calibrated(cell, data), f"output_dir={folder}", *cell.overrides]
    given = {setting.partition("=")[0]: setting for setting in settings}  # of two for one key the cell's own counts
    result = quantize(read_settings(PtqConfig, list(given.values())))
    model, tokenizer = _open(cell, result.exports["quantized"])
    report = result.report
    errors = [layer["output_error"] for layer in report["layers"] if layer["output_error"] is not None]
    return {
        **{name: report[name] for name in ("seconds", "peak_memory_bytes", "bits_per_weight", "packed_sha256")},
        "output_error": sum(errors) / len(errors) if errors else None,
        "notes": [f"{layer['name']}: {layer['note']}" for layer in report["layers"] if layer["note"]],
        **_compared(model, tokenizer, cell, data, folder.parent),
    }


def _by_peer(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """What a peer's quantizer made of the same model and rows in its own Python, opened by lowbit."""
    peer, method, *settings = cell.overrides
    folder.mkdir(parents=True)
    source, config = resolve_model(_source(cell)), read_settings(PtqConfig, _calibrated(cell, data))
    job = {
        "peer": peer,
        "method": method,
        "settings": {name: yaml.safe_load(value) for name, _, value in (s.partition("=") for s in settings)},
        "model": source,
        "rows": load_calibration(config, AutoTokenizer.from_pretrained(source)).rows,
    }
    (folder / "job.json").write_text(json.dumps(job))
    _run_peer(os.environ[PYTHONS[peer]], folder)
    model, tokenizer = _open(cell, folder / "export")
    return {
        **json.loads((folder / "figures.json").read_text()),
        "bits_per_weight": bits_per_weight(model),
        **_compared(model, tokenizer, cell, data, folder.parent),
    }


def _in_llama(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """A GGUF file, read by llama.cpp, whose products round their inputs to 8 bits for most types."""
    kind, maker = cell.overrides
    folder.mkdir(parents=True)
    model, tokenizer = _load(cell)
    path = folder / f"{kind}.gguf"
    began = time.monotonic()
    if maker == "llama.cpp":
        plain = folder / "F16.gguf"
        write_gguf(model, tokenizer, plain, gguf_type="F16")
        began = time.monotonic()
        _quantize_in_llama(plain, path, kind)
    elif maker == "imatrix":
        settings = [*_calibrated(cell, data), f"output_dir={folder}", "method=gguf", f"gguf_type={kind}"]
        path = quantize(read_settings(PtqConfig, settings)).exports["gguf"]
    else:
        write_gguf(model, tokenizer, path, gguf_type=kind)
    seconds, size = time.monotonic() - began, path.stat().st_size
    figures = _llama_figures(path, text_windows(cell, data / TEST_FILE, tokenizer))
    return {"seconds": seconds, "file_bytes": size, **figures}


# ---- parts


def _dtype(cell: Cell) -> str:
    return "float32" if cell.sizes["model"] == "tiny" else "bfloat16"


def _source(cell: Cell) -> ModelConfig:
    return named_model(cell.sizes["model"], DType(_dtype(cell)))


def _load(cell: Cell) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(_source(cell))


def _open(cell: Cell, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(ModelConfig(ModelSource.folder, str(folder), dtype=DType(_dtype(cell))))


def _calibrated(cell: Cell, data: Path) -> list[str]:
    """Settings of quantize.py: the model, and the rows that all methods and peers are given."""
    return [
        *(f"model={cell.sizes['model']}", f"dtype={_dtype(cell)}", f"data={data / CALIBRATION_FILE}"),
        *(f"rows={cell.sizes['rows']}", f"max_seq_len={cell.sizes['row_len']}", "eval_rows=4", f"seed={cell.seed}"),
    ]


def _compared(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cell: Cell, data: Path, kept: Path
) -> dict[str, Any]:
    """Fidelity on the windows, and how many answers are the 16-bit model's.

    kept  folder where what the 16-bit model says is kept for the next cell
    """
    original, answers = _reference(cell, text_windows(cell, data / TEST_FILE, tokenizer), kept)
    figures = original.compare(model).to_dict()
    match = asdict(PromptMatch.of(answers, _answers(model, tokenizer, cell)))
    return {**figures, "exact": match["exact"], "mean_common": match["mean_common"]}


def _reference(cell: Cell, windows: Tensor, kept: Path) -> tuple[Original, list[list[int]]]:
    """What the 16-bit model says, computed by the first cell that asks."""
    sizes = "_".join(str(cell.sizes[name]) for name in ("model", "windows", "window_len", "prompts", "answer_len"))
    path = kept / f"original_{sizes}.pt"
    model, tokenizer = _load(cell)
    if not path.is_file():
        kept.mkdir(parents=True, exist_ok=True)
        states = Original.of(model, list(windows)).states
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save((states, _answers(model, tokenizer, cell)), partial)
        os.replace(partial, path)
    states, answers = torch.load(path)
    head = model.get_output_embeddings().weight.detach().clone()
    return Original(states, head, list(windows)), answers


def _answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cell: Cell) -> list[list[int]]:
    """Greedy answers to held-out questions, through the server."""
    count = cell.sizes["prompts"]
    prompts = [question.prompt for question in load_questions(eval_rows=count)[1][:count]]
    llm = LLM(model, tokenizer, max_model_len=512, kv_cache_memory_bytes=1 << 28)
    sampling = SamplingParams(temperature=0, max_tokens=cell.sizes["answer_len"])
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling)
    llm.close()
    return [list(output.choices[0].token_ids) for output in outputs]


def _run_peer(python: str, folder: Path) -> None:
    """peers.py in another Python, which has versions of its own and none of this one's paths.

    raises  RuntimeError with the last line that it said
    """
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    command = [Path(python).absolute(), Path(__file__).with_name("peers.py"), folder.absolute()]
    # In the folder of the cell, since GPTQModel writes logs/ where it runs.
    done = subprocess.run(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True, errors="replace")
    print(done.stderr, file=sys.stderr)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no word"]
        raise RuntimeError(f"{python} ended with {done.returncode}: {said[-1]}")


# ---- llama.cpp


def _quantize_in_llama(source: Path, path: Path, kind: str) -> None:
    """llama.cpp's own quantizer, without an importance matrix."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.nthread = torch.get_num_threads()
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(settings))
    if failed:
        raise RuntimeError(f"llama.cpp could not quantize {source} to {kind}: {failed}")


def _llama_figures(path: Path, windows: Tensor) -> dict[str, float]:
    """Perplexity of llama.cpp over the windows."""
    from llama_cpp import Llama

    llama = Llama(
        str(path), n_ctx=windows.shape[1], n_batch=windows.shape[1], logits_all=True, verbose=False,
        n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads(),
    )  # fmt: skip
    loss = 0.0
    for window in windows.tolist():
        llama.reset()
        llama.eval(window)
        logits = torch.from_numpy(llama.scores[: len(window) - 1])
        for part, targets in zip(logits.split(256), torch.tensor(window[1:]).split(256), strict=True):
            loss -= part.log_softmax(-1).gather(1, targets[:, None]).double().sum().item()
    count = windows.shape[0] * (windows.shape[1] - 1)
    return {"perplexity": math.exp(loss / count), "llama_cpp": version("llama-cpp-python")}
