"""What config.json says about a model's size: its modules on the meta device, which have shapes and no memory.

Counts are those of transformers' own modules, so tied tables, biases and query norms are what they are. Nothing is read
but the config: a model of 70B is planned for on a laptop, and one that is on the hub before it is fetched.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.architecture import why_unsupported
from trainer.config.errors import UserError, require
from trainer.config.model import ModelConfig
from trainer.kernels.double_quant import NESTED_BLOCK_SIZE
from trainer.linear import linears_to_pack
from trainer.quantizer import Quantizer
from trainer.sources.resolve import resolve_model

Shape = tuple[int, int]
"""[out_features, in_features]"""


@dataclass(frozen=True)
class Sizes:
    """Widths of a decoder; lengths in values, not bytes.

    qkv, attended   columns of q|k|v and of what attention gives
    computed        whether our own decoders compute this architecture
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    qk_norm: bool
    computed: bool

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attended(self) -> int:
        return self.num_heads * self.head_dim


def meta_model(config: ModelConfig) -> PreTrainedModel:
    """The model's modules without their weights, from its config alone.

    raises  UserError if the config cannot be read, is no causal language model's, or is of a quantized model
    """
    path = resolve_model(config)
    try:
        read = AutoConfig.from_pretrained(path, revision=config.revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read)
    except (OSError, ValueError, KeyError, HFValidationError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"model.path={config.path or path} cannot be planned for: {reason} Give org/name on the hub or a folder "
            "with the config.json of a causal language model"
        ) from None
    require(
        getattr(read, "quantization_config", None) is None,
        f"{path} is quantized already; give the 16-bit model that it was made from",
    )
    return model


def sizes_of(model: PreTrainedModel) -> Sizes:
    """raises UserError where a config has no width by the names that decoders share"""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    missing = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(config, name)]
    require(
        heads is not None and not missing,
        f"model_type={config.model_type} has no {', '.join(missing) or 'num_attention_heads'} in its config; plans are "
        "made for decoders such as Llama, Mistral, Qwen2 and Qwen3",
    )
    return Sizes(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        max_positions=getattr(config, "max_position_embeddings", None) or 2048,
        qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        computed=why_unsupported(model.config) is None,
    )


def num_parameters(model: nn.Module) -> int:
    """Tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def packable(model: PreTrainedModel) -> dict[str, Shape]:
    """The linear layers that a packed base packs, by name: `trainer.model.prepare_model` skips the same tables."""
    tables = {module for module in (model.get_output_embeddings(), model.get_input_embeddings()) if module is not None}
    return {name: tuple(model.get_submodule(name).weight.shape) for name in linears_to_pack(model, tables)}


def packed_bytes(quantizer: Quantizer, shape: Shape) -> int:
    """Bytes of codes and scales of a weight, exactly those of `QuantizedTensor.nbytes`.

    raises  UserError if the groups do not divide the row
    """
    out_features, in_features = shape
    try:
        span = quantizer.span(in_features)
    except ValueError as error:
        raise UserError(str(error)) from None
    if quantizer.block_size is None:
        groups, zeros = out_features * (in_features // span), quantizer.symmetric is False
        return out_features * -(-in_features * quantizer.code_bits // 8) + groups * (4 + zeros)
    codes = -(-out_features * in_features * quantizer.code_bits // 8)
    blocks = -(-out_features * in_features // span)
    return codes + (blocks + 4 * -(-blocks // NESTED_BLOCK_SIZE) + 4 if quantizer.double_quant else 4 * blocks)


def num_groups(quantizer: Quantizer, shapes: Iterable[Shape]) -> int:
    """Scales of all these weights."""
    return sum(rows * columns // quantizer.span(columns) for rows, columns in shapes)
