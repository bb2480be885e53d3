"""Sample answers: the same held-out prompts, greedily continued by the base and by the tuned model.

The prompt is the row's own tokens up to its last answer, so what is asked is what was trained on.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.data.loader import IGNORED


@dataclass(frozen=True)
class Sample:
    """One prompt and what became of it; `reference` is the held-out answer."""

    prompt: str
    reference: str
    base: str | None
    """None where every weight was trained: the base is gone."""
    tuned: str


def rows_to_show(rows: Dataset, number: int) -> Dataset:
    """The first rows whose answer a model should come close to: not the bad ones of labelled answers."""
    good = range(len(rows))
    if "desirable" in rows.column_names:
        good = [place for place, desirable in enumerate(rows["desirable"]) if desirable]
    return rows.select(good[:number])


def sample_answers(
    model: PeftModel | PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, *, max_new_tokens: int
) -> list[Sample]:
    """Greedy answers to each row's prompt, with the adapter off and on.

    rows  `input_ids` and `labels`
    """
    samples = []
    for row in rows:
        prompt, reference, input_ids = _prompt(row, tokenizer)
        base = None
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                base = _continue(model, tokenizer, input_ids, max_new_tokens)
        samples.append(Sample(prompt, reference, base, _continue(model, tokenizer, input_ids, max_new_tokens)))
    return samples


def _prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, list[int]]:
    """What is asked, what the row answers, and the prompt's tokens; of what is learned as a whole, the second half."""
    ids, targets = row["input_ids"], [label != IGNORED for label in row["labels"]]
    end = max(place for place, is_target in enumerate(targets) if is_target) + 1
    start = next((place + 1 for place in range(end - 1, -1, -1) if not targets[place]), 0)
    if start <= 1:
        start = max(1, end // 2)
    reference = tokenizer.decode(ids[start:end], skip_special_tokens=True).strip()
    return _last_said(ids[:start], tokenizer), reference, ids[:start]


def _last_said(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The last text between special tokens, the one before the answer's header where there are several."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    stretches = [list(group) for is_special, group in groupby(ids, special.__contains__) if not is_special]
    texts = [text for text in (tokenizer.decode(stretch).strip() for stretch in stretches) if text]
    return texts[-2] if len(texts) > 1 else "".join(texts)


@torch.inference_mode()
def _continue(
    model: PeftModel | PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], max_new_tokens: int
) -> str:
    input_ids = torch.tensor([ids], device=model.device)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
