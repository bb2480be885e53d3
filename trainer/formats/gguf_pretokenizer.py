"""tokenizer.ggml.pre: how llama.cpp splits text before its merges, found by what a tokenizer does.

llama.cpp knows splitters by name (src/llama-vocab.cpp). A file with a wrong name, or none, is read without a complaint
and gives other tokens. Its converter tells tokenizers apart by a hash of the ids of one text, which a token added by
fine-tuning can change; here the pieces of a probe text are compared with those of each known splitter, and the one
setting that comes with the name, whether a word of the vocabulary skips the merges.
"""

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
PROBE = (
    "The quick brown fox's 3,141.59 JUMPS\n\tover  12 lazy dogs — déjà vu? 東京タワー 🙂 <b>x_1 = f(y)/2</b>\r\n"
    "def add(a: int) -> int:\n    return a + 1  # 1234567890\n\n\n\"I'LL we'll\" MiXeD CamelCaseHTTPServer 100% "
    "e\u0301a \u0e01\u0e33 \u0939\u093f\u0928\u094d\u0926\u0940 ⅷ²½٣٤ a/b//\n/ ..."
    "\n\n  \t \n trailing's   \u00a0 x\u2003y  "
)
"""Digits, contractions, cases, marks, slashes and white space of all kinds: no two splitters agree on it."""


@dataclass(frozen=True, slots=True)
class Splitter:
    """A splitter that llama.cpp has.

    skips_merges  a piece that is a token is taken whole
    """

    name: str
    pieces: PreTokenizer
    skips_merges: bool = False


def _by_regex(pattern: str) -> PreTokenizer:
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITTERS = (
    Splitter("gpt-2", ByteLevel(add_prefix_space=False)),
    Splitter("smollm", Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])),
    Splitter("llama-bpe", _by_regex(_LLAMA3), skips_merges=True),
    Splitter("smaug-bpe", _by_regex(_LLAMA3)),
    Splitter("qwen2", _by_regex(_QWEN2)),
    Splitter("qwen35", _by_regex(_QWEN35)),
    Splitter("seed-coder", _by_regex(_SEED)),
    Splitter("tekken", _by_regex(_TEKKEN), skips_merges=True),
    Splitter("gpt-4o", _by_regex(_GPT4O)),
)
"""Published patterns of GPT-2, SmolLM, Llama 3, Qwen2, Qwen3.5, Seed-Coder, Mistral NeMo and GPT-4o."""


def find_splitter(backend: Tokenizer, *, skips_merges: bool) -> str | None:
    """The name of the splitter that cuts the probe text as `backend` does; None if none does."""
    if backend.pre_tokenizer is None:
        return None
    pieces = _pieces(backend.pre_tokenizer)
    for splitter in SPLITTERS:
        if splitter.skips_merges == skips_merges and _pieces(splitter.pieces) == pieces:
            return splitter.name
    return None


def _pieces(pre_tokenizer: PreTokenizer) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(PROBE)]
