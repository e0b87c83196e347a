"""The leases of one replica in Redis, so that all gateways know the same ones, and a gateway that starts learns them.

Each gateway keeps its own book (prefix_leases.py) and enters here what it grants and renews; `sync` returns what others
did. Two gateways that grant at the same moment may differ for a moment in what fits the budget. One of those that
`sync` is to touch, where no KV events say which; it hears how much the others stored.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections import Counter
from functools import partial
from typing import Any, Final, NamedTuple

import orjson
import xxhash

from engine.leases.pins import Lease
from engine.protocol import TOKEN_BYTES
from gateway.errors import RedisDownError
from gateway.storage.redis_calls import RedisCalls, read_or_skip

_STORE: Final = "leases of replicas"
MAX_SHARED: Final = 4096
"""Of one replica; what is beyond is known to the gateway alone that granted it."""

MAX_TENANT_BYTES: Final = 32 << 20
"""Token ids of one tenant's leases on one replica: eight million."""

AT_ONCE: Final = 32
"""Leases that are written by one call: 16 MB with prefixes of 128k tokens."""

PURGE_S: Final = 60.0
"""For which gateways hear of a purge."""

TOUCHER_S: Final = 3.0
"""Without a `sync`, after which another gateway touches."""

RENEW_SHARE: Final = 0.02
"""Of its time to live, by which a lease is renewed here at least."""


class SharedLease(NamedTuple):
    """Was granted or renewed for a request that arrived at `used_unix_s`."""

    tenant: str
    salt: str
    tokens: bytes
    ttl_s: float
    used_unix_s: float

    @property
    def end_unix_s(self) -> float:
        return self.used_unix_s + self.ttl_s

    @property
    def head(self) -> bytes:
        return orjson.dumps([self.tenant, self.salt, self.ttl_s, self.used_unix_s])


