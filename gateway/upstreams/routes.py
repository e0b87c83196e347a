"""Which upstreams serve a model, in order. Pure: settings and names in, routes out.

Exact names win over patterns: an upstream that names a model is never backed by one whose pattern happens to match, so
that prompts go nowhere else than where the operator sent this model. A pattern matches printable names only: a name
that it matches is written into logs, labels and the ledger. Among those that are left the lowest priority is
first, then the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from gateway.config import ALL_TENANTS, ServedModel, UpstreamSettings

MAX_FOUND: Final = 4096
"""Models of tenants whose routes are remembered."""

MAX_NAME_CHARS: Final = 1024
"""Of a model name. Longer ones match no upstream: patterns would take long."""


@dataclass(frozen=True, slots=True)
class Route:
    """One upstream for one model.

    form     of what is translated for it, see UpstreamSettings.form
    only     whether it has no other form of the dialect
    model    what the upstream calls it
    pattern  of the settings, by which it was found; the name itself for an exact one
    """

    upstream: str
    dialect: str
    form: str
    model: str
    pattern: str
    over_engines: bool
    lossy: bool
    only: bool = False

    def speaks(self, dialect: str, path: str) -> bool:
        """Whether a request for this path passes through to it."""
        return dialect == self.dialect and not (self.only and _FORMS.get(path, self.form) != self.form)


_FORMS: Final = {"/v1/chat/completions": "openai", "/v1/responses": "openai-responses"}


class Routes:
    """The routes of all upstreams."""

    def __init__(self, upstreams: Sequence[UpstreamSettings]) -> None:
        ordered = sorted(upstreams, key=lambda upstream: upstream.priority)  # stable: else the order of the file
        self._upstreams = [(upstream, upstream.served) for upstream in ordered]
        self._found = lru_cache(MAX_FOUND)(self._find)

    def find(self, model: str, tenant: str) -> Sequence[Route]:
        """In the order in which they are tried, whatever their dialect; empty when the tenant has none for it."""
        return self._found(model, tenant) if len(model) <= MAX_NAME_CHARS else ()

    def of_all(self, model: str) -> Sequence[Route]:
        """The same for any tenant, not remembered."""
        return self._find(model, None) if len(model) <= MAX_NAME_CHARS else ()

    def _find(self, model: str, tenant: str | None) -> Sequence[Route]:
        found = [
            (item, upstream)
            for upstream, served in self._upstreams
            if (tenant is None or may(upstream.tenants, tenant)) and (item := _best(served, model)) is not None
        ]
        exact = any(not item.is_pattern for item, _ in found)
        return [
            _route(upstream, _renamed(item, model), item.served)
            for item, upstream in found
            if not (exact and item.is_pattern)
        ]

    def named(self, name: str, tenant: str) -> list[Route]:
        """The upstream of this name, for no model; empty when there is none, or none for the tenant."""
        return [
            _route(upstream, "", "")
            for upstream, _ in self._upstreams
            if upstream.name == name and may(upstream.tenants, tenant)
        ]

    def listed(self, tenant: str, lists: Mapping[str, Iterable[str]]) -> list[str]:
        """Names of models: the exact ones of the settings, and of the upstreams' own lists (by upstream) those that
        lead back to them."""
        names: dict[str, None] = {}
        for upstream, served in self._upstreams:
            if not may(upstream.tenants, tenant):
                continue
            names |= dict.fromkeys(item.served for item in served if not item.is_pattern)
            names |= dict.fromkeys(
                name
                for model in lists.get(upstream.name, ())
                for item in served
                if item.is_pattern and (name := _found_as(item, model)) is not None
            )
        return list(names)


def _route(upstream: UpstreamSettings, model: str, pattern: str) -> Route:
    return Route(
        upstream.name,
        upstream.dialect,
        upstream.form,
        model,
        pattern,
        upstream.over_engines,
        lossy=upstream.lossy == "drop",
        only=upstream.api_only,
    )


def may(tenants: Sequence[str], tenant: str) -> bool:
    """Whether a list of tenants of the settings has this one."""
    return tenant in tenants or ALL_TENANTS in tenants


def _best(items: Sequence[ServedModel], model: str) -> ServedModel | None:
    """The exact name, or the first pattern that matches."""
    matching = [item for item in items if _matches(item, model)]
    return next((item for item in matching if not item.is_pattern), matching[0] if matching else None)


def _matches(item: ServedModel, model: str) -> bool:
    if not item.is_pattern:
        return model == item.served
    return model.isprintable() and fnmatchcase(model, item.served)


def _renamed(item: ServedModel, model: str) -> str:
    """What the upstream calls it."""
    if item.upstream is None or not item.is_pattern:
        return item.upstream or model
    return item.upstream.replace("*", _starred(item.served, model) or "")


def _found_as(item: ServedModel, model: str) -> str | None:
    """The client's name for this model of the upstream; None where there is none."""
    if item.upstream is None:
        return model if _matches(item, model) else None
    starred = _starred(item.upstream, model)
    return item.served.replace("*", starred) if starred is not None and starred.isprintable() else None


def _starred(pattern: str, name: str) -> str | None:
    """What a pattern's only `*` stands for in a name."""
    before, _, after = pattern.partition("*")
    if len(name) < len(before) + len(after) or not (name.startswith(before) and name.endswith(after)):
        return None
    return name[len(before) : len(name) - len(after)]
