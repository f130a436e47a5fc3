"""Deferred release: nothing comes back before the last step that names it, everything comes back once."""

from __future__ import annotations

from deepinfer.release import DeferredRelease


class Pools:
    """Where things come back to, and in which order."""

    def __init__(self) -> None:
        self.returned: list[tuple[int, list[int]]] = []
        self.release = DeferredRelease(lambda slot, block_ids: self.returned.append((slot, block_ids)))


def test_what_no_step_in_flight_names_comes_back_at_once() -> None:
    pools = Pools()
    pools.release.release(-1, 7, [1, 2])
    pools.release.applied(4)
    pools.release.release(4, 8, [3])
    assert pools.returned == [(7, [1, 2]), (8, [3])]
    assert pools.release.num_slots == 0


def test_what_a_step_in_flight_names_waits_for_its_result() -> None:
    pools = Pools()
    pools.release.release(2, 7, [1, 2])
    pools.release.applied(1)
    assert pools.returned == [] and pools.release.slots() == [7]
    pools.release.applied(2)
    assert pools.returned == [(7, [1, 2])]
    pools.release.applied(3)
    assert pools.returned == [(7, [1, 2])]


def test_things_come_back_in_the_order_of_their_steps() -> None:
    pools = Pools()
    for fence, slot in ((5, 0), (3, 1), (5, 2), (4, 3)):
        pools.release.release(fence, slot, [slot])
    pools.release.applied(5)
    assert [slot for slot, _ in pools.returned] == [1, 3, 0, 2]


def test_capacity_on_its_way_is_counted_once_an_owner() -> None:
    pools = Pools()
    pools.release.release(3, 0, [5, 6])
    pools.release.release(3, 1, [5, 7])
    assert sorted(pools.release.block_ids()) == [5, 5, 6, 7]
    assert pools.release.num_slots == 2


def test_the_callback_comes_after_the_return_and_may_release_more() -> None:
    pools = Pools()

    def then() -> None:
        assert pools.returned == [(0, [1])]
        pools.release.release(2, 9, [9])

    pools.release.release(2, 0, [1], then)
    assert pools.returned == []
    pools.release.applied(2)
    assert pools.returned == [(0, [1]), (9, [9])]
