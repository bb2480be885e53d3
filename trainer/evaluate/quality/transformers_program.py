"""transformers as a Program: its loader, modules and kernels, and nothing of ours."""

from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.evaluate.quality.module_program import batches_of, generate
from trainer.evaluate.quality.program import Show
from trainer.evaluate.quality.subject import Subject
from trainer.formats.empty_model import quantization_config
from trainer.model import compute_dtype
from trainer.sources.resolve import resolve_model


class TransformersProgram:
    """See `Program`. Reads 16-bit folders, bitsandbytes and compressed-tensors; GPTQ and AWQ with their packages."""

    kept = "logits"

    def __init__(
        self,
        subject: Subject,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int = 0,
        other_batches: bool = False,
    ) -> None:
        require(
            subject.adapter is None,
            f"{subject.name} is an adapter over a base that is packed as lowbit packs it; use path=module or server",
        )
        folder = resolve_model(subject.source)
        config = quantization_config(folder) or {}
        require(
            config.get("quant_method") != "lowbit",
            f"{subject.name} holds lowbit's own codes, which transformers does not read; use path=module or server",
        )
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute_dtype(subject.source.dtype))
        except (OSError, ValueError, ImportError) as error:
            raise UserError(
                f"transformers does not open {subject.name}: {str(error).strip().splitlines()[0]}"
            ) from None
        self.model.eval()
        self._at_a_time = 4 if other_batches else 1
        dtype = str(self.model.dtype).removeprefix("torch.")
        self.description = f"transformers {version('transformers')}, {dtype}"

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]], show: Show) -> None:
        for numbers in batches_of(rows, self._at_a_time):
            ids = torch.tensor([list(rows[number]) for number in numbers], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits
            for number, own in zip(numbers, logits, strict=True):
                show(number, 0, own[:-1])

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return lambda logits: logits

    def answers(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        return generate(self.model, self.tokenizer, prompts, max_new_tokens=max_new_tokens)

    def close(self) -> None:
        del self.model
