"""From request to answer: where answers end, several answers, aborts, prompt log-probabilities, figures."""

from collections.abc import Callable

import pytest

from tests.serve.oracle import EOS, MAX_MODEL_LEN, Harness, LetterAdapter
from trainer.config.errors import UserError
from trainer.serve.engine import request_output
from trainer.serve.outputs import FinishReason, TokenLogprob
from trainer.serve.scheduler import Step
from trainer.serve.sequence import Request, Status

LONG = {"ignore_eos": True}
"""Answers that end at max_tokens."""


def scripted(text: str, **options) -> Harness:
    """A harness whose every answer is `text`, letter by letter; `.` is EOS, and the text begins again at its end."""
    harness = Harness(**options)
    execute = harness.runner.execute

    def run(step: Step) -> list:
        outputs = execute(step)
        for item, output in zip(step.scheduled, outputs, strict=True):
            begin = item.sequence.num_output_tokens
            output.tokens = [script(begin + place, token) for place, token in enumerate(output.tokens)]
            output.twins = [script(0, token) for token in output.twins]
        return outputs

    def script(place: int, token: TokenLogprob) -> TokenLogprob:
        letter = text[place % len(text)]
        return TokenLogprob(EOS if letter == "." else ord(letter) - ord("a") + 1, token.logprob, token.rank)

    harness.runner.execute = run
    return harness


def answer(harness: Harness, prompt: str = "abc", **params) -> tuple[str, FinishReason, str | int | None, int]:
    """Text, reason, stop reason and number of tokens of the only request."""
    request = harness.add(prompt, **params)
    while harness.engine.has_work:
        harness.step()
    harness.check_drained()
    choice = request_output(request).choices[0]
    return choice.text, choice.finish_reason, choice.stop_reason, len(choice.token_ids)


# ---- where answers end

STOP, LENGTH = FinishReason.stop, FinishReason.length


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"max_tokens": 9}, ("abc", STOP, None, 4)),
        ({"max_tokens": 4}, ("abc", STOP, None, 4)),  # EOS on the last allowed token
        ({"max_tokens": 3}, ("abc", LENGTH, None, 3)),
        ({"max_tokens": 1}, ("a", LENGTH, None, 1)),
        ({"max_tokens": 0}, ("", LENGTH, None, 0)),
        ({"max_tokens": 6, "ignore_eos": True}, ("abcab", LENGTH, None, 6)),
        ({"max_tokens": 9, "stop_token_ids": (2,)}, ("a", STOP, 2, 2)),
        ({"max_tokens": 2, "stop_token_ids": (2,)}, ("a", STOP, 2, 2)),
        ({"max_tokens": 9, "stop_token_ids": (EOS,)}, ("abc", STOP, None, 4)),  # EOS before stop ids
        ({"max_tokens": 9, "stop_token_ids": (EOS,), "ignore_eos": True}, ("abc", STOP, EOS, 4)),
        ({"max_tokens": 9, "stop": "bc"}, ("a", STOP, "bc", 3)),
        ({"max_tokens": 3, "stop": "bc"}, ("a", STOP, "bc", 3)),  # a stop string before the length
        ({"max_tokens": 2, "stop": "bc"}, ("ab", LENGTH, None, 2)),  # what was held back is shown
        ({"max_tokens": 9, "stop": "bc", "include_stop_str_in_output": True}, ("abc", STOP, "bc", 3)),
        ({"max_tokens": 9, "stop": ("c", "bc")}, ("a", STOP, "bc", 3)),  # both end here: the longer
        ({"max_tokens": 9, "stop": "b", "stop_token_ids": (2,)}, ("a", STOP, 2, 2)),  # stop ids before stop strings
        ({"max_tokens": 9, "stop": "abcd"}, ("abc", STOP, None, 4)),  # EOS ends a text that is held back
        ({"max_tokens": 9, "min_tokens": 3}, ("abc", STOP, None, 4)),
        ({"max_tokens": 9, "min_tokens": 4}, ("abcabc", STOP, None, 8)),
        ({"max_tokens": 4, "min_tokens": 4}, ("abc", LENGTH, None, 4)),
        ({"max_tokens": 9, "min_tokens": 2, "stop": "b"}, ("a", STOP, "b", 2)),
        ({"max_tokens": 9, "min_tokens": 3, "stop": "b", "ignore_eos": True}, ("abca", STOP, "b", 6)),
        ({"max_tokens": 9, "min_tokens": 1, "stop_token_ids": (2,)}, ("a", STOP, 2, 2)),
        ({"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (2,), "ignore_eos": True}, ("abca", STOP, 2, 6)),
    ],
)
def test_where_an_answer_ends(params: dict, want: tuple) -> None:
    assert answer(scripted("abc."), **params) == want


