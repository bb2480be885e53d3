"""JSON schemas as masks over the vocabulary, by xgrammar (an optional dependency, loaded with the first schema).

xgrammar ignores what it cannot enforce (`not`, `uniqueItems`, `minimum` without a type, ...) and can be made to
compile for minutes. So a schema is first read here, and refused where the answer could break it; then a process of
its own compiles it under a time and a memory limit; only what that survives is compiled in this process. Answers
may be narrower than the schema: properties come in its order, none but the declared ones where
`additionalProperties` is not given, a pattern has to match the whole string, and tabs are only written escaped. A
format is followed by its shape: 2026-02-31 is a date to it.
"""

import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.serve.json_schema import check_schema

MAX_WHITESPACE = 16
"""Whitespace characters in a row between elements: small models fill an answer with them if nothing stops them."""
COMPILE_LIMIT_S = 5.0
START_LIMIT_S = 60.0
"""Importing xgrammar takes 2 to 3 s, with cold files more."""
MAX_GRAMMAR_BYTES = 16 * 2**20
"""Compiled; 200 optional properties take 3 MB at 49,152 tokens."""
MAX_WORKER_BYTES = 4 * 2**30
CACHED_GRAMMARS = 32


@dataclass(slots=True)
class CompiledGrammar:
    """A schema compiled for a vocabulary.

    clean  [ceil(V / 32)] int32 bitmask of the tokens without control characters other than newlines: within strings
           of a given length xgrammar would write them unescaped, which is no JSON
    """

    compiled: Any
    clean: Tensor


