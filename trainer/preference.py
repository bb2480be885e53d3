"""Preference losses: DPO and ORPO of pairs, KTO of answers that are called good or bad.

    log p(y|x) = sum_t log p(y_t | x, y_<t)       over the answer's tokens; p_0 is the model before training
    r(x, y)    = log p(y|x) - log p_0(y|x)        the reward is beta r
    DPO    -(1 - eps) log sigma(beta (r_w - r_l)) - eps log sigma(-beta (r_w - r_l))      arXiv:2305.18290, equation 7
    IPO    (r_w / |y_w| - r_l / |y_l| - 1 / (2 tau))^2            arXiv:2310.12036, equation 17, tau = beta
    ORPO   -log p(y_w|x) / tokens - beta log sigma(o_w - o_l)     arXiv:2403.07691, equations 6 and 7
           o = log (q / (1 - q)),  log q = log p(y|x) / |y|
    KTO    lambda_D (1 - sigma(beta (r - z_0)))   if y is good    arXiv:2402.01306, equations 7 and 8
           lambda_U (1 - sigma(beta (z_0 - r)))   if y is bad
           z_0 = max(0, mean of r(x, y')),  y' an answer to another prompt

eps is the share of pairs that are the wrong way round (the conservative DPO of its authors). IPO divides by the
answers' lengths as its authors do, and TRL. ORPO's first term is the next-token loss of the chosen answer: it is
divided by the target tokens of the step, the second by its pairs.

No second model is held: p_0 is the same model with the adapter off, in evaluation mode, or numbers that were computed
before training (reference.py). Every r is a difference of float64 sums of float32 log-probabilities.

KTO's z_0 is that of the whole step, over all micro-steps and processes: `look_ahead` computes it before the first
pass, without gradient. So accumulation and data parallelism equal the large batch here too; where TRL takes each
micro-batch by itself, a step of one micro-batch is TRL's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from trainer.config.preference import DpoLoss, Method, PreferenceConfig
from trainer.data.preference import collate_labelled, collate_pairs
from trainer.objective import NextTokenLoss, evaluating, targets_of_documents

LARGEST_LOG_PROB = -1e-7
"""Mean log-probability of an answer that ORPO's odds are taken of, at most: float32 cannot tell more from certainty."""


# ---- the formulas, of float64 tensors with an entry a pair or a row


def dpo_losses(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Of the log-ratios r [pairs] of chosen and rejected answers."""
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo_losses(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Of log-ratios over the number of their tokens, r / |y| [pairs]."""
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def odds_ratio_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """ORPO's second term without its weight, of mean log-probabilities log q [pairs]."""
    return -logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_q: Tensor) -> Tensor:
    log_q = log_q.clamp(max=LARGEST_LOG_PROB)
    return log_q - torch.log(-torch.expm1(log_q))


def kto_losses(log_ratios: Tensor, desirable: Tensor, kl: Tensor, config: PreferenceConfig) -> Tensor:
    """Of log-ratios r [rows], desirable [rows] bool, and z_0 []."""
    signs = torch.where(desirable, 1.0, -1.0).to(log_ratios)
    weights = torch.where(desirable, config.desirable_weight, config.undesirable_weight).to(log_ratios)
    return weights * (1 - torch.sigmoid(config.beta * signs * (log_ratios - kl)))


# ---- what was measured, and what both objectives need


