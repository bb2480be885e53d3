"""Rows of preferences: pairs of answers, and answers called good or bad; from a file or from docstrings.

Beside formats.py and built of it; preference.py makes token ids and batches of the rows. In a JSON Lines file a pair
has `chosen` and `rejected`, each a text or a list of messages, and a `prompt`; without one the prompt is what both
begin with. A labelled answer has `prompt`, `completion` and a boolean `label`. `data.columns.*` says what the file
calls them. Only the answer is learned: all of the prompt, earlier assistant turns included, is masked.

pydocs has no preferences, so they are made, as a demonstration: the docstring of what was asked for is preferred to
that of the next name in the same module; half of the labelled answers are of that kind, and called bad.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from os.path import commonprefix
from typing import Any

from trainer.config.data import DataConfig, DataSource
from trainer.config.errors import require
from trainer.config.preference import Method
from trainer.data.formats import (
    content,
    drop_copies,
    exchange,
    fail,
    hold_out,
    kind,
    records,
    to_messages,
    to_text,
)
from trainer.data.pydocs import Question, load_questions
from trainer.data.rows import Labelled, Pair, Preference, Row, content_hash

logger = logging.getLogger(__name__)


def load_preferences(config: DataConfig, method: Method, seed: int) -> tuple[list[Preference], list[Preference]]:
    """Read the rows to train on and the rows held out for evaluation; see `formats.load_rows`.

    method   dpo, orpo: pairs; kto: labelled answers
    returns  train rows and held-out rows; neither is empty, and no row is in both
    raises   UserError with file and line for a row that cannot be used, or when too few rows are left
    """
    if config.source is DataSource.pydocs:
        questions, held_out = load_questions(eval_rows=config.eval_rows)
        make = _pydocs_pairs if method.of_pairs else _pydocs_labelled
        return make(questions)[: config.max_rows], make(held_out)
    rows = read_preferences(config, method, config.path, limit=config.max_rows)
    if config.eval_path:
        train, held_out = rows, read_preferences(config, method, config.eval_path, limit=config.eval_rows)
    else:
        train, held_out = hold_out(rows, config, seed)
    return drop_copies(train, held_out, config.path, content_hash), held_out


def answers_to_show(rows: Sequence[Row | Preference]) -> list[Row]:
    """The answers that a model should come close to: chosen ones, good ones, and those of rows without a preference."""
    good = [row for row in rows if not isinstance(row, Labelled) or row.desirable]
    return [row.chosen if isinstance(row, Pair) else row.row if isinstance(row, Labelled) else row for row in good]


def read_preferences(config: DataConfig, method: Method, path: str, *, limit: int | None = None) -> list[Preference]:
    """Read a JSON Lines file, one object a line.

    limit    read the first rows only
    returns  at least one row
    raises   UserError `file:line: what is wrong; what to do`
    """
    columns, wanted = config.columns, ("chosen", "rejected") if method.of_pairs else ("prompt", "completion", "label")
    names = {ours: getattr(columns, ours) or ours for ours in ("prompt", *wanted)}
    rows: list[Preference] = []
    for where, record in islice(records(path), limit):
        needed = [names[ours] for ours in wanted] + [columns.prompt] * bool(columns.prompt)
        if missing := [name for name in needed if name not in record]:
            fail(
                where,
                f"no {' and no '.join(missing)} among the fields {', '.join(record) or '(none)'}; preference.method="
                f"{method.value} needs {', '.join(needed)}; name the file's fields with "
                f"{', '.join(f'data.columns.{ours}' for ours in names)}",
            )
        rows.append((_pair if method.of_pairs else _labelled)(record, names, where))
    require(bool(rows), f"{path} holds no rows; write one JSON object a line")
    logger.info("%s: %d rows of %s", path, len(rows), ", ".join(names[ours] for ours in wanted))
    return rows


# ---- a line of a file -> a row


def _pair(record: dict[str, Any], names: dict[str, str], where: str) -> Pair:
    answers = [record[names["chosen"]], record[names["rejected"]]]
    shown = names["chosen"], names["rejected"]
    if answers[0] == answers[1]:
        fail(where, f"{shown[0]} and {shown[1]} are equal, so nothing is preferred; remove the row")
    prompt = record.get(names["prompt"])
    if all(_is_conversation(answer) for answer in answers):
        sides = _conversations(answers, prompt, names, where)
    elif prompt is None and all(isinstance(answer, str) for answer in answers):
        sides = _texts(answers, shown, where)
    elif prompt is None:
        what = " and ".join(f"{name} is {kind(value)}" for name, value in zip(shown, answers, strict=True))
        fail(where, f"{what}, and there is no {names['prompt']}; give one, or the whole conversation on both sides")
    else:
        sides = [
            _answered(prompt, value, names["prompt"], name, where) for name, value in zip(shown, answers, strict=True)
        ]
    if content(sides[0]) == content(sides[1]):
        fail(where, f"{shown[0]} and {shown[1]} say the same, so nothing is preferred; remove the row")
    return Pair(*sides)


def _labelled(record: dict[str, Any], names: dict[str, str], where: str) -> Labelled:
    label = record[names["label"]]
    if not isinstance(label, bool):
        fail(where, f"{names['label']} is {label!r}; write true for a good answer and false for a bad one")
    values = record[names["prompt"]], record[names["completion"]]
    return Labelled(_answered(*values, names["prompt"], names["completion"], where), label)


def _is_conversation(answer: Any) -> bool:
    """Whether it holds its prompt: messages that begin with another than the assistant."""
    return isinstance(answer, list) and bool(answer) and not _is_assistant(answer[0])


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _answered(prompt: Any, answer: Any, prompt_name: str, name: str, where: str) -> Row:
    """A prompt, text or messages, and the answer to it, text or assistant messages, as one conversation."""
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": to_text(prompt, prompt_name, where)}]
    if not turns:
        fail(where, f"{prompt_name} is empty; fill it or remove the row")
    if not isinstance(answer, list):
        answer = [{"role": "assistant", "content": to_text(answer, name, where)}]
    elif not answer or not _is_assistant(answer[0]):
        fail(
            where, f"{name} does not begin with an assistant turn; give the answer alone, since {prompt_name} is given"
        )
    return Row(to_messages([*turns, *answer], f"{prompt_name} + {name}", where), None, where, len(turns))


def _conversations(answers: list[Any], prompt: Any, names: dict[str, str], where: str) -> list[Row]:
    """Two whole conversations: what they begin with alike is the prompt."""
    shown = f"{names['chosen']} and {names['rejected']}"
    sides = [to_messages(answers[0], names["chosen"], where), to_messages(answers[1], names["rejected"], where)]
    turns = zip(*sides, strict=False)
    shared = next((index for index, (one, other) in enumerate(turns) if one != other), min(map(len, sides)))
    for side, name in zip(sides, (names["chosen"], names["rejected"]), strict=True):
        if shared == len(side):
            fail(where, f"{shown} are equal up to the end of {name}, whose answer is empty; fill it or remove the row")
    if not shared or not all(_is_assistant(side[shared]) for side in sides):
        fail(where, f"{shown} have different prompts: they differ in turn {shared}, which is not the assistant's")
    texts = [message["content"] for message in sides[0][:shared]]
    if not (prompt is None or prompt in texts or prompt == sides[0][:shared]):
        fail(where, f"{names['prompt']} is not what {shown} begin with; leave it out, or correct it")
    return [Row(side, None, where, shared) for side in sides]


def _texts(answers: list[str], names: tuple[str, str], where: str) -> list[Row]:
    """Two texts without a template: what they begin with alike is the prompt, a last space excepted, as TRL has it."""
    shared = len(commonprefix([to_text(value, name, where) for value, name in zip(answers, names, strict=True)]))
    shared -= answers[0][:shared].endswith(" ")
    if not shared:
        fail(where, f"{names[0]} and {names[1]} begin differently, so there is no prompt; give the field prompt")
    for name, value in zip(names, answers, strict=True):
        if not value[shared:].strip():
            fail(where, f"{name} ends where the two begin to differ, so its answer is empty; give the field prompt")
    return [Row(None, value, where, shared) for value in answers]


# ---- the demonstration set


def _pydocs_pairs(questions: Sequence[Question]) -> list[Pair]:
    return [
        Pair(_from_question(question, question.answer), _from_question(question, other.answer))
        for question, other in zip(questions, _others(questions), strict=True)
    ]


def _pydocs_labelled(questions: Sequence[Question]) -> list[Labelled]:
    return [
        Labelled(_from_question(question, other.answer if index % 2 else question.answer), index % 2 == 0)
        for index, (question, other) in enumerate(zip(questions, _others(questions), strict=True))
    ]


def _from_question(question: Question, answer: str) -> Row:
    return Row(exchange(question.prompt, answer), None, question.origin, 1)


def _others(questions: Sequence[Question]) -> Iterator[Question]:
    """For each question the next one of its module, or else of any, that has another answer."""
    modules: dict[str, list[Question]] = {}
    for question in questions:
        modules.setdefault(_module(question), []).append(question)
    for question in questions:
        module = modules[_module(question)]
        yield _next(question, module, lambda other: other.answer) or _next(
            question, questions, lambda other: other.answer
        )


def _module(question: Question) -> str:
    return question.origin.removeprefix("pydocs:").partition(".")[0]


def _next(item: Any, items: Sequence[Any], key: Callable[[Any], Any]) -> Any | None:
    """The first behind `item` in the circle of `items` whose key differs from its own."""
    start = next(index for index, other in enumerate(items) if other is item)
    behind = (items[(start + step) % len(items)] for step in range(1, len(items)))
    return next((other for other in behind if key(other) != key(item)), None)
