"""Who computes in a step: budget, order, preemption, forks; each scenario is exact, with the oracle as the model."""

from collections.abc import Callable

import pytest

from tests.serve.oracle import Harness, LetterAdapter
from trainer.config.errors import UserError
from trainer.serve.scheduler import Step
from trainer.serve.sequence import Request, Status

LONG = {"ignore_eos": True}
"""Answers that end at max_tokens."""


def rows(harness: Harness) -> dict[str, int]:
    """Tokens that the last step computed, by request; drafts aside."""
    counted: dict[str, int] = {}
    for item in harness.runner.scheduled:
        request_id = item.sequence.request.request_id
        counted[request_id] = counted.get(request_id, 0) + item.num_tokens
    return counted


def spy(harness: Harness) -> list[Step]:
    """Every step from now on, as the runner gets it."""
    steps: list[Step] = []
    execute = harness.runner.execute
    harness.runner.execute = lambda step: (steps.append(step), execute(step))[1]
    return steps


def steps_until(harness: Harness, done: Callable[[], bool], limit: int = 1000) -> int:
    for count in range(limit):
        if done():
            return count
        harness.step()
    raise AssertionError(f"not done after {limit} steps")


# ---- budget


def test_decodes_come_first_and_a_prompt_gets_the_rest() -> None:
    harness = Harness(max_num_batched_tokens=8)
    stream = harness.add("abcd", max_tokens=20, **LONG)
    harness.step()
    assert rows(harness) == {stream.request_id: 4}
    prompt = harness.add("h" * 20, max_tokens=4, **LONG)
    chunks = []
    while prompt.sequences[0].num_output_tokens == 0:
        harness.step()
        assert rows(harness)[stream.request_id] == 1
        chunks.append(rows(harness)[prompt.request_id])
    assert chunks == [7, 7, 6]
    harness.drain()


def test_prompts_share_a_step() -> None:
    harness = Harness(max_num_batched_tokens=10)
    requests = [harness.add(letter * 4, max_tokens=2, **LONG) for letter in "abc"]
    harness.step()
    assert [rows(harness).get(request.request_id) for request in requests] == [4, 4, 2]
    harness.drain()


def test_a_long_prompt_never_delays_a_decode() -> None:
    """Harness.step asserts that each decode got its token; here also that the prompt came in chunks all along."""
    harness = Harness(num_blocks=400, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
    streams = [harness.add("abc" + letter, max_tokens=100, **LONG) for letter in "abcdef"]
    harness.step()
    long = harness.add([1 + i % 8 for i in range(4096)], max_tokens=4, **LONG)
    before = [stream.sequences[0].num_output_tokens for stream in streams]
    num_steps = steps_until(harness, lambda: long.first_token_s is not None)
    # 64 tokens a step of which the six streams take one each: 4096 / 58, rounded up
    assert num_steps == 71
    assert [s.sequences[0].num_output_tokens - b for s, b in zip(streams, before, strict=True)] == [71] * 6
    harness.drain()


def test_drafts_use_what_the_decodes_leave() -> None:
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=6, num_speculative_tokens=4)
    for letter in "abcd":
        harness.add(letter * 4, max_tokens=30, **LONG)
    harness.drain()  # the oracle checks the budget in each step
    assert harness.counts.drafted > harness.counts.accepted > 0


def test_a_speculated_answer_takes_fewer_steps() -> None:
    plain, drafted = Harness(), Harness(num_speculative_tokens=4)
    for harness in (plain, drafted):
        harness.add("abababab", max_tokens=60, **LONG)
        harness.drain()
    assert drafted.scheduler.num_steps == plain.scheduler.num_steps - drafted.counts.accepted
    assert drafted.counts.accepted > 0


def test_no_drafts_before_a_fork() -> None:
    """The twins start behind the prompt; a draft that was accepted would put them past their own last token."""
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=6, num_speculative_tokens=4)
    steps = spy(harness)
    forked = harness.add("abababab", n=2, max_tokens=8, **LONG)
    harness.step()
    harness.step()  # two tokens of the prompt, and four of the budget are left
    assert len(forked.sequences) == 2
    assert [item.draft_token_ids for item in steps[1].scheduled] == [[]]
    harness.drain()


def test_drafts_with_the_last_chunk_of_a_prompt() -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=6, num_speculative_tokens=4)
    steps = spy(harness)
    harness.add("abababab", max_tokens=8, **LONG)
    harness.drain()
    assert [len(item.draft_token_ids) for item in steps[1].scheduled] == [4]  # "abab" again and again


