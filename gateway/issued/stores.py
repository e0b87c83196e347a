"""Where tenants and keys that admins made are kept: in Redis, for all gateways, or without one in data_dir, for the
workers of one.

    kvasir:issued   hash without a time to live: version, tenant:NAME and key:ID -> JSON of base.py, ended:SESSION ->
                    the Unix second at which it would be over
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from gateway.disk import Part, sync_folder, translated
from gateway.issued.base import Issued, IssuedKey, MadeTenant, read_key, read_tenant
from gateway.storage.redis_calls import RedisCalls, read_or_skip

KEY: Final = "kvasir:issued"
FILE: Final = "issued.json"
_STORE: Final = "tenants and keys"
_VERSION: Final = "version"

Changes = Mapping[str, bytes]
"""Field -> its new value; empty removes it."""


class IssuedStore(Protocol):
    """Methods raise RedisDownError and StorageError."""

    async def read(self, known: str) -> Issued | None:
        """What there is; None where it has the version that is known."""
        ...

    async def change(self, known: str, version: str, changes: Changes) -> bool:
        """Whether it was still the version that is known; then everything is changed, and else nothing. Atomic."""
        ...


class RedisIssued:
    """See IssuedStore."""

    def __init__(self, calls: RedisCalls) -> None:
        self._calls = calls
        self._change = calls.script(__package__, "change.lua")

    async def read(self, known: str) -> Issued | None:
        version: Any = await self._calls.ask_or_skip(_STORE, _hget(self._calls, KEY, _VERSION), None)
        if (version or b"").decode("utf-8", "replace") == known:
            return None
        fields: Any = await self._calls.ask_or_skip(_STORE, _hgetall(self._calls, KEY), {})
        return issued_of({name.decode("utf-8", "replace"): value for name, value in fields.items()})

    async def change(self, known: str, version: str, changes: Changes) -> bool:
        args = [known, version, *(item for pair in changes.items() for item in pair)]
        return bool(await self._calls.ask(self._change(keys=[KEY], args=args)))


class FileIssued:
    """See IssuedStore. A file that only this user may read, and replaced as a whole. Blocks in threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._seen: tuple[int, int, int] | None = None

    async def read(self, known: str) -> Issued | None:
        return await asyncio.to_thread(self._read, known)

    async def change(self, known: str, version: str, changes: Changes) -> bool:
        return await asyncio.to_thread(self._change, known, version, changes)

    def _read(self, known: str) -> Issued | None:
        fields = self._fields()
        return None if _text(fields) == known else issued_of(fields)

    def _change(self, known: str, version: str, changes: Changes) -> bool:
        with translated("Tenants and keys"):
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)  # of other workers
                fields = self._fields()
                if _text(fields) != known:
                    return False
                fields = {name: value for name, value in {**fields, **changes}.items() if value}
                fields[_VERSION] = version.encode()
                part = Part(self._folder, lambda _, __: None, "Tenants and keys")
                try:
                    part.write(orjson.dumps({name: value.decode() for name, value in fields.items()}))
                    part.keep_as(self._path)
                finally:
                    part.discard()
                sync_folder(self._folder)
            finally:
                os.close(lock)
        return True

    def _fields(self) -> dict[str, bytes]:
        with translated("Tenants and keys"):
            try:
                data = self._path.read_bytes()
            except FileNotFoundError:
                return {}
        found = read_or_skip(_STORE, partial(_decoded, data))
        return {} if found is None else found


def _decoded(data: bytes) -> dict[str, bytes]:
    return {str(name): str(value).encode() for name, value in orjson.loads(data).items()}


def _text(fields: Mapping[str, bytes]) -> str:
    return fields.get(_VERSION, b"").decode("utf-8", "replace")


def _hget(calls: RedisCalls, key: str, field: str) -> Any:
    return calls.redis.hget(key, field)


def _hgetall(calls: RedisCalls, key: str) -> Any:
    return calls.redis.hgetall(key)


def issued_of(fields: Mapping[str, bytes]) -> Issued:
    """What can be read of it."""
    tenants: dict[str, MadeTenant] = {}
    keys: dict[str, IssuedKey] = {}
    ended: dict[str, int] = {}
    for name, value in fields.items():
        if name.startswith("tenant:"):
            tenant = read_or_skip(_STORE, partial(read_tenant, value))
            if tenant is not None:
                tenants[tenant.settings.name] = tenant
        elif name.startswith("key:"):
            key = read_or_skip(_STORE, partial(read_key, value))
            if key is not None:
                keys[key.id] = key
        elif name.startswith("ended:"):
            ends_s = read_or_skip(_STORE, partial(int, value))
            if ends_s is not None:
                ended[name.removeprefix("ended:")] = ends_s
    return Issued(_text(fields), tenants, keys, ended)
