"""Answers as bytes and back, whatever is in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.responses.base import Stored
from gateway.responses.recording import decode, encode, text_of
from gateway.types import (
    CallDelta,
    Event,
    Finished,
    FinishReason,
    ScoredToken,
    Spelled,
    Started,
    TextDelta,
    ThinkingDelta,
    Usage,
)

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
    | st.builds(CallDelta, st.integers(0, 3), texts, texts)
    | st.builds(ThinkingDelta, texts, texts),
    max_size=6,
)


def answer(
    prompt: int, completion: int, reason: FinishReason, stop: str | None, chunks: list[Any], scored: Any
) -> list[Event]:
    """As it is given again: all of its prompt was there."""
    started = Started("", Usage(prompt, 0, cached_tokens=prompt), scored)
    return [started, *chunks, Finished(reason, Usage(prompt, completion, cached_tokens=prompt), stop)]


answers = st.builds(
    answer,
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(["stop", "length", "tool_calls"]),
    texts | st.none(),
    pieces,
    st.lists(tokens, max_size=2).map(tuple),
)


def stored(events: list[Event], *, joined: bool, ms: float = 1.0) -> Stored[Event]:
    body = encode(events, ms)
    assert body is not None
    found = decode(body, joined=joined)
    assert found is not None
    return found


@given(answers, st.integers(0, 10**6).map(float))
def test_every_answer_comes_back_in_its_own_chunks(events: list[Event], ms: float) -> None:
    found, end = stored(events, joined=False, ms=ms), events[-1]
    assert isinstance(end, Finished)
    tokens = end.usage.prompt_tokens, end.usage.completion_tokens
    assert found == Stored(events, *tokens, ms, end.reason)


@given(answers)
def test_joined_it_says_the_same(events: list[Event]) -> None:
    joined = stored(events, joined=True)
    assert said(joined.items) == said(events)
    if not any(
        isinstance(event, CallDelta | ThinkingDelta) or (isinstance(event, TextDelta) and event.scored)
        for event in events
    ):
        assert len(joined.items) <= 3


def said(events: Sequence[Event]) -> tuple[str, str]:
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return text, "".join(event.name + event.arguments for event in events if isinstance(event, CallDelta))


def test_what_is_not_complete_is_not_recorded() -> None:
    events: list[Event] = [Started("e", Usage(3, 0)), TextDelta("a"), Finished("stop", Usage(3, 1))]
    assert stored(events, joined=False).items == answer(3, 1, "stop", None, [TextDelta("a")], ())
    for part in ([], events[:1], events[:2], events[1:]):
        assert encode(part, 1.0) is None


def test_the_text_of_an_answer_is_that_of_one_that_is_complete_and_calls_nothing() -> None:
    start, text = Started("e", Usage(1, 0)), TextDelta(" Hi. ")
    assert text_of([start, text, Finished("stop", Usage(1, 1))]) == "Hi."
    assert text_of([start, text, Finished("length", Usage(1, 1))]) is None
    assert text_of([start, text, Finished("tool_calls", Usage(1, 1))]) is None
    assert text_of([start, text]) is None
    assert text_of([]) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"e": 1}', b'{"e": [[]]}', b'{"e": [["a", 1]], "p": 1}'])
def test_what_nobody_wrote_is_refused(body: bytes) -> None:
    assert decode(body, joined=False) is None
