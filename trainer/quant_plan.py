"""Which quantizer packs which layer: one for all, or two that share a budget of bits.

At 2 and 3 bits the mean of a model can lie between two codebooks (LoftQ, arXiv:2310.08659, section 4.1). A plan names
the layers that get fewer bits, so it is a choice and not a rule: it travels in lowbit.json, and whoever opens the
adapter packs the base by it, without choosing again.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.quantizer import Quantizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantPlan:
    """The quantizer of each layer, by its name under the base model.

    quantizer   of every layer that is not in low_layers
    low         of low_layers; None without any
    """

    quantizer: Quantizer
    low: Quantizer | None = None
    low_layers: frozenset[str] = frozenset()

    def of(self, name: str) -> Quantizer:
        """The quantizer of the layer `name`."""
        return self.low if name in self.low_layers else self.quantizer

    def __str__(self) -> str:
        low = f" and {self.low.codebook} ({len(self.low_layers)} layers)" if self.low else ""
        return f"{self.quantizer.codebook}{low}"

    def to_dict(self) -> dict[str, Any]:
        """As lowbit.json holds it: `quantizer`, and with two of them `low_quantizer` and `low_layers`."""
        if self.low is None:
            return {"quantizer": self.quantizer.settings}
        low = {"low_quantizer": self.low.settings, "low_layers": sorted(self.low_layers)}
        return {"quantizer": self.quantizer.settings, **low}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "QuantPlan":
        """The plan behind `to_dict`; other keys are passed over.

        raises  ValueError if a setting is unknown or not accepted
        """
        try:
            quantizer = Quantizer(**saved["quantizer"])
            if "low_quantizer" not in saved:
                return cls(quantizer)
            return cls(quantizer, Quantizer(**saved["low_quantizer"]), frozenset(saved["low_layers"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"quantizer settings cannot be read: {error}") from None

    @classmethod
    def of_layers(cls, layers: Mapping[str, Quantizer]) -> "QuantPlan":
        """The plan by which layers were packed.

        raises  ValueError if no layer is packed, or more than two quantizers packed them
        """
        quantizers = sorted(set(layers.values()), key=lambda q: (-q.code_bits, str(q)))
        if len(quantizers) not in (1, 2):
            raise ValueError(f"{len(layers)} layers are packed by {len(quantizers)} quantizers; a plan has one or two")
        if len(quantizers) == 1:
            return cls(quantizers[0])
        low = quantizers[1]
        return cls(quantizers[0], low, frozenset(name for name, quantizer in layers.items() if quantizer == low))


def first_layers(sizes: Mapping[str, int], high: Quantizer, low: Quantizer, *, bits_budget: float) -> QuantPlan:
    """Give the first layers more bits, as LoftQ does, as far as the mean stays within the budget.

    sizes        weights of each layer, in the model's order
    bits_budget  mean bits of a code, from low.code_bits to high.code_bits
    """
    left = _spare_bits(sizes, low, bits_budget)
    chosen = 0
    for size in sizes.values():
        left -= size * (high.code_bits - low.code_bits)
        if left < 0:
            break
        chosen += 1
    return QuantPlan(high, low, frozenset(list(sizes)[chosen:]))


def most_gaining_layers(
    sizes: Mapping[str, int], gains: Mapping[str, float], high: Quantizer, low: Quantizer, *, bits_budget: float
) -> QuantPlan:
    """Give more bits to the layers whose gain for each added bit is largest, as far as the budget allows.

    sizes   weights of each layer, in the model's order; equal gains are served in it
    gains   what more bits are worth, see `error_gain`
    """
    left = _spare_bits(sizes, low, bits_budget)
    low_layers = set(sizes)
    for name in sorted(sizes, key=lambda name: -gains[name] / sizes[name]):
        cost = sizes[name] * (high.code_bits - low.code_bits)
        if gains[name] > 0 and cost <= left:
            left -= cost
            low_layers.remove(name)
    return QuantPlan(high, low, frozenset(low_layers))


def _spare_bits(sizes: Mapping[str, int], low: Quantizer, bits_budget: float) -> int:
    return int((bits_budget - low.code_bits) * sum(sizes.values()) + 0.5)


def error_gain(weight: Tensor, high: Quantizer, low: Quantizer) -> float:
    """By how much the relative error ||W - Q(W)|| / ||W|| falls from `low` to `high`; 0 for a weight of zeros.

    weight  [out_features, in_features] float
    """
    exact = weight.double()
    norm = exact.norm().item()
    errors = [
        (exact - quantizer.quantize(weight).dequantize(weight.dtype).double()).norm() for quantizer in (low, high)
    ]
    return (errors[0] - errors[1]).item() / norm if norm else 0.0


def log_plan(plan: QuantPlan, names: list[str]) -> None:
    """One line for each block of layers: which part got which codebook."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
        blocks.setdefault(".".join(parts[: last + 1]), []).append(f"{parts[-1]} {plan.of(name).codebook}")
    for block, parts in blocks.items():
        log.info("bits     %s: %s", block, ", ".join(parts))
