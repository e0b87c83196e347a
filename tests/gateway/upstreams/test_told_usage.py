"""Streams that are asked for their usage, and clients that do not see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import UpstreamLostError
from gateway.upstreams.told_usage import asking_for_usage, without_usage
from tests.fakes.upstream import CHUNK, USAGE, chunk, events

KEPT = [*events(chunk("a", usage=None), chunk('"usage" ✓', usage=None)), b": ping\n\n", b"data: [DONE]\n\n"]
TOLD = [*KEPT[:2], *events({**CHUNK, "choices": [], "usage": USAGE}), *KEPT[2:]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"include_obfuscation": False}, {"include_usage": True, "include_obfuscation": False}),
    ],
)
def test_usage_is_asked_for_whatever_the_options_say(options: Any, expected: Any) -> None:
    body = b'{"stream":true, "x":1e2,"stream_options":%b}' % orjson.dumps(options)
    assert orjson.loads(asking_for_usage(body)) == {"stream": True, "x": 100.0, "stream_options": expected}
    assert b'"x":1e2,' in asking_for_usage(body)
    assert orjson.loads(asking_for_usage(b'{"x":1}')) == {"x": 1, "stream_options": {"include_usage": True}}


async def pieces(whole: bytes, cuts: list[int], error: Exception | None = None) -> AsyncGenerator[bytes, None]:
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    for start, end in pairwise(places):
        yield whole[start:end]
    if error is not None:
        raise error


@given(st.lists(st.integers(0, 2000)))
async def test_the_usage_alone_is_taken_out_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    left = [piece async for piece in without_usage(pieces(b"".join(TOLD), cuts), 10_000)]
    assert b"".join(left) == b"".join(KEPT)


async def test_what_breaks_off_within_an_event_ends_behind_the_one_before() -> None:
    told = TOLD[0] + TOLD[1][:10]
    left = []
    with pytest.raises(UpstreamLostError) as caught:
        async for piece in without_usage(pieces(told, [], UpstreamLostError("x")), 10_000):
            left.append(piece)  # noqa: PERF401 - what came before the error
    assert left == [TOLD[0]]
    assert caught.value.between_events


async def test_events_that_are_too_long_go_on_in_pieces() -> None:
    told = b"data: " + b"x" * 5000 + b"\n\n"
    assert b"".join([piece async for piece in without_usage(pieces(told, [1000, 3000]), 2000)]) == told
