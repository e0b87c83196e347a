"""Answers as bytes, in the chunks that they came in, and back. Pure. Of our own engines, the events of one:

    {"p": prompt tokens, "c": completion tokens, "r": reason, "s": stop string or null, "e": pieces,
     "t": milliseconds that it took, "o": scored tokens of the prompt, where it has some}

A piece is a text; or [text, scored tokens]; or [number of the call, name, arguments]. A scored token is
[text, bytes in hex or null, logprob, [[text, bytes, logprob], ...], offset]; null is the logprob of what cannot be.

Of an upstream, its bytes and what is known of them besides; no answer of the one kind can be read as one of the other,
since their JSON has other names:

    {"form": ..., "type": ..., "label": ..., "tokens": ..., "ms": ..., "sizes": ...} LF bytes
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import orjson

from gateway.types import CallDelta, Event, Finished, FinishReason, ScoredToken, Spelled, Started, TextDelta, Usage

Piece = TextDelta | CallDelta


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer that ended by itself or at its limit.

    generation_ms  from the arrival of its request to its last token
    """

    prompt_tokens: int
    completion_tokens: int
    reason: FinishReason
    stop: str | None
    pieces: Sequence[Piece]
    scored: tuple[ScoredToken, ...] = ()
    generation_ms: float = 0.0

    @property
    def calls(self) -> bool:
        """Whether there is a tool call in it."""
        return any(type(piece) is CallDelta for piece in self.pieces)

    @property
    def usage(self) -> Usage:
        """Of an answer that is given again: everything that went into it was there."""
        return Usage(self.prompt_tokens, self.completion_tokens, cached_tokens=self.prompt_tokens)

    def events(self) -> Iterator[Event]:
        """As an engine would tell them."""
        yield Started("", Usage(self.prompt_tokens, 0, cached_tokens=self.prompt_tokens), self.scored)
        yield from self.pieces
        yield Finished(self.reason, self.usage, self.stop)


def record(events: Sequence[Event], generation_ms: float = 0.0) -> Recording | None:
    """Of the events of one answer; None for one that is not complete."""
    if not events or type(events[0]) is not Started or type(events[-1]) is not Finished:
        return None
    started, finished = events[0], events[-1]
    pieces = [event for event in events if isinstance(event, TextDelta | CallDelta)]
    usage = finished.usage
    return Recording(
        usage.prompt_tokens,
        usage.completion_tokens,
        finished.reason,
        finished.stop,
        pieces,
        started.scored,
        generation_ms,
    )


def text_of(events: Sequence[Event]) -> str | None:
    """What it says; None for an answer that is not complete, or calls tools."""
    if not events or not isinstance(events[-1], Finished) or events[-1].reason != "stop":
        return None
    return "".join(event.text for event in events if isinstance(event, TextDelta)).strip()


def encode(recording: Recording) -> bytes:
    written: dict[str, Any] = {
        "p": recording.prompt_tokens,
        "c": recording.completion_tokens,
        "r": recording.reason,
        "s": recording.stop,
        "e": [_write(piece) for piece in recording.pieces],
        "t": round(recording.generation_ms, 1),
    }
    if recording.scored:
        written["o"] = [_write_token(token) for token in recording.scored]
    return orjson.dumps(written)


def decode(body: bytes, *, joined: bool) -> Recording:
    """`joined` makes one of texts that follow each other, for who wants no pieces. Raises ValueError for what `encode`
    did not write."""
    try:
        read = orjson.loads(body)
        written = read["e"]
        text = _joined(written) if joined else None
        pieces = [_read(item) for item in written] if text is None else [TextDelta(text)] if text else []
        scored = tuple(_read_token(token) for token in read.get("o", ()))
        return Recording(read["p"], read["c"], read["r"], read["s"], pieces, scored, read["t"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"an answer cannot be read: {error!r}") from error


def _joined(written: list[Any]) -> str | None:
    """None where there is more than text."""
    try:
        return "".join(written)
    except TypeError:
        return None


def _write(piece: Piece) -> Any:
    if isinstance(piece, CallDelta):
        return [piece.call, piece.name, piece.arguments]
    return [piece.text, [_write_token(token) for token in piece.scored]] if piece.scored else piece.text


def _read(item: Any) -> Piece:
    if type(item) is str:
        return TextDelta(item)
    if type(item[0]) is int:
        return CallDelta(*item)
    return TextDelta(item[0], tuple(_read_token(token) for token in item[1]))


def _write_token(token: ScoredToken) -> list[Any]:
    top = [[*_write_spelled(spelled), _finite(logprob)] for spelled, logprob in token.top]
    return [*_write_spelled(token.token), _finite(token.logprob), top, token.offset]


def _read_token(item: Any) -> ScoredToken:
    text, raw, logprob, top, offset = item
    likeliest = tuple((_read_spelled(other, bits), _logprob(value)) for other, bits, value in top)
    return ScoredToken(_read_spelled(text, raw), _logprob(logprob), likeliest, offset)


def _write_spelled(spelled: Spelled) -> tuple[str, str | None]:
    return spelled.text, None if spelled.bytes is None else spelled.bytes.hex()


def _read_spelled(text: str, raw: str | None) -> Spelled:
    return Spelled(text, None if raw is None else bytes.fromhex(raw))


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None


def _logprob(written: float | None) -> float:
    return -math.inf if written is None else written


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
