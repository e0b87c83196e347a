"""Which blocks engines lost, when and to whom, as far as their events tell."""

from __future__ import annotations

from engine.protocol import BlockEvents, Taker
from gateway.index.lost import MAX_BLOCKS, LostBlocks
from gateway.index.memory_index import MemoryIndex
from gateway.types import Lost


def digests(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def test_a_block_is_found_with_the_last_time_at_which_it_was_lost() -> None:
    now = [10.0]
    blocks = LostBlocks(lambda: now[0])
    blocks.add("a", BlockEvents(removed=digests(3, 2), takers=(Taker(1, "north", "req_1"), Taker(1))))
    now[0] = 20.0
    blocks.add("a", BlockEvents(removed=digests(2), takers=(Taker(1, "south", "req_2"),)))
    blocks.add("a", BlockEvents(removed=digests(9)))  # of a replica, which does not say for whom
    prompt = digests(1, 2, 3)
    assert blocks.find("a", prompt, 2) == Lost(10.0, "north", "req_1")
    assert blocks.find("a", prompt, 1) == Lost(20.0, "south", "req_2")
    assert blocks.find("a", digests(9), 0) == Lost(20.0)
    assert [blocks.find(name, prompt, held) for name, held in (("a", 0), ("a", 3), ("b", 1))] == [None] * 3


def test_the_oldest_are_forgotten_and_one_large_event_is_cut() -> None:
    blocks = LostBlocks(lambda: 1.0)
    blocks.add("a", BlockEvents(removed=digests(1, 2)))
    blocks.add("a", BlockEvents(removed=digests(*range(2, MAX_BLOCKS + 2))))
    assert len(blocks._lost) == MAX_BLOCKS
    assert blocks.find("a", digests(1), 0) is None
    assert blocks.find("a", digests(2), 0) is not None
    blocks.add("a", BlockEvents(removed=digests(*range(MAX_BLOCKS + 100))))
    assert len(blocks._lost) == MAX_BLOCKS
    assert blocks.find("a", digests(99), 0) is None


def test_the_memory_index_notes_what_is_lost() -> None:
    memory = MemoryIndex()
    memory.apply("a", BlockEvents(stored=digests(1, 2)))
    assert memory.lost.find("a", digests(1), 0) is None
    memory.apply("a", BlockEvents(removed=digests(2, 1), takers=(Taker(2, "north", "req_1"),)))
    found = memory.lost.find("a", digests(1), 0)
    assert found is not None
    assert (found.tenant, found.request_id) == ("north", "req_1")