# ---- order


def test_first_come_first_served() -> None:
    harness = Harness(max_num_seqs=1)
    requests = [harness.add("abc", max_tokens=3, **LONG) for _ in range(4)]
    harness.drain()
    firsts = [request.first_scheduled_s for request in requests]
    assert firsts == sorted(firsts) and len(set(firsts)) == 4


def test_the_smaller_priority_is_served_first() -> None:
    harness = Harness(max_num_seqs=1)
    requests = [harness.add("abc", priority=priority, max_tokens=3, **LONG) for priority in (3, 0, 5, -2)]
    harness.drain()
    assert sorted(requests, key=lambda r: r.first_scheduled_s) == [requests[i] for i in (3, 1, 0, 2)]


@pytest.mark.parametrize("aging_steps", [4, 16])
def test_waiting_raises_the_priority(aging_steps: int) -> None:
    """Urgent requests come in twice as fast as they are served, for ever; those of the first 2 * aging_steps steps
    overtake one that is two levels lower, and no later one."""
    harness = Harness(max_num_seqs=1, priority_aging_steps=aging_steps)
    patient = harness.add("abc", priority=2, max_tokens=2, **LONG)
    urgent = []
    while patient.first_scheduled_s is None:
        urgent.append(harness.add("ddd", priority=0, max_tokens=2, **LONG))
        harness.step()
        assert len(urgent) < 6 * aging_steps
    assert [r.first_scheduled_s is not None for r in urgent] == [i < 2 * aging_steps for i in range(len(urgent))]
    harness.drain()


def test_nobody_overtakes_a_request_that_does_not_fit_yet() -> None:
    harness = Harness(num_blocks=8, block_size=4, enable_prefix_caching=False)
    harness.add("a" * 12, max_tokens=8, **LONG)
    harness.step()
    large = harness.add("b" * 20, max_tokens=4, **LONG)
    small = harness.add("c", max_tokens=1, **LONG)
    harness.step()
    assert harness.scheduler.waiting == [large.sequences[0], small.sequences[0]]
    harness.drain()
    assert large.first_scheduled_s <= small.first_scheduled_s


# ---- preemption


def contended(num_swap_blocks: int = 0, **options) -> tuple[Harness, list[Request]]:
    """Two requests that need 9 of 16 blocks each when they are done, and 5 at first."""
    harness = Harness(num_blocks=16, block_size=4, num_swap_blocks=num_swap_blocks, **options)
    prompts = ["abcdefghabcdefgha", "hgfedcbahgfedcbah"]
    return harness, [harness.add(prompt, max_tokens=19, **LONG) for prompt in prompts]


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_the_newest_is_preempted_and_computed_again(enable_prefix_caching: bool) -> None:
    harness, (old, new) = contended(enable_prefix_caching=enable_prefix_caching)
    steps_until(harness, lambda: harness.counts.preempted_recompute == 1)
    assert old.sequences[0].status is Status.running
    assert new.sequences[0].status is Status.waiting and new.sequences[0].num_computed_tokens == 0
    assert harness.counts.preempted_swap == harness.counts.recomputed_tokens == 0
    computed = harness.runner.num_rows
    harness.drain()
    assert old.sequences[0].last_token_s < new.sequences[0].last_token_s
    assert harness.counts.preempted_recompute == 1  # the reserve lets it in only when it can stay
    # what is computed, all in all: every token but the last of each answer, and what was lost
    assert harness.runner.num_rows == 2 * (17 + 18) + harness.counts.recomputed_tokens
    assert computed < harness.runner.num_rows and harness.counts.recomputed_tokens > 0


