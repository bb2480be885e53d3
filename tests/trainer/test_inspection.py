"""What the inspection of data counts, against counts made the slow way; and what it shows, in a headless Chromium."""

import json
import random
import re
import unicodedata
from collections import Counter
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.config.data import DataConfig, DataSource, OnBadRow
from trainer.config.errors import UserError
from trainer.config.preference import Method
from trainer.data.inspection.characters import count_characters, script_of
from trainer.data.inspection.chunks import chunks
from trainer.data.inspection.conventions import count_conventions
from trainer.data.inspection.counts import count_lengths, count_targets, find_duplicates
from trainer.data.inspection.gathering import gather
from trainer.data.inspection.hashing import run_hashes, stretch_hashes
from trainer.data.inspection.histogram import histogram
from trainer.data.inspection.kinds import Only
from trainer.data.inspection.leaks import find_leaks
from trainer.data.inspection.notes import notes_of
from trainer.data.inspection.page import page, write_page
from trainer.data.inspection.pieces import Cutter, shortened
from trainer.data.inspection.report import inspect_rows
from trainer.data.inspection.selecting import Shelf, is_at
from trainer.data.inspection.terminal import Terminal
from trainer.data.shown import MARKS
from trainer.page.text import visible
from trainer.sources.tiny import tiny_model

