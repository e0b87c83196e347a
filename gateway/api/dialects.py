"""Which dialect a request speaks: three APIs share one port, and some of their paths are the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiohttp import web

from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.dialect import Dialect, Handler, Route
from gateway.api.gemini.wire import GEMINI
from gateway.api.openai.wire import OPENAI

DIALECTS: tuple[Dialect, ...] = (ANTHROPIC, GEMINI, OPENAI)
"""The first that a request speaks; the last takes all that are left."""


def dialect_of(http: web.Request) -> Dialect:
    for dialect in DIALECTS:
        if dialect.speaks(http):
            return dialect
    raise AssertionError("the last one speaks everything")


def handlers_of(routes: Mapping[str, Iterable[Route]]) -> dict[tuple[str, str], Handler]:
    """Method and path -> handler, of the routes of all dialects, by name. What several of them have goes to the one
    that the request speaks."""
    found: dict[tuple[str, str], dict[str, Handler]] = {}
    for name, own in routes.items():
        for route in own:
            found.setdefault((route.method, route.path), {})[name] = route.handler
    return {key: next(iter(own.values())) if len(own) == 1 else _by_dialect(own) for key, own in found.items()}


def _by_dialect(handlers: Mapping[str, Handler]) -> Handler:
    async def handler(http: web.Request) -> web.StreamResponse:
        return await handlers.get(dialect_of(http).name, handlers[DIALECTS[-1].name])(http)

    return handler
