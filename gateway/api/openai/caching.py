"""Prompt caching as the OpenAI API has it: `prompt_cache_options` and `prompt_cache_breakpoint` into markers.

    implicit mode   the latest 3 breakpoints, and one at the end of the latest eligible message, kept for options.ttl
    explicit mode   the latest 4 breakpoints; without any, no cache at all

The implicit breakpoint is there only when the options have a ttl: without one it asks for nothing that ordinary
eviction does not give. Two breakpoints may be at one place. Pure; messages.py has already checked the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from gateway.api.fields import choice, closed_record, record, text, wrong_value
from gateway.config import LeaseSettings, duration_s
from gateway.types import MAX_BREAKPOINTS, Marker

_string = text()
check_options = closed_record(mode=choice("implicit", "explicit"), ttl=_string)
check_breakpoint = closed_record(mode=choice("explicit"), ttl=_string)
check_control = record(type=choice("ephemeral"), ttl=_string)
"""Anthropic's `cache_control` in a message or a part, as LiteLLM sends it: a breakpoint. A ttl that the operator does
not allow is the default one here, because it was chosen for another server."""


class Point(NamedTuple):
    """A breakpoint on a part: right after the first `chars` characters of a message. Without a ttl it takes the
    request's. `path` is that of the ttl."""

    message: int
    chars: int
    ttl: str | None
    path: str


class Caching(NamedTuple):
    """What a chat asks of the cache."""

    markers: tuple[Marker, ...] = ()
    use_cache: bool = True
    only_leased: bool = False


NO_BREAKPOINTS: Final = Caching()


def read_caching(messages: Sequence[Any], options: dict[str, Any] | None, leases: LeaseSettings) -> Caching:
    """`messages` and `options` as they came. Raises BadRequestError for a ttl that the operator does not allow."""
    if not options and not any(type(one.get("content")) is list or "cache_control" in one for one in messages):
        return NO_BREAKPOINTS  # as nearly all are
    return place_markers(messages, list(_points(messages, leases)), options or {}, leases)


def place_markers(
    messages: Sequence[Any], points: Sequence[Point], options: dict[str, Any], leases: LeaseSettings
) -> Caching:
    """`points` in their order. Raises BadRequestError for a ttl that the operator does not allow."""
    asked = options.get("ttl")
    written = leases.default_ttl if asked is None else asked
    ttl_s = _ttl_s(written, "prompt_cache_options.ttl", leases, given=asked is not None)
    explicit = [
        Marker(point.message, point.chars, ttl_s if point.ttl is None else _ttl_s(point.ttl, point.path, leases))
        for point in points
    ]
    if options.get("mode") == "explicit":
        return Caching(tuple(explicit[-MAX_BREAKPOINTS:]), use_cache=bool(explicit), only_leased=True)
    markers = explicit[1 - MAX_BREAKPOINTS :]
    if asked is not None and (place := _latest_eligible(messages)) is not None:
        markers.append(Marker(*place, ttl_s))
    return Caching(tuple(markers))


def _points(messages: Sequence[Any], leases: LeaseSettings) -> Iterator[Point]:
    """In their order."""
    for index, message in enumerate(messages):
        content, chars = message.get("content"), 0
        for number, part in enumerate(content if type(content) is list else ()):
            chars += len(part[part["type"]])
            if (point := part.get("prompt_cache_breakpoint")) is not None:
                path = f"messages[{index}].content[{number}].prompt_cache_breakpoint.ttl"
                yield Point(index, chars, point.get("ttl"), path)
            elif (control := part.get("cache_control")) is not None:
                yield _controlled(index, chars, control, leases)
        if content and (control := message.get("cache_control")) is not None:
            yield _controlled(index, _num_chars(content), control, leases)


def _controlled(message: int, chars: int, control: dict[str, Any], leases: LeaseSettings) -> Point:
    """A breakpoint of a `cache_control`."""
    ttl = control.get("ttl")
    return Point(message, chars, ttl if ttl in leases.ttls else None, "")


def _latest_eligible(messages: Sequence[Any]) -> tuple[int, int] | None:
    """The end of the latest user message, of the last of a run of tool outputs, or of the initial instructions."""
    roles = [message["role"] for message in messages]
    instructions = 0
    while instructions < len(roles) and roles[instructions] in ("system", "developer"):
        instructions += 1
    for index in reversed(range(len(roles))):
        if roles[index] in ("user", "tool", "function") or index < instructions:
            return index, _num_chars(messages[index].get("content"))
    return None


def _num_chars(content: Any) -> int:
    if type(content) is list:
        return sum(len(part[part["type"]]) for part in content)
    return len(content or "")


def _ttl_s(written: str, path: str, leases: LeaseSettings, *, given: bool = True) -> float:
    """Seconds. The operator's own default is not compared with what the operator lets clients ask for."""
    try:
        ttl_s = duration_s(written)
    except ValueError:
        ttl_s = 0.0
    if given and ttl_s not in {duration_s(allowed) for allowed in leases.ttls}:
        raise wrong_value(path, written, leases.ttls)
    return ttl_s
