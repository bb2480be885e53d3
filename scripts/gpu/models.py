"""Whole models with random weights, built on the GPU layer by layer: training steps, decoding, torch.compile."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu.bench import (
    DTYPE,
    TOLERANCE,
    Bench,
    Function,
    Rows,
    Target,
    bitsandbytes,
    described,
    distance,
    free_memory,
    judged,
    row_of,
    still_works,
    with_gradients,
)
from gpu.inputs import ALPHA, RANK, documents, lora_layer, rotary
from torch import Tensor, nn

from trainer.kernels.attention import attention
from trainer.kernels.lora_linear import lora_linear
from trainer.kernels.paged_attention import AttentionBatch, KVCache
from trainer.kernels.rms_norm import rms_norm
from trainer.kernels.rope import rope

SIZES_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
"""meta-llama/Meta-Llama-3-8B, config.json."""
SIZES_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}  # fmt: skip
"""meta-llama/Llama-3.2-1B, config.json, with a head of its own."""
LOSS_TOLERANCE = 0.05
"""Nats between first losses of one function: bfloat16 rounding moves the mean of 4,000 tokens by a few thousandths."""
SIZES_DRY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256,
}  # fmt: skip


def random_model(bench: Bench, sizes: dict[str, Any], pack: Callable[[nn.Module], object]) -> Any:
    """A Llama in bfloat16, frozen; `pack` replaces the linear layers of each layer as soon as it has weights.

    The same sizes give the same weights whatever `pack` does.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**sizes, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(DTYPE)
    generator = torch.Generator(bench.device).manual_seed(0)

    def fill(module: nn.Module) -> None:
        module.to_empty(device=bench.device).requires_grad_(False)
        for parameter in module.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(0, 0.02, generator=generator)

    for layer in model.model.layers:
        fill(layer)
        pack(layer)
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        fill(module)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(bench.device)  # float32, as from_pretrained leaves it
    return model.eval()


def pack_nf4(layer: nn.Module) -> None:
    from trainer.linear import quantize_linears
    from trainer.quantizer import Quantizer

    quantize_linears(layer, Quantizer(), skip=set())


def pack_bitsandbytes(layer: nn.Module) -> None:
    bnb = bitsandbytes()
    for name, module in list(layer.named_modules()):
        if type(module) is not nn.Linear:
            continue
        with torch.device("meta"):
            packed = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=DTYPE, quant_type="nf4"
            )
        options = {"requires_grad": False, "compress_statistics": True, "quant_type": "nf4"}
        packed.weight = bnb.nn.Params4bit(module.weight.data, **options, module=packed)
        parent, _, child = name.rpartition(".")
        setattr(layer.get_submodule(parent), child, packed.to(module.weight.device))  # quantizes


Step = tuple[Callable[[], Tensor], list[nn.Parameter]]


def our_step(bench: Bench, sizes: dict[str, Any], tokens: Tensor, checkpointing: bool) -> Step:
    from trainer.config.lora import LoraConfig
    from trainer.lora import attach_lora
    from trainer.objective import NextTokenLoss

    model = random_model(bench, sizes, pack_nf4)
    objective = NextTokenLoss(attach_lora(model, LoraConfig(rank=RANK, alpha=ALPHA), seed=0)).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    targets = tokens.shape[0] * (tokens.shape[1] - 1)
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    return lambda: objective(input_ids=tokens, labels=tokens) / targets, trained


def their_step(bench: Bench, sizes: dict[str, Any], tokens: Tensor, checkpointing: bool) -> Step:
    from peft import LoraConfig, get_peft_model

    model = random_model(bench, sizes, pack_bitsandbytes)
    model.is_loaded_in_4bit = True  # how PEFT knows its 4-bit layers
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(model, config).train()
    if checkpointing:
        peft.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    return lambda: peft(input_ids=tokens, labels=tokens, use_cache=False).loss, trained


class Steps(NamedTuple):
    """What the training steps of a contender took."""

    first_loss: float
    seconds: list[float]
    peak_bytes: float


def train(bench: Bench, build: Callable[..., Step], *arguments: object) -> Steps:
    """Forward, backward, clipping and AdamW; wall time, since launches are part of a step."""
    free_memory(bench)
    loss, trained = build(bench, *arguments)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if bench.device.type == "cuda":
        free_memory(bench)
        torch.cuda.reset_peak_memory_stats()
    losses, taken = [], []
    for _ in range(2 if bench.dry else 7):
        bench.synchronize()
        began = time.perf_counter()
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        bench.synchronize()
        taken.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 1
    return Steps(losses[0], taken[1 if bench.dry else 2 :], float(peak))


