"""Prompt caching as the OpenAI API has it: `prompt_cache_options` and `prompt_cache_breakpoint` into markers.

    implicit mode   the latest 3 breakpoints, and one at the end of the latest eligible message, kept for options.ttl
    explicit mode   the latest 4 breakpoints; without any, no cache at all

The implicit breakpoint is there only when the options have a ttl: without one it asks for nothing that ordinary
eviction does not give. Two breakpoints may be at one place. Pure; chats and responses have checked their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.api.fields import choice, closed_record, record, text, wrong_value
from gateway.api.openai.media import find_media
from gateway.config import LeaseSettings, duration_s
from gateway.types import MAX_BREAKPOINTS, Marker, Media

_string = text()
check_options = closed_record(mode=choice("implicit", "explicit"), ttl=_string)
check_breakpoint = closed_record(mode=choice("explicit"), ttl=_string)
check_control = record(type=choice("ephemeral"), ttl=_string)
"""Anthropic's `cache_control` in a message or a part, as LiteLLM sends it: a breakpoint. A ttl that the operator does
not allow is the default one here, because it was chosen for another server."""


class Point(NamedTuple):
    """A breakpoint right after the first `chars` characters of a message.

    ttl    None: the request's
    path   of the ttl; None for that of a `cache_control`
    media  as in Marker
    """

    message: int
    chars: int
    ttl: str | None
    path: str | None
    media: int = 0


class Caching(NamedTuple):
    """What a request asks of the cache."""

    markers: tuple[Marker, ...] = ()
    use_cache: bool = True
    only_leased: bool = False


NO_BREAKPOINTS: Final = Caching()


class Parts(NamedTuple):
    """What the messages of a conversation have besides text, in order."""

    points: list[Point]
    media: list[Media]


def join_parts(parts: Sequence[Any], message: int, path: str, found: Parts) -> str:
    """The texts of a message's parts as one. Its breakpoints and media are added to `found`."""
    texts: list[str] = []
    chars = num_media = 0
    for number, part in enumerate(parts):
        where = f"{path}[{number}]"
        if (media := find_media(part, where, message, chars)) is not None:
            found.media.append(media)
            num_media += 1
        else:
            texts.append(part["refusal"] if part["type"] == "refusal" else part["text"])
            chars += len(texts[-1])
        if (point := part.get("prompt_cache_breakpoint")) is not None:
            ttl_path = f"{where}.prompt_cache_breakpoint.ttl"
            found.points.append(Point(message, chars, point.get("ttl"), ttl_path, num_media))
        elif (control := part.get("cache_control")) is not None:
            found.points.append(Point(message, chars, control.get("ttl"), None, num_media))
    return "".join(texts)


def join_messages(messages: Sequence[dict[str, Any]]) -> Parts:
    """Makes one text of the content of each message of a chat. Returns what else they have."""
    found = Parts([], [])
    for index, message in enumerate(messages):
        content, before = message["content"], len(found.media)
        if type(content) is list:
            content = message["content"] = join_parts(content, index, f"messages[{index}].content", found)
        control, num_media = message.pop("cache_control", None), len(found.media) - before
        if (content or num_media) and control is not None:
            found.points.append(Point(index, len(content), control.get("ttl"), None, num_media))
    return found


def place_markers(messages: Sequence[Any], found: Parts, options: dict[str, Any], leases: LeaseSettings) -> Caching:
    """`found` in the joined messages. Raises BadRequestError for a ttl that the operator does not allow."""
    points, media = found
    if not options and not points:
        return NO_BREAKPOINTS
    asked = options.get("ttl")
    # The operator's own default need not be among the lifetimes that clients may ask for.
    ttl_s = duration_s(leases.default_ttl) if asked is None else _ttl_s(asked, "prompt_cache_options.ttl", leases)
    explicit = []
    for message, chars, ttl, path, num_media in points:
        takes_default = ttl is None or (path is None and ttl not in leases.ttls)
        own_s = ttl_s if takes_default else _ttl_s(ttl or "", path or "", leases)
        explicit.append(Marker(message, chars, own_s, media=num_media))
    if options.get("mode") == "explicit":
        return Caching(tuple(explicit[-MAX_BREAKPOINTS:]), use_cache=bool(explicit), only_leased=True)
    markers = explicit[1 - MAX_BREAKPOINTS :]
    if asked is not None and (index := _latest_eligible(messages)) is not None:
        num_media = sum(one.message == index for one in media)
        markers.append(Marker(index, len(messages[index]["content"]), ttl_s, media=num_media))
    return Caching(tuple(markers))


def _latest_eligible(messages: Sequence[Any]) -> int | None:
    """The latest user message, the last of a run of tool outputs, or of the initial instructions."""
    roles = [message["role"] for message in messages]
    instructions = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
    eligible = (index for index, role in enumerate(roles) if role in ("user", "tool") or index < instructions)
    return max(eligible, default=None)


def _ttl_s(written: str, path: str, leases: LeaseSettings) -> float:
    try:
        ttl_s = duration_s(written)
    except ValueError:
        ttl_s = 0.0
    if ttl_s not in {duration_s(allowed) for allowed in leases.ttls}:
        raise wrong_value(path, written, leases.ttls)
    return ttl_s
