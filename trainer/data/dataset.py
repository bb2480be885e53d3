"""What a run trains on and what it is held to: the sources' tables, without what both would see.

The last stop before the order of rows. Whole source rows are held out, so that no two parts of one conversation lie on
both sides; a training row that says what a held-out one says is dropped.
"""

import hashlib
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig
from trainer.config.errors import require
from trainer.config.preference import Method
from trainer.data.opening import OpenedSource, OpenedSources, open_sources, read_examples
from trainer.data.preference import with_mismatched
from trainer.data.rendering.chat import Renderer
from trainer.data.rows import BadRow, Example, content_hash
from trainer.data.shown import marked
from trainer.data.table import Report, Table, judge, read_table, write_table
from trainer.data.tokenizer_pool import tokenize_all
from trainer.data.tokenizing import RowTokenizer
from trainer.sources.cache import prepare_once

logger = logging.getLogger(__name__)

ROOM = "data"
"""Of the cache."""
UNUSED_DAYS = 30
"""Tables that nobody opened for so long are removed when another is made."""
_NEEDS_BYTES = 64 << 20
_TRAINED_ON = ("input_ids", "labels", "rejected_input_ids", "rejected_labels", "desirable", "origin")


@dataclass(frozen=True)
class LoadedData:
    """Rows of tokens, mapped from disk."""

    train: Dataset
    """`input_ids` and `labels`, lists of int32, and `origin`; of pairs `rejected_input_ids` and `rejected_labels`, of
    labelled answers `desirable` and what KTO compares with (preference.py)."""
    held_out: Dataset
    sizes: list[int]
    """Rows of `train` that are each source's, in order."""
    sha256: str
    """Of all tokens and labels, and of what is held out."""
    reports: dict[str, Report]
    """By the source's name."""
    bad: list[BadRow]
    """What was left out, the first of each source."""
    copies: int
    """Training rows that were dropped, for a held-out row says the same."""

    @property
    def lengths(self) -> np.ndarray:
        """[len(train)] int64: tokens, of both documents where a row is a pair."""
        return row_lengths(self.train)


def row_lengths(rows: Dataset) -> np.ndarray:
    """[len(rows)] int64: tokens, of both documents where a row is a pair."""
    names = [name for name in ("input_ids", "rejected_input_ids") if name in rows.column_names]
    whole = rows.data if rows._indices is None else rows.with_format("arrow").select_columns(names)[:]
    return sum(pc.list_value_length(whole[name]).to_numpy().astype(np.int64) for name in names)


# ---- from settings to rows


def load_data(
    config: DataConfig,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    opened: OpenedSources | None = None,
) -> LoadedData:
    """Tokenize what `config` names, or map what was tokenized before; hold some of it out.

    method   what a row must have: see preference_shapes.py
    seed     chooses the held-out rows where no source of their own is named
    opened   the sources, where they are open already
    raises   UserError with file and line for a row that cannot be used, or when too few rows are left
    """
    opened = opened or open_sources(config, method)
    tables = [open_table(each, config, tokenizer) for each in opened.train]
    names = [each.reader.name for each in opened.train]
    if opened.held_out is None:
        kept, others = _hold_out(tables, names, config, seed)
    else:
        kept = [np.arange(len(each.rows)) for each in tables]
        tables.append(open_table(opened.held_out, config, tokenizer))
        names.append(f"{opened.held_out.reader.name} (held out)")
        others = [tables[-1].rows]
    seen = np.concatenate([column(rows, "content") for rows in others])
    kept, copies = _without_copies(tables, kept, seen, names)
    parts = [_selected(table.rows, indices) for table, indices in zip(tables, kept, strict=False)]
    held_out = trained_on(concatenate_datasets(others))
    train = trained_on(concatenate_datasets(parts))
    sha256 = _sha256(tables, kept, held_out)
    if method is Method.kto:
        limit = config.max_seq_len
        train, held_out = (
            with_mismatched(train, donors=held_out, max_seq_len=limit),
            with_mismatched(held_out, donors=train, max_seq_len=limit),
        )
    logger.info("data     for example: %s", marked(train[0], tokenizer))
    return LoadedData(
        train,
        held_out,
        [len(part) for part in parts],
        sha256,
        {name: table.report for name, table in zip(names, tables, strict=True)},
        [fault for table in tables for fault in table.bad],
        copies,
    )


