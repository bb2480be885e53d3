"""How fast the kernels are, beside the machine's limit and the best peer.

A case is timed before its loop goes on, so its functions see the variables as they are then, and ruff's B023 does not
apply.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from gpu.bench import DTYPE, Bench, Rows, Target, bitsandbytes, free_memory, peak_bytes, row_of, speed, step_of
from gpu.inputs import ALPHA, RANK, Paged, codebook_weight, documents, lora_layer, rotary
from torch import Tensor
from torch.nn import functional

from trainer.kernels import cross_entropy
from trainer.kernels.attention import attention
from trainer.kernels.codebook4 import codebook_dequantize_into, codebook_quantize
from trainer.kernels.codebook4_linear import codebook_linear
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.kernels.embedding import embed_tokens
from trainer.kernels.fake_quant import Grid, fake_quant
from trainer.kernels.int4 import int4_dequantize_into, int4_linear, int4_quantize
from trainer.kernels.int8 import int8_dequantize_into, int8_quantize
from trainer.kernels.integer_linear import int4_linear_dynamic, int8_linear_dynamic
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.kernels.rms_norm import add_rms_norm, rms_norm
from trainer.kernels.rope import rope
from trainer.kernels.swiglu import swiglu

# ruff: noqa: B023


def bandwidth(share: float) -> Target:
    return Target("of_limit", share)


def dequantize(bench: Bench) -> Rows:
    bnb = bitsandbytes()
    for name, out_features, in_features in bench.layers():
        shape = f"{name} {out_features}x{in_features}"
        dense = bench.randn(out_features, in_features, std=0.02)
        out, numel = torch.empty_like(dense), dense.numel()
        weight, peers = codebook_weight(dense), {}
        if bnb is not None:
            theirs = bnb.functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
            peers["bitsandbytes"] = lambda: bnb.functional.dequantize_4bit(*theirs)
        yield from speed(
            bench, "nf4_dequantize", shape, lambda: codebook_dequantize_into(weight, out), peers,
            moved=(0.5 + 1 / 64 + 2) * numel, targets=[bandwidth(0.85)],
        )  # fmt: skip
        int4, int8 = int4_quantize(dense, group_size=32), int8_quantize(dense)
        moved = (0.5 + 4 / 32 + 2) * numel
        yield from speed(bench, "int4_dequantize", shape, lambda: int4_dequantize_into(int4, out), moved=moved)
        yield from speed(bench, "int8_dequantize", shape, lambda: int8_dequantize_into(int8, out), moved=3 * numel)
        grid = Grid.int4(group_size=32)
        yield from speed(bench, "fake_quant_int4", shape, lambda: fake_quant(dense, grid), moved=4 * numel)
        yield from speed(
            bench, "nf4_quantize", shape, lambda: codebook_quantize(dense, codebook="nf4", block_size=64),
            moved=(0.5 + 4 / 64 + 2) * numel,
        )  # fmt: skip


def their_linear(dense: Tensor) -> Callable[[Tensor], Tensor] | None:
    """bitsandbytes' product with an NF4 weight: a kernel of its own for one row, else dequantize and multiply."""
    bnb = bitsandbytes()
    if bnb is None:
        return None
    packed, state = bnb.functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
    return lambda x: bnb.matmul_4bit(x, packed.t(), quant_state=state)


def linear(bench: Bench) -> Rows:
    """Few rows: the weight's bytes are the limit."""
    for name, out_features, in_features in bench.layers():
        dense = bench.randn(out_features, in_features, std=0.02)
        nf4, int4, theirs = codebook_weight(dense), int4_quantize(dense, group_size=32), their_linear(dense)
        bits = {"nf4_linear": 4 + 8.125 / 64, "int4_linear": 4 + 32 / 32, "int4_linear_dynamic": 4 + 32 / 32}
        for num_rows in (1, 16) if bench.quick or bench.dry else (1, 2, 4, 8, 16):
            x, shape = bench.randn(num_rows, in_features), f"{name} {out_features}x{in_features}, {num_rows} rows"
            peers = {} if theirs is None else {"bitsandbytes": lambda: theirs(x)}
            work = {"operations": 2 * num_rows * dense.numel()}
            for op, function in (
                ("nf4_linear", lambda: codebook_linear(x, nf4)),
                ("int4_linear", lambda: int4_linear(x, int4)),
                ("int4_linear_dynamic", lambda: int4_linear_dynamic(x, int4)),
            ):
                moved = dense.numel() * bits[op] / 8 + 2 * num_rows * (in_features + out_features)
                targets = [] if op == "int4_linear_dynamic" else [bandwidth(0.7), Target("ratio", 1)]
                yield from speed(bench, op, shape, function, peers, moved=moved, **work, targets=targets)


