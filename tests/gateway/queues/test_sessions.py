from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import DIGEST_BYTES
from gateway.queues.sessions import (
    GAPS,
    LEARN_EVERY,
    MAX_SESSIONS,
    SESSION_S,
    SOON_S,
    TTL_RANGE_S,
    Sessions,
    worth_waiting_s,
)


def digests(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(DIGEST_BYTES, "big") for number in numbers)


def prompt(session: int, blocks: int) -> bytes:
    """Ten blocks that all have in common, then its own."""
    return digests(*range(min(blocks, 10)), *(1000 * session + block for block in range(10, blocks)))


@given(st.integers(0, 300), st.integers(1, 50), st.integers(1, 50))
def test_a_common_prefix_is_known_but_for_a_third_at_most(common: int, mine: int, theirs: int) -> None:
    sessions = Sessions()
    sessions.sent(None, digests(*range(common), *range(1000, 1000 + mine)), "a", 0.0)
    known, _ = sessions.find(digests(*range(common), *range(2000, 2000 + theirs)), 1.0)
    assert known <= common
    assert known * 3 >= common * 2 or common <= 1


@given(st.integers(16, 400), st.integers(0, 200))
def test_a_prompt_that_goes_on_from_another_is_of_its_session(blocks: int, more: int) -> None:
    sessions = Sessions()
    sessions.sent(None, prompt(1, blocks), "a", 0.0)
    sessions.sent(None, prompt(2, blocks), "b", 0.0)
    known, session = sessions.find(prompt(1, blocks + more), 1.0)
    assert session is not None
    assert (session.incarnation, session.blocks) == ("a", blocks)
    assert known * 3 >= blocks * 2
    sessions.sent(session, prompt(1, blocks + more), "c", 1.0)
    assert sessions.find(prompt(1, blocks + more), 1.0)[1] is session


def test_a_prompt_that_only_begins_like_one_is_a_session_of_its_own() -> None:
    sessions = Sessions()
    sessions.sent(None, prompt(1, 100), "a", 0.0)
    assert sessions.find(prompt(2, 100), 1.0) == (8, None)


def test_who_was_sent_long_ago_is_not_known() -> None:
    sessions = Sessions()
    sessions.sent(None, prompt(1, 100), "a", 0.0)
    assert sessions.find(prompt(1, 120), SESSION_S)[0] == 96
    assert sessions.find(prompt(1, 120), SESSION_S + 1) == (0, None)
    assert sessions.find(b"", 0.0) == (0, None)


def test_what_was_sent_long_ago_makes_room() -> None:
    sessions = Sessions()
    for number in range(MAX_SESSIONS + 10):
        sessions.sent(None, digests(1, number + 2), f"e{number}", 0.0)
    assert len(sessions._by_position) == MAX_SESSIONS + 1
    assert len(sessions._cached) == MAX_SESSIONS
    assert sessions.find(digests(1, 11), 0.0) == (1, None)
    assert sessions.find(digests(1, 12), 0.0)[0] == 2


def test_a_session_that_was_forgotten_while_it_waited_is_known_again() -> None:
    sessions = Sessions()
    sessions.sent(None, prompt(1, 100), "a", 0.0)
    _, session = sessions.find(prompt(1, 120), 1.0)
    for number in range(MAX_SESSIONS):
        sessions.sent(None, digests(10**6 + number), "b", 1.0)
    assert sessions.find(prompt(1, 120), 2.0) == (0, None)
    sessions.sent(session, prompt(1, 120), "a", 2.0)
    assert sessions.find(prompt(1, 130), 3.0) == (96, session)


def test_room_is_what_is_behind_everybody_who_may_be_back_soon() -> None:
    sessions = Sessions()
    sessions.kept_s = 30.0
    for number, sent_s in ((1, 0.0), (2, 50.0), (3, 60.0)):
        sessions.sent(None, prompt(number, 100), "a", sent_s)
    assert sessions.room("a", 400, 70.0) == 200  # the first has been away for 70 s
    assert sessions.room("a", 400, 85.0) == 300  # the second for 35 s
    assert sessions.room("a", 400, 100.0) == 400
    assert sessions.room("a", 250, 70.0) == 50
    assert sessions.room("b", 400, 70.0) == 400


def test_who_waits_is_kept_however_long_and_who_turned_out_to_be_lost_is_not() -> None:
    sessions = Sessions()
    sessions.sent(None, prompt(1, 100), "a", 0.0)
    _, session = sessions.find(prompt(1, 101), 1000.0)
    assert session is not None
    session.waiting += 1
    assert sessions.room("a", 400, 1000.0) == 300
    sessions.lost(session)
    assert sessions.room("a", 400, 1000.0) == 400


def test_a_session_that_moves_is_in_one_cache() -> None:
    sessions = Sessions()
    sessions.sent(None, prompt(1, 100), "a", 0.0)
    sessions.sent(sessions.find(prompt(1, 110), 1.0)[1], prompt(1, 110), "b", 1.0)
    assert (sessions.room("a", 400, 2.0), sessions.room("b", 400, 2.0)) == (400, 290)


def test_clients_that_come_back_within_half_a_minute_are_all_waited_for() -> None:
    gaps = [float(1 + number % 30) for number in range(100)]
    assert worth_waiting_s(sorted(gaps)) == 30.0


def test_who_is_away_longer_than_most_is_not_waited_for_where_some_stay_away_for_hours() -> None:
    gaps = [5.0] * 50 + [20.0] * 30 + [10_000.0 + number for number in range(20)]
    assert worth_waiting_s(gaps) == 20.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60).map(sorted))
def test_the_time_that_is_worth_waiting_is_one_after_which_few_come_back_soon(gaps: list[float]) -> None:
    waited_s = worth_waiting_s(gaps)
    assert waited_s in gaps
    last = len(gaps) - 1 - gaps[::-1].index(waited_s)
    later = gaps[last + 1 :]
    assert not later or sum(gap <= waited_s + SOON_S for gap in later) <= len(later) / 2 + gaps.count(waited_s)


def test_it_is_learned_from_those_who_come_back() -> None:
    sessions = Sessions()
    for number in range(GAPS):
        sessions.sent(None, prompt(1 + number, 20), "a", 0.0)
        _, session = sessions.find(prompt(1 + number, 30), 7.0)
        assert session is not None
        sessions.arrived(session, 7.0)
        assert sessions.kept_s == (TTL_RANGE_S[1] if number + 1 < LEARN_EVERY else 7.0)
