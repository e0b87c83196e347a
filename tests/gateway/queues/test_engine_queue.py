"""Who goes where, without a clock: the lane over the real router, and what has to hold whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.protocol import DIGEST_BYTES, Load
from gateway.config import QueueSettings
from gateway.queues.engine_queue import PLAN_DEPTH, EngineQueue, WaitingRequest
from gateway.queues.router import EngineSlots
from gateway.types import Ask
from tests.fakes.pipeline import FakeEngine, hello
from tests.fakes.tuned import tuned

RATE = 1000.0


@dataclass
class Rig:
    """A lane whose engines do what the test says."""

    engines: int = 1
    places: int = 1
    aging: float = 0.05
    overload_share: float = 0.4
    lane: EngineQueue[FakeEngine] = field(init=False)

    def __post_init__(self) -> None:
        limits = tuned(
            QueueSettings, aging=self.aging, overload_share=self.overload_share, overload_aging=self.aging / 10
        )
        self.lane = EngineQueue(limits)
        for number in range(self.engines):
            load = Load(prefill_tokens_per_s=RATE, decode_tokens_per_s=1000.0)
            engine = FakeEngine(hello(incarnation=f"e{number}"), f"e{number}", load)
            self.lane.engine_slots[f"e{number}"] = EngineSlots(engine, f"e{number}", self.places)

    def enter(self, tokens: int, tenant: str = "t", at_s: float = 0.0, **fields: Any) -> tuple[WaitingRequest, bool]:
        """The request, and whether it was sent at once."""
        waiter = WaitingRequest(Ask(tenant, tokens, 1e9, **fields), at_s)
        return waiter, any(sent is waiter for sent, _ in self.lane.enter(waiter))

    def block(self) -> None:
        """Everything is taken until `drain`."""
        for slots in self.lane.engine_slots.values():
            slots.taken = slots.total

    def drain(self) -> list[WaitingRequest]:
        """One place at a time becomes free, until nobody waits."""
        order: list[WaitingRequest] = []
        while len(self.lane):
            for slots in self.lane.engine_slots.values():
                slots.taken = 0
            sent = self.lane.assign(0.0)
            assert sent, "free engines and nobody is sent"
            order += [waiter for waiter, _ in sent]
        return order


def test_the_order_is_that_of_what_is_left_to_prefill() -> None:
    rig = Rig()
    rig.block()
    waiting = [rig.enter(tokens, cached_tokens={"e0": held})[0] for tokens, held in ((900, 0), (5000, 4900), (300, 0))]
    assert rig.drain() == [waiting[1], waiting[2], waiting[0]]


def test_waiting_makes_up_for_a_long_prefill() -> None:
    rig = Rig(aging=0.05)
    rig.block()
    long, _ = rig.enter(1000, at_s=0.0)
    later = [rig.enter(100, at_s=at_s)[0] for at_s in (17.0, 19.0)]  # 0.9 s of prefill are made up for after 18 s
    assert rig.drain() == [later[0], long, later[1]]


def test_a_free_engine_takes_over_when_the_line_for_the_holder_grows() -> None:
    rig = Rig(engines=2)
    rig.lane.engine_slots["e0"].taken = 1
    sent = [rig.enter(1000, cached_tokens={"e0": 800})[1] for _ in range(11)]
    # Each adds 0.2 s in front of e0, and 0.128 s for its turn, while e1 would cost 4 x 0.8 s more.
    assert sent == [False] * 10 + [True]
    assert len(rig.lane) == 10


def test_one_who_cannot_go_anywhere_now_is_in_nobodys_way() -> None:
    rig = Rig(engines=2)
    rig.lane.engine_slots["e0"].taken = 1
    assert rig.enter(100, only="e0") == (next(iter(rig.lane)), False)
    assert rig.enter(100)[1]


def test_a_free_engine_is_found_behind_many_that_are_bound_to_another() -> None:
    rig = Rig(engines=2, places=2)
    rig.lane.engine_slots["e0"].taken = rig.lane.engine_slots["e1"].taken = 2
    bound = [rig.enter(100, cached_tokens={"e0": 100}, only="e0")[0] for _ in range(2 * PLAN_DEPTH)]
    other, _ = rig.enter(1000)
    rig.lane.engine_slots["e1"].taken = 0
    assert [(waiter, slots.incarnation) for waiter, slots in rig.lane.assign(0.0)] == [(other, "e1")]
    assert len(rig.lane) == len(bound)


def test_a_tenant_that_sends_one_is_next_however_many_another_sent() -> None:
    rig = Rig()
    rig.block()
    for _ in range(50):
        rig.enter(100, "many")
    one, _ = rig.enter(3000, "one")
    assert rig.drain().index(one) <= 1


def test_a_short_prompt_is_sent_past_the_backlog_of_another_tenant_and_a_long_one_is_not() -> None:
    rig = Rig(places=16)
    engine = rig.lane.engine_slots["e0"].engine
    assert rig.enter(8000, "much")[1]
    engine.load = Load(prefill_backlog=8000, prefill_tokens_per_s=RATE)
    engine.prefilling = {"much": 8000}
    waiting = [rig.enter(8000, "much") for _ in range(2 * PLAN_DEPTH)]
    assert not any(sent for _, sent in waiting)
    assert [rig.enter(50, "little")[1] for _ in range(3)] == [True] * 3
    assert not rig.enter(8000, "little")[1]
    engine.prefilling["little"] = 400
    assert not rig.enter(120, "little")[1]
    engine.prefilling["little"] = 0
    assert [waiter.ask.prompt_tokens for waiter, _ in rig.lane.assign(0.0)] == [120]
    rig.lane.engine_slots["e0"].taken = 16
    assert not rig.enter(50, "third")[1]


def test_a_flex_request_is_behind_those_of_its_time_and_a_priority_request_before_them() -> None:
    rig = Rig()
    rig.block()
    tiers = ("flex", "default", "priority", "flex", "default", "priority")
    waiting = [rig.enter(100, tier=tier)[0] for tier in tiers]
    assert rig.drain() == [waiting[number] for number in (2, 5, 1, 4, 0, 3)]


def test_the_lowest_priority_of_a_tenant_goes_first_whatever_else_there_is() -> None:
    rig = Rig()
    rig.block()
    high, _ = rig.enter(10, at_s=0.0, priority=7)
    usual = [rig.enter(tokens, at_s=1000.0)[0] for tokens in (500, 100)]
    first, _ = rig.enter(100, at_s=0.0, tier="priority")
    low, _ = rig.enter(9000, at_s=2000.0, tier="flex", priority=-2)
    equal, _ = rig.enter(10, at_s=2000.0, priority=7)
    assert rig.drain() == [low, first, usual[1], usual[0], high, equal]


def test_low_priorities_take_no_turn_from_other_tenants() -> None:
    """Each of the two has the same turns as without them."""
    rig = Rig()
    rig.block()
    greedy = [rig.enter(100, "a", priority=-1000)[0] for _ in range(3)]
    modest = [rig.enter(100, "b", priority=number)[0] for number in (3, 2, 1)]
    order = rig.drain()
    assert [waiter.ask.tenant for waiter in order] == ["a", "b"] * 3
    assert [waiter for waiter in order if waiter in greedy] == greedy
    assert [waiter for waiter in order if waiter in modest] == modest[::-1]


def test_in_the_batch_lane_priority_says_nothing() -> None:
    rig = Rig()
    rig.lane.name = "batch"
    rig.block()
    waiting = [rig.enter(100, priority=number)[0] for number in (3, 1, 2)]
    assert rig.drain() == waiting


def test_who_leaves_is_found_whatever_its_priority() -> None:
    rig = Rig()
    rig.block()
    waiting = [rig.enter(100, priority=number)[0] for number in (3, -1, 2, 2)]
    assert rig.lane.remove(waiting[3])
    assert not rig.lane.remove(waiting[3])
    assert rig.drain() == [waiting[1], waiting[2], waiting[0]]


def test_a_tenants_flex_requests_have_their_turn_however_many_others_send() -> None:
    rig = Rig()
    rig.block()
    flex, _ = rig.enter(100, "patient", tier="flex")
    for _ in range(60):
        rig.enter(100, "busy")
    for _ in range(60):
        rig.enter(100, "hurried", tier="priority")
    passed = rig.drain().index(flex)
    # busy has one second more than patient, and hurried one more than busy, at 0.228 s each.
    assert passed <= (1.0 + 2.0) / 0.228 + 3


def test_twice_the_weight_has_twice_the_time() -> None:
    rig = Rig()
    rig.block()
    for tenant, weight in (("heavy", 2.0), ("light", 1.0)) * 30:
        rig.enter(100, tenant, weight=weight)
    first = [waiter.ask.tenant for waiter in rig.drain()[:30]]
    assert 19 <= first.count("heavy") <= 21


COMES_OR_ENDS = st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.integers(0, 4000), st.integers(1, 8)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(COMES_OR_ENDS, max_size=120))
def test_tenants_have_the_same_however_their_requests_arrive(events: list[tuple[str, int, int] | None]) -> None:
    """From the moment from which two tenants wait, what each was given over its weight differs by no more than the
    largest request of each; and who had nothing before waits for one request of each other tenant at most."""
    rig, weights = Rig(), {"a": 1.0, "b": 0.25, "c": 4.0}
    waiting, used, largest = (dict.fromkeys("abc", value) for value in (0, 0.0, 0.0))
    since: dict[tuple[str, str], float] = {}  # of two who both wait, by how much the first was ahead when that began
    first: dict[str, int] = {}  # services since the first request of a tenant came
    rig.block()
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            tenant, tokens, times = event
            for _ in range(times):
                waiter, _ = rig.enter(tokens, tenant, weight=weights[tenant])
                waiting[tenant] += 1
                largest[tenant] = max(largest[tenant], waiter.cost_s / weights[tenant])
            first.setdefault(tenant, 0)
        elif len(rig.lane):
            rig.lane.engine_slots["e0"].taken = 0
            ((waiter, _),) = rig.lane.assign(0.0)
            tenant = waiter.ask.tenant
            waiting[tenant] -= 1
            assert used[tenant] or first[tenant] < len(weights)
            used[tenant] += waiter.cost_s / weights[tenant]
            first = {name: count + 1 for name, count in first.items()}
        for pair in ("ab", "ac", "bc"):
            one, other = pair
            if not waiting[one] or not waiting[other]:
                since.pop((one, other), None)
            ahead = used[one] - used[other]
            if waiting[one] and waiting[other]:
                began = since.setdefault((one, other), ahead)
                assert abs(ahead - began) <= largest[one] + largest[other] + 1e-9


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(100, 5000), st.integers(1, 50), st.floats(0.01, 1.0))
def test_nobody_waits_behind_newcomers_for_longer_than_aging_allows(tokens: int, short: int, aging: float) -> None:
    rig = Rig(aging=aging)
    rig.block()
    long, _ = rig.enter(tokens, at_s=0.0)
    over_s = (tokens - short) / RATE / aging
    newcomers = [rig.enter(short, at_s=over_s * share + 1e-3)[0] for share in (1.0, 1.5, 3.0) if tokens > short]
    order = rig.drain()
    assert all(order.index(long) < order.index(newcomer) for newcomer in newcomers)


def session_digests(number: int, blocks: int = 625) -> bytes:
    return b"".join((1000 * number + block).to_bytes(DIGEST_BYTES, "big") for block in range(blocks))


def take_turns(rig: Rig, *, held: int, minutes: int = 4) -> None:
    """Six sessions with prompts of 10,000 tokens, one after the other, as quickly as one engine computes what it does
    not hold of each; somebody always waits."""
    now_s = 0.0
    while now_s < 60.0 * minutes:
        rig.block()
        for number in range(6):
            cached = {"e0": held} if now_s else {}
            rig.enter(10_000, at_s=now_s, cached_tokens=cached, digests=session_digests(number), block_size=16)
        while len(rig.lane):
            now_s += max(10.0 - held / RATE, 0.1)
            rig.lane.engine_slots["e0"].taken = 0
            assert len(rig.lane.assign(now_s)) == 1


def test_sessions_that_come_back_to_an_engine_that_lost_them_are_an_overload() -> None:
    rig = Rig()
    take_turns(rig, held=0)
    assert rig.lane.overload.holds
    assert rig.lane.overload.share > 0.6  # a third of what was computed again may not be known


def test_sessions_that_find_their_prefixes_are_none_however_busy_the_engines_are() -> None:
    rig = Rig()
    take_turns(rig, held=9_900)
    assert not rig.lane.overload.holds
    assert rig.lane.overload.share < 0.05


def overloaded(rig: Rig, *, at_s: float) -> None:
    """As if it had been found to be so."""
    rig.lane.pass_time(at_s)
    rig.lane.overload.computed(1000.0, 900.0)
    rig.lane.pass_time(at_s)
    assert rig.lane.overload.holds


def fill(rig: Rig, *, at_s: float) -> None:
    """Every engine has a session that needs all of its cache."""
    for number, name in enumerate(rig.lane.engine_slots):
        waiter, sent = rig.enter(16_000, at_s=at_s, digests=session_digests(number, 1000), block_size=16, only=name)
        assert sent, waiter
    for slots in rig.lane.engine_slots.values():
        slots.taken = 0


def test_in_an_overload_one_engine_serves_those_who_would_push_others_out() -> None:
    rig = Rig(engines=3)
    fill(rig, at_s=0.0)
    overloaded(rig, at_s=1.0)
    newcomers = [rig.enter(10_000, at_s=1.0) for _ in range(3)]
    assert [sent for _, sent in newcomers] == [True, False, False]
    assert rig.lane.held_back == 2
    assert sum(slots.taken for slots in rig.lane.engine_slots.values()) == 1
    _, sent = rig.enter(16_000, at_s=2.0, cached_tokens={"e1": 15_900}, digests=session_digests(1, 1000), block_size=16)
    assert sent or next(slots for slots in rig.lane.engine_slots.values() if slots.taken).incarnation == "e1"
    assert rig.enter(10, at_s=2.0)[1]  # a little is taken everywhere


def test_who_is_held_back_is_let_in_when_the_others_stay_away() -> None:
    rig = Rig(engines=3)
    fill(rig, at_s=0.0)
    overloaded(rig, at_s=1.0)
    for _ in range(3):
        rig.enter(10_000, at_s=1.0)
    assert rig.lane.assign(2.0) == []
    assert len(rig.lane.assign(1.0 + rig.lane.sessions.kept_s)) == 2
    assert rig.lane.held_back == 0


def test_an_overload_goes_on_while_somebody_is_held_back_and_no_longer() -> None:
    rig = Rig(engines=2)
    fill(rig, at_s=0.0)
    overloaded(rig, at_s=1.0)
    rig.lane.sessions.kept_s = 1e4
    waiting = [rig.enter(10_000, at_s=1.0)[0] for _ in range(2)]
    rig.lane.assign(1000.0)
    assert rig.lane.overload.share < 0.01
    assert rig.lane.overload.holds
    assert rig.lane.remove(waiting[1])
    rig.lane.pass_time(1001.0)
    assert not rig.lane.overload.holds


def test_without_an_overload_nobody_is_held_back() -> None:
    rig = Rig(engines=3)
    fill(rig, at_s=0.0)
    assert [rig.enter(10_000, at_s=1.0)[1] for _ in range(3)] == [True, True, True]


def test_waiting_makes_up_for_less_in_an_overload() -> None:
    rig = Rig(aging=0.05)
    rig.block()
    overloaded(rig, at_s=0.0)
    long, _ = rig.enter(1000, at_s=0.0)
    rig.lane.held_back = 1  # it goes on
    later = [rig.enter(100, at_s=at_s)[0] for at_s in (19.0, 179.0, 181.0)]
    assert rig.drain() == [*later[:2], long, later[2]]


def test_prompts_of_which_nothing_is_known_are_none() -> None:
    rig, now_s = Rig(), 0.0
    for number in range(100):
        rig.block()
        rig.enter(10_000, at_s=now_s, digests=session_digests(number), block_size=16)
        rig.enter(10_000, at_s=now_s)
        for _ in range(2):
            now_s += 10.0
            rig.lane.engine_slots["e0"].taken = 0
            rig.lane.assign(now_s)
    assert rig.lane.overload.share == 0.0


class LaneMachine(RuleBasedStateMachine):
    """Requests come, leave, are sent and end; engines get busy and come and go. Nobody is lost or sent twice."""

    @initialize(engines=st.integers(1, 4), places=st.integers(1, 3))
    def begin(self, engines: int, places: int) -> None:
        self.rig = Rig(engines=engines, places=places, overload_share=0.01)
        self.lane = self.rig.lane
        self.waiting: list[WaitingRequest] = []
        self.inside: list[tuple[WaitingRequest, EngineSlots[FakeEngine]]] = []
        self.now = 0.0
        self.made = engines

    def sent(self, sent: list[tuple[WaitingRequest, EngineSlots[FakeEngine]]]) -> None:
        for waiter, slots in sent:
            self.waiting.remove(waiter)  # raises for one that was sent before
            assert waiter.ask.only in (None, slots.incarnation)
            assert slots is self.lane.engine_slots[slots.incarnation]
            self.inside.append((waiter, slots))

    @rule(
        tokens=st.integers(1, 20_000),
        tenant=st.sampled_from("abc"),
        held=st.integers(0, 20_000),
        at=st.integers(0, 3),
        pinned=st.booleans(),
        session=st.integers(0, 5),
        later_s=st.floats(0, 30),
    )
    def come(self, tokens: int, tenant: str, held: int, at: int, pinned: bool, session: int, later_s: float) -> None:
        self.now += later_s
        names = list(self.lane.engine_slots)
        name = names[at % len(names)]
        digests = session_digests(session, tokens // 16) if session else b""
        only = name if pinned else None
        ask = Ask(tenant, tokens, 1e9, {name: min(held, tokens)}, only=only, digests=digests, block_size=16)
        waiter = WaitingRequest(ask, self.now)
        self.waiting.append(waiter)
        self.sent(self.lane.enter(waiter))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 50))
    def leave(self, which: int) -> None:
        waiter = self.waiting.pop(which % len(self.waiting))
        assert self.lane.remove(waiter)
        assert not self.lane.remove(waiter)

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 50))
    def end(self, which: int) -> None:
        _, slots = self.inside.pop(which % len(self.inside))
        slots.taken -= 1
        self.sent(self.lane.assign(0.0))

    @rule(which=st.integers(0, 3), backlog=st.sampled_from([0, 400, 10**5]), tenant=st.sampled_from("abc"))
    def load(self, which: int, backlog: int, tenant: str) -> None:
        engine_slots = list(self.lane.engine_slots.values())
        engine_slots[which % len(engine_slots)].engine.prefilling = {tenant: backlog // 2}
        engine_slots[which % len(engine_slots)].engine.load = Load(prefill_backlog=backlog, prefill_tokens_per_s=RATE)
        self.sent(self.lane.assign(0.0))

    @precondition(lambda self: len(self.lane.engine_slots) > 1)
    @rule(which=st.integers(0, 3))
    def lose(self, which: int) -> None:
        name = list(self.lane.engine_slots)[which % len(self.lane.engine_slots)]
        del self.lane.engine_slots[name]
        for waiter in [waiter for waiter in self.waiting if waiter.ask.only == name]:
            assert self.lane.remove(waiter)
            self.waiting.remove(waiter)
        self.sent(self.lane.assign(0.0))

    @rule()
    def join(self) -> None:
        self.made += 1
        name = f"n{self.made}"
        self.lane.engine_slots[name] = EngineSlots(FakeEngine(hello(incarnation=name), name), name, 1)
        self.sent(self.lane.assign(0.0))

    @invariant()
    def nobody_is_lost_and_no_place_is_given_twice(self) -> None:
        if not hasattr(self, "lane"):
            return
        assert set(map(id, self.lane)) == set(map(id, self.waiting))
        assert len(self.lane) == len(self.waiting)
        assert self.lane.held_back <= len(self.lane)
        waiting = {id(waiter.session): waiter.session for waiter in self.waiting if waiter.session is not None}
        for session in waiting.values():
            assert session.waiting == sum(waiter.session is session for waiter in self.waiting)
        for slots in self.lane.engine_slots.values():
            assert 0 <= slots.taken <= slots.total
            assert slots.taken == sum(held is slots for _, held in self.inside)

    @invariant()
    def no_engine_is_idle_for_want_of_a_choice(self) -> None:
        """Who is not tied to an engine only waits if all engines that have a place are less attractive than one that
        has none: with nothing taken anywhere, nobody waits."""
        if hasattr(self, "lane") and not any(slots.taken for slots in self.lane.engine_slots.values()):
            assert not self.waiting


TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
