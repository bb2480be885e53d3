"""Each op with Triton and with its reference, on the GPU, at sizes that fill it.

A check draws its inputs and returns a function, which then runs with one and with the other.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import torch
from gpu.bench import TOLERANCE, Bench, Rows, Target, distance, judged, row_of, with_gradients
from gpu.inputs import ALPHA, RANK, Paged, codebook_weight, documents, lora_layer, rotary
from torch import Tensor

from trainer.kernels.attention import attention
from trainer.kernels.codebook4 import codebook_dequantize, codebook_quantize
from trainer.kernels.codebook4_linear import codebook_linear
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.kernels.embedding import embed_tokens
from trainer.kernels.fake_quant import Grid, fake_quant, fake_quant_learned
from trainer.kernels.int4 import Int4Weight, int4_dequantize, int4_linear, int4_quantize
from trainer.kernels.int8 import int8_dequantize, int8_linear, int8_quantize
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.kernels.lora_rows import LoraTable, lora_rows_
from trainer.kernels.merged_weight import merge_rows
from trainer.kernels.rms_norm import add_rms_norm, rms_norm
from trainer.kernels.rope import rope
from trainer.kernels.swiglu import swiglu

Check = Callable[[Bench, torch.dtype], Callable[[], tuple[Tensor, ...]]]


@contextlib.contextmanager
def kernels(name: str) -> Iterator[None]:
    before = os.environ.get("LOWBIT_KERNELS")
    os.environ["LOWBIT_KERNELS"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOWBIT_KERNELS"]
        else:
            os.environ["LOWBIT_KERNELS"] = before


def check(name: str, build: Check, *, exact: bool, bench: Bench) -> Rows:
    """One row: the largest share of the tolerance over all dtypes; exact: every bit must agree."""
    errors, worst = {}, 0.0
    for dtype in TOLERANCE:
        torch.manual_seed(1)
        function = build(bench, dtype)
        with kernels("reference"):
            want = function()
        with kernels("reference" if bench.dry else "auto"):
            got = function()
        error = max(distance(a, b) for a, b in zip(got, want, strict=True))
        errors[str(dtype).removeprefix("torch.")] = error
        worst = max(worst, error / (1e-12 if exact else TOLERANCE[dtype]))
    note = ", ".join(f"{dtype} {error:.1e}" for dtype, error in errors.items())
    row = row_of(f"correct {name}", ours=worst, unit="of the tolerance", errors=errors, note=note, exact=True)
    yield judged(row, Target("ours", 1, at_least=False))


def check_codebook(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    weight = bench.randn(bench.size(1000, 10), bench.size(1056, 96), dtype=dtype)
    packed = [codebook_weight(weight, codebook) for codebook in ("nf4", "fp4")]

    def function() -> tuple[Tensor, ...]:
        quantized = [codebook_quantize(weight, codebook=codebook, block_size=64) for codebook in ("nf4", "fp4")]
        return *itertools.chain(*quantized), *(codebook_dequantize(w, dtype=dtype) for w in packed)

    return function


def check_codebook_linear(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    packed = codebook_weight(bench.randn(bench.size(3000, 40), bench.size(2048, 96), std=0.05))
    xs = [bench.randn(rows, packed.in_features, dtype=dtype) for rows in (1, 5, 16, bench.size(300, 20))]
    return lambda: tuple(itertools.chain(*(with_gradients(lambda x: codebook_linear(x, packed), x) for x in xs)))


def int4_weights(weight: Tensor) -> list[Int4Weight]:
    return [int4_quantize(weight, group_size=32, symmetric=symmetric) for symmetric in (True, False)]


def check_integer(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    weight = bench.randn(bench.size(1000, 10), bench.size(1056, 96), dtype=dtype)
    int4, int8 = int4_weights(weight), int8_quantize(weight)

    def function() -> tuple[Tensor, ...]:
        again = int4_weights(weight)
        dense = [int4_dequantize(w, dtype=dtype) for w in int4] + [int8_dequantize(int8, dtype=dtype)]
        return *(w.packed for w in again), *(w.scales for w in again), *dense

    return function


def check_integer_linear(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    weight = bench.randn(bench.size(3000, 40), bench.size(2048, 96), std=0.05)
    int4, int8 = int4_weights(weight), int8_quantize(weight)
    xs = [bench.randn(rows, weight.shape[1], dtype=dtype) for rows in (1, 5, 16, bench.size(300, 20))]

    def products(x: Tensor) -> tuple[Tensor, ...]:
        fused = [int4_linear(x, w) for w in int4] + [int8_linear(x, int8)]
        return *fused, *(int4_linear_dynamic(x, w) for w in int4), int8_linear_dynamic(x, int8)

    return lambda: tuple(itertools.chain(*(with_gradients(products, x) for x in xs)))


def check_lora_linear(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    size, tokens = bench.size(1024, 64), bench.size(500, 20)
    weights, adapters = lora_layer(bench, [size, size // 4, size // 4], size)
    norm = torch.ones(size, device=bench.device, dtype=dtype)
    factors = [factor for adapter in adapters for factor in adapter[:2]]

    def function(x: Tensor, residual: Tensor, *factors: Tensor) -> Tensor:
        given = [Adapter(*factors[i : i + 2], ALPHA / RANK) for i in range(0, len(factors), 2)]
        return lora_linear(x, weights, given, residual=residual, norm=(norm, 1e-6))

    inputs = bench.randn(tokens, size, dtype=dtype), bench.randn(tokens, size + size // 2, dtype=dtype)
    return lambda: with_gradients(function, *inputs, *factors)


def check_fake_quant(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    x = bench.randn(bench.size(1000, 10), bench.size(1056, 96), dtype=dtype)
    grids = [Grid.int4(group_size=32), Grid.int4(group_size=32, symmetric=False), Grid.int4(divisor=7.5), Grid.int8()]
    scales = int4_quantize(x, group_size=32).scales

    def function() -> tuple[Tensor, ...]:
        plain = [with_gradients(lambda x, grid=grid: fake_quant(x, grid), x) for grid in grids]
        return *itertools.chain(*plain), *with_gradients(fake_quant_learned, x, scales)

    return function


def check_cross_entropy(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    rows, size, vocab_size = bench.size(700, 20), bench.size(512, 32), bench.size(50257, 300)
    labels = torch.randint(0, vocab_size, (rows,), device=bench.device)
    labels[::7] = -100
    inputs = bench.randn(rows, size, dtype=dtype), bench.randn(vocab_size, size, dtype=dtype, std=size**-0.5)
    options = [{}, {"z_loss": 1e-4, "label_smoothing": 0.1}, {"softcap": 30.0, "logit_scale": 0.5}]

    def function() -> tuple[Tensor, ...]:
        losses = [with_gradients(lambda h, w, o=o: linear_cross_entropy(h, w, labels, **o), *inputs) for o in options]
        return tuple(itertools.chain(*losses))

    return function


def check_norms(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    shapes = (1, 96), (bench.size(700, 9), bench.size(4096, 64)), (3, bench.size(5120, 40))
    cases = [tuple(bench.randn(*size, dtype=dtype) for size in (shape, shape, shape[1:])) for shape in shapes]

    def function() -> tuple[Tensor, ...]:
        alone = [with_gradients(lambda x, w: rms_norm(x, w, eps=1e-6), x, w) for x, _, w in cases]
        added = [with_gradients(lambda x, r, w: add_rms_norm(x, r, w, eps=1e-6), x, r, w) for x, r, w in cases]
        return tuple(itertools.chain(*alone, *added))

    return function


def check_rope(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    tokens, heads = bench.size(1500, 12), {"num_heads": 6, "num_kv_heads": 2, "head_dim": bench.size(128, 16)}
    qkv = bench.randn(tokens, 10 * heads["head_dim"], dtype=dtype)
    norms = [bench.randn(heads["head_dim"], dtype=dtype) for _ in range(2)]
    positions, table = torch.arange(tokens, device=bench.device), rotary(bench, tokens, heads["head_dim"], dtype)

    def function() -> tuple[Tensor, ...]:
        plain = with_gradients(lambda x: rope(x, positions, table, **heads), qkv)
        return *plain, *with_gradients(
            lambda x, q, k: rope(x, positions, table, **heads, q_norm=q, k_norm=k, eps=1e-6), qkv, *norms
        )

    return function


def check_merged_weight(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    rows, features = bench.size(1000, 10), bench.size(1056, 96)
    weight = bench.randn(rows, features, dtype=dtype)
    factors = [bench.randn(*shape, dtype=torch.float32, std=0.1) for shape in ((RANK, features), (rows, RANK))]

    def function() -> tuple[Tensor, ...]:
        out = torch.empty(rows, features, device=bench.device)
        merge_rows(weight, *factors, out)
        return (out,)

    return function


def check_swiglu(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    gate_up = bench.randn(bench.size(700, 9), 2 * bench.size(5000, 40), dtype=dtype, std=3.0)
    return lambda: with_gradients(swiglu, gate_up)


def check_attention(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    lengths = [3, 9, 1, 7] if bench.dry else [513, 1, 64, 300, 0, 127]
    cu_seqlens = documents(bench, lengths)
    cases = []
    for head_dim, window in itertools.product((16,) if bench.dry else (64, 80, 128), (None, 100)):
        heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "sliding_window": window}
        cases.append((heads, bench.randn(sum(lengths), 10 * head_dim, dtype=dtype)))

    def function() -> tuple[Tensor, ...]:
        each = [with_gradients(lambda x, h=heads: attention(x, cu_seqlens, **h), qkv) for heads, qkv in cases]
        return tuple(itertools.chain(*each))

    return function


def check_paged(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    decode = [(1, 9), (1, 30)] if bench.dry else [(1, 4000), (1, 1), (1, 517)]
    mixed = [(5, 9), (1, 20)] if bench.dry else [(200, 700), (1, 300), (33, 33)]
    head_dims = (16,) if bench.dry else (64, 128)
    cases = [
        Paged.random(bench, lengths, (8, 2, head_dim), dtype=dtype, int8=int8)
        for lengths, head_dim, int8 in itertools.product((decode, mixed), head_dims, (False, True))
    ]

    def function() -> tuple[Tensor, ...]:
        outputs = []
        for case in cases:
            case.write()
            # Codes of int8 keys are seen through attention: torch divides by a constant with its reciprocal on GPUs,
            # and a value on the border of two codes may take either.
            outputs += [case.attend(), case.attend(64)]
            outputs += [] if case.cache.dtype == torch.int8 else [case.cache.k.clone(), case.cache.v.clone()]
        return tuple(outputs)

    return function


def check_rows(bench: Bench, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    size = bench.size(1024, 32)
    weight, ids = bench.randn(50, size, dtype=dtype), torch.tensor([3, 49, 0, 3, 7], device=bench.device)
    x, y = bench.randn(5, size, dtype=dtype), bench.randn(5, 2 * size, dtype=dtype)
    slots = torch.tensor([0, 1, -1, 1, 2], dtype=torch.int32, device=bench.device)
    factors = [(bench.randn(rank, size, std=0.1), bench.randn(size, rank, std=0.1)) for rank in (16, 5)]

    def function() -> tuple[Tensor, ...]:
        table, total = LoraTable([size, size], size, 3, dtype, bench.device), y.clone()
        for slot, (lora_A, lora_B) in enumerate(factors):
            table.set(slot, 0, lora_A, lora_B, 2.0)
            table.set(slot, 1, lora_A, lora_B, 0.5)
        lora_rows_(total, x, slots, table)
        return total, embed_tokens(ids, weight)

    return function


CHECKS: dict[str, tuple[Check, bool]] = {
    "nf4_fp4": (check_codebook, True),
    "nf4_linear": (check_codebook_linear, False),
    "int4_int8": (check_integer, True),
    "int4_int8_linear": (check_integer_linear, False),
    "lora_linear": (check_lora_linear, False),
    "fake_quant": (check_fake_quant, False),
    "merged_weight": (check_merged_weight, True),
    "cross_entropy": (check_cross_entropy, False),
    "rms_norm": (check_norms, False),
    "rope": (check_rope, False),
    "swiglu": (check_swiglu, False),
    "attention": (check_attention, False),
    "paged_attention": (check_paged, False),
    "embedding_lora_rows": (check_rows, False),
}
"""Name -> check, and whether every bit must agree."""
