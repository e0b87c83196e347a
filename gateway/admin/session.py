"""/admin/session: a browser logs in with an admin key, and has a cookie for it (api/sessions.py)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from aiohttp import web

from gateway.api import sessions
from gateway.api.dialect import Route
from gateway.api.fields import Parameter, read, text
from gateway.api.record import ADMIN_KEY, BODY
from gateway.api.replies import reply_json
from gateway.api.sessions import COOKIE, LIFE_S, Session
from gateway.errors import RateLimitError, UnauthorizedError

MAX_CHARS: Final = 4096
TRIES: Final = 10
"""Wrong keys of one address that are answered at once; then one every EVERY_S seconds. Keys in headers are no faster
way to guess one: a key is too long to be guessed at any speed, and this only keeps logs and CPUs quiet."""
EVERY_S: Final = 6.0
MAX_ADDRESSES: Final = 1024
LOG_IN: Final = {"key": Parameter("key", text(MAX_CHARS, 1), "string", "An admin key.")}


class Admins(Protocol):
    """See api/tenants.py."""

    def admin_of(self, key: str) -> bytes | None: ...

    def admin_access(self, http: web.Request) -> tuple[str, Session | None]: ...


class SessionPages:
    """`end` ends a session for all, given its id and the time when it would be over. `now` is in seconds since 1970."""

    def __init__(self, admins: Admins, end: Callable[[str, int], Awaitable[None]], now: Callable[[], float]) -> None:
        self._admins = admins
        self._end = end
        self._now = now
        self._tries = Tries(now)

    def routes(self) -> list[Route]:
        path = "/admin/session"
        return [
            Route("GET", path, self.show, "Whether this browser is logged in, and its CSRF token.", key="none"),
            Route(
                "POST",
                path,
                self.log_in,
                "Logs a browser in with an admin key, for 12 hours.",
                parameters=LOG_IN,
                required=("key",),
                example={"key": "KEY"},
                key="none",
                changes="session begun",
            ),
            Route(
                "DELETE",
                path,
                self.log_out,
                "Ends this browser's session.",
                key="admin",
                changes="session ended",
            ),
        ]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/session: 200 also without a session, which is no error of a page that asks."""
        return _shown(*self._admins.admin_access(http))

    async def log_in(self, http: web.Request) -> web.Response:
        """POST /admin/session"""
        sessions.check_origin(http)
        body = http[BODY]
        key = read(body, LOG_IN, ("key",))["key"].strip()
        if self._admins.admin_access(http)[0] == "open":
            return _shown("open", None)
        address = http.remote or ""
        self._tries.check(address)
        digest = self._admins.admin_of(key)
        if digest is None:
            self._tries.failed(address)
            raise UnauthorizedError("Incorrect admin key provided.")
        http[ADMIN_KEY] = digest  # for the audit log
        cookie, session = sessions.begin(digest, self._now())
        answer = _shown("active", session)
        # A proxy that ends TLS says so; a client that lies about it only loses its own cookie.
        secure = http.secure or http.headers.get("X-Forwarded-Proto", "").strip().lower() == "https"
        answer.set_cookie(
            COOKIE, cookie, path="/admin", max_age=LIFE_S, httponly=True, samesite="Strict", secure=secure
        )
        return answer

    async def log_out(self, http: web.Request) -> web.Response:
        """DELETE /admin/session"""
        _, session = self._admins.admin_access(http)
        if session is not None:
            await self._end(session.id, session.ends_s)
        answer = _shown("none", None)
        answer.del_cookie(COOKIE, path="/admin", httponly=True, samesite="Strict")
        return answer


class Tries:
    """Wrong keys by address, each a bucket that one flows out of every EVERY_S seconds. Another address's attempts
    never count, and a right key in a header is always taken, so that nobody can lock an operator out."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._empty_s: OrderedDict[str, float] = OrderedDict()  # address -> when its bucket is empty

    def check(self, address: str) -> None:
        """Raises RateLimitError."""
        wait_s = self._empty_s.get(address, 0.0) - self._now() - (TRIES - 1) * EVERY_S
        if wait_s > 0:
            message = f"Too many wrong keys from this address. Please try again in {math.ceil(wait_s)}s."
            raise RateLimitError(message, "log-ins", retry_after_s=wait_s)

    def failed(self, address: str) -> None:
        now_s = self._now()
        self._empty_s[address] = max(self._empty_s.get(address, 0.0), now_s) + EVERY_S
        self._empty_s.move_to_end(address)
        if len(self._empty_s) > MAX_ADDRESSES:
            self._empty_s.popitem(last=False)


def _shown(state: str, session: Session | None) -> web.Response:
    """`state`: `open` (no key is needed), `closed` (no key opens it), `none` (a key is needed), or `active`."""
    body: dict[str, Any] = {"state": state, "csrf": None, "ends_s": None}
    if session is not None:
        body |= {"csrf": session.csrf, "ends_s": session.ends_s}
    return reply_json(body, {"Cache-Control": "no-store"})
