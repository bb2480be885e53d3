import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.config.errors import UserError
from trainer.serve.http.body import MAX_DEPTH, parse_json
from trainer.serve.http.errors import ApiError
from trainer.serve.http.protocol import ChatRequest, CompletionRequest, LoglikelihoodRequest, TokenizeRequest
from trainer.serve.sampling_params import SamplingParams

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(JSON_VALUES, st.booleans())
def test_json_that_means_something_is_read_as_python_reads_it(value, ascii_only):
    try:
        raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return  # hypothesis made half of a surrogate pair; refused below
    if any(0xD800 <= ord(char) < 0xE000 for char in json.dumps(value, ensure_ascii=False)):
        return
    assert parse_json(raw) == value


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "Expecting property name"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": "\\ud83d"}', "surrogate"),
        (b'{"a": "\\uD83d"}', "surrogate"),
        (b'{"\\ude00": 1}', "surrogate"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "'a' is repeated"),
        (b'{"b": {"a": 1, "c": 3, "a": 2}}', "'a' is repeated"),
        (b"9" * 5000, "too many digits"),
        (b"[" * 100_000, "nests deeper"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nests deeper"),
        (b"", "Expecting value"),
    ],
)
def test_json_that_means_nothing_is_refused(raw, reason):
    with pytest.raises(ApiError, match="not accepted as JSON") as caught:
        parse_json(raw)
    assert caught.value.status_code == 400
    assert reason in caught.value.detail


def test_depth_counts_brackets_not_letters():
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    text = "[" * 1000 + '"{\\'
    assert parse_json(json.dumps([text] * 3).encode()) == [text] * 3
    assert parse_json(json.dumps([[]] * 1000).encode()) == [[]] * 1000
    assert parse_json(b'"\\ud83d\\ude00"') == "😀"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompts


@pytest.mark.parametrize(
    "prompt", [None, 3, [], [True], [1.0], ["a", 1], [["a"]], [[1], "a"], {"a": 1}, [None], [[[1]]], [[1, True]]]
)
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    assert caught.value.errors()[0]["loc"][0] == "prompt"


def test_every_setting_reaches_the_sampler():
    sent = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7, "n": 2},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "stop_token_ids": [4], "min_tokens": 1, "best_of": 3},
        **{"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 2},
        **{"max_tokens": 9, "prompt_logprobs": 1},
    }
    params = CompletionRequest.model_validate(
        {"prompt": "a", "stop": "x", "logit_bias": {"3": -100}, "response_format": {"type": "json_object"}, **sent}
    ).to_params()
    read = {name: list(value) if isinstance(value := getattr(params, name), tuple) else value for name in sent}
    assert read == sent
    assert params.stop == ("x",)
    assert params.logit_bias == {3: -100}
    assert json.loads(params.json_schema) == {"type": "object"}


def test_settings_left_out_or_null_are_the_defaults():
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "echo", "suffix"))
    assert CompletionRequest.model_validate({"prompt": "a", **nulls}).to_params() == SamplingParams(max_tokens=16)
    chat = ChatRequest.model_validate({"messages": [{"role": "user"}]})
    assert chat.to_params() == SamplingParams(max_tokens=None)


def test_echo_with_logprobs_asks_for_the_prompts():
    def params(**fields: object) -> SamplingParams:
        return CompletionRequest.model_validate({"prompt": [5], **fields}).to_params()

    assert params(echo=True, logprobs=1).prompt_logprobs == 1
    assert params(echo=True).prompt_logprobs is None
    assert params(logprobs=1).prompt_logprobs is None
    assert params(echo=True, logprobs=1, prompt_logprobs=3).prompt_logprobs == 3
    assert params(echo=True, logprobs=0, max_tokens=0).max_tokens == 0


def test_openai_fields_without_effect_are_accepted_and_others_refused():
    body = {
        "messages": [{"role": "user"}],
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
    }
    ChatRequest.model_validate(body)
    for name in ("best_of", "reasoning_effort", "functions", "guided_json", "echo", "top_a"):
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate({**body, name: 1})
        assert caught.value.errors()[0]["type"] == "extra_forbidden"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "b"}, "suffix is not supported"),
        ({"stream": True, "best_of": 2}, "best_of=2"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs is not part of streams"),
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"logit_bias": {"a": 1}}, "logit_bias has the key 'a'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has the key"),
        ({"stop": [""]}, "stop has ''"),
        ({"n": 0}, "n=0"),
        ({"min_tokens": 20}, "min_tokens=20 exceeds max_tokens=16"),
    ],
)
def test_completions_that_cannot_be_served_are_refused(fields, message):
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    with pytest.raises(UserError) as caught:
        body.check()
        body.to_params()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 3}, "needs logprobs=true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "mean the same"),
        ({"tool_choice": "auto"}, "tool_choice is for requests with tools"),
        ({"tools": [{}], "parallel_tool_calls": False}, "parallel_tool_calls=false"),
    ],
)
def test_chats_that_cannot_be_served_are_refused(fields, message):
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    with pytest.raises(UserError) as caught:
        body.check()
    assert message in str(caught.value)


def test_max_completion_tokens_is_max_tokens():
    def max_tokens(**fields: int) -> int | None:
        return ChatRequest.model_validate({"messages": [{}], **fields}).to_params().max_tokens

    assert max_tokens(max_completion_tokens=5) == max_tokens(max_tokens=5) == 5
    assert max_tokens(max_completion_tokens=5, max_tokens=5) == 5


def test_a_json_schema_is_handed_on_whole():
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = ChatRequest.model_validate({"messages": [{}], "response_format": wanted})
    assert json.loads(body.to_params().json_schema) == schema
    for broken in ({"type": "json_schema"}, {"type": "text", "json_schema": wanted["json_schema"]}, {"type": "xml"}):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate({"messages": [{}], "response_format": broken})


def test_loglikelihood_and_tokenize_take_one_form_at_a_time():
    item = {"context": "a", "continuations": ["b", [3]]}
    assert LoglikelihoodRequest.model_validate(item).items() == LoglikelihoodRequest(requests=[item]).items()
    for fields in ({}, {"context": "a"}, {"requests": [item], **item}, {"continuations": ["a"]}):
        with pytest.raises(UserError, match="context is for one request"):
            LoglikelihoodRequest.model_validate(fields).items()
    messages = [{"role": "user", "content": "a"}]
    assert TokenizeRequest(prompt="a").chat_fields() is None
    assert TokenizeRequest(messages=messages).chat_fields().messages == messages
    for fields in ({}, {"prompt": "a", "messages": messages}, {"prompt": "a", "continue_final_message": True}):
        with pytest.raises(UserError):
            TokenizeRequest.model_validate(fields).chat_fields()
