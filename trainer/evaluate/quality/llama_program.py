"""llama.cpp as a Program: a .gguf file; the original is written as one, in BF16 or F16, and removed afterwards."""

import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.config.errors import UserError
from trainer.config.model import ModelSource
from trainer.evaluate.quality.program import Show, without_end
from trainer.evaluate.quality.subject import Subject
from trainer.formats.gguf_write import write_gguf
from trainer.model import load_model
from trainer.sources.resolve import resolve_model


class LlamaProgram:
    """See `Program`."""

    kept = "logits"

    def __init__(
        self,
        subject: Subject,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int,
        other_batches: bool = False,
    ) -> None:
        try:
            from llama_cpp import Llama
        except ImportError:
            raise UserError(
                "path=llama_cpp needs llama-cpp-python; pip install -e '.[bench]', or use path=server"
            ) from None
        self._folder = tempfile.TemporaryDirectory(prefix="lowbit_gguf_")
        path, self.tokenizer = self._file(subject, tokenizer)
        threads = torch.get_num_threads()
        self._longest, batch = longest, 64 if other_batches else min(longest, 512)
        try:
            self.llama = Llama(
                str(path), n_ctx=longest + 1, n_batch=batch, n_ubatch=batch, logits_all=True, verbose=False,
                n_threads=threads, n_threads_batch=threads,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(f"llama.cpp does not open {path}: {error}") from None
        self.description = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}), {batch} tokens a batch"

    def _file(
        self, subject: Subject, tokenizer: PreTrainedTokenizerBase | None
    ) -> tuple[Path, PreTrainedTokenizerBase]:
        source = subject.source
        if source.source is ModelSource.gguf:
            return Path(source.path), tokenizer or AutoTokenizer.from_pretrained(resolve_model(source))
        model, own = load_model(source)
        path = Path(self._folder.name) / "model.gguf"
        write_gguf(model, own, path, gguf_type="BF16" if model.dtype is torch.bfloat16 else "F16")
        return path, own

    def read(self, rows: Sequence[Sequence[int]], show: Show) -> None:
        for number, row in enumerate(rows):
            self.llama.reset()
            self.llama.eval(list(row))
            show(number, 0, torch.from_numpy(self.llama.scores[: len(row) - 1].copy()))

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return lambda logits: logits

    def answers(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        ends = {self.llama.token_eos(), self.tokenizer.eos_token_id}
        return [without_end(self._answer(list(prompt), max_new_tokens, ends), tuple(ends)) for prompt in prompts]

    def _answer(self, prompt: list[int], max_new_tokens: int, ends: set[int]) -> list[int]:
        self.llama.reset()
        answer: list[int] = []
        self.llama.eval(prompt)
        while len(answer) < max_new_tokens:
            answer.append(int(np.argmax(self.llama.scores[self.llama.n_tokens - 1])))
            if answer[-1] in ends or len(prompt) + len(answer) > self._longest:
                break
            self.llama.eval(answer[-1:])
        return answer

    def close(self) -> None:
        self.llama.close()
        del self.llama
        self._folder.cleanup()
