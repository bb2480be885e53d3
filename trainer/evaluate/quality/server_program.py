"""The server's engine as a Program: requests that generate nothing are read, others are answered."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainer.evaluate.quality.program import Show, without_end
from trainer.evaluate.quality.subject import Subject
from trainer.kernels.packed_linear import packed_linear
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams
from trainer.serve.sequence import Request

USUAL = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
OTHER = {"max_num_seqs": 3, "max_num_batched_tokens": 96}


class ServerProgram:
    """See `Program`."""

    kept = "hidden states"

    def __init__(
        self,
        subject: Subject,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int,
        other_batches: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        """module  what is served instead of what the subject names, with `tokenizer`"""
        settings = {"max_model_len": longest + 1, **(OTHER if other_batches else USUAL)}
        if module is None:
            self.llm = LLM(subject.model, dtype=subject.dtype, **settings)
        else:
            self.llm = LLM(module, tokenizer, **settings)
        self.tokenizer = self.llm.tokenizer
        batches = f"{settings['max_num_batched_tokens']} tokens a step"
        self.description = f"server, {_short(self.llm.runner.decoder.config.dtype)}, {batches}"

    def read(self, rows: Sequence[Sequence[int]], show: Show) -> None:
        engine, adapters = self.llm.engine, self.llm.adapters.by_name
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        adapter = adapters.get(self.llm.default_adapter)
        requests = [engine.request(list(row), params, adapter=adapter) for row in rows]
        numbers = {request.request_id: number for number, request in enumerate(requests)}

        def watch(request: Request, position: int, hidden_states: Tensor) -> None:
            show(numbers[request.request_id], position, hidden_states)

        self.llm.runner.watch = watch
        try:
            for request in requests:
                engine.add(request)
            while engine.has_work:
                engine.step()
        finally:
            self.llm.runner.watch = None

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        decoder = self.llm.runner.decoder
        weight, bias = decoder.head, decoder.head_bias

        @torch.inference_mode()
        def logits(hidden_states: Tensor) -> Tensor:
            return packed_linear(hidden_states, weight, bias, out_dtype=torch.float32, batch_invariant=True)

        return logits

    def answers(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        outputs = self.llm.generate([list(prompt) for prompt in prompts], params) if prompts else []
        ends = self.llm.engine.eos_token_ids
        return [without_end(output.choices[0].token_ids, ends) for output in outputs]

    def close(self) -> None:
        self.llm.close()
        del self.llm


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
