"""Questions about the standard library: the same everywhere, nothing leaks, nothing is imported."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.config.errors import UserError
from trainer.data.pydocs import Question, load_questions

EVERYTHING = 10**6


@pytest.fixture(scope="module")
def questions() -> tuple[list[Question], list[Question]]:
    return load_questions(eval_rows=EVERYTHING)


def module(question: Question) -> str:
    return question.origin.removeprefix("pydocs:").partition(".")[0]


def body(question: Question) -> str:
    """The docstring without the signature that some answers begin with."""
    return question.answer.split("`\n\n", 1)[1] if question.answer.startswith("`") else question.answer


def test_enough_to_learn_from(questions: tuple[list[Question], list[Question]]) -> None:
    train, held_out = questions
    assert len(train) > 2000  # 3.11: 3,497, 3.13: 3,257; a hundred steps of eight rows see no row twice
    assert len(held_out) >= 100  # 3.11: 169; more than the default data.eval_rows=64
    assert len({module(question) for question in held_out}) >= 10


def test_nothing_leaks(questions: tuple[list[Question], list[Question]]) -> None:
    train, held_out = questions
    assert not {module(question) for question in train} & {module(question) for question in held_out}
    assert not {body(question) for question in train} & {body(question) for question in held_out}


def test_questions_are_unique_public_and_of_one_form(questions: tuple[list[Question], list[Question]]) -> None:
    rows = questions[0] + questions[1]
    assert len({question.prompt for question in rows}) == len(rows)
    for prompt, answer, origin in rows:
        name = origin.removeprefix("pydocs:")
        assert f"`{name}`" in prompt
        *parents, last = name.split(".")  # a function may be called test, a package that holds it may not
        assert not last.startswith("_")
        assert not any(part.startswith("_") or part in ("test", "tests") for part in parents)
        asks_signature = "signature" in prompt
        assert answer.startswith(f"`{name}(") == asks_signature
        assert 40 <= len(body(Question(prompt, answer, origin))) <= 800
    with_signature = sum("signature" in question.prompt for question in rows)
    assert 0.3 < with_signature / len(rows) < 0.6  # two of four templates; properties and long signatures have none


def test_known_answer(questions: tuple[list[Question], list[Question]]) -> None:
    by_origin = {question.origin: question for question in questions[0] + questions[1]}
    # Two docstrings that have not changed for many versions; the method's self is left out of its signature.
    assert by_origin["pydocs:shlex.quote"] == Question(
        "Explain `shlex.quote` from Python's standard library.",
        "Return a shell-escaped version of the string *s*.",
        "pydocs:shlex.quote",
    )
    assert by_origin["pydocs:queue.Queue.get_nowait"].answer.startswith(
        "`queue.Queue.get_nowait()`\n\nRemove and return an item from the queue without blocking.\n"
    )


def test_the_same_in_another_process(questions: tuple[list[Question], list[Question]]) -> None:
    # Another hash seed, which would show any use of hash() or of a set's order.
    code = (
        "import hashlib; from trainer.data.pydocs import load_questions;"
        f"print(hashlib.sha256(repr(load_questions(eval_rows={EVERYTHING})).encode()).hexdigest())"
    )
    digests = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert digests[0] == digests[1] != ""


def test_eval_rows_are_spread_over_modules(questions: tuple[list[Question], list[Question]]) -> None:
    modules = {module(question) for question in questions[1]}
    train, few = load_questions(eval_rows=len(modules))
    assert {module(question) for question in few} == modules  # one of each before a second of any
    assert train == questions[0]


def test_speed() -> None:
    start = time.process_time()
    load_questions(eval_rows=64)
    assert time.process_time() - start < 5  # 1.1 s on the slowest machine tried; a start should not be felt


def write_library(folder: Path, count: int) -> None:
    body = "".join(
        f'def function_{index}(self, x, /, *, y=(1, 2)):\n    """Return the sum of x and y, as variant {index}."""\n'
        for index in range(count)
    )
    for name in ("json", "random", "socket", "codecs", "locale", "timeit"):  # some of these are held out
        (folder / f"{name}.py").write_text(body.replace("sum", f"sum by {name}"))


def test_rules_on_a_small_library(tmp_path: Path) -> None:
    write_library(tmp_path, 60)
    package = tmp_path / "email"
    for name in ("__init__", "parser", "_private", "test/__init__", "tests/test_it"):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            'raise SystemExit("imported")\n'
            "class Parser:\n"
            '    """Parse text into a tree of messages, lazily."""\n'
            "    def __init__(self, strict=True): ...\n"
            "    @property\n"
            '    def name(self):\n        """The name of this parser, which never changes."""\n'
            "    @name.setter\n"
            '    def name(self, value):\n        """Set the name, which is the second definition of it."""\n'
            "    @staticmethod\n"
            '    def build(kind, *rest):\n        """Build a parser of the kind that is asked for."""\n'
            "    def feed(self, data: bytes, /) -> None:\n"
            '        """Take in more data, as much as there is of it."""\n'
            '    def short(self):\n        """Too short."""\n'
            '    def _hidden(self):\n        """Private, and so nobody ought to ask about it."""\n'
            '    def doctest(self):\n        """>>> Parser().doctest() # an example is no answer"""\n'
            '    def long(self):\n        """' + "Word " * 200 + '"""\n'
        )
    (tmp_path / "heapq.py").write_text("def broken(:\n")
    train, held_out = load_questions(eval_rows=EVERYTHING, folder=tmp_path)
    rows = {question.origin: question for question in train + held_out}
    assert len(rows) == len(train) + len(held_out)
    assert sorted(name for name in rows if name.startswith("pydocs:email")) == sorted(
        f"pydocs:email{module}.Parser{name}" for module in ("", ".parser") for name in ("", ".name", ".build", ".feed")
    )
    signatures = {
        "pydocs:email.Parser": "(strict=True)",
        "pydocs:email.Parser.build": "(kind, *rest)",
        "pydocs:email.Parser.feed": "(data: bytes, /)",
        "pydocs:json.function_0": "(self, x, /, *, y=(1, 2))",  # no method, so self stays
    }
    for origin, question in rows.items():
        parts = origin.replace("email.parser", "email")
        parts = "pydocs:json.function_0" if "function" in parts else parts
        if "signature" in question.prompt:
            name = origin.removeprefix("pydocs:")
            assert question.answer.startswith(f"`{name}{signatures[parts]}`\n\n")
    assert "property" in rows["pydocs:email.Parser.name"].prompt


