"""`train.*`: what is trained, for how long, in steps of which size."""

import math
from dataclasses import dataclass
from enum import StrEnum

from trainer.config.errors import require


class Weights(StrEnum):
    lora = "lora"
    all = "all"
    scales = "scales"


@dataclass
class TrainConfig:
    max_steps: int | None = None
    """Optimizer steps; null for as many as `epochs` needs. 0, after block-wise training, for none."""
    epochs: float = 1.0
    """Passes over the data, when `max_steps` is null."""
    batch_size: int = 8
    """Sequences a process takes in one micro-step."""
    grad_accum_steps: int = 1
    """Micro-steps in one optimizer step. The loss is the mean over all their target tokens."""
    max_pass_tokens: int | None = None
    """Most tokens that go through the model at once: a micro-step's rows are grouped by length into passes, which
    changes memory and speed but not the gradient. null for 1024 on a CPU and 16384 on a GPU."""
    decoded_mb: int = 0
    """MiB for packed layers that are kept in the compute dtype too, from the first on, and not decoded twice a pass."""
    eval_every: int = 0
    """Steps between evaluations while training; 0 for before and after only."""
    eval_batch_size: int = 16
    """Sequences in one evaluation batch."""
    save_every: int = 50
    """Steps between checkpoints; 0 for the last step only."""
    keep_checkpoints: int = 2
    """How many checkpoints stay; the newest ones."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this; 0 switches clipping off."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in backward: about a third slower, much less memory."""
    weights: Weights = Weights.lora
    """What is trained: lora (an adapter over the frozen base; `lora` says which), all (every weight), or scales (those
    of codes that `qat` describes and that stay: E2E-QP of EfficientQAT, arXiv:2407.11062)."""
    neftune_alpha: float = 0.0
    """NEFTune (arXiv:2310.05914): uniform noise of this size over sqrt(tokens x width) on the embeddings of each
    document while training; the paper uses 5 to 15. 0 for none."""
    log_row_ids: bool = False
    """Write the ids of each step's rows to metrics.jsonl."""

    def __post_init__(self) -> None:
        require(self.max_steps is None or self.max_steps >= 0, f"train.max_steps={self.max_steps}; give >= 1, or null")
        require(0 < self.epochs < math.inf, f"train.epochs={self.epochs}; give a number above 0")
        for name in ("batch_size", "grad_accum_steps", "max_pass_tokens", "eval_batch_size", "keep_checkpoints"):
            require(
                getattr(self, name) is None or getattr(self, name) > 0,
                f"train.{name}={getattr(self, name)}; give at least 1",
            )
        for name in ("decoded_mb", "eval_every", "save_every", "max_grad_norm", "neftune_alpha"):
            require(getattr(self, name) >= 0, f"train.{name}={getattr(self, name)}; give 0 or more")
