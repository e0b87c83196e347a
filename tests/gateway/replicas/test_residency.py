"""What the index is told when blocks come, move, go, and come in the wrong order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import BlockEvents, Namespace, chain_digests, split_digests
from gateway.replicas.events import Cleared, EventBatch, Key, Removed, Stored
from gateway.replicas.residency import RUN_BLOCKS, Residency

SPACE = Namespace(weights="m@1", dtype="", kv_dtype="", block_size=16)
TOKENS = list(range(100, 1000))


@pytest.fixture
def residency() -> Residency:
    return Residency(SPACE, 1000)


def chain(count: int, salt: str = "", adapter: str = "", tokens: list[int] | None = None) -> list[bytes]:
    """Our digests of the first `count` blocks."""
    root = replace(SPACE, salt=salt, adapter=adapter).root()
    own = (tokens or TOKENS)[: count * 16]
    return split_digests(chain_digests(root, b"".join(token.to_bytes(4, "little") for token in own), 16))


def store(hashes: list[Key], at: int = 0, parent: Key | None = None, size: int = 16, **fields: Any) -> Stored:
    """Blocks of TOKENS from block `at` on."""
    tokens = TOKENS[at * size : (at + len(hashes)) * size]
    base = Stored(hashes, parent, tokens, size, "device", "", "")
    return base._replace(**fields)


def apply(residency: Residency, *events: Stored | Removed | Cleared) -> list[BlockEvents]:
    return residency.apply(EventBatch(events, 0))


def told(changes: list[BlockEvents]) -> list[tuple[list[bytes], list[bytes]]]:
    return [(split_digests(one.removed), split_digests(one.stored)) for one in changes]


def test_children_follow_their_parents_and_leave_before_them(residency: Residency) -> None:
    assert told(apply(residency, store([1, 2]), store([3], 2, 2))) == [([], chain(3))]
    assert told(apply(residency, Removed([1], "device"))) == [(chain(3)[::-1], [])]
    assert residency.orphans == 2
    assert told(apply(residency, store([1]))) == [([], chain(3))]
    assert residency.orphans == 0


def test_orphans_are_held_aside_until_their_parent_is_announced(residency: Residency) -> None:
    assert apply(residency, store([3], 2, 2), store([4, 5], 3, 3)) == []
    assert (residency.orphans, residency.blocks) == (3, 0)
    assert told(apply(residency, store([1, 2, 3, 4], 0))) == [([], chain(5))]  # a report of what a request reuses
    assert (residency.orphans, residency.blocks) == (0, 5)


def test_a_report_of_what_is_held_counts_no_copy_and_a_second_computation_does(residency: Residency) -> None:
    apply(residency, store([1, 2]))
    assert apply(residency, store([1, 2]), store([1, 2])) == []
    assert told(apply(residency, Removed([2], "device"))) == [([chain(2)[1]], [])]
    apply(residency, store([2], 1, 1))
    assert apply(residency, store([2], 1, 1), Removed([2], "device")) == []
    assert told(apply(residency, Removed([2], "device"))) == [([chain(2)[1]], [])]


def test_a_block_is_in_the_fastest_tier_that_holds_it(residency: Residency) -> None:
    apply(residency, store([1, 2]))
    assert apply(residency, store([1, 2], tier="host")) == []
    moved = apply(residency, Removed([2], "device"))
    assert [(one.stored, one.tier) for one in moved] == [(chain(2)[1], "host")]
    back = apply(residency, store([2], 1, 1))
    assert [(one.stored, one.tier) for one in back] == [(chain(2)[1], "device")]
    assert told(apply(residency, Removed([2], "device"), Removed([2], "host")))[-1] == ([chain(2)[1]], [])
    assert apply(residency, Removed([1], "disk")) == []


def test_a_placeholder_moves_what_is_known_and_adds_nothing(residency: Residency) -> None:
    apply(residency, store([1]))
    assert apply(residency, store([1, 9], tokens=[], block_size=0, tier="host")) == []
    assert [one.tier for one in apply(residency, Removed([1], "device"))] == ["host"]
    assert residency.blocks == 1
    assert residency.unaligned == 2


@pytest.mark.parametrize("tokens", [TOKENS[:31], TOKENS[:33], [-1] * 32, [2**32] * 32])
def test_tokens_that_do_not_fit_the_blocks_are_not_used(residency: Residency, tokens: list[int]) -> None:
    assert apply(residency, store([1, 2], tokens=tokens)) == []
    assert residency.unaligned == 2
    assert apply(residency, store([5, 5])) == []


def test_salts_and_adapters_are_those_of_the_first_block(residency: Residency) -> None:
    apply(residency, store([1], salt="t1", adapter="poet"))
    assert told(apply(residency, store([2], 1, 1, salt="t2"))) == [([], chain(2, "t1", "poet")[1:])]
    assert told(apply(residency, store([3]))) == [([], chain(1))]


def test_an_image_makes_another_chain(residency: Residency) -> None:
    apply(residency, store([1]))
    plain, picture = chain(3)[1:], apply(residency, store([2, 3], 1, 1, extra="image 7"))
    assert not set(plain) & set(split_digests(picture[0].stored))
    assert len(split_digests(picture[0].stored)) == 2
    other = apply(residency, store([4, 5], 1, 1, extra="image 8"))
    assert not set(split_digests(picture[0].stored)) & set(split_digests(other[0].stored))


def test_equal_tokens_under_two_hashes_are_there_until_both_are_gone(residency: Residency) -> None:
    assert told(apply(residency, store([1, 2]), store([11, 12]))) == [([], chain(2))]
    assert residency.blocks == 2
    assert apply(residency, Removed([2, 1], "device")) == []
    assert told(apply(residency, Removed([12], "device"))) == [([chain(2)[1]], [])]


def test_only_the_group_with_full_attention_is_followed(residency: Residency) -> None:
    apply(residency, store([1], group=0), store([1, 2], group=2, full=True))
    assert residency.blocks == 2
    assert apply(residency, Removed([1], "device", 0), store([3], 2, 2, group=1, full=True)) == []
    assert told(apply(residency, Removed([2], "device"))) == [([chain(2)[1]], [])]  # no group: all of them
    assert told(apply(residency, Removed([1], "device", 2))) == [(chain(1), [])]


@pytest.mark.parametrize("size", [1, 4, 8, 16, 24, 32, 64, 128, 528])
def test_pages_of_any_size_become_blocks_of_sixteen(size: int) -> None:
    residency, pages = Residency(SPACE, 1000), len(TOKENS) // size
    whole = pages * size // 16
    half = max(1, pages // 2)
    first = told(apply(residency, store(list(range(half)), size=size)))
    assert [digest for _, stored in first for digest in stored] == chain(half * size // 16)
    apply(residency, store(list(range(half, pages)), half, half - 1, size=size))
    assert residency.blocks == whole
    for last in range(pages - 1, -1, -1):
        apply(residency, Removed([last], "device"))
        assert residency.blocks == last * size // 16


def test_a_part_of_a_block_gives_way_to_the_whole(residency: Residency) -> None:
    part = Stored([7], 1, TOKENS[32:48], 16, "device", "", "")
    apply(residency, store([1], size=32), part)
    assert residency.blocks == 3
    assert told(apply(residency, Removed([7], "device"), store([2], 1, 1, size=32))) == [
        ([chain(3)[2]], chain(4)[2:]),
    ]


def test_clearing_begins_again(residency: Residency) -> None:
    apply(residency, store([1, 2]), store([9], 3, 8))
    assert told(apply(residency, store([3], 2, 2), Cleared(), store([1]))) == [([], []), ([], chain(1))]
    assert residency.orphans == 0
    assert residency.clear() == BlockEvents(reset=True)
    assert residency.blocks == 0
    assert residency.apply(EventBatch((), None)) == []


def test_loops_of_parents_are_never_in_the_index(residency: Residency) -> None:
    assert apply(residency, store([1], 0, 2), store([2], 0, 1), store([3], 0, 3)) == []
    assert residency.orphans == 3
    assert apply(residency, Removed([1, 2, 3], "device")) == []
    assert residency.orphans == 0


def test_too_many_orphans_push_the_oldest_out() -> None:
    residency = Residency(SPACE, 40)
    for number in range(100):
        assert apply(residency, store([1000 + number], 1, number)) == []
    assert residency.orphans == 10
    assert residency.shed == 90
    assert told(apply(residency, store([99]))) == [([], chain(2))]


def test_too_many_blocks_push_the_ends_of_the_oldest_chains_out() -> None:
    residency = Residency(SPACE, 64)
    held: set[bytes] = set()
    for number in range(50):
        salt = str(number)
        for changes in apply(residency, store([number * 10 + 1, number * 10 + 2], salt=salt)):
            held -= set(split_digests(changes.removed))
            held |= set(split_digests(changes.stored))
        assert chain(2, salt)[1] in held
        assert len(held) == residency.blocks <= 64
    assert residency.blocks > 60


def test_a_long_prompt_is_several_runs() -> None:
    residency, count = Residency(SPACE, 100_000), 3 * RUN_BLOCKS + 5
    tokens = list(range(count * 16))
    apply(residency, Stored(list(range(count)), None, tokens, 16, "device", "", ""))
    assert residency.blocks == count
    assert len({id(run) for run in residency._runs.values()}) == 4
    apply(residency, Removed([RUN_BLOCKS // 2], "device"))
    assert residency.blocks == RUN_BLOCKS // 2
    apply(residency, Stored([RUN_BLOCKS // 2], RUN_BLOCKS // 2 - 1, tokens[:16], 16, "device", "", ""))
    assert residency.blocks == count


def test_offloading_block_by_block_leaves_few_runs() -> None:
    residency = Residency(SPACE, 10_000)
    apply(residency, Stored(list(range(800)), None, list(range(12_800)), 16, "device", "", ""))
    for key in range(800):
        apply(residency, Stored([key], key - 1 if key else None, [], 0, "host", "", ""))
    assert len({id(run) for run in residency._runs.values()}) == 1
    moved = [one for key in range(799, -1, -1) for one in apply(residency, Removed([key], "device"))]
    assert {one.tier for one in moved} == {"host"}
    assert residency.blocks == 800
