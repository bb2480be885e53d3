"""Rows of the default data: questions about the standard library, and preferences made of them.

pydocs has no preferences, so they are made, as a demonstration: the docstring of what was asked for is preferred to
that of the next name in the same module; half of the labelled answers are of that kind, and called bad.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.config.preference import Method
from trainer.data.pydocs import Question, load_questions

Record = tuple[str, dict[str, Any]]
"""Where a row comes from, and its fields."""


def pydocs_records(method: Method, *, eval_rows: int) -> tuple[list[Record], list[Record]]:
    """Rows to train on and rows held out, of other modules, with the fields that `method` reads.

    raises  UserError when the standard library's sources are missing
    """
    train, held_out = load_questions(eval_rows=eval_rows)
    return _records(train, method), _records(held_out, method)


def _records(questions: Sequence[Question], method: Method) -> list[Record]:
    if method is Method.none:
        return [(asked.origin, {"prompt": asked.prompt, "completion": asked.answer}) for asked in questions]
    pairs = list(zip(questions, _others(questions), strict=True))
    if method.of_pairs:
        return [
            (asked.origin, {"prompt": asked.prompt, "chosen": asked.answer, "rejected": other.answer})
            for asked, other in pairs
        ]
    return [
        (
            asked.origin,
            {
                "prompt": asked.prompt,
                "completion": other.answer if index % 2 else asked.answer,
                "label": index % 2 == 0,
            },
        )
        for index, (asked, other) in enumerate(pairs)
    ]


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
