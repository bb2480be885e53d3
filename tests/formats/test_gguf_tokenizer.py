"""Tokenizers in GGUF files: llama.cpp gives text the ids that Hugging Face gives it, or the file is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.formats.gguf_models import EOS, llama_ids, open_llama, small_model, texts, tokenizer_of
from trainer.config.errors import UserError
from trainer.formats.gguf_file import read_keys
from trainer.formats.gguf_pretokenizer import SPLITTERS, find_splitter
from trainer.formats.gguf_tokenizer import NO_MERGES, describe_tokenizer
from trainer.formats.gguf_write import write_gguf
from trainer.sources.bundled import bundled_model
from trainer.sources.tiny import tiny_model

TINY = {"hidden": 32, "heads": 2, "kv_heads": 1, "num_hidden_layers": 1}
MIXED = f"a{EOS}b <think> c</s>d<|pad|>  e<|endoftext|>\n{EOS}"


def write(tokenizer: PreTrainedTokenizerFast, path: Path, **options: Any) -> Path:
    model = small_model("llama", **TINY)
    model.resize_token_embeddings(len(tokenizer) + 3, mean_resizing=False)
    return write_gguf(model, tokenizer, path / "model.gguf", gguf_type="F16", **options).path


def copy_of(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> PreTrainedTokenizerFast:
    """The same tokenizer with other entries in its tokenizer.json; changes of the BPE are prefixed by bpe_."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for name, value in changes.items():
        if name.startswith("bpe_"):
            state["model"][name.removeprefix("bpe_")] = value
        else:
            state[name] = value
    special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **special)


def differing(llama: Any, tokenizer: PreTrainedTokenizerFast, strings: list[str]) -> list[str]:
    return [text for text in strings if llama_ids(llama, tokenizer, text) != tokenizer(text)["input_ids"]]


# ---- equal ids


@pytest.mark.parametrize("kind", [*(splitter.name for splitter in SPLITTERS), "sentencepiece"])
def test_llama_cpp_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    llama = open_llama(write(tokenizer, tmp_path), vocab_only=True)
    assert len(texts()) > 200 and differing(llama, tokenizer, [*texts(), MIXED]) == []


def test_another_splitter_gives_other_ids(tmp_path: Path) -> None:
    """What the comparison above is worth: a wrong name is noticed."""
    tokenizer = tokenizer_of("qwen2")
    llama = open_llama(write(tokenizer, tmp_path, pre="gpt-2"), vocab_only=True)
    assert differing(llama, tokenizer, list(texts()))


def test_spaces_at_the_beginning_are_said(tmp_path: Path) -> None:
    """A Metaspace puts no space before a space, llama.cpp does; both agree on all other text."""
    tokenizer = tokenizer_of("sentencepiece-new")
    described = describe_tokenizer(tokenizer, sized_model(tokenizer))
    assert described.notes == ["text that begins with a space gets one more from llama.cpp"]
    llama = open_llama(write(tokenizer, tmp_path), vocab_only=True)
    others = differing(llama, tokenizer, list(texts()))
    assert others and all(text.startswith(" ") for text in others)


def test_the_bundled_tokenizer(tmp_path: Path) -> None:
    folder = bundled_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    llama = open_llama(write(tokenizer, tmp_path), vocab_only=True)
    assert llama.metadata["tokenizer.ggml.pre"] == "smollm"
    assert llama.metadata["tokenizer.chat_template"] == tokenizer.chat_template
    assert differing(llama, tokenizer, [*texts(), MIXED]) == []


def test_the_tiny_tokenizer_has_no_merges(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    path = write(tokenizer, tmp_path)
    assert read_keys(GGUFReader(path))["tokenizer.ggml.merges"] == NO_MERGES
    assert differing(open_llama(path, vocab_only=True), tokenizer, list(texts())) == []


# ---- which splitter


@pytest.mark.parametrize("splitter", SPLITTERS, ids=lambda splitter: splitter.name)
def test_each_splitter_is_itself_only(splitter: Any) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter.pieces
    assert find_splitter(backend, skips_merges=splitter.skips_merges) == splitter.name


def test_added_tokens_do_not_change_the_splitter(tmp_path: Path) -> None:
    tokenizer = copy_of(tokenizer_of("llama-bpe"))
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(40)])
    assert describe_tokenizer(tokenizer, sized_model(tokenizer)).pre == "llama-bpe"


# ---- what the file says


def sized_model(tokenizer: PreTrainedTokenizerFast, rows: int = 0, **settings: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **settings},
        vocab_size=rows or len(tokenizer),
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_kinds_of_tokens() -> None:
    tokenizer = tokenizer_of("smollm")
    described = describe_tokenizer(tokenizer, sized_model(tokenizer, len(tokenizer) + 2))
    kinds = dict(zip(described.tokens, described.types, strict=True))
    assert kinds[EOS] is TokenType.CONTROL and kinds["<think>"] is TokenType.USER_DEFINED
    assert kinds["a"] is TokenType.NORMAL
    assert described.tokens[-2:] == [f"[PAD{len(tokenizer)}]", f"[PAD{len(tokenizer) + 1}]"]
    assert described.types[-2:] == [TokenType.UNUSED] * 2
    described = describe_tokenizer(tokenizer_of("sentencepiece"), sized_model(tokenizer_of("sentencepiece")))
    kinds = dict(zip(described.tokens, described.types, strict=True))
    assert kinds["<0x0A>"] is TokenType.BYTE and kinds["<unk>"] is TokenType.UNKNOWN
    assert described.add_bos and not described.add_eos and described.add_space_prefix


