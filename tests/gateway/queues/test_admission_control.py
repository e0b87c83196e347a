from __future__ import annotations

from typing import Any

from engine.protocol import DIGEST_BYTES
from gateway.queues.admission_control import AdmissionControl, choose_open
from gateway.queues.router import EngineSlots
from gateway.queues.sessions import Sessions
from gateway.types import Ask
from tests.fakes.pipeline import FakeEngine, hello

BLOCKS = 1000


def engine_slots(*names: str) -> list[EngineSlots[FakeEngine]]:
    return [EngineSlots(FakeEngine(hello(incarnation=name, num_blocks=BLOCKS), name), name, 1) for name in names]


BLOCK = hello().namespace.block_size


def ask(blocks: int, **fields: Any) -> Ask:
    return Ask("t", blocks * BLOCK, 1e9, **fields)


def filled(**sent: tuple[int, float]) -> Sessions:
    """A session of so many blocks that was sent to each engine at some time."""
    sessions = Sessions()
    for number, (name, (blocks, sent_s)) in enumerate(sent.items()):
        digests = b"".join((10_000 * number + block).to_bytes(DIGEST_BYTES, "big") for block in range(blocks))
        sessions.sent(None, digests, name, sent_s)
    sessions.kept_s = 30.0
    return sessions


def test_who_would_push_somebody_out_is_taken_by_the_engine_that_is_open_to_all() -> None:
    admission = AdmissionControl(engine_slots("a", "b", "c"), filled(a=(800, 0.0), b=(500, 0.0)), {"c"}, 10.0)
    assert admission.closed(ask(600)) == {"a", "b"}
    assert admission.closed(ask(400)) == {"a"}
    assert admission.closed(ask(100)) == frozenset()


def test_who_finds_half_of_its_prompt_somewhere_is_kept_from_nowhere() -> None:
    admission = AdmissionControl(engine_slots("a", "b", "c"), filled(a=(900, 0.0), b=(900, 0.0)), {"c"}, 10.0)
    assert admission.closed(ask(900, cached_tokens={"a": 450 * BLOCK})) == frozenset()
    assert admission.closed(ask(900, cached_tokens={"a": 449 * BLOCK, "b": 400 * BLOCK})) == {"a", "b"}


def test_a_little_is_taken_everywhere_and_priority_and_groups_as_well() -> None:
    admission = AdmissionControl(engine_slots("a", "b"), filled(a=(1000, 0.0)), {"b"}, 10.0)
    assert admission.closed(ask(11)) == {"a"}
    for free in (ask(10), ask(600, tier="priority"), ask(600, only="a")):
        assert admission.closed(free) == frozenset()


def test_who_stays_away_is_not_waited_for() -> None:
    assert AdmissionControl(engine_slots("a", "b"), filled(a=(800, 0.0)), {"b"}, 31.0).closed(ask(600)) == frozenset()


def test_a_prompt_that_is_longer_than_the_cache_is_taken_by_an_empty_one() -> None:
    admission = AdmissionControl(engine_slots("a", "b", "c"), filled(b=(20, 0.0)), {"c"}, 10.0)
    assert admission.closed(ask(5000)) == {"b"}


def test_what_is_sent_takes_room() -> None:
    admission = AdmissionControl(engine_slots("a", "b"), filled(), {"b"}, 10.0)
    assert admission.closed(ask(600)) == frozenset()
    admission.add("a", ask(600))
    assert admission.closed(ask(600)) == {"a"}
    admission.add("b", ask(600))


def test_one_engine_in_eight_is_open_to_all_and_stays_so() -> None:
    names = [f"e{number}" for number in range(9)]
    sessions = filled(e3=(900, 0.0), e5=(800, 0.0))
    assert choose_open(engine_slots("e0"), set(), sessions, 1.0) == {"e0"}
    assert choose_open(engine_slots(*names[:8]), set(), sessions, 1.0) == {"e3"}
    assert choose_open(engine_slots(*names), set(), sessions, 1.0) == {"e3", "e5"}
    assert choose_open(engine_slots(*names[:8]), {"e7"}, sessions, 1.0) == {"e7"}
    assert choose_open(engine_slots(*names[:7]), {"e7"}, sessions, 1.0) == {"e3"}
