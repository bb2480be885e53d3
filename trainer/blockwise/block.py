"""One transformer block learns to give its 16-bit outputs in few bits: EfficientQAT's Block-AP (arXiv:2407.11062, 3.2).

Its linear layers become FakeQuantLinear over float32 copies of their weights; Adam trains weights and scales, each at
their own rate, to lower the error of the block's output. What comes back is codes: those that the last forward would
multiply. `blocks.py` gives the hidden states and goes from block to block.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.config.blockwise import BlockLoss, BlockwiseConfig
from trainer.linear import QuantLinear
from trainer.qat.fake_quant import FakeQuantLinear
from trainer.qat.scheme import Scheme
from trainer.quantizer import QuantizedTensor

FINAL_LR_SHARE = 0.05
"""Where the cosine of a block's learning rates ends: `min_lr_factor` of 20 in the paper's code."""
NORM_EPS = 1e-6
"""What norms add to the mean square that they divide by, so that a token of zeros has a length."""
Codes = dict[str, QuantizedTensor]
"""Names of linear layers and the codes that they get."""


class Pass(NamedTuple):
    """Documents that go through a block at once.

    inputs, targets  [T, hidden_size]
    cu_seqlens       [B + 1] int32: document b has the tokens cu_seqlens[b] to cu_seqlens[b + 1]
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor


Forward = Callable[[Tensor, Tensor], Tensor]
"""What a block makes of inputs [T, hidden_size], given cu_seqlens."""


def nearest_codes(weights: Mapping[str, Tensor], schemes: Mapping[str, Scheme]) -> Codes:
    """Round-to-nearest of each weight [out_features, in_features].

    raises  ValueError naming the layer if a weight holds inf or nan, or is not divided by the groups
    """
    codes: Codes = {}
    for name, scheme in schemes.items():
        try:
            codes[name] = scheme.weight.quantize(weights[name])
        except ValueError as error:
            raise ValueError(f"{name}.weight: {error}") from None
    return codes


def pack_block(block: nn.Module, codes: Codes) -> None:
    """Put a QuantLinear of these codes in the place of each layer."""
    for name, quantized in codes.items():
        _replace(block, name, QuantLinear(quantized, block.get_submodule(name).bias))


def train_codes(
    block: nn.Module,
    weights: Mapping[str, Tensor],
    schemes: Mapping[str, Scheme],
    forward: Forward,
    passes_of: Callable[[int], list[Pass]],
    config: BlockwiseConfig,
    *,
    num_steps: int,
) -> Codes:
    """Train layers of a block; returns their codes, and leaves FakeQuantLinear modules in the block.

    weights    where they start, by their names inside the block: [out_features, in_features] float each; biases stay,
               which no file of a finished block holds
    forward    the block, as it is at the moment
    passes_of  the documents of a step 0 <= step < num_steps
    """
    layers: dict[str, FakeQuantLinear] = {}
    for name, scheme in schemes.items():
        weight = nn.Parameter(weights[name].detach().float())  # 16 bits would not move at these rates
        layers[name] = FakeQuantLinear(weight, block.get_submodule(name).bias, scheme)
        _replace(block, name, layers[name])
    optimizer = _adam(layers.values(), config)
    for step in range(num_steps):
        _train_step(optimizer, forward, passes_of(step), config.loss)
        for group in optimizer.param_groups:
            group["lr"] = group["first_lr"] * lr_share(step + 1, num_steps)
    return {name: layer.quantized for name, layer in layers.items()}


def _adam(layers: Iterable[FakeQuantLinear], config: BlockwiseConfig) -> torch.optim.Adam:
    named = [(name, param) for layer in layers for name, param in layer.named_parameters() if param.requires_grad]
    weights = [param for name, param in named if name == "weight"]
    scales = [param for name, param in named if name != "weight"]
    groups = [
        {"params": params, "lr": lr, "first_lr": lr}
        for params, lr in ((weights, config.weight_lr), (scales, config.scale_lr))
        if params
    ]
    return torch.optim.Adam(groups, fused=True)


def lr_share(step: int, num_steps: int) -> float:
    """The share of its first value that a learning rate has at a 0-based step."""
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * step / num_steps)) / 2


def _train_step(optimizer: torch.optim.Adam, forward: Forward, passes: list[Pass], loss: BlockLoss) -> None:
    num_tokens = sum(len(batch.inputs) for batch in passes)
    for batch in passes:
        output = forward(batch.inputs, batch.cu_seqlens)
        (reconstruction_error(output, batch.targets, loss) / num_tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def reconstruction_error(output: Tensor, target: Tensor, loss: BlockLoss) -> Tensor:
    """The sum over tokens of what `blockwise.loss` says, [] float32.

    output, target  [T, hidden_size] float
    """
    target = target.float()
    error = (output.float() - target).square().mean(-1)
    return (error if loss is BlockLoss.mse else error / (target.square().mean(-1) + NORM_EPS)).sum()


@torch.no_grad()
def mean_error(forward: Forward, passes: Iterable[Pass], loss: BlockLoss) -> float:
    """`reconstruction_error` a token."""
    total, num_tokens = 0.0, 0
    for batch in passes:
        output = forward(batch.inputs, batch.cu_seqlens)
        total += reconstruction_error(output, batch.targets, loss).item()
        num_tokens += len(batch.inputs)
    return total / num_tokens


def _replace(block: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(block.get_submodule(parent), child, layer)
