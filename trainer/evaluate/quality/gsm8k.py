"""GSM8K: word problems answered greedily through the chat template, and judged by their number (arXiv:2110.14168).

With `shots` each question stands behind solved ones, as turns of a conversation: the same ones for all, drawn once.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config.errors import require
from trainer.config.evaluation import EvaluationConfig
from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.material import chat_ids, read_jsonl
from trainer.evaluate.quality.numbers import answer_number, as_text

INSTRUCTION = "\n\nSolve it step by step and end with the line: #### <number>"
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's marks for a calculator


@dataclass(frozen=True)
class Problems:
    """Questions, their right numbers, and what is asked as token ids."""

    questions: list[str]
    gold: list[Fraction]
    rows: list[list[int]]
    shots: int

    @classmethod
    def of(cls, config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> "Problems":
        """raises  UserError naming a line without a question or a number"""
        found = [_problem(record, where) for where, record in read_jsonl(Path(config.gsm8k), limit=config.gsm8k_rows)]
        before = _examples(config, {question for question, _ in found})
        rows = [chat_ids(tokenizer, [*before, _asked(question)]) for question, _ in found]
        gold = [answer_number(answer) for _, answer in found]
        return cls([question for question, _ in found], gold, rows, config.shots)

    def judge(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """A line a question: what was answered, its number, and whether it is the right one."""
        lines = []
        for question, gold, answer in zip(self.questions, self.gold, answers, strict=True):
            number = answer_number(answer)
            found = None if number is None else as_text(number)
            line = {"question": question, "gold": as_text(gold), "answer": answer, "number": found}
            lines.append({**line, "right": number == gold})
        return lines


def _problem(record: dict[str, Any], where: str) -> tuple[str, str]:
    question, answer = record.get("question"), record.get("answer")
    require(
        isinstance(question, str) and isinstance(answer, str),
        f"{where}: give question and answer, found {', '.join(sorted(record)) or 'nothing'}",
    )
    require(answer_number(answer) is not None, f"{where}: the answer holds no number")
    return question, answer


def _examples(config: EvaluationConfig, asked: set[str]) -> list[dict[str, str]]:
    """Solved questions as turns, none that is asked itself.

    raises  UserError if there are not enough
    """
    if not config.shots:
        return []
    solved = [_problem(record, where) for where, record in read_jsonl(Path(config.shots_from))]
    solved = [(question, answer) for question, answer in solved if question not in asked]
    require(
        len(solved) >= config.shots, f"shots_from={config.shots_from} has {len(solved)} questions that are not asked"
    )
    turns = []
    for question, answer in random.Random(config.seed).sample(solved, config.shots):
        turns += [_asked(question), {"role": "assistant", "content": _CALCULATOR.sub("", answer)}]
    return turns


def _asked(question: str) -> dict[str, str]:
    return {"role": "user", "content": question + INSTRUCTION}


def compare_problems(
    original: Sequence[dict[str, Any]] | None, lines: Sequence[dict[str, Any]], resampler: Resampler
) -> dict[str, Any]:
    """Exact match, and beside the original's answers how many changed sides."""
    now = [line["right"] for line in lines]
    figures = {
        "questions": len(now),
        "exact_match": resampler.share(now).to_dict(),
        "without_number": sum(line["number"] is None for line in lines),
    }
    if original is None:
        return figures
    was = [line["right"] for line in original]
    pairs = list(zip(was, now, strict=True))
    return {
        **figures,
        "exact_match_original": resampler.share(was).to_dict(),
        "right_to_wrong": resampler.share([before and not after for before, after in pairs]).to_dict(),
        "wrong_to_right": resampler.share([after and not before for before, after in pairs]).to_dict(),
    }
