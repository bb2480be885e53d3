"""What a chat template is given, and what becomes of its faults: one rule for the training rows and for the server.

A turn that training and server gave to the template in different forms would be trained as one prompt and served as
another. So both bring a message into this form: the thinking under each name that templates read it by, tool calls
with their keys in one order (templates write them out as JSON), and nothing that is not the template's business.
"""

from typing import Any

from jinja2 import TemplateError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that templates read thinking by: Qwen 3 and GLM the first, gpt-oss and LFM 2.5 the second."""
TEMPLATE_FAULTS = (
    *(TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""A template is a program: given an unexpected message it may also add a string to a list, or never end a recursion."""
_OURS = {"train", *REASONING}


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the template gets it; `train`, which is said to us, is left out."""
    result = {key: value for key, value in message.items() if key not in _OURS}
    thinking = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if thinking not in (None, ""):
        result |= dict.fromkeys(REASONING, thinking)
    if isinstance(message.get("tool_calls"), list):
        result["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return result


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = {key: call["function"].get(key) for key in ("name", "arguments")} | call["function"]
    first = {"id": call.get("id"), "type": call.get("type") or "function", "function": function}
    return {key: value for key, value in ({**first, **call} | first).items() if value is not None}


def with_one_bos(token_ids: list[int], bos_token_id: int | None) -> list[int]:
    """Without the second BOS of a text that begins with two: a template's and a tokenizer's, or a template's two."""
    while bos_token_id is not None and token_ids[:2] == [bos_token_id, bos_token_id]:
        token_ids = token_ids[1:]
    return token_ids
