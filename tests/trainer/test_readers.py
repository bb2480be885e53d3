"""Reading: no row is lost or repeated wherever reading goes on, and each fault has its place."""

import csv
import gzip
import io
import json
import logging
import pickle
import re
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from trainer.config.data import DataSource, SourceConfig
from trainer.config.errors import UserError
from trainer.data.reading import json_cursor, parquet_rows
from trainer.data.reading.files import split_of
from trainer.data.reading.readers import ListReader, Reader, open_reader
from trainer.data.rows import BadRow

LIMIT = 1 << 16
BOM = b"\xef\xbb\xbf"
some = settings(max_examples=60, deadline=None)


def open_path(path: Path, *, limit: int = LIMIT, split: str = "train") -> Reader:
    return open_reader(SourceConfig(path=str(path), split=split), max_row_bytes=limit)


def read(reader: Reader) -> list[tuple[str, Any]]:
    """Rows: their places, and their fields or what is wrong. Going on from any row gives exactly those behind it."""
    reader = pickle.loads(pickle.dumps(reader))
    rows = list(reader.raw())
    shown = [(row.where, repr(row.raw), row.behind) for row in rows]
    for index, row in enumerate(rows):
        position = json.loads(json.dumps(row.behind))
        assert [(row.where, repr(row.raw), row.behind) for row in reader.raw(position)] == shown[index + 1 :]
    return [(row.where, parsed(reader, row)) for row in rows]


def parsed(reader: Reader, row: Any) -> Any:
    try:
        return reader.parse(row)
    except BadRow as error:
        assert error.where.startswith(row.where) and row.where in str(error)
        return error.kind


def in_file(content: bytes, suffix: str, check: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{suffix}"
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
        check(path)


# ---- JSON Lines

texts = st.text(st.sampled_from('ab"\\{}[],:\n\r\x00\x0b\x85\u2028\u2029é😀 '), max_size=12)
records = st.dictionaries(texts, st.one_of(texts, st.integers(), st.none(), st.lists(texts, max_size=2)), max_size=3)
lines = st.one_of(
    records.map(lambda record: json.dumps(record, ensure_ascii=False).encode()),
    st.sampled_from([b"", b"  ", b"\t", b"[1]", b"{", b'{"a": "\xe9"}', b'{"long": "' + b"x" * 100 + b'"}']),
)


@some
@given(
    st.lists(lines, max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", BOM]),
    st.booleans(),
    st.sampled_from([".jsonl", ".ndjson.gz"]),
)
def test_json_lines(lines: list[bytes], end: bytes, bom: bytes, ended: bool, suffix: str) -> None:
    content = bom + end.join(lines) + (end if ended else b"")

    def check(path: Path) -> None:
        expected = []
        for number, line in enumerate(content.removeprefix(BOM).split(b"\n"), start=1):
            if line.strip():
                expected.append((f"{path}:{number}", by_hand(line)))
        assert read(open_path(path, limit=99)) == expected

    in_file(content, suffix, check)


def by_hand(line: bytes) -> Any:
    if len(line) > 99:
        return "huge row"
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except ValueError:
        return "broken JSON"
    return record if isinstance(record, dict) else "no object"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a", "completion" "b"}', ":2:30: broken JSON: Expecting ':' delimiter; write one complete"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', ":2:1: broken JSON: the key 'b' stands twice in one object"),
        (b"[" * 60_000, ":2:1: broken JSON: "),  # deeper than the parser goes
        (b'{"a": ' + b"1" * 5000 + b"}", ":2:1: broken JSON: Exceeds the limit"),  # more digits than int() takes
        (b"3", ":2: the line is a number, not an object; write one JSON object a line"),
        (b'{"prompt": "caf\xe9"}', ":2: byte 16 (0xe9) is not UTF-8; save the file as UTF-8"),
        (b"x" * (LIMIT + 1), f":2: longer than data.max_row_bytes={LIMIT}; end each row with a newline, or raise"),
    ],
)
def test_faulty_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n{}\n")
    reader = open_path(path)
    first, faulty, last = reader.raw()
    with pytest.raises(BadRow) as error:
        reader.parse(faulty)
    assert str(error.value).startswith(f"{path}{message}")
    assert (reader.parse(first), reader.parse(last)) == ({"a": 1}, {})


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".csv", ".txt"])
def test_a_huge_row_is_never_in_memory(suffix: str) -> None:
    huge = b"x" * (16 << 20)
    row = {".json": b'[{"a": "%s"}]', ".csv": b'a,b\n"%s\n",'}.get(suffix, b"%s") % huge

    def check(path: Path) -> None:
        reader = open_path(path)
        tracemalloc.start()
        (place,) = read(reader)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert place[1] == "huge row"
        assert peak < 6 << 20  # pieces of 1 MiB, of which csv holds two; the row is 16 MiB

    in_file(row, suffix, check)


