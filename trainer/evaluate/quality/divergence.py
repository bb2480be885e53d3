"""Greedy answers of two models to the same prompts: where they part, and how it looks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.evaluate.quality.bootstrap import Interval, Resampler, mean

MARK = "\u2316"
"""Where the answers part; what stands before it is the same in both."""
WORST = 10
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two answers differ, one's end included; None for equal ones."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt.

    divergence  position of the first token that differs; None for equal answers
    common      share of the longer answer that stands before it
    same        its text, the answers' rest behind it
    """

    prompt: str
    divergence: int | None
    common: float
    same: str
    original: str
    candidate: str

    @classmethod
    def of(
        cls, prompt: str, original: Sequence[int], candidate: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> "Pair":
        """Answers as token ids."""
        place = first_divergence(original, candidate)
        end = len(original) if place is None else place
        longest = max(len(original), len(candidate))
        # Cut where the texts are still the same: tokens before the divergence may hold half a character.
        texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in (original, candidate)]
        same = tokenizer.decode(list(original[:end]), skip_special_tokens=True).rstrip("\ufffd")
        while not all(text.startswith(same) for text in texts):
            same = same[:-1]
        rests = [text[len(same) :] for text in texts]
        return cls(prompt, place, end / longest if longest else 1.0, same, *rests)

    def marked(self) -> dict[str, str]:
        """Both answers with the mark between what is the same and what is not."""
        mark = "" if self.divergence is None else MARK
        return {"original": f"{self.same}{mark}{self.original}", "candidate": f"{self.same}{mark}{self.candidate}"}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "marked": self.marked()}


def compare_answers(pairs: Sequence[Pair], resampler: Resampler) -> dict[str, Any]:
    """Exact matches, the common beginning, and where answers part; with intervals over prompts."""
    places = [pair.divergence for pair in pairs]
    parted = np.array([place is not None for place in places], dtype=float)
    where = np.array([0 if place is None else place for place in places], dtype=float)
    found = sorted(place for place in places if place is not None)

    def of_parted(weights: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return (weights @ (where * parted)) / (weights @ parted)

    return {
        "prompts": len(pairs),
        "exact": resampler.share([place is None for place in places]).to_dict(),
        "common": resampler.interval(mean([pair.common for pair in pairs])).to_dict(),
        "first_divergence": (resampler.interval(of_parted) if found else Interval(float("nan"))).to_dict(),
        "first_divergence_shares": {f"{share:.0%}": float(np.quantile(found, share)) for share in SHARES}
        if found
        else {},
    }


def worst(pairs: Sequence[Pair], number: int = WORST) -> list[Pair]:
    """Those that part first; of equals, the ones with the smallest common share."""
    parted = [pair for pair in pairs if pair.divergence is not None]
    return sorted(parted, key=lambda pair: (pair.divergence, pair.common))[:number]
