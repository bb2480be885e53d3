"""What a run of train.py keeps in memory, from its config and the model's shapes.

    always    the process, weights (packed or not), adapter, teacher
    trained   gradients, the optimizer's state, float32 masters of 16-bit weights
    a pass    what autograd keeps of each layer for a token, and the loss of one chunk of rows

The peak is the largest of some moments: the loss of a pass (all activations, nothing of backward yet), the optimizer's
step (no activations, float32 gradients of 16-bit weights), an evaluation, and the end of quantization-aware training,
which writes the codes, reads them back and serves them. Rows are taken to be as long as `data.max_seq_len` lets them
be: shorter rows need less.

The surprising thing: on a CPU a process weighs more than a small model before it holds any weight.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from trainer.config.optim import OptimizerName
from trainer.config.preference import Method
from trainer.config.qat import RoundingName
from trainer.config.quant import Codebook
from trainer.config.schema import Config
from trainer.config.train import Weights
from trainer.kernels import cross_entropy
from trainer.lora import LoraLinear, attach_lora
from trainer.model import compute_dtype, low_quantizer_of, quantizer_of
from trainer.plan.estimate import Estimate
from trainer.plan.sizes import Shape, Sizes, meta_model, num_groups, num_parameters, packable, packed_bytes, sizes_of
from trainer.prepare import MAX_PASS_TOKENS
from trainer.qat.prepare import layer_schemes
from trainer.qat.scheme import Scheme
from trainer.quant_plan import first_layers
from trainer.quantizer import Quantizer

MIB = 2**20
PROCESS_BYTES = 625 * MIB
"""Python, torch, transformers, PEFT, datasets and our compiled kernels on a CPU: `python train.py conf=qlora
model=tiny data=jsonl train.batch_size=2 data.max_seq_len=256` peaks at 632 MiB, conf=full at 636, and tiny's own part
is about 10 (torch 2.13, transformers 5.24)."""
STATE_BYTES = {
    OptimizerName.adamw: 8,
    OptimizerName.adamw_8bit: 2,
    OptimizerName.adamw_paged: 8,
    OptimizerName.adamw_8bit_paged: 2,
    OptimizerName.adamw_schedule_free: 8,
    OptimizerName.lion: 4,
    OptimizerName.lion_8bit: 1,
    OptimizerName.muon: 4,
}
"""Bytes of optimizer state for a trained value: two float32 moments of AdamW; schedule-free has an average and one
moment; Lion and Muon have one. Muon's other parameters go through AdamW, see `_state_bytes`."""
HEAP_FACTOR = 1.15
"""Resident memory over the bytes of the tensors of a pass: the C library's heap has gaps. LoRA of SmolLM2-135M in 16
bits: 656 MiB between passes of 2048 and of 512 tokens, whose tensors are 518 MiB, and 547 with a layer's backward."""
MODULE_FACTOR = 1.5
"""Activations of transformers' own layers over ours, for architectures that we do not compute. Not measured."""


@dataclass(frozen=True)
class Trained:
    """Values that get gradients.

    in_dtype  weights, kept in the compute dtype; float32: factors, scales, soft rounding
    hidden    of the weights, whole matrices inside layers
    rank_sum  ranks of all adapters together
    """

    in_dtype: int = 0
    float32: int = 0
    hidden: int = 0
    rank_sum: int = 0


