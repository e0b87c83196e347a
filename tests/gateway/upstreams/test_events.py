"""Server-sent events out of bytes that are cut anywhere."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.events import Events, data_of

ends = st.sampled_from((b"\n", b"\r\n", b"\r"))
line = st.sampled_from((b"data: {}", b"data:x", b": ping", b"event: message", b"data: \xc3\xa9", b"id: 1"))


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    end = draw(ends)
    return [
        b"".join(one + end for one in draw(st.lists(line, min_size=1, max_size=4))) + end
        for _ in range(draw(st.integers(0, 5)))
    ]


@given(streams(), st.lists(st.integers(0, 200)))
def test_events_are_the_same_wherever_the_bytes_are_cut(stream: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(stream)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    events, found = Events(1000), []
    for start, end in pairwise(places):
        found += events.feed(whole[start:end])
    last = events.rest()
    assert b"".join([*found, last]) == whole
    # A carriage return at the very end may be half of an end that never came.
    assert [*found, *([last] if last else [])] == stream


def test_what_is_longer_than_the_limit_is_passed_over_in_pieces() -> None:
    events = Events(10)
    assert events.feed(b"data: 0123456789") == [b"data: 0123456789"]
    assert events.between
    assert events.feed(b"\n\ndata: 1\n\n") == [b"\n\n", b"data: 1\n\n"]


def test_between_events_nothing_is_held() -> None:
    events = Events(1000)
    assert events.feed(b"data: 1\n") == []
    assert not events.between
    assert events.feed(b"\n") == [b"data: 1\n\n"]
    assert events.between


def test_the_lines_of_an_events_data_are_joined() -> None:
    assert data_of(b"event: x\r\ndata: {\r\ndata:}\r\n\r\n") == b"{\n}"
