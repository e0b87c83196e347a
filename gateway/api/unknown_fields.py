"""Fields of a request that the gateway does not know: ignored and named, or refused.

Clients send what other servers take, and upstream APIs grow; so an unknown field is ignored, and the answer names it.
Unless it looks like a typo of a field that is known in its place: then ignoring it would change what was asked for.

The checks of fields.py meet such fields deep inside of a body and know nothing but a value and its path. So what is
ignored is collected in a context variable, which is set around each request. Outside of one, all are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Final

from gateway.config import ApiSettings, TenantSettings

HEADER: Final = "x-kvasir-ignored-fields"

MAX_NAMES: Final = 32
"""Different names in one request. No client sends so many; a body made of nothing else would be expensive."""

MAX_NAME_CHARS: Final = 64
MAX_HEADER_CHARS: Final = 1024
ODD: Final = "?"
"""In place of each character that is none of a name."""

_INDEX: Final = re.compile(r"\[[0-9]+\]")
_ODD_LETTER: Final = re.compile(r"[^A-Za-z0-9_.$\[\]-]")
_SHORT: Final = 3  # characters of a name that is no typo of any other
_LONG: Final = 8  # characters from which on two may be wrong
_MEANT: Final = frozenset(("max_tokens", "min_tokens", "seed", "speed", "top_a"))
"""Fields of other routes and servers that are like one of ours by chance."""


@dataclass(slots=True)
class IgnoredFields:
    """Of one request. `names` are paths without indices, cleaned and cut, in the order in which they came; where
    `refuse` is set, there are none."""

    refuse: bool = False
    names: dict[str, None] = field(default_factory=dict)

    @property
    def header(self) -> str:
        """The names, as one line of bounded length."""
        text = ", ".join(self.names)
        return text if len(text) <= MAX_HEADER_CHARS else text[: MAX_HEADER_CHARS - 3] + "..."


_IGNORED: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


class collected:  # noqa: N801 - reads as a statement, like contextlib.suppress
    """While a request is read, its unknown fields go here."""

    def __init__(self, fields: IgnoredFields) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = _IGNORED.set(self._fields)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _IGNORED.reset(self._token)


class RefusingTenants:
    """Whether unknown fields of a tenant's requests, by its name, are refused."""

    def __init__(self, settings: ApiSettings, tenants: Sequence[TenantSettings]) -> None:
        self._settings = settings
        self.replace(tenants)

    def replace(self, tenants: Sequence[TenantSettings]) -> None:
        """From now on there are these."""
        self._own = {tenant.name: tenant.unknown_fields for tenant in tenants if tenant.unknown_fields is not None}

    def __call__(self, name: str) -> bool:
        return self._own.get(name, self._settings.unknown_fields) == "refuse"


def ignored(path: str, name: str, known: Collection[str], given: Collection[str]) -> bool:
    """Whether the field `name` at this path may be ignored, which is noted then.

    known  fields of its object
    given  those that the client has sent: it means none of them by another name
    """
    fields = _IGNORED.get()
    if fields is None or fields.refuse:
        return False
    clean = _clean(path)
    if clean in fields.names:
        return True
    if len(fields.names) >= MAX_NAMES or typo_of(name, known, given) is not None:
        return False
    fields.names[clean] = None
    return True


def leave_out(name: str) -> bool:
    """Notes something else that is not carried out, under this name; False where it has to be refused."""
    return ignored(name, "", (), ())


def typo_of(name: str, known: Collection[str], given: Collection[str]) -> str | None:
    """The known name that this one was meant to be; None where it is like none of them."""
    return None if len(name) > MAX_NAME_CHARS or name in _MEANT else _nearest(name, frozenset(known).difference(given))


def _clean(path: str) -> str:
    """A name for headers, logs and metrics, of a client's field with any characters."""
    name = _ODD_LETTER.sub(ODD, _INDEX.sub("[]", path))
    return name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 3] + "..."


@lru_cache(maxsize=1024)
def _nearest(name: str, known: frozenset[str]) -> str | None:
    if len(name) < _SHORT:
        return None
    allowed = 1 if len(name) < _LONG else 2
    lower = name.lower()
    for other in sorted(known):
        alike = len(other) >= _SHORT and abs(len(other) - len(name)) <= allowed
        if alike and _distance(lower, other.lower()) <= allowed:
            return other
    return None


def _distance(one: str, other: str) -> int:
    """Letters to put in, leave out, replace or swap with their neighbour (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        before, last, row = row, before, [at]
        for to, wanted in enumerate(other, 1):
            cost = min(before[to] + 1, row[to - 1] + 1, before[to - 1] + (letter != wanted))
            if at > 1 and to > 1 and letter == other[to - 2] and one[at - 2] == wanted:
                cost = min(cost, last[to - 2] + 1)
            row.append(cost)
    return row[-1]
