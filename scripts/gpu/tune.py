"""Candidate tiles of one op after the other, timed on the GPU at hand; see kernels/_tuning.py."""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from gpu.bench import (
    DTYPE,
    TOLERANCE,
    Bench,
    Function,
    Rows,
    distance,
    failed,
    machine,
    row_of,
    say,
    seconds,
    step_of,
    still_works,
)
from gpu.inputs import Paged, codebook_weight, documents
from torch import Tensor
from triton.errors import TritonError

from trainer.kernels import _tuning, cross_entropy
from trainer.kernels.attention import attention
from trainer.kernels.codebook4 import codebook_dequantize_into
from trainer.kernels.codebook4_linear import codebook_linear
from trainer.kernels.fake_quant import Grid, fake_quant
from trainer.kernels.int4 import int4_dequantize_into, int4_linear, int4_quantize
from trainer.kernels.int8 import int8_dequantize_into, int8_linear, int8_quantize
from trainer.kernels.integer_linear import int4_linear_dynamic
from trainer.kernels.swiglu import swiglu


class Tunable(NamedTuple):
    """What the tuner tries for an op, and the calls whose times it adds up, in one bucket of tuned.json.

    build  may take the bucket's other sizes as it likes, but tiles never depend on rows: give calls with few and many
    """

    candidates: list[_tuning.Tiles]
    build: Callable[[Bench], list[Function]]


