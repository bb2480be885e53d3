"""Fidelity: how far a quantized model is from the one that it was made from, on the same tokens and prompts.

Teacher forced: both models read the same rows and are asked for each next token. The original's hidden states are kept
and not its logits, which would be a hundred times as much; a chunk of positions has both models' logits at a time.

    perplexity   of each; it can be equal while answers differ
    kl           KL(original || quantized) of the next token, nats: the mean, and what 1 % of the positions exceed
    same_token   share of positions whose likeliest token is the same
    flips        share of positions where the original's likeliest token is the text's and the quantized model's is not,
                 and the reverse (Accuracy is Not All You Need, arXiv:2407.09141)

Greedy: `PromptMatch` compares whole answers, token by token.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from trainer.evaluate.token_rows import (
    KL,
    LOSS,
    LOSS_ORIGINAL,
    SAME,
    RowCollector,
    TokenRows,
    compare_logits,
)
from trainer.objective import NextTokenLoss
from trainer.qat.fake_quant import head_operands

CHUNK = 256
"""Positions whose logits are held at a time."""


@dataclass(frozen=True)
class Fidelity:
    """Figures over all positions that have a next token; see the module.

    tokens  how many there were
    """

    tokens: int
    perplexity_original: float
    perplexity: float
    kl: float
    kl_99: float
    same_token: float
    right_to_wrong: float
    wrong_to_right: float

    @property
    def flips(self) -> float:
        """Positions that changed sides."""
        return self.right_to_wrong + self.wrong_to_right

    @classmethod
    def of(cls, found: TokenRows) -> "Fidelity":
        """From every token's own values."""
        tokens = sum(found.counts)
        return cls(
            tokens=tokens,
            perplexity_original=math.exp(found.mean(LOSS_ORIGINAL)),
            perplexity=math.exp(found.mean(LOSS)),
            kl=found.mean(KL),
            kl_99=torch.quantile(found.all(KL), 0.99).item(),
            same_token=found.mean(SAME),
            right_to_wrong=sum(found.flips(to_right=False)) / tokens,
            wrong_to_right=sum(found.flips(to_right=True)) / tokens,
        )

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class Original:
    """What a model says of rows, kept to compare others with."""

    def __init__(self, states: list[Tensor], head: Tensor, rows: list[Tensor]) -> None:
        self.states, self.head, self.rows = states, head, rows

    @classmethod
    @torch.inference_mode()
    def of(cls, model: nn.Module, rows: Sequence[Sequence[int]]) -> "Original":
        """rows: token ids, at least two each; the model stays as it is

        raises  ValueError for a model whose output head is more than a product
        """
        objective = NextTokenLoss(model.eval())
        if not objective.fused_head:
            raise ValueError("the output head does more than one product; its logits cannot be computed in chunks")
        ids = [torch.as_tensor(row) for row in rows]
        states, head = [], None
        for row in ids:
            x, head = _operands(objective, row)
            states.append(x)
        return cls(states, head.clone(), ids)

    @torch.inference_mode()
    def tokens(self, model: nn.Module) -> TokenRows:
        """The original and a model that was made from it and has its vocabulary, token by token."""
        objective = NextTokenLoss(model.eval())
        found = RowCollector(len(self.rows))
        for number, (row, wanted_x) in enumerate(zip(self.rows, self.states, strict=True)):
            x, head = _operands(objective, row)
            for start in range(0, len(row) - 1, CHUNK):
                part = slice(start, start + CHUNK)
                targets = row[1:][part].to(x.device)
                found.add(number, compare_logits(x[part] @ head.T, wanted_x[part] @ self.head.T, targets))
        return found.finish(self.rows)

    def compare(self, model: nn.Module) -> Fidelity:
        """The figures of such a model."""
        return Fidelity.of(self.tokens(model))


def _operands(objective: NextTokenLoss, row: Tensor) -> tuple[Tensor, Tensor]:
    """What the output head multiplies at all positions but the last, and the head."""
    row = row.to(next(objective.parameters()).device)
    cu_seqlens = torch.tensor([0, len(row)], dtype=torch.int32, device=row.device)
    positions = torch.arange(len(row) - 1, device=row.device)
    return head_operands(objective.head, objective.hidden_states(row, cu_seqlens, positions))


@dataclass(frozen=True)
class PromptMatch:
    """Greedy answers of two models to the same prompts.

    exact         share of prompts whose answers are equal, token by token
    mean_common   mean share of an answer up to the first token that differs
    """

    prompts: int
    exact: float
    mean_common: float

    @classmethod
    def of(cls, original: Sequence[Sequence[int]], quantized: Sequence[Sequence[int]]) -> "PromptMatch":
        """Token ids of the answers, in the order of the prompts."""
        common = [_common(a, b) for a, b in zip(original, quantized, strict=True)]
        exact = [list(a) == list(b) for a, b in zip(original, quantized, strict=True)]
        return cls(len(exact), sum(exact) / len(exact), sum(common) / len(common))


def _common(a: Sequence[int], b: Sequence[int]) -> float:
    longest = max(len(a), len(b))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / longest if longest else 1.0
