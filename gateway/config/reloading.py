"""What of the settings may change while requests are answered, and how two states of them differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from engine.config import ConfigError, Section
from gateway.config.settings import Settings

RELOADED: Final = ("tenants", "namespaces", "upstreams", "aliases", "limits", "prices")
"""Sections and lists of tables that may change; of [auth] its admin_keys may, too."""


class Reloaded(NamedTuple):
    """What a reload came to: settings by name (`tenants.north.weight`), and tables that are new or gone. No values, as
    these may be secrets. `needs_restart`: what the file says and is left as it was."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def mixed(running: Settings, read: Settings) -> Settings:
    """The settings that run, with what may change as it was read. Raises ConfigError where the two do not fit: [[warm]]
    may name a tenant that is gone."""
    values = {name: getattr(running, name) for name in Settings.model_fields}
    for name in RELOADED:
        values[name] = getattr(read, name)
    if bool(running.tenants) != bool(read.tenants):
        # An open server shares one cache among all, and a replica without salts may have joined it.
        for name in ("tenants", "namespaces", "upstreams", "aliases"):
            values[name] = getattr(running, name)
    elif not _has_semantic_cache(running):
        values["tenants"] = tuple(
            one.model_copy(update={"semantic_cache": None}) if one.semantic_cache in ("on", "ask") else one
            for one in read.tenants
        )
    values["auth"] = running.auth.model_copy(update={"admin_keys": read.auth.admin_keys})
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        why = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise ConfigError(f"{why} (with settings that only a restart would change)") from None


def _has_semantic_cache(settings: Settings) -> bool:
    modes = {settings.semantic_cache.mode, *(one.semantic_cache for one in settings.tenants)}
    return not modes <= {"off", None}


def differences(old: Settings, new: Settings) -> tuple[str, ...]:
    """Names of what is not the same."""
    found: list[str] = []
    for name in Settings.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Section):
            found += [f"{name}.{field}" for field in _fields(before, after)]
        else:
            found += [f"{name}{what}" for what in _tables(before, after)]
    return tuple(found)


def _tables(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    """`.north added`, `.north.weight`. What their order says is told where nothing else is different."""
    old, new = _by_name(before), _by_name(after)
    same = True
    for name in (*old, *(name for name in new if name not in old)):
        if name not in old or name not in new:
            same = False
            yield f".{name} {'added' if name in new else 'removed'}"
            continue
        for field in _fields(old[name], new[name]):
            same = False
            yield f".{name}.{field}"
    if same and list(old) != list(new):
        yield " in another order"


def _by_name(tables: Sequence[Any]) -> dict[str, Any]:
    """Tables of [[warm]] have no name of their own; several may be for one model."""
    found: dict[str, Any] = {}
    for number, table in enumerate(tables):
        name = getattr(table, "name", None) or table.model
        found[name if name not in found else f"{name}[{number}]"] = table
    return found


def _fields(one: BaseModel, other: BaseModel) -> list[str]:
    return [name for name in type(one).model_fields if getattr(one, name) != getattr(other, name)]
