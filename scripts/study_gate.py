"""How far the server is from the module that was trained: differences of log-probabilities, in nats.

    python scripts/study_gate.py [--quick] [--out DIR]          the bundled model, dense and NF4, in both dtypes
    python scripts/study_gate.py --run outputs/qlora/...        a run's base and adapter

Prompts are docstrings of the running Python. Rows beside the server's say how far the module is from itself: in
bfloat16 against float32, and with transformers' other attention implementation. The last line is JSON.
"""

import argparse
import collections
import inspect
import json
import os
import platform
import re
import statistics
import textwrap
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from trainer import LLM
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import QuantConfig
from trainer.model import load_model, prepare_model
from trainer.serve.config import ServeConfig
from trainer.serve.gate import train_serve_gate
from trainer.serve.open_model import open_model

SERVER = {"max_model_len": 128, "max_num_seqs": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 prompts instead of 16")
    parser.add_argument("--run", help="a run folder; its adapter and its dtype")
    parser.add_argument("--out", type=Path, help="folder for study_gate.json")
    args = parser.parse_args()
    num_prompts = 4 if args.quick else 16
    rows = _of_run(args.run, num_prompts) if args.run else _of_bundled(num_prompts)
    for row in rows:
        print(f"{row['work']:<58} max {row['max']:.5f}   mean {row['mean']:.6f}")
    versions = {name: version(name) for name in ("lowbit", "torch", "transformers")}
    report = {"name": "study_gate", "machine": platform.processor(), "versions": versions, "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "study_gate.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def _of_run(run: str, num_prompts: int) -> list[dict]:
    """The server of a run against the base with PEFT's adapter on it."""
    from trainer.export.adapter import read_adapter

    module = read_adapter(open_model(ServeConfig(model=run)).module, Path(run) / "export" / "adapter")
    llm = LLM(run, **SERVER)
    prompts = _prompts(llm.tokenizer, num_prompts)
    return [_gate_row("server against trained module", module, llm, prompts)]


def _of_bundled(num_prompts: int) -> list[dict]:
    rows = []
    for kind in ("dense", "NF4"):
        exact = None
        for dtype in (DType.float32, DType.bfloat16):
            module, tokenizer = load_model(ModelConfig(ModelSource.bundled, dtype=dtype))
            if kind == "NF4":
                prepare_model(module, QuantConfig())
            prompts = _prompts(tokenizer, num_prompts)
            name, own = f"{kind} {dtype.value}", _logprobs(module, prompts)
            exact = own if exact is None else exact
            llm = LLM(module, tokenizer, **SERVER)
            rows.append(_gate_row(f"{name}, server against module", module, llm, prompts))
            if dtype is DType.bfloat16:
                int8 = LLM(module, tokenizer, kv_cache_dtype="int8", **SERVER)
                rows.append(_gate_row(f"{name}, server with int8 KV against module", module, int8, prompts))
                rows.append(_row(f"{name}, module against itself in float32", own - exact))
                rows.append(_row(f"{name}, server against the module in float32", _served(llm, prompts) - exact))
                module.set_attn_implementation("eager")
                rows.append(_row(f"{name}, module with eager attention against sdpa", _logprobs(module, prompts) - own))
    return rows


def _gate_row(work: str, module: nn.Module, llm: LLM, prompts: list[list[int]]) -> dict:
    report = train_serve_gate(module, llm, prompts)
    return {"work": work, "max": report.max_difference, "mean": report.mean_difference, "unit": "nats"}


def _row(work: str, differences: torch.Tensor) -> dict:
    return {
        "work": work,
        "max": differences.abs().max().item(),
        "mean": differences.abs().mean().item(),
        "unit": "nats",
    }


@torch.inference_mode()
def _logprobs(module: nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the prompts' tokens but the first, one after the other. [sum of lengths - 1] float64"""
    found = []
    for prompt in prompts:
        token_ids = torch.tensor([prompt])
        logits = module(input_ids=token_ids, use_cache=False).logits[0, :-1].double()
        found.append(logits.log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def _served(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    from trainer import SamplingParams

    outputs = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0))
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs[1:]]
    return torch.tensor(logprobs, dtype=torch.float64)


def _prompts(tokenizer, num_prompts: int) -> list[list[int]]:
    """Docstrings of some modules of the standard library, at most 96 tokens each."""
    modules = (os, json, re, statistics, textwrap, collections, inspect)
    routines = [value for module in modules for value in vars(module).values() if inspect.isroutine(value)]
    docs = sorted({doc for routine in routines if (doc := inspect.getdoc(routine))})
    return [ids[:96] for doc in docs if len(ids := tokenizer(doc)["input_ids"]) > 24][:num_prompts]


if __name__ == "__main__":
    main()
