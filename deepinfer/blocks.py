"""The KV blocks of one rank: who owns them, how often they are shared, which of the free ones still hold a prefix.

Pure and synchronous. Knows block ids only; what is in a block, and when a step that names it has ended, is known
elsewhere (`deepinfer.release`).
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Reference-counted blocks `0 … num_blocks - 1`.

    A block is *used* (one or more owners), *cached* (no owner, but its content can still be adopted by hash) or
    *free*. Allocation takes free blocks first, then the cached block that was released longest ago.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_owners = [0] * num_blocks
        self._hash_of = [b""] * num_blocks
        self._hash_to_block: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in order of release

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can take now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self) -> int:
        """A block with one owner. The caller has seen `num_available`."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            self._forget_hash(block)
        self._num_owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner for a used or cached block."""
        if self._num_owners[block] == 0:
            del self._cached[block]
        self._num_owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each of `blocks`. The later ones become the first to be evicted."""
        for block in reversed(list(blocks)):
            owners = self._num_owners[block] - 1
            assert owners >= 0, f"block {block} released twice"
            self._num_owners[block] = owners
            if owners == 0:
                if self._hash_of[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def num_owners(self, block: int) -> int:
        return self._num_owners[block]

    def is_cached(self, block: int) -> bool:
        """No owner, content still known: adopting it takes from `num_available`."""
        return self._num_owners[block] == 0

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others adopt `block` by `block_hash`. The first block published under a hash keeps it."""
        if block_hash not in self._hash_to_block and not self._hash_of[block]:
            self._hash_to_block[block_hash] = block
            self._hash_of[block] = block_hash

    def find(self, block_hash: bytes) -> int | None:
        """The block published under `block_hash`."""
        return self._hash_to_block.get(block_hash)

    def _forget_hash(self, block: int) -> None:
        if self._hash_of[block]:
            del self._hash_to_block[self._hash_of[block]]
            self._hash_of[block] = b""

    def check_integrity(self, owned: Iterable[int]) -> None:
        """`owned`: every (owner, block) pair there is, by block. Raises `AssertionError` on a difference."""
        counts = [0] * self.num_blocks
        for block in owned:
            counts[block] += 1
        assert counts == self._num_owners, f"owners {counts} differ from counts {self._num_owners}"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        idle = {block for block, count in enumerate(counts) if count == 0}
        assert free | cached == idle, "free and cached blocks are not the blocks without owner"
        for block_hash, block in self._hash_to_block.items():
            assert self._hash_of[block] == block_hash, f"block {block} is published under another hash"
        assert all(self._hash_of[block] for block in cached), "a cached block has no hash"
        assert not any(self._hash_of[block] for block in free), "a free block has a hash"
