"""The tokens of a text's beginning, without tokenizing it: as many as if it had been tokenized, for every tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.trainer.test_chat import CHATML, chat, served, targets
from trainer.config.data import DataConfig
from trainer.data.rendering.chat import Renderer
from trainer.data.rendering.encoding import Encoder, shared_len, shared_tail


def byte_level(*, add_prefix_space: bool, trim_offsets: bool) -> Tokenizer:
    """As GPT-2: a space belongs to the word behind it, and its place may be left out."""
    steps = [("Ċ", "Ċ"), ("Ġ", "a"), ("Ġ", "Ġ"), ("a", "b")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, *("".join(step) for step in steps)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=steps))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def sentencepiece(*, legacy: bool) -> Tokenizer:
    """As Llama 2: a word begins with ▁, which the text's beginning gets too, or each stretch between special tokens."""
    pieces = ["▁", "a", "b", "\n", "?", "▁a", "ab", "\n\n", "▁▁"]
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: index for index, token in enumerate(["<unk>", *letters, *pieces])}
    merges = [("▁", "a"), ("a", "b"), ("\n", "\n"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


KINDS = {
    "byte level": lambda: byte_level(add_prefix_space=False, trim_offsets=False),
    "byte level, trimmed": lambda: byte_level(add_prefix_space=False, trim_offsets=True),
    "byte level, prefix space": lambda: byte_level(add_prefix_space=True, trim_offsets=True),
    "sentencepiece": lambda: sentencepiece(legacy=False),
    "sentencepiece, legacy": lambda: sentencepiece(legacy=True),
}


def fast(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|im_start|>", special=True, normalized=False),
            AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
            AddedToken("<s>", special=True, normalized=False, lstrip=True),
        ]
    )
    tokenizer.add_tokens([AddedToken("<n>", special=False, normalized=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>")


def slow() -> PreTrainedTokenizerBase:
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    assert not tokenizer.is_fast
    return tokenizer


PARTS = ["a", "b", "ab", " ", "  ", "\n", "\n\n", "?", "é", "👍", "<|im_start|>", "<|im_end|>", "<s>", "<n>"]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(text=TEXTS, data=st.data())
def test_beginnings_have_the_tokens_of_their_own(kind: str, text: str, data: st.DataObject) -> None:
    encoder = Encoder(fast(kind))
    encoded = encoder.encode("row", text)
    assert encoded.ids == encoder.ids(text)
    size = data.draw(st.integers(0, len(text)))
    alone = encoder.ids(text[:size])
    assert encoded.len_of(text[:size]) == (len(alone) if encoded.ids[: len(alone)] == alone else None)


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(text=TEXTS, data=st.data())
def test_a_parted_text_says_the_same(kind: str, text: str, data: st.DataObject) -> None:
    encoder = Encoder(fast(kind))
    encoded = encoder.encode("row", text)
    size = data.draw(st.integers(1, len(text)))
    parted = encoded.parted(text[:size])
    if parted is None:
        return
    alone = encoder.ids(text[:size])
    assert parted.ids[: len(alone)] == alone
    assert encoder.decode(parted.ids) == encoder.decode(encoded.ids)
    assert len(parted.places) == len(parted.ids) and parted.first_behind(text[:size]) == len(alone)


def test_most_texts_can_be_parted() -> None:
    """Else the test above would prove nothing: a newline that merges over the end of the prompt."""
    for kind in ("byte level", "byte level, trimmed", "sentencepiece"):
        encoder = Encoder(fast(kind))
        encoded = encoder.encode("row", "<|im_start|>a\n\n<|im_end|>")
        assert len(encoded.ids) == 4 and encoded.len_of("<|im_start|>a\n") is None
        parted = encoded.parted("<|im_start|>a\n").ids
        assert len(parted) == 5 and parted[2] == parted[3] and parted[:2] == encoded.ids[:2]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(text=TEXTS, data=st.data())
def test_tokens_of_a_part(text: str, data: st.DataObject) -> None:
    encoded = Encoder(fast("byte level")).encode("row", text)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    touching = [
        index
        for index, (first, behind) in enumerate(encoded.places)
        if first < end and behind > start and behind > first
    ]
    assert list(encoded.touching(start, end)) == (touching if end > start else [])
    assert encoded.end_of(end) == sum(first < end for first, _ in encoded.places)


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_what_two_texts_share(one: str, other: str) -> None:
    count = shared_len(one, other)
    assert one[:count] == other[:count] and one[count : count + 1] != other[count : count + 1] or one == other
    tail = shared_tail(one, other)
    assert one.endswith(tail) and other.endswith(tail) and len(tail) == shared_len(one[::-1], other[::-1])


@pytest.mark.parametrize("make", [slow, *(lambda kind=kind: fast(kind) for kind in KINDS)], ids=["slow", *KINDS])
def test_turns_are_found_with_any_tokenizer(make: object) -> None:
    tokenizer = make()
    tokenizer.chat_template = CHATML
    row = chat("a?", "b a", "ab", "a")
    (done,) = Renderer(tokenizer, DataConfig(max_seq_len=200)).tokenize(row)
    prompts = [served(row.messages[:turn], tokenizer) for turn in (1, 3)]
    first = next(index for index, label in enumerate(done.labels) if label != -100)
    assert done.input_ids[:first] == prompts[0] and done.input_ids[: len(prompts[1])] == prompts[1]
    assert [text.strip() for text in targets(done, tokenizer)] == ["b a<|im_end|>", "a<|im_end|>"]
