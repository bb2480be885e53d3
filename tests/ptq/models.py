"""Small random models of each architecture, whose blocks the tests of post-training quantization take apart."""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from trainer.fused_decoder import FusedDecoder

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
CU_SEQLENS = torch.tensor([0, 20, 24, 48], dtype=torch.int32)


def random_model(kind: str = "llama", *, heads: int = 4, kv_heads: int = 2, hidden_size: int = 64) -> PreTrainedModel:
    """float32; weights large enough for attention and SwiGLU to matter, biases and norms that are not trivial."""
    torch.manual_seed(0)
    config = CONFIGS[kind](
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        vocab_size=260,
        max_position_embeddings=256,
        pad_token_id=3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
        elif name.endswith("bias"):
            nn.init.normal_(parameter)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.requires_grad_(False)


def hidden_states(model: PreTrainedModel) -> Tensor:
    """[48, hidden_size]: three documents, one channel much louder than the others."""
    x = torch.randn(48, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    x[:, 5] *= 20
    return x


def through_block(model: PreTrainedModel, index: int = 0) -> Tensor:
    return FusedDecoder(model).layer(index, hidden_states(model), CU_SEQLENS)
