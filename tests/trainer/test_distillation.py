"""Distillation as training uses it: the loss over documents, the cache of the teacher, whole runs on model=tiny."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from tests.trainer.conftest import losses
from tests.trainer.tokens import tokens_of
from trainer import UserError, load_config, teacher_cache
from trainer.checkpoint import checkpoints
from trainer.config.distill import DistillConfig, DistillTokens, Divergence
from trainer.config.lora import LoraConfig
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.data.rows import Row
from trainer.distillation import DistillationLoss, LiveTeacher, copy_teacher
from trainer.lora import attach_lora
from trainer.model import load_model
from trainer.objective import NextTokenLoss
from trainer.prepare import prepare_run
from trainer.teacher_cache import cache_teacher, followed, with_places

PROMPTED = [
    {"role": "user", "content": "Count to four."},
    {"role": "assistant", "content": "one two three four"},
]
ROWS = [
    Row([{"role": "user", "content": "x" * (3 * n)}, {"role": "assistant", "content": "y" * n}], None, f"row {n}")
    for n in (1, 9, 4, 14, 2)
]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder for teachers of this test; the models' stays."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(teacher_cache, "cache_dir", lambda: folder)
    return folder


@pytest.fixture
def tiny():
    return load_model(ModelConfig(source=ModelSource.tiny, dtype=DType.float32))


@pytest.fixture
def data(tiny):
    """Training rows, held-out rows"""
    return [tokens_of(rows, tiny[1], max_seq_len=128) for rows in (ROWS, [Row(PROMPTED, None, "held out")])]


def student_of(model):
    """`model` with an adapter that has moved away from it."""
    peft_model = attach_lora(model, LoraConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, param in peft_model.named_parameters():
        if "lora_B" in name:
            param.data.copy_(0.1 * torch.randn(param.shape, generator=generator))
    return NextTokenLoss(peft_model)


def cached(model, data, config, *, max_pass_tokens: int = 100):
    return cache_teacher(model, data, config, device=torch.device("cpu"), max_pass_tokens=max_pass_tokens)


def truth(teacher, student, data, config: DistillConfig) -> Tensor:
    """The sum over all rows by transformers' logits of one row at a time, in float64, and torch's kl_div."""
    total = torch.zeros((), dtype=torch.float64)
    for row in data:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        said, z = (model(input_ids=ids).logits[0, :-1].double() for model in (teacher, student.model))
        log_p, log_q = ((logits / config.temperature).log_softmax(-1) for logits in (said, z))
        kept = labels != -100 if config.tokens is DistillTokens.targets else torch.ones_like(labels, dtype=torch.bool)
        one, other = (log_q, log_p) if config.loss is Divergence.forward_kl else (log_p, log_q)
        divergence = kl_div(one[kept], other[kept], reduction="sum", log_target=True)
        total += config.weight * config.temperature**2 * divergence
        total += (1 - config.weight) * cross_entropy(z, labels, reduction="sum")
    return total


SETTINGS = [
    {},
    {"temperature": 2.0, "tokens": DistillTokens.all},
    {"loss": Divergence.reverse_kl, "weight": 1.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("live", [False, True], ids=["cached", "live"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
def test_the_loss_over_documents_is_torchs(tiny, data, own_cache, settings, live, fused) -> None:
    """With top_k = vocab_size and with a live teacher: the whole distribution, over packed documents."""
    model = tiny[0]
    config = DistillConfig(**{"weight": 0.4, "top_k": 0 if live else model.config.vocab_size, **settings})
    reference = copy_teacher(model, share_weights=False)
    teacher = LiveTeacher(copy_teacher(model, share_weights=True)) if live else cached(model, data, config)
    rows = with_places(data)[0]
    student = student_of(model)
    assert student.fused_head
    student.fused_head = fused
    objective = DistillationLoss(student, config, teacher).train()
    loss = objective(**objective.collate([rows[index] for index in (3, 0, 4, 1, 2)], "cpu"))
    want = truth(reference, student, data[0], config)
    # The cache rounds log-probabilities of -5 to float16, 2^-9 of an ulp each; without it float32 sums of 100 tokens.
    assert loss.item() == pytest.approx(want.item(), rel=1e-5 if live else 2e-3)
    params = [param for param in student.parameters() if param.requires_grad]
    got, exact = (torch.cat([g.flatten() for g in torch.autograd.grad(x, params)]) for x in (loss, want))
    assert (got - exact).norm() < (1e-4 if live else 5e-3) * exact.norm()


def test_rows_alone_and_together_have_one_loss(tiny, data, own_cache) -> None:
    """Accumulation: the sum and the count of all rows are those of their passes, and of no rows."""
    config = DistillConfig(weight=0.5, top_k=8, tokens=DistillTokens.all)
    teacher = cached(tiny[0], data, config)
    rows = list(with_places(data)[0])
    objective = DistillationLoss(student_of(tiny[0]), config, teacher).train()
    batches = [objective.collate(part, "cpu") for part in (rows, rows[:2], rows[2:], [])]
    whole, *parts = (objective(**batch).item() for batch in batches)
    assert whole == pytest.approx(sum(parts), rel=1e-6) and parts[-1] == 0
    counts = [count for batch in batches for count in objective.count(batch)]
    assert counts[0] == sum(counts[1:]) == sum(len(row["input_ids"]) - 1 for row in rows)
    sums = objective.drain_metrics()
    assert sums["kl"][1] == 2 * counts[0] and sums["kl"][0] > 0
    assert objective.drain_metrics() == {"kl": (0.0, 0), "cross_entropy": (0.0, 0)}


def test_evaluation_is_the_next_token_loss_and_measures_the_divergence(tiny, data, own_cache) -> None:
    config = DistillConfig(weight=1.0, top_k=8, tokens=DistillTokens.all)
    teacher = cached(tiny[0], data, config)
    rows = list(with_places(data)[1])
    student = student_of(tiny[0])
    objective = DistillationLoss(student, config, teacher).eval()
    batch = objective.collate(rows, "cpu")
    with torch.inference_mode():
        plain = student(**student.collate(rows, "cpu"))
        assert objective(**batch).item() == pytest.approx(plain.item(), rel=1e-6)
    assert objective.count(batch) == student.count(batch)
    sums = objective.drain_metrics()
    assert list(sums) == ["kl"] and sums["kl"][1] == len(rows[0]["input_ids"]) - 1


def test_followed_positions() -> None:
    labels = torch.tensor([-100, 7, -100, 8, -100, -100, 9])
    cu_seqlens = torch.tensor([0, 4, 7], dtype=torch.int32)
    assert followed(labels, cu_seqlens, DistillTokens.targets).tolist() == [0, 2, 5]
    assert followed(labels, cu_seqlens, DistillTokens.all).tolist() == [0, 1, 2, 4, 5]


# ---- the cache


class Asked:
    """Counts the teacher's batches, and stops at one."""

    def __init__(self, monkeypatch, stop_at: int | None = None) -> None:
        self.count, self._ask, self._stop_at = 0, teacher_cache._ask, stop_at
        monkeypatch.setattr(teacher_cache, "_ask", self)

    def __call__(self, *arguments):
        if self.count == self._stop_at:
            raise KeyboardInterrupt
        self.count += 1
        return self._ask(*arguments)


