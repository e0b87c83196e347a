"""Which upstreams serve a model, in order. Pure: settings and names in, routes out.

Exact names win over patterns: an upstream that names a model is never backed by one whose pattern happens to match, so
that prompts go nowhere else than where the operator sent this model. A pattern matches printable names only: a name
that it matches is written into logs, labels and the ledger. Among those that are left the lowest priority is
first, then the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

from gateway.config import EVERYBODY, ServedModel, UpstreamSettings

MAX_NAME_CHARS: Final = 1024
"""Of a model. A longer one is no upstream's: matching patterns with it would take long."""


@dataclass(frozen=True, slots=True)
class Route:
    """One upstream for one model.

    model    what the upstream calls it
    pattern  of the settings, by which it was found; the name itself for an exact one
    """

    upstream: str
    dialect: str
    model: str
    pattern: str
    over_engines: bool


class Routes:
    """Of all upstreams."""

    def __init__(self, upstreams: Sequence[UpstreamSettings]) -> None:
        ordered = sorted(upstreams, key=lambda upstream: upstream.priority)  # stable: else the order of the file
        self._served = [(upstream, [_Served(item) for item in upstream.served]) for upstream in ordered]

    def find(self, model: str, tenant: str) -> list[Route]:
        """In the order in which they are tried, whatever their dialect; empty when the tenant has none for it."""
        if len(model) > MAX_NAME_CHARS:
            return []
        found = [
            (served, upstream)
            for upstream, every in self._served
            if may(upstream.tenants, tenant)
            if (served := _best(every, model)) is not None
        ]
        exact = any(not served.item.is_pattern for served, _ in found)
        return [
            Route(upstream.name, upstream.dialect, served.renamed(model), served.item.served, upstream.over_engines)
            for served, upstream in found
            if not (exact and served.item.is_pattern)
        ]

    def named(self, name: str, tenant: str) -> list[Route]:
        """The upstream of this name, for no model; empty when there is none, or none for the tenant."""
        return [
            Route(upstream.name, upstream.dialect, "", "", upstream.over_engines)
            for upstream, _ in self._served
            if upstream.name == name and may(upstream.tenants, tenant)
        ]

    def listed(self, dialect: str, tenant: str, lists: Mapping[str, Iterable[str]]) -> list[str]:
        """Names of models for requests of this dialect: the exact ones of the settings, and of the upstreams' own lists
        (by upstream) those that lead back to them."""
        names: dict[str, None] = {}
        for upstream, every in self._served:
            if upstream.dialect != dialect or not may(upstream.tenants, tenant):
                continue
            names |= dict.fromkeys(served.item.served for served in every if not served.item.is_pattern)
            names |= dict.fromkeys(
                name
                for model in lists.get(upstream.name, ())
                for served in every
                if served.item.is_pattern and (name := served.found_as(model)) is not None
            )
        return list(names)


def may(tenants: Sequence[str], tenant: str) -> bool:
    """Whether a list of tenants of the settings has this one."""
    return tenant in tenants or EVERYBODY in tenants


def _best(every: Sequence[_Served], model: str) -> _Served | None:
    """The exact name, or the first pattern that matches."""
    matching = [served for served in every if served.matches(model)]
    return next((served for served in matching if not served.item.is_pattern), matching[0] if matching else None)


class _Served:
    """An item of `models`, compiled."""

    def __init__(self, item: ServedModel) -> None:
        self.item = item
        self._regex = re.compile(translate(item.served)) if item.is_pattern else None

    def matches(self, model: str) -> bool:
        if self._regex is None:
            return model == self.item.served
        return model.isprintable() and self._regex.match(model) is not None

    def renamed(self, model: str) -> str:
        """What the upstream calls it."""
        upstream = self.item.upstream
        if upstream is None:
            return model
        if not self.item.is_pattern:
            return upstream
        return upstream.replace("*", _starred(self.item.served, model) or "")

    def found_as(self, model: str) -> str | None:
        """The client's name for this model of the upstream; None where there is none."""
        upstream = self.item.upstream
        if upstream is None:
            return model if self.matches(model) else None
        starred = _starred(upstream, model)
        return self.item.served.replace("*", starred) if starred is not None and starred.isprintable() else None


def _starred(pattern: str, name: str) -> str | None:
    """What a pattern's only `*` stands for in a name."""
    before, _, after = pattern.partition("*")
    if len(name) < len(before) + len(after) or not (name.startswith(before) and name.endswith(after)):
        return None
    return name[len(before) : len(name) - len(after)]
