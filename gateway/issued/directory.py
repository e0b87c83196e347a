"""The tenants that there are now, those of the file and those that admins made, the keys that admins made, and the
sessions on /admin that they ended early.

Every gateway and worker looks each second whether what is kept has changed; the one that changes it uses it at once.
While Redis is away the last known go on working, and changes are refused; a session
that is ended then is over here at once, and elsewhere when Redis is back. A tenant of the file wins over one that was
made with its name.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from gateway import tasks
from gateway.config import TenantSettings
from gateway.errors import ConflictError, NotFoundError, RedisDownError, StorageError
from gateway.issued.base import (
    MAX_ENDED,
    MAX_KEYS,
    MAX_TENANTS,
    Issued,
    IssuedKey,
    MadeTenant,
    allows,
    digest_of,
    limits_of,
    make_limits,
    make_tenant,
    table_of,
    written,
)
from gateway.issued.stores import Changes, IssuedStore
from gateway.types import ANONYMOUS

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""From one look for changes of others to the next."""

TRIES: Final = 5
"""Of a change, where others change something at the same time."""

PREFIX: Final = "kv-"
_KEY_BYTES: Final = 32
_NOTHING: Final[Mapping[str, Any]] = {}


class Directory:
    """`find` and `tenants` never wait. Changes raise KvasirError, and have then changed nothing, or, where Redis did
    not answer in time, perhaps all of it."""

    def __init__(self, store: IssuedStore, file_tenants: Sequence[TenantSettings], now: Callable[[], float]) -> None:
        """`now` is in seconds since 1970."""
        self._store = store
        self._now = now
        self._issued = Issued()
        self._by_digest: dict[str, IssuedKey] = {}
        self._ending: dict[str, int] = {}  # of `issued.ended`, what is not kept yet
        self._limited: tuple[TenantSettings, ...] = ()
        self._looking: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self.stale = False
        """Whether what is kept could not be read the last time."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when tenants or keys have become others. Never fails."""
        self.replace(file_tenants)

    def replace(self, file_tenants: Sequence[TenantSettings]) -> None:
        """From now on these are the file's. Does not call `on_change`."""
        self._file = {one.name: one for one in file_tenants}

    @property
    def is_open(self) -> bool:
        """Whether the file has no tenants: then the server asks for no keys, and there are no others."""
        return not self._file

    @property
    def has_made(self) -> bool:
        """Whether there is a tenant or a key that an admin made."""
        return bool(self._issued.tenants or self._issued.keys)

    @property
    def issued(self) -> Issued:
        return self._issued

    def tenants(self) -> tuple[TenantSettings, ...]:
        """All of them; those that were made have no keys here."""
        if self.is_open:
            return ()
        made = (one.settings for name, one in self._issued.tenants.items() if name not in self._file)
        return (*self._file.values(), *made)

    def limited_keys(self) -> tuple[TenantSettings, ...]:
        """The limits and budgets of keys, under the names of their owners; of those that have any."""
        return () if self.is_open else self._limited

    def has_budgets(self) -> bool:
        """Whether anything that was made has one."""
        made = [one.settings for one in self._issued.tenants.values()]
        return any(one.budget is not None for one in (*made, *self._limited))

    def is_of_file(self, name: str) -> bool:
        return name in self._file

    def find(self, digest: str) -> IssuedKey | None:
        """The key with this SHA-256 (hex), if it has not expired and its tenant is there."""
        key = self._by_digest.get(digest)
        if key is None or self.is_open or self._has_expired(key) or not self._has(key.tenant):
            return None
        return key

    def allows(self, tenant: str, key: IssuedKey | None, model: str) -> bool:
        """Whether the tenant, and the key if there is one, may use a model."""
        made = None if tenant in self._file else self._issued.tenants.get(tenant)
        if made is not None and not allows(made.models, model):
            return False
        return key is None or allows(key.models, model)

    def has_list(self, tenant: str, key: IssuedKey | None) -> bool:
        """Whether there is any model that `allows` refuses."""
        return bool(self.lists(tenant, key))

    def lists(self, tenant: str, key: IssuedKey | None) -> list[tuple[str, ...]]:
        """The patterns that a model has to match, one of each list."""
        made = None if tenant in self._file else self._issued.tenants.get(tenant)
        return [models for one in (made, key) if one is not None and (models := one.models)]

    async def make_tenant(self, table: Mapping[str, Any], models: tuple[str, ...]) -> MadeTenant:
        """Raises ValueError for what cannot be one."""
        made = make_tenant(table, models)
        name = made.settings.name

        def changes(issued: Issued) -> Changes:
            self._check_open()
            if name in self._file or name in issued.tenants or name == ANONYMOUS:
                where = "in the file of settings" if name in self._file else "already"
                raise ConflictError(f"There is a tenant `{name}` {where}.", param="name")
            if len(issued.tenants) >= MAX_TENANTS:
                raise ConflictError(f"There are {MAX_TENANTS} tenants that were made at run time, which is the most.")
            return {f"tenant:{name}": written(made)}

        await self._change(changes)
        return made

    async def change_tenant(
        self, name: str, table: Mapping[str, Any], unset: Sequence[str], models: tuple[str, ...] | None
    ) -> MadeTenant:
        """Sets what `table` has, and unsets what `unset` names. Raises ValueError for what cannot be one."""
        made: list[MadeTenant] = []

        def changes(issued: Issued) -> Changes:
            old = self._made(issued, name)
            new = {key: value for key, value in {**table_of(old), **table}.items() if key not in unset}
            made[:] = [make_tenant(new, old.models if models is None else models)]
            return {f"tenant:{name}": written(made[0])}

        await self._change(changes)
        return made[0]

    async def remove_tenant(self, name: str) -> int:
        """With its keys; how many there were."""
        gone: list[str] = []

        def changes(issued: Issued) -> Changes:
            self._made(issued, name)
            gone[:] = [f"key:{key.id}" for key in issued.keys.values() if key.tenant == name]
            return dict.fromkeys([f"tenant:{name}", *gone], b"")

        await self._change(changes)
        return len(gone)

    async def make_key(
        self,
        tenant: str,
        name: str,
        expires_s: float | None,
        models: tuple[str, ...],
        limits: Mapping[str, Any] = _NOTHING,
    ) -> tuple[str, IssuedKey]:
        """The key itself, which is kept nowhere, and what is known of it. `limits` has some of LIMITS."""
        secret, id_ = PREFIX + secrets.token_urlsafe(_KEY_BYTES), f"key_{secrets.token_hex(8)}"
        own = make_limits(tenant, id_, limits)
        key = IssuedKey(id_, digest_of(secret), tenant, name, self._now(), expires_s, models, own)

        def changes(issued: Issued) -> Changes:
            self._check_open()
            if tenant not in self._file and tenant not in issued.tenants:
                raise NotFoundError(f"There is no tenant `{tenant}`.", param="tenant")
            expired = [one.id for one in issued.keys.values() if self._has_expired(one)]
            if len(issued.keys) < MAX_KEYS:
                expired = []
            elif not expired:
                raise ConflictError(f"There are {MAX_KEYS} keys, which is the most. Delete some.")
            return {**{f"key:{one}": b"" for one in expired}, f"key:{key.id}": written(key)}

        await self._change(changes)
        return secret, key

    async def change_key(self, id_: str, more: Mapping[str, Any], limits: Mapping[str, Any]) -> IssuedKey:
        """`more` has fields of IssuedKey; of `limits` what is None is unset. Raises ValueError for what cannot be."""
        made: list[IssuedKey] = []

        def changes(issued: Issued) -> Changes:
            old = _key(issued, id_)
            table = {name: value for name, value in {**limits_of(old), **limits}.items() if value is not None}
            made[:] = [replace(old, **more, limits=make_limits(old.tenant, id_, table))]
            return {f"key:{id_}": written(made[0])}

        await self._change(changes)
        return made[0]

    async def remove_key(self, id_: str) -> IssuedKey:
        found: list[IssuedKey] = []

        def changes(issued: Issued) -> Changes:
            found[:] = [_key(issued, id_)]
            return {f"key:{id_}": b""}

        await self._change(changes)
        return found[0]

    def has_ended(self, session: str) -> bool:
        """Whether this session on /admin was ended."""
        return session in self._issued.ended or session in self._ending

    async def end_session(self, session: str, ends_s: int) -> None:
        """From now on here, and for all others when they look, or once Redis is there again. `ends_s`: when it would be
        over by itself, in seconds since 1970. Never raises."""
        self._ending[session] = ends_s
        self._ending = _latest(self._ending)
        await self.refresh()

    async def refresh(self) -> bool:
        """Whether what is kept could be read; it holds from now on. Never raises."""
        try:
            async with self._turn:
                self._use(await self._store.read(self._issued.version))
            if self._ending:
                await self._end()
        except (RedisDownError, StorageError) as error:
            if not self.stale:
                log.warning("tenants and keys that were made at run time stay as they were last known: %s", error)
            self.stale = True
            return False
        self.stale = False
        return True

    def start(self) -> None:
        self._looking = tasks.spawn(self._look(), name="look for changed tenants and keys")

    async def close(self) -> None:
        await tasks.cancel(self._looking)

    async def _look(self) -> None:
        while not tasks.was_cancelled():
            await self.refresh()
            await asyncio.sleep(LOOK_S)

    async def _end(self) -> None:
        ending = dict(self._ending)

        def changes(issued: Issued) -> Changes:
            now_s, every = self._now(), {**issued.ended, **ending}
            kept = _latest({one: ends_s for one, ends_s in every.items() if ends_s > now_s})
            gone = {f"ended:{one}": b"" for one in issued.ended.keys() - kept.keys()}
            return {**gone, **{f"ended:{one}": b"%d" % ends_s for one, ends_s in kept.items() if one in ending}}

        with suppress(ConflictError):  # the next look tries again
            await self._change(changes)
            self._ending = {one: ends_s for one, ends_s in self._ending.items() if one not in ending}

    async def _change(self, changes_of: Callable[[Issued], Changes]) -> None:
        async with self._turn:
            for _ in range(TRIES):
                self._use(await self._store.read(self._issued.version))
                changes = changes_of(self._issued)
                if await self._store.change(self._issued.version, secrets.token_hex(8), changes):
                    self._use(await self._store.read(self._issued.version))
                    return
        raise ConflictError("Others change tenants and keys at the same time. Try again.")

    def _use(self, issued: Issued | None) -> None:
        if issued is None:
            return
        known, self._issued = self._issued, issued
        if (known.tenants, known.keys) != (issued.tenants, issued.keys):
            self._by_digest = {key.digest: key for key in issued.keys.values()}
            self._limited = tuple(key.limits for key in issued.keys.values() if key.limits is not None)
            self.on_change()

    def _made(self, issued: Issued, name: str) -> MadeTenant:
        if name in self._file:
            raise ConflictError(f"The tenant `{name}` is in the file of settings; change it there, and reload.")
        if (made := issued.tenants.get(name)) is None:
            raise NotFoundError(f"There is no tenant `{name[:64]}`.", param="name")
        return made

    def _check_open(self) -> None:
        if self.is_open:
            raise ConflictError(
                "This server is open. Tenants and keys can be made once its file has a [[tenants]], after a restart."
            )

    def _has(self, tenant: str) -> bool:
        return tenant in self._file or tenant in self._issued.tenants

    def _has_expired(self, key: IssuedKey) -> bool:
        return key.expires_s is not None and self._now() >= key.expires_s


def _latest(sessions: Mapping[str, int]) -> dict[str, int]:
    """Those that would be over last."""
    return dict(sorted(sessions.items(), key=lambda one: one[1])[-MAX_ENDED:])


def _key(issued: Issued, id_: str) -> IssuedKey:
    if (key := issued.keys.get(id_)) is None:
        raise NotFoundError("There is no such key.", param="id")
    return key
