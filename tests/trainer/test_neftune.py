"""NEFTune's noise: its size for each document, where it is, and that it comes from torch's generator."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config.lora import LoraConfig
from trainer.lora import attach_lora
from trainer.neftune import EmbeddingNoise
from trainer.objective import NextTokenLoss

LENGTHS = (1, 7, 200)
WIDTH = 64


def noisy_embedding(alpha: float = 5.0) -> tuple[nn.Embedding, EmbeddingNoise]:
    torch.manual_seed(0)
    embedding = nn.Embedding(10, WIDTH).train()
    return embedding, EmbeddingNoise(embedding, alpha)


def noise_of(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    return (embedding(ids) - embedding.weight[ids]).detach()


def test_each_document_has_noise_of_its_own_length() -> None:
    embedding, noise = noisy_embedding()
    noise.lengths = torch.tensor(LENGTHS)
    parts = noise_of(embedding, torch.zeros(sum(LENGTHS), dtype=torch.int64)).split(LENGTHS)
    for part, length in zip(parts, LENGTHS, strict=True):
        bound = 5.0 / (length * WIDTH) ** 0.5  # algorithm 1 of the paper
        assert part.abs().max() <= bound * (1 + 1e-5)
        # A uniform of this bound has the variance bound^2 / 3; of n draws the mean square is off by about
        # 0.9 / sqrt(n) of it, n = 64 for the shortest: five deviations.
        assert part.square().mean() == pytest.approx(bound**2 / 3, rel=5 * 0.9 / part.numel() ** 0.5)
    assert not torch.equal(parts[2][:7], parts[2][7:14])


def test_padded_rows_have_the_noise_of_their_documents() -> None:
    embedding, noise = noisy_embedding()
    noise.lengths = torch.tensor(LENGTHS)
    rows = noise_of(embedding, torch.zeros(3, 200, dtype=torch.int64))
    for row, length in zip(rows, LENGTHS, strict=True):
        bound = 5.0 / (length * WIDTH) ** 0.5
        assert 0.99 * bound < row.abs().max() <= bound * (1 + 1e-5)  # of 12,800 draws one comes close


def test_no_noise_outside_training() -> None:
    embedding, noise = noisy_embedding()
    ids = torch.arange(8)
    assert not noise_of(embedding, ids).any()  # nobody said which documents
    noise.lengths = torch.tensor([8])
    assert noise_of(embedding, ids).any()
    assert not noise_of(embedding.eval(), ids).any()


@pytest.mark.parametrize("fused", [True, False])
def test_the_objective_adds_it_and_the_generator_decides_it(fused: bool) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama" if fused else "phi", vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    model = attach_lora(model, LoraConfig(rank=2, target_modules="q_proj"), seed=0)
    plain, noisy = NextTokenLoss(model), NextTokenLoss(model, neftune_alpha=20.0)
    assert noisy.fused_decoder == fused
    ids = torch.randint(0, 250, (30,))
    labels = ids.masked_fill(torch.arange(30) % 10 == 0, -100)
    batch = ids, labels, torch.tensor([0, 10, 20, 30], dtype=torch.int32)

    def loss(objective: NextTokenLoss, seed: int) -> float:
        torch.manual_seed(seed)
        return objective(*batch).item()

    base = loss(plain.eval(), 1)
    assert loss(noisy.eval(), 1) == base
    noisy.train()
    first = loss(noisy, 1)
    assert first != base and first == loss(noisy, 1) != loss(noisy, 2)