def linear_rows(bench: Bench) -> Rows:
    """Many rows: the products are the limit."""
    for name, out_features, in_features in bench.layers():
        dense = bench.randn(out_features, in_features, std=0.02)
        nf4, int4, int8 = codebook_weight(dense), int4_quantize(dense, group_size=32), int8_quantize(dense)
        theirs = their_linear(dense)
        for num_rows in (bench.size(2048, 20), bench.size(8192, 24)):
            x, shape = bench.randn(num_rows, in_features), f"{name} {out_features}x{in_features}, {num_rows} rows"
            peers = {} if theirs is None else {"bitsandbytes": lambda: theirs(x)}
            peers["bfloat16 product alone"] = lambda: x @ dense.T
            work = {"operations": 2 * num_rows * dense.numel()}
            targets = [bandwidth(0.75)]
            yield from speed(
                bench, "nf4_linear", shape, lambda: codebook_linear(x, nf4), peers, **work, targets=targets
            )
            yield from speed(bench, "int4_linear", shape, lambda: int4_linear(x, int4), **work, targets=targets)
            integer = {**work, "rate": torch.int8}
            yield from speed(bench, "int4_linear_dynamic", shape, lambda: int4_linear_dynamic(x, int4), **integer)
            yield from speed(bench, "int8_linear_dynamic", shape, lambda: int8_linear_dynamic(x, int8), **integer)


def head(bench: Bench) -> Rows:
    """Linear and cross-entropy, forward and backward, and the kernel between its products."""
    rows, size, vocab_size = bench.size(4096, 20), bench.size(4096, 32), bench.size(128256, 300)
    hidden, weight = bench.randn(rows, size), bench.randn(vocab_size, size, std=size**-0.5)
    labels = torch.randint(0, vocab_size, (rows,), device=bench.device)
    shape = f"{rows} rows, {size} x {vocab_size}"
    peer = step_of(lambda h: functional.cross_entropy((h @ weight.T).float(), labels, reduction="sum"), hidden)
    ours = step_of(lambda h: linear_cross_entropy(h, weight, labels), hidden)
    work = {"operations": 4 * rows * size * vocab_size}
    yield from speed(bench, "cross_entropy_step", shape, ours, {"torch, full logits": peer}, **work)
    for contender, function in (("ours", ours), ("torch, full logits", peer)):
        bytes_taken = peak_bytes(bench, function)
        yield row_of("cross_entropy_memory", shape, ours=bytes_taken / 1e9, unit="GB", peer_name=contender)
    logits = bench.randn(min(rows, bench.size(2048, 8)), vocab_size)
    kernel = cross_entropy.softmax_gradient_reference if bench.dry else cross_entropy.softmax_gradient_triton
    options = cross_entropy.Options()
    yield from speed(
        bench, "softmax_gradient", f"{len(logits)} x {vocab_size}",
        lambda: kernel(logits, labels[: len(logits)], options, with_grad=True), moved=2 * logits.nbytes,
    )  # fmt: skip


def elementwise(bench: Bench) -> Rows:
    """Each reads and writes its tensors once: their bytes are the limit."""
    tokens, size, mlp = bench.size(8192, 12), bench.size(4096, 64), bench.size(14336, 96)
    x, weight, gate_up = bench.randn(tokens, size), bench.randn(size), bench.randn(tokens, 2 * mlp)
    shape = f"{tokens} x {size}"
    norm = {"torch": lambda: functional.rms_norm(x, (size,), weight, 1e-6)}
    moved = 2 * x.nbytes
    yield from speed(bench, "rms_norm", shape, lambda: rms_norm(x, weight, eps=1e-6), norm, moved=moved)
    yield from speed(bench, "add_rms_norm", shape, lambda: add_rms_norm(x, x, weight, eps=1e-6), moved=2 * moved)
    ours = step_of(lambda x: rms_norm(x, weight, eps=1e-6), x)
    peer = step_of(lambda x: functional.rms_norm(x, (size,), weight, 1e-6), x)
    yield from speed(bench, "rms_norm_step", shape, ours, {"torch": peer}, moved=5 * x.nbytes)

    def silu(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate) * up

    shape, moved = f"{tokens} x {mlp}", 1.5 * gate_up.nbytes
    yield from speed(bench, "swiglu", shape, lambda: swiglu(gate_up), {"torch": lambda: silu(gate_up)}, moved=moved)
    peers = {"torch": step_of(silu, gate_up)}
    yield from speed(bench, "swiglu_step", shape, step_of(swiglu, gate_up), peers, moved=4 * gate_up.nbytes)
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": bench.size(128, 16)}
    qkv = bench.randn(tokens, 48 * heads["head_dim"])
    positions, table = torch.arange(tokens, device=bench.device), rotary(bench, tokens, heads["head_dim"], DTYPE)
    ours = step_of(lambda x: rope(x, positions, table, **heads), qkv)
    yield from speed(bench, "rope_step", f"{tokens} x {qkv.shape[1]}", ours, moved=4 * qkv.nbytes)
    ids = torch.randint(0, tokens, (tokens,), device=bench.device)
    yield from speed(bench, "embed_tokens", f"{tokens} x {size}", lambda: embed_tokens(ids, x), moved=2 * x.nbytes)


