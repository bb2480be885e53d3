"""Our training steps beside their peers, in one run: tokens/s and peak memory, on SmolLM2-135M.

    python scripts/bench_train.py [--quick] [--only qlora_step,qat_step_memory] [--out DIR]

    qlora_step         NF4 with double quantisation, LoRA r=16 on all linear layers, 2 x 512 tokens
    qlora_packed_step  the same on 4096 tokens of short documents, packed in one row, that must not see each other
    qat_step           full fine-tuning, INT4 weights in groups of 32 and INT8 dynamic activations faked, 2 x 512 tokens

Each with AdamW and every token but a document's first a target. Each contender runs in its own process, so that memory
is its own; contenders take turns, so that a noisy machine hits all of them. First losses must agree before a figure
counts. The last line is JSON.
"""

import argparse
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

RANK, ALPHA, LR = 16, 32, 1e-4
NUM_WEIGHTS = 134.5e6
"""In linear layers and output head of SmolLM2-135M; each product takes 2 FLOP a weight and token."""
DOCUMENT_LEN = (60, 400)  # shortest and longest document of a pack
GROUP_SIZE, DIVISOR, SCALE_DTYPE = 32, 7.5, torch.bfloat16  # the symmetric INT4 grid of torchao for bfloat16 weights


@dataclass(frozen=True)
class Work:
    """One step to time.

    documents   the lengths of the documents of the batch
    peers       name on the command line -> label of the table
    products    of each weight with each token: forward, gradient of the input, gradient of the weight
    tolerance   how far the first losses of the contenders may lie apart, in nats
    steps       timed steps a turn, after `warm_up` more
    """

    documents: tuple[int, ...]
    peers: dict[str, str]
    products: int
    tolerance: float
    steps: int
    warm_up: int = 2


def _document_lengths(num_tokens: int) -> tuple[int, ...]:
    draw, lengths = random.Random(0), []
    while num_tokens:
        lengths.append(min(draw.randint(*DOCUMENT_LEN), num_tokens))
        num_tokens -= lengths[-1]
    return tuple(lengths)


