"""Joined pieces are the whole text, for each kind of tokenizer; nothing is shown that a stop string may take back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.config.errors import UserError
from trainer.config.model import ModelConfig, ModelSource
from trainer.serve.detokenizer import MAX_WINDOW, Detokenizer
from trainer.serve.sampling_params import SamplingParams
from trainer.sources.resolve import resolve_model

TEXTS = (
    "Hello world, it 's fine . Don't  stop\n\n\tnow!",
    "héllo 😀 wörld 👩‍👩‍👧 नमस्ते 漢字",
    " leading and trailing ",
    "مرحبا\x00\u200f",
    "a\ufffdb\ufffd\ufffdc",  # characters that the model may well write
)


@pytest.fixture(scope="module")
def tiny() -> PreTrainedTokenizerBase:
    """A token a byte: id 4 + rank of the byte's letter in the byte alphabet."""
    return AutoTokenizer.from_pretrained(resolve_model(ModelConfig(source=ModelSource.tiny)))


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(resolve_model(ModelConfig()))
    except UserError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(f"no network: {error}")


@pytest.fixture(scope="module")
def llama() -> PreTrainedTokenizerBase:
    """Sentencepiece's way: ▁ for spaces, bytes for what is no piece, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "lo", "é"]
    return wrap(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )


@pytest.fixture(scope="module")
def metaspace() -> PreTrainedTokenizerBase:
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "lo", ",", "▁▁", "\ufffd"]
    return wrap(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<unk>"), decoders.Metaspace())


@pytest.fixture(scope="module")
def wordpiece() -> PreTrainedTokenizerBase:
    pieces = ["<unk>", "<s>", "</s>", "hello", "##lo", "world", ".", ",", "do", "n't", "'", "s"]
    return wrap(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"), decoders.WordPiece())


def wrap(model: models.Model, decoder: decoders.Decoder) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip_special_tokens: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def pieces_of(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int], **params: object
) -> tuple[list[str], str | None]:
    """What is taken after each token and at the end, and the stop string."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(**params))
    pieces, stop = [], None
    for token_id in output:
        stop = detokenizer.append(token_id)
        pieces.append(detokenizer.take())
        if stop:
            break
    detokenizer.finish()
    pieces.append(detokenizer.take())
    assert "".join(pieces) == detokenizer.text
    return pieces, stop


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int]) -> str:
    """What the output adds to the prompt's text."""
    before = decode(tokenizer, prompt)
    whole = decode(tokenizer, prompt + output)
    assert whole.startswith(before)
    return whole[len(before) :]


# ---- tokens to text


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    prompt = encode(tokenizer, "A prompt of some words:")
    for length in (0, 1, len(prompt)):
        pieces, _ = pieces_of(tokenizer, prompt[:length], encode(tokenizer, text))
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_comes_whole_with_its_last_byte(tiny: PreTrainedTokenizerBase) -> None:
    pieces, _ = pieces_of(tiny, [], encode(tiny, "a😀漢é"))
    assert pieces == ["a", "", "", "", "😀", "", "", "漢", "", "é", ""]


@pytest.mark.parametrize("name", ["llama", "metaspace", "wordpiece"])
def test_spaces_are_those_of_the_whole(name: str, request: pytest.FixtureRequest) -> None:
    """After any prompt the first piece keeps its space; without one the tokenizer strips it, and so do we."""
    tokenizer = request.getfixturevalue(name)
    words = [i for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) if "<" not in token]
    choose = random.Random(0)
    for length in (*range(9), 40):
        output = choose.choices(words, k=length)
        for prompt in ([], [1], choose.choices(words, k=1), choose.choices(words, k=9)):
            assert "".join(pieces_of(tokenizer, prompt, output)[0]) == continuation(tokenizer, prompt, output)


def test_the_first_space_by_example(llama: PreTrainedTokenizerBase) -> None:
    hello, world = llama.convert_tokens_to_ids(["▁Hello", "▁world"])
    assert pieces_of(llama, [1], [hello, world])[0] == ["Hello", " world", ""]
    assert pieces_of(llama, [1, world], [hello, world])[0] == [" Hello", " world", ""]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes_decode_as_utf8_does(data: st.DataObject, tiny: PreTrainedTokenizerBase) -> None:
    """Byte-level: equal to the tokenizer's text and to Python's, one U+FFFD for each maximal invalid part."""
    check_bytes(tiny, byte_ids(tiny), data, equals_tokenizer=True)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_fallback_bytes_decode_as_utf8_does(data: st.DataObject, llama: PreTrainedTokenizerBase) -> None:
    check_bytes(llama, {byte: 3 + byte for byte in range(256)}, data, equals_tokenizer=False)


