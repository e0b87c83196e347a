"""What admins have made: tenants beside those of the file, and keys; and the sessions on /admin that they ended. Values
only; stores.py keeps them, directory.py has those that hold now. Of a key only its SHA-256 is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import orjson
from pydantic import ValidationError

from gateway.config import TenantSettings
from gateway.digests import key_digest

MAX_TENANTS: Final = 1_000
"""That are made at run time."""

MAX_KEYS: Final = 10_000
"""Of all tenants together; about 300 bytes each, in the memory of every worker."""

MAX_ENDED: Final = 1_000
"""Sessions that were ended early; of more, those are forgotten that would be over first."""

_NO_KEYS: Final = {"keys": ("none" * 2,)}


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A key. `expires_s` is in seconds since 1970, None for never; `models` are patterns, none for all models that its
    tenant may use."""

    id: str
    digest: str  # SHA-256 in hex
    tenant: str
    name: str
    created_s: float
    expires_s: float | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MadeTenant:
    """`settings` has no keys. `models` as in IssuedKey."""

    settings: TenantSettings
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Issued:
    """One state of it all. Two with the same version are equal; the empty one has none."""

    version: str = ""
    tenants: Mapping[str, MadeTenant] = field(default_factory=dict)
    keys: Mapping[str, IssuedKey] = field(default_factory=dict)  # by id
    ended: Mapping[str, int] = field(default_factory=dict)  # id of a session, second at which it would be over


def digest_of(key: str) -> str:
    """As `Directory.find` takes it."""
    return key_digest(key).hex()


def allows(models: tuple[str, ...], model: str) -> bool:
    return not models or any(fnmatchcase(model, pattern) for pattern in models)


def make_tenant(table: Mapping[str, Any], models: tuple[str, ...] = ()) -> MadeTenant:
    """`table` is as in [[tenants]], without keys. Raises ValueError."""
    try:
        settings = TenantSettings.model_validate({**table, **_NO_KEYS})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return MadeTenant(settings.model_copy(update={"keys": ()}), models)


def table_of(tenant: MadeTenant) -> dict[str, Any]:
    """What `make_tenant` takes, of what is set."""
    return tenant.settings.model_dump(exclude={"keys"}, exclude_defaults=True)


def written(one: MadeTenant | IssuedKey) -> bytes:
    if isinstance(one, MadeTenant):
        return orjson.dumps([table_of(one), one.models])
    return orjson.dumps([one.id, one.digest, one.tenant, one.name, one.created_s, one.expires_s, one.models])


def read_tenant(data: bytes) -> MadeTenant:
    """Raises ValueError and others for what no gateway wrote."""
    table, models, *_ = orjson.loads(data)
    return make_tenant(table, tuple(map(str, models)))


def read_key(data: bytes) -> IssuedKey:
    """As `read_tenant`."""
    id_, digest, tenant, name, created_s, expires_s, models, *_ = orjson.loads(data)
    if not all(isinstance(one, str) for one in (id_, digest, tenant, name)):
        raise ValueError("nothing of a key")
    expires = None if expires_s is None else float(expires_s)
    return IssuedKey(id_, digest, tenant, name, float(created_s), expires, tuple(map(str, models)))
