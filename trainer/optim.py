"""Optimizers and learning-rate schedules.

The rate is a pure function of the step, so there is no scheduler to save. Each parameter group has an `lr_scale`, its
share of that rate: layer-wise rates and LoRA+ are nothing else. A schedule-free optimizer takes gradients at one point
and is judged at another; `averaged_weights` puts the second into the model for an evaluation, a checkpoint or an
export, and takes it out again bit for bit, so that looking at a run does not change it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from trainer.config.errors import require
from trainer.config.optim import DecayShape, OptimConfig, OptimizerName, Schedule

LION_LR_SHARE = 0.1
"""Lion's learning rate over AdamW's: "typically 3-10x smaller" (arXiv:2302.06675, section 5), and ten times in its
language models."""
CODE_LR = 1e-2
"""Learning rate of what is counted in steps of a grid: zero points, and the variables of soft rounding, for which it is
that of the authors' code (arXiv:2004.10568)."""


class Optimizer(Protocol):
    """What the loop and the checkpoints need of an optimizer; each `torch.optim.Optimizer` has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class JointOptimizer:
    """Several optimizers over different parameters that act as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)


def require_device(config: OptimConfig, device: torch.device) -> None:
    """Paged state lives in memory that GPU and processor share.

    raises  UserError for a paged optimizer elsewhere
    """
    require(
        not config.name.is_paged or device.type == "cuda",
        f"optim.name={config.name.value} pages its state out of a GPU's memory, and this run is on {device.type}; "
        f"use optim.name={config.name.value.removesuffix('_paged')}",
    )


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """An optimizer over what is trainable in `model`, its groups as `parameter_groups` makes them.

    raises  UserError for a paged optimizer without a GPU, or if a setting touches no parameter of `model`
    """
    groups = parameter_groups(model, config)
    require_device(config, groups[0]["params"][0].device)
    lr, betas, eps = config.lr, betas_of(config), config.eps
    match config.name:
        case OptimizerName.adamw:
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        case OptimizerName.adamw_8bit | OptimizerName.adamw_paged | OptimizerName.adamw_8bit_paged:
            from bitsandbytes.optim import AdamW  # here, since its import takes a second

            bits = 32 if config.name is OptimizerName.adamw_paged else 8
            return AdamW(groups, lr=lr, betas=betas, eps=eps, optim_bits=bits, is_paged=config.name.is_paged)
        case OptimizerName.lion | OptimizerName.lion_8bit:
            from bitsandbytes.optim import Lion

            return Lion(groups, lr=lr, betas=betas, optim_bits=8 if config.name is OptimizerName.lion_8bit else 32)
        case OptimizerName.adamw_schedule_free:
            from schedulefree import AdamWScheduleFree

            return AdamWScheduleFree(groups, lr=lr, betas=betas, eps=eps)
        case OptimizerName.muon:
            return _muon(groups, config)


