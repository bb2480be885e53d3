"""Quantization-aware training of a model: which layer computes in which scheme, and what changes from step to step.

`prepare_qat` replaces linear layers by layers that multiply what their codes stand for; from there on training is the
one loop. What changes on the way (the start, observers that freeze, rounding that hardens) is a function of the step
alone, so a resumed run needs no more than its number.
"""

import difflib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.architecture import ARCHITECTURES
from trainer.config.errors import UserError, require
from trainer.config.qat import QatConfig, SchemeName, moment_step
from trainer.qat.fake_quant import (
    commit_observers,
    fake_quant_layers,
    fake_quantize_embeddings,
    fake_quantize_kv_cache,
    fake_quantize_linears,
    set_rounding,
)
from trainer.qat.packed_model import packed_layers
from trainer.qat.rounding import annealed_beta, soft_rounding_penalty
from trainer.qat.scheme import Scheme

log = logging.getLogger(__name__)

FREEZE_OBSERVERS = 0.5
"""Share of the run after which observed ranges stay, unless `qat.freeze_observers` is set: later codes are trained for
the ranges that ship."""
SOFT_WARMUP = 0.2
"""Share of the quantized steps in which soft rounding is free: "warm start" of the authors of arXiv:2004.10568."""
SOFT_PENALTY = 1e-5
"""Weight of the penalty's sum over all weights, beside a loss in nats a token. A weight's part of that loss has a
gradient of some 1e-6, so where the penalty is steep it decides; AdamW cares for the ratio only."""


def layer_schemes(model: PreTrainedModel, config: QatConfig) -> dict[str, Scheme]:
    """The scheme of each layer that has one, by its name.

    raises  UserError if a pattern fits no layer or never decides, a scheme is unsupported on a layer, the groups do not
            divide it, or no layer is left
    """
    apart = _embedding_and_head(model)
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear or layer in apart}
    names = {name: SchemeName.none if layer in apart else config.scheme for name, layer in layers.items()}
    names |= _by_pattern(list(layers), config.patterns)
    chosen = {name: scheme_name for name, scheme_name in names.items() if scheme_name is not SchemeName.none}
    require(bool(chosen), f"qat.schemes={config.schemes} leaves no layer with a scheme; use conf=full to train 16 bits")
    schemes = {scheme_name: scheme_of(scheme_name, config) for scheme_name in set(chosen.values())}
    for name, scheme_name in chosen.items():
        _require_fit(name, layers[name], scheme_name, schemes[scheme_name])
    return {name: schemes[scheme_name] for name, scheme_name in chosen.items()}


def scheme_of(name: SchemeName, config: QatConfig) -> Scheme:
    """The scheme that `name` stands for, with those settings of the `qat` section that it has.

    raises  UserError for settings that have no meaning together
    """
    integers = name.value.startswith("int")
    options = {}
    if name in (SchemeName.int4, SchemeName.int4_int8):
        options = {"group_size": config.group_size, "symmetric": config.symmetric}
    if integers:
        options |= {"learn_scales": config.learn_scales, "scale_init": config.scale_init.value}
        options |= {"rounding": config.rounding.value}
    if name is SchemeName.int8_static and config.observer is not None:
        options["observer"] = config.observer.value
    try:
        return Scheme.named(name.value, **options)
    except ValueError as error:
        raise UserError(f"qat.scheme={name.value}: {error}") from None


def _by_pattern(names: list[str], patterns: dict[str, SchemeName]) -> dict[str, SchemeName]:
    """What the first pattern that matches says of each layer."""
    chosen: dict[str, SchemeName] = {}
    for pattern, scheme_name in patterns.items():
        matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        require(
            bool(matched),
            f"qat.schemes has {pattern!r}, which fits no layer; near it are {', '.join(_nearest(pattern, names))}",
        )
        fresh = {name: scheme_name for name in matched if name not in chosen}
        require(
            bool(fresh),
            f"qat.schemes has {pattern!r} after patterns that match all of its layers, and the first that matches "
            "counts; put it before them",
        )
        chosen |= fresh
    return chosen


def _nearest(pattern: str, names: list[str]) -> list[str]:
    """Up to four endings of layers' names that come close to a pattern."""
    parts = pattern.count(".") + 1
    endings = list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))
    return difflib.get_close_matches(pattern, endings, n=4, cutoff=0.4) or endings[:4]


def _require_fit(name: str, layer: nn.Module, scheme_name: SchemeName, scheme: Scheme) -> None:
    try:
        scheme.check(layer.weight.shape[1])
    except ValueError as error:
        raise UserError(f"{name}: {str(error).replace('quant.', 'qat.')}") from None
    weight_only = scheme.activations is None
    require(
        weight_only or not isinstance(layer, nn.Embedding),
        f"qat.schemes gives {name}, an embedding, {scheme_name.value}, which rounds inputs, and an embedding's are "
        "token ids; use int4, int8_weight_only, nf4, mxfp4 or nvfp4",
    )


def _embedding_and_head(model: PreTrainedModel) -> set[nn.Module]:
    """Modules that get a scheme by a pattern only."""
    return {module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None}


def prepare_qat(model: PreTrainedModel, config: QatConfig) -> int:
    """Replace the layers that have a scheme by trainable layers that multiply their codes, in place; returns how many.

    Before the optimizer is made: learned scales are parameters. Weights that are rounded softly are frozen.

    raises  UserError as `layer_schemes`, or if a tied embedding and head have two schemes
    """
    schemes = layer_schemes(model, config)
    try:
        count = fake_quantize_linears(model, schemes.get) + fake_quantize_embeddings(model, schemes.get)
    except ValueError as error:
        raise UserError(f"qat.schemes={config.schemes}: {error}") from None
    log_schemes(model, schemes)
    return count