# ---- lists in .json


@some
@given(
    st.lists(records, max_size=6),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.sampled_from(["%s", '{"v": [1, "]"], "data": %s, "w": [[{}], "}"]}']),
    st.sampled_from([b"", BOM]),
    st.sampled_from([1, 2, 3, 7, 1 << 18]),
)
def test_json_list(
    rows: list[dict[str, Any]], indent: int | None, ascii_only: bool, around: str, bom: bytes, piece: int
) -> None:
    text = around % json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    if around != "%s" and not rows:
        return  # no list of objects
    content = bom + text.encode()

    def check(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_cursor, "_PIECE_BYTES", piece)
            found = read(open_path(path))
        assert [record for _, record in found] == rows
        assert len({where for where, _ in found}) == len(rows)
        assert all(stands_at(content, where.removeprefix(f"{path}:"), row) for where, row in found)

    in_file(content, ".json", check)


def stands_at(content: bytes, place: str, row: dict[str, Any]) -> bool:
    line, _, column = place.partition(":")
    text = b"\n".join(content.split(b"\n")[int(line) - 1 :])
    begins = [int(column) - 1] if column else [match.start() for match in re.finditer(b"{", text.partition(b"\n")[0])]
    return any(begins_with(text[begin:].decode(), row) for begin in begins)


def begins_with(text: str, row: dict[str, Any]) -> bool:
    try:
        return json.JSONDecoder().raw_decode(text)[0] == row
    except ValueError:
        return False


def test_faulty_rows_of_a_list_leave_the_others_be(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1},\n {"a" 1}, 3, tru, "x",\n {"a": "\xe9"}, {"a": "' + b"x" * 40 + b'"},\n{"b": 2}]\n')
    assert read(open_path(path, limit=30)) == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:2", "broken JSON"),
        (f"{path}:2:11", "no object"),
        (f"{path}:2:14", "broken JSON"),
        (f"{path}:2:19", "no object"),
        (f"{path}:3", "not UTF-8"),
        (f"{path}:3:14", "huge row"),
        (f"{path}:4", {"b": 2}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1} {"b": 2}]', ":1:11: broken JSON: no comma between two rows"),
        ('[{"a": 1}', ":1:10: broken JSON: the file ends within its list"),
        ('[{"a": 1},', ":1:11: broken JSON: the file ends within its list"),
        ('[{"a": 1},]', ":1:11: broken JSON: no row where one is expected"),
        ('[{"a": 1}]\n[]', ":2:1: broken JSON: text behind the list"),
        ('[{"a": 1},\n {"a": "x]', ":2: the file ends within this row"),
        (
            '{"a": [{}],\n"b": [{}]}',
            " is one object with the fields a, b, of which 2 are lists of objects; give a list",
        ),
        ('{"a":\n3}', " is one object with the fields a, of which 0 are lists of objects"),
    ],
)
def test_files_that_are_no_list(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read(open_path(path))
    assert str(error.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("content", ['{"v": 1}\n{"v": [{}]}\n', '{"messages": [{"role": "user"}]}', '{"v": 1}'])
def test_json_lines_under_another_name(tmp_path: Path, content: str) -> None:
    for name in ("a.json", "a.unknown"):
        (tmp_path / name).write_text(content)
        found = read(open_path(tmp_path / name))
        assert [record for _, record in found] == [json.loads(line) for line in content.splitlines()]


# ---- CSV


@some
@given(
    st.lists(st.lists(texts, min_size=2, max_size=2), max_size=6),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([b"", BOM]),
    st.booleans(),
    st.sampled_from([".csv", ".tsv", ".csv.gz"]),
)
def test_csv(rows: list[list[str]], quoting: int, end: str, bom: bytes, ended: bool, suffix: str) -> None:
    written = io.StringIO(newline="")
    writer = csv.writer(
        written, delimiter="\t" if suffix == ".tsv" else ",", quoting=quoting, lineterminator=end, strict=True
    )
    if quoting == csv.QUOTE_MINIMAL:  # in which Python's writer leaves a lone \\r unquoted
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    starts = []
    for row in [["one", "two"], *rows]:
        starts.append(1 + written.getvalue().count("\n"))
        writer.writerow(row)
    content = bom + (written.getvalue() if ended else written.getvalue().removesuffix(end)).encode()

    def check(path: Path) -> None:
        expected = [dict(zip(("one", "two"), row, strict=True)) for row in rows]
        places = [f"{path}:{line}" for line in starts[1:]]
        assert read(open_path(path)) == list(zip(places, expected, strict=True))

    in_file(content, suffix, check)


def test_faulty_csv_rows_leave_the_others_be(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    huge = b'6,"' + b"h" * 30 + b'\n""\n' + b"i" * 100 + b'"\n'
    path.write_bytes(b'a,b\n1,"x\r\ny"\n \n\n3\n4,"zz"q\n5,caf\xe9\n' + huge + b"7,8,9\n10,11")
    assert read(open_path(path, limit=50)) == [
        (f"{path}:2", {"a": "1", "b": "x\r\ny"}),
        (f"{path}:6", "number of fields"),
        (f"{path}:7", "broken CSV"),
        (f"{path}:8", "not UTF-8"),
        (f"{path}:9", "huge row"),
        (f"{path}:12", "number of fields"),
        (f"{path}:13", {"a": "10", "b": "11"}),
    ]
    path.write_bytes(b"a,b\n" + b" " * 60 + b"\n1,2\n" + b"3," + b"4" * 49)
    assert [found for _, found in read(open_path(path, limit=50))] == ["huge row", {"a": "1", "b": "2"}, "huge row"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", " is empty; its first line names the fields"),
        (b"a,b,a\n", ":1: the header has 'a' more than once"),
        (b"a,,b\n", ":1: the header has a field without a name"),
        (b"prompt;completion\n1;2\n", ":1: ';' stands between the fields; write ','"),
        (b"caf\xe9,b\n", ":1: the first line is no header"),
        (b'a,"b', ":1: the first line is no header: 'broken CSV: unexpected end"),
    ],
)
def test_faulty_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        open_path(path)
    assert message in str(error.value) and str(path) in str(error.value)


# ---- Parquet


@some
@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 5))
def test_parquet(num_rows: int, group: int, batch: int) -> None:
    table = pyarrow.table({"a": pyarrow.array(range(num_rows), pyarrow.int64())})

    def check(path: Path) -> None:
        parquet.write_table(table, path, row_group_size=group)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parquet_rows, "BATCH_ROWS", batch)
            assert read(open_path(path)) == [(f"{path}:{row + 1}", {"a": row}) for row in range(num_rows)]

    in_file(b"", ".parquet", check)


