"""Optimizers and learning-rate schedules. The rate is a pure function of the step, so there is no scheduler to save."""

import math
from collections.abc import Iterable

import torch

from trainer.config import OptimConfig, OptimizerName, Schedule


def build_optimizer(params: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """An optimizer over `params`; adamw_8bit keeps its state in 8 bits (arXiv:2110.02861)."""
    kwargs = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    match config.name:
        case OptimizerName.adamw:
            return torch.optim.AdamW(params, fused=True, **kwargs)
        case OptimizerName.adamw_8bit:
            from bitsandbytes.optim import AdamW8bit  # here, since its import takes a second

            return AdamW8bit(params, **kwargs)


def lora_learning_rate(hidden_size: int) -> float:
    """LoRA's best peak rate for a Llama of this width (Schulman et al., LoRA Without Regret, 2025)."""
    return 5e-4 * (2000 / hidden_size) ** 0.781


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step` (0-based) out of `num_steps`: linear warm-up, then the schedule.

    config.lr must be a number here; run.py fills it in where the user left null.
    """
    num_warmup = round(config.warmup_ratio * num_steps)
    if step < num_warmup:
        return config.lr * (step + 1) / (num_warmup + 1)
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    match config.schedule:
        case Schedule.constant:
            share = 1.0
        case Schedule.linear:
            share = 1 - progress
        case Schedule.cosine:
            share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
