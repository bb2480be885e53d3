"""The sampler against slow, obvious references; its randomness against the distribution it promises."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.serve import sampler
from trainer.serve.sampler import LOWEST_LOGPROB, SampleRow, prompt_logprobs, sample
from trainer.serve.sampling_params import SamplingParams

EOS = 3


def row(params: SamplingParams | None = None, /, **changes: object) -> SampleRow:
    base = SampleRow(params or SamplingParams(), 7, 0, [1, 2], [], (EOS,))
    return dataclasses.replace(base, **changes)


def logits_of(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def ids(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    return [token.token_id for token in sample(logits, rows)]


def draws(logits: Tensor, num: int, params: SamplingParams, **changes: object) -> np.ndarray:
    """Tokens of one distribution at `num` seeds, at one position. [V]"""
    rows = [row(params, **{"seed": seed, **changes}) for seed in range(num)]
    return np.array([token_id for r in rows for token_id in ids(logits[None], [r])])


def at(uniform: float) -> Callable[[int, int, int], float]:
    return lambda seed, index, position: uniform


# ---- greedy


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 50)
    logits[1, [7, 9, 30]] = 1.0
    logits[2, 49] = 1e-3
    assert ids(logits, [row(SamplingParams(temperature=0))] * 3) == [0, 7, 49]


ASKING = [
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=0, best_of=2),
    SamplingParams(temperature=0, logit_bias={3: 1.0}),
    SamplingParams(temperature=0, min_tokens=1),
    SamplingParams(temperature=0, repetition_penalty=1.1),
    SamplingParams(temperature=0, frequency_penalty=0.1),
    SamplingParams(temperature=0, presence_penalty=-0.1),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("params", ASKING)
def test_who_needs_more_than_the_argmax(params: SamplingParams) -> None:
    assert not sampler.needs_argmax_only(row(params))
    greedy = row(
        SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1, seed=3, max_tokens=9)
    )  # cuts keep the best
    assert sampler.needs_argmax_only(greedy)
    assert not sampler.needs_argmax_only(row(greedy.params, bitmask=torch.zeros(1, dtype=torch.int32)))


def test_tokens_of_the_argmax_are_those_of_the_logits() -> None:
    logits = logits_of(5, 70)
    assert sampler.likeliest(logits.argmax(-1)) == sample(logits, [row(SamplingParams(temperature=0))] * 5)
    with pytest.raises(RuntimeError, match="the model's logits: row 1 of 3 has NaN or no finite maximum"):
        sampler.likeliest(torch.tensor([4, -1, -1]))


def test_no_rows_no_tokens() -> None:
    assert sample(torch.zeros(0, 5), []) == [] and prompt_logprobs(torch.zeros(0, 5), [], 3) == []


def test_logprobs_cost_nothing_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_logprobs", lambda *_: pytest.fail("computed"))
    for temperature in (0, 1):
        (token,) = sample(logits_of(1, 20), [row(SamplingParams(temperature=temperature))])
        assert (token.logprob, token.rank, token.top) == (0.0, 0, [])


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(logprobs=2)])
def test_a_row_that_is_no_distribution_names_itself(fault: float, params: SamplingParams) -> None:
    logits = logits_of(4, 30)
    logits[2, 11] = fault
    with pytest.raises(RuntimeError, match="row 2 of 4 has NaN or no finite maximum"):
        sample(logits, [row(params)] * 4)
    with pytest.raises(RuntimeError, match="row 2 of 4"):
        prompt_logprobs(logits, [0] * 4, 1)


def test_all_minus_infinity_is_a_fault_too() -> None:
    with pytest.raises(RuntimeError, match="row 0 of 1"):
        sample(torch.full((1, 5), -math.inf), [row()])


def test_logits_are_left_as_they_are() -> None:
    logits = logits_of(6, 40)
    before = logits.clone()
    all_on = SamplingParams(
        top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.3, frequency_penalty=1, logit_bias={5: 3}, logprobs=3
    )
    sample(logits, [row(all_on, output_token_ids=[4, 4, 5])] * 6)
    assert torch.equal(logits, before)


# ---- the draw


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations of the statistic, whose mean is the degrees of freedom and variance twice that."""
    assert expected.min() >= 5  # below, the statistic is not chi-square distributed
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("counter", ["seed", "index", "position"])
def test_draws_follow_the_softmax(temperature: float, counter: str) -> None:
    """Each counter alone must give independent draws: the seed's requests, a request's copies, an answer's places.

    4.5 standard deviations: for 18 tests of fixed seeds, a right sampler fails once in 10,000 suites; a wrong one is
    thousands away (a counter that is ignored gives one token 8,000 times).
    """
    num = 8000
    logits = logits_of(1, 12, seed=1, scale=1.0)
    place = ("seed", "index", "position").index(counter)
    uniforms = np.array([sampler._uniform(*np.roll([i, 3, 5], place).tolist()) for i in range(num)])
    assert abs(uniforms.mean() - 0.5) < 4.5 / math.sqrt(12 * num)  # 1/12 is the variance of a uniform number
    weights = np.exp(-sampler._distance(logits[0].numpy(), temperature))
    counts = np.bincount([sampler._invert(weights, uniform) for uniform in uniforms], minlength=12)
    expected = torch.softmax(logits[0].double() / temperature, -1).numpy() * num
    assert abs(chi_square(counts, expected)) < 4.5


