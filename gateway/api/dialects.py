"""Which dialect a request speaks: three APIs share one port, and some of their paths are the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiohttp import web

from gateway.api.dialect import Dialect, Handler, Route
from gateway.api.openai.wire import OPENAI

DIALECTS: tuple[Dialect, ...] = (OPENAI,)
"""The first that a request speaks; the last takes all that are left."""


def dialect_of(http: web.Request) -> Dialect:
    return next(dialect for dialect in DIALECTS if dialect.speaks(http))


def merge(routes: Mapping[str, Iterable[Route]]) -> list[Route]:
    """The routes of all dialects, by name, as one list; what several of them have on one path goes to the request's."""
    handlers: dict[tuple[str, str], dict[str, Handler]] = {}
    for name, own in routes.items():
        for method, path, handler in own:
            handlers.setdefault((method, path), {})[name] = handler
    return [
        (method, path, next(iter(found.values())) if len(found) == 1 else _by_dialect(found))
        for (method, path), found in handlers.items()
    ]


def _by_dialect(handlers: Mapping[str, Handler]) -> Handler:
    async def handler(http: web.Request) -> web.StreamResponse:
        return await handlers.get(dialect_of(http).name, handlers[DIALECTS[-1].name])(http)

    return handler