def byte_ids(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """Byte -> id. GPT-2's byte alphabet: printable Latin-1 stands for itself, the rest for 256 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {byte: tokenizer.convert_tokens_to_ids(letter) for byte, letter in letters.items()}


CHUNKS = st.one_of(
    st.text(alphabet="aé漢😀\ufffd ", max_size=4).map(str.encode),
    st.binary(max_size=4),
    st.sampled_from([b"\xe4", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80", b"\xff\xff\xff\xff\xff"]),
)


def check_bytes(
    tokenizer: PreTrainedTokenizerBase, ids: dict[int, int], data: st.DataObject, equals_tokenizer: bool
) -> None:
    text = b"".join(data.draw(st.lists(CHUNKS, max_size=12)))
    prompt = [ids[byte] for byte in data.draw(st.sampled_from(["", "p", "prompt: é"])).encode()]
    output = [ids[byte] for byte in text]
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams())
    shown = ""
    for count, token_id in enumerate(output, 1):
        detokenizer.append(token_id)
        shown += detokenizer.take()
        so_far = text[:count].decode(errors="replace")
        # All but the bytes (up to three) at the very end that may still become a character.
        assert so_far.startswith(shown) and so_far[len(shown) :] in [n * "\ufffd" for n in range(4)]
    detokenizer.finish()
    assert shown + detokenizer.take() == detokenizer.text == text.decode(errors="replace")
    if equals_tokenizer:
        assert detokenizer.text == continuation(tokenizer, prompt, output)


def test_a_long_answer_costs_the_same_a_token(tiny: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of invalid bytes only, which no whole character ever interrupts."""
    original, decoded = tiny.decode, []
    monkeypatch.setattr(tiny, "decode", lambda ids, **settings: decoded.append(len(ids)) or original(ids, **settings))
    for output in ([byte_ids(tiny)[0xFF]] * 20_000, (encode(tiny, TEXTS[1]) * 1000)[:20_000]):
        decoded.clear()
        detokenizer = Detokenizer(tiny, [], SamplingParams(stop=["\n\nUser:", "zzz"]))
        shown = [(detokenizer.append(token_id), detokenizer.take())[1] for token_id in output]
        detokenizer.finish()
        assert len(detokenizer._window) <= max(decoded) <= MAX_WINDOW and len(decoded) < 1.2 * len(output)
        assert "".join(shown) + detokenizer.take() == original(output, clean_up_tokenization_spaces=False)


def test_a_run_of_invalid_bytes_is_not_held_back(tiny: PreTrainedTokenizerBase) -> None:
    pieces, _ = pieces_of(tiny, [], [byte_ids(tiny)[0xFF]] * 50)
    assert pieces == ["", *["\ufffd"] * 50]


def test_special_and_missing_tokens_have_no_text(tiny: PreTrainedTokenizerBase) -> None:
    """Not even in the middle of a character; shown where they are asked for."""
    first, *rest = encode(tiny, "é!")
    output = [2, first, 0, 259 + 50, *rest, 3]
    assert "".join(pieces_of(tiny, [], output)[0]) == "é!"
    shown = "".join(pieces_of(tiny, [], [2, *encode(tiny, "é"), 3], skip_special_tokens=False)[0])
    assert shown == decode(tiny, [2, *encode(tiny, "é"), 3], skip_special_tokens=False) == "<|im_end|>é<|pad|>"


def test_clean_up_of_spaces_is_off(smollm2: PreTrainedTokenizerBase, wordpiece: PreTrainedTokenizerBase) -> None:
    wordpiece.clean_up_tokenization_spaces = True
    ids = wordpiece.convert_tokens_to_ids(["hello", "'", "s", "world"])
    assert "".join(pieces_of(wordpiece, [3], ids)[0]) == continuation(wordpiece, [3], ids)
    assert "".join(pieces_of(smollm2, [], encode(smollm2, "it 's , ok"))[0]) == "it 's , ok"


def test_a_prompt_that_ends_within_a_character(tiny: PreTrainedTokenizerBase, llama: PreTrainedTokenizerBase) -> None:
    """The answer may complete it; where it does not, the broken character is the prompt's alone."""
    for tokenizer, ids in ((tiny, byte_ids(tiny)), (llama, {byte: 3 + byte for byte in range(256)})):
        prompt = [ids[byte] for byte in b"a\xe6\xbc"]
        for answer, expected in (
            (b"\xa2b", "漢b"),
            (b"b", "b"),
            (b"", ""),
            (b"\xe6\xbc\xa2", "漢"),
            (b"\xff", "\ufffd"),
        ):
            assert "".join(pieces_of(tokenizer, prompt, [ids[byte] for byte in answer])[0]) == expected


# ---- stop strings


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is complete first, of those the longest."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé😀", max_size=30),
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    prompt=st.sampled_from(["", "ab", "aaaaab"]),
)
def test_stops_equal_a_search_at_every_character(
    text: str, stops: list[str], include: bool, prompt: str, tiny: PreTrainedTokenizerBase
) -> None:
    expected, stop = reference_stop(text, stops)
    pieces, found = pieces_of(
        tiny, encode(tiny, prompt), encode(tiny, text), stop=stops, include_stop_str_in_output=include
    )
    assert found == stop
    assert "".join(pieces) == expected + (stop if include and stop else "")
    if stop is None:
        # Held back at the end: exactly the longest end of the text that a stop string may begin with.
        held = max(k for s in stops for k in range(len(s)) if k <= len(text) and text.endswith(s[:k]))
        assert len(pieces[-1]) == held


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tokens_of_many_characters(data: st.DataObject, llama: PreTrainedTokenizerBase) -> None:
    """One token may hold a stop string and text behind it, or several stop strings."""
    words = llama.convert_tokens_to_ids(["▁", "▁Hello", "▁world", "lo", "é"])
    output = data.draw(st.lists(st.sampled_from(words), max_size=10))
    stops = data.draw(
        st.lists(st.sampled_from(["o", "lo", "ello", "o w", " wor", "Hello", "lolo", "é é"]), min_size=1, max_size=5)
    )
    expected, stop = reference_stop(continuation(llama, words[:1], output), stops)
    pieces, found = pieces_of(llama, words[:1], output, stop=stops)
    assert ("".join(pieces), found) == (expected, stop)