def trained_on(rows: Dataset) -> Dataset:
    """The columns that training reads."""
    return rows.select_columns([name for name in _TRAINED_ON if name in rows.column_names])


def open_table(opened: OpenedSource, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Table:
    """The source's table, made first if it is not in the cache.

    raises  UserError about a row that cannot be trained on, unless it may be left out
    """
    reader, source = opened.reader, opened.source
    content = reader.sha256()
    key = _key(opened, content, config, tokenizer)

    def build(folder: Path) -> None:
        _forget_unused(folder.parent)
        rows = islice(reader.raw(), source.max_rows)
        row_tokenizer = RowTokenizer(reader, opened.shaper, tokenizer, config)
        write_table(
            folder, tokenize_all(row_tokenizer, rows, num_workers=config.num_workers), opened.shaper.description, config
        )
        # else the table of other rows would be found under this content's key from now on
        require(
            reader.sha256() == content,
            f"{reader.name} changed while it was read; wait until nothing writes to it, and start again",
        )

    folder = prepare_once(key, build, _NEEDS_BYTES, room=ROOM)
    with suppress(OSError):  # another user's, or a disk that is read only
        os.utime(folder)
    table = read_table(folder)
    judge(table, reader.name, config)
    _log(reader.name, table.report, config)
    return table


def _key(opened: OpenedSource, content: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    decides = {
        "content": content,
        "path": opened.source.path,  # which origins begin with
        "max_rows": opened.source.max_rows,
        "max_row_bytes": config.max_row_bytes,
        "shape": [opened.shaper.shape.title, opened.shaper.names, opened.shaper.needed],
        "renderer": Renderer(tokenizer, config).fingerprint(),
        "code": _code_sha256(),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _code_sha256() -> str:
    """Of this room and those in it that make rows of tokens: a table of an older version is not read."""
    room, digest = Path(__file__).parent, hashlib.sha256()
    for pattern in ("*.py", "reading/*.py", "shaping/*.py", "rendering/*.py"):
        for path in sorted(room.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _forget_unused(room: Path) -> None:
    for folder in room.glob("[!.]*"):
        with suppress(FileNotFoundError):  # another process removes it as well
            if time.time() - folder.stat().st_mtime > UNUSED_DAYS * 86400:
                logger.info("cache    %s was not used for %d days and is removed", folder, UNUSED_DAYS)
                shutil.rmtree(folder, ignore_errors=True)


def _log(name: str, report: Report, config: DataConfig) -> None:
    logger.info(
        "data     %s: %d rows of %s, %d tokens, %d of them targets; longest %d (%s)%s",
        *(name, report.source_rows, report.description, report.tokens, report.trained_tokens),
        *(report.longest, report.longest_origin),
        f"; {report.split_rows} rows became several, {report.rows} in all" if report.split_rows else "",
    )
    if report.truncated_rows:
        logger.warning(
            "data     %s: %d of %d rows are longer than data.max_seq_len=%d and lose their end, %d tokens in all, so a "
            "model does not learn how they end; data.max_seq_len=%d holds the longest, data.on_long_row=skip or error",
            *(name, report.truncated_rows, report.rows, config.max_seq_len, report.lost_tokens),
            report.longest_uncut,
        )
    if report.special_rows:
        logger.warning(
            "data     %s: %d of %d rows hold special tokens in what is said (%s); a model reads them as the chat "
            "template's own, so that turns end or begin where nobody ended them; remove them, unless they are meant",
            *(name, report.special_rows, report.source_rows, report.special_first),
        )
    if report.bad:
        kinds = ", ".join(f"{number} {kind}" for kind, number in report.bad.items())
        logger.warning("data     %s: %d rows left out: %s", name, sum(report.bad.values()), kinds)


def load_rows(config: DataConfig, seed: int) -> tuple[list[Example], list[Example]]:
    """Rows to train on and held-out rows as they are said, in memory: for calibrations and studies.

    The same rows as those of `load_data`, but that nothing is dropped for its length or its template.
    """
    opened = open_sources(config, Method.none)
    rows = [row for source in opened.train for row in read_examples(source)]
    if opened.held_out is not None:
        held_out = list(read_examples(opened.held_out))
    else:
        require(len(rows) >= 2, f"{config.path} has 1 row; one more is needed to hold out, or set data.eval_path")
        drawn = _drawn(len(rows), config.eval_rows, seed)
        held_out = [row for row, is_held_out in zip(rows, drawn, strict=True) if is_held_out]
        rows = [row for row, is_held_out in zip(rows, drawn, strict=True) if not is_held_out]
    seen = {content_hash(row) for row in held_out}
    return [row for row in rows if content_hash(row) not in seen], held_out


# ---- what is held out


def _hold_out(
    tables: Sequence[Table], names: Sequence[str], config: DataConfig, seed: int
) -> tuple[list[np.ndarray], list[Dataset]]:
    """Which rows of each table are trained on, and the held-out rows, chosen by `seed`."""
    numbers = [column(table.rows, "row") for table in tables]
    counts = [int(each[-1]) + 1 for each in numbers]
    total = sum(counts)
    require(total >= 2, f"{names[0]} has 1 row; one more is needed to hold out, or set data.eval_path")
    held_out = _drawn(total, config.eval_rows, seed)
    ends = np.cumsum(counts)
    is_held_out = [held_out[end - count : end][each] for end, count, each in zip(ends, counts, numbers, strict=True)]
    logger.info("data     %d rows held out for evaluation (seed %d)", held_out.sum(), seed)
    return (
        [np.flatnonzero(~each) for each in is_held_out],
        [table.rows.select(np.flatnonzero(each)) for table, each in zip(tables, is_held_out, strict=True)],
    )


def _drawn(total: int, eval_rows: int, seed: int) -> np.ndarray:
    """[total] bool: what is held out, a tenth of all at most."""
    draw = random.Random(seed).random  # the one method whose sequence Python promises to keep
    draws = np.fromiter((draw() for _ in range(total)), np.float64, total)
    held_out = np.zeros(total, bool)
    held_out[np.argsort(draws, kind="stable")[-min(eval_rows, max(1, total // 10)) :]] = True
    return held_out


def _without_copies(
    tables: Sequence[Table], kept: Sequence[np.ndarray], seen: np.ndarray, names: Sequence[str]
) -> tuple[list[np.ndarray], int]:
    """Training rows that do not say what a held-out row says, and how many did."""
    done, copies = [], 0
    for table, indices, name in zip(tables, kept, names, strict=False):
        is_copy = np.isin(column(table.rows, "content")[indices], seen)
        if is_copy.any():
            logger.info("data     %s: %d rows dropped, being copies of held-out rows", name, is_copy.sum())
        copies += int(is_copy.sum())
        done.append(indices[~is_copy])
    require(
        any(map(len, done)),
        f"{names[0]}: every row is a copy of a held-out row; give other rows, or another data.eval_path",
    )
    return done, copies


def column(rows: Dataset, name: str) -> np.ndarray:
    """A column of numbers."""
    if rows._indices is None:
        return rows.data[name].to_numpy()
    return rows.with_format("arrow").select_columns([name])[:][name].to_numpy()


def _selected(rows: Dataset, indices: np.ndarray) -> Dataset:
    return rows if len(indices) == len(rows) else rows.select(indices)


def _sha256(tables: Sequence[Table], kept: Sequence[np.ndarray], held_out: Dataset) -> str:
    digest = hashlib.sha256(" ".join(table.sha256 for table in tables).encode())
    for indices in kept:
        digest.update(len(indices).to_bytes(8, "little") + indices.astype(np.int64).tobytes())
    digest.update(len(held_out).to_bytes(8, "little"))
    return digest.hexdigest()