def estimate_training(name: str, config: Config, *, device: str = "cpu") -> Estimate:
    """Memory of the run that `config` describes, in one process.

    name    what the method is called
    device  "cpu": resident memory, with all of the process; "cuda": memory that torch allocates on the GPU
    raises  UserError if the model cannot be read, or a setting does not fit it
    """
    model, dtype = meta_model(config.model), compute_dtype(config.model.dtype)
    sizes, linears = sizes_of(model), packable(model)
    schemes = layer_schemes(model, config.qat) if config.qat.enabled else {}
    dense = num_parameters(model) * dtype.itemsize
    weights = dense - _packed_away(config, linears, dtype) + _packed(config, linears)
    trained = _trained(model, config, schemes)
    tokens = pass_tokens(config, device)
    always = {
        "process": PROCESS_BYTES if device == "cpu" else 0,
        "weights": weights,
        "mapped file": _matrix_bytes(linears, dtype) if _is_blockwise(config) and device == "cpu" else 0,
        "adapter and scales": 4 * trained.float32,
        "decoded": min(config.train.decoded_mb * MIB, _matrix_bytes(linears, dtype)) if _is_packed(config) else 0,
        "codes": sum(packed_bytes(s.weight, linears[n]) for n, s in schemes.items()) if _keeps_codes(config) else 0,
        "teacher": dense if config.distill.enabled and not config.distill.top_k else 0,
    }
    of_training = {
        "gradients": trained.in_dtype * dtype.itemsize + 4 * trained.float32,
        "optimizer": _state_bytes(config, trained),
        "masters": 4 * trained.in_dtype if dtype.itemsize == 2 else 0,
        "activations": _activation_bytes(config, sizes, trained, tokens, dtype),
    }
    parts = {key: value for key, value in (always | of_training).items() if value}
    moments = _moments(config, sizes, trained, always, of_training, tokens, dtype, device)
    if config.qat.enabled:
        coded = {name: linears[name] for name in schemes if name in linears}
        codes = sum(packed_bytes(schemes[name].weight, shape) for name, shape in coded.items())
        rest = dense - _matrix_bytes(coded, dtype)
        moments["the end"] = _end_of_qat(config, sizes, always, of_training, codes, rest)
    if config.blockwise.epochs:
        moments |= _of_blocks(config, sizes, linears, always["process"] + dense, tokens, dtype)
    return Estimate(name, parts, moments, _note(config, sizes))


