"""/dashboard: static files, which need no key: they have no data, and fetch it from /admin with a session.

Knows nothing of what the pages show. Every file of `static/` is read when the gateway starts, and nothing else is
served: what a URL names is looked up among these, so that no path leads anywhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from aiohttp import web

from gateway.api.dialect import Route
from gateway.errors import NotFoundError

TYPES: Final = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again every time, and not sent again while the ETag is the same
}
INDEX: Final = "index.html"


class File(NamedTuple):
    body: bytes
    content_type: str
    etag: str


def routes() -> list[Route]:
    found, path = _found(), "/dashboard"

    async def page(http: web.Request) -> web.Response:
        """GET /dashboard"""
        return _answer(http, found[INDEX])

    async def file(http: web.Request) -> web.Response:
        """GET /dashboard/{file}"""
        name = http.match_info["file"]
        if not name:  # the page's own addresses are relative, so that a proxy may put a path before them
            return web.Response(status=303, headers={"Location": "../dashboard"})
        if name not in found:
            raise NotFoundError(f"The dashboard has no file `{name[:200]}`.")
        return _answer(http, found[name])

    media = tuple(TYPES.values())
    return [
        Route(
            "GET", path, page, "What was saved, what was not, and why: pages for a browser.", media=media, key="none"
        ),
        Route("GET", f"{path}/{{file:.*}}", file, "A file of these pages.", media=media[1:], key="none"),
    ]


@cache
def _found() -> Mapping[str, File]:
    """Path below `static` -> file."""
    every = _walk(files(__package__).joinpath("static"))
    return {name: File(body, TYPES[name.rpartition(".")[2]], _etag(body)) for name, body in every.items()}


def _walk(folder: Traversable, prefix: str = "") -> Mapping[str, bytes]:
    found: dict[str, bytes] = {}
    for one in folder.iterdir():
        name = f"{prefix}{one.name}"
        found |= _walk(one, f"{name}/") if one.is_dir() else {name: one.read_bytes()}
    return found


def _etag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


def _answer(http: web.Request, file: File) -> web.Response:
    headers = {**HEADERS, "ETag": f'"{file.etag}"'}
    if any(tag.value in (file.etag, "*") for tag in http.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)
