"""The largest singular values of a matrix and their vectors: for residuals (LoftQ) and for activations (EVA)."""

import torch
from torch import Tensor

EXACT_SIZE = 1024
EXACT_RANKS = 16
"""The SVD is exact, from the eigenvectors of the Gram matrix in float64, up to this smaller side and up to this many
times the rank; else randomized. On the residual of a [1536, 576] layer, one Zen 4 core: 73 and 17 ms at rank 16, 70 and
77 ms at rank 64, 104 and 96 ms for torch.linalg.svd; the eigenvectors' time grows with the cube of the side."""
OVERSAMPLING = 16
"""Extra directions of the randomized SVD, or as many as the rank if that is more; arXiv:0909.4061 takes 5 to 10 for
spectra that fall, a rounding residual's hardly does."""
POWER_ITERATIONS = 8
"""With these a residual's norm is within 0.06 % of the exact truncation's, at ranks 16 and 64 (SmolLM2-135M, layer 10);
with 4 it is within 0.6 %."""


def truncated_svd(matrix: Tensor, *, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values and their vectors: matrix ~ U diag(S) Vt.

    matrix   [m, n] float32
    rank     how many; at most min(m, n) come back
    returns  U [m, k], S [k] descending, Vt [k, n], float32
    """
    if matrix.shape[0] < matrix.shape[1]:
        U, S, Vt = truncated_svd(matrix.T, rank=rank)
        return Vt.T, S, U.T
    rank = min(rank, matrix.shape[1])
    if matrix.shape[1] > min(EXACT_SIZE, EXACT_RANKS * rank):
        return _randomized_svd(matrix, rank)
    wide = matrix.double()
    V = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:].flip(1)  # ascending -> descending
    US = wide @ V
    S = US.norm(dim=0)
    U = US / S.clamp(min=torch.finfo(torch.float64).tiny)
    return U.float(), S.float(), V.T.float()


def _randomized_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Subspace iteration (arXiv:0909.4061, algorithms 4.4 and 5.1) from a fixed seed; the global generator stays."""
    num_columns = min(matrix.shape[1], rank + max(rank, OVERSAMPLING))
    start = torch.randn(matrix.shape[1], num_columns, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(matrix @ start.to(matrix.device)).Q
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    U, S, Vt = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return (basis @ U)[:, :rank], S[:rank], Vt[:rank]