class Tally:
    """Sums and counts of named figures since the last `drain`."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._entries: dict[str, list[Tensor]] = {name: [] for name in names}

    def add(self, **values: Tensor) -> None:
        """values: figure -> one entry a pair or row"""
        for name, value in values.items():
            value = value.detach().double()
            self._entries[name].append(torch.stack([value.sum(), value.new_tensor(value.numel())]))

    def drain(self) -> dict[str, tuple[float, float]]:
        """Figure -> sum and count, the names in their order; 0 and 0 for one without an entry."""
        entries, self._entries = self._entries, {name: [] for name in self._names}
        sums = {name: torch.stack(each).sum(0).tolist() if each else (0.0, 0.0) for name, each in entries.items()}
        return {name: (total, count) for name, (total, count) in sums.items()}


@contextmanager
def before_training(model: nn.Module) -> Iterator[None]:
    """The model as it was before training: adapter off, no dropout, no gradient.

    Adapter off is where every adapter starts: lora.py adds the factors that LoftQ, PiSSA or OLoRA started from.
    """
    off = model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()
    with torch.no_grad(), evaluating(model), off:
        yield


class PairLoss(nn.Module):
    """DPO, IPO or ORPO over pairs of documents: chosen, rejected, chosen, rejected, ..."""

    def __init__(self, next_token: NextTokenLoss, config: PreferenceConfig) -> None:
        super().__init__()
        self.next_token, self._config = next_token, config
        likelier = ("prefers_chosen",) * (config.method is Method.dpo)  # ORPO's accuracy is just this
        self._tally = Tally("rewards_chosen", "rewards_rejected", "margin", "accuracy", *likelier)

    def collate(self, rows: Sequence[dict[str, Any]], device: torch.device | str | None = None) -> dict[str, Tensor]:
        """See `collate_pairs`."""
        return collate_pairs(rows, device)

    def count(self, batch: dict[str, Tensor]) -> list[int]:
        """Pairs; for ORPO target tokens of chosen answers and pairs, one for each sum of `forward`."""
        num_pairs = _num_pairs(batch["cu_seqlens"])
        if self._config.method is Method.dpo:
            return [num_pairs]
        lengths = targets_of_documents(batch["labels"], batch["cu_seqlens"])
        return [int(lengths[: 2 * num_pairs : 2].sum()), num_pairs]

    def look_ahead(self, batches: Sequence[dict[str, Any]], reduce: Callable[[Tensor], Tensor]) -> None:
        """A pair's loss depends on no other pair."""

    def drain_metrics(self) -> dict[str, tuple[float, float]]:
        """Rewards beta r (ORPO: beta log q), their margin, how often it is above 0 (accuracy), and for DPO how often
        the chosen answer is likelier a token; each a sum and a count since the last call."""
        return self._tally.drain()

    def reference(self, batch: dict[str, Tensor]) -> Tensor:
        """log p_0 of chosen and rejected answers [pairs, 2] float64."""
        with before_training(self.next_token.model):
            return self._log_probs(batch)

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor, reference: Tensor | None = None) -> Tensor:
        """Summed losses of a batch of `collate_pairs`: [1] for DPO; [2] for ORPO, its two terms. float64"""
        config, batch = self._config, {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens}
        if config.method is Method.dpo and reference is None:
            reference = self.reference(batch)  # first: PEFT's switch flips requires_grad, which a graph must not see
        lengths = targets_of_documents(labels, cu_seqlens)[: 2 * _num_pairs(cu_seqlens)].view(-1, 2)
        log_probs = self._log_probs(batch)
        means = log_probs / lengths
        if config.method is Method.orpo:
            self._measure(config.beta * means)
            odds = odds_ratio_losses(*means.unbind(1))
            return torch.stack([-log_probs[:, 0].sum(), config.beta * odds.sum()])
        ratios = log_probs - reference
        self._measure(config.beta * ratios)
        self._tally.add(prefers_chosen=means[:, 0] > means[:, 1])
        if config.loss is DpoLoss.ipo:
            losses = ipo_losses(*(ratios / lengths).unbind(1), beta=config.beta)
        else:
            losses = dpo_losses(*ratios.unbind(1), beta=config.beta, label_smoothing=config.label_smoothing)
        return losses.sum()[None]

    def _log_probs(self, batch: dict[str, Tensor]) -> Tensor:
        """[pairs, 2] float64"""
        documents = self.next_token.log_probs(batch["input_ids"], batch["labels"], batch["cu_seqlens"])
        return documents[: 2 * _num_pairs(batch["cu_seqlens"])].view(-1, 2)

    def _measure(self, rewards: Tensor) -> None:
        chosen, rejected = rewards.detach().unbind(1)
        margin = chosen - rejected
        self._tally.add(rewards_chosen=chosen, rewards_rejected=rejected, margin=margin, accuracy=margin > 0)