def qlora(bench: Bench) -> Rows:
    """A QLoRA step beside PEFT + bitsandbytes: tokens/s and peak memory."""
    sizes, shape = (SIZES_DRY, (2, 12)) if bench.dry else (SIZES_8B, (2, 2048))
    if bench.quick and not bench.dry:
        sizes = SIZES_1B
    tokens = torch.randint(100, sizes["vocab_size"], shape, device=bench.device)
    name = f"{'8B' if sizes is SIZES_8B else '1B' if sizes is SIZES_1B else 'tiny'}, {shape[0]} x {shape[1]} tokens"
    for checkpointing in (False, True):
        ours = train(bench, our_step, sizes, tokens, checkpointing)
        free_memory(bench)
        theirs, note = None, "bitsandbytes does not import"
        if bitsandbytes() is not None:
            try:
                theirs, note = train(bench, their_step, sizes, tokens, checkpointing), ""
            except Exception as error:  # a peer that does not run here must not cost our row
                if not still_works(bench):
                    raise
                note = f"peer: {described(error)}"
            free_memory(bench)
        yield from step_rows(
            bench, sizes, tokens.numel(), f"{name}{', checkpointing' * checkpointing}", ours, theirs, note
        )


def step_rows(
    bench: Bench, sizes: dict[str, Any], num_tokens: int, shape: str, ours: Steps, theirs: Steps | None, note: str
) -> Rows:
    same = theirs is None or abs(ours.first_loss - theirs.first_loss) < LOSS_TOLERANCE
    if not same:
        note = f"first losses differ: {ours.first_loss:.4f}, peer {theirs.first_loss:.4f}: not one function"
    operations = 4 * num_tokens * num_linear_weights(sizes)  # forward, and the gradient of the input
    median = statistics.median(ours.seconds)
    speed_row = row_of(
        "qlora_step", shape, ours=num_tokens / median, unit="tokens/s",
        of_limit=operations / bench.limits.bfloat16 / median, note=note, first_loss=ours.first_loss,
    )  # fmt: skip
    memory_row = row_of("qlora_step_memory", shape, ours=ours.peak_bytes / 1e9, unit="GB", note=note)
    if theirs is not None:
        peer, name = num_tokens / statistics.median(theirs.seconds), "PEFT + bitsandbytes"
        speed_row |= {"peer": peer, "peer_name": name, "ratio": speed_row["ours"] / peer}
        peer = theirs.peak_bytes / 1e9
        memory_row |= {"peer": peer, "peer_name": name, "ratio": memory_row["ours"] / peer}
    for row, target in ((speed_row, Target("ratio", 1.5)), (memory_row, Target("ratio", 0.7, at_least=False))):
        row = judged(row, target)
        yield row if same else {**row, "met": False, "exact": True}