def test_a_preempted_sequence_is_swapped_where_there_is_room() -> None:
    harness, (_, new) = contended(num_swap_blocks=9)
    steps = spy(harness)
    steps_until(harness, lambda: harness.counts.preempted_swap == 1)
    sequence = new.sequences[0]
    assert sequence.status is Status.swapped
    assert len(sequence.swapped_blocks) == len(steps[-1].swap_out) == -(-sequence.num_computed_tokens // 4)
    harness.drain()
    assert harness.counts.recomputed_tokens == harness.counts.preempted_recompute == 0
    assert harness.counts.swapped_out_blocks == harness.counts.swapped_in_blocks > 0
    assert harness.runner.num_rows == 2 * (17 + 18)  # nothing was computed twice


def test_without_room_in_swap_space_it_is_computed_again_and_counted() -> None:
    harness, _ = contended(num_swap_blocks=3)
    harness.drain()
    assert (harness.counts.preempted_swap, harness.counts.preempted_recompute) == (0, 1)
    assert harness.metric("vllm:num_preemptions_total") == 1


def test_swap_space_that_fills_up() -> None:
    """Three victims, room for one: it is swapped, the others are computed again, all answers are right."""
    harness = Harness(num_blocks=16, block_size=4, num_swap_blocks=6, enable_prefix_caching=False)
    for letter in "abcd":
        harness.add(letter * 9, max_tokens=30, **LONG)
    harness.drain()
    assert harness.counts.preempted_swap > 0 and harness.counts.preempted_recompute > 0


def test_two_requests_that_each_need_more_than_half_of_the_cache() -> None:
    harness = Harness(num_blocks=16, block_size=1)
    for prompt in ("abcd", "hgfe"):
        harness.add(prompt, max_tokens=12, **LONG)
    harness.drain()
    # the first needs 12 steps; by then the other has been let in again with all that it had
    assert harness.scheduler.num_steps <= 24


def test_the_oldest_finishes_under_a_storm() -> None:
    harness = Harness(num_blocks=12, block_size=2, max_num_seqs=4, max_num_batched_tokens=6)
    oldest = harness.add("abc", max_tokens=20, **LONG)
    harness.step()
    for i in range(200):
        if oldest.finished:
            break
        harness.add("defgh"[i % 5] * 3, max_tokens=12, **LONG)
        harness.step()
    assert harness.scheduler.num_steps == 20  # a token a step, whoever else was there
    assert harness.counts.preempted_recompute > 0
    harness.drain()


def test_a_victim_whose_block_was_about_to_be_copied_is_swapped_from_the_source() -> None:
    """Step 3: four answers decode and copy the block they share; then the older prompt, chunk by chunk, takes the
    blocks of two of them, of which one had a copy pending that will now not be made."""
    harness = Harness(num_blocks=10, block_size=4, num_swap_blocks=16, max_num_batched_tokens=12)
    steps = spy(harness)
    forked = harness.add("abcdefghabcdef", n=4, max_tokens=4, **LONG)
    harness.step()
    urgent = harness.add("h" * 20, priority=-1, max_tokens=1, **LONG)
    harness.step()
    assert len(forked.sequences) == 4 and urgent.sequences[0].num_computed_tokens == 10
    shared = forked.sequences[0].block_table[3]
    harness.step()
    assert [s.status for s in forked.sequences] == [Status.running] * 2 + [Status.swapped] * 2
    assert [source for source, _ in steps[2].copies] == [shared] * 2  # three were planned, one is dropped
    assert [source for source, _ in steps[2].swap_out].count(shared) == 2
    assert harness.counts.copies_on_write == 2
    harness.drain()


def test_a_victims_block_is_saved_before_a_copy_is_made_into_it() -> None:
    """Three answers write the block they share: one copy goes into the free block, one into that of the newest."""
    harness = Harness(num_blocks=4, block_size=4, num_swap_blocks=4)
    steps = spy(harness)
    harness.add("abcdef", n=3, priority=-1, max_tokens=2, **LONG)
    newest = harness.add("hhhh", max_tokens=3, **LONG)
    harness.step()
    (block,) = newest.sequences[0].block_table
    harness.step()
    assert [saved for saved, _ in steps[1].swap_out] == [block]
    assert block in [target for _, target in steps[1].copies]
    harness.drain()


def test_nobody_is_let_in_while_somebody_is_preempted() -> None:
    """An urgent request waits for a place; the preemption makes one, and it is given away in the next step."""
    harness, _ = contended(max_num_seqs=2)
    harness.step()
    urgent = harness.add("c", priority=-1, max_tokens=1, **LONG)
    steps_until(harness, lambda: harness.counts.preempted_recompute == 1)
    assert urgent.first_scheduled_s is None
    harness.step()
    assert urgent.finished
    harness.drain()


# ---- what can never run


def test_a_request_larger_than_the_cache_is_refused_with_both_numbers() -> None:
    harness = Harness(num_blocks=4, block_size=4)
    other = harness.add("abc", max_tokens=4, **LONG)
    with pytest.raises(UserError, match=r"prompt \(10 tokens\).* need 5 KV blocks of 4 tokens.* has 4"):
        harness.add("a" * 10, max_tokens=7)
    assert list(harness.engine.requests) == [other.request_id]
    harness.add("a" * 10, max_tokens=6, **LONG)  # the largest that fits
    harness.drain()


def test_more_answers_than_places_are_refused() -> None:
    harness = Harness(max_num_seqs=4)
    with pytest.raises(UserError, match="best_of=5 exceeds the server's max_num_seqs=4"):
        harness.add("abc", n=2, best_of=5, max_tokens=4)
    harness.add("abc", n=4, max_tokens=4)
    harness.drain()


# ---- several answers


def test_forks_share_the_prompt_and_copy_its_partial_block_when_they_write() -> None:
    harness = Harness(num_blocks=16, block_size=4)
    request = harness.add("abcdefghab", n=4, max_tokens=4, **LONG)
    harness.step()
    tables = [sequence.block_table for sequence in request.sequences]
    assert len(tables) == 4 and all(table == tables[0] for table in tables)
    assert harness.blocks.num_free_blocks == 16 - 3  # the prompt's blocks, once
    harness.step()
    assert harness.counts.copies_on_write == 3  # the last one writes in place
    assert len({table[2] for table in tables}) == 4 and len({tuple(table[:2]) for table in tables}) == 1
    assert harness.blocks.num_free_blocks == 16 - 2 - 4
    harness.drain()


def test_forks_of_an_aligned_prompt_copy_nothing() -> None:
    harness = Harness(block_size=4)
    harness.add("abcdefgh", n=4, max_tokens=4, **LONG)
    harness.drain()
    assert harness.counts.copies_on_write == 0


def test_answers_to_come_have_their_places() -> None:
    """While a prompt with n=3 is computed, its forks' places are taken."""
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=8, num_blocks=64)
    first = harness.add("abcdefghabcdef", n=3, max_tokens=4, **LONG)  # its second chunk leaves two tokens
    second = harness.add("hgfedcba", n=2, max_tokens=4, **LONG)
    third = harness.add("ab", max_tokens=4, **LONG)
    steps_until(harness, lambda: len(first.sequences) == 3)
    assert second.first_scheduled_s is None and third.first_scheduled_s is None  # nobody is overtaken
    harness.drain()
    assert first.first_scheduled_s < second.first_scheduled_s <= third.first_scheduled_s


