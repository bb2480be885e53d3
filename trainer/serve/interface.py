"""What the HTTP side knows of the engine: two protocols and two exceptions.

`AsyncEngine` is the engine of the product; tests put a scripted one here, so that HTTP is tested without a model.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from trainer.serve.config import ServeConfig
from trainer.serve.metrics import Metrics
from trainer.serve.outputs import Delta, RequestOutput, TokenLogprob
from trainer.serve.sampling_params import SamplingParams


class QueueFull(Exception):
    """No place for another waiting request; `retry_after_s` seconds are a fair time to wait."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(Exception):
    """The engine has failed or is shutting down; its text says which."""


class RequestStream(Protocol):
    """A submitted request: its deltas as they come."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Known with the first delta."""
    prompt_logprobs: list[TokenLogprob | None] | None
    """Complete with the first delta."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abort(self) -> None: ...

    async def wait(self) -> RequestOutput: ...


class Engine(Protocol):
    """The engine as the server sees it; every method is called on the event loop.

    submit  raises UserError about the request, QueueFull, EngineDead
    """

    config: ServeConfig
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    vocab_size: int
    metrics: Metrics
    model_name: str
    model_created: int
    default_adapter: str | None
    """What `model_name` means: this adapter, as trained, or None for the bare base model."""

    async def start(self) -> None: ...

    async def stop(self, drain_s: float) -> None: ...

    async def prepare(self, params: SamplingParams) -> None:
        """What takes long before a submit: a JSON schema is compiled beside the loop. Raises UserError."""

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> RequestStream: ...

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    def adapters(self) -> dict[str, dict[str, Any]]: ...

    async def state(self) -> dict[str, Any]: ...

    def is_healthy(self) -> bool: ...
