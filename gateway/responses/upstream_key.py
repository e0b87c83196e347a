"""What makes two requests to an upstream one, and which of them the response cache is for. Pure.

Their bodies are not known here but as JSON: everything in them counts, unknown fields too, except what is known to
change no answer. Names may come in any order where it is certain that no model reads it: those of the body, of a turn,
and of a part of one. Deeper down are schemas, and arguments of earlier calls. Large bodies are the same only byte for
byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.config import ResponseCacheSettings
from gateway.responses.eligibility import Mode, find_refusal
from gateway.responses.key import VERSION
from gateway.types import UpstreamRequest

IGNORED: Final = frozenset(
    ("stream", "stream_options", "user", "metadata", "safety_identifier", "service_tier", "priority", "labels", "cache")
)
"""Of a body's own names. What separates clients (prompt_cache_key, cache_salt) is not among them."""

TURNS: Final = frozenset(("messages", "contents", "input"))
"""Lists of them."""

_PARTS: Final = frozenset(("content", "parts"))
"""Lists of them, of a turn."""

HEADERS: Final = frozenset(("anthropic-beta", "anthropic-version", "openai-beta"))
"""That change an answer, of those that go on to an upstream."""

_STREAM: Final = ":streamGenerateContent"
_WHOLE: Final = ":generateContent"
CALLED: Final = ("tools", "functions", "mcp_servers", "web_search_options", "plugins")
"""What answers may call, at the client or at the upstream."""

_KEPT_THERE: Final = ("store", "background", "container")
"""What has an upstream keep something, or work with what it kept."""

_RESPONSES: Final = "/v1/responses"
_GONE_ON_WITH: Final = ("previous_response_id", "conversation", "prompt")
"""The same of a response, which an upstream keeps as well unless its request says that it is not to be stored."""

_VECTORS: Final = "/v1/embeddings"
"""A text has one vector, whatever is said of sampling."""

_STRICTER: Final = ("on", "ask", "off")

LARGE_BYTES: Final = 1 << 20
"""Of a body. A larger one is not written again in a common form, which would stop all other threads."""

_LEAST, _MOST, _LONGEST = -(2**63), 2**64 - 1, 20
"""Whole numbers that are read exactly, and characters of the longest of them."""

_ALT: Final = frozenset(("alt=json", "alt=sse"))
"""Parameters of a URL that say whether a Gemini answer streams. Another `alt` is another form, which others are not to
get."""


def route_of(request: UpstreamRequest) -> str:
    """The route, the same whether it streams or not, and in which version of its API."""
    if "{model}" in request.path:
        return _WHOLE if request.path.endswith((_STREAM, _WHOLE)) else request.path
    return request.path


def streams(request: UpstreamRequest) -> bool:
    return request.path.endswith(_STREAM) or request.values.get("stream") is True


def include_usage(request: UpstreamRequest) -> bool:
    """Whether a stream of the OpenAI API is to tell its usage."""
    options = request.values.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def is_large(request: UpstreamRequest) -> bool:
    """Whether only the same bytes are the same request, and none means the same."""
    return len(request.body) > LARGE_BYTES


def upstream_key(request: UpstreamRequest, whose: str) -> bytes:
    """32 bytes. `whose` says which upstreams and models answer it."""
    if is_large(request):
        hashed = hashlib.sha256(_digest("large upstream", request, {}, whose))
        hashed.update(request.body)
        return hashed.digest()
    return _digest("upstream", request, request.values, whose)


def situation_digest(request: UpstreamRequest, without: Mapping[str, Any], whose: str) -> bytes:
    """32 bytes, of everything but a text that `without` has no more of its values."""
    return _digest("upstream situation", request, without, whose)


def _digest(kind: str, request: UpstreamRequest, said: Mapping[str, Any], whose: str) -> bytes:
    parts = (
        ("kvasir", kind, VERSION),
        ("scope", request.owner.salt, request.reuse.partition),
        ("route", request.dialect, route_of(request), request.model, whose),
        ("query", sorted(part for part in request.query.split("&") if part and part not in _ALT)),
        ("headers", sorted(item for item in request.headers if item[0] in HEADERS)),
        ("body", _canonical(said)),
    )
    return hashlib.sha256(orjson.dumps(parts)).digest()


