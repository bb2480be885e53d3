"""A run's rows as it would train on them, and what it would leave out or refuse; nothing here stops at a bad row."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig, OnBadRow
from trainer.config.errors import UserError
from trainer.config.preference import Method
from trainer.data.dataset import load_data, open_table
from trainer.data.inspection.counts import row_hashes
from trainer.data.inspection.documents import origins
from trainer.data.opening import OpenedSources, open_sources
from trainer.data.rows import BadRow
from trainer.data.table import Report, Table, judge

MAX_LISTED = 100


@dataclass(frozen=True)
class Gathered:
    """What a run would see."""

    train: Dataset
    held_out: Dataset
    sizes: list[int]
    """Rows of `train` that are each source's, in order."""
    names: list[str]
    """Of the sources, in order."""
    reports: dict[str, Report]
    """By name; the last one of what is held out, where that is a source of its own."""
    bad: list[BadRow]
    copies: int
    """Training rows that were dropped, for a held-out row says the same."""
    copied: list[str]
    """The first of their places."""
    refusals: list[str]
    """What training would stop at."""


def gather(config: DataConfig, method: Method, tokenizer: PreTrainedTokenizerBase, seed: int) -> Gathered:
    """Tokenize what `config` names, or map what a run tokenized before.

    config  of a stream, the first `shuffle_buffer` rows of each source are taken
    seed    chooses the held-out rows
    raises  UserError where a source cannot be opened or has no row that is one
    """
    lenient = replace(config, on_bad_row=OnBadRow.skip)
    opened = open_sources(lenient, method)
    if config.streaming:
        opened = _first_rows(opened, config.shuffle_buffer)
        lenient = replace(lenient, streaming=False)
    tables = {each.reader.name: open_table(each, lenient, tokenizer) for each in opened.train}
    refusals = [text for name, table in tables.items() if (text := _refusal(table, name, config))]
    names = [each.reader.name for each in opened.train]
    try:
        data = load_data(lenient, method, tokenizer, seed, opened=opened)
    except UserError as error:
        return _all_rows(tables, names, [*refusals, str(error)])
    copied = _copied(list(tables.values()), data.train, data.held_out) if data.copies else []
    return Gathered(data.train, data.held_out, data.sizes, names, data.reports, data.bad, data.copies, copied, refusals)


def _first_rows(opened: OpenedSources, limit: int) -> OpenedSources:
    train = [
        replace(each, source=replace(each.source, max_rows=min(limit, each.source.max_rows or limit)))
        for each in opened.train
    ]
    return replace(opened, train=train)


def _refusal(table: Table, name: str, config: DataConfig) -> str | None:
    try:
        judge(table, name, config)
    except UserError as error:
        return str(error)
    return None


def _all_rows(tables: dict[str, Table], names: list[str], refusals: list[str]) -> Gathered:
    """Rows that no run takes: too few, or all of them copies of what is held out."""
    train = concatenate_datasets([tables[name].rows for name in names])
    reports = {name: table.report for name, table in tables.items()}
    bad = [fault for table in tables.values() for fault in table.bad]
    sizes = [len(tables[name].rows) for name in names]
    return Gathered(train, train.select([]), sizes, names, reports, bad, 0, [], refusals)


def _copied(tables: list[Table], train: Dataset, held_out: Dataset) -> list[str]:
    """Places of rows that equal a held-out row and are neither held out nor trained on."""
    seen, held = row_hashes(held_out), set(held_out["origin"][:])
    found: list[str] = []
    for table in tables:
        places = np.flatnonzero(np.isin(row_hashes(table.rows), seen))
        found += [origin for origin in origins(table.rows, places) if origin not in held]
    kept = train.with_format("arrow").select_columns(["origin"])[:]["origin"]
    trained = pc.is_in(pa.array(found), value_set=kept.combine_chunks()).to_pylist() if found else []
    return [origin for origin, is_trained in zip(found, trained, strict=True) if not is_trained][:MAX_LISTED]
