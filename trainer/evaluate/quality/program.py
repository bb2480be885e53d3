"""Program: what computes a model, and the four that there are.

    server        the engine of `python -m trainer.serve`, its scheduler, paged cache and kernels
    module        our layers in the module, as training calls them
    transformers  transformers' own loader, modules and kernels
    llama_cpp     llama.cpp on a .gguf file

One program holds one model; `with open_program(...)` lets it go. A program shows for each position of a row what its
output head is given, and turns that into logits: so hidden states can be kept, which are a hundredth of the logits.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.evaluate.quality.subject import Subject
from trainer.resident import release_free_memory

Show = Callable[[int, int, Tensor], None]
"""Row, first position, and what the output head is given there and at the positions behind it [n, ...]."""


class Program(Protocol):
    """A model that is opened.

    tokenizer    of the model; for llama_cpp, that of the original
    description  what computes, with versions
    kept         what `show` is given: "hidden states" or "logits"
    """

    tokenizer: PreTrainedTokenizerBase
    description: str
    kept: str

    def read(self, rows: Sequence[Sequence[int]], show: Show) -> None:
        """Show every position of each row but the last, a row's own in order."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """What was shown [n, ...] -> logits [n, vocab_size]; holds no more of the model than that needs."""

    def answers(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """Greedy answers to prompts of token ids, without what ends them."""

    def close(self) -> None:
        """Let the model go."""


@contextmanager
def open_program(
    subject: Subject, *, tokenizer: PreTrainedTokenizerBase | None = None, longest: int, other_batches: bool = False
) -> Iterator[Program]:
    """A subject in memory, as long as the block runs.

    tokenizer      of the original, for files whose own is not read
    longest        tokens of the longest row, or prompt with its answer
    other_batches  the same computation in batches of other sizes
    raises         UserError if this program does not compute this model, or is not installed
    """
    match subject.path:
        case "server":
            from trainer.evaluate.quality.server_program import ServerProgram as program
        case "module":
            from trainer.evaluate.quality.module_program import ModuleProgram as program
        case "transformers":
            from trainer.evaluate.quality.transformers_program import TransformersProgram as program
        case "llama_cpp":
            from trainer.evaluate.quality.llama_program import LlamaProgram as program
    opened = program(subject, tokenizer=tokenizer, longest=longest, other_batches=other_batches)
    try:
        yield opened
    finally:
        opened.close()
        del opened
        gc.collect()  # decoders and their recordings refer to each other
        release_free_memory()


def without_end(token_ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """An answer up to the first token that ends it."""
    end = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
    return list(token_ids[:end])
