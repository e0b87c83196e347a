"""W3C Trace Context (level 1): the trace that a request belongs to, from its caller and on to upstreams and replicas.

The span of the request that is worked on is in a context variable, so that nothing on the way to an upstream has to
pass it on; where no traces are made there is none. Pure but for ids and the clock; admin/spans.py makes spans of it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, NamedTuple

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

MAX_MEMBERS: Final = 32
"""Of a tracestate; one with more is dropped as a whole."""

MAX_STATE_CHARS: Final = 4096

MAX_CALLS: Final = 64
"""Of one request that become spans. All of them carry the trace on."""

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER: Final = re.compile(
    r"([a-z0-9][a-z0-9_*/@-]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_SAMPLED: Final = 1


class Parent(NamedTuple):
    """The caller's span. `state` is its tracestate, valid or empty."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""


def read_parent(traceparent: Sequence[str], tracestate: Sequence[str]) -> Parent | None:
    """The caller, from all values of the two headers. None for a traceparent that is not there, not valid, or there
    twice; a tracestate that is not valid is dropped alone."""
    if len(traceparent) != 1 or (found := _PARENT.fullmatch(traceparent[0].strip(" \t"))) is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or not trace_id or not span_id or (version == "00" and more is not None):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _read_state(tracestate))


def _read_state(values: Sequence[str]) -> str:
    if sum(map(len, values)) > MAX_STATE_CHARS:
        return ""
    members = [member for value in values for one in value.split(",") if (member := one.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members[: MAX_MEMBERS + 1]]
    keys = {one[1] for one in found if one is not None}
    return ",".join(members) if len(keys) == len(members) <= MAX_MEMBERS else ""


@dataclass(slots=True)
class RequestSpan:
    """Of one request. `parent` None: it is the root of its trace."""

    trace_id: int
    span_id: int
    sampled: bool
    parent: Parent | None = None
    calls: list[Call] = field(default_factory=list)

    @property
    def state(self) -> str:
        return "" if self.parent is None else self.parent.state

    def as_parent(self) -> Parent:
        """For what goes on in its name."""
        return Parent(self.trace_id, self.span_id, self.sampled, self.state)


@dataclass(slots=True)
class Call:
    """What the gateway asks of an upstream or a replica for a request: one attempt, a span of its own.

    name   of the upstream or replica
    api    that it speaks: a dialect, or a kind of replica
    model  by its name there
    status of its answer; 0: there is none
    error  a word; empty while nothing is wrong
    """

    span: RequestSpan
    span_id: int
    name: str
    api: str
    model: str
    begun_s: float  # monotonic clock
    ended_s: float = 0.0
    status: int = 0
    error: str = ""

    def write(self, headers: MutableMapping[str, str]) -> None:
        """Its trace, in place of any other. Names of `headers` are in small letters."""
        span = self.span
        headers[TRACEPARENT] = f"00-{span.trace_id:032x}-{self.span_id:016x}-{int(span.sampled):02x}"
        if span.state:
            headers[TRACESTATE] = span.state
        else:
            headers.pop(TRACESTATE, None)

    def failed(self, error: BaseException, word: str = "") -> None:
        """`word`: what went wrong, where the error's name does not say it."""
        self.error = word or type(error).__name__.removesuffix("Error")

    def end(self) -> None:
        """Counts the first time."""
        self.ended_s = self.ended_s or time.monotonic()


CURRENT: Final[ContextVar[RequestSpan | None]] = ContextVar("request_span", default=None)


def new_id() -> int:
    """Of a span."""
    return int.from_bytes(os.urandom(8)) or 1


def new_span(parent: Parent | None, bound: int) -> RequestSpan:
    """A span of a caller's trace, sampled as that says; else of a new one, sampled if the low 64 bits of its id are
    less than `bound`, as other SDKs decide for the same id."""
    ids = os.urandom(24)
    span_id = int.from_bytes(ids[:8]) or 1
    if parent is not None:
        return RequestSpan(parent.trace_id, span_id, parent.sampled, parent)
    return RequestSpan(int.from_bytes(ids[8:]) or 1, span_id, int.from_bytes(ids[16:]) < bound)


@contextmanager
def calling(name: str, api: str, model: str) -> Iterator[Call | None]:
    """`begin_call`, and its end."""
    call = begin_call(name, api, model)
    try:
        yield call
    except Exception as error:
        if call is not None:
            call.failed(error)
        raise
    finally:
        if call is not None:
            call.end()


def begin_call(name: str, api: str, model: str) -> Call | None:
    """For the request that is worked on. None where no traces are made."""
    if (span := CURRENT.get()) is None:
        return None
    call = Call(span, new_id(), name, api, model, time.monotonic())
    if span.sampled and len(span.calls) < MAX_CALLS:
        span.calls.append(call)
    return call