def test_no_beginning_of_a_stop_string_is_shown(smollm2: PreTrainedTokenizerBase) -> None:
    pieces, stop = pieces_of(smollm2, [], encode(smollm2, "Answer: 4.\n\nUser: more"), stop="\n\nUser:")
    assert stop == "\n\nUser:" and "".join(pieces) == "Answer: 4." and all("\n" not in piece for piece in pieces)


def test_what_cannot_become_a_stop_string_is_shown_at_once(tiny: PreTrainedTokenizerBase) -> None:
    pieces, _ = pieces_of(tiny, [], encode(tiny, "ab\nc\n\nUx"), stop="\n\nUser:")
    assert pieces == ["a", "b", "", "\nc", "", "", "", "\n\nUx", ""]


def test_the_stop_string_that_is_complete_first_ends_the_text(tiny: PreTrainedTokenizerBase) -> None:
    for stops in (["re", "he"], ["he", "re"]):
        pieces, stop = pieces_of(tiny, [], encode(tiny, "there"), stop=stops)
        assert (stop, "".join(pieces)) == ("he", "t")


def test_prompt_and_special_tokens_are_not_searched(tiny: PreTrainedTokenizerBase) -> None:
    stops = ["stop", "<|im_end|>"]
    assert pieces_of(tiny, encode(tiny, "stop sto"), [2, *encode(tiny, "p it")], stop=stops)[1] is None


def test_stops_before_min_tokens_are_text(tiny: PreTrainedTokenizerBase) -> None:
    """A stop string counts if its last token comes late enough, though it began before."""
    output = encode(tiny, "ababc")
    for min_tokens, expected in ((0, ""), (2, ""), (3, "ab"), (4, "ab"), (5, "ababc")):
        detokenizer, found, text = Detokenizer(tiny, [], SamplingParams(stop="ab")), None, ""
        for count, token_id in enumerate(output, 1):
            found = detokenizer.append(token_id, may_stop=count >= min_tokens)
            text += detokenizer.take()
            if found:
                break
        detokenizer.finish()
        assert text + detokenizer.take() == detokenizer.text == expected
        assert (found == "ab") == (expected != "ababc")


def test_finish_shows_what_was_held_back(tiny: PreTrainedTokenizerBase) -> None:
    ids = encode(tiny, "a STO漢")
    pieces, stop = pieces_of(tiny, [], ids[:-1], stop="STOP")
    assert stop is None and pieces[-1] == "STO\ufffd"  # two bytes of 漢
    assert "".join(pieces) == "a STO\ufffd"
    assert pieces_of(tiny, [], ids[:5], stop="STOP")[0] == ["a", " ", "", "", "", "STO"]


def test_stop_strings_of_any_characters(tiny: PreTrainedTokenizerBase) -> None:
    stops = ["\x00", "\ud800", "x" * 100_000, "\u05e9\u05dc"]
    assert pieces_of(tiny, [], encode(tiny, "a\x00b"), stop=stops)[1] == "\x00"
    assert pieces_of(tiny, [], encode(tiny, "aשלום"), stop=stops) == (["a", "", "", "", "", ""], stops[3])


def test_a_fork_goes_its_own_way(tiny: PreTrainedTokenizerBase, llama: PreTrainedTokenizerBase) -> None:
    for tokenizer, ids in ((tiny, encode(tiny, "é漢")), (llama, [3 + byte for byte in "é漢".encode()])):
        one = Detokenizer(tokenizer, [], SamplingParams(stop="é!"))
        for token_id in ids[:3]:
            one.append(token_id)
        other = one.fork()
        for token_id in ids[3:]:
            one.append(token_id)
        other.finish()
        assert (one.text, one.take()) == ("é漢", "é漢")
        assert (other.text, other.take()) == ("é\ufffd", "é\ufffd")