# bfloat16 rounding moves the mean loss of 1022 tokens by a few thousandths; another function moves it by tenths. QAT is
# wider: rounding flips codes, and the peer's 8-bit activations have a zero point a token and so another grid. Weights
# alone agreed to 0.002, both to 0.01 in transformers' layers; without fake quantization the loss is 0.24 lower.
WORKS = {
    "qlora_step": Work(
        (512, 512),
        {
            "peft_bfloat16": "PEFT + bitsandbytes, bfloat16",
            "peft_float32": "PEFT + bitsandbytes, float32",
        },
        products=2,
        tolerance=0.02,
        steps=5,
    ),
    "qlora_packed_step": Work(
        _document_lengths(4096),
        {
            "peft_packed": "PEFT + bitsandbytes, bfloat16, packed by position_ids",
            "peft_separate": "PEFT + bitsandbytes, bfloat16, a forward for each document",
        },
        products=2,
        tolerance=0.02,
        steps=2,
        warm_up=1,
    ),
    "qat_step": Work((512, 512), {"torchao": "torchao QATConfig, bfloat16"}, products=3, tolerance=0.05, steps=5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of one or two steps each")
    parser.add_argument("--only", default="", help="comma-separated work names")
    parser.add_argument("--out", type=Path, help="folder for bench_train.json")
    parser.add_argument("--profile", choices=WORKS, help="where the time of one of our steps goes, and nothing else")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profile:
        print(_profile(args.profile))
        return
    if args.contender:
        print(json.dumps(_measure(*args.contender, quick=args.quick)))
        return
    only = [name for name in args.only.split(",") if name]
    known = [row for name in WORKS for row in (name, f"{name}_memory")]
    if unknown := [name for name in only if name not in known]:
        parser.error(f"--only {','.join(unknown)}: use {', '.join(known)}")
    rows = []
    for name, work in WORKS.items():
        if not only or {name, f"{name}_memory"} & set(only):
            rows += _rows(name, work, _take_turns(name, work, quick=args.quick))
    rows = [row for row in rows if not only or row["work"] in only]
    _print_table(rows)
    report = {"name": "bench_train", "machine": _machine(), "versions": _versions(), "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_train.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


# ---- the parent process: turns, checks, rows


def _take_turns(name: str, work: Work, *, quick: bool) -> dict[str, list[dict]]:
    results: dict[str, list[dict]] = {}
    turns = 1 if quick else 3
    for turn in range(turns):
        for contender in ("lowbit", *work.peers):
            command = [sys.executable, __file__, "--contender", name, contender, *(["--quick"] if quick else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.setdefault(contender, []).append(json.loads(done.stdout.splitlines()[-1]))
            print(f"turn {turn + 1}/{turns} {name} {contender}: {results[contender][-1]}", file=sys.stderr)
    first = {contender: runs[0]["losses"][0] for contender, runs in results.items()}
    if not max(first.values()) - min(first.values()) <= work.tolerance:
        sys.exit(f"{name}: the contenders compute different losses on the same batch: {first}")
    return results


def _rows(name: str, work: Work, results: dict[str, list[dict]]) -> list[dict]:
    tokens = sum(work.documents)
    speed = {who: [tokens / s for run in runs for s in run["step_s"]] for who, runs in results.items()}
    memory = {who: [run["peak_bytes"] / 1e9 for run in runs] for who, runs in results.items()}
    gemm = statistics.median(run["gemm_flops"] for run in results["lowbit"])
    limit = gemm / (2 * work.products * NUM_WEIGHTS)
    rows = [
        _row(name, speed["lowbit"], speed[peer], label, "tokens/s", statistics.median(speed["lowbit"]) / limit)
        for peer, label in work.peers.items()
    ]
    rows += [_row(f"{name}_memory", memory["lowbit"], memory[peer], label, "GB") for peer, label in work.peers.items()]
    return rows


def _row(
    work: str, ours: list[float], peer: list[float], peer_name: str, unit: str, of_limit: float | None = None
) -> dict:
    middle = statistics.median(ours), statistics.median(peer)
    return {
        "work": work, "ours": middle[0], "peer": middle[1], "peer_name": peer_name, "unit": unit,
        "ratio": middle[0] / middle[1], "of_limit": of_limit,
        "ours_p20_p80": _p20_p80(ours), "peer_p20_p80": _p20_p80(peer),
    }  # fmt: skip


def _p20_p80(values: list[float]) -> list[float]:
    fifths = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values * 4
    return [fifths[0], fifths[3]]


def _print_table(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("work", "ours", "peer", "unit", "ratio", "of limit", "peer is")
    for row in rows:
        limit = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
        figures = (f"{row['ours']:.2f}", f"{row['peer']:.2f}", row["unit"], f"{row['ratio']:.2f}", limit)
        table.add_row(row["work"], *figures, row["peer_name"])
    Console(width=140).print(table)


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in ("lowbit", "torch", "transformers", "peft", "bitsandbytes", "torchao")}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- a contender's process


@dataclass(frozen=True)
class Batch:
    """Documents one after the other; input_ids, labels, positions [T] int64, -100 at each document's first label."""

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    starts: list[int]

    @classmethod
    def random(cls, documents: tuple[int, ...]) -> "Batch":
        torch.manual_seed(0)
        input_ids = torch.randint(100, 40000, (sum(documents),))
        starts = [0, *accumulate(documents)]
        labels = input_ids.clone()
        labels[starts[:-1]] = -100
        return cls(input_ids, labels, torch.cat([torch.arange(length) for length in documents]), starts)

    @property
    def num_targets(self) -> int:
        return int((self.labels != -100).sum())

    def rows(self) -> list[slice]:
        return [slice(*span) for span in pairwise(self.starts)]


def _profile(name: str) -> str:
    """torch.profiler's table of our third step, by time outside of inner calls; the optimizer is left out."""
    from torch.profiler import ProfilerActivity, profile

    build = _our_qat if name == "qat_step" else _our_qlora
    step, _ = build(Batch.random(WORKS[name].documents), "lowbit")
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=24, max_name_column_width=48)


def _measure(name: str, contender: str, *, quick: bool) -> dict:
    """Build one contender and time its steps. `step` computes the mean loss and its gradients."""
    work = WORKS[name]
    build = {"lowbit": _our_qat if name == "qat_step" else _our_qlora, "torchao": _torchao_qat}.get(contender, _peft)
    batch = Batch.random(work.documents)
    step, params = build(batch, contender)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    losses, seconds = [], []
    for _ in range(work.warm_up + (1 + (work.steps > 2) if quick else work.steps)):
        began = time.perf_counter()
        losses.append(step())
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    timed = seconds[work.warm_up :]
    return {"losses": losses, "step_s": timed, "peak_bytes": peak, "gemm_flops": _gemm_flops(len(batch.input_ids))}


Contender = tuple[Callable[[], float], list[nn.Parameter]]


def _contender(loss: Callable[[], Tensor], model: nn.Module) -> Contender:
    def step() -> float:
        mean = loss()
        mean.backward()
        return mean.item()

    return step, [p for p in model.parameters() if p.requires_grad]


def _our_qlora(batch: Batch, _: str) -> Contender:
    from trainer.compose import load_config
    from trainer.lora import attach_lora
    from trainer.model import load_model, prepare_model
    from trainer.objective import NextTokenLoss

    config = load_config("conf=qlora", f"lora.rank={RANK}", f"lora.alpha={ALPHA}")
    model, _ = load_model(config.model)
    prepare_model(model, config.quant)
    return _in_passes(NextTokenLoss(attach_lora(model, config.lora, seed=0)).train(), batch)


def _our_qat(batch: Batch, _: str) -> Contender:
    from trainer.config.model import ModelConfig
    from trainer.model import load_model
    from trainer.objective import NextTokenLoss
    from trainer.qat.fake_quant import fake_quantize_linears
    from trainer.qat.scheme import Scheme

    model, _ = load_model(ModelConfig())
    scale_dtype = str(SCALE_DTYPE).removeprefix("torch.")
    grid = {"group_size": GROUP_SIZE, "divisor": DIVISOR, "scale_dtype": scale_dtype}
    scheme = Scheme.named("int4_int8", integer=False, **grid)
    fake_quantize_linears(model, lambda name: None if name == "lm_head" else scheme)
    return _in_passes(NextTokenLoss(model.requires_grad_()).train(), batch)


def _in_passes(objective: nn.Module, batch: Batch) -> Contender:
    """As the training loop does: whole documents in passes of at most `train.max_pass_tokens`, gradients added up."""
    from trainer.data.loader import collate, group_by_length
    from trainer.prepare import MAX_PASS_TOKENS

    rows = [{"input_ids": batch.input_ids[row].tolist(), "labels": batch.labels[row].tolist()} for row in batch.rows()]
    passes = [collate(some) for some in group_by_length(rows, MAX_PASS_TOKENS[0])]

    def step() -> float:
        total = 0.0
        for one in passes:
            loss = objective(**one) / batch.num_targets
            loss.backward()
            total += loss.item()
        return total

    return step, [p for p in objective.parameters() if p.requires_grad]


def _peft(batch: Batch, contender: str) -> Contender:
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    compute = torch.float32 if contender == "peft_float32" else torch.bfloat16
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    model = _transformers(quantization_config=quantization, dtype=compute, device_map="cpu").requires_grad_(False)
    peft_config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, peft_config).train()
    if contender == "peft_separate":
        return _document_by_document(model, batch)
    return _contender(lambda: _their_loss(model, batch, packed=contender == "peft_packed"), model)


def _torchao_qat(batch: Batch, _: str) -> Contender:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = _transformers(dtype=torch.bfloat16).train()
    head = model.get_output_embeddings()
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=GROUP_SIZE, is_symmetric=True)
    config = QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    quantize_(model, config, filter_fn=lambda module, _: type(module) is nn.Linear and module is not head)
    return _contender(lambda: _their_loss(model, batch), model)


def _transformers(**options: object) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from trainer.config.model import ModelConfig
    from trainer.sources.resolve import resolve_model

    return AutoModelForCausalLM.from_pretrained(resolve_model(ModelConfig()), **options)


def _their_loss(model: nn.Module, batch: Batch, *, packed: bool = False) -> Tensor:
    """Documents as rows of one length, or packed: transformers makes the block-diagonal mask of the position_ids."""
    if packed:
        row = {"input_ids": batch.input_ids[None], "labels": batch.labels[None]}
        return model(**row, position_ids=batch.positions[None], use_cache=False).loss
    shape = len(batch.starts) - 1, -1
    return model(input_ids=batch.input_ids.view(shape), labels=batch.labels.view(shape), use_cache=False).loss


def _document_by_document(model: nn.Module, batch: Batch) -> Contender:
    """Gradients added up over one forward a document: no mask and no padding, but small products."""

    def step() -> float:
        total = 0.0
        for row in batch.rows():
            inputs = {"input_ids": batch.input_ids[None, row], "labels": batch.labels[None, row]}
            share = (row.stop - row.start - 1) / batch.num_targets
            loss = model(**inputs, use_cache=False).loss * share
            loss.backward()
            total += loss.item()
        return total

    return step, [p for p in model.parameters() if p.requires_grad]


def _gemm_flops(num_tokens: int) -> float:
    """bfloat16 matrix products of the model's shapes, FLOP/s: the limit of the machine."""
    x, w = torch.randn(num_tokens, 576).bfloat16(), torch.randn(576, 1536).bfloat16()
    x @ w
    began = time.perf_counter()
    for _ in range(20):
        x @ w
    return 20 * 2 * x.shape[0] * w.numel() / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
