"""The prologue of every route, in all dialects. A row of the route table (dialect.Route) says which steps it has:

    admit   the tenant, and the request's headers; what an admin changes is in the audit log
    resend  the answer to this very request, sent again (resend.py)
    read    its JSON body, within the limits (body.py); for an alias the next steps are tried per target (router.py)
    pass    the answer of the upstream that serves its model (passthrough.py)
    check   what its dialect wants of every request that is answered here

What is left is the handler's: parse and answer. It finds the tenant under TENANT and the body under BODY.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import web

from gateway.admin.audit import AuditLog
from gateway.api.body import read_json, read_raw
from gateway.api.cache_control import from_headers
from gateway.api.dialect import Handler, Route
from gateway.api.gemini.request import model_name
from gateway.api.gemini.wire import GEMINI
from gateway.api.middleware import DIALECTS, dialect_of
from gateway.api.passthrough import Passthrough
from gateway.api.record import ADMIN_KEY, BODY, ISSUED, RECORD, TENANT, Record
from gateway.api.resend import ResendCache
from gateway.api.router import Router
from gateway.api.tenants import NAMESPACE_HEADER, Auth
from gateway.config import ServerSettings
from gateway.errors import ForbiddenError, ModelNotFoundError
from gateway.issued.directory import Directory
from gateway.limits.limits import TenantLimits
from gateway.types import Allowance, Tenant

_BATCHES: Final = ("/v1/batches", "/v1/messages/batches")
"""Routes that make one."""


@dataclass(frozen=True, slots=True)
class Prologue:
    """The steps. `refuses_unknown`: whether unknown fields of a tenant's requests are refused."""

    server: ServerSettings
    auth: Auth
    limits: TenantLimits
    resends: ResendCache
    passthrough: Passthrough
    router: Router
    refuses_unknown: Callable[[str], bool]
    audit: AuditLog
    directory: Directory

    def handlers(self, routes: Mapping[str, Iterable[Route]]) -> dict[tuple[str, str], Handler]:
        """Method and path -> handler, of the routes of all dialects, by name. What several of them have goes to the one
        that the request speaks."""
        checks = {dialect.name: dialect.check for dialect in DIALECTS}
        found: dict[tuple[str, str], dict[str, Handler]] = {}
        for name, own in routes.items():
            for route in own:
                found.setdefault((route.method, route.path), {})[name] = self._before(name, route, checks.get(name))
        return {key: next(iter(own.values())) if len(own) == 1 else _by_dialect(own) for key, own in found.items()}

    def _before(self, dialect: str, route: Route, check: Callable[[web.Request], object] | None) -> Handler:
        """The route's handler, behind the steps of its row."""
        resends, reads, rest = route.resends, route.reads, self._rest(dialect, route, check)

        async def handler(http: web.Request) -> web.StreamResponse:
            if route.continues is not None and route.continues in http.query:
                return await route.handler(http)
            # 1. Admit.
            may_use: Callable[[str], bool] | None = None
            if route.key == "admin":
                http[ADMIN_KEY] = self.auth.check_admin(http)
            elif route.key == "tenant":
                tenant = self.admit(http)
                if (may_use := http[RECORD].may_use) is not None:
                    _check_model(http, dialect, may_use)
                # 2. Resend. What it has was not looked at for this key's models.
                if resends and may_use is None:
                    sent = await read_raw(http, self.server)
                    if (known := await self.resends.answer(http, tenant, sent)) is not None:
                        return known
            # 3. Read, and find the targets of an alias.
            if reads:
                http[BODY] = await read_json(http, self.server)
                if may_use is not None:
                    _check_model(http, dialect, may_use)
                if route.key == "tenant" and (alias := self.router.find(http)) is not None:
                    return await self.router.answer(http, alias, lambda: rest(http), generates=route.passes is not None)
            return await rest(http)

        return self.audit.noting(route.changes, handler) if route.changes else handler

    def _rest(self, dialect: str, route: Route, check: Callable[[web.Request], object] | None) -> Handler:
        """The steps behind reading, once for each target of an alias."""
        passes = route.passes if route.reads else None

        async def handler(http: web.Request) -> web.StreamResponse:
            # 4. Pass through.
            if passes is not None:
                body = http[BODY]
                model = model_name(http.match_info["model"]) if "model" in http.match_info else body.get("model")
                how = {"metered": passes != "counted", "translated": passes == "translated"}
                passing = self.passthrough.answer(http, http[TENANT], dialect, model, body, **how)
                if (answer := await passing) is not None:
                    return answer
            # 5. Check.
            if check is not None:
                check(http)
            return await route.handler(http)

        return handler

    def admit(self, http: web.Request) -> Tenant:
        """The tenant of a request. Raises UnauthorizedError, ForbiddenError for an admin key, and BadRequestError for a
        header that makes no sense."""
        tenant = http[TENANT] = self.auth.tenant(http)
        record = http[RECORD]
        record.tenant = tenant.name
        if self.directory.has_made:
            self._hold_to_made(http, record, tenant)
        record.ignored.refuse = self.refuses_unknown(tenant.name)
        if self.limits.has_any and (rooms := self.limits.rooms(*record.owners)):
            record.allowance = Allowance(**rooms)
        record.reuse = from_headers(http.headers)
        record.namespace = http.headers.get(NAMESPACE_HEADER, "").strip()
        record.may_have_priority = tenant.priority
        return tenant

    def _hold_to_made(self, http: web.Request, record: Record, tenant: Tenant) -> None:
        """To the key, and the models of it and of its tenant, where admins made them."""
        if (key := http.get(ISSUED)) is not None:
            record.key = key.id
        if self.directory.has_list(tenant.name, key):
            record.may_use = partial(self.directory.allows, tenant.name, key)
        if key is not None and key.models and http.method == "POST" and http.path in _BATCHES:
            raise ForbiddenError("This key is for certain models only, and a batch may name any: use another key.")


def _check_model(http: web.Request, dialect: str, may_use: Callable[[str], bool]) -> None:
    """Of the URL, or of the body once it is read. Raises ModelNotFoundError for one that may not be used."""
    body = http.get(BODY, {})
    model = http.match_info.get("model", body.get("model") if isinstance(body, dict) else None)
    if isinstance(model, str):
        name = model_name(model) if dialect == GEMINI.name else model
        if not may_use(name):
            raise ModelNotFoundError(name)


def _by_dialect(handlers: Mapping[str, Handler]) -> Handler:
    async def handler(http: web.Request) -> web.StreamResponse:
        return await handlers.get(dialect_of(http).name, handlers[DIALECTS[-1].name])(http)

    return handler
