"""Rounding that is not to the nearest: stochastic, and soft as in AdaRound. Both end on the grid that is shipped.

Stochastic. code = round(w / s + amount * (u - 1/2)), u uniform in [0, 1): with amount 1 the expected code is w / s
(arXiv:1502.02551, section 3), with 0 it is the nearest. The draws are a function of (seed, step, layer) alone: no
generator has a state, and a resumed run draws what the uninterrupted one would have drawn.

Soft (arXiv:2004.10568, equations 22-24). code = floor(w / s) + h(V), w frozen, V trained,
    h(V)    = clip(1.2 * sigmoid(V) - 0.1, 0, 1)    starts at the fraction of w / s, so that the code is w / s
    penalty = sum of 1 - |2 h(V) - 1|^beta          pulls h to 0 or 1; beta falls from 20 to 2
and what ships is floor(w / s) + (h(V) >= 1/2), which is V >= 0.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

ZETA, GAMMA = 1.1, -0.1  # arXiv:2004.10568, section 3.2: h reaches 0 and 1 at finite V
BETA_START, BETA_END = 20.0, 2.0  # of the authors' code
_EDGE = 1e-4  # fractions this close to 0 or 1 start just inside, where h has a gradient


def rounding_seed(seed: int, step: int, layer: int) -> int:
    """What a layer's draws of one step are made from; 63 bits, equal on every machine."""
    digest = hashlib.blake2b(f"{seed} {step} {layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rounding_noise(like: Tensor, seed: int) -> Tensor:
    """u - 1/2 for each weight: float32 of the shape of `like`, uniform in [-1/2, 1/2), from `seed` alone."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device) - 0.5


def rectified_sigmoid(variables: Tensor) -> Tensor:
    """h(V) in [0, 1]"""
    return (torch.sigmoid(variables) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def rectified_sigmoid_gradient(variables: Tensor) -> Tensor:
    """dh/dV, 0 where h is clipped"""
    sigmoid = torch.sigmoid(variables)
    h = sigmoid * (ZETA - GAMMA) + GAMMA
    return torch.where((h > 0) & (h < 1), (ZETA - GAMMA) * sigmoid * (1 - sigmoid), 0)


def initial_soft_rounding(fractions: Tensor) -> Tensor:
    """V with h(V) = w / s - floor(w / s), the fractions in [0, 1); float32."""
    share = (fractions.float().clamp(_EDGE, 1 - _EDGE) - GAMMA) / (ZETA - GAMMA)
    return torch.log(share / (1 - share))


def annealed_beta(progress: float) -> float:
    """beta after a share of the annealing in [0, 1]: from 20 down to 2 along a cosine."""
    cosine = torch.cos(torch.tensor(min(max(progress, 0.0), 1.0)) * torch.pi).item()
    return BETA_END + 0.5 * (BETA_START - BETA_END) * (1 + cosine)


def soft_rounding_penalty(variables: Iterable[Tensor], beta: float) -> Tensor:
    """Sum over all weights of 1 - |2 h(V) - 1|^beta; [] float32, differentiable.

    variables  those that are trained: `FakeQuantLinear.soft_rounding` of the layers
    beta       20 lets weights move freely, 2 makes them decide
    """
    total = torch.zeros(())
    for v in variables:
        total = total.to(v.device) + (1 - (2 * rectified_sigmoid(v) - 1).abs().pow(beta)).sum()
    return total