class GrammarCompiler:
    """Compiles JSON schemas for one tokenizer and keeps the latest. Any thread may call it; xgrammar frees the GIL.

    vocab_size     V, the logits' width: ids beyond the tokenizer's are never allowed
    eos_token_ids  what may follow a complete answer; without any, the tokenizer's
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._cache: OrderedDict[str, CompiledGrammar | UserError] = OrderedDict()
        self._lock = threading.Lock()
        """Held for a look at the cache, never for long: the event loop takes it too."""
        self._compiling = threading.Lock()
        self._compiler: Any = None
        self._clean = torch.empty(0)
        self._worker: _Worker | None = None

    def compile(self, schema: str) -> CompiledGrammar:
        """Compile a JSON schema; "{}" stands for any JSON value.

        raises  UserError without xgrammar; for a schema that is none, is too large, would take too long, or that
                the masks could not enforce; it names the place in the schema
        """
        require(
            find_spec("xgrammar") is not None,
            "json_schema: xgrammar is not installed; pip install 'lowbit[serve]', or leave the schema out",
        )
        schema = check_schema(schema)
        found = self._cached(schema)
        if found is None:
            with self._compiling:
                found = self._cached(schema) or self._compile_and_keep(schema)
        if isinstance(found, UserError):
            raise UserError(str(found))
        return found

    def _cached(self, schema: str) -> CompiledGrammar | UserError | None:
        with self._lock:
            if schema in self._cache:
                self._cache.move_to_end(schema)
            return self._cache.get(schema)

    def _compile_and_keep(self, schema: str) -> CompiledGrammar | UserError:
        try:
            found = self._compile(schema)
        except UserError as error:
            found = error
        with self._lock:
            self._cache[schema] = found
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return found

    def close(self) -> None:
        """End the process that tries schemas; the next schema starts another."""
        with self._compiling:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _compile(self, schema: str) -> CompiledGrammar:
        if self._compiler is None:
            info = self._tokenizer_info()
            self._compiler, self._clean = _compiler(info), _clean_tokens(info)
        if self._worker is None:
            self._worker = _Worker(self._tokenizer_info().serialize_json())
        try:
            num_bytes, refusal = self._worker.try_schema(schema)
        except (OSError, EOFError):
            self._worker.close()
            self._worker, num_bytes = None, 0
            refusal = f"compiling it took more than {COMPILE_LIMIT_S:g} s or too much memory; simplify it"
        require(not refusal, f"json_schema: {refusal}")
        require(
            num_bytes <= MAX_GRAMMAR_BYTES,
            f"json_schema: it takes {num_bytes} bytes compiled, above {MAX_GRAMMAR_BYTES}; make it smaller",
        )
        return CompiledGrammar(_compile_schema(self._compiler, schema), self._clean)

    def _tokenizer_info(self) -> Any:
        from xgrammar import TokenizerInfo

        stops = self._eos_token_ids or [self._tokenizer.eos_token_id]
        require(
            None not in stops, "json_schema: this model has no end-of-text token, so that an answer could never end"
        )
        return TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=stops)


class Grammar:
    """How far one choice has come in its grammar."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        from xgrammar import GrammarMatcher

        self._clean = compiled.clean
        self._matcher = GrammarMatcher(compiled.compiled)

    def bitmask(self) -> Tensor:
        """The tokens that may come next. [ceil(V / 32)] int32, bit i % 32 of word i // 32 for token i; a new tensor"""
        mask = torch.empty((1, len(self._clean)), dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        return mask[0] & self._clean

    def accept(self, token_id: int) -> bool:
        """Go on by a token. False, and no step, if the grammar does not allow it."""
        if self.terminated or not int(self._clean[token_id // 32]) >> token_id % 32 & 1:
            return False
        return self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fork(self) -> "Grammar":
        """A copy for another choice that goes on from here."""
        other = object.__new__(Grammar)
        other._clean, other._matcher = self._clean, self._matcher.fork()
        return other

    @property
    def terminated(self) -> bool:
        """Whether the answer is complete and its end token accepted; nothing may follow."""
        return self._matcher.is_terminated()


# ---- compiling under limits


def _compiler(info: Any) -> Any:
    from xgrammar import GrammarCompiler as Compiler

    return Compiler(info, max_threads=min(4, os.cpu_count() or 1), cache_enabled=False)


def _clean_tokens(info: Any) -> Tensor:
    """The bitmask of `CompiledGrammar`. End tokens are clean, whatever they are called."""
    clean = np.zeros(-(-info.vocab_size // 32) * 32, np.uint8)
    for token_id, token in enumerate(info.decoded_vocab):
        clean[token_id] = not any(byte < 0x20 and byte != 0x0A for byte in token)
    clean[info.stop_token_ids] = 1
    return torch.from_numpy(np.packbits(clean, bitorder="little").view(np.int32))


def _compile_schema(compiler: Any, schema: str) -> Any:
    return compiler.compile_json_schema(schema, strict_mode=True, max_whitespace_cnt=MAX_WHITESPACE)


class _Worker:
    """A process that compiles schemas to see whether they do: it can be killed, a thread cannot.

    Messages both ways: the length in 8 bytes, then UTF-8 text. First the tokenizer, answered when xgrammar is
    loaded, then schemas, each answered by the bytes it takes compiled or the reason of a refusal.
    """

    def __init__(self, tokenizer_info: str) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.serve.grammar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C is the server's to handle
        )
        try:
            self._ask(tokenizer_info, START_LIMIT_S)
        except (OSError, EOFError):
            self.close()
            raise RuntimeError(f"the process that tries JSON schemas did not start in {START_LIMIT_S:g} s") from None

    def try_schema(self, schema: str) -> tuple[int, str]:
        """Compile a schema in the worker.

        returns  the bytes it takes, and why it is refused, or nothing
        raises   EOFError or OSError if the time or the memory ran out; the worker is then useless
        """
        answer = self._ask(schema, COMPILE_LIMIT_S)
        return (int(answer), "") if answer.isdecimal() else (0, answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what could not be written is lost with the process
                pipe.close()

    def _ask(self, text: str, limit_s: float) -> str:
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            _send(self._process.stdin, text)
            return _receive(self._process.stdout)
        finally:
            timer.cancel()


def _send(stream: Any, text: str) -> None:
    data = text.encode(errors="surrogatepass")
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _receive(stream: Any) -> str:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    length = int.from_bytes(header, "little")
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data.decode(errors="surrogatepass")


def _answer_forever() -> None:
    """The worker's side."""
    import resource  # not on Windows

    from xgrammar import TokenizerInfo

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write to the pipe
    compiler = _compiler(TokenizerInfo.deserialize_json(_receive(sys.stdin.buffer)))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_WORKER_BYTES, MAX_WORKER_BYTES))
    _send(answers, "")
    while True:
        try:
            schema = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = str(_compile_schema(compiler, schema).memory_size_bytes)
        except RuntimeError as error:
            answer = "xgrammar says: " + re.sub(r"^\[[^\]]*\] \S+: ", "", str(error)).strip()
        _send(answers, answer)


if __name__ == "__main__":
    _answer_forever()
