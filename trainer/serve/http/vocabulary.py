r"""Token ids as strings and bytes, each id on its own: what log-probabilities are labelled with.

Decoding one id alone lies: a byte of an emoji becomes U+FFFD, as a thousand others do, and sentencepiece drops the
leading space. So the string is read from the vocabulary's piece, whose bytes are exact. Bytes that are no UTF-8 by
themselves are written `bytes:\xf0\x9f`, as OpenAI does; ids without a piece, `token_id:N`, as vLLM does. Such strings
are different for different ids, but for a few vocabularies that hold one text twice (`A` and `<0x41>`); whoever uses
them as keys must ask `distinct`.
"""

import json
import re

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The tokenizer's pieces as bytes; looked up once an id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._special = set(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = backend.decoder.__getstate__().decode() if backend is not None and backend.decoder else ""
        self._bytes_of_char = _byte_alphabet() if "ByteLevel" in decoder else None
        self._byte_fallback = "ByteFallback" in decoder
        self._underline_is_space = "Metaspace" in decoder or json.dumps("▁") in decoder or "▁" in decoder
        self._known: dict[int, bytes | None] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out of the text."""
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that the token stands for; None for an id that the tokenizer does not have (padded vocabulary)."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        r"""The token as a string: its text, or `bytes:\x..` where it is no UTF-8, or `token_id:N`."""
        raw = self.bytes_of(token_id)
        if raw is None:
            return f"token_id:{token_id}"
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def distinct(self, token_ids: list[int]) -> list[str]:
        """Their strings, no two equal: the first with a string keeps it, later ones get `token_id:N`."""
        taken: set[str] = set()
        names = []
        for token_id in token_ids:
            name = self.text_of(token_id)
            names.append(name if name not in taken else f"token_id:{token_id}")
            taken.add(names[-1])
        return names

    def _look_up(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return None
        if self._bytes_of_char is not None and all(char in self._bytes_of_char for char in piece):
            return bytes(self._bytes_of_char[char] for char in piece)
        if self._byte_fallback and (found := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        return (piece.replace("▁", " ") if self._underline_is_space else piece).encode()


def _byte_alphabet() -> dict[str, int]:
    """Each character of the byte-level alphabet (GPT-2, openai/gpt-2 encoder.py) -> its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert alphabet.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet
