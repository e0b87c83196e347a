from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import DIGEST_BYTES, Load
from gateway.config import QueueSettings
from gateway.queues.engine_queue import EngineQueue, WaitingRequest
from gateway.queues.router import EngineSlots
from gateway.queues.sessions import AFFINITY_S, MAX_POSITIONS, PrefixAffinity
from gateway.types import Ask
from tests.fakes.pipeline import FakeEngine, hello


def digests(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(DIGEST_BYTES, "big") for number in numbers)


@given(st.integers(0, 300), st.integers(1, 50), st.integers(1, 50))
def test_a_common_prefix_is_found_but_for_a_third_at_most(common: int, mine: int, theirs: int) -> None:
    affinity = PrefixAffinity()
    shared = list(range(common))
    affinity.sent(digests(*shared, *range(1000, 1000 + mine)), "a", 0.0)
    found = affinity.find(digests(*shared, *range(2000, 2000 + theirs)), 1.0)
    assert found.get("a", 0) <= common
    assert found.get("a", 0) * 3 >= common * 2 or common <= 1


def test_the_last_engine_counts_and_not_for_ever() -> None:
    affinity = PrefixAffinity()
    for incarnation in ("a", "b"):
        affinity.sent(digests(1, 2, 3), incarnation, 0.0)
    assert affinity.find(digests(1, 2, 3, 4), AFFINITY_S) == {"b": 3}
    assert affinity.find(digests(1, 2, 3, 4), AFFINITY_S + 1) == {}
    assert affinity.find(b"", 0.0) == {}


def test_what_was_sent_long_ago_makes_room() -> None:
    affinity = PrefixAffinity()
    for number in range(MAX_POSITIONS + 10):
        affinity.sent(digests(number), "a", 0.0)
    assert len(affinity._sent) == MAX_POSITIONS
    assert affinity.find(digests(9), 0.0) == {}
    assert affinity.find(digests(10), 0.0) == {"a": 1}
    affinity.sent(digests(1), "b", AFFINITY_S + 1)
    assert len(affinity._sent) == 1


def lane_of(*names: str) -> EngineQueue[FakeEngine]:
    lane: EngineQueue[FakeEngine] = EngineQueue(QueueSettings(), "batch")
    for name in names:
        load = Load(prefill_tokens_per_s=1000.0, decode_tokens_per_s=1000.0)
        lane.engine_slots[name] = EngineSlots(FakeEngine(hello(incarnation=name), name, load), name, 8)
    return lane


def test_lines_of_one_document_go_to_one_engine_before_any_index_knows_it() -> None:
    lane = lane_of("a", "b")
    where: dict[str, list[str]] = {}
    for line in range(6):
        for document in ("x", "y"):
            blocks = [ord(document) * 1000 + number for number in range(60)]
            ask = Ask("t", 1000, 1e9, lane="batch", digests=digests(*blocks, line), block_size=16)
            sent: list[tuple[WaitingRequest, EngineSlots[Any]]] = lane.enter(WaitingRequest(ask, float(line)))
            where.setdefault(document, []).extend(slots.incarnation for _, slots in sent)
    assert [set(engines) for engines in where.values()] in ([{"a"}, {"b"}], [{"b"}, {"a"}])
    assert [len(engines) for engines in where.values()] == [6, 6]


def test_those_who_wait_follow_the_one_before_them() -> None:
    lane = lane_of("a", "b")
    for slots in lane.engine_slots.values():
        slots.taken = slots.total
    for line in range(4):
        lane.enter(
            WaitingRequest(
                Ask("t", 1000, 1e9, lane="batch", digests=digests(*range(60), 100 + line), block_size=16), 0.0
            )
        )
    for slots in lane.engine_slots.values():
        slots.taken = 0
    assert len({slots.incarnation for _, slots in lane.assign(0.0)}) == 1
