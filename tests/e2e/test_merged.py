"""A run with added tokens, its adapter and its merged model: trained, exported, opened elsewhere, served."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import ROOT, environment, losses
from trainer import finetune, load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.data.dataset import load_data
from trainer.evaluate.perplexity import held_out_loss
from trainer.export.adapter import check_vocabulary, read_adapter
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss
from trainer.run import export_run
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

TOKENS = ["<sum>", "</sum>"]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ATOL = 1e-5
"""Of float32 logits of size 1: the same sums in another order."""


@pytest.fixture(scope="module")
def marked_jsonl(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "marked.jsonl"
    rows = [
        {"prompt": f"Add {i} and {i + 1}" + "?" * (i % 7), "completion": f"<sum>{2 * i + 1}</sum>" * (1 + i % 3)}
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def settings(marked_jsonl):
    return (
        *("conf=qlora", "model=tiny", "model.dtype=float32", "data=jsonl", f"data.path={marked_jsonl}"),
        *("data.eval_rows=4", "evaluate.samples=0", "train.max_steps=8", "optim.lr=0.01"),
    )


@pytest.fixture(scope="module")
def result(settings, tmp_path_factory):
    return finetune(
        load_config(
            *settings,
            f"model.add_tokens={TOKENS}",
            "export.formats=[adapter,merged]",
            "export.dtype=float32",
            f"output_dir={tmp_path_factory.mktemp('run') / 'run'}",
        )
    )


@pytest.fixture(scope="module")
def unmerged(result):
    config = load_config(f"resume={result.run_dir}")
    model, tokenizer = load_model(config.model)
    prepare_model(model, config.quant)
    return read_adapter(model, result.exports["adapter"], tokenizer)


@pytest.fixture(scope="module")
def prompts(result):
    tokenizer = AutoTokenizer.from_pretrained(result.exports["merged"])
    return [tokenizer(text)["input_ids"] for text in ("Add 3 and 4", "<sum>7</sum>", "What?<sum>")]


def test_only_the_added_rows_were_trained_and_came_back(result, unmerged):
    """The adapter's file holds the two rows, not the embedding; read back they are what the checkpoint has."""
    written = load_file(result.exports["adapter"] / "adapter_model.safetensors")
    rows = {name: tensor for name, tensor in written.items() if "lora_" not in name}
    (name,) = rows
    assert name.endswith("embed_tokens.token_adapter.trainable_tokens_delta") and rows[name].shape == (2, 96)
    trained = load_file(result.run_dir / "checkpoints" / "step_8" / "trainable.safetensors")
    (checkpoint,) = [tensor for key, tensor in trained.items() if "trainable_tokens_delta" in key]
    assert torch.equal(rows[name], checkpoint)
    embedding = unmerged.get_base_model().get_input_embeddings()
    base = embedding.original_module.weight
    assert torch.equal(embedding.weight[260:], rows[name]) and torch.equal(embedding.weight[:260], base[:260])
    assert (rows[name] - base[260:]).abs().max() > 0.01  # eight steps of 0.01 moved them
    assert torch.equal(unmerged.get_base_model().get_output_embeddings().weight, embedding.weight)  # tied


def test_lowbit_json_says_what_the_vocabulary_is(result):
    identity = json.loads((result.exports["adapter"] / "lowbit.json").read_text())
    assert identity["added_tokens"] == {"<sum>": 260, "</sum>": 261}
    assert identity["vocab_size"] == identity["num_tokens"] == 262 and identity["tied"] is True
    assert len(identity["tokenizer_sha256"]) == 64