def num_linear_weights(sizes: dict[str, Any]) -> int:
    """Weights that every token is multiplied by, the head's among them."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head_dim = sizes.get("head_dim", hidden // heads)
    block = hidden * head_dim * (2 * heads + 2 * sizes["num_key_value_heads"]) + 3 * hidden * sizes["intermediate_size"]
    return sizes["num_hidden_layers"] * block + hidden * sizes["vocab_size"]


def serve_decoder(bench: Bench) -> Rows:
    """The server's forward for single tokens, recorded as a CUDA graph and not, over caches of a real length."""
    from trainer.serve.decoder import Rows as Batch
    from trainer.serve.decoder import decoder_from_module
    from trainer.serve.recording import Recordings

    sizes = SIZES_DRY if bench.dry else SIZES_1B
    decoder = decoder_from_module(random_model(bench, sizes, pack_nf4), max_model_len=sizes["max_position_embeddings"])
    config, context, block_size = decoder.config, bench.size(1024, 20), 16
    for num_seqs in (1, 3) if bench.dry else (1, 16, 64):
        blocks = -(-context // block_size) + 1
        cache = KVCache.allocate(
            config.num_layers, num_seqs * blocks, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            block_size=block_size, dtype=DTYPE, compute_dtype=DTYPE, device=bench.device,
        )  # fmt: skip
        cache.k.normal_()
        cache.v.normal_()
        tables = torch.arange(num_seqs * blocks, dtype=torch.int32, device=bench.device).view(num_seqs, blocks)
        positions = torch.full((num_seqs,), context, device=bench.device)
        slots = tables[:, context // block_size].long() * block_size + context % block_size
        lens = torch.full((num_seqs,), context + 1, dtype=torch.int32, device=bench.device)
        batch = AttentionBatch(documents(bench, [1] * num_seqs), lens, tables, slots)
        token_ids = torch.randint(0, config.vocab_size, (num_seqs,), device=bench.device)
        rows = Batch(token_ids, positions, batch, None)
        forward = functools.partial(decoder.forward, rows, cache, batch_invariant=True)
        recordings = Recordings.on(bench.device, DTYPE)

        def tokens(run: Callable[[], Tensor]) -> Tensor:
            return decoder.logits(run(), batch_invariant=True).argmax(-1)

        def recorded(recordings: Recordings | None = recordings, forward: Function = forward) -> Tensor:
            return forward() if recordings is None else recordings.run("step", forward)

        with torch.inference_mode():
            plain, replay = functools.partial(tokens, forward), functools.partial(tokens, recorded)
            same = torch.equal(plain(), replay()) and torch.equal(plain(), replay())
            yield from decode_rows(bench, decoder, cache, num_seqs, context, replay, plain, same)


def decode_rows(
    bench: Bench,
    decoder: Any,
    cache: KVCache,
    num_seqs: int,
    context: int,
    graph: Function,
    plain: Function,
    same: bool,
) -> Rows:
    times = [wall_seconds(bench, function) for function in (graph, plain)]
    ours, peer = (num_seqs / statistics.median(taken) for taken in times)
    moved = decoder.nbytes - decoder.embedding.nbytes + cache.nbytes
    layers = f"{decoder.config.num_layers} layers of {decoder.config.hidden_size}, NF4"
    row = row_of(
        "decode_with_graphs", f"{layers}, {num_seqs} sequences of {context} tokens", ours=ours, unit="tokens/s",
        of_limit=ours * moved / num_seqs / bench.limits.copy, peer=peer, peer_name="without graphs", ratio=ours / peer,
        note="" if same else "tokens differ from those without",
    )  # fmt: skip
    yield {**row, "target": "the same tokens", "met": same, "exact": True}


def wall_seconds(bench: Bench, function: Function) -> list[float]:
    """Times of calls with their launches, as a server sees them."""
    function()
    taken = []
    for _ in range(2 if bench.dry else 20):
        bench.synchronize()
        began = time.perf_counter()
        function()
        bench.synchronize()
        taken.append(time.perf_counter() - began)
    return taken


def serve_engine(bench: Bench) -> Rows:
    """Greedy answers of the whole engine, with graphs and without; needs what the server needs (hydra, prometheus)."""
    from transformers import AutoTokenizer

    from trainer.serve.llm import LLM
    from trainer.serve.sampling_params import SamplingParams
    from trainer.sources.tiny import tiny_model

    sizes = SIZES_DRY if bench.dry else SIZES_1B
    model, tokenizer = random_model(bench, sizes, pack_nf4), AutoTokenizer.from_pretrained(tiny_model())
    num_tokens, length = bench.size(128, 4), bench.size(256, 6)
    llm = LLM(
        model, tokenizer, max_model_len=length + num_tokens, max_num_seqs=64, enable_prefix_caching=False,
        kv_cache_memory_bytes=bench.size(8 << 30, 1 << 22),
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    recordings = llm.runner._recordings
    for num_seqs in (1, 3) if bench.dry else (1, 16, 64):
        prompts = torch.randint(4, sizes["vocab_size"], (num_seqs, length)).tolist()
        answers, taken = {}, {}
        for kind, recorded in (("with graphs", recordings), ("without graphs", None)):
            llm.runner._recordings = recorded
            llm.generate(prompts, params)  # records and compiles
            bench.synchronize()
            began = time.perf_counter()
            outputs = llm.generate(prompts, params)
            taken[kind] = time.perf_counter() - began
            answers[kind] = [choice.token_ids for output in outputs for choice in output.choices]
        same = answers["with graphs"] == answers["without graphs"]
        ours, peer = (num_seqs * num_tokens / seconds for seconds in taken.values())
        row = row_of(
            "engine_with_graphs", f"{num_seqs} prompts of {length}, {num_tokens} tokens each", ours=ours,
            unit="tokens/s", peer=peer, peer_name="without graphs", ratio=ours / peer,
            note="" if same else "tokens differ from those without",
        )  # fmt: skip
        yield {**row, "target": "the same tokens", "met": same, "exact": True}


def compiled(bench: Bench) -> Rows:
    """torch.compile over a block of our ops: one graph without a break, and the same results."""
    tokens, size = bench.size(512, 20), bench.size(1024, 64)
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": size // 8}
    weights, adapters = lora_layer(bench, [size, size // 4, size // 4], size)
    gate_up, gate_up_adapters = lora_layer(bench, [2 * size, 2 * size], size)
    down, down_adapters = lora_layer(bench, [size], 2 * size)
    norm = torch.ones(size, device=bench.device, dtype=DTYPE)
    positions, table = torch.arange(tokens, device=bench.device), rotary(bench, tokens, size // 8, DTYPE)
    cu_seqlens = documents(bench, [tokens // 2, tokens - tokens // 2])

    def block(x: Tensor) -> Tensor:
        qkv = lora_linear(x, weights, adapters, norm=(norm, 1e-6))
        attended = attention(rope(qkv, positions, table, **heads), cu_seqlens, **heads)
        x = x + rms_norm(attended, norm, eps=1e-6)
        mlp = lora_linear(x, gate_up, gate_up_adapters, norm=(norm, 1e-6))
        return lora_linear(mlp, down, down_adapters, with_swiglu=True, residual=x)

    x = bench.randn(tokens, size)
    run = torch.compile(block, fullgraph=True, backend="aot_eager" if bench.dry else "inductor")
    error = max(distance(a, b) for a, b in zip(with_gradients(run, x), with_gradients(block, x), strict=True))
    row = row_of(
        "compile_fullgraph", f"a block of our ops, {tokens} x {size}", ours=error, unit="relative error", exact=True
    )
    yield judged(row, Target("ours", TOLERANCE[DTYPE], at_least=False))
