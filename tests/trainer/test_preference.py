"""DPO, IPO, ORPO and KTO against formulas written out in float64 over full logits, and against TRL where it is here."""

import math
import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig as PeftLoraConfig
from torch import Tensor

from tests.trainer.tokens import tokens_of
from trainer.config.errors import UserError
from trainer.config.lora import LoraConfig
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.preference import DpoLoss, Method, PreferenceConfig
from trainer.config.quant import Codebook, QuantConfig
from trainer.data.preference import with_mismatched
from trainer.data.rows import Labelled, Pair, Row
from trainer.data.shaping.messages import exchange
from trainer.lora import attach_lora
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss
from trainer.preference import build_objective, dpo_losses, ipo_losses, kto_losses, odds_ratio_losses

NUM_ROWS = 4
BETA = 0.3
METHODS = {
    "dpo": PreferenceConfig(Method.dpo, BETA),
    "smoothed dpo": PreferenceConfig(Method.dpo, BETA, label_smoothing=0.2),
    "ipo": PreferenceConfig(Method.dpo, BETA, DpoLoss.ipo),
    "orpo": PreferenceConfig(Method.orpo, BETA),
    "kto": PreferenceConfig(Method.kto, BETA, desirable_weight=1.2, undesirable_weight=0.7),
}


def pairs() -> list[Pair]:
    """Answers of 6 to 21 characters; the longer one is the chosen one in some pairs, the rejected one in others."""
    rng = random.Random(0)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdefgh ") for _ in range(length)) + "z"

    made = []
    for index in range(NUM_ROWS):
        prompt, origin = text(9 + index), f"rows:{index}"
        sides = [Row(exchange(prompt, text(length)), None, origin, 1) for length in (5 + 3 * index, 20 - 2 * index)]
        made.append(Pair(*sides))
    return made


def labelled() -> list[Labelled]:
    return [Labelled(pair.chosen if index % 2 else pair.rejected, index % 2 == 1) for index, pair in enumerate(pairs())]


def with_adapter(*, packed: bool = False, dropout: float = 0.0) -> tuple[torch.nn.Module, list, list]:
    """A model whose adapter has learned a little, tokenized pairs, and tokenized labelled answers."""
    model, tokenizer = load_model(ModelConfig(ModelSource.tiny, dtype=DType.float32))
    if packed:
        prepare_model(model, QuantConfig(Codebook.nf4))
    model = attach_lora(model, LoraConfig(rank=4, dropout=dropout), seed=0)
    of_pairs, answers = list(tokens_of(pairs(), tokenizer)), tokens_of(labelled(), tokenizer)
    of_labels = list(with_mismatched(answers, donors=answers, max_seq_len=512))
    learn_a_little(model, of_labels)
    return model, of_pairs, of_labels


