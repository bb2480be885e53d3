"""Sample answers: the same held-out prompts, greedily continued by the base and by the tuned model."""

from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.data.encoding import Encoder
from trainer.data.formats import Row
from trainer.data.template import Template


@dataclass(frozen=True)
class Sample:
    """One prompt and what became of it; `reference` is the held-out answer."""

    prompt: str
    reference: str
    base: str | None
    """None where every weight was trained: the base is gone."""
    tuned: str


def sample_answers(
    model: PeftModel | PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], *, max_new_tokens: int
) -> list[Sample]:
    """Greedy answers to each row's prompt, with the adapter off and on."""
    samples = []
    for row in rows:
        prompt, reference, input_ids = _prompt(row, tokenizer)
        base = None
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                base = _continue(model, tokenizer, input_ids, max_new_tokens)
        samples.append(Sample(prompt, reference, base, _continue(model, tokenizer, input_ids, max_new_tokens)))
    return samples


def _prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, list[int]]:
    """What the model sees, what the row answers, and the prompt's tokens; half of the words for plain text."""
    if row.messages is None:
        words = row.text.split()
        head, tail = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
        return head, tail, tokenizer(head)["input_ids"]
    last = max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
    prompt = Template(tokenizer).text(row.origin, row.messages[:last], row.tools, generation_prompt=True)
    ids = Encoder(tokenizer).ids(prompt)
    return row.messages[last - 1]["content"] if last else "", row.messages[last]["content"], ids


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
