"""KV blocks: the hash chain, who evicts whom, copy on write, swapping, and the accounts' own check."""

from collections.abc import Callable

import pytest

from tests.serve.oracle import LetterAdapter, ids
from trainer.serve.block_manager import BlockManager
from trainer.serve.sampling_params import SamplingParams
from trainer.serve.sequence import Request, Sequence

BLOCK_SIZE = 4


def manager(num_blocks: int = 8, *, num_swap_blocks: int = 0, enable_prefix_caching: bool = True) -> BlockManager:
    return BlockManager(
        num_blocks, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching, num_swap_blocks=num_swap_blocks
    )


def sequence(
    prompt: str, *, adapter: str | None = None, cache_salt: str | None = None, prompt_logprobs_start: int | None = None
) -> Sequence:
    scored = {} if prompt_logprobs_start is None else {"prompt_logprobs": 0}
    params = SamplingParams(prompt_logprobs_start=prompt_logprobs_start or 0, **scored)
    lora = None if adapter is None else LetterAdapter(adapter)
    request = Request(prompt, ids(prompt), params, seed=0, adapter=lora, cache_salt=cache_salt)
    return Sequence.first(request)


def compute(blocks: BlockManager, prompt: str, **options) -> Sequence:
    """A sequence whose prompt is computed, from the cache as far as it goes."""
    new = sequence(prompt, **options)
    blocks.take_prefix(new, blocks.find_prefix(new))
    blocks.allocate(new, new.num_tokens)
    blocks.register(new, new.num_tokens)
    new.num_computed_tokens = new.num_tokens
    return new


# ---- prefix cache


@pytest.mark.parametrize(
    ("prompt", "num_found"),
    [("abc", 0), ("abcd", 0), ("abcde", 1), ("abcdefgh", 1), ("abcdefgha", 2), ("abcdeeee", 1), ("bbcdefgha", 0)],
)
def test_finds_full_blocks_but_never_the_last_token(prompt: str, num_found: int) -> None:
    blocks = manager()
    first = compute(blocks, "abcdefgha")
    assert blocks.find_prefix(sequence(prompt)) == first.block_table[:num_found]


@pytest.mark.parametrize(("start", "num_found"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2)])
def test_a_cached_prefix_ends_before_the_first_wanted_logprob(start: int, num_found: int) -> None:
    """The token at position 5 is predicted at 4, so block 0..3 may come from the cache; that at 4 is predicted at 3."""
    blocks = manager()
    compute(blocks, "abcdefgha")
    assert len(blocks.find_prefix(sequence("abcdefgha", prompt_logprobs_start=start))) == num_found


def test_a_block_is_found_only_behind_the_same_blocks() -> None:
    blocks = manager()
    compute(blocks, "aaaabbbbc")
    assert blocks.find_prefix(sequence("ccccbbbbc")) == []
    assert len({sequence("aaaabbbb").block_hash(1, 4), sequence("ccccbbbb").block_hash(1, 4)}) == 2


NAMESPACES = [
    {},
    {"adapter": "a"},
    {"adapter": "b"},
    {"cache_salt": "a"},
    {"adapter": "a", "cache_salt": "bc"},
    {"adapter": "ab", "cache_salt": "c"},
    {"cache_salt": "abc"},
    {"cache_salt": "1:a"},
    {"cache_salt": "\ud800"},
]


def test_namespaces_never_share() -> None:
    blocks = manager(2 * len(NAMESPACES))
    tables = [compute(blocks, "abcde", **namespace).block_table for namespace in NAMESPACES]
    assert len({table[0] for table in tables}) == len(NAMESPACES)
    for table, namespace in zip(tables, NAMESPACES, strict=True):
        assert blocks.find_prefix(sequence("abcde", **namespace)) == table[:1]


def test_an_empty_salt_is_none() -> None:
    assert sequence("a", cache_salt="").request.namespace() == sequence("a").request.namespace()


def test_tokens_are_compared_where_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "block_hash", lambda self, index, block_size: bytes([index]))
    blocks = manager()
    first = compute(blocks, "aaaabbbbc")
    assert blocks.find_prefix(sequence("aaaabbbbc")) == first.block_table[:2]
    assert blocks.find_prefix(sequence("aaaaccccc")) == first.block_table[:1]
    assert blocks.find_prefix(sequence("ccccbbbbc")) == []
    second = compute(blocks, "ccccbbbbc")  # its blocks cannot be registered: the hashes are taken
    assert not set(second.block_table) & set(first.block_table)
    assert blocks.find_prefix(sequence("aaaabbbbc")) == first.block_table[:2]
    blocks.check([first, second])


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = manager(enable_prefix_caching=False)
    compute(blocks, "abcdefgh")
    assert blocks.find_prefix(sequence("abcdefgh")) == []
    assert blocks.num_cached_blocks == 0


