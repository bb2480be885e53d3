"""From layers that are trained through the quantizer to layers of codes: the codes that the last forward multiplied.

The pair of `prepare_qat`. Nothing is rounded here that was not rounded in training, and `convert` proves it layer by
layer before it replaces anything: the trained layer, given the rows of the unit matrix and no bias, gives out the
weight that it multiplies, and that must be the packed one, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.architecture import active_module, base_layer, base_model
from trainer.export.merged import merge_layer
from trainer.formats.hf_folder import token_rows
from trainer.linear import QuantLinear
from trainer.qat.fake_quant import FakeQuantEmbedding
from trainer.qat.packed_linear import Packed, PackedEmbedding, PackedLinear, pack_layer
from trainer.qat.packed_model import packed_layers, scheme_of_layer

PROBE_ROWS = 512
"""Rows of the unit matrix, or of random inputs, that go through a layer at a time."""

Frozen = nn.Module
"""QuantLinear, PackedLinear or PackedEmbedding."""


def convert(model: nn.Module) -> int:
    """Replace each layer that is trained through a quantizer by a frozen layer of its codes, in place.

    model    a causal language model, or PEFT's wrapper around one, whose base model is changed
    returns  how many layers were replaced
    raises   RuntimeError naming a layer that multiplies something else than its codes; ValueError if a weight is inf or
             nan. Nothing was replaced then
    """
    causal_lm = base_model(model)
    trained = {name: layer for name, layer in packed_layers(model).items() if is_trained(layer)}
    was_training = {name: layer.training for name, layer in trained.items()}
    packed: dict[str, Frozen] = {}
    for name, layer in trained.items():
        layer.eval()
        packed[name] = pack(layer)
        _require_same_function(name, layer, packed[name], causal_lm.dtype)
    for name, layer in packed.items():
        causal_lm.set_submodule(name, layer.train(was_training[name]))
    _take_out_adapters(causal_lm)
    return len(packed)


@torch.no_grad()
def _take_out_adapters(model: nn.Module) -> None:
    """What PEFT still wraps becomes a plain module: trained copies, trained rows, adapters of layers in 16 bits.

    These adapters are added to their weights in float32 and rounded once; everything else stays to the bit.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            model.set_submodule(name, active_module(module))
        elif isinstance(module, TrainableTokensWrapper):
            plain, rows = module.original_module, token_rows(module)
            plain.weight = nn.Parameter(rows, requires_grad=False)
            model.set_submodule(name, plain)
        elif isinstance(module, LoraLayer):
            dense = module.get_base_layer()
            merged = merge_layer(name, module)[1].to(dense.weight.dtype)
            dense.weight = nn.Parameter(merged, requires_grad=False)
            model.set_submodule(name, dense)


def is_trained(layer: nn.Module) -> bool:
    """Whether a layer rounds a weight of floats or trains its scales, and is not frozen codes."""
    return not isinstance(layer, QuantLinear | PackedLinear | PackedEmbedding)


@torch.no_grad()
def pack(layer: nn.Module) -> Frozen:
    """The frozen layer that multiplies the codes of a trained one."""
    quantized: Packed = layer.quantized
    if isinstance(layer, FakeQuantEmbedding):
        return PackedEmbedding(quantized, layer.scheme, layer.weight.dtype)
    scale = getattr(layer, "input_scale", None)
    scale = None if scale is None else scale.detach().clone()
    return pack_layer(scheme_of_layer(layer), quantized, base_layer(layer).bias, input_scale=scale)


@torch.no_grad()
def _require_same_function(name: str, layer: nn.Module, packed: Frozen, dtype: torch.dtype) -> None:
    """raises  RuntimeError if the product of the trained layer with inputs of `dtype` is not that of the codes"""
    quantized, scheme = packed.quantized, scheme_of_layer(layer)
    if isinstance(packed, PackedEmbedding):
        ids = torch.arange(packed.num_embeddings, device=quantized.packed.device)
        same = all(torch.equal(layer(part), packed(part)) for part in ids.split(PROBE_ROWS))
    else:
        with _without_bias(base_layer(layer)), _without_bias(packed):
            if scheme.activations is None:
                dense = quantized.dequantize(dtype)
                same = all(torch.equal(layer(rows), linear(rows, dense)) for rows in _unit_rows(dense))
            else:
                rows = _random_rows(quantized, dtype)
                same = torch.equal(layer(rows), packed(rows))
        nothing = torch.zeros(1, quantized.shape[1], dtype=dtype, device=quantized.packed.device)
        same = same and torch.equal(layer(nothing), packed(nothing))  # the bias
    if not same:
        raise RuntimeError(
            f"{name} multiplies another weight than the codes that it would export ({scheme.weight}); nothing "
            "was exported"
        )


@contextmanager
def _without_bias(layer: nn.Module) -> Iterator[None]:
    """A bias much larger than the weights would round them away, and with them what differs."""
    bias, layer.bias = layer.bias, None
    try:
        yield
    finally:
        layer.bias = bias


def _unit_rows(dense: Tensor) -> Iterator[Tensor]:
    """The unit matrix of in_features rows, some rows at a time: a product with it is the weight itself."""
    size = dense.shape[1]
    for start in range(0, size, PROBE_ROWS):
        stop = min(size, start + PROBE_ROWS)
        rows = torch.zeros(stop - start, size, dtype=dense.dtype, device=dense.device)
        rows[:, start:stop].fill_diagonal_(1)
        yield rows


def _random_rows(quantized: Packed, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PROBE_ROWS, quantized.shape[1], generator=generator).to(quantized.packed.device, dtype)
