"""The baselines and the LoRA family as a user runs them: train, stop, go on, export, read back, serve."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import losses
from trainer import UserError, finetune, load_config
from trainer.config.quant import Codebook
from trainer.config.schema import Config
from trainer.data.dataset import load_data
from trainer.evaluate.perplexity import held_out_loss
from trainer.export.adapter import read_adapter
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss
from trainer.run import Result
from trainer.serve.llm import LLM

SETTINGS = (
    *(
        "model=tiny",
        "model.dtype=float32",
        "data=jsonl",
        "data.eval_rows=4",
        "data.max_seq_len=64",
        "evaluate.samples=1",
    ),
    *("evaluate.max_new_tokens=3", "train.max_steps=6", "train.batch_size=4", "train.save_every=3", "optim.lr=0.01"),
)
TOKEN_IDS = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
FAMILY = {
    "rsLoRA": ("conf=qlora", "lora.use_rslora=true"),
    "DoRA": ("conf=qlora", "lora.use_dora=true"),
    "PiSSA": ("conf=qlora", "lora.init=pissa"),
    "OLoRA": ("conf=qlora", "lora.init=olora"),
    "EVA": ("conf=qlora", "lora.init=eva", "lora.rank=4"),
    "saved modules": ("conf=qlora", "lora.modules_to_save=[embed_tokens,norm]", "model.dtype=bfloat16"),
    "patterns": ("conf=qlora", "lora.rank_pattern=[down_proj:3]", "lora.alpha_pattern=[layers.0.*:8]"),
    "16-bit LoRA": ("conf=lora", "model.dtype=bfloat16"),
    "16-bit DoRA": ("conf=lora", "lora.use_dora=true", "lora.dropout=0.1"),
    "16-bit PiSSA": ("conf=lora", "lora.init=pissa", "model.dtype=bfloat16"),
    "16-bit OLoRA with rsLoRA": (
        "conf=lora",
        "lora.init=olora",
        "lora.use_rslora=true",
        "lora.rank_pattern=[q_proj:5]",
    ),
}
TRAJECTORIES = {
    **{name: FAMILY[name] for name in ("DoRA", "PiSSA", "EVA", "saved modules", "16-bit PiSSA")},
    "NEFTune": ("conf=qlora", "train.neftune_alpha=10"),
    "LoRA+": ("conf=qlora", "optim.lora_plus_ratio=16"),
    "full": ("conf=full", "model.dtype=bfloat16"),
    "full in float32": ("conf=full", "train.neftune_alpha=5"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, jsonl):
    """Fine-tunes model=tiny once for each set of overrides; returns the Result."""
    results: dict[tuple[str, ...], Result] = {}

    def start(*overrides: str) -> Result:
        if overrides not in results:
            folder = tmp_path_factory.mktemp("run") / "run"
            results[overrides] = finetune(
                load_config(*SETTINGS, f"data.path={jsonl}", f"output_dir={folder}", *overrides)
            )
        return results[overrides]

    return start


def held_out(config: Config, model: torch.nn.Module, export: Path) -> float:
    """The run's own held-out loss, of another model."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    rows = load_data(config.data, config.preference.method, tokenizer, config.seed).held_out
    return held_out_loss(NextTokenLoss(model), rows, Accelerator(), batch_size=16)


