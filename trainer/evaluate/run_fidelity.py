"""Fidelity at the end of a run, in its short form: what rounding did to the model, on a few held-out rows.

Compared are functions of one class: after quantization-aware training the codes that ship with the 16-bit base; of an
adapter over a packed base, that base with the adapter off, since the adapter is meant to change what it answers. The
long form is `python scripts/evaluate.py run=<run folder>`.
"""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from trainer.architecture import base_model
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig
from trainer.evaluate.fidelity import Original
from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.figures import cost_figures, divergence_figures
from trainer.model import load_model
from trainer.qat.packed_model import packed_layers
from trainer.resident import release_free_memory

MAX_ROWS = 8
MAX_ROW_LEN = 128
"""Rows and tokens of each that are read: twice a second or so for a model of 135 M parameters on two cores."""
MAX_PARAMETERS = 2_000_000_000
"""Larger models would be loaded a second time at the end of a run, which nobody asked for."""
RESAMPLES = 500


def run_fidelity(
    model: PreTrainedModel | PeftModel, source: ModelConfig, rows: Sequence[Sequence[int]], *, seed: int = 0
) -> dict[str, Any] | None:
    """The packed model of a run beside the 16-bit model that it began as; the model is afterwards what it was.

    model    as the run ends: packed layers (after `convert`), or an adapter over them
    source   `config.model` of the run
    rows     token ids of held-out rows
    returns  figures as evaluation.json has them, `compared` and `tokens`; `skipped` with the reason where the base
             cannot be had; None where nothing is quantized
    """
    if not packed_layers(model):
        return None
    kept = [list(row[:MAX_ROW_LEN]) for row in rows if len(row) >= 2][:MAX_ROWS]
    reason = _why_not(model, source, kept)
    if reason is not None:
        return {"skipped": reason}
    was_training = model.training
    try:
        original = _original(source, base_model(model), kept)
        with _without_adapter(model):
            found = original.tokens(model if _has_adapter(model) else base_model(model))
    except (UserError, ValueError) as error:  # the base is gone, or its output head is more than a product
        return {"skipped": str(error)}
    finally:
        model.train(was_training)
    draws = Resampler(len(kept), resamples=RESAMPLES, seed=seed)
    compared = "packed base, adapter off" if _has_adapter(model) else "packed model"
    figures = {**divergence_figures(found, draws), **cost_figures(found, draws)}
    return {"compared": f"{compared}, with the 16-bit base", "tokens": sum(found.counts), **figures}


def _why_not(model: nn.Module, source: ModelConfig, rows: list[list[int]]) -> str | None:
    causal_lm = base_model(model)
    size = sum(parameter.numel() for parameter in causal_lm.parameters())
    size += sum(layer.quantized.shape[0] * layer.quantized.shape[1] for layer in packed_layers(model).values())
    if not rows:
        return "no held-out row has two tokens"
    if source.add_tokens:
        return "model.add_tokens gave the model another vocabulary than the base's"
    if size > MAX_PARAMETERS:
        return f"{size / 1e9:.1f} billion parameters would be loaded again; python scripts/evaluate.py run=<run> does"
    return None


def _original(source: ModelConfig, causal_lm: PreTrainedModel, rows: list[list[int]]) -> Original:
    """What the base says, in the dtype that the run computed in; the base is gone again afterwards."""
    names = {torch.bfloat16: DType.bfloat16, torch.float32: DType.float32}
    base, _ = load_model(replace(source, dtype=names.get(causal_lm.dtype, source.dtype)))
    try:
        return Original.of(base.to(causal_lm.device), rows)
    finally:
        del base
        gc.collect()
        release_free_memory()


def _without_adapter(model: PreTrainedModel | PeftModel) -> AbstractContextManager:
    return model.disable_adapter() if _has_adapter(model) else nullcontext()


def _has_adapter(model: nn.Module) -> bool:
    """After merge-aware training PEFT's wrapper is left, with codes in the place of its layers."""
    return isinstance(model, PeftModel) and any(isinstance(layer, LoraLayer) for layer in model.modules())
