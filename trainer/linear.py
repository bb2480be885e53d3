"""QuantLinear: a linear layer whose frozen weight stays packed.

Codes and scales are plain buffers, so state_dict, safetensors, `.to(device)` and debuggers just work.
`quantize_linears` swaps the layers of a model in place, one at a time.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.kernels.frozen_weight import FrozenWeight
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.quantizer import QuantizedTensor, Quantizer
from trainer.resident import release_file_pages


class QuantLinear(nn.Module):
    """y = x W^T + bias with a packed W; gradients flow to x only.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype
    """

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.quantizer = weight.quantizer
        for name, tensor in weight.tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight as codes and scales; a view of the buffers."""
        tensors = {name: getattr(self, name) for name in self.quantizer.tensor_names}
        return QuantizedTensor(tensors, (self.out_features, self.in_features), self.quantizer)

    @property
    def qweight(self) -> Tensor:
        """The packed codes, under the name by which PEFT looks for a quantized layer's device."""
        return self.packed

    @property
    def frozen_weight(self) -> FrozenWeight:
        """The weight as a projection of `lora_linear`; a view of the buffers."""
        return self.quantized.frozen_weight

    def forward(self, x: Tensor, adapter: Adapter | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = lora_linear(x.reshape(-1, self.in_features), [self.frozen_weight], [adapter], bias=bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.quantizer.settings.items())
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {settings}"


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


Pack = Callable[[str, Tensor, Quantizer], QuantizedTensor]
"""Chooses the codes of one layer from its name, its dense weight and the quantizer that its codes must follow."""


def pack_nearest(name: str, weight: Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """The codes nearest to the weight: what is packed unless an initialisation wants others."""
    return quantizer.quantize(weight)


def linears_to_pack(model: nn.Module, skip: set[nn.Module]) -> list[str]:
    """The names of the nn.Linear layers of `model` outside `skip`, in the model's order."""
    return [name for name, layer in model.named_modules() if type(layer) is nn.Linear and layer not in skip]


def quantize_linears(
    model: nn.Module,
    quantizer: Quantizer | Callable[[str], Quantizer],
    *,
    skip: set[nn.Module],
    pack: Pack = pack_nearest,
) -> QuantizationSummary:
    """Replace each nn.Linear of `model` by a QuantLinear, in place; `skip` (modules) stays as it is.

    quantizer  of all layers, or a function from a layer's name to its own
    pack       called once a layer, in the model's order; the dense weight is freed when the next layer's turn comes,
               and its pages at once where it is mapped from a file
    raises     ValueError naming the layer if its weight holds inf or nan, or is not divided by the groups
    """
    num_layers = num_quantized = quantized_bytes = 0
    for name in linears_to_pack(model, skip):  # not the layers: a list of them would keep every dense weight
        layer = model.get_submodule(name)
        try:
            own = quantizer if isinstance(quantizer, Quantizer) else quantizer(name)
            quantized = pack(name, layer.weight.detach(), own)
        except ValueError as error:
            raise ValueError(f"{name}.weight: {error}") from None
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, QuantLinear(quantized, layer.bias))
        release_file_pages(layer.weight.detach())
        num_layers += 1
        num_quantized += quantized.shape[0] * quantized.shape[1]
        quantized_bytes += quantized.nbytes
    skipped = {id(p) for module in skip for p in module.parameters()}
    num_rest = sum(p.numel() for p in model.parameters() if id(p) not in skipped)
    return QuantizationSummary(num_layers, num_quantized, num_quantized + num_rest, quantized_bytes)


def weights_sha256(model: nn.Module) -> str:
    """A hash of every frozen tensor of `model`, packed or not, in order: the base that an adapter belongs to.

    Names are left out, since PEFT changes them; adapters are what is not frozen, or called as PEFT
    calls it. Layers that round their tensors or inputs when they are used add how, beside each of their tensors
    (`FakeQuantLinear.function`): the hash says which layer computes what.
    """
    digest = hashlib.sha256()
    functions: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # as state_dict: tied modules have tensors twice
        if isinstance(getattr(module, "function", None), str):
            functions[name] = module.function
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_")):
            continue
        owner = name.rpartition(".")[0]
        layer = owner if owner in functions else owner.removesuffix(".base_layer")  # where PEFT's layer lies over it
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}{functions.get(layer, '')}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
