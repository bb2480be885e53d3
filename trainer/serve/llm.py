"""LLM: the engine offline. `LLM("smollm2_135m").generate([...])` runs the very code that the server runs."""

import atexit
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import template_message, with_one_bos
from trainer.config.errors import UserError, require
from trainer.serve.adapters import Adapter, factors_from_module
from trainer.serve.build import LIVE_ADAPTER, build_engine
from trainer.serve.config import ServeConfig
from trainer.serve.engine import request_output
from trainer.serve.open_model import open_model, opened_module
from trainer.serve.outputs import RequestOutput
from trainer.serve.sampling_params import SamplingParams
from trainer.serve.sequence import Request

Prompt = str | Sequence[int]


class LLM:
    """Generate and score with paged attention and continuous batching, in this process.

    model       what `python -m trainer.serve model=` takes, or a module in memory, packed or not, with its `tokenizer`:
                then the function that is being trained is the one that answers
    **settings  fields of ServeConfig; with tensor_parallel_size > 1 the script runs under torchrun, and every process
                but the first stays inside this constructor until the script ends
    raises      UserError if the model or a setting is not accepted
    """

    def __init__(
        self, model: str | Path | nn.Module, tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any
    ) -> None:
        live = isinstance(model, nn.Module)
        if isinstance(tokenizer, str | Path):  # as on the command line
            settings["tokenizer"], tokenizer = str(tokenizer), None
        unknown = sorted(set(settings) - set(ServeConfig.__dataclass_fields__))
        require(not unknown, f"{unknown} are no settings of the server; see trainer.serve.config.ServeConfig")
        unused = sorted({"adapters", "dtype", "quantization", "served_model_name", "tokenizer"} & set(settings))
        require(not (live and unused), f"{unused} would change nothing: a module in memory is served as it is")
        self.config = ServeConfig(model=LIVE_ADAPTER if live else str(model), **settings)
        if live:
            require(tokenizer is not None, "LLM(model=<module>) needs tokenizer=")
            opened = opened_module(model, tokenizer)
        else:
            opened = open_model(self.config)
            opened.tokenizer = tokenizer or opened.tokenizer
        self._module = opened.module if live else None
        built = build_engine(opened, self.config)
        self.engine, self.runner, self.adapters, self.close = built.engine, built.runner, built.adapters, built.close
        if self.runner.parallel.rank > 0:
            self.runner.follow(self.adapters)
            sys.exit(0)
        if self.runner.parallel.size > 1:
            atexit.register(self.close)  # keeps the engine until then, which one process alone has no need of
        self.default_adapter = built.default_adapter
        self.tokenizer = opened.tokenizer

    # ---- generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = "default",
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answer all prompts; outputs come in the order of the prompts.

        prompts  text, token ids, or a list of these
        params   one for all, or one a prompt; without: 16 tokens at temperature 1
        adapter  a loaded adapter's name, None for the base; "default" is the run's or the module's own
        raises   UserError naming the prompt or the setting that is not accepted; nothing has run then
        """
        texts = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        params = SamplingParams(max_tokens=16) if params is None else params
        each = [params] * len(texts) if isinstance(params, SamplingParams) else list(params)
        require(len(each) == len(texts), f"{len(each)} params for {len(texts)} prompts; give one, or one a prompt")
        chosen = self._adapter(adapter)
        requests = []
        for number, (text, own) in enumerate(zip(texts, each, strict=True)):
            try:
                token_ids = self._token_ids(text)
                requests.append(self.engine.request(token_ids, own, adapter=chosen, priority=priority))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}") from None
        return self._run(requests)

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = "default",
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        several = [conversations] if isinstance(conversations[0], dict) else list(conversations)
        prompts = [
            self.tokenizer.apply_chat_template(
                [template_message(turn) for turn in turns], add_generation_prompt=True, return_dict=False
            )
            for turns in several
        ]
        prompts = [with_one_bos(prompt, self.tokenizer.bos_token_id) for prompt in prompts]
        return self.generate(prompts, params, adapter=adapter)

    def loglikelihood(
        self, contexts: Sequence[Prompt], continuations: Sequence[Prompt], *, adapter: str | None = "default"
    ) -> list[tuple[float, bool]]:
        """Sum of the log-probabilities of each continuation after its context, and whether it is the greedy one.

        Contexts and continuations given as text are tokenised apart; give ids where the border matters.
        """
        params, prompts = [], []
        for context, continuation in zip(contexts, continuations, strict=True):
            context_ids, own = self._token_ids(context), self._token_ids(continuation, special=False)
            require(bool(context_ids), "context is empty; give at least one token")
            prompts.append([*context_ids, *own])
            params.append(SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=len(context_ids)))
        outputs = self.generate(prompts, params, adapter=adapter)
        return [
            (math.fsum(t.logprob for t in output.prompt_logprobs), all(t.rank == 1 for t in output.prompt_logprobs))
            for output in outputs
        ]

    def _run(self, requests: list[Request]) -> list[RequestOutput]:
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_work:
                self.engine.step()
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return [request_output(request) for request in requests]

    def _token_ids(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt, add_special_tokens=special)["input_ids"]
        return list(prompt)

    # ---- adapters

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a PEFT adapter under a name; raises UserError if it does not fit this base."""
        require(name != "default", "lora_name=default means the model's own adapter here; use another name")
        self.adapters.install(name, str(folder), self.adapters.read(name, str(folder)))

    def unload_adapter(self, name: str) -> None:
        self.adapters.unload(name)

    def refresh(self) -> None:
        """Read a live module's adapter again, after it was trained further."""
        require(self._module is not None, "refresh() is for LLM(model=<module>)")
        factors = factors_from_module(self._module)
        require(factors is not None, "the module has no active adapter to read")
        if LIVE_ADAPTER in self.adapters.by_name:
            self.adapters.replace(self.adapters.by_name[LIVE_ADAPTER], factors)
        else:  # attached after the server was built
            self.adapters.install(LIVE_ADAPTER, "in memory", factors)
            self.default_adapter = LIVE_ADAPTER

    def _adapter(self, name: str | None) -> Adapter | None:
        name = self.default_adapter if name == "default" else name
        if name is None:
            return None
        require(
            name in self.adapters.by_name,
            f"adapter={name} is not loaded; loaded are: {', '.join(self.adapters.by_name) or 'none'}",
        )
        return self.adapters.by_name[name]