def learn_a_little(model: torch.nn.Module, rows: list) -> None:
    """Five steps on the rows' answers: adapters leave their start, and z_0 is above 0."""
    next_token, params = NextTokenLoss(model.eval()), [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.Adam(params, lr=0.02)
    for _ in range(5):
        optimizer.zero_grad()
        next_token(**next_token.collate(rows)).backward()
        optimizer.step()
    model.train()


def loss_of(objective: torch.nn.Module, *groups: list) -> Tensor:
    """The loss of a step of these passes."""
    batches = [objective.collate(rows) for rows in groups]
    counts = [sum(each) for each in zip(*map(objective.count, batches), strict=True)]
    objective.look_ahead(batches, lambda total: total)
    sums = sum(objective(**batch) for batch in batches)
    return sum(total / count for total, count in zip(sums, counts, strict=True))


def gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.cat([grad.flatten().double() for grad in torch.autograd.grad(loss, params)])


# ---- the independent computation


def answer_log_prob(model: torch.nn.Module, input_ids: list[int], labels: list[int]) -> tuple[Tensor, int]:
    """Log-probability of an answer from transformers' full logits, in float64, and its tokens."""
    logits = model(input_ids=torch.tensor([input_ids])).logits[0].double()
    targets = [place for place, label in enumerate(labels) if label != -100]
    terms = [logits[place - 1].log_softmax(-1)[labels[place]] for place in targets]
    return torch.stack(terms).sum(), len(targets)


def by_hand(model: torch.nn.Module, config: PreferenceConfig, rows: list) -> Tensor:
    """The papers' equations, a row at a time."""

    def ratio(row: dict, prefix: str = "") -> tuple[Tensor, int, Tensor]:
        document = row[f"{prefix}input_ids"], row[f"{prefix}labels"]
        with torch.no_grad(), model.disable_adapter():
            reference, _ = answer_log_prob(model, *document)
        log_prob, length = answer_log_prob(model, *document)
        return log_prob - reference, length, log_prob

    def sigmoid(x: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-x))

    if config.method is Method.kto:
        kl = max(0.0, sum(ratio(row, "mismatched_")[0].item() for row in rows) / len(rows))
        assert kl > 0  # or the clamp would be all that is tested
        losses = []
        for row in rows:
            reward = BETA * (ratio(row)[0] - kl)
            good, bad = 1.2 * (1 - sigmoid(reward)), 0.7 * (1 - sigmoid(-reward))
            losses.append(good if row["desirable"] else bad)
        return sum(losses) / len(losses)
    sides = [(ratio(row), ratio(row, "rejected_")) for row in rows]
    if config.method is Method.orpo:
        odds = []
        for (_, length, chosen), (_, other_length, rejected) in sides:
            q, p = torch.exp(chosen / length), torch.exp(rejected / other_length)
            odds.append(-torch.log(sigmoid(torch.log(q / (1 - q)) - torch.log(p / (1 - p)))))
        likelihood = -sum(side[0][2] for side in sides) / sum(side[0][1] for side in sides)
        return likelihood + BETA * sum(odds) / len(odds)
    if config.loss is DpoLoss.ipo:
        return sum((w / n - v / m - 1 / (2 * BETA)) ** 2 for (w, n, _), (v, m, _) in sides) / len(sides)
    smoothing, margins = config.label_smoothing, [BETA * (chosen[0] - rejected[0]) for chosen, rejected in sides]
    terms = [-(1 - smoothing) * sigmoid(m).log() - smoothing * sigmoid(-m).log() for m in margins]
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in METHODS), ("dpo", True), ("kto", True)])
def test_loss_and_gradient_are_the_papers(name, packed):
    config = METHODS[name]
    model, of_pairs, of_labels = with_adapter(packed=packed)
    rows = of_labels if config.method is Method.kto else of_pairs
    loss = loss_of(build_objective(NextTokenLoss(model), config), rows)
    expected = by_hand(model, config, rows)
    # sums of about 20 float32 log-probabilities near 5.5, in two orders
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    found, wanted = gradient(model, loss), gradient(model, expected)
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("name", METHODS)
def test_a_step_does_not_depend_on_how_it_is_cut(name):
    """In one pass, and in passes of one and three rows and an empty one: the same loss and gradient, z_0 too."""
    config = METHODS[name]
    model, of_pairs, of_labels = with_adapter()
    rows = of_labels if config.method is Method.kto else of_pairs
    objective = build_objective(NextTokenLoss(model), config)
    whole, cut = loss_of(objective, rows), loss_of(objective, rows[:1], [], rows[1:])
    assert cut.item() == pytest.approx(whole.item(), rel=1e-6)  # the contract of docs/decisions.md
    one, other = gradient(model, whole), gradient(model, cut)
    assert (one - other).norm() < 1e-5 * one.norm()  # float32 products of other shapes


