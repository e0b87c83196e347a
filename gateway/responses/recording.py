"""Answers as bytes, in the chunks that they came in, and back. Pure. Of our own engines, the events of one:

    {"p": prompt tokens, "c": completion tokens, "r": reason, "s": stop string or null, "e": chunks,
     "t": milliseconds that it took, "o": scored tokens of the prompt, where it has some}

A chunk is a text; or [text, scored tokens]; or [number of the call, name, arguments]; or [null, text of a thought,
signature]; "h" are the tokens of thoughts, where there are some. A scored token is
[text, bytes in hex or null, logprob, [[text, bytes, logprob], ...], offset]; null is the logprob of what cannot be.

Of an upstream, its bytes and what is known of them besides; no answer of the one kind can be read as one of the other,
since their JSON has other names:

    {"form": ..., "type": ..., "label": ..., "tokens": ..., "ms": ..., "sizes": ...} LF bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import orjson

from gateway.responses.base import Stored
from gateway.types import (
    CallDelta,
    Delta,
    Event,
    Finished,
    ScoredToken,
    Spelled,
    Started,
    TextDelta,
    ThinkingDelta,
    Usage,
)


def text_of(events: Sequence[Event]) -> str | None:
    """The text of an answer; None for one that is not complete, or calls tools."""
    if not events or not isinstance(events[-1], Finished) or events[-1].reason != "stop":
        return None
    return "".join(event.text for event in events if isinstance(event, TextDelta)).strip()


def encode(events: Sequence[Event], generation_ms: float) -> bytes | None:
    """None for an answer that is not complete."""
    if not events or type(events[0]) is not Started or type(events[-1]) is not Finished:
        return None
    started, finished = events[0], events[-1]
    written: dict[str, Any] = {
        "p": finished.usage.prompt_tokens,
        "c": finished.usage.completion_tokens,
        "r": finished.reason,
        "s": finished.stop,
        "e": [_write(event) for event in events[1:-1]],
        "t": round(generation_ms, 1),
    }
    if finished.usage.reasoning_tokens:
        written["h"] = finished.usage.reasoning_tokens
    if started.scored:
        written["o"] = [_write_token(token) for token in started.scored]
    return orjson.dumps(written)


def decode(body: bytes, *, joined: bool) -> Stored[Event] | None:
    """The events as an engine would send them; all of the prompt was there. `joined` puts texts that follow each other
    together. None for what `encode` did not write."""
    try:
        read = orjson.loads(body)
        prompt, completion, written = read["p"], read["c"], read["e"]
        if joined and all(type(item) is str for item in written):
            written = ["".join(written)] if any(written) else []
        chunks = [_read(item) for item in written]
        scored = tuple(_read_token(token) for token in read.get("o", ()))
        started = Started("", Usage(prompt, 0, cached_tokens=prompt), scored)
        usage = Usage(prompt, completion, cached_tokens=prompt, reasoning_tokens=read.get("h", 0))
        finished = Finished(read["r"], usage, read["s"])
        return Stored([started, *chunks, finished], prompt, completion, read["t"], read["r"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _write(event: Event) -> Any:
    if isinstance(event, CallDelta):
        return [event.call, event.name, event.arguments]
    if isinstance(event, ThinkingDelta):
        return [None, event.text, event.signature]
    assert isinstance(event, TextDelta)
    return [event.text, [_write_token(token) for token in event.scored]] if event.scored else event.text


def _read(item: Any) -> Delta:
    if type(item) is str:
        return TextDelta(item)
    if type(item[0]) is int:
        return CallDelta(*item)
    if item[0] is None:
        return ThinkingDelta(item[1], item[2])
    return TextDelta(item[0], tuple(_read_token(token) for token in item[1]))


def _write_token(token: ScoredToken) -> list[Any]:
    top = [_write_spelled(*one) for one in token.top]
    return [*_write_spelled(token.token, token.logprob), top, token.offset]


def _read_token(item: Any) -> ScoredToken:
    text, raw, logprob, top, offset = item
    return ScoredToken(*_read_spelled(text, raw, logprob), tuple(_read_spelled(*one) for one in top), offset)


def _write_spelled(spelled: Spelled, logprob: float) -> list[Any]:
    raw = None if spelled.bytes is None else spelled.bytes.hex()
    return [spelled.text, raw, logprob if math.isfinite(logprob) else None]


def _read_spelled(text: str, raw: str | None, logprob: float | None) -> tuple[Spelled, float]:
    spelled = Spelled(text, None if raw is None else bytes.fromhex(raw))
    return spelled, -math.inf if logprob is None else logprob


class Form(NamedTuple):
    """What a client wants of an upstream: a stream or not, and a stream with or without its usage."""

    stream: bool
    usage: bool


class UpstreamRecording(NamedTuple):
    """An upstream's answer.

    type    its Content-Type
    label   of its model, for metrics
    tokens  of its prompt, and of itself
    ms      that it took
    """

    form: Form
    type: str
    label: str
    tokens: tuple[int, int]
    ms: float
    chunks: Sequence[bytes]


def encode_upstream(recording: UpstreamRecording) -> bytes:
    head = {
        "form": list(recording.form),
        "type": recording.type,
        "label": recording.label,
        "tokens": recording.tokens,
        "ms": round(recording.ms, 1),
        "sizes": [len(chunk) for chunk in recording.chunks],
    }
    return orjson.dumps(head) + b"\n" + b"".join(recording.chunks)


def decode_upstream(body: bytes) -> UpstreamRecording | None:
    """None for what `encode_upstream` did not write."""
    head, _, joined = body.partition(b"\n")
    try:
        read = orjson.loads(head)
        cuts = pairwise([0, *accumulate(read["sizes"])])
        chunks = [joined[start:end] for start, end in cuts]
        tokens = tuple(read["tokens"])
        return UpstreamRecording(Form(*read["form"]), read["type"], read["label"], tokens, read["ms"], chunks)
    except (ValueError, KeyError, TypeError):
        return None
