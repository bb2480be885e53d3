"""Every kernel beside the best peer and the machine's limit, in one run.

    python scripts/bench_kernels.py [--quick] [--only nf4_dequantize,attention_forward] [--out DIR]

Before a kernel is timed, its result is compared with a reference; a difference beyond the tolerance ends the run. Ours
and the peer take turns. The limit of a row is the time that its bytes take at the copy or read bandwidth measured here,
or its operations at the rate of torch's products (bfloat16, float32 or int8), whichever is longer: `of limit` says how
close ours comes. Weights that would stay in the cache rotate over copies, so that they come from memory. Shapes are
those of SmolLM2-135M, Qwen3-0.6B, Llama-3.2-1B and Llama-3-8B. The last line is JSON.
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trainer.kernels.attention import attention
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.kernels.fake_quant import Grid, fake_quant
from trainer.kernels.frozen_weight import FrozenWeight
from trainer.kernels.int4 import int4_dequantize, int4_linear, int4_quantize
from trainer.kernels.int8 import int8_dequantize, int8_quantize
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.kernels.nf4 import (
    NF4Weight,
    nf4_dequantize_into,
    nf4_linear,
    nf4_quantize,
    quantize_absmax,
)
from trainer.kernels.packed_linear import (
    LinearWeight,
    pack_codebook_linear,
    pack_integer_linear,
    packed_linear,
    place_linears,
)
from trainer.kernels.paged_attention import AttentionBatch, KVCache, paged_attention, write_kv
from trainer.kernels.rms_norm import rms_norm
from trainer.kernels.rope import rope
from trainer.kernels.swiglu import swiglu

SHAPES = {"135M": (1536, 576), "0.6B": (3072, 1024), "1B": (8192, 2048), "8B": (14336, 4096)}
"""out_features, in_features of the widest layer."""
ATTENTION = {"135M": (9, 3, 64), "0.6B": (16, 8, 128), "1B": (32, 8, 64)}
"""Query heads, key and value heads, head_dim."""
CACHE_BYTES = 128 << 20
"""Copies of a weight together exceed any last-level cache here."""
DTYPE = torch.bfloat16
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}
"""Relative error in the norm; bfloat16 rounds each result by up to 2^-9, and gradients pass several roundings."""


@dataclass
class Limits:
    """What the machine gives, measured in this run: bytes a second and operations a second."""

    copy: float
    read: float
    flops: dict[torch.dtype, float]


@dataclass
class Case:
    """One row: what is timed, beside what, and how much it moves and computes."""

    work: str
    shape: str
    ours: Callable[[], object]
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    error: Callable[[], float] | None = None
    """Relative error of our result against a reference."""
    bytes_read: float = 0
    bytes_written: float = 0
    operations: float = 0
    dtype: torch.dtype = DTYPE
    """Of the products: names the rate that limits them."""
    tolerance: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest shapes, few repeats")
    parser.add_argument("--only", default="", help="comma-separated work names, or beginnings of them")
    parser.add_argument("--out", type=Path, help="folder for bench_kernels.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    only = tuple(args.only.split(",")) if args.only else ("",)
    rounds = 3 if args.quick else 9
    limits = measure_limits()
    rows = []
    for build in GROUPS:
        for case in build(args.quick):
            if case.work.startswith(only):
                rows += measure(case, limits, rounds)
                print(f"{case.work} {case.shape}", file=sys.stderr)
    print_table(rows)
    report = {
        "name": "bench_kernels",
        "machine": machine(),
        "versions": versions(),
        "limits": {
            "copy_GB_s": limits.copy / 1e9,
            "read_GB_s": limits.read / 1e9,
            **{f"{str(dtype).removeprefix('torch.')}_GFLOP_s": rate / 1e9 for dtype, rate in limits.flops.items()},
        },
        "rows": rows,
    }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_kernels.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


# ---- limits and timing


def measure_limits() -> Limits:
    source, target = torch.ones(64 << 20), torch.empty(64 << 20)  # 256 MB each
    copy = 2 * source.nbytes / best(lambda: target.copy_(source))
    read = 2 * source.nbytes / best(lambda: torch.dot(source, target))
    x, w = torch.randn(1024, 1536), torch.randn(1536, 1536)
    operations = 2 * 1024 * 1536 * 1536
    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = x.to(dtype), w.to(dtype)
        flops[dtype] = operations / best(lambda a=a, b=b: a @ b)
    a, b = (torch.randint(-127, 127, size, dtype=torch.int8) for size in (x.shape, w.shape))
    flops[torch.int8] = operations / best(lambda: torch._int_mm(a, b))
    return Limits(copy, read, flops)


def best(function: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of some runs, in seconds: a limit is what the machine can do."""
    function()
    return min(timed(function) for _ in range(repeats))


