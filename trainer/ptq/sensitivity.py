"""Which layers need more bits: what rounding each of them costs the model, in nats of the next token.

A layer's codes change its outputs by E x, E = W' - W. To second order the model's answers move by

    KL(original || quantized) of a row  =  1/2 (sum over tokens t of g_t . E x_t)^2,   mean over rows

with g_t the gradient of the row's log-likelihood at the layer's output, for tokens that are drawn from the model
itself: their scores at different positions are uncorrelated, so that a row's gradient has the Fisher information of the
whole row in it. One forward and one backward pass a row measure all layers and all candidate quantizers at once.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from trainer.quant_plan import QuantPlan, log_plan, most_gaining_layers
from trainer.quantizer import Quantizer

log = logging.getLogger(__name__)

MAX_ROWS, MAX_TOKENS = 64, 128
"""Rows that are drawn, and their length: a layer's figure then has a standard error of 1/6."""


def sensitivities(
    model: PreTrainedModel,
    quantizers: Sequence[Quantizer],
    names: Sequence[str],
    rows: Sequence[Sequence[int]],
    *,
    seed: int,
) -> list[dict[str, float]]:
    """Of each quantizer: name -> the KL a token that rounding this layer alone to nearest costs, in nats.

    model  with dense layers `names`; it is as before afterwards
    rows   token ids, of which the first MAX_ROWS and MAX_TOKENS count
    """
    layers = {name: model.get_submodule(name) for name in names}
    found = [dict.fromkeys(names, 0.0) for _ in quantizers]
    inputs: dict[str, Tensor] = {}
    moved: dict[str, list[float]] = {}

    def keep_input(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0].detach()
            output.register_hook(lambda grad: _add(name, grad))

        return hook

    def _add(name: str, grad: Tensor) -> None:
        x, g = inputs.pop(name).float().flatten(0, -2), grad.float().flatten(0, -2)
        outer = g.T @ x  # the sum over tokens of g x^T: g . E x is its product with E
        weight = layers[name].weight.detach().float()
        moved[name] = [
            (outer * (quantizer.quantize(weight).dequantize(torch.float32) - weight)).sum().item()
            for quantizer in quantizers
        ]

    handles = [layer.register_forward_hook(keep_input(name)) for name, layer in layers.items()]
    used = [list(row[:MAX_TOKENS]) for row in rows[:MAX_ROWS]]
    num_tokens = sum(map(len, used))
    generator = torch.Generator().manual_seed(seed)
    try:
        for row in used:
            moved.clear()  # a layer that a row does not reach, as an expert, costs nothing there
            _backward(model, row, generator)
            for name, dots in moved.items():
                for place, dot in enumerate(dots):
                    found[place][name] += 0.5 * dot * dot / num_tokens
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.enable_grad()
def _backward(model: PreTrainedModel, row: Sequence[int], generator: torch.Generator) -> None:
    """The gradient of the log-likelihood of tokens that the model draws at each place of a row."""
    ids = torch.tensor([row], device=model.device)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()  # the first tensor that has a gradient
    logits = model(inputs_embeds=embeds, use_cache=False).logits[0].float()
    drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
    cross_entropy(logits, drawn, reduction="sum").backward()


def plan_by_sensitivity(
    model: PreTrainedModel,
    low: Quantizer,
    high: Quantizer,
    names: Sequence[str],
    rows: Sequence[Sequence[int]],
    *,
    bits_budget: float,
    seed: int,
) -> tuple[QuantPlan, Mapping[str, float]]:
    """The plan that saves the most nats within a mean of `bits_budget` bits a code, and what each layer would gain."""
    costs_low, costs_high = sensitivities(model, (low, high), names, rows, seed=seed)
    gains = {name: costs_low[name] - costs_high[name] for name in names}
    sizes = {name: model.get_submodule(name).weight.numel() for name in names}
    plan = most_gaining_layers(sizes, gains, high, low, bits_budget=bits_budget)
    log_plan(plan, list(names))
    kept = sum(costs_low[name] if name in plan.low_layers else costs_high[name] for name in names)
    log.info("bits     expected KL %.4f nats a token, %.4f with %s alone", kept, sum(costs_low.values()), low.codebook)
    return plan, gains