def log_schemes(model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """One line: how many layers have which weights, and how much of the model that is."""
    counts = Counter(_short(scheme) for scheme in schemes.values())
    sizes = {id(layer.weight): layer.weight.numel() for layer in map(model.get_submodule, schemes)}
    share = sum(sizes.values()) / sum(parameter.numel() for parameter in model.parameters())
    parts = ", ".join(f"{count} layers {what}" for what, count in counts.items())
    log.info("qat      %s: %.0f %% of all parameters", parts, 100 * share)


def _short(scheme: Scheme) -> str:
    inputs = scheme.activations
    kind = "" if inputs is None else " with static inputs" if inputs.static else " with dynamic inputs"
    return f"{scheme.weight_name}{kind}"


def set_enabled(model: nn.Module, enabled: bool, *, kv_cache: bool = False) -> None:
    """Whether the layers of `prepare_qat` round, or multiply their weights as they are.

    kv_cache  whether keys and values are rounded along
    """
    for layer in packed_layers(model).values():
        if hasattr(layer, "enabled"):  # layers of codes are always on
            layer.enabled = enabled
    if kv_cache:
        fake_quantize_kv_cache(model, enabled)


def require_kv_cache(objective: nn.Module) -> None:
    """raises  UserError if nothing of ours computes the attention whose keys and values are to be rounded"""
    next_token = getattr(objective, "next_token", objective)  # where a teacher is mixed in
    require(
        bool(getattr(next_token, "fused_head", True)),
        "qat.kv_cache=true rounds keys and values in our own layers, and an output head that multiplies integers or "
        "does more than one product goes through the model's; leave lm_head out of qat.schemes, or use int4 there",
    )
    require(
        bool(getattr(next_token, "fused_decoder", True)),
        "qat.kv_cache=true rounds keys and values in our own layers, which do not compute this model (a log line above "
        f"says why); they are made for {', '.join(ARCHITECTURES.values())}: leave it out",
    )


@torch.no_grad()
def calibrate(objective: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
    """Ranges of static inputs from some training rows, in 16 bits; nothing happens without such layers.

    objective  maps a batch to its loss; the model is in eval mode but for the observers
    """
    rounding = [layer for _, layer in fake_quant_layers(objective) if layer.enabled]
    layers = [layer for _, layer in fake_quant_layers(objective) if getattr(layer, "observer", None) is not None]
    if not layers:
        return
    objective.eval()
    for layer in rounding:
        layer.enabled = False
    for layer in layers:
        layer.observing = True
        layer.train()
    for batch in batches:
        objective(**batch)
    commit_observers(objective)
    for layer in rounding:
        layer.enabled = True


@dataclass(frozen=True)
class QatSchedule:
    """What a step is trained with; a function of its number, counted from 0.

    model      with the layers of `prepare_qat`, under whatever wrapper
    num_steps  of the run
    start      the first step whose weights are quantized
    freeze     the first step that does not move observed ranges
    kv_cache   whether keys and values are rounded from `start` on
    seed       of stochastic rounding
    """

    model: nn.Module
    num_steps: int
    start: int
    freeze: int
    seed: int
    kv_cache: bool = False

    @classmethod
    def of(cls, model: nn.Module, config: QatConfig, *, num_steps: int, seed: int) -> "QatSchedule":
        """raises  UserError if a moment lies beyond the end"""
        config.require_moments(num_steps)
        freeze = FREEZE_OBSERVERS if config.freeze_observers is None else config.freeze_observers
        start, freeze = (moment_step(moment, num_steps) for moment in (config.start, freeze))
        return cls(model, num_steps, start, freeze, seed, config.kv_cache)

    def enable(self, enabled: bool) -> None:
        """Let the model compute what ships, or what it computed in 16 bits."""
        set_enabled(self.model, enabled, kv_cache=self.kv_cache)

    def before_step(self, step: int) -> None:
        """Get ready for step `step`."""
        self.enable(step >= self.start)
        for _, layer in fake_quant_layers(self.model):
            layer.observing = step < self.freeze
        progress = (step - self.start) / (self.num_steps - self.start)
        if progress >= 0:
            set_rounding(self.model, amount=self._amount(progress), seed=self.seed, step=step)
            self._pull_soft_rounding(progress)

    def after_step(self, step: int) -> None:
        """Fold what step `step` has shown into the ranges, before a checkpoint keeps one process's part of it."""
        if step < self.freeze:  # later ranges and learned scales stay what they are
            commit_observers(self.model)

    def finish(self) -> None:
        """After the last step: every layer computes what it ships, and no range moves."""
        self.enable(True)
        for _, layer in fake_quant_layers(self.model):
            layer.observing, layer.rounding_amount = False, 0.0

    def _amount(self, progress: float) -> float:
        """Stochastic rounding fades, so that the last steps train the codes that ship; soft rounding stays soft."""
        soft = any(layer.soft_rounding is not None for _, layer in fake_quant_layers(self.model))
        return 1.0 if soft else 1 - progress

    def _pull_soft_rounding(self, progress: float) -> None:
        """Start the gradients of a step with the one that draws soft rounding to up or down.

        It is the same on each process, and outside of the loss that is reported.
        """
        if progress < SOFT_WARMUP:
            return
        beta = annealed_beta((progress - SOFT_WARMUP) / (1 - SOFT_WARMUP))
        for _, layer in fake_quant_layers(self.model):
            if layer.soft_rounding is not None and layer.soft_rounding.grad is None:  # tied tables share theirs
                penalty = SOFT_PENALTY * soft_rounding_penalty([layer.soft_rounding], beta)
                (layer.soft_rounding.grad,) = torch.autograd.grad(penalty, layer.soft_rounding)
