"""NEFTune (arXiv:2310.05914, algorithm 1): uniform noise on the embeddings of training documents.

    x' = x + alpha / sqrt(L d) * u      u ~ U(-1, 1) for each component, L tokens of the document, d its width

The noise comes from torch's generator of the device, which checkpoints save: a resumed run draws what it would have
drawn. L is each document's own length, however documents are packed or padded, so the batch does not matter.
"""

import torch
from torch import Tensor, nn


class EmbeddingNoise:
    """Adds the noise after `embedding`, in train mode, for the documents that `lengths` describes."""

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self.lengths: Tensor | None = None
        """[B] tokens of each document of the next forward; None for no noise."""
        self._alpha = alpha
        embedding.register_forward_hook(self._add)

    def _add(self, module: nn.Module, arguments: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        """[T, D], documents one after the other, or [B, longest, D], a document a row"""
        if not module.training or self.lengths is None:
            return embedded
        lengths, width = self.lengths.to(embedded.device), embedded.shape[-1]
        if embedded.ndim == 2:
            scale = (lengths * width).rsqrt().repeat_interleave(lengths, output_size=len(embedded))[:, None]
        else:
            scale = (lengths * width).rsqrt()[:, None, None]
        noise = torch.rand(embedded.shape, device=embedded.device).mul_(2).sub_(1)
        return embedded + (noise * scale * self._alpha).to(embedded.dtype)
