"""What training minimises: the sum of next-token losses over the target tokens of a batch.

The sum, not the mean: the loop divides by the target tokens of the whole step, over all micro-steps and processes, so
that accumulation and data parallelism equal the large batch. Only target positions reach the output head.
"""

import logging

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from trainer.kernels.cross_entropy import linear_cross_entropy

log = logging.getLogger(__name__)

IGNORE_INDEX = -100
"""Label of a position that is no target, as torch and transformers have it."""


def num_targets(labels: Tensor) -> int:
    """How many positions of `labels` [B, T] are predicted: the first of a row has nothing before it."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


class NextTokenLoss(nn.Module):
    """Sum of cross-entropies over the targets of a right-padded batch, in nats.

    Padding needs no mask: under causal attention a real token never sees what stands to its right.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """model: a causal language model, or PEFT's wrapper around one"""
        super().__init__()
        self.model = model
        self.fused = self._fused_equals_logits()
        if not self.fused:
            log.warning(
                "the output head does more than one product; the loss goes through the full logits (more memory)"
            )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """input_ids, labels: [B, T] int64 with -100 where there is no target; returns [] float32."""
        targets = labels[:, 1:]
        keep = targets != IGNORE_INDEX
        if self.fused:
            hidden_states = self._hidden_states(input_ids)[:, :-1][keep]  # [B, T, D] -> [N, D]
            return linear_cross_entropy(hidden_states, self._head.weight, targets[keep])
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1][keep]
        return cross_entropy(logits.float(), targets[keep], reduction="sum")

    @property
    def _causal_lm(self) -> PreTrainedModel:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def _head(self) -> nn.Linear:
        return self._causal_lm.get_output_embeddings()

    def _hidden_states(self, input_ids: Tensor) -> Tensor:
        decoder = getattr(self._causal_lm, self._causal_lm.base_model_prefix)
        return decoder(input_ids=input_ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def _fused_equals_logits(self) -> bool:
        """Try both paths on a few tokens: soft caps, logit scales and head biases show up here."""
        if type(self._head) is not nn.Linear or self._head.bias is not None or self._head.weight.requires_grad:
            return False
        input_ids = torch.arange(8, device=self._head.weight.device)[None]
        direct = self._hidden_states(input_ids) @ self._head.weight.T
        return torch.allclose(direct, self.model(input_ids=input_ids, use_cache=False).logits.to(direct.dtype))