def test_formulas_by_numbers():
    """Values that can be checked on paper."""
    one = torch.ones(1, dtype=torch.float64)
    zero = 0 * one
    assert dpo_losses(zero, zero, beta=0.1).item() == pytest.approx(math.log(2))
    assert dpo_losses(2 * one, -one, beta=1.0).item() == pytest.approx(math.log(1 + math.exp(-3)))
    smoothed = 0.75 * math.log(1 + math.exp(-3)) + 0.25 * math.log(1 + math.exp(3))
    assert dpo_losses(2 * one, -one, beta=1.0, label_smoothing=0.25).item() == pytest.approx(smoothed)
    assert ipo_losses(one, -one, beta=0.25).item() == pytest.approx(0)  # 1 + 1 - 1 / 0.5: the margin that is wanted
    assert ipo_losses(zero, zero, beta=0.1).item() == pytest.approx(25)
    # q = 1/2 and 1/4: odds 1 and 1/3, their ratio 3, sigma(log 3) = 3/4
    assert odds_ratio_losses(-math.log(2) * one, -math.log(4) * one).item() == pytest.approx(-math.log(0.75))
    weights = PreferenceConfig(Method.kto, 1.0, desirable_weight=2.0, undesirable_weight=3.0)
    ratios, good = torch.tensor([math.log(3), math.log(3)], dtype=torch.float64), torch.tensor([True, False])
    assert kto_losses(ratios, good, zero[0], weights).tolist() == pytest.approx([2 * 0.25, 3 * 0.75])


def test_a_certain_answer_has_finite_odds():
    """float32 rounds a log-probability of -1e-9 to 0, whose odds are infinite."""
    log_q = torch.tensor([0.0, -1e-12, -50.0], dtype=torch.float64, requires_grad=True)
    loss = odds_ratio_losses(log_q, torch.full((3,), -1.0, dtype=torch.float64)).sum()
    assert loss.isfinite() and torch.autograd.grad(loss, log_q)[0].isfinite().all()


def test_the_reference_has_neither_adapter_nor_dropout():
    model, of_pairs, of_labels = with_adapter(dropout=0.5)
    for config, rows in ((METHODS["dpo"], of_pairs), (METHODS["kto"], of_labels)):
        objective = build_objective(NextTokenLoss(model), config)
        batch = objective.collate(rows)
        first = objective.reference(batch)
        assert model.training and all(param.requires_grad for name, param in model.named_parameters() if "lora" in name)
        assert torch.equal(first, objective.reference(batch)) and not first.requires_grad
        for row, found in zip(rows, first[:, 0].tolist(), strict=True):
            with torch.no_grad(), model.disable_adapter():
                model.eval()
                wanted, _ = answer_log_prob(model, row["input_ids"], row["labels"])
                model.train()
            assert found == pytest.approx(wanted.item(), rel=1e-5)
        assert loss_of(objective, rows) != loss_of(objective, rows)  # the policy drops


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_given_reference_is_used(name):
    """The numbers of `reference`, put beside the rows, give the same loss to the bit; others another."""
    model, of_pairs, of_labels = with_adapter()
    rows, objective = of_labels if name == "kto" else of_pairs, build_objective(NextTokenLoss(model), METHODS[name])
    values = objective.reference(objective.collate(rows)).tolist()
    loss = loss_of(objective, rows)
    assert loss_of(objective, [{**row, "reference": value} for row, value in zip(rows, values, strict=True)]) == loss
    moved = [{**row, "reference": [value[0] - 1, value[1]]} for row, value in zip(rows, values, strict=True)]
    assert loss_of(objective, moved) != loss


def test_what_is_measured():
    model, of_pairs, of_labels = with_adapter()
    objective = build_objective(NextTokenLoss(model), METHODS["dpo"])
    loss_of(objective, of_pairs[:2], of_pairs[2:])
    sums = objective.drain_metrics()
    assert {count for _, count in sums.values()} == {NUM_ROWS}
    means = {name: total / count for name, (total, count) in sums.items()}
    assert means["margin"] == pytest.approx(means["rewards_chosen"] - means["rewards_rejected"], abs=1e-9)
    assert set(objective.drain_metrics().values()) == {(0.0, 0.0)}
    objective = build_objective(NextTokenLoss(model), METHODS["kto"])
    loss_of(objective, of_labels[:2], of_labels[2:])
    sums = objective.drain_metrics()
    counts = {name: count for name, (_, count) in sums.items()}
    assert counts == {"rewards_chosen": 2, "rewards_rejected": 2, "margin": 4, "accuracy": 4, "kl": 1}
    good, bad, kl = sums["rewards_chosen"][0], sums["rewards_rejected"][0], sums["kl"][0]
    assert sums["margin"][0] == pytest.approx((good - 2 * BETA * kl) + (2 * BETA * kl - bad))


