"""`optim.*`: optimizer and learning rate."""

import math
from dataclasses import dataclass
from enum import Enum, StrEnum

from trainer.config.errors import require


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class DecayShape(StrEnum):
    sqrt = "sqrt"
    linear = "linear"


class OptimizerName(StrEnum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    adamw_paged = "adamw_paged"
    adamw_8bit_paged = "adamw_8bit_paged"
    adamw_schedule_free = "adamw_schedule_free"
    lion = "lion"
    lion_8bit = "lion_8bit"
    muon = "muon"

    @property
    def is_lion(self) -> bool:
        return self in (OptimizerName.lion, OptimizerName.lion_8bit)

    @property
    def is_paged(self) -> bool:
        return self in (OptimizerName.adamw_paged, OptimizerName.adamw_8bit_paged)


@dataclass
class OptimConfig:
    name: OptimizerName = OptimizerName.adamw
    """adamw; adamw_8bit, lion_8bit (bitsandbytes, arXiv:2110.02861: state in 8 bits); adamw_paged, adamw_8bit_paged
    (GPUs: state moves to main memory when the GPU's is full); lion (arXiv:2302.06675); muon (hidden matrices of a full
    fine-tuning, AdamW for the rest); adamw_schedule_free (arXiv:2405.15682: averages weights, needs no schedule)."""
    lr: float | None = None
    """Peak learning rate; null for 5e-4 * (2000 / hidden_size)^0.781, LoRA's best for Llamas of that width (Schulman et
    al., LoRA Without Regret, 2025): 1.3e-3 at 576, 2.9e-4 at 4096. Lion takes a tenth of it."""
    layer_decay: float = 1.0
    """Each layer's learning rate as a share of that of the layer above (arXiv:1801.06146); the top one has `lr`."""
    lora_plus_ratio: float = 1.0
    """LoRA+ (arXiv:2402.12354): learning rate of lora_B over that of lora_A; the paper's choice is 16."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float | None = None
    """Decay of the second moment; null for 0.999. lion: decay of the momentum; null for 0.99."""
    eps: float = 1e-8
    """Added to the denominator; lion has none."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms, biases and DoRA magnitudes have none."""
    muon_momentum: float = 0.95
    """muon: decay of the momentum that is orthogonalised."""
    schedule: Schedule = Schedule.cosine
    """constant, linear, cosine or wsd (constant, then a decay over `decay_ratio`), after the warm-up."""
    warmup_ratio: float = 0.03
    """Share of all steps in which the learning rate rises from 0."""
    decay_ratio: float = 0.2
    """wsd: share of all steps in which the learning rate falls, at the end (arXiv:2405.18392)."""
    decay_shape: DecayShape = DecayShape.sqrt
    """wsd: how it falls, as 1 - sqrt(t) or linear."""
    min_lr_ratio: float = 0.0
    """Where linear, cosine and wsd end, as a share of `lr`."""

    def __post_init__(self) -> None:
        require(
            self.lr is None or 0 < self.lr < math.inf,
            f"optim.lr={self.lr}; give a number above 0, such as 2e-4, or null",
        )
        require(0 < self.eps < math.inf, f"optim.eps={self.eps}; give a number above 0")
        require(0 <= self.weight_decay < math.inf, f"optim.weight_decay={self.weight_decay}; give 0 or more")
        for name in ("beta1", "beta2", "warmup_ratio", "muon_momentum"):
            value = getattr(self, name)
            require(value is None or 0 <= value < 1, f"optim.{name}={value}; give a number in [0, 1)")
        require(0 < self.layer_decay <= 1, f"optim.layer_decay={self.layer_decay}; give a number in (0, 1]")
        require(
            1 <= self.lora_plus_ratio < math.inf,
            f"optim.lora_plus_ratio={self.lora_plus_ratio}; give a number of at least 1, such as 16",
        )
        require(0 <= self.min_lr_ratio <= 1, f"optim.min_lr_ratio={self.min_lr_ratio}; give a number in [0, 1]")
        self._require_schedule()
        self._require_optimizer()

    def _require_schedule(self) -> None:
        """Settings of the schedule fit it."""
        require(
            self.min_lr_ratio == 0 or self.schedule is not Schedule.constant,
            f"optim.min_lr_ratio={self.min_lr_ratio} has no effect with optim.schedule=constant; use linear, cosine "
            "or wsd",
        )
        if self.schedule is Schedule.wsd:
            require(0 < self.decay_ratio <= 1, f"optim.decay_ratio={self.decay_ratio}; give a number in (0, 1]")
            require(
                self.warmup_ratio + self.decay_ratio <= 1,
                f"optim.warmup_ratio={self.warmup_ratio} and optim.decay_ratio={self.decay_ratio} add up to more than "
                "all steps; lower one",
            )
            return
        self._require_default("decay_ratio", f"optim.schedule={self.schedule.value}", "optim.schedule=wsd")
        self._require_default("decay_shape", f"optim.schedule={self.schedule.value}", "optim.schedule=wsd")

    def _require_optimizer(self) -> None:
        """Settings of the optimizer fit it."""
        setting = f"optim.name={self.name.value}"
        if self.name is not OptimizerName.muon:
            self._require_default("muon_momentum", setting, "optim.name=muon, or optim.beta1 for the first moment")
        if self.name.is_lion:
            self._require_default("eps", setting, "an AdamW, since a sign has no denominator")
        if self.name is OptimizerName.adamw_schedule_free:
            require(
                self.schedule is Schedule.constant,
                f"optim.schedule={self.schedule.value} cannot be combined with {setting}, whose average of the weights "
                "takes the decay's place; use optim.schedule=constant",
            )
            require(
                self.beta1 > 0, f"optim.beta1=0 cannot be combined with {setting}, which interpolates by it; use 0.9"
            )

    def _require_default(self, key: str, setting: str, instead: str) -> None:
        """A setting that `setting` does not look at has its default."""
        value, default = getattr(self, key), type(self).__dataclass_fields__[key].default
        shown = value.value if isinstance(value, Enum) else value
        require(value == default, f"optim.{key}={shown} has no effect with {setting}; use {instead}")
