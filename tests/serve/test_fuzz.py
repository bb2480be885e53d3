"""Random workloads over the oracle: however requests are cut, cached, forked, preempted, swapped, speculated or
aborted, no slot is read that holds another prefix, each ends with the tokens it has alone, and nothing stays held.

Once by seeds, which is quick and reaches deep, and once by hypothesis, which finds the smallest failing sequence.
"""

from dataclasses import fields
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.serve.oracle import VOCAB_SIZE, Harness, LetterAdapter
from trainer.config.errors import UserError
from trainer.serve.scheduler import SchedulerCounts
from trainer.serve.sequence import Request

NUM_WORKLOADS = 250
"""About 3 s of 8 in this file; fifteen thousand were run when this was written."""


def random_harness(random: Random) -> Harness:
    """Mostly 20 to 60 slots, which two or three requests fill."""
    block_size, max_num_seqs = random.randint(1, 8), random.choice([2, 3, 4, 8, 8])
    num_blocks = max(4, min(40, random.randint(20, 60) // block_size))
    return Harness(
        block_size=block_size,
        num_blocks=num_blocks if random.random() < 0.7 else random.randint(4, 40),
        num_swap_blocks=random.choice([0, random.randint(1, 20)]),
        enable_prefix_caching=random.random() < 0.75,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice([0, 1, 3, 8, 30]),
        priority_aging_steps=random.choice([1, 8, 256]),
        num_speculative_tokens=random.choice([0, 0, 1, 2, 4]),
    )


def random_params(random: Random, num_prompt_tokens: int) -> dict[str, Any]:
    n, max_tokens = random.choice([1, 1, 2, 3, 4]), random.choice([0, 1, 5, *(random.randint(1, 30) for _ in range(3))])
    params = {
        "max_tokens": max_tokens,
        "n": n,
        "best_of": n + random.choice([0, 0, 0, 1]),
        "ignore_eos": random.random() < 0.3,
        "include_stop_str_in_output": random.random() < 0.5,
    }
    if random.random() < 0.2:
        params["min_tokens"] = random.randint(0, max_tokens)
    if random.random() < 0.2:
        params["stop_token_ids"] = (random.randrange(VOCAB_SIZE),)
    if random.random() < 0.3:
        params["stop"] = tuple("".join(random.choices("abcdefgh", k=random.randint(1, 3))) for _ in range(2))
    if random.random() < 0.3:
        params["prompt_logprobs"], params["prompt_logprobs_start"] = 0, random.randint(0, num_prompt_tokens)
    if random.random() < 0.3:
        params["logprobs"] = 0
    return params


def arrive(random: Random, harness: Harness, stems: list[list[int]], adapters: list[LetterAdapter | None]) -> None:
    """Add a request that begins like others, if it can ever run."""
    stem = random.choice(stems)
    prompt = stem[: random.randint(0, len(stem))] + random.choices(range(VOCAB_SIZE), k=random.randint(0, 4)) or [1]
    where = {"adapter": random.choice(adapters), "cache_salt": random.choice([None, None, "x"])}
    try:
        harness.add(prompt, priority=random.choice([0, 0, -1, 2]), **where, **random_params(random, len(prompt)))
    except UserError as error:
        assert "the whole cache has" in str(error) or "max_num_seqs" in str(error)


def run_workload(seed: int) -> Harness:
    random = Random(seed)
    harness = random_harness(random)
    stems = [random.choices(range(1, VOCAB_SIZE), k=random.randint(2, 30)) for _ in range(2)]
    adapters = [None, None, LetterAdapter("a" * 64), LetterAdapter("b" * 64)]
    abort_rate = random.choice([0, 0, 0, 0.1, 0.4])
    num_arrivals, arrival_rate = random.randint(2, 14), random.choice([0.2, 0.6, 0.9])
    while num_arrivals:
        if random.random() < arrival_rate:
            arrive(random, harness, stems, adapters)
            num_arrivals -= 1
        elif harness.engine.has_work:
            harness.step()
        if harness.requests and random.random() < abort_rate:
            harness.abort(random.choice(harness.requests))
    harness.drain()
    return harness


def test_random_workloads() -> None:
    reached: dict[str, int] = {field.name: 0 for field in fields(SchedulerCounts)}
    for seed in range(NUM_WORKLOADS):
        try:
            harness = run_workload(seed)
        except Exception as error:
            error.add_note(f"run_workload({seed})")
            raise
        for name in reached:
            reached[name] += getattr(harness.counts, name) > 0
    # A fuzz that does not preempt, swap, share, copy and speculate proves nothing; each is reached in 40 or more.
    assert min(reached.values()) >= 20, reached


class EngineMachine(RuleBasedStateMachine):
    """The same as steps that hypothesis chooses and shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = [None, LetterAdapter("a" * 64), LetterAdapter("b" * 64)]

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 16),
        num_swap_blocks=st.integers(0, 8),
        enable_prefix_caching=st.booleans(),
        max_num_seqs=st.integers(2, 4),
        spare_tokens=st.integers(0, 8),
        num_speculative_tokens=st.integers(0, 4),
    )
    def start(self, max_num_seqs: int, spare_tokens: int, **options: Any) -> None:
        self.harness = Harness(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + spare_tokens, **options)

    @rule(
        # "ab" again and again: prompts share blocks, and prompt lookup finds something
        prompt=st.integers(1, 12).map(lambda length: ("ab" * 6)[:length]) | st.text("abc", min_size=1, max_size=8),
        adapter=st.integers(0, 2),
        salted=st.booleans(),
        priority=st.integers(-1, 1),
        n=st.integers(1, 3),
        max_tokens=st.integers(0, 12),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, 0]),
        prompt_logprobs_start=st.integers(0, 8),
        stop=st.sampled_from([(), ("a",), ("ab", "b"), ("cab",)]),
    )
    def add(self, prompt: str, *, adapter: int, salted: bool, **params: Any) -> None:
        try:
            self.harness.add(prompt, adapter=self.adapters[adapter], cache_salt="x" if salted else None, **params)
        except UserError:
            pass

    @precondition(lambda self: self.harness.engine.has_work)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.harness.engine.has_work:
                self.harness.step()

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request: Request = data.draw(st.sampled_from(self.harness.requests))
        self.harness.abort(request)

    @invariant()
    def accounts_add_up(self) -> None:
        if hasattr(self, "harness"):
            self.harness.blocks.check(self.harness.engine.unfinished)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=80,
    stateful_step_count=25,
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # they judge speed
)
