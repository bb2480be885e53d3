"""POST /v1/loglikelihood: how likely continuations are after a context, and whether each is what greedy would say.

For multiple choice: the continuations of a context share its KV blocks, since only their own positions need logits; a
completion with `echo` has to compute every position again. Text is split into tokens as EleutherAI's
lm-evaluation-harness does (`_encode_pair`): spaces at the context's end belong to the continuation, both are tokenized
together, and the context's own number of tokens is the border.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import Request
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.serve.http.calls import Call, usage
from trainer.serve.http.logprobs import json_logprob
from trainer.serve.http.prompts import beside_the_loop, check_ids, encode_text, route_model
from trainer.serve.http.protocol import LoglikelihoodItem, LoglikelihoodRequest
from trainer.serve.interface import Engine
from trainer.serve.outputs import TokenLogprob
from trainer.serve.sampling_params import SamplingParams


@dataclass(slots=True)
class Pair:
    """A context and a continuation as token ids, neither empty."""

    context: list[int]
    continuation: list[int]


async def loglikelihood(engine: Engine, request: Request, body: LoglikelihoodRequest) -> dict[str, Any]:
    """Score every continuation of every request.

    raises  UserError, ApiError, QueueFull, EngineDead
    """
    adapter, items = route_model(engine, body.model), body.items()
    num_pairs = sum(len(item.continuations) for item in items)
    limit = engine.config.max_prompts
    require(num_pairs <= limit, f"continuations: the call has {num_pairs}, max_prompts={limit}; send fewer a call")
    num_chars = sum(len(item.context) + sum(map(len, item.continuations)) for item in items)
    pairs = await beside_the_loop(num_chars, _encode_items, engine, items, body.add_special_tokens)
    flat = [pair for of_item in pairs for pair in of_item]
    call = Call(engine, "score")
    await call.submit(
        [pair.context + pair.continuation for pair in flat],
        [_params(len(pair.context)) for pair in flat],
        adapter=adapter,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    outputs = await call.collect(request)
    scores = iter([score(output.prompt_logprobs or []) for output in outputs])
    results = [{"continuations": [next(scores) for _ in of_item]} for of_item in pairs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached_tokens = sum(output.num_cached_tokens for output in outputs)
    return {
        "id": call.call_id,
        "object": "loglikelihood",
        "model": body.model or engine.model_name,
        **({"results": results} if body.requests is not None else results[0]),
        "usage": usage(prompt_tokens, 0, cached_tokens),
    }


def score(entries: list[TokenLogprob | None]) -> dict[str, Any]:
    """The figures of one continuation from its tokens' log-probabilities, each with the likeliest token's.

    is_greedy compares values, so a token that ties with the likeliest one counts, as it does for harnesses over HTTP.
    """
    scored = [entry for entry in entries if entry is not None]
    token_logprobs = [json_logprob(entry.logprob) for entry in scored]
    return {
        "logprob": sum(token_logprobs),
        "is_greedy": all(entry.logprob >= max(value for _, value in entry.top) for entry in scored),
        "num_tokens": len(scored),
        "token_logprobs": token_logprobs,
    }


def encode_pair(
    tokenizer: PreTrainedTokenizerBase,
    context: str | list[int],
    continuation: str | list[int],
    *,
    add_special_tokens: bool = True,
) -> Pair:
    """Token ids of a context and a continuation; see the module docstring.

    An empty context is the tokenizer's BOS, or EOS where it has none. Where one side is ids, the other is tokenized
    alone.

    raises  UserError if nothing is left of one side
    """
    if isinstance(context, str) and isinstance(continuation, str):
        pair = _encode_texts(tokenizer, context, continuation, add_special_tokens)
    else:
        pair = Pair(
            encode_text(tokenizer, context, add_special_tokens=add_special_tokens).token_ids
            if isinstance(context, str)
            else context,
            encode_text(tokenizer, continuation, add_special_tokens=False).token_ids
            if isinstance(continuation, str)
            else continuation,
        )
    if not pair.context:
        pair.context = [_first_token(tokenizer)]
    require(bool(continuation), "continuation is empty; give at least one token")
    require(
        bool(pair.continuation),
        f"continuation {continuation[:40]!r} merges with the end of its context into one token, so it has no score of "
        "its own; begin it with a space, or give both as token ids",
    )
    return pair


def _encode_texts(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, add_special_tokens: bool
) -> Pair:
    kept = context.rstrip()
    whole = encode_text(tokenizer, context + continuation, add_special_tokens=add_special_tokens).token_ids
    border = len(encode_text(tokenizer, kept, add_special_tokens=add_special_tokens).token_ids)
    return Pair(whole[:border], whole[border:])


def _first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise UserError("context is empty and the tokenizer has neither BOS nor EOS; give at least one token")


def _params(start: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start)


def _encode_items(engine: Engine, items: list[LoglikelihoodItem], add_special_tokens: bool) -> list[list[Pair]]:
    done = []
    for number, item in enumerate(items):
        pairs = []
        for index, continuation in enumerate(item.continuations):
            where = f"requests[{number}].continuations[{index}]"
            try:
                pair = encode_pair(engine.tokenizer, item.context, continuation, add_special_tokens=add_special_tokens)
            except UserError as error:
                raise UserError(f"{error} ({where})") from error
            check_ids(pair.context, engine.vocab_size, f"context of {where}")
            check_ids(pair.continuation, engine.vocab_size, where)
            pairs.append(pair)
        done.append(pairs)
    return done
