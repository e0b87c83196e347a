"""Sessions of browsers on /admin: a signed cookie in place of an admin key. Pure: no state and no clock.

    cookie   ENDS_S.NONCE.HMAC(key, "session" ENDS_S NONCE)
    token    HMAC(key, "csrf" cookie), which only a page of this server can read; sent back in CSRF_HEADER

`key` is the SHA-256 of the admin key that logged in. So all workers, and all gateways with the same admin keys, take
the cookie without sharing anything, and none takes it once the key is removed. Logging out makes the browser forget it,
and issued/directory.py remember the nonce of what was ended until it would have been over.

A browser sends cookies on its own, so a page of another site could make it send a request. Three things prevent that,
each by itself: SameSite=Strict, the token, and what the browser says of the page's origin (`check_origin`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from engine.protocol.frozen import dataclass
from gateway.errors import ForbiddenError

COOKIE: Final = "kvasir_session"
CSRF_HEADER: Final = "x-kvasir-csrf"
LIFE_S: Final = 12 * 3600
READS: Final = ("GET", "HEAD")
"""Methods that change nothing."""

_COOKIE: Final = re.compile(r"([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Session:
    """`id` is the nonce, `key` the digest of the admin key that it began with, `csrf` its token."""

    id: str
    key: bytes
    csrf: str
    ends_s: int


def begin(key: bytes, now_s: float) -> tuple[str, Session]:
    """The cookie of a new session, in seconds since 1970."""
    ends_s, nonce = int(now_s) + LIFE_S, secrets.token_hex(16)
    cookie = f"{ends_s}.{nonce}.{_signed(key, 'session', ends_s, nonce)}"
    return cookie, Session(nonce, key, _signed(key, "csrf", cookie), ends_s)


def find(cookie: str, keys: Iterable[bytes], now_s: float) -> Session | None:
    """The session of a cookie. None for one that is forged or over, or whose key is not among `keys`."""
    parts = _COOKIE.fullmatch(cookie)
    if parts is None:
        return None
    ends_s, nonce, signature = int(parts[1]), parts[2], parts[3]
    found = None
    for key in keys:  # all of them: the time says nothing about which it was
        if hmac.compare_digest(signature, _signed(key, "session", ends_s, nonce)):
            found = key
    if found is None or not now_s < ends_s <= now_s + LIFE_S + 1:
        return None
    return Session(nonce, found, _signed(found, f"csrf\n{cookie}"), ends_s)


def check(http: web.Request, session: Session) -> None:
    """Raises ForbiddenError for a request that another site's page may have made the browser send."""
    check_origin(http)
    sent = http.headers.get(CSRF_HEADER, "")
    if http.method not in READS and not hmac.compare_digest(sent.encode(), session.csrf.encode()):
        raise ForbiddenError(f"The session's token is missing or wrong ({CSRF_HEADER}). Please reload the page.")


def check_origin(http: web.Request) -> None:
    """Raises ForbiddenError for what a page of another origin asks for. Programs send none of these headers.

    Browsers say it in Sec-Fetch-Site, over https and on localhost; elsewhere in Origin, which must be this host.
    """
    site, origin = http.headers.get("Sec-Fetch-Site"), http.headers.get("Origin")
    if site is not None:
        own = site in ("same-origin", "none")
    else:
        own = origin is None or urlsplit(origin).netloc.lower() == http.host.lower()
    if not own:
        raise ForbiddenError("Pages of other sites may not use the admin pages with this browser's session.")


def _signed(key: bytes, *fields: str | int) -> str:
    return hmac.new(key, "\n".join(["kvasir", *map(str, fields)]).encode(), hashlib.sha256).hexdigest()
