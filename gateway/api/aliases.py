"""Other names of models: what a client asks for, and the alias with the models that may answer. Pure.

An exact name wins over patterns; of these the first one in the settings that matches. A target is the own name of a
model, no further alias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from gateway.config import ALL_TENANTS, AliasSettings

MAX_NAME_CHARS: Final = 256
"""Of a name that is looked up; longer ones are none."""


class Aliases:
    """Those of the settings."""

    def __init__(self, settings: Sequence[AliasSettings]) -> None:
        self._found = lru_cache(4096)(self._find)
        self.replace(settings)

    def replace(self, settings: Sequence[AliasSettings]) -> None:
        """From now on there are these."""
        self._settings = sorted(settings, key=lambda one: one.is_pattern)  # stable
        self._found.cache_clear()

    def __iter__(self) -> Iterator[AliasSettings]:
        return iter(self._settings)

    def find(self, name: str, tenant: str) -> AliasSettings | None:
        """None where the name is no alias for the tenant."""
        return self._found(name, tenant) if self._settings and len(name) <= MAX_NAME_CHARS else None

    def models(self, name: str, tenant: str) -> tuple[str, ...]:
        """Of the targets of an alias; the name itself where it is none."""
        alias = self.find(name, tenant)
        return (name,) if alias is None else tuple(target.model for target in alias.models)

    def listed(self, tenant: str) -> dict[str, tuple[str, ...]]:
        """Exact aliases -> targets."""
        exact = (one for one in self._settings if not one.is_pattern and _may(one, tenant))
        return {one.name: tuple(target.model for target in one.models) for one in exact}

    def _find(self, name: str, tenant: str) -> AliasSettings | None:
        return next((one for one in self._settings if _may(one, tenant) and fnmatchcase(name, one.name)), None)


def _may(alias: AliasSettings, tenant: str) -> bool:
    return tenant in alias.tenants or ALL_TENANTS in alias.tenants
