"""Datasets through the library of that name: from a local folder, which it loads as the hub's, and its errors."""

import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import httpx
import pytest
from datasets import Features, Image, List, Value
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from trainer.config.data import DataSource, SourceConfig
from trainer.config.errors import UserError
from trainer.data.reading.hub import HubReader
from trainer.data.reading.readers import open_reader

ROWS = [{"text": f"row {i}", "turns": [{"a": i}] if i % 2 else [{"b": "x"}]} for i in range(25)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    folder = tmp_path / "chats"
    folder.mkdir()
    for part in range(2):
        # List[struct] with fill-ins of null, in row groups of 4.
        table = datasets.Dataset.from_list(ROWS[13 * part : 13 * part + 13])
        table.to_parquet(folder / f"train-0000{part}-of-00002.parquet", batch_size=4)
    datasets.Dataset.from_list(ROWS[:3]).to_parquet(folder / "test.parquet")
    return folder


def open_hub(path: object, *, streaming: bool = False, **keys: Any) -> HubReader:
    source = SourceConfig(path=str(path), source=DataSource.hub, **keys)
    return open_reader(source, max_row_bytes=1 << 20, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_and_going_on(tmp_path: Path, folder: Path, streaming: bool) -> None:
    reader = pickle.loads(pickle.dumps(open_hub(folder, streaming=streaming)))
    assert reader.name == f"{folder}[train]"
    rows = list(reader.raw())
    assert [reader.parse(row) for row in rows] == ROWS
    assert [row.where for row in rows] == [f"{folder}[train]:{number}" for number in range(1, 26)]
    for index in (0, 3, 4, 11, 12, 13, 23, 24):
        again = list(reader.raw(json.loads(json.dumps(rows[index].behind))))
        assert [(row.where, row.raw) for row in again] == [(row.where, row.raw) for row in rows[index + 1 :]]
        if again:  # a place behind a place that was gone on from
            assert [row.raw for row in reader.raw(again[0].behind)] == [row.raw for row in rows[index + 2 :]]


@pytest.mark.parametrize("streaming", [False, True])
def test_hashes(folder: Path, streaming: bool) -> None:
    first = open_hub(folder, streaming=streaming).sha256()
    assert open_hub(folder, streaming=streaming).sha256() == first
    assert open_hub(folder, streaming=streaming, split="test").sha256() != first
    datasets.Dataset.from_list(ROWS[:2]).to_parquet(folder / "train-00001-of-00002.parquet")  # another file
    assert open_hub(folder, streaming=streaming).sha256() != first


@pytest.mark.parametrize("streaming", [False, True])
def test_images_are_not_decoded(folder: Path, streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    for path in folder.iterdir():
        path.unlink()
    features = Features({"text": Value("string"), "image": Image(decode=False), "more": List(Image(decode=False))})
    picture = {"bytes": b"no picture", "path": None}
    rows = {"text": ["one", "two"], "image": [picture, picture], "more": [[picture], []]}
    shown = datasets.Dataset.from_dict(rows, features=features)
    shown = shown.cast(Features({"text": Value("string"), "image": Image(), "more": List(Image())}))
    shown.to_parquet(folder / "train.parquet")
    reader = open_hub(folder, streaming=streaming)
    with caplog.at_level(logging.INFO, "trainer"):
        assert [reader.parse(row) for row in reader.raw()] == [{"text": "one"}, {"text": "two"}]
    assert f"{reader.name}: the columns image, more hold no text and are left aside" in caplog.messages


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_or_configuration_that_is_not_there(folder: Path, streaming: bool) -> None:
    with pytest.raises(UserError, match=r"on the hub: .*\['train', 'test'\]; set data\.split to one that is there$"):
        list(open_hub(folder, streaming=streaming, split="nope").raw())
    with pytest.raises(UserError, match=r"BuilderConfig 'nope' not found\. .*; set data\.name to one that is there$"):
        list(open_hub(folder, streaming=streaming, name="nope").raw())


def failed(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            DatasetNotFoundError("Dataset 'org/split' doesn't exist on the Hub or cannot be accessed."),
            "check the name, ",
        ),
        (DatasetNotFoundError("Dataset 'org/split' is a gated dataset on the Hub."), "accept its terms .* HF_TOKEN to"),
        (ConnectionError("Couldn't reach 'org/split' on the Hub (OfflineModeIsEnabled)"), ".* unset HF_HUB_OFFLINE"),
        (httpx.ConnectError("Name or service not known"), "check the name, the network and HF_TOKEN, or download"),
        (DatasetNotFoundError("Revision 'x' doesn't exist for dataset 'org/split' on the Hub."), r"set data\.revision"),
        (
            ValueError(
                "Config name is missing.\nPlease pick one among the available configs: ['a', 'b']\nExample of usage:"
                "\n\t`load_dataset('org/split', 'a')`"
            ),
            r"set data\.name to one that is there",
        ),
        (RuntimeError("Dataset scripts are no longer supported, but found split.py"), "use a copy of it in Parquet"),
        (failed(DatasetGenerationError("An error occurred"), OSError("No space left on device")), "check the name"),
    ],
)
def test_errors_of_the_hub(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    reader = open_hub("org/split")
    for use in (reader.sha256, lambda: list(reader.raw())):
        with pytest.raises(UserError, match=rf"^data\.path=org/split on the hub: .*; {message}") as raised:
            use()
        assert "\n" not in str(raised.value) and "Example" not in str(raised.value)


def test_a_network_that_fails_underway(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_rows(_: datasets.IterableDataset) -> Iterator[dict[str, Any]]:
        yield from ROWS[:2]
        raise httpx.ReadTimeout("The read operation timed out")

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", two_rows)
    rows = open_hub(folder, streaming=True).raw()
    assert [next(rows).raw, next(rows).raw] == ROWS[:2]
    with pytest.raises(UserError, match="The read operation timed out; check the name, the network"):
        next(rows)
