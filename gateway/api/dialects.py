"""Which dialect a request speaks: three APIs share one port, and some of their paths are the same."""

from __future__ import annotations

from aiohttp import web

from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.dialect import Dialect
from gateway.api.gemini.wire import GEMINI
from gateway.api.openai.wire import OPENAI

DIALECTS: tuple[Dialect, ...] = (ANTHROPIC, GEMINI, OPENAI)
"""The first that a request speaks; the last takes all that are left."""


def dialect_of(http: web.Request) -> Dialect:
    for dialect in DIALECTS:
        if dialect.speaks(http):
            return dialect
    raise AssertionError("the last one speaks everything")
