"""Chat messages to token ids, through the tokenizer's chat template: the ids that training saw, to the letter.

Messages go to the template as they came, other keys included; only what templates cannot read is brought into their
form: text parts become one string, the arguments of earlier tool calls become objects, null becomes an empty string;
and what training does too (trainer/chat_messages.py).
"""

import inspect
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import TEMPLATE_FAULTS, template_message, with_one_bos
from trainer.config.errors import UserError, require
from trainer.serve.http.protocol import ChatFields

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What clients may send -> what templates know; developer is OpenAI's newer word for system."""
_RESERVED = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *("messages", "raise_exception", "strftime_now"),
}


def render_chat(tokenizer: PreTrainedTokenizerBase, chat: ChatFields, *, use_tools: bool = True) -> list[int]:
    """Token ids of the conversation, the beginning of the assistant's answer included if it is to be generated.

    raises  UserError with the template's own reason if it refuses the messages, if there is no template, or if tools
            are given and the template does not look at them
    """
    require(
        bool(tokenizer.chat_template),
        "messages: this model has no chat template, so it was not trained on conversations; use /v1/completions",
    )
    messages = [_message(f"messages[{index}]", message) for index, message in enumerate(chat.messages)]
    settings = {**_template_kwargs(tokenizer, chat), **_turns(chat)}
    if not (use_tools and chat.tools):
        return _apply(tokenizer, messages, settings)
    for index, tool in enumerate(chat.tools):
        function = tool.get("function")
        require(
            tool.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str),
            f'tools[{index}]: give {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}',
        )
    token_ids = _apply(tokenizer, messages, {**settings, "tools": chat.tools})
    require(
        token_ids != _apply(tokenizer, messages, settings),
        "tools: this model's chat template does not look at tools; describe them in a system message",
    )
    return token_ids


def num_chars(chat: ChatFields) -> int:
    """About how long the conversation is."""
    return sum(len(str(message.get("content"))) for message in chat.messages)


def _turns(chat: ChatFields) -> dict[str, bool]:
    begin = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    require(
        not (begin and chat.continue_final_message),
        "add_generation_prompt and continue_final_message exclude each other; set one",
    )
    require(
        not chat.continue_final_message or chat.messages[-1].get("role") == "assistant",
        "continue_final_message needs an assistant's message at the end of messages",
    )
    return {"add_generation_prompt": begin, "continue_final_message": chat.continue_final_message}


def _template_kwargs(tokenizer: PreTrainedTokenizerBase, chat: ChatFields) -> dict[str, Any]:
    """Variables for the template; never the arguments of the call itself, such as another template."""
    given = chat.chat_template_kwargs or {}
    if taken := sorted(given.keys() & (_RESERVED | tokenizer.special_tokens_map.keys())):
        raise UserError(f"chat_template_kwargs has {taken[0]!r}, which is not the template's to take; remove it")
    return given


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], settings: dict[str, Any]) -> list[int]:
    try:
        token_ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **settings)
    except TEMPLATE_FAULTS as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = str(error) or type(error).__name__
        raise UserError(f"messages: the chat template refuses the roles {roles[:200]}: {reason[:500]}") from error
    require(bool(token_ids), "messages: the chat template makes no token of them; give a message with content")
    return with_one_bos(token_ids, tokenizer.bos_token_id)


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    require(
        isinstance(role, str) and role in ROLES,
        f"{where}.role={role!r}; use one of {', '.join(ROLES)}",
    )
    result = {**message, "role": ROLES[role], "content": _content(where, role, message)}
    if "tool_calls" in message:
        if message["tool_calls"]:
            result["tool_calls"] = _tool_calls(where, role, message["tool_calls"])
        else:
            del result["tool_calls"]
    return template_message(result)


def _content(where: str, role: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        require(role == "assistant", f"{where}.content is missing; give text")
        return ""
    if isinstance(content, str):
        return content
    require(isinstance(content, list), f"{where}.content is neither a string nor a list of parts; give text")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        require(
            kind == "text" and isinstance(part.get("text"), str),
            f'{where}.content[{index}] has type {kind!r}; this model reads text only: {{"type": "text", "text": ...}}',
        )
        texts.append(part["text"])
    return "\n".join(texts)  # as vLLM and llama.cpp join them


def _tool_calls(where: str, role: str, calls: object) -> list[dict[str, Any]]:
    require(role == "assistant" and isinstance(calls, list), f"{where}.tool_calls: an assistant's message has a list")
    done = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        require(
            isinstance(function, dict) and isinstance(function.get("name"), str),
            f"{where}.tool_calls[{index}] has no function with a name; give what the server returned",
        )
        done.append(
            {**call, "function": {**function, "arguments": _arguments(f"{where}.tool_calls[{index}]", function)}}
        )
    return done


def _arguments(where: str, function: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes a string of JSON, templates want the object."""
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{where}.function.arguments is no JSON; give what the server returned") from error
    require(isinstance(arguments, dict), f"{where}.function.arguments is no JSON object; give what the server returned")
    return arguments
