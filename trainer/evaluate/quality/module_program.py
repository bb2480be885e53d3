"""The module as a Program: our layers, called as training calls them; a run's adapter is PEFT's over its base."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainer.evaluate.quality.program import Show, without_end
from trainer.evaluate.quality.subject import Subject
from trainer.export.adapter import read_adapter
from trainer.objective import NextTokenLoss
from trainer.qat.fake_quant import head_operands
from trainer.serve.config import ServeConfig
from trainer.serve.open_model import open_model


class ModuleProgram:
    """See `Program`. Other batches are rows of one length, several at a time."""

    def __init__(
        self,
        subject: Subject,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int = 0,
        other_batches: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        """module  what is computed instead of what the subject names, with `tokenizer`"""
        if module is None:
            module, tokenizer = open_module(subject)
        self.model, self.tokenizer = module, tokenizer
        self._objective = NextTokenLoss(module.eval())
        self._at_a_time = 4 if other_batches else 1
        self.kept = "hidden states" if self._objective.fused_head else "logits"
        self.description = f"module, {str(next(module.parameters()).dtype).removeprefix('torch.')}"

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]], show: Show) -> None:
        device = next(self._objective.parameters()).device
        for numbers in batches_of(rows, self._at_a_time):
            lengths = torch.tensor([0, *(len(rows[number]) for number in numbers)])
            ends = lengths.cumsum(0)
            ids = torch.tensor([token for number in numbers for token in rows[number]], device=device)
            places = torch.cat([torch.arange(a, b - 1) for a, b in zip(ends[:-1], ends[1:], strict=True)]).to(device)
            shown = self._shown(ids, ends.int().to(device), places)
            for number, part in zip(numbers, shown.split([len(rows[n]) - 1 for n in numbers]), strict=True):
                show(number, 0, part)

    def _shown(self, ids: Tensor, cu_seqlens: Tensor, places: Tensor) -> Tensor:
        if self.kept == "logits":
            return self._objective.logits(ids, cu_seqlens, places)
        return head_operands(self._objective.head, self._objective.hidden_states(ids, cu_seqlens, places))[0]

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        if self.kept == "logits":
            return lambda logits: logits
        probe = torch.zeros(1, self._objective.head.in_features, dtype=self.model.dtype, device=self.model.device)
        with torch.inference_mode():
            weight = head_operands(self._objective.head, probe)[1]
        return lambda x: x @ weight.T

    def answers(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        return generate(self.model, self.tokenizer, prompts, max_new_tokens=max_new_tokens)

    def close(self) -> None:
        del self.model, self._objective


def open_module(subject: Subject) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model as a module, packed or not, its adapter over it, on the device where the server would have it."""
    opened = open_model(ServeConfig(model=subject.model, dtype=subject.dtype))
    module = opened.module
    return (module if subject.adapter is None else read_adapter(module, subject.adapter)), opened.tokenizer


def batches_of(rows: Sequence[Sequence[int]], at_a_time: int) -> list[list[int]]:
    """Numbers of rows of equal length, some at a time, in order."""
    groups = []
    for _, same in groupby(range(len(rows)), lambda number: len(rows[number])):
        numbers = list(same)
        groups += [numbers[start : start + at_a_time] for start in range(0, len(numbers), at_a_time)]
    return groups


@torch.inference_mode()
def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
) -> list[list[int]]:
    """Greedy answers by transformers' own loop, one after the other."""
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [listed] if isinstance(listed, int) else list(listed or [])
    ends = list(dict.fromkeys([*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )
        found.append(without_end(output[0, len(prompt) :].tolist(), ends))
    return found
