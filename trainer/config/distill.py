"""`distill.*`: the 16-bit model as the teacher of what is trained from it."""

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from trainer.config.errors import require


class DistillTokens(StrEnum):
    targets = "targets"
    all = "all"


class Divergence(StrEnum):
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"


@dataclass
class DistillConfig:
    weight: float = 0.0
    """Share of the divergence from the teacher in the loss, 0..1; the rest is the next-token loss. 0: no teacher."""
    temperature: float = 1.0
    """Both softmaxes of the divergence are taken at logits / temperature; its square multiplies the divergence."""
    top_k: int = 64
    """How many of the teacher's likeliest tokens are kept at each position, and all others as one outcome: 6 bytes each
    on disk, written once before training. 0 for the whole distribution: the teacher runs beside the student, which
    takes its weights in memory (conf=lora shares them) and the time of another forward in each step."""
    tokens: DistillTokens = DistillTokens.targets
    """Where the teacher is followed: targets (what the next-token loss sees) or all (prompts too). The loss is divided
    by the number of these tokens."""
    loss: Divergence = Divergence.forward_kl
    """forward_kl, KL(teacher || student), covers all that the teacher says; reverse_kl, KL(student || teacher), avoids
    what it does not say."""

    def __post_init__(self) -> None:
        require(0 <= self.weight <= 1, f"distill.weight={self.weight}; give a number in 0..1, or 0 for no teacher")
        require(
            0 < self.temperature < math.inf,
            f"distill.temperature={self.temperature}; give a number above 0, such as 1 or 2",
        )
        require(
            self.top_k >= 0, f"distill.top_k={self.top_k}; give at least 1, such as 64, or 0 for the whole distribution"
        )
        unused = [f"distill.{item.name}" for item in fields(self) if getattr(self, item.name) != item.default]
        require(
            self.enabled or not unused,
            f"{', '.join(unused)} has no effect with distill.weight=0; give a weight above 0, or leave it out",
        )

    @property
    def enabled(self) -> bool:
        """Whether there is a teacher."""
        return self.weight > 0