def test_sample_draws_by_seed_index_and_position(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(sampler, "_uniform", lambda *counters: asked.append(counters) or 0.5)
    sample(logits_of(2, 9), [row(seed=-5, index=3, output_token_ids=[8] * 4), row(seed=2**63)])
    assert asked == [(-5, 3, 4), (2**63, 0, 0)]


def test_the_random_number_is_pinned() -> None:
    """Another hash would change every seeded answer of every user; blake2b of three little-endian 64-bit counters."""
    assert sampler._uniform(0, 0, 0) == sampler._uniform(2**64, 0, 0) == 0.156742553465558
    assert sampler._uniform(-1, 0, 0) == sampler._uniform(2**64 - 1, 0, 0)


def test_copies_are_independent() -> None:
    """Two copies of a request agree as often as two draws do: sum of p squared, within 4.5 standard deviations."""
    logits, num = logits_of(1, 8, seed=3, scale=1.0), 1500
    first, second = (draws(logits[0], num, SamplingParams(), index=index) for index in (0, 1))
    agree = (torch.softmax(logits[0], -1) ** 2).sum().item()
    assert abs((first == second).mean() - agree) < 4.5 * math.sqrt(agree * (1 - agree) / num)


def test_a_token_of_one_in_ten_million_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tokens of one half each, so that its share of [0, 1) lies at a known place; both ways."""
    vocab_size, rare = 50_000, 25_000
    logits = torch.full((1, vocab_size), -math.inf)
    logits[0, 10] = logits[0, 40_000] = 0.0  # weight 1, exactly
    logits[0, rare] = math.log(2e-7)  # exp errs by 1e-6 of 2e-7: a tenth of that is far inside
    for share, expected in ((-0.1, 10), (0.1, rare), (0.5, rare), (0.9, rare), (1.1, 40_000)):
        monkeypatch.setattr(sampler, "_uniform", at((1 + share * 2e-7) / (2 + 2e-7)))
        assert ids(logits, [row()]) == sampler._draw_sorted(logits, [row()]) == [expected]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
def test_the_ends_of_the_interval_find_tokens_with_weight(
    uniform: float, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last token of any weight, though the vocabulary begins and ends with weightless ones."""
    monkeypatch.setattr(sampler, "_uniform", at(uniform))
    for seed in range(20):
        logits = logits_of(1, vocab_size, seed=seed)
        edge = vocab_size // 4
        logits[:, :edge] = -math.inf
        logits[:, vocab_size - edge :] = -math.inf
        expected = edge if uniform == 0 else vocab_size - edge - 1
        assert ids(logits, [row()]) == sampler._draw_sorted(logits, [row()]) == [expected]


@pytest.mark.parametrize("temperature", [1e-9, 1e-5, 1e-4, 2.0])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_any_temperature_gives_a_token(temperature: float, scale: float) -> None:
    logits = logits_of(1, 100, scale=scale)
    token = ids(logits, [row(SamplingParams(temperature=temperature))])[0]
    likeliest = int(logits.argmax())
    # Where the runner-up is thousands of temperatures away, only one token has a weight.
    gap = torch.topk(logits[0], 2).values.diff().abs().item() / temperature
    assert token == likeliest if gap > 800 else 0 <= token < 100


def reference_kept(logits: Tensor, params: SamplingParams) -> set[int]:
    """min_p, then top_k, then top_p over a full sort, in plain Python. The lower id of equals first."""
    scaled = [(value - logits.max().item()) / params.temperature for value in logits.tolist()]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = [i for i in order if params.min_p == 0 or math.exp(scaled[i]) >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(scaled[i]) for i in order]
    kept, reached = set(), 0.0
    for token_id, weight in zip(order, weights, strict=True):
        kept.add(token_id)
        reached += weight
        if params.top_p < 1 and reached >= params.top_p * sum(weights):  # 1 keeps what is too small to add, too
            break
    return kept


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-40, 40), min_size=1, max_size=90),
    grain=st.sampled_from([4, 8, 64]),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 30, 1000]),
    top_p=st.sampled_from([1e-6, 0.1003, 0.5007, 0.9503, 0.99999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0101, 0.3003, 0.999]),
)
def test_cuts_equal_a_full_sort(
    values: list[int], grain: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Logits on a grid, so that equals are common as they are in bfloat16; shares off the grid's own sums."""
    logits = torch.tensor(values, dtype=torch.float32) / grain
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = {
        i for i in reference_kept(logits, params) if math.exp((values[i] - max(values)) / grain / temperature) > 0
    }
    distance = sampler._distance(logits.numpy(), temperature)
    weights = np.exp(-distance)
    sampler._cut(weights, distance, params)
    assert set(np.flatnonzero(weights).tolist()) == expected
    sorted_weights = sampler._keep_sorted(
        torch.from_numpy(np.exp(-distance))[None],
        torch.from_numpy(distance)[None],
        [row(params)],
        lambda column: torch.tensor(column, dtype=torch.float64)[:, None],
    )
    assert torch.equal(sorted_weights[0], torch.from_numpy(weights))  # the GPU's way, bit by bit


def test_top_k_of_one_is_greedy_also_among_equals() -> None:
    logits = logits_of(50, 1000).bfloat16().float()
    logits[:, 500] = logits[:, 700] = logits.amax(-1)
    assert ids(logits, [row(SamplingParams(top_k=1))] * 50) == logits.argmax(-1).tolist()
    assert ids(logits, [row(SamplingParams(top_p=1e-9))] * 50) == logits.argmax(-1).tolist()


def test_top_k_above_the_vocabulary_keeps_all() -> None:
    logits = logits_of(20, 30)
    rows = [row(seed=seed) for seed in range(20)]
    cut = [dataclasses.replace(r, params=SamplingParams(top_k=31)) for r in rows]
    assert ids(logits, rows) == ids(logits, cut)


def test_the_sorted_way_of_gpus_draws_the_same_tokens() -> None:
    """Weights differ in the last bit (2 ** -24 of each), so one draw in millions may; none of these fixed ones does."""
    logits = logits_of(64, 3001)
    settings_ = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.5, "temperature": 0.6}]
    rows = [row(SamplingParams(**settings_[i % 5]), seed=i) for i in range(64)]
    assert sampler._draw_sorted(logits, rows) == ids(logits, rows)


