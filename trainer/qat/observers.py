"""Observers: the range of a layer's inputs, for one static scale (scheme int8_static).

An observer sees the inputs of training passes (`observe`) and adds up what a step has shown; `commit`, between two
steps, folds that into what it knows, over all processes: ranges do not depend on how a step was cut into passes or
shared out. The scale is absmax / 127 of the symmetric grid of kernels/int8.py.

    minmax           the largest |x| of all steps
    moving_average   r += momentum * (largest |x| of the step - r), starting at the first step's
    percentile       |x| that `percentile` % of all values do not exceed
    mse              the clip with the smallest squared error of rounding, over all values

The last two count |x| in 2,048 bins whose width is a power of two. A larger value doubles the width and adds pairs of
bins, so counts are exact whatever the order. All state is in buffers: a checkpoint resumes exactly.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.kernels.int8 import QUANT_MAX, divide

NUM_BINS = 2048
NUM_CLIPS = 128  # candidates of the MSE search: 1/128 .. 1 of the largest value


class ObserverKind(StrEnum):
    """How observed inputs become a range."""

    minmax = "minmax"
    moving_average = "moving_average"
    percentile = "percentile"
    mse = "mse"


@dataclass(frozen=True, slots=True)
class ObserverSettings:
    """Which range is taken.

    momentum    moving_average: the share of a step in the range, above 0, at most 1 (torch's MovingAverage has 0.01)
    percentile  percentile: of |x|, above 0, at most 100
    raises      ValueError naming the setting
    """

    kind: ObserverKind = ObserverKind.moving_average
    momentum: float = 0.01
    percentile: float = 99.99

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ObserverKind(self.kind))
        if not 0 < self.momentum <= 1:
            raise ValueError(f"observer.momentum={self.momentum}; use a number above 0, at most 1, such as 0.01")
        if not 0 < self.percentile <= 100:
            raise ValueError(f"observer.percentile={self.percentile}; use a number above 0, at most 100, such as 99.99")


class Observer(nn.Module):
    """The largest |x| that counts, from what passed by.

    range      [] float32 buffer: what has been committed; 0 before the first commit
    pending    [] float32 buffer: the largest |x| since the last commit
    width, counts, pending_counts   buffers of the kinds that count: [] float32, [2048] int64
    """

    def __init__(self, settings: ObserverSettings, device: torch.device | None = None) -> None:
        super().__init__()
        self.settings = settings
        for name in ("range", "pending"):
            self.register_buffer(name, torch.zeros((), device=device))
        if self._counts_values:
            self.register_buffer("width", torch.zeros((), device=device))
            for name in ("counts", "pending_counts"):
                self.register_buffer(name, torch.zeros(NUM_BINS, dtype=torch.int64, device=device))

    @property
    def _counts_values(self) -> bool:
        return self.settings.kind in (ObserverKind.percentile, ObserverKind.mse)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Take in the inputs [..., in_features] of one pass; inf and nan do not count."""
        if torch._C._current_graph_task_id() != -1:
            return  # inside a backward pass: gradient checkpointing shows again what was counted
        magnitude = x.detach().float().abs().flatten()
        magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0)
        if magnitude.numel() == 0:
            return
        largest = magnitude.max()
        self.pending.copy_(torch.maximum(self.pending, largest))
        if self._counts_values and largest > 0:
            self._widen(largest)
            place = (magnitude / self.width).long().clamp(max=NUM_BINS - 1)
            self.pending_counts += torch.bincount(place, minlength=NUM_BINS)

    @torch.no_grad()
    def commit(self) -> None:
        """Fold what was seen since the last call into the range, over all processes; once a step, on each of them."""
        _reduce(self.pending, "max")
        if self._counts_values:
            self._commit_counts()
        elif self.pending > 0:
            self.range.copy_(self._with_pending())
        self.pending.zero_()

    def absmax(self) -> Tensor:
        """[] float32: the largest |x| that the scale must hold, with what is pending; 0 if nothing was seen."""
        if not self._counts_values:
            return self._with_pending()
        counts = self.counts + self.pending_counts
        if self.settings.kind is ObserverKind.percentile:
            return percentile_of_counts(counts, self.width, self.settings.percentile)
        return mse_of_counts(counts, self.width)

    def scale(self) -> Tensor:
        """[] float32, positive: absmax / 127, or 1 if nothing was seen."""
        scale = divide(self.absmax(), QUANT_MAX)
        return torch.where(scale > 0, scale, 1.0)

    def _with_pending(self) -> Tensor:
        if self.settings.kind is ObserverKind.minmax:
            return torch.maximum(self.range, self.pending)
        moved = self.range + self.settings.momentum * (self.pending - self.range)
        return torch.where(self.range == 0, self.pending, torch.where(self.pending == 0, self.range, moved))

    def _widen(self, largest: Tensor) -> None:
        """Double the bins' width until `largest` fits in."""
        self._set_width(torch.exp2(torch.floor(torch.log2(largest / NUM_BINS)) + 1).clamp(min=2.0**-100))

    def _set_width(self, width: Tensor) -> None:
        """At least this power of two; counts move to the bins that hold theirs."""
        if self.width == 0:
            self.width.copy_(width)
        while self.width < width:
            self.width.mul_(2)
            for counts in (self.counts, self.pending_counts):
                pairs = counts.view(-1, 2).sum(1)
                counts.zero_()[: NUM_BINS // 2] = pairs

    def _commit_counts(self) -> None:
        if dist.is_initialized():
            widest = self.width.clone()
            _reduce(widest, "max")
            self._set_width(widest)
        _reduce(self.pending_counts, "sum")
        self.counts += self.pending_counts
        self.pending_counts.zero_()
        self.range.copy_(self.absmax())


def percentile_of_counts(counts: Tensor, width: Tensor, percentile: float) -> Tensor:
    """The upper edge of the bin that the percentile of all counted values lies in; [] float32, 0 without values.

    counts  [NUM_BINS] int64 of |x|, bin i from i * width
    """
    total = counts.sum()
    wanted = torch.ceil(total.double() * percentile / 100).clamp(min=1)
    place = torch.searchsorted(counts.cumsum(0).double(), wanted[None])[0].clamp(max=NUM_BINS - 1)
    return torch.where(total > 0, (place + 1) * width, 0.0)


def mse_of_counts(counts: Tensor, width: Tensor) -> Tensor:
    """The clip for which rounding the bins' centres to 127 steps has the smallest squared error; [] float32.

    counts  [NUM_BINS] int64 of |x|, bin i from i * width
    """
    used = (counts > 0).nonzero()
    if len(used) == 0:
        return torch.zeros_like(width)
    top = used.max() + 1
    centres = (torch.arange(NUM_BINS, device=counts.device) + 0.5).double()
    clips = top.double() * torch.arange(1, NUM_CLIPS + 1, device=counts.device).double() / NUM_CLIPS
    steps = clips[:, None] / QUANT_MAX
    rounded = (centres / steps).round().clamp(max=QUANT_MAX) * steps  # [NUM_CLIPS, NUM_BINS]
    errors = ((rounded - centres).square() * counts).sum(1)
    return (clips[errors.argmin()] * width).float()


def _reduce(tensor: Tensor, how: str) -> None:
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