def content(cache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.folder.iterdir()}


def test_the_teacher_runs_once(tiny, data, own_cache, monkeypatch) -> None:
    config, asked = DistillConfig(weight=1.0, top_k=4), Asked(monkeypatch)
    first = cached(tiny[0], data, config)
    count = asked.count
    again = cached(tiny[0], data, config)
    assert count > 1 and asked.count == count and content(again) == content(first)


def test_a_killed_run_goes_on(tiny, data, own_cache, monkeypatch, caplog) -> None:
    """Bit by bit what an undisturbed one writes; batches that are on disk are not asked again."""
    config = DistillConfig(weight=1.0, top_k=4)
    whole = cached(tiny[0], data, config)
    want = content(whole)
    shutil.rmtree(whole.folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        Asked(patch, stop_at=2)
        cached(tiny[0], data, config)
    assert not whole.folder.exists() and list(own_cache.glob("teachers/.*.partial"))
    asked = Asked(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert content(cached(tiny[0], data, config)) == want
    assert "goes on at row" in caplog.text
    assert asked.count == len(teacher_cache._batches([len(r) for d in data for r in d["input_ids"]], 100)) - 2
    assert not list(own_cache.glob("teachers/.*.partial"))


@pytest.mark.parametrize("max_pass_tokens", [40, 400])
def test_a_killed_run_goes_on_in_other_batches(tiny, data, own_cache, monkeypatch, max_pass_tokens) -> None:
    """The key does not hold the size of a pass; every position must be asked all the same."""
    config = DistillConfig(weight=1.0, top_k=4)
    whole = cached(tiny[0], data, config)
    want = whole.read(range(sum(map(len, data))))
    shutil.rmtree(whole.folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        Asked(patch, stop_at=2)
        cached(tiny[0], data, config)
    found = cached(tiny[0], data, config, max_pass_tokens=max_pass_tokens).read(range(sum(map(len, data))))
    # Sums over a batch of another size may round otherwise, by less than float16 does.
    assert torch.allclose(found.log_probs.float(), want.log_probs.float(), atol=0.01)
    assert torch.equal(found.ids.sort(1).values, want.ids.sort(1).values)


def test_every_change_is_another_cache(tiny, data, own_cache) -> None:
    """Weights, rotary base, rows, where they end, and each setting."""
    config = DistillConfig(weight=1.0, top_k=4)
    model = tiny[0]
    folders = [cached(model, data, config).folder]
    for other in (
        DistillConfig(weight=1.0, top_k=5),
        DistillConfig(weight=1.0, top_k=4, temperature=2.0),
        DistillConfig(weight=1.0, top_k=4, tokens=DistillTokens.all),
    ):
        folders.append(cached(model, data, other).folder)
    assert cached(model, data, DistillConfig(weight=0.3, top_k=4, loss=Divergence.reverse_kl)).folder == folders[0]
    moved = [data[0], data[1].select([0, 0])]
    folders.append(cached(model, moved, config).folder)
    one = data[0][1]
    cut = {**one, "input_ids": one["input_ids"][:-1], "labels": one["labels"][:-1]}
    tail = {**one, "input_ids": one["input_ids"][-1:], "labels": one["labels"][-1:]}
    tables = [[one], [cut, tail]]  # the same tokens one after the other
    folders += [cached(model, [type(data[0]).from_list(rows)], config).folder for rows in tables]
    model.config.rms_norm_eps *= 2
    folders.append(cached(model, data, config).folder)
    model.model.norm.weight.data[0] += 1
    folders.append(cached(model, data, config).folder)
    assert len(set(folders)) == len(folders)


def test_a_cache_that_lost_bytes_is_computed_again(tiny, data, own_cache) -> None:
    config = DistillConfig(weight=1.0, top_k=4)
    first = cached(tiny[0], data, config)
    want = content(first)
    with (first.folder / "ids.bin").open("ab") as file:
        file.truncate(8)
    assert content(cached(tiny[0], data, config)) == want


def test_a_full_disk_is_told_before_the_teacher_runs(tiny, data, own_cache, monkeypatch) -> None:
    asked = Asked(monkeypatch)
    usage = shutil.disk_usage(own_cache.parent)
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(UserError, match=r"distill.top_k=4 needs .* LOWBIT_CACHE"):
        cached(tiny[0], data, DistillConfig(weight=1.0, top_k=4))
    assert asked.count == 0


def test_more_tokens_than_the_vocabulary_are_refused(tiny, data, own_cache) -> None:
    with pytest.raises(UserError, match="distill.top_k=999 exceeds the model's vocabulary of"):
        cached(tiny[0], data, DistillConfig(weight=1.0, top_k=999))


def test_the_cache_holds_the_likeliest_tokens(tiny, data, own_cache) -> None:
    config = DistillConfig(weight=1.0, top_k=4, temperature=1.5)
    cache = cached(tiny[0], data, config)
    row = data[0][3]
    ids, log_probs = cache.read([3])
    with torch.no_grad():
        logits = tiny[0](input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
    probs = (logits[torch.tensor(row["labels"])[1:] != -100] / 1.5).softmax(-1)
    torch.testing.assert_close(probs.gather(-1, ids.long()), log_probs[:, :-1].float().exp(), rtol=4e-3, atol=0)
    assert set(ids[0].tolist()) == set(probs[0].topk(4).indices.tolist())
    # float16 of a log-probability near -5 is off by 2^-9 at most: 0.2 % of each probability
    assert np.allclose(log_probs.float().exp().sum(-1), 1, atol=2e-3)


# ---- runs

DISTILLED = ("conf=lora", "distill.weight=0.5", "distill.top_k=8")


def trained(result) -> dict[str, Tensor]:
    return load_file(checkpoints(result.run_dir)[-1] / "trainable.safetensors")


@pytest.mark.usefixtures("own_cache")
def test_accumulated_steps_equal_the_large_batch(run) -> None:
    """As for the next-token loss: 1e-6 on the loss, whatever shares a pass."""
    overrides = (*DISTILLED, "distill.tokens=all", "train.max_steps=3")
    large = run("large", *overrides, "train.batch_size=6")
    small = run("small", *overrides, "train.batch_size=2", "train.grad_accum_steps=3", "train.max_pass_tokens=60")
    assert losses(small.run_dir) == pytest.approx(losses(large.run_dir), rel=1e-6)


@pytest.mark.usefixtures("own_cache")
def test_resume_is_exact_and_asks_nobody(run, monkeypatch) -> None:
    whole = run("whole", *DISTILLED, "train.max_steps=4")
    half = run("half", *DISTILLED, "train.max_steps=2")
    Asked(monkeypatch, stop_at=0)
    resumed = run("half", *DISTILLED, "train.max_steps=4", f"resume={half.run_dir}")
    assert resumed.metrics["eval_kl_base"] == whole.metrics["eval_kl_base"]
    assert resumed.metrics["steps"] == 4
    # The schedule of a run of two steps differs, so the pair that must agree is two resumed ones.
    other = run("other", *DISTILLED, "train.max_steps=2")
    again = run("other", *DISTILLED, "train.max_steps=4", f"resume={other.run_dir}")
    assert losses(again.run_dir) == losses(resumed.run_dir)
    assert all(torch.equal(a, b) for a, b in zip(trained(again).values(), trained(resumed).values(), strict=True))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("top_k", [64, 0])
def test_a_packed_base_comes_nearer_to_its_16_bit_self(run, top_k) -> None:
    overrides = ("distill.weight=1", f"distill.top_k={top_k}", "quant.codebook=nf2", "train.max_steps=30")
    result = run("run", *overrides, "optim.lr=0.001", "lora.rank=16")
    # NF2 moves the tiny model's distribution; rates from 3e-4 to 3e-3 left 14 to 27 % of that after 30 steps.
    assert 0 < result.metrics["eval_kl"] < 0.5 * result.metrics["eval_kl_base"]
    first = json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(first["kl"], rel=1e-6) and first["cross_entropy"] > first["kl"]


QAT = ("conf=qat", "model=tiny", "model.dtype=float32", "data=jsonl", "data.eval_rows=2", "distill.weight=0.5")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("qat.schemes=['k_pro:int8']",), "qat.schemes has 'k_pro', which fits no layer"),
        (("qat.group_size=96",), "qat.group_size=96 does not divide in_features="),
        (("train.epochs=1", "qat.start=1000"), "qat.start=1000 is beyond the end of a run of"),
    ],
)
def test_a_bad_scheme_is_told_before_the_teacher_runs(
    tmp_path, uneven_jsonl, own_cache, monkeypatch, overrides, text
) -> None:
    asked = Asked(monkeypatch)
    config = load_config(*QAT, f"data.path={uneven_jsonl}", "train.max_steps=null", *overrides)
    with pytest.raises(UserError, match=text):
        prepare_run(config, tmp_path, Accelerator())
    assert asked.count == 0


def test_calibration_is_no_part_of_the_first_evaluation(tmp_path, uneven_jsonl, own_cache) -> None:
    config = load_config(*QAT, f"data.path={uneven_jsonl}", "train.max_steps=2", "qat.scheme=int8_static")
    objective = prepare_run(config, tmp_path, Accelerator()).training.objective
    assert objective.drain_metrics()["kl"] == (0.0, 0)


@pytest.mark.parametrize("conf", ["full", "lora", "qlora", "qat"])
def test_a_live_teacher_stays_what_it_was(run, conf) -> None:
    """Every method: training moves the student only, so a second run is measured against the same teacher."""
    formats = {"full": "merged", "qat": "quantized"}.get(conf, "adapter")
    overrides = (f"conf={conf}", f"export.formats=[{formats}]", "distill.weight=0.5", "distill.top_k=0")
    results = [run(name, *overrides, "train.max_steps=3", "optim.lr=0.01") for name in ("one", "other")]
    assert results[0].metrics["eval_kl"] == results[1].metrics["eval_kl"] > results[0].metrics["eval_kl_base"]
    if conf != "qlora":  # the student begins as its teacher
        assert abs(results[0].metrics["eval_kl_base"]) < 1e-6


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["distill.weight=1.5"], "distill.weight=1.5; give a number in 0..1"),
        (["distill.weight=0.5", "distill.temperature=0"], "distill.temperature=0.0; give a number above 0"),
        (["distill.weight=0.5", "distill.top_k=-1"], "distill.top_k=-1; give at least 1"),
        (["distill.top_k=8"], "distill.top_k has no effect with distill.weight=0"),
        (["distill.weight=0.5", "model.add_tokens=['<x>']"], "would teach not to write them"),
        (["distill.weight=1", "conf=lora"], "distill.weight=1 .* where nothing is quantized"),
    ],
)
def test_bad_settings_are_refused(overrides, text) -> None:
    with pytest.raises(UserError, match=text):
        load_config("conf=qlora", "model=tiny", *overrides) if "conf=lora" not in overrides else load_config(*overrides)