# ---- masks and penalties


def reference_adjusted(logits: list[float], r: SampleRow) -> list[float]:
    """The order of the docstring, one token at a time."""
    params, adjusted = r.params, list(logits)
    if r.bitmask is not None:
        words = [word & 0xFFFFFFFF for word in r.bitmask.tolist()]
        adjusted = [x if words[i // 32] >> i % 32 & 1 else -math.inf for i, x in enumerate(adjusted)]
    adjusted = [x + params.logit_bias.get(i, 0) for i, x in enumerate(adjusted)]
    if len(r.output_token_ids) < params.min_tokens:
        ends = {*r.eos_token_ids, *params.stop_token_ids}
        masked = [-math.inf if i in ends else x for i, x in enumerate(adjusted)]
        adjusted = masked if max(masked) > -math.inf else adjusted
    for i in {*r.prompt_token_ids, *r.output_token_ids}:
        penalty = params.repetition_penalty
        adjusted[i] = adjusted[i] / penalty if adjusted[i] > 0 else adjusted[i] * penalty
    for i in set(r.output_token_ids):
        adjusted[i] -= params.frequency_penalty * r.output_token_ids.count(i) + params.presence_penalty
    return adjusted


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_penalties_equal_a_loop(data: st.DataObject) -> None:
    size = data.draw(st.integers(5, 70))
    tokens = st.lists(st.integers(0, size - 1), max_size=20)
    params = SamplingParams(
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.3])),
        frequency_penalty=data.draw(st.sampled_from([0.0, -2.0, 0.7])),
        presence_penalty=data.draw(st.sampled_from([0.0, 2.0, -0.4])),
        logit_bias=data.draw(st.dictionaries(st.integers(0, size - 1), st.integers(-100, 100), max_size=4)),
        min_tokens=data.draw(st.integers(0, 4)),
        stop_token_ids=tuple(data.draw(tokens)),
    )
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    if mask is not None:
        words = np.packbits([*mask, *[True] * (-size % 32)], bitorder="little").view(np.int32)
        mask = torch.from_numpy(words.copy())
    r = row(params, prompt_token_ids=data.draw(tokens), output_token_ids=data.draw(tokens), bitmask=mask)
    logits = logits_of(1, size, seed=data.draw(st.integers(0, 99)))[0]
    adjusted = logits.numpy().copy()
    sampler._adjust(adjusted, r)
    # Two float32 roundings of numbers up to 300: 2 * 300 * 2 ** -24.
    np.testing.assert_allclose(adjusted, reference_adjusted(logits.tolist(), r), rtol=0, atol=4e-5)


