"""Prefixes that an upstream of the Gemini API keeps for the gateway: the `cachedContents` that it makes of marked
prompts, finds again, renews and deletes.

    key      hash of the scope, the upstream, the model, and all of the prompt up to the prefix's end
    found    the longest one that a prompt begins with, whichever request had it made
    made     where the client's marker asks for it, or what came before comes again; by one request, others wait
    renewed  on use, when half of its time is over
    deleted  the one that ends first, when the scope has no room for another; else the upstream ends it

A prefix is computed anew each time that one is made, also what a shorter one has of it. So a conversation whose marker
moves on with each turn gets another one when it is twice as long, which computes it twice at most; a marker that comes
again at the same place gets its own.

What is kept is in a ByteStore, which gateways on one Redis share; there claims keep two from making the same one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from gateway.config import UpstreamSettings
from gateway.digests import dump, feed
from gateway.errors import RedisDownError
from gateway.storage.byte_store import ByteStore, Quota
from gateway.storage.claims import RedisClaims
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.redis_calls import read_or_skip
from gateway.tasks import cancel, off_loop, spawn
from gateway.types import CachePrefix, Scope, UpstreamRequest
from gateway.upstreams.bodies import PrefixHistory
from gateway.upstreams.connections import AttemptFailed, Connections
from gateway.upstreams.routes import may

log = logging.getLogger(__name__)

_T = TypeVar("_T")

STORE: Final = "prefixes"
MAX_BYTES: Final = 256 << 20
"""Of the prefixes of one scope, as JSON."""
BYTES_PER_TOKEN: Final = 4
"""Of a prompt that is estimated."""
LEAST_S: Final = 60.0
"""Time to live of the shortest that is worth a call."""
MARGIN_S: Final = 5.0
"""One that ends within these is not used any more."""
CALL_S: Final = 60.0
"""That making one may take."""
RETRY_S: Final = 300.0
"""Until a prefix that could not be made is tried again."""
HOLD_S: Final = 30.0
"""Without new ones, after an upstream had no room or failed."""
POLL_S: Final = 0.05
"""Between two looks for what another gateway makes."""
MAX_TRIED: Final = 10_000
MAX_DELETED: Final = 8
"""To make room for one."""
GONE: Final = (403, 404)
"""Statuses of a cached content that is not there."""

_PATH: Final = "/v1beta/cachedContents"
_HEAD: Final = ("systemInstruction", "tools", "toolConfig")
"""Members that a request with a cached content must not have."""
_NAME: Final = re.compile(r"cachedContents/[A-Za-z0-9_-]{1,200}")
_TOO_SMALL: Final = re.compile(rb"min_total_token_count=(\d{1,9})")


class End(NamedTuple):
    """Where a prefix may end: behind a number of contents."""

    digest: bytes
    num_bytes: int

    @property
    def key(self) -> str:
        return self.digest.hex()


class Kept(NamedTuple):
    """A cached content of the upstream; times are in seconds since 1970."""

    name: str
    tokens: int
    num_bytes: int
    ttl_s: float
    expires_s: float


class Cached(NamedTuple):
    """What a request reads: the cached content in the place of so many contents."""

    owner: str
    key: str
    name: str
    contents: int

    def applied(self, request: UpstreamRequest) -> UpstreamRequest:
        values = {name: value for name, value in request.values.items() if name not in _HEAD}
        values |= {"contents": values["contents"][self.contents :], "cachedContent": self.name}
        return replace(request, values=values, body=dump(values))


class Shared(NamedTuple):
    """What gateways know together; `claims` None: there is one gateway. `now` is in seconds since 1970."""

    store: Callable[[Quota], ByteStore]
    claims: RedisClaims | None
    now: Callable[[], float]


ALONE: Final = Shared(lambda quota: MemoryBytes(quota, time.time), None, time.time)


class CachedPrefixes:
    """Those of one upstream."""

    def __init__(
        self, settings: UpstreamSettings, connections: Connections, seen: PrefixHistory, shared: Shared
    ) -> None:
        self._settings, self._connections, self._seen = settings, connections, seen
        self._store = shared.store(Quota(settings.cached_contents, MAX_BYTES))
        self._claims, self._now = shared.claims, shared.now
        self._tried = PrefixHistory(MAX_TRIED, RETRY_S, shared.now)
        self._least: dict[str, int] = {}  # model -> tokens, as the upstream has said; bounded by the settings' models
        self._hold_until_s = 0.0
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._is_failing = False
        self.events: Counter[str] = Counter()

    async def close(self) -> None:
        for task in list(self._running.values()):
            await cancel(task)

    async def find(self, request: UpstreamRequest, model: str) -> Cached | None:
        """What the request is to read, which is made first where it is worth that; the trace says what that costs.
        Never raises but for being cancelled."""
        wanted = request.prefix
        if wanted is None or not self._settings.cached_contents:
            return None
        if wanted.contents is None and not (request.hinted or may(self._settings.hints, request.tenant.name)):
            return None
        ends = await off_loop(request.work, lambda: _ends(request, self._settings.name, model))
        try:
            return await self._find(request, model, ends, wanted)
        except RedisDownError:  # then nothing is known, and nothing can be remembered
            return None

    async def forget(self, cached: Cached) -> None:
        """The upstream does not have it."""
        self.events["lost"] += 1
        with suppress(RedisDownError):
            await self._store.remove(cached.owner, cached.key)

    async def _find(
        self, request: UpstreamRequest, model: str, ends: Sequence[End], wanted: CachePrefix
    ) -> Cached | None:
        owner, again = _owner(request.owner), False
        if wanted.contents is None:
            at = max((number for number, end in enumerate(ends) if self._seen.has(end.digest)), default=-1)
            for end in ends:
                self._seen.add(end.digest)
        else:
            at = min(wanted.contents, len(ends) - 1)
            again = self._seen.has(ends[at].digest)
            self._seen.add(ends[at].digest)
        known, ttl_s = await self._known(owner), max(wanted.ttl_s or self._settings.hint_ttl_s, LEAST_S)
        found = max((number for number, end in enumerate(ends) if end.key in known), default=-1)
        kept = known.get(ends[found].key) if found >= 0 else None
        grown = found < 0 or again or (at > found and ends[at].num_bytes >= 2 * ends[found].num_bytes)
        if at > found and grown and self._may_make(model, ends[at]):
            make = partial(self._make, request, model, owner, ends[at], at, ttl_s)
            made, is_first = await self._once(ends[at].key, make)
            if made is not None:
                found, (kept, is_new) = at, made
                if is_first and is_new:
                    request.trace.created = (kept.ttl_s, kept.tokens)
                    request.trace.storage_token_s += round(kept.tokens * kept.ttl_s)
        if kept is None:
            return None
        cached = Cached(owner, ends[found].key, kept.name, found)
        if kept.expires_s - self._now() < max(kept.ttl_s, ttl_s) / 2:
            renewed, is_first = await self._once(cached.key, partial(self._renew, cached, kept, max(kept.ttl_s, ttl_s)))
            request.trace.storage_token_s += renewed if is_first else 0
        self.events["used"] += 1
        return cached

    def _may_make(self, model: str, end: End) -> bool:
        least = self._least.get(model) or (1024 if "flash" in model else 4096)
        is_large = end.num_bytes >= least * BYTES_PER_TOKEN
        return (
            is_large
            and end.num_bytes <= MAX_BYTES
            and not self._tried.has(end.digest)
            and self._now() >= self._hold_until_s
        )

    async def _known(self, owner: str) -> dict[str, Kept]:
        found = {
            key: read_or_skip(STORE, partial(_parse, about)) for key, about in (await self._store.all_of(owner)).items()
        }
        soon_s = self._now() + MARGIN_S
        return {key: kept for key, kept in found.items() if kept is not None and kept.expires_s > soon_s}

    async def _once(self, key: str, work: Callable[[], Awaitable[_T]]) -> tuple[_T, bool]:
        """What one of several requests does for all; whether it is this one. It goes on when that one leaves."""
        is_first = key not in self._running
        if is_first:

            async def run() -> _T:
                try:
                    return await work()
                finally:
                    del self._running[key]

            self._running[key] = spawn(run(), f"cached content of {self._settings.name}")
        return await asyncio.shield(self._running[key]), is_first

    # -- calls of the upstream ----------------------------------------------------------------------------------------

    async def _make(
        self, request: UpstreamRequest, model: str, owner: str, end: End, at: int, ttl_s: float
    ) -> tuple[Kept, bool] | None:
        """And whether it is new. None where it could not be made."""
        try:
            if self._claims is None:
                return await self._make_claimed(request, model, owner, end, at, ttl_s)
            if not await self._claims.take(end.key, CALL_S + MARGIN_S):
                return await self._made_elsewhere(owner, end)
            try:
                return await self._make_claimed(request, model, owner, end, at, ttl_s)
            finally:
                await self._claims.drop(end.key)
        except RedisDownError:
            return None

    async def _made_elsewhere(self, owner: str, end: End) -> tuple[Kept, bool] | None:
        until_s = self._now() + CALL_S
        while self._now() < until_s:
            await asyncio.sleep(POLL_S)
            is_over = self._claims is not None and await self._claims.take(end.key, POLL_S)
            if (kept := (await self._known(owner)).get(end.key)) is not None:
                return kept, False
            if is_over:  # it failed there
                break
        self._tried.add(end.digest)
        return None

    async def _make_claimed(
        self, request: UpstreamRequest, model: str, owner: str, end: End, at: int, ttl_s: float
    ) -> tuple[Kept, bool] | None:
        if (kept := (await self._known(owner)).get(end.key)) is not None:
            return kept, False
        values = request.values
        head = {name: values[name] for name in _HEAD if name in values}
        named = model if "/" in model else f"models/{model}"
        body = {"model": named, **head, "contents": values["contents"][:at], "ttl": f"{ttl_s:.0f}s"}
        expires_s = self._now() + ttl_s
        status, answer = await self._call("POST", _PATH, await off_loop(request.work, lambda: dump(body)))
        kept = _made(status, answer, end.num_bytes, ttl_s, expires_s)
        if kept is None:
            self._tried.add(end.digest)
            if (least := _TOO_SMALL.search(answer)) is None:
                self._failed(status)
            elif len(self._least) < MAX_TRIED:
                self._least[model] = int(least[1])
            return None
        self._is_failing = False
        self.events["made"] += 1
        return (kept, True) if await self._keep(owner, end.key, kept) else None

    async def _keep(self, owner: str, key: str, kept: Kept) -> bool:
        """Makes room for it where there is none; gives it back to the upstream where that does not help."""
        with suppress(RedisDownError):
            for _ in range(MAX_DELETED):
                about, ttl_s = _about(kept), kept.expires_s - self._now()
                put = await self._store.put(owner, key, b"", ttl_s, about=about, num_bytes=kept.num_bytes, refuse=True)
                if put == "stored":
                    return True
                known = await self._known(owner)
                if not known:
                    break
                first = min(known, key=lambda one: known[one].expires_s)
                await self._store.remove(owner, first)
                await self._delete(known[first])
        await self._delete(kept)
        return False

    async def _delete(self, kept: Kept) -> None:
        """What the upstream does not delete now ends with its time."""
        self.events["deleted"] += 1
        await self._call("DELETE", f"/v1beta/{kept.name}")

    async def _renew(self, cached: Cached, kept: Kept, ttl_s: float) -> int:
        """Tokens times seconds that it is kept longer for. Where the upstream does not have it, its use says so."""
        digest = bytes.fromhex(cached.key)
        if self._tried.has(digest):
            return 0
        expires_s = self._now() + ttl_s
        status, _ = await self._call("PATCH", f"/v1beta/{kept.name}", orjson.dumps({"ttl": f"{ttl_s:.0f}s"}))
        if status != 200:
            self._tried.add(digest)
            if status not in GONE:
                self._failed(status)
            return 0
        self.events["renewed"] += 1
        longer = kept._replace(ttl_s=ttl_s, expires_s=expires_s)
        with suppress(RedisDownError):  # renewed again with the next use
            await self._store.extend(cached.owner, cached.key, ttl_s, _about(longer))
        return max(0, round(kept.tokens * (expires_s - kept.expires_s)))

    async def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body; 0 for no answer."""
        try:
            return await self._connections.call(method, path, body, timeout_s=CALL_S)
        except AttemptFailed:
            return 0, b""

    def _failed(self, status: int) -> None:
        """Logged once, until one can be made again."""
        self.events["failed"] += 1
        if status == 429 or status >= 500 or not status:
            self._hold_until_s = self._now() + HOLD_S
        if not self._is_failing:
            log.warning(
                "upstream %s caches no prefix (%s): requests go without, and each prefix is tried again after %.0f s",
                self._settings.name,
                f"status {status}" if status else "no answer",
                RETRY_S,
            )
        self._is_failing = True


