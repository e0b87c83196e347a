"""Answers that are JSON and known as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from gateway.api.dialect import JSON


def reply(body: bytes, headers: Mapping[str, str] | None = None, *, status: int = 200) -> web.Response:
    """JSON. The middleware adds the headers that every answer carries."""
    return web.Response(body=body, status=status, content_type=JSON, headers=headers)


def reply_json(
    value: Mapping[str, Any], headers: Mapping[str, str] | None = None, *, status: int = 200
) -> web.Response:
    """The same, of what is no JSON yet; mappings in it become objects."""
    return reply(orjson.dumps(value, default=dict), headers, status=status)
