"""What the models read: windows of a text, prompts, and in which protocol, so that a figure can be compared."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.config.evaluation import EvaluationConfig

CHARS_A_TOKEN = 16  # no token of text is longer
PYDOCS_ROWS = 1_000_000  # all that are held out


@dataclass(frozen=True)
class Windows:
    """Pieces of a text.

    rows      token ids of each, with the first token where there is one
    words     of all scored text, whitespace between them; bytes: in UTF-8
    protocol  how perplexity is counted, in words and numbers
    """

    rows: list[list[int]]
    words: int
    bytes: int
    protocol: dict[str, Any]

    @classmethod
    def of(cls, config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> "Windows":
        """raises  UserError if the text is too short for one window, or the tokenizer has no first token"""
        name, text = _text(config)
        bos = _bos(config, tokenizer)
        ids = tokenizer(text[: CHARS_A_TOKEN * config.windows * config.window], add_special_tokens=False, verbose=False)
        ids = ids["input_ids"]
        count = min(config.windows, len(ids) // config.window)
        require(
            count >= 1, f"{name} has {len(ids)} tokens, a window has {config.window}; lower window, or give more text"
        )
        pieces = [ids[start : start + config.window] for start in range(0, count * config.window, config.window)]
        scored = [tokenizer.decode(piece if bos is not None else piece[1:]) for piece in pieces]
        protocol = {
            "text": name,
            "windows": count,
            "window": config.window,
            "bos": bos is not None,
            "scored_tokens": count * (config.window - (bos is None)),
            "rule": "pieces from the start of the text, one after the other, each read without what stands before it; "
            + ("every token of a piece is scored" if bos is not None else "a piece's first token is not scored"),
        }
        rows = [([] if bos is None else [bos]) + piece for piece in pieces]
        return cls(rows, sum(len(s.split()) for s in scored), sum(len(s.encode()) for s in scored), protocol)


def _text(config: EvaluationConfig) -> tuple[str, str]:
    """Its name, and itself."""
    if config.text is not None:
        return Path(config.text).name, Path(config.text).read_text(encoding="utf-8")
    return "pydocs: held-out docstrings", "\n\n".join(answer for _, answer in _pydocs())


@cache
def _pydocs() -> list[tuple[str, str]]:
    """(question, docstring) of all held-out ones, in the order of pydocs; reading them takes a second or two."""
    from trainer.data.pydocs import load_questions

    return [(question.prompt, question.answer) for question in load_questions(eval_rows=PYDOCS_ROWS)[1]]


def _bos(config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token to put before each window."""
    wanted = config.bos
    if wanted is None:
        wanted = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    require(
        not wanted or tokenizer.bos_token_id is not None,
        "bos=true, and this tokenizer has no first token; leave bos out",
    )
    return tokenizer.bos_token_id if wanted else None


@dataclass(frozen=True)
class Prompts:
    """Questions as people see them, and as token ids, through the chat template where there is one."""

    source: str
    texts: list[str]
    rows: list[list[int]]

    @classmethod
    def of(cls, config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> "Prompts":
        """raises  UserError naming a line that holds no prompt"""
        found, source = [], "pydocs: held-out questions"
        if config.prompts is not None:
            source = Path(config.prompts).name
            lines = read_jsonl(Path(config.prompts), limit=config.num_prompts)
            found = [_messages(record, where) for where, record in lines]
        elif config.num_prompts:
            found = [[{"role": "user", "content": prompt}] for prompt, _ in _pydocs()[: config.num_prompts]]
        rows = [chat_ids(tokenizer, messages) for messages in found]
        return cls(source, [messages[-1]["content"] for messages in found], rows)


def _messages(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    if isinstance(record.get("messages"), list) and record["messages"]:
        turns = record["messages"]
        # A conversation that ends with its answer is asked up to it.
        turns = turns[:-1] if turns[-1].get("role") == "assistant" else turns
        require(bool(turns) and all(isinstance(turn.get("content"), str) for turn in turns), f"{where}: no question")
        return turns
    text = next((record[name] for name in ("prompt", "question", "instruction") if name in record), None)
    require(
        isinstance(text, str) and bool(text.strip()),
        f"{where}: no prompt; give prompt, question or messages, found {', '.join(sorted(record)) or 'nothing'}",
    )
    return [{"role": "user", "content": text}]


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """A conversation up to where the answer begins; without a chat template, its texts with empty lines between."""
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(turn["content"] for turn in messages) + "\n\n")["input_ids"]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def read_jsonl(path: Path, *, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """(file and line, object) of the lines, blank ones left out.

    raises  UserError naming a line that is no JSON object, or a file without any
    """
    found = list(_objects(path, limit))
    require(bool(found) or limit == 0, f"{path} holds no line")
    return found


def _objects(path: Path, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    count = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or (limit is not None and count >= limit):
                continue
            count += 1
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is no JSON: {error}") from None
            require(isinstance(record, dict), f"{path}, line {number} is no JSON object; give one a line")
            yield f"{path}, line {number}", record
