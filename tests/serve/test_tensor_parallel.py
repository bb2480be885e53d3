"""Two processes that share each layer give the tokens of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainer.config.errors import UserError
from trainer.kernels.codebook4 import CodebookWeight, codebook_quantize
from trainer.kernels.int4 import Int4Weight, int4_quantize
from trainer.kernels.int8 import int8_quantize
from trainer.kernels.packed_linear import QuantizedWeight, decode
from trainer.qat.fake_quant import fake_quantize_linears
from trainer.qat.scheme import Scheme
from trainer.serve.config import ServeConfig
from trainer.serve.decoder import decoder_from_module
from trainer.serve.tensor_parallel import TensorParallel, slice_columns, slice_rows
from trainer.sources.tiny import tiny_model

QUANTIZATIONS = ("none", "fp4", "int4")  # fp4 stands for nf4 too, with a codebook that is not the default
SCRIPT = """
import json, sys
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

folder, size, quantizations = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
prompts = [list(range(3, 3 + length)) for length in (1, 16, 40)]
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
seeded = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True)
answers = {}
for quantization in quantizations:
    llm = LLM(folder, dtype="float32", quantization=quantization, tensor_parallel_size=size, max_num_batched_tokens=64)
    llm.load_adapter("tuned", folder + "/adapter")
    answers[quantization] = [
        output.choices[0].token_ids
        for adapter in (None, "tuned")
        for params in (greedy, seeded)
        for output in llm.generate(prompts, params, adapter=adapter)
    ]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose halves do not cut NF4 blocks of 64, with an adapter."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"]))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    peft.save_pretrained(path / "adapter")
    return path


def answers(folder: Path, size: int, *quantizations: str) -> dict[str, list[list[int]]]:
    launch = [sys.executable] if size == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [] if size == 1 else [f"--nproc_per_node={size}", "--no-python", sys.executable]
    command = [*launch, "-c", SCRIPT, str(folder), str(size), *quantizations]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[list[int]]]:
    return answers(folder, 1, *QUANTIZATIONS)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_two_processes_equal_one(folder: Path, alone: dict[str, list[list[int]]], quantization: str) -> None:
    want = alone[quantization]
    assert len({tuple(tokens) for tokens in want}) > 4, "the answers say nothing if they are all alike"
    assert answers(folder, 2, quantization) == {quantization: want}
    others = [alone[other] for other in QUANTIZATIONS if other != quantization]
    assert want not in others, "the weights were not quantized"


def codebook_weight(codebook: str, *shape: int) -> CodebookWeight:
    packed, absmax = codebook_quantize(torch.randn(shape), codebook=codebook, block_size=64)
    return CodebookWeight(packed, absmax, None, None, *shape, 64, codebook)


@pytest.mark.parametrize(
    "weight",
    [
        codebook_weight("nf4", 8, 256),
        codebook_weight("fp4", 8, 256),
        int4_quantize(torch.randn(8, 256), group_size=64),
        int4_quantize(torch.randn(8, 256), group_size=32, symmetric=False),
        int8_quantize(torch.randn(8, 256), group_size=128),
    ],
    ids=["nf4", "fp4", "int4", "int4-asymmetric", "int8"],
)
def test_slices_are_the_dense_slices(weight: QuantizedWeight) -> None:
    dense = decode(weight, dtype=torch.float32)
    second = TensorParallel(1, 2)
    rows, columns = slice_rows(weight, second.slice(8)), slice_columns(weight, second.slice(256))
    assert type(rows) is type(columns) is type(weight)
    assert torch.equal(decode(rows, dtype=torch.float32), dense[4:])
    assert torch.equal(decode(columns, dtype=torch.float32), dense[:, 128:])


def test_a_row_slice_keeps_the_order_of_groups() -> None:
    plain = int4_quantize(torch.randn(4, 64), group_size=32)
    g_idx = (torch.arange(64) % 2).to(torch.int32)
    weight = Int4Weight(plain.packed, plain.scales, None, g_idx, 4, 64, 32)
    half = slice_rows(weight, slice(2, 4))
    assert torch.equal(decode(half, dtype=torch.float32), decode(weight, dtype=torch.float32)[2:])
    with pytest.raises(UserError, match="blocks of 32 cannot be cut"):
        slice_columns(weight, slice(0, 32))  # its features lie in both groups


@pytest.mark.parametrize(
    "weight, size",
    [(codebook_weight("nf4", 4, 96), 64), (int4_quantize(torch.randn(4, 96), group_size=96), 96)],
    ids=["nf4", "int4"],
)
def test_a_cut_through_a_block_is_refused(weight: QuantizedWeight, size: int) -> None:
    with pytest.raises(UserError, match=f"blocks of {size} cannot be cut at rows 0:4, columns 0:48"):
        slice_columns(weight, slice(0, 48))


def test_rounded_inputs_are_not_shared_out() -> None:
    """Each process would have the scale of its own part of a token."""
    with pytest.raises(UserError, match="quantization=int4_dynamic scales each token's whole input.*use tensor_par"):
        ServeConfig(quantization="int4_dynamic", tensor_parallel_size=2)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    fake_quantize_linears(model, lambda name: None if name == "lm_head" else Scheme.named("int8"))
    with pytest.raises(UserError, match="q_proj.k_proj.v_proj rounds its input to 8 bits.*use tensor_parallel_size=1"):
        decoder_from_module(model, max_model_len=8, parallel=TensorParallel(0, 2))


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="tensor_parallel_size=2 does not divide num_key_value_heads=3"):
        TensorParallel(0, 2).check({"num_key_value_heads": 3})


def test_a_missing_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="torchrun --standalone --nproc_per_node=2"):
        TensorParallel.join(2, torch.device("cpu"))
