"""Raw rows to tokens with a real tokenizer: alone and in workers, as a table and as a stream."""

import json
import pickle
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trainer.config.data import DataConfig, DataSource, SourceConfig
from trainer.config.preference import Method
from trainer.data.reading.readers import Reader, open_reader
from trainer.data.shaping.shapes import make_shaper
from trainer.data.streams.stream import StreamSteps
from trainer.data.table import read_table, write_table
from trainer.data.tokenizer_pool import tokenize_all
from trainer.data.tokenizing import RowTokenizer
from trainer.sources.tiny import tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [{"prompt": f"Count to {row}", "completion": "1 " * (1 + row % 9)} for row in range(25)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def config(path: Path) -> DataConfig:
    streaming = {"streaming": True, "shuffle_buffer": 10}
    return DataConfig(source=DataSource.file, path=str(path), max_seq_len=128, packing=True, **streaming)


@pytest.fixture(scope="module")
def reader(path: Path) -> Reader:
    return open_reader(SourceConfig(path=str(path)), max_row_bytes=1000)


@pytest.fixture(scope="module")
def tokenizing(reader: Reader, config: DataConfig) -> RowTokenizer:
    first = next(reader.raw())
    shaper = make_shaper(reader.parse(first), first.where, config.sources()[0], Method.none)
    return RowTokenizer(reader, shaper, AutoTokenizer.from_pretrained(tiny_model()), config)


def test_a_table_is_the_same_with_workers(
    reader: Reader, tokenizing: RowTokenizer, config: DataConfig, tmp_path: Path
) -> None:
    tables = []
    for name, results in {
        "lists": map(tokenizing, reader.raw()),
        "alone": tokenize_all(tokenizing, reader.raw(), num_workers=0),
        "worker": tokenize_all(tokenizing, reader.raw(), num_workers=1),
    }.items():
        (tmp_path / name).mkdir()
        write_table(tmp_path / name, results, "prompt/completion", config)
        tables.append(read_table(tmp_path / name))
    assert len(tables[0].rows) == 25
    assert tables[0].rows[:] == tables[1].rows[:] == tables[2].rows[:]
    assert tables[0].sha256 == tables[1].sha256 == tables[2].sha256


def test_a_stream_gives_what_the_tokenizer_gives_and_resumes(
    reader: Reader, tokenizing: RowTokenizer, config: DataConfig, path: Path
) -> None:
    def steps() -> StreamSteps:
        run = dict(seed=0, rank=0, world_size=1, batch_size=1, grad_accum_steps=1, max_steps=30)
        return StreamSteps([reader], [pickle.loads(pickle.dumps(tokenizing))], config, **run)

    uninterrupted = steps()
    whole = [uninterrupted.micro_batches(step) for step in range(30)]
    rows = [row for step in whole for micro in step for row in micro]
    assert sorted(row["origin"] for row in rows[:25]) == sorted(f"{path}:{row}" for row in range(1, 26))
    expected = {raw.where: tokenizing(raw)[0] for raw in reader.raw()}
    for row in rows:
        assert all(row[name] == expected[row["origin"]][name] for name in ("input_ids", "labels", "content"))
    begun, resumed = steps(), steps()
    for step in range(17):
        begun.micro_batches(step)
    resumed.restore(json.loads(json.dumps(begun.state())), 17)
    assert [resumed.micro_batches(step) for step in range(17, 30)] == whole[17:]
