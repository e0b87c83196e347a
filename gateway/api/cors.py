"""Cross-origin requests of browsers (the Fetch standard): which pages may read answers. None, unless the operator names
their origins. Keys come in headers and never in cookies, so nothing is said of credentials.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from aiohttp import web

MAX_AGE_S: Final = 600
"""For which a browser remembers what a preflight said; Chrome takes no more than two hours."""

_METHODS: Final = "GET, HEAD, POST, PATCH, DELETE"
_NOTHING: Final[Mapping[str, str]] = {}


class Cors:
    """`origins` are those of server.cors_origins."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, http: web.Request) -> Mapping[str, str]:
        """Of every answer to this request, errors and streams too."""
        origin = http.headers.get("Origin") if self._origins else None
        if origin is None:
            return _NOTHING
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": "*"}
        if origin not in self._origins:
            return _NOTHING
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    def preflight(self, http: web.Request) -> web.Response | None:
        """The answer to a preflight of an origin that is allowed, without `headers`. It asks for no key and no route:
        the request itself will."""
        asked = http.headers.get("Access-Control-Request-Method")
        if http.method != "OPTIONS" or asked is None or not self.headers(http):
            return None
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted := http.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = wanted  # `*` would leave out Authorization
        return web.Response(status=204, headers=headers)
