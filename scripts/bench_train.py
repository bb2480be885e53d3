"""Our QLoRA step beside PEFT + bitsandbytes, in one run: tokens/s and peak memory.

    python scripts/bench_train.py [--quick] [--only qlora_step,qlora_step_memory] [--out DIR]

SmolLM2-135M, NF4 with double quantisation, LoRA r=16 on all linear layers, AdamW, 2 x 512 tokens, every token a
target. Each contender runs in its own process, so that memory is its own; contenders take turns, so that a noisy
machine hits all of them. Before timing, the first losses must agree. The last line is JSON.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

BATCH, SEQ_LEN, RANK, ALPHA, LR = 2, 512, 16, 32, 1e-4
PEERS = {"peft_bnb_bfloat16": "PEFT + bitsandbytes, bfloat16", "peft_bnb_float32": "PEFT + bitsandbytes, float32"}
LOSS_TOLERANCE = 0.02
"""bfloat16 rounding moves the mean loss of 1022 tokens by a few thousandths; another function moves it by tenths."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of two steps each")
    parser.add_argument("--only", default="", help="comma-separated work names")
    parser.add_argument("--out", type=Path, help="folder for bench_train.json")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    turns, steps = (1, 2) if args.quick else (3, 5)
    if args.contender:
        print(json.dumps(_measure(args.contender, steps)))
        return
    results: dict[str, list[dict]] = {}
    for turn in range(turns):
        for name in ("lowbit", *PEERS):
            command = [sys.executable, __file__, "--contender", name, *(["--quick"] if args.quick else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
            print(f"turn {turn + 1}/{turns} {name}: {results[name][-1]}", file=sys.stderr)
    _check_losses(results)
    rows = [row for row in _rows(results) if not args.only or row["work"] in args.only.split(",")]
    _print_table(rows)
    report = {"name": "bench_train", "machine": _machine(), "versions": _versions(), "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_train.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def _measure(contender: str, steps: int) -> dict:
    """Build one contender and time its steps, the first two not counted."""
    torch.manual_seed(0)
    input_ids = torch.randint(100, 40000, (BATCH, SEQ_LEN))
    mean_loss, params = _ours(input_ids) if contender == "lowbit" else _peer(input_ids, contender.rpartition("_")[2])
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    losses, seconds = [], []
    for _ in range(2 + steps):
        began = time.perf_counter()
        loss = mean_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gemm = _gemm_flops()
    return {"losses": losses, "step_s": seconds[2:], "peak_bytes": peak, "gemm_flops": gemm}


def _ours(input_ids: torch.Tensor):
    from trainer.compose import load_config
    from trainer.lora import attach_lora
    from trainer.model import load_model, prepare_model
    from trainer.objective import NextTokenLoss

    config = load_config("conf=qlora", f"lora.rank={RANK}", f"lora.alpha={ALPHA}")
    model, _ = load_model(config.model)
    prepare_model(model, config.quant)
    objective = NextTokenLoss(attach_lora(model, config.lora, seed=0)).train()
    params = [p for p in objective.parameters() if p.requires_grad]
    return lambda: objective(input_ids=input_ids, labels=input_ids) / (BATCH * (SEQ_LEN - 1)), params


def _peer(input_ids: torch.Tensor, dtype: str):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from trainer.config import ModelConfig
    from trainer.sources.resolve import resolve_model

    compute = getattr(torch, dtype)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    path = resolve_model(ModelConfig())
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=quantization, dtype=compute, device_map="cpu"
    )
    model.requires_grad_(False)
    peft_config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, peft_config).train()
    params = [p for p in model.parameters() if p.requires_grad]
    return lambda: model(input_ids=input_ids, labels=input_ids, use_cache=False).loss, params


def _gemm_flops() -> float:
    """bfloat16 matrix products of this step's shapes, FLOP/s: the limit of the machine."""
    x, w = torch.randn(BATCH * SEQ_LEN, 576).bfloat16(), torch.randn(576, 1536).bfloat16()
    x @ w
    began = time.perf_counter()
    for _ in range(20):
        x @ w
    return 20 * 2 * x.shape[0] * w.numel() / (time.perf_counter() - began)


def _check_losses(results: dict[str, list[dict]]) -> None:
    """All contenders start at the same function: adapters begin as zero over the same packed base."""
    first = {name: runs[0]["losses"][0] for name, runs in results.items()}
    if max(first.values()) - min(first.values()) > LOSS_TOLERANCE:
        sys.exit(f"the contenders compute different losses on the same batch: {first}")


def _rows(results: dict[str, list[dict]]) -> list[dict]:
    tokens = BATCH * SEQ_LEN
    speed = {name: [tokens / s for run in runs for s in run["step_s"]] for name, runs in results.items()}
    memory = {name: min(run["peak_bytes"] for run in runs) for name, runs in results.items()}
    weights = 134.5e6  # linear layers and output head of SmolLM2-135M; forward and input gradient are 2 FLOP each
    limit = statistics.median(run["gemm_flops"] for run in results["lowbit"]) / (4 * weights)
    ours = statistics.median(speed["lowbit"])
    rows = []
    for name, label in PEERS.items():
        peer = statistics.median(speed[name])
        rows.append(_row("qlora_step", ours, peer, label, "tokens/s", ours / limit))
    for name, label in PEERS.items():
        rows.append(_row("qlora_step_memory", memory["lowbit"] / 1e9, memory[name] / 1e9, label, "GB", None))
    for row in rows[: len(PEERS)]:
        low, _, high = (
            statistics.quantiles(speed["lowbit"], n=5)[0],
            None,
            statistics.quantiles(speed["lowbit"], n=5)[3],
        )
        row["ours_p20_p80"] = [low, high]
    return rows


def _row(work: str, ours: float, peer: float, peer_name: str, unit: str, of_limit: float | None) -> dict:
    return {
        "work": work,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "unit": unit,
        "ratio": ours / peer,
        "of_limit": of_limit,
    }


def _print_table(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("work", "ours", "peer", "unit", "ratio", "of limit", "peer is")
    for row in rows:
        limit = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
        figures = (f"{row['ours']:.2f}", f"{row['peer']:.2f}", row["unit"], f"{row['ratio']:.2f}", limit)
        table.add_row(row["work"], *figures, row["peer_name"])
    Console(width=120).print(table)


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("lowbit", "torch", "transformers", "peft", "bitsandbytes")}


if __name__ == "__main__":
    main()
