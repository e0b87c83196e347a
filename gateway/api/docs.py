"""GET /openapi.json and GET /docs: what this server takes and answers, made of the routes once, at the start.

Neither needs a key: both tell what the software is, and nothing of its tenants, models or settings.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from gateway.api.dialect import EXAMPLE_MODEL, JSON, Dialect, Route
from gateway.api.openapi import OWN, document, template

HTML = "text/html"
SAFE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Content-Type-Options": "nosniff"}

_BASE = "http://kvasir.invalid"  # stands in the page where the server's own address goes
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
_CODE = re.compile(r"`([^`]+)`")


class Docs:
    """Holds the two pages, each written when it is first read."""

    def __init__(self, routes: Mapping[str, Sequence[Route]], dialects: Sequence[Dialect], version: str) -> None:
        """`routes` are those of all dialects, and the gateway's own without these two."""
        own = [*routes.get(OWN, ()), *self._own()]
        self.routes: dict[str, Sequence[Route]] = {**routes, OWN: own}
        """With these two."""
        self._listed = {name: [route for route in own if not route.refuses] for name, own in self.routes.items()}
        self._dialects, self._version = dialects, version
        self._document: bytes | None = None
        self._page: str | None = None

    def _own(self) -> list[Route]:
        return [
            Route("GET", "/openapi.json", self.openapi, "All routes as an OpenAPI 3.1 document.", key="none"),
            Route("GET", "/docs", self.page, "All routes as a page to read.", media=(HTML,), key="none"),
        ]

    async def openapi(self, http: web.Request) -> web.Response:
        """GET /openapi.json"""
        if self._document is None:  # in a thread: it takes 30 to 80 ms
            written = await asyncio.to_thread(document, self._listed, self._dialects, self._version)
            self._document = orjson.dumps(written)
        return web.Response(body=self._document, content_type=JSON)

    async def page(self, http: web.Request) -> web.Response:
        """GET /docs"""
        if self._page is None:
            self._page = await asyncio.to_thread(_page, self._listed, self._dialects, self._version)
        page = self._page.replace(_BASE, str(escape(base_url(http))))
        return web.Response(text=page, content_type=HTML, headers=SAFE)


def base_url(http: web.Request) -> str:
    """The URL of this server, from the request's Host if that has only characters that are safe in pages and shells."""
    host = http.host if _HOST.fullmatch(http.host) else "localhost"
    return f"{http.scheme}://{host}"


def curl(route: Route, headers: Mapping[str, str], base: str) -> str:
    """A command that calls this route."""
    path = template(route.path).replace("{model}", EXAMPLE_MODEL)
    path = re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), path)
    words = ["curl", *(() if route.method == "GET" else ("-X", route.method)), shlex.quote(base + path)]
    lines = [" ".join(words)]
    if route.key != "none":
        lines += [f"-H {shlex.quote(f'{name}: {value}')}" for name, value in headers.items()]
    if route.example is not None:
        lines.append(f"-d {shlex.quote(json.dumps(route.example, ensure_ascii=False))}")
    if route.form is not None:
        lines.append("-F file=@FILE")
    return " \\\n  ".join(lines)


def _page(routes: Mapping[str, Sequence[Route]], dialects: Sequence[Dialect], version: str) -> str:
    by_name = {dialect.name: dialect for dialect in dialects}
    chapters = [
        {
            "name": name,
            "title": by_name[name].title if name in by_name else "The gateway itself",
            "routes": [_shown(name, route, by_name.get(name, dialects[-1])) for route in own],
        }
        for name, own in routes.items()
    ]
    source = files(__package__).joinpath("docs.html").read_text(encoding="utf-8")
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters["code"] = _code
    return pages.from_string(source).render(chapters=chapters, version=version, base=_BASE)


def _shown(name: str, route: Route, dialect: Dialect) -> dict[str, Any]:
    table = [*(route.parameters or {}).values(), *(route.form or {}).values()]
    effects = [
        ("Parameters", [one for one in table if one.effect == "used"]),
        ("Accepted without effect", [one for one in table if one.effect == "none"]),
        ("Left out", [one for one in table if one.effect == "left_out"]),
        ("Refused", [one for one in table if one.effect == "refused"]),
        ("In the URL", list(route.query.values())),
    ]
    path = template(route.path)
    return {
        "id": "-".join([name, route.method.lower(), *re.findall(r"\w+", path)]),
        "method": route.method,
        "path": path,
        "summary": route.summary,
        "key": route.key,
        "tables": [(heading, rows) for heading, rows in effects if rows],
        "curl": curl(route, dialect.asking_headers, _BASE),
    }


def _code(text: str) -> Markup:
    """Text with `code` in it."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 -- escaped
