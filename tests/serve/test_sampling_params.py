"""What a request may ask for: each limit, both sides."""

import math

import pytest

from trainer.config.errors import UserError
from trainer.serve.sampling_params import MAX_LOGPROBS, MAX_STOPS, SamplingParams


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": 2.1}, r"\[0, 2\]"),
        ({"temperature": math.nan}, "temperature=nan; give a finite number"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": True}, "temperature=True"),
        ({"temperature": None}, "temperature=None"),
        ({"top_p": 0}, r"top_p=0.0; give a number in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.inf}, "top_p=inf"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 1.5}, "top_k=1.5; give a whole number"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"seed": 2**63}, "seed=9223372036854775808; give a 64-bit"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens=3 exceeds max_tokens=2"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs=21; give a number in 0..20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs_start": -1}, "prompt_logprobs_start"),
        ({"n": 0}, "n=0; give a number in 1..128"),
        ({"n": 4, "best_of": 3}, "best_of=3; give a number from n=4"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop has 17 strings"),
        ({"stop": [""]}, "at least one character"),
        ({"stop": [3]}, "stop has 3"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids='a'"),
        ({"stop_token_ids": [0] * 129}, "stop_token_ids has 129"),
        ({"logit_bias": {"5": 1}}, "logit_bias='5'; give a whole number"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\]=101"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\]=nan"),
        ({"logit_bias": [5]}, "logit_bias="),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "1025 entries"),
    ],
)
def test_what_is_refused_says_field_and_range(settings: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 1},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 0},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"n": 128},
        {"stop": ["\x00", "\ud800", "x" * 100_000]},
        {"logit_bias": {0: -100, 1: 100}},
        {"min_tokens": 2, "max_tokens": 2},
    ],
)
def test_what_lies_on_the_edge_is_accepted(settings: dict) -> None:
    params = SamplingParams(**settings)
    for name, value in settings.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


def test_one_string_is_one_stop_and_none_is_none() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()


def test_best_of_is_n_where_it_is_not_given() -> None:
    assert SamplingParams(n=3).best_of == 3 and SamplingParams(n=3, best_of=5).best_of == 5


def test_temperatures_that_would_overflow_are_greedy() -> None:
    assert SamplingParams(temperature=1e-9).greedy and not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize("settings", [{"logit_bias": {260: 1}}, {"stop_token_ids": [260]}, {"logit_bias": {-1: 1}}])
def test_ids_that_the_model_does_not_have_are_refused(settings: dict) -> None:
    params = SamplingParams(**settings)
    with pytest.raises(UserError, match=r"this model's ids are 0\.\.259"):
        params.check_vocabulary(260)
    SamplingParams(logit_bias={259: 1}, stop_token_ids=[0]).check_vocabulary(260)
