"""From tokens to the text that may be shown: whole characters only, and never the beginning of a stop string.

One Detokenizer a choice; the engine appends each token and takes what is new. A token is decoded in the company of
a few tokens before it, and what that adds is its text: so leading spaces and merges are right, and the cost of a
token does not grow with the answer. Three things keep the pieces' sum equal to decoding the whole:

- The prompt's last tokens come first, undisplayed: the text is what the answer adds to them.
- A replacement character at the end may be a character of which bytes are still to come, and waits for the next
  token. Those before it are final: UTF-8 says where a character begins, and none is longer than four bytes.
- Tokenizers with byte fallback (sentencepiece's `<0x0A>` tokens) decode a run of such tokens all or nothing, so
  that one bad byte would take back characters already shown. Their bytes are decoded here, one by one; only for
  runs with invalid bytes does that differ from the tokenizer, and it keeps the valid characters.
"""

import codecs
import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from trainer.serve.sampling_params import SamplingParams

CONTEXT = 4
"""Tokens before a token that it is decoded with: as many bytes at least, so that a cut character lies behind them."""
MAX_WINDOW = 16
"""Tokens in the window before it is cut to CONTEXT again; decoding it takes 10 us."""
REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one choice, token by token.

    Decodes with skip_special_tokens as asked and without clean_up_tokenization_spaces, which would change text
    already shown. Ids without a token (a vocabulary's padding) have no text. The prompt's text is never searched
    for stop strings; a stop string that ends before min_tokens is text like any other.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._skip_special = params.skip_special_tokens
        self._window: list[int] = []
        self._decoded_len = 0  # characters of the window's text that are in this choice's (or the prompt's) text
        self._bytes = b""  # the beginning of a character, from byte-fallback tokens
        self._pieces: list[str] = []
        self._num_taken = 0
        self._held = ""  # may become a stop string
        self._ended = False
        self._cut_by_prompt = False
        for token_id in self._tail(prompt_token_ids):
            self._decode(token_id)
        self._cut_by_prompt = bool(self._rest())  # goes on with it if the answer completes it, else is the prompt's

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token of the answer.

        may_stop  False before min_tokens: a stop string that is complete with this token does not count
        returns   the stop string that ended the text, which is then cut there, else None
        """
        assert not self._ended, "append after the end of the text"
        return self._add(self._without_prompt(self._decode(token_id)), may_stop)

    def finish(self) -> None:
        """End the text: an incomplete character becomes U+FFFD, and what was held back may be shown."""
        if self._ended:
            return
        self._ended = True
        self._pieces.append(self._held + self._without_prompt(self._rest()))
        self._held, self._bytes = "", b""

    def take(self) -> str:
        """The text that may be shown and was not taken before."""
        new = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return new

    @property
    def text(self) -> str:
        """All text so far, held back or not, cut at the stop string."""
        return "".join(self._pieces) + self._held

    def fork(self) -> "Detokenizer":
        """A copy for another choice that goes on from here."""
        other = object.__new__(Detokenizer)
        other.__dict__.update(self.__dict__)
        other._window, other._pieces = self._window.copy(), self._pieces.copy()
        return other

    # ---- tokens to characters

    def _tail(self, token_ids: list[int]) -> list[int]:
        """The last CONTEXT ids that have text."""
        tail = []
        for token_id in reversed(token_ids):
            if len(tail) == CONTEXT:
                break
            if self._has_text(token_id):
                tail.append(token_id)
        return tail[::-1]

    def _has_text(self, token_id: int) -> bool:
        if self._skip_special and token_id in _special_ids(self._tokenizer):
            return False
        return self._tokenizer.convert_ids_to_tokens(token_id) is not None

    def _decode(self, token_id: int) -> str:
        """The characters that the token completes."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        fallback = _fallback_bytes(self._tokenizer)
        if token_id in fallback:
            self._bytes += bytes([fallback[token_id]])
            new, used = codecs.utf_8_decode(self._bytes, "replace", False)
            self._bytes = self._bytes[used:]
            self._start_window()
            return new
        incomplete, self._bytes = self._bytes.decode(errors="replace"), b""
        text = self._window_text()
        end = self._final_len(text)
        new = text[self._decoded_len : end]
        self._decoded_len = max(end, self._decoded_len)
        if len(self._window) >= MAX_WINDOW:
            self._start_window()
        return incomplete + new

    def _rest(self) -> str:
        """What is incomplete, as it would be if nothing followed."""
        return self._bytes.decode(errors="replace") + self._window_text()[self._decoded_len :]

    def _without_prompt(self, new: str) -> str:
        """The prompt may end within a character; if the answer does not complete it, its U+FFFD is not the answer's."""
        if new and self._cut_by_prompt:
            self._cut_by_prompt = False
            return new.removeprefix(REPLACEMENT)
        return new

    def _start_window(self) -> None:
        self._window = self._window[-CONTEXT:]
        self._decoded_len = self._final_len(self._window_text())

    def _window_text(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )

    def _final_len(self, text: str) -> int:
        """How much of a window's text no later token can change."""
        return len(text) - (text.endswith(REPLACEMENT) and not _fallback_bytes(self._tokenizer))

    # ---- stop strings

    def _add(self, new: str, may_stop: bool) -> str | None:
        if not self._stops:
            self._pieces.append(new)
            return None
        text = self._held + new
        if may_stop and (found := self._find_stop(text, len(self._held))):
            start, stop = found
            self._pieces.append(text[: start + len(stop)] if self._include_stop else text[:start])
            self._held, self._ended = "", True
            return stop
        shown = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._pieces.append(text[:shown])
        self._held = text[shown:]
        return None

    def _find_stop(self, text: str, searched: int) -> tuple[int, str] | None:
        """The stop string that is complete first, of those the longest, and where it starts.

        searched  characters of the text in which no stop string is complete
        """
        found = []
        for stop in self._stops:
            start = text.find(stop, max(searched + 1 - len(stop), 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string, not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that decoding with skip_special_tokens leaves out."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


@lru_cache(maxsize=8)
def _fallback_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """Id -> byte of the `<0x..>` tokens, where the tokenizer decodes them as bytes; else empty."""
    found = {}
    for token, token_id in tokenizer.get_vocab().items():
        if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
            found[token_id] = int(match[1], 16)
    ids = {byte: token_id for token_id, byte in found.items()}
    pair = [ids.get(byte) for byte in "é".encode()]
    return found if None not in pair and tokenizer.decode(pair) == "é" else {}