def training(bench: Bench) -> Rows:
    """Attention of documents and a LoRA layer, forward and backward."""
    num_heads, num_kv_heads, head_dim = heads = (32, 8, bench.size(128, 16))
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    packs = {"2 x 2048": [2048] * 2, "16 x 256": [256] * 16} if not bench.dry else {"2 x 8": [8, 8]}
    for name, lengths in packs.items():
        cu_seqlens, qkv = documents(bench, lengths), bench.randn(sum(lengths), (num_heads + 16) * head_dim)
        shape = f"{name} tokens, heads {heads}"
        operations = 2 * num_heads * head_dim * sum(length**2 for length in lengths)  # half of the square, 2 products

        def sdpa(qkv: Tensor, lengths: list[int] = lengths) -> Tensor:
            q, k, v = qkv.view(len(lengths), lengths[0], -1, head_dim).transpose(1, 2).split([num_heads, 8, 8], dim=1)
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def ours(qkv: Tensor, cu_seqlens: Tensor = cu_seqlens) -> Tensor:
            return attention(qkv, cu_seqlens, **sizes)

        peers = {"torch SDPA": lambda: sdpa(qkv)}
        yield from speed(bench, "attention_forward", shape, lambda: ours(qkv), peers, operations=operations)
        peers = {"torch SDPA": step_of(sdpa, qkv)}
        yield from speed(bench, "attention_step", shape, step_of(ours, qkv), peers, operations=3.5 * operations)
    tokens, out_features, in_features = bench.size(4096, 20), bench.size(28672, 64), bench.size(4096, 64)
    weights, adapters = lora_layer(bench, [out_features // 2] * 2, in_features)
    factors = [factor for adapter in adapters for factor in adapter[:2]]

    def layer(x: Tensor, *factors: Tensor) -> Tensor:
        given = [Adapter(*factors[i : i + 2], ALPHA / RANK) for i in range(0, len(factors), 2)]
        return lora_linear(x, weights, given)

    ours = step_of(layer, bench.randn(tokens, in_features), *factors)
    yield from speed(
        bench, "lora_linear_step", f"gate and up {out_features}x{in_features}, {tokens} tokens", ours,
        operations=4 * tokens * out_features * in_features,
    )  # fmt: skip


def paged(bench: Bench) -> Rows:
    """Attention over the paged cache: decoding reads every key and value once, a prompt multiplies."""
    heads = (32, 8, bench.size(128, 16))
    num_heads, num_kv_heads, head_dim = heads
    cases = [(2, 20)] if bench.dry else [(64, 8192), (16, 32768), (1, 131072)]
    for (num_seqs, context), int8 in itertools.product(cases[:1] if bench.quick else cases, (False, True)):
        case = Paged.random(bench, [(1, context)] * num_seqs, heads, int8=int8)
        value_bytes = 1 + 4 / head_dim if int8 else 2
        moved = 2 * num_seqs * context * num_kv_heads * head_dim * value_bytes
        q = bench.randn(num_seqs, num_heads, 1, head_dim)
        k, v = (bench.randn(num_seqs, num_kv_heads, context, head_dim) for _ in range(2))
        sdpa = functools.partial(functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)
        peers = {} if int8 else {"torch SDPA, dense keys": sdpa}
        work = f"paged_decode_{'int8' if int8 else 'bf16'}"
        shape = f"{num_seqs} x {context} tokens, heads {heads}"
        yield from speed(bench, work, shape, case.attend, peers, moved=moved, targets=[bandwidth(0.8)])
        del case, q, k, v, sdpa, peers
        free_memory(bench)
    length = bench.size(4096, 12)
    case = Paged.random(bench, [(length, length)], heads)
    operations = 2 * num_heads * head_dim * length**2
    q, k, v = (bench.randn(1, n, length, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads))
    peer = functools.partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    shape = f"{length} tokens, heads {heads}"
    yield from speed(bench, "paged_prefill", shape, case.attend, {"torch SDPA": peer}, operations=operations)
    yield from speed(bench, "write_kv", shape, case.write, moved=4 * length * num_kv_heads * head_dim * 2)
