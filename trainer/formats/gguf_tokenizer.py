"""What a GGUF file says of the tokenizer, and the tokenizers that llama.cpp computes.

Two kinds: byte-level BPE with a known splitter (tokenizer.ggml.model gpt2), and BPE over characters with bytes to fall
back on, as SentencePiece has it (llama). The second has no list of merges there but a score for each token, and the
pair that makes the token of the highest score is merged first: merges that are not of this kind are refused. Each
setting is found by what the tokenizer does, since files of one tokenizer differ between versions of the library.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.formats.gguf_pretokenizer import SPLITTERS, find_splitter

_SPACE = "▁"
NO_MERGES = ["no merges"]
"""In place of an empty list, which the library leaves out and llama.cpp misses; pieces start as one character each."""
_NFC_NOTE = "the tokenizer normalizes text to NFC and llama.cpp does not: letters with separate accents get other ids"
_DIFFERENT = "give a tokenizer that llama.cpp has, or export the model in 16 bits"


@dataclass(slots=True)
class GgufTokenizer:
    """The keys tokenizer.* of a file.

    model, pre   tokenizer.ggml.model, .pre
    tokens       a row of the embedding each; types: gguf.TokenType
    merges       of gpt2, "left right"; scores: of llama
    special_ids  "bos", "eos", "eot", "unk", "pad" -> id
    notes        what llama.cpp does differently with some texts
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[TokenType]
    merges: list[str] | None = None
    scores: list[float] | None = None
    special_ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    chat_template: str | list[dict[str, str]] | None = None
    notes: list[str] = field(default_factory=list)


def describe_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, *, pre: str | None = None
) -> GgufTokenizer:
    """The tokenizer as llama.cpp reads it.

    model   tells how many rows the vocabulary has, and ids that the tokenizer does not state
    pre     tokenizer.ggml.pre for a byte-level tokenizer that none of the known splitters is; not checked then
    raises  UserError if llama.cpp would give other ids
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    require(backend is not None, f"{type(tokenizer).__name__} is no tokenizer of the tokenizers library; {_DIFFERENT}")
    state = json.loads(backend.to_str())
    _require_plain_bpe(state["model"])
    num_rows = model.get_input_embeddings().weight.shape[0]
    tokens, types = _vocabulary(tokenizer, num_rows)
    if state["model"].get("byte_fallback"):
        require(pre is None, f"pre={pre} is for byte-level tokenizers, and this one falls back on bytes; leave it out")
        described = _by_scores(tokenizer, state["model"], tokens, types)
    else:
        described = _by_merges(tokenizer, state, tokens, types, pre)
    described.add_bos, described.add_eos = _added_ends(tokenizer)
    described.special_ids = _special_ids(tokenizer, model)
    described.chat_template = _chat_template(tokenizer)
    described.notes += _notes_on_added_tokens(tokenizer)
    return described


def add_tokenizer(writer: GGUFWriter, tokenizer: GgufTokenizer) -> None:
    """Write the keys tokenizer.*."""
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    if tokenizer.scores is not None:
        writer.add_token_scores(tokenizer.scores)
    if tokenizer.merges is not None:
        writer.add_token_merges(tokenizer.merges)
    for name, index in tokenizer.special_ids.items():
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


# ---- the vocabulary


def _require_plain_bpe(bpe: Mapping[str, Any]) -> None:
    require(bpe["type"] == "BPE", f"a tokenizer of {bpe['type']} is none that llama.cpp has here; {_DIFFERENT}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        require(
            not bpe.get(name), f"a tokenizer with {name}={bpe.get(name)!r} is none that llama.cpp has; {_DIFFERENT}"
        )


def _vocabulary(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> tuple[list[str], list[TokenType]]:
    """Each row's token and its kind; rows without one become [PADi], UNUSED."""
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    require(
        max(by_id) < num_rows,
        f"the tokenizer has the id {max(by_id)} and the embedding has {num_rows} rows; give the tokenizer that "
        "belongs to the model",
    )
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(num_rows)]
    require(len(set(tokens)) == num_rows, "the vocabulary has tokens named [PADi], as unused rows are called in GGUF")
    types = [TokenType.NORMAL if index in by_id else TokenType.UNUSED for index in range(num_rows)]
    for index, added in tokenizer.added_tokens_decoder.items():
        types[index] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    return tokens, types


