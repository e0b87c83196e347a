"""The tenant of a request, its namespace, and its limits.

Keys are stored and compared only as SHA-256 digests, so that the time of a look-up says nothing about a key, and no key
can reach a log. A request's need of its tenant's limits is set aside before its tokens are known: a prompt counts as
one token for every four bytes of the request, or characters of the prompt where those are more, as in a stored
conversation; prompts that come as tokens are counted. The middleware settles the need when the request is over.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from functools import lru_cache
from hmac import compare_digest
from typing import Final, Literal

from aiohttp import web

from engine.protocol import TOKEN_BYTES
from gateway.api import sessions
from gateway.api.call import Call
from gateway.api.fields import shown
from gateway.api.record import ISSUED, Record
from gateway.api.sessions import Session
from gateway.config import ALL_TENANTS, PRIVATE, AuthSettings, CacheKeyMode, NamespaceSettings, TenantSettings
from gateway.digests import key_digest
from gateway.errors import ForbiddenError, UnauthorizedError
from gateway.issued.directory import Directory
from gateway.limits.limits import TenantLimits
from gateway.types import ANONYMOUS, ChatPrompt, Need, Prompt, Scope, Tenant, TextPrompt, TokenPrompt, elapsed_ms

NAMESPACE_HEADER = "x-kvasir-namespace"
MAX_SCOPES = 1024  # that are remembered; a kilobyte each, with the longest key and salt

AdminAccess = Literal["open", "closed", "none", "active"]
_SCRIPTED: Final = ("application/json", "text/event-stream")
"""What the dashboard accepts."""

BYTES_PER_TOKEN: Final = 4
IMAGE_TOKENS: Final = 1_000
"""About what an image counts for, whatever its bytes."""

ONLY_COUNTED: Final = Need(generates=False)
"""Of a request that has its tokens counted."""


class Auth:
    """The keys of [auth] and [[tenants]], and those that admins made."""

    def __init__(
        self,
        auth: AuthSettings,
        tenants: Sequence[TenantSettings],
        directory: Directory,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`directory` has the keys that admins made and the sessions they ended. `now` is in seconds since 1970."""
        self._now = now
        self._directory = directory
        self._anonymous = Tenant(ANONYMOUS)
        self.replace(auth, tenants)

    def replace(self, auth: AuthSettings, tenants: Sequence[TenantSettings]) -> None:
        """From now on these keys hold."""
        self._named = {one.name: Tenant(one.name, weight=one.weight, priority=one.priority) for one in tenants}
        self._tenants = {key_digest(key): self._named[one.name] for one in tenants for key in one.keys}
        self._admins = {key_digest(key) for key in auth.admin_keys}

    def tenant(self, http: web.Request) -> Tenant:
        """The tenant of a request. Raises UnauthorizedError, and ForbiddenError for an admin key."""
        if not self._tenants:
            return self._anonymous
        key = _key(http)
        if not key:
            raise _no_key("You didn't provide an API key. Send it as `Authorization: Bearer KEY`.")
        digest = key_digest(key)
        if (tenant := self._tenants.get(digest)) is not None:
            return tenant
        if (issued := self._directory.find(digest.hex())) is not None and issued.tenant in self._named:
            http[ISSUED] = issued
            return self._named[issued.tenant]
        if digest in self._admins:
            raise ForbiddenError("This is an admin key, which opens /admin only. Send the key of a tenant.")
        raise UnauthorizedError("Incorrect API key provided.")

    def check_admin(self, http: web.Request) -> bytes:
        """Whether /admin may be read, or changed by what is no GET. A digest of the key that opened it, or that the
        browser's session began with; of no key where it is open. Raises UnauthorizedError and ForbiddenError."""
        state, session = self.admin_access(http)
        if state == "closed":
            raise ForbiddenError(
                "/admin is closed: this server has tenants and no admin keys. Set [auth] admin_keys to open it."
            )
        if state == "open":
            if http.method not in sessions.READS:
                sessions.check_origin(http)
            return key_digest("")
        key = _bearer(http) or _password(http)
        if not key and session is not None:
            sessions.check(http, session)
            return session.key
        if not key:
            raise _no_admin_key(
                http, "/admin needs an admin key, as `Authorization: Bearer KEY` or as a browser's password."
            )
        if (admin := self.admin_of(key)) is not None:
            return admin
        digest = key_digest(key)
        if digest in self._tenants or self._directory.find(digest.hex()) is not None:
            raise ForbiddenError("This is the key of a tenant; /admin needs an admin key.")
        raise _no_admin_key(http, "Incorrect admin key provided.", code="invalid_api_key")

    def admin_access(self, http: web.Request) -> tuple[AdminAccess, Session | None]:
        """What a browser without a key in its headers may do: `open` and `closed` for all; `active` with a session."""
        if not self._admins:
            return ("closed" if self._tenants else "open"), None
        session = sessions.find(http.cookies.get(sessions.COOKIE, ""), self._admins, self._now())
        if session is None or self._directory.has_ended(session.id):
            return "none", None
        return "active", session

    def admin_of(self, key: str) -> bytes | None:
        """The digest of an admin key, in a time that does not depend on the key."""
        digest = key_digest(key)
        return digest if sum(compare_digest(digest, admin) for admin in self._admins) else None


def _key(http: web.Request) -> str:
    """The first that is there: x-api-key (Anthropic, which prefers it to a bearer token), x-goog-api-key, a bearer
    token, and `key` in the URL, as in examples of Gemini with curl."""
    headers = http.headers
    key = headers.get("x-api-key", "").strip() or headers.get("x-goog-api-key", "").strip() or _bearer(http)
    return key or http.query.get("key", "").strip()


