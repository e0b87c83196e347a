"""A replica with a simulated cache, and gateways that keep leases there, without HTTP."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import orjson

from engine.protocol import Breakpoint, Namespace, Sampling, SequenceUpdate, chain_digests, split_digests
from gateway.digests import derived_salt
from gateway.replicas.base import Kind, ServerFacts
from gateway.replicas.prefix_leases import LeaseBudget
from gateway.replicas.requests import Target
from gateway.replicas.touching import Joined, LeaseKeeper
from gateway.storage.redis_calls import RedisCalls
from gateway.types import EncodedPrompt, Request, Tenant, TokenPrompt
from tests.fakes.fake_engine import make_hello
from tests.fakes.lru_cache import LruCache

SPACE = Namespace(weights="w", dtype="", kv_dtype="", block_size=16, salt="secret")
TTL_S = 300.0


class LeasedReplica:
    """A replica with this many blocks of `page` tokens, seen from one gateway. `events` tells of what it stores."""

    def __init__(
        self,
        pages: int,
        page: int = 16,
        *,
        name: str = "r",
        events: bool = True,
        kind: Kind = "vllm",
        hello: Mapping[str, Any] = MappingProxyType({}),
        **budget: float,
    ) -> None:
        self.name = name
        self.cache = LruCache(pages, page)
        self.events, self.now, self.live, self.busy = events, 1000.0, 0, False
        self.trust, self.leads = "exact" if events else "fallback", True
        self.held: set[bytes] = set()  # digests of ours
        self.ours: dict[bytes, set[bytes]] = {}  # of each block of the server
        self.counts = {"stored_blocks": 0, "removed_blocks": 0, "truncations": 0}
        self.bodies: list[dict[str, Any]] = []
        self.told: list[bytes] = []  # digests of prompts that the follower was told of
        self.status = 200
        self.prefilled = 0
        self.page = page
        size: dict[str, Any] = {"num_blocks": pages * page // 16, "context_tokens": 1 << 20}
        self.hello = make_hello(incarnation="i", **{"namespace": SPACE, **size, **hello})
        self.facts = ServerFacts(kind, "1", ("m",), "r", 1 << 20, block_size=page, features=frozenset({"cache_salt"}))
        more: Any = {"share": 0.5, "tenant_share": 0.5, "max_leases": 64, **budget}
        self.budget = LeaseBudget(**more)
        self.joined: Any = Joined(Target("r", self.facts, 0, self.hello), SimpleNamespace(post=self._post), self)  # type: ignore[arg-type]

        self.keeper = self.gateway()

    def gateway(self, calls: RedisCalls | None = None) -> LeaseKeeper:
        """One more, which has joined."""
        clocks = (lambda: self.now, lambda: self.now + 1e9)
        keeper = LeaseKeeper(
            self.name, self.budget, calls, lambda: self.live, lambda: not self.busy, self._prefix, *clocks
        )
        keeper.join(self.joined)
        return keeper

    # -- the follower --------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        return {**self.counts, "following": self.events}

    def sent(self, digests: bytes) -> None:
        self.told.append(digests)

    def _prefix(self, incarnation: str, digests: bytes) -> int:
        count = 0
        while digests[count * 16 : count * 16 + 16] in self.held:
            count += 1
        return count

    def _digests(self, salt: str, tokens: Sequence[int]) -> bytes:
        return chain_digests(replace(SPACE, salt=salt).root(), array("I", tokens).tobytes(), 16)

    def salted(self, tokens: Sequence[int], tenant: str = "a") -> bytes:
        """Packed digests of a tenant's prompt."""
        return self._digests(self.salt(tenant), tokens)

    def salt(self, tenant: str = "a") -> str:
        """That the server is sent with a tenant's requests."""
        return derived_salt("secret", Tenant(tenant).salt)

    # -- the server ----------------------------------------------------------------------------------------------------

    def run(self, tokens: Sequence[int], salt: str) -> int:
        running = self.cache.begin(tokens, salt)
        if self.events:
            digests, size = split_digests(self._digests(salt, tokens)), self.page // 16
            for key in running.evicted:
                self.held -= self.ours.pop(key)
            for key, end in running.stored:
                self.ours[key] = set(digests[end // 16 - size : end // 16])
                self.held |= self.ours[key]
            self.counts["stored_blocks"] += len(running.stored) * size
            self.counts["removed_blocks"] += len(running.evicted) * size
        self.cache.end(running)
        self.prefilled += len(tokens) - running.cached_tokens
        return running.cached_tokens

    async def restart(self) -> None:
        self.cache.clear()
        self.held.clear()
        self.ours.clear()
        self.counts = dict.fromkeys(self.counts, 0)
        await self.keeper.leave()
        self.keeper.join(self.joined)

    def _post(self, path: str, data: bytes, **_: Any) -> Any:
        return _Answer(self, path, orjson.loads(data))

    # -- the gateway ---------------------------------------------------------------------------------------------------

    async def ask(
        self, tokens: list[int], *points: int, tenant: str = "a", keeper: LeaseKeeper | None = None, updates: int = 1
    ) -> SequenceUpdate:
        """A request with breakpoints behind so many tokens. What it reports, with the lease's figures,
        in so many updates."""
        keeper = keeper or self.keeper
        packed = array("I", tokens).tobytes()
        breakpoints = tuple(Breakpoint(point, TTL_S) for point in points)
        request = Request("id", Tenant(tenant), "m", TokenPrompt(packed), Sampling(1), self.now, self.now + 60)
        salt = derived_salt("secret", request.salt)
        prompt = EncodedPrompt(packed, self._digests(salt, tokens), breakpoints=breakpoints)
        claim = await keeper.open(prompt, request, self._prefix("", prompt.digests) * 16)
        new = (len(tokens) - self.cache.cached_tokens(tokens, salt)) // 16
        self.live += new
        await self.look()
        self.live -= new
        update = SequenceUpdate(0, [1], cached_tokens=self.run(tokens, salt), finish="length")
        if claim is not None:
            for _ in range(updates):
                keeper.heard(claim, update)
        keeper.ended(0)
        return update

    async def look(self) -> None:
        assert self.keeper._leases is not None
        if self.now >= self.keeper._retry_s:
            self.keeper._leases.leases.expire(self.now)
            await self.keeper._look(self.joined, self.keeper._leases)

    def cached(self, tokens: list[int], tenant: str = "a") -> int:
        salt = derived_salt("secret", Tenant(tenant).salt)
        return self.cache.cached_tokens([*tokens, 0], salt)


class _Answer:
    """Of aiohttp, as far as a touch looks at it."""

    def __init__(self, server: LeasedReplica, path: str, body: dict[str, Any]) -> None:
        self.server, self.path, self.body, self.status, self.content = server, path, body, server.status, self
        self._left = b""

    async def __aenter__(self) -> _Answer:
        server, body = self.server, self.body
        server.bodies.append({"path": self.path, **body})
        if "priority" in body:
            self.status = 400  # it schedules in order of arrival
        if self.status == 200:
            cached = server.run(body.get("prompt") or body["input_ids"], body["cache_salt"])
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            self._left = orjson.dumps({"usage": usage, "meta_info": {"cached_tokens": cached}})
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def read(self, count: int) -> bytes:
        data, self._left = self._left[:count], self._left[count:]
        return data
