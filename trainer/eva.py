"""EVA: an adapter that starts in the directions in which its layers' inputs vary (arXiv:2410.07170, section 3).

    A_0 = the leading right singular vectors of the inputs X less their mean,   B_0 = 0

Ranks move to the layers whose inputs they explain best, and their sum stays. The surprising thing: one pass is enough.
The paper updates an SVD batch by batch until it settles, because it cannot hold the inputs of all layers; here each
layer's inputs, at the target positions of some dozens of rows, are decomposed when they pass by, and forgotten.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel, initialize_lora_eva_weights
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from trainer.config.errors import require
from trainer.lora import LoraLinear
from trainer.svd import truncated_svd

log = logging.getLogger(__name__)

TARGETS_PER_COMPONENT = 64
"""Target tokens for each component that is fitted, 2,048 at rank 16: their A_0 spans 0.94 of what twice as many give,
half of them 0.89 (SmolLM2-135M over NF4, GSM8K, rank 16)."""


@torch.inference_mode()
def initialize_eva(model: PeftModel, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Directions and ranks of each layer, from one pass over the first training rows.

    model    attached with lora.init=eva; left as it is, the pass runs in eval mode
    rows     tokenized rows, `input_ids` and `labels`; the target positions are what is decomposed
    returns  what `restore_eva` takes: layer name -> A_0 [rank, in_features] float32; rank 0: no adapter there
    raises   UserError if the rows have fewer targets than components are wanted
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    config = model.peft_config["default"]
    ranks = {
        name: config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r) for name in layers
    }
    most = {name: min(round(rank * config.eva_config.rho), layers[name].in_features) for name, rank in ranks.items()}
    batch = _first_rows(rows, num_targets=TARGETS_PER_COMPONENT * max(most.values()))
    targets = batch.pop("targets").to(model.device)
    require(
        int(targets.sum()) > max(most.values()),
        f"lora.init=eva fits {max(most.values())} components (rank times lora.eva_rho) to the target tokens of the "
        f"training rows, and they have {int(targets.sum())}; give more rows, or lower lora.rank or lora.eva_rho",
    )
    parts = _InputParts(layers, targets, num_components=max(most.values()))
    training = model.training
    model.eval()
    try:
        decoder = model.get_base_model().base_model  # without the head: nobody reads logits
        decoder(**{key: value.to(model.device) for key, value in batch.items()}, use_cache=False)
    finally:
        parts.remove()
        model.train(training)
    counts = distribute_ranks({name: parts.explained[name][: most[name]] for name in layers}, sum(ranks.values()))
    log.info(
        "adapter  eva: %d target tokens, ranks %d to %d", int(targets.sum()), min(counts.values()), max(counts.values())
    )
    return {name: parts.directions[name][: counts[name]].clone() for name in layers}


def distribute_ranks(explained: dict[str, Tensor], budget: int) -> dict[str, int]:
    """Give `budget` ranks to the components that explain the largest shares of their layer's variance (section 3.3).

    explained  layer name -> [components] descending, each a share of the variance of the layer's inputs
    returns    layer name -> rank; ties go to the layer that comes first
    """
    names = [name for name, shares in explained.items() for _ in shares]
    order = torch.cat(list(explained.values())).argsort(descending=True, stable=True)[:budget]
    counts = dict.fromkeys(explained, 0)
    for index in order.tolist():
        counts[names[index]] += 1
    return counts


def restore_eva(model: PeftModel, directions: dict[str, Tensor]) -> None:
    """Give each layer the rank and the A_0 of `directions`, in place; the config becomes that of plain LoRA."""
    training = model.training
    initialize_lora_eva_weights(model, eva_state_dict=dict(directions))
    config = model.peft_config["default"]
    config.init_lora_weights, config.eva_config = True, None
    model.train(training)


class _InputParts:
    """Hooks that decompose what goes into each layer; layers that get the same tensor share its parts.

    directions  layer name -> [components, in_features] float32
    explained   layer name -> [components], shares of the variance
    """

    def __init__(self, layers: dict[str, LoraLinear], targets: Tensor, *, num_components: int) -> None:
        self.directions: dict[str, Tensor] = {}
        self.explained: dict[str, Tensor] = {}
        self._targets, self._num_components = targets, num_components
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._handles = [layer.register_forward_pre_hook(self._watch(name)) for name, layer in layers.items()]

    def _watch(self, name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self._last is None or self._last[0] is not inputs[0]:
                self._last = inputs[0], self._decompose(inputs[0])
            directions, self.explained[name] = self._last[1]
            self.directions[name] = directions

        return hook

    def _decompose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, in_features] -> directions, shares; on the CPU, like all that is kept of a layer"""
        rows = x[self._targets].float()  # [N, in_features]
        rows = rows - rows.mean(0)
        _, singular, directions = truncated_svd(rows, rank=self._num_components)
        shares = singular.square() / rows.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
        return directions.cpu(), shares.cpu()

    def remove(self) -> None:
        self._last = None
        for handle in self._handles:
            handle.remove()


def _first_rows(rows: Sequence[dict[str, Any]], *, num_targets: int) -> dict[str, Tensor]:
    """Rows in their order until they have `num_targets`, padded on the right.

    returns  input_ids, attention_mask [B, longest] int64; targets [B, longest] bool
    """
    chosen: list[dict[str, Any]] = []
    found = 0
    for row in rows:
        if found >= num_targets:
            break
        chosen.append(row)
        found += sum(label != -100 for label in row["labels"])
    longest = max(len(row["input_ids"]) for row in chosen)
    padding = [longest - len(row["input_ids"]) for row in chosen]
    return {
        "input_ids": torch.tensor([row["input_ids"] + [0] * n for row, n in zip(chosen, padding, strict=True)]),
        "attention_mask": torch.tensor([[1] * (longest - n) + [0] * n for n in padding]),
        "targets": torch.tensor([row["labels"] + [-100] * n for row, n in zip(chosen, padding, strict=True)]) != -100,
    }
