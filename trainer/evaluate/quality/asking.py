"""What all models are asked, made once with the original's tokenizer, and what a program says to it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.config.errors import require
from trainer.config.evaluation import EvaluationConfig
from trainer.evaluate.quality.choices import ChoiceRows, read_choices
from trainer.evaluate.quality.gsm8k import Problems
from trainer.evaluate.quality.material import Prompts, Windows
from trainer.evaluate.quality.program import Program
from trainer.evaluate.quality.subject import Subject
from trainer.sources.resolve import resolve_model

Say = Callable[[str], None]


@dataclass(frozen=True)
class Questions:
    """Everything that models read and answer; None for what was not asked for.

    max_new_tokens  of an answer to a prompt; max_solution_tokens: to a problem
    """

    tokenizer: PreTrainedTokenizerBase
    windows: Windows
    prompts: Prompts
    choices: ChoiceRows | None
    problems: Problems | None
    max_new_tokens: int
    max_solution_tokens: int

    @classmethod
    def of(cls, config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> "Questions":
        """raises  UserError for a file that cannot be read as what it is given for"""
        choices = None
        if config.choices is not None:
            found = read_choices(Path(config.choices), limit=config.num_choices, seed=config.seed)
            choices = ChoiceRows.of(found, tokenizer)
        return cls(
            tokenizer,
            Windows.of(config, tokenizer),
            Prompts.of(config, tokenizer),
            choices,
            None if config.gsm8k is None else Problems.of(config, tokenizer),
            config.max_new_tokens,
            config.gsm8k_max_new_tokens,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest row, its answer included."""
        lengths = [len(row) for row in self.windows.rows]
        lengths += [len(row) + self.max_new_tokens for row in self.prompts.rows]
        lengths += [len(row) for row in (self.choices.rows if self.choices else [])]
        lengths += [len(row) + self.max_solution_tokens for row in (self.problems.rows if self.problems else [])]
        return max(lengths)


@dataclass(frozen=True)
class Said:
    """Answers to the prompts as token ids, the choices' log-likelihoods, and the problems' judged answers."""

    answers: list[list[int]]
    scores: list[list[float]] | None
    problems: list[dict[str, Any]] | None


def ask(program: Program, questions: Questions, say: Say) -> Said:
    """Everything but the windows."""
    answers, scores, judged = [], None, None
    if questions.prompts.rows:
        say(f"{len(questions.prompts.rows)} prompts")
        answers = program.answers(questions.prompts.rows, max_new_tokens=questions.max_new_tokens)
    if questions.choices is not None:
        say(f"{len(questions.choices.questions)} multiple choices")
        scores = questions.choices.scores(program)
    if questions.problems is not None:
        say(f"{len(questions.problems.rows)} problems of GSM8K")
        found = program.answers(questions.problems.rows, max_new_tokens=questions.max_solution_tokens)
        texts = [questions.tokenizer.decode(answer, skip_special_tokens=True) for answer in found]
        judged = questions.problems.judge(texts)
    return Said(answers, scores, judged)


def tokenizer_of(subject: Subject) -> PreTrainedTokenizerBase:
    """Without the model: a run's or adapter's own, or that of the folder."""
    for folder in (subject.adapter,):
        if folder is not None and (folder / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(resolve_model(subject.source))


def require_same_tokens(subject: Subject, own: PreTrainedTokenizerBase, original: PreTrainedTokenizerBase) -> None:
    """raises  UserError if the same text is other tokens: distributions over them cannot be compared"""
    if own is original:
        return
    theirs = original.get_vocab()
    vocab = own.get_vocab()
    differs = next((token for token, number in theirs.items() if vocab.get(token) != number), None)
    require(
        differs is None,
        f"{subject.name} has another vocabulary than the original ({differs!r} is {vocab.get(differs)} and not "
        f"{theirs.get(differs)}); give against=<the model that it was made from>",
    )
