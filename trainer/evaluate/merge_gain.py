"""How much of what training gained is left in the codes that ship: merge-aware LoRA beside the usual way.

    gain = loss of Q(W) - loss            kept = gain of the shipped codes / gain of the trained function

The usual way trains Q(W) x + s B A x and ships Q(W + s B A) of the 16-bit weights. Merge-aware layers train what they
ship, so that 1 is kept; it is measured all the same, with layers that hold nothing but the codes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn

from trainer.architecture import base_model
from trainer.linear import QuantLinear
from trainer.lora import LoraLinear
from trainer.qat.fake_weight import FromWeight
from trainer.qat.merge_aware import MergeAwareLinear
from trainer.qat.merged_codes import MergedWeight, merged_codes
from trainer.qat.packed_linear import pack_layer


@dataclass(frozen=True)
class MergeGain:
    """Losses in nats a token.

    nearest  of the base, rounded to nearest, without the adapter
    trained  of what training computed
    shipped  of the codes alone
    """

    nearest: float
    trained: float
    shipped: float

    @property
    def kept(self) -> float:
        """Of the gain in training, the share that ships; nan if training gained nothing."""
        gain = self.nearest - self.trained
        return (self.nearest - self.shipped) / gain if gain > 0 else float("nan")


def measure_merge_gain(
    model: PeftModel, loss: Callable[[], float], weights: Mapping[str, Tensor] | None = None
) -> MergeGain:
    """Measure a trained model, which is afterwards what it was.

    loss     the held-out loss of `model`, as it is when called
    weights  layer name -> the 16-bit weight, of layers whose base is packed: what the usual way merges into
    raises   ValueError naming a packed layer without a weight
    """
    with model.disable_adapter():
        nearest = loss()
    trained = loss()
    with _shipped(model, weights or {}):
        return MergeGain(nearest, trained, loss())


@contextmanager
def _shipped(model: PeftModel, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Layers of the merged codes in the place of those with adapters."""
    base = base_model(model)
    layers = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLinear)}
    packed = {name: _packed(name, layer, weights) for name, layer in layers.items()}
    try:
        for name, layer in packed.items():
            base.set_submodule(name, layer)
        yield
    finally:
        for name, layer in layers.items():
            base.set_submodule(name, layer)


@torch.no_grad()
def _packed(name: str, layer: LoraLinear, weights: Mapping[str, Tensor]) -> nn.Module:
    if isinstance(layer, MergeAwareLinear):
        return pack_layer(layer.scheme, layer.quantized, layer.get_base_layer().bias)
    base = layer.get_base_layer()
    if not isinstance(base, QuantLinear) or name not in weights:
        kind = "is not packed" if not isinstance(base, QuantLinear) else "is packed, and `weights` does not have it"
        raise ValueError(
            f"{name} {kind}; give a merge-aware model, or a packed base and the weights it was packed from"
        )
    codes = merged_codes(MergedWeight.of(weights[name], layer.adapter), FromWeight(base.quantizer))
    return QuantLinear(codes, base.bias)
