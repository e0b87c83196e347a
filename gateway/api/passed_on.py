"""What an upstream is told of a client's request, and what is read out of it for ourselves: headers, query, limits,
cache. Pure; the neighbour is passthrough.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote_plus

from aiohttp import web

from gateway.api.cache_control import check_cache, from_body
from gateway.api.tenants import BYTES_PER_TOKEN, ONLY_COUNTED
from gateway.types import PLAIN_REUSE, Need, Reuse, UpstreamRequest

PASSED_ON: Final = frozenset(
    (
        "accept",
        "anthropic-beta",
        "anthropic-version",
        "content-type",
        "idempotency-key",
        "openai-beta",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-client-request-id",
        "x-goog-api-client",
    )
)
"""Headers of a client that an upstream gets, besides those that begin with x-stainless-. No others: they are for us, or
secrets."""

MAX_ANSWERS: Final = 128
"""To one prompt, that a request is taken to want."""

_MOST: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens")
"""How the APIs call the tokens that an answer may have."""

_KEYS: Final = frozenset(("key", "api_key", "access_token", "$key"))
"""Parameters of a URL that an upstream never gets."""


def reuse_of(values: Mapping[str, Any]) -> Reuse:
    """What the body's `cache` says, which no upstream gets. Raises BadRequestError for what is none of ours."""
    cache = values.get("cache")
    return PLAIN_REUSE if cache is None else from_body(check_cache(cache, "cache"))


def priority_of(values: Mapping[str, Any]) -> int:
    """As vLLM and SGLang call it, and as our own engines' requests have it."""
    given = values.get("priority", 0)
    return given if type(given) is int else 0


def headers_of(http: web.Request) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, value)
        for name, value in lower(http.headers.items())
        if name in PASSED_ON or name.startswith("x-stainless-")
    )


def lower(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in headers]


def need_of(request: UpstreamRequest) -> Need:
    """Of what the request says itself; its prompt is nobody's to count before the upstream has."""
    if not request.metered:
        return ONLY_COUNTED
    values = request.values
    inputs = -(-len(request.body) // BYTES_PER_TOKEN)
    if request.path.endswith("/embeddings"):
        return Need(inputs)
    inside = values.get("generationConfig")
    config: Mapping[str, Any] = inside if isinstance(inside, dict) else {}
    given = {name: config.get(name, values.get(name)) for name in (*_MOST, "n", "candidateCount")}
    most = [given[name] for name in _MOST if type(given[name]) is int]
    answers = next((given[name] for name in ("n", "candidateCount") if type(given[name]) is int), 1)
    return Need(inputs, max(0, most[0]) if most else None, min(max(1, answers), MAX_ANSWERS))


def query_of(raw: str) -> str:
    """Without what may be a key, however it is spelt."""
    parts = [part for part in raw.split("&") if part]
    return "&".join(part for part in parts if unquote_plus(part.partition("=")[0]).strip().lower() not in _KEYS)
