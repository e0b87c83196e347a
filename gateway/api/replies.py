"""Answers that are JSON and known as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from gateway.api.dialect import JSON


def reply(body: bytes, **headers: str) -> web.Response:
    """JSON. The middleware adds the headers that every answer carries."""
    return web.Response(body=body, content_type=JSON, headers=headers)


def reply_json(value: Mapping[str, Any], **headers: str) -> web.Response:
    """The same, of what is no JSON yet."""
    return reply(orjson.dumps(value), **headers)
