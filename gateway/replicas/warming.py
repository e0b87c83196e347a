"""Fills the cache of a replica that has joined with the fleet's hottest prefixes, while it has nothing else to do.

    hot   a prefix that requests reused, with what that saved: tokens times reuses, each counting half after HALF_LIFE_S
    warm  one request at a time for one token, longest saving first, of what the replica does not hold; it is given up
          when a request comes

A prefix belongs to a salt: what a tenant may not share is computed for that tenant alone. Of several gateways the one
that follows the replica's KV events warms it; without events each does. What it computes pays when requests come that
begin like it; the router needs no rule for that, because it goes by what a replica holds (docs/decisions.md).

Leases of a replica that goes are handed to the others here, too; their prefixes are computed by touching.py.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.protocol import DIGEST_BYTES, TOKEN_BYTES, Hello, Namespace, Sampling
from gateway import tasks
from gateway.errors import KvasirError
from gateway.types import EncodedPrompt, Request, Scope, Tenant, TokenPrompt

if TYPE_CHECKING:
    from gateway.replicas.touching import LeaseKeeper

log = logging.getLogger(__name__)

MAX_BYTES: Final = 32 << 20
"""Of token ids and digests of hot prefixes in one gateway: about 5 million tokens."""

MAX_COUNTED: Final = 16_384
"""Prefixes whose reuses are counted; the one that was not reused for longest is forgotten first."""

HALF_LIFE_S: Final = 600.0
LEAST_REUSES: Final = 2.0
"""Before the tokens of a prefix are kept: the end of one conversation's last turn is reused once."""

LONGER: Final = 2.0
"""A prefix inside of a longer hot one is kept as well if it is reused so many times as often."""

LENGTHS: Final = sorted({round(4 * 1.5**step) for step in range(28)})
"""In blocks, at which reuses are counted, besides the length that was reused."""

LOOK_S: Final = 0.5
GIVE_WAY_S: Final = 0.05
WARM_S: Final = 600.0
"""After a replica joined, in which it is warmed."""

SHARE: Final = 0.5
"""Of its cache, that is filled so at most."""

ASSUMED_BLOCKS: Final = 4096
"""Of a replica that does not say how large its cache is."""

TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class HotPrefix:
    """Reuses of one prefix, as of `at_s`; and the prefix, once they are enough."""

    reuses: float = 0.0
    at_s: float = 0.0
    namespace: Namespace | None = None
    tenant: Tenant | None = None
    scope: Scope | None = None
    salt: str = ""
    tokens: bytes = b""
    digests: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + len(self.digests)

    def reuses_at(self, now_s: float) -> float:
        return float(self.reuses * 0.5 ** ((now_s - self.at_s) / HALF_LIFE_S))

    def saved_at(self, now_s: float) -> float:
        return self.reuses_at(now_s) * (len(self.tokens) // TOKEN_BYTES)

    def clear(self) -> None:
        self.namespace = self.tenant = self.scope = None
        self.tokens = self.digests = b""


class HotPrefixes:
    """Of one gateway. Belongs to one event loop. A reuse costs some tens of microseconds."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._counted: OrderedDict[bytes, HotPrefix] = OrderedDict()  # by the digest of their last block
        self.num_bytes = 0

    def reused(self, model: Hello, request: Request, prompt: EncodedPrompt, cached_tokens: int) -> None:
        """A request reused so many tokens of its prompt."""
        size = model.namespace.block_size
        blocks = min(cached_tokens // size, len(prompt.digests) // DIGEST_BYTES)
        if request.prewarm or not request.use_cache or blocks < LENGTHS[0]:
            return
        now_s, longer = self._clock(), 0.0
        lengths = LENGTHS[: bisect.bisect_left(LENGTHS, blocks)]
        for length in (blocks, *reversed(lengths)):
            hot = self._count(prompt.digests[(length - 1) * DIGEST_BYTES : length * DIGEST_BYTES], now_s)
            if hot.reuses >= LEAST_REUSES and hot.reuses >= LONGER * longer:
                longer = hot.reuses
                if not hot.tokens:
                    hot.namespace, hot.tenant, hot.scope = model.namespace, request.tenant, request.scope
                    hot.salt = request.salt
                    hot.tokens = prompt.tokens[: length * size * TOKEN_BYTES]
                    hot.digests = prompt.digests[: length * DIGEST_BYTES]
                    self.num_bytes += hot.num_bytes
            elif hot.tokens:
                self._clear(hot)
        if self.num_bytes > self._max_bytes:
            self._shrink(now_s)

    def hottest(self, namespace: Namespace) -> Iterator[HotPrefix]:
        """What saved the most first."""
        now_s = self._clock()
        found = [hot for hot in self._counted.values() if hot.namespace == namespace]
        return iter(sorted(found, key=lambda hot: -hot.saved_at(now_s)))

    def forget(self, salt_prefix: str) -> None:
        """Prefixes whose salts begin like this are gone."""
        for hot in self._counted.values():
            if hot.tokens and hot.salt.startswith(salt_prefix):
                self._clear(hot)

    def _count(self, digest: bytes, now_s: float) -> HotPrefix:
        hot = self._counted[digest] = self._counted.pop(digest) if digest in self._counted else HotPrefix()
        hot.reuses, hot.at_s = hot.reuses_at(now_s) + 1, now_s
        if len(self._counted) > MAX_COUNTED:
            self._clear(self._counted.popitem(last=False)[1])
        return hot

    def _clear(self, hot: HotPrefix) -> None:
        self.num_bytes -= hot.num_bytes
        hot.clear()

    def _shrink(self, now_s: float) -> None:
        """Those that saved the least go, until a quarter is free."""
        for hot in sorted((one for one in self._counted.values() if one.tokens), key=lambda hot: hot.saved_at(now_s)):
            if self.num_bytes <= self._max_bytes * 3 // 4:
                return
            self._clear(hot)


@dataclass(slots=True)
class _Warming:
    """Of one replica in one lifetime of its server."""

    incarnation: str
    end_s: float
    left_tokens: int
    tried: set[bytes]


class Warmer:
    """Warms replicas, from `start` to `stop`. Belongs to one event loop."""

    def __init__(
        self,
        hot: HotPrefixes,
        replicas: Callable[[], Sequence[Any]],
        waiting: Callable[[], int],
        held: Callable[[str, bytes], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        replicas  of the fleet (replica.py)
        waiting   requests that wait for any engine
        held      leading blocks of packed digests that an incarnation holds
        """
        self._hot, self._replicas, self._waiting, self._held, self._clock = hot, replicas, waiting, held, clock
        self._warming: dict[str, _Warming] = {}  # by URL
        self._leases: dict[str, LeaseKeeper] = {}  # by URL, also of replicas that were removed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = tasks.spawn(self._run(), name="warm replicas")

    async def stop(self) -> None:
        await tasks.cancel(self._task)

    async def _run(self) -> None:
        while not tasks.was_cancelled():
            replicas, warmed = self._replicas(), False
            await self._hand_over({one.url: one.leases for one in replicas})
            self._warming = {one.url: self._warming[one.url] for one in replicas if one.url in self._warming}
            for replica in replicas:
                if replica.joined and (prefix := self._choose(replica)) is not None:
                    warmed = True
                    await self._warm(replica, prefix)
            await asyncio.sleep(0 if warmed else LOOK_S)

    async def _hand_over(self, leases: dict[str, LeaseKeeper]) -> None:
        self._leases = {url: one for url, one in self._leases.items() if one.leased_blocks} | leases
        for one in self._leases.values():
            await one.hand_over(leases.values())

    def _choose(self, replica: Any) -> HotPrefix | None:
        """What it is to compute now. None: it is warm, or busy, or another gateway's to warm."""
        hello, now_s = replica.hello, self._clock()
        warming = self._warming.get(replica.url)
        if warming is None or warming.incarnation != hello.incarnation:
            tokens = int(SHARE * (hello.num_blocks or ASSUMED_BLOCKS) * hello.namespace.block_size)
            warming = self._warming[replica.url] = _Warming(hello.incarnation, now_s + WARM_S, tokens, set())
        if now_s > warming.end_s or not warming.left_tokens or not self._is_idle(replica) or not replica.is_own:
            return None
        for hot in self._hot.hottest(hello.namespace):
            end = hot.digests[-DIGEST_BYTES:]
            num_tokens = len(hot.tokens) // TOKEN_BYTES
            if end in warming.tried or num_tokens > warming.left_tokens:
                continue
            warming.tried.add(end)
            if self._held(hello.incarnation, hot.digests) * DIGEST_BYTES < len(hot.digests):
                warming.left_tokens -= num_tokens
                return hot
        return None

    def _is_idle(self, replica: Any, own: int = 0) -> bool:
        """`own`: requests of ours that it works on."""
        load = replica.load
        busy = replica.in_flight > own or load.running + load.waiting > own
        return not (busy or replica.draining or self._waiting())

    async def _warm(self, replica: Any, hot: HotPrefix) -> None:
        computing = tasks.spawn(self._compute(replica, hot), name=f"warm {replica.name}")
        try:
            while not computing.done():
                await asyncio.wait([computing], timeout=GIVE_WAY_S)
                if not self._is_idle(replica, own=1):
                    return
        finally:
            await tasks.cancel(computing)

    async def _compute(self, replica: Any, hot: HotPrefix) -> None:
        """One token behind the prefix. What fails is left: it is work that nobody asked for."""
        assert hot.tenant is not None
        now_s, sampling = time.monotonic(), Sampling(max_tokens=1)
        request = Request(
            request_id=f"warm_{uuid.uuid4().hex}",
            tenant=hot.tenant,
            scope=hot.scope,
            model=replica.hello.model,
            prompt=TokenPrompt(hot.tokens),
            sampling=sampling,
            received_s=now_s,
            deadline_s=now_s + TIMEOUT_S,
            lane="batch",
            prewarm=True,
        )
        prompt = EncodedPrompt(hot.tokens, hot.digests)
        try:
            async with aclosing(replica.generate(prompt, sampling, request)) as updates:
                async for _ in updates:
                    pass
        except KvasirError as error:
            log.debug("replica %s was not warmed: %s", replica.name, error.message)
        else:
            replica.warmed(prompt.num_tokens)
