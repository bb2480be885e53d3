"""Scales in the 16 bits that formats store, and what that changes.

A float32 scale that is rounded moves each weight of its group by up to 2^-11 (float16) or 2^-9 (bfloat16) of itself.
That is refused unless asked for, and then measured. Values count and not labels: float32 scales that all survive are
exact.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.config.errors import require


@dataclass
class StoredScales:
    """Scales as a layout stores them, and what rounding them to its dtype changed.

    dtype      float16, bfloat16 or float32
    layout     for messages
    allow      round them where they are not values of dtype
    largest    of |s' - s| / |s|, which is |w' - w| / |w| of each weight under the scale; 0.0: nothing was rounded
    """

    dtype: torch.dtype
    layout: str
    allow: bool = False
    largest: float = 0.0
    _sum: float = 0.0
    _num_weights: int = 0

    def store(self, name: str, scales: Tensor, *, num_weights: int = 0) -> Tensor:
        """The scales of one layer in dtype.

        num_weights  under all of them together, each under as many; 0 for the scale of inputs
        raises       UserError if they are not values of dtype, unless that is allowed; always if one is too large
        """
        stored = scales.to(self.dtype)
        changes = ((stored.double() - scales.double()) / scales.double()).abs().where(scales != 0, 0)
        dtype = str(self.dtype).removeprefix("torch.")
        require(
            bool(stored.isfinite().all()),
            f"{name} has a scale of {scales.abs().max().item():.4g}, which {dtype} has no value for; write "
            f"{self.layout} in another dtype, or keep this layer dense",
        )
        largest = changes.max().item()
        require(
            self.allow or largest == 0,
            f"{name} has scales that {self.layout} would round to {dtype}, and its weights by up to {largest:.2g} of "
            f"themselves; quantize with scale_dtype={dtype}, or allow it with allow_rounded_scales=True",
        )
        self.largest = max(self.largest, largest)
        self._sum += changes.mean().item() * num_weights
        self._num_weights += num_weights
        return stored

    @property
    def mean(self) -> float:
        """Mean of |w' - w| / |w| over all weights."""
        return self._sum / max(1, self._num_weights)

    @property
    def figures(self) -> dict[str, Any]:
        """For lowbit.json; empty where nothing was changed."""
        if not self.largest:
            return {}
        dtype = str(self.dtype).removeprefix("torch.")
        return {"scales_rounded_to": dtype, "largest_change": self.largest, "mean_change": self.mean}
