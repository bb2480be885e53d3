"""What clients may send: OpenAI's request bodies with vLLM's extensions, each a pydantic model.

A field that we do not know is refused, so that no setting is dropped in silence; the few OpenAI fields that could not
change an answer here (`NoEffect`) are accepted. Ranges are checked by `SamplingParams`, in one place for HTTP and for
Python callers.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from trainer.config.errors import UserError
from trainer.serve.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_PRIORITY = 1_000_000
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


def is_token_ids(value: object) -> bool:
    """Whether this is a list of whole numbers (true and false are none)."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _prompts(value: object) -> list[str | list[int]]:
    """The four forms of `prompt`, as a list of prompts."""
    if isinstance(value, str) or (value and is_token_ids(value)):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value) or all(map(is_token_ids, value)):
            return value
    raise ValueError("give a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _text_or_ids(value: object) -> str | list[int]:
    if isinstance(value, str) or is_token_ids(value):
        return value
    raise ValueError("give a string or a list of token ids")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _without_effect(value: object) -> object:
    return value


Prompts = Annotated[
    list,
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
TextOrIds = Annotated[Any, PlainValidator(_text_or_ids), WithJsonSchema({"anyOf": [{"type": "string"}, _TOKEN_IDS]})]
Strings = Annotated[
    list[str],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
NoEffect = Annotated[Any, PlainValidator(_without_effect), Field(description="Accepted; without effect here.")]


class StreamOptions(BaseModel):
    model_config = _STRICT
    include_usage: bool | None = None
    include_obfuscation: NoEffect = None


class JsonSchema(BaseModel):
    model_config = _STRICT
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: NoEffect = None
    """The schema is always enforced."""


class ResponseFormat(BaseModel):
    model_config = _STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_goes_with_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, which needs it")
        return self

    def schema_text(self) -> str | None:
        """For `SamplingParams.json_schema`."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return '{"type": "object"}'
        return json.dumps(self.json_schema.schema_)


class SamplingFields(BaseModel):
    """What completions and chat share."""

    model_config = _STRICT
    model: str | None = None
    """The base model's name or an adapter's; the base model if left out."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Strings | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Smaller is served earlier."""
    cache_salt: str | None = Field(None, min_length=1)
    """Only requests with the same salt share KV blocks."""
    user: NoEffect = None
    store: NoEffect = None
    metadata: NoEffect = None
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Refuse what only goes with a stream, or only without.

        raises  UserError
        """
        if self.stream_options and not self.stream:
            raise UserError("stream_options is for streams; set stream=true or leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise UserError("prompt_logprobs is not part of streams; set stream=false")

    def sampling_params(self, **settings: object) -> SamplingParams:
        """The request's own values over `SamplingParams`' defaults; `settings` over both.

        raises  UserError naming the field
        """
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given |= settings
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        if self.response_format is not None:
            given["json_schema"] = self.response_format.schema_text()
        return SamplingParams(**given)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise UserError(f"logit_bias has the key {key[:40]!r}; give token ids as strings of digits")
    return int(key)


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    """Put the prompt, and its log-probabilities if `logprobs` is set, before each answer."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    add_special_tokens: bool = True
    """Let the tokenizer add its BOS to prompts that are text."""
    suffix: str | None = None

    def check(self) -> None:
        """Refuse combinations that cannot be served.

        raises  UserError naming the field
        """
        self.check_stream()
        if self.suffix is not None:
            raise UserError("suffix is not supported: these models do not fill in the middle; leave it out")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise UserError(f"best_of={self.best_of} needs all answers before the first is shown; set stream=false")

    def to_params(self) -> SamplingParams:
        """raises  UserError naming the field"""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        prompt_logprobs = max((value for value in wanted if value is not None), default=None)
        max_tokens = 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default
        return self.sampling_params(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)


class ChatFields(BaseModel):
    """How messages become a prompt; /tokenize takes the same."""

    model_config = _STRICT
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """Begin the assistant's turn; true unless continue_final_message is."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Literal[False] = False
    """The chat template writes them; twice would not be what was trained."""


class ChatRequest(SamplingFields, ChatFields):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Refuse combinations that cannot be served.

        raises  UserError naming the field
        """
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise UserError(f"top_logprobs={self.top_logprobs} needs logprobs=true; set it")
        if self.tool_choice is not None and not self.tools:
            raise UserError("tool_choice is for requests with tools; give tools or leave it out")
        if self.parallel_tool_calls is False and self.tools:
            raise UserError("parallel_tool_calls=false is not supported: the model decides; leave it out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise UserError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} mean the same; "
                "give one"
            )

    def to_params(self) -> SamplingParams:
        """raises  UserError naming the field"""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=max_tokens, logprobs=logprobs)


class LoglikelihoodItem(BaseModel):
    model_config = _STRICT
    context: TextOrIds
    """Text or token ids; empty text is the model's BOS."""
    continuations: list[TextOrIds] = Field(min_length=1)


class LoglikelihoodRequest(BaseModel):
    """POST /v1/loglikelihood: one context with its continuations, or `requests`, a list of such."""

    model_config = _STRICT
    model: str | None = None
    context: TextOrIds | None = None
    continuations: list[TextOrIds] | None = Field(None, min_length=1)
    requests: list[LoglikelihoodItem] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    """Let the tokenizer add its BOS to contexts that are text."""
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: str | None = Field(None, min_length=1)

    def items(self) -> list[LoglikelihoodItem]:
        """raises  UserError unless it is one form and complete"""
        single = self.context is not None and self.continuations is not None
        if single and self.requests is None:
            return [LoglikelihoodItem(context=self.context, continuations=self.continuations)]
        if self.requests is not None and self.context is None and self.continuations is None:
            return self.requests
        raise UserError("context is for one request, with continuations; give both, or requests alone")


class TokenizeRequest(BaseModel):
    """POST /tokenize: `prompt`, or `messages` and what goes with them."""

    model_config = _STRICT
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    """true for a prompt, false for messages, if left out."""
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_fields(self) -> ChatFields | None:
        """The chat to render, None for a prompt.

        raises  UserError unless it is one of the two, without settings of the other
        """
        of_chat = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        if (self.prompt is None) == (self.messages is None):
            raise UserError("prompt or messages: give one of them")
        if self.messages is None:
            if extra := [name for name in of_chat if getattr(self, name)]:
                raise UserError(f"{extra[0]} is for messages; leave it out with prompt")
            return None
        if self.add_special_tokens:
            raise UserError("add_special_tokens=true with messages: the chat template writes them; leave it out")
        return ChatFields(messages=self.messages, **{name: getattr(self, name) for name in of_chat})


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = _STRICT
    model: str | None = None
    tokens: list[int]


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = _STRICT
    lora_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}$")
    lora_path: str = Field(pattern=r"^[^\x00]+$")


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = _STRICT
    lora_name: str