def test_a_stop_string_in_the_prompt_is_no_stop() -> None:
    assert answer(scripted("cd"), prompt="abab", max_tokens=3, stop=("ab", "bc")) == ("cdc", LENGTH, None, 3)


@pytest.mark.parametrize("num_tokens", range(1, 30))
def test_tokens_behind_a_stop_are_dropped_under_speculation(num_tokens: int) -> None:
    """Any id stops after min_tokens, so also in the midst of accepted drafts: those behind are neither told nor cached
    as tokens of the answer, which the check of the blocks would see."""
    harness = Harness(block_size=2, num_speculative_tokens=4)
    request = harness.add("abababab", min_tokens=num_tokens - 1, stop_token_ids=tuple(range(9)), max_tokens=30, **LONG)
    harness.drain()
    assert len(request.sequences[0].choice.token_ids) == num_tokens
    assert request.sequences[0].choice.finish_reason is STOP


def test_max_tokens_is_cut_to_what_the_model_leaves() -> None:
    harness = Harness(num_blocks=MAX_MODEL_LEN // 4 + 1)
    request = harness.add([1] * (MAX_MODEL_LEN - 3), **LONG)
    assert request.params.max_tokens == 3
    scored = harness.add([1] * MAX_MODEL_LEN, max_tokens=0)  # no room for an answer, and none is wanted
    assert scored.params.max_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, 9], {}, r"token id 9; this model's ids are 0\.\.8"),
        ([1, -1], {}, "token id -1"),
        ([1, "a"], {}, "token id 'a'"),
        ([1] * MAX_MODEL_LEN, {}, "prompt has 8192 tokens, the model takes 8192"),
        ([1] * (MAX_MODEL_LEN + 1), {"max_tokens": 0}, "prompt has 8193 tokens, the model takes 8192"),
        ([1], {"stop_token_ids": (9,)}, "stop_token_ids has token id 9"),
    ],
)
def test_refusals_change_nothing(prompt: list, params: dict, message: str) -> None:
    harness = Harness()
    with pytest.raises(UserError, match=message):
        harness.add(prompt, **params)
    assert not harness.engine.has_work and not harness.engine.requests
    harness.check_drained()


def test_a_request_id_is_taken_until_its_end() -> None:
    harness = Harness()
    params = harness.add("a", max_tokens=1).params
    first, second = (harness.engine.request([1], params, request_id="same") for _ in range(2))
    harness.engine.add(first)
    with pytest.raises(UserError, match="request_id=same is running already"):
        harness.engine.add(second)
    while harness.engine.has_work:
        harness.engine.step()
    harness.engine.add(second)
    assert list(harness.engine.requests) == ["same"]


# ---- several answers


def test_every_answer_is_its_own() -> None:
    harness = Harness()
    request = harness.add("abcdefg", n=4, max_tokens=24, **LONG)
    harness.drain()  # compares each with what it must be
    texts = [choice.text for choice in request_output(request).choices]
    assert len(set(texts)) == 4
    assert [choice.index for choice in request_output(request).choices] == [0, 1, 2, 3]


def test_best_of_returns_the_best_by_mean_logprob() -> None:
    harness = Harness()
    request = harness.add("abcdefg", n=2, best_of=5, max_tokens=16)
    harness.drain()
    assert len(request.sequences) == 5
    answers = [s.choice for s in request.sequences]
    ranked = sorted(answers, key=lambda choice: choice.cumulative_logprob / len(choice.token_ids), reverse=True)
    want = [choice.text for choice in ranked[:2]]
    output = request_output(request)
    assert [choice.text for choice in output.choices] == want
    assert [choice.index for choice in output.choices] == [0, 1]
    assert all(choice.cumulative_logprob is None for choice in output.choices)  # nobody asked for logprobs


def test_logprobs_and_their_sum() -> None:
    harness = Harness()
    request = harness.add("abcdefg", logprobs=0, max_tokens=8, **LONG)
    harness.drain()
    choice = request_output(request).choices[0]
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    # summed in the same order, so to the same float
    assert choice.cumulative_logprob == sum(entry.logprob for entry in choice.logprobs)


def test_max_tokens_0_answers_all_at_once() -> None:
    harness = Harness(max_num_batched_tokens=8)
    request = harness.add("abcdefghab", n=3, max_tokens=0, prompt_logprobs=0)
    harness.drain()
    assert harness.scheduler.num_steps == 2
    assert [s.choice.finish_reason for s in request.sequences] == [LENGTH] * 3


