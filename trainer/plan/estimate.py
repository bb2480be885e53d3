"""Estimate: what a way to train or serve keeps in memory, part by part, and the moment that needs most."""

from dataclasses import dataclass
from enum import StrEnum

ACCURACY = 0.15
"""How far an estimate may be from the measured peak: tests/trainer/test_plan.py and the table in docs/planning.md."""


class Verdict(StrEnum):
    fits = "fits"
    tight = "tight"
    does_not_fit = "does not fit"


@dataclass(frozen=True)
class Estimate:
    """Bytes of one process.

    name      method or precision
    parts     what is kept while the model is trained or serves: name -> bytes
    moments   when memory peaks -> bytes, parts included
    note      what the numbers leave out, or nothing
    """

    name: str
    parts: dict[str, int]
    moments: dict[str, int]
    note: str = ""

    @property
    def peak(self) -> int:
        return max(self.moments.values())

    @property
    def when(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=self.moments.__getitem__)

    def verdict(self, available: int) -> Verdict:
        """Whether it fits in so many bytes; tight where that lies within what an estimate may be wrong by."""
        if self.peak * (1 + ACCURACY) <= available:
            return Verdict.fits
        return Verdict.tight if self.peak * (1 - ACCURACY) <= available else Verdict.does_not_fit
