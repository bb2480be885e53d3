"""conf=qat_lora: an adapter whose layers round what they would be merged into (trainer/qat/merge_aware.py).

Which layers round, what cannot be rounded and why, and the switch between 16 bits and codes.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from trainer.config.errors import UserError, require
from trainer.config.lora import LoraConfig
from trainer.lora import Factors, LoraLinear, attach_lora
from trainer.qat.fake_quant import FakeQuantWeight, fake_quantize_embeddings, fake_quantize_linears
from trainer.qat.merge_aware import MergeAwareLinear
from trainer.qat.scheme import Rounding, Scheme


def attach_merge_aware(
    model: PreTrainedModel,
    config: LoraConfig,
    schemes: dict[str, Scheme],
    *,
    seed: int,
    start: Factors | None = None,
    token_ids: list[int] | None = None,
) -> PeftModel:
    """`attach_lora`, with layers that round their merged weights; start and token_ids are its arguments.

    A layer that has a scheme and no adapter rounds its frozen weight, so that the factors of the others are trained
    against all of the model that ships.

    schemes  layer name -> its scheme
    raises   UserError naming a layer whose scheme cannot be trained with LoRA, or that cannot have it, and as
             `attach_lora`
    """
    for name, scheme in schemes.items():
        reason = why_not_with_lora(scheme)
        require(reason is None, f"{name}: {reason}")
    options = {"seed": seed, "start": start, "token_ids": token_ids}
    peft_model = attach_lora(model, config, over_dense=merge_aware_over(model, schemes), **options)
    round_others(peft_model, schemes)
    return peft_model


def round_others(model: PeftModel, schemes: dict[str, Scheme]) -> None:
    """Let the layers of `schemes` that have no adapter round their frozen weights, in place.

    Nothing of them is trained: with learned scales they keep those of their weights.

    raises  UserError naming a layer that cannot have its scheme
    """
    base = model.get_base_model()
    try:
        fake_quantize_linears(base, schemes.get)
        fake_quantize_embeddings(base, schemes.get)
    except ValueError as error:
        raise UserError(str(error)) from None
    for _, layer in rounding_layers(base):
        if isinstance(layer, FakeQuantWeight):
            layer.requires_grad_(False)
    left_out = schemes.keys() - {name for name, _ in rounding_layers(base)}
    require(
        not left_out,
        f"qat.schemes gives codes to {sorted(left_out)[:3]}, and lora.modules_to_save or model.add_tokens trains its "
        "rows in 32 bits; leave one of the two out",
    )


def why_not_with_lora(scheme: Scheme) -> str | None:
    """Why factors cannot be trained through a scheme, and what to do; None if they can."""
    if scheme.rounding is not Rounding.nearest:
        return (
            f"qat.rounding={scheme.rounding} draws or trains a direction for each weight, and LoRA trains factors; use "
            "qat.rounding=nearest, or train all weights (conf=qat)"
        )
    if scheme.activations is not None and scheme.activations.static:
        return (
            "qat.scheme=int8_static observes ranges of inputs, which merge-aware layers do not; use qat.scheme=int8 (a "
            "scale a token), or train all weights (conf=qat)"
        )
    return None


def merge_aware_over(model: nn.Module, schemes: dict[str, Scheme]) -> Callable[..., LoraLinear]:
    """What PEFT is to put over the dense layers of `model`: see `register_layers`.

    The layers are not kept alive by it: `convert` frees their weights.
    """
    of_layer = WeakKeyDictionary({model.get_submodule(name): scheme for name, scheme in schemes.items()})

    def over_dense(target: nn.Module, *args: Any, **kwargs: Any) -> LoraLinear:
        scheme = of_layer.get(target)
        return (
            LoraLinear(target, *args, **kwargs)
            if scheme is None
            else MergeAwareLinear(target, *args, scheme=scheme, **kwargs)
        )

    return over_dense


def rounding_layers(model: nn.Module) -> Iterator[tuple[str, MergeAwareLinear | FakeQuantWeight]]:
    """The layers of a model that round weights of floats, by name, in the model's order."""
    for name, layer in model.named_modules():
        if isinstance(layer, (FakeQuantWeight, MergeAwareLinear)):
            yield name, layer
