"""Multiple choice by log-likelihood: each choice is read behind its question, and the likeliest is the answer.

A file has `prompt`, `choices` and `gold` a line. Of GSM8K's questions and answers a choice is made here: the right
number beside three that a slip would give. Two scores, as lm-evaluation-harness has them: the sum of log-probabilities,
and the sum a byte, which does not favour short choices. Flips are of the first.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import require
from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.kept import loglikelihoods
from trainer.evaluate.quality.material import read_jsonl
from trainer.evaluate.quality.numbers import answer_number, as_text, wrong_numbers
from trainer.evaluate.quality.program import Program


@dataclass(frozen=True)
class Choice:
    """A question with its answers; gold: the number of the right one."""

    prompt: str
    choices: tuple[str, ...]
    gold: int


def read_choices(path: Path, *, limit: int, seed: int) -> list[Choice]:
    """raises  UserError naming a line that is no multiple choice"""
    draw = random.Random(seed)
    return [_choice(record, where, draw) for where, record in read_jsonl(path, limit=limit)]


def _choice(record: dict[str, Any], where: str, draw: random.Random) -> Choice:
    if "choices" not in record and {"question", "answer"} <= record.keys():
        return _numbers(record, where, draw)
    prompt = next((record[name] for name in ("prompt", "question", "context") if name in record), None)
    choices, gold = record.get("choices"), record.get("gold")
    require(
        isinstance(prompt, str)
        and isinstance(choices, list)
        and len(choices) >= 2
        and all(isinstance(choice, str) and choice for choice in choices),
        f"{where}: give prompt, choices (at least two texts) and gold, or GSM8K's question and answer",
    )
    require(
        isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices),
        f"{where}: gold={gold!r}; give the number of the right choice, 0 to {len(choices) - 1}",
    )
    return Choice(prompt, tuple(choices), gold)


def _numbers(record: dict[str, Any], where: str, draw: random.Random) -> Choice:
    right = answer_number(str(record["answer"]))
    require(right is not None, f"{where}: the answer holds no number")
    choices = [right, *wrong_numbers(right, draw)]
    draw.shuffle(choices)
    prompt = f"Question: {record['question']}\nAnswer:"
    return Choice(prompt, tuple(f" {as_text(number)}" for number in choices), choices.index(right))


@dataclass(frozen=True)
class ChoiceRows:
    """All choices as token ids: a row each, and where its choice begins."""

    questions: list[Choice]
    rows: list[list[int]]
    starts: list[int]

    @classmethod
    def of(cls, questions: Sequence[Choice], tokenizer: PreTrainedTokenizerBase) -> "ChoiceRows":
        """Blanks at the end of a prompt belong to the choice, since tokens hold the blank before them."""
        rows, starts = [], []
        for question in questions:
            prompt = question.prompt.rstrip()
            blanks = question.prompt[len(prompt) :]
            before = tokenizer(prompt)["input_ids"]
            for choice in question.choices:
                row = tokenizer(prompt + blanks + choice)["input_ids"]
                starts.append(max(1, min(len(before), len(row) - 1)))
                rows.append(row)
        return cls(list(questions), rows, starts)

    def scores(self, program: Program) -> list[list[float]]:
        """Of each question, its choices' sums of log-probabilities."""
        found = iter(loglikelihoods(program, self.rows, self.starts))
        return [[next(found) for _ in question.choices] for question in self.questions]

    def right(self, scores: Sequence[Sequence[float]], *, a_byte: bool = False) -> list[bool]:
        """Whether the likeliest choice is the right one."""
        found = []
        for question, own in zip(self.questions, scores, strict=True):
            sizes = [len(choice.encode()) if a_byte else 1 for choice in question.choices]
            found.append(int(np.argmax(np.divide(own, sizes))) == question.gold)
        return found


def compare_choices(
    rows: ChoiceRows, original: Sequence[Sequence[float]], scores: Sequence[Sequence[float]], resampler: Resampler
) -> dict[str, Any]:
    """Accuracy of both, and who changed sides (arXiv:2407.09141), each with its interval."""
    was, now = rows.right(original), rows.right(scores)
    broken = [before and not after for before, after in zip(was, now, strict=True)]
    mended = [after and not before for before, after in zip(was, now, strict=True)]
    return {
        "questions": len(was),
        "accuracy_original": resampler.share(was).to_dict(),
        "accuracy": resampler.share(now).to_dict(),
        "accuracy_a_byte_original": resampler.share(rows.right(original, a_byte=True)).to_dict(),
        "accuracy_a_byte": resampler.share(rows.right(scores, a_byte=True)).to_dict(),
        "right_to_wrong": resampler.share(broken).to_dict(),
        "wrong_to_right": resampler.share(mended).to_dict(),
        "chance": float(np.mean([1 / len(question.choices) for question in rows.questions])),
    }
