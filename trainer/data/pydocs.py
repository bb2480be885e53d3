"""Questions about the running Python's standard library, answered by its docstrings.

Real text that lies on every machine, for the default run: `What does json.dumps do?` -> its docstring. The
source files are parsed and never imported, since importing some of the library opens windows or browsers.

Whole top-level modules are held out (all of `json.*` or nothing), so an evaluation asks about code that training
has not seen. The choice hashes names with SHA-256: it is the same for every seed, process and machine, and moves
with Python's version only as far as the library does.
"""

import ast
import gc
import hashlib
import logging
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from trainer.config.errors import UserError

logger = logging.getLogger(__name__)

# Test suites, demonstrations, jokes, data in the form of modules, and what Python 3.12 and 3.13 removed.
_SKIPPED_MODULES = frozenset(
    "antigravity distutils encodings ensurepip idlelib lib2to3 pydoc_data test this turtledemo".split()
)
_SKIPPED_FOLDERS = frozenset(("test", "tests"))
_DOC_CHARS = range(40, 801)
_SIGNATURE_CHARS = 160
_MIN_QUESTIONS = 50
_HELD_OUT_SHARE = 10  # one module in ten

# Question, and whether the answer begins with the signature.
_TEMPLATES = {
    "function": (
        ("What does `{name}` do?", False),
        ("Explain `{name}` from Python's standard library.", False),
        ("How do I call `{name}`? Give its signature and purpose.", True),
        ("What is the signature of `{name}`, and what does it do?", True),
    ),
    "class": (
        ("What is the class `{name}` for?", False),
        ("Explain the class `{name}` from Python's standard library.", False),
        ("How do I create a `{name}`? Give its signature and purpose.", True),
        ("What is the signature of the class `{name}`, and what is it for?", True),
    ),
    "property": (
        ("What is the property `{name}`?", False),
        ("Explain the property `{name}` from Python's standard library.", False),
    ),
}


class Question(NamedTuple):
    prompt: str
    answer: str
    origin: str
    """`pydocs:` and the dotted name."""


class _Entry(NamedTuple):
    name: str
    kind: str
    signature: str | None
    doc: str

    @property
    def module(self) -> str:
        return self.name.partition(".")[0]


def load_questions(*, eval_rows: int, folder: Path | None = None) -> tuple[list[Question], list[Question]]:
    """Ask about each public, documented function, class, method and property of the standard library.

    eval_rows  held-out questions at most, spread over the held-out modules
    folder     where the library's source lies; None for the running interpreter's
    returns    questions to train on, in a fixed shuffled order, and held-out questions; no module is in both,
               and no docstring of the held-out modules is in the first
    raises     UserError when the source is missing, as in an embedded or zipped Python
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    with _collector_paused():
        entries = sorted(_entries(folder), key=lambda entry: (_stable_hash(entry.name), entry.name))
    held_out = [entry for entry in entries if _stable_hash(entry.module) % _HELD_OUT_SHARE == 0]
    seen = {entry.doc for entry in held_out}
    train = [entry for entry in entries if _stable_hash(entry.module) % _HELD_OUT_SHARE and entry.doc not in seen]
    if len(train) < _MIN_QUESTIONS or not held_out:
        raise UserError(
            f"data=pydocs found {len(train)} docstrings to train on and {len(held_out)} to hold out in {folder}; at "
            f"least {_MIN_QUESTIONS} and 1 are needed; use a Python with its sources, or data=file data.path=<file>"
        )
    return [_ask(entry) for entry in train], [_ask(entry) for entry in _spread(held_out)[:eval_rows]]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Syntax trees hold no cycles, yet make the collector visit all of torch again and again (2.3 s against 1.1 s)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _spread(entries: list[_Entry]) -> list[_Entry]:
    """The first entry of each module, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranks = []
    for entry in entries:
        ranks.append(seen[entry.module])
        seen[entry.module] += 1
    return [entry for _, entry in sorted(zip(ranks, entries, strict=True), key=lambda pair: pair[0])]


def _ask(entry: _Entry) -> Question:
    short = entry.signature is not None and len(entry.signature) <= _SIGNATURE_CHARS
    templates = [pair for pair in _TEMPLATES[entry.kind] if short or not pair[1]]
    question, with_signature = templates[_stable_hash(f"question {entry.name}") % len(templates)]
    answer = f"`{entry.signature}`\n\n{entry.doc}" if with_signature else entry.doc
    return Question(question.format(name=entry.name), answer, f"pydocs:{entry.name}")


def _entries(folder: Path) -> Iterator[_Entry]:
    for module in sorted(sys.stdlib_module_names - _SKIPPED_MODULES):
        path = folder / f"{module}.py"
        for file in [path] if path.is_file() else sorted((folder / module).rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") or part in _SKIPPED_FOLDERS for part in parts):
                yield from _parse(file, ".".join(parts))


def _parse(file: Path, module: str) -> Iterator[_Entry]:
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        logger.warning("pydocs: %s is left out: %s", file, error)
        return
    yield from _documented(body, module, in_class=False)


def _documented(body: list[ast.stmt], prefix: str, *, in_class: bool) -> Iterator[_Entry]:
    names: set[str] = set()
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or node.name in names:  # a second definition: a property's setter
            continue
        names.add(node.name)
        name = f"{prefix}.{node.name}"
        doc = (ast.get_docstring(node) or "").strip()
        if len(doc) in _DOC_CHARS and doc[0].isalpha():
            yield _Entry(name, _kind(node), _signature(node, name, in_class=in_class), doc)
        if isinstance(node, ast.ClassDef):
            yield from _documented(node.body, name, in_class=True)


def _kind(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    return "property" if any("property" in name.lower() for name in _decorators(node)) else "function"


def _signature(node: ast.stmt, name: str, *, in_class: bool) -> str | None:
    """`json.dumps(obj, *, indent=None)` without self; None for a class whose `__init__` stands elsewhere."""
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return _signature(inits[0], name, in_class=True) if inits else None
    bound = in_class and "staticmethod" not in _decorators(node)
    if own := bound and (node.args.posonlyargs or node.args.args):
        del own[0]
    return f"{name}({ast.unparse(node.args)})"


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
