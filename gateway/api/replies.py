"""What answers are made of, for all dialects: whole answers, JSON replies, server-sent events, new ids."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from engine.protocol.frozen import dataclass
from gateway.api.dialect import JSON
from gateway.types import CallDelta, Delta, FinishReason, ScoredToken, TextDelta, ThinkingDelta, Usage

_BITS: Final = random.Random(secrets.randbits(256)).getrandbits  # noqa: S311 - no secrets

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")


def reply(body: bytes, headers: Mapping[str, str] | None = None, *, status: int = 200) -> web.Response:
    """JSON. The middleware adds the headers that every answer carries."""
    return web.Response(body=body, status=status, content_type=JSON, headers=headers)


def reply_json(
    value: Mapping[str, Any], headers: Mapping[str, str] | None = None, *, status: int = 200
) -> web.Response:
    """The same, of what is no JSON yet; mappings in it become objects."""
    return reply(orjson.dumps(value, default=dict), headers, status=status)


def page_json(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list, as the OpenAI and Anthropic APIs write one."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"data": data, **ends, "has_more": has_more}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text of a JSON object, unless the answer was cut in the middle of it. `offset` counts the
    characters of the answer's text before it."""

    name: str
    arguments: str
    offset: int = 0


class ToldThought(NamedTuple):
    """Text and signature may each be empty. `call` is the number of the call that it comes before; -1: it comes before
    the text."""

    text: str
    signature: str
    call: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, complete."""

    text: str
    reason: FinishReason
    usage: Usage
    scored: tuple[ScoredToken, ...] | None = None  # when log probabilities were asked for
    echoed: int = 0  # characters of `text` that are the prompt
    prompt: tuple[ScoredToken, ...] = ()  # scored as well, when it is echoed with log probabilities
    calls: tuple[ToolCall, ...] = ()
    stop: str | None = None  # the stop string that ended it
    thoughts: tuple[ToldThought, ...] = ()
    refusal: str = ""  # why there is no answer, or none that goes on; not part of `text`

    def in_order(self) -> Iterator[ToldThought | str | ToolCall]:
        """Thoughts, text, calls and refusal, for APIs that have the calls behind the text."""
        parts: list[str | ToolCall] = [self.text, *self.calls]
        thoughts = list(self.thoughts)
        for number, part in enumerate(parts, -1):
            while thoughts and thoughts[0].call <= number:
                yield thoughts.pop(0)
            if part:
                yield part
        yield from thoughts
        if self.refusal:
            yield self.refusal


def join_calls(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    """The calls among the deltas of an answer, in order."""
    calls: list[tuple[str, int, list[str]]] = []
    chars = 0
    for delta in deltas:
        if isinstance(delta, TextDelta):
            chars += 0 if delta.refusal else len(delta.text)
        elif isinstance(delta, CallDelta):
            if delta.call == len(calls):
                calls.append((delta.name, chars, []))
            calls[delta.call][2].append(delta.arguments)
    return tuple(ToolCall(name, "".join(arguments), offset) for name, offset, arguments in calls)


def join_thoughts(deltas: Iterable[Delta]) -> tuple[ToldThought, ...]:
    """The thoughts among the deltas of an answer, in order. A signature ends one, and so does all that is none."""
    thoughts: list[tuple[list[str], str, int]] = []
    call, is_open = -1, False
    for delta in deltas:
        if isinstance(delta, ThinkingDelta):
            texts = thoughts.pop()[0] if is_open else []
            texts.append(delta.text)
            thoughts.append((texts, delta.signature, call))
            is_open = not delta.signature
        else:
            is_open = False
            call = delta.call + 1 if isinstance(delta, CallDelta) else max(call, 0)
    return tuple(ToldThought("".join(texts), signature, call) for texts, signature, call in thoughts)


class Stamp(NamedTuple):
    """Of one answer, as its dialect writes it: the same bytes wherever they are in it, and nowhere else, because the
    id was drawn at random after everything else was known.

    make  others of the same form, for the next answer
    """

    written: bytes
    make: Callable[[], bytes]


def new_id() -> str:
    """32 new hexadecimal digits. No secret: the next ones can be guessed from some."""
    return f"{_BITS(128):032x}"


def json_text(text: str) -> bytes:
    """A JSON string that stays on one line for every SSE client: some end lines where Unicode does (str.splitlines)."""
    return orjson.dumps(text) if text.isascii() else json_line(text)


def json_line(value: Any) -> bytes:
    """As json_text, for any value."""
    return (
        orjson.dumps(value)
        .replace(b"\xc2\x85", rb"\u0085")
        .replace(b"\xe2\x80\xa8", rb"\u2028")
        .replace(b"\xe2\x80\xa9", rb"\u2029")
    )


def read_events(stream: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The data of each event of a complete stream, its lines joined, and the bytes that the event came as. Events
    without data are passed over."""
    begin = 0
    for end in _EVENT_END.finditer(stream):
        written, begin = stream[begin : end.end()], end.end()
        lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(written) if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines), written


COMMENT: Final = b": ping\n\n"
"""An event of nothing, which clients of server-sent events skip; those of the Gemini API do not."""


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + json_line(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + json_line(value) + b"\n\n"