def test_eos_waits_for_min_tokens_even_if_it_is_ignored() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 5], logits[0, 8] = 9, 5, 7
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(8,))
    assert ids(logits, [row(params)]) == ids(logits, [row(params, output_token_ids=[1])]) == [5]
    assert ids(logits, [row(params, output_token_ids=[1, 1])]) == [EOS]
    assert ids(logits, [row(SamplingParams(temperature=0, ignore_eos=True))]) == [EOS]


def test_a_grammar_that_only_allows_the_end_outweighs_min_tokens() -> None:
    mask = torch.tensor([1 << EOS], dtype=torch.int32)
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, min_tokens=5)
        assert ids(logits_of(1, 20), [row(params, bitmask=mask)]) == [EOS]


def test_a_mask_without_tokens_is_a_fault_that_names_the_row() -> None:
    with pytest.raises(RuntimeError, match="row 1: masks and penalties leave no token"):
        sample(logits_of(2, 20), [row(), row(bitmask=torch.zeros(1, dtype=torch.int32))])


def test_the_sign_bit_of_a_mask_is_a_token_like_any() -> None:
    mask = torch.tensor([-(2**31), 0], dtype=torch.int32)
    assert ids(torch.zeros(1, 40), [row(bitmask=mask)]) == [31]


def test_minus_100_on_every_token_changes_nothing() -> None:
    logits = torch.round(logits_of(8, 50))  # whole numbers, so that adding -100 does not round
    params = SamplingParams(logit_bias=dict.fromkeys(range(50), -100))
    rows = [row(seed=i) for i in range(8)]
    assert ids(logits, rows) == ids(logits, [dataclasses.replace(r, params=params) for r in rows])


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e40, 1e300])
def test_absurd_penalties_overflow_to_no_junk(penalty: float) -> None:
    logits = logits_of(1, 30)
    logits[0, 4], logits[0, 5], logits[0, 6] = 0.0, -math.inf, 2.0
    params = SamplingParams(repetition_penalty=penalty)
    for seed in range(20):
        drawn = ids(logits, [row(params, seed=seed, prompt_token_ids=list(range(30)))])[0]
        assert drawn != 5
        assert logits[0, drawn] > 0 if penalty < 1 else logits[0, drawn] >= 0  # lifted out of sight, or sunk


# ---- company


