"""QuantLinear: a linear layer whose frozen weight stays packed.

Codes and scales are plain buffers, so state_dict, safetensors, `.to(device)` and debuggers just work.
`quantize_linears` swaps the layers of a model in place, one at a time.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.kernels.frozen_weight import FrozenWeight
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.quantizer import QuantizedTensor, Quantizer


class QuantLinear(nn.Module):
    """y = x W^T + bias with a packed W; gradients flow to x only.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype
    """

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.quantizer = weight.quantizer
        self.register_buffer("packed", weight.packed)
        self.register_buffer("absmax", weight.absmax)
        self.register_buffer("nested_absmax", weight.nested_absmax)
        self.register_buffer("nested_offset", weight.nested_offset)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight as codes and scales; a view of the buffers."""
        shape = (self.out_features, self.in_features)
        return QuantizedTensor(self.packed, self.absmax, self.nested_absmax, self.nested_offset, shape, self.quantizer)

    @property
    def qweight(self) -> Tensor:
        """The packed codes, under the name by which PEFT looks for a quantized layer's device."""
        return self.packed

    @property
    def frozen_weight(self) -> FrozenWeight:
        """The weight as a projection of `lora_linear`; a view of the buffers."""
        tensors = self.packed, self.absmax, self.nested_absmax, self.nested_offset
        quantizer = self.quantizer
        return FrozenWeight(quantizer.codebook, tensors, self.out_features, self.in_features, quantizer.block_size)

    def forward(self, x: Tensor, adapter: Adapter | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = lora_linear(x.reshape(-1, self.in_features), [self.frozen_weight], [adapter], bias=bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        quantizer = self.quantizer
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"codebook={quantizer.codebook}, block_size={quantizer.block_size}, double_quant={quantizer.double_quant}"
        )


@dataclass(frozen=True)
class QuantizationSummary:
    """What `quantize_linears` did; sizes in weights and bytes."""

    num_layers: int
    num_quantized: int
    num_total: int
    quantized_bytes: int

    @property
    def share(self) -> float:
        """Share of the weights outside the embeddings that is packed now."""
        return self.num_quantized / max(1, self.num_total)


def quantize_linears(model: nn.Module, quantizer: Quantizer, *, skip: set[nn.Module]) -> QuantizationSummary:
    """Replace each nn.Linear of `model` by a QuantLinear, in place; `skip` (modules) stays as it is.

    raises  ValueError naming the layer if its weight holds inf or nan
    """
    num_layers = num_quantized = quantized_bytes = 0
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or layer in skip:
            continue
        try:
            quantized = quantizer.quantize(layer.weight.detach())
        except ValueError as error:
            raise ValueError(f"{name}.weight: {error}") from None
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, QuantLinear(quantized, layer.bias))
        num_layers += 1
        num_quantized += quantized.shape[0] * quantized.shape[1]
        quantized_bytes += quantized.nbytes
    skipped = {id(p) for module in skip for p in module.parameters()}
    num_rest = sum(p.numel() for p in model.parameters() if id(p) not in skipped)
    return QuantizationSummary(num_layers, num_quantized, num_quantized + num_rest, quantized_bytes)


def weights_sha256(model: nn.Module) -> str:
    """A hash of every frozen tensor of `model`, packed or not, in order: the base that an adapter belongs to.

    Names are left out, since PEFT changes them; adapters are what is not frozen, or called `lora_`.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if "lora_" not in name and "modules_to_save" not in name:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
