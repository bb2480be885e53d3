"""Packed documents train as unpacked ones do: equal losses and gradients, and none sees another.

Compared with transformers' own forward of one document at a time, without padding; packed ones go through our decoder,
through transformers' layers where a model is not ours, and through the model's own logits where its head is not.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainer.config.data import DataConfig
from trainer.config.lora import LoraConfig
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.preference import Method, PreferenceConfig
from trainer.config.quant import Codebook, QuantConfig
from trainer.data.loader import BatchPlan, row_len
from trainer.data.ordering.order import RunOrder
from trainer.lora import attach_lora
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss
from trainer.preference import Objective, build_objective

PATHS = ("fused", "transformers", "logits")
NUM_ROWS, LONGEST = 8, 32
CAPACITY = 48

Rows = list[dict[str, list[int] | bool]]


def adapted(codebook: Codebook | None = None) -> torch.nn.Module:
    """A model whose adapter is not at its start, where half of its gradients are 0."""
    model, _ = load_model(ModelConfig(ModelSource.tiny, dtype=DType.float32))
    if codebook is not None:
        prepare_model(model, QuantConfig(codebook))
    model = attach_lora(model, LoraConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(0.1 * torch.randn(param.shape, generator=generator))
    return model


def next_token_loss(model: torch.nn.Module, path: str, monkeypatch: pytest.MonkeyPatch) -> NextTokenLoss:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("not a model of ours")

    if path != "fused":
        monkeypatch.setattr("trainer.objective.FusedDecoder", refuse)
    objective = NextTokenLoss(model)
    assert objective.fused_decoder is (path == "fused") and objective.fused_head
    objective.fused_head = path != "logits"
    return objective


def rows_of(*sides: str) -> Rows:
    """Documents of 2 to 32 tokens with a prompt of up to half of them; equal prompts on all sides of a row."""
    draw = np.random.Generator(np.random.PCG64(0))
    rows: Rows = []
    for index in range(NUM_ROWS):
        prompt, row = draw.integers(1, 250, draw.integers(1, LONGEST // 2)).tolist(), {"desirable": index % 3 > 0}
        for side in sides or ("",):
            answer = draw.integers(1, 250, draw.integers(1, LONGEST - len(prompt))).tolist()
            row[f"{side}input_ids"], row[f"{side}labels"] = prompt + answer, [-100] * len(prompt) + answer
        rows.append(row)
    return rows


def packed(rows: Rows, capacity: int) -> list[Rows]:
    """Micro-batches of an epoch of two packed units each."""
    lengths = np.array([row_len(row) for row in rows])
    order = RunOrder([len(rows)], lengths, DataConfig(packing=True), 0, 2, capacity=capacity)
    plan = BatchPlan(len(rows), 2, 1, 1, 0, order=order)
    assert max(len(unit) for step in range(plan.num_steps) for unit in plan.units(step)) >= 2
    taken = [ids for step in range(plan.num_steps) for ids in plan.micro_batches(step, 0)]
    assert sorted(row for ids in taken for row in ids) == list(range(len(rows)))
    return [[rows[row] for row in ids] for ids in taken]


def trained(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, params = zip(*trained(model), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, params), strict=True))


def assert_equal_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """1e-5 of each tensor's norm: sums of some hundred float32 products in another order, rounding at 6e-8."""
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() < 1e-5 * gradient.norm(), name


# ---- next tokens


def alone(model: torch.nn.Module, row: dict) -> Tensor:
    """Summed loss of one document, by transformers."""
    input_ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
    logits = model(input_ids=input_ids, use_cache=False).logits[0]
    return cross_entropy(logits[:-1], labels[1:], reduction="sum")