def test_the_same_block_twice_is_found_once() -> None:
    """Two sequences that computed the same at the same time keep their own blocks; one of them is findable."""
    blocks = manager()
    first, second = sequence("abcde"), sequence("abcde")
    for new in (first, second):
        blocks.allocate(new, 5)
    for new in (first, second):
        blocks.register(new, 5)
    assert first.block_table != second.block_table
    assert blocks.find_prefix(sequence("abcde")) == first.block_table[:1]
    blocks.check([first, second])


def test_a_free_block_is_found_until_it_is_handed_out() -> None:
    blocks = manager(3)
    first = compute(blocks, "abcdefgha")
    table = list(first.block_table)
    blocks.free(first)
    assert blocks.num_free_blocks == 3
    assert blocks.find_prefix(sequence("abcdefgha")) == table[:2]
    again = compute(blocks, "abcdefgha")
    assert again.block_table[:2] == table[:2]
    blocks.free(again)
    other = compute(blocks, "hhhhhhhhhhhh")
    assert blocks.find_prefix(sequence("abcdefgha")) == []
    blocks.check([other])


def test_eviction_takes_unfindable_blocks_then_the_longest_free_and_tails_before_heads() -> None:
    blocks = manager(7)
    old, new = compute(blocks, "aaaabbbbc"), compute(blocks, "ddddeeeef")
    order = [old.block_table[2], new.block_table[2], old.block_table[1], old.block_table[0]]
    order += [new.block_table[1], new.block_table[0]]
    blocks.free(old)
    blocks.free(new)
    unused = 6  # never handed out, nobody can find it
    taker = sequence("g" * 28)
    blocks.allocate(taker, 28)
    assert set(taker.block_table[:3]) == {order[0], order[1], unused}
    assert taker.block_table[3:] == order[2:]


def test_use_makes_a_cached_block_young() -> None:
    blocks = manager(4)
    old, new = compute(blocks, "aaaab"), compute(blocks, "ccccd")
    head = old.block_table[0], new.block_table[0]
    blocks.free(old)
    blocks.free(new)
    blocks.free(compute(blocks, "aaaab"))
    taker = sequence("g" * 12)
    blocks.allocate(taker, 12)
    assert head[1] in taker.block_table and head[0] not in taker.block_table


def test_num_free_after_counts_cached_blocks_that_nobody_holds() -> None:
    blocks = manager(4)
    first = compute(blocks, "abcdefgha")
    prefix = blocks.find_prefix(sequence("abcdefgha"))
    assert blocks.num_free_after(prefix) == 1
    blocks.free(first)
    assert blocks.num_free_after(prefix) == 2


def test_forget_empties_the_cache_and_keeps_what_is_in_use() -> None:
    blocks = manager()
    held, freed = compute(blocks, "abcdefgha"), compute(blocks, "hgfedcba")
    blocks.free(freed)
    blocks.forget()
    assert blocks.num_cached_blocks == 0
    assert blocks.find_prefix(sequence("abcdefgha")) == blocks.find_prefix(sequence("hgfedcbaa")) == []
    blocks.check([held])
    blocks.register(held, 9)
    assert blocks.num_cached_blocks == 0  # what was forgotten does not come back
    blocks.free(held)
    blocks.check([])
    assert blocks.num_free_blocks == 8


# ---- forks and copy on write


def test_forks_share_all_blocks_and_copy_the_one_they_write() -> None:
    blocks = manager()
    parent = compute(blocks, "abcdef")
    twin = parent.fork()
    blocks.share(parent, twin)
    full, partial = parent.block_table
    assert twin.block_table == [full, partial]
    for answer in (parent, twin):
        answer.token_ids.append(1)
    assert blocks.num_missing(parent, 7) == 1
    assert blocks.allocate(parent, 7) == [(partial, parent.block_table[1])]
    assert parent.block_table[1] != partial
    assert blocks.num_missing(twin, 7) == 0  # the last one writes in place
    assert blocks.allocate(twin, 7) == []
    assert twin.block_table == [full, partial]
    blocks.check([parent, twin])


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    blocks = manager()
    parent = compute(blocks, "abcd")
    twin = parent.fork()
    blocks.share(parent, twin)
    for answer in (parent, twin):
        answer.token_ids.append(1)
        assert blocks.num_missing(answer, 5) == 1
        assert blocks.allocate(answer, 5) == []
    assert parent.block_table[0] == twin.block_table[0] and parent.block_table[1] != twin.block_table[1]


