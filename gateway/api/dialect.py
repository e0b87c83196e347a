"""What a dialect brings besides its handlers: its routes, how it writes errors, and the headers of every answer.

A dialect is a value. The middleware finds it by the request alone (dialects.py), also for requests that no route takes,
so that every client gets errors in the shape that its SDK reads. openapi.py describes the routes to clients.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from aiohttp import web

from gateway.api.fields import JsonSchema, Parameter
from gateway.errors import (
    DeadlineError,
    EnginesDiedError,
    KvasirError,
    NotCachedError,
    QuotaError,
    RateLimitError,
    StorageFullError,
    UnauthorizedError,
    UpstreamTimeoutError,
)
from gateway.types import Allowance

JSON = "application/json"
FORM = "multipart/form-data"
BYTES = "application/octet-stream"
SSE = "text/event-stream"
JSONL = "application/x-jsonl"
CHUNKED = frozenset({BYTES, JSONL})
"""Media types that are sent chunk by chunk, in the time that it takes."""

EXAMPLE_MODEL = "demo"

UNLISTED: web.AppKey[frozenset[str]] = web.AppKey("unlisted", frozenset)
"""Paths of an application whose routes refuse everything."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """A row of the route table: what a dialect answers, and which steps of the prologue go before its handler.

    path        as the router takes it: `{name}` is one part of a path, `{name:.+}` any number of them
    summary     one sentence
    parameters  of the JSON body, by name; None: it takes no body
    required    names of those that have to be there
    form        of a multipart/form-data body in place of a JSON one, besides its part `file`
    query       parameters of the URL, by name; their values are strings (fields.read_query)
    media       content types of its answers, the ordinary one first
    example     a body that is answered, whose model is `EXAMPLE_MODEL`, or one that embeds
    key         which key it needs, where the server has any
    changes     of an admin's route: what it changes, in the words of the audit log; empty for nothing
    refuses     every request is an error with the reason; the route is not listed to clients
    json        False: the handler reads the body itself, which `parameters` describe
    continues   parameter of the URL in requests that go on with an admitted one: they have no prologue
    resends     whether an answer to the very same request may be sent again
    passes      whether it goes to an upstream that serves its model; `counted`: the answer has no usage;
                `translated`: also to one that speaks another dialect, by way of the handler
    """

    method: str
    path: str
    handler: Handler
    summary: str
    parameters: Mapping[str, Parameter] | None = None
    required: tuple[str, ...] = ()
    form: Mapping[str, Parameter] | None = None
    query: Mapping[str, Parameter] = MappingProxyType({})
    media: tuple[str, ...] = (JSON,)
    example: Mapping[str, Any] | None = None
    key: Literal["tenant", "admin", "none"] = "tenant"
    changes: str | None = None
    refuses: bool = False
    json: bool = True
    continues: str | None = None
    resends: bool = False
    passes: Literal["metered", "counted", "translated"] | None = None

    @property
    def reads(self) -> bool:
        """Whether its JSON body is read before the handler."""
        return self.json and self.parameters is not None


@dataclass(frozen=True, slots=True)
class Dialect:
    """Pure functions of one API.

    title           as people know it, for the docs
    speaks          whether a request is of this dialect, by its path and headers; never by how it carries its key
    headers         request id, milliseconds since the request arrived -> the headers that every answer carries
    allowance       what the tenant may still send -> the headers that say so, where the API has some
    check           raises BadRequestError for a request that lacks what every route of this API wants, such as a header
    tells_writes    whether its usage has the tokens that were written to the cache, which have a price of their own
    error_json      error, request id -> the body of an error answer
    error_schema    of that body, closed: what every refusal is held to
    asking_headers  of a request, as the docs show them, with KEY for the key
    status          of an error; most dialects keep the error's own
    error_event     name of the event that an error in a stream is, where the API names its events
    unknown         whether a request is for something that does not exist, though its path does
    """

    name: str
    title: str
    speaks: Callable[[web.Request], bool]
    headers: Callable[[str, float], dict[str, str]]
    error_json: Callable[[KvasirError, str], dict[str, Any]]
    error_schema: JsonSchema
    asking_headers: Mapping[str, str]
    status: Callable[[KvasirError], int] = lambda error: error.status
    error_event: str | None = None
    unknown: Callable[[web.Request], bool] = lambda http: False
    allowance: Callable[[Allowance], dict[str, str]] = lambda allowance: {}
    check: Callable[[web.Request], object] | None = None
    tells_writes: bool = True


MOST_RETRY_S: Final = 3600.0
"""No client waits longer for a retry."""


def retry_headers(error: KvasirError) -> dict[str, str]:
    """When to retry, as the OpenAI and Anthropic SDKs and proxies read it. Empty where the status is enough."""
    headers: dict[str, str] = {}
    if isinstance(error, UnauthorizedError) and error.challenge:
        headers["WWW-Authenticate"] = error.challenge
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1e3)))
    hopeless = isinstance(error, QuotaError | StorageFullError | NotCachedError | EnginesDiedError)
    if isinstance(error, DeadlineError | RateLimitError):  # as much time, or more than the tenant ever may send
        hopeless = error.retry_after_s is None or error.retry_after_s > MOST_RETRY_S
    elif isinstance(error, UpstreamTimeoutError):
        hopeless = error.for_good
    if hopeless:  # it would be the same again, or something has to be deleted first
        headers["x-should-retry"] = "false"
    elif error.status in (429, 502, 503, 504):
        headers["x-should-retry"] = "true"
    return headers


def printable(message: str) -> str:
    """A URL may have brought bytes into a message that are no text."""
    return message.encode("utf-8", "replace").decode()
