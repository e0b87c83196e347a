"""Who is asking: keys to tenants, wherever the SDKs of the three APIs put them. Keys are kept and compared only as
SHA-256 digests, so that the time of a look-up says nothing about a key, and no key can reach a log.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode
from collections.abc import Sequence

from aiohttp import web

from gateway.config import AuthSettings, TenantSettings
from gateway.errors import ForbiddenError, UnauthorizedError
from gateway.types import ANONYMOUS, Tenant


class Auth:
    """The keys of [auth] and [[tenants]]."""

    def __init__(self, auth: AuthSettings, tenants: Sequence[TenantSettings]) -> None:
        self._tenants = {_digest(key): _tenant(tenant) for tenant in tenants for key in tenant.keys}
        self._admins = {_digest(key) for key in auth.admin_keys}
        self._anonymous = Tenant(ANONYMOUS)

    @property
    def open(self) -> bool:
        """No tenant is configured: everybody is one tenant."""
        return not self._tenants

    def tenant(self, http: web.Request) -> Tenant:
        """Whose request this is. Raises UnauthorizedError, and ForbiddenError for an admin key."""
        if not self._tenants:
            return self._anonymous
        key = _key(http)
        if not key:
            raise _no_key("You didn't provide an API key. Send it as `Authorization: Bearer KEY`.")
        digest = _digest(key)
        if (tenant := self._tenants.get(digest)) is not None:
            return tenant
        if digest in self._admins:
            raise ForbiddenError("This is an admin key, which opens /admin only. Send the key of a tenant.")
        raise UnauthorizedError("Incorrect API key provided.")

    def check_admin(self, http: web.Request) -> bytes:
        """Whether /admin may be read. A digest of the key that opened it; of no key where it is open. Raises
        UnauthorizedError and ForbiddenError."""
        if not self._admins:
            if self._tenants:
                raise ForbiddenError(
                    "/admin is closed: this server has tenants and no admin keys. Set [auth] admin_keys to open it."
                )
            return _digest("")
        key = _bearer(http) or _password(http)
        if not key:
            raise _no_admin_key("/admin needs an admin key, as `Authorization: Bearer KEY` or as a browser's password.")
        digest = _digest(key)
        if digest in self._admins:
            return digest
        if digest in self._tenants:
            raise ForbiddenError("This is the key of a tenant; /admin needs an admin key.")
        raise _no_admin_key("Incorrect admin key provided.", code="invalid_api_key")


def _tenant(settings: TenantSettings) -> Tenant:
    return Tenant(settings.name, weight=settings.weight, priority=settings.priority)


def _key(http: web.Request) -> str:
    """The first that is there: x-api-key (Anthropic, which prefers it to a bearer token), x-goog-api-key, a bearer
    token, and `key` in the URL, as people write it who try Gemini with curl."""
    headers = http.headers
    key = headers.get("x-api-key", "").strip() or headers.get("x-goog-api-key", "").strip() or _bearer(http)
    return key or http.query.get("key", "").strip()


def _bearer(http: web.Request) -> str:
    scheme, _, key = http.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _password(http: web.Request) -> str:
    """Of HTTP Basic (RFC 7617), which a browser asks for; the user's name says nothing. To read alone: a browser sends
    it with whatever a page of somebody else has it ask."""
    scheme, _, value = http.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic" or http.method not in ("GET", "HEAD"):
        return ""
    try:
        return b64decode(value.strip(), validate=True).decode().partition(":")[2].strip()
    except ValueError:  # no base64, or no text
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _no_admin_key(message: str, code: str | None = None) -> UnauthorizedError:
    error = _no_key(message)
    error.code, error.challenge = code, 'Basic realm="Kvasir admin key", charset="UTF-8"'
    return error


def _no_key(message: str) -> UnauthorizedError:
    error = UnauthorizedError(message)
    error.code = None  # `invalid_api_key` is for keys that were sent
    return error
