"""Which engine a prompt goes to. Pure: loads in, choice out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import LANES, Hello, Load
from gateway.queues.router import MAX_CANDIDATES, LoadSnapshot
from gateway.types import Ask
from tests.fakes.fake_engine import make_hello


@dataclass
class Candidate:
    """An engine, and its slots."""

    name: str
    load: Load = field(default_factory=Load)
    hello: Hello = field(init=False)
    total: int = 16
    taken: int = 0
    given_tokens: float = 0.0
    prefilling: dict[str, int] = field(default_factory=dict)
    joined: bool = True

    @property
    def engine(self) -> Candidate:
        return self

    def __post_init__(self) -> None:
        self.hello = make_hello(incarnation=f"i-{self.name}", max_sequences=8)
        self.incarnation, self.max_sequences = self.hello.incarnation, self.hello.max_sequences


def engines(**loads: dict[str, Any]) -> list[Candidate]:
    return [Candidate(name, Load(**load)) for name, load in loads.items()]


def asked(prompt_tokens: int, **cached: int) -> Ask:
    return Ask("t", prompt_tokens, 0.0, {f"i-{name}": tokens for name, tokens in cached.items()})


def chosen(candidates: list[Candidate], prompt_tokens: int, **cached: int) -> str:
    engine = LoadSnapshot(candidates).choose(asked(prompt_tokens, **cached))
    assert engine is not None
    return engine.name


def test_the_holder_of_the_longest_prefix_wins_among_idle_engines() -> None:
    assert chosen(engines(a={}, b={}, c={}), 1000, a=100, b=800, c=500) == "b"


def test_a_prefix_is_worth_the_weight_times_its_prefill_and_no_more() -> None:
    # b would prefill 1,000 tokens: 4 x 1 s. a has them, and 3.9 or 4.1 s of others' prefills in front.
    assert chosen(engines(a={"prefill_backlog": 3900}, b={}), 1000, a=1000) == "a"
    assert chosen(engines(a={"prefill_backlog": 4100}, b={}), 1000, a=1000) == "b"


def test_a_shared_system_prompt_does_not_send_everybody_to_one_engine() -> None:
    """A burst of prompts that share 64 tokens and prefill 1,000: whoever is busy loses, prefix or not."""
    loads = {name: Load() for name in "abcd"}
    counts = dict.fromkeys(loads, 0)
    for _ in range(40):
        name = chosen([Candidate(name, load) for name, load in loads.items()], 1064, a=64)
        counts[name] += 1
        load = loads[name]
        loads[name] = replace(load, prefill_backlog=load.prefill_backlog + 1000, waiting=load.waiting + 1)
    assert max(counts.values()) <= 12, counts


def test_a_faster_engine_takes_more() -> None:
    fast, slow = {"prefill_tokens_per_s": 10_000.0}, {"prefill_tokens_per_s": 500.0}
    assert chosen(engines(a=slow, b=fast), 1000, a=500) == "b"
    assert chosen(engines(a=slow, b=fast), 1000, a=990) == "a"


def test_an_engine_that_has_measured_nothing_is_taken_to_be_as_fast_as_the_others() -> None:
    measured = {"prefill_tokens_per_s": 50_000.0}
    assert chosen(engines(a=measured, b={}), 1000, a=500) == "a"
    assert chosen(engines(a=measured | {"prefill_backlog": 9000}, b={}), 1000, a=500) == "b"


def test_when_all_places_are_taken_waiting_for_one_counts() -> None:
    full = {"running": 8, "waiting": 20, "decode_tokens_per_s": 100.0}
    assert chosen(engines(a=full, b={"running": 2}), 500, a=496) == "b"


def test_what_is_meant_for_an_engine_is_in_front_of_the_next() -> None:
    snapshot = LoadSnapshot(engines(a={}, b={}))
    for wanted in ("a", "a", "a", "a", "b"):  # 1 s of prefill each, against 4 x 1 s elsewhere
        engine = snapshot.choose(asked(2000, a=1000))
        assert engine is not None
        assert engine.name == wanted
        snapshot.add(engine.hello.incarnation, asked(2000, a=1000))


def test_an_engine_is_ready_for_more_until_it_has_half_a_second_to_prefill() -> None:
    rate: dict[str, Any] = {"prefill_tokens_per_s": 1000.0}
    new: dict[str, Any] = {"prefill_backlog": 10**6}
    snapshot = LoadSnapshot(engines(a={"prefill_backlog": 499} | rate, b={"prefill_backlog": 501} | rate, c=new))
    assert snapshot.is_ready("i-a")
    assert not snapshot.is_ready("i-b")
    assert snapshot.is_ready("i-c"), "it has measured nothing yet"
    snapshot.add("i-a", asked(2))
    assert not snapshot.is_ready("i-a")


def test_a_backlog_is_in_front_of_another_tenants_prompt_only_as_far_as_their_turns_go() -> None:
    (busy,) = engines(a={"prefill_backlog": 8000, "prefill_tokens_per_s": 1000.0})
    busy.prefilling = {"much": 8000}

    def passes(tenant: str, tokens: int) -> bool:
        return LoadSnapshot([busy]).passes_backlog("i-a", replace(asked(tokens), tenant=tenant))

    assert not passes("much", 1)
    assert passes("little", 499)
    assert not passes("little", 501), "turns with a backlog as long as its own prompt take twice as long"
    busy.prefilling |= {"little": 100, "third": 60}
    assert passes("little", 230)  # 100 of its own, 330 of the first, 60 of the third
    assert not passes("little", 250)
    busy.prefilling = {}
    assert passes("anybody", 499), "what other gateways sent is another tenant's"
    assert not passes("anybody", 501)
    busy.prefilling = {"much": 8000}
    snapshot = LoadSnapshot([busy])
    snapshot.add("i-a", replace(asked(600), tenant="little"))
    assert not snapshot.passes_backlog("i-a", replace(asked(1), tenant="little"))


def test_of_equals_the_one_that_was_given_less_wins() -> None:
    candidates = engines(a={}, b={})
    candidates[0].given_tokens = 1.0
    assert chosen(candidates, 100) == "b"


def test_of_equals_an_affinity_chooses_the_same_one_whatever_was_given_and_another_key_may_choose_another() -> None:
    """At every gateway: each knows only what it has given itself."""

    def of(key: str, *given: float, **cached: int) -> str:
        candidates = engines(a={}, b={}, c={})
        for candidate, tokens in zip(candidates, given, strict=False):
            candidate.given_tokens = tokens
        chosen = LoadSnapshot(candidates).choose(replace(asked(100, **cached), affinity=key))
        assert chosen is not None
        return chosen.name

    homes = {key: of(key) for key in map(str, range(30))}
    assert set(homes.values()) == {"a", "b", "c"}
    assert all(of(key, 1.0, 2.0, 3.0) == of(key, 3.0, 2.0, 1.0) == home for key, home in homes.items())
    assert {of(key, a=64) for key in homes} == {"a"}, "a prefix that is there comes first"


def test_an_engine_whose_places_are_taken_is_waited_for() -> None:
    candidates = engines(a={}, b={})
    candidates[0].taken = candidates[0].total = 1
    assert chosen(candidates, 100, a=100) == "b"  # an answer of 1.28 s, against 4 x 0.1 s of prefill
    assert chosen(candidates, 1000, a=1000) == "a"


def test_an_engine_that_drains_is_not_in_the_picture() -> None:
    snapshot = LoadSnapshot(engines(a={"draining": True}, b={"prefill_backlog": 9000}))
    assert (engine := snapshot.choose(asked(100, a=100))) is not None
    assert engine.name == "b"
    assert snapshot.choose(replace(asked(100), only="i-a")) is None
    assert not snapshot.is_ready("i-a")


def test_rates_that_differ_by_less_than_four_times_are_one() -> None:
    # b's prompts were long, so it seems slow; believed, 4 x 4 s there would be worse than 12 s of waiting for a.
    loads: dict[str, dict[str, Any]] = {
        "a": {"prefill_tokens_per_s": 1000.0, "prefill_backlog": 8000},
        "b": {"prefill_tokens_per_s": 250.0},
    }
    assert chosen(engines(**loads), 1000) == "b"
    assert chosen(engines(a=loads["a"], b={"prefill_tokens_per_s": 20.0}), 1000) == "a"


def test_the_cost_is_that_at_the_engine_that_holds_most() -> None:
    snapshot = LoadSnapshot(engines(a={"decode_tokens_per_s": 128.0}, b={"decode_tokens_per_s": 256.0}))
    assert snapshot.cost_s(asked(5000, a=1000, b=4000)) == 1.0 + 1.0


def test_of_equals_the_one_with_fewer_sequences_wins_and_then_the_first_by_name() -> None:
    assert chosen(engines(a={"running": 2}, b={"running": 1}), 100) == "b"
    assert chosen(engines(c={}, b={}, a={}), 100) == "a"


loads = st.builds(
    Load,
    waiting=st.integers(0, 100),
    running=st.integers(0, 64),
    prefill_backlog=st.integers(0, 10**6),
    prefill_tokens_per_s=st.just(0.0) | st.floats(1, 1e6),
    decode_tokens_per_s=st.just(0.0) | st.floats(1, 1e6),
)


@given(st.lists(loads, min_size=1, max_size=6), st.integers(1, 10**6), st.lists(st.integers(0, 10**6)), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_engines(
    given_loads: list[Load], prompt: int, cached: list[int], source: Any
) -> None:
    candidates = [Candidate(f"e{number}", load) for number, load in enumerate(given_loads)]
    held = {f"e{number}": tokens for number, tokens in enumerate(cached)}
    first = chosen(candidates, prompt, **held)
    source.shuffle(candidates)
    assert chosen(candidates, prompt, **held) == first


@given(loads, st.integers(1, 10**6), st.integers(0, 10**6))
def test_more_cached_tokens_never_make_an_engine_less_attractive(load: Load, prompt: int, cached: int) -> None:
    snapshot = LoadSnapshot([*engines(a={}), Candidate("b", load)])
    score_s = snapshot.score_s("i-b", asked(prompt, b=cached))
    assert 0 <= score_s <= snapshot.score_s("i-b", asked(prompt))


def test_what_the_batch_lane_has_at_an_engine_is_in_front_of_batch_requests_alone() -> None:
    load = Load(running=4, waiting=9, prefill_backlog=9000, batch_running=4, batch_waiting=9, batch_backlog=9000)
    candidates = [Candidate("a", load), Candidate("b", Load(running=1, prefill_backlog=100))]
    asks = {lane: replace(asked(1000, a=900), lane=lane) for lane in LANES}
    snapshots = {lane: LoadSnapshot(candidates, lane) for lane in LANES}
    assert {lane: snapshot.choose(asks[lane]) for lane, snapshot in snapshots.items()} == {
        "online": candidates[0],
        "batch": candidates[1],
    }
    assert [snapshot.is_ready("i-a") for snapshot in snapshots.values()] == [True, True]  # it has measured nothing
    candidates[0].load = replace(load, prefill_tokens_per_s=1000.0)
    assert [LoadSnapshot(candidates, lane).is_ready("i-a") for lane in LANES] == [True, False]


@given(
    st.lists(loads, min_size=2, max_size=24),
    st.lists(st.tuples(st.integers(1, 5000), st.lists(st.integers(0, 5000), max_size=24), st.booleans()), max_size=6),
)
def test_a_choice_that_stops_early_is_that_of_all_engines(
    given_loads: list[Load], asks: list[tuple[int, list[int], bool]]
) -> None:
    """One request after the other, each in front of the next; its best engines too, and the cost."""
    candidates = [Candidate(f"e{number}", load) for number, load in enumerate(given_loads)]
    snapshot = LoadSnapshot(candidates)
    for prompt, cached, affine in asks:
        ask = asked(prompt, **{f"e{number}": tokens for number, tokens in enumerate(cached)})
        ask = replace(ask, affinity="key" if affine else "", route=[])
        ranks = sorted((snapshot._rank(outlook, ask), outlook.engine.name) for outlook in snapshot._outlooks.values())
        engine = snapshot.choose(ask)
        snapshot.tell(ask)
        assert (engine.name if engine else None) == (ranks[0][1] if ranks else None)
        if len(ranks) > 1:
            assert ask.route is not None
            assert [one.engine for one in ask.route] == [name for _, name in ranks[:MAX_CANDIDATES]]
        if engine is not None:
            least = min(max(0, prompt - ask.cached_tokens.get(f"i-{name}", 0)) for _, name in ranks)
            turn_s = max(outlook.turn_s for outlook in snapshot._outlooks.values())
            assert snapshot.cost_s(ask) == least / snapshot.tokens_per_s + turn_s
            snapshot.add(engine.hello.incarnation, ask)