def _special_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> dict[str, int]:
    """llama.cpp takes token 11 for bos and eos that are not stated, so the config fills in what the tokenizer lacks."""
    ends = _as_list(getattr(model.generation_config, "eos_token_id", None)) or _as_list(model.config.eos_token_id)
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(ends), None)
    require(eos is not None, "neither tokenizer nor config has an end token (eos_token); set tokenizer.eos_token")
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else model.config.bos_token_id
    ids = {"bos": eos if bos is None else bos, "eos": eos}
    others = [index for index in ends if index != eos]
    if others:
        ids["eot"] = others[0]
    ids |= {"unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    return {name: index for name, index in ids.items() if index is not None}


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def _added_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether bos and eos are put around a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for bos in (False, True):
        for eos in (False, True):
            before = [tokenizer.bos_token_id] if bos else []
            after = [tokenizer.eos_token_id] if eos else []
            if full == before + plain + after:
                return bos, eos
    raise UserError(
        f"the tokenizer turns the ids {plain} of a text into {full}; llama.cpp can put bos before and eos after it only"
    )


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str | list[dict[str, str]] | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template or None


def _notes_on_added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    strict = [t.content for t in tokenizer.added_tokens_decoder.values() if t.lstrip or t.rstrip or t.single_word]
    if not strict:
        return []
    return [f"the tokens {strict[:4]} take in white space or stand alone as words, which llama.cpp does not know"]


# ---- byte-level BPE


def _by_merges(
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    tokens: list[str],
    types: list[TokenType],
    pre: str | None,
) -> GgufTokenizer:
    backend, bpe = tokenizer.backend_tokenizer, state["model"]
    normalizer = state.get("normalizer")
    kinds = [] if normalizer is None else [part["type"] for part in normalizer.get("normalizers", [normalizer])]
    require(
        set(kinds) <= {"NFC"},
        f"the tokenizer normalizes text with {', '.join(kinds)}, which llama.cpp does not do; {_DIFFERENT}",
    )
    notes = [_NFC_NOTE] if kinds else []
    if pre is None:
        pre = _known_splitter(backend, skips_merges=bool(bpe.get("ignore_merges")))
    else:
        notes.append(f"tokenizer.ggml.pre={pre} was given and not checked")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    return GgufTokenizer("gpt2", pre, tokens, types, merges=merges or NO_MERGES, notes=notes)


def _known_splitter(backend: Tokenizer, *, skips_merges: bool) -> str:
    name = find_splitter(backend, skips_merges=skips_merges)
    known = ", ".join(splitter.name for splitter in SPLITTERS)
    require(
        name is not None,
        f"the tokenizer splits text as none of the splitters known here ({known}) does with "
        f"ignore_merges={str(skips_merges).lower()}; if llama.cpp has it, give its tokenizer.ggml.pre as pre=<name>",
    )
    return name


# ---- BPE over characters, as SentencePiece has it


def _by_scores(
    tokenizer: PreTrainedTokenizerBase, bpe: Mapping[str, Any], tokens: list[str], types: list[TokenType]
) -> GgufTokenizer:
    has_prefix = _has_space_prefix(tokenizer)
    ranks = _token_ranks(bpe)
    lowest = -float(len(ranks) + 1)
    scores = []
    for index, token in enumerate(tokens):
        if types[index] is TokenType.NORMAL and _is_byte(token):
            types[index] = TokenType.BYTE
        if types[index] is TokenType.USER_DEFINED:
            tokens[index] = token.replace(_SPACE, " ")
        of_merges = types[index] is TokenType.NORMAL and token in ranks
        scores.append(-float(ranks[token]) if of_merges else 0.0 if types[index] is TokenType.BYTE else lowest)
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
    notes = _notes_on_prefix(tokenizer) if has_prefix else []
    return GgufTokenizer("llama", "default", tokens, types, scores=scores, add_space_prefix=has_prefix, notes=notes)


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _has_space_prefix(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a space is put before a text; raises UserError if the text is split or changed in another way."""
    text = "two  words\n\t12 's, 東 "
    expected = text.replace(" ", _SPACE)
    pieces = _pieces(tokenizer, text)
    require(
        pieces in ([expected], [_SPACE + expected]),
        f"the tokenizer cuts {text!r} into {pieces[:5]} before it merges, and llama.cpp leaves it whole with {_SPACE} "
        f"for spaces; {_DIFFERENT}",
    )
    return pieces == [_SPACE + expected]


def _pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    backend = tokenizer.backend_tokenizer
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [normal]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]


def _notes_on_prefix(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    notes = []
    if _pieces(tokenizer, " a") != [_SPACE * 2 + "a"]:
        notes.append("text that begins with a space gets one more from llama.cpp")
    if tokenizer.eos_token is not None and not tokenizer.tokenize(tokenizer.eos_token + "a")[1].startswith(_SPACE):
        notes.append("text after a special token gets a space from llama.cpp")
    return notes


def _token_ranks(bpe: Mapping[str, Any]) -> dict[str, int]:
    """Token -> its place among the tokens that merges make, first merged first.

    raises  UserError if the merges are not those that the order of the tokens gives
    """
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in bpe["merges"]]
    ranks: dict[str, int] = {}
    last = None
    for left, right in merges:
        token = left + right
        require(
            token == last or token not in ranks,
            f"the merges that make {token!r} do not follow one another, so no score orders them; {_DIFFERENT}",
        )
        ranks.setdefault(token, len(ranks))
        last = token
    known, vocabulary = set(merges), bpe["vocab"]
    for token in ranks:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            require(
                pair in known or pair[0] not in vocabulary or pair[1] not in vocabulary,
                f"the tokens {pair[0]!r} and {pair[1]!r} make {token!r}, which the tokenizer does not merge and "
                f"llama.cpp would; {_DIFFERENT}",
            )
    return ranks
