"""`preference.*`: learning from answers that people prefer to others, or call good and bad."""

import math
from dataclasses import dataclass
from enum import StrEnum

from trainer.config.errors import require


class Method(StrEnum):
    none = "none"
    dpo = "dpo"
    orpo = "orpo"
    kto = "kto"

    @property
    def of_pairs(self) -> bool:
        """Whether a row has a chosen and a rejected answer."""
        return self in (Method.dpo, Method.orpo)

    @property
    def has_reference(self) -> bool:
        """Whether the model before training takes part in the loss."""
        return self in (Method.dpo, Method.kto)


class DpoLoss(StrEnum):
    sigmoid = "sigmoid"
    ipo = "ipo"


@dataclass
class PreferenceConfig:
    method: Method = Method.none
    """none (the next token), dpo (arXiv:2305.18290: pairs of a chosen and a rejected answer), orpo (arXiv:2403.07691:
    the same, together with learning the chosen answer), kto (arXiv:2402.01306: single answers, good or bad)."""
    beta: float = 0.1
    """dpo, kto: how strongly the model is held where it started; ipo: its tau; orpo: the weight of the odds ratio."""
    loss: DpoLoss = DpoLoss.sigmoid
    """dpo: sigmoid, or ipo (arXiv:2310.12036, which does not push pairs that are told apart already any further)."""
    label_smoothing: float = 0.0
    """dpo with loss=sigmoid: the share of pairs that are taken to be the wrong way round; below 0.5."""
    desirable_weight: float = 1.0
    """kto: weight of good answers; the paper (equation 8) keeps weight x number, good over bad, in 1..4/3."""
    undesirable_weight: float = 1.0
    """kto: weight of bad answers."""
    precompute: bool = False
    """Compute the log-probabilities of the model before training once, before the first step, and keep them in the run
    folder; false computes them in each step, with the adapter off."""

    def __post_init__(self) -> None:
        require(0 < self.beta < math.inf, f"preference.beta={self.beta}; give a number above 0, such as 0.1")
        require(
            0 <= self.label_smoothing < 0.5,
            f"preference.label_smoothing={self.label_smoothing}; give a number in [0, 0.5)",
        )
        for name in ("desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"preference.{name}={value}; give a number above 0")
            self._require_default(name, self.method is Method.kto, "preference.method=kto")
        self._require_default("beta", self.method is not Method.none, "preference.method=dpo, orpo or kto")
        self._require_default("loss", self.method is Method.dpo, "preference.method=dpo")
        is_sigmoid = self.method is Method.dpo and self.loss is DpoLoss.sigmoid
        self._require_default("label_smoothing", is_sigmoid, "preference.method=dpo with preference.loss=sigmoid")
        self._require_default("precompute", self.method.has_reference, "preference.method=dpo or kto")

    def _require_default(self, key: str, is_read: bool, instead: str) -> None:
        """A setting that nothing looks at has its default."""
        value, default = getattr(self, key), type(self).__dataclass_fields__[key].default
        shown = str(value).lower() if isinstance(value, bool) else getattr(value, "value", value)
        require(
            is_read or value == default,
            f"preference.{key}={shown} has no effect with preference.method={self.method.value}, "
            f"preference.loss={self.loss.value}; use {instead}",
        )
