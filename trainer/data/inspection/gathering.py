"""A run's rows as it would train on them, and what it would leave out or refuse; nothing here stops at a bad row."""

from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig, OnBadRow
from trainer.config.errors import UserError
from trainer.config.preference import Method
from trainer.data.dataset import column, load_data, open_table, trained_on
from trainer.data.inspection.chunks import origins
from trainer.data.inspection.counts import row_hashes
from trainer.data.opening import OpenedSource, OpenedSources, open_sources
from trainer.data.rows import BadRow
from trainer.data.streams.loading import load_stream
from trainer.data.table import MAX_LISTED as LISTED_BY_TABLE
from trainer.data.table import Report, Table, judge, read_table, write_table
from trainer.data.tokenizer_pool import tokenize_all
from trainer.data.tokenizing import RowTokenizer

MAX_LISTED = 100
EXCERPT_CHARS = 300


@dataclass(frozen=True)
class Gathered:
    """What a run would see."""

    train: Dataset
    held_out: Dataset
    sizes: list[int]
    """Rows of `train` that are each source's, in order."""
    names: list[str]
    """Of the sources, in order."""
    held_out_names: list[str]
    """The source of each row of `held_out`."""
    reports: dict[str, Report]
    """By name; the last one of what is held out, where that is a source of its own."""
    bad: list[BadRow]
    copies: int = 0
    """Training rows that are dropped, for a held-out row says the same."""
    copied: tuple[str, ...] = ()
    """The first of their places."""
    refusals: tuple[str, ...] = ()
    """What training would stop at."""
    first_rows: int | None = None
    """Of a stream: so many source rows of each source were looked at, and no more."""
    excerpts: dict[str, str] = field(default_factory=dict)
    """Place of a bad row, of the first of them -> how its raw row begins."""

    @property
    def bad_names(self) -> list[str]:
        """The source of each of `bad`."""
        counts = {name: min(sum(report.bad.values()), LISTED_BY_TABLE) for name, report in self.reports.items()}
        return [name for name, count in counts.items() for _ in range(count)]


def gather(config: DataConfig, method: Method, tokenizer: PreTrainedTokenizerBase, seed: int) -> Gathered:
    """Tokenize what `config` names, or map what a run tokenized before.

    config  of a stream, the first `shuffle_buffer` rows of each source are taken, and nothing is kept on disk
    seed    chooses the held-out rows
    raises  UserError where a source cannot be opened or has no row that is one
    """
    lenient = replace(config, on_bad_row=OnBadRow.skip)
    opened = open_sources(lenient, method)
    if config.streaming:
        return _of_streams(opened, config, lenient, method, tokenizer, seed)
    tables = [open_table(each, lenient, tokenizer) for each in opened.train]
    names = [each.reader.name for each in opened.train]
    refusals = _refusals(opened, tables, config)
    if opened.held_out is not None:
        held_out = [open_table(opened.held_out, lenient, tokenizer)]
        refusals += _refusals(OpenedSources([opened.held_out], None), held_out, config)
    try:
        data = load_data(lenient, method, tokenizer, seed, opened=opened)
    except UserError as error:
        return _all_rows(tables, names, (*refusals, str(error)))
    copied = _copied(tables, data.train, data.held_out) if data.copies else ()
    held_out_names = _names_of(data.held_out, tables, names, list(data.reports)[-1])
    return Gathered(
        *(data.train, data.held_out, data.sizes, names, held_out_names, data.reports, data.bad),
        *(data.copies, copied, refusals, None, _excerpts(opened, data.bad)),
    )


def _refusals(opened: OpenedSources, tables: list[Table], config: DataConfig) -> tuple[str, ...]:
    found = []
    for table, each in zip(tables, opened.train, strict=True):
        try:
            judge(table, each.reader.name, config)
        except UserError as error:
            found.append(str(error))
    return tuple(found)


def _all_rows(tables: list[Table], names: list[str], refusals: tuple[str, ...]) -> Gathered:
    """Rows that no run takes: too few, or all of them copies of what is held out."""
    train = concatenate_datasets([table.rows for table in tables])
    reports = {name: table.report for name, table in zip(names, tables, strict=True)}
    bad = [fault for table in tables for fault in table.bad]
    sizes = [len(table.rows) for table in tables]
    return Gathered(train, train.select([]), sizes, names, [], reports, bad, refusals=refusals)