@pytest.mark.parametrize("name", FAMILY)
def test_an_exported_adapter_is_what_was_trained(run, name):
    """Trained, exported and read back over the base that anybody can load: the same held-out loss, to the bit."""
    result = run(*FAMILY[name])
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_base"]
    config = load_config(f"resume={result.run_dir}")
    model, _ = load_model(config.model)
    if config.quant.codebook is not Codebook.none:
        prepare_model(model, config.quant)
    adapter = read_adapter(model, result.exports["adapter"])
    assert held_out(config, adapter, result.exports["adapter"]) == result.metrics["eval_loss"]


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_a_stopped_run_goes_on_bit_identical(run, tmp_path, name):
    """From its checkpoint half way: noise, dropout, magnitudes, masters and what an adapter started from come back."""
    result = run(*TRAJECTORIES[name])
    stopped = tmp_path / "stopped"
    shutil.copytree(result.run_dir, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step_6")
    shutil.rmtree(stopped / "export")
    resumed = finetune(load_config(f"resume={stopped}"))
    assert losses(stopped) == losses(result.run_dir)
    for key in ("eval_loss", "eval_loss_base"):
        assert resumed.metrics[key] == result.metrics[key]


@pytest.mark.parametrize("name", ["16-bit PiSSA", "16-bit OLoRA with rsLoRA", "16-bit DoRA"])
def test_plain_peft_reads_adapters_of_a_dense_base(run, name):
    """No method in the file: PiSSA and OLoRA are plain LoRA over the published weights, of twice the rank."""
    result = run(*FAMILY[name])
    folder, config = result.exports["adapter"], load_config(f"resume={result.run_dir}")
    says = json.loads((folder / "adapter_config.json").read_text())
    assert says["init_lora_weights"] is True and says["r"] == (16 if "DoRA" in name else 32)
    model, _ = load_model(config.model)
    base = AutoModelForCausalLM.from_pretrained(says["base_model_name_or_path"], dtype=torch.float32)
    theirs, ours = PeftModel.from_pretrained(base, folder).eval(), read_adapter(model, folder)
    with torch.no_grad():
        expected, found = (model(input_ids=TOKEN_IDS).logits.float() for model in (theirs, ours))
    # float32: order of sums; bfloat16 is 0.4 % coarse, and rounds at each of a few products a layer
    tolerance = 1e-4 if model.dtype is torch.float32 else 0.05
    assert (found - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("name", ["rsLoRA", "PiSSA", "EVA", "patterns", "16-bit OLoRA with rsLoRA"])
def test_the_server_computes_what_was_trained(run, name):
    result = run(*FAMILY[name])
    config = load_config(f"resume={result.run_dir}")
    model, _ = load_model(config.model)
    if config.quant.codebook is not Codebook.none:
        prepare_model(model, config.quant)
    adapter = read_adapter(model, result.exports["adapter"])
    ids = TOKEN_IDS[0].tolist()
    with torch.no_grad():
        logprobs = adapter(input_ids=TOKEN_IDS[:1]).logits[0, 3:-1].log_softmax(-1)
    expected = logprobs.gather(-1, TOKEN_IDS[0, 4:, None]).sum().item()
    llm = LLM(result.run_dir, max_model_len=64, max_num_seqs=4)
    [(found, _)] = llm.loglikelihood([ids[:4]], [ids[4:]])
    [(base, _)] = llm.loglikelihood([ids[:4]], [ids[4:]], adapter=None)
    assert found == pytest.approx(expected, abs=1e-2)  # thirteen float32 log-probabilities, about -5.5 each
    assert abs(base - found) > 0.1


def test_a_full_run_exports_the_trained_weights(run):
    """What transformers loads from the folder computes what the run measured."""
    result = run("conf=full", "export.dtype=float32")
    folder, config = result.exports["merged"], load_config(f"resume={result.run_dir}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert held_out(config, model, folder) == result.metrics["eval_loss"] < result.metrics["eval_loss_base"]
    base, _ = load_model(config.model)
    changed = [name for name, weight in base.state_dict().items() if not torch.equal(weight, model.state_dict()[name])]
    assert len(changed) == len(base.state_dict())  # every weight, norms and embedding too
    assert result.samples[0].base is None


def test_a_run_keeps_what_its_adapter_started_from(run):
    """Two decompositions on different threads may differ in their last bits; a run has one."""
    for name in ("PiSSA", "EVA", "16-bit PiSSA"):
        assert load_file(run(*FAMILY[name]).run_dir / "initial_factors.safetensors")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("conf=full", "quant.codebook=nf4"), "train.weights=all trains every weight, and quant.codebook=nf4 packs"),
        (("conf=full", "lora.rank=4"), r"lora.\* has no effect with train.weights=all"),
        (("conf=full", "export.formats=[adapter]"), "export.formats=.* has adapter, and train.weights=all trains none"),
        (("conf=lora", "loftq.iterations=1"), "loftq.iterations=1 makes up for quantization, and quant.codebook=none"),
        (("conf=qlora", "loftq.iterations=1", "lora.init=pissa"), "both choose where the adapter starts"),
        (("conf=qlora", "lora.eva_rho=3"), "lora.eva_rho=3.0 has no effect with lora.init=default"),
        (("conf=qlora", "lora.rank_pattern=[down_proj]"), "lora.rank_pattern has 'down_proj'; give the end of"),
        (("conf=qlora", "lora.rank_pattern=[down_proj:2.5]"), "lora.rank_pattern has 'down_proj:2.5'"),
        (
            ("conf=qlora", "lora.layers=[0]", "lora.target_modules='.*q_proj'"),
            "lora.layers=.0. cannot be combined with",
        ),
        (("conf=qlora", "lora.layers=[]"), "lora.layers=.*give numbers from 0"),
        (("conf=qlora", "lora.target_modules='(q_proj'"), "lora.target_modules=.q_proj; use all-linear"),
        (("conf=qlora", "lora.modules_to_save=[q_proj]", "lora.target_modules=[q_proj]"), "both have .'q_proj'."),
        (("conf=qlora", "train.neftune_alpha=-1"), "train.neftune_alpha=-1.0; give 0 or more"),
    ],
)
def test_what_does_not_fit_together_is_said_in_the_first_second(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("model=tiny", *overrides)
