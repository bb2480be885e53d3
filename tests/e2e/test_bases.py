"""Every base that QLoRA trains over: trained, exported, read back to the same bytes, and served as it was trained."""

import json
import re

import pytest
import torch

from trainer import finetune, load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import QuantConfig
from trainer.export.adapter import base_plan, read_adapter
from trainer.linear import QuantLinear, weights_sha256
from trainer.model import load_model, prepare_model
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

BASES = {
    "nf4": [],
    "fp4": ["quant.codebook=fp4"],
    "nf3": ["quant.codebook=nf3", "quant.block_size=32"],
    "nf2": ["quant.codebook=nf2", "quant.double_quant=false"],
    "int4": ["quant.codebook=int4"],
    "int4-zeros": ["quant.codebook=int4", "quant.symmetric=false", "quant.scale_dtype=bfloat16"],
    "int8": ["quant.codebook=int8"],
    "mixed": ["quant.bits_budget=2.5", "quant.mixed=error"],
}


@pytest.fixture(scope="module", params=BASES.values(), ids=BASES)
def result(request, tmp_path_factory, jsonl):
    train = ("train.max_steps=3", "optim.lr=0.02", "evaluate.samples=0", "data.eval_rows=2")
    data = ("conf=qlora", "model=tiny", "model.dtype=float32", "data=jsonl", f"data.path={jsonl}")
    return finetune(load_config(*data, *train, *request.param, f"output_dir={tmp_path_factory.mktemp('run') / 'run'}"))


@pytest.fixture(scope="module")
def ours(result):
    """The adapter over a base that was packed anew, by nothing but what lies in the export."""
    folder = result.exports["adapter"]
    model, _ = load_model(ModelConfig(source=ModelSource.tiny, dtype=DType.float32))
    prepare_model(model, QuantConfig(), plan=base_plan(folder))
    return read_adapter(model, folder)


@pytest.fixture
def input_ids():
    return torch.randint(0, 250, (1, 23), generator=torch.Generator().manual_seed(0))


def test_training_lowers_the_loss(result):
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_base"]


@torch.no_grad()
def test_reads_back_to_the_same_base(result, ours, input_ids):
    """`read_adapter` compares hashes; the config of the run packs the same base, and the adapter does something."""
    model, _ = load_model(ModelConfig(source=ModelSource.tiny, dtype=DType.float32))
    prepare_model(model, load_config(f"resume={result.run_dir}").quant)
    identity = json.loads((result.exports["adapter"] / "lowbit.json").read_text())
    assert weights_sha256(model) == weights_sha256(ours) == identity["base_sha256"]
    with ours.disable_adapter():
        base = ours(input_ids=input_ids).logits
    assert torch.equal(base, model(input_ids=input_ids).logits)
    assert (ours(input_ids=input_ids).logits - base).abs().max() > 0.01


def test_another_base_is_refused(result):
    """One code of one layer differs."""
    model, _ = load_model(ModelConfig(source=ModelSource.tiny, dtype=DType.float32))
    prepare_model(model, QuantConfig(), plan=base_plan(result.exports["adapter"]))
    layer = next(m for m in model.modules() if isinstance(m, QuantLinear))
    layer.packed.view(-1)[0] ^= 1
    with pytest.raises(UserError, match="was trained on a base"):
        read_adapter(model, result.exports["adapter"])


def test_is_served_as_it_was_trained(result, ours):
    """From the run folder and the adapter folder, greedy: the tokens of the model read back, near ties aside."""
    prompt = torch.randint(4, 250, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    for folder in (result.run_dir, result.exports["adapter"]):
        llm = LLM(str(folder), max_model_len=64)
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        ids = answer.choices[0].token_ids
        with torch.no_grad():
            logits = ours(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        best, chosen = logits.amax(-1), logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert len(ids) == 8 and (best - chosen).max() < 1e-3  # sums of another order, of logits up to 20


def test_the_card_says_how_to_load(result, tmp_path):
    """Python in the card runs as it stands, except where it is for bitsandbytes (tests/e2e/test_adapter.py)."""
    folder = result.exports["adapter"]
    card = (folder / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]
    if "bitsandbytes" in card:
        assert json.loads((folder / "lowbit.json").read_text())["quantizer"]["codebook"] in code
        return
    scope: dict = {}
    exec(code.replace("<this folder>", str(folder)), scope)
    assert weights_sha256(scope["model"]) == json.loads((folder / "lowbit.json").read_text())["base_sha256"]


def test_a_damaged_plan_is_said(result, tmp_path):
    identity = json.loads((result.exports["adapter"] / "lowbit.json").read_text())
    (tmp_path / "lowbit.json").write_text(json.dumps({**identity, "quantizer": {"codebook": "nf5"}}))
    with pytest.raises(UserError, match="lowbit.json: quant.codebook=nf5; use one of .*export the adapter again"):
        base_plan(tmp_path)