def timed(function: Callable[[], object], calls: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


def measure(case: Case, limits: Limits, rounds: int) -> list[dict]:
    """One row for each peer; ours and all peers take turns."""
    error = None if case.error is None else case.error()
    tolerance = TOLERANCE[DTYPE] if case.tolerance is None else case.tolerance
    if error is not None and not error <= tolerance:
        sys.exit(f"{case.work} {case.shape}: relative error {error:.3g} exceeds {tolerance}; nothing was timed")
    functions = {"ours": case.ours, **case.peers}
    calls = {name: max(1, math.ceil(0.02 / best(function, 2))) for name, function in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(timed(function, calls[name]))
    moved = case.bytes_read + case.bytes_written
    by_memory = moved / (limits.copy if case.bytes_written > 0.2 * moved else limits.read)
    by_products = case.operations / limits.flops[case.dtype]
    ours = statistics.median(seconds["ours"])
    unit, amount = ("GB/s", moved / 1e9) if by_memory > by_products else ("GFLOP/s", case.operations / 1e9)
    low, *_, high = statistics.quantiles(seconds["ours"], n=5)
    row = {
        "work": case.work,
        "shape": case.shape,
        "ours": amount / ours,
        "unit": unit,
        "of_limit": max(by_memory, by_products) / ours,
        "ours_us": 1e6 * ours,
        "ours_us_p20_p80": [1e6 * low, 1e6 * high],
        "error": error,
    }
    peers = [(name, amount / statistics.median(seconds[name])) for name in case.peers] or [(None, None)]
    return [
        {**row, "peer": peer, "peer_name": name, "ratio": None if peer is None else row["ours"] / peer}
        for name, peer in peers
    ]


def relative(ours: Tensor | tuple[Tensor, ...], truth: Tensor | tuple[Tensor, ...]) -> float:
    pairs = zip(ours, truth, strict=True) if isinstance(ours, tuple) else [(ours, truth)]
    pairs = [(a.detach().double(), b.detach().double()) for a, b in pairs]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def backward(output: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward for given inputs; the incoming gradient is fixed."""
    grad = torch.randn(output().shape).to(output().dtype)
    return lambda: torch.autograd.grad(output(), inputs, grad)


# ---- 4-bit and 8-bit weights
# A case is timed before its generator goes on, so its functions see the variables as they are when it is yielded, and
# ruff's B023 does not apply.
# ruff: noqa: B023


def shapes(quick: bool) -> Iterator[tuple[str, int, int]]:
    for name, (out_features, in_features) in itertools.islice(SHAPES.items(), 1 if quick else None):
        yield f"{name} {out_features}x{in_features}", out_features, in_features


def nf4_weight(weight: Tensor) -> NF4Weight:
    packed, absmax = nf4_quantize(weight, block_size=64)
    return NF4Weight(packed, *quantize_absmax(absmax), *weight.shape, 64)


def nf4_dense(weight: NF4Weight) -> Tensor:
    out = torch.empty(weight.out_features, weight.in_features, dtype=DTYPE)
    nf4_dequantize_into(weight, out)
    return out


def nf4_product(x: Tensor, weight: NF4Weight) -> Tensor:
    scales = weight.absmax, weight.nested_absmax, weight.nested_offset
    return nf4_linear(x, weight.packed, *scales, out_features=weight.out_features, block_size=weight.block_size)


def copies(make: Callable[[], object], nbytes: float) -> Callable[[], object]:
    """Calls that hand out enough different copies, one after the other, that none is still in the cache."""
    return itertools.cycle([make() for _ in range(math.ceil(CACHE_BYTES / nbytes))]).__next__


def served(make: Callable[[], LinearWeight], nbytes: float) -> Callable[[], LinearWeight]:
    """Copies in the server's layout and memory."""
    weights = [make() for _ in range(math.ceil(CACHE_BYTES / nbytes))]
    place_linears(weights)
    return itertools.cycle(weights).__next__


def storage_cases(quick: bool) -> Iterator[Case]:
    bnb, grid = bitsandbytes(), Grid.int4(group_size=32)
    for shape, out_features, in_features in shapes(quick):
        weight = torch.randn(out_features, in_features).bfloat16()
        codes = weight.numel() / 2
        peers = {} if bnb is None else {"bitsandbytes": lambda: bnb.quantize_4bit(weight, quant_type="nf4")}
        yield Case(
            "nf4_quantize", shape, lambda: nf4_quantize(weight, block_size=64), peers, None, weight.nbytes, codes
        )
        int4 = int4_quantize(weight, group_size=32)
        ours, out, peers = nf4_weight(weight), torch.empty_like(weight), {}
        if bnb is not None:
            theirs = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            peers["bitsandbytes"] = lambda: bnb.dequantize_4bit(*theirs)
        yield Case(
            "nf4_dequantize", shape, lambda: nf4_dequantize_into(ours, out), peers,
            lambda: relative(nf4_dense(ours), weight), 1.03 * codes, weight.nbytes,  # a scale byte for 32 of codes
            tolerance=0.1,  # 4 bits lose 0.09 of a normal weight
        )  # fmt: skip
        yield Case(
            "fake_quant_int4", shape, lambda: fake_quant(weight, grid), torchao_fake_quant(weight),
            lambda: relative(fake_quant(weight, grid), int4_dequantize(int4, dtype=DTYPE)),
            weight.nbytes, weight.nbytes, tolerance=0.0,
        )  # fmt: skip


def linear_cases(quick: bool) -> Iterator[Case]:
    """Few rows: the server's layouts, made at load, and, as `stored`, the weights as training keeps them."""
    for shape, out_features, in_features in shapes(quick):
        weight = torch.randn(out_features, in_features).bfloat16()
        stored_next = copies(lambda: nf4_weight(weight), weight.numel() / 2)
        int4_next = copies(lambda: int4_quantize(weight, group_size=32), weight.numel() / 2)
        nf4_served = served(lambda: pack_codebook_linear([nf4_weight(weight)], dtype=DTYPE), weight.numel() / 2)
        int4_served, dynamic_served = (
            served(lambda: pack_integer_linear([int4_next()], dtype=DTYPE, rounds_input=dynamic), weight.numel() / 2)
            for dynamic in (False, True)
        )
        nf4_truth = nf4_dense(stored_next()).float().T
        int4_truth = int4_dequantize(int4_next(), dtype=DTYPE).float().T
        theirs_next, torch_product = bitsandbytes_linear(weight), torch_int4(weight)
        nf4_peers = {} if theirs_next is None else {"bitsandbytes": lambda: theirs_next()(x)}
        int4_peers = {"torch int4pack": lambda: torch_product(x)}
        for rows in (1, 2, 4, 8):
            x = torch.randn(rows, in_features).bfloat16()
            numbers = {"bytes_written": 2 * rows * out_features, "operations": 2 * rows * weight.numel()}
            for work, product, truth, bits, peers, dtype in (
                ("nf4_linear", lambda: packed_linear(x, nf4_served()), nf4_truth, 4.5, nf4_peers, DTYPE),
                ("nf4_linear_stored", lambda: nf4_product(x, stored_next()), nf4_truth, 4.127, nf4_peers, DTYPE),
                ("int4_linear", lambda: packed_linear(x, int4_served()), int4_truth, 5, int4_peers, DTYPE),
                ("int4_linear_stored", lambda: int4_linear(x, int4_next()), int4_truth, 5, int4_peers, DTYPE),
                ("int4_linear_dynamic", lambda: packed_linear(x, dynamic_served()), int4_truth, 5, {}, torch.int8),
            ):
                yield Case(
                    f"{work}_{'1_row' if rows == 1 else f'{rows}_rows'}", shape, product, peers,
                    lambda: relative(product(), x.float() @ truth),
                    bytes_read=weight.numel() * bits / 8, **numbers, dtype=dtype,
                )  # fmt: skip
        x, int4, int8 = torch.randn(512, in_features).bfloat16(), int4_next(), int8_quantize(weight)
        codes, transposed = torch.randint(-127, 127, x.shape, dtype=torch.int8), int8.packed.T
        int8_truth, int4_weight = int8_dequantize(int8, dtype=torch.float32).T, int4_truth.T.to(DTYPE)
        work = {"operations": 2 * 512 * weight.numel(), "dtype": torch.int8}
        yield Case(
            "int8_linear_dynamic_512_rows", shape, lambda: int8_linear_dynamic(x, int8),
            {"torch._int_mm alone": lambda: torch._int_mm(codes, transposed)},
            lambda: relative(int8_linear_dynamic(x, int8), x.float() @ int8_truth), **work,
        )  # fmt: skip
        yield Case(
            "int4_linear_dynamic_512_rows", shape, lambda: int4_linear_dynamic(x, int4),
            {"torch bfloat16 product": lambda: x @ int4_weight.T},
            lambda: relative(int4_linear_dynamic(x, int4), x.float() @ int4_truth), **work,
        )  # fmt: skip


# ---- training


def training_cases(quick: bool) -> Iterator[Case]:
    yield from lora_cases(quick)
    yield from attention_cases(quick)
    yield from cross_entropy_cases(quick)
    yield from elementwise_cases()


def lora_cases(quick: bool) -> Iterator[Case]:
    num_tokens, rank = 1024, 16
    for shape, out_features, in_features in itertools.islice(shapes(quick), 3):
        weight = torch.randn(out_features, in_features).bfloat16() / in_features**0.5
        packed = nf4_weight(weight)
        tensors = packed.packed, packed.absmax, packed.nested_absmax, packed.nested_offset
        frozen = FrozenWeight("nf4", tensors, out_features, in_features, 64)
        lora_A = (torch.randn(rank, in_features) / in_features**0.5).requires_grad_()
        adapter = Adapter(lora_A, torch.randn(out_features, rank).requires_grad_(), 2.0)
        x = torch.randn(num_tokens, in_features).bfloat16().requires_grad_()
        dense, peer = nf4_dense(packed).float().T, peft_linear(weight, rank)

        def truth() -> Tensor:
            return x.float() @ dense + 2.0 * (x.float() @ adapter.lora_A.T) @ adapter.lora_B.T

        yield Case(
            "lora_linear_step", f"{shape}, {num_tokens} tokens",
            backward(lambda: lora_linear(x, [frozen], [adapter]), [x, *adapter[:2]]),
            {} if peer is None else {"PEFT + bitsandbytes": backward(lambda: peer(x), [x, *trained(peer)])},
            lambda: relative(lora_linear(x, [frozen], [adapter]), truth()),
            operations=4 * num_tokens * weight.numel() + 6 * num_tokens * rank * (in_features + out_features),
        )  # fmt: skip


def attention_cases(quick: bool) -> Iterator[Case]:
    models = itertools.islice(ATTENTION.items(), 1 if quick else None)
    for (name, (heads, kv_heads, head_dim)), lengths in itertools.product(models, ([512, 512], [200] * 20 + [96])):
        qkv = torch.randn(sum(lengths), (heads + 2 * kv_heads) * head_dim).bfloat16().requires_grad_()
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

        def ours() -> Tensor:
            return attention(qkv, cu_seqlens, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)

        def theirs() -> Tensor:
            return torch.cat([sdpa(part[None], heads, kv_heads, head_dim)[0] for part in qkv.split(lengths)])

        shape, peer = f"{name} {heads}/{kv_heads}x{head_dim}, {len(lengths)} documents of {lengths[0]}", "torch SDPA"
        pairs = sum(n * (n + 1) / 2 for n in lengths)
        with torch.no_grad():
            yield Case(
                "attention_forward", shape, ours, {peer: theirs}, lambda: relative(ours(), theirs()),
                operations=4 * pairs * heads * head_dim,
            )  # fmt: skip
        step, their_step = backward(ours, [qkv]), backward(theirs, [qkv])
        yield Case("attention_step", shape, step, {peer: their_step}, operations=14 * pairs * heads * head_dim)


def sdpa(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    parts = qkv.view(*qkv.shape[:2], -1, head_dim).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    out = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=heads != kv_heads)
    return out.transpose(1, 2).flatten(2)


def cross_entropy_cases(quick: bool) -> Iterator[Case]:
    rows, vocab, hidden = 1022, 4096 if quick else 49152, 576
    states = torch.randn(rows, hidden).bfloat16().requires_grad_()
    head, labels = torch.randn(vocab, hidden).bfloat16() / hidden**0.5, torch.randint(0, vocab, (rows,))

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_cross_entropy(states, head, labels), states)

    def full_logits(dtype: torch.dtype = DTYPE) -> tuple[Tensor, ...]:
        logits = (states.to(dtype) @ head.to(dtype).T).float()
        return torch.autograd.grad(functional.cross_entropy(logits, labels, reduction="sum"), states)

    yield Case(
        "cross_entropy_step", f"{rows} targets, {vocab} x {hidden}", ours, {"torch, full logits": full_logits},
        lambda: relative(ours(), full_logits(torch.float32)), operations=4 * rows * vocab * hidden,
    )  # fmt: skip


def elementwise_cases() -> Iterator[Case]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    rows, hidden, wide, heads, kv_heads, head_dim = 4096, 576, 1536, 9, 3, 64
    norm = LlamaRMSNorm(hidden, 1e-5).to(DTYPE).requires_grad_(False)
    x = torch.randn(rows, hidden).bfloat16().requires_grad_()
    gate_up = torch.randn(rows, 2 * wide).bfloat16().requires_grad_()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).bfloat16().requires_grad_()
    positions, cos_sin = torch.arange(rows), torch.randn(rows, 2, head_dim // 2).bfloat16()
    cos, sin = (torch.cat([half, half], -1)[None] for half in cos_sin.unbind(1))
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}

    def llama_swiglu() -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def llama_rope() -> Tensor:
        q, k, v = qkv.view(1, rows, -1, head_dim).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
        return torch.cat([*apply_rotary_pos_emb(q, k, cos, sin), v], 1).transpose(1, 2).reshape(rows, -1)

    for name, ours, theirs, source in (
        ("rms_norm", lambda: rms_norm(x, norm.weight, eps=1e-5), lambda: norm(x), x),
        ("rope", lambda: rope(qkv, positions, cos_sin, **sizes), llama_rope, qkv),
        ("swiglu", lambda: swiglu(gate_up), llama_swiglu, gate_up),
    ):
        out, shape = ours(), f"{rows} x {source.shape[1]}"
        with torch.no_grad():
            yield Case(
                f"{name}_forward", shape, ours, {"transformers": theirs}, lambda: relative(ours(), theirs()),
                source.nbytes, out.nbytes,
            )  # fmt: skip
        yield Case(
            f"{name}_step", shape, backward(ours, [source]), {"transformers": backward(theirs, [source])}, None,
            2 * source.nbytes + out.nbytes, source.nbytes + out.nbytes,
        )  # fmt: skip


# ---- serving


def serving_cases(quick: bool) -> Iterator[Case]:
    num_sequences, context, block_size = (4, 256, 16) if quick else (8, 4096, 16)
    blocks = context // block_size
    models = itertools.islice(ATTENTION.items(), 1 if quick else None)
    for (name, (heads, kv_heads, head_dim)), dtype in itertools.product(models, (DTYPE, torch.int8)):
        cache = KVCache.allocate(
            1, num_sequences * blocks, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
            dtype=dtype, compute_dtype=DTYPE, device="cpu",
        )  # fmt: skip
        filled = torch.randn(num_sequences * context, (heads + 2 * kv_heads) * head_dim).bfloat16()
        write_kv(filled, cache, 0, torch.arange(len(filled)), num_heads=heads)
        batch = AttentionBatch(
            torch.arange(num_sequences + 1, dtype=torch.int32),
            torch.full((num_sequences,), context, dtype=torch.int32),
            torch.arange(num_sequences * blocks, dtype=torch.int32).view(num_sequences, blocks),
            torch.full((num_sequences,), -1),
        )
        last = filled[context - 1 :: context].contiguous()
        q = last.view(num_sequences, 1, -1, head_dim)[:, :, :heads].transpose(1, 2)
        keys_values = filled.view(num_sequences, context, -1, head_dim)[:, :, heads:].chunk(2, dim=2)
        k, v = (part.transpose(1, 2).contiguous() for part in keys_values)

        def ours() -> Tensor:
            return paged_attention(last, cache, 0, batch, num_heads=heads, scale=head_dim**-0.5)

        def theirs() -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(1)

        number = "int8" if dtype == torch.int8 else "bfloat16"
        value_bytes = 1 + 4 / head_dim if dtype == torch.int8 else 2
        yield Case(
            f"paged_decode_{number}", f"{name} {heads}/{kv_heads}x{head_dim}, {num_sequences} x {context} keys", ours,
            {"torch SDPA, contiguous bfloat16": theirs}, lambda: relative(ours(), theirs()),
            2 * num_sequences * context * kv_heads * head_dim * value_bytes,
        )  # fmt: skip


# ---- peers, None where they are not installed


def bitsandbytes():
    try:
        import bitsandbytes.functional
    except ImportError:
        return None
    return bitsandbytes.functional


def bitsandbytes_linear(weight: Tensor) -> Callable[[], Callable[[Tensor], Tensor]] | None:
    """Layers in eval mode, where bitsandbytes repacks for its own few-row kernel."""
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError:
        return None

    def make() -> torch.nn.Module:
        options = {"bias": False, "compute_dtype": DTYPE, "quant_type": "nf4", "compress_statistics": True}
        layer = Linear4bit(weight.shape[1], weight.shape[0], **options)
        layer.load_state_dict({"weight": weight})
        return layer.to("cpu").eval().requires_grad_(False)

    return copies(make, weight.numel() // 2)


def torch_int4(weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """torch's own INT4 product for CPUs, groups of 32, two bytes a scale and a zero."""
    out_features, in_features = weight.shape
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.int32)

    def make() -> tuple[Tensor, Tensor]:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        return packed, torch.ones(in_features // 32, out_features, 2, dtype=DTYPE)

    following = copies(make, weight.numel() // 2)

    def product(x: Tensor) -> Tensor:
        packed, scales = following()
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)

    return product


def torchao_fake_quant(weight: Tensor) -> dict[str, Callable[[], object]]:
    try:
        from torchao.quantization.qat import IntxFakeQuantizeConfig
        from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer
    except ImportError:
        return {}
    quantizer = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric=True))
    return {"torchao": lambda: quantizer(weight)}


def peft_linear(weight: Tensor, rank: int) -> torch.nn.Module | None:
    try:
        from bitsandbytes.nn import Linear4bit
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        return None
    layer = Linear4bit(weight.shape[1], weight.shape[0], bias=False, compute_dtype=DTYPE, quant_type="nf4")
    layer.load_state_dict({"weight": weight})
    module = torch.nn.ModuleDict({"layer": layer.to("cpu").requires_grad_(False)})
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["layer"])
    return inject_adapter_in_model(config, module)["layer"].train()


def trained(module: torch.nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


GROUPS = (storage_cases, linear_cases, training_cases, serving_cases)


# ---- report


def print_table(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("work", "shape", "ours", "peer", "unit", "ratio", "of limit", "error", "peer is")
    for row in rows:
        table.add_row(
            row["work"],
            row["shape"],
            f"{row['ours']:.1f}",
            "" if row["peer"] is None else f"{row['peer']:.1f}",
            row["unit"],
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['of_limit']:.0%}",
            "" if row["error"] is None else f"{row['error']:.1e}",
            row["peer_name"] or "",
        )
    Console(width=150).print(table)


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {}
    for name in ("lowbit", "torch", "transformers", "peft", "bitsandbytes", "torchao"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    main()