def _num_pairs(cu_seqlens: Tensor) -> int:
    """A batch of no rows is one document without a target, so that a backward pass runs."""
    return (len(cu_seqlens) - 1) // 2


class KtoLoss(nn.Module):
    """KTO over documents with a label each."""

    def __init__(self, next_token: NextTokenLoss, config: PreferenceConfig) -> None:
        super().__init__()
        self.next_token, self._config = next_token, config
        self._kl: Tensor | None = None
        self._tally = Tally("rewards_chosen", "rewards_rejected", "margin", "accuracy", "kl")

    def collate(self, rows: Sequence[dict[str, Any]], device: torch.device | str | None = None) -> dict[str, Any]:
        """See `collate_labelled`."""
        return collate_labelled(rows, device)

    def count(self, batch: dict[str, Any]) -> list[int]:
        """Rows."""
        return [len(batch["desirable"])]

    def look_ahead(self, batches: Sequence[dict[str, Any]], reduce: Callable[[Tensor], Tensor]) -> None:
        """z_0 of the step that these batches make up; every process calls this, and `reduce` adds theirs up."""
        total = torch.zeros(2, dtype=torch.float64, device=batches[0]["desirable"].device)
        for batch in batches:
            reference = batch.get("reference")
            reference = self._reference_mismatched(batch) if reference is None else reference[:, 1]
            with torch.no_grad(), evaluating(self.next_token.model):
                ratios = self._log_probs(batch["mismatched"], batch) - reference
            total += torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))])
        summed, count = reduce(total)
        self._kl = (summed / count).clamp(min=0)
        self._tally.add(kl=self._kl[None])

    def drain_metrics(self) -> dict[str, tuple[float, float]]:
        """Rewards beta r of good (chosen) and bad (rejected) answers, by how much they lie on their side of beta z_0
        (margin), how often they do (accuracy), and z_0 (kl); each a sum and a count since the last call."""
        return self._tally.drain()

    def reference(self, batch: dict[str, Any]) -> Tensor:
        """log p_0 of the rows' answers and of the mismatched ones [rows, 2] float64."""
        with before_training(self.next_token.model):
            matched = self._log_probs(batch, batch)
        return torch.stack([matched, self._reference_mismatched(batch)], dim=1)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        desirable: Tensor,
        mismatched: dict[str, Tensor],
        reference: Tensor | None = None,
    ) -> Tensor:
        """Summed losses [1] float64 of a batch of `collate_labelled`, which `look_ahead` has seen."""
        assert self._kl is not None, "look_ahead comes first"
        batch = {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens, "desirable": desirable}
        if reference is None:
            with before_training(self.next_token.model):
                matched = self._log_probs(batch, batch)
        else:
            matched = reference[:, 0]
        ratios = self._log_probs(batch, batch) - matched
        self._measure(ratios.detach(), desirable, self._kl)
        return kto_losses(ratios, desirable, self._kl, self._config).sum()[None]

    def _log_probs(self, documents: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        """[rows] float64"""
        found = self.next_token.log_probs(documents["input_ids"], documents["labels"], documents["cu_seqlens"])
        return found[: len(batch["desirable"])]

    def _reference_mismatched(self, batch: dict[str, Any]) -> Tensor:
        with before_training(self.next_token.model):
            return self._log_probs(batch["mismatched"], batch)

    def _measure(self, ratios: Tensor, desirable: Tensor, kl: Tensor) -> None:
        rewards = self._config.beta * ratios
        margin = torch.where(desirable, 1.0, -1.0) * (rewards - self._config.beta * kl)
        self._tally.add(margin=margin, accuracy=margin > 0)
        self._tally.add(rewards_chosen=rewards[desirable], rewards_rejected=rewards[~desirable])


Objective = NextTokenLoss | PairLoss | KtoLoss


def build_objective(next_token: NextTokenLoss, config: PreferenceConfig) -> Objective:
    """What `preference.method` minimises."""
    if config.method is Method.none:
        return next_token
    return PairLoss(next_token, config) if config.method.of_pairs else KtoLoss(next_token, config)