def _names_of(held_out: Dataset, tables: list[Table], names: list[str], other: str) -> list[str]:
    """The source of each held-out row; `other` where it is in none of the tables."""
    places = pa.array(held_out["origin"][:])
    found = np.full(len(held_out), other, dtype=object)
    for table, name in zip(tables, names, strict=True):
        is_here = pc.is_in(places, value_set=_origins(table.rows)).to_numpy(zero_copy_only=False)
        found[is_here] = name
    return found.tolist()


def _copied(tables: list[Table], train: Dataset, held_out: Dataset) -> tuple[str, ...]:
    """Places of rows that equal a held-out row and are neither held out nor trained on."""
    seen, others = row_hashes(held_out), set(held_out["origin"][:])
    found: list[str] = []
    for table in tables:
        places = np.flatnonzero(np.isin(row_hashes(table.rows), seen))
        found += [origin for origin in origins(table.rows, places) if origin not in others]
    is_trained = pc.is_in(pa.array(found, pa.string()), value_set=_origins(train)).to_pylist()
    return tuple(origin for origin, trained in zip(found, is_trained, strict=True) if not trained)[:MAX_LISTED]


def _origins(rows: Dataset) -> pa.Array:
    whole = rows.with_format("arrow").select_columns(["origin"])[:]["origin"]
    return whole.combine_chunks() if isinstance(whole, pa.ChunkedArray) else whole


def _excerpts(opened: OpenedSources, bad: list[BadRow]) -> dict[str, str]:
    """How the raw rows begin that the first of `bad` are about; the sources are read up to the last of them."""
    # An error in a line may add the column: `train.jsonl:12:7`.
    first = [fault.where for fault in bad[:MAX_LISTED]]
    wanted = {place: where for where in first for place in (where, where.rpartition(":")[0])}
    found: dict[str, str] = {}
    for each in (*opened.train, *([opened.held_out] if opened.held_out else [])):
        for raw in islice(each.reader.raw(), each.source.max_rows):
            if raw.where in wanted:
                found[wanted[raw.where]] = _beginning(raw.raw)
            if len(found) == len(first):
                return found
    return found


def _beginning(raw: Any) -> str:
    if isinstance(raw, BadRow):
        return ""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw if isinstance(raw, str) else repr(raw)
    return text if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]} ..."


# ---- streams


def _of_streams(
    opened: OpenedSources,
    config: DataConfig,
    lenient: DataConfig,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Gathered:
    tables = [_first_rows(each, lenient, tokenizer) for each in opened.train]
    names = [each.reader.name for each in opened.train]
    refusals = _refusals(opened, tables, config)
    stream = load_stream(lenient, method, tokenizer, seed, opened=opened)
    held = set(stream.held_out["origin"][:])
    parts, copied = [], []
    for table in tables:
        is_seen = np.isin(column(table.rows, "content"), list(stream.held_out_contents))
        parts.append(trained_on(table.rows.select(np.flatnonzero(~is_seen))))
        copied += [place for place in origins(table.rows, np.flatnonzero(is_seen)) if place not in held]
    other = names[0] if opened.held_out is None else f"{opened.held_out.reader.name} (held out)"
    return Gathered(
        *(concatenate_datasets(parts), stream.held_out, [len(part) for part in parts], names),
        _names_of(stream.held_out, tables, names, other),
        {name: table.report for name, table in zip(names, tables, strict=True)},
        bad := [fault for table in tables for fault in table.bad],
        *(len(copied), tuple(copied[:MAX_LISTED]), refusals, config.shuffle_buffer, _excerpts(opened, bad)),
    )


def _first_rows(opened: OpenedSource, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Table:
    """The table of a stream's beginning. Its file is removed at once; it stays mapped as long as it is looked at."""
    limit = min(config.shuffle_buffer, opened.source.max_rows or config.shuffle_buffer)
    rows = islice(opened.reader.raw(), limit)
    row_tokenizer = RowTokenizer(opened.reader, opened.shaper, tokenizer, config)
    with TemporaryDirectory() as folder:
        tokenized = tokenize_all(row_tokenizer, rows, num_workers=config.num_workers)
        write_table(Path(folder), tokenized, opened.shaper.description, config)
        return read_table(Path(folder))
