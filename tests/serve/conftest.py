"""Random models small enough for a test and varied enough to catch one: every parameter is random, norms and biases
too, and large enough that answers wander through the vocabulary instead of repeating a token."""

import json
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer import finetune, load_config
from trainer.config.quant import QuantConfig
from trainer.model import prepare_model
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams
from trainer.sources.tiny import tiny_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "bos_token_id": 0,
}


@contextmanager
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread():
    """These models are too small to share: two threads that meet on a busy machine take ten times as long."""
    with _one_thread():
        yield


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, 260 ids."""
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture(scope="session")
def random_model(tokenizer):
    """Builds a frozen model of a transformers architecture with random weights; `packed` turns its layers into NF4."""

    def build(model_type: str = "llama", *, packed: bool = False, dtype: torch.dtype = torch.float32, **options):
        config = AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), **SIZES, **options})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            # 0.2 in rows of 64: products of normed rows have a deviation of 1.6, so softmaxes are neither flat nor 1
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + ("norm" in name and not name.endswith("bias")))
        inv_freq = model.model.rotary_emb.inv_freq if hasattr(model, "model") else None
        model.to(dtype)
        if inv_freq is not None:
            model.model.rotary_emb.inv_freq = inv_freq  # from_pretrained keeps it in float32
        if packed:
            prepare_model(model, QuantConfig())
        return model

    return build


@pytest.fixture(scope="session")
def token_prompts(tokenizer):
    """Prompts of given lengths, random ids."""

    def draw(*lengths: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(4, len(tokenizer), (length,), generator=generator).tolist() for length in lengths]

    return draw


@pytest.fixture(scope="session")
def serve(tokenizer):
    """An LLM over a module or a folder, with checks of the block accounts after each step."""

    def start(model, **settings) -> LLM:
        settings = {"max_model_len": 256, "max_num_seqs": 16, "check": True, **settings}
        return LLM(model, tokenizer=tokenizer, **settings)

    return start


@pytest.fixture(scope="session")
def greedy_params():
    """Greedy decoding of exactly `n` tokens, with log-probabilities of prompt and answer."""

    def params(n: int, **options) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, prompt_logprobs=0, logprobs=0, **options)

    return params


@pytest.fixture(scope="session")
def hf_greedy():
    """transformers' own greedy `generate`, one prompt at a time: `n` new token ids."""

    @torch.inference_mode()
    def generate(model, prompt: list[int], n: int) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=n, max_new_tokens=n, eos_token_id=None
        )
        return out[0, len(prompt) :].tolist()

    return generate


@pytest.fixture(scope="session")
def hf_logprobs():
    """Log-probability of each token after the first under the module's own forward, in float32."""

    @torch.inference_mode()
    def score(model, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([token_ids])
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0]

    return score


@pytest.fixture(scope="session")
def served_logprobs():
    """Log-probabilities of prompt (after its first token) and answer of a RequestOutput, as one tensor."""

    def gather(output) -> torch.Tensor:
        entries = [*output.prompt_logprobs[1:], *(output.choices[0].logprobs or [])]
        return torch.tensor([entry.logprob for entry in entries], dtype=torch.float32)

    return gather


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """model=tiny, trained for some steps in this process; the Result of the run."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [{"prompt": f"Repeat {i}", "completion": f"{i}" * (1 + i % 3)} for i in range(20, 44)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("conf=qlora", "model=tiny", "model.dtype=float32", "data=jsonl", f"data.path={folder / 'train.jsonl'}")
    lengths = ("data.eval_rows=2", "evaluate.samples=0", "train.max_steps=4", "optim.lr=0.05")
    with _one_thread():
        return finetune(load_config(*settings, *lengths, f"output_dir={folder / 'run'}"))
