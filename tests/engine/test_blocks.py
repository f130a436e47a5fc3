"""The block pool against a naive model of it: every order of calls, and what it must never do."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.blocks import BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """The model: who owns which block, what each block holds, which idle block was released first."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # by block, published ones only
        self.idle: list[int] = []  # published, without owner, in order of release

    @property
    def owned(self) -> list[int]:
        return [block for owner in self.owners for block in owner]

    @precondition(lambda self: len(set(self.owned)) < NUM_BLOCKS)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        unknown = set(range(NUM_BLOCKS)) - set(self.owned) - set(self.idle)
        block = self.pool.allocate()
        if unknown:
            assert block in unknown, "a known prefix was evicted although a free block was there"
        else:
            assert block == self.idle.pop(0), "not the block that was released longest ago"
            del self.content[block]
        place = data.draw(st.integers(0, len(self.owners)))
        if place == len(self.owners):
            self.owners.append([])
        self.owners[place].append(block)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        block, key = data.draw(st.sampled_from(sorted(self.content.items())))
        assert self.pool.find(key) == block
        assert self.pool.is_cached(block) == (block not in self.owned)
        self.pool.share(block)
        if block in self.idle:
            self.idle.remove(block)
        self.owners.append([block])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(owner)
        for block in reversed(owner):
            if block in self.content and block not in self.owned and block not in self.idle:
                self.idle.append(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(self.owned))
        self.pool.publish(block, key)
        if block not in self.content and key not in self.content.values():
            self.content[block] = key

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(self.owned)
        assert self.pool.num_used == len(set(self.owned))
        assert self.pool.num_available == NUM_BLOCKS - len(set(self.owned))
        assert self.pool.num_cached == len(self.idle)
        assert [self.pool.num_owners(block) for block in range(NUM_BLOCKS)] == [
            self.owned.count(block) for block in range(NUM_BLOCKS)
        ]
        assert {self.pool.find(key) for key in self.content.values()} == set(self.content)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(derandomize=True, max_examples=200, stateful_step_count=40, deadline=None)


def test_releasing_twice_is_found() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_the_first_block_under_a_key_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.find(b"key") == first
    pool.release([second])
    assert not pool.num_cached


def test_later_blocks_of_a_prefix_are_evicted_before_earlier_ones() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    pool.release(blocks)
    assert [pool.allocate() for _ in range(3)] == blocks[::-1]


@pytest.mark.parametrize("field", ["_num_owners", "_hash_of", "_free", "_cached"])
def test_corruption_is_found(field: str) -> None:
    pool = BlockPool(4)
    owned, published = pool.allocate(), pool.allocate()
    pool.publish(published, b"key")
    pool.release([published])
    pool.check_integrity([owned])
    if field == "_cached":
        pool._cached.clear()
    elif field == "_free":
        pool._free.append(owned)
    elif field == "_hash_of":
        pool._hash_of[published] = b"other"
    else:
        pool._num_owners[owned] += 1
    with pytest.raises(AssertionError):
        pool.check_integrity([owned])