def test_parquet_values(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [
        {
            "turns": [{"role": "user"}, {"role": "tool", "args": {"x": 1, "deep": [{"y": 2}, {"z": []}]}}],
            "system": None,
        },
        {"turns": None, "system": "s" * 500},
        {"turns": [], "system": ""},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [record for _, record in read(open_path(path, limit=300))] == [rows[0], "huge row", rows[2]]
    assert [record for _, record in read(open_path(path))] == rows
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a\.parquet is no Parquet file that can be read: "):
        read(open_path(path))


# ---- documents, gzip, other files


def test_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BOM + b"One.\r\n\r\nTwo.")
    (tmp_path / "b.md").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b"x" * 20)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b""))
    assert read(open_path(tmp_path, limit=19)) == [
        (f"{tmp_path}/a.txt", {"text": "One.\r\n\r\nTwo."}),
        (f"{tmp_path}/b.md", "not UTF-8"),
        (f"{tmp_path}/c.txt", "huge row"),
        (f"{tmp_path}/d.txt.gz", {"text": ""}),
    ]


@pytest.mark.parametrize("damage", [lambda packed: packed[:-20], lambda packed: b"x" + packed, lambda packed: b"\x1f"])
def test_broken_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"a": 1}\n' * 1000)))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is a broken gzip file: "):
        read(open_path(path))


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    with pytest.raises(UserError, match=r"a\.bin is of no kind that is read; give it the suffix that it has: \.jsonl"):
        open_path(tmp_path / "a.bin")
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "b.bin")
    assert read(open_path(tmp_path / "b.bin")) == [(f"{tmp_path}/b.bin:1", {"a": 1})]
    with pytest.raises(UserError, match=r"is no regular file, which can be read more than once; .*data\.path=-"):
        open_path(Path("/dev/null"))


# ---- folders


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"file": name}) + "\n")


