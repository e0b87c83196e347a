"""Keeps leased prefixes in the cache of a replica, which knows no leases.

These servers evict what was used longest ago. A request of one token that begins with a prefix moves its blocks to the
recent end. So it is touched before so much was stored that its blocks are next (touch_plan.py). A user's request that
begins with it counts as a touch. What was evicted all the same, as KV events say, or is gone with a restart, is
computed again by a touch in idle time.

One touch at a time for each replica, with a time limit; one that fails is tried again later and disturbs no request.
Leases of a replica that drains, or is lost for LOST_S, move to others with the same namespace and tokenizer, which
compute them in the same way; what has no room there stays, and is not touched.
With Redis one gateway touches: the one that follows the events (follower.py), without events one that counts what all
gateways store (shared_leases.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

import aiohttp
import orjson

from engine.leases.pins import Lease
from engine.protocol import Hello, SequenceUpdate, split_digests
from gateway import tasks
from gateway.digests import derived_salt
from gateway.replicas.base import Trust
from gateway.replicas.calls import mapping, read_body, whole
from gateway.replicas.prefix_leases import Claim, LeaseBudget, Prefix, PrefixLeases
from gateway.replicas.requests import Target
from gateway.replicas.shared_leases import RENEW_SHARE, SharedLease, SharedLeases
from gateway.replicas.touch_plan import TouchPlan
from gateway.storage.redis_calls import RedisCalls
from gateway.types import EncodedPrompt, Request

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
SYNC_S: Final = 1.0
"""Between two looks at what other gateways granted; a request with breakpoints looks by itself."""

RETRY_S: Final = 5.0
TOUCH_TIMEOUT_S: Final = 60.0
"""To compute the longest prefix anew; a touch of what is there takes one step of the server."""

LOST_S: Final = 30.0
"""After which the leases of a lost replica move: a network that fails for a moment moves none."""

LOWEST_PRIORITY: Final = (1 << 31) - 1

COUNTERS: Final = ("touches", "touch_failures", "touched_tokens", "recomputed_tokens")


class Follower(Protocol):
    """See follower.py."""

    @property
    def trust(self) -> Trust: ...

    @property
    def leads(self) -> bool: ...

    def sent(self, digests: bytes) -> None: ...

    def resync(self) -> None: ...

    def figures(self) -> dict[str, Any]: ...


class Joined(NamedTuple):
    """What a replica has while it is joined."""

    target: Target
    session: aiohttp.ClientSession
    follower: Follower


class LeaseKeeper:
    """The leases of one replica, over all lifetimes of its server. Belongs to one event loop.

    taken   blocks of the replica that are live or soon will be
    idle    whether no request waits there
    prefix  leading blocks of packed digests that an incarnation holds, as far as this gateway knows
    """

    def __init__(
        self,
        name: str,
        budget: LeaseBudget,
        calls: RedisCalls | None,
        taken: Callable[[], int],
        idle: Callable[[], bool],
        prefix: Callable[[str, bytes], int],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._budget, self._calls = name, budget, calls
        self._taken_blocks, self._idle, self._prefix = taken, idle, prefix
        self._clock, self._wall = clock, wall
        self._leases: PrefixLeases | None = None
        self._shared: SharedLeases | None = None
        self._plan = TouchPlan(0, 1)
        self.draining = False  # nothing is touched, and leases move
        self._joined: Joined | None = None
        self._hello: Hello | None = None  # of the last lifetime
        self._left_s = math.inf
        self._moved_s = -math.inf  # when leases were moved last, or tried to
        self._others: Sequence[LeaseKeeper] = ()  # of the fleet, as `hand_over` heard of them
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._lost: dict[bytes, None] = {}  # prefixes that are not there, or may not be: to be computed in idle time
        self._missing: set[bytes] = set()  # not there at the last look: events may be on their way
        self._seen: tuple[object, ...] = ()  # what the follower said when prefixes were last looked for
        self._retry_s = 0.0
        self._synced_s = -math.inf
        self._priority = True  # whether the server is not known to refuse one
        self._counts = Counter(dict.fromkeys(COUNTERS, 0))

    def join(self, joined: Joined) -> None:
        """Its server is there. Leases of an earlier lifetime are computed again in idle time."""
        hello, page = joined.target.hello, joined.target.facts.block_size
        if self._leases is None or not self._leases.fits(hello, page):
            self._leases = PrefixLeases(hello, page, self._budget)
            self._plan = TouchPlan(hello.num_blocks * hello.namespace.block_size, max(1, page))
            if self._calls is not None:
                self._shared = SharedLeases(self._calls, hello.model, f"{self._name}:{hello.namespace.root().hex()}")
        self._joined, self._seen, self._priority = joined, (), True
        self._hello, self._left_s = hello, math.inf
        self._plan.forget()
        self._lost.clear()
        self._task = tasks.spawn(self._run(joined, self._leases), name=f"leases of {self._name}")

    async def leave(self) -> None:
        """Its server is gone, or not asked any more."""
        task, self._task, self._joined = self._task, None, None
        self._left_s = min(self._left_s, self._clock())
        await tasks.cancel(task)

    @property
    def leased_blocks(self) -> int:
        return 0 if self._leases is None else self._leases.leases.num_blocks()

    def figures(self) -> dict[str, Any]:
        """As engine/leases/leases.py has them, and COUNTERS."""
        return {} if self._leases is None else {**self._leases.leases.stats(), **self._counts}

    def purge(self, salt_prefix: str) -> int:
        """Ends the leases of all salts that begin so, in all gateways. Returns how many there were here."""
        if self._shared is not None:
            self._shared.purge(salt_prefix, self._wall())
            self._share()
        return 0 if self._leases is None else self._leases.leases.purge(salt_prefix)

    # -- a request -----------------------------------------------------------------------------------------------------

    async def open(self, prompt: EncodedPrompt, request: Request, held_tokens: int) -> Claim | None:
        """A request is about to be sent, of which the replica probably holds so many tokens. One with breakpoints hears
        first what other gateways granted."""
        leases = self._leases
        if leases is None or self._joined is None:
            return None
        if prompt.breakpoints:
            await self._sync()
        self._plan.sent(max(0, prompt.num_tokens - held_tokens))
        self._look_soon()
        return leases.open(prompt, request, self._clock(), self._plan.pushed, held_tokens)

    def heard(self, claim: Claim, update: SequenceUpdate) -> None:
        """With the first update the prompt is computed. Fills in the figures, of that and of the one that says what was
        reused."""
        leases, now, final = self._leases, self._clock(), update.cached_tokens is not None
        if leases is None or claim.is_told or (claim.made is not None and not final):
            return
        if claim.made is None:
            leases.grant(claim, now)
            for lease in {*claim.found, *(claim.made or ())}:
                if self._shared is not None and lease.state in ("kept", "degraded"):
                    self._shared.put(lease, claim.prompt.tokens, self._ahead_s())
                if leases.is_whole(lease):
                    self._plan.mark(lease.digest, claim.pushed, self._taken(leases))
                    self._lost.pop(lease.digest, None)
            self._share()
        cached = claim.predicted_tokens if update.cached_tokens is None else update.cached_tokens
        leases.describe(claim, update, cached, self._elsewhere(claim))
        claim.is_told = final
        if final:
            leases.leases.counters.read_tokens += update.lease_read_tokens or 0

    def find(self, claim: Claim) -> Sequence[Lease]:
        """The leases that the prompt of a request to another replica begins with."""
        leases, prompt = self._leases, claim.prompt
        if leases is None:
            return ()
        return leases.find(claim.request.salt, prompt.tokens, claim.digests, self._clock())

    def _elsewhere(self, claim: Claim) -> Iterator[Lease]:
        """What other replicas keep of its prompt: this one may have computed the same."""
        return chain.from_iterable(one.find(claim) for one in self._others)

    def ended(self, tokens: int) -> None:
        """An answer of so many tokens."""
        self._plan.sent(tokens)
        self._look_soon()

    def _look_soon(self) -> None:
        """Something was stored, so a leased prefix may be due."""
        if self.leased_blocks:
            self._woken.set()

    def _taken(self, leases: PrefixLeases) -> int:
        return self._taken_blocks() * leases.block_size + leases.leased_tokens

    # -- other gateways ------------------------------------------------------------------------------------------------

    def _ahead_s(self) -> float:
        """Unix time less the clock."""
        return self._wall() - self._clock()

    def _share(self) -> None:
        """Redis is told at once."""
        self._synced_s = -math.inf
        self._woken.set()

    async def _sync(self) -> None:
        leases, shared = self._leases, self._shared
        if leases is None or shared is None:
            return
        found = await shared.sync(self._wall(), self._plan.own)
        now, ahead_s = self._clock(), self._ahead_s()
        for one in found:
            if isinstance(one, str):
                leases.leases.purge(one)
            else:
                self._restore(leases, one, now, ahead_s)

    def _restore(self, leases: PrefixLeases, one: SharedLease, now: float, ahead_s: float) -> None:
        used_s = min(now, one.used_unix_s - ahead_s)
        lease = leases.restore(one.tenant, one.salt, one.tokens, one.ttl_s, used_s, now)
        if leases.is_whole(lease) and now - used_s < RETRY_S:
            self._plan.mark(lease.digest, self._plan.pushed, self._taken(leases))

    # -- other replicas ------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this gateway touches and moves its leases."""
        follower = self._joined and self._joined.follower
        if follower is not None and (not follower.leads or follower.figures()["following"]):
            return follower.leads
        return self._shared is None or self._shared.leads

    async def hand_over(self, others: Iterable[LeaseKeeper]) -> None:
        """Moves the leases of a replica that drains, or is lost for LOST_S, to others that have room. Does nothing for
        any other one. Of several gateways one moves them; each forgets those that another replica keeps. `others` are
        the fleet's, and remembered: what they keep counts as read here (see `_elsewhere`)."""
        self._others = [one for one in others if one is not self]
        leases, now = self._leases, self._clock()
        is_leaving = self.draining or now - self._left_s >= LOST_S
        if leases is None or not is_leaving or now - self._moved_s < RETRY_S:
            return
        self._moved_s = now
        if self._joined is None:
            await self._sync()
            leases.leases.expire(now)
        targets = [one for one in self._others if one.may_take(self)]
        for lease in sorted(leases.leases, key=lambda one: -one.tokens) if targets else ():
            await asyncio.sleep(0)  # a long prefix takes milliseconds
            if lease.block is None:
                continue
            if any(one.keeps(lease) for one in targets) or (self.leads and _move(leases, lease, targets)):
                leases.drop(lease)
                if self._shared is not None:
                    self._shared.drop(lease)

    def may_take(self, other: LeaseKeeper) -> bool:
        """Whether leases of another replica can be kept here."""
        own, its = self._hello, other._hello
        if self._joined is None or self.draining or own is None or its is None:
            return False
        same = (own.model, own.namespace, own.tokenizer) == (its.model, its.namespace, its.tokenizer)
        return same and own.context_tokens >= its.context_tokens

    def keeps(self, lease: Lease) -> bool:
        """Whether it keeps the same as a lease of another replica, as long, or so nearly that it is not written."""
        assert self._leases is not None
        own = self._leases.leases.find_same(lease.tenant, lease.salt, lease.digest, lease.tail)
        least_s = lease.expires_s - RENEW_SHARE * lease.ttl_s
        return own is not None and own.state == "kept" and own.expires_s >= least_s

    def worth(self, lease: Lease, tokens: bytes, digests: bytes) -> tuple[int, float]:
        """Orders replicas: blocks of a lease that are there or leased there, and how little is leased."""
        leases, hello = self._leases, self._hello
        assert leases is not None
        assert hello is not None
        held = len(leases.pool.prefixes.find(lease.salt, tokens, split_digests(digests)))
        return max(held, self._prefix(hello.incarnation, digests)), -self.leased_blocks / leases.pool.num_blocks

    def take(self, lease: Lease, tokens: bytes) -> bool:
        """Keeps what another replica kept. False where it does not fit."""
        assert self._leases is not None
        used_s, now = lease.expires_s - lease.ttl_s, self._clock()
        own = self._leases.restore(lease.tenant, lease.salt, tokens, lease.ttl_s, used_s, now)
        if self._leases.is_whole(own):
            self._lost[own.digest] = None
        if own.state == "kept" and self._shared is not None:
            self._shared.put(own, tokens, self._ahead_s())
            self._share()
        return own.state == "kept"

    # -- touches -------------------------------------------------------------------------------------------------------

    async def _run(self, joined: Joined, leases: PrefixLeases) -> None:
        while not tasks.was_cancelled():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()
            self._woken.clear()
            if self._clock() - self._synced_s >= SYNC_S:
                self._synced_s = self._clock()
                await self._sync()
            leases.leases.expire(self._clock())
            if self.leads and self._clock() >= self._retry_s:
                await self._look(joined, leases)

    async def _look(self, joined: Joined, leases: PrefixLeases) -> None:
        """Touches what is due, then, in idle time, one prefix that is not there."""
        if self.draining:
            return
        follower, plan, names = joined.follower, self._plan, list(leases.prefixes())
        figures, knows = follower.figures(), follower.trust == "exact"
        plan.store(figures["stored_blocks"] * leases.block_size)
        if self._shared is not None and not figures["following"]:
            plan.store_unseen(self._shared.others_tokens)
        plan.keep(names)
        seen = (knows, figures["removed_blocks"], figures["truncations"], len(names))
        if seen != self._seen:
            self._seen = seen
            self._find_lost(joined, leases, names, knows=knows)
        for name in names:
            if (
                name not in self._lost
                and name not in self._missing
                and plan.is_due(name)
                and not await self._touch(joined, leases, name)
            ):
                return
        if self._lost and self._idle():
            name = next(iter(self._lost))
            if await self._touch(joined, leases, name):
                self._lost.pop(name, None)

    def _find_lost(self, joined: Joined, leases: PrefixLeases, names: list[bytes], *, knows: bool) -> None:
        lost, missing = dict[bytes, None](), set[bytes]()
        for name in names:
            last = leases.last_digest(name)
            if last is None:
                continue
            gone = not self._prefix(joined.target.hello.incarnation, last) if knows else name in self._lost
            if gone and name not in self._missing and name not in self._lost:
                missing.add(name)
                continue
            if gone or not self._plan.is_known(name):
                lost[name] = None
                leases.leases.counters.lost += gone and name not in self._lost
        self._lost, self._missing = lost, missing
        if missing:
            self._seen = ()  # look again

    async def _touch(self, joined: Joined, leases: PrefixLeases, name: bytes) -> bool:
        """False when it failed, and nothing more is to be tried for a while."""
        prefix, pushed, taken = leases.get_prefix(name), self._plan.pushed, self._taken(leases)
        if prefix is not None:
            tokens = len(prefix.tokens) // 4
            try:
                async with asyncio.timeout(TOUCH_TIMEOUT_S):
                    cached = await self._ask(joined, prefix)
            except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError, ValueError) as error:
                self._counts["touch_failures"] += 1
                self._retry_s = self._clock() + RETRY_S
                log.debug("a leased prefix on %s could not be touched: %s", self._name, error or type(error).__name__)
                return False
            cached = tokens - 1 if cached is None else min(cached, tokens)
            self._counts.update(touches=1, touched_tokens=cached, recomputed_tokens=tokens - cached)
            joined.follower.sent(prefix.digests)
            pushed += self._plan.sent(tokens - cached)  # which do not push out the prefix itself
        self._plan.mark(name, pushed, taken)
        return True

    async def _ask(self, joined: Joined, prefix: Prefix) -> int | None:
        """Sends a prefix. Returns its cached tokens, if the server reports them. Raises what aiohttp raises, ValueError
        for an answer that is none."""
        target = joined.target
        path, body = write_touch(target, prefix, lowest=self._priority)
        headers = {"content-type": "application/json"}
        if target.facts.ranks > 1:
            headers["X-data-parallel-rank"] = str(target.rank)
        async with joined.session.post(path, data=body, headers=headers, allow_redirects=False) as answer:
            data = await read_body(answer)
        if answer.status == 400 and self._priority:
            self._priority = False  # it does not schedule by priority
            return await self._ask(joined, prefix)
        if answer.status != 200 or data is None:
            raise ValueError(f"HTTP {answer.status}")
        return read_touch(target, data)