def _owner(scope: Scope) -> str:
    """Who shares room: a tenant, or a namespace, whatever keys clients separate their requests with."""
    return Scope(tenant=scope.tenant, namespace=scope.namespace).salt


def _ends(request: UpstreamRequest, upstream: str, model: str) -> list[End]:
    """Behind none of the contents, the first, ..., all but the last, which no request can go without."""
    values = request.values
    head = [values.get(name) for name in _HEAD]
    hashed = hashlib.sha256()
    feed(hashed, [request.owner.salt, upstream, model, head])
    num_bytes = sum(len(dump(one)) for one in head if one is not None)
    ends = [End(hashed.copy().digest()[:16], num_bytes)]
    for content in values["contents"][:-1]:
        feed(hashed, content)
        num_bytes += len(dump(content))
        ends.append(End(hashed.copy().digest()[:16], num_bytes))
    return ends


def _made(status: int, answer: bytes, num_bytes: int, ttl_s: float, expires_s: float) -> Kept | None:
    """None for what is no cached content."""
    try:
        value: Any = orjson.loads(answer) if status == 200 else None
    except ValueError:
        return None
    if not isinstance(value, Mapping) or not isinstance(usage := value.get("usageMetadata", {}), Mapping):
        return None
    name, tokens = value.get("name"), usage.get("totalTokenCount", num_bytes // BYTES_PER_TOKEN)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or type(tokens) is not int:
        return None
    return Kept(name, max(0, tokens), num_bytes, ttl_s, expires_s)


def _about(kept: Kept) -> bytes:
    return orjson.dumps(tuple(kept))


def _parse(about: bytes) -> Kept:
    name, tokens, num_bytes, ttl_s, expires_s = orjson.loads(about)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("no cached content")
    return Kept(name, int(tokens), int(num_bytes), float(ttl_s), float(expires_s))