@torch.no_grad()
def test_the_merged_model_opens_in_transformers_with_equal_logits(result, unmerged, prompts):
    merged, loading = AutoModelForCausalLM.from_pretrained(
        result.exports["merged"], dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    for ids in prompts:
        ids = torch.tensor([ids])
        want = unmerged(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, want, atol=ATOL, rtol=0)


def test_the_server_answers_alike_from_adapter_and_merged_model(result, prompts, unmerged):
    """The run's folder, its adapter and its merged model, and what transformers says."""
    answers = []
    for folder in (result.run_dir, result.exports["adapter"], result.exports["merged"]):
        llm = LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=4)
        answers.append([output.choices[0].token_ids for output in llm.generate(prompts, GREEDY)])
        llm.close()
    assert answers[0] == answers[1] == answers[2]
    assert {260, 261} & {token for answer in answers[0] for token in answer}  # the new rows of the head are served
    for ids, answer in zip(prompts, answers[0], strict=True):
        assert answer == greedy(unmerged, ids, len(answer))


@torch.no_grad()
def greedy(model, ids: list[int], num_tokens: int) -> list[int]:
    """Not by `generate`, which would keep the eos token from the answer of a fixed length."""
    tokens = list(ids)
    for _ in range(num_tokens):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def test_plain_peft_opens_the_adapter_over_a_resized_base(result, unmerged):
    adapter = result.exports["adapter"]
    path = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base.resize_token_embeddings(len(AutoTokenizer.from_pretrained(adapter)), mean_resizing=False)
    theirs = PeftModel.from_pretrained(base, adapter).get_base_model()
    ours = unmerged.get_base_model()
    assert torch.equal(theirs.get_input_embeddings().weight, ours.get_input_embeddings().weight)
    assert torch.equal(theirs.get_output_embeddings().weight, ours.get_output_embeddings().weight)


def test_another_vocabulary_or_tokenizer_is_refused(result, unmerged):
    config, adapter = load_config(f"resume={result.run_dir}"), result.exports["adapter"]
    config.model.add_tokens = []
    model, tokenizer = load_model(config.model)
    prepare_model(model, config.quant)
    with pytest.raises(UserError, match=r"262 embedding rows, this one has 260; load the base with model.add_tokens="):
        read_adapter(model, adapter)
    with pytest.raises(UserError, match="another tokenizer: it lacks the added tokens"):
        check_vocabulary(adapter, unmerged, tokenizer)
    model.config.tie_word_embeddings = False
    model.resize_token_embeddings(262)
    with pytest.raises(UserError, match="tie_word_embeddings=True, this one has False"):
        check_vocabulary(adapter, model)


def test_a_running_server_refuses_rows_that_it_does_not_have(result):
    with pytest.raises(UserError, match=r"with the tokens \['<sum>', '</sum>'\] added \(start the server with model="):
        LLM("tiny", dtype="float32", quantization="nf4", adapters=[f"a={result.exports['adapter']}"], max_model_len=64)


