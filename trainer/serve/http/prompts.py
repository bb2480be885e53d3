"""Prompts: text or token ids in, checked token ids out, the same ids that training saw for the same text."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError
from trainer.serve.http.errors import ApiError
from trainer.serve.interface import Engine

INLINE_CHARS = 20_000
"""Texts up to this length are tokenized on the event loop (about 5 ms); longer ones in a thread beside it."""

BARE_BASE = "base"
"""Names the base model where the served name means the base with an adapter."""

P, T = ParamSpec("P"), TypeVar("T")


@dataclass(slots=True)
class Prompt:
    """token_ids of a prompt, its text, and where in the text each token begins (None: not asked or not known)."""

    token_ids: list[int]
    text: str
    offsets: list[int] | None = None


def route_model(engine: Engine, model: str | None) -> str | None:
    """The adapter that `model` names, None for the bare base model.

    The served name is what was trained: the engine's default adapter where it has one. `base` is the model under it.

    raises  ApiError 404 for a name that is not served
    """
    if model is None or model == engine.model_name:
        return engine.default_adapter
    adapters = engine.adapters()
    if model in adapters:
        return model
    if model == BARE_BASE and engine.default_adapter is not None:
        return None
    names = ", ".join([engine.model_name, *sorted(adapters)])
    raise ApiError(
        404, f"model={model[:120]!r} is not served here; use one of {names}", param="model", code="model_not_found"
    )


async def beside_the_loop(num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`, in a thread if the text is long: streams must not wait for somebody's novel."""
    if num_chars <= INLINE_CHARS:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True, offsets: bool = False
) -> Prompt:
    """Token ids of a text, as training makes them: BOS where the tokenizer adds one, once, and no EOS of its own.

    offsets  also where each token begins, if the tokenizer can tell
    """
    offsets = offsets and tokenizer.is_fast
    encoded = tokenizer(
        text, add_special_tokens=add_special_tokens, return_offsets_mapping=offsets, return_attention_mask=False,
        verbose=False,
    )  # fmt: skip
    ids: list[int] = encoded["input_ids"]
    starts = [start for start, _ in encoded["offset_mapping"]] if offsets else None
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    skip = 1 if add_special_tokens and bos is not None and ids[:2] == [bos, bos] else 0
    end = len(ids)
    if add_special_tokens and eos is not None and ids[-1:] == [eos] and not text.endswith(tokenizer.eos_token):
        end -= 1
    return Prompt(ids[skip:end], text, starts[skip:end] if starts is not None else None)


def check_ids(token_ids: list[int], vocab_size: int, name: str) -> None:
    """Refuse ids that the model does not have.

    raises  UserError naming the field
    """
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise UserError(f"{name} has token id {token_id}; this model's ids are 0..{vocab_size - 1}")


async def encode_prompts(
    engine: Engine, prompts: list[str | list[int]], *, add_special_tokens: bool, offsets: bool
) -> list[Prompt]:
    """Every prompt of a completion call.

    raises  UserError naming the prompt that is empty or has unknown ids
    """
    limit = engine.config.max_prompts
    if len(prompts) > limit:
        raise UserError(f"prompt has {len(prompts)} entries, max_prompts={limit}; send fewer a call")
    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await beside_the_loop(num_chars, _encode_all, engine, prompts, add_special_tokens, offsets)


def _encode_all(
    engine: Engine, prompts: list[str | list[int]], add_special_tokens: bool, offsets: bool
) -> list[Prompt]:
    done = []
    for index, prompt in enumerate(prompts):
        name = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            encoded = encode_text(engine.tokenizer, prompt, add_special_tokens=add_special_tokens, offsets=offsets)
        else:
            check_ids(prompt, engine.vocab_size, name)
            encoded = Prompt(prompt, "")
        if not encoded.token_ids:
            raise UserError(f"{name} is empty and this tokenizer adds no BOS; give at least one token")
        done.append(encoded)
    return done


def prompt_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text to echo: what was sent, or what the ids say, control tokens included."""
    if prompt.text:
        return prompt.text
    # Ids of a padded vocabulary have no text.
    known = [token_id for token_id in prompt.token_ids if token_id < len(tokenizer)]
    return tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
