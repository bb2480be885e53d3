"""BlockManager: which KV block belongs to whom (PagedAttention, arXiv:2309.06180, sections 4.2-4.4).

A block is free, or held by the block tables of `num_references` sequences. A full block also has a hash of all tokens
up to its end, under which later prompts find it, also after it was freed and until it is handed out again: the free
blocks are kept in the order of their freeing, oldest first, and a sequence frees its tail before its head, so that the
head, which others are likelier to share, stays longest. On a hit the tokens are compared too.

The surprising thing: a block is findable from the moment its computation is scheduled. Keys and values of all rows of a
step are written before any are read, so requests that arrive together share a prefix too.
"""

from collections import OrderedDict
from dataclasses import dataclass

from trainer.serve.sequence import Sequence


@dataclass(slots=True)
class Block:
    block_id: int
    num_references: int = 0
    hash: bytes | None = None
    tokens: tuple[int, ...] = ()


class BlockManager:
    """Allocates, shares, copies on write and frees KV blocks. Never touches their content: it returns what to copy."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, num_swap_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[bytes, int] = {}
        self.num_swap_blocks = num_swap_blocks
        self._free_swap = list(range(num_swap_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_free_swap_blocks(self) -> int:
        return len(self._free_swap)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- prefix cache

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest known beginning of a new sequence; its last token is never among them, and
        neither is what comes after the first position whose log-probability is wanted."""
        if not self.enable_prefix_caching:
            return []
        limit = sequence.num_tokens - 1
        wanted = sequence.request.next_prompt_logprob
        if wanted is not None:
            limit = min(limit, max(0, wanted - 1))
        found = []
        for index in range(limit // self.block_size):
            block_id = self._cached.get(sequence.block_hash(index, self.block_size))
            if block_id is None or self.blocks[block_id].tokens != self._tokens(sequence, index):
                break
            found.append(block_id)
        return found

    def num_free_after(self, prefix: list[int]) -> int:
        """Free blocks that would be left if `prefix` were taken."""
        return len(self._free) - sum(self.blocks[block_id].num_references == 0 for block_id in prefix)

    def take_prefix(self, sequence: Sequence, prefix: list[int]) -> None:
        """Begin the block table of a new sequence with found blocks."""
        assert not sequence.block_table
        for block_id in prefix:
            block = self.blocks[block_id]
            if block.num_references == 0:
                del self._free[block_id]
            block.num_references += 1
        sequence.block_table = list(prefix)
        sequence.num_registered_blocks = len(prefix)
        sequence.num_computed_tokens = len(prefix) * self.block_size

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable; their computation is scheduled or done."""
        if not self.enable_prefix_caching:
            return
        for index in range(sequence.num_registered_blocks, num_tokens // self.block_size):
            block = self.blocks[sequence.block_table[index]]
            block_hash = sequence.block_hash(index, self.block_size)
            if block.hash is None and block_hash not in self._cached:
                block.hash, block.tokens = block_hash, self._tokens(sequence, index)
                self._cached[block_hash] = block.block_id
            sequence.num_registered_blocks = index + 1

    def forget(self) -> None:
        """Empty the prefix cache; blocks in use stay in use, unfindable."""
        for block_id in self._cached.values():
            self.blocks[block_id].hash, self.blocks[block_id].tokens = None, ()
        self._cached.clear()

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])

    # ---- allocation

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks needed before tokens num_computed_tokens..num_tokens can be written, copies on write included."""
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        return max(0, missing) + len(self._shared_tail(sequence, num_tokens))

    def allocate(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Grow the block table to `num_tokens`; before it is written, a block that others share is replaced by a copy.

        returns  (source, destination) of each copy to make before the next forward
        The caller has checked that `num_missing` blocks are free.
        """
        copies = []
        for index in self._shared_tail(sequence, num_tokens):
            source = sequence.block_table[index]
            destination = self._pop_free()
            self.blocks[source].num_references -= 1
            sequence.block_table[index] = destination
            copies.append((source, destination))
        while len(sequence.block_table) < self.num_blocks_for(num_tokens):
            sequence.block_table.append(self._pop_free())
        return copies

    def _shared_tail(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Indices of blocks that will be written and that another sequence holds too."""
        if num_tokens <= sequence.num_computed_tokens:
            return []
        first = sequence.num_computed_tokens // self.block_size
        last = min(len(sequence.block_table), self.num_blocks_for(num_tokens))
        return [i for i in range(first, last) if self.blocks[sequence.block_table[i]].num_references > 1]

    def share(self, source: Sequence, twin: Sequence) -> None:
        """Give a forked sequence the same blocks."""
        twin.block_table = list(source.block_table)
        for block_id in twin.block_table:
            self.blocks[block_id].num_references += 1

    def free(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back, tail first; legal in every state, and twice."""
        for block_id in reversed(sequence.block_table):
            block = self.blocks[block_id]
            block.num_references -= 1
            if block.num_references == 0:
                self._free[block_id] = None
                if block.hash is None:
                    self._free.move_to_end(block_id, last=False)  # nobody can find it: hand it out first
        sequence.block_table = []
        sequence.num_registered_blocks = 0
        self._free_swap += sequence.swapped_blocks
        sequence.swapped_blocks = []

    def _pop_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if block.hash is not None:
            del self._cached[block.hash]
            block.hash, block.tokens = None, ()
        block.num_references = 1
        return block_id

    # ---- swapping

    def swap_out(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        """Move the computed blocks of a sequence to host memory; None where that is too full.

        returns  (block, host block) of each copy to make before anything else of the step
        """
        used = sequence.block_table[: self.num_blocks_for(sequence.num_computed_tokens)]
        if not used or len(used) > len(self._free_swap):
            return None
        host = [self._free_swap.pop() for _ in used]
        self.free(sequence)
        sequence.swapped_blocks = host
        return list(zip(used, host, strict=True))

    def swap_in(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Bring a swapped sequence back into free blocks, which the caller has counted.

        returns  (host block, block) of each copy to make before the next forward
        """
        host = sequence.swapped_blocks
        sequence.block_table = [self._pop_free() for _ in host]
        sequence.swapped_blocks = []
        self._free_swap += host
        return list(zip(host, sequence.block_table, strict=True))

    # ---- invariants

    def check(self, sequences: list[Sequence]) -> None:
        """Compare the accounts with the block tables of all unfinished sequences.

        raises  RuntimeError naming the first block that does not add up
        """
        counted = [0] * self.num_blocks
        swapped: list[int] = list(self._free_swap)
        for sequence in sequences:
            swapped += sequence.swapped_blocks
            for block_id in set(sequence.block_table):  # twice in one table shows as a reference too many
                counted[block_id] += 1
        for block, count in zip(self.blocks, counted, strict=True):
            if block.num_references != count or (block.block_id in self._free) != (count == 0):
                raise RuntimeError(
                    f"KV block {block.block_id}: {count} block tables hold it, num_references={block.num_references}, "
                    f"free={block.block_id in self._free}"
                )
            if block.hash is not None and self._cached.get(block.hash) != block.block_id:
                raise RuntimeError(f"KV block {block.block_id} has a hash under which another block is found")
            if len(block.tokens) != (0 if block.hash is None else self.block_size):
                raise RuntimeError(f"KV block {block.block_id} can be found and has {len(block.tokens)} tokens")
        for block_hash, block_id in self._cached.items():
            if self.blocks[block_id].hash != block_hash:
                raise RuntimeError(f"the prefix cache finds KV block {block_id} under a hash that it does not have")
        if sorted(swapped) != list(range(self.num_swap_blocks)):
            raise RuntimeError(f"{len(swapped)} host blocks are accounted for, of {self.num_swap_blocks}")