def _canonical(said: Mapping[str, Any]) -> dict[str, Any]:
    """A body in which the order of names says nothing that no model reads."""
    return {
        name: list(map(_turn, value)) if name in TURNS and type(value) is list else value
        for name, value in sorted(said.items())
        if name not in IGNORED
    }


def _turn(turn: Any) -> Any:
    if type(turn) is not dict:
        return turn
    return {
        name: list(map(_part, value)) if name in _PARTS and type(value) is list else value
        for name, value in sorted(turn.items())
    }


def _part(part: Any) -> Any:
    return dict(sorted(part.items())) if type(part) is dict else part


def find_upstream_bypass(
    request: UpstreamRequest, settings: ResponseCacheSettings, mode: Mode, *, known: bool
) -> str | None:
    """As eligibility.find_bypass, with the stricter of its `mode` and that of upstreams, and

    route     answers of this route, or in this form, are not kept; `known` is whether they could be
    stateful  the upstream is to keep something of it
    names     it has a name twice
    numbers   it has a whole number that some parsers round, so that another request would look alike here
    """
    values, reuse = request.values, request.reuse
    if request.path != _VECTORS:
        mode = max(mode, settings.upstreams, key=_STRICTER.index)
    if (reason := find_refusal(reuse, mode)) is not None:
        return reason
    if not known or not request.metered or (request.path.endswith(_STREAM) and not _is_sse(request)):
        return "route"
    if _is_stateful(request):
        return "stateful"
    if any(values.get(name) not in (None, []) for name in CALLED) and not (settings.tool_calls or reuse.asked):
        return "tools"
    if not (settings.requests == "all" or reuse.asked or request.path == _VECTORS or _deterministic(values)):
        return "sampling"
    return _find_odd(request)


def _is_sse(request: UpstreamRequest) -> bool:
    return "alt=sse" in request.query.split("&")


def _find_odd(request: UpstreamRequest) -> str | None:
    """Parsers differ in which of two names they take, and in how they read long numbers: the upstream might answer
    another request than the one that was looked for here, and its answer would be kept for who asks the latter."""
    if is_large(request) or orjson.dumps(request.values) == request.body:  # as most clients write it
        return None
    try:
        json.loads(request.body, object_pairs_hook=_once, parse_int=_exact)
    except _OddError as odd:
        return odd.reason
    return None


class _OddError(Exception):
    def __init__(self, reason: str) -> None:
        self.reason = reason


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(named := dict(members)) != len(members):
        raise _OddError("names")
    return named


def _exact(written: str) -> None:
    """What fits into 64 bits is read as it is written."""
    if len(written) > _LONGEST or not _LEAST <= int(written) <= _MOST:
        raise _OddError("numbers")


def _is_stateful(request: UpstreamRequest) -> bool:
    values = request.values
    options = values.get("prompt_cache_options")
    if isinstance(options, dict) and (options.get("prewarm") or options.get("comparison_response_id")):
        return True
    if request.path != _RESPONSES:
        return any(values.get(name) for name in _KEPT_THERE)
    if values.get("store") is not False or any(values.get(name) for name in (*_KEPT_THERE, *_GONE_ON_WITH)):
        return True
    items = values.get("input")
    types = [item.get("type") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return "item_reference" in types


def _deterministic(values: Mapping[str, Any]) -> bool:
    """As the client asks for it. How far an upstream keeps to a seed is its own."""
    inside = sampling_of(values)
    temperature = inside.get("temperature")
    return (type(temperature) in (int, float) and temperature == 0) or type(inside.get("seed")) is int


def sampling_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a body says how its answer is sampled."""
    config = values.get("generationConfig") or values.get("generation_config")
    return config if isinstance(config, dict) else values