def grid(**axes: Iterable[int]) -> list[_tuning.Tiles]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def tune(op: str, tunable: Tunable, bench: Bench) -> Rows:
    functions = tunable.build(bench)
    with _tuning.forced(op, {}) as probe:  # the default, whatever the table says
        want = [as_tensors(function()) for function in functions]
        default = total_time(bench, functions)
    if len(probe.asked) != 1:
        yield failed(f"tune {op}", f"the launches asked for {sorted(probe.asked) or 'no tiles'}, not for one entry")
        return
    best, best_tiles, refused = default, None, 0
    candidates = tunable.candidates[:: max(1, len(tunable.candidates) // 4)] if bench.quick else tunable.candidates
    for candidate in candidates[-1:] if bench.dry else candidates:
        say(alive=op)
        try:
            with _tuning.forced(op, candidate):
                if all(agree(as_tensors(function()), w) for function, w in zip(functions, want, strict=True)):
                    taken = total_time(bench, functions)
                    best, best_tiles = min((best, best_tiles), (taken, candidate), key=lambda pair: pair[0])
        except (TritonError, RuntimeError):  # too much shared memory, a layout that Triton cannot make: no candidate
            if not still_works(bench):
                raise
            refused += 1
    source = f"{machine(bench.device)}, {date.today()}, torch {torch.__version__}, triton {version('triton')}: "
    source += f"{1e6 * best:.1f} us, default {1e6 * default:.1f} us, {len(candidates) - refused} candidates"
    wins = best < 0.97 * default  # less is noise
    yield {
        probe.asked.pop(): {"tiles": best_tiles, "source": source} if wins else {"source": f"default is best: {source}"}
    }
    yield row_of(
        f"tune {op}", str(best_tiles if wins else "default"), ours=1e6 * best, unit="us", peer=1e6 * default,
        peer_name="default", ratio=default / best, note=f"{refused} candidates were refused",
    )  # fmt: skip


def total_time(bench: Bench, functions: list[Function]) -> float:
    return sum(statistics.median(seconds(bench, function, total_s=0.03)) for function in functions)


def as_tensors(result: object) -> tuple[Tensor, ...]:
    return (result.clone(),) if isinstance(result, Tensor) else tuple(tensor.clone() for tensor in result)


def agree(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(distance(a, b) < TOLERANCE[DTYPE] for a, b in zip(got, want, strict=True))


def tuned_linear(
    make: Callable[[Tensor], Any], product: Callable[[Tensor, Any], Tensor]
) -> Callable[..., list[Function]]:
    """Products of 1 and 16 rows with an 8B layer."""

    def build(bench: Bench) -> list[Function]:
        _, out_features, in_features = bench.layers()[0]
        weight = make(bench.randn(out_features, in_features, std=0.02))
        xs = [bench.randn(rows, in_features) for rows in (1, 16)]
        return [lambda x=x: product(x, weight) for x in xs]

    return build


def tuned_dequantize(
    make: Callable[[Tensor], Any], into: Callable[[Any, Tensor], None]
) -> Callable[..., list[Function]]:
    def build(bench: Bench) -> list[Function]:
        _, out_features, in_features = bench.layers()[0]
        weight = make(bench.randn(out_features, in_features, std=0.02))
        out = torch.empty(out_features, in_features, dtype=DTYPE, device=bench.device)
        return [lambda: (into(weight, out), out)[1]]

    return build


def tuned_rows(bench: Bench) -> list[Function]:
    _, out_features, in_features = bench.layers()[0]
    weight = int4_quantize(bench.randn(out_features, in_features, std=0.02), group_size=32)
    xs = [bench.randn(rows, in_features) for rows in (16, bench.size(2048, 20))]
    return [lambda x=x: int4_linear_dynamic(x, weight) for x in xs]


def tuned_head(bench: Bench) -> list[Function]:
    logits = bench.randn(bench.size(2048, 8), bench.size(128256, 300))
    labels = torch.zeros(len(logits), dtype=torch.int64, device=bench.device)
    kernel = cross_entropy.softmax_gradient_triton
    options, work = cross_entropy.Options(), torch.empty_like(logits)
    return [lambda: (kernel(work.copy_(logits), labels, options, with_grad=True), work)]


def tuned_attention(head_dim: int, *, backward: bool) -> Callable[[Bench], list[Function]]:
    def build(bench: Bench) -> list[Function]:
        sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": bench.size(head_dim, 16)}
        functions = []
        for lengths in [[8, 8]] if bench.dry else [[2048] * 2, [256] * 16]:
            cu_seqlens, qkv = documents(bench, lengths), bench.randn(sum(lengths), 48 * sizes["head_dim"])
            call = functools.partial(attention, cu_seqlens=cu_seqlens, **sizes)
            functions.append(step_of(call, qkv) if backward else functools.partial(call, qkv))
        return functions

    return build


def tuned_paged(head_dim: int, lengths: list[tuple[int, int]], *, int8: bool) -> Callable[[Bench], list[Function]]:
    def build(bench: Bench) -> list[Function]:
        heads = (32, 8, bench.size(head_dim, 16))
        return [Paged.random(bench, [(min(2, lengths[0][0]), 9)] if bench.dry else lengths, heads, int8=int8).attend]

    return build


def tuned_elementwise(function: Callable[[Bench], Function]) -> Callable[[Bench], list[Function]]:
    return lambda bench: [function(bench)]


FEW_ROWS = grid(
    BLOCK_N=(16, 32, 64), BLOCK_K=(64, 128, 256), num_warps=(1, 4), num_stages=(3, 5), PROGRAMS=(512, 1024, 2048)
)
FLASH = grid(BLOCK_M=(32, 64, 128), BLOCK_N=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3))
PAGED = grid(BLOCK_N=(16, 32, 64, 128), num_warps=(2, 4, 8), num_stages=(2, 3, 4))
PROMPTS = grid(BLOCK_M=(16, 32), num_warps=(4, 8), num_stages=(2, 3, 4))  # larger ones have other bits than decoding
TUNABLE = {
    "codebook_dequantize": Tunable(
        grid(NUM_BYTES=(512, 1024, 2048, 4096), num_warps=(2, 4, 8)),
        tuned_dequantize(codebook_weight, codebook_dequantize_into),
    ),
    "codebook_linear": Tunable(FEW_ROWS, tuned_linear(codebook_weight, codebook_linear)),
    "int4_dequantize": Tunable(
        grid(NUM_BYTES=(512, 1024, 2048, 4096), num_warps=(2, 4, 8)),
        tuned_dequantize(functools.partial(int4_quantize, group_size=32), int4_dequantize_into),
    ),
    "int4_linear": Tunable(FEW_ROWS, tuned_linear(functools.partial(int4_quantize, group_size=32), int4_linear)),
    "int8_dequantize": Tunable(
        grid(NUM_WEIGHTS=(1024, 2048, 4096, 8192), num_warps=(2, 4, 8)),
        tuned_dequantize(int8_quantize, int8_dequantize_into),
    ),
    "int8_linear": Tunable(FEW_ROWS, tuned_linear(int8_quantize, int8_linear)),
    "integer_linear": Tunable(
        grid(BLOCK_M=(16, 32, 64, 128), BLOCK_N=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 4)), tuned_rows
    ),
    "cross_entropy": Tunable(grid(BLOCK_V=(1024, 2048, 4096, 8192), num_warps=(4, 8, 16)), tuned_head),
    "attention_forward 64": Tunable(FLASH, tuned_attention(64, backward=False)),
    "attention_forward 128": Tunable(FLASH, tuned_attention(128, backward=False)),
    "attention_dq 64": Tunable(FLASH, tuned_attention(64, backward=True)),
    "attention_dq 128": Tunable(FLASH, tuned_attention(128, backward=True)),
    "attention_dkdv 64": Tunable(FLASH, tuned_attention(64, backward=True)),
    "attention_dkdv 128": Tunable(FLASH, tuned_attention(128, backward=True)),
    "paged_decode 64": Tunable(PAGED, tuned_paged(64, [(1, 8192)] * 64, int8=False)),
    "paged_decode 128": Tunable(PAGED, tuned_paged(128, [(1, 8192)] * 64, int8=False)),
    "paged_decode 128 int8": Tunable(PAGED, tuned_paged(128, [(1, 8192)] * 64, int8=True)),
    "paged_prefill 64": Tunable(PROMPTS, tuned_paged(64, [(4096, 4096)], int8=False)),
    "paged_prefill 128": Tunable(PROMPTS, tuned_paged(128, [(4096, 4096)], int8=False)),
    "swiglu": Tunable(
        grid(BLOCK_F=(512, 1024, 2048, 4096), num_warps=(2, 4, 8)),
        tuned_elementwise(
            lambda bench: functools.partial(swiglu, bench.randn(bench.size(8192, 9), bench.size(28672, 96)))
        ),
    ),
    "fake_quant": Tunable(
        grid(TILE=(1024, 2048, 4096), num_warps=(2, 4, 8)),
        tuned_elementwise(
            lambda bench: functools.partial(
                fake_quant, bench.randn(bench.size(14336, 9), bench.size(4096, 96)), Grid.int4(group_size=32)
            )
        ),
    ),
}
"""Unit -> what is tried. The op is the unit's first word: an op with several buckets has several units."""


def tuned(name: str) -> Callable[[Bench], Rows]:
    return lambda bench: tune(name.partition(" ")[0], TUNABLE[name], bench)


TUNING_UNITS: dict[str, Callable[[Bench], Rows]] = {f"tune_{name.replace(' ', '_')}": tuned(name) for name in TUNABLE}
