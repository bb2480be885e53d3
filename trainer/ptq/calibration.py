"""Calibration: the token ids that show a model's layers what their inputs look like, and whether they can.

Rows come from several sources in equal parts (`data=pydocs,mine.jsonl`); text files are cut into rows of one length.
The last rows of each are held out: on them the result is compared with the 16-bit model. What cannot be right for all
uses is said and not refused: too few tokens for the widest layer, rows that show no context, text that the model does
not know.
"""

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from trainer.config.data import ColumnsConfig, DataConfig, DataSource
from trainer.config.errors import UserError, require
from trainer.config.ptq import PtqConfig
from trainer.data.dataset import load_rows
from trainer.data.loader import BatchPlan
from trainer.data.rows import Row

log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_TOKENS_A_FEATURE = 8
"""Fewer tokens than so many times the widest layer's inputs leave X^T X of GPTQ to its damping."""
SHORT_ROW = 32
"""Tokens of a median row under which attention has hardly anything to look back at."""
FOREIGN_LOSS = 6.0
"""Nats a token of the 16-bit model over which the text is none of its own (a perplexity of 400)."""


@dataclass(frozen=True)
class Calibration:
    """rows are calibrated on, held_out is compared on: two token ids or more each; neither is empty."""

    rows: list[list[int]]
    held_out: list[list[int]]
    description: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))


def load_calibration(config: PtqConfig, tokenizer: PreTrainedTokenizerBase) -> Calibration:
    """The rows that `data`, `rows`, `max_seq_len`, `eval_rows` and `seed` describe.

    raises  UserError for a file that cannot be read, or has too few rows
    """
    sources = config.data.split(",")
    rows: list[list[int]] = []
    held_out: list[list[int]] = []
    for place, source in enumerate(sources):
        share = _share(config.rows, place, len(sources)), _share(config.eval_rows, place, len(sources))
        some, others = _load(source, config, tokenizer, *share)
        rows += some
        held_out += others
    names = [Path(source).name for source in sources]
    num_tokens = sum(map(len, rows))
    return Calibration(rows, held_out, f"{len(rows)} rows, {num_tokens} tokens of {' and '.join(names)}")


def _share(total: int, place: int, parts: int) -> int:
    """The part of total that a source at this place gives."""
    return max(1, total * (place + 1) // parts - total * place // parts)


def _load(
    source: str, config: PtqConfig, tokenizer: PreTrainedTokenizerBase, num_rows: int, num_held_out: int
) -> tuple[list[list[int]], list[list[int]]]:
    if source.endswith(".txt"):
        rows = _text_rows(Path(source), tokenizer, config.max_seq_len)
        require(
            len(rows) > num_held_out,
            f"data={source} makes {len(rows)} rows of max_seq_len={config.max_seq_len} tokens, and eval_rows="
            f"{num_held_out} are held out; give more text, or fewer or shorter rows",
        )
        return _drawn(rows[:-num_held_out], num_rows, config.seed), rows[-num_held_out:]
    columns = ColumnsConfig(**_columns(config.columns)) if source != "pydocs" else ColumnsConfig()
    path = None if source == "pydocs" else source
    kind = DataSource.pydocs if path is None else DataSource.file
    data = DataConfig(kind, path, columns=columns, eval_rows=num_held_out, max_seq_len=config.max_seq_len)
    rows, held_out = load_rows(data, config.seed)
    drawn = _drawn(rows, num_rows, config.seed)
    parts = ([_ids(row, tokenizer)[: config.max_seq_len] for row in part] for part in (drawn, held_out))
    some, others = ([ids for ids in part if len(ids) > 1] for part in parts)  # one token is followed by nothing
    require(bool(some and others), f"data={source} has only rows of one token; give longer texts")
    return some, others


def _ids(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the model would read; without a chat template, what is said."""
    if row.tokens is not None:
        return row.tokens[0]
    if row.messages is not None and tokenizer.chat_template:
        return tokenizer.apply_chat_template(row.messages, tools=row.tools, return_dict=True)["input_ids"]
    text = row.text if row.messages is None else "\n\n".join(turn["content"] for turn in row.messages)
    return tokenizer(text, verbose=False)["input_ids"]


def _drawn(rows: list[T], num_rows: int, seed: int) -> list[T]:
    """num_rows of them, or all, drawn by the seed."""
    drawn = BatchPlan(len(rows), min(num_rows, len(rows)), 1, 1, seed, max_steps=1).row_ids(0)
    return [rows[row] for row in drawn]


def _text_rows(path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
    """The text in rows of one length; what is left at the end is dropped."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data={path} is not UTF-8 at byte {error.start + 1}; save it as UTF-8") from None
    ids = tokenizer(text, verbose=False)["input_ids"]
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]


def _columns(columns: Sequence[str]) -> dict[str, str]:
    given = dict(item.partition("=")[::2] for item in columns)
    known = ("messages", "prompt", "completion", "text")
    for name, value in given.items():
        require(
            name in known and bool(value), f"columns has {name}={value}; write e.g. columns=['prompt=question'] with "
            f"one of {', '.join(known)}"
        )  # fmt: skip
    return given


def warn_of_calibration(calibration: Calibration, *, widest: int, loss: float) -> list[str]:
    """Say what is doubtful about the rows, and return it.

    widest  input features of the widest layer
    loss    of the 16-bit model on the held-out rows, nats a token
    """
    said = []
    if calibration.num_tokens < MIN_TOKENS_A_FEATURE * widest:
        said.append(
            f"{calibration.num_tokens} tokens of calibration for layers of {widest} inputs: too few to tell their "
            f"channels apart; give {MIN_TOKENS_A_FEATURE * widest} or more (rows, max_seq_len)"
        )
    median = statistics.median(map(len, calibration.rows))
    if median < SHORT_ROW:
        said.append(
            f"half of the calibration's rows have {median:.0f} tokens or fewer: attention is hardly used; give longer "
            "texts"
        )
    if loss > FOREIGN_LOSS:
        said.append(
            f"the 16-bit model's loss on this text is {loss:.2f} nats a token: it is none that the model knows; "
            "calibrate on what it will be asked"
        )
    for line in said:
        log.warning("data     %s", line)
    return said