@pytest.mark.parametrize(("path", "codebook"), [*((path, None) for path in PATHS), ("fused", Codebook.nf4)])
def test_packed_documents_train_as_unpacked_ones(path: str, codebook: Codebook | None, monkeypatch) -> None:
    model, rows = adapted(codebook), rows_of()
    objective = next_token_loss(model, path, monkeypatch)
    expected = sum(alone(model, row) for row in rows)
    one_by_one = sum(objective(**objective.collate([row])) for row in rows)
    together = sum(objective(**objective.collate(micro)) for micro in packed(rows, CAPACITY))
    assert one_by_one.item() == pytest.approx(expected.item(), rel=1e-5)
    assert together.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = gradients(model, expected)
    assert_equal_gradients(gradients(model, one_by_one), wanted)
    assert_equal_gradients(gradients(model, together), wanted)


@pytest.mark.parametrize("path", PATHS)
def test_documents_do_not_see_each_other(path: str, monkeypatch) -> None:
    """Another token in the first or the last document: bit for bit the same loss of the others."""
    model, rows = adapted(), rows_of()[:3]
    objective = next_token_loss(model, path, monkeypatch)

    def losses(changed: int | None) -> Tensor:
        documents = [{**row, "input_ids": list(row["input_ids"])} for row in rows]
        if changed is not None:
            documents[changed]["input_ids"][0] ^= 1
        with torch.no_grad():
            return objective.log_probs(**objective.collate(documents))

    before = losses(None)
    for changed in range(len(rows)):
        assert (losses(changed) == before).tolist() == [index != changed for index in range(len(rows))]


@pytest.mark.parametrize("path", PATHS)
def test_no_gradient_crosses_documents(path: str, monkeypatch) -> None:
    """The loss of one document has no gradient at the embeddings of another, and has one at its own."""
    model, rows = adapted(), rows_of()[:3]
    objective = next_token_loss(model, path, monkeypatch)
    batch = objective.collate(rows)
    embedded: list[Tensor] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda *args: embedded.append(args[2].requires_grad_()))
    losses = objective.log_probs(**batch)
    starts = [0, *np.cumsum([len(row["input_ids"]) for row in rows])]
    for index in range(len(rows)):
        (gradient,) = torch.autograd.grad(losses[index], embedded[-1], retain_graph=True)
        if path == "fused":  # [T, hidden_size]; padded ones are [B, longest, hidden_size]
            gradient = [gradient[first:end] for first, end in zip(starts, starts[1:], strict=False)]
        assert [bool(each.any()) for each in gradient] == [other == index for other in range(len(rows))]


# ---- preferences


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", [Method.dpo, Method.orpo, Method.kto])
def test_packed_preferences_train_as_unpacked_ones(method: Method, path: str, monkeypatch) -> None:
    model = adapted()
    rows = rows_of("", "mismatched_" if method is Method.kto else "rejected_")
    objective = build_objective(next_token_loss(model, path, monkeypatch), PreferenceConfig(method, 0.3))
    expected = step_loss(objective, [[row] for row in rows])
    together = step_loss(objective, packed(rows, 2 * CAPACITY if method.of_pairs else CAPACITY))
    assert together.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert_equal_gradients(gradients(model, together.sum()), gradients(model, expected.sum()))


def step_loss(objective: Objective, micro_batches: list[Rows]) -> Tensor:
    """Summed losses of a step of these micro-batches."""
    batches = [objective.collate(rows) for rows in micro_batches]
    objective.look_ahead(batches, lambda total: total)
    return sum(objective(**batch) for batch in batches)


def test_pairs_do_not_see_each_other(monkeypatch) -> None:
    """Another prompt of the first pair: bit for bit the same answers of the second, chosen and rejected."""
    model, rows = adapted(), rows_of("", "rejected_")[:2]
    objective = build_objective(next_token_loss(model, "fused", monkeypatch), PreferenceConfig(Method.dpo, 0.3))
    changed = {**rows[0], "input_ids": [rows[0]["input_ids"][0] ^ 1, *rows[0]["input_ids"][1:]]}
    before, after = (objective.reference(objective.collate([first, rows[1]])) for first in (rows[0], changed))
    assert (before == after).tolist() == [[False, True], [True, True]]