def test_docstring_of_a_held_out_module_is_not_trained(tmp_path: Path) -> None:
    write_library(tmp_path, 60)
    shared = '"""Wait until the lock is free, then take it."""'
    for path in tmp_path.glob("*.py"):
        path.write_text(path.read_text() + f"def acquire(lock): {shared}\n")
    train, held_out = load_questions(eval_rows=EVERYTHING, folder=tmp_path)
    modules = {module(question) for question in train}, {module(question) for question in held_out}
    assert all(modules) and len(modules[0]) + len(modules[1]) == 6
    assert sum(question.origin.endswith(".acquire") for question in held_out) == len(modules[1])
    assert not any(question.origin.endswith(".acquire") for question in train)  # though it may begin with a signature


def test_broken_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_library(tmp_path, 60)
    (tmp_path / "heapq.py").write_text("def broken(:\n")
    load_questions(eval_rows=1, folder=tmp_path)
    assert any("heapq.py is left out" in message for message in caplog.messages)


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"data=pydocs found 0 docstrings .*use a Python with its sources, or data=file"
    ):
        load_questions(eval_rows=1, folder=tmp_path)
    write_library(tmp_path, 3)
    with pytest.raises(UserError, match=r"at least 50 and 1 are needed"):
        load_questions(eval_rows=1, folder=tmp_path)
