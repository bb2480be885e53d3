"""One cell of the study, measured through the very path of train.py: prepare, train, evaluate, serve.

The surprising thing: a run's `eval_loss_base` has the adapter switched off. For LoftQ and PiSSA, whose adapters start
as a part of the weight, that is not the function that training starts from; here the held-out loss before the first
step has the adapter on.
"""

import json
import math
import re
import shutil
import statistics
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from study.adapters.cells import ALPHA_ERRORS_ARE_READ_AT, START_ALPHAS, TEST_FILE, TEXT_FILE, TRAIN_FILE
from study.cell import Cell
from torch import nn

from trainer import LLM, SamplingParams, load_config
from trainer.config.errors import UserError
from trainer.config.schema import Config
from trainer.data.opening import open_sources, read_examples
from trainer.evaluate.perplexity import held_out_loss
from trainer.export.merged import write_merged
from trainer.linear import QuantLinear
from trainer.loop import train
from trainer.lora import LoraLinear, frozen_weight
from trainer.metrics import peak_memory_bytes
from trainer.model import load_model
from trainer.prepare import PreparedRun, prepare_run

_NUMBER = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?")


def measure(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """The figures of a cell; `folder` is emptied first and removed at the end.

    data  holds GSM8K's two files and WikiText-2's test text
    """
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    figures = {"trained": _trained, "start": _start, "cost": _cost, "long": _long}[cell.kind](cell, data, folder)
    shutil.rmtree(folder)
    return {**figures, "cell_s": time.monotonic() - began, "threads": torch.get_num_threads()}


# ---- kinds of cells


def _trained(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """Start, training, end: losses in nats a target token, times in seconds."""
    sizes = cell.sizes
    run, setup_s = _prepared(cell, data, folder, steps=sizes["steps"])
    figures: dict[str, Any] = {"setup_s": setup_s, "trained_parameters": _trained_parameters(run)}
    figures["start_loss"] = _held_out_loss(run, run.data.held_out)
    if cell.seed == 0:
        figures["start_perplexity"] = _text_perplexity(run, cell, data)
        figures["layer_errors"] = layer_errors(run)
    train(run.training, run.state)
    figures["peak_memory_bytes"] = peak_memory_bytes()
    lines = _metrics(folder)
    figures |= {"losses": [line["loss"] for line in lines], "grad_norms": [line["grad_norm"] for line in lines]}
    figures |= {"tokens": run.state.tokens, "tokens_per_s": run.state.tokens / run.state.train_s}
    figures["loss"] = _held_out_loss(run, run.data.held_out)
    figures["perplexity"] = _text_perplexity(run, cell, data)
    _close(run)
    return {**figures, **_answers(run, cell, data, folder / "merged")}


def _start(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """Perplexity before training and each layer's error, for every alpha where there is an update.

    `unscaled` is the perplexity of the convention of PEFT and of LoftQ's reference, which write factors of the update
    as if s were 1: the layer then adds s times the update. From the same codes, so with one iteration only.
    """
    plain = not any("loftq.iterations" in item for item in cell.overrides)
    points = []
    for alpha in (ALPHA_ERRORS_ARE_READ_AT,) if plain else START_ALPHAS:
        run, setup_s = _prepared(cell, data, folder / str(alpha), f"lora.alpha={alpha}", steps=1)
        point = {"alpha": alpha, "setup_s": setup_s, "perplexity": _text_perplexity(run, cell, data)}
        point["layer_errors"] = layer_errors(run)
        if "loftq.iterations=1" in cell.overrides:
            _as_if_unscaled(run)
            point["unscaled_perplexity"] = _text_perplexity(run, cell, data)
            point["unscaled_mean_error"] = statistics.mean(layer_errors(run).values())
        _close(run)
        points.append(point)
    return {"points": points}


def _cost(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """Seconds of a step and peak memory; the same rows for every method."""
    run, setup_s = _prepared(cell, data, folder, steps=cell.sizes["cost_steps"])
    setup_peak = peak_memory_bytes()
    train(run.training, run.state)
    _close(run)
    lines = _metrics(folder)
    tokens = [line["tokens"] - before["tokens"] for before, line in zip(lines, lines[1:], strict=False)]
    seconds = [count / line["tokens_per_s"] for count, line in zip(tokens, lines[1:], strict=True)]
    return {
        "setup_s": setup_s,
        "setup_peak_bytes": setup_peak,
        "step_s": seconds,
        "tokens_per_s": sum(tokens) / sum(seconds),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _long(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """Held-out losses on the way, as pairs of step and loss."""
    steps = cell.sizes["long_steps"]
    run, setup_s = _prepared(cell, data, folder, f"train.eval_every={steps // 8}", steps=steps)
    curve = [(0, _held_out_loss(run, run.data.held_out))]
    train(run.training, run.state)
    lines = _metrics(folder)
    curve += [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    curve.append((steps, _held_out_loss(run, run.data.held_out)))
    _close(run)
    return {"setup_s": setup_s, "losses": [line["loss"] for line in lines], "curve": curve}


# ---- parts


def _config(cell: Cell, data: Path, folder: Path, *overrides: str, steps: int) -> Config:
    sizes = cell.sizes
    return load_config(
        *cell.overrides,
        *(f"model={sizes['model']}", "data=jsonl", f"data.path={data / TRAIN_FILE}", f"seed={cell.seed}"),
        *(f"data.eval_path={data / TEST_FILE}", "data.columns.prompt=question", "data.columns.completion=answer"),
        *(f"data.max_rows={sizes['train_rows']}", f"data.max_seq_len={sizes['max_seq_len']}"),
        *(f"data.eval_rows={sizes.get('eval_rows', 1)}", f"train.batch_size={sizes.get('batch_size', 1)}"),
        *(f"train.max_steps={steps}", "train.save_every=0", "train.keep_checkpoints=1", "evaluate.samples=0"),
        *("export.formats=[]", f"output_dir={folder}"),
        *overrides,
    )


def _prepared(cell: Cell, data: Path, folder: Path, *overrides: str, steps: int) -> tuple[PreparedRun, float]:
    """The run before its first step, and the seconds of its preparation: loading, packing, starting points."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    run = prepare_run(_config(cell, data, folder, *overrides, steps=steps), folder, Accelerator())
    return run, time.monotonic() - began


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, one a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _close(run: PreparedRun) -> None:
    for sink in run.training.sinks:
        sink.close()


def _trained_parameters(run: PreparedRun) -> int:
    return sum(p.numel() for p in run.training.objective.parameters() if p.requires_grad)


def _text_perplexity(run: PreparedRun, cell: Cell, data: Path) -> float:
    """exp of the mean loss over windows from the start of the text, each read without what stands before it."""
    count, length = cell.sizes["windows"], cell.sizes["window_len"]
    text = (data / TEXT_FILE).read_text(encoding="utf-8")[: 16 * count * length]  # no token of text has 16 characters
    ids = run.tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < count * length:
        raise UserError(f"{data / TEXT_FILE} has {len(ids)} tokens; {count} windows need {count * length}")
    rows = [ids[start : start + length] for start in range(0, count * length, length)]
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return math.exp(_held_out_loss(run, dataset, batch_size=1))


def _held_out_loss(run: PreparedRun, dataset: Dataset, *, batch_size: int = 16) -> float:
    return held_out_loss(run.training.objective, dataset, run.training.accelerator, batch_size=batch_size)


def _lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


@torch.no_grad()
def layer_errors(run: PreparedRun) -> dict[str, float]:
    """||W - (Q + s B A)|| / ||W|| of each adapted layer, W the 16-bit weight, read again and not from LoftQ's report.

    For DoRA, whose rows are rescaled to their own length at the start, the same.
    """
    dense = dict(load_model(run.training.config.model)[0].named_modules())
    errors = {}
    for name, layer in run.model.get_base_model().named_modules():
        if not isinstance(layer, LoraLinear | QuantLinear) or ".base_layer" in name:
            continue
        base = layer.get_base_layer() if isinstance(layer, LoraLinear) else layer
        started = frozen_weight(base).decoded(torch.float32).tensors[0].double()
        if isinstance(layer, LoraLinear):
            lora_A, lora_B = layer.factors("default")
            started = started + layer.scaling["default"] * lora_B.double() @ lora_A.double()
        wanted = dense[name].weight.double()
        errors[name] = ((wanted - started).norm() / wanted.norm()).item()
    return errors


@torch.no_grad()
def _as_if_unscaled(run: PreparedRun) -> None:
    for layer in _lora_layers(run.model).values():
        root = layer.scaling["default"] ** 0.5
        layer.lora_A["default"].weight.mul_(root)
        layer.lora_B["default"].weight.mul_(root)


def _answers(run: PreparedRun, cell: Cell, data: Path, merged: Path) -> dict[str, Any]:
    """Questions answered greedily by our server over the live module; DoRA, which it refuses, over a 16-bit merge."""
    sizes, config = cell.sizes, run.training.config
    settings = replace(config.data, path=str(data / TEST_FILE), max_rows=sizes["eval_rows"] + sizes["questions"])
    rows = list(read_examples(open_sources(settings, config.preference.method).train[0]))
    exchanges = [row.messages for row in rows[sizes["eval_rows"] :]]
    settings = {"max_model_len": sizes["max_seq_len"] + sizes["answer_tokens"]}
    run.model.eval()
    if config.lora.use_dora:
        write_merged(run.model, run.tokenizer, merged)
        llm = LLM(merged, **settings)
    else:
        llm = LLM(run.model, run.tokenizer, **settings)
    began = time.monotonic()
    params = SamplingParams(temperature=0, max_tokens=sizes["answer_tokens"])
    outputs = llm.chat([turns[:-1] for turns in exchanges], params)
    seconds = time.monotonic() - began
    llm.close()
    texts = [output.choices[0].text for output in outputs]
    right = [is_right(text, turns[-1]["content"]) for text, turns in zip(texts, exchanges, strict=True)]
    finished = sum(output.choices[0].finish_reason == "stop" for output in outputs)
    return {"right": sum(right), "questions": len(right), "ended": finished, "answer_s": seconds, "answers": texts}


def is_right(answer: str, reference: str) -> bool:
    """Whether the answer's number is the reference's: what stands after the last ####, else the last number."""
    found, wanted = final_number(answer), final_number(reference)
    return wanted is not None and found == wanted


def final_number(text: str) -> Decimal | None:
    """The first number after the last ####, or the last one of a text without a number there; None without any."""
    after = _NUMBER.findall(text.rpartition("####")[2]) if "####" in text else []
    numbers = after[:1] or _NUMBER.findall(text)[-1:]
    return Decimal(re.sub(r"[$,]", "", numbers[0])) if numbers else None
