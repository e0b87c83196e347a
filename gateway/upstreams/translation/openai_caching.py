"""The caching hints of a request as OpenAI's APIs have them. Pure.

    prompt_cache_breakpoint   gpt-5.6 and later: at the end of each marked part, for 30 minutes or 12 hours, and no
                              implicit one beside them
    prompt_cache_key          all models of OpenAI: of the client's own key, or of how a marked prompt begins, and of
                              the scope that shares it; tenants behind one key of an upstream share nothing by chance

Tools, calls and a text of no part cannot be marked: what lies before them is. Other models are sent nothing: servers
of others refuse fields that they do not know, or cache whatever begins alike.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from gateway.digests import feed
from gateway.types import ChatPrompt, Marker, Media, Request
from gateway.upstreams.translation.base import Place, num_instructions, pieces, text_of

OPENAI: Final = re.compile(r"(openai/|ft:)?(gpt-\d|chatgpt-|chat-latest|codex-|o\d)")
_NUMBERED: Final = re.compile(r"(?:openai/|ft:)?gpt-(\d+)(?:\.(\d+))?")
_FIRST: Final = (5, 6)
_LONG_FROM_S: Final = (1800 + 43_200) / 2
"""Times to live from here on are nearer to 12 hours than to 30 minutes."""

Json = dict[str, Any]
Marks = dict[int, dict[Place, float]]
"""Number of a message -> place in it, up to which a prefix is cached -> seconds."""


def takes_breakpoints(model: str) -> bool:
    found = _NUMBERED.match(model)
    return found is not None and (int(found[1]), int(found[2] or 0)) >= _FIRST


def marks_of(chat: ChatPrompt, model: str, roles: Collection[str]) -> Marks:
    """Where the breakpoints of a prompt are, for a model that takes some. `roles` are those whose texts may be
    marked."""
    marks: Marks = {}
    for marker in chat.markers if takes_breakpoints(model) else ():
        message, place = _end(chat, marker)
        while message >= 0 and (place <= (0, 0) or chat.messages[message]["role"] not in roles):
            message -= 1
            place = _whole(chat, message)
        if message >= 0:
            own = marks.setdefault(message, {})
            own[place] = max(marker.ttl_s, own.get(place, 0.0))
    return marks


def _end(chat: ChatPrompt, marker: Marker) -> tuple[int, Place]:
    """Message and place. A tool is marked with the instructions behind it, which are the next text."""
    if marker.tool is not None:
        message = num_instructions(chat.messages) - 1
    elif marker.call is None:
        return marker.message, (marker.chars, marker.media)
    else:
        message = marker.message
    return message, _whole(chat, message)


def _whole(chat: ChatPrompt, message: int) -> Place:
    if message < 0:
        return 0, 0
    return len(text_of(chat.messages[message])), sum(one.message == message for one in chat.media)


def parts(
    text: str, media: Sequence[Media], marks: Mapping[Place, float], write: Callable[[str | Media], Json]
) -> list[Json]:
    """The content of a message in parts that end where it is marked, each written so."""
    return [write(piece) | _point(marks.get(place)) for piece, place in pieces(text, media, marks)]


def _point(ttl_s: float | None) -> Json:
    if ttl_s is None:
        return {}
    return {"prompt_cache_breakpoint": {"mode": "explicit"} | ({"ttl": "12h"} if ttl_s >= _LONG_FROM_S else {})}


def options_of(request: Request, chat: ChatPrompt, model: str, marks: Marks) -> Json:
    """`prompt_cache_key` and `prompt_cache_options`, where they say something."""
    options: Json = {"prewarm": True} if request.prewarm else {}
    if takes_breakpoints(model) and (marks or not request.use_cache):
        options["mode"] = "explicit"
    own = request.affinity or (request.scope.key if request.scope is not None else "")
    keyed = OPENAI.match(model) and request.use_cache and (own or chat.markers)
    return {
        "prompt_cache_key": _key(request.salt, own or _beginning(chat)) if keyed else None,
        "prompt_cache_options": options,
    }


def _key(*values: Any) -> str:
    hashed = hashlib.sha256()
    feed(hashed, values)
    return f"kvasir-{hashed.hexdigest()[:24]}"


def _beginning(chat: ChatPrompt) -> Sequence[Any]:
    """What all turns of a conversation share: up to the first marker, or to the end of the user's first turn, where
    that comes before. A marker that moves on with each turn makes no other key."""
    tools = [(tool.name, tool.description, tool.parameters) for tool in chat.tools]
    ends = [(marker.message, marker.chars) for marker in chat.markers if marker.tool is None and marker.call is None]
    if len(ends) < len(chat.markers) and any(marker.tool is not None for marker in chat.markers):
        return tools
    users = [at for at, message in enumerate(chat.messages) if message["role"] == "user"]
    ends += [(at, len(text_of(chat.messages[at]))) for at in users[:1]]
    last, chars = min(ends, default=(0, 0))
    texts = [(message["role"], text_of(message)) for message in chat.messages[: last + 1]]
    texts[-1:] = [(texts[-1][0], texts[-1][1][:chars])]
    return [tools, texts]
