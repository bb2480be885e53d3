"""The tensors of a model under their names in a GGUF file: dense ones and packed layers, each made when it is asked.

What a file has no place for is refused here, before anything is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.config.errors import require
from trainer.formats.gguf_config import architecture_of, require_writable, rope_factors
from trainer.formats.gguf_mix import FILE_TYPES
from trainer.formats.gguf_names import BIASED, ROPE_FACTORS, head_counts, kind_of, to_gguf_name, turned_heads
from trainer.linear import QuantLinear
from trainer.qat.packed_linear import Packed, PackedEmbedding, PackedLinear
from trainer.vocabulary import is_tied

AS_TRAINED = "as_trained"
GGUF_CHOICES = (*FILE_TYPES, AS_TRAINED)
"""Values of gguf_type."""
_PACKED = (QuantLinear, PackedLinear, PackedEmbedding)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model.

    owner    a packed layer, or the dense tensor itself
    layer    Hugging Face's name without .weight or .bias
    heads    heads whose rows are reordered, or None
    """

    owner: nn.Module | Tensor
    layer: str
    shape: tuple[int, ...]
    heads: int | None

    @property
    def quantized(self) -> Packed | None:
        """Codes and scales; None for floats."""
        return None if isinstance(self.owner, Tensor) else self.owner.quantized

    def dense(self) -> Tensor:
        """float32, on the CPU, in the model's order of rows; raises UserError if it holds inf or nan."""
        tensor = self.owner if isinstance(self.owner, Tensor) else self.owner.quantized.dequantize(torch.float32)
        tensor = tensor.detach().float().cpu()
        require(
            bool(torch.isfinite(tensor).all()), f"{self.layer} holds inf or nan; a model that diverged is not written"
        )
        return tensor


def weights_of(model: PreTrainedModel, gguf_type: str, *, requantize: bool) -> dict[str, Weight]:
    """GGUF name -> what stands there; raises UserError if the model cannot be written."""
    require(gguf_type in GGUF_CHOICES, f"gguf_type={gguf_type}; use one of {', '.join(GGUF_CHOICES)}")
    require(
        not hasattr(model, "peft_config"),
        "a model with an adapter over it is no plain model; merge the adapter first, or write it with "
        "write_gguf_adapter",
    )
    require_writable(model.config)
    architecture, heads = architecture_of(model.config), head_counts(model.config)
    weights: dict[str, Weight] = {}
    for name, owner, shape in _tensors(model):
        gguf_name = to_gguf_name(name)
        biased = gguf_name is not None and (gguf_name.endswith(".weight") or kind_of(gguf_name) in BIASED[architecture])
        require(biased, f"{name} has no place in a GGUF file of {architecture}; export the model in 16 bits instead")
        weights[gguf_name] = Weight(
            owner, name.rpartition(".")[0], shape, turned_heads(gguf_name, architecture, **heads)
        )
    factors = rope_factors(model)
    if factors is not None:
        weights[ROPE_FACTORS] = Weight(factors, "rope_freqs", tuple(factors.shape), None)
    packed = [weight.layer for weight in weights.values() if weight.quantized is not None]
    require(
        not packed or requantize or gguf_type == AS_TRAINED,
        f"gguf_type={gguf_type} would round the {len(packed)} packed layers a second time ({packed[:1]}); use "
        f"gguf_type={AS_TRAINED} for their codes, or requantize=True",
    )
    require(
        bool(packed) or gguf_type != AS_TRAINED,
        f"gguf_type={AS_TRAINED}, and no layer of the model is packed; use one of {', '.join(FILE_TYPES)}",
    )
    return weights


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module | Tensor, tuple[int, ...]]]:
    """Name, owner and shape of each tensor of the file, in the model's order; a tied head is left out."""
    head = model.get_output_embeddings()
    tied = _is_tied_head(model)
    for prefix, module in model.named_modules():
        if module is head and tied:
            continue
        if isinstance(module, _PACKED):
            yield f"{prefix}.weight", module, tuple(module.quantized.shape)
        else:
            require(
                not hasattr(type(module), "quantized"),
                f"{prefix} is still trained through the quantizer; convert the model first",
            )
        for name, tensor in module.named_parameters(recurse=False):
            require(
                tensor.is_floating_point() and tensor.dim() <= 2,
                f"{prefix}.{name} holds {tensor.dtype} {tuple(tensor.shape)} of another library "
                f"({type(module).__name__}); load the model in 16 bits",
            )
            yield f"{prefix}.{name}", tensor, tuple(tensor.shape)


def _is_tied_head(model: PreTrainedModel) -> bool:
    """Whether the head is the embedding, in what it holds and not only in the config."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not is_tied(model) or isinstance(head, _PACKED) != isinstance(embedding, _PACKED):
        return False
    if not isinstance(head, _PACKED):
        return head.weight is embedding.weight or torch.equal(head.weight, embedding.weight)
    pairs = zip(head.quantized.tensors.values(), embedding.quantized.tensors.values(), strict=False)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