def test_models_with_their_own_head_take_the_full_logits(monkeypatch):
    model, of_pairs, _ = with_adapter()
    fused, plain = NextTokenLoss(model), NextTokenLoss(model)
    plain.fused_head = False
    losses = [loss_of(build_objective(each, METHODS["dpo"]), of_pairs).item() for each in (fused, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # as above


def trl_loss(config: PreferenceConfig, rows: list, folder: str) -> tuple[torch.nn.Module, Tensor]:
    """TRL's own trainer around the tiny model, and the loss that it computes for these rows."""
    trl = pytest.importorskip("trl", reason="trl is not installed; pip install trl==1.16.0 to compare with it")
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    model, tokenizer = load_model(ModelConfig(ModelSource.tiny, dtype=DType.float32))
    settings = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "beta": config.beta}
    settings |= {"per_device_train_batch_size": len(rows), "gradient_checkpointing": False}
    peft = PeftLoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    texts = {"prompt": ["a"] * 4, "chosen": ["b"] * 4, "rejected": ["c"] * 4, "completion": ["d"] * 4}
    keys = ("prompt", "completion") if config.method is Method.kto else ("prompt", "chosen", "rejected")
    data = {key: texts[key] for key in keys} | ({"label": [True, False] * 2} if config.method is Method.kto else {})
    if config.method is Method.kto:
        weights = {name: getattr(config, name) for name in ("desirable_weight", "undesirable_weight")}
        arguments = trl.KTOConfig(**settings, **weights, train_sampling_strategy="sequential")
        trainer, collator = trl.KTOTrainer, DataCollatorForUnpairedPreference
    else:
        arguments = trl.DPOConfig(**settings, loss_type=config.loss.value)
        trainer, collator = trl.DPOTrainer, DataCollatorForPreference
    dataset = Dataset.from_dict(data)
    trainer = trainer(model, args=arguments, train_dataset=dataset, processing_class=tokenizer, peft_config=peft)
    learn_a_little(trainer.model, rows)
    batch = collator(pad_token_id=tokenizer.pad_token_id)([as_trl(row) for row in rows])
    return trainer.model, trainer._compute_loss(trainer.model, batch, False)


def as_trl(row: dict) -> dict:
    """A tokenized row by TRL's names; what the template writes behind the answer is nobody's target."""

    def split(prefix: str) -> tuple[list[int], list[int]]:
        ids, labels = row[f"{prefix}input_ids"], row[f"{prefix}labels"]
        targets = [place for place, label in enumerate(labels) if label != -100]
        return ids[: targets[0]], ids[targets[0] : targets[-1] + 1]

    prompt, answer = split("")
    if "desirable" in row:
        label, mismatched = row["desirable"], split("mismatched_")[1]
        return {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": mismatched, "label": label}
    return {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": split("rejected_")[1]}


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
def test_trl_computes_the_same(name, tmp_path):
    _, of_pairs, of_labels = with_adapter()
    config, rows = METHODS[name], of_labels if name == "kto" else of_pairs
    model, wanted = trl_loss(config, rows, str(tmp_path))
    objective = build_objective(NextTokenLoss(model), config)
    loss = loss_of(objective, rows)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)  # as against the formulas; TRL sums in float32
    found, expected = gradient(model, loss), gradient(model, wanted)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert name != "kto" or objective.drain_metrics()["kl"][0] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0}, "preference.beta=0; give a number above 0"),
        ({"label_smoothing": 0.5}, r"preference.label_smoothing=0.5; give a number in \[0, 0.5\)"),
        ({"loss": DpoLoss.ipo, "label_smoothing": 0.1}, "preference.label_smoothing=0.1 has no effect with .*loss=ipo"),
        ({"method": Method.orpo, "precompute": True}, "preference.precompute=true has no effect with .*=orpo"),
        ({"method": Method.none, "beta": 0.5}, "preference.beta=0.5 has no effect with preference.method=none"),
        ({"desirable_weight": 2.0}, "preference.desirable_weight=2.0 has no effect with .*=dpo.*; use .*=kto"),
        ({"method": Method.kto, "undesirable_weight": 0}, "preference.undesirable_weight=0; give a number above 0"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        PreferenceConfig(**{"method": Method.dpo, **settings})
