"""Digests of keys; digests and texts of large JSON values, made so that other threads have their turn; salts of
replicas. Pure.

`orjson.dumps` of a whole prompt lets no other thread run until it is done: 31 MB of escaped characters take 0.12 s.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Protocol

import orjson

_SLICE: Final = 64 << 10
"""Characters that are added at once: a fraction of a millisecond."""


UNSALTED: Final = "unsalted"
"""In place of a secret, of servers that know no salt: all requests share what they hold."""


def key_digest(key: str) -> bytes:
    """SHA-256 of an API key: all that is kept and compared of one."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@lru_cache(4096)
def derived_salt(secret: str, salt: str) -> str:
    """The salt that a server of others is given in place of a request's own, 64 hexadecimal characters: without the
    fleet's secret nobody can tell whose it is, nor make one. Empty for UNSALTED."""
    return (
        ""
        if secret == UNSALTED
        else hmac.digest(secret.encode(), salt.encode("utf-8", "surrogatepass"), "sha256").hex()
    )


class Hash(Protocol):
    """One of hashlib's."""

    def update(self, data: bytes, /) -> None: ...


def feed(hashed: Hash, value: Any) -> None:
    """Adds a value, each part with its kind and length, so that no other value can pass for it. Names of an object
    count in their order. `value` is nested as deep as a request body may be, at most."""
    if type(value) is str:
        hashed.update(b"s%d:" % len(value))
        for start in range(0, len(value), _SLICE):
            hashed.update(value[start : start + _SLICE].encode("utf-8", "surrogatepass"))
    elif isinstance(value, dict):
        hashed.update(b"{%d:" % len(value))
        for name, item in value.items():
            feed(hashed, name)
            feed(hashed, item)
    elif isinstance(value, list | tuple):
        hashed.update(b"[%d:" % len(value))
        for item in value:
            feed(hashed, item)
    else:
        hashed.update(b"v%b;" % orjson.dumps(value))


def dump(value: Any) -> bytes:
    """The JSON text of a value, as orjson writes it."""
    parts: list[bytes] = []
    _write(value, parts.append)
    return b"".join(parts)


def _write(value: Any, add: Callable[[bytes], None]) -> None:
    if isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            add((b",%b:" if index else b"{%b:") % orjson.dumps(name))
            _write(item, add)
        add(b"}" if value else b"{}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            add(b"," if index else b"[")
            _write(item, add)
        add(b"]" if value else b"[]")
    elif type(value) is str and len(value) > _SLICE:
        slices = (value[start : start + _SLICE] for start in range(0, len(value), _SLICE))
        add(b'"%b"' % b"".join(orjson.dumps(text)[1:-1] for text in slices))
    else:
        add(orjson.dumps(value))