def _move(leases: PrefixLeases, lease: Lease, targets: Iterable[LeaseKeeper]) -> bool:
    """Whether one of them keeps it now."""
    assert lease.block is not None
    tokens, digests = leases.tokens_of(lease), leases.chain(lease.block)
    best = sorted(targets, key=lambda one: one.worth(lease, tokens, digests), reverse=True)
    return any(one.take(lease, tokens) for one in best)


def write_touch(target: Target, prefix: Prefix, *, lowest: bool) -> tuple[str, bytes]:
    """Path and body of a request that computes a prefix and one token. `lowest`: with a priority behind all others,
    where the server may know priorities."""
    ids = array("I", prefix.tokens).tolist()[: target.hello.context_tokens - 1]
    salt = derived_salt(target.hello.namespace.salt, prefix.salt)
    body: dict[str, Any] = {"cache_salt": salt} if salt else {}
    if target.facts.kind == "sglang":
        body |= {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        return "generate", orjson.dumps({**body, "extra_key": salt} if salt else body)
    body |= {"model": target.facts.models[0], "prompt": ids, "max_tokens": 1, "temperature": 0.0}
    if lowest and target.facts.kind == "vllm":
        body["priority"] = LOWEST_PRIORITY
    return "v1/completions", orjson.dumps(body)


def read_touch(target: Target, data: bytes) -> int | None:
    """Cached tokens, if the answer tells. Raises ValueError."""
    answer = mapping(orjson.loads(data))
    if target.facts.kind == "sglang":
        found = mapping(answer.get("meta_info")).get("cached_tokens")
    else:
        found = mapping(mapping(answer.get("usage")).get("prompt_tokens_details")).get("cached_tokens")
    return None if found is None else whole(found)
