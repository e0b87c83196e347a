"""Answers as bytes and back, whatever is in them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.responses.recording import Recording, decode, encode, record, text_of
from gateway.types import CallDelta, Event, Finished, ScoredToken, Spelled, Started, TextDelta, Usage

texts = st.text(max_size=8)
logprobs = st.floats(max_value=0, allow_nan=False, width=32) | st.just(-math.inf)
spelled = st.builds(Spelled, texts, st.binary(max_size=4) | st.none())
tokens = st.builds(
    ScoredToken,
    spelled,
    logprobs,
    st.lists(st.tuples(spelled, logprobs), max_size=2).map(tuple),
    st.integers(0, 1000),
)
pieces = st.lists(
    st.builds(TextDelta, texts, st.lists(tokens, max_size=2).map(tuple))
    | st.builds(CallDelta, st.integers(0, 3), texts, texts),
    max_size=6,
)
recordings = st.builds(
    Recording,
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(["stop", "length", "tool_calls"]),
    texts | st.none(),
    pieces,
    st.lists(tokens, max_size=2).map(tuple),
    st.integers(0, 10**6).map(float),
)


@given(recordings)
def test_every_answer_comes_back_in_its_own_pieces(recording: Recording) -> None:
    assert decode(encode(recording), joined=False) == recording
    assert record(list(recording.events()), recording.generation_ms) == recording


@given(recordings)
def test_joined_it_says_the_same(recording: Recording) -> None:
    joined = decode(encode(recording), joined=True)
    assert said(joined) == said(recording)
    if not recording.calls and not any(piece.scored for piece in recording.pieces if isinstance(piece, TextDelta)):
        assert len(joined.pieces) <= 1


def said(recording: Recording) -> tuple[str, str]:
    text = "".join(piece.text for piece in recording.pieces if isinstance(piece, TextDelta))
    return text, "".join(piece.name + piece.arguments for piece in recording.pieces if isinstance(piece, CallDelta))


def test_what_is_not_complete_is_no_recording() -> None:
    events: list[Event] = [Started("e", Usage(3, 0)), TextDelta("a"), Finished("stop", Usage(3, 1))]
    assert record(events) == Recording(3, 1, "stop", None, [TextDelta("a")])
    for part in ([], events[:1], events[:2], events[1:]):
        assert record(part) is None


def test_the_text_of_an_answer_is_that_of_one_that_is_complete_and_calls_nothing() -> None:
    start, text = Started("e", Usage(1, 0)), TextDelta(" Hi. ")
    assert text_of([start, text, Finished("stop", Usage(1, 1))]) == "Hi."
    assert text_of([start, text, Finished("length", Usage(1, 1))]) is None
    assert text_of([start, text, Finished("tool_calls", Usage(1, 1))]) is None
    assert text_of([start, text]) is None
    assert text_of([]) is None


def test_the_prompt_of_an_answer_that_is_given_again_was_all_there() -> None:
    usage = Recording(30, 4, "stop", None, []).usage
    assert usage == Usage(30, 4, cached_tokens=30)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"e": 1}', b'{"e": [[]]}', b'{"e": [["a", 1]], "p": 1}'])
def test_what_nobody_wrote_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode(body, joined=False)