class SharedLeases:
    """`sync` writes what `put` and `purge` were told, and reads. Belongs to one event loop.

    leads         whether this gateway is to touch; while Redis does not answer each one is
    others_tokens that others stored since this was made
    """

    def __init__(self, calls: RedisCalls, model: str, name: str) -> None:
        """name  of the replica and its namespace"""
        tag = xxhash.xxh3_64_hexdigest(model.encode())  # in a cluster beside the blocks
        self._keys = [f"kvasir:{{{tag}}}:leases:{part}:{name}" for part in ("changes", "heads", "tokens", "touching")]
        self._calls = calls
        self._script = calls.script(__package__, "shared_leases.lua")
        self._revision = 0.0
        self._known: dict[str, SharedLease] = {}
        self._bytes = Counter[str]()  # tenant -> token bytes of known ones
        self._waiting: dict[str, tuple[bytes, bytes, float]] = {}  # id -> head, tokens, Unix second of its end
        self._ended: list[str] = []
        self._owner = uuid.uuid4().hex
        self._told = 0  # of `own_tokens`, that were sent
        self._stored = math.inf  # by all gateways, as Redis said last
        self._before = 0  # stored by others, before this was made
        self.leads, self.others_tokens = True, 0

    def put(self, lease: Lease, tokens: bytes, ahead_s: float) -> None:
        """A lease that was granted or renewed. `ahead_s`: Unix time less the clock of the leases."""
        own = tokens[: lease.tokens * TOKEN_BYTES]
        one = SharedLease(lease.tenant, lease.salt, own, lease.ttl_s, lease.expires_s - lease.ttl_s + ahead_s)
        name = _name(lease.tenant, lease.salt, lease.fingerprint)
        known = self._known.get(name)
        if known is not None and one.end_unix_s - known.end_unix_s < RENEW_SHARE * lease.ttl_s:
            return
        if len(self._known) < MAX_SHARED and self._bytes[lease.tenant] + len(own) <= MAX_TENANT_BYTES:
            self._learn(name, one)
            _, unsent, _ = self._waiting.get(name, (b"", b"", 0.0))
            self._waiting[name] = one.head, unsent if known else own, one.end_unix_s

    def drop(self, lease: Lease) -> None:
        """Another replica keeps it."""
        name = _name(lease.tenant, lease.salt, lease.fingerprint)
        self._forget([name] if name in self._known else [])

    def purge(self, salt_prefix: str, unix_s: float) -> None:
        """All gateways end the leases of salts that begin so."""
        self._forget([name for name, one in self._known.items() if one.salt.startswith(salt_prefix)])
        name = f"purge:{salt_prefix}"
        self._known[name] = SharedLease("", "", b"", PURGE_S, unix_s)
        self._waiting[name] = orjson.dumps([None, salt_prefix, PURGE_S, unix_s]), b"", unix_s + PURGE_S

    async def sync(self, unix_s: float, own_tokens: int = 0) -> list[SharedLease | str]:
        """What others did since the last time, in order; a text is a purge of salts that begin so. Empty where Redis
        does not answer: what was to be written is written later. `own_tokens`: that this gateway stored so far."""
        self._forget([name for name, one in self._known.items() if one.end_unix_s <= unix_s])
        names, self._ended = self._ended, []
        writing = dict(list(self._waiting.items())[:AT_ONCE])
        lives_s = max((end_unix_s - unix_s for _, _, end_unix_s in writing.values()), default=0.0)
        args: list[Any] = [repr(self._revision), max(1, round(lives_s * 1e3)), MAX_SHARED]
        untold, self._told = own_tokens - self._told, own_tokens
        args += [self._owner, round(TOUCHER_S * 1e3), untold, len(names), *names]
        for name, (head, tokens, _) in writing.items():
            args += [name, head, tokens]
            del self._waiting[name]
        try:
            answer: Any = await self._calls.ask(self._script(keys=self._keys, args=args))
            revision, leads, stored, *changes = answer
            self._hear(own_tokens, bool(leads), int(stored))
            heads = dict(zip(changes[::2], changes[1::2], strict=True))
            unknown = [raw for raw in heads if raw.decode(errors="replace") not in self._known]
            found: Any = await self._calls.ask(self._calls.redis.hmget(self._keys[2], unknown)) if unknown else []
        except RedisDownError:
            self._waiting = {**writing, **self._waiting}
            self._ended += names
            self._told -= untold
            self.leads = True
            return []
        if float(revision) < self._revision:  # Redis lost everything
            self._revision = 0.0
            self._waiting |= {name: (one.head, one.tokens, one.end_unix_s) for name, one in self._known.items()}
            return []
        self._revision = float(revision)
        tokens_of = dict(zip(unknown, found, strict=True))
        read = (read_or_skip(_STORE, partial(self._read, *item, tokens_of)) for item in heads.items())
        return [one for one in read if one is not None]

    def _hear(self, own_tokens: int, leads: bool, stored: int) -> None:
        others = stored - own_tokens
        if stored < self._stored:  # the first answer, or Redis lost the sum
            self._before = others - self.others_tokens
        self.others_tokens = max(self.others_tokens, others - self._before)
        self._stored, self.leads = stored, leads

    def _read(self, raw: bytes, head: bytes, tokens_of: dict[bytes, bytes | None]) -> SharedLease | str | None:
        """None for what this gateway wrote, and what is not there any more. Raises ValueError and others."""
        name = raw.decode()
        tenant, salt, ttl_s, used_unix_s = orjson.loads(head)
        known = self._known.get(name)
        if known is not None and known.end_unix_s >= used_unix_s + ttl_s:
            return None
        if tenant is None:
            self._forget([one for one, other in self._known.items() if other.salt.startswith(salt)])
            return str(salt)
        tokens = tokens_of.get(raw) if known is None else known.tokens
        if not tokens or len(tokens) % TOKEN_BYTES:
            return None
        one = SharedLease(str(tenant), str(salt), tokens, float(ttl_s), float(used_unix_s))
        self._learn(name, one)
        return one

    def _learn(self, name: str, one: SharedLease) -> None:
        if name not in self._known:
            self._bytes[one.tenant] += len(one.tokens)
        self._known[name] = one

    def _forget(self, names: list[str]) -> None:
        for name in names:
            one = self._known.pop(name)
            self._waiting.pop(name, None)
            self._bytes[one.tenant] -= len(one.tokens)
            if not self._bytes[one.tenant]:
                del self._bytes[one.tenant]
        self._ended += names


def _name(tenant: str, salt: str, fingerprint: bytes) -> str:
    texts = b"".join(b"%d:%b" % (len(text), text.encode("utf-8", "surrogatepass")) for text in (tenant, salt))
    return hashlib.blake2b(texts + fingerprint, digest_size=16).hexdigest()