def test_special_ids_from_config_and_generation_config() -> None:
    tokenizer = copy_of(tokenizer_of("qwen2"))
    tokenizer.bos_token = None
    model = sized_model(tokenizer, bos_token_id=7)
    model.generation_config = GenerationConfig(eos_token_id=[1, 2])
    assert describe_tokenizer(tokenizer, model).special_ids == {"bos": 7, "eos": 1, "eot": 2, "unk": 0, "pad": 2}
    model = sized_model(tokenizer)
    assert describe_tokenizer(tokenizer, model).special_ids["bos"] == 1  # never llama.cpp's own number


def test_several_chat_templates(tmp_path: Path) -> None:
    tokenizer = copy_of(tokenizer_of("smollm"))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    keys = read_keys(GGUFReader(write(tokenizer, tmp_path)))
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert keys["tokenizer.chat_template.tool_use"] == "{{ tools }}"


def test_notes() -> None:
    tokenizer = copy_of(tokenizer_of("qwen2"), normalizer={"type": "NFC"})
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    notes = describe_tokenizer(tokenizer, sized_model(tokenizer)).notes
    assert "NFC" in notes[0] and "['<mask>'] take in white space" in notes[1]
    given = describe_tokenizer(tokenizer_of("smollm"), sized_model(tokenizer), pre="mine")
    assert given.pre == "mine" and given.notes == ["tokenizer.ggml.pre=mine was given and not checked"]


# ---- what is refused


def reordered(kind: str) -> PreTrainedTokenizerFast:
    """Merges of one token that do not follow one another."""
    merges = json.loads(tokenizer_of(kind).backend_tokenizer.to_str())["model"]["merges"]
    several = next(i for i in range(len(merges) - 1) if "".join(merges[i]) == "".join(merges[i + 1]))
    return copy_of(tokenizer_of(kind), bpe_merges=[*merges[: several + 1], *merges[several + 2 :], merges[several + 1]])


def incomplete(kind: str) -> PreTrainedTokenizerFast:
    """A pair whose token is known and which is not merged."""
    merges = json.loads(tokenizer_of(kind).backend_tokenizer.to_str())["model"]["merges"]
    several = next(i for i in range(len(merges) - 1) if "".join(merges[i]) == "".join(merges[i + 1]))
    return copy_of(tokenizer_of(kind), bpe_merges=[*merges[: several + 1], *merges[several + 2 :]])


def with_backend(**parts: Any) -> PreTrainedTokenizerFast:
    tokenizer = copy_of(tokenizer_of("smollm"))
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def around(template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy_of(tokenizer_of("smollm"))
    state = json.loads(tokenizer_of("sentencepiece").backend_tokenizer.to_str())["post_processor"]
    state["single"] = [{"SpecialToken": {"id": template, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    state["special_tokens"] = {template: {"id": template, "ids": [2], "tokens": [template]}}
    return copy_of(tokenizer, post_processor=state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: with_backend(pre_tokenizer=pre_tokenizers.Whitespace()),
            "splits text as none of the splitters known here .*smollm.* with ignore_merges=false; .* as pre=<name>",
        ),
        (
            lambda: with_backend(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "splits text as none of the splitters",
        ),
        (lambda: copy_of(tokenizer_of("qwen2"), bpe_ignore_merges=True), "none of .* with ignore_merges=true"),
        (lambda: with_backend(normalizer=normalizers.Lowercase()), "normalizes text with Lowercase, which llama.cpp"),
        (lambda: copy_of(tokenizer_of("smollm"), bpe_dropout=0.1), "a tokenizer with dropout=0.1"),
        (
            lambda: copy_of(tokenizer_of("smollm"), bpe_end_of_word_suffix="@"),
            "with end_of_word_suffix='@'",
        ),
        (
            lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), eos_token="a"),
            "a tokenizer of WordLevel is none that llama.cpp has",
        ),
        (lambda: reordered("sentencepiece"), "do not follow one another, so no score orders them"),
        (lambda: incomplete("sentencepiece"), "which the tokenizer does not merge and llama.cpp would"),
        (
            lambda: copy_of(tokenizer_of("sentencepiece"), normalizer={"type": "Lowercase"}),
            "before it merges, and llama.cpp leaves it whole",
        ),
        (lambda: around("<|pad|>"), r"turns the ids \[.*\] of a text into \[2, .*llama.cpp can put bos before"),
        (lambda: PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("smollm").backend_tokenizer), "no|neither"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    tokenizer = make()
    with pytest.raises(UserError, match=message):
        describe_tokenizer(tokenizer, sized_model(tokenizer))


def test_more_ids_than_rows() -> None:
    tokenizer = tokenizer_of("smollm")
    with pytest.raises(UserError, match=r"has the id \d+ and the embedding has 100 rows"):
        describe_tokenizer(tokenizer, sized_model(tokenizer, 100))


def test_a_splitter_has_no_name_with_bytes_to_fall_back_on() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    with pytest.raises(UserError, match="pre=qwen2 is for byte-level tokenizers"):
        describe_tokenizer(tokenizer, sized_model(tokenizer), pre="qwen2")