FEATURES = {"input_ids": List(Value("int32")), "labels": List(Value("int32")), "origin": Value("string")}
NASTY = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
IM_END = 2


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte."""
    return AutoTokenizer.from_pretrained(tiny_model())


def table(documents, prompt_lens=None, name="a.jsonl") -> Dataset:
    """Rows of tokens; the first `prompt_lens[i]` of each, one at least, are no targets."""
    prompt_lens = prompt_lens or [1] * len(documents)
    labels = [[-100] * first + list(ids[first:]) for ids, first in zip(documents, prompt_lens, strict=True)]
    columns = {"input_ids": [list(ids) for ids in documents], "labels": labels}
    origins = [f"{name}:{number}" for number in range(1, len(documents) + 1)]
    return Dataset.from_dict({**columns, "origin": origins}, features=Features(FEATURES))


def encoded(tokenizer, *texts: str) -> Dataset:
    return table([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])


documents_of_tokens = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=12)

# ---- chunks and hashes


@given(documents_of_tokens, st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_chunks_give_every_document_once_and_in_order(documents, chunk_tokens):
    found = [
        (int(row), chunk.ids[start:end].tolist())
        for chunk in chunks(table(documents), chunk_tokens=chunk_tokens)
        for row, start, end in zip(chunk.rows, chunk.starts, chunk.starts[1:], strict=False)
    ]
    assert found == list(enumerate(documents))


def test_chunks_of_selected_rows_and_of_both_sides_of_pairs():
    pairs = table([[1, 2], [3, 4, 5], [6]])
    for name in ("input_ids", "labels"):
        pairs = pairs.add_column(f"rejected_{name}", [[7], [8, 9], [10]], feature=FEATURES[name])
    found = [(chunk.side, chunk.ids.tolist(), chunk.rows.tolist()) for chunk in chunks(pairs.select([2, 0]))]
    assert found == [("", [6, 1, 2], [0, 1]), ("rejected_", [10, 7], [0, 1])]


@given(documents_of_tokens)
@settings(max_examples=25, deadline=None)
def test_a_hash_is_equal_exactly_where_the_stretch_is(documents):
    """Of few tokens and short stretches, all pairs: equal hashes of unequal stretches would be found here."""
    (chunk,) = chunks(table(documents))
    size = len(chunk.ids)
    bounds = [(start, end) for start in range(size) for end in range(start, min(size, start + 6) + 1)]
    hashes = stretch_hashes(chunk.ids, *np.array(bounds).T)
    by_stretch: dict[tuple[int, ...], set[int]] = {}
    for (start, end), value in zip(bounds, hashes.tolist(), strict=True):
        by_stretch.setdefault(tuple(chunk.ids[start:end]), set()).add(value)
    assert all(len(values) == 1 for values in by_stretch.values())
    assert len({value for values in by_stretch.values() for value in values}) == len(by_stretch)


@given(documents_of_tokens, st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_runs_stay_inside_documents(documents, run_len):
    (chunk,) = chunks(table(documents))
    starts = run_hashes(chunk, run_len)[1].tolist()
    firsts = chunk.starts.tolist()
    expected = [
        first + place for first, ids in zip(firsts, documents, strict=False) for place in range(len(ids) - run_len + 1)
    ]
    assert starts == expected


# ---- counts


def test_lengths_and_targets_are_counted():
    rows = table([[1] * n for n in range(1, 101)], [1] * 100)
    lengths = count_lengths(rows)
    assert (lengths.shortest, lengths.longest, lengths.longest_origin) == (1, 100, "a.jsonl:100")
    assert lengths.percentiles[50] == 51 and lengths.percentiles[99] == 100  # the higher of the two neighbours
    assert lengths.total == 5050 and count_targets(rows) == 5050 - 100
    assert sum(count for _, _, count in lengths.bars) == 100
    assert all(one[1] == other[0] for one, other in zip(lengths.bars, lengths.bars[1:], strict=False))


@given(documents_of_tokens)
@settings(max_examples=25, deadline=None)
def test_duplicates_are_the_rows_that_an_earlier_one_equals(documents):
    found = find_duplicates(table(documents))
    expected = {row: documents.index(ids) for row, ids in enumerate(documents) if documents.index(ids) != row}
    assert dict(zip(found.rows.tolist(), found.firsts.tolist(), strict=True)) == expected
    assert len(found.groups) == len(set(expected.values()))
    assert all(len({tuple(documents[int(place.split(":")[1]) - 1]) for place in group}) == 1 for group in found.groups)


def test_a_histogram_draws_each_bar_and_the_limit():
    drawn = histogram([(0, 10, 3), (10, 20, 0), (20, 30, 1)], 512)
    assert drawn.count("<rect") == 2 and "data.max_seq_len=512" in drawn
    assert "3 of 0 to 9 tokens" in drawn


# ---- leaks


def test_a_held_out_run_inside_a_training_row_is_found_with_both_places():
    draw = random.Random(0)
    train = [[draw.randrange(1000) for _ in range(200)] for _ in range(20)]
    held_out = [[draw.randrange(1000) for _ in range(120)] for _ in range(4)]
    held_out[2][30:100] = train[7][100:170]
    held_out[3][10:59] = train[8][0:49]  # one token less than counts
    leaks = find_leaks(table(train), table(held_out, name="b.jsonl"))
    assert (leaks.run_rows, leaks.held_out_rows, leaks.run_share) == (1, 4, 0.25)
    (leak,) = leaks.runs
    assert (leak.held_out, leak.train, leak.tokens, leak.held_out_row) == ("b.jsonl:3", "a.jsonl:8", 70, 2)


def test_an_instruction_that_all_rows_share_is_told_apart_from_a_leak():
    draw = random.Random(0)
    instruction = [draw.randrange(1000) for _ in range(60)]
    train = [[*instruction, *(draw.randrange(1000) for _ in range(100))] for _ in range(20)]
    held_out = [[*instruction, *(draw.randrange(1000) for _ in range(100))] for _ in range(4)]
    held_out[1][80:140] = train[5][70:130]
    leaks = find_leaks(table(train), table(held_out, name="b.jsonl"))
    assert leaks.instruction_rows == 4
    assert [(leak.held_out, leak.train, leak.tokens) for leak in leaks.runs] == [("b.jsonl:2", "a.jsonl:6", 60)]


@given(documents_of_tokens, documents_of_tokens, st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_runs_are_those_that_a_slow_search_finds(train, held_out, run_len):
    def runs(ids):
        return {tuple(ids[start : start + run_len]) for start in range(len(ids) - run_len + 1)}

    rows_with = Counter(run for ids in train for run in runs(ids))
    shared = {run for run, count in rows_with.items() if count >= 3 and count > 0.1 * len(train)}
    expected = [row for row, ids in enumerate(held_out) if runs(ids) & (rows_with.keys() - shared)]
    leaks = find_leaks(table(train), table(held_out), run_len=run_len)
    assert sorted(leak.held_out_row for leak in leaks.runs) == expected
    assert leaks.instruction_rows == sum(bool(runs(ids) & shared) for ids in held_out)


def test_a_prompt_with_another_answer_is_found_and_a_text_has_no_prompt():
    train = table([[1, 2, 3, 4, 9], [1, 5, 6, 7, 9], [1, 8]], [4, 2, 1])
    held_out = table([[1, 2, 3, 4, 8, 8], [1, 5, 6, 6, 6], [1, 7]], [4, 4, 1], name="b.jsonl")
    leaks = find_leaks(train, held_out)
    assert [(leak.held_out, leak.train, leak.tokens) for leak in leaks.prompts] == [("b.jsonl:1", "a.jsonl:1", 4)]
    assert leaks.prompt_rows == 1
    assert find_leaks(train, held_out, prompts=False).prompt_rows == 0


# ---- characters


def test_scripts_are_named_by_unicode():
    names = {"д": "CYRILLIC", "한": "HANGUL", "漢": "CJK", "🙂": "EMOJI", "é": "LATIN", "e": "LATIN", "7": "COMMON"}
    assert {char: script_of(char) for char in names} == names
    assert script_of("—") == "SIGNS"


def test_characters_that_a_byte_tokenizer_breaks_are_counted(tokenizer):
    text = "abc Дом 漢字 🙂 é"
    found = count_characters([encoded(tokenizer, text, text)], tokenizer)
    broken = {name: (script.characters, script.broken) for name, script in found.broken().items()}
    assert broken == {"CYRILLIC": (6, 6), "CJK": (4, 4), "EMOJI": (2, 2), "LATIN": (8, 2)}
    assert found.scripts["LATIN"].share == 0.25 and found.scripts["LATIN"].examples == {"é": 2}
    assert found.damaged == 0 and found.part == 1.0


@given(st.text(st.sampled_from("ab дя漢é🙂\n"), min_size=1, max_size=20))
@settings(max_examples=25, deadline=None)
def test_every_character_is_counted_once(tokenizer, text):
    found = count_characters([encoded(tokenizer, text)], tokenizer)
    expected = Counter(script_of(char) for char in text if not char.isspace())
    assert {name: script.characters for name, script in found.scripts.items()} == expected
    assert sum(script.broken for script in found.scripts.values()) == sum(not char.isascii() for char in text)


def test_a_cut_character_is_damaged_and_does_not_join_the_next_row(tokenizer):
    ids = tokenizer("Д", add_special_tokens=False)["input_ids"]
    found = count_characters([table([ids[:1], ids[1:]])], tokenizer)
    assert found.damaged == 2 and not found.scripts


def test_a_vocabulary_with_whole_characters_breaks_none():
    words = {"<unk>": 0, "Д": 1, "о": 2, "м": 3, "<0xF0>": 4, "<0x9F>": 5, "<0x99>": 6, "<0x82>": 7}
    backend = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    found = count_characters([table([[1, 2, 3, 4, 5, 6, 7, 1]])], whole)
    assert {name: (script.characters, script.broken) for name, script in found.scripts.items()} == {
        "CYRILLIC": (4, 0),
        "EMOJI": (1, 1),
    }


# ---- what surrounds the rows


def with_template(tokenizer, template: str):
    """The same tokenizer with another template."""
    copy = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    copy.chat_template = template
    return copy


def rendered(tokenizer, *conversations) -> Dataset:
    texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in conversations]
    return encoded(tokenizer, *texts)


EXCHANGE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
DEFAULT_PROMPT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful helper<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_a_default_system_prompt_is_found_and_its_rows_counted(tokenizer):
    adding = with_template(tokenizer, DEFAULT_PROMPT)
    own = [{"role": "system", "content": "Be short"}, *EXCHANGE]
    found = count_conventions([rendered(adding, EXCHANGE, EXCHANGE, own)], adding, {IM_END})
    assert "You are a helpful helper" in found.added
    assert (found.added_documents, found.documents, found.added_to_system) == (2, 3, "")
    assert not found.has_date


def test_chatml_adds_nothing(tokenizer):
    found = count_conventions([rendered(tokenizer, EXCHANGE)], tokenizer, {IM_END})
    assert (found.added, found.added_documents, found.added_to_system, found.has_date) == ("", 0, "", False)


@pytest.mark.parametrize("where", ["always", "system"])
def test_a_date_is_found(tokenizer, where):
    date = "Today is {{ strftime_now('%d %B %Y') }}. "
    if where == "system":
        date = "{% if messages[0].role == 'system' %}" + date + "{% endif %}"
    found = count_conventions([], with_template(tokenizer, date + DEFAULT_PROMPT), {IM_END})
    assert found.has_date


def test_bos_is_counted_where_it_is_only_that(tokenizer):
    rows = table([[0, 5, 6], [0, 0, 5], [5, 6]])
    found = count_conventions([rows], tokenizer, {IM_END})
    assert found.bos_counts == {0: 1, 1: 1, 2: 1}
    assert any("2 BOS" in note for note in notes_of(inspection_with(found)))


def test_a_bos_that_begins_each_turn_counts_at_the_beginning_only(tokenizer):
    turns = AutoTokenizer.from_pretrained(tokenizer.name_or_path, bos_token="<|im_start|>")
    found = count_conventions([rendered(turns, EXCHANGE)], turns, {IM_END})
    assert found.bos_counts == {1: 1}


def test_the_token_that_ends_a_turn_is_held_against_the_stops(tokenizer):
    rows = table([[5, 6, IM_END, 7, 8, IM_END], [5, 6, 7]])
    rows = rows.remove_columns("labels").add_column(
        "labels", [[-100, 6, IM_END, -100, 8, IM_END], [-100, 6, 7]], feature=FEATURES["labels"]
    )
    found = count_conventions([rows], tokenizer, {IM_END})
    assert (found.stretches, found.stopped, found.end_stops) == (3, 2, True)
    assert found.ends["<|im_end|>"] == 2
    other = count_conventions([rows], tokenizer, {0})
    assert (other.stopped, other.end_stops, other.stops) == (0, False, ["<|endoftext|>"])
    assert any("does not stop" in note for note in notes_of(inspection_with(other)))


def inspection_with(conventions):
    """As much of an inspection as its notes about conventions need."""
    return SimpleNamespace(
        refusals=(),
        first_rows=None,
        bad_kinds={},
        total=lambda name: 0,
        duplicates=SimpleNamespace(rows=[]),
        leaks=find_leaks(table([[1]]), table([[2]])),
        conventions=conventions,
        characters=SimpleNamespace(part=1.0, broken=dict, damaged=0),
    )


# ---- pieces


@given(st.text(st.sampled_from("ab д漢🙂é\n"), min_size=1, max_size=20))
@settings(max_examples=25, deadline=None)
def test_pieces_are_the_text_and_hold_whole_characters(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = Cutter(tokenizer).pieces(ids, ids)
    assert "".join(piece.text for piece in pieces) == text
    assert [token for piece in pieces for token in piece.ids] == ids
    assert len(pieces) == len(text)  # a byte tokenizer: each piece is a character


def test_pieces_keep_the_spaces_of_tokenizers_that_write_them_before_words():
    words = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3}
    backend = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    )
    pieces = Cutter(PreTrainedTokenizerFast(tokenizer_object=backend)).pieces([1, 2, 3, 2], [-100, 2, 3, -100])
    assert [piece.text for piece in pieces] == ["the", " cat", "s", " cat"]
    assert [piece.is_target for piece in pieces] == [False, True, True, False]


def test_what_cannot_be_seen_is_shown():
    assert visible("a\x1b[31m\u202eb\u200b\r") == "a‹U+001B›[31m‹U+202E›b‹U+200B›‹U+000D›"
    family = "👩\u200d👧 line\n\ttab"
    assert visible(family) == family
    assert not [
        c for c in visible("".join(map(chr, range(0x3000)))) if unicodedata.category(c) == "Cc" and c not in "\n\t"
    ]


def test_long_stretches_lose_their_middle_and_say_how_much(tokenizer):
    ids = tokenizer("a" * 100 + "b" * 10, add_special_tokens=False)["input_ids"]
    pieces = Cutter(tokenizer).pieces(ids, [-100] * 100 + ids[100:])
    parts = shortened(pieces, max_tokens=80)
    (hidden,) = [part for part in parts if isinstance(part, int)]
    assert hidden + sum(len(part.ids) for part in parts if not isinstance(part, int)) == 110
    assert shortened(pieces, max_tokens=1000) == pieces


# ---- files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file with what is to be found in it, and its held-out file."""
    path = tmp_path_factory.mktemp("rows")
    fox = "The quick brown fox jumps over the lazy dog and runs away into the deep dark forest."
    rows = [{"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}."} for i in range(20)]
    rows += [rows[3], {"prompt": "Say " + NASTY, "completion": "<b onclick=alert(1)>bold</b> & Привет 🙂\u202e"}]
    rows += [{"prompt": "Tell", "completion": fox}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines[5:5] = ['{"prompt": "broken', '{"prompt": "</script><b>", "completion": 5}']
    (path / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    held_out = [rows[9], {"prompt": "Once", "completion": f"more. {fox}"}, {**rows[0], "completion": "Who knows?"}]
    (path / "eval.jsonl").write_text("\n".join(map(json.dumps, held_out)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def own_cache(tokenizer, tmp_path_factory):
    """Tables of these files and no others: a table that another run made of equal files has that run's places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shelf(folder, tokenizer, own_cache):
    return opened(folder, tokenizer)


def opened(folder, tokenizer, **options) -> Shelf:
    config = DataConfig(
        **{"source": DataSource.file, "path": str(folder / "train.jsonl"), "eval_path": str(folder / "eval.jsonl")}
        | options
    )
    gathered = gather(config, Method.none, tokenizer, 0)
    found = inspect_rows(gathered, config, Method.none, tokenizer, seed=0, rows_per_step=2, stop_ids={IM_END})
    return Shelf(gathered, found, Cutter(tokenizer), config.max_seq_len)


def test_bad_rows_are_listed_and_training_would_refuse(shelf, folder):
    found = shelf.inspection
    assert {kind: count for kind, (count, _) in found.bad_kinds.items()} == {"broken JSON": 1, "type": 1}
    assert [fault.where.split("/")[-1].split(":")[1] for fault in found.bad] == ["6", "7"]
    assert found.bad[0].raw.strip() == '{"prompt": "broken' and found.bad[0].source == "train.jsonl"
    assert len(found.refusals) == 1 and "train.jsonl:6" in found.refusals[0]
    assert notes_of(found)[0].startswith("training would stop")


def test_the_counts_of_a_file(shelf):
    found = shelf.inspection.as_dict()
    assert (found["source_rows"], found["rows"], found["held_out_rows"]) == (28, 22, 3)
    assert found["leaks"]["copies"] == 1 and found["leaks"]["copied"][0].endswith("train.jsonl:12")
    assert found["duplicates"]["rows"] == 1
    assert [place.split(":")[-1] for place in found["duplicates"]["first"][0]] == ["4", "23"]
    assert (found["leaks"]["prompt_rows"], found["leaks"]["run_rows"]) == (1, 1)
    assert set(found["scripts"]) == {"CYRILLIC", "EMOJI", "SIGNS"}
    assert found["would_train"] is False
    tokens = [len(ids) for ids in shelf.gathered.train["input_ids"]]
    assert (found["tokens"], found["lengths"]["longest"]) == (sum(tokens), max(tokens))
    json.dumps(found)


def test_skipping_bad_rows_would_train_and_packing_says_how_full(folder, tokenizer, own_cache):
    found = opened(folder, tokenizer, on_bad_row=OnBadRow.skip, packing=True).inspection
    assert found.refusals == () and found.bad_kinds
    packing = found.packing
    assert packing["capacity"] == 512
    assert packing["efficiency"] == pytest.approx(found.tokens / (packing["units"] * 512), abs=1e-4)


def test_a_stream_is_inspected_by_its_first_rows(folder, tokenizer, own_cache):
    shelf = opened(folder, tokenizer, streaming=True, shuffle_buffer=10)
    assert shelf.inspection.total("source_rows") == 10 and shelf.inspection.first_rows == 10
    assert len(shelf.gathered.train) == 8 and len(shelf.inspection.bad) == 2
    assert any("first 10 rows" in note for note in notes_of(shelf.inspection))


def test_too_few_rows_are_shown_and_refused(tmp_path, tokenizer, own_cache):
    (tmp_path / "one.jsonl").write_text('{"text": "only one"}\n')
    config = DataConfig(source=DataSource.file, path=str(tmp_path / "one.jsonl"))
    gathered = gather(config, Method.none, tokenizer, 0)
    assert len(gathered.train) == 1 and "has 1 row" in gathered.refusals[0]


def test_rows_are_found_by_place_and_by_number(shelf, folder):
    (row,) = shelf.find("train.jsonl:8")
    assert row.origin == f"{folder}/train.jsonl:8" and row.source == "train.jsonl"
    assert shelf.find(str(row.number))[0].origin == row.origin
    assert shelf.find("train.jsonl:6") == []  # a bad row: its reason is shown
    assert [row.part for row in shelf.find("eval.jsonl:2")] == ["held_out"]
    for wanted in ("train.jsonl:77", "99"):
        with pytest.raises(UserError, match=f"row={wanted}"):
            shelf.find(wanted)


@pytest.mark.parametrize(
    "place, wanted, is_it",
    [
        ("a/b.jsonl:12", "b.jsonl:12", True),
        ("a/b.jsonl:12:7", "b.jsonl:12", True),
        ("a/b.jsonl:12", "b.jsonl:1", False),
        ("a/bb.jsonl:12", "b.jsonl:12", False),
        ("pydocs:json.dumps", "pydocs:json.dumps", True),
    ],
)
def test_a_place_may_leave_out_its_folders(place, wanted, is_it):
    assert is_at(place, wanted) is is_it


def test_each_kind_of_rows_is_chosen(shelf):
    lengths = [row.num_tokens for row in shelf.choose(Only.long, 5)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == shelf.inspection.lengths.longest
    assert [row.num_tokens for row in shelf.choose(Only.short, 1)] == [shelf.inspection.lengths.shortest]
    assert [row.origin.split(":")[-1] for row in shelf.choose(Only.duplicates, 5)] == ["4", "23"]
    assert len(shelf.choose(Only.leaks, 5)) == 2
    assert len(shelf.choose(Only.held_out, 50)) == 3 and len(shelf.choose(Only.all, 4)) == 4
    assert len(shelf.sample(500)) == 25 == len({(row.part, row.number) for row in shelf.sample(500)})


# ---- a terminal


def printed(shelf, *, is_terminal: bool, with_ids: bool = False) -> str:
    console = Console(file=StringIO(), force_terminal=is_terminal, width=100, color_system="standard")
    terminal = Terminal(with_ids=with_ids, console=console)
    terminal.rows(shelf.take("train", [0]), max_tokens=None)
    terminal.rows(shelf.find("train.jsonl:24"), max_tokens=None)
    terminal.bad(shelf.inspection.bad)
    terminal.summary(shelf.inspection)
    return console.file.getvalue()


def test_learned_text_has_colours_in_a_terminal_and_marks_elsewhere(shelf):
    plain, coloured = printed(shelf, is_terminal=False), printed(shelf, is_terminal=True)
    assert f"{MARKS[0]}It is 0.<|im_end|>{MARKS[1]}" in plain and "\x1b" not in plain
    assert MARKS[0] not in coloured and "\x1b[1;32mIt is 0.\x1b[0m" in coloured
    assert "22 to train on" in plain and "broken JSON" in plain
    assert "‹U+202E›" in plain and "\u202e" not in plain + coloured


def test_token_ids_on_request(shelf):
    assert "I‹44›t‹87›" in printed(shelf, is_terminal=False, with_ids=True)


# ---- a page


def test_a_page_holds_nothing_that_a_row_could_start(shelf, tmp_path):
    text = page("t", shelf.inspection, shelf.sample(100))
    assert text.count("<script>") == text.count("</script>") == 1
    assert "<img" not in text and "onclick=alert" not in re.sub(r"<[^>]*>", "", text).replace("&lt;b onclick=alert", "")
    assert not re.search(r"(?:https?:)?//[\w.-]+\.\w{2,}", text)
    write_page(tmp_path / "page.html", "t", shelf.inspection, [])
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.fixture(params=["light", "dark"])
def tab(browser, shelf, tmp_path, request):
    """The page, opened without a network; at the end nothing may have been written to the console."""
    write_page(tmp_path / "page.html", f"train.jsonl {NASTY}", shelf.inspection, shelf.sample(100))
    complaints = []
    opened_page = browser.new_page(color_scheme=request.param, offline=True)
    opened_page.on("console", lambda message: complaints.append(message.text))
    opened_page.on("pageerror", lambda error: complaints.append(str(error)))
    opened_page.goto(f"file://{tmp_path}/page.html")
    yield opened_page
    opened_page.close()
    assert not complaints


def test_the_page_shows_rows_and_runs_nothing_of_theirs(tab):
    assert tab.title() == f"train.jsonl {NASTY}"  # had its script run, it would be another one
    assert tab.locator("img").count() == 0 and tab.locator("script").count() == 1
    nasty = tab.locator("article", has_text="Say </script>")
    assert NASTY in nasty.inner_text() and "<b onclick=alert(1)>bold</b> & Привет" in nasty.locator("mark").inner_text()
    assert tab.locator("article:visible").count() == 27
    assert tab.locator("svg .limit").count() == 1 and tab.locator("svg .bar").count() > 2
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_filters_and_says_what_a_token_is(tab):
    for kind, count in (("left out", 2), ("held out", 3), ("leaks", 2), ("duplicates", 1), ("train", 22), ("all", 27)):
        tab.get_by_role("button", name=kind, exact=True).click()
        assert tab.locator("article:visible").count() == count, kind
        assert tab.locator("#shown").inner_text() == f"{count} of 27 shown"
    tab.locator("#source").select_option("eval.jsonl (held out)")
    assert tab.locator("article:visible").count() == 3
    tab.locator("#source").select_option("")
    tab.locator("#words").fill("привет")
    assert tab.locator("article:visible").count() == 1
    tab.locator("article:visible mark i", has_text="🙂").hover()
    assert tab.locator("#tip").inner_text().startswith("tokens ") and "learned" in tab.locator("#tip").inner_text()
    tab.locator("article:visible > .text > i.special").first.hover()
    assert tab.locator("#tip").inner_text() == 'token 1 · read\n"<|im_start|>"'
