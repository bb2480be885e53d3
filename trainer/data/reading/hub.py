"""Datasets on the hub, through `datasets`: as a table on disk, or over the network as they are read.

Columns of images, sounds and the like are left aside before anything decodes them. Arrow's nulls within structs are
dropped as parquet_rows.py says.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import datasets
import httpx
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from huggingface_hub.errors import HfHubHTTPError

from trainer.config.errors import UserError
from trainer.data.reading.parquet_rows import without_fill_ins
from trainer.data.reading.raw_rows import Position, RawRow

_FAULTS = (DatasetsError, HfHubHTTPError, httpx.HTTPError, OSError, ValueError, RuntimeError)
"""What `datasets` raises for what the hub, the network or a user's keys cause."""
_SHOWN_CHARS = 400

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubReader:
    """Rows `org/name[train]:row`, counted from 1."""

    path: str
    config: str | None
    split: str
    revision: str | None
    streaming: bool = False

    @property
    def name(self) -> str:
        return f"{self.path}[{self.split}]"

    def sha256(self) -> str:
        """The hash of what `datasets` knows the rows by: a table's fingerprint; the versions of a stream's files."""
        with self._explained():
            if self.streaming:
                builder = datasets.load_dataset_builder(self.path, self.config, revision=self.revision)
                known = [builder.hash, builder.config_id, self.split]
            else:
                known = [self._load()._fingerprint]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        with self._explained():
            dataset = _without_media(self._load(), self.name)
        return self._stream(dataset, start) if self.streaming else self._table(dataset, start["row"] if start else 0)

    def _table(self, dataset: Dataset, first: int) -> Iterator[RawRow]:
        rows = dataset.select(range(first, dataset.num_rows)) if first < dataset.num_rows else ()
        for row, record in enumerate(rows, start=first + 1):
            yield RawRow(f"{self.name}:{row}", record, {"row": row})

    def _stream(self, dataset: IterableDataset, start: Position | None) -> Iterator[RawRow]:
        """A position holds the stream's own state, which goes on without reading what lies before it."""
        row = start["row"] if start else 0
        if start:
            dataset.load_state_dict(copy.deepcopy(start["state"]))
        records = iter(dataset)
        while True:
            with self._explained():
                record = next(records, None)
            if record is None:
                return
            row += 1
            yield RawRow(f"{self.name}:{row}", record, {"row": row, "state": dataset.state_dict()})

    def parse(self, row: RawRow) -> dict[str, Any]:
        return without_fill_ins(row.raw)

    def _load(self) -> Dataset | IterableDataset:
        return datasets.load_dataset(
            self.path, self.config, split=self.split, revision=self.revision, streaming=self.streaming
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except _FAULTS as error:
            what = _one_line(error)
            raise UserError(f"data.path={self.path} on the hub: {what.rstrip('.')}; {_next_step(what)}") from error


def _one_line(error: BaseException) -> str:
    """What an error says, or its cause, where it only says that something failed; without examples in Python."""
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(error).partition("Example of usage")[0].split())
    return said[:_SHOWN_CHARS] or type(error).__name__


def _next_step(what: str) -> str:
    """What to do about an error of `datasets`, told by its words."""
    said = what.lower()
    for words, step in _STEPS.items():
        if any(word in said for word in words):
            return step
    return "check the name, the network and HF_TOKEN, or download the files and use data=file"


_STEPS = {
    ("gated dataset", "authenticated", "unauthorized", "forbidden"): (
        "accept its terms on its page, then set HF_TOKEN to a token that may read it"
    ),
    ("offline mode", "couldn't reach"): (
        "check the network, unset HF_HUB_OFFLINE, or download the files and use data=file"
    ),
    ("bad split", "unknown split"): "set data.split to one that is there",
    ("builderconfig", "config name is missing"): "set data.name to one that is there",
    ("revision",): "set data.revision to a branch, tag or commit that is there",
    ("scripts are no longer supported",): "use a copy of it in Parquet, as a rule data.revision=refs/convert/parquet",
}


def _without_media(dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    media = [column for column, feature in (dataset.features or {}).items() if _is_media(feature)]
    if media:
        logger.info("%s: the columns %s hold no text and are left aside", name, ", ".join(media))
        if isinstance(dataset, IterableDataset):
            dataset = dataset.decode(False)
        dataset = dataset.remove_columns(media)
    return dataset


def _is_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(_is_media(inner) for inner in feature.values())
    inner = getattr(feature, "feature", None)
    is_decoded = hasattr(feature, "decode_example") and type(feature).__name__ != "Json"
    return is_decoded or (inner is not None and _is_media(inner))