# ---- prompt log-probabilities


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 8, 16, 17, 18])
@pytest.mark.parametrize("budget", [2, 5, 32])
def test_prompt_logprobs_across_chunks_and_cached_prefixes(start: int, budget: int) -> None:
    """Harness.drain compares them; here also that the cache served what lies before the first wanted one."""
    harness = Harness(block_size=4, max_num_seqs=2, max_num_batched_tokens=budget)
    for expected in (0, 16 if start > 17 else max(0, min(start - 1, 17)) // 4 * 4):
        request = harness.add("abcdefghabcdefghab", max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
        harness.drain()
        assert request.num_cached_tokens == expected
        assert len(request_output(request).prompt_logprobs) == 18 - start


@pytest.mark.parametrize("num_swap_blocks", [0, 16])
def test_prompt_logprobs_across_preemption(num_swap_blocks: int) -> None:
    """An older request takes the blocks while the prompt is computed chunk by chunk."""
    harness = Harness(num_blocks=14, block_size=2, num_swap_blocks=num_swap_blocks, max_num_batched_tokens=8)
    harness.add("abcd", max_tokens=20, **LONG)
    harness.step()
    harness.add("bcde", priority=-1, max_tokens=8, **LONG)
    scored = harness.add("hgfedcbahgfedcba", max_tokens=2, prompt_logprobs=0, **LONG)
    lost = []
    while harness.engine.has_work:
        harness.step()
        sequence = scored.sequences[0]
        if sequence.status is not Status.running and scored.first_scheduled_s is not None and not scored.finished:
            lost.append(len(scored.prompt_logprobs))
    assert lost, "the scenario must preempt the scored request"
    harness.check_answers()
    harness.check_drained()


def test_prompt_logprobs_are_none_where_not_asked() -> None:
    harness = Harness()
    request = harness.add("abc", max_tokens=1)
    harness.drain()
    assert request_output(request).prompt_logprobs is None


# ---- aborts


def waiting(harness: Harness) -> Request:
    for _ in range(harness.max_num_seqs):
        harness.add("ab", max_tokens=30, **LONG)
    harness.step()
    return harness.add("abc", n=2, max_tokens=4)


def inside_the_prompt(harness: Harness) -> Request:
    request = harness.add("a" * (harness.max_num_batched_tokens + 3), n=2, max_tokens=4, **LONG)
    harness.step()
    assert request.sequences[0].num_computed_tokens == harness.max_num_batched_tokens
    return request


def before_the_first_step(harness: Harness) -> Request:
    return harness.add("abc", n=3, max_tokens=4)


def just_forked(harness: Harness) -> Request:
    request = harness.add("abcde", n=3, max_tokens=9, **LONG)
    harness.step()
    assert len(request.sequences) == 3
    return request


def partly_finished(harness: Harness) -> Request:
    request = harness.add("abcde", n=3, max_tokens=30)
    while all(s.status is not Status.finished for s in request.sequences) or len(request.sequences) < 3:
        harness.step()
    assert not request.finished
    return request


def preempted(harness: Harness) -> Request:
    harness.add("abcdefgh", max_tokens=40, **LONG)
    request = harness.add("hgfedcba", n=2, max_tokens=40, **LONG)
    harness.step()
    while all(s.status in (Status.running, Status.finished) for s in request.sequences):
        harness.step()
    return request


def finished(harness: Harness) -> Request:
    request = harness.add("abc", max_tokens=1)
    harness.step()
    assert request.finished
    return request


STATES = [waiting, inside_the_prompt, before_the_first_step, just_forked, partly_finished, preempted, finished]


@pytest.mark.parametrize("num_swap_blocks", [0, 16])
@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state: Callable[[Harness], Request], num_swap_blocks: int) -> None:
    harness = Harness(num_blocks=16, block_size=4, num_swap_blocks=num_swap_blocks, max_num_seqs=4)
    request = state(harness)
    if state is preempted:
        wanted = Status.swapped if num_swap_blocks else Status.waiting
        assert wanted in {s.status for s in request.sequences}
    open_before = [s.index for s in request.sequences if s.status is not Status.finished]
    if state is not finished:
        open_before += range(len(request.sequences), request.params.best_of)  # those never forked end too
    events = harness.engine.abort(request.request_id, "because")
    harness.aborted.add(request.request_id)
    harness._take(events)
    assert [event.delta.index for event in events] == open_before
    assert all(event.delta.finish_reason is FinishReason.abort for event in events)
    assert all(event.delta.stop_reason == "because" for event in events)
    assert request.request_id not in harness.engine.requests
    assert all(s.status is Status.finished and not s.block_table for s in request.sequences)
    assert harness.engine.abort(request.request_id) == []  # twice
    assert harness.engine.abort("unknown") == []
    harness.drain()


def test_an_abort_shows_the_text_that_was_held_back() -> None:
    harness = scripted("abc")
    request = harness.add("a", max_tokens=9, stop="abca")
    harness.step()
    harness.step()
    harness.abort(request)
    assert request.sequences[0].choice.text == "ab"


def test_an_abort_storm_leaves_nothing_behind() -> None:
    """The last abort is followed by no step, and the gauges must be at 0 all the same."""
    harness = Harness(num_blocks=24, num_swap_blocks=4)
    adapter = LetterAdapter("a" * 64)
    for i in range(200):
        request = harness.add("abcdefgh"[: 1 + i % 8], n=1 + i % 3, adapter=adapter, max_tokens=20, **LONG)
        for _ in range(i % 5):
            harness.step()
        harness.abort(request)
        harness.check_drained()
    assert harness.metric("vllm:request_success_total") == 200


def test_a_partly_aborted_request_counts_as_aborted() -> None:
    harness = Harness()
    request = partly_finished(harness)
    harness.abort(request)
    finished_as = {
        sample.labels["finished_reason"]: sample.value
        for family in harness.engine.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }
    assert finished_as == {"abort": 1}


# ---- adapters, failures, figures


def test_an_adapter_is_held_until_the_request_ends() -> None:
    harness = Harness()
    adapter = LetterAdapter("a" * 64)
    first = harness.add("abc", adapter=adapter, n=2, max_tokens=4, **LONG)
    second = harness.add("abc", adapter=adapter, max_tokens=8, **LONG)
    assert adapter.num_requests == 2
    while not first.finished:
        harness.step()
    assert adapter.num_requests == 1
    harness.abort(second)
    assert adapter.num_requests == 0


def test_after_a_failed_step_no_block_is_found_that_was_not_computed() -> None:
    """Blocks can be found once their computation is scheduled; where it fails, they must be forgotten."""
    harness = Harness(block_size=2)
    requests = [harness.add("abcdefgha", max_tokens=4, **LONG) for _ in range(2)]
    execute, harness.runner.execute = harness.runner.execute, lambda step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        harness.engine.step()
    harness.runner.execute = execute
    for request in requests:
        harness.abort(request)
    harness.add("abcdefgha", max_tokens=4, **LONG)
    harness.drain()


def test_an_unfinished_step_ends_nothing() -> None:
    harness = Harness(max_num_batched_tokens=8)
    request = harness.add("a" * 20, max_tokens=2, **LONG)
    for done in (8, 16):
        assert harness.engine.step() == []
        assert request.sequences[0].num_computed_tokens == done
    assert len(harness.engine.step()) == 1


def test_figures_of_a_request() -> None:
    """The clock ticks once a call, so times only have to be in order."""
    harness = Harness()
    request = harness.add("abc", max_tokens=5, **LONG)
    harness.drain()
    times = [request.arrival_s, request.first_scheduled_s, request.first_token_s, request.sequences[0].last_token_s]
    assert times == sorted(set(times))
    assert harness.engine.recent_ttft_s() == request.first_token_s - request.arrival_s
    assert harness.engine.num_prompt_tokens == 3 and harness.engine.num_generated_tokens == 5
    assert harness.metric("vllm:time_to_first_token_seconds_count") == 1
    assert harness.metric("vllm:inter_token_latency_seconds_count") == 4
    assert harness.metric("vllm:iteration_tokens_total_sum") == harness.runner.num_rows == 3 + 4


def test_seeds() -> None:
    harness = Harness()
    given = [harness.add("abc", seed=7, max_tokens=1).seed for _ in range(2)]
    drawn = [harness.add("abc", max_tokens=1).seed for _ in range(2)]
    again = [Harness().add("abc", max_tokens=1).seed for _ in range(2)]
    assert given == [7, 7]
    assert drawn[0] != drawn[1]
    assert again[0] == again[1]
    harness.drain()


def test_a_requests_params_are_its_own() -> None:
    harness = Harness()
    first = harness.add("abc", max_tokens=2)
    second = harness.engine.request([1], first.params)
    assert second.params is not first.params and second.params == first.params
