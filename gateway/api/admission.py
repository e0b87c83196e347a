"""Who asks, and what the request's headers say besides: written into its record before anybody looks at the body. Every
route but those of admins begins here.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from gateway.api.auth import Auth
from gateway.api.cache_control import from_headers
from gateway.api.limiting import Limits
from gateway.api.namespaces import HEADER as NAMESPACE_HEADER
from gateway.api.namespaces import Namespaces
from gateway.api.record import RECORD, Record
from gateway.types import Allowance, Tenant


class Admission:
    """Holds what it takes to tell."""

    def __init__(
        self,
        auth: Auth,
        namespaces: Namespaces,
        limits: Limits,
        refuses_unknown: Callable[[str], bool],
    ) -> None:
        """limits           what tenants may ask for
        refuses_unknown  whether unknown fields of a tenant's requests are refused
        """
        self._auth = auth
        self._namespaces = namespaces
        self._limits = limits
        self._refuses_unknown = refuses_unknown

    def admit(self, http: web.Request) -> Tenant:
        """Whose request this is. Raises UnauthorizedError, ForbiddenError for an admin key, and BadRequestError for a
        header that makes no sense."""
        tenant = self._auth.tenant(http)
        record = http[RECORD]
        record.tenant = tenant.name
        record.ignored.refuse = self._refuses_unknown(tenant.name)
        if rooms := self._limits.rooms(tenant.name):
            record.allowance = Allowance(**rooms)
        record.reuse = from_headers(http.headers)
        record.namespace = http.headers.get(NAMESPACE_HEADER, "").strip()
        record.may_have_priority = tenant.priority
        return tenant

    def check_namespace(self, record: Record, tenant: Tenant) -> None:
        """Raises ForbiddenError for a namespace that the tenant may not use, where nothing is asked in it yet."""
        self._namespaces.scope(record.namespace, tenant)