def _muon(groups: list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Muon for the hidden matrices, AdamW for the rest, one learning rate for both.

    The update of an [m, n] matrix is scaled by 0.2 sqrt(max(m, n)), which gives it the size of AdamW's
    (arXiv:2502.16982, equation 4). LoRA factors are left to AdamW: the singular values that Muon evens out should be
    those of the layer's update, and a factor's depend on how the product was split (arXiv:2606.12921). Full fine-tuning
    of models that AdamW has trained, which most are, can lose by Muon (arXiv:2605.10468).
    """
    hidden = [group for group in groups if group["hidden"]]
    rest = [group for group in groups if not group["hidden"]]
    require(
        bool(hidden),
        "optim.name=muon orthogonalises updates of whole hidden matrices, and this run trains none: LoRA factors, "
        "embeddings, heads and norms go through AdamW; train all weights, or use optim.name=adamw",
    )
    muon = torch.optim.Muon(hidden, lr=config.lr, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw")
    if not rest:
        return muon
    return JointOptimizer(
        muon, torch.optim.AdamW(rest, lr=config.lr, betas=betas_of(config), eps=config.eps, fused=True)
    )


def betas_of(config: OptimConfig) -> tuple[float, float]:
    """The two decays, with each optimizer's own where the config has none."""
    default = 0.99 if config.name.is_lion else 0.999
    return config.beta1, default if config.beta2 is None else config.beta2


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """The trainable parameters of `model`, grouped by what the optimizer does with them, in the order of the model.

    returns  groups with `params`, `lr_scale` (share of the learning rate: layer_decay^(layers above) times, for lora_B,
             lora_plus_ratio; `CODE_LR` over it for zero points and soft rounding), `weight_decay` (none for vectors and
             what is learned about rounding) and `hidden` (whole 2-D matrices inside a layer)
    raises   UserError if layer_decay or lora_plus_ratio is set and touches no parameter
    """
    num_layers = 1 + max((_layer_of(name) for name, _ in model.named_modules()), default=-1)
    embeddings = tuple(f"{name}." for name, module in model.named_modules() if _is_embedding(module))
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        layer = _layer_of(name)
        inside = layer >= 0
        layers_above = num_layers - 1 - layer if inside else num_layers * name.startswith(embeddings)
        lr_scale = config.layer_decay**layers_above * (config.lora_plus_ratio if _is_lora_B(name) else 1.0)
        kind = name.rpartition(".")[2].removeprefix("lora_")  # of merge-aware layers, as PEFT wants it
        if kind in ("zeros", "soft_rounding"):
            lr_scale = CODE_LR / config.lr
        beside = kind in ("scales", "input_scale", "zeros", "soft_rounding")  # see qat/fake_quant.py
        weight_decay = config.weight_decay if param.ndim >= 2 and not beside else 0.0
        hidden = inside and param.ndim == 2 and not beside and not any(p.startswith("lora_") for p in name.split("."))
        key = (lr_scale, weight_decay, hidden)
        group = {"params": [], "lr_scale": lr_scale, "weight_decay": weight_decay, "hidden": hidden}
        groups.setdefault(key, group)["params"].append(param)
    require(
        config.lora_plus_ratio == 1 or any(_is_lora_B(name) for name, p in model.named_parameters() if p.requires_grad),
        f"optim.lora_plus_ratio={config.lora_plus_ratio} has no effect without LoRA factors; use 1",
    )
    require(
        config.layer_decay == 1 or len({group["lr_scale"] for group in groups.values()}) > 1,
        f"optim.layer_decay={config.layer_decay} has no effect: what is trained lies in one layer; use 1",
    )
    return list(groups.values())


def _layer_of(name: str) -> int:
    """Number of the layer that a module or parameter lies in, from the first number in its name; -1 outside of all."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _is_lora_B(name: str) -> bool:
    return not {"lora_B", "lora_embedding_B"}.isdisjoint(name.split("."))


def _is_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding or PEFT's wrapper around one."""
    inner = (module, getattr(module, "base_layer", None), getattr(module, "original_module", None))
    return any(isinstance(layer, nn.Embedding) for layer in inner)


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """What the run would give if it ended now stands in the model; afterwards the weights are what they were, bit for
    bit. A checkpoint that is written meanwhile holds both. Nothing happens unless the optimizer averages."""
    use_averaged_weights(optimizer)
    yield
    use_training_weights(optimizer)


@torch.no_grad()
def use_averaged_weights(optimizer: Optimizer) -> None:
    """Put the average x into the parameters; the training point y goes into the optimizer's state, since the library's
    way back from x (arXiv:2405.15682, equation 1 solved for y) rounds."""
    if not _averages(optimizer):
        return
    for param, state in optimizer.state.items():
        if "y" not in state:  # there already
            state["y"] = param.clone()
    optimizer.eval()


@torch.no_grad()
def use_training_weights(optimizer: Optimizer) -> None:
    """Get ready for steps: after `use_averaged_weights`, after a checkpoint was loaded, or at the start."""
    if _averages(optimizer):
        for param, state in optimizer.state.items():
            if "y" in state:
                param.copy_(state.pop("y"))
        for group in optimizer.param_groups:
            group["train_mode"] = True
    for part in getattr(optimizer, "parts", (optimizer,)):  # a wrapper names what it wraps
        if getattr(part, "is_paged", False):
            _page_state(part)


def _averages(optimizer: Optimizer) -> bool:
    return "train_mode" in optimizer.param_groups[0]


def _page_state(optimizer: torch.optim.Optimizer) -> None:
    """Put state that a checkpoint brought into paged memory; bitsandbytes loads it into the GPU's."""
    for param, state in optimizer.state.items():
        for key in {"state1", "state2"} & state.keys():
            if not getattr(state[key], "is_paged", False):
                state[key] = optimizer.get_state_buffer(param, dtype=state[key].dtype).copy_(state[key])


def lora_learning_rate(hidden_size: int) -> float:
    """LoRA's best peak rate for a Llama of this width (Schulman et al., LoRA Without Regret, 2025)."""
    return 5e-4 * (2000 / hidden_size) ** 0.781


def default_learning_rate(name: OptimizerName, hidden_size: int) -> float:
    """Peak rate where `optim.lr` is null."""
    return lora_learning_rate(hidden_size) * (LION_LR_SHARE if name.is_lion else 1.0)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give each group its share of `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


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
        case Schedule.wsd:
            share = _wsd_share(step, num_steps, config)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def _wsd_share(step: int, num_steps: int, config: OptimConfig) -> float:
    """1, then a decay over the last `decay_ratio` of the steps (arXiv:2405.18392, section 3 and its 1-sqrt form)."""
    num_decay = round(config.decay_ratio * num_steps)
    progress = max(0, step - (num_steps - num_decay)) / max(1, num_decay)
    return 1 - (math.sqrt(progress) if config.decay_shape is DecayShape.sqrt else progress)
