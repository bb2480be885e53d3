"""One cell of the study, measured through the very path of train.py: train, export, open what was exported.

A trained cell's figures are those of the folder that the run wrote, opened as the server opens it, against the 16-bit
model: what ships, and not what training saw.
"""

import json
import math
import os
import shutil
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from study.cell import Cell
from study.qat.cells import TEST_FILE, TRAIN_FILE
from study.text import text_windows
from torch import Tensor, nn

from trainer import finetune, load_config
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.schema import Config
from trainer.evaluate.fidelity import Original
from trainer.evaluate.merge_gain import MergeGain, measure_merge_gain
from trainer.export.adapter import read_adapter
from trainer.loop import train
from trainer.metrics import peak_memory_bytes
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss
from trainer.prepare import prepare_run
from trainer.qat.prepare import prepare_qat
from trainer.run import Result


def measure(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """The figures of a cell; `folder` is emptied first and removed at the end.

    data  holds WikiText-2's validation and test text
    """
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    kinds = {"rounded": _rounded, "trained": _trained, "blocks": _trained, "cost": _cost}
    figures = kinds[cell.kind](cell, data, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return {**figures, "cell_s": time.monotonic() - began, "threads": torch.get_num_threads()}


# ---- kinds of cells


def _rounded(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """A format without training, by the layers that training would start from."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(_model(cell))
    if cell.overrides:
        prepare_qat(model, load_config("conf=qat", *cell.overrides).qat)
    return _compared(model, cell, text_windows(cell, data / TEST_FILE, tokenizer), folder.parent)


def _trained(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """A run, from the command's overrides to the folder that it wrote."""
    rows = folder.with_name(f"{folder.name}_rows")
    config = _config(cell, _write_rows(cell, data, rows), folder, steps=cell.sizes["steps"])
    began = time.monotonic()
    result = finetune(config)
    run_s = time.monotonic() - began
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = {
        "run_s": run_s,
        "losses": [line["loss"] for line in lines],
        "tokens": result.metrics["tokens"],
        "tokens_per_s": result.metrics["tokens_per_s"],
        "peak_memory_bytes": peak_memory_bytes(),
        "own_loss": [result.metrics["eval_loss_base"], result.metrics["eval_loss"]],
    }
    if "qat" in result.metrics:
        figures |= {name: result.metrics["qat"][name] for name in ("bits_per_weight", "packed_sha256", "agreement")}
    shutil.rmtree(rows)
    if "adapter" in result.exports:
        gain = figures["gain"] = asdict(_gain(cell, config, result, data))
    exported = result.exports.get("quantized") or result.exports.get("merged")
    if exported is None:  # the usual way: what it would ship is no file
        return {**figures, "perplexity": math.exp(gain["shipped"])}
    model, tokenizer = load_model(ModelConfig(ModelSource.folder, str(exported), dtype=DType(_dtype(cell))))
    return {**figures, **_compared(model, cell, text_windows(cell, data / TEST_FILE, tokenizer), folder.parent)}


def _cost(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """Seconds of a step and peak memory; the same rows for every method."""
    rows = _write_rows(cell, data, folder / "rows")
    run = prepare_run(_config(cell, rows, folder, steps=cell.sizes["cost_steps"]), folder, Accelerator())
    setup_peak = peak_memory_bytes()
    train(run.training, run.state)
    for sink in run.training.sinks:
        sink.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = [line["tokens"] - before["tokens"] for before, line in zip(lines[1:], lines[2:], strict=False)]
    seconds = [count / line["tokens_per_s"] for count, line in zip(tokens, lines[2:], strict=True)]
    return {
        "setup_peak_bytes": setup_peak,
        "step_s": seconds,
        "tokens_per_s": statistics.median(count / second for count, second in zip(tokens, seconds, strict=True)),
        "peak_memory_bytes": peak_memory_bytes(),
    }


# ---- parts


def _dtype(cell: Cell) -> str:
    """The tiny model's own is float32 either way; the studied one is bfloat16 in training, and as it is shipped."""
    return "float32" if cell.sizes["model"] == "tiny" else "bfloat16"


def _model(cell: Cell) -> ModelConfig:
    source = {"tiny": ModelSource.tiny, "smollm2_135m": ModelSource.bundled}[cell.sizes["model"]]
    return ModelConfig(source, dtype=DType(_dtype(cell)))


def _config(cell: Cell, rows: Path, folder: Path, *, steps: int) -> Config:
    sizes = cell.sizes
    blocks = [f"blockwise.{name}={sizes[f'block_{name}']}" for name in ("rows", "val_rows") if cell.kind == "blocks"]
    exports = {"conf=full": "[merged]", "conf=qlora": "[adapter]"}.get(cell.overrides[0])
    return load_config(
        *cell.overrides,
        *(f"model={sizes['model']}", f"model.dtype={_dtype(cell)}", f"seed={cell.seed}", f"output_dir={folder}"),
        *("data=jsonl", "data.columns.text=text", f"data.max_seq_len={sizes['row_len']}"),
        *(f"data.path={rows / 'train.jsonl'}", f"data.eval_path={rows / 'eval.jsonl'}"),
        *(f"data.eval_rows={sizes['eval_rows']}", f"train.batch_size={sizes['batch_size']}"),
        *(f"train.max_steps={steps}", "train.save_every=0", "train.keep_checkpoints=1", "evaluate.samples=0"),
        *blocks,
        *([f"export.formats={exports}"] if exports else []),
    )


def _write_rows(cell: Cell, data: Path, folder: Path) -> Path:
    """The training text in pieces of the row's length, in files that train.py reads: the last ones are held out.

    The same for every seed, which chooses among them, so that all cells share what the teacher says.
    """
    length, held_out = cell.sizes["row_len"] - 1, cell.sizes["eval_rows"]  # a text ends with a token of its own
    tokenizer = load_model(_model(cell))[1]
    ids = tokenizer((data / TRAIN_FILE).read_text(encoding="utf-8"), verbose=False)["input_ids"]
    texts = [tokenizer.decode(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", texts[:-held_out]), ("eval", texts[-held_out:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def _compared(model: nn.Module, cell: Cell, windows: Tensor, kept: Path) -> dict[str, float]:
    """Perplexity, KL(16-bit || model) in nats a token and the share of likeliest tokens that are the same.

    kept  folder where what the 16-bit model says is kept for the next cell
    """
    figures = _original(cell, windows, kept).compare(model)
    return {name: getattr(figures, name) for name in ("perplexity", "kl", "same_token")}


def _original(cell: Cell, windows: Tensor, kept: Path) -> Original:
    """What the 16-bit model's head multiplies, of all windows: computed by the first cell that asks."""
    path = kept / f"reference_{'_'.join(map(str, (cell.sizes['model'], *windows.shape)))}.pt"
    model = load_model(_model(cell))[0].eval()
    if not path.is_file():
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(torch.stack(Original.of(model, list(windows)).states), partial)
        os.replace(partial, path)
    return Original(list(torch.load(path)), model.get_output_embeddings().weight.detach(), list(windows))


def _gain(cell: Cell, config: Config, result: Result, data: Path) -> MergeGain:
    """How much of what the adapter gained on the test text is left in the codes that ship."""
    model, tokenizer = load_model(_model(cell))
    weights = {}
    if not config.qat.enabled:
        weights = {name: layer.weight.clone() for name, layer in model.named_modules() if type(layer) is nn.Linear}
        prepare_model(model, config.quant)
    model = read_adapter(model, result.exports["adapter"], tokenizer)
    windows = text_windows(cell, data / TEST_FILE, tokenizer)

    @torch.inference_mode()
    def loss() -> float:
        objective = NextTokenLoss(model.eval())
        total = sum(objective(window[None], window[None]).item() for window in windows)
        return total / (windows.shape[0] * (windows.shape[1] - 1))

    return measure_merge_gain(model, loss, weights)