def test_a_row_does_not_notice_its_company() -> None:
    """Same token and the very same floats alone, with 15 others, and at another place among them."""
    logits = logits_of(16, 5003, seed=5)
    mask = torch.full((157,), 0x55555555, dtype=torch.int32)
    kinds = [
        {"temperature": 0},
        {},
        {"top_p": 0.9},
        {"top_k": 40, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "top_p": 0.7},
        {"logit_bias": {9: 30}, "best_of": 2},
        {"min_tokens": 9},
    ]
    rows = [
        row(
            SamplingParams(**kinds[i % 8], logprobs=(None, 0, 3, 20)[i // 4]),
            seed=i,
            output_token_ids=[5, i, i],
            bitmask=mask if i % 5 == 0 else None,
        )
        for i in range(16)
    ]
    together = sample(logits, rows)
    for i in range(16):
        assert sample(logits[i : i + 1], [rows[i]]) == [together[i]]
    turned = [(i + 5) % 16 for i in range(16)]
    assert sample(logits[turned], [rows[i] for i in turned]) == [together[i] for i in turned]


# ---- log-probabilities


@pytest.mark.parametrize("way", [sampler._logprobs, sampler._logprobs_sorted])
def test_logprobs_are_of_the_raw_logits(way: Callable) -> None:
    logits = logits_of(5, 300).bfloat16().float()  # with equals
    token_ids, num_tops = [0, 7, 7, 299, int(logits[4].argmax())], [0, 1, 5, 20, 3]
    expected = torch.log_softmax(logits.double(), -1)
    for i, entry in enumerate(way(logits, token_ids, num_tops)):
        order = sorted(range(300), key=lambda j: (-logits[i, j].item(), j))
        assert entry.token_id == token_ids[i]
        assert entry.rank == 1 + int((logits[i] > logits[i, token_ids[i]]).sum())
        likeliest = order[: num_tops[i]]
        appended = [] if token_ids[i] in likeliest else [token_ids[i]]
        assert [j for j, _ in entry.top] == likeliest + appended
        assert dict(entry.top)[entry.token_id] == entry.logprob  # the very same float
        for j, value in entry.top:
            assert abs(value - expected[i, j].item()) < 2e-6  # two float32 roundings of numbers up to 20


def test_logprobs_do_not_see_temperature_masks_or_penalties() -> None:
    logits = logits_of(1, 64)
    params = SamplingParams(temperature=0.3, top_k=2, logit_bias={5: 100}, logprobs=4)
    (token,) = sample(logits, [row(params)])
    assert token.token_id == 5
    assert token == prompt_logprobs(logits, [5], 4)[0]


def test_best_of_gets_logprobs_to_rank_by() -> None:
    logits = logits_of(1, 64)
    (token,) = sample(logits, [row(SamplingParams(n=1, best_of=2))])
    assert token == prompt_logprobs(logits, [token.token_id], 0)[0] and token.logprob < 0


def test_no_infinity_leaves() -> None:
    logits = torch.full((1, 10), -math.inf)
    logits[0, 2], logits[0, 4] = 1.0, 0.0
    for way in (sampler._logprobs, sampler._logprobs_sorted):
        (entry,) = way(logits, [9], [5])
        assert [i for i, _ in entry.top] == [2, 4, 9]  # tokens of probability 0 are nobody's likeliest
        assert entry.logprob == dict(entry.top)[9] == LOWEST_LOGPROB and entry.rank == 3
    (far,) = prompt_logprobs(torch.tensor([[0.0, -3e38]]), [1], 2)
    assert far.logprob == LOWEST_LOGPROB and far.top == [(0, 0.0), (1, LOWEST_LOGPROB)]


def test_more_tops_than_tokens() -> None:
    (entry,) = prompt_logprobs(logits_of(1, 3), [1], 20)
    assert sorted(i for i, _ in entry.top) == [0, 1, 2]


def test_prompt_logprobs_row_by_row() -> None:
    logits = logits_of(70, 90)  # more rows than stand in memory at a time on a GPU
    entries = prompt_logprobs(logits, list(range(70)), 2)
    assert entries == [prompt_logprobs(logits[i : i + 1], [i], 2)[0] for i in range(70)]
    assert [entry.token_id for entry in entries] == list(range(70))
