"""DistillationLoss: the next-token loss mixed with the divergence from a teacher, the 16-bit model before it changed.

    loss = sum over tokens  (1 - weight) CE(student, label) + weight T^2 KL(teacher || student)

A step divides it once, by the number of followed tokens, as it does with the next-token loss alone. Training what is
quantized against the model it came from is LLM-QAT's recipe (arXiv:2305.17888, section 3.3) without its generated text.

The teacher is a cache on disk of its likeliest tokens (teacher_cache.py), or a second module that runs beside the
student. The surprising thing: evaluation returns the plain cross-entropy, so that held-out losses of all methods
compare, and measures the divergence beside it.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.config.distill import DistillConfig, DistillTokens, Divergence
from trainer.kernels.distill_loss import Sums, TopK, Whole, distillation, linear_distillation
from trainer.objective import NextTokenLoss, num_targets
from trainer.qat.fake_quant import head_operands
from trainer.teacher_cache import COLUMN, TeacherCache, followed

log = logging.getLogger(__name__)


class DistillationLoss(nn.Module):
    """Sum of mixed losses over the followed tokens of documents, in nats; see the module's formula."""

    def __init__(self, next_token: NextTokenLoss, config: DistillConfig, teacher: "TeacherCache | LiveTeacher") -> None:
        """next_token: the student; teacher: a cache over rows with the column `teacher_row`, or a model"""
        super().__init__()
        self.next_token = next_token
        self._config = config
        self._cache = teacher if isinstance(teacher, TeacherCache) else None
        self._live = None if isinstance(teacher, TeacherCache) else teacher
        self._measured = _nothing()

    def collate(self, rows: Sequence[dict[str, Any]], device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Rows of the data, with what the cached teacher says about them, as the arguments of forward."""
        batch = self.next_token.collate(rows, device)
        if self._cache is None:
            return batch
        said = self._cache.read([row[COLUMN] for row in rows])
        return {**batch, "teacher_ids": said.ids.to(device), "teacher_log_probs": said.log_probs.to(device)}

    def count(self, batch: dict[str, Any]) -> list[int]:
        """In training all followed tokens, in evaluation the targets; see forward."""
        if self.training and self._config.tokens is DistillTokens.all:
            return [len(followed(batch["labels"], batch["cu_seqlens"], DistillTokens.all))]
        return [num_targets(batch["labels"])]

    def look_ahead(self, batches: Sequence[dict[str, Any]], reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing here depends on the other batches of a step."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        teacher_ids: Tensor | None = None,
        teacher_log_probs: Tensor | None = None,
    ) -> Tensor:
        """input_ids, labels, cu_seqlens as NextTokenLoss takes documents

        teacher_ids        [N, k] int32 and
        teacher_log_probs  [N, k + 1] float16 of the followed positions, in order; both from `collate`, None for a live
                           teacher
        returns            [] float32: the mixture in training, the cross-entropy in evaluation
        """
        positions = followed(labels, cu_seqlens, self._config.tokens)
        said = None if teacher_ids is None else TopK(teacher_ids, teacher_log_probs)
        sums = self._sums(input_ids, cu_seqlens, positions, labels[positions + 1], said)
        self._measure("kl", sums.divergence, len(positions))
        self._measure("cross_entropy", sums.cross_entropy, num_targets(labels))
        return sums.loss if self.training else sums.cross_entropy.float()

    def drain_metrics(self) -> dict[str, tuple[float, float]]:
        """Sums and counts since the last call: `kl` in nats over the followed tokens, without temperature^2, and in
        training `cross_entropy` over the targets, which in evaluation is the loss itself."""
        measured, self._measured = self._measured, _nothing()
        names = ("kl", "cross_entropy") if self.training else ("kl",)
        return {name: (float(measured[name][0]), measured[name][1]) for name in names}

    def _measure(self, name: str, total: Tensor, count: int) -> None:
        so_far, counted = self._measured[name]
        self._measured[name] = so_far + total, counted + count  # not in place: an evaluation's tensors are not written

    def _sums(
        self, input_ids: Tensor, cu_seqlens: Tensor, positions: Tensor, labels: Tensor, said: TopK | None
    ) -> Sums:
        config, student, live = self._config, self.next_token, self._live
        mixture = {
            "kl_weight": config.weight,
            "temperature": config.temperature,
            "reverse": config.loss is Divergence.reverse_kl,
        }
        arguments = input_ids, cu_seqlens, positions
        if student.fused_head and (live is None or live.fused_head):
            teacher = said or live.whole(*arguments)
            operands = head_operands(student.head, student.hidden_states(*arguments))
            return linear_distillation(*operands, labels, teacher, **mixture)
        return distillation(student.logits(*arguments), labels, said or live.logits(*arguments), **mixture)


def _nothing() -> dict[str, tuple[Tensor | float, int]]:
    """Name -> sum, count"""
    return {"kl": (0.0, 0), "cross_entropy": (0.0, 0)}


class LiveTeacher:
    """A frozen model that runs beside the student; no module, so that checkpoints and optimizers do not see it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._next_token = NextTokenLoss(model)
        self.fused_head = self._next_token.fused_head

    @torch.no_grad()
    def whole(self, input_ids: Tensor, cu_seqlens: Tensor, positions: Tensor) -> Whole:
        """Arguments as NextTokenLoss.hidden_states"""
        states = self._next_token.hidden_states(input_ids, cu_seqlens, positions)
        return Whole(states, self._next_token.head.weight)

    @torch.no_grad()
    def logits(self, input_ids: Tensor, cu_seqlens: Tensor, positions: Tensor) -> Tensor:
        """Arguments as NextTokenLoss.logits"""
        return self._next_token.logits(input_ids, cu_seqlens, positions)


def copy_teacher(model: PreTrainedModel, *, share_weights: bool) -> PreTrainedModel:
    """`model` as it is now, for a LiveTeacher, frozen and in eval mode.

    share_weights  the copy reads the same tensors: right where they stay frozen
    """
    shared = {id(param): param for param in model.parameters()} if share_weights else {}
    teacher = copy.deepcopy(model, shared)
    if not share_weights:
        teacher.requires_grad_(False)
    log.info(
        "teacher  beside the student: %s",
        "it reads the 16-bit base in memory"
        if share_weights
        else f"{sum(param.nbytes for param in teacher.parameters()) / 1e6:.0f} MB of weights of its own",
    )
    return teacher.eval()
