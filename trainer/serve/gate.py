"""The gate between training and serving: the same prompts through the module that was trained and through the server.

Both give the log-probability of every prompt token; where they differ by more than rounding, what answers is not what
was trained. The report also names everything that decides numbers (weights, adapter, dtype, kernels, versions,
tokenizer, chat template), so that two reports can be compared when one of them fails.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn

from trainer.config.errors import require
from trainer.kernels import _cpp
from trainer.linear import weights_sha256
from trainer.serve.adapters import factors_from_module
from trainer.serve.llm import LLM, Prompt
from trainer.serve.sampling_params import SamplingParams

KERNELS = ("packed_linear", "integer_linear", "lora_rows", "paged_attention", "elementwise")
"""The C++ files of a forward (kernels/cpp)."""


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """One prompt.

    token_ids    T of them
    tokens       their texts
    differences  T - 1 numbers, server minus module: log-probabilities of tokens 1..T-1, in nats
    """

    token_ids: list[int]
    tokens: list[str]
    differences: list[float]

    @property
    def max_difference(self) -> float:
        return _largest(map(abs, self.differences))

    @property
    def mean_difference(self) -> float:
        return sum(map(abs, self.differences)) / len(self.differences)


@dataclass(frozen=True, slots=True)
class GateReport:
    """What the gate measured; differences are absolute, in nats.

    identity    what decides the numbers, name -> value
    mismatches  names in `identity` that the module has otherwise -> the module's value; empty if it was served right
    """

    prompts: list[PromptDifference]
    identity: dict[str, str]
    mismatches: dict[str, str] = field(default_factory=dict)

    @property
    def max_difference(self) -> float:
        return _largest(prompt.max_difference for prompt in self.prompts)

    @property
    def mean_difference(self) -> float:
        """Over all tokens of all prompts."""
        differences = [abs(difference) for prompt in self.prompts for difference in prompt.differences]
        return sum(differences) / len(differences)

    @property
    def digest(self) -> str:
        """SHA-256 of the identity: equal digests compute the same function on one kind of processor."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def check(self, limit: float) -> None:
        """Fail where server and module disagree.

        limit   largest difference of a log-probability, in nats
        raises  RuntimeError naming what differs between the two, or the worst prompt and token
        """
        if self.mismatches:
            lines = [
                f"{name} is {self.identity[name]} there and {self.mismatches[name]} here" for name in self.mismatches
            ]
            raise RuntimeError(
                f"the server does not hold what was trained: {'; '.join(lines)}. Serve this run's own export, or call "
                "refresh() after training further"
            )
        number = max(range(len(self.prompts)), key=lambda i: _nan_last(self.prompts[i].max_difference))
        worst = self.prompts[number]
        # `not <=`: a nan has to fail
        if not worst.max_difference <= limit:
            position = max(range(len(worst.differences)), key=lambda i: _nan_last(abs(worst.differences[i]))) + 1
            raise RuntimeError(
                f"prompt {number}, token {position} ({worst.tokens[position]!r}): the server's log-probability differs "
                f"from the trained module's by {worst.max_difference:.3g} nats, the limit is {limit:g} (mean over all "
                f"prompts: {self.mean_difference:.3g}). Digest {self.digest[:12]}"
            )


def _nan_last(value: float) -> float:
    """A key under which max() finds a nan, which it otherwise finds only in the first place."""
    return math.inf if math.isnan(value) else value


def _largest(values: Iterable[float]) -> float:
    return max(values, key=_nan_last)


def train_serve_gate(module: nn.Module, llm: LLM, prompts: Sequence[Prompt]) -> GateReport:
    """Compare a trained module with a server, token by token.

    module   a causal language model, with its adapter if it has one; runs in eval mode, and is left as it was
    llm      the server, with the same weights; its default adapter answers
    prompts  text or token ids, each of at least two tokens
    raises   UserError if a prompt is too short or too long
    """
    require(len(prompts) > 0, "prompts is empty; give at least one")
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate(list(prompts), params)
    device = next(module.parameters()).device
    was_training = module.training
    module.eval()
    try:
        compared = []
        for number, output in enumerate(outputs):
            token_ids = output.prompt_token_ids
            require(len(token_ids) > 1, f"prompt {number} has one token; nothing predicts it, give at least two")
            served = torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]], dtype=torch.float64)
            trained = _logprobs(module, torch.tensor([token_ids], device=device)).cpu()
            texts = [llm.tokenizer.decode([token_id]) for token_id in token_ids]
            compared.append(PromptDifference(token_ids, texts, (served - trained).tolist()))
    finally:
        module.train(was_training)
    return GateReport(compared, *_identity(module, llm))


@torch.no_grad()
def _logprobs(module: nn.Module, token_ids: Tensor) -> Tensor:
    """Log-probabilities of tokens 1..T-1. [1, T] int64 -> [T - 1] float64"""
    logits = module(input_ids=token_ids, use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0]


def _identity(module: nn.Module, llm: LLM) -> tuple[dict[str, str], dict[str, str]]:
    """What the server computes with, and where the module differs from it."""
    decoder, adapter = llm.runner.decoder, llm.adapters.by_name.get(llm.default_adapter)
    served = {
        "weights_sha256": llm.adapters.base_sha256,
        "adapter_sha256": "none" if adapter is None else adapter.sha256,
        "dtype": str(decoder.config.dtype).removeprefix("torch."),
    }
    factors = factors_from_module(module)
    trained = {
        "weights_sha256": weights_sha256(module),
        "adapter_sha256": "none" if factors is None else factors.sha256,
        "dtype": str(_dtype(module)).removeprefix("torch."),
    }
    rest = {
        "kv_cache_dtype": str(llm.runner.cache.dtype).removeprefix("torch."),
        "kernels": ", ".join(f"{name} {_cpp.choose(name, decoder.device.type)}" for name in KERNELS),
        "device": decoder.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizer_sha256": _sha256(llm.tokenizer.backend_tokenizer.to_str()),
        "chat_template_sha256": _sha256(json.dumps(llm.tokenizer.chat_template)),
    }
    return {**served, **rest}, {name: value for name, value in trained.items() if value != served[name]}


def _dtype(module: nn.Module) -> torch.dtype:
    """The compute dtype: that of the frozen norms, since adapters are trained in float32."""
    return next(p.dtype for name, p in module.named_parameters() if name.endswith("norm.weight"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