def pass_tokens(config: Config, device: str) -> int:
    """Tokens that go through the model at once, if every row is as long as it may be: whole rows up to the limit."""
    documents = {Method.none: 1, Method.kto: 1}.get(config.preference.method, 2)
    row = documents * config.data.max_seq_len
    limit = config.train.max_pass_tokens or MAX_PASS_TOKENS[device != "cpu"]
    return row * max(1, min(config.train.batch_size, limit // row))


def layer_bytes_a_token(sizes: Sizes, dtype: torch.dtype, *, fused: bool) -> int:
    """What autograd keeps of a layer for one token, adapters aside.

    fused  the projections are one op each (trainer/fused_decoder.py): the stream twice, q|k|v, the attention's output,
           gate|up. Else the input of each linear layer as well: two norms and the product of gate and up
    """
    values = 2 * sizes.hidden_size + sizes.qkv + sizes.attended + 2 * sizes.intermediate_size
    values += 0 if fused else 2 * sizes.hidden_size + sizes.intermediate_size
    values += sizes.qkv if sizes.qk_norm else 0  # before and after the norms of q and k
    of_attention = 4 * sizes.num_heads  # log-sums in float32
    return int((values * dtype.itemsize + of_attention) * (1 if sizes.computed else MODULE_FACTOR))


def head_bytes(sizes: Sizes, tokens: int, dtype: torch.dtype, *, device: str, with_weight: bool) -> int:
    """The loss of one chunk of rows: logits, and on a CPU the head as oneDNN lays it out anew for the product.

    with_weight  the head is trained: its gradient in float32, and in the compute dtype
    """
    on_cpu = device == "cpu"
    rows = min(tokens, cross_entropy.CHUNK_ROWS if on_cpu else cross_entropy.CHUNK_ROWS_GPU)
    table = sizes.vocab_size * sizes.hidden_size
    repacked = table * dtype.itemsize if on_cpu else 0
    gradient = table * (4 + dtype.itemsize) if with_weight else 0
    return rows * sizes.vocab_size * dtype.itemsize + repacked + gradient


# ---- parts


def _is_packed(config: Config) -> bool:
    return config.quant.codebook is not Codebook.none


def _keeps_codes(config: Config) -> bool:
    """Merge-aware layers keep the codes of their merged weights beside the frozen 16-bit ones."""
    return config.qat.enabled and config.train.weights is Weights.lora


def _is_blockwise(config: Config) -> bool:
    """Packed one block after the other, and read again while that lasts: the 16-bit file stays mapped."""
    return config.train.weights is Weights.scales


def _matrix_bytes(linears: dict[str, Shape], dtype: torch.dtype) -> int:
    return sum(rows * columns for rows, columns in linears.values()) * dtype.itemsize


def _packed_away(config: Config, linears: dict[str, Shape], dtype: torch.dtype) -> int:
    """Bytes of dense matrices that are packed before training begins."""
    packs = _is_packed(config) or _is_blockwise(config)
    return _matrix_bytes(linears, dtype) if packs else 0


def _packed(config: Config, linears: dict[str, Shape]) -> int:
    if _is_blockwise(config):  # the scales themselves are trained, and counted there
        quantizer = Scheme.named(config.qat.scheme.value).weight
        return sum(packed_bytes(quantizer, shape) for shape in linears.values()) - 4 * num_groups(
            quantizer, linears.values()
        )
    if not _is_packed(config):
        return 0
    plan = _quantizers(config, linears)
    return sum(packed_bytes(plan[name], shape) for name, shape in linears.items())


def _quantizers(config: Config, linears: dict[str, Shape]) -> dict[str, Quantizer]:
    """With a budget of bits the first layers get more: which ones changes nothing for their sum."""
    high = quantizer_of(config.quant)
    if config.quant.bits_budget is None:
        return dict.fromkeys(linears, high)
    counts = {name: rows * columns for name, (rows, columns) in linears.items()}
    plan = first_layers(counts, high, low_quantizer_of(config.quant), bits_budget=config.quant.bits_budget)
    return {name: plan.of(name) for name in linears}


def _trained(model: PreTrainedModel, config: Config, schemes: dict[str, Scheme]) -> Trained:
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in schemes}
    scales = sum(num_groups(s.weight, [shapes[n]]) for n, s in schemes.items() if config.qat.learn_scales)
    if config.train.weights is Weights.scales:
        return Trained(float32=sum(num_groups(s.weight, [shapes[n]]) for n, s in schemes.items()))
    if config.train.weights is Weights.lora:
        return _adapter(model, config, scales)
    soft = sum(a * b for a, b in shapes.values()) if config.qat.rounding is RoundingName.soft else 0
    hidden = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)
    return Trained(in_dtype=num_parameters(model) - soft, float32=scales + soft, hidden=hidden - soft)


def _adapter(model: PreTrainedModel, config: Config, scales: int) -> Trained:
    """PEFT itself counts: patterns, layers, DoRA, whole modules and added tokens are what they are."""
    added = list(range(len(config.model.add_tokens)))
    start = {} if config.lora.init.value in ("pissa", "olora") else None
    peft_model = attach_lora(model, config.lora, seed=0, start=start, token_ids=added)
    count = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
    layers = [module for module in peft_model.modules() if isinstance(module, LoraLinear)]
    return Trained(float32=count + scales, rank_sum=sum(sum(layer.r.values()) for layer in layers))


def _state_bytes(config: Config, trained: Trained) -> int:
    count, each = trained.in_dtype + trained.float32, STATE_BYTES[config.optim.name]
    if config.optim.name is OptimizerName.muon:
        return trained.hidden * each + (count - trained.hidden) * STATE_BYTES[OptimizerName.adamw]
    return count * each


def _is_fused(config: Config) -> bool:
    """Frozen projections with plain adapters are; trained weights, dropout and rounded inputs are not."""
    return config.train.weights is Weights.lora and not config.lora.dropout