def taken(folder: Path, split: str) -> list[str]:
    return [record["file"] for _, record in read(open_path(folder, split=split))]


def test_a_folder_of_many_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, "b.jsonl", "sub/a.json", ".hidden/c.jsonl", ".d.jsonl", "README.md", "state.json", "notes.pdf")
    (tmp_path / "a.csv").write_text("file\na.csv\n")
    with caplog.at_level(logging.INFO, "trainer"):
        assert taken(tmp_path, "train") == ["a.csv", "b.jsonl", "sub/a.json"]
    assert f"{tmp_path}: 3 files: a.csv, b.jsonl, sub/a.json" in caplog.messages
    assert f"{tmp_path}: left aside, no files of rows: README.md, notes.pdf, state.json" in caplog.messages


def test_links_are_followed_but_in_no_circle(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", "a.jsonl")
    fill(tmp_path / "folder", "b.jsonl")
    (tmp_path / "folder" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "circle").symlink_to(tmp_path)
    assert taken(tmp_path / "folder", "train") == ["b.jsonl", "a.jsonl"]


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["train-00000-of-00002.parquet.jsonl", "train-00001-of-00002.jsonl", "test.jsonl"], "train", [0, 1]),
        (["data/train/a.jsonl", "data/dev/b.jsonl"], "validation", [1]),
        (["data/train/a.jsonl", "data/dev/b.jsonl"], "dev", [1]),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl", "other.jsonl"], "train", [0]),
        (["test.jsonl", "other.jsonl"], "train", [1]),
        (["other.jsonl", "train.jsonl"], "train", [0, 1]),
        (["train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"], "train_sft", [0]),
        (["part-00000-of-00002.jsonl", "part-00001-of-00002.jsonl"], "train", [0, 1]),
        (["contest.jsonl", "latest.jsonl", "trainee.jsonl"], "train", [0, 1, 2]),  # words, not letters
    ],
)
def test_splits(tmp_path: Path, names: list[str], split: str, expected: list[int]) -> None:
    folder = tmp_path / "test" / "folder"  # names above the folder do not count
    fill(folder, *names)
    assert taken(folder, split) == [names[index] for index in expected]


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    fill(tmp_path, "test.jsonl", "dev.jsonl")
    with pytest.raises(UserError, match=r"data\.split=train is not in .*; its files are of test, validation; name one"):
        open_path(tmp_path)
    with pytest.raises(UserError, match=r"split=test: .*test\.jsonl is one file and has no splits"):
        open_path(tmp_path / "test.jsonl", split="test")
    assert split_of(Path("a.b/c.jsonl")) is None


def test_folders_without_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no files of rows \(\.jsonl, .*\); it holds nothing"):
        open_path(tmp_path)
    fill(tmp_path, *(f"{index}.arrow" for index in range(10)), "dataset_info.json")
    with pytest.raises(UserError, match=r"it holds 0\.arrow, 1\.arrow, .* and 3 more"):
        open_path(tmp_path)


def test_hashes_follow_content_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        fill(folder, "b.jsonl", "a.jsonl")
    same = open_path(one).sha256()
    assert open_path(other).sha256() == same
    assert open_path(one / "b.jsonl").sha256() == open_path(other / "b.jsonl").sha256() != same
    (other / "b.jsonl").rename(other / "c.jsonl")  # the order of rows may change
    assert open_path(other).sha256() != same
    (one / "b.jsonl").write_text("{}\n")
    assert open_path(one).sha256() != same
    (other / "a.txt").write_bytes((other / "a.jsonl").read_bytes())  # other rows of the same bytes
    assert open_path(other / "a.txt").sha256() != open_path(other / "a.jsonl").sha256()


def test_rows_in_memory() -> None:
    rows = [{"a": 1}, {"a": 2}]
    assert read(ListReader("pydocs", rows)) == [("pydocs:1", {"a": 1}), ("pydocs:2", {"a": 2})]
    assert [where for where, _ in read(ListReader("pydocs", rows, ["json.dumps", "json.loads"]))][1] == "json.loads"
    assert ListReader("a", rows).sha256() == ListReader("b", list(rows)).sha256() != ListReader("a", rows[:1]).sha256()


def test_sources_that_are_no_files() -> None:
    with pytest.raises(UserError, match="data.path=- can be read once only"):
        open_path(Path("-"))
    with pytest.raises(UserError, match="data=pydocs has no files to read"):
        open_reader(SourceConfig(source=DataSource.pydocs), max_row_bytes=LIMIT)