def test_a_run_with_added_tokens_resumes_bit_identical(settings, result, tmp_path):
    run_dir = tmp_path / "run"
    tokens = f"model.add_tokens={TOKENS}"
    finetune(load_config(*settings, tokens, "train.save_every=4", "train.keep_checkpoints=9", f"output_dir={run_dir}"))
    (run_dir / "checkpoints" / "step_8").rename(tmp_path / "last")
    before = losses(run_dir)
    finetune(load_config(f"resume={run_dir}"))
    assert losses(run_dir) == before == losses(result.run_dir)
    first, second = (
        load_file(folder / "trainable.safetensors")
        for folder in (tmp_path / "last", run_dir / "checkpoints" / "step_8")
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_script_exports_a_stopped_run_and_touches_nothing_else(result, tmp_path):
    """As after Ctrl-C: a checkpoint, and no export folder."""
    run_dir = tmp_path / "run"
    shutil.copytree(result.run_dir, run_dir, ignore=shutil.ignore_patterns("export", "metrics.json"))
    files = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    script = (sys.executable, str(ROOT / "scripts" / "export.py"))

    def export(*arguments: str) -> subprocess.CompletedProcess:
        env = {**environment(), "PYTHONPATH": str(ROOT)}
        return subprocess.run([*script, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)

    refused = export(f"run={run_dir}", "format=merged_4bit")
    assert refused.returncode == 2 and "loses most of what was trained" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = export("run=run", "format=merged_4bit", "allow_lossy=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the update is left after rounding to 4 bits again; KL to the unmerged model" in done.stdout
    card = (run_dir / "export" / "merged_4bit" / "README.md").read_text()
    assert "**This merge is lossy.**" in card and f"{result.metrics['eval_loss']:.4f}" in card
    assert export_run(str(run_dir), "export.formats=[adapter]", "export.dtype=auto") == {
        "adapter": run_dir / "export" / "adapter"
    }
    again, first = (
        folder / "adapter_model.safetensors" for folder in (run_dir / "export/adapter", result.exports["adapter"])
    )
    assert again.read_bytes() == first.read_bytes()
    assert all(path.read_bytes() == content for path, content in files.items())
    mistake = export("run=run", "formt=merged")
    assert mistake.returncode == 2 and "formt is not a key; use python scripts/export.py" in mistake.stderr


def test_a_run_without_checkpoint_is_refused(result, tmp_path):
    shutil.copy(result.run_dir / "config.yaml", tmp_path / "config.yaml")
    with pytest.raises(UserError, match="holds no checkpoint to export"):
        export_run(str(tmp_path), "export.formats=[adapter]", "export.dtype=auto")


@pytest.mark.parametrize(
    "overrides",
    [
        ("conf=loftq", "loftq.iterations=2"),
        ("conf=qlora", "lora.init=pissa"),
        ("conf=lora", "lora.init=pissa"),
        ("conf=qlora", "lora.use_dora=true", "quant.codebook=int8"),
    ],
    ids=" ".join,
)
def test_whatever_an_adapter_starts_from_the_merged_model_has_the_runs_loss(settings, tmp_path, overrides):
    export = ("export.formats=[adapter,merged]", "export.dtype=float32", f"output_dir={tmp_path / 'run'}")
    result = finetune(load_config(*overrides, *settings[1:], *export))
    config = load_config(f"resume={result.run_dir}")
    config.model = ModelConfig(ModelSource.folder, str(result.exports["merged"]), dtype=DType.float32)
    model, tokenizer = load_model(config.model)
    held_out = load_data(config.data, config.preference.method, tokenizer, config.seed).held_out
    loss = held_out_loss(NextTokenLoss(model), held_out, Accelerator(), batch_size=16)
    assert abs(result.metrics["eval_loss"] - result.metrics["eval_loss_base"]) > 0.05
    assert loss == pytest.approx(result.metrics["eval_loss"], abs=1e-5)  # means of logits that differ by 1e-6


def test_a_token_that_the_data_lacks_is_named(settings, tmp_path, caplog):
    tokens = f"model.add_tokens={[*TOKENS, '<never>']}"
    finetune(load_config(*settings, tokens, "train.max_steps=1", f"output_dir={tmp_path / 'run'}"))
    (message,) = [record.getMessage() for record in caplog.records if "no training row holds" in record.getMessage()]
    assert "['<never>']" in message


def test_the_card_of_the_adapter_says_how_to_add_the_tokens(result):
    card = (result.exports["adapter"] / "README.md").read_text()
    assert "`<sum>`, `</sum>`" in card and "base.resize_token_embeddings(262)" in card


def test_the_card_of_the_merged_model_holds_the_figures(result):
    card = (result.exports["merged"] / "README.md").read_text()
    assert f"{result.metrics['eval_loss']:.4f}" in card and "LoRA of rank 16, alpha 32" in card
    assert "marked.jsonl for 8 steps" in card and "AutoModelForCausalLM.from_pretrained" in card
    assert "rounded once to float32, which left 100.0 % of it" in card.replace("\n", " ")


def test_dense_weights_that_are_called_packed_are_no_model(result, tmp_path):
    """A config that says of 16-bit weights that they are codes."""
    config = json.loads((result.exports["merged"] / "config.json").read_text())
    folder = tmp_path / "packed"
    shutil.copytree(result.exports["merged"], folder)
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(UserError, match="says that it is quantized with bitsandbytes, and no layer of it is packed"):
        load_model(ModelConfig(ModelSource.folder, str(folder)))