def _activation_bytes(config: Config, sizes: Sizes, trained: Trained, tokens: int, dtype: torch.dtype) -> int:
    layer = layer_bytes_a_token(sizes, dtype, fused=_is_fused(config))
    ranks = trained.rank_sum * dtype.itemsize
    if not config.train.gradient_checkpointing:
        return tokens * (sizes.num_layers * layer + ranks)
    stream = sizes.num_layers * sizes.hidden_size * dtype.itemsize
    return tokens * (stream + layer + ranks // sizes.num_layers)


# ---- moments


def _moments(
    config: Config,
    sizes: Sizes,
    trained: Trained,
    always: dict[str, int],
    of_training: dict[str, int],
    tokens: int,
    dtype: torch.dtype,
    device: str,
) -> dict[str, int]:
    kept = sum(always.values()) + of_training["optimizer"] + of_training["masters"]
    with_weight = config.train.weights is Weights.all
    head = head_bytes(sizes, tokens, dtype, device=device, with_weight=with_weight)
    rows = config.train.batch_size * config.train.grad_accum_steps * config.data.max_seq_len
    earlier = of_training["gradients"] if rows > tokens else 0
    backward = tokens * _layer_gradient(sizes) * dtype.itemsize
    activations = int(of_training["activations"] * (HEAP_FACTOR if device == "cpu" else 1))
    moments = {
        "a pass": kept
        + earlier
        + activations
        + max(head, backward + (0 if earlier else of_training["gradients"] // 2)),
        "the step": kept + of_training["gradients"] + (of_training["masters"] if dtype.itemsize == 2 else 0),
    }
    eval_tokens = min(config.train.eval_batch_size, config.data.eval_rows) * config.data.max_seq_len
    forward = eval_tokens * (_layer_gradient(sizes) + sizes.qkv + sizes.attended) * dtype.itemsize
    moments["an evaluation"] = kept + forward + head_bytes(sizes, eval_tokens, dtype, device=device, with_weight=False)
    return moments


def _layer_gradient(sizes: Sizes) -> int:
    """Values a token that one layer's backward holds at its widest: of gate|up, of their product, of the stream."""
    return 3 * sizes.intermediate_size + 3 * sizes.hidden_size


def _end_of_qat(
    config: Config, sizes: Sizes, always: dict[str, int], of_training: dict[str, int], codes: int, rest: int
) -> int:
    """What training keeps, the codes in memory, copied to be written and read back, a server over them, and float32
    log-probabilities of the tokens that are compared (trainer/finish.py).

    rest  bytes of what has no codes
    """
    kept = sum(always.values()) + of_training["optimizer"] + of_training["masters"]
    codes_in_memory = 0 if always["codes"] else codes
    compared = 3 * 4 * config.qat.compare_tokens * sizes.vocab_size
    served = codes + sizes.vocab_size * sizes.hidden_size
    return kept + codes_in_memory + 2 * (codes + rest) + served + compared


def _of_blocks(
    config: Config, sizes: Sizes, linears: dict[str, Shape], before: int, tokens: int, dtype: torch.dtype
) -> dict[str, int]:
    """One block's float32 weights, gradients and Adam's moments, its activations, and two streams of all rows."""
    block = sum(rows * columns for rows, columns in linears.values()) // sizes.num_layers
    stream = (config.blockwise.rows or 0) * config.data.max_seq_len * sizes.hidden_size * dtype.itemsize
    in_memory = min(2 * stream, config.blockwise.activations_mb * MIB)
    activations = tokens * layer_bytes_a_token(sizes, dtype, fused=False)
    return {"a block": before + 16 * block + in_memory + activations}


def _note(config: Config, sizes: Sizes) -> str:
    if not sizes.computed:
        return "its layers are transformers' own: activations are a rough guess"
    return "every row as long as data.max_seq_len"
