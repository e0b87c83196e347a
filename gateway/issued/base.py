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
from gateway.types import owners_of

MAX_TENANTS: Final = 1_000
"""That are made at run time."""

MAX_KEYS: Final = 10_000
"""Of all tenants together; about 300 bytes each, with limits 2 KB, in the memory of every worker."""

LIMITS: Final = (
    *("requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute"),
    *("max_in_flight", "budget", "budget_period", "budget_hard"),
)
"""Settings of a tenant that a key may have, too."""

MAX_ENDED: Final = 1_000
"""Sessions that were ended early; of more, those are forgotten that would be over first."""

_NO_KEYS: Final = {"keys": ("none" * 2,)}


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A key. `expires_s` is in seconds since 1970, None for never; `models` are patterns, none for all models that its
    tenant may use; `limits` has what is set of LIMITS, and the name of an owner (types.owners_of)."""

    id: str
    digest: str  # SHA-256 in hex
    tenant: str
    name: str
    created_s: float
    expires_s: float | None = None
    models: tuple[str, ...] = ()
    limits: TenantSettings | None = None


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


def make_limits(tenant: str, id_: str, table: Mapping[str, Any]) -> TenantSettings | None:
    """Those of a key. `table` has some of LIMITS. Raises ValueError."""
    if not table:
        return None
    if unknown := table.keys() - set(LIMITS):
        raise ValueError(f"{min(unknown)}: no limit of a key")
    owner = owners_of(tenant, id_)[-1]
    return make_tenant({"name": "key", **table}).settings.model_copy(update={"name": owner})


def limits_of(key: IssuedKey) -> dict[str, Any]:
    """What `make_limits` takes, of what is set."""
    return {} if key.limits is None else key.limits.model_dump(include=set(LIMITS), exclude_defaults=True)


def written(one: MadeTenant | IssuedKey) -> bytes:
    if isinstance(one, MadeTenant):
        return orjson.dumps([table_of(one), one.models])
    of_key = (one.id, one.digest, one.tenant, one.name, one.created_s, one.expires_s, one.models, limits_of(one))
    return orjson.dumps(of_key)


def read_tenant(data: bytes) -> MadeTenant:
    """Raises ValueError and others for what no gateway wrote."""
    table, models, *_ = orjson.loads(data)
    return make_tenant(table, tuple(map(str, models)))


def read_key(data: bytes) -> IssuedKey:
    """As `read_tenant`."""
    id_, digest, tenant, name, created_s, expires_s, models, *rest = orjson.loads(data)
    if not all(isinstance(one, str) for one in (id_, digest, tenant, name)):
        raise ValueError("nothing of a key")
    expires = None if expires_s is None else float(expires_s)
    limits = make_limits(tenant, id_, rest[0]) if rest else None
    return IssuedKey(id_, digest, tenant, name, float(created_s), expires, tuple(map(str, models)), limits)