def _bearer(http: web.Request) -> str:
    scheme, _, key = http.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _password(http: web.Request) -> str:
    """Of HTTP Basic (RFC 7617), which a browser prompts for; the user's name is ignored. For reading only: a browser
    also sends it with requests of other sites' pages."""
    scheme, _, value = http.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic" or http.method not in ("GET", "HEAD"):
        return ""
    try:
        return b64decode(value.strip(), validate=True).decode().partition(":")[2].strip()
    except ValueError:  # no base64, or no text
        return ""


def _no_admin_key(http: web.Request, message: str, code: str | None = None) -> UnauthorizedError:
    """A page's own script must not make the browser ask for a password: only who opens a page is asked."""
    error = _no_key(message)
    scripted = http.headers.get("Accept", "").startswith(_SCRIPTED)
    error.code, error.challenge = code, f'{"Bearer" if scripted else "Basic"} realm="Kvasir admin key", charset="UTF-8"'
    return error


def _no_key(message: str) -> UnauthorizedError:
    error = UnauthorizedError(message)
    error.code = None  # `invalid_api_key` is for keys that were sent
    return error


class Namespaces:
    """The namespaces of [[namespaces]]."""

    def __init__(
        self, namespaces: Sequence[NamespaceSettings], tenants: Sequence[TenantSettings], cache_key: CacheKeyMode
    ) -> None:
        """`cache_key`: what keys of tenants do that have no setting of their own."""
        self._cache_key = cache_key
        self.replace(namespaces, tenants)

    def replace(self, namespaces: Sequence[NamespaceSettings], tenants: Sequence[TenantSettings]) -> None:
        """From now on there are these."""
        self._cache_keys = {tenant.name: tenant.cache_key for tenant in tenants if tenant.cache_key is not None}
        self._tenants = {namespace.name: frozenset(namespace.tenants) for namespace in namespaces}
        self._defaults = [namespace for namespace in namespaces if namespace.default]

    def scope(self, requested: str, tenant: Tenant, *, key: str = "", cache_salt: str = "") -> Scope:
        """`requested` is what the request's header names, or nothing. `key` and `cache_salt` are the client's, and
        separate requests inside of a namespace too; the key only where it is not a hint.

        Raises ForbiddenError for a namespace that does not exist or is not for this tenant; which, is not told.
        """
        key = self.separating_key(tenant, key)
        name = requested or self._default(tenant)
        if name == PRIVATE:
            return _scope(tenant.name, "", key, cache_salt)
        if not _may_use(tenant, self._tenants.get(name, frozenset())):
            raise ForbiddenError(f"There is no namespace `{shown(name)}` that you may use ({NAMESPACE_HEADER}).")
        return _scope("", name, key, cache_salt)

    def separating_key(self, tenant: Tenant, key: str) -> str:
        """The key, or nothing where the tenant's keys are hints for routing."""
        return key if self._cache_keys.get(tenant.name, self._cache_key) == "separate" else ""

    def _default(self, tenant: Tenant) -> str:
        for namespace in self._defaults:
            if _may_use(tenant, namespace.tenants):
                return namespace.name
        return PRIVATE


@lru_cache(maxsize=MAX_SCOPES)
def _scope(tenant: str, namespace: str, key: str, cache_salt: str) -> Scope:
    """One object for equal scopes: its salt is computed once."""
    return Scope(tenant, namespace, key, cache_salt)


def _may_use(tenant: Tenant, tenants: Sequence[str] | frozenset[str]) -> bool:
    return tenant.name in tenants or ALL_TENANTS in tenants


async def set_aside(limits: TenantLimits, record: Record, need: Callable[[], Need], model: str | None = None) -> None:
    """Once for each request. Raises RateLimitError. Nothing happens without limits and a budget, of the tenant or its
    key, and of the batch lane only money is set aside. `model` is the record's where it is not given."""
    if limits.has_any:
        await _set_aside(limits, record, need, model)
    if record.span is not None:
        record.admitted_ms = elapsed_ms(record)


async def _set_aside(limits: TenantLimits, record: Record, need: Callable[[], Need], model: str | None) -> None:
    owners, budgets = record.owners, limits.budgets
    if record.hold is None and record.lane != "batch" and limits.has(*owners):
        try:
            record.hold = await limits.set_aside(owners, need())
        finally:
            if record.allowance is not None:
                record.allowance = record.allowance._replace(**limits.rooms(*owners))
    model = model or record.model
    if budgets is not None and budgets.has(*owners) and record.money is None and model is not None:
        try:
            record.money = await limits.set_money_aside(owners, model, need(), at_batch_price=record.at_batch_price)
        finally:
            record.budget = budgets.header(*owners)


def need_of(call: Call, body_bytes: int, context_tokens: int) -> Need:
    """`body_bytes` are those of the request, decoded."""
    tokens = min(call.sampling.max_tokens, context_tokens) or None
    answers = 0 if call.prewarm else len(call.prompts) * call.choices.best_of
    return Need(_prompt_tokens(call.prompts, body_bytes), tokens, answers)


def _prompt_tokens(prompts: tuple[Prompt, ...], body_bytes: int) -> int:
    chars = tokens = 0
    for prompt in prompts:
        match prompt:
            case TokenPrompt():
                tokens += len(prompt.tokens) // TOKEN_BYTES
            case TextPrompt():
                chars += len(prompt.text)
            case ChatPrompt():
                chars += sum(len(message["content"] or "") for message in prompt.messages)
                images = [len(one.data) for one in prompt.media if one.kind == "image"]
                tokens, body_bytes = tokens + IMAGE_TOKENS * len(images), body_bytes - sum(images)
    if tokens and not chars:
        return tokens
    return tokens + -(-max(chars, body_bytes) // BYTES_PER_TOKEN)