def test_num_missing_counts_new_blocks_and_copies() -> None:
    blocks = manager()
    parent = compute(blocks, "abcdef")
    blocks.share(parent, parent.fork())
    parent.token_ids += ids("abcd")
    assert [blocks.num_missing(parent, length) for length in (6, 7, 8, 9, 10)] == [0, 1, 1, 2, 2]
    before = blocks.num_free_blocks
    blocks.allocate(parent, 10)
    assert before - blocks.num_free_blocks == 2


def test_free_is_legal_twice() -> None:
    blocks = manager()
    first = compute(blocks, "abcdef")
    blocks.free(first)
    blocks.free(first)
    blocks.free(sequence("never began"[:5]))
    blocks.check([])
    assert blocks.num_free_blocks == 8


# ---- swapping


def test_swap_moves_computed_blocks_only_and_brings_them_back_in_order() -> None:
    blocks = manager(num_swap_blocks=3)
    first = compute(blocks, "abcdefgha")
    table = list(first.block_table)
    first.token_ids += ids("hhhhh")
    blocks.allocate(first, 14)  # a fourth block, of which nothing is computed
    moved = blocks.swap_out(first)
    assert [block for block, _ in moved] == table
    assert first.swapped_blocks == [host for _, host in moved]
    assert blocks.num_free_blocks == 8 and blocks.num_free_swap_blocks == 0
    blocks.check([first])
    back = blocks.swap_in(first)
    assert [host for host, _ in back] == [host for _, host in moved]
    assert [block for _, block in back] == first.block_table
    assert blocks.num_free_swap_blocks == 3
    blocks.check([first])


def test_a_swapped_in_sequence_can_be_found_again() -> None:
    blocks = manager(3, num_swap_blocks=3)
    first = compute(blocks, "abcdefgha")
    blocks.swap_out(first)
    other = compute(blocks, "hhhhhhhhhhhh")
    blocks.free(other)
    blocks.swap_in(first)
    blocks.register(first, 9)
    assert blocks.find_prefix(sequence("abcdefgha")) == first.block_table[:2]


def test_swap_space_that_is_too_small_changes_nothing() -> None:
    blocks = manager(num_swap_blocks=2)
    first = compute(blocks, "abcdefgha")
    table = list(first.block_table)
    assert blocks.swap_out(first) is None
    assert first.block_table == table and blocks.num_free_swap_blocks == 2
    blocks.check([first])


def test_nothing_computed_is_not_swapped() -> None:
    blocks = manager(num_swap_blocks=2)
    first = sequence("abcde")
    blocks.allocate(first, 5)
    assert blocks.swap_out(first) is None


def test_free_gives_host_blocks_back() -> None:
    blocks = manager(num_swap_blocks=3)
    first = compute(blocks, "abcdefgha")
    blocks.swap_out(first)
    blocks.free(first)
    assert blocks.num_free_swap_blocks == 3
    blocks.check([])


# ---- the check


CORRUPTIONS: dict[str, tuple[Callable[[BlockManager, Sequence], object], str]] = {
    "reference too many": (lambda b, s: setattr(b.blocks[s.block_table[0]], "num_references", 2), "1 block tables"),
    "reference too few": (lambda b, s: setattr(b.blocks[s.block_table[0]], "num_references", 0), "1 block tables"),
    "lost from a table": (lambda b, s: s.block_table.pop(), "0 block tables hold it"),
    "twice in a table": (
        lambda b, s: (s.block_table.append(s.block_table[0]), setattr(b.blocks[s.block_table[0]], "num_references", 2)),
        "1 block tables hold it, num_references=2",
    ),
    "held and free": (lambda b, s: b._free.update({s.block_table[0]: None}), "free=True"),
    "neither held nor free": (lambda b, s: b._free.popitem(), "0 block tables hold it, num_references=0, free=False"),
    "hash without entry": (lambda b, s: b._cached.clear(), "under which another block is found"),
    "hash of another": (lambda b, s: setattr(b.blocks[s.block_table[0]], "hash", b"x"), "hash"),
    "entry without hash": (lambda b, s: b._cached.update({b"x": 7}), "under a hash that it does not have"),
    "hash without tokens": (lambda b, s: setattr(b.blocks[s.block_table[0]], "tokens", (1,)), "has 1 tokens"),
    "tokens without hash": (lambda b, s: setattr(b.blocks[7], "tokens", (1,)), "has 1 tokens"),
    "host block lost": (lambda b, s: b._free_swap.pop(), "1 host blocks are accounted for, of 2"),
    "host block twice": (lambda b, s: s.swapped_blocks.append(0), "3 host blocks are accounted for, of 2"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_check_sees(kind: str) -> None:
    corrupt, message = CORRUPTIONS[kind]
    blocks = manager(num_swap_blocks=2)
    first = compute(blocks, "abcdef")
    blocks.check([first])
    corrupt(blocks, first)
    with pytest.raises(RuntimeError, match=message):
        blocks.check([first])
