"""Whose blocks a request may share: its tenant's own, or those of a namespace that the operator named for several.

A tenant asks for a namespace with a header, or is put into one by the settings. Knows nothing of prompts; the scope it
makes becomes the salt that every block hash starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gateway.api.fields import shown
from gateway.config import EVERYBODY, PRIVATE, CacheKeyMode, NamespaceSettings, TenantSettings
from gateway.errors import ForbiddenError
from gateway.types import Scope, Tenant

HEADER = "x-kvasir-namespace"
MAX_SCOPES = 1024  # that are remembered; a kilobyte each, with the longest key and salt


class Namespaces:
    """The namespaces of [[namespaces]]."""

    def __init__(
        self, namespaces: Sequence[NamespaceSettings], tenants: Sequence[TenantSettings], cache_key: CacheKeyMode
    ) -> None:
        """`cache_key`: what keys of tenants do that have no setting of their own."""
        self._cache_key = cache_key
        self._cache_keys = {tenant.name: tenant.cache_key for tenant in tenants if tenant.cache_key is not None}
        self._tenants = {namespace.name: frozenset(namespace.tenants) for namespace in namespaces}
        self._defaults = [namespace for namespace in namespaces if namespace.default]

    def scope(self, asked: str, tenant: Tenant, *, key: str = "", cache_salt: str = "") -> Scope:
        """`asked` is what the request's header names, or nothing. `key` and `cache_salt` are the client's, and separate
        requests inside of a namespace too; the key only where it is not a hint.

        Raises ForbiddenError for a namespace that does not exist or is not for this tenant; which, is not told.
        """
        key = self.separating_key(tenant, key)
        name = asked or self._default(tenant)
        if name == PRIVATE:
            return _scope(tenant.name, "", key, cache_salt)
        if not _may_use(tenant, self._tenants.get(name, frozenset())):
            raise ForbiddenError(f"There is no namespace `{shown(name)}` that you may use ({HEADER}).")
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
    """The same object for the same scope: its salt is made once."""
    return Scope(tenant, namespace, key, cache_salt)


def _may_use(tenant: Tenant, tenants: Sequence[str] | frozenset[str]) -> bool:
    return tenant.name in tenants or EVERYBODY in tenants