def test_forks_have_hash_chains_of_their_own() -> None:
    harness = Harness(block_size=2)
    request = harness.add("abcde", n=2, max_tokens=12, **LONG)
    harness.step()
    first, second = request.sequences
    assert first.block_hashes == second.block_hashes and first.block_hashes is not second.block_hashes
    harness.drain()


# ---- prefix cache


def test_requests_that_arrive_together_share_what_the_first_computes() -> None:
    harness = Harness(block_size=4)
    requests = [harness.add("abcdefgh" + letter, max_tokens=2, **LONG) for letter in "abc"]
    harness.step()
    assert [request.num_cached_tokens for request in requests] == [0, 8, 8]
    assert rows(harness) == {requests[0].request_id: 9, requests[1].request_id: 1, requests[2].request_id: 1}
    assert (harness.counts.prefix_queries, harness.counts.prefix_hits) == (27, 16)
    harness.drain()


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_the_same_prompt_twice(length: int) -> None:
    """Shorter than a block, a block, one more, two: all but the last token's block comes from the cache."""
    harness = Harness(block_size=4)
    for expected in (0, (length - 1) // 4 * 4):
        request = harness.add("abcdefgh"[:length], max_tokens=6, **LONG)
        harness.drain()
        assert request.num_cached_tokens == expected


def test_an_answer_is_found_by_the_next_turn() -> None:
    harness = Harness(block_size=4)
    first = harness.add("abcdefg", max_tokens=10, **LONG)
    harness.drain()
    # 17 tokens, of which the last was never computed: four full blocks
    second = harness.add(first.sequences[0].token_ids + [1, 2, 3], max_tokens=2, **LONG)
    harness.drain()
    assert second.num_cached_tokens == 16


def test_adapters_and_salts_share_with_their_like_only() -> None:
    harness = Harness()
    adapter = LetterAdapter("a" * 64)
    spaces = [{}, {"adapter": adapter}, {"adapter": LetterAdapter("b" * 64)}, {"cache_salt": "x"}]
    spaces.append({"adapter": adapter, "cache_salt": "x"})
    for expected in (0, 8):
        for space in spaces:
            request = harness.add("abcdefgha", max_tokens=2, **space, **LONG)
            harness.drain()
            assert request.num_cached_tokens == expected
