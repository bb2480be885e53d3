"""The merged model rounded to 4 bits again, Q(dequantize(W) + s B A): lossy, so the loss is measured and written down.

The file layout is bitsandbytes' (QLoRA's own), which transformers opens; the codes are our quantizer's, on the grid of
the base. What rounding does to the update is no matter of taste: with an update of 1 % of the weight's norm some 2 %
of it is left, since the step between two codes is twenty times as large.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.architecture import base_layer, base_model
from trainer.config.errors import require
from trainer.export.merged import Survival, merge_layer
from trainer.formats.bnb import CODEBOOKS, bnb_config, bnb_tensors
from trainer.formats.hf_folder import SHARD_BYTES, num_weights, whole_folder, write_identity, write_model
from trainer.linear import QuantLinear

MEASURED_ROWS = 32
"""Held-out rows on which next-token distributions are compared: two forwards each."""


@dataclass(frozen=True)
class LossyMerge:
    """What a re-quantised merge lost.

    survival    of the update in the weights, overall and by layer
    kl          mean KL(unmerged || merged) of the next token, nats a target token
    flips       share of the target positions whose likeliest token is another
    num_tokens  target positions compared
    """

    survival: Survival
    kl: float
    flips: float
    num_tokens: int


def write_merged_4bit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rows: Sequence[tuple[Tensor, Tensor]],
    *,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> LossyMerge:
    """Merge, round to the grid of the base, measure, write; the model itself is left as it is.

    model    PEFT's wrapper around a model whose linear layers are packed as nf4 or fp4
    rows     input_ids and labels, [T] int64 each, -100 where there is no target; not trained on
    raises   UserError if a layer is dense or in another format; else as `write_merged`
    """
    causal_lm, survival = base_model(model), Survival()
    packed = dict(_requantized(causal_lm, survival))
    require(
        bool(packed),
        "export.formats has 'merged_4bit', but no layer has an adapter over packed weights; export merged instead",
    )
    kl, flips, num_tokens = _divergence(causal_lm, packed, rows[:MEASURED_ROWS])
    merge = LossyMerge(survival, kl, flips, num_tokens)
    dtype = causal_lm.get_input_embeddings().weight.dtype
    quantizer = next(iter(packed.values())).quantizer
    heads = [name for name, module in causal_lm.named_modules() if module is causal_lm.get_output_embeddings()]

    def render(name: str, layer: nn.Module) -> dict[str, Tensor]:
        return bnb_tensors((packed[name] if name in packed else base_layer(layer)).quantized, dtype)

    figures = {"update_survived": survival.overall, "kl": kl, "flips": flips, "num_tokens": num_tokens}
    needs_bytes = num_weights(causal_lm)  # a byte a weight: more than codes, and less the embeddings' second byte
    with whole_folder(folder, needs_bytes=needs_bytes) as partial:
        write_model(
            model,
            tokenizer,
            partial,
            render,
            dtype=dtype,
            shard_bytes=shard_bytes,
            quantization_config=bnb_config(quantizer, dtype, heads),
        )
        write_identity(partial, "merged", {**(provenance or {}), **figures, "layers": survival.layers})
    return merge


def _requantized(model: PreTrainedModel, survival: Survival) -> Iterator[tuple[str, QuantLinear]]:
    """Each adapted layer, its update rounded into new codes."""
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer | QuantLinear) or name.endswith(".base_layer"):
            continue
        packed = base_layer(layer)
        kind = packed.quantizer.codebook if isinstance(packed, QuantLinear) else "16 bits"
        require(
            kind in CODEBOOKS,
            f"export.formats has 'merged_4bit', but {name} is in {kind}; the format holds nf4 and fp4: export merged",
        )
        if layer is packed:
            continue
        base, merged = merge_layer(name, layer)
        quantized = packed.quantizer.quantize(merged)
        survival.add(name, base, merged, quantized.dequantize(torch.float32))
        yield name, QuantLinear(quantized, packed.bias)


@torch.inference_mode()
def _divergence(
    model: PreTrainedModel, packed: dict[str, QuantLinear], rows: Sequence[tuple[Tensor, Tensor]]
) -> tuple[float, float, int]:
    """Mean KL and share of flips over the rows' target positions, and how many these are; one row at a time."""
    was_training, device = model.training, model.get_input_embeddings().weight.device
    model.eval()
    kl, flips, count = 0.0, 0, 0
    for input_ids, labels in rows:
        keep = (labels[1:] != -100).nonzero()[:, 0]
        inputs = {"input_ids": input_ids[None].to(device), "use_cache": False}
        before = model(**inputs).logits[0, keep.to(device)].double().log_softmax(-1)
        with _replaced(model, packed):
            after = model(**inputs).logits[0, keep.to(device)].double().log_softmax(-1)
        kl += (before.exp() * (before - after)).sum().item()
        flips += int((before.argmax(-1) != after.argmax(-1)).sum())
        count += len(keep)
    model.train(was_training)
    return kl / max(1, count), flips / max(1, count), count


@contextmanager
def _replaced(model: nn.Module, layers: dict[str, nn.Module]) -> Iterator[None]:
    """Other layers under the same names, for a moment."""
    before = {name: model.get_submodule(name) for name in layers}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        yield
    finally:
        for name, layer in before.items():
            model.set_submodule(name, layer)
