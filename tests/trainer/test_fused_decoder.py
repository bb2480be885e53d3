"""The fused decoder against the modules of transformers that it reads."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config.lora import LoraConfig
from trainer.config.quant import QuantConfig
from trainer.fused_decoder import FusedDecoder, document_positions
from trainer.lora import LoraLinear, attach_lora
from trainer.model import prepare_model
from trainer.objective import NextTokenLoss

LENGTHS = (1, 7, 40, 3, 22)
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
SIZES = dict(
    vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, attention_bias=True,
)  # fmt: skip


def build(model_type: str, **changes: object) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))  # they start as ones and zeros, which hide mistakes
    return model.requires_grad_(False)


def documents() -> list[torch.Tensor]:
    return list(torch.randint(0, 250, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1)).split(LENGTHS))


def by_transformers(model: nn.Module, ids: list[torch.Tensor]) -> torch.Tensor:
    """One document a call: nothing to pad, nothing to mask."""
    return torch.cat([model.model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in ids])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32; two layers of sums in another order


MODELS = {
    "llama": {"attention_bias": False},
    "llama with biases": {"mlp_bias": False},
    "mistral": {"sliding_window": 5},
    "mistral without a window": {"sliding_window": None},
    "qwen2": {},
    "qwen2 with windows": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_hidden_states_are_those_of_transformers(name: str, packed: bool) -> None:
    model = build(name.split()[0], **MODELS[name]).eval()
    if packed:
        prepare_model(model, QuantConfig())
    ids = documents()
    close(FusedDecoder(model)(torch.cat(ids), CU_SEQLENS), by_transformers(model, ids))


def test_decoded_layers_change_nothing() -> None:
    """A budget for the first layer and a bit: the same bits, and no more memory than was given."""
    model = build("qwen2")
    prepare_model(model, QuantConfig())
    layer_bytes = 4 * sum(
        p.out_features * p.in_features for p in model.model.layers[0].modules() if hasattr(p, "in_features")
    )
    ids = torch.cat(documents())
    plain, decoded = FusedDecoder(model), FusedDecoder(model, decoded_bytes=layer_bytes + 100)
    assert len(decoded._decoded) == 7
    assert torch.equal(plain(ids, CU_SEQLENS), decoded(ids, CU_SEQLENS))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_gradients_are_those_of_transformers(model_type: str, recompute: bool) -> None:
    """Of every factor, through the loss; with and without gradient checkpointing."""
    model = build(model_type)
    prepare_model(model, QuantConfig())
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    peft_model = attach_lora(model, LoraConfig(rank=4), seed=0).train()
    for layer in (m for m in peft_model.modules() if isinstance(m, LoraLinear)):
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    ids = torch.randint(0, 250, (3, 12))
    objective = NextTokenLoss(peft_model)
    assert objective.fused_decoder
    params = [p for p in objective.parameters() if p.requires_grad]
    ours = torch.autograd.grad(objective(ids, ids), params)
    logits = peft_model(input_ids=ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    for mine, theirs in zip(ours, torch.autograd.grad(loss, params), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))  # sums' order


def test_trained_weights_get_their_gradients() -> None:
    """Modules that are not frozen run as they are: full fine-tuning, norms and embedding included."""
    model = build("qwen3").requires_grad_(True).train()
    ids = documents()
    decoder, weights = FusedDecoder(model), list(model.model.parameters())
    target = torch.randn(sum(LENGTHS), 64)
    ours = torch.autograd.grad((decoder(torch.cat(ids), CU_SEQLENS) * target).sum(), weights)
    theirs = torch.autograd.grad((by_transformers(model, ids) * target).sum(), weights)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_a_document_does_not_see_its_neighbours() -> None:
    model = build("llama")
    decoder, ids = FusedDecoder(model), documents()
    packed = decoder(torch.cat(ids), CU_SEQLENS)
    alone = decoder(ids[2], torch.tensor([0, LENGTHS[2]], dtype=torch.int32))
    start = int(CU_SEQLENS[2])
    close(packed[start : start + LENGTHS[2]], alone)
    changed = torch.cat([ids[0], ids[1] * 0, *ids[2:]])
    assert torch.equal(decoder(changed, CU_SEQLENS)[start:], packed[start:])


def test_what_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream before each norm, q|k|v, attention's output and gate|up; no product of a norm, no dense weight."""
    model = build("llama", attention_bias=False)
    prepare_model(model, QuantConfig())
    attach_lora(model, LoraConfig(rank=4), seed=0)
    kept: dict[int, int] = {}
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    num_tokens = 300
    cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        FusedDecoder(model)(torch.zeros(num_tokens, dtype=torch.int64), cu_seqlens)
    per_token = 2 * 64 + (4 + 2 * 2) * 16 + 4 * 16 + 2 * 96  # s twice, q|k|v, attended, gate|up
    ranks_and_lse = 7 * 4 + 4
    tables = 64 + 512 * 16 // num_tokens + 4  # the last norm's input; cos and sin; positions and lengths
    assert sum(kept.values()) <= num_tokens * (2 * (per_token + ranks_and_lse) + tables)


def test_models_that_it_does_not_compute_keep_their_own_layers(caplog: pytest.LogCaptureFixture) -> None:
    gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=250))
    with pytest.raises(ValueError, match="model_type=gpt2 is none of Llama"):
        FusedDecoder(gpt)
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        FusedDecoder(build("llama", attention_dropout=0.1))
    objective = NextTokenLoss(gpt.requires_grad_(False).eval())
    assert not objective.fused_decoder
    ids = documents()
    labels = torch.cat([torch.cat([row[:1] * 0 - 100, row[1:]]) for row in ids])
    expected = sum(
        nn.functional.cross_entropy(gpt(row[None]).logits[0, :-1], row[1:], reduction="sum")
        for row in ids
        if len(row) > 1
    )
    torch.testing.assert_close(objective(torch.cat(ids), labels, CU_SEQLENS), expected, rtol=1e-5, atol=0)


def test_a_decoder_that_disagrees_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A subclass of a known architecture that scales its residuals says "llama" and is another function."""
    model = build("llama")
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: 0.1 * forward(x)
    assert not NextTokenLoss(copy.copy(model)).fused_decoder
    assert "the fused ones differ by" in caplog.text


def test_positions_start_anew_in_each_document() -> None:
    assert document_positions(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5).tolist() == [0, 1, 0, 1, 2]
