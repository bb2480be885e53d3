"""Trained, packed, exported, served: one function, and by how much the programs that compute it differ.

The same held-out tokens go through the model as it was trained (weights rounded in each forward), as layers of codes,
as it is read from its folder, and through the server. Differences are of the log-probability of the token that follows,
in nats. What may differ is the order of sums and where 16 bits are rounded, never a code: hashes say that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.architecture import base_model, why_unsupported
from trainer.config.errors import UserError
from trainer.objective import NextTokenLoss
from trainer.qat.fake_quant import fake_quantize_kv_cache, head_operands
from trainer.qat.packed_model import packed_layers, scheme_of_layer
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

MAX_MEAN_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Mean over the tokens, in nats. In bfloat16 the server, which sums in another order, is 0.034 to 0.038 away on
SmolLM2-135M (30 layers; `agreement` in the results of `scripts/study_qat.py`), the packed and the opened model 0. One
wrong scale in a layer is above the limit in float32, a layer with another grid in 16 bits."""
ROUNDED_INPUTS = 0.2
"""The same where inputs are rounded to 8 bits: the last bit of a sum decides there about a code, 1/127 of a token's
largest value."""


@dataclass(frozen=True)
class Difference:
    """Mean and maximum of absolute differences of log-probabilities, in nats."""

    mean: float
    max: float

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> "Difference":
        distance = (ours - theirs).abs()
        return cls(distance.mean().item(), distance.max().item())


def cut_rows(rows: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Token ids of the first rows, num_tokens in all, at least two in each."""
    cut: list[list[int]] = []
    for row in rows:
        left = num_tokens - sum(map(len, cut))
        if left < 2:
            break
        if len(row) >= 2:
            cut.append(list(row[:left]))
    return cut


@torch.no_grad()
def following_logprobs(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """Of each row's tokens but the first, the log-probability after those before it; through the model's own forward.

    returns  [sum of (len(row) - 1)] float64
    """
    device, parts = next(model.parameters()).device, []
    was_training = model.training
    model.eval()
    for row in rows:
        ids = torch.tensor([row], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        parts.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu())
    model.train(was_training)
    return torch.cat(parts)


@torch.no_grad()
def int8_cache_logprobs(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """`following_logprobs` with keys and values as an INT8 cache gives them back, through our own layers."""
    fake_quantize_kv_cache(model, False)  # while the objective compares our layers with transformers'
    objective, parts = NextTokenLoss(model).eval(), []
    fake_quantize_kv_cache(model, True)
    for row in rows:
        ids = torch.tensor(row, device=next(model.parameters()).device)
        cu_seqlens = torch.tensor([0, len(row)], dtype=torch.int32, device=ids.device)
        hidden_states = objective.hidden_states(ids, cu_seqlens, torch.arange(len(row) - 1, device=ids.device))
        x, weight = head_operands(objective.head, hidden_states)
        logits = (x @ weight.T).double()
        parts.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu())
    return torch.cat(parts)


def served_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]],
    *,
    kv_cache_dtype: str = "auto",
) -> Tensor | str:
    """The same through the server, in this process; why not, if it does not serve this model."""
    reason = why_unsupported(base_model(model).config)
    if reason is not None:
        return reason
    longest = max(map(len, rows))
    settings = {"max_model_len": longest + 1, "max_num_seqs": 4, "screen_greedy": False}
    settings["kv_cache_dtype"] = kv_cache_dtype
    try:
        llm = LLM(model, tokenizer, kv_cache_memory_bytes=_cache_bytes(model, num_tokens=4 * longest + 64), **settings)
    except UserError as error:
        return str(error)
    outputs = llm.generate([list(row) for row in rows], SamplingParams(max_tokens=0, prompt_logprobs=0))
    llm.close()
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs[1:]]
    return torch.tensor(logprobs, dtype=torch.float64)


def _cache_bytes(model: PreTrainedModel, *, num_tokens: int) -> int:
    """Of the keys and values of some tokens."""
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize * num_tokens


def require_agreement(what: str, difference: Difference, model: PreTrainedModel) -> None:
    """raises  RuntimeError if a program computes another function than the one that was trained"""
    limit = MAX_MEAN_DIFFERENCE[model.dtype]
    if any(scheme_of_layer(layer).activations is not None for layer in packed_layers(model).values()):
        limit = max(limit, ROUNDED_INPUTS)
    if not difference.mean <= limit:  # a nan has to fail
        raise RuntimeError(
            f"{what} differs from the trained model by {difference.mean:.3g} nats a token on average (at most "
            f"{difference.max:.3g}), the limit is {limit:g}; its export cannot be trusted"
        )
